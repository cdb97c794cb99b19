"""A ledger with pools, and the `skyward` command on it. The fixtures are those of the folders `cli` (their `conftest.py`)."""

import json
import os
import re
import shlex
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from http.client import HTTPConnection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import skyward_core as sky
from skyward_core import cli
from skyward_core.cli import sweep
from skyward_core.cli.ui import PageServer, answers
from skyward_core.ledger.ledger import Ledger
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
from skyward_core.ledger.uses import NewUse, UseCount
from skyward_core.live.observer import NodeUse
from skyward_core.machines.owner import Owner
from skyward_core.providers import base
from skyward_core.providers.base import LAUNCH_TAG, POOL_TAG, RANK_TAG
from skyward_core.provisioning import quote as plans
from skyward_core.work import NO_WORK, Work
from tests.cleanup.pools import FolderProvider, install_folder_provider

ROOT = Path(__file__).parents[2]
HERE = replace(Owner.here(), user="ada", host="laptop")
DEAD = replace(Owner.here(), started="1")


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
        return load(requested)

    monkeypatch.setattr(base, "load", loading)
    install_folder_provider(monkeypatch)
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


class Skyward:
    """The command line, and what it looks at: a ledger, a cloud, and a clock that stands."""

    def __init__(
        self, ledger: Ledger, clock: Clock, folder: FolderProvider, capsys: pytest.CaptureFixture[str], url: str
    ) -> None:
        self.ledger, self.clock, self.folder, self._capsys, self._url = ledger, clock, folder, capsys, url

    def run(self, line: str) -> tuple[int, str, str]:
        """Run a command line; return its exit code, stdout and stderr."""
        code = cli.main(shlex.split(line))
        return code, *self._capsys.readouterr()

    def __call__(self, line: str, code: int = 0) -> str:
        """Run a command line; return its stdout, or its stderr if it must fail."""
        found, output, errors = self.run(line)
        assert found == code
        if code == cli.FAILED:
            assert "Traceback" not in errors
            return errors
        assert errors == ""
        return output

    def json(self, line: str, code: int = 0) -> Any:
        return json.loads(self(f"{line} --json", code))

    def refused(self, line: Sequence[str]) -> str:
        """Run a command line that is not valid; return its stderr."""
        with pytest.raises(SystemExit) as caught:
            cli.main([*line])
        assert caught.value.code == 2
        return self._capsys.readouterr().err

    def damage(self, *statements: str) -> None:
        """Change the database below the ledger."""
        with closing(sqlite3.connect(self._url.removeprefix("sqlite:///"))) as database:
            for statement in statements:
                database.execute(statement)
            database.commit()

    def open(
        self, pool_id: str, *, owner: Owner = HERE, age_seconds: float = 3600, machines: int = 1, **more: Any
    ) -> None:
        """Open a pool with machines at 2 USD an hour each (8 USD on demand), which have run calls since it was opened."""
        now = self.clock.now
        self.clock.now -= timedelta(seconds=age_seconds)
        end, provider, ledger = now + timedelta(seconds=100), self.folder.to_json(), self.ledger
        ledger.open_pool(pool_id, owner=owner, provider=provider, spec_json="{}", lease_expires_at=end, **more)
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
        instances = self.folder.launch(None, machines, tags, "")
        ledger.bind_all({its.id: instance.id for its, instance in zip(intents, instances, strict=True)})
        ledger.note_all({its.id: {Bucket.RUNNING_CALLS: age_seconds} for its in intents})
        self.clock.now = now

    def open_named(self, work: Work = NO_WORK) -> None:
        """Open the pool `sky-named` with the name "nightly", which two processes and the owner of a detached call use."""
        self.open("sky-named", name="nightly")
        terms: dict[str, Any] = {"owner": HERE, "terms": {}, "keep_warm_seconds": 60.0, "lease_seconds": 100.0}
        for client, its_work, seconds in (("a", NO_WORK, 30.0), ("b", work, 10.0)):
            self.ledger.names.claim("nightly", "sky-named", client, work=its_work, **terms)
            self.ledger.names.opened("nightly", 1)
            self.ledger.uses.write([NewUse(client, "sky-named", its_work, client)])
            self.ledger.uses.write(counts={client: UseCount(seconds, seconds / 100)})
        used = (SlotUse("i", 1, 5.0),)
        call = CallState("c", "train", "dag", 1, "running", self.clock.now, None, used)
        self.ledger.note_calls("sky-named", [call])

    def open_three(self) -> None:
        """Open a live pool, a dead one, and a live one with rows that a test damages."""
        self.open("sky-live")
        self.open("sky-dead", owner=DEAD)
        self.open("sky-odd")


@pytest.fixture
def skyward(
    ledger: Ledger,
    clock: Clock,
    folder: FolderProvider,
    capsys: pytest.CaptureFixture[str],
    url: str,
    monkeypatch: pytest.MonkeyPatch,
) -> Skyward:
    install_bills(monkeypatch)
    return Skyward(ledger, clock, folder, capsys, url)


def lines(output: str) -> list[list[str]]:
    """The text of a table, by lines and columns."""
    return [re.split(r" {2,}", line.strip()) for line in output.splitlines()]


def install(monkeypatch: pytest.MonkeyPatch, planner: Callable[[str], sky.Plan | None]) -> None:
    """Install a plugin with the name "cron"."""
    entries = [SimpleNamespace(name="cron", load=lambda: planner)]
    monkeypatch.setattr(plans, "entry_points", lambda group: entries if group == "skyward.quotes" else [])


def install_bills(monkeypatch: pytest.MonkeyPatch, complete: Callable[[], int] | None = None) -> None:
    """Let the plugin "cron" be the only one that completes bills; None: there is none."""
    entries = [SimpleNamespace(name="cron", module="cron_plugin", load=lambda: complete)] if complete else []
    monkeypatch.setattr(sweep, "entry_points", lambda group: entries if group == "skyward.bills" else [])


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


def record_pools(skyward: Skyward) -> None:
    """Record pools in all states, budgets, attempts and calls, so that no list of any command is empty."""
    ledger, folder, now = skyward.ledger, skyward.folder, skyward.clock.now
    ledger.set_account(Account("team-a", Decimal(200), Period.DAY))
    ledger.set_account(Account("each", Decimal(5), Period.RUN))
    skyward.open("sky-ended")
    skyward("stop sky-ended")
    skyward.open("sky-gone", owner=DEAD)
    folder.terminate([instance.id for instance in folder.instances()])
    skyward.open("sky-live", account="team-a", machines=2, work=Work(system="cron", run="1"))
    skyward.open("sky-dead", owner=DEAD)
    ledger.open_pool("sky-odd", owner=DEAD, provider={"name": "nonesuch"}, spec_json="{}", lease_expires_at=now)
    ledger.note_attempts(
        [
            Attempt("sky-live", now, "folder", "here", "t", is_spot=True, seconds=0.5, error=error)
            for error in ("", "NoCapacity")
        ]
    )
    calls = [CallState("c", "train", "dag", 1, "ended", now, now), CallState("d", "f", "", 0, "waiting", now)]
    ledger.note_calls("sky-live", calls)
    ledger.note_calls("sky-ended", [CallState("e", "f", "", 1, "running", now)])
    skyward.open_named(Work(system="cron", run="2"))


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
