"""The scheduler's memory: messages that clients miss, calls without waiting clients, workers that do not answer."""

import asyncio
import contextlib
import os
import time
import uuid
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dask
import distributed
import pytest

from skyward_core.wire.protocol import RETRIES, RUN_BATCH, Resumed, detached_key
from skyward_core.worker.calls import CallMemory
from skyward_core.worker.node import DASK_CONFIG
from skyward_core.worker.scheduler import SILENCE_CHECK_SECONDS, SILENT_SECONDS, PoolScheduler, PromptMessages
from tests.worker.fake_scheduler import FOR_EVER, TOPIC
from tests.worker.following import Following

# ── a real scheduler ─────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Head:
    """A scheduler of this process with a worker, and its clients."""

    scheduler: Any
    calls: CallMemory
    stack: contextlib.AsyncExitStack

    async def client(self) -> Any:
        client = await self.stack.enter_async_context(
            distributed.Client(self.scheduler.address, asynchronous=True, set_as_default=False, timeout=40)
        )
        client.scheduler_comm.interval = 0.0
        return client

    def new_worker(self, name: str | None = None) -> Any:
        options: Any = {"dashboard": False, "dashboard_address": "127.0.0.1:0", "memory_limit": 0}
        return distributed.Worker(self.scheduler.address, name=name, nthreads=1, host="127.0.0.1", **options)

    async def worker(self) -> Any:
        return await self.stack.enter_async_context(self.new_worker())

    async def until(self, condition: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + 120
        while not condition():
            assert time.monotonic() < deadline, f"waited for {what}"
            await asyncio.sleep(0.005)

    async def lose(self, client: Any) -> None:
        """Break a client's connection, as a network does, and keep it from making another."""
        client.status = "closing"
        client.scheduler_comm.comm.abort()
        await self.until(
            lambda: client.id not in self.scheduler.clients, "the scheduler to see that the client is gone"
        )


@contextlib.asynccontextmanager
async def _head(calls: CallMemory) -> AsyncGenerator[Head]:
    with dask.config.set(DASK_CONFIG):
        scheduler = PoolScheduler(
            host="127.0.0.1",
            port=0,
            dashboard=False,
            dashboard_address="127.0.0.1:0",
            plugins=[PromptMessages(), calls],
        )
        async with scheduler, contextlib.AsyncExitStack() as stack:
            yield Head(scheduler, calls, stack)


def with_head(test: Callable[[Head], Any], abandoned_seconds: float = FOR_EVER, limit_bytes: int = 1 << 20) -> None:
    """Run a test in an event loop of its own with a head."""

    async def main() -> None:
        async with asyncio.timeout(150), _head(CallMemory(abandoned_seconds, limit_bytes)) as head:
            await test(head)
        # a connection that Dask still makes would stay open if its task were cancelled
        if others := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(others, timeout=2.0)

    asyncio.run(main())


def wait_for_file(path: str) -> str:
    """A task that waits."""
    while not Path(path).exists():
        time.sleep(0.01)
    return path


def runs_noted(folder: Path) -> int:
    """How many notes there are, without the file `go`."""
    return len([note for note in folder.iterdir() if note.name != "go"])


def note_and_wait(folder: str) -> int:
    """A task that writes a note of each of its runs."""
    Path(folder, uuid.uuid4().hex).touch()
    wait_for_file(f"{folder}/go")
    return 1


def follow(client: Any, following: Following) -> None:
    client.subscribe_topic(following.topic, following.handler(client.id))
    client._send_to_scheduler(following.resume(client.id))


def test_messages_outlive_a_connection() -> None:
    """Messages that come meanwhile reach the client's next connection. Acknowledged messages take no memory.

    Looks inside: what the scheduler keeps shows nowhere else.
    """

    async def test(head: Head) -> None:
        heard, answers = list[bytes](), list[Resumed]()
        following = Following(TOPIC, heard.append, answers.append)
        first = await head.client()
        follow(first, following)
        await head.until(lambda: answers, "an answer")
        assert not answers[0].is_known
        large = os.urandom(300_000)
        for message in (b"1", large):
            head.scheduler.log_event(TOPIC, message)
        await head.until(lambda: len(heard) == 2, "live messages")
        first._send_to_scheduler(following.acknowledge())
        await head.until(lambda: not head.calls._topics[TOPIC].nbytes, "memory to be given back")
        await head.lose(first)
        assert list(head.calls._absent) == [first.id]
        for message in (b"3", b"4"):
            head.scheduler.log_event(TOPIC, message)
        follow(await head.client(), following)
        await head.until(lambda: len(heard) == 4, "what was missed")
        assert not head.calls._absent, "it would be abandoned later, although it is there"
        head.scheduler.log_event(TOPIC, b"5")
        await head.until(lambda: len(heard) == 5, "live messages")
        assert heard == [b"1", large, b"3", b"4", b"5"]
        assert answers[1] == Resumed(number=2, missed=0, is_known=True, tasks={}, last=4)

    with_head(test)


@pytest.mark.parametrize("state", ["processing", "memory"])
def test_tasks_outlive_a_connection_until_their_client_releases_them(tmp_path: Path, state: str) -> None:
    """The client's next connection learns the state of a task, gets its result, and releases it with its future.

    Looks inside: what the scheduler keeps shows nowhere else.
    """

    async def test(head: Head) -> None:
        await head.worker()
        answers = list[Resumed]()
        following = Following(TOPIC, print, answers.append)
        first, go = await head.client(), str(tmp_path / "go")
        follow(first, following)
        futures = [first.submit(wait_for_file, go, key=key, pure=False) for key in ("skyward-1", "theirs")]
        await head.until(lambda: {"skyward-1", "theirs"} <= head.scheduler.tasks.keys(), "the tasks")
        await head.lose(first)
        await head.until(lambda: "theirs" not in head.scheduler.tasks, "Dask to forget what is not ours")
        second = await head.client()
        if state == "memory":
            (tmp_path / "go").touch()
            await head.until(lambda: head.scheduler.tasks["skyward-1"].state == state, "the task to end")
        following._resumed = lambda answer: (
            answers.append(answer),
            futures.append(distributed.Future("skyward-1", second)),
        )
        follow(second, following)
        await head.until(lambda: len(futures) == 3, "an answer")
        assert answers[-1].tasks == {"skyward-1": state}
        (tmp_path / "go").touch()
        assert await futures[2] == go
        futures.pop().release()
        await head.until(lambda: "skyward-1" not in head.scheduler.tasks, "the task to be let go")
        assert not head.calls._keys

    with_head(test)


def test_a_release_by_dask_after_a_reconnect_releases_nothing(tmp_path: Path) -> None:
    """Dask's client reconnects by itself and then releases its old futures, of tasks that it does not know any more.

    Looks inside: what the scheduler keeps shows nowhere else.
    """

    async def test(head: Head) -> None:
        scheduler, client = head.scheduler, await head.client()
        await head.worker()
        future = client.submit(wait_for_file, str(tmp_path / "go"), key="skyward-1", pure=False)
        await head.until(lambda: "skyward-1" in scheduler.tasks, "the task")
        connections = scheduler._client_connections_added_total
        client.scheduler_comm.comm.abort()
        await head.until(lambda: scheduler._client_connections_added_total > connections, "Dask to reconnect")
        await head.until(lambda: client.status == "running", "Dask to reconnect")
        future.release()
        client.subscribe_topic("after", print)
        await head.until(
            lambda: client.id in scheduler._broker._topics["after"].subscribers, "the release to have come"
        )
        assert "skyward-1" in scheduler.tasks
        (tmp_path / "go").touch()
        await head.until(lambda: scheduler.tasks["skyward-1"].state == "memory", "the task to end")

    with_head(test)


def test_a_client_that_comes_back_learns_what_has_arrived(tmp_path: Path) -> None:
    """Which batches have a task, and which came and have none any more. Others of its earlier connection are refused."""

    async def test(head: Head) -> None:
        answers, tasks = list[Resumed](), head.scheduler.tasks
        following = Following(TOPIC, lambda _: None, answers.append)
        first, second = await head.client(), await head.client()
        follow(first, following)
        await head.until(lambda: answers, "an answer")
        (tmp_path / "go").touch()
        async with head.new_worker():
            ended = first.submit(note_and_wait, str(tmp_path), key="skyward-1", pure=False)
            assert await ended == 1
        await head.until(lambda: not tasks, "Dask to forget what is lost")
        batch = {"op": RUN_BATCH, "batch": b"", "annotations": {}}
        first._send_to_scheduler({**batch, "key": "skyward-2"})
        await head.until(lambda: tasks, "the batch")
        follow(second, following)
        await head.until(lambda: len(answers) == 2, "an answer")
        assert (set(answers[1].tasks), answers[1].gone, answers[1].is_known) == ({"skyward-2"}, {"skyward-1"}, True)
        seen = list[str]()

        def take_batch(client: str, key: str, **rest: Any) -> None:
            head.scheduler.take_batch(client, key, **rest)
            seen.append(key)

        head.scheduler.stream_handlers[RUN_BATCH] = take_batch
        first._send_to_scheduler({**batch, "key": "skyward-3"})
        second._send_to_scheduler({**batch, "key": "skyward-4"})
        await head.until(lambda: len(seen) == 2, "both to come")
        await head.lose(first)
        assert (set(tasks), head.calls.is_replaced(first.id)) == ({"skyward-2", "skyward-4"}, False)

    with_head(test)


def test_the_data_of_a_client_that_left_is_dropped(tmp_path: Path) -> None:
    """A client that stays away, or says that it leaves, is forgotten; its detached calls are kept.

    Looks inside: what the scheduler keeps shows nowhere else.
    """

    async def test(head: Head) -> None:
        await head.worker()
        mine, detached, calls = "skyward-1", detached_key("d"), head.calls
        for leaves in (False, True):
            client, following = await head.client(), Following(TOPIC, print)
            follow(client, following)
            futures = [
                client.submit(wait_for_file, str(tmp_path / "go"), key=key, pure=False) for key in (mine, detached)
            ]
            await head.until(lambda: len(head.scheduler.tasks) == 2, "the tasks")
            if leaves:
                client._send_to_scheduler(following.leave())
            else:
                await head.lose(client)
            await head.until(
                lambda: TOPIC not in calls._topics and mine not in head.scheduler.tasks, "it to be dropped"
            )
            assert (set(head.scheduler.tasks), calls._keys, calls._owners) == ({detached}, {}, {})
            del futures
        (tmp_path / "go").touch()

    with_head(test, abandoned_seconds=0.05)


@pytest.mark.parametrize("key", ["theirs", "skyward-ours"])
def test_a_task_of_dasks_own_may_block_its_worker(tmp_path: Path, key: str) -> None:
    """A worker imports modules of such a task in the loop that sends its heartbeats, and gets time for it.

    Looks inside: an hour passes by changing when it was looked at.
    """

    async def pass_silently(scheduler: Any, seconds: float) -> None:
        for _ in range(int(seconds / (2 * SILENCE_CHECK_SECONDS))):
            scheduler._checked_at -= 3600.0
            await scheduler.check_worker_ttl()

    async def test(head: Head) -> None:
        scheduler, client, worker = head.scheduler, await head.client(), await head.worker()
        worker.periodic_callbacks["heartbeat"].stop()
        task = client.submit(wait_for_file, str(tmp_path / "go"), key=key)
        await head.until(lambda: scheduler.workers[worker.address].processing, "the task to be there")
        await pass_silently(scheduler, 2 * SILENT_SECONDS)
        assert (worker.address in scheduler.workers) == (key == "theirs")
        (tmp_path / "go").touch()
        if key == "theirs":
            await task
            for seconds, is_there in ((SILENT_SECONDS - 4, True), (SILENT_SECONDS, False)):
                await pass_silently(scheduler, seconds)
                assert (worker.address in scheduler.workers) is is_there

    with_head(test)


# ── calls that may not run twice ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("retries", [0, 1])
def test_a_call_runs_as_often_as_it_may(tmp_path: Path, retries: int) -> None:
    """A detached call that loses its worker runs again only if it has retries; then every client can read why."""

    async def test(head: Head) -> None:
        client = await head.client()
        with dask.annotate(**({RETRIES: retries} if retries else {})):
            client.submit(note_and_wait, str(tmp_path), key=detached_key("d"), pure=False)
        for run in range(retries + 1):
            async with head.new_worker() as worker:
                await head.until(lambda run=run: runs_noted(tmp_path) == run + 1, "the call to run")
                await head.scheduler.remove_worker(worker.address, stimulus_id="lost")
                (tmp_path / "go").touch()  # lets its thread end
                await worker.close()
            (tmp_path / "go").unlink()
        await head.worker()
        known = await client.scheduler.skyward_call(call_id="d")
        assert (known["state"], known["runs"], known["has_result"]) == ("lost", retries + 1, False)
        assert (known["reason"], known["dask_error"]) == ("the worker that ran it is gone", "")
        assert runs_noted(tmp_path) == retries + 1

    with_head(test)


def test_a_call_that_has_ended_does_not_run_again_when_its_result_is_lost(tmp_path: Path) -> None:
    """Dask would compute a lost result again."""

    async def test(head: Head) -> None:
        client = await head.client()
        (tmp_path / "go").touch()
        async with head.new_worker():
            keys = ("skyward-1", detached_key("d"))
            futures = [client.submit(note_and_wait, str(tmp_path), key=key, pure=False) for key in keys]
            assert await client.gather(futures) == [1, 1]
        await head.worker()
        await head.until(lambda: not head.scheduler.tasks, "Dask to forget what is lost")
        known = await client.scheduler.skyward_call(call_id="d")
        assert (known["state"], known["has_result"], runs_noted(tmp_path)) == ("ended", False, 2)

    with_head(test)
