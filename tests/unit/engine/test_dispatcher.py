"""The dispatcher, message by message: earlier faults, the states of the connection, drain, hold."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from skyward_core.engine import actions as do
from skyward_core.engine.dispatcher import Dispatcher
from skyward_core.engine.fetches import FETCH_SECONDS
from skyward_core.engine.outbox import Entry
from skyward_core.errors import NodeLost, PoolClosed, SkywardError
from skyward_core.events.events import CallProgress, CallRetrying
from skyward_core.worker.scheduler_messages import HELD, Resumed, WorkerHeld, WorkerJoined, WorkerLeft
from skyward_core.worker.wire import Call, Outcome, OutcomeKind, Output, Parcel, Report
from tests.engine.model import FUNCTION_SPANS, LARGE, SPANS, machine_id, node_of

SMALL = Parcel(b"small")
TOPIC = "skyward-topic"
ADDRESSES = {"0-0": "tls://zero", "1-0": "tls://one"}


def entry(
    call_id: str, *, arguments: Parcel = SMALL, function: str = "f", is_large: bool = False, worker: str | None = None
) -> Entry:
    return Entry(Call(call_id, function, arguments, "job"), LARGE if is_large else SMALL, worker)


def value(call_id: str, path: str | None = None, ending: OutcomeKind = OutcomeKind.RESULT) -> Outcome:
    return Outcome(call_id, ending, Parcel(b"", (), path, SPANS) if path else Parcel(b"value"), seconds=1.0)


class Pool:
    """A connected dispatcher of a pool of two nodes, each with a worker of one slot; and its actions, by kind."""

    def __init__(self, retries: int = 0, *, workers: Sequence[str] = ("0-0", "1-0"), is_here: bool = False) -> None:
        self.nodes = [node_of(rank, rank, 1, 1) for rank in range(2)]
        self.dispatcher = Dispatcher(self.nodes, TOPIC, retries, is_here=is_here)
        self.workers = dict.fromkeys(workers)
        self.done: list[do.Action] = []
        self.epoch = 0
        self.number = 0
        self.connect()

    def connect(
        self,
        *,
        is_known: bool = False,
        tasks: Mapping[str, str] | None = None,
        gone: Sequence[str] = (),
        last: int | None = None,
    ) -> None:
        """Connect; the scheduler answers at once."""
        self.epoch = self.dispatcher.connected(0.0)
        self.answer(is_known=is_known, tasks=tasks, gone=gone, last=last)

    def answer(
        self,
        *,
        is_known: bool = False,
        tasks: Mapping[str, str] | None = None,
        gone: Sequence[str] = (),
        last: int | None = None,
    ) -> None:
        workers = {ADDRESSES[name]: (name, "running") for name in self.workers}
        number = self.dispatcher.heard
        resumed = Resumed(number, 0, is_known, tasks or {}, frozenset(gone), number if last is None else last, workers)
        self.dispatcher.resumed(self.epoch, resumed, 0.0)
        self.go_on()

    def go_on(self, now: float = 0.0) -> None:
        """Flush, and take the actions."""
        self.dispatcher.flush(now)
        self.done += self.dispatcher.take_actions()

    def take(self, kind: type) -> list[Any]:
        """Return the actions of this kind since the last time."""
        self.go_on()
        taken = [action for action in self.done if isinstance(action, kind)]
        self.done = [action for action in self.done if not isinstance(action, kind)]
        return taken

    def submit(self, *entries: Entry) -> list[Any]:
        """Submit calls; return the batches that go out."""
        self.dispatcher.submit(entries)
        return self.take(do.Send)

    def report(self, *news: Outcome | Output, node: int = 0) -> None:
        """A worker reports."""
        self.dispatcher.report(self.epoch, Report(node, f"machine-{node:03d}", news), 0.0)
        self.go_on()

    def upload(self, action: do.Upload, path: str = "a") -> None:
        """An upload succeeds."""
        place = f"/dev/shm/{action.instance_id}"
        arguments = {call_id: Parcel(b"", (), f"{place}/{path}-{call_id}", SPANS) for call_id, _ in action.arguments}
        functions: dict[str, Parcel | None] = {
            name: Parcel(b"", (), f"{place}/{name}", FUNCTION_SPANS) for name, _ in action.functions
        }
        self.dispatcher.uploaded(action.number, action.instance_id, arguments, functions)
        self.go_on()

    def errors(self) -> dict[str, SkywardError]:
        """Return the errors of calls since the last time."""
        return {action.call_id: action.error for action in self.take(do.Fail)}

    def progress(self) -> tuple[int, int, int, int]:
        """Return the counts of the last progress event."""
        event = [action.event for action in self.take(do.EmitEvent) if isinstance(action.event, CallProgress)][-1]
        return event.submitted, event.done, event.failed, event.cancelled


# ── fault 1: large arguments that are being uploaded when the head is lost ───────────────────────────────────────────


@pytest.mark.parametrize("retries", [0, 1])
def test_a_call_that_is_being_uploaded_when_the_head_is_lost_waits_again(retries: int) -> None:
    """It was not sent: no loss is counted, and it is sent once. The files of the late upload are removed."""
    pool = Pool(retries)
    assert pool.submit(entry("a", arguments=LARGE)) == []
    (upload,) = pool.take(do.Upload)
    pool.dispatcher.restarted(pool.nodes, lambda parcel: True, 0.0)
    pool.connect()
    assert pool.errors() == {}
    pool.upload(upload, "late")
    assert [action.parcel.path for action in pool.take(do.Remove)] == [f"/dev/shm/{upload.instance_id}/late-a"]
    (again,) = pool.take(do.Upload)
    pool.upload(again)
    (sent,) = pool.take(do.Send)
    assert [call.call_id for call in sent.batch.calls] == ["a"]
    assert pool.dispatcher.entries["a"].losses == 0


def test_a_call_that_was_sent_is_lost_with_the_head() -> None:
    """If no worker brings it to the next head, it raises with retries=0."""
    pool = Pool()
    pool.submit(entry("a"))
    pool.dispatcher.restarted([node_of(7, 0, 1, 1)], lambda parcel: True, 0.0)
    assert "head" in str(pool.errors()["a"])


def test_waiting_arguments_are_lost_with_their_machine_even_if_their_file_is_still_there() -> None:
    """The file of a lost machine exists until its memory is cleared: a call that is sent meanwhile would not find it
    later.
    """
    pool = Pool(is_here=True)
    pool.submit(entry("x"), entry("y"))
    pool.submit(entry("gone", arguments=Parcel(b"", (), f"/dev/shm/skyward-0-{machine_id(0)}/a", SPANS)))
    pool.submit(entry("kept", arguments=Parcel(b"", (), f"/dev/shm/skyward-0-{machine_id(1)}/b", SPANS)))
    pool.errors()
    pool.dispatcher.restarted([node_of(7, 0, 1, 1), pool.nodes[1]], lambda parcel: True, 0.0)
    errors = pool.errors()
    assert isinstance(errors.pop("gone"), NodeLost)
    assert "kept" not in errors
    assert "kept" in pool.dispatcher.entries


# ── fault 5: a pool that closes while batches are being uploaded ─────────────────────────────────────────────────────


def test_all_calls_end_when_the_pool_closes() -> None:
    """In every state: waiting, being uploaded, blocked by another upload, in flight, or being fetched.

    Values that arrive later are removed.
    """
    pool = Pool()
    pool.submit(entry("out"), entry("fetched"))
    pool.report(value("fetched", "/dev/shm/machine-000/x"))
    pool.submit(
        entry("uploading", arguments=LARGE, is_large=True, worker="0-0"),
        entry("blocked", is_large=True, worker="0-0"),
        *map(entry, "abc"),
    )
    (upload,) = pool.take(do.Upload)
    pool.dispatcher.close(PoolClosed("closed"))
    assert set(pool.errors()) == {"out", "fetched", "uploading", "blocked", "a", "b", "c"}
    pool.take(do.Remove)
    pool.upload(upload)
    pool.dispatcher.fetched("fetched", Parcel(b"late"), "/dev/shm/machine-000/x")
    assert [action.parcel.path for action in pool.take(do.Remove)] == ["/dev/shm/machine-000/a-uploading"]
    assert pool.take(do.Discard) == [do.Discard(Parcel(b"late"))]
    assert pool.take(do.Send) == []
    assert pool.progress()[:2] == (7, 7)


# ── fault 6: a lost call, while another call prints ──────────────────────────────────────────────────────────────────


def test_a_call_is_lost_though_another_one_prints() -> None:
    """The call is lost after the second of two missed messages.

    The task is gone when the scheduler answers again.
    """
    pool = Pool()
    pool.submit(entry("lost"), entry("prints"))
    key = pool.dispatcher.key
    pool.connect(is_known=True, tasks={key(1): "processing"}, gone=[key(0)], last=2)
    pool.report(Output("prints", "stdout", ("one",), 0.0))
    assert pool.errors() == {}
    pool.report(Output("prints", "stdout", ("two",), 0.0))
    assert isinstance(pool.errors()["lost"], NodeLost)
    assert list(pool.dispatcher.entries) == ["prints"]


def test_an_outcome_that_was_reported_before_the_loss_counts() -> None:
    """The outcome is among the messages that were missed."""
    pool = Pool()
    pool.submit(entry("a"))
    pool.connect(is_known=True, gone=[pool.dispatcher.key(0)], last=1)
    pool.report(value("a"))
    assert [action.call_id for action in pool.take(do.Finish)] == ["a"]
    assert pool.errors() == {}


# ── fault 7: a result that is being fetched when the pool is given up ────────────────────────────────────────────────


def fetching() -> tuple[Pool, str]:
    pool = Pool()
    pool.submit(entry("a"))
    path = "/dev/shm/machine-000/x"
    pool.report(value("a", path))
    assert len(pool.take(do.Fetch)) == 1
    return pool, path


@pytest.mark.parametrize("is_cut", [False, True])
def test_a_fetch_that_fails_after_the_pool_was_abandoned_ends_its_call(is_cut: bool) -> None:
    """Until the failure the value may still arrive."""
    pool, path = fetching()
    pool.dispatcher.give_up(NodeLost("no head"))
    assert pool.errors() == {}
    pool.dispatcher.not_fetched("a", path, OSError("cut"), is_cut=is_cut)
    assert "could not be fetched: cut" in str(pool.errors()["a"])
    assert not pool.dispatcher.fetching


def test_a_fetch_that_arrives_after_the_pool_was_abandoned_counts() -> None:
    pool, path = fetching()
    pool.dispatcher.give_up(NodeLost("no head"))
    pool.dispatcher.fetched("a", Parcel(b"value"), path)
    assert [action.outcome.parcel.data for action in pool.take(do.Finish)] == [b"value"]


def test_a_fetch_that_waits_for_its_node_is_abandoned_with_the_pool() -> None:
    pool, path = fetching()
    pool.dispatcher.not_fetched("a", path, OSError("cut"), is_cut=True)
    pool.dispatcher.give_up(NodeLost("no head"))
    assert str(pool.errors()["a"]) == "no head"


def test_a_fetch_is_repeated_when_its_node_is_reachable() -> None:
    """It is repeated until its deadline; then the outcome is removed from the node."""
    pool, path = fetching()
    pool.dispatcher.not_fetched("a", path, OSError("cut"), is_cut=True)
    pool.dispatcher.tick(1.0, lambda _: False)
    assert pool.take(do.Fetch) == []
    pool.dispatcher.tick(2.0, lambda _: True)
    assert [action.call_id for action in pool.take(do.Fetch)] == ["a"]
    pool.dispatcher.not_fetched("a", path, OSError("cut"), is_cut=True)
    pool.dispatcher.tick(FETCH_SECONDS + 1, lambda _: True)
    assert isinstance(pool.errors()["a"], NodeLost)
    assert [action.parcel.path for action in pool.take(do.Remove)] == [path]


# ── fault 8: an upload delays no call ────────────────────────────────────────────────────────────────────────────────


def test_other_calls_end_while_one_is_being_uploaded() -> None:
    """The dispatcher does not wait: results, lines and pings go on."""
    pool = Pool()
    pool.submit(entry("small", worker="1-0"), entry("large", arguments=LARGE, worker="0-0"))
    assert len(pool.take(do.Upload)) == 1
    pool.report(Output("small", "stdout", ("line",), 0.0), value("small"), node=1)
    pool.dispatcher.tick(10.0, lambda _: True)
    assert [action.call_id for action in pool.take(do.Finish)] == ["small"]
    assert len(pool.take(do.Ping)) == 1


# ── fault 10: functions in the memory of nodes ───────────────────────────────────────────────────────────────────────


def run(pool: Pool, call_id: str, function: str) -> list[str]:
    """Run one call of a large function on node 0; return the names of the functions that are removed."""
    sent = pool.submit(entry(call_id, function=function, is_large=True, worker="0-0"))
    for action in pool.take(do.Upload):
        pool.upload(action)
    sent += pool.take(do.Send)
    pool.report(value(call_id))
    pool.dispatcher.task_ended(pool.epoch, sent[0].number, is_finished=True, reason="")
    return [str(action.parcel.path).rpartition("/")[2] for action in pool.take(do.Remove)]


def test_the_least_recently_used_functions_are_evicted() -> None:
    """There is room for two. A function that is used again stays, and is not uploaded again."""
    pool = Pool()
    assert [run(pool, "1", "f"), run(pool, "2", "g"), run(pool, "3", "f")] == [[], [], []]
    assert run(pool, "4", "h") == ["g"]


def test_a_function_in_use_is_not_evicted() -> None:
    """It is evicted when the last batch that refers to it has ended."""
    pool = Pool()
    (upload,) = pool.submit(entry("a", function="f", is_large=True, worker="0-0")) or pool.take(do.Upload)
    pool.upload(upload)
    (sent,) = pool.take(do.Send)
    assert [run(pool, "2", "g"), run(pool, "3", "h")] == [[], ["g"]]
    pool.report(value("a"))
    pool.dispatcher.task_ended(pool.epoch, sent.number, is_finished=True, reason="")
    assert run(pool, "4", "i") == ["f"]


def test_a_function_travels_to_a_node_once() -> None:
    """A second batch waits for the first one's upload, and is sent with it."""
    pool = Pool()
    pool.submit(entry("a", is_large=True, worker="0-0"), entry("b", is_large=True, worker="0-0"))
    (upload,) = pool.take(do.Upload)
    pool.upload(upload)
    assert [call.call_id for action in pool.take(do.Send) for call in action.batch.calls] == ["a", "b"]
    assert pool.take(do.Upload) == []


def test_functions_are_known_after_a_change_of_head() -> None:
    """The node that stays has them: they are not uploaded again, and are evicted later."""
    pool = Pool()
    run(pool, "1", "f")
    pool.dispatcher.restarted(pool.nodes, lambda parcel: True, 0.0)
    pool.connect()
    assert len(pool.submit(entry("2", function="f", is_large=True, worker="0-0"))) == 1
    assert pool.take(do.Upload) == []


def test_a_function_without_room_travels_in_the_message() -> None:
    pool = Pool()
    pool.submit(entry("a", is_large=True, worker="0-0"))
    (upload,) = pool.take(do.Upload)
    pool.dispatcher.uploaded(upload.number, upload.instance_id, {}, {"f": None})
    (sent,) = pool.take(do.Send)
    assert sent.batch.functions == {"f": LARGE}


# ── fault 11: counts, and workers that come and go ───────────────────────────────────────────────────────────────────


def test_a_worker_that_left_is_not_counted_again() -> None:
    """Messages of an earlier connection are dropped; the scheduler's answer lists the present workers."""
    pool = Pool()
    pool.dispatcher.pool_news(pool.epoch, WorkerLeft("1-0", ADDRESSES["1-0"]), 0.0)
    pool.dispatcher.pool_news(pool.epoch - 1, WorkerJoined("1-0", ADDRESSES["1-0"]), 0.0)
    assert list(pool.dispatcher.members.workers) == ["0-0"]


def test_a_late_leave_does_not_remove_the_successor() -> None:
    pool = Pool()
    pool.dispatcher.pool_news(pool.epoch, WorkerJoined("1-0", "tls://new"), 0.0)
    pool.dispatcher.pool_news(pool.epoch, WorkerLeft("1-0", ADDRESSES["1-0"]), 0.0)
    assert pool.dispatcher.members.workers["1-0"] == "tls://new"
    assert pool.take(do.Left) == []


def test_all_calls_are_counted_once() -> None:
    """Done, failed and cancelled ones; a late outcome is not counted."""
    pool = Pool(workers=["0-0"])
    pool.submit(*map(entry, ["done", "failed", "cancelled", "late"]))
    for number, call_id in enumerate(["done", "failed"]):
        pool.report(value(call_id, ending=[OutcomeKind.RESULT, OutcomeKind.ERROR][number]))
    pool.dispatcher.cancel("cancelled")
    pool.dispatcher.cancel("late")
    pool.report(value("late", ending=OutcomeKind.CANCELLED))
    pool.dispatcher.cancel("late")
    assert pool.progress() == (4, 2, 1, 2)


def test_a_large_result_counts_when_it_has_arrived() -> None:
    """A pool is not idle during the fetch."""
    pool, path = fetching()
    assert list(pool.dispatcher.entries) == ["a"]
    assert pool.dispatcher.fetching_from("machine-000") == 1
    pool.dispatcher.fetched("a", Parcel(b"value"), path)
    assert not pool.dispatcher.entries


# ── cancelling ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_cancelled_call_that_is_handed_back_does_not_go_out() -> None:
    """It was cancelled in flight.

    Looks inside: a call that waits for nothing does nothing else that shows.
    """
    pool = Pool(workers=["0-0"])
    pool.submit(entry("a"))
    pool.dispatcher.cancel("a")
    assert [action.call_ids for action in pool.take(do.Stop)] == [("a",)]
    pool.report(value("a", ending=OutcomeKind.RETURNED))
    pool.dispatcher.tick(1.0, lambda _: True)
    assert pool.take(do.Send) == []
    assert pool.dispatcher._queue.all_out() == []


def test_a_cancelled_call_is_stopped_on_a_worker_that_joins_later() -> None:
    """Its batch may have waited in the scheduler, which had no worker for the message to stop it."""
    pool = Pool(workers=["0-0"])
    pool.submit(entry("a"))
    pool.dispatcher.cancel("a")
    pool.take(do.Stop)
    pool.dispatcher.pool_news(pool.epoch, WorkerJoined("1-0", ADDRESSES["1-0"]), 0.0)
    assert [action.call_ids for action in pool.take(do.Stop)] == [("a",)]


def test_a_call_that_is_cancelled_while_the_connection_is_cut_is_stopped_on_the_next_one() -> None:
    pool = Pool()
    pool.submit(entry("a"))
    pool.dispatcher.cut(pool.epoch)
    pool.dispatcher.cancel("a")
    assert pool.take(do.Stop) == []
    pool.connect(is_known=True, tasks={pool.dispatcher.key(0): "processing"})
    assert [(action.epoch, action.call_ids) for action in pool.take(do.Stop)] == [(2, ("a",))]


def test_a_large_result_of_a_cancelled_call_is_removed() -> None:
    pool = Pool()
    pool.submit(entry("a"))
    pool.dispatcher.cancel("a")
    pool.report(value("a", "/dev/shm/machine-000/x"))
    assert [action.parcel.path for action in pool.take(do.Remove)] == ["/dev/shm/machine-000/x"]


# ── the connection ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_nothing_is_sent_before_the_scheduler_has_answered() -> None:
    pool = Pool()
    pool.dispatcher.disconnected()
    pool.epoch = pool.dispatcher.connected(0.0)
    assert pool.submit(entry("a")) == []
    pool.answer(is_known=True)
    assert [action.epoch for action in pool.take(do.Send)] == [2]


def test_the_answer_to_an_earlier_connection_is_dropped() -> None:
    """An answer after the cut of its connection is dropped too."""
    pool = Pool()
    first = pool.epoch
    pool.epoch = pool.dispatcher.connected(0.0)
    pool.dispatcher.resumed(first, Resumed(0, 0, is_known=True, tasks={}), 0.0)
    assert not pool.dispatcher.is_live
    pool.dispatcher.disconnected()
    pool.dispatcher.resumed(pool.epoch, Resumed(0, 0, is_known=True, tasks={}), 0.0)
    assert not pool.dispatcher.is_live


def test_three_pings_without_an_answer_end_the_connection() -> None:
    """This holds before the scheduler's first answer too; an answer in between resets the count."""
    pool = Pool()
    pool.epoch = pool.dispatcher.connected(0.0)
    for is_answered in (False, False, True, False, False):
        pool.dispatcher.pinged(pool.epoch, is_answered=is_answered)
    assert pool.take(do.CutOff) == []
    pool.dispatcher.pinged(pool.epoch, is_answered=False)
    pool.dispatcher.cut(pool.epoch)
    assert pool.take(do.CutOff) == [do.CutOff()]


def test_a_batch_that_never_arrived_is_sent_again() -> None:
    """The scheduler knows the topic, but its task never arrived. No loss is counted."""
    pool = Pool()
    pool.submit(entry("a"))
    pool.connect(is_known=True)
    (sent,) = pool.take(do.Send)
    assert [call.call_id for call in sent.batch.calls] == ["a"]
    assert pool.dispatcher.entries["a"].losses == 0


def test_a_batch_without_its_worker_is_lost_after_the_missed_messages() -> None:
    """The worker's reports are among the messages that were missed."""
    pool = Pool()
    pool.submit(entry("a", worker="1-0"), entry("b", worker="1-0"))
    del pool.workers["1-0"]
    key = pool.dispatcher.key
    pool.connect(is_known=True, tasks={key(0): "no-worker", key(1): "no-worker"}, last=1)
    assert pool.take(do.TakeBack) == []
    pool.report(value("a"), node=1)
    taken = pool.take(do.TakeBack)
    assert [action.number for action in taken] == [0, 1]
    for action in taken:
        pool.dispatcher.taken_back(pool.epoch, action.number)
    assert list(pool.errors()) == ["b"]


def test_a_scheduler_that_has_forgotten_the_client_has_lost_its_calls() -> None:
    """It has stopped them: they are not sent again as calls that never arrived."""
    pool = Pool()
    pool.submit(entry("a"))
    pool.epoch = pool.dispatcher.connected(0.0)
    pool.dispatcher.resumed(pool.epoch, Resumed(0, 0, is_known=True, tasks={}, abandoned=1), 0.0)
    assert isinstance(pool.errors()["a"], NodeLost)
    assert pool.take(do.Send) == []


def test_a_message_of_an_earlier_connection_ends_no_batch() -> None:
    pool = Pool()
    pool.submit(entry("a"))
    first = pool.epoch
    pool.connect(is_known=True, tasks={pool.dispatcher.key(0): "processing"})
    pool.dispatcher.task_ended(first, 0, is_finished=False, reason="gone")
    pool.dispatcher.report(first, Report(0, "machine-000", (value("a"),)), 0.0)
    assert (pool.errors(), pool.take(do.Finish)) == ({}, [])


def test_a_call_of_a_group_is_not_repeated_alone() -> None:
    pool = Pool(retries=1)
    pool.submit(replace(entry("a"), in_group=True))
    pool.dispatcher.task_ended(pool.epoch, 0, is_finished=False, reason="gone")
    assert "its group cannot go on without it" in str(pool.errors()["a"])
    assert pool.take(do.Send) == []


def test_a_call_runs_again_as_often_as_retries_allows() -> None:
    pool = Pool(retries=1)
    pool.submit(entry("a"))
    pool.dispatcher.task_ended(pool.epoch, 0, is_finished=False, reason="gone")
    events = [action.event for action in pool.take(do.EmitEvent) if isinstance(action.event, CallRetrying)]
    assert [(event.attempt, event.attempts) for event in events] == [(2, 2)]
    (sent,) = pool.take(do.Send)
    pool.dispatcher.task_ended(pool.epoch, sent.number, is_finished=False, reason="gone")
    assert "it was lost 2 times" in str(pool.errors()["a"])


# ── drain and hold ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_pool_that_drains_begins_nothing() -> None:
    """Calls that wait, come back or are being uploaded raise; calls in flight may end.

    After the drain it begins calls again.
    """
    pool = Pool()
    pool.submit(
        entry("out", worker="0-0"), entry("back", worker="0-0"), entry("uploading", arguments=LARGE, worker="1-0")
    )
    pool.submit(entry("waits", worker="7-0"))
    pool.dispatcher.drain(PoolClosed("draining"))
    assert set(pool.errors()) == {"uploading", "waits"}
    pool.report(value("out"), value("back", ending=OutcomeKind.RETURNED))
    assert (list(pool.errors()), [action.call_id for action in pool.take(do.Finish)]) == (["back"], ["out"])
    pool.dispatcher.drain(None)
    assert len(pool.submit(entry("next"))) == 1


def test_a_call_that_is_lost_on_a_pool_that_drains_is_not_run_again() -> None:
    """Its error says why."""
    pool = Pool(retries=1)
    pool.submit(entry("a"))
    pool.dispatcher.drain(PoolClosed("draining"))
    pool.dispatcher.task_ended(pool.epoch, 0, is_finished=False, reason="gone")
    assert "the pool begins no calls any more" in str(pool.errors()["a"])


def test_a_held_worker_occupies_no_free_slot() -> None:
    """Its calls are in flight, and the other worker's slot is still free.

    A call for the held worker waits for the worker that replaces it.
    """
    pool = Pool()
    assert len(pool.submit(entry("a"), entry("b"))) == 2
    pool.dispatcher.pool_news(pool.epoch, WorkerHeld(ADDRESSES["1-0"], 1), 0.0)
    pool.report(value("a"))
    assert len(pool.submit(entry("c"), entry("pinned", worker="1-0"))) == 1
    pool.dispatcher.pool_news(pool.epoch, WorkerLeft("1-0", ADDRESSES["1-0"]), 0.0)
    pool.dispatcher.pool_news(pool.epoch, WorkerJoined("1-0", "tls://new"), 0.0)
    assert [action.address for action in pool.take(do.Send)] == ["tls://new"]


def test_a_worker_that_is_held_when_the_scheduler_answers_is_held() -> None:
    pool = Pool(workers=[])
    pool.epoch = pool.dispatcher.connected(0.0)
    pool.dispatcher.resumed(
        pool.epoch, Resumed(0, 0, is_known=True, tasks={}, workers={"tls://zero": ("0-0", HELD)}), 0.0
    )
    assert pool.dispatcher.members.free == []
    assert pool.submit(entry("a")) == []


def test_a_worker_that_was_freed_during_a_cut_gets_calls_again() -> None:
    """WorkerFree was lost with the connection; the scheduler's answer says that the worker runs."""
    pool = Pool(workers=["0-0"])
    pool.dispatcher.pool_news(pool.epoch, WorkerHeld(ADDRESSES["0-0"], 1), 0.0)
    assert pool.submit(entry("a")) == []
    pool.epoch = pool.dispatcher.connected(0.0)
    pool.dispatcher.resumed(
        pool.epoch, Resumed(0, 0, is_known=True, tasks={}, workers={ADDRESSES["0-0"]: ("0-0", "running")}), 0.0
    )
    pool.dispatcher.flush(0.0)
    assert [action.address for action in pool.take(do.Send)] == [None]


def test_calls_for_an_abandoned_node_raise() -> None:
    """Calls for other nodes wait."""
    pool = Pool(workers=["0-0"])
    pool.submit(entry("pinned", worker="1-0"), entry("waits", worker="0-0"))
    pool.dispatcher.give_up(NodeLost("not replaced"), 1)
    assert {call_id: str(error) for call_id, error in pool.errors().items()} == {"pinned": "not replaced"}


def test_a_file_is_searched_on_its_own_node() -> None:
    """Ids of Vast.ai are numbers: one id may be the beginning of another."""
    nodes = [node_of(rank, rank, 1, 1) for rank in range(2)]
    short, long = (
        node.model_copy(update={"instance": node.instance.model_copy(update={"id": name})})
        for node, name in zip(nodes, ("1234", "12345"), strict=True)
    )
    for order in ([short, long], [long, short]):
        members = Dispatcher(order, TOPIC, 0, is_here=False).members
        assert members.instance_of(Parcel(b"", (), "/dev/shm/skyward-abc-12345/value")) == "12345"
        assert members.instance_of(Parcel(b"", (), "/dev/shm/skyward-abc-1234/value")) == "1234"
        assert members.instance_of(Parcel(b"", (), "/dev/shm/skyward-abc-99/value")) is None
