"""The calls and reports that a worker keeps until the client has their outcomes, so that it can repeat them to another
head.

A batch is kept from the moment that a slot takes it. It is released when Dask frees its task, at the client's request.
If the head that knew the task is gone, the client releases its calls one by one (RELEASE). Reports are numbered: the
client recognises one that comes twice.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from skyward_core.wire.messages import Item, News, Outcome, Report
from skyward_core.wire.protocol import WorkerKept
from skyward_core.wire.reports import decode_report, encode_news, encode_report

KEPT_LIMIT_BYTES = 16 << 20
REPORT_BYTES = 32 << 20
"""A larger report is sent in parts: clients read none that is larger than `checks.MOST_BYTES`."""


@dataclass(slots=True)
class _RetainedBatch:
    """A batch: the calls that are not released, and its reports as they were sent."""

    topic: str
    origin: str
    calls: set[str]
    is_running: bool = True
    number: int = 0
    messages: list[bytes] = field(default_factory=list[bytes])
    lean: int = 0
    """How many of the first messages have no output."""


class RetainedBatches:
    """The batches of one worker process, by key. Used from any thread; reports go out in the order of their numbers.

    `process` names the worker process in the origins of reports. Between `attach` and `detach` reports go to a
    scheduler; otherwise they are only kept. Without `keeps` a report is sent and forgotten. If the reports exceed
    `limit_bytes`, output is dropped first, then batches that have ended.
    """

    def __init__(self, process: str, *, keeps: bool, limit_bytes: int = KEPT_LIMIT_BYTES) -> None:
        self._process = process
        self._keeps = keeps
        self._limit_bytes = limit_bytes
        self._batches: dict[str, _RetainedBatch] = {}
        self.nbytes = 0
        """Size of all reports that are kept."""
        self._send: Callable[[str, bytes], object] | None = None
        self._lock = threading.RLock()
        self.epoch = 0
        """How many schedulers the process has left."""

    @property
    def calls(self) -> tuple[str, ...]:
        """The calls that are kept."""
        with self._lock:
            return tuple(call_id for batch in self._batches.values() for call_id in batch.calls)

    @property
    def running(self) -> tuple[str, ...]:
        """The keys of the batches in slots."""
        with self._lock:
            return tuple(key for key, batch in self._batches.items() if batch.is_running)

    def begin(self, key: str, topic: str, calls: Iterable[str], epoch: int) -> None:
        """A slot takes a batch, which came from the scheduler of this epoch.

        Raises ConnectionError if the process has left that scheduler: the batch must not begin, since the announcement
        to the next one may be without it.
        """
        with self._lock:
            if epoch != self.epoch:
                raise ConnectionError("its scheduler was left before the batch could begin")
            self._batches[key] = _RetainedBatch(topic, f"{self._process}/{key}", set(calls))

    def report(self, key: str, node: int, instance_id: str, news: tuple[News, ...]) -> None:
        """Send a report of a batch, and keep it."""
        with self._lock:
            batch = self._batches[key]
            report = Report(node, instance_id, news, batch.origin, batch.number + 1)
            message = encode_report(report)
            if len(message) > REPORT_BYTES and len(news) > 1:
                middle = len(news) // 2
                self.report(key, node, instance_id, news[:middle])
                self.report(key, node, instance_id, news[middle:])
                return
            batch.number += 1
            if self._keeps and (kept := _without_items(message, report)):
                batch.messages.append(kept)
                self.nbytes += len(kept)
                self._make_room()
            if self._send is not None:
                self._send(batch.topic, message)

    def end(self, key: str) -> None:
        """The batch has left its slot."""
        with self._lock:
            batch = self._batches[key]
            batch.is_running = False
            if not batch.calls or not self._keeps:
                self._forget(key)
            self._make_room()

    def release(self, key: str) -> None:
        """The client has all outcomes of a batch, or does not want them."""
        with self._lock:
            batch = self._batches.get(key)
            if batch is not None:
                batch.calls.clear()
                if not batch.is_running:
                    self._forget(key)

    def release_calls(self, calls: Collection[str]) -> None:
        """The client has the outcomes of these calls, or does not want them. Unknown ids are ignored."""
        with self._lock:
            for key, batch in list(self._batches.items()):
                if not batch.calls.isdisjoint(calls):
                    batch.calls.difference_update(calls)
                    if not batch.calls and not batch.is_running:
                        self._forget(key)

    def attach(
        self, name: str, address: str, topic: str, send: Callable[[str, bytes], object], *, is_paused: bool = False
    ) -> None:
        """Announce the kept calls on `topic`, send all kept reports, and send new ones from now on.

        A second call repeats this.
        """
        with self._lock:
            self._send = send
            if self._keeps:
                send(topic, encode_news(WorkerKept(name, address, self.calls, is_paused, tuple(self._batches))))
                for batch in self._batches.values():
                    for message in batch.messages:
                        send(batch.topic, message)

    def detach(self) -> None:
        """Send nothing more, and begin no batch of the scheduler so far: it is gone."""
        with self._lock:
            self._send = None
            self.epoch += 1

    def _forget(self, key: str) -> None:
        batch = self._batches.pop(key)
        self.nbytes -= sum(map(len, batch.messages))

    def _make_room(self) -> None:
        if self.nbytes > self._limit_bytes:
            for batch in self._batches.values():
                self._drop_output(batch)
        for key in [key for key, batch in self._batches.items() if not batch.is_running]:
            if self.nbytes > self._limit_bytes:
                self._forget(key)

    def _drop_output(self, batch: _RetainedBatch) -> None:
        before = sum(map(len, batch.messages))
        lean = [message for fat in batch.messages[batch.lean :] if (message := _without_output(fat))]
        batch.messages[batch.lean :] = lean
        batch.lean = len(batch.messages)
        self.nbytes += sum(map(len, batch.messages)) - before


def _without_items(message: bytes, report: Report) -> bytes:
    """Return a report as it is kept: items of streams do not outlive their head."""
    if not any(isinstance(item, Item) for item in report.news):
        return message
    rest = tuple(item for item in report.news if not isinstance(item, Item))
    return encode_report(report._replace(news=rest)) if rest else b""


def _without_output(message: bytes) -> bytes:
    report = decode_report(message)
    outcomes = tuple(item for item in report.news if isinstance(item, Outcome))
    return encode_report(report._replace(news=outcomes)) if outcomes else b""
