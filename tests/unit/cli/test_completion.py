"""The shell completes commands, options, and pools from the ledger."""

from collections.abc import Callable

import pytest

from skyward_core import cli
from skyward_core.ledger.ledger import Ledger
from tests.unit.cli.test_commands import (  # noqa: F401 - fixtures
    DEAD,
    HERE,
    Clock,
    FolderProvider,
    clock,
    folder,
    ledger,
    open_named,
    open_pool,
    url,
)

type Complete = Callable[[str], list[str]]


@pytest.fixture
def complete(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], url: str) -> Complete:
    """Return what bash is offered for the last word of a command line."""

    def run(line: str) -> list[str]:
        monkeypatch.setenv("_SKYWARD_COMPLETE", "complete_bash")
        monkeypatch.setenv("COMP_WORDS", line)
        monkeypatch.setenv("COMP_CWORD", str(len(line.split(" ")) - 1))
        with pytest.raises(SystemExit):
            cli.main([])
        output = capsys.readouterr()
        assert output.err == ""
        return output.out.split()

    return run


def test_commands_are_completed(complete: Complete) -> None:
    assert complete("skyward lo") == ["logs"]
    assert complete("skyward config s") == ["show", "schema"]


@pytest.mark.parametrize("command", ["logs", "stop", "users", "warm", "receipt", "ssh"])
def test_pools_are_completed_from_the_ledger(
    complete: Complete, ledger: Ledger, clock: Clock, folder: FolderProvider, command: str
) -> None:
    """Those that have not ended, by id and by name."""
    open_pool(ledger, clock, folder, "sky-a", owner=HERE)
    open_pool(ledger, clock, folder, "sky-b", owner=DEAD)
    open_pool(ledger, clock, folder, "sky-ended", owner=HERE)
    ledger.end_pools(["sky-ended"])
    open_named(ledger, clock, folder)
    assert sorted(complete(f"skyward {command} sky-")) == ["sky-a", "sky-b", "sky-named"]
    assert complete(f"skyward {command} night") == ["nightly"]


def test_a_ledger_that_cannot_be_read_completes_nothing(complete: Complete, monkeypatch: pytest.MonkeyPatch) -> None:
    """A message would be in the middle of what the user types."""
    monkeypatch.setenv("SKYWARD_LEDGER", "sqlite:////nonesuch/folder/ledger.db")
    assert complete("skyward logs sky-") == []
