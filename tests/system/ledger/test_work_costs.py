"""The bill by run of a pool with a name: each process that has used it has its part, and all add up to the pool's bill."""

from datetime import timedelta
from decimal import Decimal

from skyward_core.ledger.ledger import Ledger
from skyward_core.ledger.names_policy import Usage
from skyward_core.ledger.rows import Bucket, CallState, CostBy, Price, SlotUse
from skyward_core.ledger.work_costs import PoolUse, parts_of
from skyward_core.work import NO_WORK, Work
from tests.system.ledger.test_names import LEASE_SECONDS, claim, opened
from tests.unit.ledger.test_ledger import (  # noqa: F401 - fixtures
    NOON,
    Clock,
    clock,
    ledger,
    postgresql_server,
    postgresql_url,
    resource_request,
    sqlite_url,
    url,
)

USD = Decimal
OPENER, JOINED = (Work(system="prefect", workflow="train", run=run) for run in ("1", "2"))


def used(ledger: Ledger) -> None:
    """A pool of the flow run 1 at 3.6 USD an hour, which a process of run 2 has used for as long; 400 s were busy."""
    opened(ledger, work=OPENER)
    claim(ledger, "b", work=JOINED)
    (intent,) = ledger.intend_all("sky-a", [resource_request("sky-a-1", "sky-a", Price(USD("3.6")))])
    ledger.bind(intent, "i-1")
    buckets = {Bucket.LAUNCHING: 100, Bucket.RUNNING_CALLS: 400, Bucket.IDLE: 50, Bucket.WARM: 450}
    ledger.note_all({intent.id: buckets})
    for client in "ab":
        ledger.names.renew(client, LEASE_SECONDS, Usage(200.0))


def bill(ledger: Ledger, by: CostBy, work: Work = NO_WORK) -> dict[str, Decimal]:
    return {row.key: row.cost_usd for row in ledger.cost_rows(by, work=work)}


def test_the_cost_of_a_work_is_its_part_of_the_pools_that_it_has_used(ledger: Ledger) -> None:
    used(ledger)
    assert bill(ledger, CostBy.POOL, JOINED) == {"sky-a": USD("0.2")}
    assert bill(ledger, CostBy.POOL, OPENER) == {"sky-a": USD("0.8")}
    assert bill(ledger, CostBy.POOL, Work(system="prefect")) == {"sky-a": USD(1)}
    assert bill(ledger, CostBy.RUN, JOINED) == {"prefect:train/2": USD("0.2")}
    assert bill(ledger, CostBy.POOL, Work(run="another")) == {}


def test_the_parts_of_the_cost_for_a_work_are_those_of_exact_works(ledger: Ledger, clock: Clock) -> None:
    used(ledger)
    task = Work(system="prefect", workflow="train", run="2", task="fit")
    ledger.set_shares("sky-a", {task: USD("0.15")}, keeps_others=True)
    system = Work(system="prefect")
    parts = {part.work: part for part in ledger.cost_parts(system)}
    assert {work: part.cost_usd for work, part in parts.items()} == {
        task: USD("0.15"),
        JOINED: USD("0.05"),
        OPENER: USD("0.8"),
    }
    assert sum(part.cost_usd for part in parts.values()) == sum(bill(ledger, CostBy.POOL, system).values())
    assert [part.work for part in ledger.cost_parts(task)] == [task]
    assert not any(part.is_final for part in parts.values())
    ledger.end_pool("sky-a")
    assert not any(part.is_final for part in ledger.cost_parts(system)), "its machine may still cost"
    ledger.close_all([1], "it is gone")
    assert all(part.is_final for part in ledger.cost_parts(system))
    assert ledger.cost_parts(Work(run="another")) == []


def test_detached_calls_are_for_the_work_of_their_pool(ledger: Ledger) -> None:
    used(ledger)
    calls = [CallState("1", "f", "dag", 1, "ended", NOON, NOON, (SlotUse("i-1", 1, 400.0),))]
    ledger.note_calls("sky-a", calls)
    assert bill(ledger, CostBy.RUN) == {"prefect:train/1": USD("0.9"), "prefect:train/2": USD("0.1")}


def test_detached_calls_are_for_the_user_whose_work_their_owner_names(ledger: Ledger) -> None:
    used(ledger)
    call = CallState("1", "f", str(JOINED), 1, "ended", NOON, NOON, (SlotUse("i-1", 1, 400.0),))
    ledger.note_calls("sky-a", [call])
    assert bill(ledger, CostBy.RUN) == {"prefect:train/1": USD("0.7"), "prefect:train/2": USD("0.3")}
    assert bill(ledger, CostBy.POOL, JOINED) == {"sky-a": USD("0.3")}


def test_the_bill_by_run_is_the_same_after_pruning(ledger: Ledger, clock: Clock) -> None:
    used(ledger)
    ledger.set_shares("sky-a", {Work(system="prefect", workflow="train", run="2", task="fit"): USD("0.15")})
    before = bill(ledger, CostBy.RUN), bill(ledger, CostBy.TASK), bill(ledger, CostBy.POOL, JOINED)
    ledger.close_all([1], "it is gone")
    ledger.end_pool("sky-a")
    assert ledger.prune(clock.time + timedelta(days=1), is_dry_run=False).pools == 1
    assert ledger.names.clients("sky-a") == []
    assert (bill(ledger, CostBy.RUN), bill(ledger, CostBy.TASK), bill(ledger, CostBy.POOL, JOINED)) == before


def test_the_parts_of_a_pool() -> None:
    task = Work(run="2", task="fit")
    use = PoolUse(shares=[(task, 60)], users=[(Work(run="2"), 5), (NO_WORK, 5), (Work(run="2"), 0), (Work(run="1"), 0)])
    assert parts_of(Work(run="1"), 100, use) == [(task, 60), (NO_WORK, 50)]
    use.shares = [(task, 20)]
    assert parts_of(Work(run="1"), 100, use) == [(task, 20), (Work(run="2"), 30), (NO_WORK, 50)]
    assert parts_of(Work(run="1"), 100, PoolUse(detached_milliseconds=7)) == []
