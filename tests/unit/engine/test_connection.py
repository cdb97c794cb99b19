"""The connection to a pool's scheduler."""

import pickle
from collections.abc import Callable, Collection
from types import SimpleNamespace
from typing import Any

import pytest
from distributed.scheduler import KilledWorker

from skyward_core.engine import connection as module
from skyward_core.engine.certificates import make_certificate
from skyward_core.engine.connection import (
    WORKER_GONE,
    NotSent,
    SchedulerConnection,
    connect,
    reason_of,
)
from skyward_core.worker.scheduler_messages import Resumed
from skyward_core.worker.wire import Batch


@pytest.mark.parametrize("is_pickled", [False, True])
def test_the_reason_of_a_killed_worker_is_in_words(is_pickled: bool) -> None:
    """Dask's scheduler pickles its own exceptions."""
    killed: Any = KilledWorker("task", "worker", 0)
    assert reason_of(pickle.dumps(killed) if is_pickled else killed) == WORKER_GONE
    refused = ValueError("too large")
    assert reason_of(pickle.dumps(refused) if is_pickled else refused) == "the scheduler could not take it: too large"


class Loop:
    """Dask's loop: runs callbacks at once, and keeps those for later."""

    def __init__(self) -> None:
        self.later: list[Callable[[], object]] = []

    def add_callback(self, callback: Callable[..., object], *arguments: Any) -> None:
        callback(*arguments)

    def call_later(self, seconds: float, callback: Callable[[], object]) -> None:
        self.later.append(callback)


class Client:
    """A connected client whose messages go nowhere. The tests call its handlers as Dask does."""

    listener: Any = None

    def __init__(self) -> None:
        self.status = "running"
        self.id = "client"
        self.loop = Loop()
        self.handlers: dict[str, Callable[[Any], object]] = {}
        self.sent: list[str] = []

    def subscribe_topic(self, topic: str, handler: Callable[[Any], object]) -> None:
        self.handlers[topic] = handler

    def _send_to_scheduler(self, msg: Any) -> None:
        self.sent.append(msg["op"])


class Posted:
    """The engine: notes what is posted to it."""

    def __init__(self) -> None:
        self.finished: list[int] = []
        self.failed: dict[int, str] = {}

    def on_resumed(self, epoch: int, resumed: Resumed) -> None:
        pass

    def on_tasks_finished(self, epoch: int, numbers: Collection[int]) -> None:
        self.finished += numbers

    def on_task_failed(self, epoch: int, number: int, reason: str) -> None:
        assert number not in self.failed
        self.failed[number] = reason


BATCH = Batch("topic", (), {})


@pytest.fixture
def posted() -> Posted:
    return Posted()


@pytest.fixture
def connection(posted: Posted) -> SchedulerConnection:
    """A connection that has sent task "a" with number 1, and knows task "old" of an earlier connection."""
    connection = SchedulerConnection(Client())  # type: ignore[arg-type]
    connection.listen(1, "topic", 0, posted)  # type: ignore[arg-type]
    answer = {"request": 1, "number": 0, "missed": 0, "is_known": True, "tasks": {"old": "processing"}, "gone": ()}
    connection.client.handlers["topic"]((0.0, answer))  # type: ignore[attr-defined]
    connection.send_batch(1, "a", BATCH, None)
    return connection


def later(connection: SchedulerConnection) -> None:
    while callbacks := connection.client.loop.later:  # type: ignore[attr-defined]
        callbacks.pop(0)()


def test_the_end_of_a_task_is_posted_once(connection: SchedulerConnection, posted: Posted) -> None:
    """Finished tasks are posted together, a little later."""
    connection.finished("a")
    connection.finished("a")
    connection.failed("a", "gone")
    assert posted.finished == []
    later(connection)
    assert (posted.finished, posted.failed) == ([1], {})


@pytest.mark.parametrize("is_first", [True, False])
def test_a_task_of_an_earlier_connection_ends_before_or_after_it_is_followed(
    connection: SchedulerConnection, posted: Posted, is_first: bool
) -> None:
    """The scheduler may say how it ended before the engine follows it."""
    if is_first:
        connection.finished("old")
    connection.follow(7, "old")
    if not is_first:
        connection.finished("old")
    later(connection)
    assert posted.finished == [7]


def test_a_restart_of_the_cluster_fails_all_tasks(connection: SchedulerConnection, posted: Posted) -> None:
    """A user's Dask client may restart it. A task that is not followed yet fails when it is."""
    connection.all_failed("restarted")
    assert posted.failed == {1: "restarted"}
    connection.follow(7, "old")
    assert posted.failed == {1: "restarted", 7: "restarted"}


def test_a_task_is_taken_back_or_posted_but_not_both(connection: SchedulerConnection, posted: Posted) -> None:
    """A task that has ended cannot be taken back; a task that was taken back is not posted."""
    assert connection.take_back("a")
    connection.failed("a", "gone")
    connection.send_batch(2, "b", BATCH, None)
    connection.failed("b", "gone")
    assert not connection.take_back("b")
    assert posted.failed == {2: "gone"}


def test_a_batch_that_was_not_sent_is_not_followed(
    connection: SchedulerConnection, posted: Posted, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(message: Any) -> None:
        raise NotSent

    monkeypatch.setattr(connection, "send", refuse)
    with pytest.raises(NotSent):
        connection.send_batch(3, "c", BATCH, None)
    connection.failed("c", "gone")
    assert posted.failed == {}


def test_a_connection_that_is_cut_at_once_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """`_reconnect` has taken the stream before it is used."""
    closed: list[str] = []
    client: Any = SimpleNamespace(
        scheduler_comm=None, status="connecting", close=lambda timeout: closed.append("close")
    )
    client._loop_runner = SimpleNamespace(stop=lambda timeout: closed.append("stop"))
    monkeypatch.setattr(module, "PoolClient", lambda *_, **__: client)
    with pytest.raises(OSError, match="at once"):
        connect("tls://127.0.0.1:1", make_certificate("p"), 0.1)
    assert closed == ["close", "stop"]


def test_a_client_that_cannot_be_closed_in_time_leaves_no_thread() -> None:
    """The scheduler reads nothing, or this machine is overloaded."""
    stopped: list[float] = []

    def close(timeout: float) -> None:
        raise TimeoutError

    client: Any = SimpleNamespace(close=close, status="closing")
    client._loop_runner = SimpleNamespace(stop=lambda timeout: stopped.append(timeout))
    SchedulerConnection(client).close()
    assert (client.status, len(stopped)) == ("closed", 1)
