"""Pools with a name while their ledger, a PostgreSQL server, is reached by no process, and when it comes back."""

from pathlib import Path

import pytest

import skyward_core as sky
from skyward_core.ledger import sql_engine
from skyward_core.session import bookkeeping, named_use
from skyward_core.worker.node_clocks import read_lease
from tests.pool.named import Start, double, is_gone, machines_of, name, pool_of, program, rentals  # noqa: F401 - fixtures
from tests.system.ledger.test_answers import Proxy, proxy, url  # noqa: F401 - fixtures
from tests.unit.ledger.test_ledger import postgresql_server, postgresql_url  # noqa: F401 - fixtures
from tests.waiting import wait_until

LEASE_SECONDS = 10

pytestmark = [pytest.mark.timeout(240)]


@pytest.fixture(autouse=True)
def ledger(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    """The ledger is on the other side of the proxy, and no statement waits for long."""
    monkeypatch.setenv("SKYWARD_LEDGER", url)
    monkeypatch.setattr(sql_engine, "ANSWER_SECONDS", 0.5)
    monkeypatch.setattr(sql_engine, "CONNECT_TIMEOUT_SECONDS", 2)
    for module in (named_use, bookkeeping):
        monkeypatch.setattr(module, "LEDGER_BUSY_SECONDS", 0.5)


def lease_of(pool: sky.ComputePool) -> float:
    """Until when the head lives, on its machine's clock."""
    directory = pool.lease.nodes[0].instance.directory
    assert directory is not None
    until = read_lease(Path(directory))
    assert until is not None
    return until


def test_an_open_pool_goes_on_and_a_newcomer_rents_nothing(name: str, proxy: Proxy) -> None:
    with pool_of(name, lease_seconds=LEASE_SECONDS) as opener, pool_of(name, lease_seconds=LEASE_SECONDS) as joined:
        before = lease_of(opener)
        proxy.cut()
        with pytest.raises(sky.LedgerError, match="Check that its server runs"):
            pool_of(name, lease_seconds=LEASE_SECONDS).open()
        wait_until(lambda: lease_of(opener) > before + LEASE_SECONDS, "the leases to be renewed")
        assert (double(1) >> opener, double(2) >> joined) == (2, 4)
        proxy.mend()
        assert len(rentals()) == 1
        with pool_of(name, lease_seconds=LEASE_SECONDS) as late:
            assert late.id == opener.id
            assert double(3) >> late == 6
        ids = machines_of(opener)
    assert is_gone(ids)


def test_of_two_that_open_a_name_while_the_ledger_comes_back_one_rents(name: str, proxy: Proxy, program: Start) -> None:
    assert rentals() == []
    proxy.cut()
    first, second = (program(name, lease_seconds=LEASE_SECONDS) for _ in range(2))
    waiting = proxy.connections + 2
    wait_until(lambda: proxy.connections >= waiting, "both to wait for the ledger")
    proxy.mend()
    one, other = first.answer(), second.answer()
    assert (one["result"], other["result"]) == (42, 42)
    assert one["id"] == other["id"]
    assert len(rentals()) == 1
    first.leave()
    second.leave()
