"""Dagster: assets that are written in YAML, loaded from a project's folder as `dagster dev` and `dg` do."""

import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

dg = pytest.importorskip("dagster")

from dagster.components.core.package_entry import get_package_objects_in_module  # noqa: E402

import dagster_skyward  # noqa: E402
import skyward_core as sky  # noqa: E402
from dagster_skyward import SkywardComponent  # noqa: E402

# Dagster's own: it uses its deprecated names for nested resources
pytestmark = pytest.mark.filterwarnings("default::DeprecationWarning")


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of a project, whose package `yaml_project` has a module with functions and an empty `defs`."""
    package = tmp_path / "yaml_project"
    (package / "defs").mkdir(parents=True)
    (tmp_path / "pyproject.toml").write_text(
        '[tool.dg]\ndirectory_type = "project"\n[tool.dg.project]\nroot_module = "yaml_project"\n'
    )
    (package / "__init__.py").write_text("")
    (package / "training.py").write_text(
        dedent("""
        import os

        FACTOR = 2

        def train(number, day=""):
            return f"{day}{FACTOR * number}"
        """)
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] == "yaml_project"]:
        del sys.modules[name]


def write(project: Path, name: str, text: str) -> Path:
    folder = project / "yaml_project" / "defs" / name
    folder.mkdir()
    (folder / "defs.yaml").write_text(dedent(text))
    return folder


def loaded(project: Path) -> Any:
    return dg.load_from_defs_folder(path_within_project=project)


def test_dg_finds_the_component_and_shows_its_fields() -> None:
    """The registered module has one component; each field has a description in the schema, those of a pool the one of
    `PoolSpec`.
    """
    assert dict(get_package_objects_in_module(dagster_skyward)) == {"SkywardComponent": SkywardComponent}
    fields = SkywardComponent.model().model_json_schema()["properties"]
    assert {name for name, field in fields.items() if "description" not in field} == {"asset"}  # it has its own fields
    assert sky.PoolSpec.model_fields["nodes"].description in fields["nodes"]["description"]


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ("{asset: {key: a}}", "either `function` or `script`"),
        ("{asset: {key: a}, function: 'yaml_project.training:train', script: x.py}", "either `function` or `script`"),
        ("{asset: {key: a}, function: yaml_project.training}", '"package.module:name"'),
        ("{asset: {key: a}, function: 'yaml_project.training:fit'}", "cannot be imported"),
        ("{asset: {key: a}, script: missing.py}", "there is no file"),
        ("{asset: {key: a}, script: missing.py, kwargs: {a: 1}}", "a script has args"),
        ("{asset: {key: a}, function: 'yaml_project.training:train', accelerator: H1000}", "H1000"),
        ("{asset: {key: a}, function: 'yaml_project.training:train', nodes: 2, compute: {nodes: 1}}", "write it once"),
        ("{asset: {key: a}, function: 'yaml_project.training:train', resource: c, nodes: many}", "nodes"),
        (
            "{asset: {key: a}, function: 'yaml_project.training:train', resource: c, compute: {sharing: run}}",
            "where `resource` is defined",
        ),
    ],
)
def test_what_cannot_be_is_refused_when_the_project_is_loaded(project: Path, attributes: str, message: str) -> None:
    """The error says what to write, before anything is rented."""
    write(project, "a", f"type: dagster_skyward.SkywardComponent\nattributes: {attributes}\n")
    with pytest.raises(Exception) as caught:
        loaded(project)
    texts, error = [], caught.value
    while error is not None:
        texts.append(str(error))
        error = error.__cause__ or error.__context__
    assert message in "\n".join(texts)
