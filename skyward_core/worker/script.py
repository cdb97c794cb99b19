"""A script or a command as a separate process of a call: what `skyward run` and `sky.command_call` run on a node.

The script, the modules of its project that it imports, and other files come with the call, and are written into a
folder that is removed with the process. The process has the call's output, environment and process group, so it ends
with the call.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from skyward_core.errors import CallCrashed
from skyward_core.wire.info import instance_info

BY_SIGNAL = 128
"""Shells add the number of the signal that has ended a process to this."""
NOT_STARTED = 127
"""The exit code of a shell for a command that cannot be started."""


class File(NamedTuple):
    """A file that travels; `place` is below the folder."""

    place: str
    content: bytes
    is_executable: bool


class Script(NamedTuple):
    """A Python file with its arguments. `files` has its text and those of its modules, by their paths; `others` lie
    beside it.
    """

    name: str
    files: Mapping[str, str]
    args: tuple[str, ...]
    others: tuple[File, ...] = ()


class Command(NamedTuple):
    """A command with its arguments. With files, their folder is its working directory, else that of the call."""

    name: str
    argv: tuple[str, ...]
    files: tuple[File, ...] = ()


type Program = Script | Command


def run_script(script: Script) -> int:
    """Run a script to its end; return its exit code, as a shell has it."""
    with tempfile.TemporaryDirectory(prefix="skyward-run-") as folder:
        _write([File(path, text.encode(), is_executable=False) for path, text in script.files.items()], folder)
        _write(script.others, folder)
        path = {"PYTHONPATH": os.pathsep.join(_search_path())}
        return _exit_code([sys.executable, "-u", os.path.join(folder, script.name), *script.args], path, None)


def run_command(command: Command) -> int:
    """Run a command to its end; return its exit code, as a shell has it."""
    with tempfile.TemporaryDirectory(prefix="skyward-run-") as folder:
        _write(command.files, folder)
        try:
            return _exit_code(command.argv, {}, folder if command.files else None)
        except OSError as error:
            print(f"{command.argv[0]} cannot be started: {error.strerror}", file=sys.stderr, flush=True)
            return NOT_STARTED


def run_checked(program: Program) -> int:
    """Run a program to its end; return 0. Raises CallCrashed for another exit code."""
    code = run_script(program) if isinstance(program, Script) else run_command(program)
    if code:
        raise CallCrashed(f"{program.name} has exit code {code}", instance_info().node, code)
    return code


def _write(files: Sequence[File], folder: str) -> None:
    for file in files:
        place = Path(folder, file.place)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(file.content)
        if file.is_executable:
            place.chmod(0o755)


def _exit_code(argv: Sequence[str], variables: Mapping[str, str], folder: str | None) -> int:
    environment = {**os.environ, **rank_variables(), **variables}
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, env=environment, cwd=folder, check=False)
    return done.returncode if done.returncode >= 0 else BY_SIGNAL - done.returncode


def rank_variables() -> dict[str, str]:
    """Return the variables by which the processes of one program find each other, named as those of torchrun."""
    info = instance_info()
    return {
        "RANK": str(info.rank),
        "WORLD_SIZE": str(info.world_size),
        "LOCAL_RANK": str(info.worker),
        "LOCAL_WORLD_SIZE": str(info.workers_per_node),
        "MASTER_ADDR": info.head_addr,
        "MASTER_PORT": str(info.head_port),
    }


def _search_path() -> Sequence[str]:
    """Return where this process finds modules: the script may import skyward_core too."""
    return [entry for entry in sys.path if entry]
