"""A step's use of pools as Dagster metadata, and the place of that metadata for each kind of step.

Dagster plots numbers (int and float) of an asset over its materializations; text is listed. The cost of a step up to
its asset's materialization goes with the materialization. The rest of the bill is known when the pool has closed: the
end of the machines, and the costs of steps without a materialization (failed ones, checks, ops of a graph, outputs that
were not made). It follows as observations of the assets, under its own key, so that the two add up to the bill.
"""

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import dagster as dg

import skyward_core as sky

type StepContext = dg.AssetExecutionContext | dg.OpExecutionContext | dg.AssetCheckExecutionContext

COST_USD = "skyward/cost_usd"
OTHER_COST_USD = "skyward/other_cost_usd"
SECONDS = "skyward/seconds"
PLACES = {COST_USD: 9, SECONDS: 3}
"""Decimal places of a share, so that a person can read it; `observe_rest` adds the rounding difference."""
NODES = "skyward/nodes"
ACCELERATOR = "skyward/accelerator"
POOL_ID = "skyward/pool_id"

SMALLEST_USD = 1e-9
"""A smaller difference is a rounding error."""


@dataclass(frozen=True, slots=True)
class Usage:
    """A step's use of pools, from its first use to the end of its last: USD on the bill, seconds, number of nodes,
    accelerator in words, the pools' ids.
    """

    cost_usd: float
    seconds: float
    nodes: int
    accelerator: str
    pool_ids: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Share:
    """The part of the bill that a step bears once the pools have closed.

    `since` is when it began to use them, in seconds since 1970.
    """

    context: StepContext
    work: sky.Work
    cost_usd: float
    since: float
    pool_id: str


def record(context: StepContext, pool: object, usage: Usage) -> None:
    """Set the step's metadata. A later call for the same pool replaces the earlier one; another pool of the same step
    is added.

    An asset gets it with its materialization, an op with its first output. If a step makes several assets, each gets an
    equal share of the cost and of the seconds. A check, an op without outputs and an op with dynamic outputs cannot
    have metadata.
    """
    with _lock:
        usages = _usages.setdefault(context, {})
        usages[id(pool)] = usage
        total = _total(usages) | _names(work_of(context))
    if isinstance(context, dg.AssetCheckExecutionContext):
        return
    outputs = _outputs(context)
    for output in outputs:
        _set(
            context,
            output,
            total | {name: round(total[name] / len(outputs), places) for name, places in PLACES.items()},
        )


def work_of(context: StepContext) -> sky.Work:
    """Return the step's work, as in the ledger and the machines' tags: only the system for a context that was made by
    hand.
    """
    step = step_key(context)
    if step is None:
        return sky.Work(system="dagster")
    op = _op_context(context)
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


def step_key(context: StepContext) -> str | None:
    """Return the key of the context's step; None outside of a run."""
    try:
        return _op_context(context).get_step_execution_context().step.key
    except (dg.DagsterError, AttributeError):  # a context that was made by hand has no step, and raises one of these
        return None


def assets_of(context: StepContext) -> list[dg.AssetKey]:
    """Return the assets that the step makes or checks: also for an op within a graph that makes assets."""
    op = _op_context(context)
    if isinstance(context, dg.AssetCheckExecutionContext):
        return sorted({key.asset_key for key in op.selected_asset_check_keys})
    if not op.has_assets_def:
        return []
    return sorted(op.selected_asset_keys if op.assets_def.node_def is op.op_def else op.assets_def.keys)


def observe_rest(shares: Iterable[Share]) -> dict[str, dict[sky.Work, float]]:
    """Log as observations the parts of the bill that are in no materialization; return all shares, by pool and work,
    for the ledger.

    A share goes equally to the assets that the step has made, or if it has made none, to all that it should have made.
    The share of an op without assets goes to the log.
    """
    recorded: dict[str, dict[sky.Work, float]] = {}
    for its in _by_step(shares):
        context = its[-1].context
        made = _made(context, min(share.since for share in its))
        assets = sorted(made) or assets_of(context)
        due = sum(share.cost_usd for share in its)
        for asset in assets:
            rest = due / len(assets) - made.get(asset, 0.0)
            if abs(rest) > SMALLEST_USD:
                _observe(context, asset, rest, its)
        if not assets:
            context.log.info("cost of the step, with its share of the pool's end: %.6f USD", due)
        for share in its:
            names = [asset.to_user_string() for asset in assets] or [""]
            for name in names:
                work = sky.Work.of({**share.work.labels(), "asset": name})
                of_pool = recorded.setdefault(share.pool_id, {})
                of_pool[work] = of_pool.get(work, 0.0) + share.cost_usd / len(names)
    return recorded


def _by_step(shares: Iterable[Share]) -> list[list[Share]]:
    """Group all tries of a step in this process: the costs that one try has materialized are subtracted only once."""
    found: dict[str | None, list[Share]] = {}
    for share in shares:
        found.setdefault(step_key(share.context), []).append(share)
    return list(found.values())


def _made(context: StepContext, since: float) -> dict[dg.AssetKey, float]:
    """Return the assets that the step has made since then, with the cost in each materialization."""
    op, step = _op_context(context), step_key(context)
    made: dict[dg.AssetKey, float] = {}
    for entry in op.instance.all_logs(op.run_id, of_type=dg.DagsterEventType.ASSET_MATERIALIZATION):
        event = entry.dagster_event
        if event is None or entry.step_key != step or entry.timestamp < since or event.asset_key is None:
            continue
        value = event.step_materialization_data.materialization.metadata.get(COST_USD)
        made[event.asset_key] = made.get(event.asset_key, 0.0) + (
            float(value.value) if isinstance(value, dg.FloatMetadataValue) else 0.0
        )
    return made


def _observe(context: StepContext, asset: dg.AssetKey, cost_usd: float, shares: Sequence[Share]) -> None:
    work = shares[0].work
    metadata = {
        OTHER_COST_USD: round(cost_usd, PLACES[COST_USD]),
        POOL_ID: ", ".join(dict.fromkeys(share.pool_id for share in shares)),
        **_names(work),
    }
    partition = work.partition if "..." not in work.partition else ""
    _op_context(context).log_event(dg.AssetObservation(asset, metadata=metadata, partition=partition or None))


def _names(work: sky.Work) -> dict[str, str]:
    """Return the work in metadata keys of the step; the asset is the one that carries the metadata."""
    named = {"run": work.run, "job": work.workflow, "step": work.task, "partition": work.partition, "asset": work.asset}
    return {f"skyward/{name}": value for name, value in named.items() if value}


def _total(usages: Mapping[int, Usage]) -> dict[str, Any]:
    """Add up the costs of several pools; the seconds are those of the pool that was used longest."""
    used = usages.values()
    return {
        COST_USD: float(sum(usage.cost_usd for usage in used)),
        SECONDS: float(max(usage.seconds for usage in used)),
        NODES: sum(usage.nodes for usage in used),
        ACCELERATOR: ", ".join(sorted({usage.accelerator for usage in used})),
        POOL_ID: ", ".join(dict.fromkeys(pool_id for usage in used for pool_id in usage.pool_ids)),
    }


def _outputs(context: dg.AssetExecutionContext | dg.OpExecutionContext) -> list[str]:
    """Names of the step's outputs that carry the metadata: one for each asset that is made, or the op's first; none for
    an op within a graph of assets.
    """
    try:
        op = _op_context(context)
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


def _set(context: dg.AssetExecutionContext | dg.OpExecutionContext, output: str, metadata: Mapping[str, Any]) -> None:
    """Set metadata with `add_output_metadata` for assets too: `add_asset_metadata` does not work if an asset is invoked
    directly, in a test (Dagster 1.13).
    """
    try:
        context.add_output_metadata(dict(metadata), output_name=output)
    # the output was already yielded, or a directly invoked one has metadata, which Dagster sets only once
    except dg.DagsterInvariantViolationError:
        recorded = context.get_output_metadata(output)
        if isinstance(recorded, dict):
            recorded.update(metadata)
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


def _op_context(context: Any) -> Any:
    return getattr(context, "op_execution_context", context)


_lock = threading.Lock()
_usages: WeakKeyDictionary[Any, dict[int, Usage]] = WeakKeyDictionary()
