"""The pages for contributors are correct: their links and the tests that they name exist."""

import ast
import re
import tomllib
from functools import cache
from pathlib import Path

import pytest

import skyward_core as sky
from docs.site.parameters import parameter_table
from skyward_core.sklearn.pool import JoblibPool, ScikitLearnPool
from tests import mutation
from tests.page_blocks import pages_of
from tests.sentences import long_sentences

ROOT = Path(__file__).parents[2]
DOCS = (
    "index getting-started concepts events examples faq integrations seeds selection troubleshooting performance"
    " architecture glossary compose decisions/README"
)
PAGES = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", *(f"docs/{name}.md" for name in DOCS.split())]
NAMED_TEST = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")


@pytest.mark.parametrize("page", PAGES)
def test_the_links_and_tests_that_a_page_names_exist(page: str) -> None:
    """A link is a file or a folder of the repository, and `tests/test_x.py::test_y` a function of that file."""
    text = (ROOT / page).read_text()
    targets = re.findall(r"\]\((?!https?://|#)([^)#]+)[^)]*\)", text)
    assert targets
    assert [target for target in targets if not (ROOT / page).parent.joinpath(target).exists()] == []
    named = NAMED_TEST.findall(text)
    missing = [test for test in named if not (ROOT / test[0]).exists() or test[1] not in {"", *functions_of(test[0])}]
    assert missing == []


@cache
def functions_of(file: str) -> frozenset[str]:
    tree = ast.walk(ast.parse((ROOT / file).read_text()))
    return frozenset(node.name for node in tree if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


KINDS = [sky.ComputePool, JoblibPool, ScikitLearnPool, sky.PoolSpec, sky.Image, sky.S3Volume]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_the_reference_says_what_each_parameter_is_for(kind: type) -> None:
    """No row of the table ends with an empty cell; the site's test looks at all providers too."""
    rows = parameter_table(f"{kind.__module__}.{kind.__qualname__}").splitlines()
    assert len(rows) > 2
    assert [row for row in rows if row.endswith("|  |")] == []


SUBJECTS = ["airflow", "dagster", "prefect", "pool", "machines", "commands"]
MOST_WORDS = 900


@pytest.mark.parametrize("subject", SUBJECTS)
def test_the_first_page_of_a_subject_goes_from_nothing_to_a_result(subject: str) -> None:
    """It is a tutorial of at most 900 words with a program or commands, and leads to the pages by question."""
    first, *others = pages_of(subject)
    text = (ROOT / first).read_text()
    assert re.search(r"^```(python|console)$", text, re.M)
    assert len(re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S).split()) <= MOST_WORDS
    linked = {(ROOT / "docs" / target).resolve() for target in re.findall(r"\]\(([^)#]+)", text)}
    assert len(others) >= 6
    assert {(ROOT / page).resolve() for page in others} - linked == set()


def test_sentences_have_at_most_25_words() -> None:
    """In all pages but the decisions, which are records."""
    pages = [*ROOT.glob("*.md"), *(page for page in (ROOT / "docs").rglob("*.md") if "decisions" not in page.parts)]
    found = {page.name: long_sentences(page.read_text()) for page in pages if page.name != "CHANGELOG.md"}
    assert {page: sentences for page, sentences in found.items() if sentences} == {}


def test_the_changelog_is_short() -> None:
    """A version has at most 12,000 bytes, and a sentence at most 34 words."""
    text = (ROOT / "CHANGELOG.md").read_text()
    versions = re.split(r"^(?=## )", text, flags=re.M)[1:]
    assert versions
    assert [version.partition("\n")[0] for version in versions if len(version.encode()) > 12_000] == []
    sentences = re.split(r"[.!?]\s|\n(?=[-#\n])", text)
    assert [sentence for sentence in sentences if len(sentence.split()) > 34] == []


def test_each_public_name_is_explained_on_a_page() -> None:
    """The reference has them all (tests/system/test_site.py); a page says what one is for."""
    pages = [page for page in (ROOT / "docs").rglob("*.md") if "decisions" not in page.parts and page.stem != "seeds"]
    text = "\n".join(page.read_text() for page in [ROOT / "README.md", *pages])
    assert [name for name in sky.__all__ if not re.search(rf"\bsky\.{name}\b|`{name}\b", text)] == []


def test_the_page_of_integrations_has_each_name_of_the_three_packages() -> None:
    page = (ROOT / "docs/integrations.md").read_text()
    for package in ("prefect_skyward", "dagster_skyward"):
        source = (ROOT / "integrations" / package / "__init__.py").read_text()
        (exported,) = re.findall(r"__all__ = \[(.*?)\]", source, re.S)
        names = re.findall(r'"(\w+)"', exported)
        assert names
        assert [name for name in names if f"`{name}`" not in page] == []


def test_the_guide_to_accelerators_has_enough_memory_for_each_model() -> None:
    """2 bytes for each parameter to run it, 16 to train all of it."""
    rows = re.findall(r"^\| ([\d.]+) · 10⁹ \|(.*)\|$", (ROOT / "docs/selection.md").read_text(), re.M)
    assert len(rows) == 6
    for billions, rest in rows:
        to_run, to_train, *chips = (cell.strip() for cell in rest.split("|"))
        for cell, size, chip in zip((to_run, to_train), (2, 16), chips, strict=True):
            written = float(cell.removesuffix(" GB").replace(",", ""))
            assert written == float(billions) * size
            accelerator = sky.accelerators.parse(chip.split('"')[1])
            nodes = 2 if chip.endswith("two nodes") else 1
            assert accelerator.memory_gb * accelerator.count * nodes > written


def test_each_row_of_the_users_documents_holds_or_says_how_it_differs() -> None:
    """The page has a row for each of their statements, with a page of ours and a test that exist."""
    text = (ROOT / "docs/seeds.md").read_text()
    rows = re.findall(
        r"^\| (\d{3}):(\d+) \| (.+?) \| (holds|differs: .+) \| \[.+?\]\((.+?)\) \| `(.+?)::(\w+)` \|$", text, re.M
    )
    assert len(rows) == len(re.findall(r"^\| \d{3}:", text, re.M)), "a row that is missing, or has no page or no test"
    assert [(row[0], int(row[1])) for row in rows] == sorted((row[0], int(row[1])) for row in rows)
    holding = sum(row[3] == "holds" for row in rows)
    assert f"{len(rows)} rows: {holding} hold, {len(rows) - holding} differ, none is missing." in text
    assert [row for row in rows if not (ROOT / "docs" / row[4].partition("#")[0]).exists()] == []
    assert [row for row in rows if not (ROOT / row[5]).exists() or row[6] not in functions_of(row[5])] == []


def test_each_code_block_of_the_users_documents_has_a_row() -> None:
    rows = re.findall(r"^\| (\d{3}):(\d+) \|", (ROOT / "docs/seeds.md").read_text(), re.M)
    blocks = re.findall(
        r"^=== (\d{3}):(\d+)\n(.*?)(?=^=== |\Z)", (ROOT / "tests/seed_blocks.txt").read_text(), re.S | re.M
    )
    lines = [(name, range(int(first), int(first) + 2 * len(code.splitlines()) + 2)) for name, first, code in blocks]
    assert len(lines) > 30
    assert [one for one in lines if not any(name == one[0] and int(row) in one[1] for name, row in rows)] == []


def test_the_index_of_decisions_lists_every_record() -> None:
    folder = ROOT / "docs/decisions"
    listed = re.findall(r"\((\d{4}-[\w-]+\.md)\) \|", (folder / "README.md").read_text())
    assert listed == sorted(record.name for record in folder.glob("[0-9]*.md"))


def test_a_record_that_was_replaced_says_so_in_its_first_line() -> None:
    """It names each record by which the index says that it, or a part of it, is replaced."""
    folder = ROOT / "docs/decisions"
    rows = re.findall(r"\((\d{4}-[\w-]+\.md)\) \|.*\| (.*) \|$", (folder / "README.md").read_text(), re.M)
    replaced = {record: re.findall(r"replaced by ([\d, and]+)", status) for record, status in rows}
    expected = {record: re.findall(r"\d+", by[0]) for record, by in replaced.items() if by}
    assert len(expected) > 5
    lines = {record: (folder / record).read_text().splitlines()[2] for record in expected}
    assert [record for record, line in lines.items() if "eplaced by" not in line] == []
    assert [record for record, line in lines.items() if any(f"[{by}](" not in line for by in expected[record])] == []


def test_the_architecture_names_each_package_in_the_order_of_the_layers() -> None:
    """The numbers of the list are those of the layers that import-linter checks."""
    core = ROOT / "skyward_core"
    modules = {path.stem for path in core.glob("*.py")} - {"__init__"}
    packages = {path.parent.name for path in core.glob("*/__init__.py")}
    section = (ROOT / "docs/architecture.md").read_text().partition("\n## Packages\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|") and not set(line) <= set("|-: ")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert set(re.findall(r"`(\w+)`", " ".join(row[0] for row in rows))) == modules | packages
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    expected = [(name.strip(), str(number)) for number, layer in enumerate(layers, 1) for name in layer.split("|")]
    assert [(row[0].strip("`"), row[1]) for row in rows[1:]] == expected


def test_the_architecture_names_each_group_of_entry_points_that_others_may_use() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = [group for group in project["entry-points"] if group.startswith("skyward.")]
    page = (ROOT / "docs/architecture.md").read_text()
    assert len(groups) == 4
    assert [group for group in groups if f"`{group}`" not in page] == []


def test_the_modules_and_files_of_the_mutation_table_exist() -> None:
    """A renamed one would be skipped without a message."""
    named = [f"skyward_core/{module}.py" for module in mutation.OTHERS]
    named += [f"tests/{file.partition('::')[0]}" for files in mutation.OTHERS.values() for file in files]
    assert [name for name in named if not (ROOT / name).exists()] == []
