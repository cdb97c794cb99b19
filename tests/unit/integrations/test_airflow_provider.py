"""The Airflow provider as a package: its info, its classifiers, and where it uses names that Airflow may move."""

import importlib.util
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest

if (AIRFLOW := importlib.util.find_spec("airflow")) is None:
    pytest.skip("Airflow is not installed", allow_module_level=True)

from airflow_provider_skyward import get_provider_info

ROOT = Path(__file__).parents[3]
PACKAGE = ROOT / "integrations/airflow_provider_skyward"


def schema() -> dict[str, Any]:
    """Return Airflow's schema of a provider's info, without an import of Airflow."""
    assert AIRFLOW.submodule_search_locations
    return json.loads((Path(next(iter(AIRFLOW.submodule_search_locations))) / "provider_info.schema.json").read_text())


def test_the_provider_info_is_valid_by_airflows_schema() -> None:
    """Airflow itself only logs a fault, and then leaves the whole provider out."""
    validator = jsonschema.validators.validator_for(schema())(schema())
    assert [error.message for error in validator.iter_errors(get_provider_info())] == []
    assert list(validator.iter_errors({**get_provider_info(), "extra-links": [1]})), "the schema finds no fault at all"


def test_the_provider_info_has_no_key_that_airflow_does_not_know() -> None:
    """Else Airflow would leave it out without a word."""
    assert set(get_provider_info()) <= set(schema()["properties"])


def test_each_name_of_the_provider_info_is_one_of_ours() -> None:
    """The modules exist, and define the named classes; looks at the source, because an import takes seconds."""
    info: dict[str, Any] = get_provider_info()
    modules = [
        module for kind in ("operators", "triggers", "hooks") for one in info[kind] for module in one["python-modules"]
    ]
    classes = [
        *info["extra-links"],
        *info["notifications"],
        *(one["hook-class-name"] for one in info["connection-types"]),
        *(one["class-name"] for one in info["task-decorators"]),
    ]
    for module in modules:
        assert (PACKAGE.parent / f"{module.replace('.', '/')}.py").is_file()
    for path in classes:
        module, _, name = path.rpartition(".")
        source = (PACKAGE.parent / f"{module.replace('.', '/')}.py").read_text()
        assert re.search(rf"^(class|def) {name}\b", source, re.MULTILINE), path


def test_the_distribution_says_that_it_is_an_airflow_provider() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {"Framework :: Apache Airflow", "Framework :: Apache Airflow :: Provider"} <= set(project["classifiers"])
    assert project["name"] == get_provider_info()["package-name"]


def test_names_that_airflow_may_move_are_in_one_module() -> None:
    """`airflow.sdk.execution_time` is not public: one module imports from it, with a fallback."""
    users = [path.name for path in PACKAGE.glob("*.py") if "airflow.sdk.execution_time" in path.read_text()]
    assert users == ["airflow_compat.py"]
