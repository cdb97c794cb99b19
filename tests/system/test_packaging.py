"""The built wheel: its packages, entry points and requirements, and fresh environments with each extra and with none."""

import ast
import configparser
import importlib
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
    names = [name for name in wheel.namelist() if ".dist-info/" not in name]
    assert {name.partition("/")[0] for name in names} == PACKAGES
    for package in PACKAGES:
        home = ROOT / package if package == "skyward_core" else ROOT / "integrations" / package
        expected = {f"{package}/{path.relative_to(home)}" for path in home.rglob("*.py")}
        assert {name for name in names if name.startswith(f"{package}/") and name.endswith(".py")} == expected
    assert {"skyward_core/cli/page.html", *(f"{package}/py.typed" for package in PACKAGES)} <= set(names)
    assert not [name for name in names if "__pycache__" in name or name.endswith(".pyc")]


def test_the_entry_points_can_be_loaded(wheel: zipfile.ZipFile) -> None:
    (path,) = [name for name in wheel.namelist() if name.endswith("entry_points.txt")]
    entries = configparser.ConfigParser()
    entries.read_string(wheel.read(path).decode())
    assert entries.get("apache_airflow_provider", "provider_info") == "airflow_provider_skyward:get_provider_info"
    assert entries.has_section("prefect.collections")
    for _, target in entries.items("skyward.quotes"):
        module, _, attribute = target.partition(":")
        assert getattr(importlib.import_module(module), attribute)("no such target") is None
    for _, target in entries.items("skyward.bills"):
        module, _, attribute = target.partition(":")
        assert callable(getattr(importlib.import_module(module), attribute))
    assert entries.get("dagster_dg_cli.registry_modules", "dagster_skyward") == "dagster_skyward"
    for name, target in entries.items("skyward.providers"):
        module, _, attribute = target.partition(":")
        provider = getattr(importlib.import_module(module), attribute)
        assert issubclass(provider, skyward_core.Provider)
        assert provider.name == name


def test_the_wheel_names_its_requirements(wheel: zipfile.ZipFile) -> None:
    """Orchestrators are extras: none of them is required, each can be installed; the clouds' SDKs are for tests only."""
    (path,) = [name for name in wheel.namelist() if name.endswith("METADATA")]
    lines = wheel.read(path).decode().splitlines()
    required = [line.partition(": ")[2] for line in lines if line.startswith("Requires-Dist")]
    plain = [line for line in required if "extra ==" not in line]
    assert not [line for line in plain if line.startswith(("prefect", "apache-airflow", "dagster", "psycopg", "boto3"))]
    assert not [line for line in required if line.startswith(("pydo", "verda", "vastai", "runpod"))]
    extras = {line.partition(": ")[2] for line in lines if line.startswith("Provides-Extra")}
    assert extras == {
        "aws",
        "prefect",
        "airflow",
        "dagster",
        "postgres",
        "otel",
        "prometheus",
        "sklearn",
        "examples",
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
    python, source = str(home / "bin" / "python"), f"skyward-core{extra} @ {wheel_file.as_uri()}"
    run(uv.find_uv_bin(), "venv", "--quiet", "--python", sys.executable, str(home))
    run(uv.find_uv_bin(), "pip", "install", "--quiet", "--python", python, source)
    return python


def test_without_an_extra_there_is_no_orchestrator_and_a_pool_works(wheel_file: Path, tmp_path: Path) -> None:
    python = installed(wheel_file, "", tmp_path / "env")
    loaded = run(python, "-c", "import sys, skyward_core; print(sorted(sys.modules))", cwd=tmp_path)
    names = {name.partition(".")[0] for name in ast.literal_eval(loaded)}
    assert not {"prefect", "airflow", "dagster", "distributed", "pydantic"} & names
    (tmp_path / "call.py").write_text(A_CALL)
    run(python, "call.py", cwd=tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("orchestrator", "statement"),
    [
        ("prefect", "from prefect_skyward import SkywardTaskRunner"),
        ("airflow", "from airflow_provider_skyward import operators, decorators"),
        ("dagster", "from dagster_skyward import SkywardResource"),
    ],
)
def test_each_extra_alone_installs_only_its_orchestrator(
    wheel_file: Path, orchestrator: str, statement: str, tmp_path: Path
) -> None:
    python = installed(wheel_file, f"[{orchestrator}]", tmp_path / "env")
    run(python, "-c", f"import skyward_core; {statement}", cwd=tmp_path)
    for other in {"prefect", "airflow", "dagster"} - {orchestrator}:
        run(python, "-c", f"import importlib.util; assert importlib.util.find_spec({other!r}) is None", cwd=tmp_path)
