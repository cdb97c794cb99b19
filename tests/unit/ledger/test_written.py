"""Ledgers that older code has written open in this one, and their money is the same."""

import sqlite3
from decimal import Decimal
from pathlib import Path

import pytest

from skyward_core.ledger.database import newest_version
from skyward_core.ledger.ledger import Ledger
from skyward_core.ledger.rows import CostBy
from tests.ledger.fixtures import NOON, TRAIN, Clock, bill, pay
from tests.ledger.write import WRITTEN, write
from tests.system.ledger.test_schema import schema, versions

DUMPS = sorted(WRITTEN.glob("version_*.sql"))


@pytest.mark.parametrize("dump", DUMPS, ids=lambda dump: dump.stem)
def test_a_ledger_that_older_code_wrote_is_migrated_with_its_money(dump: Path, tmp_path: Path) -> None:
    _expect_its_money(dump, tmp_path)


def test_the_ledger_that_this_code_writes_is_the_one_that_is_expected(tmp_path: Path) -> None:
    write(tmp_path / "this.sql")
    _expect_its_money(tmp_path / "this.sql", tmp_path)


def _expect_its_money(dump: Path, tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    path.touch(mode=0o600)
    raw = sqlite3.connect(path)
    raw.executescript(dump.read_text())
    raw.close()
    clock = Clock()
    clock.go(3600)  # its pools do not live any more
    with Ledger(f"sqlite:///{path}", clock=clock, may_migrate=True) as ledger:
        assert bill(ledger, CostBy.POOL) == {"p": (1, Decimal(0)), "q": (2, Decimal(2)), "shared": (2, Decimal(16))}
        assert bill(ledger, CostBy.TASK) == {
            "(no task)": (3, Decimal("10.999999")),
            "airflow:nightly/train": (2, Decimal(2)),
            "dagster:job/a": (0, Decimal("5.000001")),
        }
        assert [pool.id for pool in ledger.pools()] == ["p", "q", "shared"]
        assert [(intent.id, intent.pool_id, intent.cloud_id) for intent in ledger.intents()][:1] == [(1, "p", None)]
        (made,) = ledger.open_reservations()
        assert (made.account, made.reserved_usd, made.made_at) == ("team", Decimal("0.37"), NOON)
        assert ledger.left_usd("team", "p") == Decimal("29.63")
        ledger.settle(made, Decimal("0.11"))
        assert ledger.left_usd("team", "p") == Decimal("29.89")
        pay(ledger, "new", TRAIN, 4)
        assert bill(ledger, CostBy.TASK)["airflow:nightly/train"] == (4, Decimal(6))
    assert versions(f"sqlite:///{path}") == (str(newest_version()), str(newest_version()))
    Ledger(f"sqlite:///{tmp_path}/new.db").close()
    assert {(kind, name) for kind, name, _ in schema(path)} == {
        (kind, name) for kind, name, _ in schema(tmp_path / "new.db")
    }


def test_there_is_a_written_ledger() -> None:
    assert DUMPS
