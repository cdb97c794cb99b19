"""One rank's side of a group: how it finds the hub, and what it learns from it."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, NoReturn

from skyward_core.distributed.hub import Hub, HubServer, Message, keep_alive, line_of, proof
from skyward_core.errors import GroupNotFormed, RankFailed

FIRST_PORT, LAST_PORT = 20_000, 30_000  # below Linux's ephemeral ports, ip(7)
PORTS_TRIED = 8
CONNECT_SECONDS = 2.0
PAUSE_SECONDS = 0.1
HOLD_SECONDS = 20.0
"""How long a rank that did not fail first waits to be stopped. The client stops it once it has the first error."""


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
