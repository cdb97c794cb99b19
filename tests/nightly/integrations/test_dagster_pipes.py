"""Dagster Pipes: functions and scripts on real pools of local nodes, which have no Dagster."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.filterwarnings("default::DeprecationWarning")]


ENDLESS = """
import dagster as dg
import skyward_core as sky
from dagster_skyward import PipesSkywardClient, SkywardResource

@dg.asset
def endless(context: dg.AssetExecutionContext, pipes: PipesSkywardClient):
    return pipes.run(context=context, script="sleep.py").get_materialize_result()

if __name__ == "__main__":
    compute = SkywardResource(provider=sky.Local(price_per_hour=1.0))
    dg.materialize([endless], resources={"pipes": PipesSkywardClient(compute=compute)})
"""
SLEEP = """
import importlib.util, os, time
from dagster_pipes import open_dagster_pipes

with open_dagster_pipes() as pipes:
    pipes.log.info(f"the script runs in {os.getpid()}")
    time.sleep(600)
"""


@pytest.mark.timeout(120)
def test_termination_ends_the_script_on_its_node(tmp_path: Path) -> None:
    """Dagster's interrupt ends the run, the call, and the process of its script. Its log line came while it ran."""
    (tmp_path / "endless.py").write_text(ENDLESS)
    (tmp_path / "sleep.py").write_text(SLEEP)
    process = subprocess.Popen(
        [sys.executable, "endless.py"],
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "DAGSTER_HOME": ""},
    )
    assert process.stderr is not None
    try:
        found = next(
            (match for line in process.stderr if (match := re.search(r"the script runs in (\d+)", line))), None
        )
        assert found is not None
        assert os.path.exists(f"/proc/{found[1]}")
        process.send_signal(signal.SIGINT)
        rest = process.communicate(timeout=60)[1]
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
    assert "DagsterExecutionInterruptedError" in rest
    assert not os.path.exists(f"/proc/{found[1]}")
