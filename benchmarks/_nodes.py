"""Run a fake DigitalOcean in a separate process. Its droplets have real SSH servers and join the pool.

The pool has a real scheduler and one light worker on each node. The program prints the address of the API, and ends
when its stdin is closed. The droplets have the addresses 127.77.x.y and port 22.

    python -m benchmarks._nodes --latency 0.3 --install 20
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import sys
import tempfile
from typing import Any

import dask.config
from distributed import Worker

from skyward_core.wire.settings import NodeSettings
from skyward_core.worker.calls import CallMemory
from skyward_core.worker.node import DASK_CONFIG, security
from skyward_core.worker.scheduler import PoolScheduler, PromptMessages
from tests.fake_nodes import FakeNode, FakeNodes, Played, slowly
from tests.providers.fake_digitalocean import Droplet, FakeDigitalOcean
from tests.providers.http_fake import Reply, Request, route

SSH_PORT = 22


class Cluster:
    """Starts the programs of the nodes: the scheduler on the head, and a Dask worker without runners on each node.

    They end only with this process, because a terminated machine closes no connections.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._members: list[object] = []

    async def serve(self, node: FakeNode, settings: NodeSettings) -> None:
        address = settings.scheduler
        if address is None:
            scheduler = await PoolScheduler(
                host=settings.host,
                port=settings.scheduler_port,
                protocol="tls",
                security=security(settings),
                dashboard=False,
                dashboard_address="127.0.0.1:0",
                plugins=[PromptMessages(), CallMemory(settings.lease_seconds)],
            )
            address = str(scheduler.address)
            node.say(f"::skyward head {settings.generation} {address}")
            self._members.append(scheduler)
        self._members.append(
            await Worker(
                address,
                host=settings.host,
                name=f"{settings.rank}-0",
                nthreads=settings.slots,
                memory_limit=0,
                security=security(settings),
                local_directory=self._folder,
                dashboard=False,
                dashboard_address="127.0.0.1:0",
                extensions={},
            )
        )


class Rented(FakeDigitalOcean):
    """Each droplet is a fake node."""

    network = "127.77"
    """The first half of the droplets' addresses."""

    def __init__(self, nodes: FakeNodes) -> None:
        super().__init__()
        self._nodes = nodes

    def add(self, name: str, found: dict[str, Any] | None, order: dict[str, Any]) -> Droplet:
        droplet = super().add(name, found, order)
        droplet.ip = f"{self.network}.{droplet.id >> 8 & 255}.{droplet.id & 255}"
        config = json.loads(order["user_data"].partition("\n")[2])
        self._nodes.add(
            str(droplet.id),
            droplet.ip,
            SSH_PORT,
            config["ssh_keys"]["ed25519_private"],
            "\n".join(config["ssh_authorized_keys"]),
        )
        return droplet

    @route("DELETE", "/v2/droplets/{id}")
    def destroy(self, request: Request) -> Reply:
        self._nodes.end(request.words["id"])
        return super().destroy(request)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--latency", type=float, default=0.3)
    parser.add_argument("--install", type=float, default=20.0)
    parser.add_argument("--has-uv", action="store_true")
    options = parser.parse_args()
    for name in ("distributed", "asyncio"):
        logging.getLogger(name).setLevel(logging.ERROR)
    folder = tempfile.mkdtemp()
    with dask.config.set(DASK_CONFIG):
        nodes = FakeNodes(
            Played(options.install, options.has_uv), before=slowly(options.latency), serve=Cluster(folder).serve
        )
        cloud = Rented(nodes).serve()
        cloud.delay_seconds = options.latency
        print(json.dumps({"url": cloud.url}), flush=True)
        sys.stdin.read()
    shutil.rmtree(folder, ignore_errors=True)
    if nodes.unknown:
        print(
            f"the fake nodes received commands that they do not know: {nodes.unknown[:3]}", file=sys.stderr, flush=True
        )
    os._exit(1 if nodes.unknown else 0)


if __name__ == "__main__":
    main()
