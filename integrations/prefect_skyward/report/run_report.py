"""`RunReport`: what Prefect's UI shows of one flow run, kept up to date by a separate thread."""

from __future__ import annotations

import json
import logging
import math
import re
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from functools import cache, partial
from queue import Empty, SimpleQueue
from typing import Any
from uuid import UUID
from weakref import WeakSet

from httpx import HTTPStatusError
from prefect.context import SyncClientContext

import skyward_core as sky
from prefect_skyward.report import pages
from prefect_skyward.report.flow_trend import (
    COST_LABEL,
    FINAL_LABEL,
    MEASURE_LABEL,
    PERCENT_LABEL,
    metadata_of,
    write_trend,
)
from prefect_skyward.report.notices import Notice, RunWarning, Sieve, exceeded, notice_of, share_final
from prefect_skyward.report.pages import RunState
from prefect_skyward.report.pool_state import PoolState, SharedPool
from prefect_skyward.report.prefect_api import COST_KEY, LABEL_SECONDS, RunApi
from prefect_skyward.report.settlement import NODES_KEY, TASKS_KEY, begin_bill, settle_earlier_runs
from prefect_skyward.report.task_costs import nodes_with_the_ledger, total, with_the_ledger
from prefect_skyward.ui import RunLog

MACHINES_KEY, TASK_RUN_KEY = "skyward-machines", "skyward-task-run"
WRITE_SECONDS = 15.0
"""The least time between two updates. The start and the readiness of a pool are written at once."""
BATCH_SECONDS = 0.05
"""How long messages are collected: each task run sends three, and each wake of the thread takes the interpreter from
the task runs.
"""
BILL_SECONDS = 1.0
"""How soon the end of a pool is written. If the flow run ends with it, only the last state is."""
LAST_LABEL_SECONDS, EXIT_LABEL_SECONDS = 0.5, 5.0
"""How long the last labels are tried, and if a signal ends the process: a server that takes in the events of a thousand
task runs refuses them for some seconds. The artifact has the same figures; the next run of the flow writes the labels.
"""
CLOSE_SECONDS = 2.0
"""How long the end of a flow waits for an API that is slow."""
EXIT_SECONDS = 10.0
"""How long the end of the process, and the next attempt's first request, wait for what is still to be written."""
OTHERS_SECONDS = 1.0
"""How long of that it waits for what the next run would write too: the card of the flow, labels, earlier runs."""
MOST_TASK_ROWS, MOST_LIVE_TASK_ROWS = 1_000, 50
"""Rows of the table of task runs, at the end and while the flow runs."""
MOST_TASK_ARTIFACTS = 20
"""How many task runs get an artifact of their own: each is a request, and 1,000 task runs may end in two seconds. If
there are more, only those that report get one.
"""
UNREPORTED = (sky.LogLine, sky.CallRetrying, sky.CallsWaiting, sky.ContactLost, sky.ContactRegained, sky.Error)
SOON: dict[type[sky.SkywardEvent], float] = {
    sky.InfraCreating: 0.0,
    sky.PoolReady: 0.0,
    sky.CostFinal: BILL_SECONDS,
    sky.PoolLeft: BILL_SECONDS,
}
"""How many seconds after an event the pages are written."""

_log = logging.getLogger("skyward")
_late: WeakSet[RunReport] = WeakSet()
"""Those that may still write, though their flow runs have ended; nobody has waited for them."""


class RunReport:
    """Keeps the artifacts, the events and the labels of one flow run up to date, over all of its pools.

    All methods only put a message into a queue; one thread owns the state and sends the requests. An API that is slow
    or does not answer delays neither the calls nor the end of the machines: it causes one warning in the log. `close`
    comes last, and waits for the last requests, but not long; the end of the process waits for them longer.
    """

    def __init__(self, flow_run_id: UUID, log: RunLog, work: sky.Work, flow_id: UUID | None = None) -> None:
        """`flow_id`: of the flow whose earlier runs are settled; None: of none."""
        self._flow_run_id = flow_run_id
        self._flow_id = flow_id
        self._log = log
        self._work = work
        self._api = RunApi(flow_run_id)
        self._state = RunState()
        self._sieve = Sieve()
        self._warning = RunWarning()
        self._earlier_rows: dict[str, list[dict[str, Any]]] = {}
        self._has_task_artifact: set[str] = set()
        self._uses: dict[str, tuple[sky.PoolUse, int]] = {}
        """By id: uses whose cost has changed since it was asked last, and how many of their calls have ended."""
        self._is_changed = self._has_warned = self._is_closed = False
        self._is_bill_final = True
        """Whether the ledger adds nothing to the last figures: machines may be left that are not confirmed gone."""
        self._label_seconds, self._others_seconds = LAST_LABEL_SECONDS, OTHERS_SECONDS
        self._due_at = math.inf
        """When the pages are to be written because of an event."""
        self._has_written = threading.Event()
        """Set when the last state was written."""
        self._has_taken_last = False
        self._inbox: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._thread = sky.LoopThread("skyward-report", partial(log.run, self._run))
        self._thread.start_if_possible()  # `close` tries again

    @property
    def _own_work(self) -> sky.Work:
        """The flow run, with all its attempts and tasks."""
        return sky.Work(system=self._work.system, workflow=self._work.workflow, run=self._work.run)

    # ── messages, from any thread ────────────────────────────────────────────────────────────────────────────────────

    def sink(self, name: str = "") -> sky.Callback:
        """Return the event sink of one pool. `name` distinguishes the pools of the run; the first may have none."""
        pool = PoolState(name)
        self._inbox.put(partial(self._state.pools.append, pool))

        def take(event: sky.SkywardEvent) -> None:
            if not isinstance(event, UNREPORTED):
                self._inbox.put(partial(self._take, pool, event, time.monotonic()))

        return take

    def limit(self, usd: float) -> None:
        """Warn when all pools of the flow run have cost 80 % of this, in USD."""
        self._inbox.put(partial(setattr, self._warning, "limit_usd", usd))

    def call(self, use: sky.PoolUse) -> None:
        """Say that a task run has made a call, so that what it reports is shown there."""
        self._inbox.put(partial(self._state.tasks.begin, use))

    def task_cost(self, use: sky.PoolUse, *, calls: int = 0) -> None:
        """Say that the cost of a task run's use of a pool has changed; so many more of its calls have ended."""
        self._inbox.put(partial(self._note_use, use, calls))

    def settle(self, pool_id: str, receipt: Mapping[str, Any] | None) -> None:
        """Take the seconds and the cost of each machine from the receipt of a pool that has ended."""
        if receipt is not None:
            self._inbox.put(partial(self._settle, pool_id, receipt))

    def share(self, name: str, shared: SharedPool) -> None:
        """Say that other processes may use a pool, once it is open. `name` is that of its `sink`."""
        self._inbox.put(partial(self._share, name, shared, time.monotonic()))

    def leave(self, pool_id: str) -> None:
        """Take the flow run's part of a shared pool's cost from the ledger, once the flow run has left the pool."""
        self._inbox.put(partial(self._leave, pool_id, time.monotonic()))

    def money_is_used_up(self, error: sky.BudgetExceeded, limit_usd: float | None, pool_id: str = "") -> None:
        """Emit `skyward.budget.exceeded`, once for each pool."""
        self._inbox.put(partial(self._exceeded, str(error), limit_usd, error.account, pool_id))

    def expect_exit(self) -> None:
        """Say that a signal ends the process, before `close`: then the labels are worth a longer wait, because Prefect
        may show the run as Running until somebody looks for it.
        """
        self._label_seconds, self._others_seconds = EXIT_LABEL_SECONDS, EXIT_SECONDS

    def close(self) -> None:
        """Write the last state and end the thread; called once the pools are closed. May be called twice.

        It waits CLOSE_SECONDS at most, and not for the pages of earlier runs. The thread goes on after that; the end of
        the process waits for it.
        """
        if self._is_closed:
            return
        self._is_closed = True
        self._inbox.put(None)
        if not (self._thread.is_alive or self._thread.start_if_possible()):
            _log.warning("the costs of flow run %s are not written: no thread can be started", self._flow_run_id)
            self._has_written.set()
        _late.add(self)
        _wait_at_exit()
        self._has_written.wait(CLOSE_SECONDS)

    def wait(self, seconds: float) -> None:
        """Wait for the last requests of a flow run that has ended; say where the bill is if they are not done then."""
        until = time.monotonic() + seconds
        self._has_written.wait(seconds)
        self._thread.join(max(0.0, min(self._others_seconds, until - time.monotonic())))
        if not self._has_written.is_set():
            pools = " ".join(pool.pool_id for pool in list(self._state.pools) if pool.pool_id)
            # an API that does not answer takes no line of the run's log either
            _log.warning(
                "Prefect's API has not taken the costs of flow run %s, and the process ends without them; the next run"
                " of the flow writes them. The ledger has the bill: skyward receipt %s",
                self._flow_run_id,
                pools,
            )

    # ── in the thread ────────────────────────────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        with ExitStack() as connection:
            self._try(lambda: connection.enter_context(SyncClientContext.get_or_create()))  # one for all requests
            self._take_all()

    def _take_all(self) -> None:
        self._wait_for_earlier_attempt()
        self._try(self._read_earlier_attempts)
        written_at = time.monotonic() - WRITE_SECONDS
        while not self._has_taken_last:
            if self._inbox.empty():
                time.sleep(BATCH_SECONDS)
            due_at = min(written_at + WRITE_SECONDS, self._due_at)
            wait = max(0.0, due_at - time.monotonic()) if self._is_changed else None
            try:
                message = self._inbox.get(timeout=wait)
            except Empty:
                message = self._noted
            if message is None:
                self._has_taken_last = True
                break
            self._try(message)
            if self._is_changed and time.monotonic() >= min(written_at + WRITE_SECONDS, self._due_at):
                self._write()
                written_at, self._is_changed, self._due_at = time.monotonic(), False, math.inf
        self._state.is_final = True
        is_written = self._write()
        self._has_written.set()
        if self._flow_id is not None and self._state.pools:
            self._try(partial(write_trend, self._flow_id, {self._flow_run_id: self._figures}))
        if is_written:
            # without them the next run of the flow writes all that may be missing
            self._try(self._write_last_labels)
        if self._flow_id is not None:
            self._try(partial(self._settle_earlier_runs, self._flow_id))

    def _settle_earlier_runs(self, flow_id: UUID) -> None:
        if settle_earlier_runs(flow_id, self._flow_run_id):
            write_trend(flow_id)

    def _noted(self) -> None:
        """The time for an update has come."""

    def _try(self, do: Callable[[], object]) -> bool:
        """Do something that may fail, with a warning for the first failure; return whether it has not failed."""
        try:
            do()
        except Exception as error:
            if not self._has_warned:
                self._has_warned = True
                self._log.say(logging.WARNING, f"what the run's pages show of its machines is incomplete: {error!r}")
            else:
                self._log.logger.debug("the run's pages could not be written: %r", error)
            return False
        return True

    def _take(self, pool: PoolState, event: sky.SkywardEvent, at: float) -> None:
        self._is_changed = True
        if isinstance(event, sky.CallReported):
            self._state.tasks.report(event)
            return
        pool.after(event, at)
        if (seconds := SOON.get(type(event))) is not None:
            self._due_at = min(self._due_at, time.monotonic() + seconds)
        if pool.pool_id in self._state.earlier:  # the ledger was read after this pool had begun
            self._state.earlier = {name: usd for name, usd in self._state.earlier.items() if name != pool.pool_id}
        if (notice := notice_of(event, pool)) is not None and not self._warning.repeats(notice):
            self._emit(notice, pool)
        if (warning := self._warning.due(self._state.usd)) is not None:
            self._emit(warning, pool)

    def _note_use(self, use: sky.PoolUse, calls: int) -> None:
        self._is_changed = True
        _, before = self._uses.get(use.id, (use, 0))
        self._uses[use.id] = use, before + calls

    def _ask_costs(self) -> None:
        """Once for all calls that have ended: each answer looks at all calls that run."""
        while self._uses:
            use_id, (use, calls) = self._uses.popitem()
            self._state.tasks.note(use.work.task_run, use_id, use.cost, calls)

    def _settle(self, pool_id: str, receipt: Mapping[str, Any]) -> None:
        self._is_changed = True
        for pool in self._state.pools:
            if pool.pool_id == pool_id:
                pool.settle(receipt)

    def _share(self, name: str, shared: SharedPool, at: float) -> None:
        self._is_changed, self._due_at = True, 0.0
        for pool in self._state.pools:
            if pool.name == name:
                pool.share(shared, at)
        # the part of a flow run is that of all its attempts
        self._state.earlier = {name: usd for name, usd in self._state.earlier.items() if name != shared.pool_id}

    def _leave(self, pool_id: str, at: float) -> None:
        self._is_changed = True
        for pool in self._state.pools:
            if pool.pool_id == pool_id and pool.shared_name:
                pool.leave(at)
                self._ask_shares()
                self._emit(share_final(pool), pool)

    def _ask_shares(self) -> None:
        if any(pool.shared_name for pool in self._state.pools):
            costs = sky.cost_of(self._own_work)
            for pool in self._state.pools:
                if pool.shared_name:
                    pool.share_usd = costs.get(pool.pool_id, 0.0)

    def _exceeded(self, reason: str, limit_usd: float | None, account: str, pool_id: str) -> None:
        pools = [pool for pool in self._state.pools if pool.pool_id == pool_id or not pool_id]
        pool = pools[-1] if pools else None
        if pool is not None and pool.trouble:
            return
        if pool is not None:
            pool.trouble, self._is_changed = reason, True
        self._emit(exceeded(reason, pool, limit_usd, account), pool)

    def _emit(self, notice: Notice, pool: PoolState | None) -> None:
        if self._sieve.lets(notice):
            run = {"flow_run_usd": self._state.usd}
            self._api.emit(
                notice.event, pool.pool_id if pool else "", pool.name if pool else "", {**notice.payload, **run}
            )

    def _wait_for_earlier_attempt(self) -> None:
        """Let the report of the attempt before, in this process, write its last figures before this one begins."""
        for report in list(_late):
            if report is not self and report._flow_run_id == self._flow_run_id:
                report._thread.join(EXIT_SECONDS)

    def _read_earlier_attempts(self) -> None:
        """Find what earlier attempts of the flow run have cost, by the ledger, and the rows of their tables."""
        if self._work.run:
            self._state.earlier = sky.cost_of(self._own_work)
        if self._state.earlier:
            # the labels of an attempt are final, for it does not know that another one follows
            self._try(partial(begin_bill, self._flow_run_id))
            tables = self._api.read([COST_KEY, NODES_KEY, TASKS_KEY, MACHINES_KEY])
            self._earlier_rows = {
                key: rows for key in (NODES_KEY, TASKS_KEY) if isinstance(rows := _rows(tables.get(key)), list)
            }

    # ── the artifacts ────────────────────────────────────────────────────────────────────────────────────────────────

    def _write(self) -> bool:
        """Write what has changed; return whether there was something, and all of it is written."""
        if not any(pool.pool_id or pool.trouble for pool in self._state.pools):
            return False
        self._try(self._ask_shares)
        self._try(self._ask_costs)
        if self._state.is_final and self._work.run:
            self._try(self._ask_earlier_costs_again)
        self._try(self._write_progress)
        # Prefect's graph shows artifacts of one moment as a number: the circle of the opening is to stand alone
        if not (
            self._state.is_final or any(pool.ready_seconds is not None or pool.trouble for pool in self._state.pools)
        ):
            self._try(self._write_live_labels)
            return True
        # the cost is first: an API that is slow may not take all
        has_cost = self._try(self._write_cost) and self._try(self._write_tag)
        self._try(self._write_live_labels)
        written = [self._try(write) for write in (self._write_nodes, self._write_tasks, self._write_runs)]
        return has_cost and all(written)

    def _ask_earlier_costs_again(self) -> None:
        """The machines of an earlier attempt may have ended after this one began; its process may have been killed.

        Other processes of the run, such as those of its task runner, may have pools too.
        """
        self._is_bill_final = False  # nor if the ledger does not answer
        parts = sky.cost_parts(self._own_work)
        self._is_bill_final = all(part.is_final for part in parts)
        pools, own = {pool.pool_id for pool in self._state.pools}, self._state.tasks.runs
        others: dict[str, float] = {}
        for part in parts:
            if part.pool_id not in pools:
                others[part.pool_id] = total([others.get(part.pool_id, 0.0), float(part.cost_usd)])
        self._state.earlier = {**self._state.earlier, **others}
        parts = [part for part in parts if part.work.task_run not in own]
        self._earlier_rows[TASKS_KEY] = with_the_ledger(self._earlier_rows.get(TASKS_KEY, []), parts)

    def _write_progress(self) -> None:
        for pool in self._state.pools:
            key = "-".join(filter(None, (MACHINES_KEY, _slug(pool.name))))
            words = pages.progress_words(pool)
            if pool.ready_seconds is None and pool.usd:
                words += f" · {pages.usd(pool.usd)} so far"
            self._api.write(key, "progress", round(pool.progress, 1), words)

    def _write_cost(self) -> None:
        page = pages.cost_page(self._state, time.monotonic())
        self._api.write(COST_KEY, "markdown", page, pages.summary(self._state), tag=self._tag, figures=self._figures)

    @property
    def _figures(self) -> dict[str, str]:
        measure, percent = self._state.utilisation or ("", None)
        is_final = self._state.is_final and self._is_bill_final
        return metadata_of(self._state.usd, measure, percent, is_final=is_final)

    def _write_tag(self) -> None:
        self._api.tag(self._tag)

    @property
    def _tag(self) -> str:
        measure, percent = self._state.utilisation or ("", None)
        return pages.cost_tag(self._state.usd, measure, percent, is_final=self._state.is_final)

    def _write_nodes(self) -> None:
        own = {pool.pool_id for pool in self._state.pools}
        earlier = [row for row in self._earlier_rows.get(NODES_KEY, []) if row.get("pool") not in own]
        if self._state.is_final and earlier:  # the process of an earlier attempt may have been killed
            pools = {row["pool"] for row in earlier}
            earlier = nodes_with_the_ledger(earlier, {pool_id: sky.receipt_of(pool_id) for pool_id in pools})
        rows = earlier + pages.node_rows(self._state, time.monotonic())
        if rows:
            self._api.write(NODES_KEY, "table", rows, f"{pages.machines(len(rows))} · {pages.summary(self._state)}")

    def _write_tasks(self) -> None:
        tasks = self._state.tasks
        if not tasks.runs:
            return
        runs = tasks.costliest(MOST_TASK_ROWS if self._state.is_final else MOST_LIVE_TASK_ROWS)
        known = {run.task_run_id for run in runs}
        earlier = [row for row in self._earlier_rows.get(TASKS_KEY, []) if row.get("task run") not in known]
        count = len(tasks.runs)
        words = f"{count} task runs · {pages.usd(tasks.usd)}" + (
            "" if len(runs) == count else f" · the {len(runs)} that cost most"
        )
        self._api.write(TASKS_KEY, "table", (earlier + pages.task_rows(runs))[:MOST_TASK_ROWS], words)

    def _write_runs(self) -> None:
        """Write the artifacts of single task runs: of those that report, and at the end of all if they are few."""
        tasks = self._state.tasks
        wanted = [tasks.runs[name] for name in sorted(tasks.changed)]
        tasks.changed.clear()
        if self._state.is_final:
            reporting = [tasks.runs[name] for name in sorted(self._has_task_artifact)]
            # of a thousand, twenty requests would only delay the end of the run: the table has what each has cost
            few = tasks.costliest() if len(tasks.runs) <= MOST_TASK_ARTIFACTS else []
            wanted = [*reporting, *wanted, *few]
        for run in wanted:
            if run.task_run_id not in self._has_task_artifact and len(self._has_task_artifact) >= MOST_TASK_ARTIFACTS:
                continue
            self._has_task_artifact.add(run.task_run_id)
            self._api.write(
                TASK_RUN_KEY, "markdown", pages.task_page(run), pages.task_summary(run), task_run_id=run.task_run_id
            )

    def _write_live_labels(self) -> None:
        if not self._state.is_final:
            with suppress(HTTPStatusError):  # of a busy server; the last ones say the same and more
                self._write_labels()

    def _write_last_labels(self) -> None:
        with suppress(HTTPStatusError):  # the next run of the flow writes them
            self._write_labels(is_last=True)

    def _write_labels(self, *, is_last: bool = False) -> None:
        pools = self._state.pools
        machines = [machine for pool in pools for machine in pool.machines.values()]
        use = self._state.utilisation
        self._api.label(
            {
                **({MEASURE_LABEL: use[0], PERCENT_LABEL: round(use[1], 1)} if use is not None else {}),
                COST_LABEL: self._state.usd,
                "skyward.pool_id": ",".join(filter(None, (pool.pool_id for pool in pools))),
                "skyward.provider": ",".join(sorted({machine.provider for machine in machines})),
                "skyward.hardware": self._state.hardware,
                "skyward.nodes": len(machines),
                FINAL_LABEL: is_last and self._is_bill_final,
            },
            self._label_seconds if is_last else LABEL_SECONDS,
        )


@cache
def _wait_at_exit() -> None:
    """Let the end of the process wait before Prefect ends its threads, which send events. They are registered in the
    same way, and earlier; `atexit` comes after them.
    """
    with suppress(RuntimeError):  # the process ends already
        threading._register_atexit(wait_for_late_reports)  # type: ignore[attr-defined]


def wait_for_late_reports() -> None:
    """Wait EXIT_SECONDS at most for what flow runs that have ended still have to write, once for each."""
    until = time.monotonic() + EXIT_SECONDS
    for report in list(_late):
        _late.discard(report)
        report.wait(max(0.0, until - time.monotonic()))


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _rows(data: Any) -> Any:
    return json.loads(data) if isinstance(data, str) else data
