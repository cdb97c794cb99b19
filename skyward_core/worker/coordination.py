"""The scheduler's part of the pool's shared objects: passes requests to `CoordinationState`, and answers back.

Requests of calls come in the streams of their workers. A program that uses the pool from outside has a connection for
them. The scheduler drops a holder when its worker says so, and all holders of a worker or a program when that is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from typing import Any

from distributed import Scheduler  # noqa: TID253 - stands in the scheduler, with calls.py
from distributed.core import Status  # noqa: TID253
from distributed.diagnostics.plugin import SchedulerPlugin  # noqa: TID253

from skyward_core.coordination.messages import Request, fields_of, request_of
from skyward_core.coordination.state import CoordinationState, Holder, Letter
from skyward_core.worker.call_connections import ANSWER, DROP, REQUEST

SERVE_PROGRAM = "skyward_coordinate"
"""The operation that makes a connection the one of a program outside the pool: it sends requests and gets answers."""


class Coordination(SchedulerPlugin):
    """Has the shared objects of the pool, and the timers of requests that wait. All of it ends with the scheduler."""

    name = "skyward-coordination"

    def __init__(self) -> None:
        self._state = CoordinationState()
        self._timers: dict[tuple[Holder, int], asyncio.TimerHandle] = {}
        self._holders: dict[str, set[Holder]] = {}
        """By origin: a worker or a program."""
        self._programs: dict[str, asyncio.Queue[Any]] = {}
        self._numbers = itertools.count(1)
        self._scheduler: Any = None  # Dask's types say too little

    async def start(self, scheduler: Scheduler) -> None:
        """Add the operations to the scheduler."""
        self._scheduler = scheduler
        streams: dict[str, Any] = scheduler.stream_handlers
        streams[REQUEST] = self.request
        streams[DROP] = self.drop
        scheduler.handlers[SERVE_PROGRAM] = self.serve_program

    async def close(self) -> None:
        """Stop the timers."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()

    def request(self, worker: str, holder: int, request: list[Any]) -> None:
        """Take a request of a call."""
        if worker in self._scheduler.workers:  # otherwise it was removed, and its message comes too late
            self._take((worker, holder), request)  # the worker has checked it: an error would end its stream

    def drop(self, worker: str, holder: int) -> None:
        """Take back what a holder of a worker has."""
        self._drop(worker, {(worker, holder)})

    def remove_worker(self, scheduler: Scheduler, worker: str, **_: Any) -> None:
        """Take back what the calls of a worker have."""
        self._drop(worker, set(self._holders.get(worker, ())))

    async def serve_program(self, comm: Any) -> Any:
        """Take requests of a program until its connection ends."""
        origin = f"program-{next(self._numbers)}"
        answers = self._programs[origin] = asyncio.Queue()
        writing = asyncio.create_task(_write(comm, answers))
        try:
            with contextlib.suppress(OSError, ValueError):  # the connection has ended, or it brings no requests
                while True:
                    self._take((origin, 0), await comm.read())
        finally:
            del self._programs[origin]
            writing.cancel()
            self._drop(origin, set(self._holders.get(origin, ())))
        return Status.dont_reply

    def _take(self, holder: Holder, fields: list[Any]) -> None:
        request = request_of(fields, bytes(fields[4]))
        self._holders.setdefault(holder[0], set()).add(holder)
        letters = self._state.receive(holder, request)
        self._send(letters)
        if request.seconds and not any(_answers(letter, holder, request) for letter in letters):
            loop = asyncio.get_running_loop()
            self._timers[holder, request.number] = loop.call_later(request.seconds, self._expire, holder, request)

    def _expire(self, holder: Holder, request: Request) -> None:
        self._timers.pop((holder, request.number), None)
        self._send(self._state.expire(holder, request))

    def _drop(self, origin: str, holders: set[Holder]) -> None:
        """Drop holders of one origin together, so that an object of one is not given to another."""
        there = self._holders.get(origin, set())
        there -= holders
        if not there:
            self._holders.pop(origin, None)
        for key in [key for key in self._timers if key[0] in holders]:
            self._timers.pop(key).cancel()
        self._send(self._state.drop(*holders))

    def _send(self, letters: list[Letter]) -> None:
        for letter in letters:
            origin, number = letter.holder
            if timer := self._timers.pop((letter.holder, letter.answer.number), None):
                timer.cancel()
            if origin in self._programs:
                self._programs[origin].put_nowait(fields_of(letter.answer))
            elif origin in self._scheduler.stream_comms:
                message = {"op": ANSWER, "holder": number, "answer": fields_of(letter.answer)}
                self._scheduler.send_all({}, {origin: [message]})


def _answers(letter: Letter, holder: Holder, request: Request) -> bool:
    return letter.holder == holder and letter.answer.number == request.number


async def _write(comm: Any, answers: asyncio.Queue[Any]) -> None:
    with contextlib.suppress(OSError):
        while True:
            await comm.write(await answers.get())
