"""The published constraints of the tested versions, and how a trial with other versions names the package that
failed.
"""

import argparse
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
from packaging.requirements import Requirement

from tests import versions
from tests.versions import ROOT, Trial, blamed, pins


def test_a_pin_holds_for_its_python_only() -> None:
    """Pins for another Python or system only are left out; of two pins of a package each keeps its marker."""
    exported = [
        "plain==1",
        "old==1 ; python_full_version < '3.13'",
        "old==2 ; python_full_version >= '3.13'",
        "win==1 ; sys_platform == 'win32'",
        "mac==1 ; sys_platform == 'darwin'",
        "two==1 ; platform_machine == 'arm64'",
        "two==2 ; platform_machine != 'arm64'",
    ]
    two = ['two==1; platform_machine == "arm64"', 'two==2; platform_machine != "arm64"']
    assert pins(exported, "3.12") == ["mac==1", "old==1", "plain==1", *two]
    assert pins(exported, "3.13") == ["mac==1", "old==2", "plain==1", *two]


@pytest.mark.parametrize(("name", "failed"), [("sqlalchemy", "2.0.30"), ("pydantic", "2.11.10")])
def test_a_version_that_has_failed_is_not_allowed(name: str, failed: str) -> None:
    """`make versions` tries the lower bounds, and takes minutes. A version that failed there stays refused (issue 10,
    on Python 3.12 and 3.13).
    """
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    (bound,) = [one for one in map(Requirement, dependencies) if one.name == name]
    assert failed not in bound.specifier


def test_each_minor_version_from_the_lowest_to_the_locked_one_is_tried() -> None:
    """All other packages are those of the lock; the lowest version that is allowed is in the first minor."""
    asked = argparse.Namespace(resolution=["lowest", "minors"], python=["3.13"], part=["prefect"])
    found = list(versions.trials(asked, Path("place")))
    assert [trial.resolution for trial in found] == ["lowest", "3.6", "3.7", "3.8"]
    assert versions.limits(found[1], {"prefect": "3.7.7", "httpx": "1.0"}) == ["httpx<=1.0", "prefect==3.6.*"]
    assert versions.limits(found[0], {"prefect": "3.7.7"}) == ["prefect<=3.7.7"]
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert "prefect>=3.6,<4" in extras["prefect"]


def test_a_failure_names_the_package() -> None:
    """The innermost package of the traceback first, each with its locked version; a missing module before all."""
    log = """
  File "/x/lib/python3.13/site-packages/skyward_core/ledger/ledger.py", line 1, in <module>
  File "/x/lib/python3.13/site-packages/prefect/server/api/server.py", line 111, in <module>
  File "/x/lib/python3.13/site-packages/fastapi/param_functions.py", line 305, in <module>
TypeError: Body() got an unexpected keyword argument 'min_items'
"""
    installed = {"prefect": "3.8.8", "fastapi": "0.140.0", "skyward-core": "0.1.0"}
    assert (
        blamed(log, installed, {"prefect": "3.7.7", "fastapi": "0.140.0"})
        == "look at fastapi 0.140.0, prefect 3.8.8 (locked: 3.7.7)"
    )
    missing = f"{log}\nModuleNotFoundError: No module named 'importlib_metadata'\n"
    assert blamed(missing, installed, {}).startswith("look at importlib-metadata missing, fastapi 0.140.0")
    under = blamed(
        log.replace("fastapi/", "prefect/"),
        installed,
        {"prefect": "3.7.7", "fastapi": "0.136.3"},
        {"prefect": {"fastapi", "rich"}},
    )
    assert under == "look at prefect 3.8.8 (locked: 3.7.7); changed below prefect: fastapi 0.140.0 (locked: 0.136.3)"
    absent = blamed(log, installed, {"whenever": "0.9"}, {"fastapi": {"whenever", "typing-extensions"}})
    assert absent == "look at fastapi 0.140.0, prefect 3.8.8; changed below fastapi: whenever missing (locked: 0.9)"
    assert blamed("exit", installed, {}) == "no package stands in a traceback"


@pytest.mark.parametrize(("minor", "asked"), [("3.12", {"pendulum"}), ("3.13", {"whenever", "rich"})])
def test_the_requirements_of_a_package_are_those_for_the_trials_python(
    tmp_path: Path, minor: str, asked: set[str]
) -> None:
    """A trial may have another Python than the one that runs it."""
    info = tmp_path / f"venv/lib/python{minor}/site-packages/prefect-3.8.8.dist-info"
    info.mkdir(parents=True)
    needs = [
        "pendulum; python_version<'3.13'",
        "whenever>=0.9; python_version>='3.13'",
        "rich; python_full_version>='3.13'",
        "dask; extra=='dask'",
    ]
    (info / "METADATA").write_text("\n".join(["Name: prefect", *(f"Requires-Dist: {need}" for need in needs)]))
    assert versions._needs(Trial("prefect", "newest", f"/usr/bin/python{minor}", tmp_path)) == {"prefect": asked}


def test_only_the_lowest_versions_may_stop_ci(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A failure with the newest versions is reported, with its part and its package."""

    def built(command: list[str], **_: object) -> None:
        folder = Path(command[command.index("--out-dir") + 1])
        folder.mkdir()
        (folder / "skyward_core-0-py3-none-any.whl").touch()

    monkeypatch.setattr(versions, "subprocess", SimpleNamespace(run=built))
    monkeypatch.setattr(versions, "tried", lambda trial, wheel: "look at fastapi 9" if trial.part == "prefect" else "")
    assert versions.main(["newest", "--at-once", "1"]) == 0
    output = capsys.readouterr().out
    assert f"prefect, newest versions, Python 3.{sys.version_info.minor}: FAILED (reported only)" in output
    assert "look at fastapi 9" in output
    assert versions.main(["lowest", "newest", "--at-once", "1"]) == 1
    assert "Raise the lower bound" in capsys.readouterr().out
