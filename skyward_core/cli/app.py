"""The `skyward` command: the tree of commands, the options before a command, errors in words, and the exit code."""

from __future__ import annotations

import errno
import inspect
import io
import os
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, NoReturn, TextIO

import typer

from skyward_core.cli import budget, caches, calls, config, copies, cost, live, offers, pools, run, sweep, values
from skyward_core.cli.printing import FAILED, one_line
from skyward_core.errors import BadRequest, SkywardError

HELP_OPTIONS = {"help_option_names": ["--help", "-h"]}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code. Errors of this library and of the operating system are one line.

    `--help`, `--version` and a command line with a fault end with SystemExit.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # a terminal without Unicode shows a name's characters as numbers
            stream.reconfigure(errors="backslashreplace")
    try:
        return _flushed(_run, argv)
    except BrokenPipeError:  # `skyward ps | head`: no process reads on
        _discard(sys.stdout)
        return FAILED
    except (SkywardError, OSError) as error:
        return _fail(error)
    except KeyboardInterrupt:
        return 130


def _run(argv: Sequence[str] | None) -> int:
    try:
        return command_tree().main(argv, prog_name="skyward", standalone_mode=False) or 0
    except typer.TyperException as error:
        _refuse(error)


def _refuse(error: typer.TyperException) -> NoReturn:
    """Print the usage of the command and what is wrong with the command line; end with typer's exit code, 2."""
    context: typer.Context | None = getattr(error, "ctx", None)  # no public class of typer has this method
    path = "skyward" if context is None else context.command_path
    if context is not None:
        print(context.get_usage(), file=sys.stderr)
    message = error.format_message().replace("Value error, ", "", 1)  # pydantic's words, with which typer reads choices
    print(f"{path}: error: {one_line(message)}", file=sys.stderr)
    raise SystemExit(error.exit_code) from error


def _flushed(run: Callable[[Sequence[str] | None], int], argv: Sequence[str] | None) -> int:
    """Run it and flush its output here, where a full disk or a closed pipe can still be reported."""
    try:
        return run(argv)
    except OSError as error:
        if error.errno != errno.ENOSPC or error.filename is not None:
            raise
        # stdout has no buffer (PYTHONUNBUFFERED): what is printed fails at once
        raise _lost(error, sys.stdout) from error
    finally:
        if sys.stdout is not None:  # pyright: ignore[reportUnnecessaryComparison] - None under `>&-`
            _flush(sys.stdout)


def _flush(stream: TextIO) -> None:
    try:
        stream.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise _lost(error, stream) from error


def _lost(error: OSError, stream: TextIO) -> OSError:
    return OSError(error.errno, f"{error.strerror}: the output is lost", stream.name)


def _fail(error: Exception) -> int:
    """Print the error as one line. Nothing stays in a buffer: the interpreter writes it again as it ends."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is sys.stderr:
                print(f"skyward: {one_line(error)}", file=stream)
            stream.flush()
        except OSError:
            _discard(stream)
        except AttributeError:  # closed by the shell
            pass
    return FAILED


def _discard(stream: TextIO) -> None:
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())


@cache
def command_tree() -> Any:
    """Return the root command, built once. Its class is private to typer."""
    app = _group("What is rented, what it costs, and which machines belong to no living pool.", add_completion=True)
    app.callback()(_root)
    _add(app, run.run, cls=run.RunCommand, context_settings=run.PASS_ON)
    _add(app, pools.ps, cost.users, cost.cost, calls.calls, sweep.sweep, pools.warm, pools.stop)
    _add(app, live.top, live.logs, live.metrics, live.stacks, live.ssh, live.cp, live.dashboard, live.ui)
    _add(app, pools.why, offers.offers, offers.quote, cost.receipt, config.doctor)
    app.add_typer(
        _add(_group("the ledger itself"), copies.backup, copies.restore, sweep.migrate, sweep.prune), name="ledger"
    )
    app.add_typer(_add(_group("accounts that pay for pools"), budget.set_, budget.list_), name="budget")
    app.add_typer(_add(_group("the settings, and where they come from"), config.show, config.schema), name="config")
    cache_group = _add(_group("what pools have left on this computer for later ones"), caches.prune)
    cache_group.callback(invoke_without_command=True)(caches.show)
    app.add_typer(cache_group, name="cache")
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
