"""The documentation site: it builds strictly, needs no other machine, and has every public name and every error."""

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

from tests.system.test_site import (  # noqa: F401 - fixtures
    site,
)


def test_the_pages_load_nothing_from_another_machine(site: Path) -> None:
    """No script, style, font or image has an address outside of the site. Links may have one."""
    loaded = {address for page in pages(site) for address in addresses(page, loads=True)}
    assert loaded
    assert sorted(address for address in loaded if re.match(r"(https?:)?//", address)) == []


def pages(site: Path) -> Iterator[Path]:
    return site.rglob("*.html")


class Addresses(HTMLParser):
    """Collects the addresses of a page: what it loads, and what it links to."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.linked: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        if source := found.get("src"):
            self.loaded.append(source)
        if target := found.get("href"):
            (self.linked if tag == "a" else self.loaded).append(target)


def addresses(page: Path, *, loads: bool) -> list[str]:
    parser = Addresses()
    parser.feed(page.read_text())
    return parser.loaded if loads else parser.linked
