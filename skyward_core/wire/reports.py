"""The messages of topics as bytes and back: reports of workers, and news of the pool.

They are data (msgpack without maps), and are checked when they are read (`checks.py`). Only the values of calls inside
them are pickles. They stay bytes here, and are loaded by who has asked for that call's result (`engine/futures.py`).

    a report     [node, instance id, origin, number, [[kind, fields], ...]]
    news         [kind, field, ...]
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from skyward_core.wire.checks import (
    MOST_COUNT,
    MOST_NAME,
    MOST_RANK,
    MOST_SECONDS,
    MOST_TEXT,
    Unreadable,
    count,
    fields,
    finite,
    items,
    maybe,
    packed,
    refuse,
    seconds,
    text,
    texts,
    truth,
    unpacked,
    worker_name,
)
from skyward_core.wire.messages import (
    LINE_BYTES,
    CallMetrics,
    Item,
    News,
    Outcome,
    OutcomeKind,
    Output,
    Parcel,
    Report,
    ReportedMetrics,
)
from skyward_core.wire.protocol import PoolRanks, WorkerFree, WorkerHeld, WorkerJoined, WorkerKept, WorkerLeft

type Sample = Mapping[str, Any]
"""The fields of `events.Metrics`."""
type PoolNews = WorkerJoined | WorkerLeft | WorkerHeld | WorkerKept | WorkerFree | PoolRanks | Sample

MOST_FILE_BYTES = 1 << 50
MOST_LEVEL = 1_000_000
EXIT_CODES = (-256, 1 << 32)
"""Signals are negative."""
_KINDS = {str(kind): kind for kind in OutcomeKind}
_OUTCOME, _ITEM, _OUTPUT, _METRICS = range(4)
_NONE = ()


def encode_report(report: Report) -> bytes:
    """Return a report as a message."""
    news = [_encoded(item) for item in report.news]
    return packed((report.node, report.instance_id, report.origin, report.number, news))


def decode_report(message: object) -> Report:
    """Return the report of a message. Raises Unreadable."""
    try:
        return _report(unpacked(message))
    except Unreadable:
        raise
    except (ValueError, TypeError) as error:  # a list of another length, or no list
        raise Unreadable("a report has other fields") from error


def encode_outcomes(outcomes: Iterable[Outcome], node: int, instance_id: str) -> bytes:
    """Return outcomes as a message, in the form of a report."""
    return encode_report(Report(node, instance_id, tuple(outcomes)))


def _encoded(item: News) -> tuple[int, Any]:
    # a named tuple is packed as a list of its fields, without a copy
    if isinstance(item, Outcome):
        return _OUTCOME, item
    if isinstance(item, Item):
        return _ITEM, item
    if isinstance(item, Output):
        return _OUTPUT, item
    return _METRICS, (item.call_id, item.metrics.to_text(), item.timestamp)


def _report(content: Any) -> Report:
    node, instance_id, origin, number, news = content
    return Report(
        count("the node of a report", node, MOST_RANK, -1),
        text("the instance of a report", instance_id),
        tuple([_news(item) for item in items("the news of a report", news)]),
        text("the origin of a report", origin),
        count("the number of a report", number),
    )


def _news(item: Any) -> News:
    kind, content = item
    if kind == _OUTCOME:
        return _outcome(content)
    if kind == _ITEM:
        call_id, number, parcel = fields("an item of a stream", content, 3)
        return Item(text("the call of an item", call_id), count("the number of an item", number), _parcel(parcel))
    if kind == _OUTPUT:
        return _output(content)
    if kind == _METRICS:
        return _metrics(content)
    return refuse("the kind of an item of a report", kind)


def _outcome(content: Any) -> Outcome:
    # thousands of them come in a second: one comparison for all usual fields
    call_id, kind, parcel, words, exit_code, output, ran_seconds, number, use = content
    if not (
        type(call_id) is type(words) is type(use) is type(kind) is str
        and len(call_id) <= MOST_NAME
        and len(use) <= MOST_NAME
        and type(ran_seconds) is float
        and 0.0 <= ran_seconds <= MOST_SECONDS
        and type(number) is int
        and 0 <= number <= MOST_COUNT
        and kind in _KINDS
    ):
        refuse("an outcome", content)
    if exit_code is not None:
        count("the exit code of an outcome", exit_code, EXIT_CODES[1], EXIT_CODES[0])
    if output != _NONE:
        texts("the output of an outcome", output, MOST_TEXT)
    known = _KINDS[kind]
    if known is OutcomeKind.TIMED_OUT:
        _time_of(words)
    return tuple.__new__(Outcome, (call_id, known, _parcel(parcel), words, exit_code, output, ran_seconds, number, use))


def _time_of(words: str) -> None:
    try:
        seconds("the time of an outcome", float(words))
    except ValueError as error:
        raise Unreadable("the time of an outcome is no number") from error


def _parcel(content: Any) -> Parcel:
    data, buffers, path, spans = content
    if type(data) is not bytes:
        refuse("the pickle of a value", data)
    if path is None and buffers == spans == _NONE:
        return tuple.__new__(Parcel, (data, _NONE, None, _NONE))
    if not all(type(buffer) is bytes for buffer in items("the buffers of a value", buffers)):
        refuse("a buffer of a value", buffers)
    return Parcel(data, buffers, maybe(text, "the path of a value", path), _spans(spans, is_needed=not data and path))


def _spans(content: Any, *, is_needed: object) -> tuple[tuple[int, int], ...]:
    spans = tuple([_span(span) for span in items("the spans of a value", content)])
    return spans if spans or not is_needed else refuse("the spans of a value", content)


def _span(content: Any) -> tuple[int, int]:
    start, size = fields("a span of a value", content, 2)
    return count("a span of a value", start, MOST_FILE_BYTES), count("a span of a value", size, MOST_FILE_BYTES)


def _output(content: Any) -> Output:
    call_id, stream, lines, timestamp, level = fields("output", content, 5)
    return Output(
        maybe(text, "the call of output", call_id),
        text("the stream of output", stream, 64),
        texts("a line of output", lines, MOST_TEXT),
        seconds("the time of output", timestamp),
        None if level is None else count("the level of output", level, MOST_LEVEL, -MOST_LEVEL),
    )


def _metrics(content: Any) -> ReportedMetrics:
    call_id, line, timestamp = fields("metrics", content, 3)
    try:
        metrics = CallMetrics.from_text(text("metrics", line, LINE_BYTES))
    except (ValueError, RecursionError) as error:
        raise Unreadable("the metrics of a call are not readable") from error
    return ReportedMetrics(
        maybe(text, "the call of metrics", call_id), metrics, seconds("the time of metrics", timestamp)
    )


# ── news of the pool ─────────────────────────────────────────────────────────────────────────────────────────────────


_SAMPLE = "sample"
_LEAST = -1e6
"""The lowest value of a measurement: a temperature may be below 0."""
_MEASURES = (
    "cpu_percent",
    "memory_percent",
    "memory_used_mb",
    "memory_total_mb",
    "gpu_utilization",
    "gpu_memory_used_mb",
    "gpu_memory_total_mb",
    "gpu_temperature",
)
"""The measurements of a sample; those of GPUs may be missing."""


def encode_news(news: PoolNews) -> bytes:
    """Return news of the pool as a message."""
    match news:
        case WorkerJoined(name, address, instance_id):
            return packed(("joined", name, address, instance_id))
        case WorkerLeft(name, address):
            return packed(("left", name, address))
        case WorkerHeld(address, left):
            return packed(("held", address, left))
        case WorkerKept(name, address, calls, is_paused, keys):
            return packed(("kept", name, address, calls, is_paused, keys))
        case WorkerFree(name, address):
            return packed(("free", name, address))
        case PoolRanks(ranks):
            return packed(("ranks", sorted(ranks)))
        case _:
            return packed((_SAMPLE, *(news.get(name) for name in ("instance_id", "node", *_MEASURES, "timestamp"))))


def decode_news(message: object) -> PoolNews:
    """Return the news of a message. Raises Unreadable."""
    content = items("news of the pool", unpacked(message))
    kind = content[0] if content else None
    if not isinstance(kind, str) or (read := _READERS.get(kind)) is None:
        refuse("the kind of news", kind)
    return read(content)


def is_sample(news: PoolNews) -> bool:
    """Return whether this is a sample of a node."""
    return isinstance(news, Mapping)


def _joined(content: Any) -> WorkerJoined:
    _, name, address, instance_id = fields("a worker that joins", content, 4)
    return WorkerJoined(worker_name("a worker", name), text("an address", address), text("an instance", instance_id))


def _left(content: Any) -> WorkerLeft:
    _, name, address = fields("a worker that leaves", content, 3)
    return WorkerLeft("" if name == "" else worker_name("a worker", name), text("an address", address))


def _held(content: Any) -> WorkerHeld:
    _, address, left = fields("a held worker", content, 3)
    return WorkerHeld(text("an address", address), count("the calls of a held worker", left))


def _kept(content: Any) -> WorkerKept:
    _, name, address, calls, is_paused, keys = fields("a worker with calls", content, 6)
    return WorkerKept(
        worker_name("a worker", name),
        text("an address", address),
        texts("the calls of a worker", calls),
        truth("whether a worker is paused", is_paused),
        texts("the batches of a worker", keys),
    )


def _free(content: Any) -> WorkerFree:
    _, name, address = fields("a free worker", content, 3)
    return WorkerFree(worker_name("a worker", name), text("an address", address))


def _ranks(content: Any) -> PoolRanks:
    _, ranks = fields("the ranks of a pool", content, 2)
    return PoolRanks(frozenset(count("a rank", rank, MOST_RANK) for rank in items("the ranks of a pool", ranks)))


def _sample(content: Any) -> Sample:
    _, instance_id, node, *measures, timestamp = fields("a sample", content, 4 + len(_MEASURES))
    sample: dict[str, Any] = {
        "instance_id": text("the instance of a sample", instance_id),
        "node": count("the node of a sample", node, MOST_RANK),
        "timestamp": seconds("the time of a sample", timestamp),
    }
    for name, value in zip(_MEASURES, measures, strict=True):
        is_missing = value is None and name.startswith("gpu_")
        sample[name] = None if is_missing else finite(f"{name} of a sample", value, MOST_COUNT, _LEAST)
    return sample


_READERS: Mapping[str, Callable[[Any], PoolNews]] = {
    "joined": _joined,
    "left": _left,
    "held": _held,
    "kept": _kept,
    "free": _free,
    "ranks": _ranks,
    _SAMPLE: _sample,
}
