"""The published constraints of the tested versions, and how a trial with other versions names the package that
failed.
"""

import tomllib

import pytest
from packaging.requirements import Requirement

from tests.versions import ROOT


@pytest.mark.parametrize(("name", "failed"), [("sqlalchemy", "2.0.30"), ("pydantic", "2.11.10")])
def test_a_version_that_has_failed_is_not_allowed(name: str, failed: str) -> None:
    """`make versions` tries the lower bounds, and takes minutes. A version that failed there stays refused (issue 10,
    on Python 3.12 and 3.13).
    """
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    (bound,) = [one for one in map(Requirement, dependencies) if one.name == name]
    assert failed not in bound.specifier
