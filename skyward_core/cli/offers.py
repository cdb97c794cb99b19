"""`skyward offers` and `skyward quote`: what is sold, and what tasks would cost."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from skyward_core.cli import values
from skyward_core.cli.options import AsJson, provider_from
from skyward_core.cli.printing import FAILED, duration, money, number_of, print_json, print_table, print_warnings, say

if TYPE_CHECKING:
    from skyward_core.machines.offers import Offer
    from skyward_core.pool.preparation import TaskQuote
    from skyward_core.provisioning.price_list import PriceList
    from skyward_core.spec import PoolSpec

OFFER_HEADS = (
    "PROVIDER",
    "REGION",
    "TYPE",
    "MARKET",
    ">USD/H",
    ">OF IT BESIDE",
    ">CPUS",
    ">MEMORY GB",
    "ACCELERATORS",
    "PROCESSOR",
)
QUOTE_HEADS = ("WORKFLOW", "TASK", ">TASKS", ">TRIES", "ASKS FOR", "CANDIDATE", ">OTHERS", ">USD/H", ">AT MOST USD")


def offers(
    *,
    as_json: AsJson = False,
    provider: Annotated[
        list[str] | None,
        typer.Option(
            parser=values.printable,
            metavar="NAME",
            help="a provider; may be repeated (default: those of the settings, else each cloud with credentials)",
        ),
    ] = None,
    accelerator: Annotated[
        str | None, typer.Option(parser=values.name, metavar="NAME", help='such as "A100" or "H100-SXM"')
    ] = None,
    count: Annotated[
        int, typer.Option(parser=values.count, metavar="N", help="accelerators in one machine, at least")
    ] = 1,
    cpu: Annotated[int | None, typer.Option(parser=values.count, metavar="N", help="CPU cores, at least")] = None,
    memory: Annotated[
        str | None, typer.Option(parser=values.name, metavar="SIZE", help='memory, at least: "64GB"')
    ] = None,
    architecture: Annotated[
        Literal["x86_64", "arm64"] | None, typer.Option(help="processor of the machine (default: any)")
    ] = None,
    max_price: Annotated[
        float | None, typer.Option(parser=values.price, metavar="USD", help="per hour and machine, at most")
    ] = None,
    max_age: Annotated[
        float, typer.Option(parser=values.seconds, metavar="SECONDS", help="use stored answers up to this age")
    ] = 300.0,
    limit: Annotated[int, typer.Option(parser=values.count, metavar="N", help="at most this many, the cheapest")] = 20,
) -> int:
    """Show what is sold now, the cheapest first."""
    from skyward_core.accelerators import parse
    from skyward_core.operations import offers as find_offers

    found = find_offers(
        None if provider is None else [provider_from(text) for text in provider],
        accelerator=None if accelerator is None else replace(parse(accelerator), count=count),
        cpu=cpu,
        memory=memory,
        architecture=architecture,
        max_price_per_hour=max_price,
        max_age_seconds=max_age,
    )
    shown = found.offers[:limit]
    if as_json:
        print_json(_offers_json(found, shown))
        return 0 if shown else FAILED
    if shown:
        print_table(*_offers_table(shown))
        say(_offers_summary(found, shown))
    print_warnings(found.refusals)
    return 0 if shown else FAILED


def quote(
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            parser=values.printable,
            help="where an orchestrator's tasks are defined, such as a folder of DAGs; or a Python program",
        ),
    ],
    *,
    as_json: AsJson = False,
) -> int:
    """Show what an orchestrator's tasks or a program would rent, and what it costs at most."""
    from skyward_core.pool.preparation import quotes_of
    from skyward_core.provisioning.quote import plans_of

    with redirect_stdout(sys.stderr):  # the definitions are programs, and may print; so do orchestrators
        plans = plans_of(target)
    quotes = {system: quotes_of(plan.tasks) for system, plan in plans.items()}
    warnings = [f"{system}: {warning}" for system, plan in plans.items() for warning in plan.warnings]
    if as_json:
        print_json(_quote_json(target, quotes, warnings))
    else:
        if any(quotes.values()):
            print_table(*_quote_table(quotes))
        for line in _quote_summary(quotes):
            say(line)
    print_warnings([*warnings, *_faults(quotes)])
    return FAILED if warnings or _faults(quotes) else 0


def _offers_json(found: PriceList, shown: Sequence[Offer]) -> dict[str, Any]:
    return {
        "age_seconds": round(found.age_seconds(), 1),
        "offers": [{**offer.model_dump(mode="json"), "total_per_hour": offer.total_per_hour} for offer in shown],
        "without": [asdict(refusal) for refusal in found.refusals],
    }


def _offers_table(shown: Sequence[Offer]) -> tuple[Sequence[str], list[list[str]]]:
    return OFFER_HEADS, [_offer_row(offer) for offer in shown]


def _offer_row(offer: Offer) -> list[str]:
    from skyward_core.machines.offers import total_of

    return [
        offer.provider,
        offer.region,
        offer.instance_type,
        "spot" if offer.is_spot else "on demand",
        money(offer.total_per_hour),
        money(total_of(offer.extras_per_hour)) if offer.extras_per_hour else "",
        f"{offer.vcpus:g}",
        f"{offer.memory_gb:.0f}",
        _accelerators(offer),
        offer.architecture or "",
    ]


def _accelerators(offer: Offer) -> str:
    if not offer.accelerator:
        return ""
    return f"{offer.accelerators} x {offer.accelerator} {offer.accelerator_memory_gb or 0:.0f}GB"


def _offers_summary(found: PriceList, shown: Sequence[Offer]) -> str:
    """Return how many offers there are, and how old the answers are."""
    how_many = f"the cheapest {len(shown)} of {len(found)}" if len(found) > len(shown) else f"{len(found)} in all"
    return f"{how_many}; queried {duration(found.age_seconds())} ago"


type Quotes = Mapping[str, Sequence[TaskQuote]]
"""The quotes of each orchestrator."""


def _quote_json(target: str, quotes: Quotes, warnings: Sequence[str]) -> dict[str, Any]:
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
        "asks_for": None if one.spec is None else _asked_for(one.spec),
        "reason": one.reason or None,
        "candidates": [] if quote is None else [asdict(candidate) for candidate in quote.candidates],
        "price_per_hour": None if quote is None else quote.price_per_hour,
        "ceiling_usd": one.ceiling_usd,
        "run_ceiling_usd": one.run_ceiling_usd,
        "account": None if quote is None else quote.account,
        "without": [] if quote is None else [asdict(refusal) for refusal in quote.refusals],
    }


def _quote_table(quotes: Quotes) -> tuple[Sequence[str], list[list[str]]]:
    return QUOTE_HEADS, [_quote_row(system, one) for system, one in _each(quotes)]


def _quote_row(system: str, one: TaskQuote) -> list[str]:
    task, quote = one.task, one.quote
    candidates = () if quote is None else quote.candidates
    return [
        f"{system}:{task.workflow}",
        task.task,
        "?" if task.instances is None else str(task.instances),
        str(task.tries),
        f"(not known: {task.reason})" if one.spec is None else _asked_for(one.spec),
        candidates[0].name if candidates else "" if one.spec is None else "(none)",
        str(len(candidates) - 1) if len(candidates) > 1 else "",
        money(candidates[0].price_per_hour) if candidates else "",
        "" if one.run_ceiling_usd is None else money(one.run_ceiling_usd),
    ]


def _asked_for(spec: PoolSpec) -> str:
    """Return the machines that a spec asks for: how many, of what, and in which market."""
    from skyward_core.machines.offers import describe

    least, most = spec.least_nodes, spec.most_nodes
    count = f"{least} to {most}" if spec.is_elastic else str(most)
    market = "" if spec.spot is None else ", on spot"
    name = "" if spec.name is None else f", shared as {spec.name!r}"
    return f"{count} x {describe(spec.requirements)}{market}{name}"


def _quote_summary(quotes: Quotes) -> Iterator[str]:
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


def _faults(quotes: Quotes) -> list[str]:
    """Return a line for each task whose pool could not be opened now."""
    found = list[str]()
    for system, one in _each(quotes):
        if one.is_faulty or (one.quote is not None and not one.quote.candidates):
            why = one.reason if one.quote is None else str(one.quote)
            found.append(f"{system}:{one.task.workflow}/{one.task.task}: {why}")
    return found


def _each(quotes: Quotes) -> Iterator[tuple[str, TaskQuote]]:
    for system, ones in quotes.items():
        for one in ones:
            yield system, one


def _workflows(quotes: Quotes) -> Iterator[tuple[str, str, float | None, list[str]]]:
    """Return each workflow with the ceiling of a run, and the tasks that have none."""
    from skyward_core.pool.preparation import ceiling_of_run

    for system, ones in quotes.items():
        for workflow in dict.fromkeys(one.task.workflow for one in ones):
            its = [one for one in ones if one.task.workflow == workflow]
            yield system, workflow, ceiling_of_run(its), [one.task.task for one in its if one.run_ceiling_usd is None]
