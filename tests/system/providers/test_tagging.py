"""Tags as one word: it can be decoded, and all environments keep it."""

from hypothesis import given
from hypothesis import strategies as st

from skyward_core.providers.tagging import (
    from_word,
    to_word,
)
from tests.unit.providers.test_tagging import (
    TEXT,
)


@given(st.dictionaries(TEXT, TEXT, max_size=5))
def test_tags_are_encoded_as_one_ascii_word(tags: dict[str, str]) -> None:
    """The word is printable ASCII without spaces, for any tags. Pool and rank are those that are given with it."""
    word = to_word(tags)
    assert all("!" <= letter <= "~" for letter in word)
    assert from_word(word, "sky-one", 3) == {**tags, "skyward-pool": "sky-one", "skyward-rank": "3"}
