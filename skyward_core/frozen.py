"""`Frozen`: a value that a user writes, such as an image or a provider.

An error is a `BadRequest` in our own words.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, ClassVar, cast, get_args

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from skyward_core.errors import BadRequest, question, without_logins
from skyward_core.written_numbers import shown

_SHOWN = (str, int, float, bool, type(None))


class Frozen(BaseModel):
    """A frozen value with known fields.

    Raises BadRequest, with the nearest name for a field that it has not, and without values where they may be secret.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
    other_names: ClassVar[Mapping[str, str]] = {}
    """Names that other libraries have for a field, and the field."""

    def __init__(self, /, **fields: Any) -> None:
        """Raises BadRequest."""
        try:
            super().__init__(**fields)
        except ValidationError as error:
            kind = type(self)
            text = explained(
                error, fields, kind.__name__, is_secret=bool(kind.model_config.get("hide_input_in_errors"))
            )
            # the cause shows the values again
            raise BadRequest(text) from (error if without_logins(f"{text} {error}") == f"{text} {error}" else None)

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
    name: str = "",
    *,
    is_secret: bool = False,
    unshown: Collection[str] = (),
) -> str:
    """Return what is wrong with the fields of a value: our own words for each fault, pydantic's where we have none."""
    found = list[str]()
    for fault in error.errors(include_url=False, include_input=False):
        field = ".".join(map(str, fault["loc"]))
        message = fault["msg"].removeprefix("Value error, ")
        value = fields.get(field)
        if fault["type"] == "missing":
            message = f"{name} needs {field!r}: write {name}({field}=...)"
        elif isinstance(value, type) and fault["type"] != "value_error":
            message = f"{field}={value.__name__} is a class: write sky.{value.__name__}(...)"
        elif fault["type"] == "value_error" and (name or message.startswith(field)):
            pass  # its own words name the field
        elif field in fields and not is_secret and field not in unshown and isinstance(value, _SHOWN):
            message = f"{field}={shown(value)}: {message}"
        elif field:
            message = f"{field}: {message}"
        found.append(message)
    return "; ".join(found)
