"""The asset of the stack: calls on the two nodes, which the settings name (SKYWARD_PROVIDER)."""

import time

import dagster as dg

import skyward_core as sky
from dagster_skyward import SkywardResource


def square(number: int) -> int:
    print(f"{number} on node {sky.instance_info().node}")
    until = time.monotonic() + 4  # for so long that the nodes' utilisation is measured
    while time.monotonic() < until:
        sum(range(10_000))
    return number * number


@dg.asset
def two_nodes_asset(context: dg.AssetExecutionContext, compute: SkywardResource) -> list[int]:
    return compute.map(context, square, [1, 2, 3, 4])


defs = dg.Definitions(
    assets=[two_nodes_asset],
    jobs=[dg.define_asset_job("two_nodes", [two_nodes_asset])],
    resources={"compute": SkywardResource(nodes=2)},
    executor=dg.in_process_executor,
)
