"""`Check`: the result of one check."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Self

from skyward_core.urls import without_logins


class CheckState(StrEnum):
    """How a check ended. A warning stops no pool."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check: what was checked, what was found, and for all but `ok` what to do (`cure`)."""

    subject: str
    state: CheckState
    message: str
    cure: str = ""

    def __post_init__(self) -> None:
        """Hide the passwords of URLs: a check says which address did not answer."""
        object.__setattr__(self, "message", without_logins(self.message))

    @classmethod
    def ok(cls, subject: str, message: str) -> Self:
        """Return that all is well."""
        return cls(subject, CheckState.OK, message)

    @classmethod
    def warning(cls, subject: str, message: str, cure: str) -> Self:
        """Return that something works, but not in all cases."""
        return cls(subject, CheckState.WARNING, message, cure)

    @classmethod
    def failed(cls, subject: str, message: str, cure: str) -> Self:
        """Return that something does not work."""
        return cls(subject, CheckState.FAILED, message, cure)
