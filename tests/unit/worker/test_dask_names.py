"""Dask's undocumented names that this package uses exist, in the form in which they are used."""

import ast
import importlib
import inspect
import re
from pathlib import Path

import distributed
import pytest

import skyward_core
from skyward_core.worker import dask_names

NAMES = [*dask_names.CLIENT, *dask_names.STREAMS, *dask_names.SCHEDULER, *dask_names.WORKER]


def lacks(name: str) -> str:
    """Return what Dask lacks of a name; "" if it lacks nothing."""
    module_name, _, path = name.partition(":")
    path, _, listed = path.partition("(")
    found: object = importlib.import_module(module_name)
    for part in path.split("."):
        if not hasattr(found, part) and not (inspect.isclass(found) and is_set_by(found, part)):
            return f"{module_name} has no {path}"
        found = getattr(found, part, None)
    wanted = {parameter.strip() for parameter in listed.rstrip(")").split(",") if parameter.strip()}
    if "(" not in name:
        return ""
    if not callable(found):
        return f"{path} cannot be called"
    parameters = inspect.signature(found).parameters
    takes_all = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    missing = sorted(wanted - parameters.keys())
    return f"{path} takes no {', '.join(missing)}" if missing and not takes_all else ""


def is_set_by(kind: type, attribute: str) -> bool:
    """Return whether instances of a class, or of its bases, have an attribute."""
    assigned = re.compile(rf"\bself\.{attribute}\b\s*(:[^=\n]+)?=[^=]|^    {attribute}:", re.MULTILINE)
    return any(
        assigned.search(inspect.getsource(base))
        for base in kind.__mro__
        if base.__module__.startswith(("distributed", "dask"))
    )


@pytest.mark.parametrize("name", NAMES)
def test_dask_has_each_name_that_is_used(name: str) -> None:
    """If this fails, this Dask is too new, or too old.

    Change the bound in pyproject.toml only after the code that uses the name works again.
    """
    assert not lacks(name), (
        f"distributed {distributed.__version__} is not as skyward_core uses it: {lacks(name)} (skyward_core/worker/dask_names.py)"
    )


USERS = [
    "engine/connection.py",
    "engine/data_stream.py",
    "engine/owner.py",
    "engine/cluster.py",
    "worker/calls.py",
    "worker/scheduler.py",
    "worker/node.py",
    "worker/pool_worker.py",
    "wire/streams.py",
]


@pytest.mark.parametrize("file", USERS)
def test_every_private_name_is_listed(file: str) -> None:
    """Names with an underscore that the file does not define, used on objects other than `self`."""
    tree = ast.parse((Path(skyward_core.__file__).parent / file).read_text())
    own = {"_exit", "_replace"}  # of os, and of named tuples
    own |= {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    own |= {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
    }
    used = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__")
    }
    listed = {re.split(r"[.:]", name.partition("(")[0])[-1] for name in NAMES}
    assert used - own <= listed
