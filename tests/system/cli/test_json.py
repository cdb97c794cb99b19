"""JSON of commands: the fields of docs/json.md."""

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

import skyward_core as sky
from skyward_core import cli
from skyward_core.doctor import diagnosis
from skyward_core.errors import CredentialsError
from skyward_core.ledger.ledger import Ledger
from skyward_core.ledger.rows import (
    BILLING_ROUNDING,
    Account,
    Attempt,
    Bucket,
    CallState,
    Period,
)
from skyward_core.machines.offers import Offer
from skyward_core.work import Work
from tests.cleanup.pools import FolderProvider
from tests.unit.cli.test_commands import (  # noqa: F401 - fixtures
    DEAD,
    HERE,
    ROOT,
    Clock,
    Skyward,
    clock,
    folder,
    ledger,
    open_named,
    open_pool,
    skyward,
    url,
)
from tests.unit.cli.test_quote import install

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


def test_json_has_the_fields_of_the_page(
    skyward: Skyward,
    ledger: Ledger,
    clock: Clock,
    folder: FolderProvider,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """All fields of docs/json.md are present with their documented kind, and no others."""
    sold = Offer(
        provider="folder", instance_type="t", region="here", price_per_hour=1.0, vcpus=1, memory_gb=8, or_types=("u",)
    )

    def offers(provider: FolderProvider, _: object) -> list[Offer]:
        if provider.folder.endswith("other"):
            raise CredentialsError("who are you?").coded("401")
        return [sold]

    monkeypatch.setattr(FolderProvider, "offers", offers)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "skyward.toml").write_text("[profiles.large]\nnodes = 2\n[pools.nightly]\n")
    monkeypatch.setattr(diagnosis, "entry_points", lambda group: ())
    record_pools(skyward, ledger, clock, folder)
    planned = sky.Plan(
        (
            sky.PlannedTask("w", "t", sky.PoolSpec.of(provider=[folder, FolderProvider(folder=f"{tmp_path}/other")])),
            sky.PlannedTask("w", "u", None, "a template", timeout_seconds=60),
        ),
        ("bad.py: SyntaxError",),
    )
    install(monkeypatch, cron=lambda _: planned)
    wheres = " ".join(
        f"--provider {shlex.quote(json.dumps({'name': 'folder', 'folder': place}))}"
        for place in (str(tmp_path), f"{tmp_path}/other")
    )
    lines = {
        "ps": ["ps --all --json"],
        "users": ["users nightly --json"],
        "warm": ["warm nightly --for 2h --json"],
        "calls": ["calls --json"],
        "cost": ["cost --json"],
        "receipt": ["receipt sky-live", "receipt sky-ended", "receipt sky-named"],
        "offers": [f"offers {wheres} --json"],
        "quote": ["quote jobs/ --json"],
        "why": ["why sky-live --json"],
        "sweep": ["sweep --json", "sweep --yes --json"],
        "budget list": ["budget list --json"],
        "config show": ["config show --json", "config show --json --profile large"],
        "doctor": ["doctor --json"],
        "ledger prune": ["ledger prune --older-than 90d --json"],
    }
    for command, typed in lines.items():
        fields, seen = documented(command), set[str]()
        for line in typed:
            cli.main(shlex.split(line))
            seen |= check_fields(line, capsys.readouterr().out, fields)
        assert seen == fields.keys(), f"{command} does not print {fields.keys() - seen}"
