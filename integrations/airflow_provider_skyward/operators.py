"""`SkywardOperator`: a task whose function runs on machines that exist only for that task.

Airflow's engine (retries, state, XCom) stays in the task's process. Only the function and its arguments travel, and
nodes need no Airflow. One `execute` opens the pool, submits the call (with `map_over`, one call for each item), writes
the nodes' output to the task log, and closes the pool in every case.

Threads: the pool's threads only fill a queue. The main thread drains it, and only the main thread talks to Airflow: the
connection for XCom supports neither several threads nor signal handlers.
"""

from __future__ import annotations

import inspect
import json
import queue
import threading
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from difflib import get_close_matches
from types import NoneType
from typing import TYPE_CHECKING, Any, ClassVar, cast

from airflow.sdk import BaseOperator
from airflow.sdk.bases.xcom import BaseXCom
from airflow.sdk.definitions.context import KNOWN_CONTEXT_KEYS
from airflow.sdk.exceptions import AirflowException, AirflowFailException
from airflow.sdk.execution_time.lazy_sequence import LazyXComSequence
from pydantic import BaseModel

import skyward_core as sky
from airflow_provider_skyward.secrets import hidden, shown, values_of

if TYPE_CHECKING:
    from airflow.sdk import Context

COST_KEY = "skyward_cost"
POOL_KEY = "skyward_pool"
"""XCom that is pushed before anything is rented: by the pool's id the bill is found even if the task is killed."""
MAX_XCOM_BYTES = 1_000_000
"""Largest result that goes into Airflow's database by default: every reader of the task's row loads it."""

OTHER_NAMES = {"retries": "call_retries"}
"""Fields of PoolSpec that have names of Airflow's fields: `retries` run the task again, `call_retries` a call that lost
its node.
"""
POOL_FIELDS = {OTHER_NAMES.get(name, name): name for name in sky.PoolSpec.model_fields}
POOL_KEYWORDS = tuple(POOL_FIELDS)
OWN_KEYWORDS = ("python_callable", "op_args", "op_kwargs", "map_over", "spec", "max_xcom_bytes")
KNOWN_KEYWORDS = frozenset({*POOL_KEYWORDS, *OWN_KEYWORDS, *inspect.signature(BaseOperator.__init__).parameters})
"""Computed once: an operator is made at each parse of each DAG file, and reading a signature takes half of that time.
"""
PLAIN_CONTEXT = frozenset(
    {
        *(
            "ds",
            "ds_nodash",
            "ts",
            "ts_nodash",
            "ts_nodash_with_tz",
            "run_id",
            "task_instance_key_str",
            "try_number",
            "task_reschedule_count",
            "test_mode",
        ),
        *(
            "logical_date",
            "data_interval_start",
            "data_interval_end",
            "partition_key",
            "partition_date",
            "params",
            "templates_dict",
            "reason",
        ),
        *(
            "prev_data_interval_start_success",
            "prev_data_interval_end_success",
            "prev_start_date_success",
            "prev_end_date_success",
        ),
        *("map_index_template", "expanded_ti_count"),
    }
)
"""Values of Airflow's context that are plain data, and so may travel to a node.

The others (`ti`, `dag_run`, `task_state_store`, ...) talk to Airflow.
"""


def _names_pool_keywords[F: Callable[..., None]](init: F) -> F:
    """Show the fields of PoolSpec in a constructor's signature: Airflow reads there which names `partial`, `expand` and
    `default_args` accept.
    """
    *own, rest = inspect.signature(init).parameters.values()
    pool = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in POOL_KEYWORDS]
    init.__signature__ = inspect.Signature([*own, *pool, rest])  # type: ignore[attr-defined]
    return init


class SkywardOperator(BaseOperator):
    """Run a function on a pool of machines that lives as long as the task.

    Takes the keywords of `ComputePool` beside Airflow's own, or `spec`, a PoolSpec or its plain data, which single
    keywords override. `pool` stays Airflow's pool of slots; `timeout` is the idle pool's, not the task's: that is
    `execution_timeout`; `retries` are the task's, those of the pool's calls are `call_retries`. All of them, `op_args`
    and `op_kwargs` are templates.
    `map_over` names the argument(s) that hold a sequence: the function is called once for each item, all on this one
    pool, and the task returns the list of results in order. The result goes to XCom, unless its JSON is larger than
    `max_xcom_bytes` (None: no limit); the bill goes to the XCom `skyward_cost`, and the pool's id, before anything is
    rented, to the XCom `skyward_pool`.

    The pool's keywords are kept as plain data; nothing is asked of a provider before the task runs. Raises BadRequest
    while the DAG is parsed.

        SkywardOperator(task_id="train", python_callable=train, op_args=["{{ ds }}"], accelerator="A100",
        image=sky.Image(pip=["torch"]))
    """

    template_fields: Collection[str] = ("op_args", "op_kwargs", *POOL_KEYWORDS)
    template_fields_renderers: ClassVar[dict[str, str]] = {
        "op_args": "py",
        "op_kwargs": "py",
        **dict.fromkeys(("provider", "image", "volume", "env"), "json"),
    }
    shallow_copy_attrs: Sequence[str] = ("python_callable", "op_kwargs")
    ui_color = "#e3f0ea"
    _attempt: _Attempt | None = None

    @_names_pool_keywords
    def __init__(
        self,
        *,
        python_callable: Callable[..., Any],
        op_args: Collection[Any] | None = None,
        op_kwargs: Mapping[str, Any] | None = None,
        map_over: str | Sequence[str] | None = None,
        spec: sky.PoolSpec | Mapping[str, Any] | None = None,
        max_xcom_bytes: int | None = MAX_XCOM_BYTES,
        **kwargs: Any,
    ) -> None:
        _refuse_unknown(type(self).__name__, kwargs)
        wishes = _as_keywords(spec) | {field: kwargs.pop(name) for name, field in POOL_FIELDS.items() if name in kwargs}
        if map_over:
            # else inferred from the function's return type, of which the task returns a list
            kwargs["multiple_outputs"] = False
        super().__init__(**kwargs)
        self.python_callable = python_callable
        self.op_args = op_args if op_args is not None else ()
        self.op_kwargs = op_kwargs if op_kwargs is not None else {}
        self.map_over = (map_over,) if isinstance(map_over, str) else tuple(map_over or ())
        self.max_xcom_bytes = max_xcom_bytes
        _refuse_callable(python_callable, self.op_args, self.op_kwargs, self.map_over)
        plain = _as_plain_data(wishes)
        for field, value in plain.items():
            setattr(self, OTHER_NAMES.get(field, field), value)
        self._asked = tuple(plain)
        self.template_fields = tuple(
            name
            for name in type(self).template_fields
            if POOL_FIELDS.get(name, name) in plain or name not in POOL_FIELDS
        )

    @property
    def pool_spec(self) -> sky.PoolSpec:
        """The pool's spec, after templates are rendered. Raises BadRequest if a rendered value is not valid."""
        return sky.PoolSpec.of(**{field: shown(getattr(self, OTHER_NAMES.get(field, field))) for field in self._asked})

    def execute(self, context: Context) -> Any:
        """Run the function on a pool of its own and return its result; close the pool in every case."""
        self._attempt = attempt = _Attempt(self.log, context)
        try:
            calls = self._calls(context)
            results = attempt.run(self.pool_spec, calls)
        except _Killed:
            raise AirflowException("the task was asked to stop while its function ran; the pool is closed") from None
        # the work is done and paid for: another try would do it again, and fail here again
        except sky.ResultNotLoaded as error:
            raise AirflowFailException(f"{error}: not tried again") from error
        except sky.BudgetExceeded as error:  # another try would cost again, and fail here again
            raise AirflowFailException(
                f"{error}: not tried again. Allow more (max_cost, budget), or ask for less"
            ) from error
        finally:
            self._attempt = None
            attempt.push_bill()
        result = results if self.map_over else results[0]
        if self.do_xcom_push:
            _refuse_too_large(result, self.max_xcom_bytes)
        return result

    def on_kill(self) -> None:
        """Hand the machines' end to the pool's reaper and make `execute` end now.

        Airflow calls this in a signal handler, and sends SIGKILL 5 seconds later. A local pool is gone about a second
        later. SIGKILL does not end the reaper, because the reaper is in another session: it goes on until all machines
        are gone.
        """
        if self._attempt is not None:
            self._attempt.kill()

    def _calls(self, context: Context) -> list[sky.PendingCompute[Any]]:
        args, kwargs = _at_hand(list(self.op_args)), _at_hand(dict(self.op_kwargs))
        _refuse_callable(self.python_callable, args, kwargs, self.map_over)
        wanted = _wanted_of_context(inspect.signature(self.python_callable).parameters, args, kwargs)
        from_context = {name: _plain(name, context[name]) for name in wanted if name in context}  # type: ignore[literal-required]
        return _pending(self.python_callable, args, from_context | kwargs, self.map_over)


for _name in POOL_KEYWORDS:
    # omitted fields are not set: Airflow takes 2 µs for each attribute of an instance, and there are two dozen
    setattr(SkywardOperator, _name, None)


# ── one execution ────────────────────────────────────────────────────────────────────────────────────────────────────


class _Killed(BaseException):
    """Unwinds `execute` after a kill.

    A BaseException, as AirflowTaskTimeout is: raised in a signal handler, it must pass every `except Exception`.
    """


class _Attempt:
    """The pool of one execution, and its events.

    While the pool opens or closes, the main thread waits, and the thread of the pool's events writes them to the log.
    Otherwise the main thread writes them. Everything else happens in the main thread.
    """

    def __init__(self, log: Any, context: Context) -> None:
        self._log = log
        self._task_instance = context["ti"]  # pyright: ignore[reportTypedDictNotRequiredAccess]
        self._work = _work_of(self._task_instance)
        self._news: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._main = threading.current_thread()
        self._writing = threading.Lock()
        self._is_main_waiting = False
        """Waits until the pool is open, or closed."""
        self._pool: sky.ComputePool | None = None
        self._calls = 0
        self._provider = ""
        self._narrator = sky.Narrator()
        self._is_killed = False
        self._is_interruptible = False

    def run(self, spec: sky.PoolSpec, calls: Sequence[sky.PendingCompute[Any]]) -> list[Any]:
        """Return the results, in order.

        Raises the exception of a call, _Killed after `kill`, and the errors of opening a pool.
        """
        if not calls:  # `map_over` an empty list: no machines are needed
            return []
        # The task log replaces the display; the pool's own display would write everything twice.
        self._pool = pool = sky.ComputePool.from_spec(
            spec.with_(display="quiet"),
            on_event=self._tell,
            secrets=values_of(spec),
            replace_object=_plain_function,
            work=self._work,
        )
        try:
            self._log.info("::group::Provisioning")
            try:
                with self._interruptible(), self._told_at_once():
                    pool.open()
            finally:
                self._log.info("::endgroup::")
            with self._interruptible():
                futures = pool.submit_all(calls)
            self._calls = len(futures)
            return self._wait(futures)
        finally:
            with self._told_at_once():
                # an unconfirmed machine is in the log and in `bill`, and fails no task that has done its work
                pool.hand_over()

    def kill(self) -> None:
        """Stop `run`. Called in a signal handler: orders the machines' end, then wakes the main thread, or raises an
        exception where it may be waiting for machines.

        If a provider does not answer, closing the pool may take longer than Airflow lets this process live: so the
        reaper gets the order first.
        """
        self._is_killed = True
        if self._pool is not None:
            self._pool.terminate_now()
        self._news.put(None)
        if self._is_interruptible:
            raise _Killed

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
        """Log and push the cost of this try, and of all tries of the task instance together: by the ledger, which
        includes tries that were killed.
        """
        bill = self.bill()
        if bill is None:
            return
        costs = self._costs_so_far() | {bill["pool_id"]: bill["cost_usd"]}
        bill |= {"all_tries_usd": sum(costs.values()), "pools": sorted(costs)}
        told = (bill["cost_usd"], bill["seconds"], bill["nodes"], bill["pool_id"])
        self._log.info("cost: %.6f USD, %.1f s, nodes: %d; of each machine: skyward receipt %s", *told)
        if len(costs) > 1:
            self._log.info("cost of all tries: %.6f USD, for %d pools", bill["all_tries_usd"], len(costs))
        self._push(COST_KEY, bill)

    def _push_pool(self, pool_id: str) -> None:
        """Push the pool's id before anything is rented: then the cost of this try is found even after a SIGKILL."""
        costs = {other: cost for other, cost in self._costs_so_far().items() if other != pool_id}
        receipt = f"skyward receipt {pool_id}"
        self._log.info("`%s` tells at any time what became of each machine and what it has cost", receipt)
        if costs:
            self._log.info(
                "earlier tries of this task have cost %.6f USD: %s", sum(costs.values()), ", ".join(sorted(costs))
            )
        told = {
            "pool_id": pool_id,
            "receipt": receipt,
            "work": self._work.labels(),
            "earlier_tries_usd": sum(costs.values()),
            "earlier_pools": sorted(costs),
        }
        self._push(POOL_KEY, told)

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
            raise _Killed

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
                raise _Killed
            yield
        finally:
            self._is_interruptible = False

    def _wait(self, futures: Sequence[Future[Any]]) -> list[Any]:
        waiting = {future: number for number, future in enumerate(futures, 1)}
        for future in futures:
            future.add_done_callback(self._news.put)
        while waiting and not self._is_killed:
            news = self._news.get()
            if not isinstance(news, Future):
                with self._writing:
                    self._write(news)
            elif error := _error_of(news):
                if len(futures) > 1:
                    error.add_note(f"in call {waiting[news]} of {len(futures)} (map_over)")
                raise error
            else:
                del waiting[news]
        if self._is_killed:
            raise _Killed
        return [future.result() for future in futures]

    def _tell(self, event: sky.SkywardEvent) -> None:
        with self._writing:
            if self._is_main_waiting:
                self._write(event)
                return
        self._news.put(event)

    @contextmanager
    def _told_at_once(self) -> Generator[None]:
        """Have the thread of the pool's events write the events of the block.

        An exception that a signal handler raises does not interrupt that thread.
        """
        with self._writing:
            while not self._news.empty():
                self._write(self._news.get())
            self._is_main_waiting = True
        try:
            yield
        finally:
            with self._writing:
                self._is_main_waiting = False

    def _write(self, news: Any) -> None:
        if isinstance(news, sky.InstanceProvisioned):
            self._provider = news.provider
        if isinstance(news, sky.InfraCreating):
            self._push_pool(news.pool_id)
        if isinstance(news, (Future, NoneType)):
            return
        if told := self._narrator.tell(news):
            self._log.log(told[0], "%s", told[1])


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


# ── the pool's keywords, as plain data ──────────────────────────────────────────────────────────────────────────────


def _refuse_unknown(operator: str, keywords: Mapping[str, Any]) -> None:
    for name in keywords:
        if name not in KNOWN_KEYWORDS and not name.startswith("_"):
            near = get_close_matches(name, KNOWN_KEYWORDS, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"the pool's keywords are {', '.join(POOL_KEYWORDS)}"
            raise sky.BadRequest(f"{operator} has no keyword {name!r}; {hint}")


def _as_keywords(spec: sky.PoolSpec | Mapping[str, Any] | None) -> dict[str, Any]:
    if isinstance(spec, sky.PoolSpec):
        return {name: getattr(spec, name) for name in spec.model_fields_set}
    return dict(spec or {})


def _as_plain_data(wishes: Mapping[str, Any]) -> dict[str, Any]:
    """Return values as JSON data, checked by PoolSpec; templates and results of other tasks stay as they are, and are
    checked when they are known.
    """
    known = {name: value for name, value in wishes.items() if not _is_template(value)}
    spec = sky.PoolSpec.of(**known)
    checked = spec.model_dump(mode="json", exclude_unset=True)
    plain = {name: checked.get(name, value) for name, value in wishes.items()}
    if plain.get("env"):
        plain["env"] = hidden(spec.env, plain["env"]) if "env" in known else hidden(plain["env"])
    if isinstance(image := plain.get("image"), Mapping) and cast("Mapping[str, Any]", image).get("env"):
        env = cast("Mapping[str, Any]", image)["env"]
        plain["image"] = {**image, "env": hidden(spec.image.env, env) if "image" in known else hidden(env)}
    return plain


def _is_template(value: object) -> bool:
    if isinstance(value, str):
        return "{{" in value or "{%" in value
    if isinstance(value, (int, float, BaseModel)):
        return False
    if isinstance(value, Mapping):
        return any(map(_is_template, value.values()))
    if isinstance(value, (list, tuple)):
        return any(map(_is_template, value))
    return callable(getattr(value, "iter_references", None))  # an XComArg, or an argument of a mapped task group


# ── the call ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _refuse_callable(fn: Callable[..., Any], args: object, kwargs: object, map_over: Sequence[str]) -> None:
    """Raise BadRequest for a function that cannot run on a node."""
    if not callable(fn):
        raise sky.BadRequest(f"python_callable={fn!r} is no function")
    name = getattr(fn, "__name__", "") or repr(fn)
    if inspect.iscoroutinefunction(inspect.unwrap(fn)):
        raise sky.BadRequest(
            f"{name} is async, and a node runs plain functions: write `def {name}` and call asyncio.run(...) inside it"
        )
    parameters = inspect.signature(fn).parameters
    takes_any = _takes_any(parameters)
    for argument in map_over:
        if argument not in parameters and not takes_any:
            near = get_close_matches(argument, parameters, 1)
            raise sky.BadRequest(
                f"map_over={argument!r}: {name} has no such argument{f'; did you mean {near[0]!r}?' if near else ''}"
            )
    if (
        isinstance(args, (list, tuple))
        and isinstance(kwargs, Mapping)
        and (bound := _wanted_of_context(parameters, args, kwargs) - PLAIN_CONTEXT)
    ):
        raise sky.BadRequest(
            f"{name} asks for {', '.join(map(repr, sorted(bound)))}, which talks to Airflow and cannot travel to a"
            " node. Ask for plain data instead (ds, ts, run_id, params, ...), pass what you need of it as a template,"
            " such as op_kwargs={'try_number': '{{ ti.try_number }}'}, or return the value and push it in"
            " another task"
        )


def _takes_any(parameters: Mapping[str, inspect.Parameter]) -> bool:
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())


def _wanted_of_context(
    parameters: Mapping[str, inspect.Parameter], args: Collection[Any], kwargs: Mapping[str, Any]
) -> set[str]:
    """Names of context values that a signature has and the caller has not given; with `**kwargs`, also all values that
    are loaded and can travel.
    """
    named = {name for name in list(parameters)[len(args) :] if name in KNOWN_CONTEXT_KEYS}
    others = PLAIN_CONTEXT - set(parameters) if _takes_any(parameters) else ()
    unnamed = {name for name in others if not name.startswith("prev_")}  # each queries Airflow's database
    return (named | unnamed) - set(kwargs)


def _plain(name: str, value: Any) -> Any:
    """A context value without Airflow's and pendulum's classes, which may be missing on a node."""
    if hasattr(value, "__wrapped__"):  # a lazy value: queries Airflow's database on first use
        value = value.__wrapped__
    if isinstance(value, datetime):
        return datetime.fromtimestamp(value.timestamp(), UTC)
    if isinstance(value, Mapping):
        return {key: _plain(name, item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(name, item) for item in value]
    if value is None or isinstance(value, (str, int, float)):
        return value
    raise sky.BadRequest(
        f"the context's {name!r} holds a {type(value).__name__}, which is no plain data: pass it as a template"
    )


def _at_hand(value: Any) -> Any:
    """Return loaded values: results of mapped tasks are loaded one by one on access, which is impossible on a node."""
    if isinstance(value, LazyXComSequence):
        return list(value)
    if isinstance(value, dict):
        return {key: _at_hand(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_at_hand, value))
    return value


def _pending(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], map_over: Sequence[str]
) -> list[sky.PendingCompute[Any]]:
    """The calls to make: one, or with `map_over` one for each item. Raises BadRequest for arguments that do not fit."""
    compute = sky.compute(fn)
    try:
        arguments = inspect.signature(fn).bind(*args, **kwargs)
    except TypeError as error:
        raise sky.BadRequest(f"{getattr(fn, '__name__', fn)}: {error}") from error
    if not map_over:
        return [compute(*arguments.args, **arguments.kwargs)]
    given = {**dict(kwargs), **arguments.arguments}
    columns = [_items(name, given.get(name)) for name in map_over]
    if len(lengths := {len(column) for column in columns}) > 1:
        raise sky.BadRequest(f"map_over={tuple(map_over)}: the sequences differ in length ({sorted(lengths)})")
    calls = list[sky.PendingCompute[Any]]()
    for items in zip(*columns, strict=True):
        arguments.arguments.update(zip(map_over, items, strict=True))
        calls.append(compute(*arguments.args, **arguments.kwargs))
    return calls


def _items(name: str, value: object) -> Sequence[Any]:
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return value
    raise sky.BadRequest(
        f"map_over={name!r} needs a list or tuple in {name}, one item for each call, and found {type(value).__name__}"
    )


def _refuse_too_large(result: object, limit: int | None) -> None:
    """Raise AirflowFailException (a retry would only cost again) for a result that XCom cannot take.

    A custom backend has limits of its own.
    """
    from airflow.sdk.execution_time.xcom import XCom
    from airflow.sdk.serde import serialize

    if XCom.serialize_value is not BaseXCom.serialize_value:
        return
    advice = (
        "write it to storage on the node and return its path, or set [core] xcom_backend to one that stores in files"
    )
    try:
        size = len(json.dumps(serialize(result)))
    except (TypeError, ValueError, RecursionError) as error:
        raise AirflowFailException(
            f"the result, a {type(result).__name__}, is nothing that XCom can store ({error}): {advice}"
        ) from error
    if limit is not None and size > limit:
        raise AirflowFailException(
            f"the result takes {size:,} bytes as XCom, more than {limit:,} (max_xcom_bytes): {advice}"
        )
