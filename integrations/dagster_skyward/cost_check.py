"""`build_cost_check`: an asset check of what the latest materialization has cost on its pools."""

import dagster as dg

import skyward_core as sky
from dagster_skyward.metadata import COST_USD, OTHER_COST_USD


def build_cost_check(
    asset: dg.AssetKey | str | list[str] | dg.AssetsDefinition | dg.AssetSpec,
    max_usd: float,
    *,
    severity: dg.AssetCheckSeverity = dg.AssetCheckSeverity.WARN,
    name: str = "skyward_cost",
) -> dg.AssetChecksDefinition:
    """Return a check that fails if the latest materialization of the asset has cost more than `max_usd`.

    The cost is `skyward/cost_usd` of the materialization, and `skyward/other_cost_usd` of the observations of its run
    so far. The latter are written when the pool closes: a check in the same run does not have them yet. Without a cost
    the check fails as a warning, whatever the severity. Raises BadRequest if `max_usd` is not above 0.
    """
    if not max_usd > 0:
        raise sky.BadRequest(f"max_usd={max_usd!r}: write an amount above 0, in USD")

    @dg.asset_check(
        asset=asset,  # pyright: ignore[reportArgumentType] - it takes a spec too
        name=name,
        description=f"The latest materialization has cost {max_usd:g} USD at most.",
        metadata={"skyward/max_usd": max_usd},
    )
    def skyward_cost(context: dg.AssetCheckExecutionContext) -> dg.AssetCheckResult:
        (key,) = {one.asset_key for one in context.op_execution_context.selected_asset_check_keys}
        return _result(context.instance, key, max_usd, severity)

    return skyward_cost


def _result(
    instance: dg.DagsterInstance, asset: dg.AssetKey, max_usd: float, severity: dg.AssetCheckSeverity
) -> dg.AssetCheckResult:
    event = instance.get_latest_materialization_event(asset)
    if event is None or event.asset_materialization is None:
        return _unknown("the asset has no materialization yet: materialize it first", max_usd)
    materialization = event.asset_materialization
    cost = _amount(materialization.metadata, COST_USD)
    others = [
        amount
        for entry in instance.all_logs(event.run_id, of_type=dg.DagsterEventType.ASSET_OBSERVATION)
        if (observation := entry.asset_observation) is not None
        and observation.asset_key == asset
        and observation.partition in {None, materialization.partition}
        and (amount := _amount(observation.metadata, OTHER_COST_USD)) is not None
    ]
    if cost is None and not others:
        return _unknown(f"the latest materialization has no {COST_USD}: its step has used no SkywardResource", max_usd)
    cost, other = cost or 0.0, sum(others)
    total = cost + other
    return dg.AssetCheckResult(
        passed=total <= max_usd,
        severity=severity,
        description=f"{total:.6f} USD of {max_usd:g} USD",
        metadata={
            COST_USD: cost,
            OTHER_COST_USD: float(other),
            "skyward/max_usd": max_usd,
            "skyward/run": event.run_id,
        },
    )


def _unknown(why: str, max_usd: float) -> dg.AssetCheckResult:
    return dg.AssetCheckResult(
        passed=False,
        severity=dg.AssetCheckSeverity.WARN,
        description=f"the cost is not known: {why}",
        metadata={"skyward/max_usd": max_usd},
    )


def _amount(metadata: dict[str, dg.MetadataValue] | object, name: str) -> float | None:
    value = getattr(metadata.get(name) if isinstance(metadata, dict) else None, "value", None)
    return float(value) if isinstance(value, (int, float)) else None
