"""Dagster: the check of what an asset has cost. Metadata are written by hand, so that no pool is needed."""

from typing import Any

import pytest

dg = pytest.importorskip("dagster")

import skyward_core as sky  # noqa: E402
from dagster_skyward import build_cost_check  # noqa: E402
from dagster_skyward.metadata import COST_USD, OTHER_COST_USD  # noqa: E402


def evaluated(costs: dict[str, float] | None, others: list[dict[str, Any]], max_usd: float, **options: Any) -> Any:
    """Materialize an asset with these amounts (None: not at all), then run its check; return its evaluation."""

    @dg.asset
    def model(context: dg.AssetExecutionContext) -> dg.MaterializeResult:
        for other in others:
            context.log_event(dg.AssetObservation(**{"asset_key": "model"} | other))
        return dg.MaterializeResult(metadata=costs)

    check = build_cost_check(model, max_usd, **options)
    with dg.DagsterInstance.ephemeral() as instance:
        if costs is not None:
            dg.materialize([model], instance=instance)
        result = dg.materialize(
            [model, check], selection=dg.AssetSelection.checks(check), instance=instance, raise_on_error=False
        )
    (evaluation,) = result.get_asset_check_evaluations()
    return evaluation


@pytest.mark.parametrize(("max_usd", "passed"), [(3.0, True), (2.9, False)])
def test_the_cost_of_a_materialization_and_the_rest_of_its_run_are_compared(max_usd: float, passed: bool) -> None:
    """Observations of the asset count with the materialization; those of other assets and other keys do not."""
    others = [
        {"metadata": {OTHER_COST_USD: 0.5}},
        {"metadata": {OTHER_COST_USD: 0.5}},
        {"metadata": {"skyward/seconds": 70.0}},
        {"asset_key": "other", "metadata": {OTHER_COST_USD: 70.0}},
        {"metadata": {OTHER_COST_USD: 70.0}, "partition": "another"},
    ]
    evaluation = evaluated({COST_USD: 2.0}, others, max_usd, severity=dg.AssetCheckSeverity.ERROR)
    assert evaluation.passed is passed
    assert evaluation.severity is dg.AssetCheckSeverity.ERROR
    assert evaluation.description == f"3.000000 USD of {max_usd:g} USD"
    assert (evaluation.metadata[COST_USD].value, evaluation.metadata[OTHER_COST_USD].value) == (2.0, 1.0)


def test_without_a_cost_the_check_warns_and_says_why() -> None:
    """A cost that is not known is not taken for a low one."""
    evaluation = evaluated({}, [], 1.0, severity=dg.AssetCheckSeverity.ERROR, name="cheap")
    assert evaluation.check_name == "cheap"
    assert not evaluation.passed
    assert evaluation.severity is dg.AssetCheckSeverity.WARN
    assert "no skyward/cost_usd" in evaluation.description
    evaluation = evaluated(None, [], 1.0)
    assert "no materialization" in evaluation.description


@pytest.mark.parametrize("max_usd", [0, -1.0, float("nan")])
def test_a_limit_that_is_no_amount_is_refused(max_usd: float) -> None:
    """The error says what to write."""
    with pytest.raises(sky.BadRequest, match="above 0"):
        build_cost_check("model", max_usd)
