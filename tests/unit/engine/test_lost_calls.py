"""Losses, message by message: with a connection, with a head, and reports that are repeated.

`test_losses.py` has the losses of real nodes.
"""

from skyward_core.engine import actions as do
from skyward_core.engine.kept_calls import DECIDED_SECONDS
from skyward_core.errors import NodeLost
from skyward_core.events.events import LogLine
from skyward_core.worker.retained_batches import WorkerKept
from skyward_core.worker.scheduler_messages import Resumed, WorkerLeft
from skyward_core.worker.wire import SHARED, Outcome, Output, Report
from tests.engine.model import machine_id, node_of
from tests.unit.engine.test_dispatcher import ADDRESSES, TOPIC, Pool, entry, value


def test_a_batch_that_the_next_connection_finds_is_followed() -> None:
    """Its worker is there, so that it is not taken back."""
    pool = Pool()
    (sent,) = pool.submit(entry("a", worker="0-0"))
    assert sent.key == f"skyward-{sent.number}-{TOPIC[-8:]}"
    pool.connect(is_known=True, tasks={sent.key: "processing"})
    assert pool.take(do.Follow) == [do.Follow(pool.epoch, sent.number, sent.key)]
    assert (pool.take(do.TakeBack), pool.errors()) == ([], {})
    pool.dispatcher.task_ended(pool.epoch, sent.number, is_finished=False, reason="gone")
    assert list(pool.errors()) == ["a"]


def test_tasks_that_the_client_has_forgotten_are_released() -> None:
    pool = Pool()
    (sent,) = pool.submit(entry("a"))
    pool.dispatcher.give_up(NodeLost("no head"))
    pool.take(do.Fail)
    pool.connect(is_known=True, tasks={sent.key: "processing"})
    assert pool.take(do.Release) == [do.Release(pool.epoch, (sent.key,))]


def test_a_batch_that_is_lost_waits_for_the_missed_messages_of_its_own_connection() -> None:
    """The next connection decides again."""
    pool = Pool()
    (sent,) = pool.submit(entry("a", worker="1-0"))
    del pool.workers["1-0"]
    pool.connect(is_known=True, tasks={sent.key: "no-worker"}, last=1)
    pool.workers["1-0"] = None
    pool.connect(is_known=True, tasks={sent.key: "processing"}, last=0)
    assert pool.take(do.TakeBack) == []
    assert "a" in pool.dispatcher.entries


def test_a_scheduler_that_has_waited_too_long_says_so() -> None:
    """The next answer with the same number loses nothing."""
    pool = Pool(workers=["0-0"])

    def answer(*keys: str) -> None:
        pool.epoch = pool.dispatcher.connected(0.0)
        tasks, workers = dict.fromkeys(keys, "processing"), {ADDRESSES["0-0"]: ("0-0", "running")}
        pool.dispatcher.resumed(
            pool.epoch, Resumed(0, 0, is_known=True, tasks=tasks, workers=workers, abandoned=1), 0.0
        )

    pool.submit(entry("a"))
    answer()
    assert str(pool.errors()["a"]).startswith("its scheduler has waited for this client for too long; ")
    (sent,) = pool.submit(entry("b"))
    answer(sent.key)
    assert pool.errors() == {}
    assert list(pool.dispatcher.entries) == ["b"]


# ── repeated reports ─────────────────────────────────────────────────────────────────────────────────────────────────


def say(pool: Pool, sent: do.Send, number: int, *news: Outcome) -> None:
    pool.dispatcher.report(pool.epoch, Report(0, machine_id(0), news, f"tls://zero/{sent.key}", number), 0.0)
    pool.go_on()


def test_a_report_that_is_repeated_counts_once() -> None:
    """Its seconds are metered once too. A later report counts."""
    pool = Pool(workers=["0-0"])
    (sent,) = pool.submit(entry("a"))
    for number in (2, 1, 2):
        say(pool, sent, number, value("a"))
    assert len(pool.take(do.MeterCalls)) == 1
    say(pool, sent, 3, value("b"))
    assert len(pool.take(do.MeterCalls)) == 1
    assert [action.call_id for action in pool.take(do.Finish)] == ["a"]


# ── another head ─────────────────────────────────────────────────────────────────────────────────────────────────────


def lost_head() -> tuple[Pool, do.Send]:
    """Call "a" runs on node 1, which outlives the head; the worker of node 1 may join the next head."""
    pool = Pool(workers=["0-0", "1-0"])
    (sent,) = pool.submit(entry("a", worker="1-0"))
    pool.dispatcher.restarted([node_of(7, 0, 1, 1), pool.nodes[1]], lambda _: True, 0.0)
    assert pool.errors() == {}
    return pool, sent


def test_workers_are_asked_for_the_calls_that_they_keep() -> None:
    """Once for each connection to the next head, and not without another head."""
    pool, _ = lost_head()
    assert pool.take(do.RepeatReports) == []
    pool.connect()
    assert pool.take(do.RepeatReports) == [do.RepeatReports(pool.epoch)]
    assert Pool().take(do.RepeatReports) == []


def test_a_call_that_its_worker_keeps_ends_with_its_report() -> None:
    """The worker may forget it then. It is informed again if it repeats the report."""
    pool, sent = lost_head()
    pool.connect()
    kept = WorkerKept("1-0", ADDRESSES["1-0"], ("a",), keys=(sent.key,))
    pool.dispatcher.pool_news(pool.epoch, kept, 0.0)
    pool.dispatcher.tick(DECIDED_SECONDS + 1, lambda _: True)
    assert pool.errors() == {}
    for finished in (["a"], []):
        say(pool, sent, 1, value("a"))
        assert [action.call_id for action in pool.take(do.Finish)] == finished
        assert pool.take(do.ReleaseRetainedCalls) == [do.ReleaseRetainedCalls(pool.epoch, ("a",))]


def test_a_batch_of_another_client_with_the_same_number_is_not_ours() -> None:
    """A worker announces the batches of all clients. Our call is on none of them, and lost."""
    pool, sent = lost_head()
    pool.connect()
    another = WorkerKept("1-0", ADDRESSES["1-0"], ("b",), keys=(f"skyward-{sent.number}-deadbeef",))
    pool.dispatcher.pool_news(pool.epoch, another, 0.0)
    assert str(pool.errors()["a"]).startswith("the head of the pool was lost; ")


def test_a_report_before_the_announcement_does_not_count() -> None:
    """An earlier report may have come before the next head knew this client. The announcement is followed by both."""
    pool, sent = lost_head()
    pool.connect()
    say(pool, sent, 2, value("a"))
    assert pool.take(do.Finish) == []
    kept = WorkerKept("1-0", ADDRESSES["1-0"], ("a",), keys=(sent.key,))
    pool.dispatcher.pool_news(pool.epoch, kept, 0.0)
    pool.dispatcher.report(
        pool.epoch,
        Report(0, machine_id(0), (Output("a", "stdout", ("line",), 0.0),), f"tls://zero/{sent.key}", 1),
        0.0,
    )
    say(pool, sent, 2, value("a"))
    assert [action.event.line for action in pool.take(do.EmitEvent) if isinstance(action.event, LogLine)] == ["line"]
    assert [action.call_id for action in pool.take(do.Finish)] == ["a"]


def test_a_function_that_a_kept_call_needs_stays_on_its_node() -> None:
    """The call waits in its worker while the head is lost. The function goes when the call has ended."""
    pool = Pool(workers=["0-0", "1-0"])
    pool.submit(entry("a", function=f"{SHARED}1", is_large=True, worker="1-0"))
    (upload,) = pool.take(do.Upload)
    pool.upload(upload)
    (sent,) = pool.take(do.Send)
    pool.dispatcher.restarted([node_of(7, 0, 1, 1), pool.nodes[1]], lambda _: True, 0.0)
    pool.connect()
    pool.dispatcher.pool_news(pool.epoch, WorkerKept("1-0", ADDRESSES["1-0"], ("a",), keys=(sent.key,)), 0.0)
    pool.dispatcher.release_shared(f"{SHARED}1")
    assert pool.take(do.Remove) == []
    say(pool, sent, 1, value("a"))
    assert len(pool.take(do.Remove)) == 1


def test_a_call_that_no_worker_keeps_is_lost_when_the_time_is_up() -> None:
    """The time begins with the connection to the next head."""
    pool, _ = lost_head()
    pool.connect()
    pool.dispatcher.tick(DECIDED_SECONDS, lambda _: True)
    assert pool.errors() == {}
    pool.dispatcher.tick(DECIDED_SECONDS + 1, lambda _: True)
    assert str(pool.errors()["a"]).startswith("the head of the pool was lost; ")


def test_a_kept_call_is_lost_with_its_worker() -> None:
    pool, sent = lost_head()
    pool.connect()
    kept = WorkerKept("1-0", ADDRESSES["1-0"], ("a",), keys=(sent.key,))
    pool.dispatcher.pool_news(pool.epoch, kept, 0.0)
    pool.dispatcher.pool_news(pool.epoch, WorkerLeft("1-0", ADDRESSES["1-0"]), 0.0)
    assert str(pool.errors()["a"]).startswith("its worker is gone; ")


def test_a_worker_that_keeps_calls_may_take_no_others_for_now() -> None:
    """If it is paused, a call waits."""
    pool, sent = lost_head()
    pool.workers = {"1-0": None}
    pool.connect()
    kept = WorkerKept("1-0", ADDRESSES["1-0"], ("a",), is_paused=True, keys=(sent.key,))
    pool.dispatcher.pool_news(pool.epoch, kept, 0.0)
    assert pool.submit(entry("b")) == []


def test_a_result_of_a_lost_call_is_removed() -> None:
    """A worker reports the call after the time was up."""
    pool, sent = lost_head()
    pool.connect()
    pool.dispatcher.tick(DECIDED_SECONDS + 1, lambda _: True)
    pool.errors()
    path = f"/dev/shm/{machine_id(1)}/x"
    say(pool, sent, 1, value("a", path))
    assert [action.parcel.path for action in pool.take(do.Remove)] == [path]
    assert pool.take(do.Finish) == []
