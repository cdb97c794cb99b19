"""Dagster: one pool for a range of partitions, and one for the runs of a backfill."""

from decimal import Decimal
from typing import Any

import pytest

import skyward_core as sky
from dagster_skyward import SkywardResource
from dagster_skyward.backfills import BACKFILL_TAG
from dagster_skyward.metadata import COST_USD, OTHER_COST_USD, POOL_ID
from skyward_core.ledger.budgets import LONGEST_BOOT_SECONDS
from skyward_core.ledger.ledger import Ledger, default_url
from skyward_core.ledger.rows import Account, Period
from tests.system.integrations.test_dagster_backfills import (  # noqa: F401 - fixtures
    DAYS,
    days,
    dg,
    instance,
    made,
)

# Dagster's own: it uses its deprecated names for nested resources; and a policy of backfills is beta
pytestmark = [
    pytest.mark.filterwarnings("default::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*backfill_policy"),
]


@pytest.mark.parametrize("sharing", ["step", "backfill"])
def test_a_backfill_rents_nothing_more_when_its_budget_is_spent(sharing: str, instance: Any, days: Any) -> None:
    """The account has a third of a cent more than a pool of one cent a second reserves, and the first run costs at
    least a cent. The later runs fail before anything is rented, whoever made the pool. The bill is within the limit.
    """
    lease_seconds, account = 10, f"backfills by {sharing}"
    limit = Decimal("0.01") * (int(LONGEST_BOOT_SECONDS) + 2 * lease_seconds) + Decimal("0.003")
    with Ledger(default_url()) as ledger:
        ledger.set_account(Account(account, limit, Period.MONTH))
    compute = SkywardResource(
        provider=sky.Local(price_per_hour=36.0), sharing=sharing, lease_seconds=lease_seconds, budget=account
    )
    results = [
        dg.materialize(
            [days],
            resources={"compute": compute},
            instance=instance,
            partition_key=day,
            tags={BACKFILL_TAG: sharing},
            raise_on_error=False,
        )
        for day in DAYS
    ]
    assert [result.success for result in results] == [True, False, False, False]
    assert list(made) == DAYS[:1]
    for result in results[1:]:
        assert "BudgetExceeded" in result.failure_data_for_node("days").error.to_string()
        messages = [entry.user_message for entry in instance.all_logs(result.run_id)]
        assert not any("launching" in message for message in messages)
    with Ledger(default_url()) as ledger:
        assert Decimal("0.01") <= limit - ledger.left_usd(account, "") <= limit


def test_a_range_of_partitions_is_one_pool_and_each_partition_has_its_share(instance: Any, days: Any) -> None:
    """A backfill of one run makes all partitions in one step. The costs of its partitions, and the observations, add
    up to the bill.
    """
    compute = SkywardResource(provider=sky.Local(price_per_hour=36.0))
    result = dg.materialize(
        [days],
        resources={"compute": compute},
        instance=instance,
        tags={"dagster/asset_partition_range_start": "mon", "dagster/asset_partition_range_end": "thu"},
    )
    assert len(set(made.values())) == 1
    events = [event.materialization for event in result.get_asset_materialization_events()]
    assert sorted(event.partition for event in events) == sorted(DAYS)
    assert {event.metadata[POOL_ID].value for event in events} == set(made.values())
    costs = [event.metadata[COST_USD].value for event in events]
    observed = [
        entry.asset_observation.metadata
        for entry in instance.all_logs(result.run_id, of_type=dg.DagsterEventType.ASSET_OBSERVATION)
    ]
    others = [metadata[OTHER_COST_USD].value for metadata in observed if OTHER_COST_USD in metadata]
    bill = sum(sky.cost_of(sky.Work(system="dagster", run=result.run_id)).values())
    assert min(costs) > 0
    assert all(other >= 0 for other in others)  # none if the machine ended within a second that was billed before
    assert sum(costs) + sum(others) == pytest.approx(bill, abs=1e-6)
