"""Batches in flight: their ends, and the outcomes that were not reported before."""

import pytest

from skyward_core.engine import actions as do
from skyward_core.errors import NodeLost
from skyward_core.worker.scheduler_messages import WorkerLeft
from skyward_core.worker.wire import Outcome, OutcomeKind
from tests.engine.model import LARGE
from tests.unit.engine.test_dispatcher import ADDRESSES, Pool, entry, value


def gathering() -> tuple[Pool, do.Send]:
    """A batch of call "a" whose task has ended, and whose outcome was not reported."""
    pool = Pool(workers=["0-0"])
    (batch,) = pool.submit(entry("a"))
    pool.dispatcher.task_ended(pool.epoch, batch.number, is_finished=True, reason="")
    assert pool.take(do.Gather) == [do.Gather(pool.epoch, batch.number, batch.key)]
    assert pool.take(do.Release) == []
    return pool, batch


def gathered(pool: Pool, batch: do.Send, *outcomes: Outcome, epoch: int | None = None) -> None:
    found = {outcome.call_id: outcome for outcome in outcomes}
    pool.dispatcher.gathered(pool.epoch if epoch is None else epoch, batch.number, found, 0, "machine-000", 0.0)


def test_an_outcome_that_was_not_reported_is_in_the_result_of_the_task() -> None:
    """Its seconds are metered, and the task is released once."""
    pool, batch = gathering()
    gathered(pool, batch, value("a"))
    gathered(pool, batch, value("a"))
    assert pool.take(do.MeterCalls) == [do.MeterCalls("machine-000", 1.0)]
    assert pool.take(do.Release) == [do.Release(pool.epoch, (batch.key,))]
    (finish,) = pool.take(do.Finish)
    assert (finish.call_id, finish.node, finish.instance_id) == ("a", 0, "machine-000")
    assert pool.errors() == {}


def test_a_call_that_the_task_hands_back_waits_again() -> None:
    """Its seconds are not metered: it was not begun."""
    pool, batch = gathering()
    gathered(pool, batch, value("a", ending=OutcomeKind.RETURNED))
    assert [call.call_id for sent in pool.take(do.Send) for call in sent.batch.calls] == ["a"]
    assert pool.take(do.MeterCalls) == []
    assert pool.dispatcher.entries["a"].losses == 0


def test_a_call_that_is_missing_in_the_result_of_its_task_is_lost() -> None:
    pool, batch = gathering()
    gathered(pool, batch)
    assert str(pool.errors()["a"]).startswith("the call ended, but its result was not there; ")


def test_a_result_that_comes_for_an_earlier_connection_is_dropped() -> None:
    pool, batch = gathering()
    gathered(pool, batch, value("a"), epoch=pool.epoch - 1)
    pool.dispatcher.not_gathered(pool.epoch - 1, batch.number, OSError("late"))
    assert (pool.take(do.Finish), pool.take(do.Release), pool.errors()) == ([], [], {})


def test_a_task_whose_result_is_out_of_reach_is_released_and_its_call_is_lost() -> None:
    pool, batch = gathering()
    error = OSError("refused")
    pool.dispatcher.not_gathered(pool.epoch, batch.number, error)
    assert pool.take(do.Release) == [do.Release(pool.epoch, (batch.key,))]
    lost = pool.errors()["a"]
    assert str(lost).startswith("the call ended, but its result could not be fetched: refused; ")
    assert lost.__cause__ is error


def test_a_task_with_all_outcomes_reported_is_released_and_not_gathered() -> None:
    pool = Pool()
    (batch,) = pool.submit(entry("a"))
    pool.report(value("a"))
    pool.dispatcher.task_ended(pool.epoch, batch.number, is_finished=True, reason="")
    assert (pool.take(do.Gather), pool.take(do.Release)) == ([], [do.Release(pool.epoch, (batch.key,))])
    assert not pool.dispatcher.outs


def test_a_task_that_has_failed_is_released_and_its_call_is_lost_with_the_reason() -> None:
    pool = Pool()
    (batch,) = pool.submit(entry("a"))
    pool.dispatcher.task_ended(pool.epoch, batch.number, is_finished=False, reason="killed")
    assert pool.take(do.Release) == [do.Release(pool.epoch, (batch.key,))]
    assert str(pool.errors()["a"]).startswith("killed; ")


@pytest.mark.parametrize("is_its_fault", [False, True])
def test_a_batch_that_could_not_be_sent(is_its_fault: bool) -> None:
    """It waits for the next tick, if the fault is not its own; else its call raises."""
    pool = Pool()
    (batch,) = pool.submit(entry("a"))
    error = OSError("too large")
    pool.dispatcher.unsent(pool.epoch - 1, batch.number, error, is_its_fault=is_its_fault)
    assert batch.number in pool.dispatcher.outs
    pool.dispatcher.unsent(pool.epoch, batch.number, error, is_its_fault=is_its_fault)
    assert pool.take(do.Send) == []
    errors = pool.errors()
    pool.dispatcher.tick(1.0, lambda _: True)
    again = [call.call_id for sent in pool.take(do.Send) for call in sent.batch.calls]
    if is_its_fault:
        assert isinstance(errors["a"], NodeLost)
        assert (str(errors["a"]), errors["a"].__cause__) == ("the call could not be sent: too large", error)
        assert again == []
        pool.connect(is_known=True)
        assert pool.take(do.Stop) == []  # it is not in flight any more
    else:
        assert (errors, again) == ({}, ["a"])
        assert pool.dispatcher.entries["a"].losses == 0


def test_the_batches_of_a_worker_that_leaves_are_taken_back() -> None:
    """A batch of another worker stays."""
    pool = Pool()
    first, second = pool.submit(entry("a", worker="0-0"), entry("b", worker="1-0"))
    assert (first.address, second.address) == (ADDRESSES["0-0"], ADDRESSES["1-0"])
    pool.dispatcher.pool_news(pool.epoch, WorkerLeft("0-0", ADDRESSES["0-0"]), 0.0)
    assert pool.take(do.TakeBack) == [do.TakeBack(pool.epoch, first.number, first.key)]
    pool.dispatcher.taken_back(pool.epoch, first.number)
    assert {call_id: str(error).partition(";")[0] for call_id, error in pool.errors().items()} == {
        "a": "its worker is gone"
    }
    assert list(pool.dispatcher.outs) == [second.number]


def test_a_batch_that_is_being_uploaded_waits_for_the_worker_that_comes_back() -> None:
    """It was not begun, so that no loss is counted."""
    pool = Pool()
    assert pool.submit(entry("a", arguments=LARGE, worker="0-0")) == []
    pool.dispatcher.pool_news(pool.epoch, WorkerLeft("0-0", ADDRESSES["0-0"]), 0.0)
    assert (pool.take(do.TakeBack), pool.dispatcher.outs) == ([], {})
    assert pool.dispatcher.entries["a"].losses == 0
