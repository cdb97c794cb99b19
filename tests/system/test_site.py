"""The documentation site: it builds strictly, needs no other machine, and has every public name and every error."""

import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest

import skyward_core as sky
from skyward_core import errors

ROOT = Path(__file__).parents[2]
ROW = re.compile(r"^\| `(\w+)` \|", re.M)


def test_the_page_of_errors_has_each_class_once() -> None:
    classes = [name for name, value in vars(errors).items() if is_error(value)]
    assert sorted(ROW.findall((ROOT / "docs/errors.md").read_text())) == sorted(classes)


def is_error(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, errors.SkywardError) and value is not errors.SkywardError


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built strictly: a page outside the navigation, or a broken link or anchor, is an error."""
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    return folder


def test_the_reference_has_every_public_name(site: Path) -> None:
    text = "".join(page.read_text() for page in (site / "reference").rglob("index.html"))
    anchors = {found.rpartition(".")[2] for found in re.findall(r'id="([\w.]+)"', text)}
    modules = {"accelerators", "distributed", "errors", "integrations"}
    assert sorted(set(sky.__all__) - modules - anchors) == []


@pytest.mark.nightly
def test_the_pages_load_nothing_from_another_machine(site: Path) -> None:
    loaded = {address for page in pages(site) for address in addresses(page, loads=True)}
    assert loaded
    assert sorted(address for address in loaded if re.match(r"(https?:)?//", address)) == []


@pytest.mark.nightly
def test_the_links_between_pages_lead_to_files(site: Path) -> None:
    """mkdocs does not know the links that themes and hooks write."""
    broken = []
    for page in pages(site):
        for path in (re.split("[#?]", address)[0] for address in addresses(page, loads=False)):
            target = site / path.lstrip("/") if path.startswith("/") else page.parent / path
            if not re.match(r"(\w+:|//|$)", path) and not (target.is_file() or (target / "index.html").is_file()):
                broken.append(f"{page.relative_to(site)}: {path}")
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
