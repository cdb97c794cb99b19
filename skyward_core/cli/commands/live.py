"""`skyward logs`, `metrics`, `stacks`, `ssh`, `cp` and `dashboard`: a look at a live pool."""

from __future__ import annotations

import os
import shlex
import sys
import threading
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from skyward_core.cli import values
from skyward_core.cli.options import AsJson, PoolName, open_ledger
from skyward_core.cli.printing import print_json, print_json_line, print_table, print_warnings, visible
from skyward_core.cli.views import live as view

OnNode = Annotated[int, typer.Argument(parser=values.whole, metavar="[NODE]", help="the node, from 0")]


def logs(
    context: typer.Context,
    pool: PoolName,
    *,
    as_json: AsJson = False,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="go on with new lines until the pool ends")] = False,
    node: Annotated[
        list[int] | None, typer.Option(parser=values.whole, metavar="N", help="only this node; may be repeated")
    ] = None,
    call: Annotated[
        str | None,
        typer.Option(parser=values.name, metavar="CALL_ID", help="the output of a detached call, not of nodes"),
    ] = None,
) -> int:
    """Show the logs of a live pool's nodes, or the output of a detached call. Other calls print to their own client."""
    from skyward_core.live.logs import CallLog, NodeLogs, followed
    from skyward_core.live.observer import Observer
    from skyward_core.live.pool_nodes import find_nodes

    with open_ledger(context) as ledger:
        nodes = find_nodes(ledger, pool)
    for rank in node or ():
        nodes.instance(rank)
    ranks = frozenset(node or (instance.rank for instance in nodes.instances))
    with Observer(nodes) as observer:
        source = NodeLogs(observer, ranks) if call is None else CallLog(observer, call)
        code = print_warnings(source.failures)
        if as_json and not follow:
            print_json([view.line(one) for one in source.all()])
            return code
        for one in followed(source) if follow else source.all():
            if as_json:
                print_json_line(view.line(one))
            else:
                print(visible(view.words(one)), flush=follow)
    return code


def metrics(context: typer.Context, pool: PoolName, *, as_json: AsJson = False) -> int:
    """Show the utilisation of a live pool's nodes now, and how many slots have calls. Takes some seconds."""
    from skyward_core.live.metrics import uses_of
    from skyward_core.live.observer import Observer
    from skyward_core.live.pool_nodes import find_nodes

    with open_ledger(context) as ledger:
        nodes = find_nodes(ledger, pool)
    with Observer(nodes) as observer:
        uses = uses_of(observer)
    if as_json:
        print_json([view.use(one) for one in uses])
    else:
        print_table(*view.table_of_uses(uses, is_unicode=view.is_unicode(sys.stdout)))
    return 0


def stacks(context: typer.Context, pool: PoolName, *, as_json: AsJson = False) -> int:
    """Show what each slot of a live pool does right now: the Python stacks of its process. The calls go on."""
    from skyward_core.live.observer import Observer
    from skyward_core.live.pool_nodes import find_nodes
    from skyward_core.live.stacks import stacks_of

    with open_ledger(context) as ledger:
        nodes = find_nodes(ledger, pool)
    with Observer(nodes) as observer:
        found = stacks_of(observer)
    if as_json:
        print_json(view.stacks(found))
    else:
        print(view.text_of_stacks(found))
    return 0


def ssh(
    context: typer.Context,
    pool: PoolName,
    node: OnNode = 0,
    *,
    show: Annotated[bool, typer.Option("--print", help="print the command, and do not run it")] = False,
) -> int:
    """Log in to a node of a live pool with OpenSSH; for a node of this machine, open a shell in its folder."""
    from skyward_core.live.login import login_command
    from skyward_core.live.pool_nodes import find_nodes

    with open_ledger(context) as ledger:
        command = login_command(find_nodes(ledger, pool), node)
    if show:
        print(shlex.join(command))
        return 0
    sys.stdout.flush()
    sys.stderr.flush()
    return run_in_place(command)


def cp(
    context: typer.Context,
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="a file or folder here, or POOL:NODE:PATH")],
    target: Annotated[str, typer.Argument(metavar="TARGET", help="the same; one of both is on a node")],
) -> int:
    """Copy a file or folder to or from a node of a live pool. A relative PATH begins where its calls run."""
    from skyward_core.errors import BadRequest
    from skyward_core.live.copying import copy_from, copy_to, read_place
    from skyward_core.live.pool_nodes import find_nodes

    there, here = read_place(source), read_place(target)
    place = here if there is None else there
    if place is None or (there is not None and here is not None):
        raise BadRequest(
            "one of both must be on a node, and the other one here: write `skyward cp data.csv POOL:NODE:PATH`, and"
            " ./a:b for a file here with a colon in its name"
        )
    with open_ledger(context) as ledger:
        nodes = find_nodes(ledger, place.pool)
    if there is None:
        copy_to(nodes, place.node, Path(source), place.path)
    else:
        copy_from(nodes, place.node, place.path, Path(target))
    return 0


def dashboard(context: typer.Context, pool: PoolName) -> int:
    """Forward the pages of a live pool's Dask scheduler to this machine until Ctrl-C, and print their URL."""
    from skyward_core.live.observer import Observer
    from skyward_core.live.pool_nodes import find_nodes

    with open_ledger(context) as ledger:
        nodes = find_nodes(ledger, pool)
    with Observer(nodes) as observer:
        print(observer.dashboard(), flush=True)
        print("skyward: until Ctrl-C", file=sys.stderr, flush=True)
        try:
            wait_for_ctrl_c()
        except KeyboardInterrupt:
            print("skyward: the forwarding has ended; the pool goes on", file=sys.stderr)
    return 0


def run_in_place(command: list[str]) -> NoReturn:
    """Go on as this program. Raises OSError if it is not installed."""
    os.execvp(command[0], command)  # noqa: S606 - the words are ours, and no shell reads them


def wait_for_ctrl_c() -> None:
    """Wait until this process is interrupted."""
    threading.Event().wait()
