"""A step's use of pools as Dagster metadata, and where each kind of step keeps it.

Dagster plots numbers (int and float) of an asset over its materializations; text is listed.
"""

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import dagster as dg

type StepContext = dg.AssetExecutionContext | dg.OpExecutionContext | dg.AssetCheckExecutionContext

COST_USD = "skyward/cost_usd"
SECONDS = "skyward/seconds"
NODES = "skyward/nodes"
ACCELERATOR = "skyward/accelerator"


@dataclass(frozen=True, slots=True)
class Usage:
    """A step's use of one pool, from its first use to the end of its last: USD on the pool's bill, seconds, number of nodes, accelerator in words."""

    cost_usd: float
    seconds: float
    nodes: int
    accelerator: str


def record(context: StepContext, pool: object, usage: Usage) -> None:
    """Set the step's metadata; a later call for the same pool replaces the earlier one, another pool of the same step is added to it.

    An asset gets it with its materialization, an op with its first output. Of a step that makes several assets each gets an equal share of the cost and of
    the seconds, so that sums over assets stay true. A check, an op without outputs or with dynamic ones has no place for it: the log tells it.
    """
    with _lock:
        usages = _usages.setdefault(context, {})
        usages[id(pool)] = usage
        total = _total(usages)
    if isinstance(context, dg.AssetCheckExecutionContext):
        return
    outputs = _outputs(context)
    for output in outputs:
        _set(context, output, total | {name: total[name] / len(outputs) for name in (COST_USD, SECONDS)})


def _total(usages: Mapping[int, Usage]) -> dict[str, Any]:
    """Of several pools the costs add up; the seconds are those of the pool that was used longest."""
    used = usages.values()
    return {
        COST_USD: float(sum(usage.cost_usd for usage in used)),
        SECONDS: float(max(usage.seconds for usage in used)),
        NODES: sum(usage.nodes for usage in used),
        ACCELERATOR: ", ".join(sorted({usage.accelerator for usage in used})),
    }


def _outputs(context: dg.AssetExecutionContext | dg.OpExecutionContext) -> list[str]:
    """Names of the step's outputs that carry the metadata: one for each asset that is made, or the op's first."""
    try:
        if isinstance(context, dg.AssetExecutionContext) and context.has_assets_def:
            return [context.assets_def.get_output_name_for_asset_key(key) for key in sorted(context.selected_asset_keys)]
        return [output.name for output in context.op_def.output_defs[:1] if not output.is_dynamic]
    except dg.DagsterError:  # a context that was built by hand and belongs to no step
        return []


def _set(context: dg.AssetExecutionContext | dg.OpExecutionContext, output: str, metadata: Mapping[str, Any]) -> None:
    """Through `add_output_metadata` for assets too: `add_asset_metadata` does not work where an asset is invoked directly, in a test (Dagster 1.13)."""
    try:
        context.add_output_metadata(dict(metadata), output_name=output)
    except dg.DagsterInvariantViolationError:  # the output was yielded already; or a directly invoked one was set before, which Dagster does once only
        recorded = context.get_output_metadata(output)
        if isinstance(recorded, dict):
            recorded.update(metadata)


_lock = threading.Lock()
_usages: WeakKeyDictionary[Any, dict[int, Usage]] = WeakKeyDictionary()
