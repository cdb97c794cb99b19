"""The answers of `skyward ui`: its page, and JSON from the ledger and from live pools.

Each list has the rows that could be read, and `warnings` for those that could not. If the ledger cannot be read there
is no list: LedgerError becomes an error that the page shows.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime, timedelta
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from skyward_core.cli.listing import pools_of
from skyward_core.cli.options import SHOWN_ROWS
from skyward_core.cli.ui.exposition import metrics
from skyward_core.cli.ui.server import Answer, Answers
from skyward_core.cli.ui.utilisation import use_as_json
from skyward_core.cli.views import attempts as attempts_view
from skyward_core.cli.views import calls as calls_view
from skyward_core.cli.views import cost as cost_view
from skyward_core.cli.views import pools as pools_view
from skyward_core.errors import BadRequest
from skyward_core.ledger.receipt import receipt
from skyward_core.ledger.rows import CostBy, UnreadableRow

if TYPE_CHECKING:
    from skyward_core.cli.ui.utilisation import Utilisation
    from skyward_core.ledger.ledger import Ledger

SHOWN_DAYS = 30
"""Of costs, calls and refusals."""


def answers(ledger: Ledger, utilisation: Utilisation) -> Answers:
    """Return what answers each path."""

    def from_ledger(read: Callable[[Ledger, Mapping[str, str]], dict[str, Any]]) -> Callable[..., Answer]:
        return lambda query: Answer.of(read(ledger, query))

    return {
        "/": lambda _: page(),
        "/metrics": lambda _: metrics(ledger, utilisation),
        "/api/pools": from_ledger(pools),
        "/api/nodes": lambda _: Answer.of(nodes(ledger, utilisation)),
        "/api/calls": from_ledger(calls),
        "/api/cost": from_ledger(cost),
        "/api/receipt": from_ledger(receipt_of),
        "/api/refusals": from_ledger(refusals),
    }


def page() -> Answer:
    """Return the page. Only its own script and style have the nonce, so no text from the ledger becomes a script."""
    nonce = secrets.token_urlsafe(16)
    policy = (
        f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; connect-src 'self';"
        " img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    body = _page_text().replace("NONCE", nonce).encode()
    return Answer(body, "text/html; charset=utf-8", {"Content-Security-Policy": policy})


@cache
def _page_text() -> str:
    return files("skyward_core.cli.ui").joinpath("page.html").read_text(encoding="utf-8")


def pools(ledger: Ledger, _: Mapping[str, str]) -> dict[str, Any]:
    """Return the open pools, and the newest of all that have ended, as in `skyward ps --json`."""
    unreadable: list[UnreadableRow] = []
    rows = ledger.pool_rows(limit=SHOWN_ROWS, unreadable=unreadable)
    newest = ledger.pool_rows(include_ended=True, limit=SHOWN_ROWS, unreadable=unreadable)
    ended = [row for row in newest if row.entry.ended_at is not None]
    return {
        "pools": pools_of(ledger, rows, unreadable),
        "ended": pools_of(ledger, ended, unreadable)[::-1],
        "warnings": _lines([*unreadable, *pools_view.faults([*rows, *ended])]),
    }


def nodes(ledger: Ledger, utilisation: Utilisation) -> dict[str, Any]:
    """Return the nodes of the open pools with their utilisation over time; `trouble` says why one is out of reach."""
    unreadable: list[UnreadableRow] = []
    entries = ledger.pools(unreadable=unreadable)
    found: list[dict[str, Any]] = []
    for entry in entries:
        uses = utilisation.of(entry.id)
        trouble = uses if isinstance(uses, str) else None
        known = () if uses is None or isinstance(uses, str) else uses
        found.append(
            {
                "pool": entry.id,
                "nodes": [use_as_json(one) for one in known],
                "trouble": trouble,
                "is_awaited": uses is None,
            }
        )
    return {"pools": found, "warnings": _lines(unreadable)}


def calls(ledger: Ledger, _: Mapping[str, str]) -> dict[str, Any]:
    """Return the newest detached calls of the last days, the newest first, as in `skyward calls --json`."""
    unreadable: list[UnreadableRow] = []
    found = ledger.calls(since=_since(), unreadable=unreadable)
    newest = [calls_view.as_json(one) for one in found[-SHOWN_ROWS:]]
    return {"calls": newest[::-1], "all": len(found), "days": SHOWN_DAYS, "warnings": _lines(unreadable)}


def cost(ledger: Ledger, query: Mapping[str, str]) -> dict[str, Any]:
    """Return the costs of the last days, as in `skyward cost --json`. Raises BadRequest for an unknown `by`."""
    try:
        by = CostBy(query.get("by", CostBy.DAY))
    except ValueError as error:
        raise BadRequest(f"costs are added up by {', '.join(CostBy)}; given by={query['by']!r}") from error
    unreadable: list[UnreadableRow] = []
    rows = ledger.cost_rows(by, since=_since(), unreadable=unreadable)
    return {
        "by": by,
        "days": SHOWN_DAYS,
        "rows": [cost_view.sum_of(row.key, [row]) for row in rows],
        "total": cost_view.total(rows),
        "warnings": _lines(unreadable),
    }


def receipt_of(ledger: Ledger, query: Mapping[str, str]) -> dict[str, Any]:
    """Return the receipt of a pool, as `skyward receipt` does.

    Raises BadRequest, and LedgerConflict if there is no such pool.
    """
    pool_id = query.get("pool")
    if not pool_id:
        raise BadRequest("a receipt is that of a pool: ?pool=ID")
    unreadable: list[UnreadableRow] = []
    return {"receipt": receipt(ledger, pool_id, unreadable=unreadable), "warnings": _lines(unreadable)}


def refusals(ledger: Ledger, _: Mapping[str, str]) -> dict[str, Any]:
    """Return the newest attempts of the last days that have rented nothing, the newest first, with their pools."""
    unreadable: list[UnreadableRow] = []
    failed = [one for one in ledger.attempts(since=_since(), unreadable=unreadable) if one.error]
    newest = [{"pool": one.pool_id, **attempts_view.as_json(one)} for one in failed[-SHOWN_ROWS:]]
    return {"refusals": newest[::-1], "all": len(failed), "days": SHOWN_DAYS, "warnings": _lines(unreadable)}


def _since() -> datetime:
    today = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    return today - timedelta(days=SHOWN_DAYS - 1)


def _lines(warnings: Iterable[object]) -> list[str]:
    return list(dict.fromkeys(" ".join(str(warning).split()) for warning in warnings))
