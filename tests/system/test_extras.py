"""The built wheel, installed alone in a fresh environment with each extra, and with none."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import uv

ROOT = Path(__file__).parents[2]
A_CALL = """
import skyward_core as sky
def double(x): return 2 * x
with sky.ComputePool(display="quiet") as pool:
    assert pool.map(double, [1, 2]) == [2, 4]
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from this tree."""
    out = tmp_path_factory.mktemp("wheel")
    run(uv.find_uv_bin(), "build", "--quiet", "--wheel", "--out-dir", str(out), cwd=ROOT)
    return next(out.glob("*.whl"))


def run(*command: str, cwd: Path | None = None) -> str:
    """Run a command; fail with its output if it fails."""
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def installed(wheel: Path, extra: str, home: Path) -> str:
    """Return the interpreter of a fresh environment that holds the wheel with an extra."""
    python = str(home / "bin" / "python")
    run(uv.find_uv_bin(), "venv", "--quiet", "--python", sys.executable, str(home))
    run(uv.find_uv_bin(), "pip", "install", "--quiet", "--python", python, f"skyward-core{extra} @ {wheel.as_uri()}")
    return python


@pytest.mark.timeout(900)
def test_without_an_extra_there_is_no_orchestrator_and_a_pool_works(wheel: Path, tmp_path: Path) -> None:
    """The bare wheel runs calls, and neither has nor imports any orchestrator."""
    python = installed(wheel, "", tmp_path / "env")
    output = run(
        python,
        "-c",
        "import sys, skyward_core; print(sorted({name.partition('.')[0] for name in sys.modules}))",
        cwd=tmp_path,
    )
    assert not {"prefect", "airflow", "dagster", "distributed", "pydantic"} & set(ast.literal_eval(output))
    script = tmp_path / "call.py"
    script.write_text(A_CALL)
    run(python, str(script), cwd=tmp_path)


ORCHESTRATORS = ("prefect", "airflow", "dagster")
IMPORTS = {
    "prefect": "from prefect_skyward import SkywardTaskRunner",
    "airflow": "from airflow_provider_skyward.operators import SkywardOperator; from airflow_provider_skyward.decorators import skyward_task",
    "dagster": "from dagster_skyward import SkywardResource",
}


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("orchestrator", ORCHESTRATORS)
def test_each_extra_alone_installs_only_its_orchestrator(wheel: Path, orchestrator: str, tmp_path: Path) -> None:
    """With one extra its package can be imported, and the other two orchestrators are not installed."""
    python = installed(wheel, f"[{orchestrator}]", tmp_path / "env")
    run(python, "-c", f"import skyward_core; {IMPORTS[orchestrator]}", cwd=tmp_path)
    for other in set(ORCHESTRATORS) - {orchestrator}:
        run(python, "-c", f"import importlib.util; assert importlib.util.find_spec({other!r}) is None", cwd=tmp_path)
