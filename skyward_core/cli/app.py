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
from typing import Annotated, Any, NoReturn, TextIO, override

import typer
import typer.core

from skyward_core.cli import (
    budget,
    caches,
    calls,
    config,
    copies,
    cost,
    live,
    offers,
    pools,
    receipts,
    run,
    sweep,
    values,
)
from skyward_core.cli.printing import FAILED, one_line
from skyward_core.cli.words import EXAMPLES, command_hint, option_hint
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
    """Print what is wrong with the command line; end with typer's exit code, 2. For a word that is not ours, say what
    to write; else print the usage of the command too.
    """
    context: typer.Context | None = getattr(error, "ctx", None)  # no public class of typer has this method
    path = "skyward" if context is None else context.command_path
    message, hint = error.format_message().replace("Value error, ", "", 1), ""  # pydantic reads the choices of typer
    if isinstance(error, NoSuchCommand):
        message, hint = f"there is no command {error.word!r}", error.hint
    elif context is not None and hasattr(error, "possibilities"):  # typer's class for an unknown option is private
        option: str = getattr(error, "option_name", "")
        message, hint = f"there is no option {option}", option_hint(option, _options_of(context))
    if context is not None and not hint:
        print(context.get_usage(), file=sys.stderr)
    print(f"{path}: error: {one_line(f'{message}: {hint}' if hint else message)}", file=sys.stderr)
    raise SystemExit(error.exit_code) from error


def _options_of(context: typer.Context) -> list[str]:
    return [text for option in context.command.params if option.param_type_name == "option" for text in option.opts]


class NoSuchCommand(typer.TyperException):
    """A word is no command of a group. `hint` says what to write, "" if nothing is near."""

    exit_code = 2

    def __init__(self, context: typer.Context, word: str, hint: str) -> None:
        super().__init__(word)
        self.ctx, self.word, self.hint = context, word, hint


class CommandGroup(typer.core.TyperGroup):
    """Commands in groups, and an answer to a word that is none of them."""

    @override
    def format_commands(self, ctx: Any, formatter: Any) -> None:
        commands = [(name, self.commands[name]) for name in self.list_commands(ctx)]
        for group in dict.fromkeys(_group_of(command) for _, command in commands):
            with formatter.section(group):
                formatter.write_dl(
                    [(name, command.get_short_help_str()) for name, command in commands if _group_of(command) == group]
                )

    @override
    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        word = args[0]
        if self.get_command(ctx, word) is None and not ctx.resilient_parsing and not word.startswith("-"):
            group = ctx.command_path.removeprefix("skyward").strip()
            raise NoSuchCommand(ctx, word, command_hint(group, word, self.commands))
        return super().resolve_command(ctx, args)


def _group_of(command: Any) -> str:
    return command.rich_help_panel or "Commands"


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
    app = _group("", "What is rented, what it costs, and which machines belong to no living pool.", add_completion=True)
    app.callback(invoke_without_command=True)(_root)
    _add(app, run.run, panel="Run", cls=run.RunCommand, context_settings=run.PASS_ON)
    _add(app, live.ssh, live.cp, pools.warm, panel="Run")
    _add(app, pools.ps, live.top, live.ui, live.logs, calls.calls, live.metrics, live.stacks, panel="Look")
    _add(app, pools.why, live.dashboard, panel="Look")
    _add(app, offers.offers, offers.quote, cost.cost, receipts.receipt, cost.users, panel="Money")
    of_budget = (budget.set_, budget.list_, budget.remove)
    _add_group(app, "budget", "accounts that pay for pools", *of_budget, panel="Money")
    _add(app, pools.stop, sweep.sweep, panel="Clean up")
    about = "what pools have left on this computer for later ones"
    _add_group(app, "cache", about, caches.prune, panel="Clean up").callback(invoke_without_command=True)(caches.show)
    _add(app, config.doctor, panel="Set up")
    _add_group(app, "config", "the settings, and where they come from", config.show, config.schema, panel="Set up")
    of_ledger = (copies.backup, copies.restore, sweep.migrate, sweep.prune)
    _add_group(app, "ledger", "the ledger itself", *of_ledger, panel="Set up")
    return typer.main.get_command(app)


def _group(path: str, about: str, *, add_completion: bool = False) -> typer.Typer:
    # without rich, help has no frames, needs no Unicode, and is readable on 50 columns
    return typer.Typer(
        cls=CommandGroup,
        help=about,
        short_help=about,
        epilog=_example(path),
        add_completion=add_completion,
        rich_markup_mode=None,
        subcommand_metavar="COMMAND ...",
        context_settings=HELP_OPTIONS,
    )


def _add_group(app: typer.Typer, name: str, about: str, *commands: Callable[..., int], panel: str) -> typer.Typer:
    """Add a group of commands; without a command it prints its help."""
    group = _group(name, about)
    group.callback(invoke_without_command=True)(_print_help)
    app.add_typer(_add(group, *commands, path=name), name=name, rich_help_panel=panel)
    return group


def _add(app: typer.Typer, *commands: Callable[..., int], path: str = "", panel: str = "", **more: Any) -> typer.Typer:
    """Add functions as commands; a docstring is the help, and is not cut in the list of commands."""
    for command in commands:
        about, name = inspect.getdoc(command), command.__name__.removesuffix("_")
        example = _example(f"{path} {name}".strip())
        app.command(name, help=about, short_help=about, epilog=example, rich_help_panel=panel or None, **more)(command)
    return app


def _example(path: str) -> str:
    """Return the last line of a help. The first character keeps it on one line, so that it can be copied."""
    return f"\b\nExample: {EXAMPLES[path]}"


def _print_help(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


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
    _print_help(context)
