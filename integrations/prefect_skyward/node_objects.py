"""What nodes get in place of Prefect's objects: a task's function, a logger that prints, an address without an API."""

from __future__ import annotations

import logging
from contextlib import suppress
from types import FunctionType
from typing import Any, cast

from prefect.logging import get_run_logger
from prefect.tasks import Task

import skyward_core as sky
from prefect_skyward.options import TARGET, beneath

NO_API_SCHEME = "skyward-node:"
NO_API = f"{NO_API_SCHEME}//a-node-has-no-way-to-prefects-api"


def without_prefect_s_api(spec: sky.PoolSpec) -> sky.PoolSpec:
    """Give nodes an address at which each use of Prefect's API fails at once; an address of the user has precedence.

    Without an address Prefect's client starts a server on the node, with a database in the home directory. If it may
    not do that, its concurrency limits wait for ever (3.6 to 3.7).
    """
    return spec.with_(env={"PREFECT_API_URL": NO_API, **spec.image.env, **(spec.env or {})})


def raise_if_prefect_s_api_was_used(error: Exception) -> None:
    if NO_API_SCHEME in f"{error} {error.__cause__}":  # the cause is the traceback of the node
        raise sky.BadRequest(
            "the task's function asks Prefect's API (for a variable, a concurrency limit, an artifact, a block), which"
            " nodes have no way to: do it in the flow and hand the value to the task, or give the nodes an API that"
            " they reach: SkywardTaskRunner(env={'PREFECT_API_URL': ...})"
        ) from error


def portable(obj: Any) -> Any:
    """Return the replacement of Prefect's own objects: a task's function, and a logger that prints."""
    if isinstance(obj, Task):
        fn = beneath(cast(Any, obj.fn))
        with suppress(AttributeError):  # a callable that takes no attributes
            cast(Any, fn).fn = fn  # so that `other_task.fn(x)` in a task's body works on a node as it does here
        return fn
    if isinstance(obj, FunctionType) and TARGET in vars(obj):
        return beneath(obj)
    if obj is get_run_logger:
        return _node_run_logger
    return NotImplemented


def _node_run_logger(context: object = None, **kwargs: Any) -> logging.Logger:
    """`get_run_logger` on a node: it prints each record, which so arrives in the log of the task run."""
    import logging
    import sys

    logger = logging.getLogger("skyward.run")
    if not logger.handlers:
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(logging.Formatter("%(message)s"))  # the level travels separately
        logger.addHandler(handler)
        logger.setLevel(logging.DEBUG)  # the task run's logger filters by level
        logger.propagate = False
    return logger


# Nodes have no prefect_skyward to import it from: the name of a missing module makes it travel by value.
_node_run_logger.__module__ = "skyward_node"
