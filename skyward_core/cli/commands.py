"""The `skyward` command: what is rented, what it costs, what nobody answers for any more, and what may be spent.

Exit codes: 0 all is well, 1 something failed, 2 it was asked for in a way that is not understood, 3 a dry run has found
something to do.
"""

from __future__ import annotations

import argparse
import errno
import io
import json
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, override

from skyward_core.errors import ZERO_USD, BadRequest, SkywardError

if TYPE_CHECKING:
    from skyward_core.cleanup.policy import Finding
    from skyward_core.cleanup.sweep import SweepReport
    from skyward_core.ledger.ledger import Ledger
    from skyward_core.ledger.rows import Account, Attempt, CostRow, PoolEntry, PoolRow, Reservation, UnreadableRow
    from skyward_core.providers.base import Provider

FAILED, TO_DO = 1, 3
SHOWN_POOLS = 100
MOST_COUNTED = 1_000_000_000
MOST_SECONDS = 3_155_760_000.0
"""A hundred years: ages beyond that leave the calendar."""
MOST_DAYS = 36_500
MOST_USD = 1_000_000_000_000
"""The ledger's micro-dollars are 64-bit numbers."""
LONGEST_NAME = 200
"""The ledger's columns have 255 characters; a scope is a name and a little more."""
SHOWN_CHARACTERS = 60
READABLE_CHARACTERS = 16
"""So many columns a text needs at least before it is folded."""
WIDE = 400
"""Columns of what is not shown on a terminal: nothing is folded there, so that `grep` finds whole lines."""

type Command = Callable[[Ledger, argparse.Namespace], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code. What this library or the operating system raises is told in one line."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # a terminal without Unicode shows a name's characters as numbers
            stream.reconfigure(errors="backslashreplace")
    try:
        return _flushed(_run, argv)
    except BrokenPipeError:  # `skyward ps | head`: nobody reads on
        _discard(sys.stdout)
        return FAILED
    except (SkywardError, OSError) as error:
        return _fail(error)
    except KeyboardInterrupt:
        return 130


def _flushed(run: Callable[[Sequence[str] | None], int], argv: Sequence[str] | None) -> int:
    """Run it and write out what it has printed, `--help` included: here, where a reader that has gone or a full disk
    can be told.
    """
    try:
        return run(argv)
    except OSError as error:
        if error.errno != errno.ENOSPC or error.filename is not None:
            raise
        # stdout has no buffer (PYTHONUNBUFFERED): what is printed fails at once
        raise _lost(error, sys.stdout) from error
    finally:
        if sys.stdout is not None:  # pyright: ignore[reportUnnecessaryComparison] - None under `>&-`
            _flush(sys.stdout)


def _flush(stream: TextIO) -> None:
    try:
        stream.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise _lost(error, stream) from error


def _lost(error: OSError, stream: TextIO) -> OSError:
    return OSError(error.errno, f"{error.strerror}: what was to be printed is lost", stream.name)


def _fail(error: Exception) -> int:
    """Say what went wrong, in one line; nothing is left that the interpreter would try to write again as it ends."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is sys.stderr:
                print(f"skyward: {_visible(' '.join(str(error).split()))}", file=stream)
            stream.flush()
        except OSError:
            _discard(stream)
        except AttributeError:  # closed by the shell
            pass
    return FAILED


def _discard(stream: TextIO) -> None:
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())


def _run(argv: Sequence[str] | None) -> int:
    asked = _parser().parse_args(argv)
    from skyward_core.ledger.ledger import Ledger, default_url

    command: Command = asked.command
    with Ledger(asked.ledger or default_url()) as ledger:
        return command(ledger, asked)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="skyward", description="What is rented, what it costs, and what nobody answers for any more."
    )
    parser.add_argument("--version", action=_Say, const=_version, help="say which version this is")
    parser.add_argument(
        "--constraints",
        action=_Say,
        const=_constraints,
        help="say where the file of tested versions for this Python is, for `pip install -c`",
    )
    parser.add_argument(
        "--ledger",
        type=_url,
        metavar="URL",
        help="the ledger (default: SKYWARD_LEDGER, else a file under the user's state directory)",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    ps = _add(commands, "ps", _ps, "show the pools, and what each has cost so far", has_json=True)
    ps.add_argument("--all", action="store_true", help="those that have ended too")
    ps.add_argument(
        "--limit", type=_count, default=SHOWN_POOLS, metavar="N", help=f"the newest so many (default: {SHOWN_POOLS})"
    )

    cost = _add(commands, "cost", _cost, "add up what was spent, and what spot has saved", has_json=True)
    cost.add_argument(
        "--by",
        choices=["day", "pool", "owner", "bucket", "run", "task", "asset"],
        default="day",
        help="what to add up by (default: day)",
    )
    cost.add_argument(
        "--since", type=_date, metavar="DATE", help="what was asked for on this UTC day (2026-11-21) or later"
    )
    cost.add_argument("--until", type=_date, metavar="DATE", help="what was asked for before this UTC day")
    cost.add_argument(
        "--limit",
        type=_count,
        default=SHOWN_POOLS,
        metavar="N",
        help=f"the costliest so many lines (default: {SHOWN_POOLS}); others in one",
    )

    sweep = _add(commands, "sweep", _sweep, "find what nobody answers for any more; with --yes, end it", has_json=True)
    sweep.add_argument("--yes", action="store_true", help="do it; without this nothing is touched")
    sweep.add_argument(
        "--provider",
        type=_words,
        action="append",
        metavar="NAME",
        help="whom to ask beside those of the ledger's pools (default: as the settings say)",
    )
    sweep.add_argument(
        "--min-age",
        type=_seconds,
        default=600.0,
        metavar="SECONDS",
        help="leave machines that the ledger does not know until they are older",
    )
    sweep.add_argument(
        "--unknown",
        action="store_true",
        help="end old machines too of which nobody here can tell whose they are; they may be somebody else's",
    )

    stop = _add(commands, "stop", _stop, "end a pool, live or not")
    stop.add_argument("pool_id", type=_name)
    stop.add_argument(
        "--provider", type=_words, metavar="NAME", help="who rents its machines, if the ledger does not know"
    )

    why = _add(
        commands,
        "why",
        _why,
        "show why a pool has its machines where it has them, or none: each try to rent them, and what refused it",
        has_json=True,
    )
    why.add_argument("pool_id", type=_name)

    offers = _add(commands, "offers", _offers, "show what is sold now, the cheapest first", has_json=True)
    offers.add_argument(
        "--provider", type=_words, action="append", metavar="NAME", help="whom to ask (default: as the settings say)"
    )
    offers.add_argument("--accelerator", type=_name, metavar="NAME", help='such as "A100" or "H100-SXM"')
    offers.add_argument(
        "--count",
        type=_count,
        default=1,
        metavar="N",
        help="so many accelerators in one machine, at least (default: 1)",
    )
    offers.add_argument("--cpu", type=_count, metavar="N", help="CPU cores, at least")
    offers.add_argument("--memory", type=_name, metavar="SIZE", help='memory, at least: "64GB"')
    offers.add_argument("--architecture", choices=("x86_64", "arm64"), help="processor of the machine (default: any)")
    offers.add_argument("--max-price", type=_price, metavar="USD", help="per hour and machine, at most")
    offers.add_argument(
        "--max-age",
        type=_seconds,
        default=300.0,
        metavar="SECONDS",
        help="take answers that are not older than that (default: 300)",
    )
    offers.add_argument("--limit", type=_count, default=20, metavar="N", help="the cheapest so many (default: 20)")

    receipt = _add(commands, "receipt", _receipt, "show what a pool has rented and what became of it, as JSON")
    receipt.add_argument("pool_id", type=_name)

    ledgers = commands.add_parser("ledger", help="the ledger itself").add_subparsers(required=True, metavar="COMMAND")
    prune = _add(
        ledgers,
        "prune",
        _prune,
        "show which details of old pools can go; with --yes, take them away: what they have cost stays",
        has_json=True,
    )
    prune.add_argument(
        "--older-than", type=_days, required=True, metavar="DAYS", help="of pools that ended longer ago than that: 90d"
    )
    prune.add_argument("--yes", action="store_true", help="do it; without this nothing is touched")

    budgets = commands.add_parser("budget", help="accounts that pools are paid from").add_subparsers(
        required=True, metavar="COMMAND"
    )
    limit = _add(budgets, "set", _set_budget, "make an account, or change its limit")
    limit.add_argument("name", type=_name)
    limit.add_argument("--limit", type=_usd_asked, required=True, metavar="USD")
    limit.add_argument(
        "--per", choices=["run", "day", "month"], required=True, help="for each pool, each UTC day, or each UTC month"
    )
    _add(budgets, "list", _list_budgets, "show the accounts, and what is left of each", has_json=True)
    return parser


def _add(commands: Any, name: str, command: Command, about: str, *, has_json: bool = False) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=about, description=about)
    parser.set_defaults(command=command)
    if has_json:
        parser.add_argument("--json", action="store_true", help="as JSON")
    return parser


def _date(text: str) -> datetime:
    try:
        told = datetime.fromisoformat(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no date such as 2026-11-21") from error
    return told if told.tzinfo is not None else told.replace(tzinfo=UTC)


def _count(text: str) -> int:
    if (
        not (text.isascii() and text.isdecimal())
        or len(text) > len(str(MOST_COUNTED))
        or not 0 < int(text) <= MOST_COUNTED
    ):
        raise argparse.ArgumentTypeError(f"{_short(text)} is no whole number from 1 to {MOST_COUNTED}")
    return int(text)


def _seconds(text: str) -> float:
    if not 0 <= (seconds := _number_told(text)) <= MOST_SECONDS:
        raise argparse.ArgumentTypeError(
            f"seconds are zero or more, and at most {MOST_SECONDS:.0f}; given {_short(text)}"
        )
    return seconds


def _days(text: str) -> timedelta:
    number = text.removesuffix("d")
    if (
        number == text
        or not (number.isascii() and number.isdecimal())
        or len(number) > len(str(MOST_DAYS))
        or not 0 < int(number) <= MOST_DAYS
    ):
        raise argparse.ArgumentTypeError(f"{_short(text)} is no number of days from 1d to {MOST_DAYS}d")
    return timedelta(days=int(number))


def _price(text: str) -> float:
    if not 0 < (price := _number_told(text)) <= MOST_USD:
        raise argparse.ArgumentTypeError(f"a price is more than zero, and at most {MOST_USD} USD; given {_short(text)}")
    return price


def _number_told(text: str) -> float:
    """A number; what is not a number is as wrong as one that is too large."""
    try:
        return float(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{_short(text)} is no number") from error


def _usd_asked(text: str) -> Decimal:
    try:
        usd = Decimal(text)
    except InvalidOperation as error:
        raise argparse.ArgumentTypeError(f"{_short(text)} is no sum in USD") from error
    if not usd.is_finite() or not 0 <= usd <= MOST_USD:
        raise argparse.ArgumentTypeError(f"a limit is zero or more, and at most {MOST_USD} USD; given {_short(text)}")
    return usd


def _name(text: str) -> str:
    if not text.strip() or len(text) > LONGEST_NAME:
        raise argparse.ArgumentTypeError(f"a name has 1 to {LONGEST_NAME} characters; given {_short(text)}")
    return _words(text)


def _words(text: str) -> str:
    """A name, or JSON: no control characters, which a terminal would obey, and no bytes that are no text."""
    if not text.strip() or not text.replace("\n", " ").isprintable():
        raise argparse.ArgumentTypeError(f"{_short(text)} is empty, or has characters that cannot be printed")
    return text


def _url(text: str) -> str:
    return _words(text)


def _short(text: str) -> str:
    return repr(text) if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]!r}... ({len(text)} characters)"


def _version() -> str:
    from importlib.metadata import version

    return f"skyward {version('skyward-core')}"


def _constraints() -> str:
    path = Path(__file__).parents[1] / f"constraints-{sys.version_info.major}.{sys.version_info.minor}.txt"
    if not path.is_file():
        raise BadRequest(
            f"no versions were tested with Python {sys.version_info.major}.{sys.version_info.minor}; for others there"
            f" are files in {path.parent}"
        )
    return str(path)


class _Say(argparse.Action):
    """Print what `const` returns, and end; it is called only if it is asked for."""

    def __init__(self, option_strings: Sequence[str], dest: str, const: Callable[[], str], help: str) -> None:  # noqa: A002 - argparse's word
        super().__init__(option_strings, dest, nargs=0, const=const, help=help)

    @override
    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        print(self.const())
        parser.exit()


# ── ps ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _ps(ledger: Ledger, asked: argparse.Namespace) -> int:
    from skyward_core.events.narrator import digits

    now = datetime.now(UTC)
    damaged: list[UnreadableRow] = []
    rows = ledger.pool_rows(include_ended=asked.all, limit=asked.limit, unreadable=damaged)
    rates: dict[str, Decimal] = {}
    for intent in ledger.open_intents(unreadable=damaged):
        if intent.cloud_id is not None:
            rates[intent.pool_id] = rates.get(intent.pool_id, ZERO_USD) + intent.price.per_hour
    pools = [_pool(row, rates.get(row.entry.id, ZERO_USD), now) for row in rows]
    troubles = [
        *map(str, damaged),
        *(f"pool {row.entry.id!r}: {row.entry.trouble}" for row in rows if row.entry.trouble),
    ]
    if asked.json:
        _print_json(pools)
        return _warned(troubles)
    if not pools:
        print("no pools" if asked.all else "no open pools; `skyward ps --all` shows those that have ended")
        return _warned(troubles)
    works = {row.entry.id: str(row.entry.work) for row in rows}
    _print_table(
        [
            "POOL",
            "STATE",
            "OWNER",
            "PROVIDER",
            ">OPEN",
            ">AGE",
            ">LEASE",
            ">USD/H",
            ">COST USD",
            *(["WORK"] if any(works.values()) else []),
        ],
        [
            [
                pool["pool"],
                pool["state"],
                pool["owner"],
                pool["provider"],
                f"{pool['open_resources']}/{pool['resources']}",
                _time(pool["age_seconds"]),
                "" if pool["state"] == "ended" else _time(pool["lease_seconds"]),
                _rate(pool["usd_per_hour"]),
                digits(pool["cost_usd"]),
                *([works[pool["pool"]]] if any(works.values()) else []),
            ]
            for pool in pools
        ],
    )
    if len(pools) == asked.limit:
        print(f"the newest {asked.limit}; --limit shows more")
    return _warned(troubles)


def _warned(troubles: Iterable[object]) -> int:
    """Say what could not be read, one line each; return the exit code."""
    lines = list(dict.fromkeys(_visible(" ".join(str(trouble).split())) for trouble in troubles))
    for line in lines:
        print(f"skyward: {line}", file=sys.stderr)
    return FAILED if lines else 0


def _rate(usd_per_hour: float) -> str:
    """To the cent, and what is below a dollar as exactly as any money."""
    from skyward_core.events.narrator import digits

    return f"{usd_per_hour:.2f}" if usd_per_hour >= 1 else digits(usd_per_hour) if usd_per_hour else ""


def _pool(row: PoolRow, rate: Decimal, now: datetime) -> dict[str, Any]:
    entry = row.entry
    return {
        "pool": entry.id,
        "state": _state(entry, now),
        "owner": entry.owner.name,
        "work": entry.work.labels(),
        "provider": str(entry.provider.get("name", "?")),
        "account": entry.account,
        "created_at": _iso(entry.created_at),
        "lease_expires_at": _iso(entry.lease_expires_at),
        "ended_at": None if entry.ended_at is None else _iso(entry.ended_at),
        "open_resources": row.open_resources,
        "resources": row.resources,
        "age_seconds": round(((entry.ended_at or now) - entry.created_at).total_seconds(), 3),
        "lease_seconds": round((entry.lease_expires_at - now).total_seconds(), 3),
        "usd_per_hour": float(rate),
        "cost_usd": float(row.cost_usd),
        "saved_usd": float(row.on_demand_usd - row.cost_usd),
    }


def _state(entry: PoolEntry, now: datetime) -> str:
    if entry.ended_at is not None:
        return "ended"
    if why := entry.why_dead(now, entry.owner.state()):
        return f"dead: {why}"
    return "live, by its lease" if entry.lives_by_lease else "live"


# ── cost ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _cost(ledger: Ledger, asked: argparse.Namespace) -> int:
    from skyward_core.events.narrator import digits
    from skyward_core.ledger.rows import BILLING_ROUNDING, CostBy

    damaged: list[UnreadableRow] = []
    rows = ledger.cost_rows(CostBy(asked.by), since=asked.since, until=asked.until, unreadable=damaged)
    # a resource has seconds in several buckets: that row counts each of them once
    counted = [row for row in rows if row.key == BILLING_ROUNDING] or rows
    total = {**_added_up("total", rows), "resources": sum(row.resources for row in counted)}
    if asked.json:
        _print_json({"by": asked.by, "rows": [_bill(row) for row in rows], "total": total})
        return _warned(damaged)
    costliest = sorted(rows, key=lambda row: row.cost_usd, reverse=True)[: asked.limit]
    shown = {row.key for row in costliest}
    bills = [_bill(row) for row in rows if row.key in shown]
    if others := [row for row in rows if row.key not in shown]:
        bills.append(_added_up(f"({len(others)} others)", others))
    _print_table(
        [asked.by.upper(), ">RESOURCES", ">HOURS", ">USD", ">ON DEMAND", ">SAVED"],
        [
            [
                str(bill["key"]),
                "" if bill["key"] == BILLING_ROUNDING else str(bill["resources"]),
                f"{bill['seconds'] / 3600:.2f}",
                *(digits(bill[name]) for name in ("cost_usd", "on_demand_usd", "saved_usd")),
            ]
            for bill in [*bills, total]
        ],
    )
    return _warned(damaged)


def _bill(row: CostRow) -> dict[str, Any]:
    return _added_up(row.key, [row])


def _added_up(key: str, rows: Iterable[CostRow]) -> dict[str, Any]:
    its = list(rows)
    return {
        "key": key,
        "resources": sum(row.resources for row in its),
        "seconds": round(sum(row.seconds for row in its), 3),
        "cost_usd": float(sum((row.cost_usd for row in its), ZERO_USD)),
        "on_demand_usd": float(sum((row.on_demand_usd for row in its), ZERO_USD)),
        "saved_usd": float(sum((row.saved_usd for row in its), ZERO_USD)),
    }


# ── sweep, stop, receipt ─────────────────────────────────────────────────────────────────────────────────────────────


def _sweep(ledger: Ledger, asked: argparse.Namespace) -> int:
    from skyward_core.cleanup.sweep import sweep
    from skyward_core.operations import configured_providers

    providers = configured_providers() if asked.provider is None else [_provider(name) for name in asked.provider]
    report = sweep(
        ledger, providers, is_dry_run=not asked.yes, min_age_seconds=asked.min_age, include_unknown=asked.unknown
    )
    if asked.json:
        _print_json(
            {
                "is_dry_run": not asked.yes,
                "findings": [_found(finding) for finding in report.findings],
                "ended": [_found(finding) for finding in report.ended],
                "closed": [_found(finding) for finding in report.closed],
                "adopted": [_found(finding) for finding in report.adopted],
                "pruned": list(report.pruned),
                "failures": [
                    {"provider": its.provider, "pool": its.pool_id, "error": str(its.error)} for its in report.failures
                ],
            }
        )
    else:
        _tell(report, is_dry_run=not asked.yes)
    if report.failures:
        return FAILED
    return TO_DO if (report.to_do or report.pruned) and not asked.yes else 0


def _tell(report: SweepReport, *, is_dry_run: bool) -> None:
    if report.findings:
        _print_table(
            ["ACTION", "POOL", "PROVIDER", "RESOURCES", "WHY"],
            [
                [its.action.value, its.pool_id, its.provider, _some(its.resource_ids), its.reason]
                for its in report.findings
            ],
        )
    for failure in report.failures:
        print(f"skyward: {_visible(' '.join(str(failure).split()))}", file=sys.stderr)
    for line in report.pruned:
        print(f"{'to be taken away' if is_dry_run else 'taken away'}: {line}")
    if not report.to_do and not report.pruned:
        print("nothing is to be done")
    elif is_dry_run:
        print("nothing was touched; `skyward sweep --yes` does it")
    else:
        print(_done(report))


def _done(report: SweepReport) -> str:
    """What a sweep has done, in words; what it has not done is said only if there is any."""
    from skyward_core.cleanup.policy import Action

    waiting = [finding for finding in report.findings if finding.action is Action.WAIT]
    told = [
        f"machines of {_number(report.ended, 'pool')} ended" if report.ended else "",
        f"entries of {_number(report.closed, 'pool')} closed, nothing of which was there" if report.closed else "",
        f"machines of {_number(report.adopted, 'live pool')} written down" if report.adopted else "",
        f"{_number(waiting, 'pool')} left for the next sweep" if waiting else "",
        f"{_number(report.pruned, 'thing')} of no use taken away" if report.pruned else "",
        _number(report.failures, "failure") if report.failures else "",
    ]
    return "; ".join(part for part in told if part) or "nothing was done"


def _number(things: Sequence[object], called: str) -> str:
    return f"{len(things)} {called}{'' if len(things) == 1 else 's'}"


def _found(finding: Finding) -> dict[str, Any]:
    return {
        "action": finding.action.value,
        "pool": finding.pool_id,
        "provider": finding.provider,
        "resources": list(finding.resource_ids),
        "reason": finding.reason,
    }


def _some(ids: Sequence[str], most: int = 4) -> str:
    return ", ".join(ids) if len(ids) <= most else f"{', '.join(ids[:most])} and {len(ids) - most} more"


def _provider(text: str) -> Provider:
    """A provider by its name, or as JSON with its fields."""
    from skyward_core.providers.base import load

    try:
        told: object = json.loads(text) if text.lstrip().startswith("{") else text
    except ValueError as error:
        raise BadRequest(f"--provider {text}: {error}") from error
    return load(told)  # pyright: ignore[reportArgumentType] - a name, or a JSON object


def _stop(ledger: Ledger, asked: argparse.Namespace) -> int:
    from skyward_core.cleanup.release import release

    provider = None if asked.provider is None else _provider(asked.provider)
    was_known = _is_known(ledger, asked.pool_id)
    ended = release(asked.pool_id, ledger=ledger, credentials=provider, why="it was stopped with `skyward stop`")
    if ended:
        print(f"{asked.pool_id} has ended: {_number(ended, 'machine')} ended ({_some(ended)}); nothing of it is left")
    elif was_known:
        print(f"{asked.pool_id} has ended; there was no machine of it to end")
    else:
        where = "the provider" if provider is None else provider.name
        print(
            f"nothing was ended: the ledger has no pool {asked.pool_id!r}, and {where} lists no machine of it; is that"
            " its id? look with `skyward ps --all`"
        )
    return 0


def _is_known(ledger: Ledger, pool_id: str) -> bool:
    from skyward_core.ledger.rows import UnreadableRow

    try:
        return ledger.pool(pool_id) is not None
    except UnreadableRow:
        return True


def _receipt(ledger: Ledger, asked: argparse.Namespace) -> int:
    from skyward_core.ledger.receipt import receipt

    damaged: list[UnreadableRow] = []
    _print_json(receipt(ledger, asked.pool_id, unreadable=damaged))
    return _warned(damaged)


# ── offers, why ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _offers(_: Ledger, asked: argparse.Namespace) -> int:
    from dataclasses import asdict

    from skyward_core.accelerators import parse
    from skyward_core.events.narrator import digits
    from skyward_core.machines.offers import total_of
    from skyward_core.operations import configured_providers, offers

    chip = None if asked.accelerator is None else replace(parse(asked.accelerator), count=asked.count)
    providers = configured_providers() if asked.provider is None else [_provider(name) for name in asked.provider]
    found = offers(
        providers,
        accelerator=chip,
        cpu=asked.cpu,
        memory=asked.memory,
        architecture=asked.architecture,
        max_price_per_hour=asked.max_price,
        max_age_seconds=asked.max_age,
    )
    shown = found.offers[: asked.limit]
    if asked.json:
        return _print_json(
            {
                "age_seconds": round(found.age_seconds(), 1),
                "offers": [
                    {**offer.model_dump(mode="json"), "total_per_hour": offer.total_per_hour} for offer in shown
                ],
                "without": [asdict(one) for one in found.refusals],
            }
        )
    if shown:
        _print_table(
            [
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
            ],
            [
                [
                    offer.provider,
                    offer.region,
                    offer.instance_type,
                    "spot" if offer.is_spot else "on demand",
                    digits(offer.total_per_hour),
                    digits(total_of(offer.extras_per_hour)) if offer.extras_per_hour else "",
                    f"{offer.vcpus:g}",
                    f"{offer.memory_gb:.0f}",
                    (
                        f"{offer.accelerators} x {offer.accelerator} {offer.accelerator_memory_gb or 0:.0f}GB"
                        if offer.accelerator
                        else ""
                    ),
                    offer.architecture or "",
                ]
                for offer in shown
            ],
        )
        more = f"the cheapest {len(shown)} of {len(found)}" if len(found) > len(shown) else f"{len(found)} in all"
        print(f"{more}; asked {_time(found.age_seconds())} ago")
    for one in found.refusals:
        print(f"skyward: {one}", file=sys.stderr)
    return 0 if shown else FAILED


def _why(ledger: Ledger, asked: argparse.Namespace) -> int:
    from skyward_core.ledger.rows import PRUNED_SPEC

    entry = ledger.pool(asked.pool_id)
    if entry is None:
        raise BadRequest(f"the ledger has no pool {asked.pool_id!r}: look with `skyward ps --all`")
    damaged: list[UnreadableRow] = []
    attempts = ledger.attempts(pool_id=entry.id, unreadable=damaged)
    if asked.json:
        _print_json([_attempt(one) for one in attempts])
        return _warned(damaged)
    if not attempts:
        what = (
            "what it tried is not known any more: `skyward ledger prune` took it away"
            if entry.spec_json == PRUNED_SPEC
            else "has not tried to rent anything"
        )
        print(f"{entry.id} {what}" if what.startswith("has") else f"{entry.id}: {what}")
        return _warned(damaged)
    _print_table(
        ["AT", "PROVIDER", "REGION", "TYPE", "MARKET", ">SECONDS", "OUTCOME", "CODE", "REASON"],
        [
            [
                _iso(one.at),
                one.provider,
                one.region,
                one.instance_type,
                "" if not one.instance_type else "spot" if one.is_spot else "on demand",
                f"{one.seconds:.1f}",
                one.error or "rented",
                one.code,
                " ".join(one.message.split()),
            ]
            for one in attempts
        ],
    )
    return _warned(damaged)


def _attempt(one: Attempt) -> dict[str, Any]:
    return {
        "at": _iso(one.at),
        "provider": one.provider,
        "region": one.region,
        "instance_type": one.instance_type,
        "spot": one.is_spot,
        "seconds": round(one.seconds, 3),
        "error": one.error or None,
        "code": one.code or None,
        "message": one.message or None,
    }


# ── the ledger itself ────────────────────────────────────────────────────────────────────────────────────────────────


def _prune(ledger: Ledger, asked: argparse.Namespace) -> int:
    before = datetime.now(UTC) - asked.older_than
    pruned = ledger.prune(before, is_dry_run=not asked.yes)
    if asked.yes and pruned.pools:
        ledger.vacuum()
    told = {"pools": pruned.pools, "attempts": pruned.attempts, "reservations": pruned.reservations}
    if asked.json:
        _print_json({"is_dry_run": not asked.yes, "ended_before": _iso(before), **told})
    elif not pruned.pools:
        print(f"no pool that ended before {_iso(before)} has details left")
    else:
        what = (
            f"details of {pruned.pools} pools, {pruned.attempts} tries to rent machines, {pruned.reservations} settled"
            " reservations"
        )
        print(
            f"taken away: {what}; what they have cost stays"
            if asked.yes
            else f"to be taken away: {what}\nnothing was touched; --yes does it"
        )
    return TO_DO if pruned.pools and not asked.yes else 0


# ── budgets ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _set_budget(ledger: Ledger, asked: argparse.Namespace) -> int:
    from skyward_core.ledger.rows import Account, Period

    ledger.set_account(Account(asked.name, asked.limit, Period(asked.per)))
    print(f"{asked.name}: {asked.limit} USD per {asked.per}")
    return 0


def _list_budgets(ledger: Ledger, asked: argparse.Namespace) -> int:
    from skyward_core.events.narrator import digits

    damaged: list[UnreadableRow] = []
    reservations, now = ledger.open_reservations(unreadable=damaged), datetime.now(UTC)
    budgets = [_budget(ledger, account, reservations, now) for account in ledger.accounts(unreadable=damaged)]
    if asked.json:
        _print_json(budgets)
        return _warned(damaged)
    if not budgets:
        print("no accounts; `skyward budget set NAME --limit USD --per run|day|month` makes one")
        return _warned(damaged)
    names = ("limit_usd", "spent_usd", "reserved_usd", "left_usd")
    _print_table(
        ["ACCOUNT", "PER", ">LIMIT USD", ">SPENT", ">RESERVED", ">LEFT"],
        [
            [
                budget["account"],
                budget["per"],
                *("" if budget[name] is None else digits(budget[name]) for name in names),
            ]
            for budget in budgets
        ],
    )
    return _warned(damaged)


def _budget(ledger: Ledger, account: Account, reservations: Sequence[Reservation], now: datetime) -> dict[str, Any]:
    """An account in this period; one with a limit for each run has nothing spent or left but for a pool, and all that
    is reserved from it is told.
    """
    scope = {"run": None, "day": f"{now:%Y-%m-%d}", "month": f"{now:%Y-%m}"}[account.period.value]
    reserved = sum(
        (its.reserved_usd for its in reservations if its.account == account.name and scope in (None, its.scope)),
        ZERO_USD,
    )
    left = None if scope is None else ledger.left_usd(account.name, "")
    return {
        "account": account.name,
        "per": account.period.value,
        "limit_usd": float(account.limit_usd),
        "spent_usd": None if left is None else float(account.limit_usd - left - reserved),
        "reserved_usd": float(reserved),
        "left_usd": None if left is None else float(left),
    }


# ── printing ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _print_json(data: object) -> int:
    print(json.dumps(data, indent=2))
    return 0


def _visible(text: str) -> str:
    """A text from the ledger or a provider without what a terminal would obey: others may have written it."""
    return text if text.isprintable() else "".join(one if one.isprintable() else repr(one)[1:-1] for one in text)


def _print_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print columns, those to the right whose head begins with `>`; on a terminal what is too long is folded, and what
    is too wide for that stands in lines.
    """
    from rich.console import Console
    from rich.table import Table

    rows = [[_visible(text) for text in row] for row in rows]
    console = Console(markup=False, highlight=False, emoji=False, color_system=None)
    if not console.is_terminal:
        console.width = WIDE
    if _least_width(heads, rows) > console.width:
        print(
            "\n\n".join(
                "\n".join(f"{head.removeprefix('>')}: {text}" for head, text in zip(heads, row, strict=True) if text)
                for row in rows
            )
        )
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for head in heads:
        table.add_column(head.removeprefix(">"), justify="right" if head.startswith(">") else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    with console.capture() as told:
        console.print(table)
    print("\n".join(line.rstrip() for line in told.get().splitlines()))


def _least_width(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> int:
    """How many columns a table needs to be readable: numbers are whole, texts may be folded."""
    columns = zip(heads, *rows, strict=True)
    widths = [
        max(map(len, texts)) if texts[0].startswith(">") else min(max(map(len, texts)), READABLE_CHARACTERS)
        for texts in columns
    ]
    return sum(widths) + 2 * len(widths)


def _time(seconds: float) -> str:
    """Seconds in words: "47 s", "12 min", "3.4 h", "2.1 d"; with a sign where they are over."""
    size = abs(seconds)
    for unit, length, most, digits in (("s", 1, 120, 0), ("min", 60, 7200, 0), ("h", 3600, 172_800, 1)):
        if size < most:
            return f"{seconds / length:.{digits}f} {unit}"
    return f"{seconds / 86_400:.1f} d"


def _iso(at: datetime) -> str:
    return at.astimezone(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
