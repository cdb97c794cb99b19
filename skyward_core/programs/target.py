"""What `skyward run` is to run: a script, or a function of a module, with arguments of the command line."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skyward_core.compute import ComputeFunction, PendingCompute
from skyward_core.errors import BadRequest
from skyward_core.programs.calls import script_of
from skyward_core.worker.script import run_script

HOW = "write the path of a Python file, or module:function"


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
    pending: Any = found(*args) if isinstance(found, ComputeFunction) else PendingCompute(found, tuple(args))
    return pending
