"""One pool for several tasks of a DAG run: `skyward_pool`, and the setup and the teardown that it consists of.

    with skyward_pool(accelerator="A100") as pool:
        SkywardOperator(task_id="train", python_callable=train, skyward_pool=pool)

No process holds the pool between two tasks. Its warm time does, which each use renews (docs/decisions/0039).
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, Unpack

from airflow.sdk import BaseOperator, TaskGroup
from airflow.sdk.exceptions import AirflowException

import skyward_core as sky
from airflow_provider_skyward.bills import Cost, cost_of_part, make_final
from airflow_provider_skyward.connections import credentials_of, ledger_of
from airflow_provider_skyward.generations import pool_name_of
from airflow_provider_skyward.operators import SkywardOperator, names_pool_keywords
from airflow_provider_skyward.pool_keywords import PLACEHOLDER, as_keywords, is_template
from airflow_provider_skyward.retry import raise_as_airflows
from airflow_provider_skyward.shared_pools import setup_id_of, setup_of, setup_work
from airflow_provider_skyward.stop_order import order_stop
from airflow_provider_skyward.task_attempt import Killed, TaskAttempt, work_of

if TYPE_CHECKING:
    from airflow.sdk import Context, XComArg

    from airflow_provider_skyward.keyword_types import SetupKeywords

HOLD_SECONDS = 1800.0
"""For how long machines wait for the next task by default. A task that comes later rents anew."""
IDLE_SECONDS = 600.0
"""The pool's own clock (`timeout`) counts from the last call, so it ends later than `hold`, which counts from the last
process.
"""
RELEASE_RETRIES = 3
RELEASE_RETRY_DELAY = timedelta(seconds=30)


class SkywardCreatePool(SkywardOperator):
    """Open a pool for the tasks downstream, as their setup, and leave it warm.

    Takes the keywords of the pool that `SkywardOperator` takes, and `hold`: for how many seconds the machines wait for
    the next task. Each task that uses the pool renews it, and it bounds what a teardown that never runs can cost. The
    machines' own `timeout` is longer than `hold` by default. The pool's name is made of DAG and run.

    With a `name`, which may be a template, the pool is shared with all runs and programs that use this name: the setup
    joins it if it is open, and neither setup nor teardown ends it. `keep_warm` takes the place of `hold` then.

    Its result in XCom is `{"name": ..., "pool_id": ...}`. Give `create.output` to the tasks and to the teardown. If it
    fails or is killed, it ends the pool of its run, because Airflow then runs no teardown.

        create = SkywardCreatePool(task_id="create", accelerator="A100")
    """

    is_pool_setup: ClassVar[bool] = True
    is_pool_named: bool = False
    """Whether the user has named the pool, which then is not that of one DAG run."""
    ui_color = "#d7e6f2"

    @names_pool_keywords
    def __init__(self, *, hold: float | None = None, **kwargs: Unpack[SetupKeywords]) -> None:
        keywords: dict[str, Any] = {**kwargs}
        given = as_keywords(kwargs.get("spec")) | keywords
        is_named = given.get("name") is not None
        waits = _seconds_of_waiting(given, hold, is_named=is_named)
        timeout = given.get("timeout")
        keywords["keep_warm"] = waits
        if timeout is None and isinstance(waits, (int, float)):
            keywords["timeout"] = waits + IDLE_SECONDS
        super().__init__(python_callable=_no_function, deferrable=False, durable=False, **keywords)
        self.is_setup = True
        self.is_pool_named = is_named

    def execute(self, context: Context) -> dict[str, str]:
        """Open the pool, or find it warm, and leave it warm; return its name and its id."""
        with ledger_of(self.skyward_conn_id):
            return self._open(context)

    def _open(self, context: Context) -> dict[str, str]:
        self._attempt = attempt = SetupAttempt(self.log, context)
        self._take_links(attempt)
        try:
            attempt.credentials = self._credentials()
            return attempt.open_and_leave(self.pool_spec)
        except Killed:
            raise AirflowException("the task was asked to stop before the pool was ready; the pool is ended") from None
        except sky.SkywardError as error:
            raise_as_airflows(error, self)
            raise
        finally:
            self._attempt = None
            attempt.push_bill()


class SetupAttempt(TaskAttempt):
    """One execution of a setup: it owns the pool of its run until it has succeeded."""

    _is_of_run = True
    """Whether the pool is that of one DAG run. Others may use one to which the user has given a name."""

    def open_and_leave(self, spec: sky.PoolSpec) -> dict[str, str]:
        """Open the pool of this setup and leave it warm; end it after any error, and after a kill.

        Raises the errors of opening a pool, BudgetExceeded if its money does not pay for the warm time, and Killed.
        """
        self._is_of_run = spec.name is None or spec.name == PLACEHOLDER
        name = pool_name_of(self._work) if self._is_of_run else str(spec.name)
        self._owns_pool = False
        pool = self._pool_of(spec.with_(name=name), belongs_to=self._work if self._is_of_run else None)
        try:
            self._open(pool.open)
            self._leave_warm(pool)
        except BaseException:
            is_open = self._has_opened or pool.is_active  # a kill may come right after the opening
            self._end(pool.hand_over, pool.id if is_open and self._is_of_run else "")
            raise
        self._log.info("the pool %s is warm for %g s, as %s; each task renews that", pool.id, spec.keep_warm, name)
        return {"name": name, "pool_id": pool.id}

    def _first_try(self) -> int:
        """Return 1: its part of the cost is what the tasks leave, in all of its tries."""
        return 1

    def _leave_warm(self, pool: sky.ComputePool) -> None:
        with self._phases.phase("release", pool_id=pool.id), self._events_written_at_once():
            pool.close()
        if self._is_killed:
            raise Killed
        if pool.receipt is not None and pool.receipt["ended_at"] is not None:
            raise sky.BudgetExceeded(
                f"the pool {pool.id} was ended again, because its money does not pay for {pool.spec.keep_warm:g} s of"
                " warm time (hold)"
            )

    def kill(self) -> None:
        """As `TaskAttempt.kill`; a process of its own ends the pool, which SIGKILL to this process group leaves."""
        self._is_killed = True
        if self._pool is not None:
            self._pool.terminate_now()
            if self._is_of_run:
                order_stop(str(self._pool.spec.name), self.credentials)
        self._inbox.put(None)
        if self._is_interruptible:
            raise Killed


class SkywardReleasePool(BaseOperator):
    """End the pool of a `SkywardCreatePool`, as its teardown: also after a task that has failed.

    Its result in XCom is the bill of the pool: `cost_usd`, `pools` by id, and `shares` by task id, which add up to it.
    The share of the setup is what no call has used. It reads no XCom: an altered one does not keep the machines.

    It leaves a pool to which the user has given a name, because other runs may use it. Then the bill is the part of
    this run.

    It is tried again three times unless you say otherwise. After that its task has failed, and the DAG run has not:
    with `on_failure_fail_dagrun` Airflow decides by teardowns alone, and failed work would be a success.

        SkywardReleasePool(task_id="release", skyward_pool=create.output)
    """

    template_fields = ("provider", "skyward_conn_id", "provider_conn_id", "pool_name")
    ui_color = "#d7e6f2"

    def __init__(self, *, skyward_pool: XComArg, **kwargs: Any) -> None:
        setup = setup_of(skyward_pool)
        kwargs = {"retries": RELEASE_RETRIES, "retry_delay": RELEASE_RETRY_DELAY} | kwargs
        super().__init__(**kwargs)
        self.pool_setup_id = setup.task_id
        self.provider = setup.plain_fields.get("provider")
        self.skyward_conn_id, self.provider_conn_id = setup.skyward_conn_id, setup.provider_conn_id
        self.pool_name = setup.plain_fields["name"] if setup.is_pool_named else None
        self._is_setup_mapped = setup.get_closest_mapped_task_group() is not None
        self.as_teardown(setups=setup)  # pyright: ignore[reportArgumentType]

    def execute(self, context: Context) -> dict[str, Any]:
        """End the machines, wait until they are confirmed gone, and return the bill."""
        with ledger_of(self.skyward_conn_id):
            return self._end(context)

    def _end(self, context: Context) -> dict[str, Any]:
        instance = context["ti"]  # pyright: ignore[reportTypedDictNotRequiredAccess]
        work = setup_work(work_of(instance), self.pool_setup_id, is_mapped=self._is_setup_mapped)
        if self.pool_name is not None:
            bill = self._part_of_run(work)
            self._finish_bills(work)
            return bill
        name = pool_name_of(work)
        self.log.info("ending the pool %s", name)
        providers = sky.PoolSpec.of(provider=self.provider).providers
        provider = providers if len(providers) > 1 else next(iter(providers), None)
        credentials = credentials_of(self.provider_conn_id, provider)
        sky.release(name, credentials=credentials)
        for pool_id in self._pools_left(work):  # an earlier pool of the name, which a task has found broken
            sky.release(pool_id, credentials=credentials)
        bill = self._bill(work)
        self.log.info("cost of the pool: %.6f USD; by task: %s", bill["cost_usd"], bill["shares"])
        self._finish_bills(work)
        return bill

    def _finish_bills(self, setup: sky.Work) -> None:
        """Make the bills of the setup and of the tasks final that could not do it themselves."""
        tasks = {self.pool_setup_id, *_users_of(self.dag, self.pool_setup_id)}
        try:
            found: dict[sky.Work, list[Cost]] = {}
            for part in sky.cost_parts(_run_of(setup)):
                if part.work.task in tasks and (not self._is_setup_mapped or part.work.task_run == setup.task_run):
                    found.setdefault(replace(part.work, attempt=""), []).append(cost_of_part(part))
            for work, costs in found.items():
                make_final(work, costs)
        except Exception:  # the pool is ended, and the ledger has the bills
            self.log.exception("the bills of some tasks are not final")

    def _part_of_run(self, setup: sky.Work) -> dict[str, Any]:
        """Return the bill of this run for a pool that is left to its other users."""
        costs = self._costs(setup)
        shares = {task_id: sum(its.values()) for task_id, its in costs.items()}
        pools: dict[str, float] = {}
        for its in costs.values():
            for pool_id, usd in its.items():
                pools[pool_id] = pools.get(pool_id, 0.0) + usd
        bill = {"cost_usd": sum(pools.values()), "pools": pools, "shares": shares}
        self.log.info(
            "the pool %s is left: it ends after its last user, when its keep_warm is over; `skyward stop %s` ends it at"
            " once. Cost of the calls of this run: %.6f USD; by task: %s",
            self.pool_name,
            self.pool_name,
            bill["cost_usd"],
            shares,
        )
        return bill

    def _pools_left(self, setup: sky.Work) -> list[str]:
        ids = {pool_id for costs in self._costs(setup).values() for pool_id in costs}
        return [one["pool_id"] for one in sky.receipts_of(_run_of(setup)) if one["pool_id"] in ids and one["left"]]

    def _bill(self, setup: sky.Work) -> dict[str, Any]:
        costs = self._costs(setup)
        ids = {pool_id for its in costs.values() for pool_id in its}
        receipts = sky.receipts_of(_run_of(setup))
        pools = {one["pool_id"]: one["total_cost_usd"] for one in receipts if one["pool_id"] in ids}
        shares = {task_id: sum(its.values()) for task_id, its in costs.items()}
        return {"cost_usd": sum(pools.values()), "pools": pools, "shares": shares}

    def _costs(self, setup: sky.Work) -> dict[str, dict[str, float]]:
        """Return the costs of the setup and of each task that uses its pool, by pool id."""
        tasks = (self.pool_setup_id, *_users_of(self.dag, self.pool_setup_id))
        return {task_id: sky.cost_of(replace(setup, task=task_id)) for task_id in tasks}


def _run_of(setup: sky.Work) -> sky.Work:
    return replace(setup, task="", task_run="")


@contextmanager
def skyward_pool(
    group_id: str = "skyward_pool", *, hold: float | None = None, **kwargs: Unpack[SetupKeywords]
) -> Generator[Any]:
    """Make a task group whose tasks share one pool: a setup that opens it, and a teardown that ends it.

    Yields what `skyward_pool=` of `SkywardOperator` and `@task.skyward` takes. Takes the keywords of
    `SkywardCreatePool`. All tasks of the block come between setup and teardown, also those that use no pool.

        with skyward_pool(accelerator="A100", hold=600) as pool:
            task.skyward(skyward_pool=pool)(score).expand(candidate=[1, 2, 3])

    With `name` and `keep_warm` the pool is shared with other runs too, and goes on after this one.
    """
    with TaskGroup(group_id, add_suffix_on_collision=True) as group:
        keywords: dict[str, Any] = {"task_id": "create_pool", **kwargs}
        create = SkywardCreatePool(hold=hold, **keywords)
        release = SkywardReleasePool(task_id="release_pool", skyward_pool=create.output)
        yield create.output
        _wire(group, create, release)


def _wire(group: TaskGroup, create: BaseOperator, release: BaseOperator) -> None:
    """Put all tasks of a group between its setup and its teardown.

    Airflow's own `with teardown:` leaves out mapped tasks, and tasks before one outside of the block.
    """
    own = (create.task_id, release.task_id)
    tasks = {task.task_id: task for task in group.iter_tasks() if task.task_id not in own}
    for task in tasks.values():
        if tasks.keys().isdisjoint(task.upstream_task_ids) and create.task_id not in task.upstream_task_ids:
            task.set_upstream(create)
        if tasks.keys().isdisjoint(task.downstream_task_ids):
            task.set_downstream(release)


def _users_of(dag: Any, setup_id: str) -> list[str]:
    """Return the ids of the tasks that use the pool of a setup, mapped ones included."""
    return sorted(task.task_id for task in dag.tasks if setup_id_of(task) == setup_id)


def _seconds_of_waiting(given: Mapping[str, Any], hold: float | None, *, is_named: bool) -> Any:
    """Return for how long the machines wait for the next task; a template may be in its place.

    Raises BadRequest for settings that do not fit.
    """
    word = "keep_warm" if is_named else "hold"
    of_word, of_other = (given.get("keep_warm"), hold) if is_named else (hold, given.get("keep_warm"))
    if of_other and is_named:
        raise sky.BadRequest(
            f"hold={hold!r}: with name= the pool is shared with other runs, and waits for keep_warm seconds: write that"
        )
    if of_other:
        raise sky.BadRequest(
            f"keep_warm={of_other!r}: the teardown ends the pool, which waits `hold` seconds for a task. To share it"
            " with other runs, give it a name= too"
        )
    waits = HOLD_SECONDS if of_word is None else of_word
    if is_template(waits):
        return waits
    if not waits > 0:
        raise sky.BadRequest(
            f"{word}={waits!r}: write for how many seconds the machines wait for the next task, as 1800"
        )
    timeout = given.get("timeout")
    if isinstance(timeout, (int, float)) and timeout < waits:
        raise sky.BadRequest(
            f"timeout={timeout:g} ends idle machines before {word}={waits:g}: leave timeout out, or shorten {word}"
        )
    return waits


def _no_function() -> None:
    """What a setup calls: nothing."""
