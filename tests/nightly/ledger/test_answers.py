"""A PostgreSQL server that is reached, and does not answer."""

import time

import pytest

from skyward_core.errors import LedgerError
from skyward_core.ledger import sql_engine
from skyward_core.ledger.ledger import Ledger
from tests.system.ledger.test_answers import Proxy, proxy, url  # noqa: F401 - fixtures
from tests.unit.ledger.test_ledger import Clock, open_pool, postgresql_server, postgresql_url  # noqa: F401 - fixtures


def test_a_silent_server_is_an_error_and_not_a_wait(proxy: Proxy, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
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
