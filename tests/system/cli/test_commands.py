"""The `skyward` command as a user types it: its output, its effects, and its exit codes."""

import shlex
import subprocess
import sys

import pytest

from skyward_core import cli
from skyward_core.errors import InstancesLeft
from skyward_core.ledger.ledger import Ledger
from skyward_core.provisioning import teardown
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
    open_pool,
    skyward,
    url,
)


def test_a_sweep_that_fails_in_part_names_each_failure(
    skyward: Skyward, ledger: Ledger, clock: Clock, folder: FolderProvider
) -> None:
    """Exit code 1, one line for each failure; the rest was done."""
    open_pool(ledger, clock, folder, "sky-dead", owner=DEAD)
    ledger.open_pool("sky-odd", owner=DEAD, provider={"name": "nonesuch"}, spec_json="{}", lease_expires_at=clock.now)
    assert skyward("sweep --yes", code=1).startswith("skyward: nonesuch: no provider is called 'nonesuch'")
    assert folder.instances() == []


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


def test_a_closed_pipe_is_no_traceback(url: str, ledger: Ledger, clock: Clock, folder: FolderProvider) -> None:
    """`skyward ps | head -1`, as a separate program."""
    open_pool(ledger, clock, folder, "sky-1", owner=HERE)
    command = f"set -o pipefail; {shlex.quote(sys.executable)} -m skyward_core.cli ps --json | true"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=ROOT, check=False, timeout=60)
    assert (done.stdout, done.stderr) == ("", "")


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
