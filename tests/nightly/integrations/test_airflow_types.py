"""What a type checker finds in a DAG file: pyright knows the keywords of the operators and of the decorator."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

if importlib.util.find_spec("airflow") is None:
    pytest.skip("Airflow is not installed", allow_module_level=True)

ROOT = Path(__file__).parents[3]

RIGHT = """
import skyward_core as sky
from airflow_provider_skyward.decorators import skyward_task
from airflow_provider_skyward.operators import SkywardOperator
from airflow_provider_skyward.pools import SkywardCreatePool, skyward_pool
from airflow_provider_skyward.programs import SkywardRunOperator

gpu = SkywardOperator(task_id="gpu", python_callable=len, op_args=["ab"]).output
SkywardOperator(task_id="a", python_callable=len, accelerator="A100", nodes="{{ params.n }}", retries=2, name=gpu)
SkywardOperator(task_id="b", python_callable=len, accelerator=gpu, spot=sky.Spot.Percent(0.8), nodes=(1, 4))
SkywardOperator(task_id="c", python_callable=len, provider=[sky.AWS(), "local"], secrets=("HF_TOKEN",), pool_slots=2)
SkywardRunOperator(task_id="d", command="ls", accelerator="A100", broadcast=True, env={"DAY": "{{ ds }}"})
SkywardCreatePool(task_id="e", accelerator="A100", hold=60, skyward_conn_id="ledger")
with skyward_pool("g", name="nightly", keep_warm=60, accelerator=["A100", sky.Alternative("T4")]) as pool:
    pass

@skyward_task(accelerator="A100", nodes=2, map_over="x", durable=False, multiple_outputs=True)
def train(x: int) -> dict[str, int]:
    return {"x": x}
"""
WRONG = (
    "SkywardOperator(task_id='a', python_callable=len, acelerator='A100')",
    "SkywardRunOperator(task_id='a', command='ls', acelerator='A100')",
    "SkywardCreatePool(task_id='a', acelerator='A100')",
    "skyward_pool('g', acelerator='A100')",
    "skyward_task(acelerator='A100')(len)",
)


def test_pyright_refuses_a_keyword_that_no_pool_has(tmp_path: Path) -> None:
    file = tmp_path / "pools.py"
    file.write_text(RIGHT + "\n".join(WRONG) + "\nSkywardOperator(task_id='a', python_callable=len, nodes=1.5)\n")
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    found = [
        (one["range"]["start"]["line"] - RIGHT.count("\n"), one["message"].partition("\n")[0])
        for one in json.loads(done.stdout)["generalDiagnostics"]
        if one["severity"] == "error"
    ]
    assert [line for line, _ in found] == list(range(len(WRONG) + 1)), found
    assert {words for _, words in found[:-1]} == {'No parameter named "acelerator"'}
    assert 'parameter "nodes"' in found[-1][1]
