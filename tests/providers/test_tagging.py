"""Tags as one word: what goes in comes out, and nothing on the way can break it."""

from urllib.parse import quote, unquote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyward_core.errors import BadRequest
from skyward_core.providers.tagging import (
    MORE_TAGS,
    TagName,
    from_codes,
    from_word,
    launch_word,
    of_machine,
    to_codes,
    to_word,
)

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


@given(st.dictionaries(TEXT, TEXT, max_size=5))
def test_tags_come_back_from_one_word_of_ascii(tags: dict[str, str]) -> None:
    """Whatever the tags hold, their word has printable ASCII alone and no space, and gives them back; pool and rank are
    those told beside it.
    """
    word = to_word(tags)
    assert all("!" <= letter <= "~" for letter in word)
    assert from_word(word, "sky-one", 3) == {**tags, "skyward-pool": "sky-one", "skyward-rank": "3"}


@pytest.mark.parametrize("word", ["", "{", "null", "[1]", '{"odd": 1}', '"text"'])
def test_a_word_that_is_none_says_nothing(word: str) -> None:
    """Pool and rank are what is left; nothing is raised: a listing must not fail of what somebody has written."""
    assert from_word(word, "sky-one", 3) == {"skyward-pool": "sky-one", "skyward-rank": "3"}


def test_each_machine_of_a_launch_has_its_own_rank() -> None:
    """The tags of the call stay, but for the rank, which was the first machine's."""
    assert of_machine({"skyward-pool": "sky-one", "skyward-rank": "0", "a": "b"}, 2) == {
        "skyward-pool": "sky-one",
        "skyward-rank": "2",
        "a": "b",
    }


def test_launches_of_a_pool_have_other_words() -> None:
    """Though their tokens begin alike; the word is the same in each process and release, for machines are found by
    it.
    """
    assert launch_word({"skyward-launch": "sky-a-1"}) == "62af3659"
    assert launch_word({"skyward-launch": "sky-a-2"}) == "dd3baef7"


NAMES = [
    TagName(".", 191, "a name", lambda text: to_codes(text, "A-Za-z0-9-"), from_codes),
    TagName(":", 256, "a label", lambda text: quote(text, safe=""), unquote),
]
TAGGED = {"skyward-pool": "pool.1", "skyward-rank": "2", "skyward-launch": "pool.1-7"}


@given(
    st.dictionaries(st.sampled_from(["skyward-created", "skyward-owner", "skyward-process", "team", "a b"]), TEXT),
    TEXT.filter(bool),
)
@pytest.mark.parametrize("names", NAMES)
def test_tags_come_back_from_a_name_and_an_environment(names: TagName, others: dict[str, str], pool: str) -> None:
    """Whatever they hold, and whatever had no room; the name is never longer than it may be."""
    tags = {**others, **TAGGED, "skyward-pool": pool}
    try:
        name, environment = names.pack(tags)
    except BadRequest:
        assert len(names.machine(tags)) > names.characters / 2
        return
    assert len(name) <= names.characters
    assert names.unpack(name, environment) == tags


@pytest.mark.parametrize("names", NAMES)
def test_the_least_important_tags_go_first(names: TagName) -> None:
    """What a machine is found by stays; a short tag behind one without room still gets in."""
    name, environment = names.pack({**TAGGED, "skyward-process": "p" * 300, "skyward-owner": "jo", "team": "ours"})
    assert set(environment) == {MORE_TAGS}
    assert names.unpack(name, {}) == {**TAGGED, "skyward-owner": "jo"}


@pytest.mark.parametrize("told", [None, "", "skyward", "web-1", "skyward.pool-1", "skyward.pool.lx", "other.pool-1.lx"])
def test_a_name_that_is_none_of_ours_has_no_tags(told: str | None) -> None:
    """Without mark, rank or launch it is somebody else's."""
    assert NAMES[0].unpack(told, {}) is None
    assert NAMES[0].unpack("skyward.pool-1.lx", {}) == {
        "skyward-pool": "pool",
        "skyward-rank": "1",
        "skyward-launch": "x",
    }
