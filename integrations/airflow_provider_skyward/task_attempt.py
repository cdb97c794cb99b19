"""One execution of a task: its pool, the pool's events in the task log, its bill in XCom, and its kill.

Threads: the pool's threads only fill a queue. The main thread drains it, and only the main thread talks to Airflow: the
connection for XCom supports neither several threads nor signal handlers.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from types import NoneType
from typing import TYPE_CHECKING, Any

import skyward_core as sky
from airflow_provider_skyward.airflow_compat import is_supervisor_gone, known_level
from airflow_provider_skyward.bills import COST_KEY, Cost, bill_of, costs_of, usd, whole_pool_usd
from airflow_provider_skyward.links import CONSOLE_KEY, links_of
from airflow_provider_skyward.phases import Phases
from airflow_provider_skyward.plain_values import PLAIN
from airflow_provider_skyward.pool_keywords import PLACEHOLDER
from airflow_provider_skyward.progress import Progress
from airflow_provider_skyward.secrets import values_of
from airflow_provider_skyward.task_log import TaskLog, alarm_waits

if TYPE_CHECKING:
    from airflow.sdk import Context

POOL_KEY = "skyward_pool"
"""XCom that is pushed before anything is rented: the pool's id finds the bill even if the task is killed."""

SUPERVISOR_SECONDS = 2.0
"""The pause between two looks at the supervisor, at least: a silent function makes no request that would fail."""


class Killed(BaseException):
    """Unwinds `execute` after a kill.

    A BaseException, as AirflowTaskTimeout is: raised in a signal handler, it must pass every `except Exception`.
    """


class SupervisorGone(RuntimeError):
    """The process does not go on beside the next try, of which it would hear nothing."""


class TaskAttempt:
    """The pool of one execution, and its events.

    While the pool opens or closes, the main thread waits, and the thread of the pool's events writes them to the log.
    Otherwise the main thread writes them. Everything else happens in the main thread.
    """

    def __init__(self, log: Any, context: Context) -> None:
        self._log = TaskLog(log)
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
        self.is_broadcast = False
        """Whether the one call is made on each worker at once."""
        self._wanted_calls = 0
        """How many calls there will be; 0 if all nodes have one, or none is to have any."""
        self._provider = ""
        self._narrator = sky.Narrator()
        self._is_killed = False
        self.is_orphan = False
        """Whether Airflow hears nothing of this process any more, and the next try goes on with its call."""
        self._is_interruptible = False
        self.links: dict[str, str] = {CONSOLE_KEY: ""}
        """The links of the task instance that are known (`links.py`), by the keys of their XComs."""
        self._has_opened = False
        self._announced = ""
        """The pool whose id is in XCom."""
        self._owns_pool = True
        """Whether the pool is for this task instance alone. Of a pool that others use too, it pays a part."""
        self.pool_work: sky.Work | None = None
        """That of the setup task, if the pool is its pool: it bears what no task has used."""
        self._machines: tuple[sky.Node, ...] = ()
        self._opened_at = time.monotonic()
        self.progress = Progress(self._log, context, self._work)
        self._phases = Phases(self._log)
        self._last_bill: dict[str, Any] = {}
        self._stays_warm = ""
        """What this execution has left running, in words."""

    def run(self, spec: sky.PoolSpec, calls: Sequence[sky.PendingCompute[Any]]) -> list[Any]:
        """Return the results, in order.

        Raises the exception of a call, Killed after `kill`, and the errors of opening a pool.
        """
        if not calls:  # `map_over` an empty list: no machines are needed
            return []
        self._owns_pool = spec.name is None or spec.name == PLACEHOLDER
        pool = self._pool_of(_without_placeholder(spec), belongs_to=self.pool_work)
        self._use = use = sky.PoolUse(pool)
        self._wanted_calls = 0 if self.is_broadcast else len(calls)
        if not self._owns_pool:
            self.progress.live_cost = lambda: use.cost
        try:
            self._open(use.open)
            with self._phases.phase("call", pool_id=pool.id):
                if self.is_broadcast and calls[0].forms_group:
                    return list(self._wait([self._grouped(use, calls[0])])[0])
                with self._interruptible():
                    futures = use.submit_broadcast(calls[0]) if self.is_broadcast else use.submit_all(calls)
                self._calls = len(futures)
                return self._wait(futures)
        finally:
            self._end(use.close)

    def _grouped(self, use: sky.PoolUse, call: sky.PendingCompute[Any]) -> Future[tuple[Any, ...]]:
        """Return the future of a call whose workers form a group: after the loss of a node all of them run again."""
        whole: Future[tuple[Any, ...]] = Future()

        def submit(again: sky.PendingCompute[Any]) -> list[sky.CallFuture[Any]]:
            ranks = use.submit_broadcast(again)
            self._calls = len(ranks)
            return ranks

        def work() -> None:
            try:
                whole.set_result(use.pool.broadcast(call, submit=submit))
            except BaseException as error:  # it is that of the call, and is raised by the main thread
                whole.set_exception(error)

        # a daemon: after a kill it waits for ranks that the end of the pool ends
        sky.in_thread("skyward-broadcast", work)
        return whole

    def _pool_of(self, spec: sky.PoolSpec, belongs_to: sky.Work | None = None) -> sky.ComputePool:
        """Make the pool of this execution, which is not open: `belongs_to` bears what no call has held."""
        self._pool = sky.ComputePool.from_spec(
            spec.with_(display="quiet"),  # the task log replaces it, which would have everything twice
            on_event=self._receive,
            credentials=self.credentials,
            secrets=values_of(spec),
            replace_object=PLAIN.replace,
            work=self._work,
            belongs_to=belongs_to,
        )
        return self._pool

    def _open(self, open_pool: Callable[[], object]) -> None:
        """Open the pool, and keep what the bill says of its machines."""
        with self._phases.phase("provision"), self._interruptible(), self._events_written_at_once():
            open_pool()
        self._has_opened = True
        self._note_open()

    def _note_open(self) -> None:
        assert self._pool is not None
        self._announce(self._pool.id)  # of a pool that was found open
        self._machines = self._pool.lease.nodes
        if self._owns_pool and self._wanted_calls and (warning := idle_machines(self._machines, self._wanted_calls)):
            self._log.warning("%s", warning)

    def _end(self, leave_pool: Callable[[], object] | None, to_release: str = "") -> None:
        """Leave the pool, and end the machines of the pool `to_release`, whichever process has rented them.

        Raises no error of that: it is in the log, machines that are not confirmed gone are in the bill, and neither
        fails a task that has done its work.
        """
        pool_id = to_release or ("" if self._pool is None else self._pool.id)
        with self._phases.phase("release", pool_id=pool_id), self._events_written_at_once():
            try:
                if leave_pool is not None:
                    leave_pool()
            except sky.SkywardError as error:
                self._log.warning("the pool was not left properly: %s", error)
            try:
                if to_release:
                    sky.release(to_release, credentials=self.credentials)
            except sky.SkywardError as error:
                self._log.warning(
                    "the pool %s could not be ended: it ends with its lease or its warm time; `skyward stop %s` ends it"
                    " at once: %s",
                    pool_id,
                    pool_id,
                    error,
                )
        self._stays_warm = "" if to_release or self._pool is None else _what_stays_warm(self._pool)

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

    def push_bill(self) -> None:
        """Log and push the cost of this try, and of all tries of the task instance together. The ledger has them, also
        of tries that were killed.
        """
        if not self._announced:  # no pool was asked for
            return
        # the ledger may be slow; only the main thread talks to Airflow, so the rest is not in a thread
        bill = sky.after_the_work("the bill", self._final_bill, self._log.warning)
        if bill is None:
            return
        try:
            self._show_bill(bill)
        except Exception:
            self._log.exception("the bill could not be shown")

    def _final_bill(self) -> dict[str, Any]:
        costs = costs_of(self._work, self._log)
        bill = self._bill(costs, None if self._use is None else self._use.bill())
        if not self._owns_pool:
            bill["pool_cost_usd"] = whole_pool_usd(self._announced, self._log)
        return bill

    def _bill(self, costs: Sequence[Cost] | None, use: sky.UseBill | None = None) -> dict[str, Any]:
        """Return the bill as JSON data. `use` is that of the use, None before the pool is open.

        Units: USD, seconds, USD per hour of all nodes together; the pool's id finds its receipt. Of a pool that others
        may use, it has what the calls of this try have held. Detached calls outlive a try: their bill is that of the
        tries from the one that has begun them. `is_final` is false if that may still change, or is not known.
        """
        pool, nodes = self._pool, [node.instance for node in self._machines]
        final = None if pool is None else pool.cost_final
        tries = [str(number) for number in range(self._first_try(), int(self._work.attempt) + 1)]
        seconds = time.monotonic() - self._opened_at  # with the search for machines, as those of a pool of its own
        return bill_of(self._announced, tries, costs, use) | {
            "utilisation": self.progress.utilisation(),
            "seconds": round(final.total_seconds if final is not None and self._owns_pool else seconds, 3),
            "hourly_rate": sum(node.price_per_hour for node in nodes) if final is None else final.hourly_rate,
            "nodes": len(nodes) if final is None else final.spot_count + final.ondemand_count,
            "spot_nodes": sum(node.is_spot for node in nodes) if final is None else final.spot_count,
            "savings_usd": final.savings_vs_ondemand if final is not None and self._owns_pool else 0.0,
            "provider": nodes[0].provider if nodes else self._provider,
            "calls": self._calls,
            "share_of": "" if self._owns_pool or pool is None else str(pool.spec.name),
            "unconfirmed": [] if pool is None or pool.unconfirmed is None else list(pool.unconfirmed.ids),
        }

    def _first_try(self) -> int:
        """Return the number of the try that has begun the calls of this execution."""
        return int(self._work.attempt)

    def _show_bill(self, bill: dict[str, Any]) -> None:
        figures = (bill["cost_usd"], bill["seconds"], bill["nodes"], bill["pool_id"])
        self._log.info("cost: %.6f USD, %.1f s, nodes: %d; of each machine: skyward receipt %s", *figures)
        if len(bill["tries"]) > 1:
            self._log.info("cost of all tries: %.6f USD, for %d pools", bill["all_tries_usd"], len(bill["pools"]))
        if self._stays_warm:
            self._log.info("%s; the machines cost %.4f USD per hour", self._stays_warm, bill["hourly_rate"])
        self._push(COST_KEY, bill)
        self._last_bill = bill
        self.progress.end(bill)

    def cost_fields(self) -> dict[str, Any]:
        """Return what the events of the task's assets say of its cost."""
        return {name: self._last_bill[name] for name in ("cost_usd", "pool_id", "seconds") if name in self._last_bill}

    def _announce(self, pool_id: str) -> None:
        """Push the pool's id before anything is rented: then the cost of this try is found even after a SIGKILL."""
        if pool_id == self._announced:
            return
        self._announced = pool_id
        costs = costs_of(self._work, self._log)
        earlier = [one for one in costs or () if one.attempt != self._work.attempt]
        pools = sorted({one.pool_id for one in earlier})
        receipt = f"skyward receipt {pool_id}"
        self._log.info("`%s` shows at any time the state and the cost of each machine", receipt)
        if earlier:
            self._log.info("earlier tries of this task have cost %.6f USD: %s", usd(earlier), ", ".join(pools))
        value = {
            "pool_id": pool_id,
            "receipt": receipt,
            "work": self._work.labels(),
            "earlier_tries_usd": None if costs is None else usd(earlier),
            "earlier_pools": pools,
        }
        self._push(POOL_KEY, value)
        for key, link in links_of(self._work).items():
            self.links[key] = link
            self._push(key, link)
        self._push(COST_KEY, self._bill(costs))  # for readers of a task that is killed before it can push its bill

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
            with alarm_waits():
                self._task_instance.xcom_push(key=key, value=sky.shown_text.visible_data(value))
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
            message = self._next_message()
            if not isinstance(message, Future):
                with self._writing:
                    self._write(message)
                self.progress.tick()
            elif error := _error_of(message):
                if len(futures) > 1:
                    kind = "broadcast" if self.is_broadcast else "map_over"
                    error.add_note(f"in call {waiting[message]} of {len(futures)} ({kind})")
                raise error
            else:
                del waiting[message]
        if self._is_killed:
            raise Killed
        return [future.result() for future in futures]

    def _next_message(self) -> Any:
        """Return what comes next. Raises SupervisorGone."""
        while True:
            try:
                return self._inbox.get(timeout=SUPERVISOR_SECONDS)
            except queue.Empty:
                self._refuse_without_supervisor()

    def _refuse_without_supervisor(self) -> None:
        if is_supervisor_gone():
            raise SupervisorGone("Airflow's supervisor of this task has died: Airflow begins the next try")

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
            self._log.log(known_level(record[0]), "%s", record[1])


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


def idle_machines(nodes: Sequence[sky.Node], calls: int) -> str:
    """Return a warning if there are fewer calls than nodes: the others are paid for, and have nothing to do."""
    if (idle := len(nodes) - calls) <= 0:
        return ""
    names = ", ".join(f"node {number} ({node.instance.id})" for number, node in enumerate(nodes))
    prices = sorted(node.instance.price_per_hour for node in nodes)
    least = "" if prices[0] == prices[-1] else "at least "
    return (
        f"{calls} call{'s' if calls > 1 else ''} for {len(nodes)} nodes: {idle} of {names}"
        f" {'has' if idle == 1 else 'have'} nothing to do, for {least}{sum(prices[:idle]):.4f} USD per hour. Write"
        f" nodes={calls}, broadcast=True for the same call on each node, or map_over= for one call for each item"
    )


def _what_stays_warm(pool: sky.ComputePool) -> str:
    """Return in words that a pool goes on after this process has left it; "" if it does not."""
    name, seconds, receipt = pool.spec.name, pool.spec.keep_warm, pool.receipt
    if name is None or not seconds or (receipt is not None and receipt["ended_at"] is not None):
        return ""
    return f"the pool {name} stays warm for {seconds:g} s after its last user; `skyward stop {name}` ends it at once"


def _error_of(future: Future[Any]) -> BaseException | None:
    return RuntimeError("the call was cancelled") if future.cancelled() else future.exception()


def _without_placeholder(spec: sky.PoolSpec) -> sky.PoolSpec:
    """Return the spec of a pool that only this process uses: it has no name, and so is not kept warm."""
    return spec.with_(name=None, keep_warm=0.0) if spec.name == PLACEHOLDER else spec
