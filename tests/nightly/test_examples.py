"""Every file of dags/ and flows/ runs on this machine, as its users run it."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
DIGITS = {
    "flows/dagster_definitions.py": [[sys.executable, "flows/dagster_definitions.py"]],
    "dags/digits_sweep.py": [
        [str(BIN / "airflow"), "db", "migrate"],
        [str(BIN / "airflow"), "dags", "test", "digits_sweep"],
    ],
}
FLOWS = {
    f"flows/{name}.py" for name in ("digits_sweep", "hardware_per_step", "shared_warm_pool", "checkpointed_training")
}
"""These run in integrations/test_prefect_browser.py."""
DEFERRED = {"dags/deferrable_training.py"}
"""This runs in integrations/test_airflow_server.py."""
SHARED = {"dags/shared_pool.py"}
"""This runs in integrations/test_airflow_pools.py."""
SWEEPS = {"dags/sweep.py", "flows/sweep.py"}
"""These run in integrations/test_sweeps.py."""


def test_there_is_a_command_for_every_example() -> None:
    """A new example without a command here fails."""
    files = {str(path.relative_to(ROOT)) for folder in ("dags", "flows") for path in (ROOT / folder).glob("*.py")}
    assert files == {*DIGITS, *FLOWS, *DEFERRED, *SHARED, *SWEEPS}


@pytest.mark.timeout(400)
@pytest.mark.parametrize("example", ["flows/dagster_definitions.py", "dags/digits_sweep.py"])
def test_the_example_finds_a_good_classifier_and_prints_its_cost(example: str, tmp_path: Path) -> None:
    """The sweep has at least 12 candidates, its winner is right on more than 97 % of unseen digits, and there is a
    bill.
    """
    environ = _environ(tmp_path)
    said = ""
    for command in DIGITS[example]:
        said = _output(command, environ)
    result = _report(said, "digits_sweep")
    assert result["accuracy"] > 0.97
    assert result["calls"] >= 13
    assert 0 < result["cost_usd"] < 1


def _environ(folder: Path) -> dict[str, str]:
    """Return the environment of an example: its own home of each orchestrator."""
    environ = os.environ | {
        "PREFECT_HOME": str(folder / "prefect"),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "AIRFLOW_HOME": str(folder / "airflow"),
        "AIRFLOW__CORE__DAGS_FOLDER": str(ROOT / "dags"),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW__USAGE_DATA_COLLECTION__ENABLED": "False",
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "200",  # a busy machine needs more than the 20
    }
    environ.pop("DAGSTER_HOME", None)
    return environ


def _output(command: list[str], environ: dict[str, str]) -> str:
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=380,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout


def _report(output: str, name: str) -> dict[str, Any]:
    """Return the JSON after the last "NAME: " of an output."""
    return json.JSONDecoder().raw_decode("{" + output.rpartition(name + ": {")[2])[0]
