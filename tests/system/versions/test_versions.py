"""The published constraints of the tested versions, and how a trial with other versions names the package that
failed.
"""

import pytest

from tests.versions import MINORS, ROOT, constraints


@pytest.mark.parametrize("minor", MINORS)
def test_the_constraints_are_those_of_the_lock(minor: str) -> None:
    """Each file has the versions of uv.lock. One copy is in the package, and one at the top of the repository's
    tree.
    """
    published = ROOT / "skyward_core" / f"constraints-{minor}.txt"
    assert published.read_text() == constraints(minor), "run `make constraints`"
    link = ROOT / published.name
    assert link.resolve() == published.resolve()
    readme = (ROOT / "README.md").read_text()
    assert f"`{published.name}`" in readme
    assert "pip install -c constraints-3.13.txt" in readme
