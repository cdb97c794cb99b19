"""What runs on a node for `PipesSkywardClient`. It travels by value, and imports nothing of Dagster.

The one-file library `dagster_pipes` comes with the call, because a node has no Dagster.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import types
import zlib
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

LIBRARY = "dagster_pipes"
LINE_BYTES = 3500
"""The longest part of a message: with its mark the kernel writes the line in one piece (PIPE_BUF is 4,096)."""


def install_library(packed: bytes) -> bytes:
    """Make `import dagster_pipes` work in this process; return the library as it came."""
    if LIBRARY not in sys.modules:
        module = types.ModuleType(LIBRARY)
        sys.modules[LIBRARY] = module
        exec(compile(zlib.decompress(packed), f"{LIBRARY}.py", "exec"), module.__dict__)  # noqa: S102
    return packed


def send(mark: str, message: Mapping[str, Any]) -> None:
    """Write a message to the output of the call: one line for each part, which names the writer and the rest."""
    data = json.dumps(message).encode("ascii")
    parts = [data[start : start + LINE_BYTES] for start in range(0, len(data), LINE_BYTES)]
    sys.stdout.flush()
    writer = f"{os.getpid()}.{threading.get_ident()}"  # threads of a call may write at the same time
    for number, part in enumerate(parts, 1):
        line = f"{mark} {writer} {len(parts) - number} ".encode() + part + b"\n"
        while line:
            line = line[os.write(1, line) :]


def run_function(
    library: bytes, bootstrap: Mapping[str, str], mark: str, fn: Callable[..., Any], args: Any, kwargs: Any
) -> Any:
    """Call a function with a separate `PipesContext`, which `PipesContext.get()` returns."""
    install_library(library)
    pipes: Any = sys.modules[LIBRARY]

    class Channel(pipes.PipesMessageWriterChannel):
        def write_message(self, message: Mapping[str, Any]) -> None:
            send(mark, message)

    class Writer(pipes.PipesMessageWriter):
        @contextlib.contextmanager
        def open(self, params: Any) -> Generator[Any]:
            yield Channel()

    before = pipes.PipesContext._instance
    params = pipes.PipesMappingParamsLoader(dict(bootstrap))
    with pipes.PipesContext(params, pipes.PipesDefaultContextLoader(), Writer()) as context:
        pipes.PipesContext.set(context)
        try:
            return fn(*args, **kwargs)
        finally:
            pipes.PipesContext._instance = before


def run_script(
    library: bytes,
    bootstrap: Mapping[str, str],
    mark: str,
    name: str,
    source: bytes,
    args: Sequence[str],
    env: Mapping[str, str],
) -> int:
    """Run a script in a separate process, with `dagster_pipes` beside it; raise RuntimeError if it fails."""
    with _folder(library, {name: source}) as folder:
        command = [sys.executable, os.path.join(folder, name), *args]
        return _run(folder, mark, command, {**bootstrap, **env}, name)


def run_command(
    library: bytes, bootstrap: Mapping[str, str], mark: str, command: Sequence[str], env: Mapping[str, str]
) -> int:
    """Run a command in a separate process; raise RuntimeError if it fails. Python finds `dagster_pipes` in it."""
    with _folder(library, {}) as folder:
        places = [folder, *filter(None, [env.get("PYTHONPATH") or os.environ.get("PYTHONPATH")])]
        variables = {**bootstrap, **env, "PYTHONPATH": os.pathsep.join(places)}
        return _run(folder, mark, command, variables, command[0])


@contextlib.contextmanager
def _folder(library: bytes, files: Mapping[str, bytes]) -> Generator[str]:
    """Make a folder with the library and these files."""
    with tempfile.TemporaryDirectory(prefix="pipes-") as folder:
        for file, text in {**files, f"{LIBRARY}.py": zlib.decompress(library)}.items():
            with open(os.path.join(folder, file), "wb") as opened:
                opened.write(text)
        yield folder


def _run(folder: str, mark: str, command: Sequence[str], variables: Mapping[str, str], name: str) -> int:
    fifo = os.path.join(folder, "messages")
    os.mkfifo(fifo, 0o600)
    with _forwarding(fifo, mark):
        done = subprocess.run(
            command,
            env={**os.environ, **variables, "DAGSTER_PIPES_MESSAGES": _packed({"path": fifo})},
            check=False,
        )
    if done.returncode:
        raise RuntimeError(f"{name} ended with exit code {done.returncode}: its output is in the step's log")
    return done.returncode


@contextlib.contextmanager
def _forwarding(fifo: str, mark: str) -> Generator[None]:
    """Send each line of the named pipe as a message, at once, and the rest before leaving."""
    keeper = os.open(fifo, os.O_RDWR)  # so that the reader sees no end between two messages

    def forward() -> None:
        with open(fifo, "rb") as lines:
            for line in lines:
                if line == b"\n":
                    return
                send(mark, json.loads(line))

    thread = threading.Thread(target=forward, name="skyward-pipes", daemon=True)
    try:
        thread.start()
    except RuntimeError:
        os.close(keeper)
        raise
    try:
        yield
    finally:
        os.write(keeper, b"\n")
        thread.join()
        os.close(keeper)


def _packed(params: Mapping[str, Any]) -> str:
    pipes: Any = sys.modules[LIBRARY]
    return str(pipes.encode_param(params))
