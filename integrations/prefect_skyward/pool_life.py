"""One pool of a flow run, from the request to open it to the end of its machines."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack, contextmanager
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial

import skyward_core as sky
from prefect_skyward.money import MoneyEnd
from prefect_skyward.node_objects import portable
from prefect_skyward.prefect_context import without_prefect_s_api
from prefect_skyward.report.pool_state import SharedPool
from prefect_skyward.report.run_report import RunReport
from prefect_skyward.secrets import values_of
from prefect_skyward.ui import RunLog, RunLogs

BREAK_OFF_SECONDS = 0.25
UPDATE_SECONDS = 5.0
"""The least time between two messages of a task run that waits for machines."""
MOST_UPDATED = 20
"""How many of these task runs get more than the first message: each is an event, and a thousand may wait."""


@dataclass(frozen=True, slots=True)
class FlowFacts:
    """What a pool needs to know of its flow run. Made in the flow's context; the pool ends after it."""

    work: sky.Work
    log: RunLog
    logs: RunLogs
    report: RunReport | None
    money: MoneyEnd
    on_event: sky.Callback | None


class Waiter:
    """One task run that waits for machines. It hears nothing after its end: a message that comes after its state
    Running would replace that. A message that takes long holds nobody else.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._lock = threading.Lock()
        self._has_ended = False

    def hear(self, reason: str) -> None:
        """Send the reason why the pool is not open."""
        with self._lock:
            if not self._has_ended:
                self._say(reason)

    def end(self) -> None:
        """Send nothing from now on. Waits for a message that is being sent."""
        with self._lock:
            self._has_ended = True


class PoolLife:
    """A pool that is opened once and ended once.

    States: opening -> open -> ended, or opening -> failed. The thread of `_open` owns it while it opens; `end` takes it
    in any state. `holders` and `idle_since` belong to the lock of `FlowPools`.
    """

    def __init__(self, spec: sky.PoolSpec, facts: FlowFacts, name: str, run_max_cost: float | None = None) -> None:
        """`run_max_cost` is the most that all pools of the flow run may cost, in USD."""
        self.spec = spec
        self.name = name
        """Distinguishes the pools of a flow run; "" for the first."""
        self.opened: Future[sky.ComputePool] = Future()
        self.pool: sky.ComputePool | None = None
        self.holders = 0
        self.idle_since = time.monotonic()
        self._facts = facts
        # a pool with a name is not for one run; without a flow run there is no run
        self._run_max_cost = run_max_cost if spec.name is None and facts.work.run else None
        self._is_stopping = False
        self._ending = threading.Lock()
        self._is_ended = False
        self._is_noted = False
        self._uses: dict[sky.Work, sky.PoolUse] = {}
        self._using = threading.Lock()
        self._waiting: list[Waiter] = []
        self._reason = self._sent_reason = ""
        self._updated_at = -UPDATE_SECONDS

    def start(self, spent_usd: float) -> None:
        """Open the pool, in a thread. `spent_usd` was spent by earlier pools of this spec, under the same limit."""
        self.opened.set_running_or_notify_cancel()  # so that a task which stops waiting cannot cancel it
        context = copy_context()
        thread = sky.LoopThread("skyward-open", lambda: context.run(self._open, spent_usd))
        try:
            thread.start()
        except BaseException as error:  # else `end` would wait for ever for an opening that does not begin
            self.opened.set_exception(error)
            raise

    @property
    def has_failed(self) -> bool:
        """Whether it could not be opened."""
        return self.opened.done() and self.opened.exception() is not None

    @property
    def has_ended_by_itself(self) -> bool:
        """Whether it was open and is closed now: its money or its `max_lifetime` is used up, or its lease is lost."""
        pool = self.pool
        return self.opened.done() and not self.has_failed and pool is not None and not pool.is_active

    @property
    def spec_text(self) -> str:
        """The machines in words: `2 x H100`."""
        return f"{self.spec.most_nodes} x {self.spec.accelerator_words or self.spec.machine or 'machine'}"

    @property
    def cost(self) -> float:
        """USD spent so far."""
        return self.pool.cost if self.pool is not None else 0.0

    def use_of(self, work: sky.Work) -> sky.PoolUse:
        """Return the use of the pool by a task run; the ledger has it before its first call, if it answers."""
        pool = self.opened.result()
        with self._using:
            use = self._uses.setdefault(work, sky.PoolUse(pool, work, is_alone=False))
        return use.open()

    def report_cost(self, use: sky.PoolUse) -> None:
        """Report what a task run has cost, when one of its calls has ended."""
        if self._facts.report is not None:
            self._facts.report.task_cost(use, calls=1)

    def note_its_end(self) -> None:
        """Report that the money of a pool which has ended by itself is used up: a pool without calls raises it nowhere.

        The pool reports the error only to what is asked of it.
        """
        pool, report = self.pool, self._facts.report
        if pool is None or report is None or self._is_noted or not self.has_ended_by_itself:
            return
        try:
            pool.submit(sky.PendingCompute(int, (), {}))
        except sky.BudgetExceeded as error:
            self._is_noted = True
            report.money_is_used_up(error, None if error.account else self.spec.max_cost, pool.id)
        except sky.SkywardError:  # another end; or this one is not complete, and is looked at again
            pass

    @contextmanager
    def waiting_message(self, say: Callable[[str], None]) -> Generator[None]:
        """Call `say` with the reason why the pool is not open yet: now, and when it changes, until the block ends."""
        waiter = Waiter(say)
        waiter.hear(self._reason)
        self._waiting.append(waiter)
        try:
            yield
        finally:
            waiter.end()
            self._waiting.remove(waiter)

    def update_waiting_messages(self) -> None:
        """Send a changed reason to the first MOST_UPDATED that wait, at most once in UPDATE_SECONDS."""
        if self._reason == self._sent_reason or time.monotonic() - self._updated_at < UPDATE_SECONDS:
            return
        self._sent_reason, self._updated_at = self._reason, time.monotonic()
        for waiter in self._waiting[:MOST_UPDATED]:
            waiter.hear(self._sent_reason)

    def terminate_now(self) -> None:
        """Leave the machines to the reaper and return at once."""
        self._is_stopping = True
        if self.pool is not None:
            self.pool.terminate_now()

    def end(self) -> None:
        """End the pool in any state. After an error it may be called again, and ends what is left."""
        self._break_off_opening()
        with self._ending, ExitStack() as undo:
            if self._is_ended:
                return
            if self.pool is not None:
                undo.callback(self._settle, self.pool)  # after its end: then no more calls come
                # an unconfirmed machine is in the run's log and on its artifact, and fails no flow that has done its
                # work
                undo.callback(self.pool.hand_over)
            undo.close()
            self._is_ended = True

    def _open(self, spent_usd: float) -> None:
        facts = self._facts
        sinks: list[sky.Callback] = [facts.logs, self._note_reason]
        try:
            if facts.report is not None:
                sinks.append(facts.report.sink(self.name))
            if facts.on_event is not None:
                sinks.append(facts.on_event)
            pool = sky.ComputePool.from_spec(
                _within(_for_nodes(self.spec), spent_usd),
                on_event=sky.compose(*sinks),
                secrets=values_of(self.spec),
                replace_object=portable,
                work=facts.work,
                run_max_cost=self._run_max_cost,
            )
            self.pool = pool  # before it is open: a stopped flow must be able to end the opening
            if not self._is_stopping:
                pool.open()
        except BaseException as error:
            if not self._is_stopping:
                facts.log.say(logging.ERROR, f"the pool could not be opened: {error}")
            self.opened.set_exception(error)
        else:
            self._report_shared(pool)
            # an opening may last longer than `idle_timeout`; until `opened` is done no other thread reads this
            self.idle_since = time.monotonic()
            self.opened.set_result(pool)

    def _note_reason(self, event: sky.SkywardEvent) -> None:
        if isinstance(event, sky.CandidateRefused | sky.InstanceLaunching | sky.InstanceLost):
            _, self._reason = sky.Narrator().tell(event) or (0, self._reason)

    def _report_shared(self, pool: sky.ComputePool) -> None:
        """Report a pool with a name: this flow run has a share of its cost. Raises nothing, or no call would begin."""
        if self._facts.report is None or self.spec.name is None or not pool.is_active:
            return
        try:
            shared = SharedPool(self.spec.name, pool.id, self.spec.accelerator_words, pool.lease.nodes)
        except Exception as error:  # it has ended already, or its lease cannot be signed
            self._facts.log.say(
                logging.WARNING, f"what this flow run has cost on {self.spec.name} is not shown: {error}"
            )
        else:
            self._facts.report.share(self.name, shared)

    def _break_off_opening(self) -> None:
        """Cancel an opening that goes on, and wait until its machines and threads have ended."""
        while not self.opened.done():
            # repeatedly: `pool.open()` does not see a request that comes before it has begun
            self.terminate_now()
            wait([self.opened], timeout=BREAK_OFF_SECONDS)

    def _settle(self, pool: sky.ComputePool) -> None:
        """Report what it has cost in all. What each task run has cost is in the ledger."""
        if self._facts.report is None:
            return
        for use in tuple(self._uses.values()):
            self._facts.report.task_cost(use)
        self._facts.report.settle(pool.id, pool.receipt)
        if self.spec.name is not None:
            self._facts.report.leave(pool.id)


def end_all(lives: Sequence[PoolLife]) -> None:
    """End pools at the same time. Raises the first error, after all have ended or failed to."""
    errors: list[BaseException] = []

    def end(life: PoolLife) -> None:
        try:
            life.end()
        except BaseException as error:
            errors.append(error)

    threads = sky.Threads(is_daemon=False)
    try:
        for life in lives[1:]:
            threads.run("skyward-end", partial(copy_context().run, partial(end, life)))
        for life in lives[:1]:
            end(life)
    finally:
        threads.join()
    if errors:
        raise errors[0]


def _for_nodes(spec: sky.PoolSpec) -> sky.PoolSpec:
    return without_prefect_s_api(spec if "display" in spec.model_fields_set else spec.with_(display="quiet"))


def _within(spec: sky.PoolSpec, spent_usd: float) -> sky.PoolSpec:
    """Return the spec with the rest of its limit: a pool that is opened again after it was idle has no new one."""
    if spec.max_cost is None or not spent_usd or spec.name is not None:
        return spec
    if spec.max_cost <= spent_usd:
        raise sky.BudgetExceeded(
            f"max_cost={spec.max_cost:g}: earlier pools of this flow run have used it up ({spent_usd:.4f} USD)"
        )
    return spec.with_(max_cost=spec.max_cost - spent_usd)
