"""Tables of parameters for the reference: mkdocstrings shows those of functions, and not those of most classes."""

import ast
import inspect
import re
import textwrap
from enum import Enum
from importlib import import_module
from itertools import pairwise
from typing import Any, Never

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from skyward_core import accelerators
from skyward_core.pool.pool import ComputePool
from skyward_core.spec import PoolSpec

ELSEWHERE = {
    "spec": "A `PoolSpec`, instead of its fields as keywords.",
    "on_event": "A callback for each event.",
    "work": "The purpose of the machines, for the ledger, the receipt and the machines' tags.",
    "pip": "Packages that are added to those of the image.",
    "joblib_version": "joblib's version on the nodes; None: this client's.",
    "sklearn_version": "scikit-learn's version on the nodes; None: this client's.",
}
"""Meanings of parameters that are not fields of `PoolSpec`."""

ARGUMENT = re.compile(r"^    (\w+(?:, \w+)*): (.*(?:\n {8}.*)*)", re.MULTILINE)
"""A parameter under "Args:" in a docstring, or several with one meaning."""

BOUNDS = {"ge": "at least {}", "gt": "more than {}", "le": "at most {}", "lt": "less than {}"}


def parameter_table(path: str) -> str:
    """Return the table of a class's parameters as Markdown; "" for functions, errors and classes without parameters."""
    module, _, name = path.rpartition(".")
    kind = getattr(import_module(module), name)
    if not isinstance(kind, type) or issubclass(kind, BaseException | Enum | dict):
        return ""
    given = inspect.signature(kind).parameters.values()
    # a positional value is taken only to be refused in our words
    shown = [each for each in given if not each.name.startswith("_") and each.annotation not in (Never, "Never")]
    rows = [_row(kind, parameter) for parameter in shown]
    if not rows:
        return ""
    return "\n".join(["| parameter | type | default | meaning |", "| --- | --- | --- | --- |", *rows, ""])


def methods_of(path: str) -> list[str]:
    """Return the paths of the public methods and properties of a class and of its bases."""
    module, _, name = path.rpartition(".")
    found: dict[str, str] = {}
    for kind in getattr(import_module(module), name).__mro__:
        names = vars(kind) if kind.__module__.startswith("skyward_core.") else ()
        for one in names:
            if not one.startswith("_") and one not in found and inspect.getdoc(getattr(kind, one)):
                found[one] = f"{kind.__module__}.{kind.__qualname__}.{one}"
    return list(found.values())


def named_defaults(path: str) -> str:
    """Return the values of a function's defaults that its signature has as the name of a constant; "" without any."""
    module, _, name = path.rpartition(".")
    function = inspect.unwrap(getattr(import_module(module), name))
    if not inspect.isfunction(function):
        return ""
    written = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    assert isinstance(written, ast.FunctionDef)
    defaults = [*written.args.defaults, *written.args.kw_defaults]
    constants = sorted({one.id for one in defaults if isinstance(one, ast.Name)})
    return "\n".join(f"`{name}` is {_shown(function.__globals__[name])}.\n" for name in constants)


def _row(kind: type, parameter: inspect.Parameter) -> str:
    model = kind if issubclass(kind, BaseModel) else PoolSpec if issubclass(kind, ComputePool) else None
    field = model.model_fields.get(parameter.name) if model else None
    meaning = (field.description if field else None) or _meanings(kind).get(parameter.name)
    if model is PoolSpec:
        meaning = meaning or ELSEWHERE.get(parameter.name)
    cells = [
        f"`{_stars(parameter)}{parameter.name}`",
        _code(_type(kind, parameter, field)),
        _default(parameter, field),
        " ".join([*filter(None, [meaning]), *_bounds(field)]),
    ]
    return f"| {' | '.join(cell.replace('|', r'\|') for cell in cells)} |"


def _meanings(kind: type) -> dict[str, str]:
    """Return what the classes say of their parameters: under "Args:", or in a text below the attribute."""
    return {name: text for base in reversed(kind.__mro__) for name, text in _own_meanings(base).items()}


def _own_meanings(kind: type) -> dict[str, str]:
    if not kind.__module__.startswith("skyward_core."):
        return {}
    found = {
        name: " ".join(text.split())
        for names, text in ARGUMENT.findall((inspect.getdoc(kind) or "").partition("Args:\n")[2])
        for name in names.split(", ")
    }
    written = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    assert isinstance(written, ast.ClassDef)
    for one, below in pairwise(written.body):
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name) and isinstance(below, ast.Expr):
            found[one.target.id] = " ".join(str(ast.literal_eval(below.value)).split())
    return found


def _stars(parameter: inspect.Parameter) -> str:
    return {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")


def _type(kind: type, parameter: inspect.Parameter, field: FieldInfo | None) -> str:
    if parameter.annotation is parameter.empty:
        return ""
    written = _declared(kind).get(parameter.name)
    given = written if isinstance(written, str) else parameter.annotation
    if field and issubclass(kind, BaseModel):
        given = field.annotation
    text = given if isinstance(given, str) else inspect.formatannotation(given)
    return re.sub(r"\b(?:\w+\.)+(?=\w)", "", text).replace("'", "").replace("NoneType", "None")


def _declared(kind: type) -> dict[str, Any]:
    return {
        name: hint for base in reversed(kind.__mro__) for name, hint in vars(base).get("__annotations__", {}).items()
    }


def _default(parameter: inspect.Parameter, field: FieldInfo | None) -> str:
    if field is not None and field.default_factory is not None:
        made = field.get_default(call_default_factory=True)
        return _code("Image()" if parameter.name == "image" else _shown(made))
    if parameter.default is parameter.empty:
        return "" if _stars(parameter) else "required"
    return _code(_shown(parameter.default))


def _shown(value: object) -> str:
    if isinstance(value, BaseModel) or hasattr(value, "__dataclass_fields__"):
        return f"{type(value).__name__}()"
    return getattr(value, "__name__", repr(value)).replace("<factory>", "...")


def _bounds(field: FieldInfo | None) -> list[str]:
    found = [
        words.format(f"{value:,.10g}" if isinstance(value, int | float) else value)
        for bound in (field.metadata if field else ())
        for name, words in BOUNDS.items()
        if (value := getattr(bound, name, None)) is not None
    ]
    return [f"({', '.join(found)})"] if found else []


def _code(text: str) -> str:
    return f"`{text}`" if text else ""


def factories() -> list[str]:
    """Return the names of `skyward_core.accelerators`' factories: their functions are made in a loop, so that
    mkdocstrings does not find them.
    """
    makers = vars(accelerators.Accelerator.NVIDIA) | vars(accelerators.Accelerator.AMD)
    makers |= vars(accelerators.Accelerator.AWS) | vars(accelerators.Accelerator.Google)
    return [name for name in accelerators.__all__ if name in makers]


def factory_table() -> str:
    """Return the table of the factories, each with the anchor of its name."""
    rows = ["| factory | parameters |", "| --- | --- |"]
    for name in factories():
        parameters = inspect.signature(getattr(accelerators, name)).parameters.values()
        anchor = f'<a id="skyward_core.accelerators.{name}"></a>'
        rows.append(f"| {anchor}`{name}` | `{', '.join(map(_parameter, parameters))}` |")
    return "\n".join([*rows, ""])


def _parameter(one: inspect.Parameter) -> str:
    return one.name if one.default is one.empty else f"{one.name}={one.default!r}"
