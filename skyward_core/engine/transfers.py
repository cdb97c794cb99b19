"""Large values to and from nodes, and questions to the scheduler: all that the owner's thread must not wait for.

Each method returns at once. The work is done in "skyward-upload" or "skyward-fetch", and its outcome is posted to the
owner's thread, for the dispatcher.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable

from skyward_core.concurrency.threads import ThreadPool
from skyward_core.engine import actions as do
from skyward_core.engine.calls import KNOWN_SECONDS
from skyward_core.engine.connection import SchedulerConnection
from skyward_core.engine.dispatcher import PING_SECONDS, Dispatcher
from skyward_core.errors import CommandFailed, ConnectionLost, NodeLost, Unreachable
from skyward_core.transport.transport import Transport, Transports
from skyward_core.wire.answers import batches_by_worker
from skyward_core.wire.checks import Unreadable
from skyward_core.wire.messages import SHARED, Item, Outcome, Parcel, Report

UPLOADS = FETCHES = 4  # at once
POLL_SECONDS = 0.1
_log = logging.getLogger("skyward")


class _NotKnownYet(Unreachable):
    """A node has joined, and its lease has not been read here: it will be tried again."""


class Transfers:
    """Owns the threads of transfers. `post` does something in the owner's thread.

    The methods with a connection get a function that returns whether its answer is still of use.
    """

    def __init__(
        self, dispatcher: Dispatcher, transports: Transports, post: Callable[[Callable[[], None]], None]
    ) -> None:
        self._dispatcher = dispatcher
        self._transports = transports
        self._post = post
        self._uploads = ThreadPool(UPLOADS, "skyward-upload")
        self._fetches = ThreadPool(FETCHES, "skyward-fetch")
        self.items: Counter[str] = Counter()
        """How many items are being fetched from each instance. Only the owner's thread uses it."""

    def close(self) -> None:
        """Begin no more transfers. Does not wait for those that run."""
        self._uploads.close()
        self._fetches.close()

    def is_reachable(self, instance_id: str) -> bool:
        """Whether a node can be reached now."""
        transport = self._transport(instance_id)
        return transport is not None and transport.is_connected

    def refuse_other_files(self, report: Report) -> None:
        """Raise Unreadable if a report names a file of this machine where no node of the pool keeps values: such files
        are read, and removed. Those of other machines are checked when they are fetched.
        """
        members = self._dispatcher.members
        for item in report.news if members.is_local else ():
            parcel = item.parcel if isinstance(item, Outcome | Item) else None
            if parcel is not None and parcel.path is not None:
                here = list(members.instances.values())
                if not self._transports.may_be_here(parcel, here):
                    raise Unreadable("a value lies where no node of the pool keeps values")

    def upload(self, action: do.Upload) -> None:
        """Put large arguments and functions into a node's memory."""
        self._uploads.submit(self._upload, action)

    def remove(self, instance_id: str, parcel: Parcel) -> None:
        """Remove a large value from a node's memory."""
        self._uploads.submit(self._remove, instance_id, parcel)

    def discard(self, parcel: Parcel) -> None:
        """Release a large value that no node has got."""
        self._uploads.submit(parcel.release)

    def fetch(self, action: do.Fetch) -> None:
        """Get a large outcome from a node's memory."""
        self._fetches.submit(self._fetch, action)

    def fetch_item(
        self,
        instance_id: str,
        parcel: Parcel,
        deliver: Callable[[Parcel], object],
        fail: Callable[[BaseException], object],
    ) -> None:
        """Get a large item from a node's memory; then `deliver` or `fail` is called, in "skyward-fetch"."""
        self.items[instance_id] += 1
        self._fetches.submit(self._fetch_item, instance_id, parcel, deliver, fail)

    def gather(self, connection: SchedulerConnection, action: do.Gather, is_of_use: Callable[[], bool]) -> None:
        """Get the outcomes of a batch as the result of its task."""
        self._fetches.submit(self._gather, connection, action, is_of_use)

    def ask_load(self, connection: SchedulerConnection, epoch: int, is_of_use: Callable[[], bool]) -> None:
        """Ask the scheduler how busy its workers are."""
        self._fetches.submit(self._ask_load, connection, epoch, is_of_use)

    # ── in their threads ─────────────────────────────────────────────────────────────────────────────────────────────

    def _upload(self, action: do.Upload) -> None:
        number, instance_id = action.number, action.instance_id
        arguments = dict[str, Parcel]()
        functions = dict[str, Parcel | None]()
        try:
            transport = self._transport_of(instance_id)
            for call_id, parcel in action.arguments:
                arguments[call_id] = transport.put(parcel)
            for name, parcel in action.functions:
                functions[name] = transport.put(parcel) if name.startswith(SHARED) else _put_function(transport, parcel)
        except Exception as failure:
            error = failure
            names = [name for name, _ in action.functions]
            is_its_fault = not isinstance(error, OSError | Unreachable)
            self._post(
                lambda: self._dispatcher.upload_failed(number, instance_id, names, error, is_its_fault=is_its_fault)
            )
            for parcel in (*arguments.values(), *filter(None, functions.values())):
                self._remove(instance_id, parcel)
        else:
            self._post(lambda: self._dispatcher.uploaded(number, instance_id, arguments, functions))

    def _fetch(self, action: do.Fetch) -> None:
        call_id, path = action.call_id, str(action.parcel.path)
        try:
            parcel = self._transport_of(action.instance_id).take(action.parcel)
        except Exception as failure:
            error = failure
            is_cut = isinstance(error, ConnectionLost | _NotKnownYet)
            self._post(lambda: self._dispatcher.not_fetched(call_id, path, error, is_cut=is_cut))
        else:
            self._post(lambda: self._dispatcher.fetched(call_id, parcel, path))

    def _fetch_item(
        self,
        instance_id: str,
        parcel: Parcel,
        deliver: Callable[[Parcel], object],
        fail: Callable[[BaseException], object],
    ) -> None:
        try:
            self._await(instance_id)
            taken = self._transport_of(instance_id).take(parcel)
        except Exception as error:
            failure = NodeLost(f"an item of the call could not be fetched: {error}")
            failure.__cause__ = error
            fail(failure)
            self._remove(instance_id, parcel)  # the consumer does not ask for it again
        else:
            deliver(taken)
        finally:
            self._post(lambda: self.items.subtract([instance_id]))

    def _remove(self, instance_id: str, parcel: Parcel) -> None:
        try:
            if (transport := self._transport(instance_id)) is not None:
                transport.release(parcel)
        except Exception as error:
            _log.debug("%s could not be removed from %s, which may be gone: %s", parcel.path, instance_id, error)

    def _gather(self, connection: SchedulerConnection, action: do.Gather, is_of_use: Callable[[], bool]) -> None:
        epoch, number = action.epoch, action.number
        try:
            report = connection.gather(action.key, is_of_use)
            self.refuse_other_files(report)
        except Exception as failure:
            error = failure
            self._post(lambda: self._dispatcher.not_gathered(epoch, number, error))
        else:
            outcomes = {item.call_id: item for item in report.news if isinstance(item, Outcome)}
            self._post(
                lambda: self._dispatcher.gathered(
                    epoch, number, outcomes, report.node, report.instance_id, time.monotonic()
                )
            )

    def _ask_load(self, connection: SchedulerConnection, epoch: int, is_of_use: Callable[[], bool]) -> None:
        until = time.monotonic() + PING_SECONDS
        try:
            answer = connection.ask("skyward_load", lambda: is_of_use() and time.monotonic() < until, {})
            load = batches_by_worker(answer)
        except Exception as error:  # it cannot be reached; pings notice that
            _log.debug("the scheduler does not say how busy its workers are: %s", error)
            load = {}
        self._post(lambda: self._dispatcher.load_known(epoch, load))

    def _transport_of(self, instance_id: str) -> Transport:
        if (transport := self._transport(instance_id)) is None:
            if self._dispatcher.members.may_have_instance(instance_id):
                raise _NotKnownYet(f"{instance_id} has just joined the pool, and this client does not know it yet")
            raise Unreachable(f"{instance_id} is not a node of the pool any more")
        return transport

    def _await(self, instance_id: str) -> None:
        """Wait for some time until this client knows a node that has just joined."""
        until, members = time.monotonic() + KNOWN_SECONDS, self._dispatcher.members
        while (
            not members.has_instance(instance_id)
            and members.may_have_instance(instance_id)
            and time.monotonic() < until
        ):
            time.sleep(POLL_SECONDS)

    def _transport(self, instance_id: str) -> Transport | None:
        node = next((node for node in self._dispatcher.members.nodes.values() if node.instance.id == instance_id), None)
        return self._transports.to(node.instance) if node is not None else None


def _put_function(transport: Transport, function: Parcel) -> Parcel | None:
    """Put a large function into a node's memory; None if there is no room: then it travels in the message."""
    try:
        return transport.put(function)
    except (ConnectionLost, Unreachable):
        raise
    except (OSError, CommandFailed):
        return None
