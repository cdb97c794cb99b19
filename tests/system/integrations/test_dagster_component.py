"""Dagster: assets that are written in YAML, loaded from a project's folder as `dagster dev` and `dg` do."""

import os
from pathlib import Path
from textwrap import dedent

import pytest

from dagster_skyward import SkywardResource
from dagster_skyward.metadata import COST_USD, NODES, POOL_ID
from tests.unit.integrations.test_dagster_component import (  # noqa: F401 - fixtures
    dg,
    loaded,
    project,
    write,
)

# Dagster's own: it uses its deprecated names for nested resources
pytestmark = pytest.mark.filterwarnings("default::DeprecationWarning")

LOCAL = {"name": "local", "price_per_hour": 36.0}


FUNCTION = """
type: dagster_skyward.SkywardComponent
attributes:
  asset: {key: team/model, partitions_def: {type: static, partition_keys: [mon, tue]}, group_name: training}
  function: yaml_project.training:train
  args: [21]
  partition: day
  provider: {name: local, price_per_hour: 36.0}
  max_cost: 5
  compute: {env: {COLOR: red}}
"""
SCRIPT = """
type: dagster_skyward.SkywardComponent
attributes:
  asset: {key: report, deps: [other]}
  script: report.py
  args: [3]
  resource: compute
  nodes: 2
"""


def test_assets_of_yaml_files_are_made_on_pools(project: Path) -> None:
    """A function of the project gets its arguments and the partition; a script with Dagster Pipes uses the project's
    own resource with the hardware of its file. Both have their costs.
    """
    write(project, "model", FUNCTION)
    folder = write(project, "report", SCRIPT)
    (folder / "report.py").write_text(
        dedent("""
        import sys
        from dagster_pipes import open_dagster_pipes
        with open_dagster_pipes() as pipes:
            pipes.report_asset_materialization(metadata={"rows": int(sys.argv[1])})
        """)
    )
    compute = SkywardResource(provider=LOCAL)
    defs = dg.Definitions.merge(
        loaded(project),
        dg.Definitions(resources={"compute": compute}, jobs=[dg.define_asset_job("report_job", ["report"])]),
    )
    assert defs.resolve_asset_graph().get(dg.AssetKey(["team", "model"])).group_name == "training"
    with dg.DagsterInstance.ephemeral() as instance:
        made = defs.resolve_implicit_global_asset_job_def().execute_in_process(
            instance=instance, partition_key="tue", asset_selection=[dg.AssetKey(["team", "model"])]
        )
        assert made.output_for_node("skyward_team__model") == "tue42"
        reported = defs.resolve_job_def("report_job").execute_in_process(instance=instance)
    (of_model,) = made.get_asset_materialization_events()
    (of_report,) = reported.get_asset_materialization_events()
    assert of_model.materialization.metadata[COST_USD].value > 0
    assert of_report.materialization.metadata["rows"].value == 3
    assert of_report.materialization.metadata[NODES].value == 2
    assert of_report.materialization.metadata[COST_USD].value > 0
    assert of_report.materialization.metadata[POOL_ID].value != of_model.materialization.metadata[POOL_ID].value
    assert "yaml_project" not in os.environ.get("PYTHONPATH", "")  # the module has travelled by value
