"""One execution of a task: its pool, the pool's events in the task log, its bill in XCom, and its kill.

Threads: the pool's threads only fill a queue. The main thread drains it, and only the main thread talks to Airflow: the
connection for XCom supports neither several threads nor signal handlers.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from types import NoneType
from typing import TYPE_CHECKING, Any

import skyward_core as sky
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
        self._work = _work_of(self._task_instance)
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._main = threading.current_thread()
        self._writing = threading.Lock()
        self._is_main_waiting = False
        """Whether the main thread waits until the pool is open, or closed."""
        self._pool: sky.ComputePool | None = None
        self._calls = 0
        self._provider = ""
        self._narrator = sky.Narrator()
        self._is_killed = False
        self._is_interruptible = False

    def run(self, spec: sky.PoolSpec, calls: Sequence[sky.PendingCompute[Any]]) -> list[Any]:
        """Return the results, in order.

        Raises the exception of a call, Killed after `kill`, and the errors of opening a pool.
        """
        if not calls:  # `map_over` an empty list: no machines are needed
            return []
        # The task log replaces the display; the pool's own display would write everything twice.
        self._pool = pool = sky.ComputePool.from_spec(
            spec.with_(display="quiet"),
            on_event=self._receive,
            secrets=values_of(spec),
            replace_object=_plain_function,
            work=self._work,
        )
        try:
            self._log.info("::group::Provisioning")
            try:
                with self._interruptible(), self._events_written_at_once():
                    pool.open()
            finally:
                self._log.info("::endgroup::")
            with self._interruptible():
                futures = pool.submit_all(calls)
            self._calls = len(futures)
            return self._wait(futures)
        finally:
            with self._events_written_at_once():
                # an unconfirmed machine is in the log and in `bill`, and fails no task that has done its work
                pool.hand_over()

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

    def bill(self) -> dict[str, Any] | None:
        """Return the bill as JSON data, None if no pool was opened.

        Units: USD, seconds, USD per hour of all nodes together; the pool's id finds its receipt.
        """
        final = self._pool.cost_final if self._pool is not None else None
        if final is None:
            return None
        return {
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

    def push_bill(self) -> None:
        """Log and push the cost of this try, and of all tries of the task instance together. The ledger has them, also
        of tries that were killed.
        """
        bill = self.bill()
        if bill is None:
            return
        costs = self._costs_so_far() | {bill["pool_id"]: bill["cost_usd"]}
        bill |= {"all_tries_usd": sum(costs.values()), "pools": sorted(costs)}
        figures = (bill["cost_usd"], bill["seconds"], bill["nodes"], bill["pool_id"])
        self._log.info("cost: %.6f USD, %.1f s, nodes: %d; of each machine: skyward receipt %s", *figures)
        if len(costs) > 1:
            self._log.info("cost of all tries: %.6f USD, for %d pools", bill["all_tries_usd"], len(costs))
        self._push(COST_KEY, bill)

    def _push_pool(self, pool_id: str) -> None:
        """Push the pool's id before anything is rented: then the cost of this try is found even after a SIGKILL."""
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

    def _costs_so_far(self) -> dict[str, float]:
        try:
            return sky.cost_of(replace(self._work, attempt=""))
        except sky.LedgerError as error:  # `skyward cost --by task` shows it when the ledger answers again
            self._log.warning("the cost of earlier tries is not known: %s", error)
            return {}

    def _push(self, key: str, value: dict[str, Any]) -> None:
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

    def _store(self, key: str, value: dict[str, Any]) -> None:
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
        if isinstance(message, sky.InfraCreating):
            self._push_pool(message.pool_id)
        if isinstance(message, (Future, NoneType)):
            return
        if record := self._narrator.tell(message):
            self._log.log(record[0], "%s", record[1])


def _work_of(task_instance: Any) -> sky.Work:
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


def _plain_function(obj: Any) -> Any:
    """For the pickler: return the function of a `@task` object that it uses, because the object would bring Airflow
    along.
    """
    return obj.function if getattr(type(obj), "_airflow_is_task_decorator", False) else NotImplemented
