"""The published constraints of the tested versions, and how a trial with other versions names the package that
failed.
"""

import tomllib

from tests import versions
from tests.versions import ROOT


def test_the_nightly_run_tries_the_lowest_and_the_newest_versions_of_the_core_and_every_plugin() -> None:
    """Each part has a smoke, and each plugin's extra is in a part."""
    assert " versions " in (ROOT / ".ci/nightly").read_text()
    assert "python -m tests.versions lowest minors newest\n" in (ROOT / "Makefile").read_text()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {extra for part in versions.PARTS.values() for extra in part} == set(extras) - {"all"}
    smoke = (ROOT / "tests/versions/smoke.py").read_text()
    assert [part for part in versions.PARTS if f"def {part}(" not in smoke] == []
