"""The dispatcher, message by message: examples for a reader, texts, and what the simulation (`tests/engine`) does not see.

All other rules have a broken dispatcher in `tests/engine/broken.py`, in which the simulation must find the fault.
"""

from dataclasses import replace

import pytest

from skyward_core.engine import actions as do
from skyward_core.engine.calls import FETCH_SECONDS, PROGRESS_SECONDS, call_events
from skyward_core.engine.dispatcher import Dispatcher
from skyward_core.engine.state import DECIDED_SECONDS, batch_of
from skyward_core.errors import NodeLost, PoolClosed
from skyward_core.events.events import CallProgress, CallReported, CallRetrying, LogLine
from skyward_core.wire.messages import Call, Outcome, OutcomeKind, Output, Parcel, Report, ReportedMetrics
from skyward_core.wire.protocol import HELD, WorkerHeld, WorkerJoined, WorkerKept, WorkerLeft
from tests.engine.dispatcher_pool import ADDRESSES, SMALL, TOPIC, Entry, Item, Pool, entry, in_file, value
from tests.engine.model import LARGE, machine_id, node_of

RESULT = f"/dev/shm/{machine_id(0)}/x"

# ── lost calls ───────────────────────────────────────────────────────────────────────────────────────────────────────


def lost(pool: Pool, call: Entry, times: int = 1, *, before: tuple[Item, ...] = (), ends: bool = False) -> str:
    """Submit a call, lose it so often, and return the text of its error."""
    (sent,) = pool.submit(call)
    pool.report(*before)
    if ends:
        pool.dispatcher.drain(PoolClosed("draining"))
    for _ in range(times):
        pool.lose(sent, "its worker is gone")
        sent = next(iter(pool.take(do.Send)), sent)
    error = pool.errors()["a"]
    assert isinstance(error, NodeLost)
    assert not pool.dispatcher.entries
    reason, _, advice = str(error).partition("; ")
    assert reason == "its worker is gone"
    return advice


STREAMING = Entry(Call("a", "f", SMALL, "job", ahead=4), SMALL)


def test_a_lost_call_says_what_to_do() -> None:
    file = in_file(f"/dev/shm/{machine_id(0)}/large")
    assert lost(Pool(), entry("a")) == "submit it again if it may run twice, or open the pool with retries=1 or more"
    assert lost(Pool(1), entry("a"), 2) == "it was lost 2 times (ComputePool(retries=1))"
    assert "its group cannot go on without it" in lost(Pool(1), replace(entry("a"), in_group=True))
    assert "the pool begins no calls any more" in lost(Pool(1), entry("a"), ends=True)
    assert "too large to be kept here: submit it again" in lost(Pool(3, is_local=True), entry("a", arguments=file))
    first = (Item("a", 0, Parcel(b"item")),)
    assert "its first items have come, so it does not run again" in lost(Pool(1), STREAMING, before=first)


def test_a_call_runs_again_as_often_as_retries_allows() -> None:
    """A lost result counts like a lost node. A worker is told to stop the call that has raised."""
    pool = Pool(retries=2, workers=["0-0"])
    (sent,) = pool.submit(entry("a"))
    pool.lose(sent)
    (sent,) = pool.take(do.Send)
    pool.report(value("a", RESULT))
    pool.dispatcher.not_fetched("a", RESULT, OSError("gone"), is_cut=False)
    retries = [(event.call_id, event.attempt, event.attempts, event.reason) for event in pool.events(CallRetrying)]
    assert retries == [("a", 2, 3, "gone"), ("a", 3, 3, "the call ended, but its result could not be fetched: gone")]
    (sent,) = pool.take(do.Send)
    pool.lose(sent)
    assert "it was lost 3 times" in str(pool.errors()["a"])
    assert pool.take(do.Stop) == [do.Stop(pool.epoch, ("a",))]


@pytest.mark.parametrize(
    ("ends", "text"),
    [
        ("not there", "the call ended, but its result was not there; "),
        ("refused", "the call ended, but its result could not be fetched: refused; "),
        ("abandoned", "its scheduler has waited for this client for too long; "),
        ("unknown machine", "the call ended, but its result could not be fetched: the value lies on a node that this"),
        ("unsent", "the call could not be sent: too large"),
        ("head", "the head of the pool was lost; "),
    ],
)
def test_a_lost_call_says_why(ends: str, text: str) -> None:
    pool = Pool(workers=["0-0"])
    (sent,) = pool.submit(entry("a"))
    dispatcher, error = pool.dispatcher, OSError("too large" if ends == "unsent" else "refused")
    if ends in {"not there", "refused"}:
        dispatcher.task_ended(pool.epoch, sent.number, is_finished=True, reason="")
        assert pool.take(do.Gather) == [do.Gather(pool.epoch, sent.number, sent.key)]
    match ends:
        case "not there":
            dispatcher.gathered(pool.epoch, sent.number, {}, 0, machine_id(0), 0.0)
        case "refused":
            dispatcher.not_gathered(pool.epoch, sent.number, error)
        case "abandoned":
            pool.connect(abandoned=1)
        case "unknown machine":
            pool.report(value("a", f"/dev/shm/{machine_id(99)}/x"))
        case "unsent":
            dispatcher.unsent(pool.epoch, sent.number, error, is_its_fault=True)
        case _:
            dispatcher.restarted([node_of(7, 0, 1, 1)], lambda _: True, 0.0)
    failed = pool.errors()["a"]
    assert str(failed).startswith(text)
    assert failed.__cause__ is (error if ends in {"refused", "unsent"} else failed.__cause__)


def test_a_call_that_was_not_sent_when_the_head_is_lost_waits_again() -> None:
    """No loss is counted, also with retries=0."""
    pool = Pool()
    pool.submit(entry("a", arguments=LARGE))
    (upload,) = pool.take(do.Upload)
    pool.dispatcher.restarted(pool.nodes, lambda _: True, 0.0)
    pool.connect(is_known=False)
    pool.upload(upload)
    assert pool.removed() == ["a-a"], "the late upload"
    pool.upload(*pool.take(do.Upload))
    assert [call.call_id for sent in pool.take(do.Send) for call in sent.batch.calls] == ["a"]
    assert (pool.errors(), pool.dispatcher.entries["a"].losses) == ({}, 0)


def test_arguments_in_files_are_lost_with_their_machine() -> None:
    """Also if the file is still there: the memory of a lost machine is cleared at any time."""
    pool = Pool(3, is_local=True)
    pool.submit(entry("x"), entry("y"))
    for rank, call_id in enumerate(["gone", "kept"]):
        pool.submit(entry(call_id, arguments=in_file(f"/dev/shm/skyward-0-{machine_id(rank)}/a")))
    pool.dispatcher.restarted([node_of(7, 0, 1, 1), pool.nodes[1]], lambda _: True, 0.0)
    assert "gone" in pool.errors()
    assert "kept" in pool.dispatcher.entries


def test_the_stage_of_a_call_has_its_function_its_place_and_its_time() -> None:
    """Waiting and sent calls count from their submission, fetched ones from their report; an ended one has none."""
    pool, first, second = Pool(workers=["0-0"]), entry("a"), entry("b", worker="1-0")
    for one, seconds in ((first, 3.0), (second, 4.0)):
        one.title, one.submitted_at = f"function of {one.call.call_id}", seconds
    pool.submit(first, second)
    stage = pool.dispatcher.stage
    assert (stage("a"), stage("b")) == (("function of a", "out", None, 3.0), ("function of b", "waiting", "1-0", 4.0))
    pool.dispatcher.report(pool.epoch, Report(0, machine_id(0), (value("a", RESULT),), "", 0), 7.0)
    assert stage("a") == ("function of a", "fetching", "0", 7.0)
    pool.dispatcher.not_fetched("a", RESULT, OSError("gone"), is_cut=False)
    assert stage("a") is None


# ── another head, and other clients ──────────────────────────────────────────────────────────────────────────────────


def lost_head() -> tuple[Pool, do.Send]:
    """Call "a" ran on node 1, which outlives the head and may join the next one."""
    pool = Pool()
    (sent,) = pool.submit(entry("a", worker="1-0"))
    pool.dispatcher.restarted([node_of(7, 0, 1, 1), pool.nodes[1]], lambda _: True, 0.0)
    pool.workers = {"1-0": "running"}
    pool.connect(is_known=False)
    assert pool.take(do.RepeatReports) == [do.RepeatReports(pool.epoch)]
    return pool, sent


def kept(*keys: str, is_paused: bool = False) -> WorkerKept:
    return WorkerKept("1-0", ADDRESSES["1-0"], ("a",), is_paused=is_paused, keys=keys)


def test_a_call_that_its_worker_keeps_ends_with_its_report() -> None:
    """A paused worker takes no other calls. It may forget the call when its outcome is here, and is told again."""
    pool, sent = lost_head()
    pool.news(kept(sent.key, is_paused=True))
    pool.tick(DECIDED_SECONDS + 1)
    assert pool.errors() == {}
    assert pool.submit(entry("b")) == []
    for finished in (["a"], []):
        pool.report(value("a"), node=1, origin=f"tls://one/{sent.key}", number=1)
        assert pool.finished() == finished
        assert pool.take(do.ReleaseRetainedCalls) == [do.ReleaseRetainedCalls(pool.epoch, ("a",))]


def test_the_next_loss_of_a_head_makes_kept_calls_unknown_again() -> None:
    """A worker that joins the third head a little late still has its call."""
    pool, sent = lost_head()
    pool.news(kept(sent.key))
    pool.dispatcher.restarted([node_of(8, 0, 1, 1), pool.nodes[1]], lambda _: True, 0.0)
    pool.workers = {}
    pool.connect(is_known=False)
    assert pool.errors() == {}
    pool.news(WorkerJoined("1-0", ADDRESSES["1-0"]))
    pool.news(kept(sent.key))
    pool.report(value("a"), node=1, origin=f"tls://one/{sent.key}", number=1)
    assert pool.finished() == ["a"]


def test_a_report_before_the_announcement_does_not_count() -> None:
    """An earlier one may have come before the next head knew this client. Both follow the announcement."""
    pool, sent = lost_head()
    origin = f"tls://one/{sent.key}"
    pool.report(value("a"), origin=origin, number=2)
    assert pool.finished() == []
    pool.news(kept(sent.key))
    pool.report(Output("a", "stdout", ("line",), 0.0), origin=origin, number=1)
    pool.report(value("a"), origin=origin, number=2)
    assert ([event.line for event in pool.events(LogLine)], pool.finished()) == (["line"], ["a"])


@pytest.mark.parametrize("how", ["too late", "with its worker", "another client"])
def test_a_call_that_no_worker_keeps_is_lost(how: str) -> None:
    """A worker announces the batches of all clients, which count from 0 too. Its large result does not stay."""
    pool, sent = lost_head()
    if how == "too late":
        pool.tick(DECIDED_SECONDS)
        assert pool.errors() == {}
        pool.tick(DECIDED_SECONDS + 1)
    elif how == "with its worker":
        pool.news(kept(sent.key))
        pool.news(WorkerLeft("1-0", ADDRESSES["1-0"]))
    else:
        pool.news(kept(f"skyward-{sent.number}-deadbeef"))
    assert list(pool.errors()) == ["a"]
    pool.report(value("a", f"/dev/shm/{machine_id(1)}/x"), node=1, origin=f"tls://one/{sent.key}", number=1)
    assert (pool.removed(), pool.finished()) == (["x"], [])


def test_a_report_that_did_not_count_leaves_no_file_if_its_worker_never_repeats_it() -> None:
    """The worker dies before it announces its batch; the node goes on."""
    pool, sent = lost_head()
    pool.report(value("a", f"/dev/shm/{machine_id(1)}/x"), node=1, origin=f"tls://one/{sent.key}", number=1)
    assert (pool.removed(), pool.finished()) == ([], [])
    pool.tick(DECIDED_SECONDS + 1)
    assert (list(pool.errors()), pool.removed()) == (["a"], ["x"])


def test_a_worker_that_announces_lost_calls_stops_those_without_a_caller() -> None:
    pool, sent = lost_head()
    pool.tick(DECIDED_SECONDS + 1)
    pool.take(do.Stop)
    pool.news(kept(sent.key))
    assert pool.take(do.Stop) == [do.Stop(pool.epoch, ("a",))]


@pytest.mark.parametrize(
    ("origin", "number"),
    [("tls://w/skyward-12-ours", 12), ("skyward-0-ours", 0), ("", -1), ("w/array-sum-1", -1), ("w/skyward-x-1", -1)],
)
def test_the_origin_of_a_report_ends_with_the_key_of_its_batch(origin: str, number: int) -> None:
    assert batch_of(origin) == number


@pytest.mark.parametrize("order", [1, -1])
def test_a_file_is_searched_on_its_own_node(order: int) -> None:
    """Ids of Vast.ai are numbers: one id may be the beginning of another."""
    nodes = [
        (node := node_of(rank, rank, 1, 1)).model_copy(
            update={"instance": node.instance.model_copy(update={"id": name})}
        )
        for rank, name in enumerate(["1234", "12345"])
    ]
    members = Dispatcher(nodes[::order], TOPIC).members
    for name, found in {"12345": "12345", "1234": "1234", "99": None}.items():
        assert members.instance_of(Parcel(b"", (), f"/dev/shm/skyward-abc-{name}/value")) == found


# ── the end of a pool ────────────────────────────────────────────────────────────────────────────────────────────────


def test_all_calls_end_when_the_pool_closes() -> None:
    """Waiting, being uploaded, blocked by another upload, in flight, being fetched. What arrives later is removed."""
    pool = Pool()
    pool.submit(entry("out"), entry("fetched"))
    pool.report(value("fetched", RESULT))
    uploading = entry("uploading", arguments=LARGE, is_large=True, worker="0-0")
    pool.submit(uploading, entry("blocked", is_large=True, worker="0-0"), *map(entry, "abc"))
    (upload,) = pool.take(do.Upload)
    pool.dispatcher.close(PoolClosed("closed"))
    assert set(pool.errors()) == {"out", "fetched", "uploading", "blocked", "a", "b", "c"}
    pool.take(do.Remove)
    pool.upload(upload)
    pool.dispatcher.fetched("fetched", Parcel(b"late"), RESULT)
    assert (pool.removed(), pool.take(do.Discard)) == (["a-uploading"], [do.Discard(Parcel(b"late"))])
    assert (pool.take(do.Send), pool.progress()[:2]) == ([], (7, 7))


@pytest.mark.parametrize("ends", ["fail_calls", "close", "drain"])
def test_calls_that_come_after_the_end_raise_the_first_error(ends: str) -> None:
    pool = Pool()
    getattr(pool.dispatcher, ends)(PoolClosed("first"))
    if ends != "drain":
        pool.dispatcher.fail_calls(PoolClosed("second"))
    assert pool.submit(entry("a"), entry("b")) == []
    assert {call_id: str(error) for call_id, error in pool.errors().items()} == {"a": "first", "b": "first"}


def test_calls_for_an_abandoned_node_raise() -> None:
    pool = Pool(workers=["0-0"])
    pool.submit(entry("pinned", worker="1-0"), entry("waits", worker="0-0"))
    pool.dispatcher.fail_calls(NodeLost("not replaced"), 1)
    assert {call_id: str(error) for call_id, error in pool.errors().items()} == {"pinned": "not replaced"}


def test_a_pool_that_drains_begins_nothing() -> None:
    """Calls that wait, come back or are being uploaded raise; calls in flight may end. Later it begins calls again."""
    pool = Pool()
    calls = entry("out", worker="0-0"), entry("back", worker="0-0"), entry("waits", worker="7-0")
    pool.submit(*calls, entry("uploading", arguments=LARGE, worker="1-0"))
    pool.dispatcher.drain(PoolClosed("draining"))
    assert set(pool.errors()) == {"uploading", "waits"}
    pool.report(value("out"), value("back", ending=OutcomeKind.RETURNED))
    assert (list(pool.errors()), pool.finished()) == (["back"], ["out"])
    pool.dispatcher.drain(None)
    assert len(pool.submit(entry("next"))) == 1


# ── workers ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_held_worker_occupies_no_free_slot() -> None:
    """Its call is in flight, and the other worker's slot is free. A call that is bound to it waits for its successor."""
    pool = Pool()
    assert len(pool.submit(entry("a"), entry("b"))) == 2
    pool.news(WorkerHeld(ADDRESSES["1-0"], 1))
    pool.report(value("a"))
    assert len(pool.submit(entry("c"), entry("bound", worker="1-0"))) == 1
    pool.news(WorkerLeft("1-0", ADDRESSES["1-0"]))
    pool.news(WorkerJoined("1-0", "tls://new"))
    assert [action.address for action in pool.take(do.Send)] == ["tls://new"]


def test_the_answer_to_a_connection_says_which_workers_are_held() -> None:
    """News of that were lost with the earlier connection."""
    pool = Pool(workers=["0-0"])
    pool.workers = {"0-0": HELD}
    pool.connect()
    assert pool.submit(entry("a")) == []
    pool.workers = {"0-0": "running"}
    pool.connect()
    assert len(pool.take(do.Send)) == 1


def test_a_late_leave_does_not_remove_the_successor() -> None:
    pool = Pool()
    pool.news(WorkerJoined("1-0", "tls://new"))
    pool.news(WorkerLeft("1-0", ADDRESSES["1-0"]))
    assert (pool.dispatcher.members.workers["1-0"], pool.take(do.Left)) == ("tls://new", [])


def test_messages_of_an_earlier_connection_do_not_count() -> None:
    pool = Pool()
    (sent,) = pool.submit(entry("a"))
    first, dispatcher = pool.epoch, pool.dispatcher
    pool.connect(tasks={sent.key: "processing"})
    heard = dispatcher.heard
    dispatcher.task_ended(first, sent.number, is_finished=False, reason="gone")
    dispatcher.report(first, Report(0, machine_id(0), (value("a"),)), 0.0)
    dispatcher.pool_news(first, WorkerLeft("1-0", ADDRESSES["1-0"]), 0.0)
    assert (pool.errors(), pool.finished(), dispatcher.heard) == ({}, [], heard)
    assert "1-0" in dispatcher.members.workers
    pool.report(value("a"))
    assert pool.finished() == ["a"]


# ── items of streams ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_streaming_call_is_alone_in_its_batch() -> None:
    """Also among calls that are known to be short."""
    pool = Pool(workers=["0-0"])
    for name in "123":
        pool.submit(entry(name))
        pool.report(value(name)._replace(seconds=0.0001))
    calls = [entry(str(number)).call._replace(ahead=4 * (number % 3 == 0)) for number in range(12)]
    sent = pool.submit(*(Entry(call, SMALL) for call in calls))
    while pool.dispatcher.entries:
        for call_id in list(pool.dispatcher.entries):
            pool.report(Outcome(call_id, OutcomeKind.RESULT, Parcel(b"x"), seconds=0.0001))
        sent += pool.take(do.Send)
    streams = [action.batch.calls for action in sent if any(call.ahead for call in action.batch.calls)]
    assert [len(calls) for calls in streams] == [1] * 4


def test_a_second_copy_of_an_item_does_not_count() -> None:
    pool = Pool()
    pool.submit(replace(STREAMING, items=0))
    for numbers in ((0, 1), (1, 2)):
        pool.report(*(Item("a", number, Parcel(b"item")) for number in numbers))
    assert [action.number for action in pool.take(do.DeliverItem)] == [0, 1, 2]


def test_a_report_that_cannot_be_read_ends_no_call() -> None:
    """It is from no worker of this release: whoever has the pool's certificate could end all calls by one. It has a
    number, as all messages of the topic.
    """
    pool = Pool()
    pool.submit(replace(STREAMING, items=0), entry("b"))
    heard = pool.dispatcher.heard
    pool.dispatcher.report(pool.epoch, None, 0.0)
    assert pool.dispatcher.heard == heard + 1
    pool.report(Item("a", 0, Parcel(b"item")), value("b"))
    assert (pool.errors(), [action.number for action in pool.take(do.DeliverItem)]) == ({}, [0])


# ── fetches ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_fetch_is_repeated_until_its_deadline() -> None:
    """Then the outcome is removed from the node."""
    pool = Pool()
    pool.submit(entry("a"))
    pool.report(value("a", RESULT))
    for now, is_reachable, fetches in ((1.0, False, 0), (FETCH_SECONDS, True, 1), (FETCH_SECONDS + 1, True, 0)):
        pool.take(do.Fetch)
        pool.dispatcher.not_fetched("a", RESULT, OSError("cut"), is_cut=True)
        pool.tick(now, is_reachable=is_reachable)
        assert len(pool.take(do.Fetch)) == fetches
    assert (list(pool.errors()), pool.removed()) == (["a"], ["x"])


def test_a_late_message_about_an_earlier_fetch_does_not_count() -> None:
    """The result was lost, and the call has run again."""
    pool, again = Pool(1, workers=["0-0"]), f"/dev/shm/{machine_id(0)}/y"
    pool.submit(entry("a"))
    pool.report(value("a", RESULT))
    pool.dispatcher.not_fetched("a", RESULT, OSError("gone"), is_cut=False)
    assert len(pool.take(do.Send)) == 1
    pool.report(value("a", again))
    pool.dispatcher.not_fetched("a", RESULT, OSError("late"), is_cut=False)
    assert pool.errors() == {}
    pool.dispatcher.fetched("a", Parcel(b"value"), again)
    assert pool.finished() == ["a"]


@pytest.mark.parametrize("arrives", [True, False])
def test_a_fetch_under_way_outlives_a_pool_that_is_given_up(arrives: bool) -> None:
    pool = Pool()
    pool.submit(entry("a"))
    pool.report(value("a", RESULT))
    assert pool.dispatcher.fetches_by_instance[machine_id(0)] == 1, "the pool is not idle"
    pool.dispatcher.fail_calls(NodeLost("no head"))
    assert pool.errors() == {}
    if arrives:
        pool.dispatcher.fetched("a", Parcel(b"value"), RESULT)
    else:
        pool.dispatcher.not_fetched("a", RESULT, OSError("cut"), is_cut=True)
    ended = [(end.call_id, end.node, end.instance_id, end.outcome.parcel) for end in pool.take(do.Finish)]
    assert ended == ([("a", 0, machine_id(0), Parcel(b"value"))] if arrives else [])
    assert list(pool.errors()) == ([] if arrives else ["a"])


# ── events ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("is_gathered", [False, True])
def test_what_a_call_ran_is_metered_once(is_gathered: bool) -> None:
    """By its report, which may be repeated, or by the result of its task. A call that is handed back did not run."""
    pool = Pool(workers=["0-0"])
    (sent,) = pool.submit(entry("a"))
    outcomes = {"a": value("a")}
    for number in (2, 1, 2):
        if is_gathered:
            pool.dispatcher.task_ended(pool.epoch, sent.number, is_finished=True, reason="")
            pool.dispatcher.gathered(pool.epoch, sent.number, outcomes, 0, machine_id(0), 0.0)
        else:
            pool.report(value("a"), origin=f"tls://zero/{sent.key}", number=number)
    assert pool.take(do.MeterCalls) == [do.MeterCalls(machine_id(0), {"": 1.0})]
    (sent,) = pool.submit(entry("b"))
    outcomes = {"b": Outcome("b", OutcomeKind.RETURNED)}
    pool.dispatcher.task_ended(pool.epoch, sent.number, is_finished=True, reason="")
    pool.dispatcher.gathered(pool.epoch, sent.number, outcomes, 0, machine_id(0), 0.0)
    assert (pool.take(do.MeterCalls), len(pool.take(do.Send)), pool.finished()) == ([], 1, ["a"])


def test_all_calls_are_counted_once() -> None:
    pool = Pool(workers=["0-0"])
    pool.submit(*map(entry, ["done", "failed", "cancelled", "late"]))
    pool.report(value("done"))
    pool.report(value("failed", ending=OutcomeKind.ERROR))
    for call_id in ("cancelled", "late"):
        pool.dispatcher.cancel(call_id)
    pool.report(value("late", ending=OutcomeKind.CANCELLED))
    pool.dispatcher.cancel("late")
    assert pool.progress() == (4, 2, 1, 2)


def test_the_progress_is_emitted_ten_times_a_second_and_at_the_end() -> None:
    """Only if a count has changed."""
    pool, times = Pool(), 20.0 + PROGRESS_SECONDS * 2
    pool.submit(entry("a"), entry("b"), entry("c"))
    pool.take(do.EmitEvent)
    for now, cancels, emitted in (
        (20.0, "a", [1]),
        (20.0, "", []),
        (20.05, "b", []),
        (times, "", [2]),
        (times, "c", [3]),
    ):
        if cancels:
            pool.dispatcher.cancel(cancels)
        pool.go_on(now)
        assert [event.cancelled for event in pool.events(CallProgress)] == emitted


def test_each_line_and_each_report_of_metrics_is_an_event() -> None:
    report = Report(2, "i-2", ())
    output = Output("call", "stderr", ("first", "second"), 12.5, 30)
    assert list(call_events(report, output)) == [
        LogLine(2, "i-2", line, 12.5, "call", "stderr", 30) for line in ("first", "second")
    ]
    assert [event.place for event in call_events(report, output, 1)] == [1, 1]
    metrics = ReportedMetrics("call", (10, {"loss": 0.5}), 12.5)
    assert list(call_events(report, metrics)) == [CallReported(2, "i-2", "call", 10, {"loss": 0.5}, 12.5)]
