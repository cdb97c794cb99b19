"""The wheel has the four packages and no other, and its entry points can be loaded."""

import configparser
import importlib
import os
import subprocess
import zipfile
from pathlib import Path

import pytest
import uv

import skyward_core

ROOT = Path(skyward_core.__file__).parents[1]
PACKAGES = {"skyward_core", "prefect_skyward", "airflow_provider_skyward", "dagster_skyward"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel, built from this tree."""
    folder = tmp_path_factory.mktemp("dist")
    done = subprocess.run(
        [uv.find_uv_bin(), "build", "--wheel", "--out-dir", str(folder), str(ROOT)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ},
    )
    assert done.returncode == 0, done.stderr
    (path,) = folder.glob("*.whl")
    return zipfile.ZipFile(path)


pytestmark = [pytest.mark.timeout(300)]


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
