"""Messages of nodes: what is written is read again, and everything else is refused and runs nothing."""

import math
import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgpack
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from skyward_core.wire import checks
from skyward_core.wire.checks import Unreadable, UnreadableMessages, unpacked
from skyward_core.wire.messages import (
    CallMetrics,
    Item,
    Outcome,
    OutcomeKind,
    Output,
    Parcel,
    Report,
    ReportedMetrics,
)
from skyward_core.wire.protocol import (
    PoolRanks,
    Resumed,
    WorkerFree,
    WorkerHeld,
    WorkerJoined,
    WorkerKept,
    WorkerLeft,
)
from skyward_core.wire.reports import PoolNews, decode_news, decode_report, encode_news, encode_report
from tests.conftest import examples

_loaded: list[Any] = []
_is_watching = False


def _watch(name: str, arguments: Any) -> None:
    if _is_watching and name == "pickle.find_class":
        _loaded.append(arguments)


sys.addaudithook(_watch)


@contextmanager
def nothing_is_unpickled() -> Iterator[None]:
    global _is_watching
    _loaded.clear()
    _is_watching = True
    try:
        yield
    finally:
        _is_watching = False
    assert _loaded == []


names = st.text(max_size=20)
texts = st.text(st.characters(codec=None), max_size=60)
"""With lone surrogates: a call prints what it likes."""
counts = st.integers(0, 2**53)
times = st.floats(0, 1e10)
parcels = st.builds(
    Parcel,
    st.binary(min_size=1, max_size=40),
    st.lists(st.binary(max_size=9), max_size=3).map(tuple),
    st.none() | names,
    st.lists(st.tuples(st.integers(0, 2**50), st.integers(0, 2**50)), max_size=3).map(tuple),
)
outcomes = st.builds(
    Outcome,
    names,
    st.sampled_from([kind for kind in OutcomeKind if kind is not OutcomeKind.TIMED_OUT]),
    parcels,
    texts,
    st.none() | st.integers(-64, 255),
    st.lists(texts, max_size=3).map(tuple),
    times,
    counts,
    names,
)
metrics = st.builds(
    CallMetrics, st.none() | st.integers(-(2**62), 2**62), st.dictionaries(names, st.floats(allow_nan=False))
)
news_of_calls = st.one_of(
    outcomes,
    st.builds(Item, names, counts, parcels),
    st.builds(
        Output, st.none() | names, names, st.lists(texts, max_size=3).map(tuple), times, st.none() | st.integers(-9, 99)
    ),
    st.builds(ReportedMetrics, st.none() | names, metrics, times),
)
reports = st.builds(
    Report, st.integers(-1, 10**6), names, st.lists(news_of_calls, max_size=5).map(tuple), names, counts
)
workers = st.builds("{}-{}".format, st.integers(0, 10**6), st.integers(0, 99))
measures = st.floats(-1e6, 1e15)
samples = st.fixed_dictionaries(
    {
        "instance_id": names,
        "node": st.integers(0, 10**6),
        "timestamp": times,
        **dict.fromkeys(("cpu_percent", "memory_percent", "memory_used_mb", "memory_total_mb"), measures),
        **{
            f"gpu_{name}": st.none() | measures
            for name in ("utilization", "memory_used_mb", "memory_total_mb", "temperature")
        },
    }
)
news_of_the_pool = st.one_of(
    st.builds(WorkerJoined, workers, names, names),
    st.builds(WorkerLeft, workers | st.just(""), names),
    st.builds(WorkerHeld, names, counts),
    st.builds(WorkerKept, workers, names, st.lists(names).map(tuple), st.booleans(), st.lists(names).map(tuple)),
    st.builds(WorkerFree, workers, names),
    st.builds(PoolRanks, st.frozensets(st.integers(0, 10**6))),
    samples,
)


@given(reports)
def test_a_report_is_read_as_it_was_written(report: Report) -> None:
    """Also text that is no Unicode, and metrics that are infinite. Its values stay bytes."""
    assert decode_report(encode_report(report)) == report


@given(news_of_the_pool)
def test_news_of_the_pool_are_read_as_they_were_written(news: PoolNews) -> None:
    assert decode_news(encode_news(news)) == news


def test_a_metric_may_be_no_number() -> None:
    """A loss that is NaN is what the user wants to see."""
    report = Report(0, "i", (ReportedMetrics("c", CallMetrics(1, {"loss": math.nan}), 0.0),))
    (item,) = decode_report(encode_report(report)).news
    assert isinstance(item, ReportedMetrics) and math.isnan(item.metrics.values["loss"])


anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=12,
)


@contextmanager
def refused() -> Iterator[None]:
    """Only Unreadable, and nothing is unpickled."""
    with nothing_is_unpickled():
        try:
            yield
        except Unreadable as error:
            assert len(str(error)) < 200


@pytest.mark.generated
@settings(max_examples=examples(2000))
@given(st.binary(max_size=200) | anything.map(msgpack.packb) | anything)
@example(pickle.dumps(OutcomeKind.RESULT))
@example(b"\x91" * 1_000_000)
@example(b"\x81" * 1_000_000)
@example(b"\xdd\xff\xff\xff\xff")
@example(b"\xdb\xff\xff\xff\xffx")
def test_anything_else_is_refused(message: Any) -> None:
    """Any bytes, any data, and what is no message at all."""
    for decode in (decode_report, decode_news, unpacked):
        with refused():
            decode(message)


@pytest.mark.generated
@settings(max_examples=examples(2000))
@given(st.one_of(reports.map(encode_report), news_of_the_pool.map(encode_news)), st.data())
def test_a_part_that_is_replaced_is_refused_or_has_its_type(message: bytes, data: st.DataObject) -> None:
    """Whatever is read can be written again."""
    content = msgpack.unpackb(message, use_list=True, unicode_errors="surrogatepass")
    place = content
    while place and isinstance(inner := place[index := data.draw(st.integers(0, len(place) - 1))], list) and inner:
        if data.draw(st.booleans()):
            break
        place = inner
    if place:
        place[index] = data.draw(anything)
    changed = msgpack.packb(content, unicode_errors="surrogatepass")
    with refused():
        encode_report(decode_report(changed))
    with refused():
        encode_news(decode_news(changed))


@pytest.mark.generated
@settings(max_examples=examples(1000))
@given(st.one_of(reports.map(encode_report), news_of_the_pool.map(encode_news)), st.data())
def test_a_message_that_is_cut_or_changed_is_refused(message: bytes, data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(message) - 1))
    for changed in (
        message[:place],
        message[:place] + data.draw(st.binary(min_size=1, max_size=4)) + message[place + 1 :],
    ):
        for decode in (decode_report, decode_news):
            with refused():
                decode(changed)


OUTCOME = ("c", "result", (b"", (), None, ()), "", None, (), 0.0, 0, "")


def outcome(**changes: Any) -> bytes:
    fields = dict(zip(Outcome._fields, OUTCOME, strict=True)) | changes
    return checks.packed((0, "i", "o", 1, ((0, tuple(fields.values())),)))


def test_a_plain_outcome_is_read() -> None:
    assert decode_report(outcome()) == Report(0, "i", (Outcome("c", OutcomeKind.RESULT),), "o", 1)


@pytest.mark.parametrize(
    "changes",
    [
        *({"seconds": it} for it in (math.nan, math.inf, -1.0, -0.5, 1e300, True, 1, "1", None)),
        *({"items": it} for it in (-1, 2**60, True, 1.0, None)),
        *({"kind": it} for it in ("", "no kind", 1, None, ["result"])),
        *({"exit_code": it} for it in (2**40, -1000, True, 1.5, "1")),
        *({"call_id": it} for it in (None, 1, b"c", "c" * 5000)),
        {"use": "u" * 5000},
        {"output": ("line", 1)},
        {"output": "line"},
        {"kind": "timed out", "text": "soon"},
        {"kind": "timed out", "text": "nan"},
        {"parcel": (b"", (), "/a", ())},
        {"parcel": (b"x", (), "/a", ((-1, 2),))},
        {"parcel": (b"x", (), "/a", ((0, 2**60),))},
        {"parcel": (b"x", ("text",), None, ())},
        {"parcel": ("text", (), None, ())},
        {"parcel": (b"x", (), 7, ())},
        {"parcel": (b"x", (), "/" * 5000, ())},
        {"parcel": None},
    ],
    ids=str,
)
def test_an_outcome_with_a_field_out_of_bounds_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(Unreadable):
        decode_report(outcome(**changes))


def test_a_sample_has_finite_numbers_only() -> None:
    """A missing GPU is None, and a missing processor is a lie."""
    sample = {"instance_id": "i", "node": 0, "cpu_percent": 1.0, "memory_percent": 1.0, "memory_used_mb": 1.0}
    sample |= {"memory_total_mb": 1.0, "timestamp": 1.0}
    assert decode_news(encode_news(sample))["gpu_utilization"] is None  # type: ignore[index]
    for lie in (math.nan, math.inf, -math.inf, 1e300, 2**2000, "1", None, True):
        with pytest.raises((Unreadable, OverflowError)):
            decode_news(encode_news(sample | {"cpu_percent": lie}))


ANSWER: dict[str, Any] = {
    "request": 1,
    "number": 0,
    "missed": 0,
    "is_known": True,
    "abandoned": 0,
    "tasks": {"k": "memory"},
    "gone": ["a"],
    "last": 2,
    "workers": {"tls://a": ("0-0", "running"), "tls://b": ("worker of Dask", "running")},
    "instances": {"tls://a": "i"},
    "ranks": [0, 1],
}


def test_the_answer_to_resume_has_the_workers_of_the_pool() -> None:
    """Dask's own workers are none of them."""
    resumed = Resumed.of(ANSWER)
    assert resumed.workers == {"tls://a": ("0-0", "running")}
    assert (resumed.gone, resumed.ranks, resumed.last) == (frozenset("a"), frozenset({0, 1}), 2)


@given(st.sampled_from(sorted(ANSWER.keys() - {"request", "ranks"})), anything.filter(lambda value: value != {}))
def test_an_answer_to_resume_that_is_none_is_refused(field: str, value: Any) -> None:
    with refused():
        Resumed.of({**ANSWER, field: value})


def test_of_ten_thousand_messages_that_cannot_be_read_six_lines_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    """The first, each tenfold, and the sum at the end, for each sender."""
    unreadable = UnreadableMessages("pool sky-1")
    for _ in range(10_000):
        unreadable.note("worker 3-0", Unreadable("a report has other fields"))
    unreadable.end()
    unreadable.end()
    first, *others = caplog.messages
    assert first.startswith("worker 3-0 of pool sky-1 sends messages that cannot be read")
    assert [int(word) for line in others for word in line.split() if word.isdecimal()] == [10, 100, 1000, 10000, 10000]
    for number in range(5000):
        unreadable.note(f"worker {number}-0", Unreadable("x"))
    assert len(unreadable.counts) == checks.MOST_SENDERS + 1, "names are a lie too"


@pytest.mark.parametrize(
    ("path", "is_there"),
    [
        (None, True),
        ("/dev/shm/skyward-0-i/" + "a" * 32, True),
        ("/dev/shm/skyward-0-i/../x/" + "a" * 32, False),
        ("/dev/shm/skyward-0-i/" + "a" * 31, False),
        ("/dev/shm/skyward-0-i/settings.json", False),
        ("/dev/shm/skyward-0-i/" + "a" * 32 + "\n", False),
        ("/etc/" + "a" * 32, False),
        ("a" * 32, False),
        ("", False),
    ],
)
def test_a_value_lies_only_in_a_folder_for_values(path: str | None, is_there: bool) -> None:
    """A node names the file, which is read and removed."""
    assert Parcel(b"x", (), path).lies_in(["/dev/shm/skyward-0-i"]) is is_there


def kinds() -> list[Callable[[str, object], object]]:
    return [checks.text, checks.count, checks.finite, checks.seconds, checks.truth, checks.texts, checks.worker_name]


@given(anything)
def test_a_check_returns_its_value_or_refuses_it(value: Any) -> None:
    for check in kinds():
        with refused():
            found = check("a value", value)
            assert found == (tuple(value) if isinstance(value, list) else value)
