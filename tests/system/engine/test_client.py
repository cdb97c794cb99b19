"""The client's side of a pool: its loop, its connection, its futures, its transfers, and Dask's client for the user."""

import gc
import inspect
import queue
import re
import socket
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from datetime import UTC, datetime
from threading import Event
from types import SimpleNamespace
from typing import Any

import dask
import distributed
import distributed.client
import pytest
import uvloop

import skyward_core as sky
from skyward_core.compute import PendingCompute
from skyward_core.concurrency.item_stream import ItemStream
from skyward_core.engine import connection
from skyward_core.engine.certificates import PoolCertificate, make_certificate
from skyward_core.engine.cluster import Cluster
from skyward_core.engine.connection import DaskLoop, PoolClient, UserClient, call_scheduler, connect
from skyward_core.engine.dispatcher import Dispatcher
from skyward_core.engine.futures import CallFuture
from skyward_core.engine.transfers import Transfers
from skyward_core.errors import ConnectionLost, NodeLost, PoolClosed
from skyward_core.machines.instances import Lease
from skyward_core.transport.transport import Transports
from skyward_core.wire.messages import Parcel
from tests.engine.model import SPANS, node_of
from tests.unit.engine.test_results import Stream, call  # noqa: F401 - fixtures
from tests.waiting import wait_until


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """No loop begins before this is set: the machine gives its thread no processor time."""
    it = threading.Event()

    def late() -> Any:
        assert it.wait(60)
        return uvloop.new_event_loop()

    monkeypatch.setattr(connection, "uvloop", SimpleNamespace(new_event_loop=late))
    yield it
    it.set()


def loops() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "IO loop"}


def connected() -> None:
    """Connect to a port where no process listens."""
    with socket.socket() as there:
        there.bind(("127.0.0.1", 0))
        connect(f"tls://127.0.0.1:{there.getsockname()[1]}", make_certificate("p"), 0.1)


def test_a_thread_that_begins_late_is_waited_for(gate: threading.Event) -> None:
    """Dask's own runner raises AssertionError after 10 s."""
    loop = DaskLoop()
    starting = threading.Thread(target=loop.start)
    starting.start()
    assert not loop.is_started()
    gate.set()
    starting.join()
    assert loop.is_started()
    loop.stop()


def test_no_room_for_another_thread_is_an_error_of_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refused(threading.Thread):
        def start(self) -> None:
            raise RuntimeError("can't start new thread")

    monkeypatch.setattr(
        connection, "threading", SimpleNamespace(Thread=Refused, current_thread=threading.current_thread)
    )
    with pytest.raises(OSError, match="can't start new thread"):
        connected()


def test_it_has_all_that_dasks_client_calls() -> None:
    called = set(re.findall(r"_loop_runner\.(\w+)", inspect.getsource(distributed.client)))
    assert called <= set(dir(DaskLoop)), called


@pytest.mark.parametrize("is_there", [False, True])
def test_a_connection_that_fails_leaves_nothing_to_be_closed(monkeypatch: pytest.MonkeyPatch, is_there: bool) -> None:
    """No process listens, or the listener is silent.

    Collected as garbage, Dask's client would close itself, on a loop that is closed by then.
    """
    clients = list[PoolClient]()
    start = PoolClient.start
    monkeypatch.setattr(PoolClient, "start", lambda client, **words: clients.append(client) or start(client, **words))
    with socket.socket() as there:
        there.bind(("127.0.0.1", 0))
        if is_there:
            there.listen()
        with pytest.raises(OSError):
            connect(f"tls://127.0.0.1:{there.getsockname()[1]}", make_certificate("p"), 0.5)
    assert [client.status for client in clients] == ["closed"]
    clients.clear()
    gc.collect()


# ── a client that is closed meanwhile ────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def running_loop() -> Iterator[DaskLoop]:
    it = DaskLoop()
    it.start()
    yield it
    it.stop()


def closed_pool(**_: Any) -> Any:
    raise RuntimeError("ConnectionPool is closed")  # Dask's words


@pytest.mark.parametrize("scheduler", [None, SimpleNamespace(skyward_call=closed_pool)])
def test_a_question_to_a_client_that_is_closed_meanwhile_has_no_answer(running_loop: DaskLoop, scheduler: Any) -> None:
    """Dask raises AttributeError or RuntimeError, which no caller expects."""
    client: Any = SimpleNamespace(loop=running_loop.loop, scheduler=scheduler, status="closing")
    with pytest.raises(NodeLost, match="does not answer"):
        call_scheduler(client, "skyward_call", lambda: True, {})
    client.status = "running"  # then it is a fault
    with pytest.raises((AttributeError, RuntimeError), match=r"NoneType|is closed"):
        call_scheduler(client, "skyward_call", lambda: True, {})


CALLS = 5_000
BYTES_PER_CALL = 1_100  # 900 now; 2,200 before


def test_a_call_that_waits_is_small() -> None:
    """The client's memory for a tiny call that was not sent yet: its arguments, its place in the queue, its future."""
    lease = Lease(pool_id="p", provider={"name": "local"}, created_at=datetime.now(UTC))
    cluster = Cluster(lease, PoolCertificate("", ""), Transports(60.0, lambda _: None), lambda _: None)
    cluster.submit(PendingCompute(abs, (number,)) for number in range(10))
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        futures = cluster.submit(PendingCompute(abs, (number,)) for number in range(CALLS))
        used = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert used / len(futures) < BYTES_PER_CALL


def test_several_threads_wait_for_one_future() -> None:
    """All are woken, also one with a short timeout; the future is then done for later callers.

    Looks inside: only the condition knows who waits.
    """
    future = CallFuture[int]("a", print)
    got = list[int]()
    with pytest.raises(TimeoutError):
        future.result(timeout=0.01)
    with pytest.raises(TimeoutError):
        future.result(timeout=0)
    threads = [threading.Thread(target=lambda: got.append(future.result(timeout=30))) for _ in range(5)]
    for thread in threads:
        thread.start()
    condition: Any = future._condition
    wait_until(lambda: len(condition._waiters) == 5, "all to wait")
    assert future.set_running_or_notify_cancel()
    future.set_result(7)
    for thread in threads:
        thread.join()
    assert got == [7] * 5
    assert condition._waiters == ()
    assert future.result() == 7


def test_waiting_for_some_futures_of_many_works() -> None:
    """`wait`, callbacks and cancelling are those of Python."""
    stopped = list[str]()
    ours, theirs = [CallFuture[int](str(number), stopped.append) for number in range(3)], Future[int]()
    called = list[object]()
    ours[0].add_done_callback(called.append)
    timer = threading.Timer(0.05, lambda: ours[0].set_result(1))
    timer.start()
    done, _ = wait([*ours, theirs], timeout=30, return_when=FIRST_COMPLETED)
    timer.join()
    assert done == {ours[0]}
    assert called == [ours[0]]
    assert ours[1].cancel()
    assert stopped == ["1"]
    assert ours[1].cancelled()
    assert not ours[0].cancel()


def test_the_end_waits_for_items_that_are_being_fetched(call: Stream) -> None:
    """The call has ended, but one of its items is still on its way."""
    call.put(0)
    call.end(2)
    taken = list[int]()
    consumer = threading.Thread(target=lambda: taken.extend(ItemStream[int](call.future)))
    consumer.start()
    call.put(1)
    consumer.join(30)
    assert taken == [0, 1]


NODE = node_of(0, 0, 1, 1)


class CutTransport:
    """A node from which nothing comes; `released` has the paths that it was requested to remove."""

    def __init__(self) -> None:
        self.released: list[str | None] = []

    def to(self, instance: object) -> "CutTransport":
        return self

    def take(self, parcel: Parcel) -> Parcel:
        raise ConnectionLost("cut on the way")

    def release(self, parcel: Parcel) -> None:
        self.released.append(parcel.path)


class SlowTransport(CutTransport):
    """A node whose values come when `go` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.go = Event()

    def take(self, parcel: Parcel) -> Parcel:
        self.go.wait(60)
        return parcel


@pytest.mark.parametrize("make", [SlowTransport, CutTransport])
def test_an_item_counts_until_it_is_here(make: type[CutTransport]) -> None:
    """Its node may not leave before; a generator that has ended does not count any more by then."""
    node: Any = make()
    posted = queue.SimpleQueue[Callable[[], None]]()
    transfers = Transfers(Dispatcher([NODE], "skyward-topic"), node, posted.put)
    parcel = Parcel(b"", (), f"/dev/shm/{NODE.instance.id}/item", SPANS)
    came = list[object]()
    for _ in range(2):
        transfers.fetch_item(NODE.instance.id, parcel, came.append, came.append)
    assert transfers.items == {NODE.instance.id: 2}
    if isinstance(node, SlowTransport):
        node.go.set()
    for left in (1, 0):
        posted.get(timeout=60)()
        assert transfers.items[NODE.instance.id] == left
    assert len(came) == 2
    transfers.close()


def test_an_item_that_cannot_be_fetched_does_not_stay_on_its_node() -> None:
    """Its consumer gets the error, and does not ask for it again."""
    node: Any = CutTransport()
    transfers = Transfers(Dispatcher([NODE], "skyward-topic"), node, lambda message: None)
    errors = list[BaseException]()
    path = f"/dev/shm/{NODE.instance.id}/item"
    transfers.fetch_item(NODE.instance.id, Parcel(b"", (), path, SPANS), lambda parcel: None, errors.append)
    wait_until(lambda: node.released, "the removal")
    transfers.close()
    assert [type(error) for error in errors] == [NodeLost]
    assert node.released == [path]


SOON_SECONDS = 10.0


# ── which client there is ────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class FakeClient:
    address: str
    status: str = "running"


class Schedulers:
    """A scheduler at `address`, which may be out of reach, and its clients."""

    def __init__(self) -> None:
        self.address = "tls://a"
        self.refusal: Exception | None = None
        self.made = list[FakeClient]()
        self.gate = threading.Event()
        self.gate.set()
        self.holder = UserClient(lambda: self.address, PoolCertificate("", ""), self.check)

    def check(self) -> None:
        if isinstance(self.refusal, NodeLost):
            raise self.refusal

    def connect(self, address: str) -> FakeClient:
        self.made.append(FakeClient(address))
        assert self.gate.wait(SOON_SECONDS)
        if isinstance(self.refusal, OSError):
            raise self.refusal
        return self.made[-1]

    @staticmethod
    def end(client: FakeClient, timeout_seconds: float) -> None:
        client.status = "closed"

    @property
    def states(self) -> list[tuple[str, str]]:
        return [(client.address, client.status) for client in self.made]


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Schedulers:
    schedulers = Schedulers()
    monkeypatch.setattr(connection, "connect_user", lambda address, certificate: schedulers.connect(address))
    monkeypatch.setattr(connection, "end", schedulers.end)
    return schedulers


def test_it_is_the_same_client_as_long_as_it_is_open(cluster: Schedulers) -> None:
    """Even while the pool itself has no connection: the scheduler may only be slow. A user's `with` block closes it."""
    client = cluster.holder.get()
    cluster.refusal = NodeLost("out of reach")
    assert cluster.holder.get() is client
    client.status = "connecting"
    with pytest.raises(NodeLost, match="out of reach"):
        cluster.holder.get()
    cluster.refusal = None
    assert cluster.holder.get() is client
    client.status = "closed"
    assert cluster.holder.get() is cluster.made[1]
    assert cluster.states == [("tls://a", "closed"), ("tls://a", "running")]


@pytest.mark.parametrize("status", ["running", "connecting"])
def test_there_is_another_client_when_the_head_has_another_address(cluster: Schedulers, status: str) -> None:
    """The client of the old head is closed, even if it has not noticed the loss yet."""
    cluster.holder.get().status = status
    cluster.address = "tls://b"
    assert cluster.holder.get() is cluster.made[1]
    assert cluster.states == [("tls://a", "closed"), ("tls://b", "running")]


@pytest.mark.parametrize(
    ("refusal", "text"), [(NodeLost("try again"), "try again"), (OSError("refused"), "tls://a does not answer")]
)
def test_a_scheduler_that_does_not_answer(cluster: Schedulers, refusal: Exception, text: str) -> None:
    """The next attempt may succeed."""
    cluster.refusal = refusal
    with pytest.raises(NodeLost, match=text):
        cluster.holder.get()
    cluster.refusal = None
    assert cluster.holder.get() is cluster.made[-1]


def test_closing_ends_it_permanently(cluster: Schedulers) -> None:
    """A client that is just being made ends too; closing waits for neither."""
    cluster.holder.get()
    cluster.address = "tls://b"
    cluster.gate.clear()
    with ThreadPoolExecutor(1) as threads:
        late = threads.submit(cluster.holder.get)
        wait_until(lambda: len(cluster.made) == 2, "the second to be begun")
        cluster.holder.close()
        cluster.gate.set()
        with pytest.raises(PoolClosed):
            late.result(SOON_SECONDS)
    cluster.holder.close()
    with pytest.raises(PoolClosed):
        cluster.holder.get()
    assert cluster.states == [("tls://a", "closed"), ("tls://b", "closed")]


def test_two_threads_get_one_client(cluster: Schedulers) -> None:
    cluster.gate.clear()
    with ThreadPoolExecutor(2) as threads:
        got = [threads.submit(cluster.holder.get) for _ in range(2)]
        wait_until(lambda: cluster.made, "one to be begun")
        cluster.gate.set()
        assert got[0].result(SOON_SECONDS) is got[1].result(SOON_SECONDS)
    assert cluster.states == [("tls://a", "running")]


def test_it_is_not_dasks_default_client(pool: sky.ComputePool) -> None:
    """Dask's functions use it only if the program says so."""
    client = pool.dask_client()
    assert pool.dask_client() is client
    with pytest.raises(ValueError):
        distributed.default_client()
    with client.as_current():
        assert distributed.default_client() is client
        assert dask.compute(dask.delayed(pow)(2, 5)) == (32,)
