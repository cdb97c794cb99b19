"""Run bare Dask on hosts over SSH: asyncssh and Dask's commands, all with their default settings."""

from __future__ import annotations

import asyncio
import shlex
import sys
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import asyncssh
import uv
from _place import Place

LISTENING = "Scheduler at:"
SECONDS = 90.0
ENDING_SECONDS = 20.0


class Tunnel:
    """A scheduler on the first host, a worker on each, and a port here that leads to the scheduler."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="tunnel", daemon=True)
        self._connections: list[asyncssh.SSHClientConnection] = []
        self._running: list[tuple[asyncssh.SSHClientConnection, asyncssh.SSHClientProcess[str], str]] = []

    def start(self, meanwhile: Callable[[], object]) -> str:
        """Start everything, and call `meanwhile` at the same time; return the local address. Workers join later."""
        self._thread.start()
        started = asyncio.run_coroutine_threadsafe(self._start(), self._loop)
        meanwhile()
        return started.result(SECONDS)

    def close(self) -> None:
        """End the processes on the hosts, and close the connections."""
        self._wait(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _wait(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(SECONDS)

    async def _start(self) -> str:
        options = {"username": "root", "client_keys": [self._place.key], "known_hosts": None, "config": None}
        self._connections = list(
            await asyncio.gather(*(asyncssh.connect(address, **options) for address in self._place.addresses))
        )
        python = self._place.python
        if python is None:
            python = "/root/dask/bin/python"
            await asyncio.gather(*(self._install(connection) for connection in self._connections))
        head, address = self._connections[0], self._place.addresses[0]
        scheduler = await self._run(
            head,
            f"{python} -m distributed.cli.dask_scheduler --host {address} --port 8786 --dashboard-address {address}:0",
        )
        # The workers start at once, because a worker tries again until the scheduler listens.
        workers = [
            f"{python} -m distributed.cli.dask_worker tcp://{address}:8786 --host {one} --nthreads 1"
            for one in self._place.addresses
        ]
        await asyncio.gather(
            *(self._run(connection, worker) for connection, worker in zip(self._connections, workers, strict=True))
        )
        # The tunnel comes last: it accepts a connection before the scheduler listens, closes it, and Dask's client does
        # not try again.
        async for line in scheduler.stdout:
            if LISTENING in line:
                break
        listener = await head.forward_local_port("127.0.0.1", 0, address, 8786)
        return f"tcp://127.0.0.1:{listener.get_port()}"

    async def _install(self, connection: asyncssh.SSHClientConnection) -> None:
        await asyncssh.scp(uv.find_uv_bin(), (connection, "/root/uv"), preserve=True)
        minor = "{}.{}".format(*sys.version_info)
        words = [
            "/root/uv",
            "pip",
            "install",
            "--quiet",
            "--python",
            "/root/dask/bin/python",
            *self._place.requirements,
        ]
        done = await connection.run(f"/root/uv venv --quiet --python {minor} /root/dask && {shlex.join(words)}")
        if done.exit_status != 0:
            raise RuntimeError(f"the environment could not be created: {done.stderr}")

    async def _run(self, connection: asyncssh.SSHClientConnection, command: str) -> asyncssh.SSHClientProcess[str]:
        process = await connection.create_process(f"cd /tmp && echo $$ && exec {command} 2>&1")
        self._running.append((connection, process, (await process.stdout.readline()).strip()))
        return process

    async def _close(self) -> None:
        # The workers end first. They get the signal by a command, because sshd sends no signals to processes of root.
        await asyncio.gather(*(connection.run(f"kill {pid}") for connection, _, pid in self._running[1:]))
        await asyncio.gather(*(process.wait(timeout=ENDING_SECONDS) for _, process, _ in self._running[1:]))
        connection, scheduler, pid = self._running[0]
        await connection.run(f"kill {pid}")
        await scheduler.wait(timeout=ENDING_SECONDS)
        for connection in self._connections:
            connection.close()
            await connection.wait_closed()
