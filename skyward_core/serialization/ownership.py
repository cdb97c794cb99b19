"""Which modules belong to the user's own project, and so travel by value; see `pickling.py` for the rule."""

from __future__ import annotations

import functools
import importlib.machinery
import os
import sys
import sysconfig
import types
import typing
from contextlib import suppress
from pathlib import Path
from typing import Any

_INSTALL_DIRECTORIES = {"site-packages", "dist-packages"}
_STDLIB = tuple({os.path.realpath(sysconfig.get_path(name)) + os.sep for name in ("stdlib", "platstdlib")})
_EXTENSIONS = tuple(importlib.machinery.EXTENSION_SUFFIXES)


def belongs_to_user(module: types.ModuleType) -> bool:
    """Return whether a module is part of the user's own project, and so travels by value.

    A module without a file, made by a program (a notebook's `__main__`, an Airflow DAG), is the user's unless its name
    is in an installed package, as `torch.ops` is. On a node, a module that came as source
    is not the user's: the client has it.
    """
    if getattr(getattr(module, "__loader__", None), "client_has_it", False):
        return False
    name = module.__name__
    file = getattr(module, "__file__", None)
    if not file:
        file = next(iter(getattr(module, "__path__", ())), None)
    return is_of_user(name, file if isinstance(file, str) and os.path.isabs(file) else None)


@functools.lru_cache(maxsize=4096)
def is_of_user(name: str, file: str | None) -> bool:
    """Return whether a module of this name and (absolute) file is the user's; see `belongs_to_user`."""
    if name in ("__main__", "__mp_main__"):
        return True
    top = name.partition(".")[0]
    if top == "skyward_core" or name in sys.builtin_module_names:
        return False
    if file is not None:
        return not _is_installed(name, file)
    if top in sys.stdlib_module_names:
        return False
    package = sys.modules.get(top)
    return package is None or top == name or belongs_to_user(package)


def _is_installed(name: str, file: str) -> bool:
    if file.endswith(_EXTENSIONS):
        return True  # machine code cannot travel by value
    for path in {os.path.abspath(file), os.path.realpath(file)}:
        if not _INSTALL_DIRECTORIES.isdisjoint(Path(path).parts) or path.startswith(_STDLIB):
            return True
    levels = name.count(".") + (1 if Path(file).stem == "__init__" or os.path.isdir(file) else 0)
    return _holds_distributions(str(Path(os.path.abspath(file)).parents[levels]))


@functools.lru_cache(maxsize=1024)
def _holds_distributions(directory: str) -> bool:
    """Return whether distributions are installed in this directory, as `pip install --target` does."""
    with suppress(OSError):
        return any(entry.endswith(".dist-info") for entry in os.listdir(directory))
    return False


def home_module(obj: Any) -> types.ModuleType | None:
    """Return the module of the user's project that a function, class or type variable says it is from."""
    name = getattr(obj, "__module__", None)
    module = sys.modules.get(name) if isinstance(name, str) else None
    return module if isinstance(module, types.ModuleType) and belongs_to_user(module) else None


def is_user_module(value: Any) -> typing.TypeGuard[types.ModuleType]:
    """Return whether a value is a module of the user's project."""
    return issubclass(type(value), types.ModuleType) and belongs_to_user(value)
