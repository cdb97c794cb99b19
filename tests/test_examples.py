"""Every file of dags/ and flows/ runs on this machine, as its users run it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BIN = Path(sys.executable).parent
DIGITS = {
    "flows/digits_sweep.py": [[sys.executable, "flows/digits_sweep.py"]],
    "flows/dagster_definitions.py": [[sys.executable, "flows/dagster_definitions.py"]],
    "dags/digits_sweep.py": [
        [str(BIN / "airflow"), "db", "migrate"],
        [str(BIN / "airflow"), "dags", "test", "digits_sweep"],
    ],
}
SWEEPS = {"dags/sweep.py", "flows/sweep.py"}
"""These run in integrations/test_sweeps.py."""


def test_there_is_a_command_for_every_example() -> None:
    """A new example without a command here fails."""
    files = {str(path.relative_to(ROOT)) for folder in ("dags", "flows") for path in (ROOT / folder).glob("*.py")}
    assert files == set(DIGITS) | SWEEPS


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "example",
    [
        pytest.param("flows/dagster_definitions.py", marks=pytest.mark.long),
        pytest.param("flows/digits_sweep.py", marks=pytest.mark.long),
        pytest.param("dags/digits_sweep.py", marks=pytest.mark.long),
    ],
)
def test_the_example_finds_a_good_classifier_and_prints_its_cost(example: str, tmp_path: Path) -> None:
    """The sweep has at least 12 candidates, its winner is right on more than 97 % of unseen digits, and there is a
    bill.
    """
    environ = os.environ | {
        "PREFECT_HOME": str(tmp_path / "prefect"),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "AIRFLOW_HOME": str(tmp_path / "airflow"),
        "AIRFLOW__CORE__DAGS_FOLDER": str(ROOT / "dags"),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW__USAGE_DATA_COLLECTION__ENABLED": "False",
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "200",  # a busy machine needs more than the 20
    }
    environ.pop("DAGSTER_HOME", None)
    said = ""
    for command in DIGITS[example]:
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
        said = done.stdout
    result = json.JSONDecoder().raw_decode("{" + said.rpartition("digits_sweep: {")[2])[0]
    assert result["accuracy"] > 0.97
    assert result["calls"] >= 13
    assert 0 < result["cost_usd"] < 1
