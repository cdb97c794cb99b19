"""Altered sealed texts, drawn by chance."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import skyward_core as sky
from skyward_core.machines.signing import KeyRing
from tests.conftest import examples
from tests.unit.machines.test_sealing import CONTENT, CONTEXT


@pytest.mark.generated
@settings(max_examples=examples(1500), deadline=None)
@given(data=st.data())
def test_an_altered_text_is_never_opened(data: st.DataObject) -> None:
    """Any other character at any place, a text that is cut or longer, and any text at all: it is CredentialsError, and
    LeaseTampered unless the name of the key is another one.
    """
    ring = KeyRing([b"k" * 32, b"l" * 32])
    sealed = ring.seal(CONTENT, CONTEXT)
    place = data.draw(st.integers(0, len(sealed) - 1))
    flipped = st.integers(0, 7).map(
        lambda bit: sealed[:place] + chr(ord(sealed[place]) ^ 1 << bit) + sealed[place + 1 :]
    )
    replaced = st.characters().map(lambda other: sealed[:place] + other + sealed[place + 1 :])
    cut, longer = st.just(sealed[:place]), st.text(min_size=1).map(sealed.__add__)
    altered = data.draw(st.one_of(flipped, replaced, st.text(), cut, longer).filter(lambda text: text != sealed))
    with pytest.raises(sky.CredentialsError) as caught:
        ring.unseal(altered, CONTEXT)
    if altered.split(":")[:2] == sealed.split(":")[:2]:
        assert isinstance(caught.value, sky.LeaseTampered)
