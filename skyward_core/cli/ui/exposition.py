"""`/metrics`: pools, nodes and costs in the text format of Prometheus (version 0.0.4).

https://prometheus.io/docs/instrumenting/exposition_formats/ has the format, and /docs/practices/naming/ the rules for
names: base units as suffixes, `_total` for counters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Literal

from skyward_core.cli.listing import pools_of
from skyward_core.cli.ui.server import Answer
from skyward_core.ledger.rows import CostBy, ResourceKind, UnreadableRow

if TYPE_CHECKING:
    from skyward_core.cli.ui.utilisation import Utilisation
    from skyward_core.ledger.ledger import Ledger
    from skyward_core.live.metrics import NodeUse

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"
ESCAPES = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n"})

type Value = int | float | Decimal
type Samples = Iterable[tuple[Mapping[str, str], Value]]


@dataclass(frozen=True, slots=True)
class Family:
    """A metric with its samples: each has labels and a value."""

    name: str
    kind: Literal["gauge", "counter"]
    about: str
    samples: Sequence[tuple[Mapping[str, str], Value]]

    def __str__(self) -> str:
        head = f"# HELP {self.name} {self.about}\n# TYPE {self.name} {self.kind}\n"
        return head + "".join(f"{self.name}{_labels(labels)} {value}\n" for labels, value in self.samples)


def metrics(ledger: Ledger, utilisation: Utilisation) -> Answer:
    """Return all metrics. Raises LedgerError if the ledger cannot be read: then Prometheus has no sample, and no 0."""
    return Answer("".join(map(str, families(ledger, utilisation))).encode(), MEDIA_TYPE)


def families(ledger: Ledger, utilisation: Utilisation) -> list[Family]:
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


def _of_pools(pools: Sequence[Mapping[str, Any]], machines: Mapping[str, int]) -> Iterator[Family]:
    dead = sum(pool["state"].startswith("dead") for pool in pools)
    states = [({"state": "live"}, len(pools) - dead), ({"state": "dead"}, dead)]
    yield _gauge("skyward_pools", "Open pools by state; a dead one waits for `skyward sweep`.", states)
    yield _gauge(
        "skyward_pool_nodes",
        "Machines of the pool that are rented now.",
        [(_of(pool), machines.get(pool["pool"], 0)) for pool in pools],
    )
    yield _gauge(
        "skyward_pool_cost_usd_per_hour",
        "What all that the pool rents now costs, in USD per hour.",
        [(_of(pool), pool["usd_per_hour"]) for pool in pools],
    )
    yield _gauge(
        "skyward_pool_lease_remaining_seconds",
        "Seconds until the pool's lease ends; negative when it is over.",
        [(_of(pool), pool["lease_seconds"]) for pool in pools],
    )


def _of_nodes(
    pools: Sequence[Mapping[str, Any]], uses: Mapping[str, Sequence[NodeUse] | str | None]
) -> Iterator[Family]:
    """Yield what the pools' nodes have reported. A pool out of reach has no samples here."""
    reached = {pool_id: its for pool_id, its in uses.items() if its is not None and not isinstance(its, str)}
    yield _gauge(
        "skyward_pool_reachable",
        "1 if the pool's scheduler answers this page, 0 if not.",
        [(_of(pool), int(pool["pool"] in reached)) for pool in pools if uses[pool["pool"]] is not None],
    )
    in_reach = [(pool, reached[pool["pool"]]) for pool in pools if pool["pool"] in reached]
    busy = {pool["pool"]: sum(one.busy for one in its) for pool, its in in_reach}
    yield _gauge(
        "skyward_pool_calls_in_flight",
        "Calls that run or wait, of a pool with a name; else calls that run.",
        [
            (_of(pool), calls)
            for pool in pools
            if (calls := busy.get(pool["pool"]) if pool["calls"] is None else pool["calls"]) is not None
        ],
    )
    yield _gauge(
        "skyward_pool_slots",
        "Slots of the pool's workers.",
        [(_of(pool), sum(one.slots for one in its)) for pool, its in in_reach],
    )
    yield _gauge(
        "skyward_pool_slots_busy",
        "Slots that have a call.",
        [(_of(pool), busy[pool["pool"]]) for pool, _ in in_reach],
    )
    last = [
        (_of(pool) | {"node": str(one.node)}, one.samples[-1]) for pool, its in in_reach for one in its if one.samples
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


def _of_ledger(ledger: Ledger, unreadable: list[UnreadableRow]) -> Iterator[Family]:
    owners = ledger.cost_rows(CostBy.OWNER, unreadable=unreadable)
    yield Family(
        "skyward_cost_usd_total",
        "counter",
        "What all pools of the owner have cost, in USD, as recorded in the ledger.",
        [({"owner": row.key}, row.cost_usd) for row in owners],
    )
    refused = Counter((one.provider, one.error) for one in ledger.attempts(unreadable=unreadable) if one.error)
    yield Family(
        "skyward_refusals_total",
        "counter",
        "Attempts to rent that have rented nothing, by the class of the error.",
        [({"provider": provider, "error": error}, count) for (provider, error), count in sorted(refused.items())],
    )


def _gauge(name: str, about: str, samples: Samples) -> Family:
    return Family(name, "gauge", about, list(samples))


def _of(pool: Mapping[str, Any]) -> dict[str, str]:
    return {"pool": pool["pool"], "name": pool["name"] or "", "provider": pool["provider"]}


def _labels(labels: Mapping[str, str]) -> str:
    pairs = ",".join(f'{name}="{value.translate(ESCAPES)}"' for name, value in labels.items())
    return f"{{{pairs}}}" if pairs else ""
