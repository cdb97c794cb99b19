"""What a step asks for: hardware and broadcast, on its decorator or around its call.

The spec of a call is the runner's, then the decorator's, then the options' around the call, the inner ones last.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import skyward_core as sky
from prefect_skyward.secrets import with_references

TARGET = "__skyward__"
"""The attribute of a function that `on_skyward` has made: its `Target`."""
OF_A_NAME = ("name", "keep_warm")


@dataclass(frozen=True, slots=True)
class StepOptions:
    """Fields of `PoolSpec` that replace the runner's, and whether the function runs on each worker (None: not said)."""

    keywords: Mapping[str, Any] = field(default_factory=dict[str, Any])
    broadcast: bool | None = None
    prefect_context: bool | None = None
    """Whether the function runs in Prefect's context (None: not said)."""

    @classmethod
    def of(
        cls, broadcast: bool | None, keywords: Mapping[str, Any], prefect_context: bool | None = None
    ) -> StepOptions:
        """Check the keywords. Raises BadRequest as `PoolSpec.of` does."""
        keywords = with_references(keywords)
        sky.PoolSpec.of(**keywords)
        return cls(keywords, broadcast, prefect_context)

    def then(self, inner: StepOptions) -> StepOptions:
        """Return both; the inner ones have precedence."""
        broadcast = self.broadcast if inner.broadcast is None else inner.broadcast
        context = self.prefect_context if inner.prefect_context is None else inner.prefect_context
        return StepOptions({**self.keywords, **inner.keywords}, broadcast, context)


@dataclass(frozen=True, slots=True)
class Target:
    """The function beneath `on_skyward`, and what it asks for."""

    fn: Callable[..., Any]
    options: StepOptions


NO_OPTIONS = StepOptions()
_present: ContextVar[StepOptions] = ContextVar("skyward_options", default=NO_OPTIONS)


@contextmanager
def skyward_options(
    *, broadcast: bool | None = None, prefect_context: bool | None = None, **keywords: Any
) -> Generator[None]:
    """Let the tasks that are submitted, mapped or called in the block run on other hardware.

    Takes the keywords of `ComputePool`; they replace those of the runner. `broadcast=True` runs the function on each
    worker of the pool: the result is a tuple. `prefect_context=True` is as that of `SkywardTaskRunner`. Blocks nest.
    Raises BadRequest for a wrong keyword.

        with skyward_options(accelerator="H100", nodes=2):
            future = train.submit(data)
    """
    token = _present.set(_present.get().then(StepOptions.of(broadcast, keywords, prefect_context)))
    try:
        yield
    finally:
        _present.reset(token)


def beneath(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function beneath `on_skyward`, or the function itself."""
    target = vars(fn).get(TARGET) if hasattr(fn, "__dict__") else None
    return target.fn if isinstance(target, Target) else fn


def target_of(fn: Callable[..., Any]) -> Target:
    """Return the function that travels for a task's function, and the options of a call that is made now."""
    target = vars(fn).get(TARGET) if hasattr(fn, "__dict__") else None
    function, options = (target.fn, target.options) if isinstance(target, Target) else (fn, NO_OPTIONS)
    if isinstance(function, sky.ComputeFunction):
        function = function.local
    return Target(function, options.then(_present.get()))


class StepSpecs:
    """The specs of a runner's steps; equal wishes give the same spec."""

    def __init__(self, base: sky.PoolSpec) -> None:
        self._base = base
        self._lock = threading.Lock()
        self._known: list[tuple[Mapping[str, Any], sky.PoolSpec]] = []

    def of(self, options: StepOptions) -> sky.PoolSpec:
        """Return the base with the options' keywords. Raises BadRequest for what cannot be."""
        if not options.keywords:
            return self._base
        with self._lock:
            for keywords, spec in self._known:
                if keywords == options.keywords:
                    return spec
        spec = changed(self._base, options.keywords)
        with self._lock:
            self._known.append((options.keywords, spec))
        return spec


def changed(base: sky.PoolSpec, keywords: Mapping[str, Any]) -> sky.PoolSpec:
    """Return the base with these fields.

    A name belongs to one set of settings: a spec that differs has no name, unless the keywords give one.
    """
    spec = base.with_(**keywords)
    if spec == base:
        return base
    if base.name is not None and "name" not in keywords:
        left = {name: getattr(spec, name) for name in spec.model_fields_set if name not in OF_A_NAME}
        spec = sky.PoolSpec.of(**left)
    spec.refuse_what_cannot_be()
    return spec
