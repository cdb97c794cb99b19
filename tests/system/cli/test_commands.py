"""The `skyward` command as a user types it: its output, its effects, and its exit codes."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import skyward_core as sky
from skyward_core import cli
from skyward_core import doctor as diagnosis
from skyward_core.errors import CredentialsError, InstancesLeft
from skyward_core.machines.offers import Offer
from tests.cleanup.pools import FolderProvider
from tests.cli.ledger import DEAD, ROOT, Skyward, check_fields, documented, install, record_pools, shell


def test_a_sweep_that_only_fails_reports_nothing_as_ended(skyward: Skyward, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that may still exist is not reported as ended."""
    skyward.open("sky-dead", owner=DEAD)

    def refuse(*_: object) -> None:
        raise InstancesLeft("it stays", ["m"])

    monkeypatch.setattr(FolderProvider, "terminate", refuse)
    monkeypatch.setattr(FolderProvider, "gone_deadline_seconds", 0.05)
    code, output, _ = skyward.run("sweep --yes")
    assert (code, output.splitlines()[-1]) == (cli.FAILED, "1 failure")


def test_the_help_imports_little() -> None:
    """For its help it imports neither the database, nor the terminal tables, nor any provider."""
    heavy = "{'sqlalchemy', 'rich', 'pydantic', 'distributed', 'asyncssh'}"
    code = f"import sys, skyward_core.cli.app as app; app.command_tree(); print({heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout == "set()\n"


def test_a_terminal_without_unicode_shows_every_name(skyward: Skyward) -> None:
    skyward.open("sky-möwe")
    done = shell("skyward ps", PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert (done.returncode, "sky-m\\xf6we" in done.stdout) == (0, True)


def test_json_has_the_fields_of_the_page(skyward: Skyward, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """All fields of docs/json.md are present with their documented kind, and no others."""
    place = {"provider": "folder", "instance_type": "t", "region": "here", "or_types": ("u",)}
    sold = Offer(price_per_hour=1.0, vcpus=1, memory_gb=8, **place)
    folders = [skyward.folder, FolderProvider(folder=f"{tmp_path}/other")]

    def offers(provider: FolderProvider, _: object) -> list[Offer]:
        if provider.folder.endswith("other"):
            raise CredentialsError("who are you?").coded("401")
        return [sold]

    monkeypatch.setattr(FolderProvider, "offers", offers)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "skyward.toml").write_text("[profiles.large]\nnodes = 2\n[pools.nightly]\n")
    monkeypatch.setattr(diagnosis, "entry_points", lambda group: ())
    record_pools(skyward)
    monkeypatch.setenv("SKYWARD_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (old := tmp_path / "home" / "envs" / "old").mkdir(parents=True)
    os.utime(old, (0, 0))
    tasks = (
        sky.PlannedTask("w", "t", sky.PoolSpec.of(provider=folders)),
        sky.PlannedTask("w", "u", None, "a template", timeout_seconds=60),
    )
    install(monkeypatch, lambda _: sky.Plan(tasks, ("bad.py: SyntaxError",)))
    wheres = " ".join(f"--provider {shlex.quote(json.dumps(one.to_json()))}" for one in folders)
    lines = {
        "ps": ["ps --all --json"],
        "users": ["users nightly --json"],
        "warm": ["warm nightly --for 2h --json"],
        "calls": ["calls --json"],
        "cost": ["cost --json"],
        "receipt": ["receipt sky-live --json", "receipt sky-ended --json", "receipt sky-named --json"],
        "offers": [f"offers {wheres} --json"],
        "quote": ["quote jobs/ --json"],
        "why": ["why sky-live --json"],
        "sweep": ["sweep --json", "sweep --yes --json"],
        "stop": ["stop sky-live --json"],
        "budget list": ["budget list --json"],
        "config show": ["config show --json", "config show --json --profile large"],
        "doctor": ["doctor --json"],
        "ledger prune": ["ledger prune --older-than 90d --json"],
        "cache": ["cache --json"],
        "cache prune": ["cache prune --json"],
    }
    for command, typed in lines.items():
        fields, seen = documented(command), set[str]()
        for line in typed:
            seen |= check_fields(line, skyward.run(line)[1], fields)
        assert seen == fields.keys(), f"{command} does not print {fields.keys() - seen}"


def test_a_sweep_that_fails_in_part_names_each_failure(skyward: Skyward) -> None:
    skyward.open("sky-dead", owner=DEAD)
    now, odd = skyward.clock.now, {"name": "nonesuch"}
    skyward.ledger.open_pool("sky-odd", owner=DEAD, provider=odd, spec_json="{}", lease_expires_at=now)
    assert skyward("sweep --yes", code=1).startswith(
        "skyward: nonesuch, pool sky-odd: no provider is called 'nonesuch'"
    )
    assert skyward.folder.instances() == []


RESOURCE_DAMAGES = {
    "price is nan": "price_micro_usd_per_hour = 'nan'",
    "tags are no JSON": "tags_json = 'x'",
    "region is bytes": "region = x'ff00'",
    "time is text": "intended_microseconds = 'then'",
    "seconds are infinite": "idle_milliseconds = 9e999",
}


@pytest.mark.parametrize("what", RESOURCE_DAMAGES)
def test_a_resource_that_cannot_be_read_stops_nothing(what: str, skyward: Skyward) -> None:
    skyward.open_three()
    before = skyward.json("cost")["total"]["cost_usd"]
    skyward.damage(f"UPDATE skyward_resources SET {RESOURCE_DAMAGES[what]} WHERE pool_id = 'sky-odd'")
    for line in ("ps", "cost --by day", "cost --by bucket --json", "cost --by pool", "receipt sky-odd"):
        code, output, complaint = skyward.run(line)
        assert code in (0, 1), line
        if code:
            assert complaint.startswith("skyward: row "), line
    assert "cannot be read" in skyward.run("ps")[2]
    if what == "price is nan":
        code, output, complaint = skyward.run("cost --json")
        assert (code, json.loads(output)["total"]["cost_usd"]) == (1, pytest.approx(before * 2 / 3))
        assert "a price or a time is no number, or none that a bill can have" in complaint
    skyward.damage("UPDATE skyward_pools SET lease_expires_microseconds = 1 WHERE id = 'sky-odd'")
    code, output, _ = skyward.run("sweep --yes --json")
    report = json.loads(output)
    assert code == 1
    assert "sky-dead" in [finding["pool"] for finding in report["ended"]]
    assert "sky-odd" in [failure["pool"] for failure in report["failures"]]
    assert {machine.pool_id for machine in skyward.folder.instances()} == {"sky-live"}
    entry = skyward.ledger.pool("sky-odd")
    assert entry is not None
    assert entry.ended_at is None  # an unreadable entry is not known to be gone
