"""The `skyward` command. `skyward_core.cli:main` is its entry point; the commands are in `commands`."""

from skyward_core.cli.commands import main as main
