"""The sealed lease in the ledger: when it is written, what it opens, and that nothing altered is ever used."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import skyward_core as sky
from skyward_core.ledger.ledger import Ledger
from skyward_core.session.sealed_lease import find_lease
from tests.system.session.test_sealed_lease import (  # noqa: F401 - fixtures
    GENERATED,
    POOL,
    alter,
    key,
    key_text,
    ledger,
    over_ssh,
    shared,
)


def characters_altered(original: str) -> st.SearchStrategy[str]:
    """Another bit or character at one place, a part left out, or more behind it."""

    @st.composite
    def altered(draw: st.DrawFn) -> str:
        place = draw(st.integers(0, len(original) - 1))
        rest = original[place + 1 :]
        other = draw(
            st.one_of(
                st.integers(0, 6).map(lambda bit: chr(ord(original[place]) ^ 1 << bit)), st.characters(), st.just("")
            )
        )
        return original[:place] + other + (rest if draw(st.booleans()) else rest[::-1])

    return altered().filter(lambda text: text != original)


@pytest.mark.generated
@GENERATED
@given(data=st.data())
def test_an_altered_row_is_never_used(ledger: Ledger, key: Path, data: st.DataObject) -> None:
    shared(ledger, over_ssh(key))
    row = ledger.sealed_lease(POOL)
    assert row is not None
    column = data.draw(st.sampled_from(["lease_json", "sealed"]))
    original: str = getattr(row, column)
    changed = data.draw(characters_altered(original))
    alter(ledger, column, changed.encode("utf-8", "replace").decode())
    with pytest.raises(sky.CredentialsError) as caught:
        find_lease(POOL)
    if column == "lease_json" or changed.split(":")[:2] == original.split(":")[:2]:
        assert isinstance(caught.value, sky.LeaseTampered)
