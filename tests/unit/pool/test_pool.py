"""Real pools: calls on local nodes, how the calls end, and what is left after the pool."""

import os
import pickle
from types import SimpleNamespace
from typing import Any

import pytest

import skyward_core as sky
from skyward_core.pool.current_session import _left
from skyward_core.session.session import Session
from tests.conftest import RecordedEvents


@sky.compute
def double(x: int) -> int:
    return 2 * x


def test_a_pool_cannot_be_pickled_and_the_error_names_attach() -> None:
    """A child process that is spawned with a pool as an argument would get a copy of it; it must attach instead."""
    from skyward_core.serialization import sources

    closed = sky.ComputePool(provider=sky.Local())
    with pytest.raises(sky.NotPicklable, match=r"ComputePool\.attach\(lease\)"):
        pickle.dumps(closed)
    with pytest.raises(sky.NotPicklable, match=r"args cannot travel.*ComputePool\.attach\(lease\)"):
        sources.pack((closed,), label=("args",))


# ── life ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def one_node(recorded: RecordedEvents | None = None, **options: Any) -> sky.ComputePool:
    return sky.ComputePool(
        **{
            "provider": sky.Local(price_per_hour=3600.0),
            "display": "quiet",
            "on_event": recorded or RecordedEvents(),
            **options,
        }
    )


def test_a_pool_that_is_not_open_raises_pool_closed() -> None:
    """Every use of a pool that was never opened raises PoolClosed; its message recommends `with`."""
    pool = one_node()
    for use in (
        lambda: double(1) >> pool,
        lambda: double(1) @ pool,
        lambda: sky.gather(double(1)) >> pool,
        lambda: pool.submit(double(1)),
        lambda: pool.map(double, [1]),
        lambda: pool.dask_client(),
        lambda: pool.lease,
    ):
        with pytest.raises(sky.PoolClosed, match=r"with sky\.ComputePool"):
            use()
    assert not pool.is_active
    assert pool.instance_count == 0
    assert pool.cost == 0.0
    pool.close()


def test_a_failed_step_of_the_clock_prevents_no_other_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lost lease has priority, and no step of a round is skipped: money, work and reaper are checked.

    Looks inside: the steps are those that a session gives to its clock.
    """
    opened = Session(sky.PoolSpec.of(display="quiet", lease_seconds=60), [sky.Local()], None)
    done: list[str] = []

    def does(name: str) -> Any:
        return lambda *_: done.append(name)

    monkeypatch.setattr(opened._renewal, "raise_if_lost", does("lease"))
    monkeypatch.setattr(opened._reaper, "restart_if_gone", does("reaper"))
    monkeypatch.setattr(opened, "emit", does("emit"))
    limits = SimpleNamespace(check_money=does("money"), check_work=does("work"))
    size = SimpleNamespace(look=does("size"))
    looking = opened._clock(limits, SimpleNamespace(note=does("note")), size)  # type: ignore[arg-type]
    looking._seldom_at = 0.0
    for now in (1.0, 5.0, 6.0):
        for step in looking.due(now):
            looking.take(step, opened._ended)
    look = ["lease", "money", "work", "size"]
    assert done == [*look, *look, "reaper", "note", "emit", *look]


@pytest.mark.parametrize(("process", "stopped"), [(os.getpid(), 1), (os.getpid() + 1, 0)], ids=["the opener", "a fork"])
def test_an_attached_pool_that_is_collected_in_a_fork_stays_attached(process: int, stopped: int) -> None:
    """Its connections belong to the process that has attached."""
    reasons: list[str] = []
    _left(SimpleNamespace(stop=reasons.append), process)  # type: ignore[arg-type]
    assert len(reasons) == stopped
