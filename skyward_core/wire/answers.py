"""The answers of a pool's scheduler as checked values, by the operation that was asked (`protocol.py`).

A lie of one worker, client or call inside an answer is left out and noted, and the rest is used. `note` gets who has
sent it, and the error. All functions raise Unreadable for an answer that is none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from skyward_core.wire.checks import (
    MOST_TEXT,
    Unreadable,
    count,
    fields,
    items,
    mapping,
    maybe,
    refuse,
    seconds,
    text,
    texts,
    texts_by_name,
    truth,
    worker_name,
)
from skyward_core.wire.messages import OutcomeKind
from skyward_core.wire.protocol import ENDS, BusyTime

type Note = Callable[[str, Unreadable], object]

MOST_PID = 1 << 32
LARGEST_PAGE = 1 << 25
PAGE_STATUSES = (200, 404, 500)
STATES = ENDS | {"waiting", "running", "forgotten"}
"""Of a detached call."""
STAGES = frozenset({"waiting", "out", "fetching"})
"""Of a client's call."""
_OUTCOMES = frozenset({"", *map(str, OutcomeKind)})


def _each[T](content: object, read: Callable[[Any], T], note: Note, sender: Callable[[Any], str]) -> Iterator[T]:
    """Yield the items of a list that can be read."""
    for item in items("a list", content):
        try:
            yield read(item)
        except Unreadable as error:
            note(sender(item), error)


def _one_of(what: str, value: object, allowed: frozenset[str]) -> str:
    return value if type(value) is str and value in allowed else refuse(what, value)


# ── detached calls ───────────────────────────────────────────────────────────────────────────────────────────────────


def call_record(answer: object) -> dict[str, Any]:
    """Return the record of a detached call (`worker/detached_calls.py`), with the parts that it has: `is_new`, and
    the messages, which are still bytes (`reports.decode_report`).
    """
    known = mapping("the record of a call", answer)
    record: dict[str, Any] = {
        "call_id": text("the id of a call", known.get("call_id")),
        "name": text("the function of a call", known.get("name")),
        "owner": text("the owner of a call", known.get("owner")),
        "work": dict(texts_by_name("the work of a call", known.get("work"))),
        "state": _one_of("the state of a call", known.get("state"), STATES),
        "worker": "" if known.get("worker") == "" else worker_name("the worker of a call", known.get("worker")),
        "runs": count("the runs of a call", known.get("runs")),
        "attempts": [_attempt(attempt) for attempt in items("the attempts of a call", known.get("attempts"))],
        "submitted_at": seconds("the start of a call", known.get("submitted_at")),
        "ended_at": maybe(seconds, "the end of a call", known.get("ended_at")),
        "seconds": maybe(seconds, "the seconds of a call", known.get("seconds")),
        "outcome": _one_of("the outcome of a call", known.get("outcome"), _OUTCOMES),
        "reason": text("the reason of a lost call", known.get("reason"), MOST_TEXT),
        "dask_error": text("the error of a lost call", known.get("dask_error"), MOST_TEXT),
        "messages_in_all": count("the messages of a call", known.get("messages_in_all")),
        "lines_in_all": count("the lines of a call", known.get("lines_in_all")),
        "has_result": truth("whether a call has a result", known.get("has_result")),
        "is_forgotten": truth("whether a call is forgotten", known.get("is_forgotten")),
    }
    if "is_new" in known:
        record["is_new"] = truth("whether a call is new", known["is_new"])
    if "messages" in known:
        messages = items("the messages of a call", known["messages"])
        record["messages"] = list(messages)
        record["number"] = count("the number of a message", known.get("number"))
        record["first_line"] = count("the number of a line", known.get("first_line"))
    return record


def _attempt(attempt: object) -> tuple[str, str, float, float | None, str]:
    worker, instance_id, began_at, ended_at, why_lost = fields("an attempt of a call", attempt, 5)
    return (
        worker_name("the worker of an attempt", worker),
        text("the machine of an attempt", instance_id),
        seconds("the begin of an attempt", began_at),
        maybe(seconds, "the end of an attempt", ended_at),
        text("the loss of an attempt", why_lost, MOST_TEXT),
    )


def call_records(answer: object, note: Note) -> list[dict[str, Any]]:
    """Return the records of several detached calls."""
    return list(_each(answer, call_record, note, lambda _: "the scheduler"))


# ── which calls a pool has ───────────────────────────────────────────────────────────────────────────────────────────


def call_lists(answer: object, note: Note) -> dict[str, Any]:
    """Return the answer to LIST_CALLS in its own form. A member whose part is a lie counts as one that is silent."""
    known = mapping("the list of calls", answer)
    return {
        "clients": [_client(client, note) for client in items("the clients of a pool", known.get("clients"))],
        "workers": list(
            _each(known.get("workers"), lambda worker: _worker(worker, note), note, lambda _: "the scheduler")
        ),
        "others": list(texts("other workers", known.get("others"))),
        "detached": call_records(known.get("detached"), note),
        "now": seconds("the time of the scheduler", known.get("now")),
    }


def _client(client: object, note: Note) -> dict[str, Any]:
    try:
        known = mapping("a client", client)
        who = {
            "topic": text("the topic of a client", known.get("topic", "")),
            "user": text("the user of a client", known.get("user", "")),
            "pid": maybe(_pid, "the process of a client", known.get("pid")),
            "work": dict(texts_by_name("the work of a client", known.get("work", {}))),
            "work_text": text("the work of a client", known.get("work_text", "")),
        }
    except Unreadable as error:
        note("a client", error)
        return {"calls": None}
    try:
        return {**who, "calls": None if known.get("calls") is None else _calls(known["calls"])}
    except Unreadable as error:
        note(f"the client {who['user']}, process {who['pid']},", error)
        return {**who, "calls": None}


def _pid(what: str, value: object) -> int:
    return count(what, value, MOST_PID)


def _calls(content: object) -> dict[str, Any]:
    known = mapping("the calls of a client", content)
    listed = [_call(call) for call in items("the calls of a client", known.get("listed"))]
    return {"listed": listed, "waiting": count("the waiting calls of a client", known.get("waiting"))}


def _call(call: object) -> tuple[str, str, str, str | None, float]:
    call_id, function, stage, where, since = fields("a call of a client", call, 5)
    return (
        text("the id of a call", call_id),
        text("the function of a call", function),
        _one_of("the state of a call", stage, STAGES),
        maybe(text, "the place of a call", where),
        seconds("the seconds of a call", since),
    )


def _worker(worker: object, note: Note) -> dict[str, Any]:
    known = mapping("a worker", worker)
    name = worker_name("the name of a worker", known.get("name"))
    try:
        slots = None if known.get("slots") is None else [_slot(slot) for slot in items("the slots", known["slots"])]
    except Unreadable as error:
        note(f"worker {name}", error)
        slots = None
    return {"name": name, "slots": slots}


def _slot(slot: object) -> tuple[int, int, str, str, float, str | None]:
    number, pid, topic, call_id, since, stacks = fields("a slot", slot, 6)
    return (
        count("the number of a slot", number),
        _pid("the process of a slot", pid),
        text("the topic of a slot", topic),
        text("the call of a slot", call_id),
        seconds("the seconds of a slot", since),
        None if stacks is None else text("the stacks of a slot", stacks, MOST_TEXT),
    )


def worker_stacks(answer: object, note: Note) -> list[tuple[str, list[tuple[int, float | None, str]] | None]]:
    """Return for each worker its name, and process, busy seconds (None: idle) and stacks of each slot; None for a
    worker that has not answered.
    """

    def read(worker: object) -> tuple[str, list[tuple[int, float | None, str]] | None]:
        name, slots = fields("the stacks of a worker", worker, 2)
        known = worker_name("the name of a worker", name)
        try:
            return known, None if slots is None else [_stack(slot) for slot in items("the slots", slots)]
        except Unreadable as error:
            note(f"worker {known}", error)
            return known, None

    return list(_each(answer, read, note, lambda _: "the scheduler"))


def _stack(slot: object) -> tuple[int, float | None, str]:
    pid, busy_seconds, stacks = fields("the stacks of a slot", slot, 3)
    return (
        _pid("the process of a slot", pid),
        maybe(seconds, "the seconds of a slot", busy_seconds),
        text("the stacks of a slot", stacks, MOST_TEXT),
    )


# ── how busy a pool is ───────────────────────────────────────────────────────────────────────────────────────────────


def busy_times(answer: object, note: Note) -> list[BusyTime]:
    """Return how long the slots of each worker were busy."""
    return list(_each(answer, _busy_time, note, lambda _: "a worker"))


def _busy_time(content: object) -> BusyTime:
    instance_id, process, busy_seconds, by_use = fields("the busy time of a worker", content, 4)
    return (
        text("the machine of a worker", instance_id),
        text("the process of a worker", process),
        seconds("the busy time of a worker", busy_seconds),
        _seconds_by_name("the busy time of uses", by_use),
    )


def _seconds_by_name(what: str, content: object) -> dict[str, float]:
    return {use: seconds(what, its_seconds) for use, its_seconds in mapping(what, content).items()}


def ended_client(answer: object, note: Note) -> tuple[bool, list[tuple[str, dict[str, float]]]]:
    """Return the answer to END_CLIENT: whether the calls hold no slot, and their seconds by machine and use."""
    is_free, spent = fields("the end of a client", answer, 2)

    def read(content: object) -> tuple[str, dict[str, float]]:
        instance_id, by_use = fields("the seconds of a client", content, 2)
        return text("a machine", instance_id), _seconds_by_name("the seconds of uses", by_use)

    return truth("whether a client has ended", is_free), list(_each(spent, read, note, lambda _: "a worker"))


def batches_by_worker(answer: object) -> dict[str, tuple[str, ...]]:
    """Return the keys of the batches of each worker, by its name."""
    return {name: texts("the batches of a worker", keys) for name, keys in mapping("the load", answer).items()}


def workers_of_dask(answer: object) -> dict[str, tuple[str, int]]:
    """Return name and slots of each worker by its address, from what Dask's `scheduler_info` has."""
    workers = mapping("the workers of a pool", mapping("a scheduler", answer).get("workers"))
    return {address: _dask_worker(worker) for address, worker in workers.items()}


def _dask_worker(worker: object) -> tuple[str, int]:
    known = mapping("a worker", worker)
    return str(known.get("name"))[:64], count("the slots of a worker", known.get("nthreads"))


def tasks_by_address(answer: object) -> dict[str, int]:
    """Return how many tasks each worker has, from what Dask's `processing` has."""
    return {address: len(items("the tasks", tasks)) for address, tasks in mapping("the tasks", answer).items()}


def whole_number(answer: object) -> int:
    """Return an answer that is a count."""
    return count("a number", answer)


def yes_or_no(answer: object) -> bool:
    """Return an answer that is a bool."""
    return truth("an answer", answer)


class DaskPage(NamedTuple):
    """A page of Dask's scheduler: its HTTP status, and HTML that the node has written."""

    status: int
    text: str


def dask_page(answer: object) -> DaskPage:
    """Return the answer to DASK_PAGE. A status that such a page cannot have counts as 502 (RFC 9110)."""
    known = mapping("a page", answer)
    status = count("the status of a page", known.get("status"), 999)
    return DaskPage(status if status in PAGE_STATUSES else 502, text("a page", known.get("text"), LARGEST_PAGE))
