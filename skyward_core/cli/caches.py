"""`skyward cache` and `skyward cache prune`: what pools of this computer have left for later ones."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated, Any

import typer

from skyward_core.cli import values
from skyward_core.cli.options import AsJson
from skyward_core.cli.printing import TO_DO, iso, print_json, print_table, say

if TYPE_CHECKING:
    from skyward_core.transport.caches import Entry

GB = 1e9


def show(context: typer.Context, *, as_json: AsJson = False) -> int:
    """List what pools have left on this computer for later ones: environments, included files, our package."""
    if context.invoked_subcommand is not None:
        return 0
    cached = _entries()
    kinds = list(dict.fromkeys(entry.kind for entry in cached))
    rows = [_summary(kind, [entry for entry in cached if entry.kind == kind]) for kind in sorted(kinds)]
    if as_json:
        print_json(rows)
    else:
        print_table(
            ["KIND", ">ENTRIES", ">IN USE", ">GB", "OLDEST USE", "NEWEST USE"],
            [
                [
                    row["kind"],
                    str(row["entries"]),
                    str(row["in_use"]),
                    f"{row['bytes'] / GB:.3f}",
                    row["oldest_use"],
                    row["newest_use"],
                ]
                for row in rows
            ],
        )
    return 0


def prune(
    *,
    older_than: Annotated[
        timedelta | None,
        typer.Option(parser=values.days, metavar="DAYS", help="what was not used for so long: 30d"),
    ] = None,
    keep_gb: Annotated[
        float | None,
        typer.Option(parser=values.gigabytes, metavar="GB", help="what exceeds this size, least recently used first"),
    ] = None,
    as_json: AsJson = False,
    yes: Annotated[bool, typer.Option("--yes", help="do it; without this nothing is touched")] = False,
) -> int:
    """Show what of the cache can go (by default what was not used for 30 days); with --yes, delete it."""
    from skyward_core.transport.caches import UNUSED_SECONDS, remove, superfluous

    is_default = older_than is None and keep_gb is None
    unused_seconds = UNUSED_SECONDS if is_default else None if older_than is None else older_than.total_seconds()
    keep_bytes = None if keep_gb is None else keep_gb * GB
    cached = _entries()
    chosen = superfluous(cached, unused_seconds=unused_seconds, keep_bytes=keep_bytes, now=time.time())
    if yes:
        chosen = [entry for entry in chosen if remove(entry)]
    size = sum(entry.bytes for entry in chosen)
    if as_json:
        paths = [str(entry.path) for entry in chosen]
        print_json({"is_dry_run": not yes, "entries": len(chosen), "bytes": size, "paths": paths})
    elif not chosen:
        say("nothing can go: all that is there was used lately, or is in use")
    else:
        what = f"{len(chosen)} of {len(cached)} entries with {size / GB:.3f} GB"
        say(f"deleted: {what}" if yes else f"to be deleted: {what}\nnothing was touched; --yes does it")
    return TO_DO if chosen and not yes else 0


def _entries() -> list[Entry]:
    from skyward_core.paths import cache_places, existing
    from skyward_core.transport.caches import cache_home, entries

    homes = [cache_home(), *(path.parent for path in existing("ship", cache_places()))]
    unique = {home.resolve(): home for home in reversed(homes)}
    return [entry for home in unique.values() for entry in entries(home)]


def _summary(kind: str, cached: Sequence[Entry]) -> dict[str, Any]:
    uses = [entry.used_at for entry in cached]
    return {
        "kind": kind,
        "entries": len(cached),
        "in_use": sum(entry.is_used for entry in cached),
        "bytes": sum(entry.bytes for entry in cached),
        "oldest_use": iso(datetime.fromtimestamp(min(uses), UTC)),
        "newest_use": iso(datetime.fromtimestamp(max(uses), UTC)),
    }
