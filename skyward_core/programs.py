"""Programs on a pool: a Python script, a command or a function of a module, each in a process of its own on a node.

`run_program` is `skyward run`: it opens the pool, or joins the one with a name, runs the program, and returns its exit
code. `script_call` and `command_call` make calls for a pool that is open.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import queue
import re
import signal
import sys
import threading
import types
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, TextIO, cast, override

from skyward_core.compute import ComputeFunction, PendingCompute, refuse_wrong_arguments
from skyward_core.concurrency import interrupts
from skyward_core.config.settings import Settings
from skyward_core.engine.futures import CallFuture
from skyward_core.errors import BadRequest, CallCrashed, RemoteError, SkywardError
from skyward_core.events.events import LogLine, SkywardEvent
from skyward_core.events.narrator import Narrator
from skyward_core.image.local_files import NEVER
from skyward_core.pool.pool import ComputePool
from skyward_core.serialization.sources import Source, collect
from skyward_core.shown_text import each_line, indented, visible_lines
from skyward_core.spec import PoolSpec
from skyward_core.work import Work
from skyward_core.worker.script import BY_SIGNAL, Command, File, Script, run_checked, run_command, run_script

FAILED = 1
HOW = "write the path of a Python file, module:function, or -- and a command"
SIGNALS = (signal.SIGINT, signal.SIGTERM)
_LIKE_OURS = re.compile(r"^skyward[: ]", re.MULTILINE)
"""Lines of a program that would look like news of its pool."""


def spec_of(fields: Mapping[str, Any], *, profile: str | None = None) -> PoolSpec:
    """Return the spec of a program's pool: these fields, and below them the settings with a profile.

    Raises BadRequest.
    """
    settings = Settings.read(profile=profile, pool=fields.get("name"))
    return PoolSpec.of(**cast("Any", {**settings.fields, **fields, "display": "quiet"}))


def run_program(program: Program, spec: PoolSpec, output: ProgramOutput, *, everywhere: bool = False) -> int:
    """Run a program once, or on every worker (`everywhere`); return its exit code when its machines have ended.

    A pool with a name is left as any other of its users leaves it. Of several exit codes it is the first that is not
    zero; then the other workers are stopped. Raises errors of the pool, and `Interrupted` after a signal.
    """
    pool = ComputePool.from_spec(spec, on_event=output, work=Work(system="skyward", workflow=program.name))
    what_ends = "its machines end" if spec.name is None else f"the pool {spec.name} is left"
    try:
        with output.warnings(), interruptible(output.report, pool.terminate_now, what_ends), pool:
            return _exit_code(pool, program, output, everywhere=everywhere)
    except Interrupted as interrupted:
        output.report("stopped")
        return interrupted.exit_code


def _exit_code(pool: ComputePool, program: Program, output: ProgramOutput, *, everywhere: bool) -> int:
    try:
        if everywhere and program.call.forms_group:
            values: list[Any] = list(pool.broadcast(program.call))
        else:
            futures = pool.submit_broadcast(program.call) if everywhere else [pool.submit(program.call)]
            values = _values(futures, is_script=program.is_script)
    except CallCrashed as error:
        if error.exit_code == 0:  # sys.exit() in a function
            return 0
        output.text(str(error), is_error=True)
        return _as_in_a_shell(error.exit_code)
    except RemoteError as error:
        output.text(str(error), is_error=True)
        return FAILED
    except SkywardError:
        raise
    except Exception as error:  # the function's own
        output.text(str(error.__cause__ or f"{type(error).__name__}: {error}"), is_error=True)
        return FAILED
    if program.is_script:
        return next((code for code in values if code), 0)
    for value in values:
        if value is not None:
            output.text(str(value), is_error=False)
    return 0


def _values(futures: list[CallFuture[Any]], *, is_script: bool) -> list[Any]:
    """Wait for all calls; when one of them fails, stop the others.

    Raises the error of the first that has failed.
    """
    done: queue.SimpleQueue[CallFuture[Any]] = queue.SimpleQueue()
    for future in futures:
        future.add_done_callback(cast("Any", done.put))
    failed: BaseException | None = None
    for _ in futures:
        future = done.get()
        try:
            has_failed = is_script and future.result() != 0
        except CancelledError:
            continue
        except Exception as error:
            failed, has_failed = failed or error, True
        if has_failed:
            for other in futures:
                other.cancel()
    if failed is not None:
        raise failed
    return [future.result() for future in futures if not future.cancelled()]


def _as_in_a_shell(exit_code: int | None) -> int:
    return FAILED if exit_code is None else exit_code if exit_code >= 0 else BY_SIGNAL - exit_code


@dataclass(frozen=True, slots=True)
class Program:
    """A call to make, and what it is called. `is_script` says that the call returns an exit code."""

    name: str
    call: PendingCompute[Any]
    is_script: bool


def read_target(target: str, args: Sequence[str]) -> Program:
    """Return the program of a command line; `args` are its arguments, as texts.

    A function's module is imported from the working directory, as `python -m` does. Raises BadRequest.
    """
    if os.path.isfile(target) or target.endswith(".py"):
        script = script_of(Path(target), args)
        return Program(script.name, PendingCompute(run_script, (script,)), is_script=True)
    module, colon, function = target.partition(":")
    if not (colon and module and function):
        raise BadRequest(f"{target!r} is no file here, and names no function: {HOW}")
    return Program(target, _call(module, function, args), is_script=False)


def command_of(argv: Sequence[str]) -> Program:
    """Return the program that is a command with its arguments; it is started on the node, without a shell."""
    command = Command(argv[0], tuple(argv))
    return Program(command.name, PendingCompute(run_command, (command,)), is_script=True)


def _call(module: str, function: str, args: Sequence[str]) -> PendingCompute[Any]:
    if sys.path[0] != str(Path.cwd()):
        sys.path.insert(0, str(Path.cwd()))
    try:
        found: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise BadRequest(f"{module!r} cannot be imported from {Path.cwd()}: {error}. {HOW}") from error
    except Exception as error:  # the user's own code runs here, and may raise anything
        raise BadRequest(f"{module!r} cannot be imported: {type(error).__name__}: {error}") from error
    for name in function.split("."):
        if not hasattr(found, name):
            raise BadRequest(f"{module!r} has no {function!r}: {HOW}")
        found = getattr(found, name)
    if not callable(found):
        raise BadRequest(f"{module}:{function} is no function: it is {type(found).__name__}")
    called = found.local if isinstance(found, ComputeFunction) else found
    try:
        refuse_wrong_arguments(called, args, {})
    except TypeError as error:  # before anything is rented
        raise BadRequest(f"{error}: write the arguments behind {module}:{function}, each is a text") from error
    return PendingCompute(called, tuple(args))


class ProgramOutput:
    """A callback that prints. After an error of a stream, such as a closed pipe, it prints nothing there any more."""

    def __init__(self, out: TextIO, err: TextIO, *, has_ranks: bool, least_level: int = logging.INFO) -> None:
        self._out = out
        self._err = err
        self._has_ranks = has_ranks
        self._least_level = least_level
        self._narrator = Narrator()
        self._lock = threading.Lock()
        """Held for one line: the thread of the events prints, and the main thread."""
        self._broken: set[str] = set()

    def __call__(self, event: SkywardEvent, /) -> None:
        if isinstance(event, LogLine) and event.call_id is not None:
            if not event.is_shown:
                return
            is_error = event.stream == "stderr" or event.level is not None
            is_marked = self._has_ranks or _LIKE_OURS.search(event.line)
            line = each_line(f"[node {event.node}] ", event.line) if is_marked else event.line
            self._print("stderr" if is_error else "stdout", line)
        elif (news := self._narrator.tell(event)) is not None and news[0] >= self._least_level:
            self.report(news[1])

    def report(self, words: str) -> None:
        """Print news of the pool."""
        self._print("stderr", f"skyward: {indented(words)}")

    @contextlib.contextmanager
    def warnings(self) -> Generator[None]:
        """Report the warnings of the logger "skyward" too: those of a pool that are no events."""
        logger, handler = logging.getLogger("skyward"), _Reporter(self)
        logger.addHandler(handler)
        try:
            yield
        finally:
            logger.removeHandler(handler)

    def text(self, text: str, *, is_error: bool) -> None:
        """Print what a function has returned or raised."""
        self._print("stderr" if is_error else "stdout", indented(text) if is_error else visible_lines(text))

    def _print(self, name: str, line: str) -> None:
        with self._lock:
            if name in self._broken:
                return
            try:
                print(line, file=self._out if name == "stdout" else self._err, flush=True)
            except (OSError, ValueError):  # a closed pipe or a full disk is no reason to stop the program
                self._broken.add(name)


class _Reporter(logging.Handler):
    def __init__(self, output: ProgramOutput) -> None:
        super().__init__(logging.WARNING)
        self._output = output

    @override
    def emit(self, record: logging.LogRecord) -> None:
        self._output.report(self.format(record))


# Ctrl-C and SIGTERM while a program runs on a pool: the first one stops cleanly, the next one does not wait.
#
# running ──first──▶ stopping (the block gets `Interrupted`, its `with` ends the machines) ──next──▶ left
#                                               (the reaper ends them, and nothing is waited for)


class Interrupted(KeyboardInterrupt):
    """A signal has stopped the program."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.exit_code = 128 + number


@contextmanager
def interruptible(tell: Callable[[str], object], leave: Callable[[], object], what_ends: str) -> Generator[None]:
    """Raise `Interrupted` in the block at the first signal, and say what happens; call `leave` at the next one.

    Outside of the main thread, and for signals that are ignored, it changes nothing.
    """
    received: list[int] = []

    def handle(number: int, _: FrameType | None) -> None:
        received.append(number)
        name = signal.Signals(number).name
        tell(interrupts.of_program(name, what_ends, is_again=len(received) > 1))
        if len(received) > 1:
            leave()
        raise Interrupted(number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in SIGNALS}
    mine = [number for number, handler in before.items() if handler is not signal.SIG_IGN]
    try:
        for number in mine:
            signal.signal(number, handle)
        yield
    finally:
        for number in mine:
            signal.signal(number, before[number] or signal.SIG_DFL)


# ── a program as a call of a pool: its modules and files travel with it ───────────────────────────────────────────────

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
