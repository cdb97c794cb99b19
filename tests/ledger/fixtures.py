"""Ledgers on both databases, clocks that a test sets, and pools and names to put into a ledger."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, insert

from skyward_core import Instance, InstanceState
from skyward_core.ledger.ledger import Ledger
from skyward_core.ledger.names_policy import Claim, Rent
from skyward_core.ledger.rows import MICRO_USD, Bucket, CostBy, Intent, PoolEntry, Price, ResourceKind, ResourceRequest
from skyward_core.ledger.tables import SHARES, work_values
from skyward_core.machines.owner import Owner
from skyward_core.work import NO_WORK, Work
from tests.waiting import wait_until

NOON = datetime(2026, 11, 21, 12, tzinfo=UTC)
LATER = NOON + timedelta(hours=1)
OWNER = Owner("ada", "laptop", "c0ffee-boot", "4026531836", 4711, "1234")
PROVIDER = {"provider": "verda", "regions": ["FIN-01"]}
TRAIN = Work(system="airflow", workflow="nightly", run="manual__2026-11-22T07:00:00+00:00", task="train", attempt="1")
TERMS = {"nodes": 2}
LEASE_SECONDS = 120.0
USD = Decimal


class Clock:
    """A time that the test sets."""

    def __init__(self) -> None:
        self.time = NOON

    def __call__(self) -> datetime:
        return self.time

    def go(self, seconds: float) -> None:
        self.time += timedelta(seconds=seconds)


class MeterClock:
    """Seconds for a meter, and the same time as a datetime for a ledger."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds

    def date(self) -> datetime:
        return NOON + timedelta(seconds=self.seconds - 1000.0)

    def go(self, seconds: float) -> None:
        self.seconds += seconds


@pytest.fixture
def clock() -> Clock:
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


@pytest.fixture(scope="session")
def postgresql_server() -> Iterator[str]:
    """The URL of a server that lives as long as the test session, or less if that is killed; on a Unix socket."""
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
        made = ["-D", f"{folder}/data", "-U", "ada", "-A", "trust", "-N", "-E", "UTF8", "--no-locale"]
        subprocess.run([*ours, programs / "initdb", *made], check=True, timeout=100, **quiet)
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


def url_of(ledger: Ledger) -> str:
    return ledger.url.render_as_string(hide_password=False)


def record_shares(ledger: Ledger, pool_id: str, shares: Mapping[Work, Decimal]) -> None:
    """Record parts of a pool's cost as pruning does, and as earlier releases did for steps that shared a pool."""
    engine = create_engine(url_of(ledger))
    rows = [
        {"pool_id": pool_id, "micro_usd": int(usd / MICRO_USD), **work_values(work)} for work, usd in shares.items()
    ]
    with engine.begin() as connection:
        connection.execute(insert(SHARES), rows)
    engine.dispose()


def run_script(script: str, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script, *args], capture_output=True, text=True, timeout=250, check=False
    )


def machine(name: str, price: float = 0.0, *, on_demand: float | None = None, is_spot: bool = False) -> Instance:
    return Instance(
        id=name,
        provider="fake",
        pool_id="sky-1",
        rank=0,
        state=InstanceState.RUNNING,
        region="r",
        instance_type="t",
        is_spot=is_spot,
        price_per_hour=price,
        on_demand_price_per_hour=on_demand,
    )


def open_pool(ledger: Ledger, pool_id: str, owner: Owner = OWNER, **fields: Any) -> PoolEntry:
    values: dict[str, Any] = {"provider": PROVIDER, "spec_json": "{}", "lease_expires_at": LATER, **fields}
    return ledger.open_pool(pool_id, owner=owner, **values)


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


def pay(ledger: Ledger, pool_id: str, work: Work, usd: int) -> None:
    """Open a pool for this work, with two machines of this total cost."""
    open_pool(ledger, pool_id, provider={"name": "verda"}, work=work)
    price = Price(Decimal(usd) / 2)
    requests = [resource_request(f"{pool_id}-{number}", pool_id, price) for number in range(2)]
    intents = ledger.intend_all(pool_id, requests)
    ledger.bind_all({intent.id: f"{pool_id}-i-{intent.id}" for intent in intents})
    ledger.note_all({intent.id: {Bucket.RUNNING_CALLS: 3600.0} for intent in intents})


def bill(ledger: Ledger, by: CostBy, **which: object) -> dict[str, tuple[int, Decimal]]:
    return {row.key: (row.resources, row.cost_usd) for row in ledger.cost_rows(by, **which)}


def claim(ledger: Ledger, client: str, name: str = "nightly", **changes: Any) -> Claim:
    """Open a name as this client, with the pool id `sky-` and its id."""
    values: dict[str, Any] = {"owner": Owner.here(), "terms": TERMS, "keep_warm_seconds": 0.0, **changes}
    return ledger.names.claim(name, f"sky-{client}", client, **{"lease_seconds": LEASE_SECONDS, **values})


def begin(ledger: Ledger, pool_id: str, work: Work = NO_WORK, name: str = "") -> None:
    """Write the pool into the ledger, as its journal does."""
    expires_at = ledger.names.now() + timedelta(seconds=LEASE_SECONDS)
    open_pool(ledger, pool_id, Owner.here(), lease_expires_at=expires_at, work=work, name=name)


def opened(ledger: Ledger, client: str = "a", *, name_it: bool = False, **changes: Any) -> int:
    """Open a name, up to the state in which others may join; return the epoch.

    `name_it`: the row of the pool has its name. Without a work it belongs to nobody then.
    """
    rent = claim(ledger, client, **changes)
    assert isinstance(rent, Rent)
    begin(ledger, f"sky-{client}", changes.get("work", NO_WORK), "nightly" if name_it else "")
    ledger.names.opened("nightly", rent.epoch)
    return rent.epoch
