"""The published constraints of the tested versions."""

import pytest

from tests.versions import MINORS, ROOT, constraints


@pytest.mark.parametrize("minor", MINORS)
def test_the_constraints_are_those_of_the_lock(minor: str) -> None:
    published = ROOT / "skyward_core" / f"constraints-{minor}.txt"
    assert published.read_text() == constraints(minor), "run `make constraints`"
    assert (ROOT / published.name).resolve() == published.resolve()
    assert f"`{published.name}`" in (ROOT / "README.md").read_text()
