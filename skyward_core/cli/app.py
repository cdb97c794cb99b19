"""The tree of commands, and the options before a command."""

import inspect
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import typer

from skyward_core.cli import values
from skyward_core.cli.commands import (
    attempts,
    budget,
    calls,
    config,
    cost,
    doctor,
    ledger,
    live,
    offers,
    pools,
    quote,
    receipt,
    run,
    sweep,
    top,
    ui,
    users,
    warm,
)
from skyward_core.errors import BadRequest

HELP_OPTIONS = {"help_option_names": ["--help", "-h"]}


@cache
def command_tree() -> Any:
    """Return the root command, built once. Its class is private to typer."""
    app = _group("What is rented, what it costs, and which machines belong to no living pool.", add_completion=True)
    app.callback()(_root)
    _add(app, run.run, context_settings=run.PASS_ON)
    _add(app, pools.ps, users.users, cost.cost, calls.calls, sweep.sweep, warm.warm, pools.stop)
    _add(app, top.top, live.logs, live.metrics, live.stacks, live.ssh, live.cp, live.dashboard, ui.ui)
    _add(app, attempts.why, offers.offers, quote.quote, receipt.receipt, doctor.doctor)
    app.add_typer(_add(_group("the ledger itself"), ledger.prune), name="ledger")
    app.add_typer(_add(_group("accounts that pay for pools"), budget.set_, budget.list_), name="budget")
    app.add_typer(_add(_group("the settings, and where they come from"), config.show, config.schema), name="config")
    return typer.main.get_command(app)


def _group(about: str, *, add_completion: bool = False) -> typer.Typer:
    # without rich, help has no frames, needs no Unicode, and is readable on 50 columns
    return typer.Typer(
        help=about,
        short_help=about,
        add_completion=add_completion,
        rich_markup_mode=None,
        subcommand_metavar="COMMAND ...",
        context_settings=HELP_OPTIONS,
    )


def _add(app: typer.Typer, *commands: Callable[..., int], **settings: Any) -> typer.Typer:
    """Add functions as commands; a docstring is the help, and is not cut in the list of commands."""
    for command in commands:
        about = inspect.getdoc(command)
        app.command(command.__name__.removesuffix("_"), help=about, short_help=about, **settings)(command)
    return app


def _print_version(is_given: bool) -> None:
    if is_given:
        from importlib.metadata import version

        print(f"skyward {version('skyward-core')}")
        raise SystemExit(0)


def _print_constraints(is_given: bool) -> None:
    if is_given:
        print(_constraints())
        raise SystemExit(0)


def _constraints() -> Path:
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    path = Path(__file__).parents[1] / f"constraints-{python}.txt"
    if not path.is_file():
        raise BadRequest(f"no versions were tested with Python {python}; for others there are files in {path.parent}")
    return path


def _root(
    context: typer.Context,
    *,
    version: Annotated[  # noqa: ARG001 - its callback prints
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="print the version")
    ] = False,
    constraints: Annotated[  # noqa: ARG001
        bool,
        typer.Option(
            "--constraints",
            is_eager=True,
            callback=_print_constraints,
            help="print the path of the file of tested versions for this Python, for `pip install -c`",
        ),
    ] = False,
    ledger: Annotated[
        str | None,
        typer.Option(
            parser=values.printable,
            metavar="URL",
            help="the ledger (default: SKYWARD_LEDGER, else a file under the user's state directory)",
        ),
    ] = None,
) -> None:
    context.obj = ledger
