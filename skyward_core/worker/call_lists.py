"""Which calls a pool has right now, on request: the scheduler asks its clients and workers, and adds up what they know.

    observer ──LIST_CALLS──▶ scheduler ──CALLS_QUESTION──▶ each client: its calls that wait, are out, or are fetched
                                ▲  └─────CALLS_QUESTION──▶ each worker: the call of each slot, with its stacks;
                                │                          about one client: the seconds of its uses
                                └──CALLS_ANSWER── both; who does not answer in time is named, and the rest is shown

Before a request, only one introduction of each client is sent. Only members are asked that can answer. A client shows
this by its introduction, a worker by a metric: a member of an earlier release would take the question for an error.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

from distributed import Scheduler  # noqa: TID253 - with calls.py and draining.py stands in the scheduler
from distributed.diagnostics.plugin import SchedulerPlugin  # noqa: TID253

from skyward_core.worker.calls import CallMemory
from skyward_core.worker.scheduler_messages import END_CLIENT, ENDING_SECONDS, LIST_CALLS, LISTING_SECONDS

INTRODUCE = "skyward_introduce"
"""The operation by which a client says who it is, once for each connection."""
CALLS_QUESTION, CALLS_ANSWER = "skyward-calls-question", "skyward-calls-answer"
"""Question and answer on the streams of clients and workers."""
ANSWERS_CALLS = "skyward_answers_calls"
"""The metric of workers that answer."""
LOOK_SECONDS = 0.05
MOST_WAITING = 1000
"""A client lists so many of the calls that wait in its queue, the oldest, and counts the others."""


def answer_of(request: int, answer: Any) -> dict[str, Any]:
    """Return the message that answers a question."""
    return {"op": CALLS_ANSWER, "request": request, "answer": answer}


class CallLists(SchedulerPlugin):
    """Knows who the clients are, and asks all members. It keeps no calls."""

    name = "skyward-call-lists"

    def __init__(self) -> None:
        self._who: dict[str, dict[str, Any]] = {}
        """By the id of a client: how it has introduced itself."""
        self._answers: dict[int, dict[str, Any]] = {}
        """By question: the answers by client or worker; None for those that are missing."""
        self._complete: dict[int, asyncio.Event] = {}
        self._asked = 0
        self._scheduler: Any = None  # Dask's types say too little

    async def start(self, scheduler: Scheduler) -> None:
        """Add the operations to the scheduler."""
        self._scheduler = scheduler
        scheduler.handlers.update({INTRODUCE: self.introduce, LIST_CALLS: self.list_calls, END_CLIENT: self.end_client})
        streams: dict[str, Any] = scheduler.stream_handlers
        streams[CALLS_ANSWER] = self._answered

    def introduce(self, client: str, who: dict[str, Any]) -> None:
        """Note who a client is: its topic, user, process and work."""
        self._who[client] = who

    def remove_client(self, scheduler: Scheduler, client: str) -> None:
        """Forget a client whose connection has ended."""
        self._who.pop(client, None)

    async def list_calls(self, *, with_stacks: bool = False, seconds: float = LISTING_SECONDS) -> dict[str, Any]:
        """Ask all members, for so many seconds at most; return their answers, None for those that have not answered.

        `others` are workers of an earlier release, `detached` the records of detached calls, and `now` is this clock.
        """
        clients = [client for client in self._who if client in self._scheduler.clients]
        workers = {
            address: str(worker.name)
            for address, worker in self._scheduler.workers.items()
            if worker.metrics.get(ANSWERS_CALLS)
        }
        answers = await self._ask(clients, list(workers), {"with_stacks": with_stacks}, seconds=seconds)
        memory = self._scheduler.plugins[CallMemory.name]
        return {
            "clients": [{**self._who.get(client, {}), "calls": answers[client]} for client in clients],
            "workers": [{"name": name, "slots": answers[address]} for address, name in workers.items()],
            "others": [str(one.name) for one in self._scheduler.workers.values() if one.address not in workers],
            "detached": memory.detached.calls(),
            "now": time.time(),
        }

    async def end_client(self, *, topic: str, seconds: float = ENDING_SECONDS) -> tuple[bool, list[Any]]:
        """End the calls of another client, and wait until they hold no slot, for so many seconds at most.

        Return whether that is so, and for each worker its instance and how long it was busy for this client, by use.
        Workers that do not answer hold none that are known.
        """
        self._scheduler.plugins[CallMemory.name].end(topic)
        until = time.monotonic() + seconds
        while True:
            workers = [address for address, one in self._scheduler.workers.items() if one.metrics.get(ANSWERS_CALLS)]
            question = {"topic": topic}
            answers = await self._ask([], workers, question, seconds=max(0.1, until - time.monotonic()))
            known = [answer for answer in answers.values() if answer is not None]
            is_free = not any(is_running for is_running, *_ in known)
            if is_free or time.monotonic() > until:
                return is_free, [spent for _, *spent in known]
            await asyncio.sleep(LOOK_SECONDS)

    async def _ask(
        self, clients: Sequence[str], workers: Sequence[str], question: Mapping[str, Any], *, seconds: float
    ) -> dict[str, Any]:
        self._asked += 1
        request = self._asked
        self._answers[request] = dict.fromkeys([*clients, *workers])
        complete = self._complete[request] = asyncio.Event()
        if not self._answers[request]:
            complete.set()
        message = {"op": CALLS_QUESTION, "request": request, **question}
        self._scheduler.send_all(
            {client: [dict(message)] for client in clients}, {worker: [dict(message)] for worker in workers}
        )
        try:
            async with asyncio.timeout(seconds):
                await complete.wait()
        except TimeoutError:
            pass
        finally:
            answers = self._answers.pop(request)
            del self._complete[request]
        return answers

    def _answered(self, request: int, answer: Any, client: str = "", worker: str = "") -> None:
        answers = self._answers.get(request, {})
        if (client or worker) in answers:
            answers[client or worker] = answer
            if None not in answers.values():
                self._complete[request].set()
