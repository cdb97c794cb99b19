"""A PostgreSQL server that is reached, and does not answer."""

import math
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import pytest
from sqlalchemy import Connection, select

from skyward_core.errors import LedgerError
from skyward_core.ledger import database, sql_engine
from skyward_core.ledger.ledger import Ledger
from skyward_core.ledger.names_policy import Rent, Wait
from skyward_core.ledger.schema import migrate
from skyward_core.ledger.tables import NAMES
from tests.system.ledger.test_names import claim
from tests.unit.ledger.test_ledger import Clock, open_pool, postgresql_server, postgresql_url  # noqa: F401 - fixtures


class Proxy:
    """Stands between clients and a server on a Unix socket. While it is cut it takes bytes and passes none on."""

    def __init__(self, folder: Path, target: Path) -> None:
        self._target = target
        self._is_open = threading.Event()
        self._is_open.set()
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
        mender = threading.Timer(0.5, proxy.mend)
        mender.start()
        assert ledger.pool("p") is not None
        mender.join()


def test_only_the_migration_may_take_long(postgresql_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[float] = []

    def seen(connection: Connection) -> None:
        limits.append(_limit(connection))
        migrate(connection)

    monkeypatch.setattr(database, "migrate", seen)
    opened = database.Database(postgresql_url, Clock(), 0.2)
    with opened.read() as connection:
        limits.append(_limit(connection))
    opened.close()
    assert limits == [math.inf, sql_engine.ANSWER_SECONDS + 0.2]


def test_a_process_that_is_stopped_inside_a_transaction_keeps_no_locks(
    postgresql_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = database.Database(postgresql_url, Clock(), 5.0)
    opened.close()  # it has migrated
    monkeypatch.setattr(sql_engine, "IDLE_SECONDS", 0.3)
    stopped = database.Database(postgresql_url, Clock(), 5.0)
    with Ledger(postgresql_url, clock=Clock(), busy_timeout_seconds=5.0) as other:
        found = [claim(other, "a")]
        with pytest.raises(LedgerError), stopped.write() as connection:
            connection.execute(select(NAMES).with_for_update()).all()
            found.append(claim(other, "b"))
    stopped.close()
    assert [type(one) for one in found] == [Rent, Wait]


def test_a_migration_may_pause(postgresql_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sql_engine, "IDLE_SECONDS", 0.3)
    found: list[str | None] = []

    def seen(connection: Connection) -> None:
        found.append(connection.exec_driver_sql("SHOW idle_in_transaction_session_timeout").scalar())
        migrate(connection)

    monkeypatch.setattr(database, "migrate", seen)
    opened = database.Database(postgresql_url, Clock(), 0.2)
    with opened.read() as connection:
        found.append(connection.exec_driver_sql("SHOW idle_in_transaction_session_timeout").scalar())
    opened.close()
    assert found == ["0", "300ms"]


def _limit(connection: Connection) -> float:
    return cast("Any", connection.connection.dbapi_connection).answer_seconds
