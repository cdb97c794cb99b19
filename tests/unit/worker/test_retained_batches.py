"""The batches that a worker keeps: released or not, reported once or again, within its limits."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyward_core.wire.messages import Item, Outcome, OutcomeKind, Output, Parcel, Report
from skyward_core.wire.protocol import WorkerKept
from skyward_core.wire.reports import decode_news, decode_report, encode_report
from skyward_core.worker.retained_batches import RetainedBatches


class Wire:
    """The messages that were sent to a scheduler."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, Any]] = []

    def send(self, topic: str, message: bytes) -> None:
        self.sent.append((topic, decode_news(message) if topic == "pool" else decode_report(message)))

    @property
    def reports(self) -> list[Report]:
        return [message for _, message in self.sent if isinstance(message, Report)]

    @property
    def kept(self) -> list[tuple[str, ...]]:
        return [tuple(sorted(message.calls)) for _, message in self.sent if isinstance(message, WorkerKept)]


def outcome(call_id: str, size: int = 1) -> Outcome:
    return Outcome(call_id, OutcomeKind.RESULT, Parcel(b"x" * size))


def said(call_id: str, text: str) -> Output:
    return Output(call_id, "stdout", (text,), 0.0)


def test_another_head_gets_all_that_was_not_released() -> None:
    """First the list of kept calls, then the reports in their order, with their old numbers; newer reports come
    after.
    """
    kept, first, second = RetainedBatches("process", keeps=True), Wire(), Wire()
    kept.attach("1-0", "tls://a", "pool", first.send)
    kept.begin("k1", "topic", ["a", "b"], kept.epoch)
    kept.report("k1", 1, "i", (said("a", "hello"),))
    kept.report("k1", 1, "i", (outcome("a"),))
    kept.detach()
    kept.report("k1", 1, "i", (outcome("b"),))
    kept.end("k1")
    kept.attach("2-0", "tls://b", "pool", second.send)
    assert first.kept == [()]
    assert [report.number for report in first.reports] == [1, 2]
    assert second.sent[0] == ("pool", WorkerKept("2-0", "tls://b", kept.calls, keys=("k1",)))
    assert second.kept == [("a", "b")]
    assert [(topic, message.origin, message.number) for topic, message in second.sent[1:]] == [
        ("topic", "process/k1", number) for number in (1, 2, 3)
    ]
    assert second.reports[:2] == first.reports
    kept.detach()
    kept.attach("2-0", "tls://c", "pool", (third := Wire()).send)
    assert (third.kept, third.reports) == (second.kept, second.reports), "the third head too"


def test_items_are_sent_and_not_kept() -> None:
    """They do not outlive their head. What came with them in a report is kept, with its number."""
    kept, first, second = RetainedBatches("process", keeps=True), Wire(), Wire()
    kept.attach("1-0", "tls://a", "pool", first.send)
    kept.begin("k1", "topic", ["a"], kept.epoch)
    item = Item("a", 0, Parcel(b"x"))
    kept.report("k1", 1, "i", (item,))
    kept.report("k1", 1, "i", (item._replace(number=1), outcome("a")))
    kept.attach("1-0", "tls://a", "pool", second.send)
    assert [len(report.news) for report in first.reports] == [1, 2]
    assert [(report.number, report.news) for report in second.reports] == [(2, (outcome("a"),))]


def test_a_released_batch_is_not_kept() -> None:
    """It is released by its task's key or by its calls; a batch that still runs is dropped when it ends."""
    kept = RetainedBatches("process", keeps=True)
    for key in ("k1", "k2", "k3"):
        kept.begin(key, "topic", [f"{key}a", f"{key}b"], kept.epoch)
        kept.report(key, 1, "i", (outcome(f"{key}a"),))
    kept.end("k1")
    kept.release("k1")
    kept.release("unknown")
    kept.release("k2")
    assert kept.running == ("k2", "k3")
    kept.report("k2", 1, "i", (outcome("k2b"),))
    kept.end("k2")
    kept.release_calls(["k3a", "unknown"])
    assert kept.calls == ("k3b",)
    kept.end("k3")
    kept.release_calls(["k3b"])
    wire = Wire()
    kept.attach("1-0", "tls://a", "pool", wire.send)
    assert (kept.calls, kept.running, wire.reports, kept.nbytes) == ((), (), [], 0)


def test_batches_that_wait_when_their_scheduler_is_left_never_begin() -> None:
    """The next scheduler gets a list of the calls that are here: a call that began after that would run beside the
    one that the client sends again.
    """
    kept, wire = RetainedBatches("process", keeps=True), Wire()
    epoch = kept.epoch
    kept.detach()
    kept.attach("1-0", "tls://a", "pool", wire.send)
    with pytest.raises(ConnectionError):
        kept.begin("k1", "topic", ["a"], epoch)
    assert (kept.calls, kept.running) == ((), ())
    kept.begin("k1", "topic", ["a"], kept.epoch)
    assert kept.calls == ("a",)


def test_without_a_limit_for_kept_batches_nothing_is_kept() -> None:
    """Reports go to the scheduler, numbered, and are dropped."""
    kept, wire = RetainedBatches("process", keeps=False), Wire()
    kept.attach("1-0", "tls://a", "pool", wire.send)
    kept.begin("k1", "topic", ["a"], kept.epoch)
    kept.report("k1", 1, "i", (outcome("a"),))
    assert kept.nbytes == 0
    kept.end("k1")
    assert (kept.calls, wire.kept) == ((), [])
    assert [report.number for report in wire.reports] == [1]


STEPS = st.lists(
    st.tuples(st.sampled_from(["begin", "say", "outcome", "end", "release"]), st.integers(0, 3), st.integers(1, 400)),
    max_size=60,
)


@given(STEPS)
def test_if_memory_is_short_outcomes_outlive_output(steps: list[tuple[str, int, int]]) -> None:
    """Only outcomes of running batches may exceed the limit. Repeated reports have every outcome of a batch, unless
    the whole batch was dropped.
    """
    kept, limit = RetainedBatches("process", keeps=True, limit_bytes=1000), 1000
    running, outcomes_of = set[str](), dict[str, list[str]]()
    for number, (step, index, size) in enumerate(steps):
        key = f"k{index}"
        match step:
            case "begin" if key not in running and key not in outcomes_of:
                running.add(key)
                outcomes_of[key] = []
                kept.begin(key, "topic", [f"{key}-{number}"], kept.epoch)
            case "say" if key in running:
                kept.report(key, 1, "i", (said(key, "x" * size),))
            case "outcome" if key in running:
                outcomes_of[key].append(f"{key}-{number}")
                kept.report(key, 1, "i", (outcome(f"{key}-{number}", size), said(key, "y" * size)))
            case "end" if key in running:
                running.remove(key)
                kept.end(key)
            case "release" if key in outcomes_of and key not in running:
                del outcomes_of[key]
                kept.release(key)
            case _:
                pass
        wire = Wire()
        kept.attach("1-0", "tls://a", "pool", wire.send)
        there = {report.origin.removeprefix("process/") for report in wire.reports}
        assert kept.nbytes == sum(len(encode_report(report)) for report in wire.reports)
        assert kept.nbytes <= limit or there <= running
        for key, outcomes in outcomes_of.items():
            again = [
                item.call_id
                for report in wire.reports
                if report.origin == f"process/{key}"
                for item in report.news
                if isinstance(item, Outcome)
            ]
            assert again == outcomes or (not again and key not in running)
        kept.detach()
