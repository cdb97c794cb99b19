"""What nodes get in place of Prefect's objects: a task's function, a logger that prints, an address without an API.

Calls in Prefect's context get the objects themselves.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Generator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from types import FunctionType, ModuleType
from typing import Any, cast

from prefect.exceptions import MissingContextError
from prefect.logging import get_run_logger
from prefect.task_runners import TaskRunner, ThreadPoolTaskRunner
from prefect.tasks import Task

import skyward_core as sky
from prefect_skyward.options import TARGET, beneath
from prefect_skyward.prefect_context import NO_API_SCHEME

_WITH_CONTEXT = "let it run in Prefect's context: SkywardTaskRunner(prefect_context=True), with Prefect in the image"
_OF_A_TASK = re.compile(r"'function' object has no attribute '(submit|map|delay|apply_async|with_options)'")

PLAIN = sky.PlainTypes(
    {
        "prefect.futures.PrefectFuture": lambda future: future.result(raise_on_failure=False),
        "prefect.futures.PrefectFutureList": list,
        "prefect.states.State": lambda state: state.result(raise_on_failure=False, _sync=True),
        "prefect.client.schemas.objects.State": lambda state: state.result(raise_on_failure=False, _sync=True),
        "prefect.utilities.annotations.BaseAnnotation": lambda annotated: annotated.value,
    }
)
"""What travels in place of Prefect's values: the engine resolves those in parameters, and not those that stand deeper,
or among the arguments of a function that is no task. A failure is the exception, as with `allow_failure`.
"""

_is_in_context: ContextVar[bool] = ContextVar("skyward_prefect_context", default=False)


def raise_if_prefect_s_api_was_used(error: Exception) -> None:
    """Raise BadRequest, with what to write instead, if a function has used what nodes do not have."""
    if isinstance(error, sky.BadRequest):  # of another kind: a pool that is joined may have another `env` than ours
        return
    if NO_API_SCHEME in f"{error} {error.__cause__}":  # the cause is the traceback of the node
        raise sky.BadRequest(
            "the task's function asks Prefect's API (for a variable, a concurrency limit, an artifact, a block), which"
            f" nodes have no way to: do it in the flow and hand the value to the task, or {_WITH_CONTEXT}"
        ) from error
    if isinstance(error, AttributeError) and _OF_A_TASK.fullmatch(str(error)):
        raise sky.BadRequest(
            f"the task's function uses another task as one ({error}), and nodes have no engine of Prefect: submit it"
            f" from the flow, or {_WITH_CONTEXT}"
        ) from error
    if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] == "prefect":
        raise sky.BadRequest(
            f"the task needs Prefect ({error}), which the node does not have: import get_run_logger at the head of the"
            " file, and hand plain values from the flow to the task; or, for classes of Prefect, list it in"
            f' Image(pip=[...]), as "prefect"; or {_WITH_CONTEXT}'
        ) from error
    if isinstance(error, MissingContextError):
        raise sky.BadRequest(
            f"the task's function needs Prefect's context ({error}), which nodes do not have: import get_run_logger at"
            f" the head of the file, read what you need in the flow and hand it to the task, or {_WITH_CONTEXT}"
        ) from error


@contextmanager
def packing(*, in_prefect_s_context: bool) -> Generator[None]:
    """Let `portable` know in the block for what kind of call it packs."""
    token = _is_in_context.set(in_prefect_s_context)
    try:
        yield
    finally:
        _is_in_context.reset(token)


def portable(obj: Any) -> Any:
    """Return the replacement of Prefect's own objects: a task's function, a logger that prints, the result of a future.
    In Prefect's context functions and loggers need none.
    """
    if isinstance(obj, FunctionType) and TARGET in vars(obj):
        return beneath(obj)
    if (plain := PLAIN.replace(obj)) is not NotImplemented:
        return plain
    if isinstance(obj, TaskRunner) and type(obj).__module__.startswith("prefect_skyward."):
        return ThreadPoolTaskRunner()  # a flow that is called on a node runs there, with its tasks
    if _is_in_context.get():
        return NotImplemented
    if isinstance(obj, Task):
        fn = beneath(cast(Any, obj.fn))
        with suppress(AttributeError):  # a callable that takes no attributes
            cast(Any, fn).fn = fn  # so that `other_task.fn(x)` in a task's body works on a node as it does here
        return fn
    if isinstance(obj, ModuleType) and obj.__name__.startswith("prefect.runtime"):
        return _NoRuntime()
    if obj is get_run_logger:
        return _node_run_logger
    return NotImplemented


class _NoRuntime:
    """`prefect.runtime` on a node: without Prefect's context it would answer None to all questions."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise sky.BadRequest(
            f"the task's function reads prefect.runtime ({name}), which nodes do not have: read it in the flow,"
            " use sky.run_context(), or set SkywardTaskRunner(prefect_context=True)"
        )


def _node_run_logger(context: object = None, **kwargs: Any) -> logging.Logger:
    """`get_run_logger` on a node: it prints each record, which so arrives in the log of the task run."""
    import logging
    import sys

    logger = logging.getLogger("skyward.run")
    if not logger.handlers:
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(logging.Formatter("%(message)s"))  # the level travels separately
        logger.addHandler(handler)
        logger.propagate = False
    logger.setLevel(logging.getLogger("prefect.task_runs").getEffectiveLevel())  # the client's levels hold here
    return logger


# Nodes have no prefect_skyward to import it from: the name of a missing module makes it travel by value.
_node_run_logger.__module__ = _NoRuntime.__module__ = "skyward_node"
