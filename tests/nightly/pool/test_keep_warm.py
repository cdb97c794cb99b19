"""`skyward warm NAME --for 2h` with nodes: they live longer, whatever the process that opened the pool has set."""

from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path

import pytest

import skyward_core as sky
from skyward_core import cli
from skyward_core.ledger.ledger import Ledger, default_url
from skyward_core.ledger.names_policy import NamedPool
from skyward_core.ledger.rows import Account, Bucket, CostBy, Period
from skyward_core.worker.watchdog import read_lease, read_paid, uptime
from tests.conftest import wait_until
from tests.system.pool.test_named_pools import double, is_gone, machines_of, name, pool_of  # noqa: F401 - a fixture

pytestmark = [pytest.mark.timeout(240)]


def row_of(name: str) -> NamedPool:
    with Ledger(default_url()) as ledger:
        row = ledger.names.named(name)
    assert row is not None
    return row


def test_a_warm_pool_lives_longer(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Its nodes have the longer lease and the longer paid time, and so has the ledger; its cost is warm time."""
    with Ledger(default_url()) as ledger:
        ledger.set_account(Account(name, Decimal(100), Period.RUN))
    provider = sky.Local(price_per_hour=36)
    with pool_of(name, provider=provider, keep_warm=30, budget=name) as pool:
        assert pool.lease is not None
        folders = [Path(str(node.instance.directory)) for node in pool.lease.nodes]
        ids = machines_of(pool)
    assert cli.main(["warm", name, "--for", "10m"]) == 0
    assert "stays warm until" in capsys.readouterr().out
    for folder in folders:
        lease, paid = read_lease(folder), read_paid(folder)
        assert lease is not None and paid is not None
        assert min(lease, paid) > uptime() + 500
    until = row_of(name).warm_until
    assert until is not None
    assert timedelta(seconds=500) < until - datetime.now(UTC) < timedelta(seconds=601)
    with pool_of(name, provider=provider, keep_warm=30, budget=name) as again:
        assert (again.id, double(4) >> again) == (pool.id, 8)
    assert cli.main(["stop", name]) == 0
    assert is_gone(pool, ids)
    with Ledger(default_url()) as ledger:
        warm = next(row for row in ledger.cost_rows(CostBy.BUCKET, pool_id=pool.id) if row.key == Bucket.WARM)
        assert warm.seconds > 0
        assert ledger.open_reservations(pool_id=pool.id) == []


def test_a_pool_in_use_is_kept_warm_when_it_is_left(name: str) -> None:
    """Also one that was to end with its last process."""
    with pool_of(name) as pool:
        ids = machines_of(pool)
        assert pool.lease is not None
        folder = Path(str(pool.lease.nodes[0].instance.directory))
        assert cli.main(["warm", name, "--for", "5m"]) == 0
    assert row_of(name).warm_until is not None
    lease = read_lease(folder)
    assert lease is not None
    assert lease > uptime() + 200
    assert not is_gone(pool, ids)
    sky.release(pool.id)
    wait_until(lambda: is_gone(pool, ids), "the machines to be gone")


def test_a_warm_pool_whose_nodes_have_ended_is_refused(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The ledger stays as it was."""
    with pool_of(name, keep_warm=300) as pool:
        ids = machines_of(pool)
    before = row_of(name)
    for instance in sky.Local().instances(pool.id):
        sky.Local().terminate([instance.id])
    wait_until(lambda: is_gone(pool, ids), "the machines to be gone")
    assert cli.main(["warm", name, "--for", "10m"]) == cli.FAILED
    assert "has ended" in capsys.readouterr().err
    assert row_of(name) == before
