"""The work that a pool is rented for: the run and the task of an orchestrator, in fields that suit all of them."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any, Self, cast

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
    if type(value) is str and len(value) <= WORK_CHARACTERS and value.isprintable():
        return value
    text = "".join(character if character.isprintable() else "?" for character in str(value))
    if len(text) <= WORK_CHARACTERS:
        return text
    digest = hashlib.sha256(text.encode(errors="replace")).hexdigest()[:12]
    return f"{text[: WORK_CHARACTERS - len(digest) - 1]}#{digest}"


NO_WORK = Work()
"""The work of a pool whose opener has named none."""


PARAMETER_BYTES = 8 * 1024
"""Longest JSON of the parameters that travel with each call."""


@dataclass(frozen=True, slots=True)
class RunContext:
    """The run of an orchestrator for which a call is made. Plain values, "" or 0 where the system has none."""

    system: str = ""
    """"prefect", "airflow", "dagster", or a name of your own."""
    workflow: str = ""
    """The name of the flow, the DAG or the job."""
    run_id: str = ""
    run_name: str = ""
    task: str = ""
    """The name of the task or the step."""
    task_run_id: str = ""
    task_run_name: str = ""
    tags: tuple[str, ...] = ()
    """In alphabetical order."""
    parameters: Mapping[str, Any] = dataclasses.field(default_factory=lambda: MappingProxyType({}))
    """The parameters of the run that are plain JSON, in order, until their JSON has `PARAMETER_BYTES`."""
    deployment: str = ""
    """The id of the deployment."""
    run_count: int = 0
    """The number of the attempt of the task run, from 1."""
    log_level: int = 0
    """The level (of `logging`) from which on the run's log takes records; 0: as this process shows the lines of
    nodes.
    """
    env: Mapping[str, str] = dataclasses.field(default_factory=lambda: MappingProxyType({}))
    """Variables of the call's process while it runs, also while its function is loaded: no secrets. Those of the pool
    are settings that all its users have in common; these are of one call.
    """

    def __post_init__(self) -> None:
        object.__setattr__(self, "tags", tuple(sorted(self.tags)))
        object.__setattr__(self, "env", MappingProxyType(dict(self.env)))
        object.__setattr__(self, "parameters", MappingProxyType(_plain_parameters(self.parameters)))

    def plain(self) -> tuple[Any, ...]:
        """Return its fields in their order, as values of Python's own types: `RunContext(*plain)` makes it again."""
        return tuple(
            dict(value) if type(value) is MappingProxyType else value
            for value in (getattr(self, name) for name in _RUN_FIELDS)
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return RunContext, self.plain()


_RUN_FIELDS = tuple(field.name for field in fields(RunContext))


_present_run: ContextVar[RunContext | None] = ContextVar("skyward_run", default=None)


def run_context() -> RunContext | None:
    """Return the run of an orchestrator for which this call is made, on a node; None outside of one.

    >>> run_context()
    """
    return _present_run.get()


@contextmanager
def running_for(context: RunContext | None) -> Generator[None]:
    """Let `run_context` return this in the block. Calls that are submitted in it carry it to their nodes."""
    token = _present_run.set(context)
    try:
        yield
    finally:
        _present_run.reset(token)


_paying_use: ContextVar[str] = ContextVar("skyward_use", default="")


def paying_use() -> str:
    """Return the id of the use of a pool that pays for the calls that are submitted here; "" outside of one."""
    return _paying_use.get()


@contextmanager
def paid_by(use: str) -> Generator[None]:
    """Let a use of a pool pay for the calls that are submitted in the block."""
    token = _paying_use.set(use)
    try:
        yield
    finally:
        # a generator that is driven by several tasks of asyncio ends the block in another context than it began
        with suppress(ValueError):
            _paying_use.reset(token)


def _plain_parameters(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Copy those that are plain JSON: text, numbers, true, false, None, and lists and objects of them."""
    kept: dict[str, Any] = {}
    left = PARAMETER_BYTES
    for name, value in parameters.items():
        if not _is_json(value, 8):
            continue
        text = json.dumps({name: value})
        if len(text) <= left:
            left -= len(text)
            kept[name] = json.loads(text)[name]
    return kept


def _is_json(value: Any, depth: int) -> bool:
    if value is None or type(value) in (bool, int, str):
        return type(value) is not int or abs(value) < 10**100
    if type(value) is float:
        return math.isfinite(value)
    if depth == 0 or type(value) not in (list, dict):
        return False
    if type(value) is list:
        return all(_is_json(item, depth - 1) for item in cast("list[Any]", value))
    items = cast("dict[Any, Any]", value)
    return all(type(key) is str and _is_json(item, depth - 1) for key, item in items.items())
