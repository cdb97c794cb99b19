"""A PostgreSQL server that is reached, and answers late; in tests/nightly it does not answer."""

import math
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import pytest
from sqlalchemy import Connection

from skyward_core.ledger import database, sql_engine
from skyward_core.ledger.database import migrate
from skyward_core.ledger.ledger import Ledger
from tests.ledger.fixtures import Clock, open_pool


class Proxy:
    """Stands between clients and a server on a Unix socket. While it is cut it takes bytes and passes none on."""

    def __init__(self, folder: Path, target: Path) -> None:
        self._target = target
        self._is_open = threading.Event()
        self._is_open.set()
        self.is_holding = threading.Event()
        """Bytes have come that are not passed on."""
        self._ends: list[socket.socket] = []
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(folder / target.name))
        self._listener.listen()
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    @property
    def connections(self) -> int:
        """How many clients have connected so far."""
        return len(self._ends) // 2

    def cut(self) -> None:
        """Partition: connections stay, and nothing passes."""
        self._is_open.clear()

    def mend(self) -> None:
        """Let everything pass, also what was sent meanwhile."""
        self._is_open.set()

    def close(self) -> None:
        """End all connections."""
        for end in (self._listener, *self._ends):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        self._is_open.set()
        for thread in self._threads:
            thread.join()
        for end in (self._listener, *self._ends):
            end.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.socket(socket.AF_UNIX)
                server.connect(str(self._target))
                self._ends += [client, server]
                for here, there in ((client, server), (server, client)):
                    self._threads.append(threading.Thread(target=self._pass, args=(here, there), daemon=True))
                    self._threads[-1].start()

    def _pass(self, here: socket.socket, there: socket.socket) -> None:
        with suppress(OSError):
            while data := here.recv(65536):
                if not self._is_open.is_set():
                    self.is_holding.set()
                self._is_open.wait()
                there.sendall(data)
        with suppress(OSError):
            there.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def proxy(postgresql_server: str, tmp_path: Path) -> Iterator[Proxy]:
    folder = Path(postgresql_server.partition("host=")[2])
    made = Proxy(tmp_path, folder / ".s.PGSQL.5432")
    yield made
    made.close()


@pytest.fixture
def url(postgresql_server: str, postgresql_url: str, tmp_path: Path) -> str:
    """The ledger as it is reached through the proxy."""
    return postgresql_url.replace(postgresql_server.partition("host=")[2], str(tmp_path))


def test_a_slow_answer_in_time_is_no_error(proxy: Proxy, url: str) -> None:
    with Ledger(url, clock=Clock(), busy_timeout_seconds=0.2) as ledger:
        open_pool(ledger, "p")
        proxy.cut()
        mender = threading.Thread(target=lambda: (proxy.is_holding.wait(), proxy.mend()))
        mender.start()
        assert ledger.pool("p") is not None
        mender.join()


def test_only_a_migration_may_take_long_and_pause(postgresql_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may read much and compute before it writes. Its connection has the usual limits afterwards."""
    limits: list[tuple[float, str]] = []

    def look(connection: Connection) -> None:
        raw = cast("Any", connection.connection.dbapi_connection)
        idle = connection.exec_driver_sql("SHOW idle_in_transaction_session_timeout").scalar()
        limits.append((raw.answer_seconds, str(idle)))

    def seen(connection: Connection, living: Any) -> None:
        look(connection)
        migrate(connection, living)

    monkeypatch.setattr(database, "migrate", seen)
    opened = database.Database(postgresql_url, Clock(), 0.2)
    with opened.read() as connection:
        look(connection)
    opened.close()
    assert limits == [(math.inf, "0"), (sql_engine.ANSWER_SECONDS + 0.2, f"{sql_engine.IDLE_SECONDS:.0f}s")]
