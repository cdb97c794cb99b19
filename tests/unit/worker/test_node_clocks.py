"""The node's clocks, lease, paid time and marks: values in, a reason out. No test here waits."""

import math
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyward_core.wire.settings import NodeOwner, NodeSettings, this_process
from skyward_core.worker import node_clocks
from skyward_core.worker.node_clocks import (
    LEAVING,
    WARM,
    BusyFlag,
    Clocks,
    Watch,
    kill_all_but_keepers,
    read_lease,
    read_paid,
    read_warm,
    write_lease,
    write_leaving,
    write_paid,
    write_warm,
)
from skyward_core.worker.supervisor import CrashHistory

HOUR = 3600.0
NO_UPTIME = [math.inf, math.nan, -1.0]
uptimes = st.floats(min_value=0, max_value=1e9)


def settings(**fields: object) -> NodeSettings:
    given_fields: dict = {"pool_id": "sky-1", "instance_id": "local-0", "rank": 0, "total_nodes": 1, "slots": 1}
    given_fields |= {"host": "127.0.0.1", "head_host": "127.0.0.1", "head_port": 1}
    given_fields |= {"tls_certificate": "", "tls_key": "", "value_directories": ("/dev/shm/none",)}
    return NodeSettings(**given_fields | fields)


class Node:
    """A node whose uptime a test advances; its client lives, unless the settings say otherwise."""

    def __init__(self, directory: Path, *marks: BusyFlag, **fields: object) -> None:
        self.now = 1000.0
        self.directory, self.marks = directory, marks
        self.settings = settings(**{"owner": this_process()} | fields)
        self.watch = Watch(directory, lambda: self.now)

    def at(self, now: float) -> str | None:
        """Return why the node ends at this uptime."""
        self.now = now
        return self.watch.verdict(self.settings, list(self.marks))


# ── the clocks ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_each_clock_names_its_setting() -> None:
    clocks = Clocks(timeout_seconds=HOUR, max_lifetime_seconds=2 * HOUR)
    assert clocks.verdict(now=HOUR, started=0, busy_at=0, lease_until=None) == "idle for 3600 s (timeout)"
    reason = clocks.verdict(now=2 * HOUR, started=0, busy_at=2 * HOUR, lease_until=None)
    assert reason == "alive for 7200 s (max_lifetime)"
    assert "lease_seconds" in (clocks.verdict(now=50, started=0, busy_at=50, lease_until=50) or "")


def test_a_warm_pool_whose_time_is_over_does_not_blame_the_money() -> None:
    """The money that is reserved for it ends with its warm time."""
    of = Clocks(HOUR).verdict
    assert "keep_warm" in (of(now=50, started=0, busy_at=50, lease_until=90, paid_until=49, warm_until=50) or "")
    assert "max_cost" in (of(now=50, started=0, busy_at=50, lease_until=90, paid_until=49, warm_until=51) or "")


@given(
    now=uptimes,
    started=uptimes,
    busy_at=uptimes,
    timeout=uptimes,
    lifetime=st.none() | uptimes,
    lease=st.none() | uptimes,
    paid=st.none() | uptimes,
    warm=st.none() | uptimes,
)
def test_a_node_ends_exactly_when_one_of_its_clocks_has_expired(
    now: float,
    started: float,
    busy_at: float,
    timeout: float,
    lifetime: float | None,
    lease: float | None,
    paid: float | None,
    warm: float | None,
) -> None:
    """Whatever the others show."""
    out = now - busy_at >= timeout or (lifetime is not None and now - started >= lifetime)
    out = out or any(until is not None and now >= until for until in (lease, paid, warm))
    assert (Clocks(timeout, lifetime).verdict(now, started, busy_at, lease, paid, warm) is not None) == out


# ── what is written ──────────────────────────────────────────────────────────────────────────────────────────────────


@given(untils=st.lists(uptimes, min_size=1))
@pytest.mark.parametrize(
    ("name", "write", "read", "expected"),
    [("lease", write_lease, read_lease, max), ("paid", write_paid, read_paid, lambda untils: untils[-1])],
)
def test_a_lease_is_never_shortened_and_the_last_paid_time_holds(
    tmp_path_factory: pytest.TempPathFactory,
    name: str,
    write: Callable[[Path, float], None],
    read: Callable[[Path], float | None],
    expected: Callable[[list[float]], float],
    untils: list[float],
) -> None:
    """Another machine may be paid with the same money. To the millisecond, in digits that a shell can compare."""
    directory = tmp_path_factory.mktemp("node")
    assert read(directory) is None
    for until in untils:
        write(directory, until)
    assert read(directory) == pytest.approx(expected(untils), abs=0.001)
    assert set((directory / name).read_text()) <= set("0123456789.\n")
    assert os.listdir(directory) == [name]


@given(text=st.binary(max_size=40).filter(lambda text: not text.strip().replace(b".", b"").isdigit()))
def test_garbage_is_no_lease(tmp_path_factory: pytest.TempPathFactory, text: bytes) -> None:
    directory = tmp_path_factory.mktemp("node")
    (directory / "lease").write_bytes(text)
    assert read_lease(directory) is None


@pytest.mark.parametrize("text", ["nan", "inf", "-5", "1e9", "1_000", "9" * 400, "", "12.", "1 2", "\u0663"])
def test_numbers_that_a_shell_cannot_read_are_no_lease(tmp_path: Path, text: str) -> None:
    """The guard and the supervisor must see the same."""
    (tmp_path / "lease").write_text(text)
    assert read_lease(tmp_path) is None


@pytest.mark.parametrize("until", NO_UPTIME)
def test_an_endless_lease_and_an_endless_paid_time_are_refused(tmp_path: Path, until: float) -> None:
    """The machine might never end. The old value stays."""
    write_paid(tmp_path, 5.0)
    for write in (write_lease, write_paid):
        with pytest.raises(ValueError, match="uptime"):
            write(tmp_path, until)
    assert (read_lease(tmp_path), read_paid(tmp_path)) == (None, 5.0)


# ── the watch ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("fields", [{"owner": None, "lease_seconds": 120}, {}], ids=["lease", "client"])
def test_a_node_ends_with_its_paid_time_whatever_its_lease(tmp_path: Path, fields: dict[str, object]) -> None:
    """Neither a longer lease nor a living client nor a running call helps; the reason names the money."""
    busy = BusyFlag()
    node = Node(tmp_path, busy, **fields)
    write_lease(tmp_path, 9000)
    busy.begin()
    for paid in (1500, 3000, 2000):
        write_paid(tmp_path, paid)
        assert node.at(1499.9) is None
    assert node.at(2000) == "the money is used up (max_cost, budget)"


@pytest.mark.parametrize("text", ["", "soon", "-5", "inf", "1e9", None])
def test_an_unreadable_file_leaves_the_last_paid_time(tmp_path: Path, text: str | None) -> None:
    """After garbage, or without the file, the paid time is neither longer nor over."""
    node = Node(tmp_path)
    write_paid(tmp_path, 1500)
    assert node.at(1000) is None
    if text is None:
        (tmp_path / "paid").unlink()
    else:
        (tmp_path / "paid").write_text(text)
    assert node.at(1499) is None
    assert "budget" in (node.at(1500) or "")


def test_a_call_that_runs_for_hours_keeps_the_node_alive(tmp_path: Path) -> None:
    """The idle clock counts from its end, which was after the last check. Lifetime does not stand still."""
    busy = BusyFlag()
    node = Node(tmp_path, busy, timeout_seconds=HOUR, max_lifetime_seconds=30 * HOUR)
    busy.begin()
    for hours in range(2, 20, 2):
        assert node.at(1000 + hours * HOUR) is None
    busy.end()
    assert node.at(1000 + 19 * HOUR - 1) is None
    assert node.at(1000 + 20 * HOUR - 2) is None
    assert node.at(1000 + 20 * HOUR - 1) == "idle for 3600 s (timeout)"
    busy.begin()
    assert node.at(1000 + 30 * HOUR) == "alive for 108000 s (max_lifetime)"


def test_calls_between_two_checks_count(tmp_path: Path) -> None:
    """A tiny call that was never seen running counts, on any runner; old news of one do not count later."""
    marks = [BusyFlag(), BusyFlag()]
    node = Node(tmp_path, *marks, timeout_seconds=HOUR)
    for mark in (*marks, None):
        for one in [mark] if mark else marks:
            one.begin()
            one.end()
        assert node.at(node.now + HOUR - 1) is None
    assert node.at(node.now + HOUR) is not None


@given(steps=st.lists(st.sampled_from(["begin", "end", "look"])))
def test_a_mark_shows_calls_since_the_last_check(steps: list[str]) -> None:
    """True if a call runs or one has run since; a second begin or a second end changes nothing."""
    busy, runs, news = BusyFlag(), False, False
    for step in steps:
        if step == "begin":
            busy.begin()
            runs = news = True
        elif step == "end":
            busy.end()
            news, runs = news or runs, False
        else:
            assert busy.look() == news
            news = runs


def test_the_lease_ends_a_node_without_a_client_process(tmp_path: Path) -> None:
    """The lease of the node's start first, then the last readable one that a client has written."""
    node = Node(tmp_path, owner=None, lease_seconds=120)
    assert node.at(1119) is None
    write_lease(tmp_path, 1300)
    assert node.at(1299) is None
    (tmp_path / "lease").write_text("soon")
    assert node.at(1299) is None
    (tmp_path / "lease").unlink()
    assert node.at(1299) is None
    assert "lease_seconds" in (node.at(1300) or "")


def test_without_any_sign_of_life_the_lease_of_the_start_expires(tmp_path: Path) -> None:
    """A client that died before it wrote a lease, or that wrote garbage, does not leave a node for ever."""
    node = Node(tmp_path, owner=None, lease_seconds=120)
    (tmp_path / "lease").write_text("soon")
    assert "lease_seconds" in (node.at(1120) or "")
    (tmp_path / "lease").unlink()
    (tmp_path / "lease").mkdir()
    assert "lease_seconds" in (node.at(1120) or "")


def test_a_client_process_replaces_the_lease(tmp_path: Path) -> None:
    """While it lives no lease ends the node. When it is gone a written lease counts; without one the node ends."""
    node, alive = Node(tmp_path, owner=NodeOwner(os.getpid(), "1")), settings(owner=this_process())
    assert node.at(1000) == "its client is gone"
    write_lease(tmp_path, 1100)
    assert node.at(1000) is None
    assert "lease_seconds" in (node.at(1101) or "")
    node.settings = alive
    assert node.at(1101) is None


# ── the warm time ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("until", [1020.0, 1500.0], ids=["shorter than the lease", "longer"])
@pytest.mark.parametrize("owner", [None, this_process()], ids=["guarded", "of a living client"])
def test_a_warm_node_ends_at_the_end_of_its_warm_time(until: float, owner: NodeOwner | None, tmp_path: Path) -> None:
    """Whatever its lease, which a client that is leaving goes on renewing until the end."""
    node = Node(tmp_path, owner=owner)
    write_lease(tmp_path, 1110)
    write_leaving(tmp_path, "a")
    write_lease(tmp_path, 1120, is_leaving=True)
    assert node.at(1001) is None
    assert write_warm(tmp_path, until, "a")
    assert read_lease(tmp_path) == max(1120.0, until)
    assert node.at(until - 0.1) is None
    assert node.at(until) == "its warm time is over (keep_warm)"


def test_the_first_renewal_of_a_client_that_comes_ends_the_warm_time(tmp_path: Path) -> None:
    """Also if it comes before the one that has left could write it, and if its renewal changes no lease."""
    node = Node(tmp_path, owner=None)
    for comes_first in (True, False):
        write_lease(tmp_path, 1120)
        write_leaving(tmp_path, "a")
        if not comes_first:
            assert write_warm(tmp_path, 1005, "a")
        write_lease(tmp_path, 1060)
        assert write_warm(tmp_path, 1005, "a") is False
        assert (read_warm(tmp_path), read_lease(tmp_path)) == (None, 1120.0)
        assert os.listdir(tmp_path) == ["lease"]
        assert node.at(1010) is None


def test_of_several_that_leave_at_once_the_last_one_ends_the_warm_time(tmp_path: Path) -> None:
    """Each has its mark, in any order. The ledger says which of them is the last."""
    write_lease(tmp_path, 1120)
    for mark in ("b", "a"):
        write_leaving(tmp_path, mark)
    assert write_warm(tmp_path, 1020, "c") is False
    assert write_warm(tmp_path, 1020, "b")
    assert read_warm(tmp_path) == 1020


def test_a_warm_time_is_made_longer_and_never_shorter(tmp_path: Path) -> None:
    """By a process that does not use the node. A node that is not warm gets a longer lease, and no warm time."""
    write_lease(tmp_path, 1120)
    assert write_warm(tmp_path, 1200)
    assert (read_warm(tmp_path), read_lease(tmp_path)) == (None, 1200.0)
    write_leaving(tmp_path, "a")
    write_warm(tmp_path, 1020, "a")
    write_warm(tmp_path, 1010)
    assert read_warm(tmp_path) == 1020
    write_warm(tmp_path, 1500)
    assert (read_warm(tmp_path), read_lease(tmp_path)) == (1500.0, 1500.0)


@pytest.mark.parametrize("text", ["", "soon", "1e3", "a\n"])
def test_garbage_is_no_warm_time(text: str, tmp_path: Path) -> None:
    node = Node(tmp_path, owner=None)
    (tmp_path / WARM).write_text(text)
    (tmp_path / LEAVING).write_text(text)
    assert node.at(1100) is None


# ── settings and deaths ──────────────────────────────────────────────────────────────────────────────────────────────


def test_settings_come_back_as_they_were_written() -> None:
    """Also those of real machines: tuples stay tuples. Other text is refused."""
    limits = settings(
        timeout_seconds=5.0, lease_seconds=7.0, is_guarded=True, worker_ports=(82, 83), owner=NodeOwner(1, "2")
    )
    assert NodeSettings.from_json(limits.to_json()) == limits
    for text in ("", "[]", "{}", "3", '{"owner": null}'):
        with pytest.raises((ValueError, KeyError, TypeError)):
            NodeSettings.from_json(text)


def test_pauses_between_deaths_grow_and_are_forgotten() -> None:
    """While a worker dies often; short again when it has lived for a minute. Five deaths within a minute are a loop."""
    deaths, pauses = CrashHistory(), []
    for second in range(8):
        deaths = deaths.and_at(100.0 + second)
        pauses.append(deaths.pause_seconds)
        assert deaths.is_loop == (second >= 4)
    assert pauses == pytest.approx([0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0])
    deaths = deaths.and_at(200.0)
    assert (deaths.pause_seconds, deaths.is_loop) == (pytest.approx(0.2), False)


def test_the_keeper_of_a_node_that_ends_itself_is_never_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has to write when and why the node has ended. The last other process may end between two looks."""
    looks = [{11: True, 12: False}, {11: True}]
    killed: list[int] = []
    monkeypatch.setattr(node_clocks, "members", lambda _: looks.pop(0))
    monkeypatch.setattr(os, "kill", lambda pid, _: killed.append(pid))
    assert [kill_all_but_keepers("local-1"), kill_all_but_keepers("local-1")] == [1, 0]
    assert killed == [12]
