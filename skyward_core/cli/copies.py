"""`skyward ledger backup` and `restore`: a whole copy of a ledger in SQLite."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from skyward_core.cli import values
from skyward_core.cli.options import ledger_url, open_ledger
from skyward_core.cli.printing import TO_DO, say

if TYPE_CHECKING:
    from skyward_core.ledger.backup import Copy

BackupFile = Annotated[str, typer.Argument(metavar="FILE", parser=values.printable, help="the backup, one file")]


def backup(context: typer.Context, file: BackupFile) -> int:
    """Write the whole ledger into one file, while others use it; an earlier backup is replaced when it is complete."""
    from skyward_core.ledger.backup import backup as write_backup

    say(f"written: {_words(write_backup(ledger_url(context, 'nothing is written'), Path(file)))}")
    return 0


def restore(
    context: typer.Context,
    file: BackupFile,
    *,
    yes: Annotated[bool, typer.Option("--yes", help="do it; without this nothing is touched")] = False,
) -> int:
    """Show what a backup has; with --yes, replace the ledger by it, if no pool lives and no process has it open."""
    from skyward_core.ledger.backup import inspect
    from skyward_core.ledger.backup import restore as read_backup

    if not yes:
        say(f"to be restored: {_words(inspect(Path(file)))}")
        say("nothing was touched; --yes does it, and the present ledger is lost")
        return TO_DO
    with open_ledger(context) as ledger:
        say(f"restored: {_words(read_backup(ledger, Path(file)))}")
    say("machines that were rented after the backup are found by their tags: look at `skyward sweep`")
    return 0


def _words(copy: Copy) -> str:
    return f"{copy.path}, version {copy.version}, {copy.pools} pools, {copy.size / 1e6:.1f} MB"
