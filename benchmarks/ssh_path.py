"""Compare our SSH path with OpenSSH's `ssh -L` and direct TCP, to the same host of the test bed.

It sends a tiny message and a payload through a forwarded port. Then it measures what only an SSH connection can do:
files to the host's memory and back, and commands. The paths take turns in each round, and the table shows the median of
the rounds. It needs root (`python -m tests.testbed preflight` shows what is missing).

    python benchmarks/ssh_path.py --rounds 5 --megabytes 1000
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skyward_core.machines.instances import Endpoint
from skyward_core.transport.ssh_commands import Shell
from skyward_core.transport.ssh_connection import SSHConnection

HERE = Path(__file__).resolve().parent
PEER_PORT = 7000
TINY_BYTES = 200
TINY_TURNS = 500
COMMAND_TURNS = 50
BLOCK_BYTES = 1 << 20
ARRAY_BYTES = 100 << 20
VALUE = "/dev/shm/benchmark-value"
MB = 1e6

type Address = tuple[str, int]


@dataclass(frozen=True)
class Row:
    """A line of the table: one value for each round, in `unit`.

    A path has no values if it cannot do this, or if it does it differently.
    """

    what: str
    unit: str
    ours: Sequence[float]
    openssh: Sequence[float] = ()
    direct: Sequence[float] = ()
    more_is_better: bool = False

    @property
    def ratio(self) -> float | None:
        """How many times better our path is than OpenSSH; above 1 is better."""
        if not self.openssh:
            return None
        ours, openssh = statistics.median(self.ours), statistics.median(self.openssh)
        return ours / openssh if self.more_is_better else openssh / ours


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--megabytes", type=int, default=1000, help="size of the payload, in units of 10^6 bytes")
    parser.add_argument("--peer", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peer:
        _serve()
    elif reason := why_not():
        sys.exit(reason)
    else:
        print(table(measure(options.rounds, options.megabytes * 10**6)))


def why_not() -> str | None:
    """Return in one line why this machine cannot make hosts; None if it can."""
    return testbed().why_not()


def measure(rounds: int = 5, payload_bytes: int = 10**9) -> list[Row]:
    """Make a host, measure all paths to it, and remove it; a round with a payload of 1 GB takes about 12 seconds."""
    measured: dict[tuple[str, str], list[float]] = defaultdict(list)
    with testbed().Fleet() as fleet, contextlib.ExitStack() as undo:
        host = fleet.create()
        undo.enter_context(_peer(host))
        endpoint = Endpoint(
            host=host.ip,
            user=host.user,
            key=str(host.key_path),
            known_hosts=str(host.known_hosts_path),
            config="/dev/null",
        )
        connection = undo.enter_context(SSHConnection(endpoint).connect(20))
        shell = undo.enter_context(connection.shell())
        paths: dict[str, Address] = {
            "direct": (host.ip, PEER_PORT),
            "openssh": ("127.0.0.1", undo.enter_context(_openssh_forward(host))),
            "ours": ("127.0.0.1", connection.forward_local("127.0.0.1", PEER_PORT)),
        }
        payload = bytes(payload_bytes)
        for address in paths.values():  # the first connection of a path is not measured
            _tiny(address)
        for _ in range(rounds):
            for name, address in paths.items():
                measured["tiny", name].append(_tiny(address))
                measured["up", name].append(_up(address, payload))
                measured["down", name].append(_down(address, payload_bytes))
            for what, value in _files_and_commands(connection, shell, payload).items():
                measured[what, "ours"].append(value)
            for what, value in _openssh_commands(host, payload).items():
                measured[what, "openssh"].append(value)
    megabytes = f"{payload_bytes / MB:,.0f} MB"
    return [
        _row("tiny round trip through a forward", "ms", measured, "tiny"),
        _row(f"{megabytes} to the host through a forward", "MB/s", measured, "up", more_is_better=True),
        _row(f"{megabytes} from the host through a forward", "MB/s", measured, "down", more_is_better=True),
        _row(
            f"{megabytes} into a file in the host's memory (OpenSSH: with a login)",
            "MB/s",
            measured,
            "put",
            more_is_better=True,
        ),
        _row(f"{megabytes} from that file (OpenSSH: with a login)", "MB/s", measured, "fetch", more_is_better=True),
        _row("100 MiB to the host and back, as files", "s", measured, "back"),
        _row("a command, `run`", "ms", measured, "run"),
        _row("a command, `shell().run`", "ms", measured, "shell"),
    ]


def table(rows: Sequence[Row]) -> str:
    """Return the rows as Markdown."""
    lines = [
        "| | unit | our SSH path | OpenSSH | direct TCP | to OpenSSH |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        cells = [_shown(row.ours), _shown(row.openssh), _shown(row.direct), f"{row.ratio:.2f}" if row.ratio else ""]
        lines.append(f"| {row.what} | {row.unit} | {' | '.join(cells)} |")
    return "\n".join(
        [
            *lines,
            "",
            "To OpenSSH: how many times better our path is than `ssh` with aes128-gcm, the cipher of both; above 1 is better.",
        ]
    )


def _shown(values: Sequence[float]) -> str:
    if not values:
        return ""
    low, middle, high = (
        f"{value:.3g}" if value < 100 else f"{value:,.0f}"
        for value in (min(values), statistics.median(values), max(values))
    )
    return f"{middle} [{low}, {high}]"


def _row(
    what: str, unit: str, measured: Mapping[tuple[str, str], Sequence[float]], key: str, *, more_is_better: bool = False
) -> Row:
    scale = {"ms": 1e3, "s": 1.0, "MB/s": 1 / MB}[unit]
    values = {
        name: [value * scale for value in measured[key, name]]
        for name in ("ours", "openssh", "direct")
        if (key, name) in measured
    }
    return Row(what, unit, more_is_better=more_is_better, **values)


# ── what is measured ─────────────────────────────────────────────────────────────────────────────────────────────────


def _tiny(address: Address) -> float:
    """Return the median seconds of a message to the host and back."""
    taken: list[float] = []
    message = bytes(TINY_BYTES)
    with _request_to_peer(address, b"e", 0) as peer:
        for _ in range(TINY_TURNS):
            began = time.perf_counter()
            peer.sendall(message)
            peer.recv(TINY_BYTES, socket.MSG_WAITALL)
            taken.append(time.perf_counter() - began)
    return statistics.median(taken)


def _up(address: Address, payload: bytes) -> float:
    """Return the bytes per second to the host, until the host confirms that it has all of them."""
    with _request_to_peer(address, b"u", len(payload)) as peer:
        began = time.perf_counter()
        peer.sendall(payload)
        _check(peer.recv(1) == b"k")
        return len(payload) / (time.perf_counter() - began)


def _down(address: Address, size: int) -> float:
    """Return the bytes per second from the host."""
    block = bytearray(BLOCK_BYTES)
    began = time.perf_counter()
    with _request_to_peer(address, b"d", size) as peer:
        left = size
        while left and (got := peer.recv_into(block)):
            left -= got
    _check(left == 0)
    return size / (time.perf_counter() - began)


def _files_and_commands(connection: SSHConnection, shell: Shell, payload: bytes) -> dict[str, float]:
    put, fetch = _there_and_back(connection, memoryview(payload))
    return {
        "put": len(payload) / put,
        "fetch": len(payload) / fetch,
        "back": sum(_there_and_back(connection, memoryview(bytes(ARRAY_BYTES)))),
        "run": _commands(connection.run),
        "shell": _commands(shell.run),
    }


def _there_and_back(connection: SSHConnection, payload: memoryview) -> tuple[float, float]:
    """Return the seconds to write a file in the host's memory, and the seconds to read and remove it."""
    began = time.perf_counter()
    connection.put(payload, VALUE, mode=0o600)
    there = time.perf_counter()
    _check(len(connection.fetch(VALUE, remove=True)) == len(payload))
    return there - began, time.perf_counter() - there


def _commands(run: Callable[[str], Any]) -> float:
    taken: list[float] = []
    for _ in range(COMMAND_TURNS):
        began = time.perf_counter()
        _check(run("true").exit_code == 0)
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


def _openssh_commands(host: Any, payload: bytes) -> dict[str, float]:
    """Measure files and commands with `ssh`, which logs in each time."""
    began = time.perf_counter()
    _openssh(host, f"umask 077; cat >{VALUE}", payload)
    there = time.perf_counter()
    _check(len(_openssh(host, f"cat {VALUE}; rm {VALUE}")) == len(payload))
    ended = time.perf_counter()
    _openssh(host, "true")
    alone = time.perf_counter() - ended
    return {"put": len(payload) / (there - began), "fetch": len(payload) / (ended - there), "run": alone}


# ── the paths ────────────────────────────────────────────────────────────────────────────────────────────────────────


@contextlib.contextmanager
def _peer(host: Any) -> Generator[None]:
    """Run the peer in the network of the host."""
    command = ["nsenter", f"--net=/proc/{host.pid}/ns/net", sys.executable, str(Path(__file__).resolve()), "--peer"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        yield
    finally:
        process.kill()
        process.communicate()


@contextlib.contextmanager
def _openssh_forward(host: Any) -> Generator[int]:
    """Run `ssh -L`, and yield the local port."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    forward = ["-N", "-o", "ExitOnForwardFailure=yes", "-L", f"127.0.0.1:{port}:127.0.0.1:{PEER_PORT}"]
    process = subprocess.Popen([*_ssh(host)[:-1], *forward, _ssh(host)[-1]])
    try:
        deadline = time.monotonic() + 20
        while True:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except ConnectionRefusedError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.02)
        yield port
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(10)


def _openssh(host: Any, command: str, text: bytes = b"") -> bytes:
    return subprocess.run([*_ssh(host), command], input=text, stdout=subprocess.PIPE, check=True, timeout=120).stdout


def _ssh(host: Any) -> list[str]:
    return host.ssh("Ciphers=aes128-gcm@openssh.com")


@contextlib.contextmanager
def _request_to_peer(address: Address, kind: bytes, size: int) -> Generator[socket.socket]:
    with socket.create_connection(address, timeout=120) as peer:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peer.sendall(kind + size.to_bytes(8, "big"))
        yield peer


def _serve() -> None:
    """Serve as the peer: a request is a letter and a size. It ends when it is killed."""
    with socket.create_server(("0.0.0.0", PEER_PORT)) as listening:
        print("ready", flush=True)
        while True:
            peer, _ = listening.accept()
            threading.Thread(target=_answer, args=(peer,), daemon=True).start()


def _answer(peer: socket.socket) -> None:
    with peer, contextlib.suppress(OSError):
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        request = peer.recv(9, socket.MSG_WAITALL)
        left, block = int.from_bytes(request[1:], "big"), bytearray(BLOCK_BYTES)
        match request[:1]:
            case b"u":
                while left and (got := peer.recv_into(block)):
                    left -= got
                peer.sendall(b"k" if not left else b"?")
            case b"d":
                while left:
                    left -= peer.send(memoryview(block)[:left])
            case _:
                while message := peer.recv(65536):
                    peer.sendall(message)


def testbed() -> Any:
    """Return the package of the test bed, which is in the repository and is not installed."""
    if str(HERE.parent) not in sys.path:
        sys.path.append(str(HERE.parent))
    return importlib.import_module("tests.testbed")


def _check(is_right: bool) -> None:
    if not is_right:
        raise SystemExit("a path returned a wrong result, so its time is not valid")


if __name__ == "__main__":
    main()
