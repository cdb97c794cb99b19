"""Detached calls without a pool: what is refused, and numbered lines that each reader gets once."""

from concurrent.futures import CancelledError
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

import skyward_core as sky
from skyward_core.session import detached_call
from skyward_core.session.detached_call import OUTCOME_SECONDS, DetachedCall
from skyward_core.wire.messages import Outcome, OutcomeKind, Output, Report
from skyward_core.wire.reports import encode_report
from skyward_core.worker.detached_calls import LineTopic
from tests.pool.local import double


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        *[({"call_id": it}, "1 to 128 letters, digits") for it in ("", "a b", "é", "x" * 129, "a\n", b"a", "a#1")],
        *[({"result_ttl": it}, "result_ttl=") for it in (-1.0, float("nan"), float("inf"), 1e12)],
    ],
)
def test_an_id_of_other_characters_and_a_time_that_is_none_are_refused(settings: dict[str, Any], words: str) -> None:
    pool = sky.ComputePool(provider=sky.Local(), display="quiet")
    with pytest.raises(sky.BadRequest, match=words):
        pool.start_detached(double(1), **settings)


class Head:
    """A head with the record of one call."""

    def __init__(self, limit_bytes: int) -> None:
        self.topic = LineTopic(limit_bytes)

    def record(self, call_id: str, after: int) -> dict[str, Any]:
        number, messages = self.topic.after(after)
        return {
            "state": "running",
            "attempts": [("3-0", "i", 0.0, None, "")],
            "outcome": "",
            "is_forgotten": False,
            "number": number,
            "messages": messages,
            "first_line": self.topic.line_of(len(messages)),
            "lines_in_all": self.topic.lines,
        }

    def add(self, *lines: str) -> None:
        self.topic.add(encode_report(Report(0, "i", (Output("c", "stdout", lines, 0.0),))))

    def reader(self) -> DetachedCall[Any]:
        return DetachedCall("c", lambda: cast(Any, SimpleNamespace(detached=self)))


@given(st.lists(st.one_of(st.integers(0, 4), st.sampled_from(["read", "come back"]))), st.sampled_from([1, 600, 10**6]))
def test_readers_that_come_back_read_each_line_once(steps: list[int | str], limit_bytes: int) -> None:
    head = Head(limit_bytes)
    reader, cursor, written, read = head.reader(), 0, 0, 0
    for step in [*steps, "read"]:
        if isinstance(step, int):
            head.add(*(str(number) for number in range(written, written + step)))
            written += step
        else:
            reader = head.reader() if step == "come back" else reader
            lines, cursor = reader.log_from(cursor)
            for line in lines:
                if line.startswith("["):
                    read += int(line[1:].split()[0])
                else:
                    assert line == str(read)
                    read += 1
            assert cursor == read == written
            assert reader.log_from(cursor) == ([], cursor)
    if limit_bytes == 10**6:
        assert head.reader().log() == [str(number) for number in range(written)]
        assert head.reader().log(2) == [str(number) for number in range(2, written)]


@pytest.mark.parametrize("limit_bytes", [1, 600, 10**6])
def test_a_reader_that_follows_keeps_no_lines(limit_bytes: int) -> None:
    """Each look has the state, the new lines and the node. The lines before its cursor are not in memory any more."""
    head = Head(limit_bytes)
    reader, cursor, read = head.reader(), 0, 0
    for number in range(100):
        head.add(str(number))
        news = reader.follow(cursor)
        assert (news.state, news.has_ended, news.node) == ("running", False, 3)
        assert news.lines in ([str(number)], ["[1 lines were dropped: there were too many]"])
        read, cursor = read + len(news.lines), news.cursor
    assert cursor == read == 100
    assert reader.log() == ["[99 lines were dropped: there were too many]", "99"] or limit_bytes == 1
    with pytest.raises(sky.BadRequest, match="cursor=-1"):
        reader.follow(-1)


def test_the_lines_of_a_log_record_have_its_level() -> None:
    """All of them, if it has several; lines that are no record, and the one that stands for dropped lines, have none."""
    head = Head(10**6)
    head.topic.add(
        encode_report(
            Report(
                0,
                "i",
                (Output("c", "stdout", ("a line",), 0.0), Output("c", "stderr", ("a warning\nof two lines",), 0.0, 30)),
            )
        )
    )
    news = head.reader().follow()
    assert (news.lines, news.levels) == (["a line", "a warning", "of two lines"], [None, 30, 30])
    short = Head(1)
    short.add("dropped")
    short.add("kept")
    assert short.reader().follow().levels == [None, None]


def test_a_call_that_another_head_runs_again_has_its_whole_time_for_the_outcome(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It had ended for a head that is gone, and runs for an hour. Its second end is not the first one."""
    now = [0.0]
    monkeypatch.setattr(
        detached_call,
        "time",
        SimpleNamespace(monotonic=lambda: now[0], sleep=lambda _: now.__setitem__(0, now[0] + 1)),
    )
    head = Head(10**6)
    stored = Outcome("c", OutcomeKind.CANCELLED)

    class ChangingHead:
        def record(self, call_id: str, after: int) -> dict[str, Any]:
            has_ended = now[0] < 10 or now[0] > 3600
            if now[0] > 3600 + OUTCOME_SECONDS / 2 and not head.topic.lines:
                head.topic.add(encode_report(Report(0, "i", (Output("c", "stdout", ("x",), 0.0), stored))))
            return head.record(call_id, after) | {"state": "ended" if has_ended else "running"}

    call = DetachedCall[Any]("c", lambda: cast(Any, SimpleNamespace(detached=ChangingHead())))
    with pytest.raises(CancelledError):
        call.result()
    assert now[0] > 3600


def test_a_call_of_a_pool_that_somebody_has_stopped_says_so_and_not_that_a_node_is_lost() -> None:
    """Otherwise an orchestrator would try its step again, and rent the machines anew. An outage stays one."""
    stopped = list[sky.PoolStopped]()

    class Gone:
        def record(self, *_: object) -> None:
            raise sky.NodeLost("the scheduler does not answer")

    def raise_if_stopped() -> None:
        if stopped:
            raise stopped[0]

    call = DetachedCall[Any](
        "c", lambda: cast(Any, SimpleNamespace(detached=Gone())), raise_if_stopped=raise_if_stopped
    )
    with pytest.raises(sky.NodeLost):
        call.follow()
    stopped.append(sky.PoolStopped("by ada"))
    for ask in (call.follow, call.result, call.log, lambda: call.state):
        with pytest.raises(sky.PoolStopped, match="by ada"):
            ask()
