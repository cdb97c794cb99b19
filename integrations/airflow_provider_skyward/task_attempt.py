"""One execution of a task: its pool, the pool's events in the task log, its bill in XCom, and its kill.

Threads: the pool's threads only fill a queue. The main thread drains it, and only the main thread talks to Airflow: the
connection for XCom supports neither several threads nor signal handlers.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Generator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from types import NoneType
from typing import TYPE_CHECKING, Any

import skyward_core as sky
from airflow_provider_skyward.links import CONSOLE_KEY, links_of
from airflow_provider_skyward.phases import Phases
from airflow_provider_skyward.plain_values import PLAIN
from airflow_provider_skyward.pool_keywords import PLACEHOLDER
from airflow_provider_skyward.progress import Progress
from airflow_provider_skyward.secrets import values_of

if TYPE_CHECKING:
    from airflow.sdk import Context

COST_KEY = "skyward_cost"
POOL_KEY = "skyward_pool"
"""XCom that is pushed before anything is rented: the pool's id finds the bill even if the task is killed."""


class Killed(BaseException):
    """Unwinds `execute` after a kill.

    A BaseException, as AirflowTaskTimeout is: raised in a signal handler, it must pass every `except Exception`.
    """


class TaskAttempt:
    """The pool of one execution, and its events.

    While the pool opens or closes, the main thread waits, and the thread of the pool's events writes them to the log.
    Otherwise the main thread writes them. Everything else happens in the main thread.
    """

    def __init__(self, log: Any, context: Context) -> None:
        self._log = log
        self._task_instance = context["ti"]  # pyright: ignore[reportTypedDictNotRequiredAccess]
        self._work = work_of(self._task_instance)
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._main = threading.current_thread()
        self._writing = threading.Lock()
        self._is_main_waiting = False
        """Whether the main thread waits until the pool is open, or closed."""
        self._pool: sky.ComputePool | None = None
        self._use: sky.PoolUse | None = None
        """The use of the pool by the calls of this try; None for detached calls, which outlive it."""
        self.credentials: sky.Provider | None = None
        """The provider with the credentials of a connection; None if it finds them in the worker's environment."""
        self._calls = 0
        self._provider = ""
        self._narrator = sky.Narrator()
        self._is_killed = False
        self.is_orphan = False
        """Whether Airflow hears nothing of this process any more, and the next try goes on with its call."""
        self._is_interruptible = False
        self.links: dict[str, str] = {CONSOLE_KEY: ""}
        """The links of the task instance that are known (`links.py`), by the keys of their XComs."""
        self._announced = ""
        """The pool whose id is in XCom."""
        self._owns_pool = True
        """Whether the pool is for this task instance alone. Of a pool that others use too, it pays a part."""
        self.pool_work: sky.Work | None = None
        """That of the setup task, if the pool is its pool: it bears what no task has used."""
        self._machines: tuple[sky.Node, ...] = ()
        self._opened_at = time.monotonic()
        self.progress = Progress(log, context, self._work)
        self._phases = Phases(log)
        self._last_bill: dict[str, Any] = {}

    def run(self, spec: sky.PoolSpec, calls: Sequence[sky.PendingCompute[Any]]) -> list[Any]:
        """Return the results, in order.

        Raises the exception of a call, Killed after `kill`, and the errors of opening a pool.
        """
        if not calls:  # `map_over` an empty list: no machines are needed
            return []
        self._owns_pool = spec.name is None or spec.name == PLACEHOLDER
        # The task log replaces the display; the pool's own display would write everything twice.
        self._pool = pool = sky.ComputePool.from_spec(
            _without_placeholder(spec).with_(display="quiet"),
            on_event=self._receive,
            credentials=self.credentials,
            secrets=values_of(spec),
            replace_object=PLAIN.replace,
            work=self._work,
            belongs_to=self.pool_work,
        )
        self._use = use = sky.PoolUse(pool)
        if not self._owns_pool:
            self.progress.live_cost = lambda: use.cost
        try:
            with self._phases.phase("provision"), self._interruptible(), self._events_written_at_once():
                use.open()
            self._note_open(pool)
            with self._phases.phase("call", pool_id=pool.id):
                with self._interruptible():
                    futures = use.submit_all(calls)
                self._calls = len(futures)
                return self._wait(futures)
        finally:
            with self._phases.phase("release", pool_id=pool.id), self._events_written_at_once():
                # an unconfirmed machine is in the log and in `bill`, and fails no task that has done its work
                try:
                    use.close()
                except sky.SkywardError as error:
                    self._log.warning("the pool was not left properly: %s", error)

    def kill(self) -> None:
        """Stop `run`. Called in a signal handler.

        It orders the machines' end. Then it wakes the main thread, or raises Killed where that may wait for machines.

        The reaper gets the order first: if a provider does not answer, closing the pool may take longer than Airflow
        lets this process live.
        """
        self._is_killed = True
        if self._pool is not None:
            self._pool.terminate_now()
        self._inbox.put(None)
        if self._is_interruptible:
            raise Killed

    def end(self) -> None:
        """Push the bill, and end the generation. Raises nothing: the work is done, or has failed for another reason."""
        self.push_bill()
        self.end_generation()

    def end_generation(self) -> None:
        """Write that no later try may adopt the calls: those of this class end with their process."""

    def bill(self) -> dict[str, Any] | None:
        """Return the bill as JSON data, None if no pool was opened.

        Units: USD, seconds, USD per hour of all nodes together; the pool's id finds its receipt. Of a pool that others
        may use, it has what the calls of this try have held. Detached calls outlive a try: of theirs it has what the
        task has cost on this pool so far, by the ledger. `is_final` is false if that may still change, or is not known.
        """
        final = self._pool.cost_final if self._pool is not None and self._owns_pool else None
        if final is None:
            return self._bill_of_a_part() if self._announced else None
        return {
            "is_final": True,
            "pool_id": self._pool.id if self._pool is not None else "",
            "cost_usd": final.total_cost,
            "seconds": round(final.total_seconds, 3),
            "hourly_rate": final.hourly_rate,
            "nodes": final.spot_count + final.ondemand_count,
            "spot_nodes": final.spot_count,
            "savings_usd": final.savings_vs_ondemand,
            "provider": self._provider,
            "calls": self._calls,
            "unconfirmed": (
                [] if self._pool is None or self._pool.unconfirmed is None else list(self._pool.unconfirmed.ids)
            ),
        }

    def _bill_of_a_part(self) -> dict[str, Any]:
        if self._use is not None:
            bill = self._use.bill()
            cost_usd, is_final = bill.cost_usd, bill.is_final
        else:
            parts = [part for part in self._parts_so_far() or [] if part.pool_id == self._announced]
            cost_usd = float(sum(part.cost_usd for part in parts))
            is_final = bool(parts) and all(part.is_final for part in parts)
        return self._placeholder(self._announced) | {
            "is_final": is_final,
            "cost_usd": cost_usd,
            "seconds": round(time.monotonic() - self._opened_at, 3),
            "hourly_rate": sum(node.instance.price_per_hour for node in self._machines),
            "nodes": len(self._machines),
            "spot_nodes": sum(node.instance.is_spot for node in self._machines),
            "provider": self._machines[0].instance.provider if self._machines else self._provider,
            "calls": self._calls,
            "share_of": "" if self._owns_pool or self._pool is None else str(self._pool.spec.name),
        }

    def _placeholder(self, pool_id: str) -> dict[str, Any]:
        """Return a bill of nothing, for readers of the XCom of a task that was killed before it could push its bill."""
        nothing = dict.fromkeys(("cost_usd", "seconds", "hourly_rate", "savings_usd"), 0.0)
        counts = dict.fromkeys(("nodes", "spot_nodes", "calls"), 0)
        return {"is_final": False, "pool_id": pool_id, **nothing, **counts, "provider": "", "unconfirmed": []}

    def push_bill(self) -> None:
        """Log and push the cost of this try, and of all tries of the task instance together. The ledger has them, also
        of tries that were killed.
        """
        # the ledger may be slow; only the main thread talks to Airflow, so the rest is not in a thread
        bill = sky.after_the_work("the bill", self._full_bill, self._log.warning)
        if bill is None:
            return
        try:
            self._show_bill(bill)
        except Exception:
            self._log.exception("the bill could not be shown")

    def _full_bill(self) -> dict[str, Any] | None:
        bill = self.bill()
        if bill is None:
            return None
        costs = self._costs_so_far()
        # a ledger that is away knows less
        costs[bill["pool_id"]] = max(bill["cost_usd"], costs.get(bill["pool_id"], 0.0))
        return bill | {"all_tries_usd": sum(costs.values()), "pools": sorted(costs), "tries": self._costs_by_try()}

    def _show_bill(self, bill: dict[str, Any]) -> None:
        costs = bill["pools"]
        figures = (bill["cost_usd"], bill["seconds"], bill["nodes"], bill["pool_id"])
        self._log.info("cost: %.6f USD, %.1f s, nodes: %d; of each machine: skyward receipt %s", *figures)
        if len(costs) > 1:
            self._log.info("cost of all tries: %.6f USD, for %d pools", bill["all_tries_usd"], len(costs))
        self._push(COST_KEY, bill)
        self._last_bill = bill
        self.progress.end(bill)

    def cost_fields(self) -> dict[str, Any]:
        """Return what the events of the task's assets say of its cost."""
        return {name: self._last_bill[name] for name in ("cost_usd", "pool_id", "seconds") if name in self._last_bill}

    def _note_open(self, pool: sky.ComputePool) -> None:
        """Push the id of a pool that was found open, and keep what the bill says of its machines."""
        self._announce(pool.id)
        self._machines = pool.lease.nodes

    def _announce(self, pool_id: str) -> None:
        """Push the pool's id before anything is rented: then the cost of this try is found even after a SIGKILL."""
        if pool_id == self._announced:
            return
        self._announced = pool_id
        costs = {other: cost for other, cost in self._costs_so_far().items() if other != pool_id}
        receipt = f"skyward receipt {pool_id}"
        self._log.info("`%s` shows at any time the state and the cost of each machine", receipt)
        if costs:
            self._log.info(
                "earlier tries of this task have cost %.6f USD: %s", sum(costs.values()), ", ".join(sorted(costs))
            )
        value = {
            "pool_id": pool_id,
            "receipt": receipt,
            "work": self._work.labels(),
            "earlier_tries_usd": sum(costs.values()),
            "earlier_pools": sorted(costs),
        }
        self._push(POOL_KEY, value)
        for key, link in links_of(self._work).items():
            self.links[key] = link
            self._push(key, link)
        earlier = {"all_tries_usd": sum(costs.values()), "pools": sorted({*costs, pool_id}), "tries": {}}
        self._push(COST_KEY, self._placeholder(pool_id) | earlier)

    def _parts_so_far(self) -> list[sky.CostPart] | None:
        """Return what all tries have cost so far, by the ledger; None if it does not answer."""
        try:
            return sky.cost_parts(replace(self._work, attempt=""))
        except sky.LedgerError as error:  # `skyward cost --by task` shows it when the ledger answers again
            self._log.warning("the cost of earlier tries is not known: %s", error)
            return None

    def _costs_so_far(self) -> dict[str, float]:
        costs: dict[str, float] = {}
        for part in self._parts_so_far() or []:
            costs[part.pool_id] = costs.get(part.pool_id, 0.0) + float(part.cost_usd)
        return costs

    def _costs_by_try(self) -> dict[str, float]:
        """Return the cost of each try so far, in USD: that of the pools that it has opened, by the ledger."""
        tries = map(str, range(1, int(self._work.attempt) + 1))
        try:
            return {number: sum(sky.cost_of(replace(self._work, attempt=number)).values()) for number in tries}
        except sky.LedgerError:  # the log has said it
            return {}

    def _push(self, key: str, value: dict[str, Any] | str) -> None:
        """Store an XCom. A kill waits until it is stored: if a request to Airflow is cut off, Airflow's next request
        would read this one's answer.

        In the thread of the pool's events signal handlers raise nothing.
        """
        if threading.current_thread() is not self._main:
            self._store(key, value)
            return
        was_interruptible, self._is_interruptible = self._is_interruptible, False
        self._store(key, value)
        self._is_interruptible = was_interruptible
        if was_interruptible and self._is_killed:
            raise Killed

    def _store(self, key: str, value: dict[str, Any] | str) -> None:
        try:
            self._task_instance.xcom_push(key=key, value=value)
        except Exception:  # the work is done and paid for, or failed for a more important reason
            self._log.exception("XCom %s could not be stored: %s", key, value)

    @contextmanager
    def _interruptible(self) -> Generator[None]:
        """Let a kill raise in the block: the block waits for machines or packs arguments, and makes no request to
        Airflow that could be cut off.
        """
        self._is_interruptible = True
        try:
            if self._is_killed:
                raise Killed
            yield
        finally:
            self._is_interruptible = False

    def _wait(self, futures: Sequence[Future[Any]]) -> list[Any]:
        waiting = {future: number for number, future in enumerate(futures, 1)}
        for future in futures:
            future.add_done_callback(self._inbox.put)
        while waiting and not self._is_killed:
            message = self._inbox.get()
            if not isinstance(message, Future):
                with self._writing:
                    self._write(message)
                self.progress.tick()
            elif error := _error_of(message):
                if len(futures) > 1:
                    error.add_note(f"in call {waiting[message]} of {len(futures)} (map_over)")
                raise error
            else:
                del waiting[message]
        if self._is_killed:
            raise Killed
        return [future.result() for future in futures]

    def _receive(self, event: sky.SkywardEvent) -> None:
        with self._writing:
            if self._is_main_waiting:
                self._write(event)
                return
        self._inbox.put(event)

    @contextmanager
    def _events_written_at_once(self) -> Generator[None]:
        """Have the thread of the pool's events write the events of the block.

        An exception that a signal handler raises does not interrupt that thread.
        """
        with self._writing:
            while not self._inbox.empty():
                self._write(self._inbox.get())
            self._is_main_waiting = True
        try:
            yield
        finally:
            with self._writing:
                self._is_main_waiting = False

    def _write(self, message: Any) -> None:
        if isinstance(message, sky.InstanceProvisioned):
            self._provider = message.provider
            if message.console_url and not self.links.get(CONSOLE_KEY):
                self.links[CONSOLE_KEY] = message.console_url
                self._push(CONSOLE_KEY, message.console_url)
        if isinstance(message, sky.InfraCreating):
            self._announce(message.pool_id)
        if isinstance(message, (Future, NoneType)):
            return
        self.progress.see(message)
        if isinstance(message, sky.BootstrapStarting):
            self._phases.machines_are_there(provider=self._provider)
        if record := self._narrator.tell(message):
            self._log.log(record[0], "%s", record[1])


def work_of(task_instance: Any) -> sky.Work:
    """Return the work of one try of a task instance."""
    index = task_instance.map_index
    return sky.Work(
        system="airflow",
        workflow=task_instance.dag_id,
        run=task_instance.run_id,
        task=task_instance.task_id,
        task_run="" if index is None or index < 0 else str(index),
        attempt=str(task_instance.try_number),
    )


def _error_of(future: Future[Any]) -> BaseException | None:
    return RuntimeError("the call was cancelled") if future.cancelled() else future.exception()


def _without_placeholder(spec: sky.PoolSpec) -> sky.PoolSpec:
    """Return the spec of a pool that only this process uses: it has no name, and so is not kept warm."""
    return spec.with_(name=None, keep_warm=0.0) if spec.name == PLACEHOLDER else spec
