"""A bare interpreter with only installed packages, and the files of a user's project, for the tests of this folder."""

import importlib
import io
import pickle
import subprocess
import sys
import textwrap
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import skyward_core
from skyward_core.serialization.pickling import loads

type Write = Callable[..., types.ModuleType]


def results_of(program: str, calls: Sequence[object], path: Sequence[Path] = ()) -> list[Any]:
    """Run a program that reads these calls; return the results that it writes, or raise the first error.

    It gets the folder of our package and these search paths as arguments. Each result is written with `dumps`: whether
    the call has returned, the value or the error, and the text of the error if there is one.
    """
    core = str(Path(skyward_core.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-I", "-c", program, core, *map(str, path)],
        input=pickle.dumps(calls, protocol=5),
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    results: list[Any] = []
    stream = io.BytesIO(done.stdout)
    for _ in calls:
        has_returned, value, *texts = loads(pickle.load(stream))
        if not has_returned:
            for text in texts:
                value.add_note(text)
            raise value
        results.append(value)
    return results


@contextmanager
def user_project(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Yield a function that writes files of a user's project (own.py, own_helpers.py, ...) and imports the module
    `own`. Its modules are forgotten at the end.
    """
    monkeypatch.syspath_prepend(str(folder))

    def write(**files: str) -> types.ModuleType:
        for name, text in files.items():
            path = folder / (name.replace("__in__", "/") + ".py")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(textwrap.dedent(text))
        importlib.invalidate_caches()
        return importlib.import_module("own")

    yield write
    for name in [name for name in sys.modules if name.partition(".")[0].partition("_")[0] == "own"]:
        del sys.modules[name]
