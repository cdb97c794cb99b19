"""A step's use of pools as Dagster metadata, and the place of that metadata for each kind of step.

Dagster plots numbers (int and float) of an asset over its materializations; text is listed. The cost of a step up to
its asset's materialization goes with the materialization, in whole micro-dollars. The rest of the bill follows as
observations, under its own key (`settlement`).
"""

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import dagster as dg

import skyward_core as sky

type StepContext = dg.AssetExecutionContext | dg.OpExecutionContext | dg.AssetCheckExecutionContext

COST_USD = "skyward/cost_usd"
OTHER_COST_USD = "skyward/other_cost_usd"
SECONDS = "skyward/seconds"
QUEUE_SECONDS = "skyward/queue_seconds"
SECONDS_PLACES = 3
"""Decimal places of the seconds, so that a person can read them."""
GPU_UTIL_PCT = "skyward/gpu_util_pct"
CPU_UTIL_PCT = "skyward/cpu_util_pct"
MEMORY_GB, MEMORY_MAX_GB = "skyward/memory_gb", "skyward/memory_max_gb"
MEASURED = {
    "gpu_percent_mean": GPU_UTIL_PCT,
    "gpu_percent_max": "skyward/gpu_util_max_pct",
    "gpu_memory_percent_mean": "skyward/gpu_memory_pct",
    "gpu_memory_percent_max": "skyward/gpu_memory_max_pct",
    "cpu_percent_mean": CPU_UTIL_PCT,
    "cpu_percent_max": "skyward/cpu_util_max_pct",
    "memory_percent_mean": "skyward/memory_pct",
    "memory_percent_max": "skyward/memory_max_pct",
}
"""Names of metadata, by those of `sky.Utilisation.numbers`."""
REPORTED = "skyward/reported/"
"""The names of what calls report with `sky.report` follow."""
SAVINGS_USD = "skyward/savings_usd"
RUNNING_COST_USD = "skyward/running_cost_usd"
RUNNING_SECONDS = "skyward/running_seconds"
NODES = "skyward/nodes"
ACCELERATOR = "skyward/accelerator"
POOL_ID = "skyward/pool_id"
RECEIPT = "skyward/receipt"

MICRO_PER_USD = 1_000_000
"""Costs are whole micro-dollars, as in the ledger."""


@dataclass(frozen=True, slots=True)
class Usage:
    """A step's use of pools: USD on the bill, seconds of work, number of nodes, accelerator in words, the pools' ids,
    and what was measured (`numbers_of`).

    `queue_seconds` is for how long it has waited, for its pool and for slots; the seconds of work are without it.
    `details` is metadata that is no number.
    """

    cost_usd: float
    seconds: float
    nodes: int
    accelerator: str
    pool_ids: tuple[str, ...] = ()
    savings_usd: float = 0.0
    measured: Mapping[str, float | str] = field(default_factory=dict[str, float | str])
    details: Mapping[str, Any] = field(default_factory=dict[str, Any])
    queue_seconds: float = 0.0


def record(context: StepContext, pool: object, usage: Usage) -> None:
    """Set the step's metadata. A later call for the same pool replaces the earlier one; another pool of the same step
    is added.

    An asset gets it with its materialization, an op with its first output. If a step makes several assets, each gets an
    equal share of the cost and of the seconds; so does each partition of a range. A check, an op without outputs and an
    op with dynamic outputs cannot have metadata.
    """
    if isinstance(context, dg.AssetCheckExecutionContext) or not is_of_step(context):
        return
    with _lock:
        usages = _usages.setdefault(context, {})
        usages[id(pool)] = usage
        total: dict[str, Any] = {**_total(usages), **_details(usages)}
    outputs = _outputs(context)
    costs, savings = (equal_parts(round(total[name] * MICRO_PER_USD), len(outputs)) for name in (COST_USD, SAVINGS_USD))
    partitions = _materializations(context)
    for output, cost, saved in zip(outputs, costs, savings, strict=True):
        shares = {
            COST_USD: cost // partitions / MICRO_PER_USD,  # what is left of the division is observed later
            SAVINGS_USD: saved // partitions / MICRO_PER_USD,
            SECONDS: round(total[SECONDS] / len(outputs) / partitions, SECONDS_PLACES),
            QUEUE_SECONDS: round(total[QUEUE_SECONDS] / len(outputs) / partitions, SECONDS_PLACES),
        }
        _set(context, output, total | shares)


def numbers_of(use: sky.Utilisation) -> dict[str, float | str]:
    """Return what was measured while the step's calls ran, and the last values of what they have reported."""
    measured = {MEASURED[name]: value for name, value in use.numbers().items()}
    if use.memory_gb.count:
        measured |= {MEMORY_GB: round(use.memory_gb.mean, 3), MEMORY_MAX_GB: round(use.memory_gb.greatest, 3)}
    return measured | {f"{REPORTED}{name}": value for name, value in use.last_values().items()}


def work_of(context: StepContext | None) -> sky.Work:
    """Return the step's work, as in the ledger and the machines' tags: only the system without a context, or for one
    that was made by hand.
    """
    step = None if context is None else step_key(context)
    if context is None or step is None:
        return sky.Work(system="dagster")
    op = op_context(context)
    keys = op.partition_keys if op.has_partition_key or op.has_partition_key_range else []
    return sky.Work(
        system="dagster",
        workflow=op.job_name,
        run=op.run_id,
        task=step,
        attempt=str(op.retry_number + 1),
        asset=", ".join(key.to_user_string() for key in assets_of(context)),
        partition=keys[0] if len(keys) == 1 else f"{keys[0]}...{keys[-1]}" if keys else "",
    )


def tags_of(context: StepContext) -> Mapping[str, str]:
    """Return the tags of the step: those of its op (`op_tags` of an asset), and those of its place in a graph. Without
    a step they are the op's; none for a context that was made by hand.
    """
    op = op_context(context)
    try:
        return op.op_def.tags if step_key(context) is None else op.get_step_execution_context().step.tags
    except (dg.DagsterError, AttributeError):
        return {}


def asset_tags_of(context: StepContext) -> set[str]:
    """Return the names of the tags of the step's assets."""
    try:
        return {name for tags in op_context(context).assets_def.tags_by_key.values() for name in tags}
    except (dg.DagsterError, AttributeError):  # no assets, or a context that was made by hand
        return set()


def shown(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return metadata in which each text is visible, names too: what nodes report and providers say is in it, and a
    database that cannot take one character would lose the event.
    """
    return sky.shown_text.visible_data(dict(metadata))


def plain(usage: Usage) -> dict[str, Any]:
    """Return a usage as metadata: numbers and text."""
    return _total({0: usage})


def is_of_step(context: StepContext) -> bool:
    """Return whether the context is that of an op, an asset or a check; a sensor and a schedule make nothing."""
    return isinstance(context, dg.AssetCheckExecutionContext) or hasattr(context, "add_output_metadata")


def step_key(context: StepContext) -> str | None:
    """Return the key of the context's step; None outside of a run."""
    try:
        return op_context(context).get_step_execution_context().step.key
    except (dg.DagsterError, AttributeError):  # a context that was made by hand has no step, and raises one of these
        return None


def op_context(context: Any) -> Any:
    """Return the context of the op of an asset's or a check's context; an op's own."""
    return getattr(context, "op_execution_context", context)


def is_alone(context: StepContext) -> bool:
    """Return whether the step is the only one of its process, as under Dagster's multiprocess executor."""
    try:
        return len(op_context(context).get_step_execution_context().execution_plan.step_keys_to_execute) == 1
    except (dg.DagsterError, AttributeError):  # a context that was made by hand
        return False


def assets_of(context: StepContext) -> list[dg.AssetKey]:
    """Return the assets that the step makes or checks: also for an op within a graph that makes assets."""
    op = op_context(context)
    if isinstance(context, dg.AssetCheckExecutionContext):
        return sorted({key.asset_key for key in op.selected_asset_check_keys})
    if not op.has_assets_def:
        return []
    return sorted(op.selected_asset_keys if op.assets_def.node_def is op.op_def else op.assets_def.keys)


def partition_of(work: sky.Work) -> str | None:
    """Return the partition of an event of the work; None for none, and for a range."""
    return work.partition if work.partition and "..." not in work.partition else None


def equal_parts(amount: int, count: int) -> list[int]:
    """Divide whole micro-dollars equally. If the amount grows, no part shrinks."""
    return [amount // count + (place < amount % count) for place in range(count)]


def _total(usages: Mapping[int, Usage]) -> dict[str, Any]:
    """Add up the costs of several pools; the seconds are those of the pool that was used longest, and what was measured
    is of all of them up to the last one's use.
    """
    used = usages.values()
    return {
        **max(used, key=lambda usage: usage.seconds).measured,
        SAVINGS_USD: float(sum(usage.savings_usd for usage in used)),
        COST_USD: float(sum(usage.cost_usd for usage in used)),
        SECONDS: float(max(usage.seconds for usage in used)),
        QUEUE_SECONDS: float(max(usage.queue_seconds for usage in used)),
        NODES: sum(usage.nodes for usage in used),
        ACCELERATOR: ", ".join(sorted({usage.accelerator for usage in used})),
        POOL_ID: ", ".join(dict.fromkeys(pool_id for usage in used for pool_id in usage.pool_ids)),
    }


def _details(usages: Mapping[int, Usage]) -> dict[str, Any]:
    return {name: value for usage in usages.values() for name, value in usage.details.items()}


def _outputs(context: dg.AssetExecutionContext | dg.OpExecutionContext) -> list[str]:
    """Names of the step's outputs that carry the metadata: one for each asset that is made, or the op's first; none for
    an op within a graph of assets.
    """
    try:
        op = op_context(context)
        if op.has_assets_def:
            is_whole = op.assets_def.node_def is op.op_def
            return (
                [op.assets_def.get_output_name_for_asset_key(key) for key in sorted(op.selected_asset_keys)]
                if is_whole
                else []
            )
        return [output.name for output in op.op_def.output_defs[:1] if not output.is_dynamic]
    except dg.DagsterError:  # a context that was built by hand and belongs to no step
        return []


def _materializations(context: dg.AssetExecutionContext | dg.OpExecutionContext) -> int:
    """Return how many materializations carry the metadata of one output: one for each partition of a range."""
    op = op_context(context)
    if step_key(context) is None or not op.has_assets_def or not op.has_partition_key_range:
        return 1
    return max(1, len(op.partition_keys))


def _set(context: dg.AssetExecutionContext | dg.OpExecutionContext, output: str, metadata: Mapping[str, Any]) -> None:
    """Set metadata with `add_output_metadata` for assets too: `add_asset_metadata` does not work if an asset is invoked
    directly, in a test (Dagster 1.13).
    """
    found = shown(metadata)
    try:
        context.add_output_metadata(found, output_name=output)
    # the output was already yielded, or a directly invoked one has metadata, which Dagster sets only once
    except dg.DagsterInvariantViolationError:
        recorded = context.get_output_metadata(output)
        if isinstance(recorded, dict):
            recorded.update(found)
    if step_key(context) is None:
        _let_merge(context)


def _let_merge(context: Any) -> None:
    """Allow the asset's own `add_output_metadata` after ours if the asset is invoked directly: Dagster then allows one
    call for each output, in a run many.
    """
    if "add_output_metadata" in vars(context):
        return
    once = context.add_output_metadata

    def add_output_metadata(
        metadata: Mapping[str, Any], output_name: str | None = None, mapping_key: str | None = None
    ) -> None:
        definitions = context.op_def.output_defs
        recorded = (
            context.get_output_metadata(output_name or definitions[0].name, mapping_key)
            if output_name or len(definitions) == 1
            else None
        )
        if isinstance(recorded, dict):
            recorded.update(metadata)
        else:
            once(metadata, output_name=output_name, mapping_key=mapping_key)

    context.add_output_metadata = add_output_metadata


_lock = threading.Lock()
_usages: WeakKeyDictionary[Any, dict[int, Usage]] = WeakKeyDictionary()
