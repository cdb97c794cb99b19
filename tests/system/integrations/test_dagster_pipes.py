"""Dagster Pipes: functions and scripts on real pools of local nodes, which have no Dagster."""

import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

dg = pytest.importorskip("dagster")

from dagster_pipes import PipesContext  # noqa: E402

import skyward_core as sky  # noqa: E402
from dagster_skyward import PipesSkywardClient, SkywardResource  # noqa: E402
from dagster_skyward.metadata import COST_USD, POOL_ID  # noqa: E402

pytestmark = [pytest.mark.filterwarnings("default::DeprecationWarning")]


def train(step: int, large: int = 0) -> None:
    pipes = PipesContext.get()
    print("a progress bar", end="")
    pipes.log.info(f"step {step} of {pipes.asset_key} with {pipes.get_extra('rate')}")
    print("printed")
    pipes.report_custom_message({"node": pipes.get_extra("rate"), "large": "x" * large})
    pipes.report_asset_check("sound", passed=True)
    pipes.report_asset_materialization(metadata={"loss": 0.5})


def rank() -> None:
    info = sky.instance_info()
    assert info is not None
    PipesContext.get().report_custom_message(info.node)


def fail() -> None:
    PipesContext.get().log.info("before the error")
    raise LookupError("the payload's own error")


SCRIPT = """
import os, sys
from dagster_pipes import open_dagster_pipes

with open_dagster_pipes() as pipes:
    print("from the script")
    pipes.report_custom_message([sys.argv[1], os.environ["MODE"]])
    pipes.report_asset_materialization(metadata={"loss": 0.25})
sys.exit(int(sys.argv[2]))
"""


def lines(instance: Any, result: Any, step: str) -> list[str]:
    return [
        line
        for entry in instance.all_logs(result.run_id)
        if entry.step_key == step
        for line in entry.user_message.splitlines()
    ]


@pytest.mark.timeout(180)
def test_functions_and_scripts_report_with_pipes(tmp_path: Path) -> None:
    """Several calls on one pool: logs, checks, materializations with the cost, custom messages of any size, one writer
    for each node, and errors.
    """
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT))
    seen: dict[str, Any] = {}

    @dg.asset(check_specs=[dg.AssetCheckSpec("sound", asset="model")])
    def model(context: dg.AssetExecutionContext, pipes: PipesSkywardClient) -> dg.MaterializeResult:
        done = pipes.run(context=context, fn=train, args=[1], kwargs={"large": 20_000}, extras={"rate": 3})
        seen["model"] = done.get_custom_messages()
        return done.get_materialize_result()

    @dg.asset(deps=[model])
    def scripted(context: dg.AssetExecutionContext, pipes: PipesSkywardClient) -> dg.MaterializeResult:
        done = pipes.run(context=context, script=script, args=["one", 0], env={"MODE": "test"})
        seen["scripted"] = done.get_custom_messages()
        with pytest.raises(RuntimeError, match=r"train\.py ended with exit code 3"):
            pipes.run(context=context, script=script, args=["two", 3], env={"MODE": "test"})
        return done.get_materialize_result()

    @dg.asset(deps=[scripted])
    def everywhere(context: dg.AssetExecutionContext, pipes: PipesSkywardClient) -> dg.MaterializeResult:
        done = pipes.run(context=context, fn=rank, broadcast=True)
        seen["everywhere"] = sorted(done.get_custom_messages())
        with pytest.raises(LookupError, match="the payload's own error"):
            pipes.run(context=context, fn=fail)
        with pytest.raises(sky.BadRequest, match="either"):
            pipes.run(context=context)
        return done.get_materialize_result()

    client = PipesSkywardClient(compute=SkywardResource(provider=sky.Local(price_per_hour=36.0), nodes=2))
    with dg.DagsterInstance.ephemeral() as instance:
        result = dg.materialize([model, scripted, everywhere], resources={"pipes": client}, instance=instance)
        assert seen == {
            "model": ({"node": 3, "large": "x" * 20_000},),
            "scripted": (["one", "test"],),
            "everywhere": [0, 1],
        }
        logged = {step: lines(instance, result, step) for step in ("model", "scripted", "everywhere")}
    assert "step 1 of model with 3" in logged["model"]
    assert any(line.endswith("printed") and line.startswith("[node ") for line in logged["model"])
    assert any(line.endswith("] from the script") for line in logged["scripted"])
    assert "before the error" in logged["everywhere"]
    assert not [line for step in logged.values() for line in step if "skyward-pipes" in line]
    assert not [line for step in logged.values() for line in step if "did not receive" in line or "unexpected" in line]
    made = {
        event.asset_key.to_user_string(): event.materialization.metadata
        for event in result.get_asset_materialization_events()
    }
    assert (made["model"]["loss"].value, made["scripted"]["loss"].value) == (0.5, 0.25)
    assert all(metadata[COST_USD].value >= 0 for metadata in made.values())
    assert len({metadata[POOL_ID].value for metadata in made.values()}) == 1
    assert [check.check_name for check in result.get_asset_check_evaluations()] == ["sound"]
    assert "dagster_pipes" in sys.modules
