"""Pages of the documentation site that are generated: the reference, programs of the repository, and its root pages.

MkDocs calls the functions `on_*` (mkdocs.org/dev-guide/plugins). `mkdocs.yml` names this file.
"""

import ast
import html
import inspect
import posixpath
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from parameters import factories, factory_table, methods_of, named_defaults, parameter_table

from skyward_core import errors

ROOT = Path(__file__).parent.parent.parent
ROOT_PAGES = {
    "CHANGELOG.md": "project/changelog.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "SECURITY.md": "project/security.md",
    "README.md": "project/readme.md",
    "benchmarks/RESULTS.md": "project/benchmarks.md",
}
"""Pages outside of `docs/`, and where they are on the site."""

PROGRAMS = ("examples", "flows", "dags")
"""Folders of programs that pages link to: each program is a page with its source."""

PACKAGES = {
    "skyward_core": "skyward_core",
    "prefect_skyward": "integrations/prefect_skyward",
    "dagster_skyward": "integrations/dagster_skyward",
}
"""Packages whose public names are in the reference, and their folders."""

TOPICS = {
    "pools": (
        "compute",
        "concurrency",
        "config",
        "engine",
        "pool",
        "programs",
        "secret",
        "serialization",
        "session",
        "spec",
        "work",
        "wire",
        "worker",
    ),
    "machines": ("accelerators", "image", "machines", "providers", "provisioning"),
    "training": ("distributed", "integrations", "sklearn"),
    "events": ("events", "shown_text"),
    "errors": ("errors",),
    "operations": ("doctor", "ledger", "operations"),
}
"""Pages of the reference of `skyward_core`, and the packages whose names they have."""

MODULES = ("accelerators", "distributed", "errors", "sklearn", "integrations", "shown_text")
"""Public modules of `skyward_core`: the reference has what they export too."""

FIRST = ("compute", "ComputePool")
"""Names that come first on their page."""

LAST_IN_SEARCH = re.compile(r"decisions/|project/|seeds\.md|architecture\.md|threads\.md|mutation\.md|glossary\.md")
"""Pages for contributors: the search lists them after those for users."""

POOL = "skyward_core.pool.pool.ComputePool"
"""Its many parameters come before its methods, and it has the methods of its bases."""

FROM_MODULES = {
    "airflow_provider_skyward.operators": ("SkywardOperator",),
    "airflow_provider_skyward.programs": ("SkywardRunOperator",),
    "airflow_provider_skyward.decorators": ("skyward_task",),
    "airflow_provider_skyward.pools": ("SkywardCreatePool", "SkywardReleasePool", "skyward_pool"),
    "airflow_provider_skyward.hooks": (
        "SkywardHook",
        "AWSHook",
        "DigitalOceanHook",
        "RunPodHook",
        "VastAIHook",
        "VerdaHook",
    ),
    "airflow_provider_skyward.bills": ("settle_bills",),
    "airflow_provider_skyward.results": ("read_result",),
    "airflow_provider_skyward.retry": ("default_retry_policy",),
    "airflow_provider_skyward.notifications": ("BudgetNotifier",),
    "prefect_skyward.automations": ("deploy_budget_guard", "deploy_budget_notification", "deploy_crash_guard"),
}
"""Public names that no package exports: users import them from these modules, and Airflow loads some by their names."""

LINK = re.compile(
    r"\[(?P<label>(?:[^\[\]]|\[[^\]]*\])*)\]\((?P<target>(?!https?://|mailto:|#)[^)#\s]+)(?P<anchor>#[^)\s]*)?\)"
)
CODE = re.compile(r"`([^`\n]+)`")
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


# ── events of MkDocs ─────────────────────────────────────────────────────────────────────────────────────────────────


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the page of each cloud behind the page of all clouds, with its own heading."""
    folder = ROOT / "docs/clouds"
    pages = sorted({*folder.glob("*.md")} - {folder / "index.md", folder / "another-cloud.md"})
    headings = {page.name: page.read_text().partition("\n")[0].removeprefix("# ") for page in pages}
    (machines,) = [entry["Machines"] for entry in config.nav or [] if "Machines" in entry]
    here = machines.index({"Providers": "clouds/index.md"}) + 1
    machines[here:here] = [{heading: f"clouds/{name}"} for name, heading in headings.items()]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    for path, content in generated_pages().items():
        files.append(File.generated(config, path, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Point links between files of the repository to the pages of the site, list the programs, and rank the page in
    the search.
    """
    if LAST_IN_SEARCH.match(page.file.src_uri):
        page.meta["search"] = {"boost": 0.2}
    return with_site_links(markdown.replace("<!-- programs -->", program_table()), page.file.src_uri)


def on_post_build(config: MkDocsConfig) -> None:
    """Write `llms.txt` (llmstxt.org): title, address and first sentence of each page."""
    lines = [f"# {config.site_name}", "", f"> {config.site_description}", ""]
    for title, uri in _entries(config.nav or []):
        source = ROOT / "docs" / uri
        content = source.read_text() if source.exists() else generated_pages().get(uri, "")
        lines.append(f"- [{title}]({_address(uri)}): {first_sentence(content)}".removesuffix(": "))
    Path(config.site_dir, "llms.txt").write_text("\n".join(lines) + "\n")


# ── generated pages ──────────────────────────────────────────────────────────────────────────────────────────────────


@cache
def generated_pages() -> dict[str, str]:
    """Return the Markdown of each generated page, by its path on the site."""
    pages = {where: (ROOT / source).read_text() for source, where in ROOT_PAGES.items()}
    for path in _programs():
        name = path.relative_to(ROOT).as_posix()
        source = path.read_text()
        about = ast.get_docstring(ast.parse(source)) or ""
        pages[_program_page(name)] = f"# {name}\n\n{about}\n\n```python\n{source}```\n"
    return pages | reference_pages()


def reference_pages() -> dict[str, str]:
    """Return a page for each group of public names, packages of the core and the plugins, and one that lists all."""
    groups: dict[str, list[str]] = defaultdict(list)
    for package, folder in PACKAGES.items():
        for module, name in public_names(ROOT / folder / "__init__.py", package):
            groups[_group(package, module)].append(f"{module}.{name}")
    for module in MODULES:
        groups[_group("skyward_core", f"skyward_core.{module}")] += exports(f"skyward_core.{module}")
    for module, names in FROM_MODULES.items():
        groups[module.split(".")[0]] += [f"{module}.{name}" for name in names]
    pages = {
        f"reference/{group}.md": _reference_page(group, list(dict.fromkeys(names))) for group, names in groups.items()
    }
    return pages | {"reference/index.md": overview(groups)}


def public_names(path: Path, package: str) -> Iterator[tuple[str, str]]:
    """Yield module and name of everything that a package exports: `from package.module import name as name`.

    Submodules are left out: `exports` has their names.
    """
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith(f"{package}."):
            yield from ((node.module, alias.name) for alias in node.names if alias.asname == alias.name)


def exports(module: str) -> list[str]:
    """Return the paths of a public module and of what it exports, without the accelerators' factories (`factories`)."""
    values = vars(import_module(module))
    names = values.get("__all__") or [name for name, kind in values.items() if _is_error(kind)]
    own = [name for name in names if module != "skyward_core.accelerators" or name not in factories()]
    return [module, *(f"{getattr(import_module(module), name).__module__}.{name}" for name in own)]


def _is_error(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, errors.SkywardError)


def _group(package: str, module: str) -> str:
    """Return the page of a module: a topic of the core, or the plugin.

    Raises KeyError for a package without a topic.
    """
    if package != "skyward_core":
        return package
    return {name: topic for topic, names in TOPICS.items() for name in names}[module.split(".")[1]]


def _reference_page(group: str, names: list[str]) -> str:
    title = f"skyward_core: {group}" if group in TOPICS else group
    return f"# {title}\n\n" + "\n".join(_entry(name) for name in sorted(set(names), key=_by_name))


def _entry(path: str) -> str:
    """Return the entry of a name: its docstring, and the parameters of a class."""
    package, _, module = path.partition(".")
    if package != "skyward_core":
        return f"::: {path}\n"
    if module in MODULES:
        table = factory_table() if module == "accelerators" else ""
        return f"::: {path}\n    options:\n      members: false\n\n{table}"
    if path == POOL:
        methods = "".join(f"::: {method}\n    options:\n      heading_level: 3\n\n" for method in methods_of(path))
        return f"::: {path}\n    options:\n      members: false\n\n{parameter_table(path)}\n{methods}"
    return f"::: {path}\n\n{parameter_table(path) or named_defaults(path)}"


def overview(groups: Mapping[str, list[str]]) -> str:
    """Return the page that lists every name of each group, with the first sentence of its docstring."""
    lines = ["# API reference", "", OVERVIEW]
    for group in [*TOPICS, *sorted(set(groups) - set(TOPICS))]:
        lines += ["", f"## {group}", "", "| name | |", "| --- | --- |"]
        for path in sorted(set(groups[group]), key=_by_name):
            lines.append(f"| [`{path.rpartition('.')[2]}`]({group}.md#{path}) | {_summary(path)} |")
    return "\n".join([*lines, ""])


OVERVIEW = """Every public name, with its parameters, defaults and errors. The pages are made from the docstrings of the
package that you have. All names of `skyward_core` are importable from it: `import skyward_core as sky`, `sky.Image`."""


def _summary(path: str) -> str:
    """Return the first sentence of a name's docstring, without importing an orchestrator."""
    package, _, rest = path.partition(".")
    if package != "skyward_core":
        return ""
    module, _, name = path.rpartition(".")
    value = import_module(path) if rest in MODULES else getattr(import_module(module), name)
    is_documented = isinstance(value, type) or callable(value) or rest in MODULES
    return first_sentence(inspect.getdoc(value) or "").replace("|", r"\|") if is_documented else ""


def _by_name(path: str) -> tuple[int, str, str]:
    """Names by the alphabet, after those with which each program begins."""
    name = path.rpartition(".")[2]
    return FIRST.index(name) if name in FIRST else len(FIRST), name.lower(), path


def _programs() -> list[Path]:
    return sorted(path for folder in PROGRAMS for path in (ROOT / folder).rglob("*.py"))


@cache
def program_table() -> str:
    """Return the table of programs as Markdown, with links as in docs/, and the first sentence of each docstring."""
    rows = ["| program | what it shows |", "| --- | --- |"]
    for path in _programs():
        name = path.relative_to(ROOT).as_posix()
        about = first_sentence(ast.get_docstring(ast.parse(path.read_text())) or "")
        rows.append(f"| [{name}](../{name}) | {about} |")
    return "\n".join(rows)


def _program_page(name: str) -> str:
    return f"programs/{name.removesuffix('.py')}.md"


# ── links ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def with_site_links(markdown: str, uri: str) -> str:
    """Return a page's Markdown with links that work on the site, and without backslashes that readers would see.

    Code blocks stay as they are.
    """
    source = next((source for source, where in ROOT_PAGES.items() if where == uri), f"docs/{uri}")
    parts, end = [], 0
    for fence in FENCE.finditer(markdown):
        parts += [_linked(markdown[end : fence.start()], source, uri), fence[0]]
        end = fence.end()
    return "".join([*parts, _linked(markdown[end:], source, uri)])


def _linked(text: str, source: str, uri: str) -> str:
    return LINK.sub(lambda link: _site_link(link, source, uri), CODE.sub(_with_pipes, text))


def _with_pipes(code: re.Match[str]) -> str:
    """Return code of a table's cell as HTML if it has a pipe: Python-Markdown shows the backslash before it."""
    if r"\|" not in code[1]:
        return code[0]
    return f"<code>{html.escape(code[1].replace(r'\|', '|')).replace('|', '&#124;')}</code>"


def _site_link(link: re.Match[str], source: str, uri: str) -> str:
    target = posixpath.normpath(posixpath.join(posixpath.dirname(source), link["target"]))
    where = place_on_site(target)
    if where is not None:
        return f"[{link['label']}]({posixpath.relpath(where, posixpath.dirname(uri) or '.')}{link['anchor'] or ''})"
    return link["label"] if (ROOT / target).exists() else link[0]


def place_on_site(target: str) -> str | None:
    """Return the page of a file or folder of the repository, or None if it has none (most source files)."""
    if target in ROOT_PAGES:
        return ROOT_PAGES[target]
    if target.endswith(".py") and target.split("/", maxsplit=1)[0] in PROGRAMS:
        return _program_page(target)
    if target.startswith("docs/"):
        inner = target.removeprefix("docs/")
        for index in ("README.md", "index.md"):
            if (ROOT / target / index).exists():
                return f"{inner}/{index}"
        return inner if (ROOT / target).is_file() else None
    return None


# ── llms.txt ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _entries(nav: Any) -> Iterator[tuple[str, str]]:
    """Yield title and page of each entry of the navigation, from top to bottom."""
    for entry in nav:
        for title, value in entry.items():
            if isinstance(value, str):
                yield title, value
            else:
                yield from _entries(value)


def first_sentence(markdown: str) -> str:
    """Return the first sentence of a page's text, without markup. Lists, tables and code are left out."""
    paragraphs = (part.strip() for part in FENCE.sub("", markdown).split("\n\n"))
    text = next((part for part in paragraphs if part and part[0] not in "#:|-<!" and not part.endswith(":")), "")
    plain = LINK.sub(lambda link: link["label"], " ".join(text.split())).replace("`", "").replace("**", "")
    return re.split(r"(?<=\.)\s", plain)[0]


def _address(uri: str) -> str:
    """Return the path of a page on the site, from its root."""
    stem = uri.removesuffix(".md")
    return f"./{stem.removesuffix('index').removesuffix('README')}".rstrip("/") + "/"
