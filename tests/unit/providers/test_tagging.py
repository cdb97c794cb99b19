"""Tags as one word: it can be decoded, and all environments keep it."""

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
    price_in,
    rank_in,
    to_codes,
    to_word,
)

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


@given(st.dictionaries(TEXT, TEXT, max_size=5))
def test_tags_are_encoded_as_one_ascii_word(tags: dict[str, str]) -> None:
    """The word is printable ASCII without spaces, for any tags. Pool and rank are those that are given with it."""
    word = to_word(tags)
    assert all("!" <= letter <= "~" for letter in word)
    assert from_word(word, "sky-one", 3) == {**tags, "skyward-pool": "sky-one", "skyward-rank": "3"}


@pytest.mark.parametrize("word", ["", "{", "null", "[1]", '{"odd": 1}', '"text"', "[" * 100_000])
def test_an_invalid_word_has_no_tags(word: str) -> None:
    """Pool and rank remain. No error is raised, because a changed variable must not make a listing fail."""
    assert from_word(word, "sky-one", 3) == {"skyward-pool": "sky-one", "skyward-rank": "3"}


def test_halves_of_surrogate_pairs_are_replaced() -> None:
    """They stand for bytes of an environment that are no UTF-8. No machine could be listed with them."""
    read = from_word(r'{"\ud800": "\udcff"}', "sky-\udcff", 3)
    assert read == {"?": "?", "skyward-pool": "sky-?", "skyward-rank": "3"}


@pytest.mark.parametrize("text", ["abc", "nan", "inf", "-inf", "-1", "1e999", "", "1,5"])
def test_what_is_no_price_is_reported_once_and_not_believed(text: str, caplog: pytest.LogCaptureFixture) -> None:
    """A listing must not fail because of one machine, and the sweep ends all others."""
    assert [price_in(text, default, f"m-{text}") for default in (0.0, 1.5)] == [0.0, 1.5]
    assert [record.getMessage() for record in caplog.records] == [
        f"m-{text}: its tags have {text!r} in the place of its price per hour; it is listed without it"
    ]
    assert price_in("0.25", 1.5, "m") == 0.25


@pytest.mark.parametrize("text", ["abc", "²", "-1", "1e3", "9" * 5000])
def test_what_is_no_rank_is_reported_once_and_is_rank_zero(text: str, caplog: pytest.LogCaptureFixture) -> None:
    assert (rank_in(text, f"m-{text}"), rank_in(text, f"m-{text}")) == (0, 0)
    (record,) = caplog.records
    assert text[:80] in record.getMessage() and len(record.getMessage()) < len(text) + 200
    assert (rank_in("12", "m"), rank_in("", "m")) == (12, 0)


def test_each_machine_of_a_launch_has_its_own_rank() -> None:
    """The other tags are those of the call."""
    assert of_machine({"skyward-pool": "sky-one", "skyward-rank": "0", "a": "b"}, 2) == {
        "skyward-pool": "sky-one",
        "skyward-rank": "2",
        "a": "b",
    }


def test_launches_of_a_pool_have_different_words() -> None:
    """Their tokens have a common prefix."""
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
def test_tags_are_read_from_a_name_and_an_environment(names: TagName, others: dict[str, str], pool: str) -> None:
    """The environment has the tags that do not fit into the name. Any content is kept."""
    tags = {**others, **TAGGED, "skyward-pool": pool}
    try:
        name, environment = names.pack(tags)
    except BadRequest:
        assert len(names.machine(tags)) > names.characters / 2
        return
    assert len(name) <= names.characters
    assert names.unpack(name, environment) == tags


@pytest.mark.parametrize("names", NAMES)
def test_the_least_important_tags_are_left_out_first(names: TagName) -> None:
    """The tags that identify a machine stay. A short tag after a long one may still fit."""
    name, environment = names.pack({**TAGGED, "skyward-process": "p" * 300, "skyward-owner": "jo", "team": "ours"})
    assert set(environment) == {MORE_TAGS}
    assert names.unpack(name, {}) == {**TAGGED, "skyward-owner": "jo"}


@pytest.mark.parametrize("name", [None, "", "skyward", "web-1", "skyward.pool-1", "skyward.pool.lx", "other.pool-1.lx"])
def test_a_foreign_name_has_no_tags(name: str | None) -> None:
    """A name without mark, rank or launch belongs to another user."""
    assert NAMES[0].unpack(name, {}) is None
    assert NAMES[0].unpack("skyward.pool-1.lx", {}) == {
        "skyward-pool": "pool",
        "skyward-rank": "1",
        "skyward-launch": "x",
    }
