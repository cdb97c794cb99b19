"""A ledger with pools, and the `skyward` command on it. The fixtures are those of the folders `cli` (their `conftest.py`)."""

import json
import os
import re
import shlex
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from http.client import HTTPConnection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import create_engine, text

import skyward_core as sky
from skyward_core import cli
from skyward_core.cleanup import release as releasing
from skyward_core.cleanup import survey
from skyward_core.cli.app import command_tree
from skyward_core.cli.ui.pages import answers
from skyward_core.cli.ui.server import PageServer
from skyward_core.ledger.ledger import Ledger
from skyward_core.ledger.names_policy import Usage
from skyward_core.ledger.rows import (
    BILLING_ROUNDING,
    Account,
    Attempt,
    Bucket,
    CallState,
    Period,
    Price,
    ResourceKind,
    ResourceRequest,
    SlotUse,
)
from skyward_core.live.metrics import NodeUse
from skyward_core.machines.owner import Owner
from skyward_core.providers import base
from skyward_core.providers.base import LAUNCH_TAG, POOL_TAG, RANK_TAG
from skyward_core.provisioning import plan as plans
from skyward_core.work import NO_WORK, Work
from tests.cleanup.pools import FolderProvider

ROOT = Path(__file__).parents[2]


HERE = replace(Owner.here(), user="ada", host="laptop")


DEAD = replace(Owner.here(), started="1")


type Skyward = Callable[..., str]


class Clock:
    """The ledger's clock; it does not advance."""

    def __init__(self, now: datetime) -> None:
        self.now = now

    def __call__(self) -> datetime:
        return self.now


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the URL of the ledger that commands use by default.

    No command finds the machines of other tests, which are processes of this host.
    """
    found = f"sqlite:///{tmp_path / 'ledger.db'}"
    monkeypatch.setenv("SKYWARD_LEDGER", found)
    load = base.load

    def loading(requested: Any) -> Any:
        fields = dict(requested) if isinstance(requested, Mapping) else {"name": requested}
        assert fields.get("name") != "local", "a test must not sweep this host"
        return FolderProvider(folder=fields["folder"]) if fields.get("name") == "folder" else load(requested)

    monkeypatch.setattr(base, "load", loading)
    monkeypatch.setattr(releasing, "load", loading)
    monkeypatch.setattr(survey, "load", loading)
    monkeypatch.setenv("SKYWARD_PROVIDER", json.dumps({"name": "folder", "folder": str(tmp_path)}))
    return found


@pytest.fixture
def clock() -> Clock:
    return Clock(datetime.now(UTC))


@pytest.fixture
def ledger(url: str, clock: Clock) -> Iterator[Ledger]:
    with Ledger(url, clock=clock) as opened:
        yield opened


@pytest.fixture
def folder(tmp_path: Path) -> FolderProvider:
    return FolderProvider(folder=str(tmp_path))


@pytest.fixture
def skyward(capsys: pytest.CaptureFixture[str], url: str) -> Skyward:
    """Run a command line; return its stdout, or its stderr if it must fail."""

    def run(line: str, code: int = 0) -> str:
        assert cli.main(shlex.split(line)) == code
        output = capsys.readouterr()
        if code == cli.FAILED:
            assert "Traceback" not in output.err
            return output.err
        assert output.err == ""
        return output.out

    return run


def open_pool(
    ledger: Ledger,
    clock: Clock,
    provider: FolderProvider,
    pool_id: str,
    *,
    owner: Owner,
    age_seconds: float = 3600,
    machines: int = 1,
    **more: Any,
) -> None:
    """Open a pool with machines at 2 USD an hour each (8 USD on demand), which have run calls since it was opened."""
    began = clock.now - timedelta(seconds=age_seconds)
    now, clock.now = clock.now, began
    try:
        ledger.open_pool(
            pool_id,
            owner=owner,
            provider=provider.to_json(),
            spec_json="{}",
            lease_expires_at=now + timedelta(seconds=100),
            **more,
        )
        tags = {POOL_TAG: pool_id, LAUNCH_TAG: f"{pool_id}-1", RANK_TAG: "0"}
        price = Price(Decimal(2), Decimal(8), is_spot=True)
        requests = [
            ResourceRequest(
                ResourceKind.INSTANCE,
                "folder",
                "here",
                f"{pool_id}-{rank}",
                f"{pool_id}-1-{rank}",
                tags | {RANK_TAG: str(rank)},
                now,
                price,
            )
            for rank in range(machines)
        ]
        intents = ledger.intend_all(pool_id, requests)
        instances = provider.launch(None, machines, tags, "")
        ledger.bind_all({its.id: instance.id for its, instance in zip(intents, instances, strict=True)})
        ledger.note_all({its.id: {Bucket.RUNNING_CALLS: age_seconds} for its in intents})
    finally:
        clock.now = now


def open_named(ledger: Ledger, clock: Clock, provider: FolderProvider, work: Work = NO_WORK) -> None:
    """Open the pool `sky-named` with the name "nightly", which two processes and the owner of a detached call use."""
    open_pool(ledger, clock, provider, "sky-named", owner=HERE)
    for client, its_work, seconds in (("a", NO_WORK, 30.0), ("b", work, 10.0)):
        ledger.names.claim(
            "nightly",
            "sky-named",
            client,
            owner=HERE,
            terms={},
            keep_warm_seconds=60.0,
            lease_seconds=100.0,
            work=its_work,
        )
        ledger.names.opened("nightly", 1)
        ledger.names.renew(client, 100.0, Usage(seconds))
    used = (SlotUse("i", 1, 5.0),)
    ledger.note_calls("sky-named", [CallState("c", "train", "dag", 1, "running", clock.now, None, used)])


def lines(output: str) -> list[list[str]]:
    """The text of a table, by lines and columns."""
    return [re.split(r" {2,}", line.strip()) for line in output.splitlines()]


type Damage = Callable[[str], None]


@pytest.fixture
def damage(url: str) -> Damage:
    """Run a statement on the ledger's database, without the ledger's methods."""

    def run(statement: str) -> None:
        engine = create_engine(url)
        with engine.begin() as connection:
            connection.execute(text(statement))
        engine.dispose()

    return run


@pytest.fixture
def run(url: str, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run a command line; return its exit code, stdout and stderr."""

    def go(line: str) -> tuple[int, str, str]:
        code = cli.main(shlex.split(line))
        return code, *capsys.readouterr()

    return go


RESOURCE_DAMAGES = {
    "price is nan": "UPDATE skyward_resources SET price_micro_usd_per_hour = 'nan' WHERE pool_id = 'sky-odd'",
    "tags are no JSON": "UPDATE skyward_resources SET tags_json = 'x' WHERE pool_id = 'sky-odd'",
    "region is bytes": "UPDATE skyward_resources SET region = x'ff00' WHERE pool_id = 'sky-odd'",
    "time is text": "UPDATE skyward_resources SET intended_microseconds = 'then' WHERE pool_id = 'sky-odd'",
    "seconds are infinite": "UPDATE skyward_resources SET idle_milliseconds = 9e999 WHERE pool_id = 'sky-odd'",
}


@pytest.fixture
def three(ledger: Ledger, clock: Clock, folder: FolderProvider) -> None:
    """A live pool, a dead one, and a live one with rows that a test damages."""
    open_pool(ledger, clock, folder, "sky-live", owner=HERE)
    open_pool(ledger, clock, folder, "sky-dead", owner=DEAD)
    open_pool(ledger, clock, folder, "sky-odd", owner=HERE)


def _options(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], list[Any]]]:
    """Each command with its options and arguments, as typer has them."""
    for name, sub in getattr(command, "commands", {}).items():
        yield from _options(sub, (*path, name))
    if not hasattr(command, "commands"):
        yield path, command.params


COMMANDS = list(_options(command_tree()))


type Planner = Callable[[str], sky.Plan | None]


def install(monkeypatch: pytest.MonkeyPatch, **planners: Planner | ImportError) -> None:
    """Install plugins by their names; an ImportError is one whose orchestrator is not installed."""

    def loaded(planner: Planner | ImportError) -> Planner:
        if isinstance(planner, ImportError):
            raise planner
        return planner

    entries = [
        SimpleNamespace(name=name, load=lambda planner=planner: loaded(planner)) for name, planner in planners.items()
    ]
    monkeypatch.setattr(plans, "entry_points", lambda group: entries if group == "skyward.quotes" else [])


TOKEN = "a-token-of-enough-letters"


def sample(percent: float, seconds: float = 0.0, gpu: float | None = None) -> sky.Metrics:
    memory = {"gpu_memory_used_mb": 10.0, "gpu_memory_total_mb": 40.0} if gpu is not None else {}
    return sky.Metrics("i-0", 0, percent, 50.0, 1.0, 2.0, gpu_utilization=gpu, timestamp=seconds, **memory)


KINDS = {"string": str, "number": int | float, "integer": int, "boolean": bool, "null": type(None)}


BUCKETS = {*map(str, Bucket), BILLING_ROUNDING}


def documented(command: str) -> dict[str, str]:
    """Return the fields of a command in docs/json.md: where each one is, and its kind."""
    page = (ROOT / "docs/json.md").read_text()
    (section,) = re.findall(rf"^## {command}\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
    fields = dict(re.findall(r"^\| `([^`]+)` \| ([a-z ]+) \|", section, re.MULTILINE))
    assert len(fields) == section.count("\n| `")
    if command == "sweep":
        fields |= {
            f"{done}{field.removeprefix('findings')}": kind
            for done in ("ended", "closed", "adopted")
            for field, kind in fields.items()
            if "findings" in field
        }
    return fields


def fields_of(data: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """Return the position of each value in some JSON, with the value; an empty list is one value."""
    if place.endswith("[].value"):  # any JSON
        yield place, data
    elif isinstance(data, dict):
        for name, value in data.items():
            yield from fields_of(value, f"{place}.{_kind_of(name, place)}".lstrip("."))
    elif isinstance(data, list) and data:
        for value in data:
            yield from fields_of(value, f"{place}[]" if place else "")
    else:
        yield place, data


def _kind_of(name: str, place: str) -> str:
    return "<bucket>" if name in BUCKETS else "<field>" if place.rpartition(".")[2] == "work" else name


def record_pools(skyward: Skyward, ledger: Ledger, clock: Clock, folder: FolderProvider) -> None:
    """Record pools in all states, budgets, attempts and calls, so that no list of any command is empty."""
    ledger.set_account(Account("team-a", Decimal(200), Period.DAY))
    ledger.set_account(Account("each", Decimal(5), Period.RUN))
    open_pool(ledger, clock, folder, "sky-ended", owner=HERE)
    skyward("stop sky-ended")
    open_pool(ledger, clock, folder, "sky-gone", owner=DEAD)
    folder.terminate([instance.id for instance in folder.instances()])
    open_pool(
        ledger, clock, folder, "sky-live", owner=HERE, account="team-a", machines=2, work=Work(system="cron", run="1")
    )
    open_pool(ledger, clock, folder, "sky-dead", owner=DEAD)
    ledger.open_pool("sky-odd", owner=DEAD, provider={"name": "nonesuch"}, spec_json="{}", lease_expires_at=clock.now)
    ledger.note_attempts(
        [
            Attempt("sky-live", clock.now, "folder", "here", "t", is_spot=True, seconds=0.5, error=error)
            for error in ("", "NoCapacity")
        ]
    )
    ledger.note_calls(
        "sky-live",
        [
            CallState("c", "train", "dag", 1, "ended", clock.now, clock.now),
            CallState("d", "f", "", 0, "waiting", clock.now),
        ],
    )
    ledger.note_calls("sky-ended", [CallState("e", "f", "", 1, "running", clock.now)])
    open_named(ledger, clock, folder, Work(system="cron", run="2"))


def check_fields(line: str, text: str, fields: Mapping[str, str]) -> set[str]:
    """Check that the JSON of a command has no other fields and kinds than the page; return the fields that it has."""
    seen = set[str]()
    for place, value in fields_of(json.loads(text)):
        known = [field for field in fields if field == place or (value == [] and field.startswith(f"{place}[]"))]
        assert known, f"{line} prints {place}, and docs/json.md does not have it"
        if value != []:
            kinds = fields[place].split(" or ")
            assert any(
                kind == "any" or (isinstance(value, KINDS[kind]) and (kind == "boolean") == isinstance(value, bool))
                for kind in kinds
            ), (line, place, value)
        seen.update(known)
    return seen


def shell(line: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = line.replace("skyward", f"{shlex.quote(sys.executable)} -m skyward_core.cli", 1)
    return subprocess.run(
        ["bash", "-c", command],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
        timeout=60,
        env=os.environ | environ,
    )


@dataclass(frozen=True)
class Reply:
    status: int
    headers: dict[str, str]
    text: str

    @property
    def json(self) -> Any:
        return json.loads(self.text)


class Page:
    """A client of a running page."""

    def __init__(self, server: PageServer) -> None:
        self.server = server

    def get(self, path: str, *, token: str | None = TOKEN, method: str = "GET", **headers: str) -> Reply:
        connection = HTTPConnection("127.0.0.1", self.server.server_port, timeout=20)
        try:
            sent = {"Authorization": f"Bearer {token}"} if token is not None else {}
            connection.request(method, path, headers=sent | headers)
            reply = connection.getresponse()
            return Reply(reply.status, dict(reply.headers), reply.read().decode())
        finally:
            connection.close()


class FakeUtilisation:
    """What was seen of pools, by id."""

    def __init__(self) -> None:
        self.uses: dict[str, Sequence[NodeUse] | str] = {}

    def of(self, pool_id: str) -> Sequence[NodeUse] | str | None:
        return self.uses.get(pool_id)


@pytest.fixture
def utilisation() -> FakeUtilisation:
    return FakeUtilisation()


@pytest.fixture
def page(ledger: Ledger, utilisation: FakeUtilisation) -> Iterator[Page]:
    with PageServer(0, TOKEN, answers(ledger, utilisation)) as server:  # type: ignore[arg-type]
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield Page(server)
        finally:
            server.shutdown()
            thread.join()
