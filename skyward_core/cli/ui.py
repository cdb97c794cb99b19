"""The page of `skyward ui`: its server, its JSON, what it reads from ledger and pools, and `/metrics`.

Each list has the rows that could be read, and `warnings` for those that could not. If the ledger cannot be read there
is no list: LedgerError becomes an error that the page shows.

Every user of this machine, and every page in this user's browser, can send requests to a port of the loopback. The
token keeps out the first. It is never in a cookie, so a page of another site cannot send it. A page whose own name
leads to 127.0.0.1 (DNS rebinding) has another `Host` header, and is refused before the token is looked at.

`/metrics` has the text format of Prometheus (version 0.0.4), written by its own library.
https://prometheus.io/docs/practices/naming/ has the rules for names: base units as suffixes, `_total` for counters.
"""

from __future__ import annotations

import hmac
import json
import re
import secrets
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from functools import cache
from html import escape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from socketserver import TCPServer
from statistics import fmean
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self, cast, override
from urllib.parse import parse_qsl, urlsplit

from skyward_core.cli.calls import detached_json
from skyward_core.cli.cost import sum_of, total
from skyward_core.cli.options import SHOWN_ROWS
from skyward_core.cli.pools import attempt_json, faults, pools_of
from skyward_core.concurrency.threads import LoopThread
from skyward_core.errors import BadRequest, LedgerConflict, LedgerError, SkywardError
from skyward_core.events.utilisation import MEASURES, percentages
from skyward_core.ledger.receipt import receipt
from skyward_core.ledger.rows import CostBy, ResourceKind, UnreadableRow
from skyward_core.live.observer import NodeUse, PoolUses
from skyward_core.shown_text import visible_data

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from skyward_core.events.events import Metrics
    from skyward_core.ledger.ledger import Ledger

SHOWN_DAYS = 30
"""Of costs, calls and refusals."""
ADDRESS = "127.0.0.1"
OURS = re.compile(r"(127\.0\.0\.1|localhost)(:[0-9]{1,5})?", re.IGNORECASE | re.ASCII)
"""What `Host` may be: we listen on IPv4 only. The port is any: it is another one at the end of an SSH forwarding."""
REQUEST_SECONDS = 5.0
"""How long a client may take with its request. Browsers connect in advance, and Ctrl-C waits for these connections."""
JSON = "application/json"
HTML = "text/html; charset=utf-8"
FOR_PROGRAMS = ("/api/", "/metrics")
"""Paths whose errors are JSON, whatever the client accepts."""
HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",  # the URL has the token
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
EVERY_SECONDS = 2.0
MOST_SAMPLES = 900
"""Of one node: half an hour."""
POINTS = 60
"""Of one curve: the samples are averaged in so many groups."""
END_SECONDS = 5.0
MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def answers(ledger: Ledger, utilisation: Utilisation) -> Answers:
    """Return what answers each path."""

    def from_ledger(read: Callable[[Ledger, Mapping[str, str]], dict[str, Any]]) -> Callable[..., Answer]:
        return lambda query: Answer.of(read(ledger, query))

    return {
        "/": lambda _: page(),
        "/metrics": lambda _: exposition(ledger, utilisation),
        "/api/pools": from_ledger(pools),
        "/api/nodes": lambda _: Answer.of(nodes(ledger, utilisation)),
        "/api/calls": from_ledger(calls),
        "/api/cost": from_ledger(cost),
        "/api/receipt": from_ledger(receipt_of),
        "/api/refusals": from_ledger(refusals),
    }


def page() -> Answer:
    """Return the page. Only its own script and style have the nonce, so no text from the ledger becomes a script."""
    return _html(_page_text())


REFUSAL = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Skyward</title>
<link rel="icon" href="data:,">
<style nonce="NONCE">
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 640px; padding: 24px 20px; }
h1 { font-size: 20px; }
</style>
</head>
<body>
<h1>This address does not open the page</h1>
<p>The answer of the server: WHY.</p>
<p>The address with the token is what COMMAND printed first when it started. Open the whole address.</p>
<p>If you no longer have it, end the command with Ctrl-C and start COMMAND again. It prints the address.</p>
</body>
</html>
"""


def refusal_page(command: str, why: str) -> Answer:
    """Return what a browser shows without the token. Nothing of the request is in it."""
    texts = {"WHY": why, "COMMAND": f"`{command}`"}
    return _html(re.sub("WHY|COMMAND", lambda name: _with_code(texts[name[0]]), REFUSAL))


def _with_code(text: str) -> str:
    return re.sub("`([^`]*)`", r"<code>\1</code>", escape(text))


def _html(text: str) -> Answer:
    nonce = secrets.token_urlsafe(16)
    policy = (
        f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; connect-src 'self';"
        " img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return Answer(text.replace("NONCE", nonce).encode(), HTML, {"Content-Security-Policy": policy})


@cache
def _page_text() -> str:
    return files("skyward_core.cli").joinpath("page.html").read_text(encoding="utf-8")


def pools(ledger: Ledger, _: Mapping[str, str]) -> dict[str, Any]:
    """Return the open pools, and the newest of all that have ended, as in `skyward ps --json`."""
    unreadable: list[UnreadableRow] = []
    rows = ledger.pool_rows(limit=SHOWN_ROWS, unreadable=unreadable)
    newest = ledger.pool_rows(include_ended=True, limit=SHOWN_ROWS, unreadable=unreadable)
    ended = [row for row in newest if row.entry.ended_at is not None]
    return {
        "pools": pools_of(ledger, rows, unreadable),
        "ended": pools_of(ledger, ended, unreadable)[::-1],
        "warnings": _lines([*unreadable, *faults([*rows, *ended])]),
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
    newest = [detached_json(one) for one in found[-SHOWN_ROWS:]]
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
        "rows": [sum_of(row.key, [row]) for row in rows],
        "total": total(rows),
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
    newest = [{"pool": one.pool_id, **attempt_json(one)} for one in failed[-SHOWN_ROWS:]]
    return {"refusals": newest[::-1], "all": len(failed), "days": SHOWN_DAYS, "warnings": _lines(unreadable)}


def _since() -> datetime:
    today = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    return today - timedelta(days=SHOWN_DAYS - 1)


def _lines(warnings: Iterable[object]) -> list[str]:
    return list(dict.fromkeys(" ".join(str(warning).split()) for warning in warnings))


@dataclass(frozen=True, slots=True)
class Answer:
    """The body of an answer, its media type, further headers, and its status."""

    body: bytes
    media_type: str = JSON
    headers: Mapping[str, str] | None = None
    status: int = 200

    @classmethod
    def of(cls, data: object) -> Self:
        """Return data as JSON in which each text is visible; the page makes it text of HTML."""
        return cls(json.dumps(visible_data(data)).encode())


class Answers(Protocol):
    """What answers a path, from the parameters of the query; None for a path that is none.

    It may raise BadRequest (400), LedgerConflict (404: no such pool), LedgerError and other SkywardErrors (503).
    """

    def get(self, path: str, /) -> Callable[[Mapping[str, str]], Answer] | None:
        """Return it."""
        ...


class PageServer(ThreadingHTTPServer):
    """Listens as soon as it is made, on 127.0.0.1 only. Raises BadRequest if the port is taken."""

    daemon_threads = False  # the end waits for answers, which read the ledger
    command = "skyward ui"

    def __init__(self, port: int, token: str, answers: Answers) -> None:
        self.token = token
        self.answers = answers
        try:
            super().__init__((ADDRESS, port), _Request)
        except OSError as error:
            raise BadRequest(
                f"port {port} of {ADDRESS} cannot be used ({error.strerror}): choose another with --port, or none"
            ) from error

    @property
    def url(self) -> str:
        """The URL of the page, with the token."""
        return f"http://{ADDRESS}:{self.server_port}/?token={self.token}"

    def read_target(self, target: str) -> tuple[str, str | None, dict[str, str]]:
        """Return the path of a request, its token and the other parameters of its query."""
        url = urlsplit(target)
        query = dict(parse_qsl(url.query))
        return url.path, query.pop("token", None), query

    @override
    def server_bind(self) -> None:
        # the method of HTTPServer looks up the name of this host, which may take seconds
        TCPServer.server_bind(self)
        self.server_name, self.server_port = ADDRESS, int(self.server_address[1])

    @override
    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):  # the browser has gone
            super().handle_error(request, client_address)


class _Request(BaseHTTPRequestHandler):
    timeout: ClassVar[float | None] = REQUEST_SECONDS
    server_version = "skyward"
    sys_version = ""

    def do_GET(self) -> None:
        """Check host and token, then answer."""
        path, token, query = self._server.read_target(self.path)
        if refusal := self._why_not(token):
            self._send_refusal(path, *refusal)
            return
        found = self._server.answers.get(path)
        if found is None:
            self._refuse(404, "there is no such page")
            return
        try:
            answer = found(query)
        except BadRequest as error:
            self._refuse(400, str(error))
        except LedgerConflict as error:
            self._refuse(404, str(error))
        except SkywardError as error:
            self._refuse(503, str(error))
        else:
            self._send(answer.status, answer)

    @property
    def _server(self) -> PageServer:
        return cast(PageServer, self.server)

    def _why_not(self, token: str | None) -> tuple[int, str] | None:
        """Return the status and the reason of a refusal; None for a request that may be answered."""
        hosts, command = self.headers.get_all("Host") or [], self._server.command
        if len(hosts) != 1 or not OURS.fullmatch(hosts[0].strip()):
            return 403, f"this page has another name: open the URL that `{command}` has printed"
        scheme, _, bearer = (self.headers.get("Authorization") or "").partition(" ")
        if scheme.lower() == "bearer":
            token = bearer.strip()
        if not token:
            return 401, f"this needs a token: open the URL that `{command}` has printed"
        # headers are Latin-1, and compare_digest takes no text beyond ASCII
        if not hmac.compare_digest(token.encode(errors="replace"), self._server.token.encode()):
            return 403, f"this token is not that of the running `{command}`: open the URL that it has printed"
        return None

    def _send_refusal(self, path: str, status: int, why: str) -> None:
        is_browser = "text/html" in (self.headers.get("Accept") or "") and not path.startswith(FOR_PROGRAMS)
        answer = refusal_page(self._server.command, why) if is_browser else _error(why)
        headers = {"WWW-Authenticate": "Bearer"} if status == 401 else {}
        self._send(status, replace(answer, headers={**(answer.headers or {}), **headers}))

    def _refuse(self, status: int, why: str) -> None:
        self._send(status, _error(why))

    def _send(self, status: int, answer: Answer) -> None:
        self.send_response(status)
        for name, value in {**HEADERS, **(answer.headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Type", answer.media_type)
        self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        self.wfile.write(answer.body)

    @override
    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing: the URL has the token."""


def _error(why: str) -> Answer:
    return Answer.of({"error": why})


class Utilisation:
    """Follows the live pools in a thread of its own, because a connection to a node may take half a minute."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._uses: Mapping[str, Sequence[NodeUse] | str] = {}
        self._trouble: LedgerError | None = None
        self._end = threading.Event()
        # a login that hangs does not keep the process
        self._thread = LoopThread("skyward-ui", self._follow)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join(END_SECONDS)

    def of(self, pool_id: str) -> Sequence[NodeUse] | str | None:
        """Return the use of a pool's nodes, or why it is out of reach; None if it was not looked at yet.

        Raises LedgerError if the pools could not be read at the last look.
        """
        if self._trouble is not None:
            raise LedgerError(str(self._trouble)) from self._trouble
        return self._uses.get(pool_id)

    def _follow(self) -> None:
        with PoolUses(self._ledger, most_samples=MOST_SAMPLES) as uses:
            while not self._end.wait(EVERY_SECONDS if self._uses or self._trouble else 0.2):
                try:
                    pools = [entry.id for entry in self._ledger.pools(unreadable=[])]
                except LedgerError as error:
                    self._trouble = error
                    continue
                self._trouble = None
                uses.keep(pools)
                self._look(uses, pools)

    def _look(self, uses: PoolUses, pools: Sequence[str]) -> None:
        self._uses = {pool_id: one for pool_id, one in self._uses.items() if pool_id in pools}
        for pool_id in pools:
            if self._end.is_set():
                return
            self._uses = {**self._uses, pool_id: uses.of(pool_id)}


def curves(samples: Sequence[Metrics]) -> dict[str, list[float | None]]:
    """Return percentages over time, the oldest first: at most `POINTS` of each, None where there is no GPU."""
    size = max(1, -(-len(samples) // POINTS))
    groups = [samples[start : start + size] for start in range(0, len(samples), size)]
    known = [[percentages(one) for one in group] for group in groups]
    return {name: [_mean([one.get(name) for one in group]) for group in known] for name in MEASURES}


def use_as_json(one: NodeUse) -> dict[str, Any]:
    """Return a node with its curves, and the time that they show, in seconds."""
    first, last = (one.samples[0], one.samples[-1]) if one.samples else (None, None)
    return {
        "node": one.node,
        "instance": one.instance_id,
        "busy_slots": one.busy,
        "slots": one.slots,
        "seconds": 0.0 if first is None or last is None else round(last.timestamp - first.timestamp, 1),
        **curves(one.samples),
    }


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(fmean(known), 1) if known else None


type Samples = Iterable[tuple[Mapping[str, str], float | Decimal]]


def exposition(ledger: Ledger, utilisation: Utilisation) -> Answer:
    """Return all metrics. Raises LedgerError if the ledger cannot be read: then Prometheus has no sample, and no 0.
    Raises BadRequest without the package prometheus-client.
    """
    try:
        import prometheus_client
    except ImportError as error:
        raise BadRequest(
            "/metrics needs the package prometheus-client: pip install 'skyward-core[prometheus]'"
        ) from error
    found = _families(ledger, utilisation)
    registry = prometheus_client.CollectorRegistry()
    registry.register(_Families(found))
    return Answer(prometheus_client.generate_latest(registry), MEDIA_TYPE)


@dataclass(frozen=True, slots=True, eq=False)
class _Families:
    """What the library asks for metrics."""

    found: Sequence[Metric]

    def collect(self) -> Sequence[Metric]:
        return self.found


def _families(ledger: Ledger, utilisation: Utilisation) -> list[Metric]:
    """Return the metrics of open pools now, and the sums of all pools that the ledger has."""
    unreadable: list[UnreadableRow] = []
    pools = pools_of(ledger, ledger.pool_rows(unreadable=unreadable), unreadable)
    machines = Counter(
        intent.pool_id
        for intent in ledger.open_intents(unreadable=[])
        if intent.kind is ResourceKind.INSTANCE and intent.cloud_id is not None
    )
    uses = {pool["pool"]: utilisation.of(pool["pool"]) for pool in pools}
    found = [
        *_of_pools(pools, machines),
        *_of_nodes(pools, uses),
        *_of_ledger(ledger, unreadable),
    ]
    rows = len({str(row) for row in unreadable})
    return [*found, _gauge("skyward_ledger_unreadable_rows", "Rows of the ledger that cannot be read.", [({}, rows)])]


def _of_pools(pools: Sequence[Mapping[str, Any]], machines: Mapping[str, int]) -> Iterator[Metric]:
    dead = sum(pool["state"].startswith("dead") for pool in pools)
    states = [({"state": "live"}, len(pools) - dead), ({"state": "dead"}, dead)]
    yield _gauge("skyward_pools", "Open pools by state; a dead one waits for `skyward sweep`.", states)
    yield _gauge(
        "skyward_pool_nodes",
        "Machines of the pool that are rented now.",
        [(_pool_labels(pool), machines.get(pool["pool"], 0)) for pool in pools],
    )
    yield _gauge(
        "skyward_pool_cost_usd_per_hour",
        "What all that the pool rents now costs, in USD per hour.",
        [(_pool_labels(pool), pool["usd_per_hour"]) for pool in pools],
    )
    yield _gauge(
        "skyward_pool_lease_remaining_seconds",
        "Seconds until the pool's lease ends; negative when it is over.",
        [(_pool_labels(pool), pool["lease_seconds"]) for pool in pools],
    )


def _of_nodes(
    pools: Sequence[Mapping[str, Any]], uses: Mapping[str, Sequence[NodeUse] | str | None]
) -> Iterator[Metric]:
    """Yield what the pools' nodes have reported. A pool out of reach has no samples here."""
    reached = {pool_id: its for pool_id, its in uses.items() if its is not None and not isinstance(its, str)}
    yield _gauge(
        "skyward_pool_reachable",
        "1 if the pool's scheduler answers this page, 0 if not.",
        [(_pool_labels(pool), int(pool["pool"] in reached)) for pool in pools if uses[pool["pool"]] is not None],
    )
    in_reach = [(pool, reached[pool["pool"]]) for pool in pools if pool["pool"] in reached]
    busy = {pool["pool"]: sum(one.busy for one in its) for pool, its in in_reach}
    yield _gauge(
        "skyward_pool_calls_in_flight",
        "Calls that run or wait, of a pool with a name; else calls that run.",
        [
            (_pool_labels(pool), calls)
            for pool in pools
            if (calls := busy.get(pool["pool"]) if pool["calls"] is None else pool["calls"]) is not None
        ],
    )
    yield _gauge(
        "skyward_pool_slots",
        "Slots of the pool's workers.",
        [(_pool_labels(pool), sum(one.slots for one in its)) for pool, its in in_reach],
    )
    yield _gauge(
        "skyward_pool_slots_busy",
        "Slots that have a call.",
        [(_pool_labels(pool), busy[pool["pool"]]) for pool, _ in in_reach],
    )
    last = [
        (_pool_labels(pool) | {"node": str(one.node)}, one.samples[-1])
        for pool, its in in_reach
        for one in its
        if one.samples
    ]
    yield _gauge(
        "skyward_node_cpu_ratio",
        "Use of the node's processors, 0 to 1.",
        [(labels, one.cpu_percent / 100) for labels, one in last],
    )
    yield _gauge(
        "skyward_node_memory_ratio",
        "Use of the node's memory, 0 to 1.",
        [(labels, one.memory_percent / 100) for labels, one in last],
    )
    yield _gauge(
        "skyward_node_gpu_ratio",
        "Mean use of the node's GPUs, 0 to 1.",
        [(labels, one.gpu_utilization / 100) for labels, one in last if one.gpu_utilization is not None],
    )


def _of_ledger(ledger: Ledger, unreadable: list[UnreadableRow]) -> Iterator[Metric]:
    owners = ledger.cost_rows(CostBy.OWNER, unreadable=unreadable)
    yield _counter(
        "skyward_cost_usd",
        "What all pools of the owner have cost, in USD, as recorded in the ledger.",
        [({"owner": row.key}, row.cost_usd) for row in owners],
    )
    refused = Counter((one.provider, one.error) for one in ledger.attempts(unreadable=unreadable) if one.error)
    yield _counter(
        "skyward_refusals",
        "Attempts to rent that have rented nothing, by the class of the error.",
        [({"provider": provider, "error": error}, count) for (provider, error), count in sorted(refused.items())],
    )


def _gauge(name: str, about: str, samples: Samples) -> Metric:
    return _metric(name, about, "gauge", name, samples)


def _counter(name: str, about: str, samples: Samples) -> Metric:
    return _metric(name, about, "counter", f"{name}_total", samples)


def _metric(name: str, about: str, kind: str, sample_name: str, samples: Samples) -> Metric:
    from prometheus_client.core import Metric

    metric = Metric(name, about, kind)
    for labels, value in samples:
        metric.add_sample(sample_name, visible_data(dict(labels)), float(value))
    return metric


def _pool_labels(pool: Mapping[str, Any]) -> dict[str, str]:
    return {"pool": pool["pool"], "name": pool["name"] or "", "provider": pool["provider"]}
