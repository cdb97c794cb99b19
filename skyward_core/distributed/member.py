"""One rank's side of a group: how it finds the hub, and what it learns from it."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import json
import os
import secrets
import selectors
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, BinaryIO, NoReturn

from skyward_core.errors import GroupNotFormed, RankFailed

SETTLE_SECONDS = 0.2
"""How long the first error waits for a crash that may have caused it. The crash of another rank breaks connections, and
their errors may arrive before the end of its process is known.
"""
LINE_BYTES = 16 << 20
UNPROVED_BYTES = 4096
"""How much of a connection is read before it has proved that it has the key."""
SEND_SECONDS = 10.0
FIRST_PORT, LAST_PORT = 20_000, 30_000  # below Linux's ephemeral ports, ip(7)
PORTS_TRIED = 8
CONNECT_SECONDS = 2.0
PAUSE_SECONDS = 0.1
HOLD_SECONDS = 20.0
"""How long a rank that did not fail first waits to be stopped. The client stops it once it has the first error."""


type Message = dict[str, Any]
type Letter = tuple[int, Message]
"""A rank, and a message for it."""


# The hub of a group, in the process of rank 0: it knows which ranks are there, passes values, and decides who failed
# first.
#
# `Hub` is the pure state machine; `HubServer` runs it on a socket, in a separate thread. Messages are lines of JSON.


class HubState(StrEnum):
    """Where a group is in its life."""

    GATHERING = "gathering"  # some ranks have not come; those that are there may leave and come again
    FORMED = "formed"  # all have come, and functions may run
    FAILED = "failed"  # a rank failed or did not come; the others get to know which
    ENDED = "ended"  # the functions of all ranks have returned


class Hub:
    """The states of one group. Each method takes something that happened and returns the messages to send."""

    def __init__(self, world_size: int, deadline: float) -> None:
        self.state = HubState.GATHERING
        self.world_size = world_size
        self._deadline = deadline
        self._present = set[int]()
        self._done = set[int]()
        self._values = {rank: deque[Any]() for rank in range(world_size)}
        self._reported: tuple[int, str, float] | None = None
        """The first rank that reported an error, its text, and until when a crash takes precedence."""
        self._verdict: Message | None = None

    @property
    def next_deadline(self) -> float | None:
        """When `expire` has to be called, on the clock of `now`."""
        if self.state is HubState.GATHERING:
            return self._deadline
        return self._reported[2] if self._reported and self._verdict is None else None

    def refusal(self) -> str:
        """Return why no rank may join now; empty if one may."""
        if self.state is HubState.GATHERING:
            return ""
        return f"the group is {self.state} already: a rank that was lost cannot join it again"

    def join(self, rank: int) -> list[Letter]:
        """Take a rank in that may join."""
        self._present.add(rank)
        if len(self._present) < self.world_size:
            return []
        self.state = HubState.FORMED
        return self._to_all({"formed": True})

    def receive(self, rank: int, message: Message, now: float) -> list[Letter]:
        """Take a message of a rank in: a value for all, an error, a crash, or the end of its function.

        A crash needs not wait for what may have caused it.
        """
        match message:
            case {"value": value}:
                return self._exchange(rank, value)
            case {"failed": str(text)}:
                return self._fail(rank, text, now)
            case {"crashed": str(text)}:
                return self._decide(rank, text)
            case {"done": True}:
                self._done.add(rank)
                return self._end()
            case _:
                return []

    def leave(self, rank: int) -> list[Letter]:
        """Note the end of a rank's connection: its process is gone, unless its function has returned or has failed."""
        self._present.discard(rank)
        is_expected = rank in self._done or (self._reported is not None and self._reported[0] == rank)
        if self.state is not HubState.FORMED or is_expected:
            return []
        return self._decide(rank, "its process ended, or its node is out of reach")

    def expire(self, now: float) -> list[Letter]:
        """Do what is due at `next_deadline`."""
        if self.next_deadline is None or now < self.next_deadline:
            return []
        if self.state is HubState.GATHERING:
            self.state = HubState.FAILED
            return self._to_all({"absent": sorted(set(range(self.world_size)) - self._present)})
        assert self._reported is not None
        return self._decide(*self._reported[:2])

    def _exchange(self, rank: int, value: Any) -> list[Letter]:
        self._values[rank].append(value)
        if self.state is not HubState.FORMED or not all(self._values.values()):
            return []
        return self._to_all({"values": [self._values[other].popleft() for other in range(self.world_size)]})

    def _fail(self, rank: int, text: str, now: float) -> list[Letter]:
        if self._verdict is not None:
            return [(rank, self._verdict)]
        if self._reported is None:
            self._reported = (rank, text, now + SETTLE_SECONDS)
        return []

    def _decide(self, rank: int, text: str) -> list[Letter]:
        if self._verdict is not None:
            return []
        self.state = HubState.FAILED
        self._verdict = {"first": rank, "text": text}
        return self._to_all(self._verdict)

    def _end(self) -> list[Letter]:
        if self.state is not HubState.FORMED or len(self._done) < self.world_size:
            return []
        self.state = HubState.ENDED
        return self._to_all({"ended": True})

    def _to_all(self, message: Message) -> list[Letter]:
        """Address a message to all ranks that are there. Rank 0 is the last one, because it may end its process, and
        this hub, as soon as it has the message.
        """
        return [(rank, message) for rank in sorted(self._present, reverse=True)]


def proof(key: str, *parts: object) -> str:
    """Return the proof that the sender has the group's key, for the nonces of both sides."""
    return hmac.digest(key.encode(), json.dumps(parts).encode(), hashlib.sha256).hex()


def line_of(message: Message) -> bytes:
    """Return a message as it is sent."""
    return json.dumps(message).encode() + b"\n"


class _Peer:
    """One connection to the hub. Its rank is known once it has proved that it has the key."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.nonce = secrets.token_hex(16)
        self.rank: int | None = None
        self._received = b""

    def messages(self) -> list[Message] | None:
        """Return what has arrived; None at the end of the connection. Raises ValueError for anything but messages."""
        limit = UNPROVED_BYTES if self.rank is None else LINE_BYTES
        try:
            data = self.connection.recv(min(1 << 16, limit - len(self._received)))
        except OSError:
            return None
        if not data:
            return None
        *lines, self._received = (self._received + data).split(b"\n")
        if len(self._received) >= limit:
            raise ValueError("a line is too long")
        found = [json.loads(line) for line in lines]
        if not all(isinstance(one, dict) for one in found):
            raise ValueError("no message")
        return found

    def send(self, message: Message) -> bool:
        """Send a message; return whether the connection took it."""
        try:
            self.connection.sendall(line_of(message))
        except OSError:
            return False
        return True


class HubServer:
    """Runs a hub on a listening socket, which it owns, as it owns the connections. `close` ends all of it."""

    def __init__(self, hub: Hub, listener: socket.socket, key: str) -> None:
        self._hub = hub
        self._listener = listener
        self._key = key
        self._peers = dict[int, _Peer]()
        self._wake, self._waking = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ, None)
        self._selector.register(self._wake, selectors.EVENT_READ, None)
        self._is_closing = False
        self._thread = threading.Thread(target=self._serve, name="skyward-group-hub", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread, and close the listener and all connections."""
        self._is_closing = True
        self._waking.send(b"c")
        self._thread.join()
        for key in list(self._selector.get_map().values()):
            if isinstance(key.data, _Peer):
                key.data.connection.close()
        self._selector.close()
        for end in (self._listener, self._wake, self._waking):
            end.close()

    def _serve(self) -> None:
        while not self._is_closing:
            deadline = self._hub.next_deadline
            wait_seconds = None if deadline is None else max(0.0, deadline - time.monotonic())
            for key, _ in self._selector.select(wait_seconds):
                if key.fileobj is self._listener:
                    self._accept()
                elif isinstance(key.data, _Peer):
                    self._read(key.data)
            self._send(self._hub.expire(time.monotonic()))

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        keep_alive(connection)
        connection.settimeout(SEND_SECONDS)
        peer = _Peer(connection)
        self._selector.register(connection, selectors.EVENT_READ, peer)
        if not peer.send({"nonce": peer.nonce}):
            self._drop(peer)

    def _read(self, peer: _Peer) -> None:
        try:
            messages = peer.messages()
        except ValueError:  # another program's client
            messages = None
        if messages is None:
            self._drop(peer)
            return
        for message in messages:
            if peer.rank is not None:
                self._send(self._hub.receive(peer.rank, message, time.monotonic()))
            elif not self._welcome(peer, message):
                self._drop(peer)
                return

    def _welcome(self, peer: _Peer, message: Message) -> bool:
        """Take a connection in that proves to be a rank of this group; return whether it did."""
        rank, nonce = message.get("join"), message.get("nonce")
        expected = proof(self._key, "rank", peer.nonce, nonce, rank)
        is_proved = hmac.compare_digest(str(message.get("proof")).encode(), expected.encode())
        if not is_proved or not isinstance(rank, int) or rank not in range(self._hub.world_size):
            return False
        refusal = self._hub.refusal()
        peer.send({"proof": proof(self._key, "hub", peer.nonce, nonce, rank), "refused": refusal})
        if refusal:
            return False
        if (
            earlier := self._peers.get(rank)
        ) is not None:  # its node was replaced, and nothing has ended its connection
            earlier.rank = None
            self._drop(earlier)
        peer.rank = rank
        self._peers[rank] = peer
        self._send(self._hub.join(rank))
        return True

    def _send(self, letters: list[Letter]) -> None:
        for rank, message in letters:
            if (peer := self._peers.get(rank)) is not None and not peer.send(message):
                self._drop(peer)

    def _drop(self, peer: _Peer) -> None:
        with contextlib.suppress(KeyError, ValueError):  # it was dropped before
            self._selector.unregister(peer.connection)
        peer.connection.close()
        if peer.rank is not None and self._peers.get(peer.rank) is peer:
            del self._peers[peer.rank]
            self._send(self._hub.leave(peer.rank))


def keep_alive(connection: socket.socket) -> None:
    """Let a connection end some 15 seconds after the other machine is gone, although nothing is sent."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 5)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


@dataclass(frozen=True, slots=True)
class Place:
    """One process of a group, as torchrun numbers them. `key` is a secret that all ranks of this call have."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node: int
    nodes: int
    head_address: str
    key: str

    @property
    def run_id(self) -> str:
        """A name of the group that is no secret."""
        return hashlib.sha256(self.key.encode()).hexdigest()[:16]

    @property
    def ports(self) -> list[int]:
        """The ports on which the hub may listen, in order: all ranks compute the same, and each call others."""
        digest = hashlib.sha512(f"ports {self.key}".encode()).digest()
        numbers = (int.from_bytes(digest[start : start + 8]) for start in range(0, 8 * PORTS_TRIED, 8))
        return [FIRST_PORT + number % (LAST_PORT - FIRST_PORT) for number in numbers]


def open_hub(place: Place, deadline: float) -> HubServer:
    """Listen on the first port that is free, at the address by which the other nodes know this one.

    Raises GroupNotFormed if all are taken.
    """
    for port in place.ports:
        listener = socket.socket(socket.AF_INET6 if ":" in place.head_address else socket.AF_INET)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((place.head_address, port))
            listener.listen(max(128, place.world_size))
        except OSError as error:
            listener.close()
            if error.errno != errno.EADDRINUSE:
                raise GroupNotFormed(f"rank 0 cannot listen at {place.head_address}: {error}") from error
            continue
        return HubServer(Hub(place.world_size, deadline), listener, place.key)
    raise GroupNotFormed(f"the ports {place.ports} at {place.head_address} are taken: make the call again")


def find_hub(place: Place, deadline: float) -> tuple[socket.socket, BinaryIO]:
    """Connect to the hub of this group; return the connection and its reading side.

    Raises GroupNotFormed at the deadline, or if the hub refuses this rank.
    """
    while True:
        for port in place.ports:
            try:
                connection = socket.create_connection((place.head_address, port), CONNECT_SECONDS)
            except OSError:
                continue
            lines = connection.makefile("rb")
            if _is_hub(place, connection, lines):
                connection.settimeout(None)
                keep_alive(connection)
                return connection, lines
            lines.close()
            connection.close()
        if time.monotonic() > deadline:
            raise GroupNotFormed(
                f"a group of {place.world_size} ranks was not formed in time: rank 0 did not come (rank"
                f" {place.rank} found no hub at {place.head_address}, ports {', '.join(map(str, place.ports))}). Can"
                " the nodes reach each other?",
                absent=(0,),
            )
        time.sleep(PAUSE_SECONDS)


def _is_hub(place: Place, connection: socket.socket, lines: BinaryIO) -> bool:
    """Join the hub at the other end of a connection; return False if it is none of this group.

    Raises GroupNotFormed if the hub refuses.
    """
    nonce = secrets.token_hex(16)
    try:
        theirs = json.loads(lines.readline(4096))["nonce"]
        answer = {"join": place.rank, "nonce": nonce, "proof": proof(place.key, "rank", theirs, nonce, place.rank)}
        connection.sendall(line_of(answer))
        welcome = json.loads(lines.readline(4096))
        is_hub = secrets.compare_digest(welcome["proof"], proof(place.key, "hub", theirs, nonce, place.rank))
    except (OSError, ValueError, KeyError, TypeError):  # another program listens there
        return False
    if is_hub and welcome["refused"]:
        raise GroupNotFormed(f"rank {place.rank} came too late: {welcome['refused']}")
    return is_hub


def end_process(text: str) -> NoReturn:
    """End this process. It hangs in its function, and nothing else has stopped it."""
    sys.stderr.write(f"skyward: {text}\n")
    sys.stderr.flush()
    os._exit(1)


class Member:
    """A rank's connection to its hub. A separate thread reads it, so that a failure elsewhere is known at once.

    `hold_seconds` and `stop` are for tests: see HOLD_SECONDS and `end_process`.
    """

    def __init__(
        self,
        place: Place,
        connection: socket.socket,
        lines: BinaryIO,
        hold_seconds: float = HOLD_SECONDS,
        stop: Callable[[str], object] = end_process,
    ) -> None:
        self.place = place
        self.address: str = connection.getsockname()[0]
        """This node's address in the network of the group."""
        self._connection = connection
        self._lines = lines
        self._hold_seconds = hold_seconds
        self._stop = stop
        self._changed = threading.Condition()
        self._received = list[Message]()
        self._absent: Sequence[int] = ()
        self._first: tuple[int, str] | None = None
        self._is_over = threading.Event()
        """The function has returned or raised, or its process is gone: its rank needs not be stopped any more."""
        self._reader = threading.Thread(target=self._read, name="skyward-group", daemon=True)
        self._reader.start()

    def wait_until_formed(self) -> None:
        """Return when all ranks are there.

        Raises GroupNotFormed with the ranks that did not come, and RankFailed if the hub is lost. Then the process of
        rank 0 has ended, possibly after the group was formed, and its error is the first one.
        """
        try:
            self._next("formed")
        except RankFailed:
            absent = self._absent
            if not absent:
                raise
            ranks = f"rank{'s' * (len(absent) > 1)} {', '.join(map(str, absent))}"
            raise GroupNotFormed(
                f"a group of {self.place.world_size} ranks was not formed in time: {ranks} did not come", absent=absent
            ) from None

    def exchange(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in their order. Each rank must call this the same number of times.

        Values are what JSON can hold. Raises RankFailed if a rank fails before.
        """
        self._send({"value": value})
        return self._next("values")["values"]

    def finish(self) -> None:
        """Wait until the functions of all ranks have returned. Raises RankFailed if one fails instead."""
        self._send({"done": True})
        self._next("ended")
        self._is_over.set()

    def fail(self, error: BaseException, *, is_certain: bool = False) -> None:
        """Report the error of this rank. Returns if it failed first; else waits to be stopped, and raises RankFailed.

        To be called before anything is torn down, because that makes other ranks fail. `is_certain`: no failure of
        another rank can have caused it.
        """
        text = f"{type(error).__name__}: {error}"
        self._send({"crashed" if is_certain else "failed": text[:2000]})
        with self._changed:
            self._changed.wait_for(lambda: self._first is not None)
        assert self._first is not None
        first, why = self._first
        if first != self.place.rank:
            self._is_over.wait(self._hold_seconds)
        self._is_over.set()
        if first != self.place.rank:
            raise RankFailed(f"rank {first} of {self.place.world_size} failed first: {why}", first) from error

    def close(self) -> None:
        """Close the connection, and end the thread and any wait of another thread. It may be called again."""
        self._is_over.set()
        try:
            self._connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self._reader.join()
        self._lines.close()
        self._connection.close()

    def _send(self, message: Message) -> None:
        try:
            self._connection.sendall(line_of(message))
        except OSError:
            pass  # the reader sees the end of the connection

    def _next(self, kind: str) -> Message:
        """Wait for the next message of this kind. Raises RankFailed if there will be none."""
        with self._changed:
            self._changed.wait_for(lambda: self._received or self._first is not None)
            if self._received:
                message = self._received.pop(0)
                assert kind in message, f"{kind} was expected, and {message} came"
                return message
        assert self._first is not None
        first, why = self._first
        raise RankFailed(f"rank {first} of {self.place.world_size} failed first: {why}", first)

    def _read(self) -> None:
        while True:
            try:
                line = self._lines.readline()
                message = json.loads(line) if line else {}
            except (OSError, ValueError):
                message = {}
            with self._changed:
                match message:
                    case {"first": int(rank), "text": str(text)}:
                        self._first = rank, text
                    case {"absent": [*ranks]}:
                        self._absent = tuple(ranks)
                        self._first = ranks[0], "it did not come"
                    case {} if not message:
                        self._first = self._first or (0, "its process ended, or its node is out of reach")
                    case _:
                        self._received.append(message)
                self._changed.notify_all()
            if self._first is not None:
                break
        first, why = self._first
        if first != self.place.rank and not self._is_over.wait(2 * self._hold_seconds):
            self._stop(f"rank {self.place.rank} is stopped, because rank {first} failed: {why}")
