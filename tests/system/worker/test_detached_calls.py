"""The scheduler's records of detached calls: ids, attempts, lines and what is left when a call is forgotten."""

import asyncio
import pickle
from pathlib import Path
from typing import Any

import dask
import distributed
import pytest

from skyward_core.worker.detached_calls import IS_NAMED, NAME, RESULT_TTL, RETRIES, RUN_ID, detached_key
from skyward_core.worker.topic import LineTopic
from skyward_core.worker.wire import Output, Report
from tests.system.worker.test_calls import Head, note_and_wait, runs_noted, with_head


def start(client: Any, call_id: str, run_id: str, **annotations: Any) -> Any:
    return client.scheduler.skyward_start_detached(
        call_id=call_id, batch=b"", annotations={RUN_ID: run_id, IS_NAMED: True, **annotations}
    )


def message(*lines: str) -> bytes:
    return pickle.dumps(Report(0, "i", (Output("c", "stdout", lines, 0.0),)))


def test_of_two_starts_with_one_id_one_makes_the_call() -> None:
    """Both come at the same moment. The starter whose answer was lost asks again and learns that the call is its own.

    Another function's name changes nothing.
    """

    async def test(head: Head) -> None:
        clients = [await head.client(), await head.client()]
        answers = await asyncio.gather(
            *(
                start(client, "dag/run:1", f"run{number}", **{NAME: f"f{number}"})
                for number, client in enumerate(clients)
            )
        )
        first = next(number for number, answer in enumerate(answers) if answer["is_new"])
        assert [answer["is_new"] for answer in answers] == [number == first for number in range(2)]
        assert {answer["name"] for answer in answers} == {f"f{first}"}
        assert list(head.scheduler.tasks) == [detached_key("dag/run:1")]
        assert (await start(clients[0], "dag/run:1", f"run{first}"))["is_new"] is True
        assert (await start(clients[1], "dag/run:1", "another"))["is_new"] is False
        assert len(head.scheduler.tasks) == 1

    with_head(test)


def test_a_chosen_id_stays_known_when_its_call_is_forgotten() -> None:
    """No second call of this id begins. The list of calls is without it, and nothing of its lines and task is kept.

    Looks inside: what the scheduler keeps shows nowhere else.
    """

    async def test(head: Head) -> None:
        client = await head.client()
        await start(client, "once", "r", **{NAME: "train"})
        await client.scheduler.skyward_cancel(call_id="once")
        for _ in range(2):
            assert await client.scheduler.skyward_forget(call_id="once")
        known = await client.scheduler.skyward_call(call_id="once")
        assert (known["state"], known["is_forgotten"], known["name"]) == ("cancelled", True, "train")
        assert (await start(client, "once", "r2"))["is_forgotten"]
        assert not await client.scheduler.skyward_calls()
        assert not head.scheduler.tasks
        assert not head.calls._topics
        await start(client, "other", "r3")
        await client.scheduler.skyward_forget(call_id="other")
        assert (await client.scheduler.skyward_call(call_id="other"))["state"] == "forgotten"
        assert not await client.scheduler.skyward_forget(call_id="unknown")

    with_head(test)


@pytest.mark.parametrize("is_named", [True, False])
def test_a_call_is_forgotten_when_its_time_is_over(*, is_named: bool, tmp_path: Path) -> None:
    """The time counts from its end. A chosen id stays known."""

    async def test(head: Head) -> None:
        client = await head.client()
        with dask.annotate(**{RESULT_TTL: 0.01, IS_NAMED: is_named}):
            client.submit(note_and_wait, str(tmp_path), key=detached_key("d"), pure=False)
        await head.worker()
        await head.until(lambda: runs_noted(tmp_path) == 1, "the call to run")
        assert not (await client.scheduler.skyward_call(call_id="d"))["is_forgotten"]
        (tmp_path / "go").touch()
        await head.until(lambda: not head.scheduler.tasks, "the result to be dropped")
        known = await client.scheduler.skyward_call(call_id="d")
        assert known is None if not is_named else (known["state"], known["is_forgotten"]) == ("ended", True)

    with_head(test)


def test_each_attempt_is_in_the_record(tmp_path: Path) -> None:
    """With the worker that had it, its times, and why it was lost."""

    async def test(head: Head) -> None:
        client = await head.client()
        with dask.annotate(**{RETRIES: 2}):
            client.submit(note_and_wait, str(tmp_path), key=detached_key("d"), pure=False)
        for run, stimulus in enumerate(("lost", "skyward-silent-1")):
            async with distributed.Worker(
                head.scheduler.address, name=f"{run}-0", nthreads=1, host="127.0.0.1", dashboard_address=":0"
            ) as worker:
                await head.until(lambda run=run: runs_noted(tmp_path) == run + 1, "the call to run")
                await head.scheduler.remove_worker(worker.address, stimulus_id=stimulus)
                (tmp_path / "go").touch()  # lets its thread end
                await worker.close()
            (tmp_path / "go").unlink()
        (tmp_path / "go").touch()
        await head.worker()
        await head.until(lambda: head.calls.detached.calls()[0]["state"] == "ended", "the call to end")
        known = await client.scheduler.skyward_call(call_id="d")
        workers, _, begun, ended, why = zip(*known["attempts"], strict=True)
        assert (workers[:2], len(workers), known["runs"]) == (("0-0", "1-0"), 3, 3)
        assert ["has left the pool" in why[0], "did not answer" in why[1], why[2]] == [True, True, ""]
        assert sorted([*begun, *ended]) == [time for pair in zip(begun, ended, strict=True) for time in pair]
        assert known["ended_at"] == ended[2]

    with_head(test)


def test_a_topic_knows_the_number_of_its_first_line() -> None:
    """Lines of dropped reports count, and an output with line ends is several lines."""
    topic = LineTopic(2 * len(message("a", "b")))
    for lines in (("a", "b"), ("c\nd",), ("e",), ()):
        topic.add(message(*lines))
    number, messages = topic.after(0)
    assert (topic.lines, topic.number) == (5, 4)
    assert topic.line_of(len(messages)) == 5 - sum({1: 2, 2: 2, 3: 1, 4: 0}[one] for one in range(number + 1, 5))
    assert [topic.line_of(count) for count in range(len(messages) + 1)][:2] == [5, 5]
