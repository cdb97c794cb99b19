"""The receipt: the ledger's record of a pool, as data that adds up."""

import contextlib
import json
import sqlite3
from collections.abc import Iterator
from datetime import timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from skyward_core.errors import LedgerConflict
from skyward_core.ledger.ledger import Ledger
from skyward_core.ledger.metering import Meter
from skyward_core.ledger.receipt import receipt
from skyward_core.ledger.rows import Bucket, CostBy, Price, ResourceKind, ResourceRequest, UnreadableRow
from skyward_core.machines.offers import Extra
from skyward_core.providers.base import TYPE_TAG
from tests.ledger.fixtures import NOON, Clock, machine, open_pool

SPOT = Price(Decimal("1.5"), Decimal(4), is_spot=True, increment_seconds=60)


@pytest.fixture
def ledger(clock: Clock, tmp_path: Path) -> Iterator[Ledger]:
    """A ledger in which pool `p` is open."""
    with Ledger(f"sqlite:///{tmp_path}/ledger.db", clock=clock) as opened:
        for pool_id in ("p", "other"):
            open_pool(opened, pool_id, provider={"name": "verda", "token": "a secret"})
        yield opened


def intend(
    ledger: Ledger, name: str, price: Price = SPOT, kind: ResourceKind = ResourceKind.INSTANCE, pool_id: str = "p"
) -> int:
    tags = {TYPE_TAG: "1xH100"} if kind is ResourceKind.INSTANCE else {}
    request = ResourceRequest(
        kind, "verda", "FIN-01", name, f"token-{pool_id}-{name}", tags, NOON + timedelta(hours=9), price
    )
    return ledger.intend(pool_id, request).id


def of_an_afternoon(ledger: Ledger, clock: Clock) -> dict[str, Any]:
    """The receipt of a machine that ended, one that may still run, one that never came, and a thing that is none."""
    gone, left = intend(ledger, "p-0"), intend(ledger, "p-1", Price(Decimal("0.5")))
    key = intend(ledger, "key", Price(), ResourceKind.OTHER)
    never = intend(ledger, "p-2")
    intend(ledger, "elsewhere", pool_id="other")
    clock.go(5)
    ledger.bind_all({gone: "i-0", left: "i-1", key: "k-1"})
    ledger.close_all([never], "there was none")
    ledger.note_all(
        {
            gone: {Bucket.LAUNCHING: 20.0, Bucket.RUNNING_CALLS: 3000.25, Bucket.IDLE: 9.75, Bucket.TERMINATING: 30.0},
            left: {Bucket.IDLE: 100.0},
        }
    )
    clock.time = NOON + timedelta(minutes=50)
    ledger.ask_end_all([gone, left])
    clock.time = NOON + timedelta(minutes=51)
    ledger.close_all([gone, key], "verda lists it no more")
    ledger.end_pool("p")
    return receipt(ledger, "p")


def test_a_receipt_has_the_state_of_each_resource(ledger: Ledger, clock: Clock) -> None:
    found = of_an_afternoon(ledger, clock)
    assert (found["pool_id"], found["owner"], found["provider"], found["account"]) == ("p", "ada@laptop", "verda", None)
    assert found["name"] is None
    assert found["max_cost_usd"] is None
    assert (found["created_at"], found["ended_at"]) == ("2026-11-21T12:00:00+00:00", "2026-11-21T12:51:00+00:00")
    assert [resource["name"] for resource in found["resources"]] == ["p-0", "p-1", "key", "p-2"]
    assert found["resources"][0] == {
        "kind": "instance",
        "provider": "verda",
        "region": "FIN-01",
        "name": "p-0",
        "cloud_id": "i-0",
        "instance_type": "1xH100",
        "is_spot": True,
        "price_per_hour_usd": 1.5,
        "extras_per_hour": [],
        "lines": {"machine": 1.275},
        "intended_at": "2026-11-21T12:00:00+00:00",
        "bound_at": "2026-11-21T12:00:05+00:00",
        "end_asked_at": "2026-11-21T12:50:00+00:00",
        "gone_at": "2026-11-21T12:51:00+00:00",
        "evidence": "verda lists it no more",
        "seconds": {
            "launching": 20.0,
            "bootstrapping": 0.0,
            "running calls": 3000.25,
            "idle": 9.75,
            "warm": 0.0,
            "lost to preemption": 0.0,
            "terminating": 30.0,
        },
        "cost_usd": 1.275,  # 51 minutes at 1.50 USD per hour
        "on_demand_usd": 3.4,
    }
    assert found["left"] == [
        {"kind": "instance", "provider": "verda", "region": "FIN-01", "name": "p-1", "cloud_id": "i-1"}
    ]
    assert [resource["cost_usd"] for resource in found["resources"][1:]] == [0.013889, 0.0, 0.0]
    written = json.dumps(found, allow_nan=False)
    assert json.loads(written) == found
    assert "secret" not in written, "other fields of the provider than its name may be secret"


@pytest.mark.parametrize(
    ("spec", "ceiling"),
    [
        ({}, None),
        ({"max_cost": 2.5, "nodes": 2}, 2.5),
        ({"max_lifetime": 7200.0, "nodes": 2}, 6.0),  # the dearer machine costs 1.50 USD per hour
        ({"max_lifetime": 7200.0, "nodes": [1, 3], "max_cost": 20.0}, 9.0),
        ({"max_lifetime": 7200.0, "nodes": [1, 3], "max_cost": 8.0}, 8.0),
    ],
)
def test_a_receipt_has_the_most_that_the_pool_may_cost(
    ledger: Ledger, spec: dict[str, Any], ceiling: float | None
) -> None:
    open_pool(ledger, "limited", spec_json=json.dumps(spec))
    assert receipt(ledger, "limited")["ceiling_usd"] == spec.get("max_cost"), "nothing was rented yet"
    for name, price in (("a", SPOT), ("b", Price(Decimal("0.5")))):
        intend(ledger, name, price, pool_id="limited")
    intend(ledger, "key", Price(Decimal(9)), ResourceKind.OTHER, pool_id="limited")
    assert receipt(ledger, "limited")["ceiling_usd"] == ceiling


def test_a_receipt_adds_up(ledger: Ledger, clock: Clock) -> None:
    found = of_an_afternoon(ledger, clock)
    (row,) = ledger.cost_rows(CostBy.POOL, pool_id="p")
    assert found["total_cost_usd"] == float(row.cost_usd) == 1.288889
    assert found["on_demand_usd"] == float(row.on_demand_usd) == 3.413889
    assert found["saved_usd"] == float(row.saved_usd) == 2.125
    for lines in (found["resources"], list(found["buckets"].values())):
        assert round(sum(line["cost_usd"] for line in lines), 6) == found["total_cost_usd"]
        assert round(sum(line["on_demand_usd"] for line in lines), 6) == found["on_demand_usd"]
    assert list(found["buckets"]) == [*map(str, Bucket), "billing rounding"]
    for bucket in Bucket:
        assert found["buckets"][bucket]["seconds"] == sum(
            resource["seconds"][bucket] for resource in found["resources"]
        )


def test_a_receipt_has_a_line_for_each_extra(ledger: Ledger, clock: Clock) -> None:
    disk = Extra(name="disk", usd_per_hour=0.25, source="a page", checked="2026-11-22")
    address = Extra(name="public IPv4", usd_per_hour=0.1, source="another page", checked="2026-11-21")
    gone = intend(ledger, "p-0", Price(Decimal("1.35"), Decimal("2.35"), is_spot=True, extras=(disk, address)))
    other = intend(ledger, "p-1", Price(Decimal("1.25"), extras=(disk,)))
    ledger.bind_all({gone: "i-0", other: "i-1"})
    ledger.note_all({gone: {Bucket.IDLE: 3600.0}, other: {Bucket.IDLE: 1000.0}})
    found = receipt(ledger, "p")
    assert found["resources"][0]["price_per_hour_usd"] == found["resources"][0]["cost_usd"] == 1.35
    assert found["resources"][0]["extras_per_hour"] == [disk.model_dump(), address.model_dump()]
    assert found["resources"][0]["lines"] == {"machine": 1.0, "disk": 0.25, "public IPv4": 0.1}
    assert found["resources"][1]["lines"] == {"machine": 0.277779, "disk": 0.069444}
    assert (found["lines"], found["total_cost_usd"]) == (
        {"machine": 1.277779, "disk": 0.319444, "public IPv4": 0.1},
        1.697223,
    )
    assert found["resources"][0]["on_demand_usd"] == 2.35


def test_a_live_pool_has_a_receipt(ledger: Ledger) -> None:
    found = receipt(ledger, "p")
    assert (found["ended_at"], found["resources"], found["left"]) == (None, [], [])
    assert (found["total_cost_usd"], found["saved_usd"]) == (0.0, 0.0)
    with pytest.raises(LedgerConflict, match="no pool 'q'"):
        receipt(ledger, "q")


@pytest.mark.parametrize(("column", "total_usd"), [("tags_json", 1.5), ("price_micro_usd_per_hour", 1.0)])
def test_a_receipt_leaves_out_an_entry_that_cannot_be_read(
    ledger: Ledger, tmp_path: Path, column: str, total_usd: float
) -> None:
    whole, damaged = intend(ledger, "p-0", Price(Decimal(36))), intend(ledger, "p-1", Price(Decimal(36)))
    other = intend(ledger, "elsewhere", pool_id="other")
    ledger.note_all({whole: {Bucket.IDLE: 100.0}, damaged: {Bucket.IDLE: 50.0}})
    with contextlib.closing(sqlite3.connect(tmp_path / "ledger.db")) as database, database:
        database.execute(f"UPDATE skyward_resources SET {column} = '[damaged' WHERE id IN (?, ?)", [damaged, other])
    unreadable: list[UnreadableRow] = []
    found = receipt(ledger, "p", unreadable=unreadable)
    assert [resource["name"] for resource in found["resources"]] == [left["name"] for left in found["left"]] == ["p-0"]
    assert found["total_cost_usd"] == total_usd
    assert sum(bucket["seconds"] for bucket in found["buckets"].values()) == total_usd * 100  # 36 USD per hour
    assert {error.pool_id for error in unreadable} == {"p"}
    assert all(f"row {damaged} of skyward_resources" in str(error) for error in unreadable)
    with pytest.raises(UnreadableRow):
        receipt(ledger, "p")


def test_the_meters_bill_is_the_ledgers(ledger: Ledger, clock: Clock) -> None:
    meter = Meter(lambda: clock.time.timestamp())
    prices = [
        Price(Decimal("0.333333"), Decimal("1.1"), is_spot=True),
        Price(Decimal("2.49"), increment_seconds=60),
        Price(Decimal(7), increment_seconds=60, minimum_seconds=3600),
    ]
    numbers = {f"i-{rank}": intend(ledger, f"p-{rank}", price) for rank, price in enumerate(prices)}
    ledger.bind_all({number: instance_id for instance_id, number in numbers.items()})
    for rank, (instance_id, price) in enumerate(zip(numbers, prices, strict=True)):
        meter.start(machine(instance_id), clock.time.timestamp(), price)
    for rank, instance_id in enumerate(numbers):
        for phase in (Bucket.BOOTSTRAPPING, Bucket.IDLE, Bucket.TERMINATING):
            clock.time += timedelta(seconds=17.1234 * (rank + 1))
            meter.enter(instance_id, phase)
        meter.ran(instance_id, 9.87654)
        meter.end(instance_id)
    ledger.note_all({numbers[instance_id]: seconds for instance_id, seconds in meter.buckets().items()})
    ledger.close_all(numbers.values(), "seen")
    found, final = receipt(ledger, "p"), meter.final()
    assert final is not None
    assert found["total_cost_usd"] == final.total_cost == float(meter.total())
    assert found["saved_usd"] == final.savings_vs_ondemand
    assert {name: line["cost_usd"] for name, line in found["buckets"].items() if line["cost_usd"]} == final.buckets
