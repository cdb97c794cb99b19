"""SSH to many hosts at once, for `Hosts`: connections, host keys that were seen, and answers of the scripts."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from skyward_core.concurrency.threads import Threads
from skyward_core.errors import CommandFailed, HostKeyChanged, SkywardError, Unreachable
from skyward_core.machines.instances import Endpoint
from skyward_core.transport.ssh_connection import SSHConnection
from skyward_core.transport.ssh_loop import Loop
from skyward_core.worker.watchdog import INSTANCE_TAG

CONNECT_SECONDS = 10.0
COMMAND_SECONDS = 60.0
MARK = "::skyward "
PROCESS_SHAPE = re.compile(r"/proc/([0-9]+)/environ:(\w+)=(.*)")


@dataclass(frozen=True, slots=True)
class SeenKeys:
    """The host keys that were seen, by address; with None, they are not remembered.

    They are no part of a provider's value: any two are equal.
    """

    seen: dict[str, str] | None = field(default=None, compare=False)

    def of(self, address: str) -> str | None:
        return None if self.seen is None else self.seen.get(address)

    def note(self, address: str, key: str | None) -> None:
        """Remember a key that was verified, or seen for the first time.

        Raises HostKeyChanged if another connection has seen a different key meanwhile.
        """
        if self.seen is not None and key is not None and (before := self.seen.setdefault(address, key)) != key:
            raise HostKeyChanged(f"{address} has shown two host keys: {before} and {key}")


@dataclass(frozen=True, slots=True)
class HostAnswer:
    """The output of a script on a host: values by name, and the tags of each process of an instance."""

    values: Mapping[str, Sequence[str]]
    processes: Sequence[Mapping[str, str]] = ()

    @classmethod
    def read(cls, output: str) -> Self:
        """Read the output of a script; other lines, for instance of a login shell, are ignored."""
        values: dict[str, list[str]] = {}
        processes: dict[str, dict[str, str]] = {}
        for line in output.splitlines():
            if line.startswith(MARK):
                name, _, value = line.removeprefix(MARK).partition(" ")
                values.setdefault(name, []).append(value)
            elif found := PROCESS_SHAPE.fullmatch(line):
                processes.setdefault(found[1], {})[found[2]] = found[3]
        return cls(values, [tags for tags in processes.values() if INSTANCE_TAG in tags])

    def all(self, name: str) -> Sequence[str]:
        return self.values.get(name, ())

    def one(self, name: str) -> str:
        """Return a value; raises CommandFailed if the output does not have it."""
        if name not in self.values:
            raise CommandFailed(f"the host did not report its {name}")
        return self.values[name][0]


class HostConnections:
    """SSH connections to several hosts, used at the same time; closed at exit, even while commands run on them."""

    def __init__(self, endpoints: Mapping[str, Endpoint], keys: SeenKeys) -> None:
        self._endpoints = endpoints
        self._keys = keys
        self._threads = Threads("skyward-hosts")
        self._loop = Loop()
        self._connections = {
            address: SSHConnection(endpoint, loop=self._loop) for address, endpoint in endpoints.items()
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for connection in self._connections.values():
            connection.close()  # this also ends commands that wait in the threads
        self._threads.join()
        self._loop.close()

    def connect(self, straggler_seconds: float | None = None) -> dict[str, SkywardError]:
        """Connect to all hosts; return the errors of those that do not answer.

        With `straggler_seconds` the others may take so much longer than the first host that answers.
        """
        futures = {address: self._threads.submit(self._connect, address) for address in self._endpoints}
        if straggler_seconds is not None:
            pending = set(futures.values())
            while pending and not any(future.done() and future.exception() is None for future in futures.values()):
                pending = wait(pending, return_when=FIRST_COMPLETED).not_done
            wait(pending, straggler_seconds)
            late = Unreachable(f"no SSH connection within {straggler_seconds:g} s of the other hosts'")
            failures: dict[str, SkywardError] = {
                address: late for address, future in futures.items() if not future.done()
            }
            futures = {address: future for address, future in futures.items() if address not in failures}
            return failures | _settled(futures)[1]
        return _settled(futures)[1]

    def _connect(self, address: str) -> None:
        connection = self._connections[address]
        connection.connect(CONNECT_SECONDS)
        self._keys.note(address, connection.host_key)

    def ask(
        self,
        script: str,
        arguments: Mapping[str, Sequence[str]],
        *,
        stdin: str | None = None,
        timeout_seconds: float = COMMAND_SECONDS,
    ) -> tuple[dict[str, HostAnswer], dict[str, SkywardError]]:
        """Run a script with these arguments on each of these hosts; return the answers, and the errors.

        An exit code other than 0 is CommandFailed.
        """
        return _settled(
            {
                address: self._threads.submit(self._ask, address, script, its, stdin, timeout_seconds)
                for address, its in arguments.items()
            }
        )

    def endpoint(self, address: str) -> Endpoint:
        """Return the endpoint of a connected host, with the key that it has shown."""
        return self._endpoints[address].model_copy(update={"host_key": self._connections[address].host_key})

    def _ask(
        self, address: str, script: str, arguments: Sequence[str], stdin: str | None, timeout_seconds: float
    ) -> HostAnswer:
        done = self._connections[address].run(
            shlex.join(["sh", "-c", script, "skyward", *arguments]), stdin=stdin, timeout_seconds=timeout_seconds
        )
        if done.exit_code:
            raise CommandFailed(f"a command failed on {address}", done.exit_code, done.output)
        return HostAnswer.read(done.output)


def _settled[T](futures: Mapping[str, Future[T]]) -> tuple[dict[str, T], dict[str, SkywardError]]:
    """Wait for all; return the results, and the errors that are ours. Raises other errors."""
    results: dict[str, T] = {}
    failures: dict[str, SkywardError] = {}
    for address, future in futures.items():
        try:
            results[address] = future.result()
        except SkywardError as error:
            failures[address] = error
    return results, failures
