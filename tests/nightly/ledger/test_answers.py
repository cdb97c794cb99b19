"""A PostgreSQL server that is reached, and does not answer; and a client that holds locks and does nothing."""

import time

import pytest
from sqlalchemy import select

from skyward_core.errors import LedgerError
from skyward_core.ledger import database, sql_engine
from skyward_core.ledger.ledger import Ledger
from skyward_core.ledger.names_policy import Rent, Wait
from skyward_core.ledger.tables import NAMES
from tests.ledger.fixtures import Clock, claim, open_pool
from tests.system.ledger.test_answers import Proxy, proxy, url  # noqa: F401 - fixtures


def test_a_silent_server_is_an_error_and_not_a_wait(proxy: Proxy, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each statement has its limit; the next one is sent on another connection."""
    monkeypatch.setattr(sql_engine, "ANSWER_SECONDS", 0.3)
    monkeypatch.setattr(sql_engine, "CONNECT_TIMEOUT_SECONDS", 2)
    with Ledger(url, clock=Clock(), busy_timeout_seconds=0.2) as ledger:
        open_pool(ledger, "p")
        proxy.cut()
        began = time.monotonic()
        with pytest.raises(LedgerError, match="cannot be reached"):
            ledger.pool("p")
        assert time.monotonic() - began < 30  # the first statement and a new connection, each with its limit
        proxy.mend()
        assert ledger.pool("p") is not None


def test_a_process_that_is_stopped_inside_a_transaction_keeps_no_locks(
    postgresql_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server ends its connection. Those who wait for its lock get it in time."""
    database.Database(postgresql_url, Clock(), 5.0).close()  # it has migrated
    monkeypatch.setattr(sql_engine, "IDLE_SECONDS", 0.3)
    stopped = database.Database(postgresql_url, Clock(), 5.0)
    with Ledger(postgresql_url, clock=Clock(), busy_timeout_seconds=5.0) as other:
        found = [claim(other, "a")]
        with pytest.raises(LedgerError), stopped.write() as connection:
            connection.execute(select(NAMES).with_for_update()).all()
            found.append(claim(other, "b"))
    stopped.close()
    assert [type(one) for one in found] == [Rent, Wait]
