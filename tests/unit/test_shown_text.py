"""Text of others as visible text, and as text of Markdown and HTML."""

import json
import logging
import sys
import unicodedata

import pytest

from skyward_core import shown_text
from skyward_core.shown_text import each_line, html, indented, markdown, visible, visible_data, visible_lines
from tests.hostile_texts import HIDDEN_CATEGORIES, HOSTILE_TEXTS, hidden_in, refuse_hidden, rendered, tags_of

hostile = pytest.mark.parametrize("text", HOSTILE_TEXTS.values(), ids=HOSTILE_TEXTS)


def test_every_character_of_unicode_that_shows_nothing_is_written_out() -> None:
    """All of the categories Cc, Cf, Cs, Zl and Zp of this Python's tables, except for tab and line feed."""
    every = [chr(code) for code in range(sys.maxunicode + 1)]
    hidden = [one for one in every if unicodedata.category(one) in HIDDEN_CATEGORIES]
    assert [one for one in hidden if visible_lines(one) == one] == ["\t", "\n"]
    assert [one for one in hidden if visible(one) == one] == []
    letters = [one for one in every if unicodedata.category(one)[0] in "LNPS"]
    changed = {one for one in letters if visible(one) != one}
    assert changed == {"\u115f", "\u1160", "\u3164", "\uffa0"}, "letters without a picture"


@hostile
def test_a_hostile_text_can_be_seen_and_encoded(text: str) -> None:
    """And stays as it is if it is made visible again: a text on its way through several displays is escaped once."""
    for shown in (visible(text), visible_lines(text)):
        refuse_hidden(shown)
        assert (visible_lines(shown), visible(shown).count("\\n")) == (shown, visible(text).count("\\n"))
    assert "\n" not in visible(text) and "\t" not in visible("a\tb")


def test_what_is_written_out_can_be_read() -> None:
    assert visible_lines("\x1b[2J a\tb \x9b \u202e \udc80 \U000e0041\r\nnext \x00") == (
        "\\x1b[2J a\tb \\x9b \\u202e \\udc80 \\U000e0041\nnext \\x00"
    )
    assert visible("größe\xa05 µs, 日本, 👍🏽 é a\nb") == "größe\xa05 µs, 日本, 👍🏽 é a\\nb"


def test_colours_are_left_out() -> None:
    """Keras writes them also where stdout is no terminal. What is left of a cut one is visible."""
    keras = "\x1b[1m10/10\x1b[0m \x1b[32m━━━━\x1b[0m\x1b[37m\x1b[0m \x1b[1m0s\x1b[0m 9ms/step"
    assert visible_lines(keras) == "10/10 ━━━━ 0s 9ms/step"
    assert visible("\x1b\x1b[0m[2J \x1b[0") == "\\x1b[2J \\x1b[0"


def test_every_line_has_the_mark() -> None:
    assert each_line("[node 0] ", "a\nskyward  b\x85c") == "[node 0] a\n[node 0] skyward  b\\x85c"
    assert indented("no offer\nskyward  done\n  here\n") == "no offer\n  skyward  done\n  here\n"


@hostile
def test_a_hostile_text_is_only_text_in_markdown(text: str) -> None:
    """At the begin of a line, within one, and in a cell of a table: what a reader sees is the visible text."""
    seen = visible(" ".join(text.split()))
    for page, tags in (
        (markdown(text), ["p"]),
        (f"**1** {markdown(text)}", ["p", "strong"]),
        (
            f"| a | b |\n| --- | --- |\n| {markdown(text)} | x |",
            ["table", "thead", "tr", "th", "th", "tbody", "tr", "td", "td"],
        ),
    ):
        found, words = tags_of(rendered(page))
        assert found == tags
        assert seen in words


@hostile
def test_a_hostile_text_is_only_text_in_html(text: str) -> None:
    found, words = tags_of(f'<p title="{html(text)}">{html(text)}</p>')
    assert (found, words) == (["p"], visible_lines(text))


@hostile
def test_a_hostile_address_is_no_link_of_another_kind(text: str) -> None:
    """And a hostile text leaves the link that it is in."""
    page = rendered(shown_text.markdown_link("i-1", f"https://console.example/?id={text}"))
    assert tags_of(page)[0] == ["p", "a"]
    assert page.count("<a href=") == 1
    assert tags_of(rendered(shown_text.markdown_link(text, "https://console.example/")))[0] == ["p", "a"]
    for address in ("javascript:alert(1)", "data:text/html,x", text, ""):
        assert "a" not in tags_of(rendered(shown_text.markdown_link("i-1", address)))[0]
    assert set(tags_of(rendered(shown_text.markdown_code(text)))[0]) <= {"p", "code"}


@pytest.mark.parametrize("escape", [markdown, html])
def test_text_is_escaped_once(escape: type) -> None:
    """Escaped text has a type, and no function of a format takes it: a reader would see the escapes."""
    for first in (markdown, html):
        with pytest.raises(TypeError, match="escaped already"):
            escape(first("a|b"))


def test_data_has_visible_texts() -> None:
    data = {"a\x1b": ["\x00", 1, None, ("\udc80", 2.5)], 3: True}
    assert visible_data(data) == {"a\\x1b": ["\\x00", 1, None, ("\\udc80", 2.5)], 3: True}


@hostile
def test_a_record_of_our_logger_is_visible_for_every_handler(text: str, caplog: pytest.LogCaptureFixture) -> None:
    """Also with text in the arguments; a line of another begins with spaces."""
    log = shown_text.visible_logger("skyward.tests_of_texts")
    with caplog.at_level(logging.INFO, log.name):
        log.info("it said: %s (%d)", text, 5)
        log.info("a %s without arguments")
    message = caplog.records[0].getMessage()
    assert hidden_in(message) == []
    assert all(line.startswith("  ") or not line for line in message.split("\n")[1:])
    assert caplog.records[1].getMessage() == "a %s without arguments"
    assert json.dumps(message, ensure_ascii=False).encode()
