"""Tags as one word: what goes in comes out, and nothing on the way can break it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyward_core.providers.tagging import from_word, launch_word, of_machine, to_word

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


@given(st.dictionaries(TEXT, TEXT, max_size=5))
def test_tags_come_back_from_one_word_of_ascii(tags: dict[str, str]) -> None:
    """Whatever the tags hold, their word has printable ASCII alone and no space, and gives them back; pool and rank are those told beside it."""
    word = to_word(tags)
    assert all("!" <= letter <= "~" for letter in word)
    assert from_word(word, "sky-one", 3) == {**tags, "skyward-pool": "sky-one", "skyward-rank": "3"}


@pytest.mark.parametrize("word", ["", "{", "null", "[1]", '{"odd": 1}', '"text"'])
def test_a_word_that_is_none_says_nothing(word: str) -> None:
    """Pool and rank are what is left; nothing is raised: a listing must not fail of what somebody has written."""
    assert from_word(word, "sky-one", 3) == {"skyward-pool": "sky-one", "skyward-rank": "3"}


def test_each_machine_of_a_launch_has_its_own_rank() -> None:
    """The tags of the call stay, but for the rank, which was the first machine's."""
    assert of_machine({"skyward-pool": "sky-one", "skyward-rank": "0", "a": "b"}, 2) == {"skyward-pool": "sky-one", "skyward-rank": "2", "a": "b"}


def test_launches_of_a_pool_have_other_words() -> None:
    """Though their tokens begin alike; the word is the same in each process and release, for machines are found by it."""
    assert launch_word({"skyward-launch": "sky-a-1"}) == "62af3659"
    assert launch_word({"skyward-launch": "sky-a-2"}) == "dd3baef7"
