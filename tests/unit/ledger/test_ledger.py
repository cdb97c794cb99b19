"""The ledger: writes are committed, a killed writer leaves a readable file, and no limit is overdrawn."""

import os
import shutil
import signal
import sqlite3
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from itertools import count
from pathlib import Path

import pytest
from sqlalchemy import Engine, create_engine, event

from skyward_core.errors import LedgerError
from skyward_core.ledger.database import Database
from skyward_core.ledger.ledger import Ledger, default_url
from skyward_core.ledger.rows import Account, Intent, Period, PoolEntry, Price, ResourceKind, ResourceRequest
from skyward_core.ledger.tables import POOLS
from skyward_core.machines.owner import Owner
from tests.conftest import wait_until

NOON = datetime(2026, 11, 21, 12, tzinfo=UTC)
LATER = NOON + timedelta(hours=1)
OWNER = Owner("ada", "laptop", "c0ffee-boot", "4026531836", 4711, "1234")
PROVIDER = {"provider": "verda", "regions": ["FIN-01"]}
USD = Decimal


class Clock:
    """A time that the test sets."""

    def __init__(self) -> None:
        self.time = NOON

    def __call__(self) -> datetime:
        return self.time


@pytest.fixture
def clock() -> Clock:
    """Noon, until the test sets it."""
    return Clock()


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    """A ledger file that does not exist yet, in a directory that does not exist yet."""
    return f"sqlite:///{tmp_path}/state/ledger.db"


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest) -> str:
    """A ledger that does not exist yet, in each kind of database."""
    return request.getfixturevalue("sqlite_url" if request.param == "sqlite" else "postgresql_url")


@pytest.fixture
def ledger(url: str, clock: Clock) -> Iterator[Ledger]:
    """An open ledger with one pool, `p`."""
    with Ledger(url, clock=clock, busy_timeout_seconds=10) as opened:
        open_pool(opened, "p")
        yield opened


@pytest.fixture
def file_ledger(sqlite_url: str, clock: Clock) -> Iterator[Ledger]:
    """The same in a file, for tests of files."""
    with Ledger(sqlite_url, clock=clock, busy_timeout_seconds=10) as opened:
        open_pool(opened, "p")
        yield opened


def open_pool(ledger: Ledger, pool_id: str, owner: Owner = OWNER) -> PoolEntry:
    return ledger.open_pool(pool_id, owner=owner, provider=PROVIDER, spec_json="{}", lease_expires_at=LATER)


def resource_request(token: str = "t1", pool_id: str = "p", price: Price = Price()) -> ResourceRequest:
    return ResourceRequest(
        kind=ResourceKind.INSTANCE,
        provider="verda",
        region="FIN-01",
        name=f"skyward-{token}",
        token=token,
        tags={"skyward-pool": pool_id, "skyward-rank": "0"},
        expires_at=LATER,
        price=price,
    )


def intend(ledger: Ledger, token: str = "t1", pool_id: str = "p", price: Price = Price()) -> Intent:
    return ledger.intend(pool_id, resource_request(token, pool_id, price))


@pytest.fixture(scope="session")
def postgresql_server() -> Iterator[str]:
    """The URL of a server that lives as long as the test session, or less if that is killed; reached over a Unix
    socket.
    """
    programs = next(
        (path.parent for path in sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), reverse=True)), None
    )
    if programs is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)("no PostgreSQL server is installed (Debian: postgresql)")
    folder = tempfile.mkdtemp(prefix="ledger-")
    ours = ["setpriv"]
    if os.getuid() == 0:  # the server refuses to run as root
        shutil.chown(folder, "nobody", "nogroup")
        ours = ["setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups"]
    quiet = {"cwd": folder, "stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    server: subprocess.Popen[bytes] | None = None
    try:
        subprocess.run(
            [
                *ours,
                programs / "initdb",
                "-D",
                f"{folder}/data",
                "-U",
                "ada",
                "-A",
                "trust",
                "-N",
                "-E",
                "UTF8",
                "--no-locale",
            ],
            check=True,
            timeout=100,
            **quiet,
        )
        says = ["-D", f"{folder}/data", "-k", folder, "-c", "listen_addresses=", "-c", "fsync=off"]
        server = subprocess.Popen([*ours, "--pdeathsig=INT", programs / "postgres", *says], **quiet)
        wait_until(
            lambda: subprocess.run([programs / "pg_isready", "-h", folder], check=False, **quiet).returncode == 0,
            "the server to be ready",
            60,
        )
        yield f"postgresql+psycopg://ada@/postgres?host={folder}"
    finally:
        if server is not None:
            server.send_signal(signal.SIGINT)  # "fast shutdown": connections are closed
            server.wait(30)
        shutil.rmtree(folder)


_DATABASES = count(1)


@pytest.fixture
def postgresql_url(postgresql_server: str) -> Iterator[str]:
    """A new database."""
    name = f"ledger_{next(_DATABASES)}"
    run_on(postgresql_server, f"CREATE DATABASE {name}")
    yield postgresql_server.replace("/postgres?", f"/{name}?")
    run_on(postgresql_server, f"DROP DATABASE {name} WITH (FORCE)")


def run_on(url: str, statement: str) -> None:
    engine = create_engine(url, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.exec_driver_sql(statement)
    engine.dispose()


@pytest.mark.parametrize("kind", ["key pair", "volume", "other"])
def test_entries_of_earlier_kinds_can_be_read(file_ledger: Ledger, sqlite_url: str, kind: str) -> None:
    open_pool(file_ledger, "old")
    intend(file_ledger, pool_id="old")
    run_on(sqlite_url, f"UPDATE skyward_resources SET kind = '{kind}'")
    assert [its.kind for its in file_ledger.open_intents()] == [ResourceKind.OTHER]


def test_a_reader_blocks_no_writer(file_ledger: Ledger, tmp_path: Path) -> None:
    raw = sqlite3.connect(tmp_path / "state/ledger.db", isolation_level=None)
    raw.execute("BEGIN")
    assert raw.execute("SELECT count(*) FROM skyward_resources").fetchone() == (0,)
    with Ledger(str(file_ledger.url), busy_timeout_seconds=0) as impatient:
        intend(impatient)
    assert raw.execute("SELECT count(*) FROM skyward_resources").fetchone() == (0,)
    raw.close()
    assert len(file_ledger.intents()) == 1


@pytest.mark.parametrize(
    "use",
    [lambda ledger: ledger.left_usd("team", "p"), lambda ledger: ledger.reserve("team", "p", USD(1))],
    ids=["read", "write"],
)
def test_closing_a_ledger_in_use_closes_every_connection(
    tmp_path: Path, clock: Clock, use: Callable[[Ledger], object]
) -> None:
    path = tmp_path / "state/ledger.db"

    def connections() -> int:
        return sum(os.path.realpath(f"/proc/self/fd/{number}") == str(path) for number in os.listdir("/proc/self/fd"))

    def closing() -> datetime:
        if closes:
            ledger.close()
        return clock()

    closes = False
    with Ledger(f"sqlite:///{path}", clock=closing) as ledger:
        open_pool(ledger, "p")
        ledger.set_account(Account("team", USD(10), Period.RUN))
        closes = True
        use(ledger)
        assert connections() == 0
        closes = False
        use(ledger)
        assert connections() == 0


def test_a_ledger_that_stays_locked_is_an_error(file_ledger: Ledger, tmp_path: Path) -> None:
    raw = sqlite3.connect(tmp_path / "state/ledger.db", isolation_level=None)
    raw.execute("BEGIN IMMEDIATE")
    with Ledger(str(file_ledger.url), busy_timeout_seconds=0.05) as impatient:
        with pytest.raises(LedgerError, match=r"ledger\.db is locked by another process"):
            intend(impatient)
        assert impatient.intents() == []
        raw.close()
        intend(impatient)


@pytest.mark.parametrize("garbage", [b"not a database at all" * 100, b"SQLite format 3\0" + b"\x5a" * 5000])
def test_a_garbage_file_is_refused_and_not_changed(tmp_path: Path, garbage: bytes) -> None:
    path = tmp_path / "ledger.db"
    path.write_bytes(garbage)
    with pytest.raises(LedgerError, match=r"is damaged, or no ledger\. Move it away"):
        Ledger(f"sqlite:///{path}")
    assert path.read_bytes() == garbage


def test_a_directory_that_cannot_be_created_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("")
    with pytest.raises(LedgerError, match="Check the path"):
        Ledger(f"sqlite:///{tmp_path}/state/ledger.db")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("ledger.db", "is no URL"),
        ("mysql://host/x", "SQLite or PostgreSQL, not in mysql"),
        ("sqlite://", "lost with its process"),
        ("postgresql+nothing://ada:secret@host/x", "driver for .*is not installed"),
        ("postgresql+psycopg://ada:secret@127.0.0.1:9/x", "is not installed|cannot be reached"),
    ],
)
def test_a_wrong_url_is_an_error(url: str, message: str) -> None:
    with pytest.raises(LedgerError, match=message) as caught:
        Ledger(url)
    assert "secret" not in str(caught.value)


def test_the_default_ledger_is_in_the_state_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert default_url({}) == f"sqlite:///{tmp_path}/skyward/ledger.db"
    assert default_url({"SKYWARD_LEDGER": "sqlite:////x.db"}) == "sqlite:////x.db"
    Ledger(default_url({})).close()
    assert (tmp_path / "skyward").stat().st_mode & 0o777 == 0o700


def modes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()}


def test_the_files_of_a_ledger_are_private(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        with Ledger(f"sqlite:///{tmp_path / 'new' / 'ledger.db'}") as ledger:
            ledger.set_account(Account("team", Decimal(1), Period.RUN))
            names = ("ledger.db", "ledger.db-wal", "ledger.db-shm", "ledger.db-queue")
            assert modes(tmp_path / "new") == dict.fromkeys(names, 0o600)
            assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700
    finally:
        os.umask(before)


def test_a_ledger_that_others_could_read_becomes_private(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "ledger.db"
    with Ledger(f"sqlite:///{path}") as ledger, Ledger(f"sqlite:///{path}"):
        ledger.set_account(Account("team", Decimal(1), Period.RUN))
        for name in modes(tmp_path):
            (tmp_path / name).chmod(0o644)
        tmp_path.chmod(0o755)
        with caplog.at_level("WARNING"), Ledger(f"sqlite:///{path}") as again:
            assert [account.name for account in again.accounts()] == ["team"]
            assert set(modes(tmp_path).values()) == {0o600}
        with Ledger(f"sqlite:///{path}"):
            pass
    ours = [record.getMessage() for record in caplog.records if record.name.startswith("skyward")]
    assert ours == [f"other users could read the ledger {path} (mode 0644); its mode is 0600 now"]
    assert tmp_path.stat().st_mode & 0o777 == 0o755


def test_the_default_folder_is_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    (tmp_path / "skyward").mkdir(mode=0o755)
    Ledger(default_url({})).close()
    assert (tmp_path / "skyward").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("mode", [0o777, 0o1777])
def test_a_ledger_in_a_folder_that_others_can_write_is_refused(tmp_path: Path, mode: int) -> None:
    """Others could put a journal file there, which SQLite would apply."""
    tmp_path.chmod(mode)
    with pytest.raises(LedgerError, match=rf"SKYWARD_LEDGER.*may be written to by everybody \(mode {mode:04o}\)"):
        Ledger(f"sqlite:///{tmp_path / 'ledger.db'}")
    assert modes(tmp_path) == {}


def test_a_transaction_that_a_signal_interrupts_keeps_no_lock(tmp_path: Path) -> None:
    with closing(Database(f"sqlite:///{tmp_path / 'ledger.db'}", lambda: NOON, 0.5)) as database:

        def interrupt(*_: object) -> None:
            event.remove(Engine, "after_cursor_execute", interrupt)
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt) as caught, database.write() as connection:
            event.listen(Engine, "after_cursor_execute", interrupt)
            connection.exec_driver_sql("SELECT id FROM (SELECT 1 AS id UNION ALL SELECT 2)")  # a row remains to be read
        assert caught.value.__traceback__ is not None
        with database.write() as connection:
            connection.execute(POOLS.select())
