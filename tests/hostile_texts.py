"""Texts that a node, a provider or another user may write, and what no display or page may make of them.

`HOSTILE_TEXTS` goes through every display and page (`-k hostile`). A new display or page takes it too.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Mapping
from html.parser import HTMLParser
from typing import override

HOSTILE_TEXTS = {
    "clear screen": "a\x1b[2J\x1b[Hb",
    "clipboard, OSC 52": "\x1b]52;c;cm0gLXJmIH4=\x07",
    "window title": "\x1b]0;root@here\x1b\\",
    "C1 escape": "\x9b2J\x9d0;title\x9c",
    "colour": "\x1b[8;31mhidden\x1b[0m",
    "colour within an escape": "\x1b\x1b[0m[2J",
    "line of ours": "x\nskyward  forged",
    "line of ours, by a separator": "x\u2028skyward  forged\x85skyward  forged\x0bskyward  forged",
    "overwritten line": "loss 0.1\rskyward  forged",
    "backspaces": "loss 9\b\b0.1",
    "bidi override": "safe\u202eexe.txt\u2066x\u2069",
    "zero width": "a\u200bb\u200dc\ufeffd\u2060e\xadf\u3164g",
    "tag characters": "a\U000e0041\U000e0042b",
    "NUL": "a\x00b",
    "lone surrogates": "a\udc80\ud800b",
    "image": "![x](http://evil.example/a.png)",
    "link": "[bill](javascript:alert(1)) <https://evil.example> https://evil.example www.evil.example //localhost a@b.cd",
    "reference": "[bill]\n\n[bill]: http://evil.example",
    "tags": "<script>alert(1)</script><img src=x onerror=alert(1)><a href='http://evil.example'>x</a>",
    "attribute": '" onmouseover="alert(1)" x=\'y\'',
    "columns": "a | b || c \\| d `|` e",
    "code": "`a` ``b`` ```c",
    "block": "# h\n\n> q\n\n- l\n\n1. n\n\n---\n\n```\ncode",
    "entity": "&lt;b&gt; &#60;img&#62; &amp;lt;",
    "markup of rich": "[bold red]x[/] [link=http://evil.example]y[/link] :smile:",
    "template": "{{ 7 * 7 }} ${HOME} %s %(x)s {0}",
}
"""What it is, and the text."""
HIDDEN_CATEGORIES = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})


def hidden_in(text: str, *, besides: str = "\n\t") -> list[str]:
    """Return the characters of a text that a reader cannot see."""
    return [one for one in text if unicodedata.category(one) in HIDDEN_CATEGORIES and one not in besides]


def refuse_hidden(text: str) -> None:
    """Fail if a text has a character that acts on a terminal, that nobody sees, or that no database takes."""
    assert hidden_in(text) == []
    text.encode()


def refuse_lines_of_ours(text: str) -> None:
    """Fail if a line of a text claims to be one of ours."""
    refuse_hidden(text)
    assert [line for line in text.splitlines() if line.startswith(("skyward  forged", "skyward: forged"))] == []


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.attributes: list[str] = []
        self.text = ""

    @override
    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [name for name, _ in attrs]

    @override
    def handle_data(self, data: str) -> None:
        self.text += data


def tags_of(html: str) -> tuple[list[str], str]:
    """Return the tags of a page in their order, and its text as a reader sees it."""
    found = _Tags()
    found.feed(html)
    found.close()
    assert not {one for one in found.attributes if one.startswith("on")}
    return found.tags, found.text


def rendered(markdown: str) -> str:
    """Return a page in Markdown as HTML, as pages do that show tables, tags and every address as a link."""
    from markdown_it import MarkdownIt

    return MarkdownIt("gfm-like", {"html": True, "linkify": True}).render(markdown)


def refuse_foreign_markdown(markdown: str, harmless: str) -> None:
    """Fail if a page with hostile texts has other tags, or another number of columns, than the same page with harmless
    ones. Names may be code, and are not if they have other characters.
    """
    refuse_hidden(markdown)
    found, usual = ([tag for tag in tags_of(rendered(page))[0] if tag != "code"] for page in (markdown, harmless))
    assert found == usual


def texts_in(data: object) -> Iterator[str]:
    """Yield each text of JSON data, also the names in objects."""
    if isinstance(data, str):
        yield data
    elif isinstance(data, Mapping):
        for name, value in data.items():
            yield from (str(name), *texts_in(value))
    elif isinstance(data, list | tuple):
        for value in data:
            yield from texts_in(value)


def refuse_hidden_in_data(data: object) -> None:
    """Fail if a text of JSON data cannot be seen or encoded."""
    for text in texts_in(data):
        refuse_hidden(text)
