"""Locks and queues of the processes of a call, over the worker's socket, without Dask: `coordination/channel.py`,
`coordination/primitives.py` and `worker/call_connections.py`.
"""

import asyncio
import os
import signal
import socket
import struct
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import skyward_core as sky
from skyward_core.coordination import channel
from skyward_core.coordination.messages import Frames, Kind, Request, fields_of, frame_of, request_of
from skyward_core.coordination.state import CoordinationState, Letter
from skyward_core.worker.call_connections import DROP, CallConnections
from tests.conftest import wait_until


class Node:
    """A worker's socket, and the scheduler's state behind it, in a thread."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / ("x" * 120) / "coordination-0"  # longer than the kernel takes
        self.path.parent.mkdir()
        self.state = CoordinationState()
        self.connections = CallConnections(self.path, self._take)
        self.requests: list[Request] = []
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        self.do(self.connections.listen)

    def do(self, function: Any, *args: Any) -> None:
        async def call() -> None:
            function(*args)

        asyncio.run_coroutine_threadsafe(call(), self.loop).result(30)

    def close(self) -> None:
        self.do(self.connections.detach)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self.loop) as runner:
            runner.get_loop()
            asyncio.set_event_loop(self.loop)
            self.loop.run_forever()

    def _take(self, message: Mapping[str, Any]) -> None:
        holder = ("worker", message["holder"])
        if message["op"] == DROP:
            self._answer(self.state.drop(holder))
            return
        request = request_of(message["request"], message["request"][4])
        self.requests.append(request)
        self._answer(self.state.receive(holder, request))
        if request.seconds:
            self.loop.call_later(request.seconds, lambda: self._answer(self.state.expire(holder, request)))

    def _answer(self, letters: list[Letter]) -> None:
        for (_, holder), answer in letters:
            self.connections.answer(holder, fields_of(answer))


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path)
    yield node
    channel.end_call()
    wait_until(lambda: node.state.is_empty, "the state of all holders to be gone")
    node.close()


@pytest.fixture
def call(node: Node, monkeypatch: pytest.MonkeyPatch) -> str:
    """Make this process the one of a call that runs on the node."""
    monkeypatch.setenv(channel.ENV, channel.of_call(str(node.path), "call"))
    node.connections.begin(["call"])
    return "call"


@pytest.mark.usefixtures("call")
def test_waits_end_in_time() -> None:
    """`acquire` and `wait` return whether they succeeded; `get` and `put` raise, as Dask's do."""
    lock, other = sky.Lock("l"), sky.Lock("l")
    assert lock.acquire(timeout=0)
    assert not other.acquire(timeout=0)
    assert not other.acquire(timeout=0.01)
    assert not sky.Event("e").wait(timeout=0.01)
    queue, variable = sky.Queue[int]("q", maxsize=1), sky.Variable[int]("v")
    with pytest.raises(TimeoutError, match=r"sky.Queue\('q'\) has had no value for 0.01 s"):
        queue.get(timeout=0.01)
    queue.put(1)
    with pytest.raises(TimeoutError, match="no room"):
        queue.put(2, timeout=0.01)
    with pytest.raises(TimeoutError, match="no value"):
        variable.get(timeout=0)
    assert (queue.get(timeout=0), queue.qsize()) == (1, 0)
    lock.release()


@pytest.mark.usefixtures("call")
def test_a_wait_that_is_interrupted_is_withdrawn(node: Node) -> None:
    """Otherwise the lock would be given to a thread that does not wait any more."""

    class Interrupted(Exception):
        pass

    def interrupt(*_: object) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGUSR1, interrupt)
    main = threading.get_ident()

    def send_signal() -> None:
        wait_until(lambda: len(node.requests) == 2, "the second request")
        signal.pthread_kill(main, signal.SIGUSR1)

    held, wanted = sky.Lock("l"), sky.Lock("l")
    held.acquire()
    thread = threading.Thread(target=send_signal)
    thread.start()
    with pytest.raises(Interrupted):
        wanted.acquire()
    thread.join()
    signal.signal(signal.SIGUSR1, before)
    held.release()
    assert not held.locked()


@pytest.mark.usefixtures("call")
def test_a_call_that_outlives_the_scheduler_connects_again(node: Node) -> None:
    """Its first request says what it has lost; those after it go to the next scheduler."""
    lock = sky.Lock("l")
    lock.acquire()
    node.do(node.connections.detach)
    with pytest.raises(sky.NodeLost, match="What this call held is released"):
        lock.locked()
    assert not lock.locked()
    with pytest.raises(sky.NodeLost):
        lock.release()


@pytest.mark.usefixtures("call")
def test_a_large_value_is_refused_with_advice() -> None:
    """Before it is sent."""
    with pytest.raises(sky.NotPicklable, match=r"at most 65,536: write it to a volume.*sky.scatter"):
        sky.Queue[bytes]("q").put(bytes(1 << 17))


@pytest.mark.parametrize("name", ["", "x" * 201, "\ud800", 5, None])
def test_a_name_that_cannot_be_sent_is_refused(name: Any) -> None:
    with pytest.raises(sky.BadRequest, match="1 to 200 characters"):
        sky.Event(name)


def test_outside_of_a_call_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """The object may be made there: a function may read it as a variable."""
    monkeypatch.delenv(channel.ENV, raising=False)
    with pytest.raises(sky.BadRequest, match=r"pass the pool, as in `sky.Semaphore\(2, 's', pool=pool\)`"):
        sky.Semaphore(2, "s").acquire()


@pytest.mark.parametrize(
    "junk",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        struct.pack(">II", 4000, 0) + b"[" * 4000,
        struct.pack(">II", 1 << 30, 0),
        struct.pack(">II", 2, 1 << 30) + b"[]",
        frame_of(Request(1, "tape", "x", "get")),
        frame_of(Request(1 << 80, Kind.LOCK, "x", "acquire")),
        frame_of(Request(1, Kind.LOCK, "\ud800", "acquire")),
        frame_of(Request(1, Kind.LOCK, "x", "acquire", seconds=float("inf"))),
        frame_of("another id"),
    ],
)
def test_a_connection_that_brings_nonsense_is_closed(node: Node, junk: bytes) -> None:
    """It disturbs no other one, and its leases are gone."""
    node.connections.begin(["call"])
    with socket.socket(socket.AF_UNIX) as other, channel.short_path(node.path) as path:
        other.settimeout(30)
        other.connect(path)
        other.sendall(frame_of("call") + frame_of(Request(7, Kind.LOCK, "x", "acquire", limit=1)))
        frames = Frames()
        while not (answer := frames.next()):
            frames.add(other.recv(4096))
        assert answer[0][:2] == [7, "done"]
        other.sendall(junk)
        assert other.recv(1) == b""
    wait_until(lambda: node.state.is_empty, "the end of the lease")


def test_no_other_user_can_connect(node: Node) -> None:
    """The folder of a node is private; so is the socket."""
    assert os.stat(node.path).st_mode & 0o777 == 0o600
