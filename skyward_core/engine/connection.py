"""Connections to a pool's scheduler: the engine's own, and the one that its user is given (`engine.user_client` owns it).

The engine's is Dask's client, the topics it listens to, the futures of the tasks it follows, and questions that end in time.

A connection has a number, its epoch. What arrives is posted to the owner of the engine with that number; nothing is decided here. All access to private
names of Dask's client is in this file (`tests/test_dask_names.py` holds them).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import pickle
import socket
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import CancelledError
from concurrent.futures import wait as wait_for
from typing import Any, Protocol, cast

import dask.config  # noqa: TID253 - with worker/node.py owns Dask
import distributed  # noqa: TID253
from distributed.client import ClosedClientError, done_callback  # noqa: TID253
from distributed.scheduler import KilledWorker  # noqa: TID253

from skyward_core.engine.certificates import PoolCertificate
from skyward_core.engine.connection_state import PING_SECONDS
from skyward_core.engine.dispatcher import PoolNews
from skyward_core.errors import NodeLost
from skyward_core.worker import calls
from skyward_core.worker.calls import RAN, Ran
from skyward_core.worker.node import POOL_TOPIC, RUN_BATCH, STALLED_SECONDS
from skyward_core.worker.scheduler_messages import Resumed
from skyward_core.worker.streams import Told, send_at_once
from skyward_core.worker.wire import Batch, Report

ASKING_SECONDS = 0.2
USER_SECONDS = 60.0  # for which a user's client tries to connect, and to connect again
_log = logging.getLogger("skyward")


class NotSent(Exception):
    """A message has not gone out: the connection is closed."""


class Inbox(Protocol):
    """What arrives on a connection. Called in Dask's thread; must not wait."""

    def on_resumed(self, epoch: int, resumed: Resumed) -> None: ...
    def on_report(self, epoch: int, report: Callable[[], Report]) -> None: ...
    def on_pool_news(self, epoch: int, news: Callable[[], PoolNews]) -> None: ...
    def on_task_end(self, epoch: int, number: int, *, is_finished: bool, reason: str) -> None: ...
    def on_ping(self, epoch: int, ran: Collection[Ran] | None) -> None: ...


class DaskClient(distributed.Client):
    """Dask's client. What was started for one that cannot connect ends."""

    def start(self, **kwargs: Any) -> None:
        """Connect."""
        try:
            super().start(**kwargs)
        except BaseException:
            cast(Any, self)._loop_runner.stop()
            self.status = "closed"  # else Dask closes it again when it is collected, on a loop that is closed by then
            raise


class PoolClient(DaskClient):
    """Dask's client, which does not connect again by itself: whether the scheduler is lost is for the pool to find out."""

    is_to_return = False
    """Whether another client will come in the place of this one, which wants to find all tasks: they are not released with it."""

    def _release_key(self, key: Any) -> None:
        if not self.is_to_return:
            cast(Any, super())._release_key(key)
        elif (state := cast(Any, self).futures.pop(key, None)) is not None:
            state.cancel()

    async def _reconnect(self) -> None:
        self.scheduler_comm = None
        self.status = "connecting"
        for state in self.futures.values():
            state.cancel(reason="scheduler-connection-lost", msg="the pool's scheduler does not answer any more")
        self.futures.clear()


class UserDaskClient(DaskClient):
    """Dask's client as a user gets it: it connects again by itself. Each of its streams sends at once and outlives a scheduler that stands still."""

    async def _ensure_connected(self, timeout: float | None = None) -> None:  # noqa: ASYNC109 - Dask's signature
        """Connect, at first and again. Dask's own stream waits 10 ms for more messages, and gives up a silent scheduler after 30 s."""
        me: Any = self
        before = me.scheduler_comm
        await cast(Any, super())._ensure_connected(timeout)
        if (stream := me.scheduler_comm) is not None and stream is not before:
            send_at_once(stream)
            _allow_silence(stream.comm.stream.socket, STALLED_SECONDS)


def _allow_silence(connection: socket.socket, seconds: float) -> None:
    """Keep a TCP connection for so long while the other side acknowledges nothing (tcp(7): this overrides the keepalive). Only Linux has it."""
    if (option := getattr(socket, "TCP_USER_TIMEOUT", None)) is not None:
        connection.setsockopt(socket.IPPROTO_TCP, option, round(1000 * seconds))


class Connection:
    """A client of one scheduler, and what it follows there. `close` is its end."""

    def __init__(self, client: PoolClient) -> None:
        self.client = client
        self.epoch = 0
        self._tasks: dict[str, distributed.Future[Any]] = {}
        """By key. Those that the scheduler has kept for the connection before are put there in Dask's thread, before it hears what becomes of them."""

    @property
    def is_open(self) -> bool:
        """Whether the connection stands, as far as is known: a scheduler that stands still keeps it."""
        return self.client.status == "running"

    def listen(self, epoch: int, topic: str, after: int, inbox: Inbox) -> None:
        """Listen to the pool and to a topic from the message after this number on. From here on everything is posted. Raises NotSent."""
        self.epoch = epoch

        def on_topic(event: tuple[float, Any]) -> None:
            if isinstance(event[1], Mapping):
                self._on_answer(Resumed.of(cast("Mapping[str, Any]", event[1])), inbox)
            else:
                inbox.on_report(epoch, lambda: pickle.loads(event[1]))

        try:
            self.client.subscribe_topic(POOL_TOPIC, lambda event: inbox.on_pool_news(epoch, lambda: pickle.loads(event[1])))
            self.client.subscribe_topic(topic, on_topic)
        except ClosedClientError as error:
            raise NotSent from error
        self.send(calls.resume(self.client.id, topic, after, epoch))

    def _on_answer(self, resumed: Resumed, inbox: Inbox) -> None:
        for key in resumed.tasks:  # what becomes of a task is told right after this, to futures that are there by then
            self._tasks.setdefault(key, distributed.Future(key, self.client))
        inbox.on_resumed(self.epoch, resumed)

    # ── out ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message down the client's stream: it is handed to Dask's thread, and lost if the scheduler is out of reach. Raises NotSent."""
        try:
            cast(Any, self.client)._send_to_scheduler(message)
        except ClosedClientError as error:
            raise NotSent from error

    def send_batch(self, number: int, key: str, batch: Batch, address: str | None, inbox: Inbox) -> None:
        """Send a batch as a task, and follow it. Whatever is raised, it has not gone out."""
        annotations = {"workers": [address]} if address else {}
        message = {"op": RUN_BATCH, "key": key, "batch": pickle.dumps(batch, protocol=5), "annotations": annotations}
        task = distributed.Future[Any](key, self.client)
        self.send(message)
        self._tasks[key] = task
        self.follow(number, key, inbox)

    def follow(self, number: int, key: str, inbox: Inbox) -> None:
        """Post when a task has ended."""
        # Not task.add_done_callback: that starts a thread which stays with the process for good.
        call: Callable[..., object] = cast(Any, self.client.loop).add_callback
        with contextlib.suppress(RuntimeError):  # its thread has ended: the connection that comes next asks what has become of this one
            call(done_callback, self._tasks[key], lambda task: self._on_task_end(number, task, inbox))

    def _on_task_end(self, number: int, task: distributed.Future[Any], inbox: Inbox) -> None:
        if task.status in ("cancelled", "lost") and not self.is_open:
            return  # the connection is cut: what has become of the batch is not known
        is_finished = task.status == "finished"
        inbox.on_task_end(self.epoch, number, is_finished=is_finished, reason="" if is_finished else _cause(task))

    def take_back(self, key: str) -> bool:
        """Release a task that has not ended; False if it has."""
        task = self._tasks.get(key)
        if task is None or task.status != "pending":
            return False
        self.release([key])
        return True

    def release(self, keys: Collection[str]) -> None:
        """Have the scheduler forget tasks."""
        for key in keys:
            if (task := self._tasks.pop(key, None)) is not None:
                task.release()

    # ── questions ────────────────────────────────────────────────────────────────────────────────────────────────────

    def gather(self, key: str, is_open: Callable[[], bool], *, is_direct: bool) -> Told:
        """Return a task's result. Raises NodeLost if it cannot be had, or when `is_open` says no."""
        answer: Any = self.client.gather(self._tasks[key], direct=is_direct, asynchronous=True)
        return cast(Told, wait_in_loop(self.client, answer, is_open))

    def ask(self, operation: str, is_open: Callable[[], bool], what: Mapping[str, Any]) -> Any:
        """Have the scheduler do an operation, and return its answer. Raises NodeLost if there will be none."""
        return asked(self.client, operation, is_open, what)

    def ping(self, inbox: Inbox) -> None:
        """Ask the scheduler for how long calls have run: one that stands still keeps its connections, and says nothing."""
        with contextlib.suppress(RuntimeError):
            cast(Any, self.client.loop).add_callback(self._ping, inbox)

    async def _ping(self, inbox: Inbox) -> None:
        ran: Collection[Ran] | None = None
        try:
            async with asyncio.timeout(PING_SECONDS):
                ran = await getattr(cast(Any, self.client.scheduler), RAN)()
        except Exception as error:
            _log.debug("the scheduler does not answer: %s", error)
        inbox.on_ping(self.epoch, ran)

    def close(self, *, is_to_return: bool = False) -> None:
        """Close. `is_to_return`: there will be another connection to the same scheduler, which is to keep what it has for us."""
        self.client.is_to_return = is_to_return
        with contextlib.suppress(Exception):  # the nodes may be gone already, and it is they who cost money
            self.client.close(timeout=2)


def connect(address: str, certificate: PoolCertificate, timeout_seconds: float) -> PoolClient:
    """Return a Dask client of the pool's cluster, over TLS with the pool's certificate. Its caller closes it."""
    settings = {
        "distributed.admin.low-level-log-length": 0,  # else the last thousand messages stay in memory, payloads included
        "distributed.admin.event-loop": "uvloop",
        "distributed.comm.timeouts.tcp": "18s",
    }
    with dask.config.set(settings):
        client = PoolClient(address, security=_security(certificate), set_as_default=False, timeout=timeout_seconds, name="skyward")
    send_at_once(client.scheduler_comm)  # our calls are grouped before they come here: no waiting for more
    return client


def connect_user(address: str, certificate: PoolCertificate) -> distributed.Client:
    """Return a Dask client of the pool's cluster that connects again by itself. Its caller ends it. Raises OSError.

    It goes by the user's own Dask settings, but for the event loop and the time that a silent scheduler is given: that takes nothing from a client while it
    imports what the client's last graph needs, which must not break the connection.
    """
    settings = {"distributed.comm.timeouts.tcp": f"{STALLED_SECONDS:.0f}s", "distributed.admin.event-loop": "uvloop"}
    with dask.config.set(settings):
        return UserDaskClient(address, security=_security(certificate), set_as_default=False, timeout=USER_SECONDS, name="skyward-user")


def _security(certificate: PoolCertificate) -> distributed.Security:
    pem = certificate.certificate
    return distributed.Security(require_encryption=True, tls_ca_file=pem, tls_client_cert=pem, tls_client_key=certificate.key)


def end(client: distributed.Client, timeout_seconds: float) -> None:
    """Close a client and end its thread, in at most three times that time. Raises nothing: its scheduler may be gone or stand still."""
    it: Any = client
    stream: Any = getattr(getattr(it.scheduler_comm, "comm", None), "stream", None)
    log = logging.getLogger("distributed.client")
    log.addFilter(_is_no_cancel)
    try:
        try:
            client.close(timeout=timeout_seconds)
        except Exception:  # the scheduler takes nothing any more, and what is to be sent waits for that
            with contextlib.suppress(Exception):
                it.loop.add_callback(stream.close)
                client.close(timeout=timeout_seconds)  # now the futures are cancelled too
        with contextlib.suppress(Exception):  # its thread has ended, unless the client had closed itself
            it._loop_runner.stop(timeout=timeout_seconds)
        client.status = "closed"  # else Dask closes it again when it is collected
    finally:
        log.removeFilter(_is_no_cancel)


def _is_no_cancel(record: logging.LogRecord) -> bool:
    """Leave out that connecting again was cancelled: Dask logs its traceback for a client that is closed meanwhile."""
    return not (record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError))


def asked(client: distributed.Client, operation: str, is_open: Callable[[], bool], what: Mapping[str, Any]) -> Any:
    """Have the scheduler do an operation, and return its answer. Raises NodeLost if there will be none: it is out of reach, or `is_open` says no."""
    return wait_in_loop(client, _answer(client, operation, what), is_open)


def wait_in_loop(client: distributed.Client, answer: Any, is_open: Callable[[], bool]) -> Any:
    """Have Dask's thread run a coroutine, and return its result. Raises NodeLost if the scheduler is out of reach, or when `is_open` says no.

    Not `Client.sync`: its wait does not end if Dask's thread does.
    """
    try:
        question = asyncio.run_coroutine_threadsafe(answer, cast(Any, client).loop.asyncio_loop)
    except RuntimeError as error:  # Dask's thread has ended
        answer.close()
        raise NodeLost("the connection to the pool's scheduler is closed") from error
    try:
        while not wait_for([question], ASKING_SECONDS).done:
            if not is_open():
                question.cancel()
                raise NodeLost("the pool's scheduler has not answered in time, or the connection to it was cut")
        return question.result()
    except (OSError, CancelledError) as error:
        raise NodeLost(f"the pool's scheduler does not answer: {error}") from error


async def _answer(client: Any, operation: str, what: Mapping[str, Any]) -> Any:
    return await getattr(client.scheduler, operation)(**what)


def _cause(task: distributed.Future[Any]) -> str:
    state: Any = cast(Any, task)._state
    error = state.exception if task.status == "error" else None
    if error is None or isinstance(error, KilledWorker):  # whose own words are Dask's advice to look at logs that nobody has
        return "the worker that ran it is gone"
    return f"the scheduler could not take it: {error}"
