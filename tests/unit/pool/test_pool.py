"""What a pool refuses without machines, and the clock of an open one."""

import logging
import os
import pickle
import re
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

import skyward_core as sky
from skyward_core.pool.current_session import _left
from skyward_core.serialization import sources
from skyward_core.session.clock import Clock
from skyward_core.session.session import Session
from tests.pool.local import double, one_node

SPEC = sky.PoolSpec.of(provider=sky.Local(), display="quiet")
NIGHTLY = sky.Work(system="cron", workflow="nightly", run="2026-11-24")


def test_a_pool_cannot_be_pickled_and_the_error_names_attach() -> None:
    """A child process that is spawned with a pool as an argument would get a copy of it; it must attach instead."""
    closed = one_node()
    with pytest.raises(sky.NotPicklable, match=r"ComputePool\.attach\(lease\)"):
        pickle.dumps(closed)
    with pytest.raises(sky.NotPicklable, match=r"args cannot travel.*ComputePool\.attach\(lease\)"):
        sources.pack((closed,), label=("args",))


@pytest.mark.parametrize(
    "use",
    [
        lambda pool: double(1) >> pool,
        lambda pool: double(1) @ pool,
        lambda pool: sky.gather(double(1)) >> pool,
        lambda pool: pool.submit(double(1)),
        lambda pool: pool.map(double, [1]),
        lambda pool: pool.executor().submit(abs, 1),
        lambda pool: pool.dask_client(),
        lambda pool: pool.lease,
        lambda pool: pool.scale(1),
    ],
)
def test_a_pool_that_is_not_open_raises_pool_closed(use: Callable[[sky.ComputePool], object]) -> None:
    pool = one_node()
    with pytest.raises(sky.PoolClosed, match=r"with sky\.ComputePool"):
        use(pool)
    assert (pool.is_active, pool.instance_count, pool.cost) == (False, 0, 0.0)
    pool.close()


def test_no_pool_opens_after_the_end_of_the_main_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Machines were rented, and then Python said that it "cannot schedule new futures after interpreter shutdown"."""
    monkeypatch.setattr(threading, "main_thread", lambda: SimpleNamespace(is_alive=lambda: False))
    pool = sky.ComputePool.from_spec(SPEC)
    with pytest.raises(sky.BadRequest, match=r"the main thread of this program has ended.*thread\.join\(\)"):
        pool.open()
    assert not pool.is_active


@pytest.mark.parametrize(
    "use",
    [
        lambda: sky.ComputePool(nodes=0),
        lambda: sky.ComputePool.from_spec(SPEC, run_max_cost=1),
        lambda: sky.ComputePool.attach("sky-nonesuch"),
        lambda: sky.Image(pip=cast("Any", "torch")),
    ],
)
def test_an_expected_error_ends_in_the_line_of_the_program(
    use: Callable[[], object], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Not in 140 lines of ours. What was handled before keeps its frames."""
    monkeypatch.setenv("SKYWARD_LEDGER", f"sqlite:///{tmp_path / 'ledger.db'}")
    try:
        raise_by_hand()
    except LookupError:
        with pytest.raises(sky.SkywardError) as raised:
            use()
    lines = "".join(traceback.format_exception(raised.value))
    assert "in raise_by_hand" in lines or raised.value.__suppress_context__
    assert len(re.findall(r'File ".*skyward_core/', lines)) <= 1
    assert "pydantic" not in lines
    assert lines.splitlines()[-1].endswith(str(raised.value).splitlines()[-1])


def raise_by_hand() -> None:
    raise LookupError("by hand")


def test_a_second_ctrl_c_waits_for_nothing_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The program ends with the first interrupt, without the frames in which the second one came."""
    pool, done, first = sky.ComputePool(provider=sky.Local()), list[str](), KeyboardInterrupt()

    def closed_slowly() -> None:
        done.append("close")
        raise KeyboardInterrupt

    monkeypatch.setattr(pool, "hand_over", closed_slowly)
    monkeypatch.setattr(pool._session, "terminate_now", lambda **how: done.append(f"terminate_now {how}"))
    with caplog.at_level(logging.INFO, logger="skyward"):
        pool.__exit__(KeyboardInterrupt, first, None)
    assert done == ["close", "terminate_now {'may_wait_at_exit': False}"]
    assert [message.partition(":")[0] for message in caplog.messages] == ["interrupted", "interrupted again"]
    assert first.__context__ is None


def test_keep_warm_needs_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the pool is made. Before, the name may be missing: here it comes from the settings."""
    spec = sky.PoolSpec.of(provider=sky.Local(), keep_warm=60)
    with pytest.raises(sky.BadRequest, match="keep_warm needs a name"):
        sky.ComputePool(provider=sky.Local(), keep_warm=60)
    monkeypatch.setenv("SKYWARD_NAME", "nightly")
    assert sky.ComputePool.from_spec(spec).spec.name == "nightly"


@pytest.mark.parametrize(
    ("spec", "work", "usd", "words"),
    [
        (SPEC, sky.Work(system="cron"), 5.0, "needs the run"),
        (SPEC.with_(name="team"), NIGHTLY, 5.0, "name='team'"),
        (SPEC, NIGHTLY, 0, "positive"),
        (SPEC, NIGHTLY, -1.5, "positive"),
        (SPEC, NIGHTLY, float("nan"), "positive"),
    ],
)
def test_a_limit_of_a_run_that_cannot_be_is_refused(spec: sky.PoolSpec, work: sky.Work, usd: Any, words: str) -> None:
    with pytest.raises(sky.BadRequest, match=words):
        sky.ComputePool.from_spec(spec, work=work, run_max_cost=usd)


def test_the_error_of_a_deadline_survives_a_pickle() -> None:
    error = pickle.loads(pickle.dumps(sky.CallTimedOut("late", 2, 30.0, ["last"])))
    assert (str(error), error.node, error.timeout_seconds) == ("late\nlast output:\n  last", 2, 30.0)


def test_a_step_of_the_clock_that_fails_is_logged_once_and_prevents_no_other() -> None:
    """Steps look after money, lease and reaper. A lost lease stops the pool."""
    done: list[str] = []
    ended = threading.Event()

    def fails() -> None:
        raise OSError("Too many open files")

    def loses() -> None:
        raise sky.LeaseLost("condemned")

    def stop(reason: str, _: object) -> None:
        done.append(f"stop: {reason}")
        ended.set()

    often, seldom = [fails, lambda: done.append("money")], [lambda: done.append("reaper"), loses]
    clock = Clock("sky-1", often, seldom, stop, lambda level, *_, **__: done.append(logging.getLevelName(level)), 0.0)
    for now in (1.0, 2.0, 6.0, 7.0):
        for step in clock.due(now):
            clock.take(step, ended)
    assert done == ["ERROR", "money", "money", "money", "reaper", "ERROR", "stop: condemned"]


def test_the_clock_of_an_open_pool_looks_after_lease_money_work_and_reaper(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lost lease comes first. Looks inside: the steps are those that a session gives to its clock."""
    opened = Session(SPEC, [sky.Local()], None)
    done: list[str] = []

    def does(name: str) -> Any:
        return lambda *_: done.append(name)

    monkeypatch.setattr(opened._renewal, "raise_if_lost", does("lease"))
    monkeypatch.setattr(opened._reaper, "restart_if_gone", does("reaper"))
    monkeypatch.setattr(opened, "emit", does("cost"))
    limits: Any = SimpleNamespace(check_money=does("money"), check_work=does("work"))
    parts: tuple[Any, Any] = SimpleNamespace(note=does("note")), SimpleNamespace(look=does("size"))
    clock = opened._clock(limits, *parts)
    clock._seldom_at = 0.0
    for now in (1.0, 5.0):
        for step in clock.due(now):
            clock.take(step, opened._ended)
    look = ["lease", "money", "work", "size"]
    assert done == [*look, *look, "reaper", "note", "cost"]


@pytest.mark.parametrize(("process", "stopped"), [(os.getpid(), 1), (os.getpid() + 1, 0)], ids=["the opener", "a fork"])
def test_an_attached_pool_that_is_collected_in_a_fork_stays_attached(process: int, stopped: int) -> None:
    """Its connections belong to the process that has attached."""
    reasons: list[str] = []
    _left(SimpleNamespace(stop=reasons.append), SimpleNamespace(close=list), process)  # type: ignore[arg-type]
    assert len(reasons) == stopped
