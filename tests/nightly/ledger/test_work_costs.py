"""The bill by run of a pool with a name: each process that has used it has its part, and all add up to the pool's bill."""

from skyward_core.ledger.ledger import Ledger
from skyward_core.ledger.rows import CostBy
from skyward_core.work import Work
from tests.system.ledger.test_work_costs import USD, bill, used
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


def test_a_run_that_has_joined_a_pool_has_its_part_of_the_bill(ledger: Ledger) -> None:
    used(ledger)
    assert bill(ledger, CostBy.RUN) == {"prefect:train/1": USD("0.8"), "prefect:train/2": USD("0.2")}
    task = Work(system="prefect", workflow="train", run="2", task="fit")
    ledger.set_shares("sky-a", {task: USD("0.15")}, keeps_others=True)
    assert bill(ledger, CostBy.RUN) == {"prefect:train/1": USD("0.8"), "prefect:train/2": USD("0.2")}
    assert bill(ledger, CostBy.TASK) == {"prefect:train/fit": USD("0.15"), "(no task)": USD("0.85")}
    assert sum(row.resources for row in ledger.cost_rows(CostBy.RUN)) == 1
    assert bill(ledger, CostBy.POOL) == {"sky-a": USD(1)}
