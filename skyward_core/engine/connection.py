"""The connection to a pool's scheduler: Dask's client, which does not connect again by itself, and questions whose wait ends when the connection does.

A part of `engine.cluster`, which owns the client.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError
from concurrent.futures import wait as wait_for
from typing import Any, cast

import dask.config  # noqa: TID253 - with cluster.py and worker/node.py owns Dask
import distributed  # noqa: TID253

from skyward_core.engine.certificates import PoolCertificate
from skyward_core.errors import NodeLost
from skyward_core.worker.streams import send_at_once

ASKING_SECONDS = 0.2


class PoolClient(distributed.Client):
    """Dask's client, which does not connect again by itself: whether the scheduler is lost is for the pool to find out."""

    is_to_return = False
    """Whether another client will come in the place of this one, which wants to find all tasks: they are not released with it."""

    def _release_key(self, key: Any) -> None:
        if not self.is_to_return:
            cast(Any, super())._release_key(key)
        elif (state := cast(Any, self).futures.pop(key, None)) is not None:
            state.cancel()

    def start(self, **kwargs: Any) -> None:
        """Connect; what was started for it ends if that fails."""
        try:
            super().start(**kwargs)
        except BaseException:
            cast(Any, self)._loop_runner.stop()
            self.status = "closed"  # else Dask closes it again when it is collected, on a loop that is closed by then
            raise

    async def _reconnect(self) -> None:
        self.scheduler_comm = None
        self.status = "connecting"
        for state in self.futures.values():
            state.cancel(reason="scheduler-connection-lost", msg="the pool's scheduler does not answer any more")
        self.futures.clear()


def connect(address: str, certificate: PoolCertificate, timeout_seconds: float) -> distributed.Client:
    """Return a Dask client of the pool's cluster, over TLS with the pool's certificate. Its caller closes it."""
    security = distributed.Security(
        require_encryption=True, tls_ca_file=certificate.certificate, tls_client_cert=certificate.certificate, tls_client_key=certificate.key
    )
    settings = {
        "distributed.admin.low-level-log-length": 0,  # else the last thousand messages stay in memory, payloads included
        "distributed.admin.event-loop": "uvloop",
        "distributed.comm.timeouts.tcp": "18s",
    }
    with dask.config.set(settings):
        client = PoolClient(address, security=security, set_as_default=False, timeout=timeout_seconds, name="skyward")
    send_at_once(client.scheduler_comm)  # our calls are grouped before they come here: no waiting for more
    return client


def asked(client: distributed.Client, operation: str, is_open: Callable[[], bool], what: Mapping[str, Any]) -> Any:
    """Have the scheduler do an operation, and return its answer. Raises NodeLost if there will be none: it is out of reach, or the connection was given up.

    Not `Client.sync`: its wait does not end if Dask's thread does.
    """
    it: Any = client
    answer = _answer(it, operation, what)
    try:
        question = asyncio.run_coroutine_threadsafe(answer, it.loop.asyncio_loop)
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
        raise NodeLost(f"the pool's scheduler does not answer: {error}") from error


async def _answer(client: Any, operation: str, what: Mapping[str, Any]) -> Any:
    return await getattr(client.scheduler, operation)(**what)


def members(client: distributed.Client) -> dict[str, Any]:
    """Return what the scheduler knows of its workers, by address.

    `Client.scheduler_info` may return the answer to a question that the client itself asks every two seconds, of another thread: about no workers at all.
    """
    it: Any = client  # Dask's types say too little
    return it.sync(it.scheduler.identity, n_workers=-1)["workers"]
