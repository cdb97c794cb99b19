"""Pools with a name while their ledger, a PostgreSQL server, is reached by no process, and when it comes back."""

import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import skyward_core as sky
from skyward_core.ledger import sql_engine
from skyward_core.ledger.ledger import Ledger
from skyward_core.ledger.names import Names
from skyward_core.session import bookkeeping, named_use
from skyward_core.worker.watchdog import read_lease
from tests.conftest import wait_until
from tests.nightly.pool.test_named_pools import answer, program, rentals  # noqa: F401 - fixtures
from tests.system.ledger.test_answers import Proxy, proxy, url  # noqa: F401 - fixtures
from tests.system.pool.test_named_pools import LEASE_SECONDS, double, is_gone, machines_of, name, pool_of  # noqa: F401 - fixtures
from tests.unit.ledger.test_ledger import postgresql_server, postgresql_url  # noqa: F401 - fixtures

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
    """The nodes' leases are renewed for longer than they last. When the ledger is back, the newcomer joins."""
    with pool_of(name) as opener, pool_of(name) as joined:
        before = lease_of(opener)
        proxy.cut()
        with pytest.raises(sky.LedgerError, match="Check that its server runs"):
            pool_of(name).open()
        wait_until(lambda: lease_of(opener) > before + LEASE_SECONDS, "the leases to be renewed")
        assert (double(1) >> opener, double(2) >> joined) == (2, 4)
        proxy.mend()
        assert len(rentals()) == 1
        with pool_of(name) as late:
            assert late.id == opener.id
            assert double(3) >> late == 6
        ids = machines_of(opener)
    assert is_gone(opener, ids)


def test_who_leaves_while_the_ledger_is_away_keeps_nothing_alive(name: str, proxy: Proxy) -> None:
    """Closing again, when the ledger is back, ends the machines before their lease does."""
    pool = pool_of(name, lease_seconds=3600.0).open()
    ids = machines_of(pool)
    proxy.cut()
    with pytest.raises(sky.LedgerError, match="renews nothing"):
        pool.close()
    proxy.mend()
    assert not is_gone(pool, ids)
    pool.close()
    assert is_gone(pool, ids)


def test_the_first_that_leaves_after_a_long_outage_does_not_end_the_pool_of_the_others(
    name: str, proxy: Proxy, postgresql_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows of both have run out. The other one renews its row when the first one leaves already."""
    opener, joined = pool_of(name).open(), pool_of(name).open()
    ids = machines_of(opener)
    renew, may_renew = Names.renew, threading.Event()

    def late(names: Names, client_id: str, *values: float) -> None:
        if client_id != leaver:
            may_renew.wait()
        renew(names, client_id, *values)

    def look(*_: object) -> bool:
        may_renew.set()
        return may_come_back(*_)  # type: ignore[arg-type]

    may_come_back = Names.may_come_back
    with Ledger(postgresql_url) as ledger:
        leaver = ledger.names.clients(opener.id)[0].id
        monkeypatch.setattr(Names, "renew", late)
        monkeypatch.setattr(Names, "may_come_back", look)
        proxy.cut()
        wait_until(lambda: not ledger.names.activity([opener.id])[opener.id].users, "the rows of both to run out")
        proxy.mend()
    opener.close()
    may_renew.set()
    assert double(3) >> joined == 6
    assert not is_gone(joined, ids)
    joined.close()
    assert is_gone(joined, ids)


def test_of_two_that_open_a_name_while_the_ledger_comes_back_one_rents(
    name: str,
    proxy: Proxy,
    program: Callable[..., subprocess.Popen[str]],
) -> None:
    """Two processes wait for the ledger at the same time."""
    assert rentals() == []
    proxy.cut()
    first, second = program(name), program(name)
    waiting = proxy.connections + 2
    wait_until(lambda: proxy.connections >= waiting, "both to wait for the ledger")
    proxy.mend()
    one, other = answer(first), answer(second)
    assert (one["result"], other["result"]) == (42, 42)
    assert one["id"] == other["id"]
    assert len(rentals()) == 1
    for process in (first, second):
        process.communicate("")
        assert process.returncode == 0
