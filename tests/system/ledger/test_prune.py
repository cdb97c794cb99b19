"""`skyward ledger prune` deletes the details of old pools and keeps their costs, on both databases."""

import json
import re
from collections.abc import Iterator
from datetime import timedelta
from decimal import Decimal
from pathlib import Path

import pytest
from sqlalchemy import create_engine, text

from skyward_core import cli
from skyward_core.errors import LedgerError
from skyward_core.ledger.ledger import Ledger
from skyward_core.ledger.rows import Account, Attempt, Bucket, Period, Price, ResourceKind, ResourceRequest
from skyward_core.providers.base import LAUNCH_TAG, OWNER_TAG, RANK_TAG, TYPE_TAG
from tests.unit.ledger.test_ledger import (  # noqa: F401 - fixtures
    LATER,
    NOON,
    OWNER,
    PROVIDER,
    Clock,
    clock,
    postgresql_server,
    postgresql_url,
    run_on,
    sqlite_url,
    url,
)

ROOT = Path(__file__).parents[3]
SPEC = json.dumps({"nodes": 2, "env": {"TEXT": "x" * 2000}})
TAGS = {LAUNCH_TAG: "l", RANK_TAG: "0", TYPE_TAG: "t4.large", OWNER_TAG: "ada@laptop", "much": "x" * 500}


@pytest.fixture
def ledger(url: str, clock: Clock) -> Iterator[Ledger]:
    """A ledger with four pools"""
    with Ledger(url, clock=clock, busy_timeout_seconds=10) as opened:
        opened.set_account(Account("team", Decimal(500), Period.MONTH))
        clock.time = NOON - timedelta(days=100)
        for pool_id in ("old", "left", "lives"):
            use(opened, pool_id, closes=pool_id == "old")
        for pool_id in ("old", "left"):
            opened.end_pool(pool_id)
        clock.time = NOON
        use(opened, "new", closes=True)
        opened.end_pool("new")
        yield opened


def use(ledger: Ledger, pool_id: str, *, closes: bool) -> None:
    ledger.open_pool(pool_id, owner=OWNER, provider=PROVIDER, spec_json=SPEC, lease_expires_at=LATER, account="team")
    request = ResourceRequest(
        ResourceKind.INSTANCE, "local", "here", f"{pool_id}-0", pool_id, TAGS, LATER, Price(Decimal("1.5"), Decimal(4))
    )
    (intent,) = ledger.intend_all(pool_id, [request])
    ledger.bind(intent, f"i-{pool_id}")
    ledger.note_all({intent.id: {Bucket.LAUNCHING: 60.0, Bucket.RUNNING_CALLS: 3600.5}})
    ledger.note_attempts(
        [
            Attempt(
                pool_id,
                ledger._database.clock(),
                "local",
                "here",
                "t4.large",
                is_spot=False,
                seconds=1.0,
                message="x" * 300,
            )
        ]
        * 3
    )
    ledger.settle(ledger.reserve("team", pool_id, Decimal(5)), Decimal("1.6"))
    if closes:
        ledger.close_all([intent.id], "it is not listed")


def test_the_command_is_a_dry_run_by_default(
    ledger: Ledger, clock: Clock, url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SKYWARD_LEDGER", url)
    days = "1d"
    made_smaller = list[str]()
    really = Ledger.vacuum
    monkeypatch.setattr(Ledger, "vacuum", lambda self: (made_smaller.append(str(self.url)), really(self))[1])
    ledger.prune(NOON - timedelta(days=3650))
    assert cli.main(["ledger", "prune", "--older-than", days]) == cli.TO_DO
    printed = capsys.readouterr().out
    assert re.match(
        r"to be taken away: details of \d pools, \d tries to rent machines, \d settled reservations, \d detached calls\nnothing was touched; --yes does it\n",
        printed,
    )
    assert made_smaller == []
    assert cli.main(["ledger", "prune", "--older-than", days, "--yes", "--json"]) == 0
    assert len(made_smaller) == 1
    printed = json.loads(capsys.readouterr().out)
    assert (printed["is_dry_run"], printed["attempts"], printed["reservations"]) == (
        False,
        3 * printed["pools"],
        printed["pools"],
    )
    assert cli.main(["ledger", "prune", "--older-than", days]) == 0
    assert "has details left" in capsys.readouterr().out
    assert cli.main(["why", "old"]) == 0
    assert "`skyward ledger prune` deleted them" in capsys.readouterr().out
    for wrong in ("90", "0d", "-1d", "nand", "1e9d", "99999999d", "²d"):
        with pytest.raises(SystemExit):
            cli.main(["ledger", "prune", f"--older-than={wrong}"])
        capsys.readouterr()


def test_a_minimal_role_is_enough(postgresql_server: str, postgresql_url: str, clock: Clock) -> None:
    page = (ROOT / "docs/ledger.md").read_text()
    (grants,) = re.findall(r"```sql\n(.*?)```", page, re.DOTALL)
    with Ledger(postgresql_url):
        pass
    engine = create_engine(postgresql_url)
    try:
        with engine.begin() as connection:
            connection.execute(text(grants.replace("'...'", "'secret'")))
        theirs = postgresql_url.replace("//ada@", "//skyward_user@")
        with Ledger(theirs, clock=clock) as ledger:
            ledger.set_account(Account("team", Decimal(500), Period.MONTH))
            use(ledger, "p", closes=True)
            ledger.condemn("p", seen=LATER)
            ledger.end_pool("p")
            assert ledger.prune(NOON + timedelta(days=1), is_dry_run=False).pools == 1
            ledger.vacuum()
        other = create_engine(theirs)
        for statement in (
            "CREATE TABLE mine (a int)",
            "DROP TABLE skyward_pools",
            "DELETE FROM skyward_resources",
            "ALTER TABLE skyward_meta ADD b int",
        ):
            with pytest.raises(Exception, match=r"permission denied|must be owner"), other.begin() as connection:
                connection.execute(text(statement))
        other.dispose()
        with engine.begin() as connection:
            connection.execute(text("UPDATE skyward_meta SET value = '1'"))
        with pytest.raises(LedgerError, match="SQLSTATE 42501"):
            Ledger(theirs)
    finally:
        with engine.begin() as connection:
            connection.execute(text("DROP OWNED BY skyward_user; DROP ROLE skyward_user"))
        engine.dispose()
