"""The `skyward` command as a user types it: its output, its effects, and its exit codes."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import skyward_core as sky
from skyward_core import cli
from skyward_core.doctor import diagnosis
from skyward_core.errors import CredentialsError, InstancesLeft
from skyward_core.ledger.ledger import Ledger
from skyward_core.machines.offers import Offer
from skyward_core.provisioning import teardown
from tests.cleanup.pools import FolderProvider
from tests.cli.ledger import (
    DEAD,
    HERE,
    ROOT,
    Clock,
    Skyward,
    check_fields,
    documented,
    install,
    open_pool,
    record_pools,
    shell,
)


def test_a_sweep_that_only_fails_reports_nothing_as_ended(
    ledger: Ledger,
    clock: Clock,
    folder: FolderProvider,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A machine that may still exist is not reported as ended."""
    open_pool(ledger, clock, folder, "sky-dead", owner=DEAD)

    def refuse(*_: object) -> None:
        raise InstancesLeft("it stays", ["m"])

    monkeypatch.setattr(FolderProvider, "terminate", refuse)
    monkeypatch.setattr(teardown, "DEADLINE_SECONDS", 0.05)
    assert cli.main(["sweep", "--yes"]) == cli.FAILED
    assert capsys.readouterr().out.splitlines()[-1] == "1 failure"


def test_the_help_imports_little() -> None:
    """For its help it imports neither the database, nor the terminal tables, nor any provider."""
    heavy = "{'sqlalchemy', 'rich', 'pydantic', 'distributed', 'asyncssh'}"
    code = (
        f"import sys; from skyward_core.cli.app import command_tree; command_tree(); print({heavy} & set(sys.modules))"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True).stdout
        == "set()\n"
    )


# ── output ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_terminal_without_unicode_shows_every_name(ledger: Ledger, clock: Clock, folder: FolderProvider) -> None:
    """Characters that it cannot show are written as their numbers."""
    open_pool(ledger, clock, folder, "sky-möwe", owner=HERE)
    done = shell("skyward ps", PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert (done.returncode, "sky-m\\xf6we" in done.stdout) == (0, True)


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


def test_a_sweep_that_fails_in_part_names_each_failure(
    skyward: Skyward, ledger: Ledger, clock: Clock, folder: FolderProvider
) -> None:
    """Exit code 1, one line for each failure; the rest was done."""
    open_pool(ledger, clock, folder, "sky-dead", owner=DEAD)
    ledger.open_pool("sky-odd", owner=DEAD, provider={"name": "nonesuch"}, spec_json="{}", lease_expires_at=clock.now)
    assert skyward("sweep --yes", code=1).startswith("skyward: nonesuch: no provider is called 'nonesuch'")
    assert folder.instances() == []
