"""The pools that a plain Python program opens, as far as its text says: for `skyward quote program.py`.

Nothing of the program runs. Constants, sums of numbers, and the classes of this library are evaluated; whatever else
decides about a pool is known only when the program runs, and the pool is listed with that reason.
"""

from __future__ import annotations

import ast
import importlib
import operator
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from skyward_core.errors import BadRequest
from skyward_core.provisioning.quote import Plan, PlannedTask
from skyward_core.spec import PoolSpec

OURS = "skyward_core"
POOLS = ("ComputePool", "JoblibPool", "ScikitLearnPool")
NOT_OF_SPEC = ("spec", "on_event", "work", "joblib_version", "sklearn_version")
"""Parameters of pools that are no fields of `PoolSpec`. None of them has an influence on prices but `spec`."""
OPERATIONS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


class _Unknown(Exception):
    """A value that only a run of the program has."""


def planned_tasks(target: str) -> Plan | None:
    """Return a task for each line of a program that makes a pool, in their order; None for a target that is no file
    with such a line. The entry point of `skyward.quotes`.

    Raises BadRequest for a file that is no Python program.
    """
    path = Path(target)
    if path.suffix != ".py" or not path.is_file():
        return None
    try:
        tree = ast.parse(path.read_bytes(), str(path))
    except (OSError, ValueError, SyntaxError) as error:
        raise BadRequest(f"{path} cannot be read: {error}") from error
    values = _Values(tree)
    tasks = tuple(_task(path.name, call, values) for call in _pools(tree, values))
    return Plan(tasks) if tasks else None


def _pools(tree: ast.Module, values: _Values) -> Iterator[ast.Call]:
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    for call in sorted(calls, key=lambda call: (call.lineno, call.col_offset)):
        function = call.func
        if isinstance(function, ast.Attribute) and function.attr == "from_spec":
            function = function.value
        if getattr(values.of_library(function), "__name__", "") in POOLS:
            yield call


def _task(file: str, call: ast.Call, values: _Values) -> PlannedTask:
    place = f"line {call.lineno}"
    fields: dict[str, Any] = {}
    is_from_spec = isinstance(call.func, ast.Attribute) and call.func.attr == "from_spec"
    try:
        if is_from_spec:
            spec = values.of(call.args[0] if call.args else _argument(call, "spec"))
            return PlannedTask(file, place, spec)
        for word in call.keywords:
            if word.arg is None:
                return PlannedTask(file, place, None, reason="** is known only when the program runs")
            if word.arg == "spec":
                return PlannedTask(file, place, values.of(word.value))
            if word.arg not in NOT_OF_SPEC:
                fields[word.arg] = values.of(word.value)
        return PlannedTask(file, place, PoolSpec.of(**fields))
    except _Unknown as error:
        return PlannedTask(file, place, None, reason=f"{error} is known only when the program runs")
    except BadRequest as error:
        return PlannedTask(file, place, None, reason=str(error))


def _argument(call: ast.Call, name: str) -> ast.expr:
    found = [word.value for word in call.keywords if word.arg == name]
    if not found:
        raise _Unknown(name)
    return found[0]


class _Values:
    """The values of expressions of one program that do not depend on a run."""

    def __init__(self, tree: ast.Module) -> None:
        self._library: dict[str, Any] = {}
        bound = Counter(name for node in ast.walk(tree) for name in _names_bound(node))
        for node in ast.walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                self._library.update(_imported(node))
        self._constants = {
            target.id: node.value
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None
            for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
            if isinstance(target, ast.Name) and bound[target.id] == 1
        }
        """Names that one line of the program sets, and no other."""

    def of_library(self, node: ast.expr) -> Any:
        """Return the object of this library that a dotted name means, or None."""
        if isinstance(node, ast.Name):
            return self._library.get(node.id)
        if isinstance(node, ast.Attribute) and not node.attr.startswith("_"):
            holder = self.of_library(node.value)
            return None if holder is None else getattr(holder, node.attr, None)
        return None

    def of(self, node: ast.expr) -> Any:
        """Return the value of an expression. Raises _Unknown with its text, and what a class of ours raises."""
        if (known := self.of_library(node)) is not None:
            return known
        match node:
            case ast.Constant(value):
                return value
            case ast.Name(name) if name in self._constants:
                return self.of(self._constants[name])
            case ast.Tuple(elements) | ast.List(elements):
                found = [self.of(element) for element in elements]
                return tuple(found) if isinstance(node, ast.Tuple) else found
            case ast.Dict(keys, values) if None not in keys:
                return {self.of(key): self.of(value) for key, value in zip(keys, values, strict=True) if key}
            case ast.UnaryOp(ast.USub(), operand):
                return -self._number(operand)
            case ast.BinOp(left, kind, right) if type(kind) in OPERATIONS:
                return OPERATIONS[type(kind)](self._number(left), self._number(right))
            case ast.Call(function, arguments, words) if self._may_be_made(self.of_library(function)):
                if not any(word.arg is None for word in words):
                    given = {str(word.arg): self.of(word.value) for word in words}
                    return self.of_library(function)(*map(self.of, arguments), **given)
            case _:
                pass
        raise _Unknown(ast.unparse(node))

    def _number(self, node: ast.expr) -> Any:
        value = self.of(node)
        if not isinstance(value, int | float):
            raise _Unknown(ast.unparse(node))
        return value

    @staticmethod
    def _may_be_made(function: Any) -> bool:
        """Return whether calling it only makes a value: a class of ours that is data, or an accelerator."""
        if isinstance(function, type):
            return issubclass(function, BaseModel) or hasattr(function, "__dataclass_fields__")
        return function == PoolSpec.of or getattr(function, "__module__", "") == f"{OURS}.accelerators"


def _imported(node: ast.Import | ast.ImportFrom) -> dict[str, Any]:
    """Return the names that an import binds to this library."""
    found: dict[str, Any] = {}
    for alias in node.names:
        full = alias.name if isinstance(node, ast.Import) else f"{node.module}.{alias.name}"
        if full.partition(".")[0] != OURS or (isinstance(node, ast.ImportFrom) and node.level):
            continue
        name = alias.asname or (OURS if isinstance(node, ast.Import) else alias.name)
        if isinstance(node, ast.Import):
            importlib.import_module(full)
            found[name] = importlib.import_module(full if alias.asname else OURS)
        else:
            module = importlib.import_module(str(node.module))
            found[name] = getattr(module, alias.name, None)
    return found


def _names_bound(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Name(name, ast.Store() | ast.Del()) | ast.arg(name):
            yield name
        case ast.FunctionDef(name) | ast.AsyncFunctionDef(name) | ast.ClassDef(name):
            yield name
        case _:
            pass
