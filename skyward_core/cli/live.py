"""`skyward top`, `ui`, `logs`, `metrics`, `stacks`, `ssh`, `cp` and `dashboard`: a look at live pools."""

from __future__ import annotations

import os
import secrets
import shlex
import signal
import sys
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TextIO

import typer

from skyward_core.cli import values
from skyward_core.cli.options import SHOWN_ROWS, AsJson, PoolName, make_ledger, nodes_of, open_ledger
from skyward_core.cli.pools import pools_of
from skyward_core.cli.printing import (
    duration,
    money,
    print_json,
    print_json_line,
    print_table,
    print_warnings,
    say,
    stack_text,
    table_text,
)
from skyward_core.errors import BadRequest, LedgerConflict, LedgerError
from skyward_core.shown_text import each_line, visible, visible_lines

if TYPE_CHECKING:
    from skyward_core.events.events import Metrics
    from skyward_core.ledger.ledger import Ledger
    from skyward_core.live.observer import CallLog, Line, NodeUse, PoolUses, WorkerStacks

OnNode = Annotated[int, typer.Argument(parser=values.whole, metavar="[NODE]", help="the node, from 0")]
TOKEN = "SKYWARD_UI_TOKEN"  # noqa: S105 - the name of a variable
SHORTEST_TOKEN = 20
WHO_READS = "with this URL, every user of this machine can read it"
TOKEN_BYTES = 24
BARS = "▁▂▃▄▅▆▇█"
ASCII_BARS = "12345678"
SPARKS = 20
OF_A_CALL = -1
TOP_HEADS = [
    "POOL",
    "STATE",
    ">AGE",
    ">USD/H",
    ">COST USD",
    "NODE",
    ">BUSY",
    ">CPU %",
    "CPU",
    ">MEMORY %",
    ">GPU %",
    "GPU",
    ">GPU MEMORY %",
]


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
    from skyward_core.live.observer import CallLog, NodeLogs, Observer, followed

    nodes = nodes_of(context, pool)
    for rank in node or ():
        nodes.instance(rank)
    ranks = frozenset(node or (instance.rank for instance in nodes.instances))
    with Observer(nodes) as observer:
        source = NodeLogs(observer, ranks) if call is None else CallLog(observer, call)
        code = print_warnings(source.failures)
        if as_json and not follow:
            print_json([_line_json(one) for one in source.all()])
        elif as_json:
            for one in followed(source):
                print_json_line(_line_json(one))
        else:
            for one in followed(source) if follow else source.all():
                print(_line_text(one), flush=follow)
        if isinstance(source, CallLog):
            _note_state(context, nodes.pool_id, source)
    return code


def _note_state(context: typer.Context, pool_id: str, call: CallLog) -> None:
    """Write into the ledger what is known of the call, as each client does that looks at one."""
    if (state := call.state()) is None:
        return
    try:
        with open_ledger(context) as ledger:
            ledger.note_calls(pool_id, [state])
    except LedgerConflict:
        pass  # a pool of another ledger
    except LedgerError as error:  # the output is there; the next look writes the state
        say(f"skyward: the state of the call is not in the ledger: {error}", is_error=True)


def metrics(context: typer.Context, pool: PoolName, *, as_json: AsJson = False) -> int:
    """Show the utilisation of a live pool's nodes now, and how many slots have calls. Takes some seconds."""
    from skyward_core.live.observer import Observer, uses_of

    with Observer(nodes_of(context, pool)) as observer:
        uses = uses_of(observer)
    if as_json:
        print_json([use_json(one) for one in uses])
    else:
        print_table(*_uses_table(uses, is_unicode=is_unicode(sys.stdout)))
    return 0


def stacks(context: typer.Context, pool: PoolName, *, as_json: AsJson = False) -> int:
    """Show what each slot of a live pool does right now: the Python stacks of its process. The calls go on."""
    from skyward_core.live.observer import Observer, stacks_of

    with Observer(nodes_of(context, pool)) as observer:
        found = stacks_of(observer)
    code = print_warnings(
        f"worker {one.worker} does not answer: what it does is not known" for one in found if one.slots is None
    )
    if as_json:
        print_json(_stacks_json(found))
    elif code == 0 or any(one.slots for one in found):
        print(_stacks_text(found))
    return code


def ssh(
    context: typer.Context,
    pool: PoolName,
    node: OnNode = 0,
    *,
    show: Annotated[bool, typer.Option("--print", help="print the command, and do not run it")] = False,
) -> int:
    """Log in to a node of a live pool with OpenSSH; for a node of this machine, open a shell in its folder."""
    from skyward_core.live.pool_nodes import login_command

    command = login_command(nodes_of(context, pool), node)
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
    from skyward_core.live.node_files import copy_from, copy_to, read_place

    there, here = read_place(source), read_place(target)
    place = here if there is None else there
    if place is None or (there is not None and here is not None):
        raise BadRequest(
            "one of both must be on a node, and the other one here: write `skyward cp data.csv POOL:NODE:PATH`, and"
            " ./a:b for a file here with a colon in its name"
        )
    nodes = nodes_of(context, place.pool)
    with _ending_as_by_ctrl_c():
        if there is None:
            copy_to(nodes, place.node, Path(source), place.path)
        else:
            copy_from(nodes, place.node, place.path, Path(target))
    return 0


@contextmanager
def _ending_as_by_ctrl_c() -> Generator[None]:
    """Let SIGTERM, and the end of the terminal, raise SystemExit here: what was written by halves is removed."""
    endings = [ending for ending in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(ending) is signal.SIG_DFL]
    for ending in endings:
        signal.signal(ending, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        for ending in endings:
            signal.signal(ending, signal.SIG_DFL)


def dashboard(context: typer.Context, pool: PoolName) -> int:
    """Show the plain pages of a live pool's Dask scheduler on this machine until Ctrl-C, and print their URL."""
    from skyward_core.cli.dashboard import START, DaskPages, DaskServer
    from skyward_core.live.observer import Observer

    with Observer(nodes_of(context, pool)) as observer:
        observer.dask_page(START)
        with DaskServer(0, secrets.token_urlsafe(TOKEN_BYTES), DaskPages(observer)) as server:
            say(server.url, is_now=True)
            print(f"skyward: Ctrl-C ends the pages; {WHO_READS}", file=sys.stderr, flush=True)
            try:
                server.serve_forever()
            except KeyboardInterrupt:
                print("skyward: the pages have ended; the pool goes on", file=sys.stderr, flush=True)
    return 0


def run_in_place(command: list[str]) -> NoReturn:
    """Go on as this program. Raises OSError if it is not installed."""
    os.execvp(command[0], command)  # noqa: S606 - the words are ours, and no shell reads them


def top(
    context: typer.Context,
    *,
    as_json: AsJson = False,
    once: Annotated[bool, typer.Option("--once", help="print one table; so too where stdout is no terminal")] = False,
    every: Annotated[
        float, typer.Option(parser=values.seconds, metavar="SECONDS", help="how often the table is new")
    ] = 2.0,
) -> int:
    """Show the live pools and their nodes, with utilisation and cost, again and again until Ctrl-C."""
    from skyward_core.live.observer import PoolUses

    is_one = as_json or once or not sys.stdout.isatty()
    with (open_ledger if is_one else make_ledger)(context) as ledger, PoolUses(ledger, awaits_first=is_one) as uses:
        if is_one:
            unreadable: list[object] = []
            found = _pools(ledger, uses, unreadable)
            if as_json:
                print_json([_top_json(*one) for one in found])
            elif found:
                print_table(*_top_table(found, is_unicode=is_unicode(sys.stdout)))
            else:
                print("no live pools")
            return print_warnings(unreadable)
        _draw(_texts(ledger, uses, every))
    return 0


def _pools(ledger: Ledger, uses: PoolUses, unreadable: list[Any]) -> list[tuple[dict[str, Any], Any]]:
    rows = ledger.pool_rows(limit=SHOWN_ROWS, unreadable=unreadable)
    pools = pools_of(ledger, rows, unreadable)
    return [(pool, uses.of(pool["pool"])) for pool in pools]


def _texts(ledger: Ledger, uses: PoolUses, seconds: float) -> Iterator[str]:
    while True:
        found = _pools(ledger, uses, [])
        yield table_text(*_top_table(found, is_unicode=is_unicode(sys.stdout))) if found else "no live pools"
        time.sleep(seconds)


def _draw(texts: Iterator[str]) -> None:
    """Show the texts one after the other in the same place, until Ctrl-C."""
    from rich.live import Live
    from rich.text import Text

    with Live(auto_refresh=False) as live:
        try:
            for text in texts:
                live.update(Text(text), refresh=True)
        except KeyboardInterrupt:
            return


def ui(
    context: typer.Context,
    *,
    port: Annotated[
        int, typer.Option(parser=values.port, metavar="PORT", help="on 127.0.0.1; any free one if not given")
    ] = 0,
) -> int:
    """Serve a page on this machine with pools, nodes, calls, costs and refusals until Ctrl-C, and print its URL."""
    from skyward_core.cli.ui import PageServer, Utilisation, answers

    token = _token()
    with (
        make_ledger(context) as ledger,
        Utilisation(ledger) as utilisation,
        PageServer(port, token, answers(ledger, utilisation)) as server,
    ):
        print(server.url, flush=True)
        print(f"skyward: Ctrl-C ends the page; {WHO_READS}", file=sys.stderr, flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print("skyward: the page has ended; the pools go on", file=sys.stderr, flush=True)
    return 0


def _token() -> str:
    """Return the token of the environment, which a monitor can keep, or a random one.

    It is no option: other users of this machine see the command lines of processes.
    """
    token = os.environ.get(TOKEN)
    if token is None:
        return secrets.token_urlsafe(TOKEN_BYTES)
    if len(token) < SHORTEST_TOKEN or not all(one.isalnum() or one in "-_" for one in token) or not token.isascii():
        raise BadRequest(
            f"{TOKEN} needs at least {SHORTEST_TOKEN} letters, digits, `-` or `_`: make one with `openssl rand -hex 24`"
        )
    return token


def _line_json(one: Line) -> dict[str, Any]:
    return {"node": None if one.node == OF_A_CALL else one.node, "text": one.text}


def _line_text(one: Line) -> str:
    return visible_lines(one.text) if one.node == OF_A_CALL else each_line(f"[node {one.node}] ", one.text)


def use_json(one: NodeUse) -> dict[str, Any]:
    return {
        "node": one.node,
        "instance": one.instance_id,
        "busy_slots": one.busy,
        "slots": one.slots,
        "samples": [_sample(sample) for sample in one.samples],
    }


def _sample(sample: Metrics) -> dict[str, Any]:
    fields = asdict(sample)
    del fields["instance_id"], fields["node"]
    return fields


def _uses_table(uses: Sequence[NodeUse], *, is_unicode: bool) -> tuple[list[str], list[list[str]]]:
    heads = ["NODE", ">BUSY", ">CPU %", "CPU", ">MEMORY %", ">GPU %", "GPU", ">GPU MEMORY %", "INSTANCE"]
    return heads, [[str(one.node), *use_columns(one, is_unicode=is_unicode), one.instance_id] for one in uses]


def use_columns(one: NodeUse, *, is_unicode: bool) -> list[str]:
    """Return the columns from BUSY to GPU MEMORY %; empty texts for what is not known."""
    last = one.samples[-1] if one.samples else None
    gpus = [sample.gpu_utilization for sample in one.samples]
    return [
        f"{one.busy}/{one.slots}",
        "" if last is None else f"{last.cpu_percent:.0f}",
        sparks([sample.cpu_percent for sample in one.samples], is_unicode=is_unicode),
        "" if last is None else f"{last.memory_percent:.0f}",
        _percent(None if last is None else last.gpu_utilization),
        sparks(gpus, is_unicode=is_unicode) if any(value is not None for value in gpus) else "",
        "" if last is None else _percent(_share(last.gpu_memory_used_mb, last.gpu_memory_total_mb)),
    ]


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}"


def _share(part: float | None, whole: float | None) -> float | None:
    return 100 * part / whole if part is not None and whole else None


def sparks(percents: Sequence[float | None], *, is_unicode: bool) -> str:
    """Return one character for each of the last percentages; a space where there is none."""
    bars = BARS if is_unicode else ASCII_BARS
    return "".join(
        " " if value is None else bars[min(len(bars) - 1, max(0, int(value / 100 * len(bars))))]
        for value in percents[-SPARKS:]
    )


def is_unicode(stream: TextIO) -> bool:
    """Return whether a stream can show the bars."""
    try:
        BARS.encode(stream.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def _stacks_json(found: Sequence[WorkerStacks]) -> list[dict[str, Any]]:
    return [
        {"worker": one.worker, "slot": number, "pid": slot.pid, "busy_seconds": slot.busy_seconds, "stacks": slot.text}
        for one in found
        for number, slot in enumerate(one.slots or ())
    ]


def _stacks_text(found: Sequence[WorkerStacks]) -> str:
    """Return the stacks of all slots, the newest frame of each thread first."""
    parts = [
        f"worker {visible(one.worker)}, slot {number}, process {slot.pid}, {_busy_text(slot.busy_seconds)}\n"
        + stack_text(slot.text)
        for one in found
        for number, slot in enumerate(one.slots or ())
    ]
    return "\n\n".join(parts) or "the pool has no workers"


def _busy_text(busy_seconds: float | None) -> str:
    return "idle" if busy_seconds is None else f"busy for {duration(busy_seconds)}"


def _top_json(pool: Mapping[str, Any], uses: Sequence[NodeUse] | str) -> dict[str, Any]:
    shown = ("pool", "name", "state", "provider", "age_seconds", "usd_per_hour", "cost_usd")
    return {
        **{name: pool[name] for name in shown},
        "nodes": [] if isinstance(uses, str) else [use_json(one) for one in uses],
        "trouble": uses if isinstance(uses, str) else None,
    }


def _top_table(
    found: Sequence[tuple[Mapping[str, Any], Sequence[NodeUse] | str]], *, is_unicode: bool
) -> tuple[list[str], list[list[str]]]:
    """Return heads and rows: one for each node; the pool's own columns stand in its first."""
    rows: list[list[str]] = []
    for pool, uses in found:
        head = [
            pool["name"] or pool["pool"],
            pool["state"],
            duration(pool["age_seconds"]),
            money(pool["usd_per_hour"]),
            money(pool["cost_usd"]),
        ]
        if isinstance(uses, str) or not uses:
            rows.append([*head, f"not known: {uses}" if uses else "none", *[""] * 7])
            continue
        for one in uses:
            rows.append([*head, str(one.node), *use_columns(one, is_unicode=is_unicode)])
            head = [""] * len(head)
    return TOP_HEADS, rows
