"""`SkywardResource`: a pool as a Dagster resource.

The pool opens when a step first uses it. The steps of a process share it, and on request those of a run or of all runs.
It closes with the resource, or with the last step that needs it.
"""

import difflib
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Optional, cast

import dagster as dg

# the only internal function of Dagster that we use here: no public name does this
from dagster._utils.interrupts import capture_interrupts
from pydantic import Field, PrivateAttr, ValidationError, create_model

import skyward_core as sky
from dagster_skyward import metadata
from dagster_skyward.configuration import FIELDS, filled_in, plain, spec_of
from dagster_skyward.credentials import SkywardCredentials
from dagster_skyward.final_errors import not_tried_again
from dagster_skyward.in_process import InProcessPool
from dagster_skyward.lifecycle import (
    OF_A_CALL,
    OF_RUNS,
    Lifecycle,
    divided_keywords,
    named_by_sharing,
    spec_of_use,
)
from dagster_skyward.metadata import StepContext
from dagster_skyward.plain_values import plain_pending
from dagster_skyward.step import Use
from dagster_skyward.step_events import Listener
from dagster_skyward.step_pools import StepPools, Terms

OWN_FIELDS = ("lifecycle", "sharing", "credentials")
"""Fields of the resource that are none of `PoolSpec`."""

_PoolFields: Any = create_model("_PoolFields", __base__=dg.ConfigurableResource, **FIELDS)


@dataclass(frozen=True, slots=True)
class PoolResult[R]:
    """What a call on the pool returned, what it cost, and the same as metadata of an asset.

    `cost` is the USD by which the bill of the step's use of the pool grew during the call. `metadata` has the keys
    `skyward/cost_usd`, `skyward/seconds`, `skyward/queue_seconds`, `skyward/nodes`, `skyward/accelerator` and
    `skyward/pool_id`. The step has them already, for all its calls together.
    """

    value: R
    cost: float = 0.0
    metadata: Mapping[str, Any] = field(default_factory=dict[str, Any])


class SkywardResource(_PoolFields):
    """An ephemeral accelerator pool.

    Takes the keywords of `skyward_core.ComputePool`, and keeps them as plain data. The pool opens when a step first
    uses it. Steps that run in one process share it. It closes when Dagster ends the resource, in whatever way the run
    ends. `lifecycle` changes when it opens and ends, `sharing` who uses it: "step" (the steps of one process), "run"
    (all steps of a run and of its re-executions), "backfill" (those of all runs of a backfill), or the name of a pool
    (all runs that give it). Not given, it is "run" if several steps of a run need the pool and each has a process of
    its own, else "step".
    """

    is_skyward: ClassVar[bool] = True
    lifecycle: Lifecycle = Field(
        default_factory=Lifecycle, description="When the pool opens, and when its machines end."
    )
    sharing: Optional[str] = Field(  # noqa: UP045 - Dagster reads no other form
        default=None,
        description=(
            'Who uses the pool: "step": the steps of one process; "run": all steps of a run; "backfill": all runs of'
            ' a backfill; "deployment": all runs, by `name`; any other text is the name. None: "run" if several steps'
            ' need it and each has its process, else "step".'
        ),
    )
    credentials: Optional[SkywardCredentials] = Field(  # noqa: UP045 - Dagster reads no other form
        default=None, description="The credentials of the provider; None: those of the process that runs the step."
    )
    _live: StepPools | None = PrivateAttr(default=None)
    _run_id: str | None = PrivateAttr(default=None)

    def __init__(self, **keywords: Any) -> None:
        """Raise BadRequest, which says what to do, for keywords that make no valid pool.

        Values from the environment are checked when the run starts.
        """
        super().__init__(**_checked(keywords))

    @classmethod
    def configure_at_launch(cls, **keywords: Any) -> Any:
        """Return the resource with these keywords as defaults; the run's config may set all keywords."""
        return super().configure_at_launch(**_checked(keywords))

    @classmethod
    def local(cls, **keywords: Any) -> "SkywardResource":
        """Return a resource for tests, which runs functions in this process and rents nothing.

        Takes the same keywords, and refuses the same mistakes. Costs are 0.
        """
        return InProcessResource(**keywords)

    @property
    def spec(self) -> sky.PoolSpec:
        """The keywords as a `PoolSpec`, environment variables filled in. Raises BadRequest if one is not set."""
        values = {name: getattr(self, name) for name in FIELDS if name != "keep_warm" or not self._names_pools}
        return spec_of(values, self._run_id)

    def run[**P, R](
        self,
        context: StepContext | None,
        fn: Callable[P, R] | sky.ComputeFunction[P, R],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> PoolResult[R]:
        """Run `fn(*args, **kwargs)` on a node; return its result and its cost, or raise its exception.

        `fn` may be plain or decorated with `@sky.compute`. `context` is None in a script or a notebook. Keywords such
        as `accelerator="H100"` and `nodes=4` (`lifecycle.OF_A_CALL`) that are no parameters of `fn` are for the pool:
        the call has another one then, for this step. Raises BadRequest if it is not clear which is meant.
        """
        with not_tried_again():
            pending, settings = _divided(fn, args, kwargs)
        with self.using(context, settings) as use:
            value = use.pool.run(pending)
        return _result(value, use)

    def map[R](
        self,
        context: StepContext | None,
        fn: Callable[..., R] | sky.ComputeFunction[..., R],
        /,
        *iterables: Iterable[Any],
        **settings: Any,
    ) -> list[R]:
        """Run `fn(a, b, ...)` on the nodes for the items of the iterables taken together; return the results in order.

        The iterables must have the same length. All keywords are for the pool, as in `pool`.
        """
        with not_tried_again():
            plain = plain_pending(fn, tuple(map(list, iterables)), {}, ("iterables", "kwargs")).args
        with self.pool(context, **settings) as pool:
            return pool.map(fn, *plain)

    def broadcast[**P, R](
        self,
        context: StepContext | None,
        fn: Callable[P, R] | sky.ComputeFunction[P, R],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> PoolResult[tuple[R, ...]]:
        """Run `fn(*args, **kwargs)` on each worker at once; the value has the results in the order of the nodes.

        Keywords are divided as in `run`.
        """
        with not_tried_again():
            pending, settings = _divided(fn, args, kwargs)
        with self.using(context, settings) as use:
            value = use.pool.broadcast(pending)
        return _result(value, use)

    @contextmanager
    def pool(self, context: StepContext | None, **settings: Any) -> Generator[sky.ComputePool]:
        """Give a step the open pool: the nodes' output goes to the step's log, cost and time to the step's metadata.

        The pool stays open for the next steps. Outside of a run it lives for the block. `settings` (`nodes=4`) are for
        another pool of this step. Raises BadRequest for those that no call can give (`lifecycle.OF_A_CALL`).
        """
        with self.using(context, settings) as use:
            yield use.pool

    @contextmanager
    def yield_for_execution(self, context: dg.InitResourceContext) -> "Generator[SkywardResource]":
        """Called by Dagster, once in each process that executes steps.

        The pool is closed in whatever way the run ends, also by an interrupt.
        """
        self._run_id = None if context.run is None else context.run.run_id
        live = self._live = StepPools(self._terms(), context.log, context.instance, context.run)
        try:
            if self.lifecycle.create == "eager":
                live.open_eagerly()
            yield self
        finally:
            self._live = self._run_id = None
            with capture_interrupts():  # a second SIGTERM must not interrupt the teardown
                live.close()

    @contextmanager
    def using(self, context: StepContext | None, settings: Mapping[str, Any] | None = None) -> Generator[Use]:
        """Give a step the open pool, as `pool` does, and afterwards what this use has cost."""
        if self._live is not None:
            with self._live.used_by(context, settings) as use:
                yield use
        else:
            log = None if context is None else context.log
            live = StepPools(self._terms(has_log=log is not None), log)
            with closing(live), live.used_by(context, settings) as use:
                yield use

    @contextmanager
    def listening(self, use: Use, listener: Listener) -> Generator[None]:
        """Give the listener the events of the pools first; those for which it returns true are in no log."""
        use.listeners.append(listener)
        try:
            yield
        finally:
            use.listeners.remove(listener)

    @property
    def _names_pools(self) -> bool:
        """Whether the pools get their names from runs: then the spec has none yet, and so cannot have `keep_warm`."""
        return self.sharing in OF_RUNS

    def _terms(self, *, has_log: bool = True) -> Terms:
        spec = self.spec
        if not has_log and "display" not in self.model_fields_set:
            spec = spec.with_(display="log")  # a script has no other place for the output
        sharing = "deployment" if spec.name is not None else self.sharing
        warm = float(filled_in(self.keep_warm, "keep_warm") or 0) if self._names_pools else 0.0
        if self.credentials is None:
            return Terms(spec, self.lifecycle, sharing, keep_warm=warm)
        if len(spec.providers) > 1:
            raise sky.BadRequest("credentials are for one provider: leave out the others")
        given = spec.providers[0] if spec.providers else None
        return Terms(spec, self.lifecycle, sharing, self.credentials.provider(given), warm)


class InProcessResource(SkywardResource):
    """`SkywardResource.local()`: functions run in this process, one after the other."""

    @contextmanager
    def yield_for_execution(self, context: dg.InitResourceContext) -> "Generator[SkywardResource]":
        """Called by Dagster. There is nothing to open or to end."""
        self._run_id = None if context.run is None else context.run.run_id
        yield self

    @contextmanager
    def using(self, context: StepContext | None, settings: Mapping[str, Any] | None = None) -> Generator[Use]:
        """Give a step what stands for its pool; its metadata have the keys of a real one."""
        began, pool = time.monotonic(), InProcessPool(spec_of_use(self._terms().spec, context, settings or {}))
        use = Use(cast("sky.ComputePool", pool), [])
        try:
            yield use
        finally:
            words = pool.spec.accelerator_words or "none"
            use.usage = metadata.Usage(0.0, time.monotonic() - began, pool.instance_count, words)
            if context is not None:
                metadata.record(context, self, use.usage)

    @contextmanager
    def listening(self, use: Use, listener: Listener) -> Generator[None]:
        """Raise BadRequest: Pipes reads what a node prints."""
        raise sky.BadRequest(
            "SkywardResource.local() has no Dagster Pipes: write PipesSkywardClient(compute=SkywardResource("
            "provider=sky.Local())), a pool of this machine"
        )
        yield


def _checked(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Return all keywords as plain data. Raises BadRequest."""
    keywords = named_by_sharing(keywords)
    own = {name: value for name, value in keywords.items() if name in OWN_FIELDS and value is not None}
    if isinstance(own.get("lifecycle"), Mapping):
        try:
            own["lifecycle"] = Lifecycle(**own["lifecycle"])
        except ValidationError as error:
            raise sky.BadRequest(f"lifecycle: {error}") from error
    others = {name: value for name, value in keywords.items() if name not in OWN_FIELDS}
    if own.get("sharing") not in OF_RUNS or others.get("keep_warm") is None:
        return plain(others) | own
    warm = plain({"name": "of-a-run", "keep_warm": others.pop("keep_warm")})["keep_warm"]
    return plain(others) | own | {"keep_warm": warm}


def _divided[R](
    fn: Callable[..., R] | sky.ComputeFunction[..., R], args: tuple[Any, ...], keywords: Mapping[str, Any]
) -> tuple[sky.PendingCompute[R], dict[str, Any]]:
    """Return the call, and the settings for its pool.

    Raises BadRequest, also for what the function does not take, and NotPicklable.
    """
    if not callable(fn):
        raise sky.BadRequest(
            f"{fn!r} is no function: write compute.run(context, fn, ...), with the context of the step, or None, before"
            " the function"
        )
    kwargs, settings = divided_keywords(fn.local if isinstance(fn, sky.ComputeFunction) else fn, keywords)
    try:
        sky.compute(fn)(*args, **kwargs)
    except TypeError as error:
        raise sky.BadRequest(f"{error}{_setting_that_was_meant(error, kwargs)}") from error
    return plain_pending(fn, args, kwargs), settings


def _setting_that_was_meant(error: TypeError, kwargs: Mapping[str, Any]) -> str:
    """Return words about the setting of a call that a keyword may stand for; "" if it is like none."""
    for name in kwargs:
        if f"'{name}'" in str(error) and (meant := difflib.get_close_matches(name, OF_A_CALL, 1)):
            return f". For the pool of this call: did you mean {meant[0]!r}?"
    return ""


def _result[R](value: R, use: Use) -> PoolResult[R]:
    if use.usage is None:
        return PoolResult(value)
    return PoolResult(value, use.usage.cost_usd, metadata.plain(use.usage))
