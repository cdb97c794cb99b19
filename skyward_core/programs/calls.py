"""Programs as calls of a pool: a Python script, or a command, in a process of its own on a node."""

from __future__ import annotations

import os
import types
from collections.abc import Iterator, Sequence
from pathlib import Path

from skyward_core.compute import PendingCompute
from skyward_core.errors import BadRequest
from skyward_core.image.local_files import NEVER
from skyward_core.serialization.sources import Source, collect
from skyward_core.worker.script import Command, File, Script, run_checked

MOST_BYTES = 20_000_000
"""Of all files of one program together: they travel in one message."""


def script_call(
    script: str | os.PathLike[str],
    args: Sequence[str] = (),
    *,
    files: Sequence[str | os.PathLike[str]] = (),
    folder: str | os.PathLike[str] = ".",
) -> PendingCompute[int]:
    """Return a call that runs a Python script in a process of its own, with these arguments.

    The modules of its project that it imports travel with it. `files` are files and folders that travel too: those
    below its folder keep their place relative to it, all others lie beside it. Relative paths, that of the script too,
    begin at `folder`. The files have 20 MB at most. The call returns 0; for another exit code it raises CallCrashed,
    with that code as `exit_code` (128 and the signal for one that was killed).
    Raises BadRequest.
    """
    path = Path(folder, script)
    found = script_of(path, [*map(str, args)])
    return PendingCompute(run_checked, (found._replace(others=_travelling(files, Path(folder), path.parent)),))


def command_call(
    command: str | Sequence[str],
    *,
    files: Sequence[str | os.PathLike[str]] = (),
    folder: str | os.PathLike[str] = ".",
) -> PendingCompute[int]:
    """Return a call that runs a command: a text by bash, a list of texts as it is.

    `files` are files and folders that travel: those below `folder` keep their place relative to it, which is then the
    working directory of the command, and is removed after it. Without files that is the one of the calls. The result
    and the errors are those of `script_call`.
    """
    if isinstance(command, str):
        name, argv = (command.strip().partition("\n")[0][:60], ("bash", "-c", command))
    else:
        name, argv = (str(command[0]) if command else "", tuple(map(str, command)))
    if not name:
        raise BadRequest(f"command={command!r}: write a text for bash, or a list with a program and its arguments")
    return PendingCompute(run_checked, (Command(name, argv, _travelling(files, Path(folder), Path(folder))),))


def script_of(path: Path, args: Sequence[str]) -> Script:
    """Return a script with the modules that it imports. Raises BadRequest."""
    try:
        text = path.read_text(encoding="utf-8")
        code = compile(text, str(path), "exec")
    except OSError as error:
        raise BadRequest(f"{path} cannot be read ({error.strerror}): write the path of a Python file") from error
    except (SyntaxError, ValueError) as error:  # ValueError: no UTF-8, or null bytes
        raise BadRequest(f"{path} is no Python program: {error}") from error
    modules = collect([types.FunctionType(code, {"__name__": "__main__"})], first=str(path.resolve().parent))
    return Script(
        path.name, {_path_of(one): one.text for one in modules if one.file is not None} | {path.name: text}, tuple(args)
    )


def _path_of(source: Source) -> str:
    path = source.name.replace(".", "/")
    return f"{path}/__init__.py" if source.is_package else f"{path}.py"


def _travelling(entries: Sequence[str | os.PathLike[str]], folder: Path, base: Path) -> tuple[File, ...]:
    """Return the files of entries, which begin at `folder`. Those below `base` keep their place in it."""
    found = {place: path for entry in entries for place, path in _walk(os.fspath(entry), folder, base)}
    if (total := sum(path.stat().st_size for path in found.values())) > MOST_BYTES:
        raise BadRequest(
            f"files= have {total / 1e6:.0f} MB, and {MOST_BYTES / 1e6:.0f} MB is the limit, because they travel with"
            " each call: name fewer, include them in the image (sky.Image(includes=[...])), or mount a volume"
        )
    return tuple(
        File(place, path.read_bytes(), bool(path.stat().st_mode & 0o100)) for place, path in sorted(found.items())
    )


def _walk(entry: str, folder: Path, base: Path) -> Iterator[tuple[str, Path]]:
    """Yield the files of an entry by their places. What is not below the base has its last name."""
    path = Path(os.path.abspath(folder / Path(entry).expanduser()))
    root = Path(os.path.abspath(base))
    start = root if path.is_relative_to(root) else path.parent
    if path.is_file():
        yield str(path.relative_to(start)), path
    elif path.is_dir():
        for one in sorted(path.rglob("*")):
            if one.is_file() and not set(NEVER) & set(one.relative_to(path).parts):
                yield str(one.relative_to(start)), one
    else:
        raise BadRequest(f"files= has {entry!r}, and there is no file or folder {path} on this machine")
