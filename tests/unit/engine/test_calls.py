"""Calls whose callers wait: what a cancelled, lost or refused call leaves behind, and the progress."""

import pytest

from skyward_core.engine import actions as do
from skyward_core.engine.calls import PROGRESS_SECONDS
from skyward_core.errors import NodeLost, PoolClosed
from skyward_core.events.events import CallProgress, CallRetrying
from skyward_core.worker.wire import OutcomeKind, Parcel
from tests.engine.model import LARGE, SPANS, machine_id
from tests.unit.engine.test_dispatcher import SMALL, Pool, entry, value

RESULT = f"/dev/shm/{machine_id(0)}/x"


def uploaded(pool: Pool, call_id: str = "a") -> str:
    """A call whose large arguments are in a node's memory; return their path."""
    pool.submit(entry(call_id, arguments=LARGE, worker="0-0"))
    (upload,) = pool.take(do.Upload)
    pool.upload(upload)
    return f"/dev/shm/{upload.instance_id}/a-{call_id}"


def removed(pool: Pool) -> list[str | None]:
    return [action.parcel.path for action in pool.take(do.Remove)]


# ── arguments on nodes ───────────────────────────────────────────────────────────────────────────────────────────────


def test_arguments_are_removed_from_the_node_when_their_call_has_ended() -> None:
    """Once."""
    pool = Pool()
    path = uploaded(pool)
    assert removed(pool) == []
    pool.report(value("a"))
    assert removed(pool) == [path]
    pool.dispatcher.close(PoolClosed("closed"))
    assert removed(pool) == []


def test_arguments_of_a_cancelled_call_are_removed_from_the_node() -> None:
    pool = Pool()
    path = uploaded(pool)
    pool.dispatcher.cancel("a")
    assert removed(pool) == [path]
    assert [(action.call_id, action.arguments) for action in pool.take(do.Cancelled)] == [("a", LARGE)]


@pytest.mark.parametrize("retries", [0, 1])
def test_arguments_of_a_lost_call_are_removed_from_the_node(retries: int) -> None:
    """Also if the call runs again: its arguments are uploaded again."""
    pool = Pool(retries)
    path = uploaded(pool)
    (sent,) = pool.take(do.Send)
    pool.dispatcher.task_ended(pool.epoch, sent.number, is_finished=False, reason="gone")
    assert removed(pool) == [path]
    assert [action.call_id for action in pool.take(do.Fail)] == ["a"] * (1 - retries)
    assert len(pool.take(do.Upload)) == retries


# ── lost results ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_call_whose_result_is_lost_runs_again_as_the_last_of_the_queue() -> None:
    """Its loss is counted: the second lost result ends the call."""
    pool = Pool(1, workers=["0-0"])
    pool.submit(entry("a"))
    pool.report(value("a", RESULT))
    pool.dispatcher.not_fetched("a", RESULT, OSError("gone"), is_cut=False)
    pool.go_on()
    (event,) = [action.event for action in pool.done if getattr(action, "event", None).__class__ is CallRetrying]
    assert (event.call_id, event.attempt, event.attempts) == ("a", 2, 2)
    assert event.reason == "the call ended, but its result could not be fetched: gone"
    assert [call.call_id for sent in pool.take(do.Send) for call in sent.batch.calls] == ["a"]
    pool.report(value("a", RESULT))
    error = OSError("gone again")
    pool.dispatcher.not_fetched("a", RESULT, error, is_cut=False)
    lost = pool.errors()["a"]
    assert str(lost).endswith("could not be fetched: gone again; it was lost 2 times (ComputePool(retries=1))")
    assert lost.__cause__ is error


def test_a_large_result_ends_its_call_when_it_is_here() -> None:
    """With the node that has run the call, and its arguments."""
    pool = Pool()
    pool.submit(entry("a", worker="1-0"))
    path = f"/dev/shm/{machine_id(1)}/x"
    pool.report(value("a", path), node=1)
    pool.dispatcher.fetched("a", Parcel(b"value"), path)
    (finish,) = pool.take(do.Finish)
    assert (finish.call_id, finish.node, finish.instance_id) == ("a", 1, machine_id(1))
    assert (finish.outcome.parcel, finish.arguments) == (Parcel(b"value"), SMALL)


def test_a_result_on_an_unknown_node_is_lost() -> None:
    """It is not fetched."""
    pool = Pool()
    pool.submit(entry("a"))
    pool.report(value("a", f"/dev/shm/{machine_id(99)}/x"))
    assert pool.take(do.Fetch) == []
    assert "a node that this client does not know" in str(pool.errors()["a"])


def test_a_call_with_arguments_in_a_file_is_not_run_again() -> None:
    """They were with the call on the lost node. The error says what to do."""
    pool = Pool(3, is_here=True)
    arguments = Parcel(b"", (), f"/dev/shm/{machine_id(0)}/large", SPANS)
    (sent,) = pool.submit(entry("a", arguments=arguments))
    pool.dispatcher.task_ended(pool.epoch, sent.number, is_finished=False, reason="its worker is gone")
    assert str(pool.errors()["a"]) == (
        "its worker is gone; its arguments were lost with it, because they are too large to be kept here:"
        " submit it again"
    )


def test_a_lost_call_of_a_pool_without_retries_says_how_to_get_them() -> None:
    pool = Pool()
    (sent,) = pool.submit(entry("a"))
    pool.dispatcher.task_ended(pool.epoch, sent.number, is_finished=False, reason="its worker is gone")
    lost = pool.errors()["a"]
    assert isinstance(lost, NodeLost)
    assert str(lost) == (
        "its worker is gone; submit it again if it may run twice, or open the pool with retries=1 or more"
    )


def test_a_worker_is_told_to_stop_a_call_that_was_lost() -> None:
    """It may still have it, and must not begin it after the caller has seen the error."""
    pool = Pool()
    (sent,) = pool.submit(entry("a"))
    pool.dispatcher.task_ended(pool.epoch, sent.number, is_finished=False, reason="gone")
    assert pool.take(do.Stop) == [do.Stop(pool.epoch, ("a",))]


def test_a_cancelled_call_that_is_lost_is_not_in_flight_any_more() -> None:
    """The next connection stops nothing."""
    pool = Pool()
    (sent,) = pool.submit(entry("a"))
    pool.dispatcher.cancel("a")
    assert len(pool.take(do.Stop)) == 1
    pool.dispatcher.task_ended(pool.epoch, sent.number, is_finished=False, reason="gone")
    pool.connect(is_known=True)
    assert (pool.take(do.Stop), pool.take(do.Send), pool.errors()) == ([], [], {})


def test_calls_that_fail_are_counted_and_keep_their_arguments() -> None:
    """The caller's side removes these."""
    pool = Pool()
    pool.submit(entry("a"), entry("b"), entry("c", worker="7-0"))
    pool.report(value("a", ending=OutcomeKind.CRASH), value("b"))
    pool.dispatcher.close(PoolClosed("closed"))
    pool.go_on(10.0)
    assert [(action.call_id, action.arguments) for action in pool.take(do.Fail)] == [("c", SMALL)]
    assert pool.progress() == (3, 3, 2, 0)


# ── the end of a pool ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("ends", ["give_up", "close", "drain"])
def test_calls_that_are_submitted_to_a_pool_that_has_ended_raise(ends: str) -> None:
    """The first error stays."""
    pool = Pool()
    getattr(pool.dispatcher, ends)(PoolClosed("first"))
    if ends != "drain":
        pool.dispatcher.give_up(PoolClosed("second"))
    assert pool.submit(entry("a"), entry("b")) == []
    assert {call_id: str(error) for call_id, error in pool.errors().items()} == {"a": "first", "b": "first"}


# ── the progress ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_progress_is_emitted_ten_times_a_second_and_at_the_end() -> None:
    """Only if a count has changed."""
    pool = Pool()

    def progress(now: float) -> list[tuple[int, int, int, int]]:
        pool.dispatcher.flush(now)
        events = [action.event for action in pool.dispatcher.take_actions() if isinstance(action, do.EmitEvent)]
        return [
            (event.submitted, event.done, event.failed, event.cancelled)
            for event in events
            if isinstance(event, CallProgress)
        ]

    pool.dispatcher.submit([entry("a"), entry("b"), entry("c")])
    assert progress(10.0) == [(3, 0, 0, 0)]
    assert progress(20.0) == []
    pool.dispatcher.cancel("a")
    assert progress(20.0) == [(3, 0, 0, 1)]
    pool.dispatcher.cancel("b")
    assert progress(20.0 + PROGRESS_SECONDS / 2) == []
    assert progress(20.0 + PROGRESS_SECONDS * 2) == [(3, 0, 0, 2)]
    pool.dispatcher.cancel("c")
    assert progress(20.0 + PROGRESS_SECONDS * 2) == [(3, 0, 0, 3)]
