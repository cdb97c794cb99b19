"""Pools with a name, when the ledger or a node does not answer while a process leaves: it keeps nothing alive."""

import signal
import sqlite3
import subprocess
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager

import pytest

import skyward_core as sky
from skyward_core.ledger.ledger import Ledger, default_url
from skyward_core.ledger.names_policy import NameState
from skyward_core.session import bookkeeping, named_use
from tests.conftest import signal_members, wait_until
from tests.nightly.pool.test_named_pools import answer, program  # noqa: F401 - fixtures
from tests.system.pool.test_named_pools import double, is_gone, machines_of, name, pool_of, state_of  # noqa: F401 - fixtures

pytestmark = [pytest.mark.timeout(240)]

RENEWALS = {"skyward-client", "skyward-lease", "skyward-node-lease"}
BUSY_SECONDS = 0.3


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No process waits for a locked ledger for long."""
    for module in (named_use, bookkeeping):
        monkeypatch.setattr(module, "LEDGER_BUSY_SECONDS", BUSY_SECONDS)


@contextmanager
def locked_ledger() -> Generator[None]:
    """Keep the write lock of this test's ledger."""
    path = default_url().removeprefix("sqlite:///")
    holder = sqlite3.connect(path, timeout=60, isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    try:
        yield
    finally:
        holder.execute("ROLLBACK")
        holder.close()


def renewals() -> set[threading.Thread]:
    """The threads of this process that renew something, those of pools that tests share too."""
    return {thread for thread in threading.enumerate() if thread.name in RENEWALS}


def users(pool: sky.ComputePool) -> int:
    with Ledger(default_url()) as ledger:
        return ledger.names.activity([pool.id])[pool.id].users


def opened_by(who: str, name: str, **changes: float) -> sky.ComputePool:
    """Return a pool that this process is the only one to use, as its opener or as one that has joined."""
    first = pool_of(name, **changes).open()
    if who == "opener":
        return first
    second = pool_of(name, **changes).open()
    first.close()
    return second


@pytest.mark.parametrize("who", ["opener", "joined"])
def test_the_last_one_that_leaves_while_the_ledger_is_locked_keeps_nothing_alive(who: str, name: str) -> None:
    """The error says what is left, until when, and what to do. The process lives on; the machines do not."""
    others = renewals()
    pool = opened_by(who, name)
    ids = machines_of(pool)
    with locked_ledger(), pytest.raises(sky.LedgerError, match="is locked") as refused:
        pool.close()
    for words in ("renews nothing", "UTC at the latest", "close the pool again", f"skyward stop {name}"):
        assert words in str(refused.value)
    wait_until(lambda: renewals() <= others, "the renewals to end")
    with pytest.raises(sky.PoolClosed, match="close it"):
        pool.open()
    wait_until(lambda: is_gone(pool, ids), "the nodes to end with their lease")
    pool.close()


@pytest.mark.parametrize("keep_warm", [0.0, 3600.0])
@pytest.mark.parametrize("who", ["opener", "joined"])
def test_closing_again_ends_what_could_not_be_left(who: str, keep_warm: float, name: str) -> None:
    """At once, and not when the lease ends."""
    pool = opened_by(who, name, keep_warm=keep_warm, lease_seconds=3600.0)
    ids = machines_of(pool)
    with locked_ledger(), pytest.raises(sky.LedgerError, match="renews nothing"):
        pool.close()
    assert not is_gone(pool, ids)
    pool.close()
    assert is_gone(pool, ids)
    with pool_of(name, keep_warm=keep_warm, lease_seconds=3600.0) as again:
        assert again.id != pool.id
        assert double(1) >> again == 2
        ids = machines_of(again)
    sky.release(again.id)
    assert is_gone(again, ids)


@pytest.mark.parametrize("who", ["opener", "joined"])
def test_others_go_on_if_one_leaves_while_the_ledger_is_locked(
    who: str, name: str, program: Callable[..., subprocess.Popen[str]]
) -> None:
    """The one that has left counts as a user no more when its lease has run out, and the last one ends the machines."""
    if who == "opener":
        mine = pool_of(name).open()
        other = program(name)
        assert answer(other)["id"] == mine.id
    else:
        other = program(name)
        answer(other)
        mine = pool_of(name).open()
    ids = machines_of(mine)
    with locked_ledger(), pytest.raises(sky.LedgerError, match="renews nothing"):
        mine.close()
    wait_until(lambda: users(mine) == 1, "the lease of the one that has left to run out")
    with pool_of(name) as late:
        assert late.id == mine.id
        assert double(3) >> late == 6
    other.communicate("")
    assert other.returncode == 0
    assert is_gone(mine, ids)
    mine.close()


@pytest.mark.parametrize("is_last", [True, False])
@pytest.mark.parametrize("who", ["opener", "joined"])
def test_a_frozen_node_keeps_no_process_from_leaving(who: str, is_last: bool, name: str) -> None:
    """The last one ends it; any other leaves it to those that stay."""
    leaver = opened_by(who, name)
    ids = machines_of(leaver)
    stayer = None if is_last else pool_of(name).open()
    for instance_id in ids:
        signal_members(instance_id, signal.SIGSTOP)
    leaver.close()
    if stayer is not None:
        assert users(leaver) == 1
        assert state_of(name) is NameState.IN_USE
        stayer.close()
    assert is_gone(leaver, ids)


def test_a_closer_that_gives_up_is_not_waited_for(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It could not confirm the end of the machines. The next process ends them, and rents at once."""
    others = renewals()
    pool = opened_by("joined", name)
    ids = machines_of(pool)
    with monkeypatch.context() as patch:
        patch.setattr(named_use, "release", _unconfirmed)
        with pytest.raises(sky.InstancesLeft):
            pool.close()
    assert state_of(name) is NameState.CLOSING
    wait_until(lambda: renewals() <= others, "the renewals to end")  # one may run: to give up does not wait for it
    with pool_of(name, provision_timeout=60) as again:
        assert again.id != pool.id
        assert double(2) >> again == 4
    wait_until(lambda: is_gone(pool, ids), "the machines that were left to be gone")
    pool.close()


def _unconfirmed(*_: object, **__: object) -> None:
    raise sky.InstancesLeft("one machine may still run", ["local-1"])
