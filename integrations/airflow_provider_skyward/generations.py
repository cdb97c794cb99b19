"""The generations of a task instance: its pool's name, the id of its call, and whether a try adopts the call before it.

    none ──▶ renting ──▶ starting ──▶ started ──▶ ended
              │            │            └─ the worker died: the next try adopts the call, if its pool lives
              │            └─ the same: the start is repeated with the same id, and the pool makes one call of both
              └─ no call can have begun: the next try begins its own generation

The try that begins a generation names it. A generation that has ended, or whose pool is gone, is never begun again.
Pure; docs/decisions/0033 has what is written before what.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Self, cast

import skyward_core as sky

STATE_KEY = "skyward"
"""The key of the state in Airflow's task state store."""

_UNFIT = re.compile(r"[^A-Za-z0-9._-]+")
_NAME_CHARACTERS = 100


class Phase(StrEnum):
    """How far a generation is, as it was written last."""

    RENTING = "renting"
    STARTING = "starting"
    STARTED = "started"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Generation:
    """One run of a task's function, which several tries may follow. Stored as JSON.

    `number` is the try that has begun it. `pool_id` is "" before the pool is open. `cursors` are the numbers of the
    lines of each call that are in the task log. `max_tries` is Airflow's number of the last try then, which a clear
    raises; None if it is not known.
    """

    number: int
    phase: Phase
    pool_name: str
    call_id: str
    pool_id: str = ""
    cursors: tuple[int, ...] = ()
    max_tries: int | None = None

    @classmethod
    def of(cls, stored: object) -> Self | None:
        """Return a generation from the state store; None if there is none, or nothing that can be read.

        Users may edit the store: a value that is wrong is no generation, and the next try begins one.
        """
        if not isinstance(stored, Mapping):
            return None
        known = cast("Mapping[str, Any]", stored)
        try:
            return cls(
                number=int(known["number"]),
                phase=Phase(known["phase"]),
                pool_name=str(known["pool_name"]),
                call_id=str(known["call_id"]),
                pool_id=str(known["pool_id"]),
                cursors=tuple(max(0, int(cursor)) for cursor in known["cursors"]),
                max_tries=None if known.get("max_tries") is None else int(known["max_tries"]),
            )
        except (KeyError, TypeError, ValueError):
            return None

    def to_json(self) -> dict[str, Any]:
        """Return plain data for the state store."""
        return asdict(self) | {"phase": str(self.phase), "cursors": list(self.cursors)}

    def is_cleared(self, max_tries: int | None) -> bool:
        """Return whether a user has cleared the task since: then its call is not adopted."""
        return None not in {self.max_tries, max_tries} and self.max_tries != max_tries

    def call_ids(self, count: int) -> tuple[str, ...]:
        """Return the ids of its calls: one, or with `map_over` one for each item."""
        return tuple(f"{self.call_id}/{number}" for number in range(count))


def pool_name_of(work: sky.Work) -> str:
    """Return the name of the pool of one task instance. It is the same in all of its tries."""
    parts = (work.workflow, work.run, work.task, work.task_run)
    digest = hashlib.sha256("\0".join(parts).encode(errors="replace")).hexdigest()[:16]
    return f"{_UNFIT.sub('-', f'airflow-{work.workflow}-{work.task}')[:_NAME_CHARACTERS]}-{digest}"


def begun(work: sky.Work, try_number: int, pool_name: str, max_tries: int | None = None) -> Generation:
    """Return the generation that a try begins."""
    return Generation(try_number, Phase.RENTING, pool_name, f"{pool_name_of(work)}/{try_number}", max_tries=max_tries)


def may_adopt(before: Generation | None, work: sky.Work, pool_name: str) -> bool:
    """Return whether the call of an earlier try may run still, or have a result: then it is adopted, if the pool of
    the name is the one that has it.
    """
    return (
        before is not None
        and before.phase in {Phase.STARTING, Phase.STARTED}
        and (before.pool_name, before.call_id) == (pool_name, f"{pool_name_of(work)}/{before.number}")
        and before.pool_id != ""
    )
