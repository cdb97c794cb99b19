"""`SkywardOperator`: a task whose function runs on machines that exist only for that task.

Airflow's engine (retries, state, XCom) stays in the task's process. Only the function and its arguments travel, and
nodes need no Airflow. One `execute` opens the pool, submits the call (with `map_over`, one call for each item), writes
the nodes' output to the task log, and closes the pool in every case.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import timedelta
from difflib import get_close_matches
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Unpack

from airflow.sdk import BaseOperator
from airflow.sdk.exceptions import AirflowException, AirflowFailException
from jinja2 import TemplateError

import skyward_core as sky
from airflow_provider_skyward.asset_events import names_of, write_events
from airflow_provider_skyward.calls import calls_of, reason_of, refuse_callable, takes_outlet_events
from airflow_provider_skyward.connections import credentials_of, ledger_of
from airflow_provider_skyward.deferred_attempt import DeferredAttempt
from airflow_provider_skyward.durable_attempt import DurableAttempt, can_store
from airflow_provider_skyward.links import ConsoleLink, ReceiptLink, SkywardLink
from airflow_provider_skyward.pool_keywords import (
    OTHER_NAMES,
    POOL_FIELDS,
    POOL_KEYWORDS,
    as_keywords,
    as_plain_data,
    named,
    refuse_credentials,
)
from airflow_provider_skyward.progress import OnWarning
from airflow_provider_skyward.results import DONE, refuse_place, refuse_what_airflow_refuses, write_result
from airflow_provider_skyward.retry import raise_as_airflows
from airflow_provider_skyward.secrets import shown
from airflow_provider_skyward.shared_pools import (
    PoolSetup,
    refuse_without_teardown,
    setup_of,
    setup_work,
    shared_fields,
    shared_name,
)
from airflow_provider_skyward.task_attempt import Killed, TaskAttempt, work_of

if TYPE_CHECKING:
    from airflow.sdk import Context, XComArg

    from airflow_provider_skyward.keyword_types import PoolKeywords

MAX_XCOM_BYTES = 1_000_000
"""Largest result that goes into Airflow's database by default: every reader of the task's row loads it."""

OWN_KEYWORDS = (
    *("python_callable", "op_args", "op_kwargs", "templates_dict", "templates_exts", "show_return_value_in_logs"),
    *("map_over", "spec", "max_xcom_bytes", "durable", "deferrable", "skyward_conn_id", "provider_conn_id"),
    *("on_budget_warning", "skyward_pool", "result_path", "broadcast"),
)
KNOWN_KEYWORDS = frozenset({*POOL_KEYWORDS, *OWN_KEYWORDS, *inspect.signature(BaseOperator.__init__).parameters})
"""Computed once: an operator is made at each parse of each DAG file, and reading a signature takes half of that time.
"""


def names_pool_keywords[F: Callable[..., None]](init: F) -> F:
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
    `execution_timeout`; `retries` are the task's, those of the pool's calls are `call_retries`; `output` is the task's
    XCom, that of the pool is `node_output`. All of them, `op_args` and `op_kwargs` are templates.

    `map_over` names the argument(s) that hold a sequence: the function is called once for each item, all on this one
    pool, and the task returns the list of results in order. With `broadcast` it is called on each worker at once, as
    one group if it is decorated with `sky.distributed`, and the results come in the order of nodes and workers. The
    result goes to XCom, unless its JSON is larger than `max_xcom_bytes` (None: no limit). With `result_path`, a folder
    or a place in object storage, it is written to a file there, and XCom has the path. The bill goes to the XCom
    `skyward_cost`, and the pool's id, before anything is rented, to the XCom `skyward_pool`. `templates_dict`,
    `templates_exts` and `show_return_value_in_logs` are those of PythonOperator. With `durable`, the default for a task
    with `retries`, the call outlives its worker, and the next try adopts it; `keep_warm` then needs no `name`, and a
    retry finds the machines warm. With `deferrable` (by default `[operators] default_deferrable`) the task gives its
    worker back while the call runs, and a trigger follows it. With `skyward_pool` the task uses the pool of a setup
    task (`airflow_provider_skyward.pools`), and has its settings.

    `skyward_conn_id` is a connection of the type `skyward`, with the ledger's URL and the secret key, and
    `provider_conn_id` one with the credentials of a cloud. They are read while the task runs, if they are given.
    `on_budget_warning` are callbacks for a pool whose money runs low (see `notifications.BudgetNotifier`).

    The pool's keywords are kept as plain data; no provider gets a request before the task runs. Raises BadRequest
    while the DAG is parsed.

        SkywardOperator(task_id="train", python_callable=train, op_args=["{{ ds }}"], accelerator="A100",
        image=sky.Image(pip=["torch"]))
    """

    template_fields: Collection[str] = (
        *("templates_dict", "op_args", "op_kwargs", "skyward_conn_id", "provider_conn_id", "skyward_pool"),
        "result_path",
        *POOL_KEYWORDS,
    )
    template_fields_renderers: ClassVar[dict[str, str]] = {
        "templates_dict": "json",
        "op_args": "py",
        "op_kwargs": "py",
        **dict.fromkeys(("provider", "image", "volume", "env"), "json"),
    }
    shallow_copy_attrs: Sequence[str] = ("python_callable", "op_kwargs")
    operator_extra_links = (SkywardLink(), ReceiptLink(), ConsoleLink())
    ui_color = "#e3f0ea"
    templates_dict: dict[str, Any] | None = None
    show_return_value_in_logs: bool = True
    durable: bool | None = None
    deferrable: bool | None = None
    skyward_conn_id: str | None = None
    provider_conn_id: str | None = None
    on_budget_warning: Sequence[OnWarning] = ()
    skyward_pool: Any = None
    result_path: str | None = None
    broadcast: bool = False
    is_pool_setup: ClassVar[bool] = False
    """Whether the task opens a pool for others."""
    is_pool_named: bool = False
    """Whether the user has named the pool of the setup task: then it is not that of one DAG run."""
    pool_setup_id: str = ""
    """The setup task whose pool the task uses; "" for a pool of its own."""
    _is_setup_mapped: bool = False
    _attempt: TaskAttempt | None = None
    links: Mapping[str, str] | None = MappingProxyType({})
    """The links of this execution, by the keys of their XComs. None if an earlier worker has pushed them."""

    @names_pool_keywords
    def __init__(
        self,
        *,
        python_callable: Callable[..., Any],
        op_args: Collection[Any] | None = None,
        op_kwargs: Mapping[str, Any] | None = None,
        templates_dict: dict[str, Any] | None = None,
        templates_exts: Sequence[str] | None = None,
        show_return_value_in_logs: bool = True,
        map_over: str | Sequence[str] | None = None,
        broadcast: bool = False,
        spec: sky.PoolSpec | Mapping[str, Any] | None = None,
        max_xcom_bytes: int | None = MAX_XCOM_BYTES,
        durable: bool | None = None,
        deferrable: bool | None = None,
        skyward_conn_id: str | None = None,
        provider_conn_id: str | None = None,
        on_budget_warning: OnWarning | Sequence[OnWarning] = (),
        skyward_pool: XComArg | None = None,
        result_path: str | None = None,
        **kwargs: Unpack[PoolKeywords],
    ) -> None:
        keywords: dict[str, Any] = {**kwargs}
        _refuse_unknown(f"{type(self).__name__} of task {keywords.get('task_id', '?')!r}", keywords)
        given = as_keywords(spec) | {
            field: keywords.pop(name) for name, field in POOL_FIELDS.items() if name in keywords
        }
        _refuse_beside_broadcast(broadcast=broadcast, map_over=map_over, durable=durable, deferrable=deferrable)
        if map_over or broadcast or result_path:
            # else inferred from the function's return type, of which the task returns a list, or the path
            keywords["multiple_outputs"] = False
        super().__init__(**keywords)
        self.python_callable = python_callable
        self.op_args = op_args if op_args is not None else ()
        self.op_kwargs = op_kwargs if op_kwargs is not None else {}
        self.map_over = (map_over,) if isinstance(map_over, str) else tuple(map_over or ())
        self.max_xcom_bytes = max_xcom_bytes
        setup = None if skyward_pool is None else setup_of(skyward_pool)
        own = {
            "templates_dict": templates_dict,
            "template_ext": templates_exts or None,
            "show_return_value_in_logs": None if show_return_value_in_logs else False,
            "durable": durable,
            "deferrable": deferrable,
            "skyward_conn_id": skyward_conn_id or (setup and setup.skyward_conn_id),
            "provider_conn_id": provider_conn_id or (setup and setup.provider_conn_id),
            "skyward_pool": skyward_pool,
            "result_path": result_path,
            "broadcast": broadcast or None,
            "on_budget_warning": (on_budget_warning,) if callable(on_budget_warning) else on_budget_warning or None,
        }
        for name, value in own.items():
            if value is not None:
                setattr(self, name, value)
        refuse_callable(python_callable, self.op_args, self.op_kwargs, self.map_over)
        plain = as_plain_data(given) if setup is None else self._share(setup, given)
        for field, value in plain.items():
            setattr(self, OTHER_NAMES.get(field, field), value)
        self._given = tuple(plain)
        self._render_only(plain, own)

    def _render_only(self, plain: Mapping[str, Any], own: Mapping[str, Any]) -> None:
        """Take away the templated fields that are not given: each is in the serialized form of the task."""
        self.template_fields = tuple(
            name
            for name in type(self).template_fields
            if POOL_FIELDS.get(name, name) in plain or (name not in POOL_FIELDS and own.get(name, name) is not None)
        )
        renderers = type(self).template_fields_renderers
        self.template_fields_renderers = {name: renderers[name] for name in self.template_fields if name in renderers}  # type: ignore[misc]

    def _share(self, setup: PoolSetup, given: Mapping[str, Any]) -> dict[str, Any]:
        """Use the pool of a setup task; return the fields of its spec. Raises BadRequest."""
        if self.deferrable:
            raise sky.BadRequest(
                "deferrable=True is for a task with a pool of its own: leave out one of deferrable and skyward_pool"
            )
        self.pool_setup_id = setup.task_id
        if setup.is_pool_named:
            self.is_pool_named = True
        if setup.get_closest_mapped_task_group() is not None:
            self._is_setup_mapped = True
        return shared_fields(setup, given)

    @property
    def plain_fields(self) -> dict[str, Any]:
        """The fields of the pool's spec that were given, as plain data."""
        return {field: getattr(self, OTHER_NAMES.get(field, field)) for field in self._given}

    @property
    def pool_spec(self) -> sky.PoolSpec:
        """The pool's spec, after templates are rendered. Raises BadRequest if a rendered value is not valid."""
        values = {field: shown(value) for field, value in self.plain_fields.items()}
        spec = sky.PoolSpec.of(**named(values, values))
        refuse_credentials(spec)
        return spec

    def _spec_in(self, context: Context) -> sky.PoolSpec:
        """Return the spec of the pool in this run. Raises BadRequest and LeaseTampered if there is none to be used."""
        if not self.pool_setup_id:
            return self.pool_spec
        instance = context["ti"]  # pyright: ignore[reportTypedDictNotRequiredAccess]
        is_mapped = self._is_setup_mapped
        if self.is_pool_named:
            spec, work = self.pool_spec, work_of(instance)
            shared_name(work, self.pool_setup_id, self.skyward_pool, is_mapped=is_mapped, given=str(spec.name))
            return spec
        name = shared_name(work_of(instance), self.pool_setup_id, self.skyward_pool, is_mapped=is_mapped)
        refuse_without_teardown(self, instance, self.pool_setup_id, is_mapped=is_mapped)
        return self.pool_spec.with_(name=name)

    def _do_render_template_fields(self, parent: Any, template_fields: Iterable[str], *more: Any, **named: Any) -> None:
        """As Airflow's, and an error of a template is said with its keyword. Another try would have the same error."""
        for name in template_fields:
            try:
                super()._do_render_template_fields(parent, (name,), *more, **named)
            except TemplateError as error:
                why = f"the template in {name} of the task {self.task_id!r} cannot be rendered: {reason_of(error)}"
                raise AirflowFailException(why) from error

    def execute(self, context: Context) -> Any:
        """Run the function on its own pool and return its result; close the pool in every case."""
        if self.templates_dict is not None:
            context["templates_dict"] = self.templates_dict
        if self.result_path:
            refuse_place(self.result_path)
        with ledger_of(self.skyward_conn_id):
            return self._start_and_defer(context) if self._is_deferrable(context) else self._run(context)

    def _run(self, context: Context) -> Any:
        self._attempt = attempt = self._attempt_of(context)
        self._take_links(attempt)
        attempt.is_broadcast = self.broadcast

        def run() -> list[Any]:
            calls = self._calls(context)
            spec = self._spec_in(context) if calls else self.pool_spec
            attempt.credentials = credentials_of(self.provider_conn_id, spec.provider)
            if self.pool_setup_id and not self.is_pool_named:
                work = work_of(context["ti"])  # pyright: ignore[reportTypedDictNotRequiredAccess]
                attempt.pool_work = setup_work(work, self.pool_setup_id, is_mapped=self._is_setup_mapped)
            return attempt.run(spec, calls)

        return self._finished(attempt, run, context)

    def _take_links(self, attempt: TaskAttempt) -> None:
        self.links, attempt.progress.on_warning = attempt.links, self.on_budget_warning

    def _calls(self, context: Context) -> list[sky.PendingCompute[Any]]:
        return calls_of(
            self.python_callable, self.op_args, self.op_kwargs, self.map_over, context, names_of(self.outlets)
        )

    def _finished(self, attempt: TaskAttempt, run: Callable[[], list[Any]], context: Context) -> Any:
        """Return the task's result; push the bill, and end the generation, in every case."""
        try:
            results = run()
        except Killed:
            raise AirflowException("the task was asked to stop while its function ran; the pool is closed") from None
        except sky.SkywardError as error:
            raise_as_airflows(error, self)
            raise
        finally:
            self._attempt = None
            if not attempt.is_orphan:
                attempt.end()
        written: dict[str, Any] = {}
        if takes_outlet_events(self.python_callable, self.op_args, self.op_kwargs):
            written = {name: event for _, events in results for name, event in events.items()}
            results = [value for value, _ in results]
        if self.outlets:
            events: Any = context["outlet_events"]  # pyright: ignore[reportTypedDictNotRequiredAccess]
            try:
                write_events(self.outlets, events, written, attempt.cost_fields())
            except Exception as error:
                raise AirflowFailException(f"the events of the assets are not written: {error!r}. {DONE}") from error
        result = results if self.map_over or self.broadcast else results[0]
        if self.result_path:
            result = write_result(result, self.result_path, work_of(context["ti"]))  # pyright: ignore[reportTypedDictNotRequiredAccess]
        refuse_what_airflow_refuses(result, self, context["ti"], self.max_xcom_bytes)  # pyright: ignore[reportTypedDictNotRequiredAccess]
        self.log.info(
            "returned value: %s",
            _shown(result) if self.show_return_value_in_logs else "not shown (show_return_value_in_logs)",
        )
        return result

    def execute_complete(self, context: Context, event: Mapping[str, Any]) -> Any:
        """Return the result of a deferred task, and end its pool. `event` is that of the trigger."""
        self._attempt = attempt = DeferredAttempt(self.log, context, None)
        count, cursors = int(event["calls"]), [int(cursor) for cursor in event["cursors"]]

        def run() -> list[Any]:
            attempt.credentials = self._credentials()
            attempt.note_cursors(cursors)
            return attempt.finish(count, self.pool_spec.max_cost, str(event.get("money", "")))

        if attempt.was_cleared():  # Airflow resumes a task too that was cleared while its result was fetched
            self._attempt = None
            return self.execute(context)
        with ledger_of(self.skyward_conn_id):
            return self._finished(attempt, run, context)

    def resume_execution(self, next_method: str, next_kwargs: dict[str, Any] | None, context: Context) -> Any:
        """As BaseOperator's; when the deferral has timed out or the trigger has failed, the pool is ended first."""
        self.links = None
        if next_method == "__fail__":
            attempt = DeferredAttempt(self.log, context, None)
            with ledger_of(self.skyward_conn_id):
                attempt.credentials = self._credentials()
                attempt.end_unfollowed()
        return super().resume_execution(next_method, next_kwargs, context)

    def _credentials(self) -> sky.Provider | None:
        return credentials_of(self.provider_conn_id, self.pool_spec.provider) if self.provider_conn_id else None

    def _is_deferrable(self, context: Context) -> bool:
        if self.pool_setup_id:  # between worker and trigger its warm time could end under the call
            return False
        if self.broadcast:  # the calls of a group end with their worker
            return False
        wanted = self.deferrable
        if wanted is None:
            from airflow.sdk.configuration import conf

            wanted = conf.getboolean("operators", "default_deferrable", fallback=False)
        if wanted and not can_store(context):
            if self.deferrable is None:
                return False
            raise sky.BadRequest("deferrable=True needs the task state store of Airflow 3.3: update Airflow")
        return wanted

    def _start_and_defer(self, context: Context) -> Any:
        began = time.monotonic()
        self._attempt = attempt = DeferredAttempt(self.log, context, None)
        self._take_links(attempt)
        try:
            calls = self._calls(context)
            if not calls:
                return []
            spec = self.pool_spec
            attempt.credentials = credentials_of(self.provider_conn_id, spec.provider)
            generation = attempt.start(spec, calls)
        except Killed:
            attempt.end()
            raise AirflowException("the task was asked to stop before its call ran; the pool is closed") from None
        except BaseException as error:
            if not attempt.is_orphan:
                attempt.push_bill()
            raise_as_airflows(error, self)
            raise
        finally:
            if not attempt.has_ended:  # else a kill from here on has this attempt to end
                self._attempt = None
        if attempt.has_ended:
            return self._finished(attempt, attempt.results, context)
        # imported only when a task runs: parsing a DAG does not need it
        from airflow_provider_skyward.triggers import SkywardTrigger

        ids = generation.call_ids(len(calls))
        self.defer(
            trigger=SkywardTrigger(
                generation.pool_id,
                list(ids),
                list(generation.cursors) or [0] * len(ids),
                skyward_conn_id=self.skyward_conn_id,
                provider_conn_id=self.provider_conn_id,
                provider=self._plain_provider(spec),
            ),
            method_name="execute_complete",
            timeout=self._left_of_timeout(time.monotonic() - began),
        )
        raise AssertionError  # `defer` raises

    def _plain_provider(self, spec: sky.PoolSpec) -> dict[str, Any] | None:
        """Return what the trigger needs beside the connection to end the pool; it has no secret."""
        return spec.provider.to_json() if self.provider_conn_id and isinstance(spec.provider, sky.Provider) else None

    def _left_of_timeout(self, seconds: float) -> timedelta | None:
        """Return for how long the task may be deferred: Airflow applies `execution_timeout` to each part by itself."""
        if self.execution_timeout is None:
            return None
        return max(timedelta(seconds=1), self.execution_timeout - timedelta(seconds=seconds))

    def _attempt_of(self, context: Context) -> TaskAttempt:
        """Return what runs this execution. Raises BadRequest for `durable=True` where Airflow has no state store."""
        is_durable = bool(self.retries) and not self.broadcast if self.durable is None else self.durable
        if is_durable and can_store(context):
            instance = context["ti"]  # pyright: ignore[reportTypedDictNotRequiredAccess]
            is_last = instance.try_number > (getattr(instance, "max_tries", 0) or 0)
            retry_seconds = None if is_last else self.retry_delay.total_seconds()
            return DurableAttempt(self.log, context, retry_seconds, has_policy=bool(self.retry_policy))
        if self.durable:
            raise sky.BadRequest(
                "durable=True needs the task state store of Airflow 3.3: update Airflow, or leave `durable` out; then a"
                " call ends with its worker"
            )
        return TaskAttempt(self.log, context)

    def on_kill(self) -> None:
        """Hand the machines' end to the pool's reaper and make `execute` end now.

        Airflow calls this in a signal handler, and sends SIGKILL 5 seconds later. A local pool is gone about a second
        later. SIGKILL does not end the reaper, because the reaper is in another session: it goes on until all machines
        are gone.
        """
        if self._attempt is not None:
            self._attempt.kill()


for _name in POOL_KEYWORDS:
    # omitted fields are not set: Airflow takes 2 µs for each attribute of an instance, and there are two dozen
    setattr(SkywardOperator, _name, None)


def _shown(result: object) -> str:
    """A result in the task log. The `repr` of a user's class may raise."""
    try:
        return str(result)
    except Exception as error:
        return f"a {type(result).__name__}, which cannot be shown: {error!r}"


def _refuse_beside_broadcast(
    *, broadcast: bool, map_over: object, durable: bool | None, deferrable: bool | None
) -> None:
    """Raise BadRequest for what a broadcast cannot have."""
    if not broadcast:
        return
    if map_over:
        raise sky.BadRequest(
            f"broadcast=True makes the same call on each worker, and map_over={map_over!r} one call for each item:"
            " leave out one of them; a function of a broadcast takes its part of the data with sky.shard(...)"
        )
    for name, value in (("durable", durable), ("deferrable", deferrable)):
        if value:
            raise sky.BadRequest(
                f"{name}=True is for calls that outlive their worker, and those of a broadcast end with it: leave out"
                f" one of {name} and broadcast. A training that was killed goes on from a checkpoint (docs/training.md)"
            )


def _refuse_unknown(operator: str, keywords: Mapping[str, Any]) -> None:
    unknown = [name for name in keywords if name not in KNOWN_KEYWORDS and not name.startswith("_")]
    if not unknown:
        return
    # with a lower cutoff words meet that only look alike
    near = [match for name in unknown for match in get_close_matches(name, KNOWN_KEYWORDS, 1, cutoff=0.8)]
    hint = (
        f"did you mean {' and '.join(map(repr, near))}?"
        if near
        else f"the pool's keywords are {', '.join(POOL_KEYWORDS)}"
    )
    raise sky.BadRequest(f"{operator} has no keyword {' and '.join(map(repr, unknown))}; {hint}")
