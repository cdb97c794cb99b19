"""`Frozen`: a value that a user writes, such as an image or a provider.

An error is a `BadRequest` in our own words.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from types import UnionType
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    Never,
    TypeAliasType,
    Union,
    cast,
    get_args,
    get_origin,
)

from pydantic import BaseModel, ConfigDict, SecretStr, ValidationError, model_validator
from pydantic_core import ErrorDetails

from skyward_core.errors import BadRequest, question
from skyward_core.written_numbers import shown

_SHOWN = (str, int, float, bool, type(None))


class Frozen(BaseModel):
    """A frozen value with known fields.

    Raises BadRequest, with the nearest name for a field that it has not, and without values where they may be secret.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
    other_names: ClassVar[Mapping[str, str]] = {}
    """Names that other libraries have for a field, and the field."""
    examples: ClassVar[Mapping[str, str]] = {}
    """Values as they are written, by field: for the words about a wrong one."""

    def __init__(self, /, *values: Never, **fields: Any) -> None:
        """Raises BadRequest."""
        kind = type(self)
        if values:
            first = next(iter(kind.model_fields), "")
            example = f"{kind.__name__}({first}=...)" if first else f"{kind.__name__}()"
            raise BadRequest(f"{kind.__name__} takes its values by name: write {example}")
        try:
            super().__init__(**fields)
        except ValidationError as error:
            # pydantic's words say less than ours, and show the values again
            is_secret = bool(kind.model_config.get("hide_input_in_errors"))
            raise BadRequest(explained(error, fields, kind, is_secret=is_secret)) from None

    @model_validator(mode="before")
    @classmethod
    def _know_every_field(cls, data: Any) -> Any:
        known = cls.model_fields
        for name in cast("Mapping[Any, Any]", data) if isinstance(data, Mapping) else ():
            if name not in known:
                hint = question(cls.other_names.get(str(name), str(name)), known) or f"known are {', '.join(known)}"
                raise ValueError(
                    f"{cls.__name__} has no field {name!r}: {hint}" if known else f"{cls.__name__} has no fields"
                )
        return without_booleans(cls, data)


def without_booleans(kind: type[BaseModel], data: Any) -> Any:
    """Return the fields of a value. Raises ValueError for a boolean in place of a number: pydantic would take it for 1
    or 0.
    """
    for name, value in cast("Mapping[Any, Any]", data).items() if isinstance(data, Mapping) else ():
        field = kind.model_fields.get(name)
        if isinstance(value, bool) and field is not None and _is_number(field.annotation):
            raise ValueError(f"{name}={value}: write a number")
    return data


def _is_number(annotation: Any) -> bool:
    kinds = get_args(annotation) or (annotation,)
    return bool({int, float} & set(kinds)) and bool not in kinds


def explained(
    error: ValidationError,
    fields: Mapping[str, Any],
    kind: type[BaseModel],
    *,
    is_secret: bool = False,
    unshown: Collection[str] = (),
) -> str:
    """Return what is wrong with the fields of a value, one sentence for each field, in our own words.

    `unshown` are the fields whose values are not repeated; with `is_secret` none is.
    """
    faults: dict[str, list[ErrorDetails]] = {}
    for fault in error.errors(include_url=False, include_input=False):
        faults.setdefault(str(fault["loc"][0]) if fault["loc"] else "", []).append(fault)
    return "; ".join(
        _sentence(
            field, its_faults, fields.get(field), kind, is_shown=not is_secret and field in fields.keys() - set(unshown)
        )
        for field, its_faults in faults.items()
    )


def _sentence(field: str, faults: Sequence[ErrorDetails], value: Any, kind: type[BaseModel], *, is_shown: bool) -> str:
    """Return what is wrong with one field. A field of several types has a fault for each of them."""
    ours = [fault["msg"].removeprefix("Value error, ") for fault in faults if fault["type"] == "value_error"]
    if ours and (not field or issubclass(kind, Frozen) or ours[0].startswith(field)):
        return ours[0]  # its own words name the field
    if faults[0]["type"] == "missing":
        return f"{kind.__name__} needs {field!r}: write {kind.__name__}({field}=...)"
    if isinstance(value, type) and not ours:
        name = cast("type[object]", value).__name__
        return f"{field}={name} is a class: write sky.{name}(...)"
    given = f"{field}={shown(value)}" if is_shown and isinstance(value, _SHOWN) else field
    if ours:
        return f"{given}: {ours[0]}"
    annotation = kind.model_fields[field].annotation if field in kind.model_fields else None
    if len(faults) == 1 and len(faults[0]["loc"]) > 1 and (part := _part_of(annotation)) is not None:
        given, annotation = f"{field}[{faults[0]['loc'][1]!r}]", part
    example = getattr(kind, "examples", {}).get(field, "")
    if isinstance(value, str) and (seconds := seconds_in(value)) and words_of(annotation).startswith("a number"):
        example = f"{seconds:g}"
    such_as = [f"such as {field}={example}"] if example else []
    limits = [text.format(**fault.get("ctx", {})) for fault in faults if (text := LIMITS.get(fault["type"]))]
    return f"{given}: write {', '.join([words_of(annotation), *limits[:1], *such_as])}"


def seconds_in(text: str) -> float | None:
    """Return the seconds in a text such as "90s", "5m", "1h" or "2d"; None for any other.

    >>> seconds_in("1.5h"), seconds_in("soon")
    (5400.0, None)
    """
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?([smhd])", text.strip().lower())
    return float(match[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[match[2]] if match else None


LIMITS: Mapping[str, str] = {
    "greater_than": "above {gt}",
    "greater_than_equal": "{ge} or more",
    "less_than": "below {lt}",
    "less_than_equal": "{le} at most",
    "finite_number": "a finite one",
    "string_too_short": "with {min_length} characters or more",
    "string_too_long": "with {max_length} characters at most",
    "too_short": "with {min_length} of them or more",
    "too_long": "with {max_length} of them at most",
}
"""What a value lacks that has the right type, by pydantic's type of the fault (docs.pydantic.dev/errors)."""
WORDS: Mapping[Any, str] = {
    str: "a text",
    SecretStr: "a text",
    bytes: "bytes",
    bool: "True or False",
    int: "a whole number",
    float: "a number",
    type(None): "None",
    None: "another value",
    Any: "another value",
}
PLURALS: Mapping[str, str] = {"a text": "texts", "a whole number": "whole numbers", "a number": "numbers"}


def _part_of(annotation: Any) -> Any:
    """Return what the values of a dict or the items of a list are; None for another annotation."""
    parts = [part for part in get_args(annotation) if part is not type(None)]
    if get_origin(annotation) in (Union, UnionType) and len(parts) == 1:
        return _part_of(parts[0])
    kind = get_origin(annotation) or annotation
    if not isinstance(kind, type) or not issubclass(kind, Mapping | Sequence | AbstractSet):
        return None
    return (
        parts[-1] if issubclass(kind, Mapping) and parts else parts[0] if parts and Ellipsis not in parts[:1] else str
    )


def words_of(annotation: Any) -> str:
    """Return what a field takes, in words.

    >>> words_of(int | None), words_of(tuple[str, ...]), words_of(Mapping[str, str])
    ('a whole number or None', 'a list of texts', 'a dict')
    """
    origin, parts = get_origin(annotation), get_args(annotation)
    if isinstance(annotation, TypeAliasType):
        return words_of(annotation.__value__)
    if isinstance(origin, TypeAliasType):
        return words_of(origin.__value__)
    if origin is Annotated:
        return words_of(parts[0])
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(words_of(part) for part in parts))
    if origin is Literal:
        return " or ".join(map(repr, parts))
    if annotation in WORDS:
        return WORDS[annotation]
    kind = origin or annotation
    if kind is Callable:
        return "a function"
    if not isinstance(kind, type):
        return "another value"
    if issubclass(kind, Mapping):
        return "a dict"
    if issubclass(kind, Sequence | AbstractSet):
        if issubclass(kind, tuple) and parts and Ellipsis not in parts:
            return f"({', '.join(map(words_of, parts))})"
        item = words_of(parts[0]) if parts else "a text"
        return f"a list of {PLURALS.get(item, item)}"
    return f"sky.{kind.__name__}(...)" if not kind.__name__.startswith("_") else "another value"
