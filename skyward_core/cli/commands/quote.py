"""`skyward quote`."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from typing import Annotated

import typer

from skyward_core.cli import values
from skyward_core.cli.options import FAILED, AsJson
from skyward_core.cli.printing import print_json, print_table, print_warnings
from skyward_core.cli.views import quote as view


def quote(
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            parser=values.printable,
            help="where an orchestrator's tasks are defined, such as a folder of DAGs",
        ),
    ],
    *,
    as_json: AsJson = False,
) -> int:
    """Show what an orchestrator's tasks would rent, and what it costs at most."""
    from skyward_core.pool.task_quotes import quotes_of
    from skyward_core.provisioning.quote import plans_of

    with redirect_stdout(sys.stderr):  # the definitions are programs, and may print; so do orchestrators
        plans = plans_of(target)
    quotes = {system: quotes_of(plan.tasks) for system, plan in plans.items()}
    warnings = [f"{system}: {warning}" for system, plan in plans.items() for warning in plan.warnings]
    if as_json:
        print_json(view.as_json(target, quotes, warnings))
    else:
        if any(quotes.values()):
            print_table(*view.table(quotes))
        print("\n".join(view.summary(quotes)))
    print_warnings([*warnings, *view.faults(quotes)])
    return FAILED if warnings or view.faults(quotes) else 0
