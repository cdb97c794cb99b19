"""`skyward users`: who uses a pool with a name, and what that has cost."""

import json
from datetime import timedelta

from skyward_core import cli
from skyward_core.ledger.ledger import Ledger
from skyward_core.machines.owner import Owner
from skyward_core.work import Work
from tests.unit.cli.test_commands import (  # noqa: F401 - fixtures
    HERE,
    Clock,
    FolderProvider,
    Skyward,
    clock,
    folder,
    ledger,
    lines,
    open_named,
    skyward,
    url,
)


def test_users_of_a_pool_are_shown_by_its_name(
    skyward: Skyward, ledger: Ledger, clock: Clock, folder: FolderProvider
) -> None:
    """Two USD were spent while calls ran: three quarters for one process, a quarter for the other."""
    open_named(ledger, clock, folder, Work(system="cron", run="2"))
    rows = lines(skyward("users nightly"))
    assert rows[0] == ["USER", "STATE", "SINCE", "SLOT SECONDS", "SHARE", "COST USD", "WORK"]
    assert [row[0] for row in rows[1:]] == [HERE.name, HERE.name, "detached calls of dag", "(no calls)", "total"]
    assert [row[3:6] for row in rows[1:3]] == [["30.0", "66.7%", "1.3333"], ["10.0", "22.2%", "0.4444"]]
    assert rows[2][-1] == "cron:2"
    assert rows[-1][-1] == "2.0000"
    assert lines(skyward("users sky-named")) == rows


def test_the_state_of_a_user(skyward: Skyward, ledger: Ledger, clock: Clock, folder: FolderProvider) -> None:
    """It lives, has left, or is silent: it was killed, or is cut off."""
    open_named(ledger, clock, folder)
    ledger.names.leave("nightly", "b")
    states = [user["state"] for user in json.loads(skyward("users nightly --json"))["users"]]
    assert states == ["live", "ended", "live"]
    other = Owner("bob", "server", "boot", "1", 4712, "1")
    long_ago = clock.now - timedelta(hours=1)
    clock.now, now = long_ago, clock.now
    ledger.names.claim("nightly", "x", "c", owner=other, terms={}, keep_warm_seconds=60.0, lease_seconds=100.0)
    clock.now = now
    states = {user["state"] for user in json.loads(skyward("users nightly --json"))["users"]}
    assert states == {"live", "ended", "silent"}


def test_a_name_without_a_pool_is_an_error(skyward: Skyward, ledger: Ledger) -> None:
    assert "no pool with the name 'nonesuch'" in skyward("users nonesuch", code=cli.FAILED)
