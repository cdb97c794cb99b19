"""The documentation site: it builds strictly, needs no other machine, and has every public name and every error."""

import html
import inspect
import json
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from enum import Enum
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import skyward_core as sky
from skyward_core import errors

ROOT = Path(__file__).parents[2]
ROW = re.compile(r"^\| `(\w+)` \|", re.M)


def test_the_page_of_errors_has_each_class_once() -> None:
    classes = [name for name, value in vars(errors).items() if is_error(value)]
    assert sorted(ROW.findall((ROOT / "docs/troubleshooting.md").read_text())) == sorted(classes)


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
    """By its full path: the last part of it may be that of a method too."""
    anchors = re.findall(r'id="([\w.]+)"', reference(site))
    assert sorted(set(public_values()) - set(anchors)) == []
    for package in ("prefect_skyward", "dagster_skyward"):
        assert sorted(exported(package) - set(anchors)) == []
    assert sorted(imported_on_pages() - set(anchors)) == []


def test_the_reference_has_the_parameters_and_defaults_of_every_public_name(site: Path) -> None:
    """An editor's help and this page say the same."""
    values = public_values()
    missing = []
    for path, section in sections(reference(site), values):
        for parameter in parameters_of(values[path]):
            default = "" if parameter.default is parameter.empty else shown_default(parameter.default)
            shown = re.escape(default).replace("'", "['\"]")
            # the default stands beside its parameter, or a constant does, and its value is told
            if not re.search(rf"\b{parameter.name}\b.{{0,300}}?({shown}|= ([A-Z_]+)\b.*\b\2 is {shown})", section):
                missing.append(f"{path}: {parameter}")
    assert missing == []


def test_the_reference_says_what_each_parameter_of_a_pool_an_image_and_a_provider_is_for(site: Path) -> None:
    """No row of their tables ends with an empty cell."""
    values = public_values()
    ours = (sky.ComputePool, sky.PoolSpec, sky.Image, sky.S3Volume)
    explained = {
        path: re.findall(r"<tr>\s*<td><code>([^<]+)</code></td>.*?(<td></td>)?\s*</tr>", section, re.DOTALL)
        for path, section in html_sections(reference(site), values)
        if isinstance(values[path], type) and issubclass(values[path], (*ours, sky.Provider))
    }
    assert explained.keys() >= {f"{kind.__module__}.{kind.__qualname__}" for kind in (*ours, sky.AWS, sky.Local)}
    assert [f"{path}: {name}" for path, rows in explained.items() for name, empty in rows if empty] == []


def test_the_reference_begins_with_what_each_program_needs(site: Path) -> None:
    names = re.findall(r'<h2 id="([\w.]+)"', (site / "reference/pools/index.html").read_text())
    assert names[:2] == ["skyward_core.compute.compute", "skyward_core.pool.pool.ComputePool"]


def test_the_search_ranks_pages_for_users_first(site: Path) -> None:
    """Not decisions, the changelog and the seed documents, which have the same words."""
    sections = json.loads((site / "search/search_index.json").read_text())["docs"]
    lower = {section["location"].partition("/")[0] for section in sections if section.get("boost", 1) < 1}
    assert lower == {"architecture", "decisions", "glossary", "mutation", "project", "seeds", "threads"}


def test_the_reference_has_each_method_of_a_pool(site: Path) -> None:
    """Those of its bases too."""
    homes = {
        name: f"{kind.__module__}.{kind.__qualname__}.{name}"
        for kind in reversed(sky.ComputePool.__mro__)
        for name in vars(kind)
        if not name.startswith("_")
    }
    assert homes.keys() >= {"run", "scale", "arun", "start_detached", "quote"}
    assert sorted(set(homes.values()) - set(re.findall(r'id="([\w.]+)"', reference(site)))) == []


def reference(site: Path) -> str:
    return "".join(page.read_text() for page in sorted((site / "reference").rglob("index.html")))


def exported(package: str) -> set[str]:
    """Return the full paths of the `__all__` of a package of an orchestrator, without the seconds of importing it."""
    text = (ROOT / "integrations" / package / "__init__.py").read_text()
    homes = {name: module for module, name in re.findall(r"from ([\w.]+) import (\w+) as \2\b", text)}
    return {
        f"{homes[name]}.{name}" for name in re.findall(r'"(\w+)"', text.partition("__all__ = [")[2].partition("]")[0])
    }


def imported_on_pages() -> set[str]:
    """Return what the pages import from modules of the orchestrators' packages, by full path."""
    pages = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    pattern = r"from ((?:prefect|dagster|airflow_provider)_skyward\.\w+) import ([\w, ]+)"
    found = re.findall(pattern, "\n".join(page.read_text() for page in pages))
    return {f"{module}.{name.strip()}" for module, names in found for name in names.split(",")}


def public_values() -> dict[str, Any]:
    """Return what `skyward_core` and its public modules export, by full path."""
    found: dict[str, Any] = {}
    for module in (sky, sky.accelerators, sky.distributed, sky.integrations):
        for name in module.__all__:
            value = getattr(module, name)
            home = module.__name__ if module is sky.accelerators and name != "partitions" else value_home(value)
            found[home if isinstance(value, ModuleType) else f"{home}.{name}"] = value
    return found | {f"{errors.__name__}.{kind.__name__}": kind for kind in vars(errors).values() if is_error(kind)}


def value_home(value: Any) -> str:
    return value.__name__ if isinstance(value, ModuleType) else value.__module__


def sections(text: str, paths: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield each path with the words between its anchor and the next one."""
    for path, section in html_sections(text, paths):
        yield path, " ".join(html.unescape(re.sub(r"<[^>]*>", "", section)).split())


def html_sections(text: str, paths: Iterable[str]) -> Iterator[tuple[str, str]]:
    starts = sorted((text.index(f'id="{path}"'), path) for path in paths)
    for (start, path), end in zip(starts, [*(start for start, _ in starts[1:]), len(text)], strict=True):
        yield path, text[start:end]


def parameters_of(value: Any) -> list[inspect.Parameter]:
    """Return the parameters that a user gives. Errors and enumerations are not made by users."""
    if not callable(value) or (isinstance(value, type) and issubclass(value, Exception | Enum | dict)):
        return []
    given = {inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY}
    return [one for one in inspect.signature(value).parameters.values() if one.kind in given and one.name[0] != "_"]


def shown_default(default: object) -> str:
    return repr(default) if isinstance(default, int | float | str | bool | None) else ""


@pytest.mark.nightly
def test_the_pages_load_nothing_from_another_machine(site: Path) -> None:
    loaded = {address for page in pages(site) for address in addresses(page, loads=True)}
    assert loaded
    assert sorted(address for address in loaded if re.match(r"(https?:)?//", address)) == []


@pytest.mark.nightly
def test_code_in_tables_has_no_backslash_before_a_pipe(site: Path) -> None:
    """It is in the Markdown, where a pipe would end the cell."""
    pages = "".join(page.read_text() for page in site.rglob("*.html"))
    assert "<code>str | None</code>" in html.unescape(pages)
    assert re.findall(r"<code>[^<]*\\\|[^<]*</code>", pages) == []


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
