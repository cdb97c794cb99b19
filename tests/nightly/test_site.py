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


def test_the_links_between_pages_lead_to_files(site: Path) -> None:
    """This is checked in the built pages, because mkdocs does not know the links that themes and hooks write."""
    broken = [
        f"{page.relative_to(site)}: {address}"
        for page in pages(site)
        for address in addresses(page, loads=False)
        if is_inner(address) and not leads_to_file(site, page, address)
    ]
    assert broken == []


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


def is_inner(address: str) -> bool:
    return re.match(r"(\w+:|//|#)", address) is None


def leads_to_file(site: Path, page: Path, address: str) -> bool:
    path = address.partition("#")[0].partition("?")[0]
    target = site / path.lstrip("/") if path.startswith("/") else page.parent / path
    return target.is_file() or (target / "index.html").is_file()
