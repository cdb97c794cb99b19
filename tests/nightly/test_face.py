"""`import skyward_core`: every public name exists and has a docstring, and the import is cheap."""

import json
import subprocess
import sys

import pytest

import skyward_core as sky


@pytest.mark.parametrize(
    ("statement", "unwanted"),
    [
        (
            "import skyward_core",
            "distributed dask pydantic rich numpy pandas torch jax sklearn joblib boto3 prefect airflow dagster uv cloudpickle psutil cryptography",
        ),
        (
            "import skyward_core; skyward_core.compute; skyward_core.gather; skyward_core.LogLine; skyward_core.instance_info()",
            "distributed dask pydantic rich",
        ),
        (
            "import skyward_core; skyward_core.ComputePool; skyward_core.Local()",
            "distributed dask rich tenacity numpy torch jax sklearn boto3 prefect airflow dagster",
        ),
        (
            "import skyward_core; skyward_core.ScikitLearnPool(provider=skyward_core.Local()); skyward_core.integrations",
            "distributed dask numpy sklearn joblib",
        ),
        ("import skyward_core.sklearn.tasks", "pydantic distributed numpy sklearn joblib"),
        (
            "import skyward_core.worker.node, skyward_core.worker.supervisor",
            "pydantic rich uv boto3 asyncssh httpx tenacity prefect airflow dagster",
        ),
    ],
)
def test_the_import_loads_no_heavy_package(statement: str, unwanted: str) -> None:
    code = f"{statement}\nimport sys, json; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    loaded = {name.partition(".")[0] for name in json.loads(done.stdout)}
    assert loaded & set(unwanted.split()) == set()


NOT_FOR_A_JOINER = {
    "cryptography.x509",
    "skyward_core.cleanup.release",
    "skyward_core.provisioning.lifecycle",
    "skyward_core.provisioning.selection",
    "skyward_core.session.session",
    "skyward_core.session.stewardship",
    "skyward_core.worker.pool_worker",
    "sqlalchemy.dialects.postgresql",
}
JOIN = """
import sys
import skyward_core as sky
@sky.compute
def modules():
    return sorted(sys.modules)
with sky.ComputePool(name="face", keep_warm=60, provider=sky.Local(), display="quiet") as pool:
    {call}
    print(*sys.modules)
"""


def test_a_process_that_joins_a_pool_loads_nothing_of_what_rents_machines() -> None:
    """Its first result would come later by the time that these modules need."""
    run = [sys.executable, "-c"]
    subprocess.run([*run, JOIN.format(call="pass")], capture_output=True, timeout=120, check=True)
    done = subprocess.run([*run, JOIN.format(call="modules() >> pool")], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    sky.release("face")
    assert set(done.stdout.split()) & NOT_FOR_A_JOINER == set()
