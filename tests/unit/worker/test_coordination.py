"""The scheduler's part of shared objects, without Dask: what the calls of a worker have goes with the worker."""

import asyncio
from typing import Any

from skyward_core.coordination.messages import Kind, Request, fields_of
from skyward_core.worker.call_connections import REQUEST
from skyward_core.worker.coordination import Coordination
from skyward_core.worker.pool_scheduler import SILENCE_CHECK_SECONDS, SILENT_SECONDS, SilentWorkers

SILENT, OTHER = "tls://silent", "tls://other"


class Scheduler:
    """What the plug-in uses of Dask's scheduler. `answers`: worker, holder, number and status of each."""

    def __init__(self, *workers: str) -> None:
        self.workers = dict.fromkeys(workers)
        self.stream_comms = dict.fromkeys(workers)
        self.stream_handlers: dict[str, Any] = {}
        self.handlers: dict[str, Any] = {}
        self.answers: list[tuple[str, int, int, str]] = []
        self.coordination = Coordination()
        started: Any = self.coordination.start
        asyncio.run(started(self))

    def send_all(self, clients: object, workers: dict[str, list[dict[str, Any]]]) -> None:
        self.answers += [
            (worker, message["holder"], *message["answer"][:2])
            for worker, messages in workers.items()
            for message in messages
        ]

    def request(self, worker: str, holder: int, number: int, action: str, target: int = 0) -> None:
        """A call on a worker asks for the lock "x"."""
        request = Request(number, Kind.LOCK, "x", action, limit=1, target=target, seconds=None)
        self.stream_handlers[REQUEST](worker, holder, fields_of(request))

    def remove_worker(self, worker: str) -> None:
        """As Dask does: it forgets the worker, and calls its plug-ins then."""
        del self.workers[worker], self.stream_comms[worker]
        self.coordination.remove_worker(self, worker)  # pyright: ignore[reportArgumentType]

    def take_answers(self) -> list[tuple[str, int, int, str]]:
        answers, self.answers = self.answers, []
        return answers


def test_a_silent_worker_keeps_its_lock_until_it_is_removed() -> None:
    """For SILENT_SECONDS, counted in the checks of the scheduler. Another worker's call waits so long, and has it then.

    Requests of other holders of the silent worker do not get it.
    """
    scheduler, silence = Scheduler(SILENT, OTHER), SilentWorkers()
    scheduler.request(SILENT, 1, 1, "acquire")
    scheduler.request(SILENT, 2, 1, "acquire")
    scheduler.request(OTHER, 1, 1, "acquire")
    assert scheduler.take_answers() == [(SILENT, 1, 1, "done")]
    limits, seconds = dict.fromkeys((SILENT, OTHER), SILENT_SECONDS), 0.0
    while not (removed := silence.check({SILENT: 0.0, OTHER: seconds}, SILENCE_CHECK_SECONDS, limits)):
        assert scheduler.take_answers() == []
        seconds += SILENCE_CHECK_SECONDS
    assert (removed, seconds) == ([SILENT], SILENT_SECONDS + SILENCE_CHECK_SECONDS)
    scheduler.remove_worker(SILENT)
    assert scheduler.take_answers() == [(OTHER, 1, 1, "done")]


def test_what_a_removed_worker_still_says_has_no_effect() -> None:
    """It goes on, and releases its lock or wants another one: the other worker's call has the lock."""
    scheduler = Scheduler(SILENT, OTHER)
    scheduler.request(SILENT, 1, 1, "acquire")
    scheduler.remove_worker(SILENT)
    scheduler.request(OTHER, 1, 1, "acquire")
    scheduler.request(SILENT, 1, 2, "release", target=1)
    scheduler.request(SILENT, 1, 3, "acquire")
    scheduler.request(OTHER, 2, 1, "count")
    scheduler.request(OTHER, 1, 2, "release", target=1)
    assert [status for *_, status in scheduler.take_answers()] == ["done", "done", "done", "done"]
    scheduler.request(OTHER, 2, 2, "acquire")
    assert scheduler.take_answers() == [(OTHER, 2, 2, "done")]  # nothing of the removed worker waits before it
