"""`Observer`: connections to the nodes of a live pool and to its scheduler, for as long as one command looks."""

from __future__ import annotations

import importlib
import json
import time
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, cast
from urllib.parse import urlsplit

from skyward_core.engine.certificates import PoolCertificate
from skyward_core.errors import CommandFailed, NodeLost
from skyward_core.live.pool_nodes import PoolNodes
from skyward_core.machines.instances import Instance
from skyward_core.session.sealed_lease import KeysInMemory
from skyward_core.transport.transport import Transport, Transports
from skyward_core.worker.pages import START, serve_pages

if TYPE_CHECKING:
    import distributed

REACH_SECONDS = 30.0
END_SECONDS = 2.0
NO_LEASE_SECONDS = 1.0
"""No node gets a lease from an observer; its transports must have a number."""


class Observer:
    """Connects to what is asked for, and closes it at the end of the context."""

    def __init__(self, nodes: PoolNodes) -> None:
        self.pool_id = nodes.pool_id
        self._lease = nodes.lease
        self._certificate = None if nodes.keys is None else nodes.keys.certificate
        self._in_memory = KeysInMemory()
        self._transports = Transports(NO_LEASE_SECONDS, lambda _: 0)
        self._client: distributed.Client | None = None
        self.instances = nodes.instances
        if nodes.lease is not None and nodes.keys is not None:
            lease = self._in_memory.with_keys(nodes.lease, nodes.keys.ssh_keys)
            self.instances = tuple(node.instance for node in lease.nodes)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._client is not None:
                importlib.import_module("skyward_core.engine.connection").end(self._client, END_SECONDS)
        finally:
            self._transports.close()
            self._in_memory.close()

    def reach(self, instance: Instance) -> Transport:
        """Return a transport to a node, connected. Raises NodeLost (it has no address), Unreachable, errors of keys."""
        if instance.endpoint is None and instance.directory is None:
            raise NodeLost(f"{instance.id} has no address yet: try again when it has started")
        transport = self._transports.to(instance)
        if not transport.is_connected:
            transport.visit(timeout_seconds=REACH_SECONDS)
        return transport

    def client(self) -> distributed.Client:
        """Return a Dask client of the pool's scheduler, made at the first call.

        Raises NodeLost if the pool has no head that answers, Unreachable and errors of keys.
        """
        if self._client is None:
            head, address = self._head()
            certificate = self._certificate or _certificate_of(self.reach(head))
            module = importlib.import_module("skyward_core.engine.connection")
            try:
                self._client = cast("distributed.Client", module.connect_user(self._here(head, address), certificate))
            except OSError as error:
                raise NodeLost(f"the scheduler of pool {self.pool_id} does not answer: try again") from error
        return self._client

    def ask(self, operation: str, seconds: float, /, **what: Any) -> Any:
        """Return the answer of the pool's scheduler. Raises NodeLost if none comes in time, and as `client` does."""
        client, until = self.client(), time.monotonic() + seconds
        module = importlib.import_module("skyward_core.engine.connection")
        return module.call_scheduler(client, operation, lambda: time.monotonic() < until, what)

    def dashboard(self) -> str:
        """Return the URL, on this machine, of the pages that Dask's scheduler serves. It works until the end."""
        client = self.client()
        head, _ = self._head()
        port: Any = client.run_on_scheduler(serve_pages)
        return f"{self._here(head, f'http://127.0.0.1:{port}')}/{START}"

    def _here(self, head: Instance, address: str) -> str:
        return self.reach(head).address(address)

    def _head(self) -> tuple[Instance, str]:
        """Return the node with the scheduler, and the scheduler's address there."""
        if self._lease is not None and self._lease.scheduler:
            return self.instances[0], self._lease.scheduler
        failures: list[Exception] = []
        for instance in self.instances:
            try:
                if (address := self.reach(instance).read("head.json").strip()) and urlsplit(address).port:
                    return instance, address
            except (CommandFailed, NodeLost, OSError) as error:  # it is not the head, or not yet
                failures.append(error)
        raise NodeLost(f"pool {self.pool_id} has no head yet, or it has ended") from next(iter(failures), None)


def _certificate_of(head: Transport) -> PoolCertificate:
    """Return the pool's certificate, which its nodes have in a private file."""
    try:
        settings: Mapping[str, Any] = json.loads(head.read("settings.json"))
        return PoolCertificate(settings["tls_certificate"], settings["tls_key"])
    except (CommandFailed, OSError, ValueError, KeyError) as error:
        raise NodeLost("the head of the pool has no settings: it has ended, or has not begun") from error
