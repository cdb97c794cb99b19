"""Answers of a pool's scheduler: a lie of one member hides no other, and an answer that is none is refused."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyward_core.wire import answers
from skyward_core.wire.checks import Unreadable
from tests.unit.wire.test_reports import anything, refused

RECORD: dict[str, Any] = {
    "call_id": "c",
    "name": "train",
    "owner": "",
    "work": {"run": "7"},
    "state": "running",
    "worker": "0-0",
    "runs": 1,
    "attempts": [["0-0", "i", 1.0, None, ""]],
    "submitted_at": 1.0,
    "ended_at": None,
    "seconds": None,
    "outcome": "",
    "reason": "",
    "dask_error": "",
    "messages_in_all": 1,
    "lines_in_all": 2,
    "has_result": False,
    "is_forgotten": False,
    "number": 0,
    "first_line": 0,
    "messages": [b"x"],
}
CALLS = {"listed": [["c", "train", "out", None, 1.0]], "waiting": 0}
LISTS: dict[str, Any] = {
    "clients": [{"topic": "t", "user": "ada", "pid": 7, "work": {}, "work_text": "", "calls": CALLS}],
    "workers": [{"name": "0-0", "slots": [[0, 9, "t", "c", 1.0, None]]}, {"name": "1-0", "slots": None}],
    "others": ["2-0"],
    "detached": [RECORD],
    "now": 5.0,
}


class Notes:
    """Who has lied."""

    def __init__(self) -> None:
        self.senders: list[str] = []

    def __call__(self, sender: str, error: Unreadable) -> None:
        self.senders.append(sender)


def test_an_honest_answer_is_what_it_was() -> None:
    notes = Notes()
    record = answers.call_record(RECORD)
    assert {**record, "attempts": [list(one) for one in record["attempts"]]} == RECORD
    lists = answers.call_lists(LISTS, notes)
    assert lists["workers"] == [{"name": "0-0", "slots": [(0, 9, "t", "c", 1.0, None)]}, {"name": "1-0", "slots": None}]
    assert lists["clients"][0]["calls"]["listed"] == [("c", "train", "out", None, 1.0)]
    assert (len(lists["detached"]), lists["others"], lists["now"]) == (1, ["2-0"], 5.0)
    assert answers.busy_times([("i", "0-1", 2.0, {"u": 1.0})], notes) == [("i", "0-1", 2.0, {"u": 1.0})]
    assert answers.ended_client((True, [("i", {"u": 1.0})]), notes) == (True, [("i", {"u": 1.0})])
    assert answers.batches_by_worker({"0-0": ["k"]}) == {"0-0": ("k",)}
    assert answers.workers_of_dask({"workers": {"a": {"name": "0-0", "nthreads": 2, "x": 1}}}) == {"a": ("0-0", 2)}
    assert answers.tasks_by_address({"a": ["k", "l"]}) == {"a": 2}
    assert notes.senders == []


def test_a_member_that_lies_is_silent_and_the_others_are_shown() -> None:
    """It counts as one that has not answered: what it runs is unknown."""
    notes = Notes()
    workers = [{"name": "0-0", "slots": [[0, 9, "t", "c", float("nan"), None]]}, *LISTS["workers"], {"name": "x"}]
    clients = [{**LISTS["clients"][0], "calls": {"listed": 7}}, {"user": 5}, *LISTS["clients"]]
    lists = answers.call_lists({**LISTS, "workers": workers, "clients": clients, "detached": [{}, RECORD]}, notes)
    assert [worker["slots"] is None for worker in lists["workers"]] == [True, False, True]
    assert [client["calls"] is None for client in lists["clients"]] == [True, True, False]
    assert len(lists["detached"]) == 1
    assert sorted(notes.senders) == [
        "a client",
        "the client ada, process 7,",
        "the scheduler",
        "the scheduler",
        "worker 0-0",
    ]
    stacks = answers.worker_stacks([("0-0", [[1, None, "text"]]), ("1-0", [[1, "busy", "text"]]), ("2-0", None)], notes)
    assert stacks == [("0-0", [(1, None, "text")]), ("1-0", None), ("2-0", None)]
    assert notes.senders[-1] == "worker 1-0"
    times = [("i", "p", 1.0, {}), ("i", "p", -1.0, {}), ("i", "p", float("inf"), {}), 7, ("i", "p", 1.0, {"u": "x"})]
    assert answers.busy_times(times, notes) == [("i", "p", 1.0, {})]


READERS: list[Callable[[Any], object]] = [
    answers.call_record,
    lambda answer: answers.call_records(answer, Notes()),
    lambda answer: answers.call_lists(answer, Notes()),
    lambda answer: answers.worker_stacks(answer, Notes()),
    lambda answer: answers.busy_times(answer, Notes()),
    lambda answer: answers.ended_client(answer, Notes()),
    answers.batches_by_worker,
    answers.workers_of_dask,
    answers.tasks_by_address,
    answers.whole_number,
    answers.yes_or_no,
    answers.dask_page,
]


@given(anything)
def test_an_answer_that_is_none_is_refused(answer: Any) -> None:
    for read in READERS:
        with refused():
            read(answer)


@given(st.sampled_from(sorted(RECORD)), anything)
def test_a_record_with_a_changed_field_is_refused_or_has_its_type(field: str, value: Any) -> None:
    with refused():
        record = answers.call_record({**RECORD, field: value})
        assert record[field] == value or isinstance(value, list | int)


@pytest.mark.parametrize("field", sorted(RECORD.keys() - {"messages", "number", "first_line", "ended_at", "seconds"}))
def test_a_record_without_a_field_is_refused(field: str) -> None:
    with pytest.raises(Unreadable):
        answers.call_record({name: value for name, value in RECORD.items() if name != field})


@given(st.sampled_from(sorted(LISTS)), anything)
def test_a_list_of_calls_with_a_changed_part_is_refused_or_shown(field: str, value: Any) -> None:
    from skyward_core.live.observer import call_list

    with refused():
        call_list(answers.call_lists({**LISTS, field: value}, Notes()))
