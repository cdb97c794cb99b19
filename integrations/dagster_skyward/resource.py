"""`SkywardResource`: a pool as a Dagster resource.

The pool opens when a step first uses it. The steps of a process share it. It closes with the resource.
"""

import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import closing, contextmanager
from itertools import groupby
from types import UnionType
from typing import Annotated, Any, Literal, Optional, TypeAliasType, Union, cast, get_args, get_origin
from weakref import WeakKeyDictionary

import dagster as dg

# the only internal function of Dagster that we use: no public name does this
from dagster._utils.interrupts import capture_interrupts
from pydantic import BaseModel, Field, PrivateAttr, create_model
from pydantic_core import PydanticUndefined

import skyward_core as sky
from dagster_skyward.metadata import Share, StepContext, Usage, observe_rest, record, step_key, work_of
from dagster_skyward.watch import RunWatch, interrupt_step

type Log = dg.DagsterLogManager

ENVIRONMENT = (dg.EnvVar, type(dg.EnvVar.int("NAME")))
"""Classes of values that Dagster reads from the environment when a run starts."""

OF_VARIABLES = ("env", "image.env")
"""Fields that map names of variables to values: `{"env": "prod"}` is a variable called env there, and no `EnvVar`.
Their values may be `EnvVar`s.
"""

FLUSH_SECONDS = 60.0
LINES_PER_RECORD = 100

OWN_DEFAULTS = {"display": "quiet"}
"""Defaults that differ from the core's: the step's log has the output of a display."""


def _plain_type(annotation: Any) -> Any:
    """Return the type by which Dagster's config system describes a field of `PoolSpec`: a scalar, a mapping, or any
    plain data.
    """
    match annotation:
        case TypeAliasType():
            return _plain_type(annotation.__value__)
        case _ if get_origin(annotation) is Annotated:
            return Any  # read and written by its own functions: a name, a number, a mapping
        case _ if get_origin(annotation) in (Union, UnionType):
            return _plain_type(next(part for part in get_args(annotation) if part is not type(None)))
        case _ if get_origin(annotation) is Literal:
            return str
        case _ if get_origin(annotation) is Mapping:
            return dict[str, str]
        case type() if issubclass(annotation, BaseModel):
            return dict[str, Any]
        case type() if annotation in (str, int, float, bool):
            return annotation
        case _:
            return Any


def _config_fields() -> dict[str, Any]:
    """A config field for each field of `PoolSpec`.

    Each may be omitted: then the settings decide, and after them the default in the description.
    """
    fields: dict[str, Any] = {}
    for name, field in sky.PoolSpec.model_fields.items():
        own = OWN_DEFAULTS.get(name)
        default = "" if own or field.default in {None, PydanticUndefined, ()} else f" Default: {field.default!r}."
        fields[name] = (
            Optional[_plain_type(field.annotation)],  # noqa: UP045 - the type is known at run time only
            Field(default=own, description=f"{field.description}{default}"),
        )
    return fields


_FIELDS = _config_fields()
_PoolFields: Any = create_model("_PoolFields", __base__=dg.ConfigurableResource, **_FIELDS)


class SkywardResource(_PoolFields):
    """An ephemeral accelerator pool.

    Takes the keywords of `skyward_core.ComputePool`, and keeps them as plain data. The pool opens when a step first
    uses it. Steps that run in one process share it. It closes when Dagster ends the resource, in whatever way the run
    ends.
    """

    _live: "_SharedPool | None" = PrivateAttr(default=None)

    def __init__(self, **keywords: Any) -> None:
        """Raise BadRequest, which says what to do, for keywords that make no valid pool.

        Values from the environment are checked when the run starts.
        """
        super().__init__(**_plain(keywords))

    @classmethod
    def configure_at_launch(cls, **keywords: Any) -> Any:
        """Return the resource with these keywords as defaults; the run's config may set all keywords."""
        return super().configure_at_launch(**_plain(keywords))

    @property
    def spec(self) -> sky.PoolSpec:
        """The keywords as a `PoolSpec`, environment variables filled in. Raises BadRequest if one is not set."""
        said = _with_references({name: getattr(self, name) for name in type(self).model_fields})
        return sky.PoolSpec.of(**{name: _filled_in(value, name) for name, value in said.items() if value is not None})

    def run[**P, R](
        self,
        context: StepContext,
        fn: "Callable[P, R] | sky.ComputeFunction[P, R]",
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> R:
        """Run `fn(*args, **kwargs)` on a node and return its result, or raise its exception.

        `fn` may be plain or decorated with `@sky.compute`.
        """
        with self.pool(context) as pool:
            return pool.run(sky.PendingCompute(fn.local if isinstance(fn, sky.ComputeFunction) else fn, args, kwargs))

    def map[R](
        self, context: StepContext, fn: "Callable[..., R] | sky.ComputeFunction[..., R]", /, *iterables: Iterable[Any]
    ) -> list[R]:
        """Run `fn(a, b, ...)` on the nodes for the items of the iterables taken together; return the results in order.

        The iterables must have the same length.
        """
        with self.pool(context) as pool:
            return pool.map(fn, *iterables)

    @contextmanager
    def pool(self, context: StepContext) -> Generator[sky.ComputePool]:
        """Give a step the open pool: the nodes' output goes to the step's log, cost and time to the step's metadata.

        The pool stays open for the next steps. Outside of a run it lives for the block.
        """
        if self._live is not None:
            with self._live.used_by(context) as pool:
                yield pool
        else:
            with closing(_SharedPool(self.spec, context.log)) as live, live.used_by(context) as pool:
                yield pool

    @contextmanager
    def yield_for_execution(self, context: dg.InitResourceContext) -> "Generator[SkywardResource]":
        """Called by Dagster, once in each process that executes steps.

        The pool is closed in whatever way the run ends, also by an interrupt.
        """
        live = self._live = _SharedPool(self.spec, context.log, context.instance)
        try:
            yield self
        finally:
            self._live = None
            with capture_interrupts():  # a second SIGTERM must not interrupt the teardown
                live.close()


class _SharedPool:
    """The one pool of a resource's lifetime, and the receiver of its events: the step that used it last, and before and
    after all steps the resource.
    """

    def __init__(self, spec: sky.PoolSpec, log: Log | None, instance: dg.DagsterInstance | None = None) -> None:
        self._spec = spec
        self._instance = instance
        self._watch: RunWatch | None = None
        self._resource_log = self._log = log
        self._log_writer = _LogWriter()
        self._narrator = sky.Narrator()
        self._lock = threading.RLock()
        self._pool: sky.ComputePool | None = None
        self._began: WeakKeyDictionary[StepContext, tuple[float, float]] = WeakKeyDictionary()
        """When each step began to use pools: on the monotonic clock, and in seconds since 1970."""
        self._uses: dict[str, dict[StepContext, tuple[float, float]]] = {}
        """The cost of each pool at a step's first use and at its last one, by the pools' ids."""
        self._pools: dict[str, sky.ComputePool] = {}
        """All pools that were opened, by their ids."""

    @contextmanager
    def used_by(self, context: StepContext) -> Generator[sky.ComputePool]:
        """Open the pool if it is not open, and record the cost of this use.

        A step that is being stopped hands the machines' end to the pool's reaper, because its process may be killed
        before the provider has answered.
        """
        self._log = context.log
        self._began.setdefault(context, (time.monotonic(), time.time()))
        before = self._pool.id if self._pool is not None and self._pool.is_active else ""
        cost = self._pool.cost if self._pool is not None and before else 0.0
        try:
            yield self._opened(context)
        except (dg.DagsterExecutionInterruptedError, KeyboardInterrupt):
            if self._pool is not None:
                self._pool.terminate_now()
            raise
        finally:
            if self._pool is not None and self._pool.id:
                self._note(context, self._pool, cost if self._pool.id == before else 0.0)
            self._log_writer.flush()

    def _note(self, context: StepContext, pool: sky.ComputePool, cost_before: float) -> None:
        self._pools[pool.id] = pool
        its = self._uses.setdefault(pool.id, {})
        its[context] = (its.get(context, (cost_before, 0.0))[0], pool.cost)
        used = {
            pool_id: last - first
            for pool_id, uses in self._uses.items()
            for step, (first, last) in uses.items()
            if step is context
        }
        seconds = time.monotonic() - self._began[context][0]
        record(
            context,
            self,
            Usage(
                sum(used.values()),
                seconds,
                self._spec.most_nodes,
                str(self._spec.accelerator or "none"),
                tuple(used),
            ),
        )

    def close(self) -> None:
        """Terminate the machines, and divide the bill among the steps.

        Unconfirmed machines are in the run's log, and the reaper asks again: they fail no step.
        """
        self._log = self._resource_log
        if self._watch is not None:
            self._watch.close()
        with self._lock:
            try:
                if self._pool is not None:
                    self._pool.hand_over()
            finally:
                try:
                    self._share_out()
                finally:
                    self._log_writer.close()

    def _share_out(self) -> None:
        """Log the parts of the bills that are in no step's metadata, and write all shares into the ledger.

        The machines are gone: an error here is only logged.
        """
        shares = [share for pool in self._pools.values() for share in self._shares(pool.id, pool.cost)]
        try:
            for pool_id, its in observe_rest(shares).items():
                self._pools[pool_id].share_cost(its)
        # Dagster's storage or the ledger fails; the ledger still has the whole bill, for the step that opened the pool
        except Exception:
            logging.getLogger("skyward").exception("the shares of the bill could not all be recorded")

    def _shares(self, pool_id: str, bill: float) -> list[Share]:
        """Each step's part of a pool's bill: the costs while the step used the pool, and a proportional part of the
        rest.
        """
        costs = {
            step: last - first
            for step, (first, last) in self._uses.get(pool_id, {}).items()
            if step_key(step) is not None
        }
        used = sum(costs.values())
        rest = max(0.0, bill - used)
        return [
            Share(
                step,
                work_of(step),
                cost + rest * (cost / used if used else 1 / len(costs)),
                self._began[step][1],
                pool_id,
            )
            for step, cost in costs.items()
        ]

    def _opened(self, context: StepContext) -> sky.ComputePool:
        """The open pool.

        If it has closed itself, idle between two steps, a new one is opened: new machines, a new bill.
        """
        with self._lock:
            pool = self._pool
            if pool is None or not pool.is_active:
                if pool is not None:
                    pool.hand_over()
                self._pool = sky.ComputePool.from_spec(
                    self._spec, on_event=self._log_event, replace_object=_refuse_context, work=work_of(context)
                )
                self._watch_run(context)
                self._pool.open()
            return self._pool

    def _watch_run(self, context: StepContext) -> None:
        """Before anything is rented: watch the run, and end the pool when the run is over, or when the process that has
        started this step's process is gone.
        """
        if (
            self._watch is None
            and self._instance is not None
            and not self._instance.is_ephemeral
            and step_key(context) is not None
        ):
            self._watch = RunWatch(self._instance, context.run_id, self._stop)
            self._watch.start()

    def _stop(self, why: str) -> None:
        """Called in the watch's thread: hands the machines' end to the reaper first, in case this process is killed."""
        logging.getLogger("skyward").warning("%s: the pool is ended, and the step with it", why)
        if self._pool is not None:
            self._pool.terminate_now()
        interrupt_step()

    def _log_event(self, event: sky.SkywardEvent) -> None:
        line = self._narrator.tell(event)
        if line is not None and self._log is not None:
            self._log_writer.write(self._log, *line)


def _refuse_context(obj: Any) -> Any:
    """For the pickler: refuse a step's context, because it contains a database and a hundred other objects, and the
    first of them cannot travel.
    """
    if isinstance(
        obj, (dg.AssetExecutionContext, dg.OpExecutionContext, dg.AssetCheckExecutionContext, dg.InitResourceContext)
    ):
        raise sky.BadRequest(
            f"the function, or an argument of it, uses the step's `context` (a Dagster {type(obj).__name__}), which"
            " cannot travel to a node. Take what it needs of it as arguments: compute.run(context, train,"
            " context.partition_key); and log with print or logging: both arrive in the step's log"
        )
    if isinstance(obj, SkywardResource):
        raise sky.BadRequest(
            "the function, or an argument of it, uses the resource itself, which cannot travel to a node: call"
            " compute.run(...) in the step, and not within the function that runs on a node"
        )
    return NotImplemented


class _LogWriter:
    """Writes to Dagster's logs in a separate thread: a record takes about 14 ms in SQLite, and the pool's results
    must not wait for it.

    Lines that have come in meanwhile become one record; no line is dropped.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[Log, int, str] | threading.Event] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._ended = threading.Event()

    def write(self, log: Log, level: int, text: str) -> None:
        """Queue a line, from any thread."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="skyward-dagster-log", daemon=True)
                self._thread.start()
        self._queue.put((log, level, text))

    def flush(self) -> None:
        """Wait until all lines so far are in the log, a minute at most."""
        if self._thread is not None:
            written = threading.Event()
            self._queue.put(written)
            written.wait(FLUSH_SECONDS)

    def close(self) -> None:
        """Write the remaining lines, and end the thread."""
        if self._thread is not None:
            self._queue.put(self._ended)
            self._thread.join(FLUSH_SECONDS)

    def _work(self) -> None:
        while not self._ended.is_set():
            batch = [self._queue.get()]
            while len(batch) < LINES_PER_RECORD and not self._queue.empty():
                batch.append(self._queue.get())
            for (log, level), items in groupby(
                (item for item in batch if isinstance(item, tuple)), key=lambda item: item[:2]
            ):
                try:
                    log.log(level, "\n".join(text for _, _, text in items))
                # Dagster's storage fails: the run will report it, and the pool must be able to close
                except Exception:
                    logging.getLogger("skyward").exception("lines of the pool could not be written to Dagster's log")
            for item in batch:
                if isinstance(item, threading.Event):
                    item.set()


def _plain(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords as plain data, checked as far as they are known.

    None means not given, as in Dagster's config. Raises BadRequest.
    """
    said = _with_references({name: value for name, value in keywords.items() if value is not None})
    _refuse_plain_secrets(said)
    later = {name: value for name, value in said.items() if name in _FIELDS and _is_from_environment(value, name)}
    for name, value in later.items():
        _refuse_unreadable(name, value)
    spec = sky.PoolSpec.of(**{name: value for name, value in said.items() if name not in later})
    spec.refuse_what_cannot_be()
    plain = spec.model_dump(mode="json", exclude_unset=True) | later
    image = plain.get("image")
    if isinstance(image, Mapping) and set(cast("Mapping[str, Any]", image)) == {"env"}:
        # if the only key of a mapping in a default is "env", Dagster takes it for an EnvVar, and fails on its value
        plain["image"] = {**image, "pip": []}
    return plain


def _with_references(said: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords with each `EnvVar` among `secrets` replaced by the name of its variable.

    Raises BadRequest.
    """
    secrets = said.get("secrets")
    if isinstance(secrets, Mapping):
        secrets = {name: _reference(one) for name, one in cast("Mapping[str, Any]", secrets).items()}
    elif isinstance(secrets, (list, tuple)):
        secrets = [one.env_var_name if isinstance(one, dg.EnvVar) else one for one in cast("list[Any]", secrets)]
    return {**said, "secrets": secrets} if secrets is not None else dict(said)


def _reference(one: Any) -> Any:
    match one:
        case dg.EnvVar():
            return sky.Secret.from_env(one.env_var_name)
        case {"env": str() as variable, **others} if not others:
            return sky.Secret.from_env(variable)
        case sky.Secret(source="store") | {"source": "store"}:
            raise sky.BadRequest('secrets: Dagster has no store for secrets: write secrets={"NAME": dg.EnvVar("NAME")}')
        case _:
            return one


def _refuse_plain_secrets(said: Mapping[str, Any]) -> None:
    """Raise BadRequest for a probable secret in plain text: Dagster writes a resource's configuration to its database,
    and shows it.
    """
    image = said.get("image")
    for env in (
        said.get("env"),
        image.env if isinstance(image, sky.Image) else image.get("env") if isinstance(image, Mapping) else None,
    ):
        if isinstance(env, Mapping):
            plain = {
                name: value
                for name, value in cast("Mapping[str, Any]", env).items()
                if isinstance(value, str) and not isinstance(value, dg.EnvVar)
            }
            if found := sky.PoolSpec.of(env=plain).plain_secrets:
                raise sky.BadRequest(
                    f"env holds {', '.join(found)} in plain text, which Dagster writes to its database and shows:"
                    " write "
                    f'secrets={{"{found[0]}": dg.EnvVar("{found[0]}")}}, or env={{"{found[0]}":'
                    f' dg.EnvVar("{found[0]}")}} for what installing packages needs'
                )


def _is_from_environment(value: object, place: str) -> bool:
    """Whether a value is, or holds, an `EnvVar`, also in its form in config: {"env": "NAME"}."""
    match value:
        case _ if isinstance(value, ENVIRONMENT):
            return True
        case {"env": str(), **others} if not others and place not in OF_VARIABLES:
            return True
        case Mapping():
            return any(_is_from_environment(item, f"{place}.{key}") for key, item in value.items())
        case list() | tuple():
            return any(_is_from_environment(item, place) for item in value)
        case _:
            return False


def _refuse_unreadable(name: str, value: object) -> None:
    """Raise BadRequest for an environment variable in a place where Dagster cannot read one; Dagster's own error would
    describe the type of a string.
    """
    kind = get_args(_FIELDS[name][0])[0]
    if kind is int and isinstance(value, dg.EnvVar):
        raise sky.BadRequest(
            f'{name}=dg.EnvVar("{value.env_var_name}"): it is a whole number, write'
            f' dg.EnvVar.int("{value.env_var_name}")'
        )
    if kind in (float, bool):
        raise sky.BadRequest(
            f"{name}: Dagster reads only text and whole numbers from the environment; leave it out and set"
            f" SKYWARD_{name.upper()} there"
        )


def _filled_in(value: Any, name: str) -> Any:
    """Return the value with the environment variables that it refers to filled in.

    Dagster has filled in text and whole numbers, but not inside plain data.
    """
    match value:
        case {"env": str() as variable, **others} if not others and name not in OF_VARIABLES:
            return _from_environment(variable, name)
        case _ if isinstance(value, ENVIRONMENT):  # outside of a run Dagster has filled in nothing
            return _from_environment(getattr(value, "env_var_name", None) or getattr(value, "name", ""), name)
        case Mapping():
            return {key: _filled_in(item, f"{name}.{key}") for key, item in value.items()}
        case list() | tuple():
            return [_filled_in(item, name) for item in value]
        case _:
            return value


def _from_environment(variable: str, name: str) -> str:
    if (value := os.environ.get(variable)) is None:
        raise sky.BadRequest(
            f"{name}: the environment variable {variable} is not set in the process that runs the step"
        )
    return value
