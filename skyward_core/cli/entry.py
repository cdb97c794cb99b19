"""Entry point of the `skyward` command: run a command line, report errors in words, and return the exit code."""

import errno
import io
import os
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn, TextIO

import typer

from skyward_core.cli.app import command_tree
from skyward_core.cli.options import FAILED
from skyward_core.cli.printing import one_line
from skyward_core.errors import SkywardError


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
