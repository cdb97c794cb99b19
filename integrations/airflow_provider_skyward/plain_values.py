"""What travels to a node in place of Airflow's values: it has no Airflow, and no way to Airflow's database."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from lazy_object_proxy import Proxy

import skyward_core as sky

NAMES = ("op_args", "op_kwargs")
"""What users call the arguments."""

_LAZY = (
    "airflow.sdk.execution_time.lazy_sequence.LazyXComSequence",
    *(f"airflow.sdk.definitions.xcom_arg.{name}" for name in ("_MapResult", "_ZipResult", "_ConcatResult")),
)
"""Results of mapped tasks, and what `.map`, `.zip` and `.concat` make of them: each item is a request to Airflow."""


def _unwrapped(proxy: Any) -> Any:
    """A lazy value of the context: it queries Airflow's database on first use."""
    return proxy.__wrapped__


def _dictionary(params: Mapping[str, Any]) -> dict[str, Any]:
    return dict(params)


PLAIN = sky.PlainTypes(
    {
        Proxy: _unwrapped,
        **dict.fromkeys(_LAZY, list),
        "airflow.sdk.definitions.param.ParamsDict": _dictionary,
        # the object of a `@task` function would bring Airflow along
        "airflow.sdk.bases.decorator._TaskDecorator": lambda decorated: decorated.function,
    }
)
"""Collections are converted before a pool is opened, in the main thread: only that one may talk to Airflow."""


def plain_context(names: Collection[str], context: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return values of Airflow's context as plain ones. Raises NotPicklable."""
    values = {name: context[name] for name in names if name in context}
    return sky.plain_call(sky.PendingCompute(dict, (), values), PLAIN, names=("", "context")).kwargs
