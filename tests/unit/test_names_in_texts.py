"""Each file, class, function and command that a text names in back-ticks exists."""

from pathlib import Path

import pytest

from tests.names_in_texts import findings

FILES = {
    "Makefile": "test: ## run the tests\n",
    "README.md": "",
    "docs/page.md": "",
    "skyward_core/__init__.py": "from skyward_core.ledger.tables import Price as Price\n",
    "skyward_core/ledger/__init__.py": "",
    "skyward_core/ledger/tables.py": (
        "from dask import Client\n"
        "WHOLE, PART = 1, 2\n"
        "class Price(Protocol):\n"
        "    per_hour: float\n"
        "    def cost(self):\n"
        "        self.sum = 0\n"
        "class Higher(Price): ...\n"
        "class Remote(Client): ...\n"
        'SETTINGS = "settings.json"\n'
    ),
    "tests/kill/__main__.py": "",
    "tests/test_prices.py": "def test_a_price(): ...\n",
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for file, text in FILES.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)
    return tmp_path


def test_each_name_in_back_ticks_exists() -> None:
    """Otherwise mend the text. What is not ours goes into the lists of `names_in_texts.py`."""
    checked, missing = findings()
    assert missing == []
    assert checked > 5_000


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("ledger/rows.py", "no such file"),
        ("rows.py", "no such file"),
        ("skyward_core/ledger/{tables,rows}.sh", "no such file"),
        ("ledger/tables.py:40", "no such line"),
        ("ledger/tables.py:8-40", "no such line"),
        ("tests/test_prices.py::test_two_prices", "no test_two_prices in this file"),
        ("Price.cost_usd", "no cost_usd in Price"),
        ("Higher.cost_usd()", "no cost_usd in Higher"),
        ("tables.Cost", "no Cost in tables"),
        ("ledger.prices", "no prices in ledger"),
        ("skyward_core.ledger.prices", "no prices in ledger"),
        ("sky.Cost", "no Cost in skyward_core"),
        ("PriceList", "nothing is called PriceList"),
        ("cost_per_hour", "nothing is called cost_per_hour"),
        ("make tests", "no target tests"),
        ("make test all", "no target all"),
        ("skyward prices", "no command prices"),
        ("skyward --ledger URL ledger copy", "no command copy"),
        ("skyward ps --some", "no option --some"),
        ("python -m tests.kills --points 5", "no such program"),
        ("pytest tests/test_cost.py", "no such file"),
    ],
)
def test_a_name_that_does_not_exist_is_found(root: Path, name: str, fault: str) -> None:
    (root / "docs/page.md").write_text(f"A page.\n\nIt names\n`{name}`.\n")
    assert findings(root) == (1, [f"docs/page.md:4: `{name}`: {fault}"])


@pytest.mark.parametrize(
    "name",
    [
        "ledger/tables.py",
        "tables.py",
        "skyward_core/*/{tables,rows}.py",
        "ledger/tables.py:2-8",
        "tests/test_prices.py::test_a_price",
        "skyward_core/ledger",
        "settings.json",
        "Price.cost",
        "Price.per_hour",
        "Price.sum",
        "Higher.cost()",
        "Remote.submit",
        "tables.PART",
        "ledger.tables.Client",
        "skyward_core.ledger.tables",
        "sky.Price",
        "per_hour",
        "make test PROVIDER=aws",
        "skyward ledger prune --older-than 90d --yes",
        "python3 -m tests.kill",
    ],
)
def test_a_name_that_exists_is_no_finding(root: Path, name: str) -> None:
    (root / "docs/page.md").write_text(f"It names `{name}`.")
    assert findings(root) == (1, [])


@pytest.mark.parametrize("name", ["FOLDER/PLACE.py", "/etc/hosts.json", "a word", "first.py", "cost"])
def test_what_nothing_here_can_tell_is_not_checked(root: Path, name: str) -> None:
    (root / "docs/page.md").write_text(f"It names `{name}`.")
    assert findings(root) == (0, [])


@pytest.mark.parametrize(
    "text",
    [
        '"""A module. It has\n`gone.py`."""\n',
        "def one():\n    # the reason:\n    return 1  # `gone.py`\n",
        'def one():\n    raise ValueError(f"see "\n    "`gone.py`")\n',
        'SIZE = 1\n\n"""The size of `gone.py`."""\n',
    ],
)
def test_docstrings_comments_and_messages_are_texts(root: Path, text: str) -> None:
    (root / "skyward_core/one.py").write_text(text)
    line = text.count("\n", 0, text.index("`")) + 1 if "A module" not in text else 2
    assert findings(root)[1] == [f"skyward_core/one.py:{line}: `gone.py`: no such file"]


def test_blocks_of_code_and_columns_of_old_names_are_not_read(root: Path) -> None:
    table = "| was | is |\n| --- | --- |\n| `old.py` | `tables.py` |\n| `older.py` | `new.py` |\n"
    (root / "docs/page.md").write_text(f"```console\n$ echo `old.py`\n```\n\n{table}\n")
    assert findings(root)[1] == ["docs/page.md:8: `new.py`: no such file"]
