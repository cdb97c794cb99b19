"""Connections to a pool's scheduler: the engine's, and the user's (`UserClient`).

The engine's connection is a Dask client, the topics that it listens to, the tasks that it follows, and questions with a
deadline. It has no Dask futures: each of them costs a coroutine, an event and a callback, and a call needs one number.

A connection has a number, its epoch. It posts each message with that number to the owner of the engine, and decides
nothing. All access to private names of Dask's client is in this file (`worker/dask_names.py` lists them).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import inspect
import logging
import pickle
import socket
import sys
import threading
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import CancelledError, Future, InvalidStateError
from concurrent.futures import wait as wait_for
from typing import Any, Protocol, cast

import dask.config  # noqa: TID253 - with worker/node.py owns Dask
import distributed  # noqa: TID253
import uvloop
from distributed.client import ClosedClientError  # noqa: TID253
from distributed.comm.core import CommClosedError  # noqa: TID253
from tornado.ioloop import IOLoop

from skyward_core.engine.certificates import PoolCertificate
from skyward_core.engine.data_stream import Opaque, address_of
from skyward_core.engine.dispatcher import PING_SECONDS
from skyward_core.errors import NodeLost, PoolClosed
from skyward_core.wire import protocol
from skyward_core.wire.checks import Unreadable, mapping
from skyward_core.wire.messages import Batch, Report
from skyward_core.wire.protocol import (
    BUSY_TIMES,
    CALLS_QUESTION,
    INTRODUCE,
    LIST_CALLS,
    LISTING_SECONDS,
    POOL_TOPIC,
    RUN_BATCH,
    STALLED_SECONDS,
    TASK_FAILED,
    Resumed,
    content_of,
)
from skyward_core.wire.streams import read_outcomes, send_at_once

ASKING_SECONDS = 0.2
CLOSE_SECONDS = 2
USER_CLOSE_SECONDS = 2.0
USER_SECONDS = 60.0  # how long a user's client tries to connect, also after a cut
FINISHED_SECONDS = 0.01  # how long the end of a task may wait: its outcomes were reported before
TOPIC, SCHEDULER = "a worker", "the scheduler"
"""Who sends messages on a topic, as far as that is known, and who answers."""
WORKER_GONE = "the worker that ran it is gone"
START_SECONDS = 30.0
"""How long a new thread may take until its loop runs. An overloaded machine has taken more than 10 s."""
_log = logging.getLogger("skyward")


class NotSent(Exception):
    """A message has not gone out: the connection is closed."""


class ReportInbox(Protocol):
    """Takes the messages of a connection. Called in Dask's thread; must not wait."""

    def on_resumed(self, epoch: int, resumed: Resumed) -> None: ...
    def on_report(self, epoch: int, report: bytes) -> None: ...
    def on_pool_news(self, epoch: int, news: object) -> None: ...
    def on_unreadable(self, sender: str, error: Unreadable) -> None: ...
    def on_tasks_finished(self, epoch: int, numbers: Collection[int]) -> None: ...
    def on_task_failed(self, epoch: int, number: int, reason: str) -> None: ...
    def on_ping(self, epoch: int, answer: object) -> None: ...
    def on_asked_for_calls(self, epoch: int, request: int) -> None: ...
    def on_calls_listed(self, epoch: int, answer: object) -> None: ...


class DaskLoop:
    """The event loop of one Dask client, in its own thread: the methods of Dask's `LoopRunner` that a client calls.
    May be used from any thread.

    Dask's own runner waits 10 s for its thread to begin. Then it raises an AssertionError and leaves the thread behind,
    and meanwhile no other client of the process starts or ends. A process with hundreds of connections may need longer.

    States: new -> started -> stopped. It is started once.
    """

    def __init__(self) -> None:
        self._running: Future[IOLoop] = Future()
        """The loop, from when it runs."""
        self._unwanted: Future[None] = Future()
        """Ends the loop, also one that does not run yet."""
        self._thread: threading.Thread | None = None
        self._is_started = False

    def start(self) -> None:
        """Start the thread, and wait until its loop runs.

        Raises OSError if there can be no other thread or loop, such as TimeoutError. Then nothing stays behind.
        """
        self._thread = thread = threading.Thread(target=self._run, name="IO loop", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            self._thread = None
            raise OSError(f"no thread for the connection: {error}") from error
        try:
            self._running.result(START_SECONDS)
        except BaseException as error:
            self._end()  # the thread may come later
            if isinstance(error, TimeoutError):
                raise TimeoutError(f"the thread for the connection has not begun within {START_SECONDS:g} s") from error
            raise
        self._is_started = True

    def stop(self, timeout: float = 10) -> None:  # Dask's signature
        """End the loop, and wait so many seconds for its thread. Idempotent. Raises TimeoutError."""
        self._is_started = False
        self._end()
        thread = self._thread
        # a loop that has not begun by now ends when it does
        if thread is None or thread is threading.current_thread() or not self._running.done():
            return
        thread.join(timeout)
        if thread.is_alive():
            raise TimeoutError(f"the thread of the connection has not ended within {timeout:g} s")

    def is_started(self) -> bool:
        """Return whether it is started, and not stopped."""
        return self._is_started

    @property
    def loop(self) -> IOLoop:
        """The loop. Raises RuntimeError if it does not run."""
        loop: Any = self._running.result() if self._running.done() else None  # tornado's types say too little
        if loop is None or not loop.asyncio_loop.is_running():
            raise RuntimeError("the loop of the connection does not run")
        return cast(IOLoop, loop)

    def _end(self) -> None:
        with contextlib.suppress(InvalidStateError):  # another thread has ended it
            self._unwanted.set_result(None)

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(self._until_unwanted())
        except BaseException as error:
            if self._running.done():
                _log.exception("the thread of a connection to a scheduler has failed")
            else:
                self._running.set_exception(error)

    async def _until_unwanted(self) -> None:
        self._running.set_result(IOLoop.current())
        await asyncio.wrap_future(self._unwanted)


class DaskClient(distributed.Client):
    """Dask's client, with a loop of ours. If it cannot connect, it ends the threads that it has started."""

    def start(self, **kwargs: Any) -> None:
        """Connect. Raises OSError."""
        if self.status != "newly-created":
            return
        cast(Any, self)._loop_runner = DaskLoop()
        try:
            super().start(**kwargs)
        except BaseException:
            cast(Any, self)._loop_runner.stop()
            self.status = "closed"  # otherwise Dask closes it again when it is collected, on a closed loop
            raise


class DataClient(DaskClient):
    """Dask's client on a connection that unpickles nothing (`data_stream.py`), and without Dask's own handlers that do.

    A message of another form is dropped, and given to `on_unreadable`, in Dask's thread.
    """

    on_unreadable: Callable[[str, Unreadable], object] = staticmethod(
        lambda sender, error: _log.debug("%s: %s", sender, error)
    )

    async def _ensure_connected(self, timeout: float | None = None) -> None:  # noqa: ASYNC109 - Dask's signature
        try:
            await cast(Any, super())._ensure_connected(timeout)
        except (AssertionError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise ConnectionError(f"the scheduler answers with something else: {error!r}") from error

    async def _update_scheduler_info(self, n_workers: int = 0) -> None:
        """Ask nothing that nobody needs: Dask's client would show it in its `repr`."""

    def subscribe_topic(self, topic: str, handler: Any) -> None:
        """Listen to a topic of ours. Dask's own ("print", "warn") have pickles."""
        if topic not in cast(Any, distributed.Client)._default_event_handlers:
            super().subscribe_topic(topic, handler)

    async def _handle_event(self, topic: Any = None, event: Any = None) -> None:
        handler = cast(Any, self)._event_handlers.get(topic)
        if handler is not None:
            handler(event)

    async def _handle_report(self) -> None:
        """Read the stream until it ends, as Dask does."""
        me: Any = self
        with contextlib.suppress(asyncio.CancelledError, concurrent.futures.CancelledError):
            while (stream := me.scheduler_comm) is not None:
                try:
                    messages = await stream.comm.read()
                except Unreadable as error:
                    self.on_unreadable(SCHEDULER, error)
                except CommClosedError:
                    if sys.is_finalizing() or self.status != "running":
                        return
                    self.status = "connecting"
                    await me._reconnect()
                else:
                    for message in messages if isinstance(messages, tuple) else (messages,):
                        if await self._ends(message):
                            return

    async def _ends(self, message: Any) -> bool:
        """Handle one message of the stream; return whether the scheduler has ended it."""
        try:
            op = message["op"]
            if op in {"close", "stream-closed"}:
                return True
            del message["op"]
            handled = cast(Any, self)._stream_handlers[op](**message)
            if inspect.isawaitable(handled):
                await handled
        except Exception as error:  # whatever a lie leads to: the next message is heard
            self.on_unreadable(SCHEDULER, Unreadable(f"a message of the stream: {type(error).__name__}"))
        return False

    def _adjust_heartbeat_intervals(self, interval: Any = None) -> None:
        """Keep our own intervals."""

    def _handle_error(self, *_: Any, **__: Any) -> None:
        """Dask prints it."""


class TaskListener(Protocol):
    """Receives how tasks end. Called in Dask's thread; must not wait."""

    def finished(self, key: str) -> None:
        """The task's result is in the memory of a worker."""
        ...

    def failed(self, key: str, reason: str) -> None:
        """The task has no result and will not have one."""
        ...

    def all_failed(self, reason: str) -> None:
        """The scheduler has forgotten all tasks."""
        ...


class PoolClient(DataClient):
    """Dask's client, without its automatic reconnect: the pool finds out whether the scheduler is lost.

    It has no futures: the listener receives how tasks end.
    """

    listener: TaskListener | None = None

    async def _reconnect(self) -> None:
        self.scheduler_comm = None
        self.status = "connecting"

    def _handle_key_in_memory(self, key: Any = None, type: Any = None, workers: Any = None) -> None:  # noqa: A002
        if self.listener is not None:
            self.listener.finished(key)

    def _handle_task_erred(self, key: Any = None, exception: Any = None, traceback: Any = None) -> None:
        if self.listener is not None:  # our own message before has the reason (TASK_FAILED), unless there is none
            self.listener.failed(key, WORKER_GONE)

    def _handle_cancelled_keys(self, keys: Collection[Any], reason: Any = None, msg: Any = None) -> None:
        if self.listener is not None:
            for key in keys:
                self.listener.failed(key, WORKER_GONE)

    def _handle_restart(self) -> None:
        if self.listener is not None:
            self.listener.all_failed("the cluster was restarted by a Dask client")


class UserDaskClient(DaskClient):
    """The user's Dask client, with automatic reconnect.

    Each of its streams sends at once and outlives a scheduler that is frozen for a while.
    """

    async def _ensure_connected(self, timeout: float | None = None) -> None:  # noqa: ASYNC109 - Dask's signature
        """Connect or reconnect.

        A stream of Dask's waits 10 ms for more messages, and gives up a silent scheduler after 30 s.
        """
        me: Any = self
        before = me.scheduler_comm
        await cast(Any, super())._ensure_connected(timeout)
        if (stream := me.scheduler_comm) is not None and stream is not before:
            send_at_once(stream)
            _allow_silence(stream.comm.stream.socket, STALLED_SECONDS)


class ObserverClient(DataClient, UserDaskClient):
    """The client of a process that only looks: it reconnects by itself, and unpickles nothing."""


def _allow_silence(connection: socket.socket, seconds: float) -> None:
    """Keep a TCP connection for this long while the other side acknowledges nothing (tcp(7): this overrides the
    keepalive). Only Linux has it.
    """
    if (option := getattr(socket, "TCP_USER_TIMEOUT", None)) is not None:
        connection.setsockopt(socket.IPPROTO_TCP, option, round(1000 * seconds))


class SchedulerConnection:
    """A client of one scheduler, and the tasks that it follows. `close` ends it.

    A task is followed from before it is sent until it has ended or is released, and is posted once: `pop` of a
    dictionary is atomic, and who gets the number posts it or takes the task back.
    """

    def __init__(self, client: PoolClient) -> None:
        self.client = client
        self.epoch = 0
        self._inbox: ReportInbox | None = None
        self._has_answer = False
        """Whether the scheduler has answered. Only Dask's thread uses it."""
        self._topic = ""
        self._followed: dict[str, int] = {}
        """By key: the numbers of the tasks that have not ended."""
        self._known: dict[str, Callable[[int], object] | None] = {}
        """Tasks of the earlier connection that are not followed yet, by key: how to post their end, if they have ended.
        Only Dask's thread uses it.
        """
        self._finished: list[int] = []
        """Numbers of finished tasks that are not posted yet. Only Dask's thread uses it."""

    @property
    def is_open(self) -> bool:
        """Whether the connection is open, as far as is known: a frozen scheduler keeps it open."""
        return self.client.status == "running"

    def listen(self, epoch: int, topic: str, after: int, inbox: ReportInbox) -> None:
        """Listen to the pool, and to a topic after this message number.

        Post every message from now on. Raises NotSent.
        """
        self.epoch = epoch
        self._topic = topic
        self._inbox = inbox
        self.client.listener = self

        def on_topic(event: object) -> None:
            content = content_of(event)
            if type(content) is bytes:
                inbox.on_report(epoch, content)
            elif not isinstance(content, Mapping):
                inbox.on_unreadable(TOPIC, Unreadable("an event of another type"))
            elif cast("Mapping[str, Any]", content).get("request") == epoch and not self._has_answer:
                try:
                    resumed = Resumed.of(cast("Mapping[str, Any]", content))
                except Unreadable as error:
                    inbox.on_unreadable(SCHEDULER, error)
                else:
                    self._has_answer = True
                    self._on_answer(resumed, inbox)

        try:
            self.client.subscribe_topic(POOL_TOPIC, lambda event: inbox.on_pool_news(epoch, content_of(event)))
            self.client.subscribe_topic(topic, on_topic)
        except ClosedClientError as error:
            raise NotSent from error
        cast(Any, self.client)._stream_handlers[CALLS_QUESTION] = lambda request, **_: inbox.on_asked_for_calls(
            epoch, request
        )
        cast(Any, self.client)._stream_handlers[TASK_FAILED] = self._on_failed
        self.client.on_unreadable = inbox.on_unreadable
        self.send(protocol.resume(self.client.id, topic, after, epoch))

    def introduce(self, who: Mapping[str, Any]) -> None:
        """Say who this client is. A scheduler of an earlier release does not know the operation."""
        with contextlib.suppress(RuntimeError):  # Dask's thread has ended: the next connection says it
            cast(Any, self.client.loop).add_callback(self._introduce, who)

    async def _introduce(self, who: Mapping[str, Any]) -> None:
        try:
            async with asyncio.timeout(PING_SECONDS):
                await getattr(cast(Any, self.client.scheduler), INTRODUCE)(client=self.client.id, who=dict(who))
        except Exception as error:  # `skyward calls` then shows its calls without their client
            _log.debug("the scheduler does not know who this client is: %s", error)

    def _on_answer(self, resumed: Resumed, inbox: ReportInbox) -> None:
        # The scheduler says next how these tasks have ended, perhaps before the engine follows them.
        self._known.update(dict.fromkeys(resumed.tasks))
        inbox.on_resumed(self.epoch, resumed)

    # ── out ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message on the client's stream: Dask's thread takes it, and loses it if the scheduler is out of reach.

        Raises NotSent.
        """
        try:
            cast(Any, self.client)._send_to_scheduler(message)
        except ClosedClientError as error:
            raise NotSent from error

    def send_batch(self, number: int, key: str, batch: Batch, address: str | None) -> None:
        """Send a batch as a task, and follow it. If it raises, the batch has not gone out."""
        annotations = {"workers": [address]} if address else {}
        message = {"op": RUN_BATCH, "key": key, "batch": pickle.dumps(batch, protocol=5), "annotations": annotations}
        self._followed[key] = number
        try:
            self.send(message)
        except BaseException:
            self._followed.pop(key, None)
            raise

    def follow(self, number: int, key: str) -> None:
        """Follow a task that an earlier connection has sent; the scheduler's answer has named it."""
        with contextlib.suppress(RuntimeError):  # its thread has ended: the next connection asks for the task's state
            cast(Any, self.client.loop).add_callback(self._follow, number, key)

    def _follow(self, number: int, key: str) -> None:
        if (post := self._known.pop(key, None)) is not None:
            post(number)
        else:
            self._followed[key] = number

    def take_back(self, key: str) -> bool:
        """Release a task that has not ended; False if it has."""
        if self._followed.pop(key, None) is None:
            return False
        self.release([key])
        return True

    def release(self, keys: Collection[str]) -> None:
        """Let the scheduler forget tasks."""
        for key in keys:
            self._followed.pop(key, None)
        with contextlib.suppress(NotSent):  # the scheduler's answer to the next connection names tasks without a caller
            self.send({"op": "client-releases-keys", "keys": list(keys), "client": self.client.id})

    # ── how tasks end, in Dask's thread ──────────────────────────────────────────────────────────────────────────────

    def finished(self, key: str) -> None:
        """Post a finished task, together with others: all that its callers wait for was reported before."""
        self._end(key, self._post_finished)

    def failed(self, key: str, reason: str) -> None:
        """Post a task that has no result."""
        self._end(key, lambda number: self._post_failed(number, reason))

    def _on_failed(self, key: str, reason: str) -> None:
        self.failed(key, f"the scheduler could not take it: {reason}" if reason else WORKER_GONE)

    def all_failed(self, reason: str) -> None:
        """Post all tasks as failed."""
        for key in [*self._followed, *self._known]:
            self.failed(key, reason)

    def _end(self, key: str, post: Callable[[int], object]) -> None:
        if (number := self._followed.pop(key, None)) is not None:
            post(number)
        elif key in self._known:
            self._known[key] = post

    def _post_finished(self, number: int) -> None:
        self._finished.append(number)
        if len(self._finished) == 1:
            cast(Any, self.client.loop).call_later(FINISHED_SECONDS, self._post_all_finished)

    def _post_all_finished(self) -> None:
        numbers, self._finished = self._finished, []
        if self._inbox is not None:
            self._inbox.on_tasks_finished(self.epoch, numbers)

    def _post_failed(self, number: int, reason: str) -> None:
        if self._inbox is not None:
            self._inbox.on_task_failed(self.epoch, number, reason)

    # ── questions ────────────────────────────────────────────────────────────────────────────────────────────────────

    def gather(self, key: str, is_open: Callable[[], bool]) -> Report:
        """Return a task's result, in the form of a report. Raises NodeLost if it is out of reach, or when `is_open`
        returns False; and Unreadable.
        """
        answer = mapping("a result", self.ask("gather", is_open, {"keys": [key]}))
        if answer.get("status") != "OK":
            raise NodeLost("the node that had the result is gone")
        outcomes = mapping("a result", answer.get("data")).get(key)
        return read_outcomes(outcomes.frames if isinstance(outcomes, Opaque) else ())

    def ask(self, operation: str, is_open: Callable[[], bool], what: Mapping[str, Any]) -> Any:
        """Call an operation of the scheduler, and return its answer. Raises NodeLost if there will be none."""
        return call_scheduler(self.client, operation, is_open, what)

    def ping(self, inbox: ReportInbox) -> None:
        """Ask the scheduler how long calls have run: a frozen scheduler keeps its connections and does not answer."""
        with contextlib.suppress(RuntimeError):
            cast(Any, self.client.loop).add_callback(self._ping, inbox)

    async def _ping(self, inbox: ReportInbox) -> None:
        answer: object = None
        try:
            async with asyncio.timeout(PING_SECONDS):
                answer = await getattr(cast(Any, self.client.scheduler), BUSY_TIMES)(topic=self._topic)
        except Exception as error:
            _log.debug("the scheduler does not answer: %s", error)
        inbox.on_ping(self.epoch, answer)

    def list_calls(self, inbox: ReportInbox) -> None:
        """Ask the scheduler which calls the slots have, of all clients."""
        with contextlib.suppress(RuntimeError):
            cast(Any, self.client.loop).add_callback(self._list_calls, inbox)

    async def _list_calls(self, inbox: ReportInbox) -> None:
        try:
            async with asyncio.timeout(LISTING_SECONDS + PING_SECONDS):
                answer = await getattr(cast(Any, self.client.scheduler), LIST_CALLS)()
        except Exception as error:  # a scheduler of an earlier release, or one that is out of reach
            _log.debug("the calls of the pool are not known: %s", error)
        else:
            if answer is not None:  # None: a scheduler that does not know the operation
                inbox.on_calls_listed(self.epoch, answer)

    def close(self) -> None:
        """Close, and end Dask's thread. The scheduler keeps this client's tasks for the next connection."""
        try:
            self.client.close(timeout=CLOSE_SECONDS)
        except Exception:  # the nodes may be gone already, or the scheduler reads nothing
            with contextlib.suppress(Exception):
                cast(Any, self.client)._loop_runner.stop(timeout=CLOSE_SECONDS)
            self.client.status = "closed"  # else Dask closes it again when it is collected


def connect(address: str, certificate: PoolCertificate, timeout_seconds: float) -> PoolClient:
    """Return a Dask client of the pool's cluster, over TLS with the pool's certificate. Its caller closes it.

    Raises OSError.
    """
    settings = {
        # otherwise the last thousand messages stay in memory, with their payloads
        "distributed.admin.low-level-log-length": 0,
        "distributed.comm.timeouts.tcp": "18s",
    }
    with dask.config.set(settings):
        client = PoolClient(
            address_of(address),
            security=_security(certificate),
            set_as_default=False,
            timeout=timeout_seconds,
            name="skyward",
        )
    if (stream := client.scheduler_comm) is None:  # `_reconnect`
        end(client, CLOSE_SECONDS)
        raise ConnectionResetError(f"the scheduler at {address} has closed the connection at once")
    send_at_once(stream)  # our calls are grouped before they come here: no waiting for more
    return client


def connect_observer(address: str, certificate: PoolCertificate) -> ObserverClient:
    """Return a client for a process that only looks, as `connect_user`: it unpickles nothing. Raises OSError."""
    with dask.config.set({"distributed.comm.timeouts.tcp": f"{STALLED_SECONDS:.0f}s"}):
        return ObserverClient(
            address_of(address),
            security=_security(certificate),
            set_as_default=False,
            timeout=USER_SECONDS,
            name="skyward-observer",
        )


def connect_user(address: str, certificate: PoolCertificate) -> distributed.Client:
    """Return a Dask client of the pool's cluster that reconnects automatically. Its caller ends it. Raises OSError.

    It is Dask itself: it unpickles what the pool sends. It uses the user's own Dask settings, except for the TCP
    timeout. A scheduler reads nothing while it imports what a graph needs, and that must not break the connection.
    """
    with dask.config.set({"distributed.comm.timeouts.tcp": f"{STALLED_SECONDS:.0f}s"}):
        return UserDaskClient(
            address, security=_security(certificate), set_as_default=False, timeout=USER_SECONDS, name="skyward-user"
        )


def _security(certificate: PoolCertificate) -> distributed.Security:
    pem = certificate.certificate
    return distributed.Security(
        require_encryption=True, tls_ca_file=pem, tls_client_cert=pem, tls_client_key=certificate.key
    )


def end(client: distributed.Client, timeout_seconds: float) -> None:
    """Close a client and end its thread, in at most three times this time.

    Raises nothing: its scheduler may be gone or frozen.
    """
    it: Any = client
    stream: Any = getattr(getattr(it.scheduler_comm, "comm", None), "stream", None)
    log = logging.getLogger("distributed.client")
    log.addFilter(_is_no_cancel)
    try:
        try:
            client.close(timeout=timeout_seconds)
        except Exception:  # the scheduler reads nothing any more, and messages wait for it
            with contextlib.suppress(Exception):
                it.loop.add_callback(stream.close)
                client.close(timeout=timeout_seconds)  # now the futures are cancelled too
        with contextlib.suppress(Exception):  # its thread has ended, unless the client had closed itself
            it._loop_runner.stop(timeout=timeout_seconds)
        client.status = "closed"  # else Dask closes it again when it is collected
    finally:
        log.removeFilter(_is_no_cancel)


def _is_no_cancel(record: logging.LogRecord) -> bool:
    """Drop the log record of a cancelled reconnect: Dask logs its traceback for a client that is closed meanwhile."""
    return not (record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError))


def call_scheduler(
    client: distributed.Client, operation: str, is_open: Callable[[], bool], what: Mapping[str, Any]
) -> Any:
    """Call an operation of the scheduler, and return its answer.

    Raises NodeLost if it is out of reach, or when `is_open` returns False.
    """
    return wait_in_loop(client, _answer(client, operation, what), is_open)


def wait_in_loop(client: distributed.Client, answer: Any, is_open: Callable[[], bool]) -> Any:
    """Run a coroutine in Dask's thread, and return its result. Raises NodeLost if the scheduler is out of reach, or
    when `is_open` returns False.

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
        raise NodeLost(
            "the pool's scheduler does not answer: the connection to it was lost. Try again: the pool connects again by"
            " itself"
        ) from error


async def _answer(client: Any, operation: str, what: Mapping[str, Any]) -> Any:
    try:
        return await getattr(client.scheduler, operation)(**what)
    except (LookupError, TypeError, ValueError) as error:
        raise NodeLost(f"the pool's scheduler has sent an answer that is none: {error!r}") from error
    except (AttributeError, RuntimeError) as error:
        if client.status == "running":
            raise
        raise ConnectionResetError("the client was closed meanwhile") from error  # Dask has no error for it
    except Exception as error:
        if type(error) is not Exception:
            raise
        # so Dask raises the text of an error that the scheduler has had
        raise NodeLost(f"the pool's scheduler has failed at {operation}: {error!s:.500}") from error


class UserClient:
    """The Dask client that a pool returns (`ComputePool.dask_client`): a separate connection. For any thread.

    The pool gives up its own connection when the scheduler has not answered for some seconds, and makes another; that
    cancels the futures of its client. The user's client waits, and reconnects automatically if the connection breaks.

    States of the client: none -> open (running, or reconnecting) -> closed: by its user, by Dask if it could not
    reconnect, or here, when the scheduler has another address. Then `get` makes another one. `close` ends it with the
    pool.
    """

    def __init__(self, address: Callable[[], str], certificate: PoolCertificate, check: Callable[[], object]) -> None:
        self._address = address
        """Returns the scheduler's address as seen from here: a new head has another one."""
        self._certificate = certificate
        self._check = check
        """Raises NodeLost if the pool has no connection to the scheduler just now, and the pool's error after its end.
        """
        self._getting = threading.Lock()
        """Held while a client is made, which may take a minute: two threads must not make two clients."""
        self._lock = threading.Lock()
        """Guards the attributes below."""
        self._client: distributed.Client | None = None
        self._made_for = ""
        self._is_closed = False

    def get(self) -> distributed.Client:
        """Return the open client, or make one. Raises NodeLost if the scheduler is out of reach, and PoolClosed."""
        with self._getting:
            address = self._address()
            client = self._client if self._made_for == address else None
            if client is not None and client.status == "running":
                return client
            self._check()
            if client is not None and client.status == "connecting":
                return client
            self._put(None, "")
            try:
                client = connect_user(address, self._certificate)
            except OSError as error:
                raise NodeLost(f"the pool's scheduler at {address} does not answer: try again") from error
            self._put(client, address)
            return client

    def close(self) -> None:
        """End the client and cancel its futures. Idempotent. A thread that makes a client meanwhile gets PoolClosed."""
        with self._lock:
            self._is_closed = True
            client, self._client = self._client, None
        if client is not None:
            end(client, USER_CLOSE_SECONDS)

    def _put(self, client: distributed.Client | None, address: str) -> None:
        """Keep this client, and end the one before. Raises PoolClosed."""
        with self._lock:
            unwanted = client if self._is_closed else self._client
            if not self._is_closed:
                self._client, self._made_for = client, address
            is_closed = self._is_closed
        if unwanted is not None:
            end(unwanted, USER_CLOSE_SECONDS)
        if is_closed:
            raise PoolClosed("the pool is closing")
