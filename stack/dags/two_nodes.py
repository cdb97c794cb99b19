"""The DAG of the stack: a task on the two nodes, which the settings name (SKYWARD_PROVIDER)."""

import time

from airflow.sdk import dag, task

import skyward_core as sky


@dag(schedule=None, catchup=False, tags=["skyward", "stack"])
def two_nodes_dag():
    @task.skyward(nodes=2, map_over="number")
    def squares(number: int) -> int:
        print(f"{number} on node {sky.instance_info().node}")
        until = time.monotonic() + 4  # for so long that the nodes' utilisation is measured
        while time.monotonic() < until:
            sum(range(10_000))
        return number * number

    squares([1, 2, 3, 4])  # pyright: ignore[reportArgumentType] - map_over takes a list of the parameter's type


two_nodes_dag()
