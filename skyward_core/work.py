"""The work that a pool is rented for: the run and the task of an orchestrator, in fields that suit all of them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields
from typing import Any, Self

WORK_CHARACTERS = 500
"""Longest text of a field: an index of PostgreSQL takes rows of about 2,700 bytes, and a character may have four."""


@dataclass(frozen=True, slots=True)
class Work:
    """The work that a pool is rented for. It is in the ledger, in the receipt and in the tags of the machines, and
    costs are added up by it.

    All fields are text, and empty if they do not apply. A text that is longer than `WORK_CHARACTERS` ends in a hash of
    the whole; characters that cannot be printed become "?".

        ComputePool.from_spec(spec, work=Work(system="cron", workflow="nightly", run="2026-11-22", task="train"))
    """

    system: str = ""
    """The system that runs it: "airflow", "dagster", "prefect", or a name of your own."""
    workflow: str = ""
    """The DAG, the flow or the job."""
    run: str = ""
    """The id of one run of the workflow."""
    task: str = ""
    """The task or the step."""
    task_run: str = ""
    """The task run, if a run has several of one task: the id of a task run, the index of a mapped task."""
    attempt: str = ""
    """The number of the try, from 1."""
    asset: str = ""
    """The assets that the task makes, separated by a comma and a space."""
    partition: str = ""
    """The partition of the asset."""

    def __post_init__(self) -> None:
        for field in fields(self):
            object.__setattr__(self, field.name, _plain(getattr(self, field.name)))

    @classmethod
    def of(cls, values: dict[str, Any]) -> Self:
        """Return the work from a mapping by the names of the fields; other names are ignored."""
        return cls(**{field.name: values[field.name] for field in fields(cls) if field.name in values})

    def labels(self) -> dict[str, str]:
        """Return the fields that are not empty, by their names."""
        return {field.name: value for field in fields(self) if (value := getattr(self, field.name))}

    def __str__(self) -> str:
        """Return one line: `airflow:nightly/manual__2026-11-22/train[3], try 2, asset model, partition 2026-11`."""
        path = "/".join(
            part
            for part in (self.workflow, self.run, self.task + (f"[{self.task_run}]" if self.task_run else ""))
            if part
        )
        named = [
            f"{word} {value}"
            for word, value in (("try", self.attempt), ("asset", self.asset), ("partition", self.partition))
            if value
        ]
        return ", ".join(part for part in (of_system(self.system, path), *named) if part)


def of_system(system: str, path: str) -> str:
    """Return a name within a system: `airflow:nightly/train`."""
    return f"{system}:{path}" if system and path else system or path


def _plain(value: object) -> str:
    text = "".join(character if character.isprintable() else "?" for character in str(value))
    if len(text) <= WORK_CHARACTERS:
        return text
    digest = hashlib.sha256(text.encode(errors="replace")).hexdigest()[:12]
    return f"{text[: WORK_CHARACTERS - len(digest) - 1]}#{digest}"


NO_WORK = Work()
"""The work of a pool whose opener has named none."""
