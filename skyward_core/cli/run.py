"""`skyward run`."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, override

import typer
import typer.core

from skyward_core.cli import values
from skyward_core.cli.options import provider_from
from skyward_core.cli.printing import FAILED, money, number_of, print_warnings, say
from skyward_core.errors import BadRequest

if TYPE_CHECKING:
    from skyward_core.spec import PoolSpec

PASS_ON: dict[str, Any] = {"allow_interspersed_args": False}
"""What follows the target belongs to the program, options too."""
IS_COMMAND = "skyward.is_command"


Texts = list[str] | None
Packages = Annotated[
    Texts,
    typer.Option("--pip", parser=values.printable, metavar="PACKAGE", help="a package for the nodes; may be repeated"),
]
Variables = Annotated[
    Texts, typer.Option("--env", parser=values.assignment, metavar="NAME=VALUE", help="a variable; may be repeated")
]
Secrets = Annotated[
    Texts,
    typer.Option(
        "--secret", parser=values.name, metavar="NAME", help="a secret variable of this process; may be repeated"
    ),
]
Fields = Annotated[
    Texts,
    typer.Option(
        "--set",
        parser=values.assignment,
        metavar="FIELD=VALUE",
        help="any other setting of a pool; JSON if it is more than a word; may be repeated",
    ),
]


class RunCommand(typer.core.TyperCommand):
    """Notes in `meta` of the context whether `--` is before the target: then it is a command, and no script."""

    @override
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given = [*args]
        rest = super().parse_args(ctx, args)
        count = 1 + len(ctx.params.get("args") or ())
        ctx.meta[IS_COMMAND] = len(given) > count and given[-count - 1] == "--"
        return rest


def run(
    context: typer.Context,
    target: Annotated[
        str,
        typer.Argument(metavar="SCRIPT|MODULE:FUNCTION|-- COMMAND", parser=values.printable, help="what runs"),
    ],
    args: Annotated[list[str] | None, typer.Argument(metavar="[ARGS]...", help="its arguments, as texts")] = None,
    *,
    everywhere: Annotated[bool, typer.Option("--everywhere", help="on every worker at once, not on one")] = False,
    pool: Annotated[
        str | None,
        typer.Option(
            "--pool",
            "--name",
            parser=values.name,
            metavar="NAME",
            help="use the pool with this name, or open it for all",
        ),
    ] = None,
    profile: Annotated[
        str | None,
        typer.Option(parser=values.name, metavar="NAME", help="a profile of skyward.toml (default: SKYWARD_PROFILE)"),
    ] = None,
    provider: Annotated[
        list[str] | None,
        typer.Option(parser=values.printable, metavar="NAME", help="a provider; may be repeated"),
    ] = None,
    accelerator: Annotated[
        list[str] | None,
        typer.Option(
            parser=values.name, metavar="NAME", help='such as "A100" or "8xH100"; may be repeated, the best first'
        ),
    ] = None,
    nodes: Annotated[int | None, typer.Option(parser=values.count, metavar="N", help="how many machines")] = None,
    max_cost: Annotated[float | None, typer.Option(parser=values.price, metavar="USD", help="end at this cost")] = None,
    max_hourly_cost: Annotated[
        float | None,
        typer.Option(parser=values.price, metavar="USD", help="rent nothing that costs more per hour, all together"),
    ] = None,
    pip: Packages = None,
    env: Variables = None,
    secret: Secrets = None,
    set_: Fields = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="of the pool, show warnings only")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="show what would be rented and the most that it costs, and rent nothing")
    ] = False,
) -> int:
    """Run a script, a function or a command on a pool, with its output and its exit code. The machines end with it,
    unless --pool names a pool that stays.
    """
    from skyward_core.programs import ProgramOutput, command_of, read_target, run_program, spec_of

    fields = _fields(pip or (), env or (), secret or (), set_ or ())
    if provider:
        fields["provider"] = [provider_from(text) for text in provider]
    if accelerator:
        fields["accelerator"] = accelerator if len(accelerator) > 1 else accelerator[0]
    given = {"name": pool, "nodes": nodes, "max_cost": max_cost, "max_hourly_cost": max_hourly_cost}
    fields |= {name: value for name, value in given.items() if value is not None}
    program = command_of([target, *(args or ())]) if context.meta[IS_COMMAND] else read_target(target, args or ())
    spec = spec_of(fields, profile=profile)
    if dry_run:
        return _show_plan(spec)
    least_level = logging.WARNING if quiet else logging.INFO
    output = ProgramOutput(sys.stdout, sys.stderr, has_ranks=everywhere, least_level=least_level)
    return run_program(program, spec, output, everywhere=everywhere)


def _fields(pip: Sequence[str], env: Sequence[str], secrets: Sequence[str], others: Sequence[str]) -> dict[str, Any]:
    """Return the settings of these options, as `PoolSpec` reads them. Raises BadRequest."""
    from skyward_core.config.settings import from_text

    fields: dict[str, Any] = {name: from_text(text) for name, text in map(values.halves, others)}
    if pip:
        image: object = fields.get("image", {})
        if not isinstance(image, dict):
            raise BadRequest(f"--set image={image}: write the image as JSON, such as {{}}, or leave --pip out")
        fields["image"] = {**image, "pip": list(pip)}
    if env:
        fields["env"] = dict(map(values.halves, env))
    if secrets:
        fields["secrets"] = list(secrets)
    return fields


def _show_plan(spec: PoolSpec) -> int:
    """Print what would be rented first, and why other candidates are not there."""
    from skyward_core.pool.pool import ComputePool

    quote = ComputePool.from_spec(spec).quote()
    if quote.candidates:
        say(str(quote))
        if more := quote.candidates[1:]:
            dearest = money(quote.candidates[-1].price_per_hour)
            say(f"{number_of(more, 'candidate')} more, the last at {dearest} USD per hour")
    print_warnings(quote.refusals)
    return 0 if quote.candidates else FAILED
