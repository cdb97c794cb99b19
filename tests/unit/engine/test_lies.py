"""What a hostile node may say in the right form: the dispatcher goes on, and calls of others end."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyward_core.engine import actions as do
from skyward_core.engine.dispatcher import MOST_ORIGINS
from skyward_core.wire.messages import Item, Outcome, OutcomeKind, Output, Parcel, Report
from skyward_core.wire.protocol import (
    PoolRanks,
    Resumed,
    WorkerFree,
    WorkerHeld,
    WorkerJoined,
    WorkerKept,
    WorkerLeft,
)
from tests.conftest import examples
from tests.engine.dispatcher_pool import ADDRESSES, Pool, entry, in_file, value
from tests.unit.engine.test_dispatcher import STREAMING

ids = st.sampled_from(["a", "b", "c", "unknown"])
origins = st.sampled_from(["", "p/skyward-0-x", "p/skyward-1-x", "p/skyward-99-x", "no origin", "p/skyward--1"])
parcels = st.sampled_from([Parcel(b"lie"), in_file("/dev/shm/i-0/x"), in_file("/etc/passwd")])
numbers = st.integers(0, 2**53)
outcomes = st.builds(
    Outcome,
    ids,
    st.sampled_from([kind for kind in OutcomeKind if kind is not OutcomeKind.TIMED_OUT]),
    parcels,
    items=st.integers(0, 3) | numbers,
    seconds=st.floats(0, 1e10),
)
said = st.builds(Output, ids, st.just("stdout"), st.just(("a line",)), st.just(0.0))
lies = st.lists(outcomes | st.builds(Item, ids, st.integers(0, 3) | numbers, parcels) | said, max_size=4).map(tuple)
reports = st.builds(Report, st.integers(-1, 10**6), st.sampled_from(["i-0", "i-1", "other"]), lies, origins, numbers)
names = st.sampled_from(["0-0", "1-0", "0-7", "999999-3"])
addresses = st.sampled_from([*ADDRESSES.values(), "tls://other", ""])
news = st.one_of(
    st.builds(WorkerJoined, names, addresses, st.sampled_from(["", "i-0", "other"])),
    st.builds(WorkerLeft, names, addresses),
    st.builds(WorkerHeld, addresses, numbers),
    st.builds(WorkerFree, names, addresses),
    st.builds(WorkerKept, names, addresses, st.lists(ids).map(tuple), st.booleans(), st.lists(origins).map(tuple)),
    st.builds(PoolRanks, st.frozensets(st.integers(0, 10**6), max_size=3)),
)
forged_answers = st.builds(
    Resumed,
    numbers,
    numbers,
    st.booleans(),
    st.dictionaries(origins, st.just("memory")),
    last=numbers,
    workers=st.dictionaries(addresses, st.tuples(names, st.just("running"))),
)


@pytest.mark.generated
@settings(max_examples=examples(1000))
@given(st.lists(reports | news | forged_answers, max_size=12), st.booleans(), st.integers(0, 2))
def test_no_lie_in_the_right_form_stops_the_dispatcher(messages: list[Any], is_local: bool, retries: int) -> None:
    """It raises nothing, and when the pool is cut off and connects again, every call can still end: each has had at
    most one end.
    """
    pool = Pool(retries, is_local=is_local)
    pool.submit(entry("a"), entry("b"), replace(STREAMING, call=STREAMING.call._replace(call_id="c"), items=0))
    for message in messages:
        match message:
            case Report():
                pool.dispatcher.report(pool.epoch, message, 0.0)
            case Resumed():
                pool.dispatcher.resumed(pool.epoch, message, 0.0)
            case _:
                pool.news(message)
        pool.go_on()
        pool.tick(1.0)
    pool.dispatcher.close(do_error())
    pool.go_on()
    ended = [action.call_id for action in pool.done if isinstance(action, do.Finish | do.Fail | do.Cancelled)]
    assert sorted(ended) == ["a", "b", "c"]


def do_error() -> Any:
    from skyward_core.errors import PoolClosed

    return PoolClosed("the pool is closed")


def test_an_item_of_a_call_that_does_not_stream_is_dropped() -> None:
    """The call would miss it at its end."""
    pool = Pool()
    pool.submit(entry("a"))
    pool.report(Item("a", 0, Parcel(b"lie")))
    pool.report(value("a"))
    assert (pool.take(do.DeliverItem), [action.call_id for action in pool.take(do.Finish)]) == ([], ["a"])


def test_forged_origins_fill_no_memory() -> None:
    """Of batches that are in flight, and of those that are not."""
    pool = Pool()
    (sent,) = pool.submit(entry("a"))
    for number in range(MOST_ORIGINS + 10):
        for batch in (sent.number, 99):
            report = Report(0, "i-0", (), f"p{number}/skyward-{batch}-x", 1)
            pool.dispatcher.report(pool.epoch, report, 0.0)
    assert len(pool.dispatcher.outs[sent.number].heard) == len(pool.dispatcher._kept.heard) == MOST_ORIGINS


def test_a_forged_number_of_a_report_delays_a_result_and_loses_none() -> None:
    """The report that has it counts as repeated then; the result comes with the task of its batch."""
    pool = Pool()
    (sent,) = pool.submit(entry("a"))
    origin = f"p/{pool.dispatcher.key(sent.number)}"
    pool.report(origin=origin, number=2**53)
    pool.report(value("a"), origin=origin, number=1)
    assert pool.take(do.Finish) == []
    pool.dispatcher.task_ended(pool.epoch, sent.number, is_finished=True, reason="")
    assert [action.number for action in pool.take(do.Gather)] == [sent.number]
    pool.dispatcher.gathered(pool.epoch, sent.number, {"a": value("a")}, 0, "i-0", 0.0)
    assert [action.call_id for action in pool.take(do.Finish)] == ["a"]
