"""Tags as one word, which survive the round trip and every environment."""

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
    """The word of any tags is printable ASCII without spaces. Pool and rank are those given beside it."""
    word = to_word(tags)
    assert all("!" <= letter <= "~" for letter in word)
    assert from_word(word, "sky-one", 3) == {**tags, "skyward-pool": "sky-one", "skyward-rank": "3"}


@pytest.mark.parametrize("word", ["", "{", "null", "[1]", '{"odd": 1}', '"text"'])
def test_an_invalid_word_has_no_tags(word: str) -> None:
    """Pool and rank remain. Nothing is raised, because a listing must not fail of a changed variable."""
    assert from_word(word, "sky-one", 3) == {"skyward-pool": "sky-one", "skyward-rank": "3"}


def test_each_machine_of_a_launch_has_its_own_rank() -> None:
    """The other tags are those of the call."""
    assert of_machine({"skyward-pool": "sky-one", "skyward-rank": "0", "a": "b"}, 2) == {
        "skyward-pool": "sky-one",
        "skyward-rank": "2",
        "a": "b",
    }


def test_launches_of_a_pool_have_different_words() -> None:
    """Though their tokens begin alike.

    The word is the same in each process and release, because machines are found by it.
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
    """With any content, and those that did not fit. The name never exceeds its limit."""
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
    """The tags by which a machine is found stay. A short tag after a long one may still fit."""
    name, environment = names.pack({**TAGGED, "skyward-process": "p" * 300, "skyward-owner": "jo", "team": "ours"})
    assert set(environment) == {MORE_TAGS}
    assert names.unpack(name, {}) == {**TAGGED, "skyward-owner": "jo"}


@pytest.mark.parametrize("name", [None, "", "skyward", "web-1", "skyward.pool-1", "skyward.pool.lx", "other.pool-1.lx"])
def test_a_name_that_is_none_of_ours_has_no_tags(name: str | None) -> None:
    """Without mark, rank or launch it is another user's."""
    assert NAMES[0].unpack(name, {}) is None
    assert NAMES[0].unpack("skyward.pool-1.lx", {}) == {
        "skyward-pool": "pool",
        "skyward-rank": "1",
        "skyward-launch": "x",
    }
