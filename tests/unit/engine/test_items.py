"""Items of streaming calls in the dispatcher: deliveries, losses, credit."""

import pytest

from skyward_core.engine import actions as do
from skyward_core.engine.outbox import Entry
from skyward_core.errors import NodeLost
from skyward_core.worker.scheduler_messages import Resumed, WorkerJoined, WorkerLeft
from skyward_core.worker.wire import Call, Item, Outcome, OutcomeKind, Parcel, Report
from tests.engine.model import SPANS
from tests.unit.engine.test_dispatcher import ADDRESSES, SMALL, Pool, entry, value


def streaming(call_id: str = "a") -> Entry:
    return Entry(Call(call_id, "f", SMALL, "job", ahead=4), SMALL)


def item(number: int, path: str | None = None, call_id: str = "a") -> Item:
    return Item(call_id, number, Parcel(b"", (), path, SPANS) if path else Parcel(b"item"))


def end(items: int) -> Outcome:
    return Outcome("a", OutcomeKind.RESULT, Parcel(b"end"), items=items)


def report(pool: Pool, *news: Item | Outcome) -> None:
    pool.dispatcher.report(pool.epoch, Report(0, pool.nodes[0].instance.id, news), 0.0)


def delivered(pool: Pool) -> list[int]:
    return [action.number for action in pool.take(do.DeliverItem)]


def test_items_are_delivered_once_in_their_order() -> None:
    """A second copy of an item does not count."""
    pool = Pool()
    pool.submit(streaming())
    report(pool, item(0), item(1))
    report(pool, item(1), item(2), end(3))
    came = pool.take(do.DeliverItem)
    assert [(action.call_id, action.number, action.node, action.parcel) for action in came] == [
        ("a", number, 0, Parcel(b"item")) for number in range(3)
    ]
    assert [action.outcome.items for action in pool.take(do.Finish)] == [3]


def test_a_large_item_is_fetched_from_its_node() -> None:
    """On this machine the client sees the same memory."""
    far, near = Pool(), Pool(is_here=True)
    path = f"/dev/shm/{far.nodes[0].instance.id}/large"
    for pool in (far, near):
        pool.submit(streaming())
        report(pool, item(0, path))
    (fetch,) = far.take(do.FetchItem)
    assert (fetch.instance_id, fetch.parcel.path) == (far.nodes[0].instance.id, path)
    assert delivered(far) == []
    assert delivered(near) == [0]


def test_an_item_without_consumer_is_removed() -> None:
    """The call was cancelled: it is stopped, and what it has sent meanwhile does not stay on the node."""
    pool = Pool()
    pool.submit(streaming())
    pool.dispatcher.cancel("a")
    path = f"/dev/shm/{pool.nodes[0].instance.id}/late"
    report(pool, item(0, path))
    assert [action.parcel.path for action in pool.take(do.Remove)] == [path]
    assert [action.call_ids for action in pool.take(do.Stop)] == [("a",)]
    assert delivered(pool) == []


def test_a_streaming_call_is_alone_in_its_batch() -> None:
    """Also among calls that are known to be short."""
    pool = Pool(workers=("0-0",))
    for name in "123":
        pool.submit(entry(name))
        report(pool, value(name)._replace(seconds=0.0001))
    pool.take(do.Send)
    sent = pool.submit(*(streaming(f"s{n}") if n % 3 == 0 else entry(f"c{n}") for n in range(12)))
    while len(sent) < 20 and pool.dispatcher.entries:
        for call in list(pool.dispatcher.entries):
            report(pool, Outcome(call, OutcomeKind.RESULT, Parcel(b"x"), seconds=0.0001))
        sent += pool.take(do.Send)
    for batch in [action.batch for action in sent]:
        assert len(batch.calls) == 1 or not any(call.ahead for call in batch.calls)


def test_an_item_of_a_lost_run_is_removed() -> None:
    """The call runs again elsewhere; its first run goes on meanwhile, and its items do not stay on their node."""
    pool = Pool(retries=1)
    (sent,) = pool.submit(streaming())
    pool.dispatcher.taken_back(pool.epoch, sent.number)
    assert len(pool.take(do.Send)) == 1
    instance_id = pool.nodes[0].instance.id
    path = f"/dev/shm/{instance_id}/late"
    late = Report(0, instance_id, (item(0, path),), f"worker/{pool.dispatcher.key(sent.number)}", 1)
    pool.dispatcher.report(pool.epoch, late, 0.0)
    assert [action.parcel.path for action in pool.take(do.Remove)] == [path]
    assert delivered(pool) == []


def test_a_missing_item_ends_the_call() -> None:
    """It raises, and its node stops it."""
    pool = Pool()
    pool.submit(streaming())
    report(pool, item(0), item(2))
    assert delivered(pool) == [0]
    assert "items of the call were lost" in str(pool.errors()["a"])
    assert [action.call_ids for action in pool.take(do.Stop)] == [("a",)]


def test_a_report_that_cannot_be_read_may_have_had_items() -> None:
    """Calls in flight might wait for ever for the credit that these items bring: they raise, and are stopped."""
    pool = Pool()
    pool.submit(streaming(), entry("b"))
    pool.dispatcher.report(pool.epoch, None, 0.0)
    assert list(pool.errors()) == ["a"]
    pool.dispatcher.flush(0.0)
    assert [action.call_ids for action in pool.take(do.Stop)] == [("a",)]


def test_an_end_after_more_items_than_have_come() -> None:
    pool = Pool()
    pool.submit(streaming())
    report(pool, item(0), end(2))
    assert isinstance(pool.errors()["a"], NodeLost)
    assert pool.take(do.Finish) == []


@pytest.mark.parametrize("items", [0, 1])
def test_a_call_runs_again_only_before_its_first_item(items: int) -> None:
    """Its worker was lost."""
    pool = Pool(retries=1)
    (sent,) = pool.submit(streaming())
    report(pool, *(item(number) for number in range(items)))
    pool.dispatcher.taken_back(pool.epoch, sent.number)
    errors = pool.errors()
    again = pool.take(do.Send)
    assert (list(errors), len(again)) == ((["a"], 0) if items else ([], 1))
    if errors:
        assert "its first items have come" in str(errors["a"])


def test_a_call_does_not_outlive_its_head() -> None:
    """Its worker may keep it, but not the items on their way: it raises at once, and is stopped. Others are kept."""
    pool = Pool(retries=1)
    pool.submit(streaming(), entry("b"))
    pool.dispatcher.restarted(pool.nodes, lambda parcel: True, 0.0)
    assert list(pool.errors()) == ["a"]
    assert list(pool.dispatcher.entries) == ["b"]


def test_messages_that_the_scheduler_had_no_room_for() -> None:
    """They may have had items, for which the call waits: it raises."""
    pool = Pool()
    pool.submit(streaming())
    report(pool, item(0))
    epoch = pool.dispatcher.connected(1.0)
    tasks = {pool.dispatcher.key(0): "processing"}
    workers = {ADDRESSES[name]: (name, "running") for name in pool.workers}
    pool.dispatcher.resumed(epoch, Resumed(9, 8, is_known=True, tasks=tasks, last=9, workers=workers), 1.0)
    assert list(pool.errors()) == ["a"]


def test_credit_is_repeated_where_it_may_be_missing() -> None:
    """On another connection, and to a worker that joins; not for calls that have ended."""
    pool = Pool(workers=("0-0",))
    pool.submit(streaming())
    report(pool, item(0))
    pool.dispatcher.give_credit("a", 6)
    assert pool.take(do.GiveCredit) == [do.GiveCredit(pool.epoch, {"a": 6})]
    pool.connect(is_known=True, tasks={pool.dispatcher.key(0): "processing"})
    assert do.GiveCredit(pool.epoch, {"a": 6}) in pool.take(do.GiveCredit)
    pool.dispatcher.pool_news(pool.epoch, WorkerJoined("1-0", ADDRESSES["1-0"]), 0.0)
    assert pool.take(do.GiveCredit) == [do.GiveCredit(pool.epoch, {"a": 6})]
    report(pool, end(1))
    pool.dispatcher.give_credit("a", 8)
    pool.dispatcher.pool_news(pool.epoch, WorkerLeft("1-0", ADDRESSES["1-0"]), 0.0)
    pool.dispatcher.pool_news(pool.epoch, WorkerJoined("1-0", ADDRESSES["1-0"]), 0.0)
    assert pool.take(do.GiveCredit) == []
