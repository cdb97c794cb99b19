"""Command lines that are parsed and not run, and the commands that there are."""

import re
from collections.abc import Iterator
from typing import Any

from tests.page_blocks import ROOT, pages_of

PAGES = "\n".join((ROOT / page).read_text() for page in pages_of("commands"))


def understood(command: Any, words: list[str], parent: Any = None) -> str:
    """Parse a command line without running it; return its command. A line that the parser refuses raises."""
    with command.make_context("skyward", words, parent=parent) as context:
        if not hasattr(command, "commands") or not (rest := [*context._protected_args, *context.args]):
            return ""
        name, subcommand, rest = command.resolve_command(context, rest)
        return f"{name} {understood(subcommand, rest, context)}".strip()


def all_commands(command: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Return each command and group with its words, "" for `skyward` itself."""
    yield path, command
    for name, subcommand in getattr(command, "commands", {}).items():
        yield from all_commands(subcommand, f"{path} {name}".strip())


def lines_of_the_pages() -> list[str]:
    """Return the command lines of docs/commands.md and docs/commands/ without "skyward" and without comments."""
    return re.findall(r"^(?:\$ )?skyward (?!run: error)(.+)$", PAGES, re.MULTILINE)
