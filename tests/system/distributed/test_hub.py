"""The hub's states: who is there, values from all to all, and which rank failed first."""

import json
import socket

from skyward_core.distributed.hub import UNPROVED_BYTES, line_of, proof
from tests.unit.distributed.test_hub import (  # noqa: F401 - fixtures
    connection,
)


def read_line(connection: socket.socket) -> dict[str, str]:
    with connection.makefile("rb") as file:
        return json.loads(file.readline())


def test_a_connection_without_a_proof_is_closed_after_four_kilobytes(connection: socket.socket) -> None:
    """It sends no end of a line: the hub neither waits for one, nor keeps what comes."""
    assert "nonce" in read_line(connection)
    connection.sendall(b"x" * UNPROVED_BYTES)
    assert connection.recv(1) == b""
    assert UNPROVED_BYTES == 4096


def test_a_rank_with_a_proof_may_send_longer_lines(connection: socket.socket) -> None:
    """Its first line is short; a value of another megabyte arrives."""
    nonce = read_line(connection)["nonce"]
    connection.sendall(line_of({"join": 0, "nonce": "n", "proof": proof("key", "rank", nonce, "n", 0)}))
    assert read_line(connection)["proof"] == proof("key", "hub", nonce, "n", 0)
    connection.sendall(line_of({"value": "x" * (1 << 20)}))
    received = b""
    while not received.endswith(b"]}\n"):
        received += connection.recv(1 << 16)
    assert len(received) > 1 << 20
