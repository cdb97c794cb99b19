"""The scheduler's records of detached calls, batches without a graph, and held nodes, in a real scheduler."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import dask
import distributed
import pytest

import skyward_core as sky
from skyward_core.wire.messages import Outcome, OutcomeKind, Output, Report
from skyward_core.wire.protocol import (
    IS_NAMED,
    NAME,
    RESULT_TTL,
    RETRIES,
    RUN_BATCH,
    RUN_ID,
    TASK_FAILED,
    detached_key,
    resume,
)
from skyward_core.wire.reports import encode_report
from skyward_core.worker.detached_calls import LineTopic
from skyward_core.worker.scheduler import NodeHolding
from tests.system.worker.test_calls import Head, note_and_wait, runs_noted, with_head


def start(client: Any, call_id: str, run_id: str, **annotations: Any) -> Any:
    return client.scheduler.skyward_start_detached(
        call_id=call_id, batch=b"", annotations={RUN_ID: run_id, IS_NAMED: True, **annotations}
    )


def message(*lines: str) -> bytes:
    return encode_report(Report(0, "i", (Output("c", "stdout", lines, 0.0),)))


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
            async with head.new_worker(f"{run}-0") as worker:
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


CALLS = 40
KEY = "skyward-1-0123"


@sky.compute
def square(number: int) -> int:
    return number * number


# ── batches ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def send_batch(client: Any, key: str, annotations: dict[str, Any], batch: bytes = b"sealed") -> Any:
    """Send a batch as the pool does; return its future."""
    future = distributed.Future(key, client)
    client._send_to_scheduler({"op": RUN_BATCH, "key": key, "batch": batch, "annotations": annotations})
    return future


def test_a_batch_that_cannot_become_a_task_fails_alone() -> None:
    """Its client gets the reason as a text; its stream goes on, and the scheduler keeps nothing of it.

    Looks inside: what the scheduler keeps shows nowhere else.
    """

    async def test(head: Head) -> None:
        client: Any = await head.client()
        reasons = dict[str, str]()
        client._stream_handlers[TASK_FAILED] = lambda key, reason: reasons.update({key: reason})
        connections = head.scheduler._client_connections_added_total
        bad = send_batch(client, "skyward-bad", {"workers": [1.5]})
        await head.until(lambda: bool(reasons), "the reason")
        assert list(reasons) == ["skyward-bad"] and "string" in reasons["skyward-bad"]
        good = send_batch(client, KEY, {})
        await head.until(lambda: KEY in head.scheduler.tasks, "the next batch")
        assert head.scheduler._client_connections_added_total == connections
        bad.release()
        good.release()
        await head.until(lambda: not head.scheduler.tasks, "both to be forgotten")
        assert not head.calls._keys

    with_head(test)


def test_garbage_on_its_topic_does_not_drop_the_outcome_of_a_detached_call() -> None:
    """Before its end what cannot be read is not kept; after it, nothing. Whoever has the pool's certificate can publish
    there, and a topic keeps the newest messages.
    """

    async def test(head: Head) -> None:
        client = await head.client()
        topic = detached_key("d")
        client.submit(int, 5, key=topic, pure=False)
        await head.until(lambda: topic in head.scheduler.tasks, "the call")
        head.scheduler.log_event(topic, b"garbage")
        said = encode_report(Report(0, "i", (Output("d", "stdout", ("a line",), 0.0),)))
        head.scheduler.log_event(topic, said)
        outcome = encode_report(Report(0, "i", (Outcome("d", OutcomeKind.RESULT),)))
        head.scheduler.log_event(topic, outcome)
        await head.worker()
        await head.until(lambda: head.scheduler.tasks[topic].state == "memory", "its end")
        for late in (b"garbage", said):
            head.scheduler.log_event(topic, late)
        known = await client.scheduler.skyward_call(call_id="d")
        assert (known["state"], known["outcome"], known["lines_in_all"]) == ("ended", "result", 1)
        assert list(known["messages"]) == [said, outcome]

    with_head(test)


def test_a_batch_that_its_worker_cannot_begin_fails_with_the_reason_as_a_text() -> None:
    """Dask's own message has a pickle of the error, which our clients do not load. A client that comes back gets the
    reason again.
    """

    async def test(head: Head) -> None:
        client: Any = await head.client()
        reasons = list[tuple[str, str]]()
        client._stream_handlers[TASK_FAILED] = lambda key, reason: reasons.append((key, reason))
        await head.worker()
        failed = client.submit(int, "no number", key="skyward-5", pure=False)
        await head.until(lambda: bool(reasons), "the reason")
        client._send_to_scheduler(resume(client.id, "skyward-topic", 0, 1))
        await head.until(lambda: len(reasons) == 2, "the reason again")
        assert {key for key, _ in reasons} == {"skyward-5"}
        assert all(reason.startswith("ValueError(") and "no number" in reason for _, reason in reasons)
        failed.release()

    with_head(test)


@asynccontextmanager
async def cluster() -> AsyncGenerator[tuple[Any, NodeHolding, Any]]:
    """A scheduler with two workers, "0-0" and "1-0"; its holding, and a client."""
    holding = NodeHolding("skyward-pool")
    async with (
        distributed.Scheduler(host="127.0.0.1", port=0, dashboard=False) as scheduler,
        distributed.Worker(scheduler.address, name="0-0", nthreads=1, host="127.0.0.1", dashboard=False),
        distributed.Worker(scheduler.address, name="1-0", nthreads=1, host="127.0.0.1", dashboard=False),
        distributed.Client(scheduler.address, asynchronous=True, set_as_default=False) as client,
    ):
        await holding.start(scheduler)
        yield scheduler, holding, client


async def sent_to(client: Any, scheduler: Any, name: str, key: str, state: str) -> Any:
    """Send a task that only this worker may run; it waits for an event of its key. Return its future."""
    future = client.submit(_wait, key, key=key, workers=[name], pure=False)
    while (task := scheduler.tasks.get(key)) is None or task.state != state:  # noqa: ASYNC110 - Dask sends no event
        await asyncio.sleep(0.005)
    return future


async def _wait(key: str) -> str:
    await distributed.Event(key)
    return key


def test_a_task_that_comes_for_a_held_node_alone_is_let_in_and_counts() -> None:
    """It was on its way when the node was held: a large value went to that node first. All other tasks stay out."""

    async def main() -> None:
        async with cluster() as (scheduler, holding, client):
            assert [holding.hold(rank) for rank in (0, 1)] == [0, 0]
            bound = await sent_to(client, scheduler, "1-0", "bound", "no-worker")
            other = await sent_to(client, scheduler, "0-0", "other", "no-worker")
            assert [holding.hold(1) for _ in range(2)] == [1, 1]
            assert {worker.status for worker in scheduler.workers.values()} == {distributed.Status.paused}
            assert scheduler.tasks["other"].state == "no-worker"
            await distributed.Event("bound", client=client).set()
            assert await bound == "bound"
            assert holding.hold(1) == 0
            holding.free(0)
            await distributed.Event("other", client=client).set()
            assert await other == "other"

    asyncio.run(main())
