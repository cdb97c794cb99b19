"""Functions of this package that run on a node, which does not have this package."""

from functools import cache
from pathlib import Path
from typing import Any


def function_on_node(file: str, name: str) -> Any:
    """Return a function of a file beside this one, as one of a module that is not imported: it travels by value."""
    return _functions(file)[name]


@cache
def _functions(file: str) -> dict[str, Any]:
    functions: dict[str, Any] = {"__name__": f"skyward_{file}"}
    source = Path(__file__).with_name(f"{file}.py")
    exec(compile(source.read_bytes(), str(source), "exec"), functions)  # noqa: S102
    return functions
