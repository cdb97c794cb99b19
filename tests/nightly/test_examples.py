"""Every file of dags/ and flows/ runs on this machine, as its users run it."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import uv

from tests.programs_of_users import PROGRAMS, wanted

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
DIGITS = {
    "flows/dagster_definitions.py": [[sys.executable, "flows/dagster_definitions.py"]],
    "dags/digits_sweep.py": [
        [str(BIN / "airflow"), "db", "migrate"],
        [str(BIN / "airflow"), "dags", "test", "digits_sweep"],
    ],
}
FLOWS = ("digits_sweep", "hardware_per_step", "shared_warm_pool", "checkpointed_training")
ELSEWHERE = {
    *(f"flows/{name}.py" for name in FLOWS),  # in integrations/test_prefect_browser.py
    "dags/deferrable_training.py",  # in integrations/test_airflow_server.py
    "dags/shared_pool.py",  # in integrations/test_airflow_kill.py
    "dags/train_and_evaluate.py",  # in tests/system/integrations/test_airflow_pools.py
    *("dags/sweep.py", "flows/sweep.py"),  # in integrations/test_sweeps.py
}


def test_there_is_a_command_for_every_example() -> None:
    files = {str(path.relative_to(ROOT)) for folder in ("dags", "flows") for path in (ROOT / folder).glob("*.py")}
    assert files == ELSEWHERE | DIGITS.keys()


@pytest.mark.timeout(400)
@pytest.mark.parametrize("example", DIGITS)
def test_the_example_finds_a_good_classifier_and_prints_its_cost(example: str, tmp_path: Path) -> None:
    """The sweep has at least 12 candidates, and its winner is right on more than 97 % of unseen digits."""
    environ = os.environ | {
        "AIRFLOW_HOME": str(tmp_path / "airflow"),
        "AIRFLOW__CORE__DAGS_FOLDER": str(ROOT / "dags"),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW__USAGE_DATA_COLLECTION__ENABLED": "False",
    }
    environ.pop("DAGSTER_HOME", None)
    said = ""
    for command in DIGITS[example]:
        done = subprocess.run(
            command, cwd=ROOT, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
        said = done.stdout
        assert done.returncode == 0, said[-6000:]
    result = json.JSONDecoder().raw_decode("{" + said.rpartition("digits_sweep: {")[2])[0]
    assert result["accuracy"] > 0.97
    assert result["calls"] >= 13
    assert 0 < result["cost_usd"] < 1


@pytest.mark.timeout(900)
def test_the_first_steps_of_the_page_of_airflow_work_as_they_are_printed(tmp_path: Path) -> None:
    """All but the installation, and the server, which the last step starts (`test_airflow_browser.py`)."""
    page = (ROOT / "docs" / "airflow.md").read_text()
    steps = page.partition("## From the installation to the cost of a run\n")[2].partition("\n## ")[0]
    (dag,) = re.findall(r"^```python\n(.*?)^```", steps, re.DOTALL | re.MULTILINE)
    commands = re.findall(r"^\$ (.*)", steps, re.MULTILINE)
    ours = [
        command for command in commands if not command.startswith(("python3.13 -m venv", "pip ", "airflow standalone"))
    ]
    assert len(commands) == len(ours) + 3
    (tmp_path / "airflow" / "dags").mkdir(parents=True)
    (tmp_path / "airflow" / "dags" / "first_pool.py").write_text(dag)
    done = subprocess.run(
        ["bash", "-ec", "\n".join(ours)],
        cwd=ROOT,
        env=os.environ | {"HOME": str(tmp_path), "PATH": f"{BIN}:{os.environ['PATH']}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    assert "Connection success!" in done.stdout
    assert "returned value: [1229, 2262, 3245, 4203]" in done.stdout  # OEIS A000720
    assert re.search(r"cost: 0\.0\d+ USD, .* nodes: 2", done.stdout), done.stdout[-6000:]


COMMANDS = {
    "examples/grid_search.py": [["python", "examples/grid_search.py"]],
    "examples/joblib_parallel.py": [["python", "examples/joblib_parallel.py"]],
    "examples/scatter_array.py": [["python", "examples/scatter_array.py"]],
    "examples/guides/04_gpu_accelerators.py": [["python", "examples/guides/04_gpu_accelerators.py", "A100", "256"]],
    "flows/hardware_per_step.py": [["python", "flows/hardware_per_step.py"]],
    "flows/digits_sweep.py": [["python", "flows/digits_sweep.py"]],
    "flows/dagster_definitions.py": [["python", "flows/dagster_definitions.py"]],
    "dags/train_and_evaluate.py": [["airflow", "db", "migrate"], ["airflow", "dags", "test", "train_and_evaluate"]],
    "dags/digits_sweep.py": [["airflow", "db", "migrate"], ["airflow", "dags", "test", "digits_sweep"]],
}
"""How a user runs the programs whose one line installs no framework: at least one for each line."""


@pytest.fixture(scope="module")
def environments(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], Path]:
    """Make an environment by exactly the line of a program, once for each line; return its folder of commands."""

    @cache
    def made(line: tuple[str, ...]) -> Path:
        home = tmp_path_factory.mktemp("environment")
        subprocess.run([uv.find_uv_bin(), "venv", "--quiet", "--python", sys.executable, str(home)], check=True)
        install = [uv.find_uv_bin(), "pip", "install", "--quiet", "--python", str(home / "bin/python"), *line]
        subprocess.run(install, cwd=ROOT, check=True)
        return home / "bin"

    return lambda program: made(tuple(wanted(program)))


def test_each_line_without_a_framework_is_tried() -> None:
    """The others are tried in `make frameworks`, with all frameworks in one environment."""
    lines = {tuple(wanted(path)) for path in PROGRAMS if len(wanted(path)) == 1}
    assert lines - {tuple(wanted(ROOT / program)) for program in COMMANDS} == {(".",)}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("program", COMMANDS)
def test_a_program_runs_after_its_one_line(program: str, environments: Callable[[Path], Path], tmp_path: Path) -> None:
    commands = environments(ROOT / program)
    environ = os.environ | {  # a registry's certificates may be named there
        "HOME": str(tmp_path),
        "PATH": f"{commands}:{os.environ['PATH']}",
        "AIRFLOW__CORE__DAGS_FOLDER": str(ROOT / "dags"),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "200",  # a busy machine needs more than the 20
    }
    for command in COMMANDS[program]:
        done = subprocess.run(
            [str(commands / command[0]), *command[1:]],
            cwd=ROOT,
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-6000:]
