"""Quotes of planned tasks as JSON and as a table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from skyward_core.cli.printing import money, number_of

if TYPE_CHECKING:
    from skyward_core.pool.task_quotes import TaskQuote
    from skyward_core.spec import PoolSpec

type Quotes = Mapping[str, Sequence[TaskQuote]]
"""The quotes of each orchestrator."""

HEADS = ("WORKFLOW", "TASK", ">TASKS", ">TRIES", "ASKS FOR", "CANDIDATE", ">OTHERS", ">USD/H", ">AT MOST USD")


def as_json(target: str, quotes: Quotes, warnings: Sequence[str]) -> dict[str, Any]:
    return {
        "target": target,
        "tasks": [_task_json(system, one) for system, one in _each(quotes)],
        "workflows": [
            {"system": system, "workflow": workflow, "ceiling_usd": ceiling}
            for system, workflow, ceiling, _ in _workflows(quotes)
        ],
        "warnings": list(warnings),
    }


def _task_json(system: str, one: TaskQuote) -> dict[str, Any]:
    quote, task = one.quote, one.task
    return {
        "system": system,
        "workflow": task.workflow,
        "task": task.task,
        "instances": task.instances,
        "tries": task.tries,
        "timeout_seconds": task.timeout_seconds,
        "asks_for": None if one.spec is None else asked_for(one.spec),
        "reason": one.reason or None,
        "candidates": [] if quote is None else [asdict(way) for way in quote.ways],
        "price_per_hour": None if quote is None else quote.price_per_hour,
        "ceiling_usd": one.ceiling_usd,
        "run_ceiling_usd": one.run_ceiling_usd,
        "account": None if quote is None else quote.account,
        "without": [] if quote is None else [asdict(refusal) for refusal in quote.refusals],
    }


def table(quotes: Quotes) -> tuple[Sequence[str], list[list[str]]]:
    return HEADS, [_row(system, one) for system, one in _each(quotes)]


def _row(system: str, one: TaskQuote) -> list[str]:
    task, quote = one.task, one.quote
    ways = () if quote is None else quote.ways
    return [
        f"{system}:{task.workflow}",
        task.task,
        "?" if task.instances is None else str(task.instances),
        str(task.tries),
        f"(not known: {task.reason})" if one.spec is None else asked_for(one.spec),
        ways[0].name if ways else "" if one.spec is None else "(none)",
        str(len(ways) - 1) if len(ways) > 1 else "",
        money(ways[0].price_per_hour) if ways else "",
        "" if one.run_ceiling_usd is None else money(one.run_ceiling_usd),
    ]


def asked_for(spec: PoolSpec) -> str:
    """Return the machines that a spec asks for: how many, of what, and in which market."""
    from skyward_core.machines.offers import describe

    least, most = spec.least_nodes, spec.most_nodes
    count = f"{least} to {most}" if spec.is_elastic else str(most)
    market = "" if spec.spot is None else ", on spot"
    name = "" if spec.name is None else f", shared as {spec.name!r}"
    return f"{count} x {describe(spec.requirements)}{market}{name}"


def summary(quotes: Quotes) -> Iterator[str]:
    """Return a line for each workflow: the most that one run of it may cost, or which tasks have no limit."""
    if not any(quotes.values()):
        yield f"no task here opens a pool (read as {', '.join(quotes)})"
    for system, workflow, ceiling, open_tasks in _workflows(quotes):
        if ceiling is None:
            yield (
                f"{system}:{workflow}: the cost of a run is not limited, or not known, in"
                f" {number_of(open_tasks, 'task')}: {', '.join(open_tasks)}"
            )
        else:
            yield f"{system}:{workflow}: a run costs at most {money(ceiling)} USD"


def faults(quotes: Quotes) -> list[str]:
    """Return a line for each task whose pool could not be opened now."""
    found = list[str]()
    for system, one in _each(quotes):
        if one.is_faulty or (one.quote is not None and not one.quote.ways):
            why = one.reason if one.quote is None else str(one.quote)
            found.append(f"{system}:{one.task.workflow}/{one.task.task}: {why}")
    return found


def _each(quotes: Quotes) -> Iterator[tuple[str, TaskQuote]]:
    for system, ones in quotes.items():
        for one in ones:
            yield system, one


def _workflows(quotes: Quotes) -> Iterator[tuple[str, str, float | None, list[str]]]:
    """Return each workflow with the ceiling of a run, and the tasks that have none."""
    from skyward_core.pool.task_quotes import ceiling_of_run

    for system, ones in quotes.items():
        for workflow in dict.fromkeys(one.task.workflow for one in ones):
            its = [one for one in ones if one.task.workflow == workflow]
            yield system, workflow, ceiling_of_run(its), [one.task.task for one in its if one.run_ceiling_usd is None]
