"""The built wheel: its packages, entry points and requirements, and fresh environments with each extra and with none."""

import ast
import configparser
import importlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import uv

import skyward_core

ROOT = Path(skyward_core.__file__).parents[1]
PACKAGES = {"skyward_core", "prefect_skyward", "airflow_provider_skyward", "dagster_skyward"}


@pytest.fixture(scope="module")
def wheel_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from this tree."""
    folder = tmp_path_factory.mktemp("dist")
    run(uv.find_uv_bin(), "build", "--quiet", "--wheel", "--out-dir", str(folder), str(ROOT))
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def wheel(wheel_file: Path) -> zipfile.ZipFile:
    return zipfile.ZipFile(wheel_file)


pytestmark = [pytest.mark.timeout(900)]


def test_the_wheel_holds_exactly_four_packages(wheel: zipfile.ZipFile) -> None:
    """Four import packages, each complete; no tests, DAGs or flows, and no module at the top."""
    names = [name for name in wheel.namelist() if ".dist-info/" not in name]
    assert {name.partition("/")[0] for name in names} == PACKAGES
    for package in PACKAGES:
        home = ROOT / package if package == "skyward_core" else ROOT / "integrations" / package
        expected = {f"{package}/{path.relative_to(home)}" for path in home.rglob("*.py")}
        assert {name for name in names if name.startswith(f"{package}/") and name.endswith(".py")} == expected
    assert {"skyward_core/cli/ui/page.html", *(f"{package}/py.typed" for package in PACKAGES)} <= set(names)
    assert not [name for name in names if "__pycache__" in name or name.endswith(".pyc")]


def test_the_entry_points_can_be_loaded(wheel: zipfile.ZipFile) -> None:
    """Airflow's provider info, Prefect's collection, Dagster's components and our providers are registered, and each
    entry can be loaded.
    """
    (path,) = [name for name in wheel.namelist() if name.endswith("entry_points.txt")]
    entries = configparser.ConfigParser()
    entries.read_string(wheel.read(path).decode())
    assert entries.get("apache_airflow_provider", "provider_info") == "airflow_provider_skyward:get_provider_info"
    assert entries.has_section("prefect.collections")
    for _, target in entries.items("skyward.quotes"):
        module, _, attribute = target.partition(":")
        assert getattr(importlib.import_module(module), attribute)("no such target") is None
    assert entries.get("dagster_dg_cli.registry_modules", "dagster_skyward") == "dagster_skyward"
    for name, target in entries.items("skyward.providers"):
        module, _, attribute = target.partition(":")
        provider = getattr(importlib.import_module(module), attribute)
        assert issubclass(provider, skyward_core.Provider)
        assert provider.name == name


def test_the_wheel_names_its_requirements(wheel: zipfile.ZipFile) -> None:
    """Orchestrators are extras: none of them is required, each can be installed; the licence is included."""
    (path,) = [name for name in wheel.namelist() if name.endswith("METADATA")]
    lines = wheel.read(path).decode().splitlines()
    required = [line.partition(": ")[2] for line in lines if line.startswith("Requires-Dist")]
    plain = [line for line in required if "extra ==" not in line]
    assert not [line for line in plain if line.startswith(("prefect", "apache-airflow", "dagster", "psycopg", "boto3"))]
    # the clouds' SDKs are for tests only
    assert not [line for line in required if line.startswith(("pydo", "verda", "vastai", "runpod"))]
    assert {line.partition(": ")[2] for line in lines if line.startswith("Provides-Extra")} == {
        "aws",
        "prefect",
        "airflow",
        "dagster",
        "postgres",
        "otel",
        "all",
    }
    assert "Name: skyward-core" in lines
    assert [name for name in wheel.namelist() if name.endswith("LICENSE")]


A_CALL = """
import skyward_core as sky
def double(x): return 2 * x
with sky.ComputePool(display="quiet") as pool:
    assert pool.map(double, [1, 2]) == [2, 4]
"""


def run(*command: str, cwd: Path | None = None) -> str:
    """Run a command; fail with its output if it fails."""
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def installed(wheel_file: Path, extra: str, home: Path) -> str:
    """Return the interpreter of a fresh environment that holds the wheel with an extra."""
    python = str(home / "bin" / "python")
    run(uv.find_uv_bin(), "venv", "--quiet", "--python", sys.executable, str(home))
    run(
        uv.find_uv_bin(),
        "pip",
        "install",
        "--quiet",
        "--python",
        python,
        f"skyward-core{extra} @ {wheel_file.as_uri()}",
    )
    return python


def test_without_an_extra_there_is_no_orchestrator_and_a_pool_works(wheel_file: Path, tmp_path: Path) -> None:
    """The bare wheel runs calls, and neither has nor imports any orchestrator."""
    python = installed(wheel_file, "", tmp_path / "env")
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
@pytest.mark.parametrize("orchestrator", ORCHESTRATORS)
def test_each_extra_alone_installs_only_its_orchestrator(wheel_file: Path, orchestrator: str, tmp_path: Path) -> None:
    """With one extra its package can be imported, and the other two orchestrators are not installed."""
    python = installed(wheel_file, f"[{orchestrator}]", tmp_path / "env")
    run(python, "-c", f"import skyward_core; {IMPORTS[orchestrator]}", cwd=tmp_path)
    for other in set(ORCHESTRATORS) - {orchestrator}:
        run(python, "-c", f"import importlib.util; assert importlib.util.find_spec({other!r}) is None", cwd=tmp_path)


def test_the_wheel_works_without_its_tree(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    """Unpacked elsewhere, the core imports and runs a call in a real local pool."""
    wheel.extractall(tmp_path / "site")
    code = """
        import skyward_core as sky, sys
        assert sky.__file__.startswith(sys.argv[1]), sky.__file__
        if __name__ == "__main__":
            with sky.ComputePool(provider=sky.Local(), display="quiet") as pool:
                print(sky.compute(lambda x: 2 * x)(21) >> pool)
    """
    script = tmp_path / "use.py"
    script.write_text("\n".join(line[8:] for line in code.splitlines()))
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "site")],
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=tmp_path,
    )
    assert (done.returncode, done.stdout) == (0, "42\n"), done.stderr
