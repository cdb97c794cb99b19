"""The node's clocks, lease and marks: values in, a reason out. No test here waits."""

import math
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyward_core.worker.settings import NodeOwner, NodeSettings, this_process
from skyward_core.worker.watchdog import BusyFlag, Clocks, Watch, read_lease, read_paid, write_lease, write_paid

HOUR = 3600.0
uptimes = st.floats(min_value=0, max_value=1e9)


class Clock:
    """An uptime that a test advances."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def settings(**fields: object) -> NodeSettings:
    given_fields: dict = {
        "pool_id": "sky-1",
        "instance_id": "local-0",
        "rank": 0,
        "total_nodes": 1,
        "slots": 1,
        "host": "127.0.0.1",
        "head_host": "127.0.0.1",
        "head_port": 1,
        "tls_certificate": "",
        "tls_key": "",
        "value_directories": ("/dev/shm/none",),
    }
    return NodeSettings(**given_fields | fields)


# ── the clocks ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_each_clock_names_its_setting() -> None:
    """The reason says which setting has ended the node, and its value."""
    clocks = Clocks(timeout_seconds=HOUR, max_lifetime_seconds=2 * HOUR)
    assert clocks.verdict(now=HOUR, started=0, busy_at=0, lease_until=None) == "idle for 3600 s (timeout)"
    assert (
        clocks.verdict(now=2 * HOUR, started=0, busy_at=2 * HOUR, lease_until=None) == "alive for 7200 s (max_lifetime)"
    )
    reason = clocks.verdict(now=50, started=0, busy_at=50, lease_until=50)
    assert reason is not None
    assert "lease_seconds" in reason


@given(
    now=uptimes,
    started=uptimes,
    busy_at=uptimes,
    timeout=uptimes,
    lifetime=st.none() | uptimes,
    lease=st.none() | uptimes,
    paid=st.none() | uptimes,
)
def test_a_node_ends_exactly_when_one_of_its_clocks_has_expired(
    now: float,
    started: float,
    busy_at: float,
    timeout: float,
    lifetime: float | None,
    lease: float | None,
    paid: float | None,
) -> None:
    """There is a reason if and only if one clock has expired, whatever the others show."""
    out = (
        now - busy_at >= timeout
        or (lifetime is not None and now - started >= lifetime)
        or (lease is not None and now >= lease)
    )
    out = out or (paid is not None and now >= paid)
    assert (Clocks(timeout, lifetime).verdict(now, started, busy_at, lease, paid) is not None) == out


# ── the lease ────────────────────────────────────────────────────────────────────────────────────────────────────────


@given(until=uptimes)
def test_a_lease_is_read_as_it_was_written(tmp_path_factory: pytest.TempPathFactory, until: float) -> None:
    """To the millisecond, in plain digits that a shell can compare."""
    directory = tmp_path_factory.mktemp("node")
    write_lease(directory, until)
    assert read_lease(directory) == pytest.approx(until, abs=0.001)
    assert set((directory / "lease").read_text()) <= set("0123456789.\n")


@given(untils=st.lists(uptimes, min_size=1))
def test_a_lease_is_never_shortened(tmp_path_factory: pytest.TempPathFactory, untils: list[float]) -> None:
    """If leases are written in any order, the latest end holds."""
    directory = tmp_path_factory.mktemp("node")
    for until in untils:
        write_lease(directory, until)
    assert read_lease(directory) == pytest.approx(max(untils), abs=0.001)


@given(text=st.binary(max_size=40).filter(lambda text: not text.strip().replace(b".", b"").isdigit()))
def test_garbage_is_no_lease(tmp_path_factory: pytest.TempPathFactory, text: bytes) -> None:
    """Text that is not a number is not read as one, and raises nothing."""
    directory = tmp_path_factory.mktemp("node")
    (directory / "lease").write_bytes(text)
    assert read_lease(directory) is None


@pytest.mark.parametrize("text", ["nan", "inf", "-5", "1e9", "1_000", "9" * 400, "", "12.", "1 2", "\u0663"])
def test_numbers_that_a_shell_cannot_read_are_no_lease(tmp_path: Path, text: str) -> None:
    """The guard and the supervisor must see the same."""
    (tmp_path / "lease").write_text(text)
    assert read_lease(tmp_path) is None


@pytest.mark.parametrize("until", [math.inf, math.nan, -1.0])
def test_a_lease_without_an_end_is_refused(tmp_path: Path, until: float) -> None:
    """Otherwise the machine might never end."""
    with pytest.raises(ValueError, match="uptime"):
        write_lease(tmp_path, until)
    assert not (tmp_path / "lease").exists()


@pytest.mark.parametrize("until", [math.inf, math.nan, -1.0])
def test_an_endless_paid_time_is_refused(tmp_path: Path, until: float) -> None:
    """It could not be read back, and the old value would stay."""
    write_paid(tmp_path, 5.0)
    with pytest.raises(ValueError, match="uptime"):
        write_paid(tmp_path, until)
    assert read_paid(tmp_path) == 5.0


def test_a_node_ends_with_its_paid_time_whatever_its_lease(tmp_path: Path) -> None:
    """Neither a longer lease nor a living client nor a running call helps; the reason names the money."""
    for name, limits in (("lease", settings(lease_seconds=120)), ("client", settings(owner=this_process()))):
        directory, clock, busy = tmp_path / name, Clock(1000), BusyFlag()
        directory.mkdir()
        watch = Watch(directory, clock)
        write_lease(directory, 9000)
        write_paid(directory, 1500)
        busy.begin()
        clock.now = 1499.9
        assert watch.verdict(limits, [busy]) is None
        clock.now = 1500
        assert watch.verdict(limits, [busy]) == "the money is used up (max_cost, budget)"


@pytest.mark.parametrize("text", ["", "soon", "-5", "inf", "1e9", None])
def test_an_unreadable_file_leaves_the_last_paid_time(tmp_path: Path, text: str | None) -> None:
    """After garbage, or without the file, the paid time is neither longer nor over."""
    clock, limits = Clock(1000), settings(owner=this_process())
    watch = Watch(tmp_path, clock)
    write_paid(tmp_path, 1500)
    assert watch.verdict(limits, []) is None
    if text is None:
        (tmp_path / "paid").unlink()
    else:
        (tmp_path / "paid").write_text(text)
    clock.now = 1499
    assert watch.verdict(limits, []) is None
    clock.now = 1500
    assert "budget" in (watch.verdict(limits, []) or "")


# ── the watch ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_call_that_runs_for_hours_keeps_the_node_alive(tmp_path: Path) -> None:
    """While a call runs the idle clock stands still; it counts from the call's end."""
    clock, busy, limits = Clock(), BusyFlag(), settings(owner=this_process(), timeout_seconds=HOUR)
    watch = Watch(tmp_path, clock)
    busy.begin()
    for _ in range(10):
        clock.now += 2 * HOUR
        assert watch.verdict(limits, [busy]) is None
    busy.end()
    clock.now += HOUR - 1
    assert watch.verdict(limits, [busy]) is None  # it ended after the last check: at the latest now
    clock.now += HOUR - 1
    assert watch.verdict(limits, [busy]) is None
    clock.now += 1
    assert watch.verdict(limits, [busy]) == "idle for 3600 s (timeout)"


def test_calls_between_two_checks_count(tmp_path: Path) -> None:
    """A tiny call that was never seen running counts, on any runner."""
    clock, marks, limits = (
        Clock(),
        [BusyFlag(), BusyFlag(), BusyFlag()],
        settings(owner=this_process(), timeout_seconds=HOUR),
    )
    watch = Watch(tmp_path, clock)
    for mark in marks:
        clock.now += HOUR - 1
        mark.begin()
        mark.end()
        assert watch.verdict(limits, marks) is None
    clock.now += HOUR
    assert watch.verdict(limits, marks) is not None


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
    clock, limits = Clock(1000), settings(lease_seconds=120)
    watch = Watch(tmp_path, clock)
    clock.now = 1119
    assert watch.verdict(limits, []) is None
    write_lease(tmp_path, 1300)
    clock.now = 1299
    assert watch.verdict(limits, []) is None
    (tmp_path / "lease").write_text("soon")
    assert watch.verdict(limits, []) is None
    (tmp_path / "lease").unlink()
    assert watch.verdict(limits, []) is None
    clock.now = 1300
    assert "lease_seconds" in (watch.verdict(limits, []) or "")


def test_without_any_sign_of_life_the_lease_of_the_start_expires(tmp_path: Path) -> None:
    """A client that died before it wrote a lease, or that wrote garbage, does not leave a node for ever."""
    clock, limits = Clock(1000), settings(lease_seconds=120)
    watch = Watch(tmp_path, clock)
    (tmp_path / "lease").write_text("soon")
    clock.now = 1120
    assert "lease_seconds" in (watch.verdict(limits, []) or "")


def test_a_client_process_replaces_the_lease(tmp_path: Path) -> None:
    """While it lives no lease ends the node. When it is gone a written lease counts; without one the node ends."""
    clock, alive, gone = Clock(1000), settings(owner=this_process()), settings(owner=NodeOwner(os.getpid(), "1"))
    watch = Watch(tmp_path, clock)
    assert watch.verdict(gone, []) == "its client is gone"
    write_lease(tmp_path, 1100)
    assert watch.verdict(gone, []) is None
    clock.now = 1101
    assert watch.verdict(alive, []) is None
    assert "lease_seconds" in (watch.verdict(gone, []) or "")


def test_lifetime_counts_from_the_start_whatever_calls_run(tmp_path: Path) -> None:
    """A running call does not stop the hard end."""
    clock, busy, limits = Clock(1000), BusyFlag(), settings(owner=this_process(), max_lifetime_seconds=10.0)
    watch = Watch(tmp_path, clock)
    busy.begin()
    clock.now = 1010
    assert watch.verdict(limits, [busy]) == "alive for 10 s (max_lifetime)"


# ── settings and processes ───────────────────────────────────────────────────────────────────────────────────────────


def test_settings_come_back_as_they_were_written() -> None:
    """Also those of real machines: tuples stay tuples."""
    limits = settings(
        timeout_seconds=5.0,
        max_lifetime_seconds=60.0,
        lease_seconds=7.0,
        is_guarded=True,
        scheduler_port=81,
        worker_ports=(82, 83),
        generation=3,
        owner=NodeOwner(1, "2"),
    )
    assert NodeSettings.from_json(limits.to_json()) == limits
    assert NodeSettings.from_json(settings().to_json()) == settings()


@pytest.mark.parametrize("text", ["", "[]", "{}", "3", '{"owner": null}'])
def test_other_text_is_refused(text: str) -> None:
    """It raises one of the errors that the docstring names."""
    with pytest.raises((ValueError, KeyError, TypeError)):
        NodeSettings.from_json(text)
