"""Calls that wait for slots which other clients hold."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

import skyward_core as sky
from skyward_core.engine.connection import SchedulerConnection
from skyward_core.engine.slot_use import SlotHolder, SlotWaits, holder_of
from skyward_core.events.narrator import Narrator
from skyward_core.wire.protocol import detached_key


def asked_at(waits: SlotWaits, seconds: range, *, ended_at: float = 0.0, own_seconds: float = 0.0) -> list[int]:
    """Return when a client asks whose calls make no progress."""
    return [second for second in seconds if waits.is_due(float(second), 2, ended_at, own_seconds)]


def test_a_client_whose_calls_make_no_progress_asks_after_5_seconds_and_then_rarely():
    waits = SlotWaits()
    assert asked_at(waits, range(2000)) == [5, 65, 185, 425, 905, 1505]
    assert waits.answered(1505.0, waits=True) == 1505.0


def test_a_client_without_calls_asks_nothing():
    waits = SlotWaits()
    assert not any(waits.is_due(float(second), 0, 0.0, 0.0) for second in range(100))
    assert asked_at(waits, range(100, 110)) == [105]


def test_a_client_whose_calls_run_asks_nothing():
    """Also if their seconds come late: once it was seen that one runs."""
    waits = SlotWaits()
    assert not any(waits.is_due(float(second), 1, 0.0, float(second // 4)) for second in range(100))
    waits = SlotWaits()
    asked = [second for second in range(60) if waits.is_due(float(second), 1, 0.0, float(second // 8))]
    assert asked[:1] == [5]
    waits.answered(5.0, waits=False)
    assert not any(waits.is_due(float(second), 1, 0.0, float(second // 8)) for second in range(6, 64))


def test_the_next_call_asks_after_5_seconds_again():
    waits = SlotWaits()
    asked_at(waits, range(10))
    waits.answered(5.0, waits=False)
    assert asked_at(waits, range(10, 20), ended_at=9.5) == [15]


def answer(*slots: tuple[str, str, float]) -> dict[str, Any]:
    """What the scheduler answers: one worker with calls of these topics, ids and seconds."""
    return {
        "workers": [
            {"name": "0-0", "slots": [(n, 100 + n, *slot, None) for n, slot in enumerate(slots)]},
            {"name": "1-0", "slots": None},
        ],
        "clients": [
            {"topic": "skyward-mine", "user": "me@here", "pid": 1, "work": {}, "work_text": "", "calls": None},
            {"topic": "skyward-b", "user": "b@there", "pid": 7, "work": {}, "work_text": "airflow:etl/r-1/train"},
            {"topic": "skyward-c", "user": "c@there", "pid": 8, "work": {}, "work_text": ""},
            {"calls": None},
        ],
        "detached": [{"call_id": "nightly", "owner": "d@there", "name": "train", "state": "running"}],
    }


@pytest.mark.parametrize(
    ("slots", "holder"),
    [
        ([], None),
        ([("skyward-b", "1", 9.0), ("skyward-mine", "2", 1.0)], None),
        ([("skyward-b", "1", 62.0), ("skyward-c", "2", 9.0)], ("run airflow:etl/r-1/train (process 7 of b@there)", 62)),
        ([("skyward-c", "2", 9.0)], ("process 8 of c@there", 9)),
        ([(detached_key("nightly"), "2", 9.0)], ("the detached call nightly of d@there", 9)),
        ([("skyward-b", "1", 9.0), (detached_key("own"), "2", 1.0)], None),
        ([("skyward-gone", "2", 9.0)], ("a client that has gone", 9)),
    ],
)
def test_the_holder_of_a_slot_is_named_by_its_run_or_its_process(slots: Any, holder: Any):
    assert holder_of(answer(*slots), {"skyward-mine", detached_key("own")}) == (
        None if holder is None else SlotHolder(*holder)
    )


@pytest.mark.parametrize("known", [None, answer()])
def test_a_scheduler_that_knows_no_such_question_is_no_error(known: Any):
    """Dask answers None to an operation that is not there: a head of an earlier release."""
    heard: list[Any] = []

    async def list_calls() -> Any:
        return known

    connection = object.__new__(SchedulerConnection)
    connection.epoch = 1
    connection.client = cast("Any", SimpleNamespace(scheduler=SimpleNamespace(skyward_list_calls=list_calls)))
    inbox = cast("Any", SimpleNamespace(on_calls_listed=lambda _, found: heard.append(found)))
    asyncio.run(connection._list_calls(inbox))
    assert heard == ([] if known is None else [known])


@pytest.mark.parametrize(("calls", "words"), [(1, "a call waits"), (3, "3 calls wait")])
def test_it_is_told_in_words(calls: int, words: str):
    event = sky.CallsWaiting("gpu", calls, 5.2, "run nightly", 60.0)
    level, line = Narrator().tell(event) or (0, "")
    assert (level, line) == (20, f"{words} for a slot of pool gpu, held by run nightly for 1 min 0 s")
