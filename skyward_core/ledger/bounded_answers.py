"""Connections to PostgreSQL on which each statement waits for a limited time if the server does not answer.

A server that is stopped, or behind a network that drops all packets, closes no connection. The driver would wait until
the operating system ends the connection, which may not happen. `sql_engine` imports this module for PostgreSQL only.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from typing import Any, override

from psycopg import Connection, Error, OperationalError
from psycopg.abc import PQGen


class BoundedConnection(Connection[Any]):
    """A connection whose statements raise OperationalError if the server takes longer than `answer_seconds`."""

    answer_seconds = 60.0

    @override
    def wait[T](self, gen: PQGen[T], *arguments: Any, **settings: Any) -> T:
        """Wait for an answer. The driver checks ten times a second for an answer, and the limit is checked at the same
        moments.
        """
        return super().wait(self._bounded(gen), *arguments, **settings)

    def _bounded[T](self, gen: PQGen[T]) -> PQGen[T]:
        deadline = time.monotonic() + self.answer_seconds
        try:
            wanted = next(gen)
            while True:
                ready = yield wanted
                if not ready and time.monotonic() > deadline:
                    self.pgconn.finish()  # the answer may still come: the connection is of no use any more
                    raise OperationalError(f"the server has not answered for {self.answer_seconds:.0f} s")
                wanted = gen.send(ready)
        except StopIteration as end:
            return end.value


def connector(answer_seconds: float) -> Callable[..., Connection[Any]]:
    """Return a function that connects as `psycopg.connect` does, with this limit for each statement, in seconds."""

    def connect(*arguments: Any, **settings: Any) -> Connection[Any]:
        try:
            connection = BoundedConnection.connect(*arguments, **settings)
        except Error as error:
            _close_attempts(error)
            raise
        connection.answer_seconds = answer_seconds
        return connection

    return connect


def _close_attempts(error: BaseException) -> None:
    """Close the sockets of attempts that took too long: the driver leaves them in frames, to the garbage collection."""
    failed: BaseException | None = error
    while failed is not None:
        traceback.clear_frames(failed.__traceback__)
        failed = failed.__context__
