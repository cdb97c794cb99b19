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
    characters_altered,
    key,
    key_text,
    ledger,
    over_ssh,
    shared,
)


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
