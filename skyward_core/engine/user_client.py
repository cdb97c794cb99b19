"""The Dask client that a pool returns (`ComputePool.dask_client`): a separate connection.

The pool gives up its connection when the scheduler has not answered for some seconds, and makes another; that cancels
the futures of its client. The user's client waits, and reconnects automatically if the connection breaks.

States of the client: none -> open (running, or reconnecting) -> closed: by its user, by Dask if it could not reconnect,
or here, when the scheduler has another address. Then `get` makes another one. `close` ends it with the pool.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from skyward_core.errors import NodeLost, PoolClosed

if TYPE_CHECKING:
    import distributed

    from skyward_core.engine.certificates import PoolCertificate

END_SECONDS = 2.0


class UserClient:
    """Holds the client of one session, or of one attached pool. May be used from any thread."""

    def __init__(
        self,
        address: Callable[[], str],
        check: Callable[[], object],
        connect: Callable[[str], distributed.Client],
        end: Callable[[distributed.Client], object],
    ) -> None:
        self._address = address
        """Returns the scheduler's address as seen from here: a new head has another one."""
        self._check = check
        """Raises NodeLost if the pool has no connection to the scheduler just now, and the pool's error after its end.
        """
        self._connect = connect
        """Raises OSError."""
        self._end = end
        self._getting = threading.Lock()
        """Held while a client is made, which may take a minute: two threads must not make two clients."""
        self._lock = threading.Lock()
        """Guards the attributes below."""
        self._client: distributed.Client | None = None
        self._made_for = ""
        self._is_closed = False

    def get(self) -> distributed.Client:
        """Return the open client, or make one. Raises NodeLost if the scheduler is out of reach, and PoolClosed."""
        with self._getting:
            address = self._address()
            client = self._client if self._made_for == address else None
            if client is not None and client.status == "running":
                return client
            self._check()
            if client is not None and client.status == "connecting":
                return client
            self._put(None, "")
            try:
                client = self._connect(address)
            except OSError as error:
                raise NodeLost(f"the pool's scheduler at {address} does not answer: try again") from error
            self._put(client, address)
            return client

    def close(self) -> None:
        """End the client and cancel its futures. Idempotent. A thread that makes a client meanwhile gets PoolClosed."""
        with self._lock:
            self._is_closed = True
            client, self._client = self._client, None
        if client is not None:
            self._end(client)

    def _put(self, client: distributed.Client | None, address: str) -> None:
        """Keep this client, and end the one before. Raises PoolClosed."""
        with self._lock:
            unwanted = client if self._is_closed else self._client
            if not self._is_closed:
                self._client, self._made_for = client, address
            is_closed = self._is_closed
        if unwanted is not None:
            self._end(unwanted)
        if is_closed:
            raise PoolClosed("the pool is closing")


def user_client(address: Callable[[], str], certificate: PoolCertificate, check: Callable[[], object]) -> UserClient:
    """Return the owner of a pool's user client, without a connection so far. Imports Dask."""
    from skyward_core.engine.connection import connect_user, end

    return UserClient(
        address, check, lambda where: connect_user(where, certificate), lambda client: end(client, END_SECONDS)
    )
