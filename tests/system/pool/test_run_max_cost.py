"""`run_max_cost`: what it needs, checked before anything is rented; and what a kill leaves."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import skyward_core as sky
from skyward_core.ledger.ledger import Ledger, default_url
from skyward_core.ledger.rows import CostBy
from skyward_core.ledger.run_accounts import account_of_run
from tests.conftest import wait_until

SPEC = sky.PoolSpec.of(provider=sky.Local(), display="quiet")
NIGHTLY = sky.Work(system="cron", workflow="nightly", run="2026-11-24")


@pytest.mark.parametrize(
    ("spec", "work", "usd", "words"),
    [
        (SPEC, sky.Work(system="cron"), 5.0, "needs the run"),
        (SPEC.with_(name="team"), NIGHTLY, 5.0, "name='team'"),
        (SPEC, NIGHTLY, 0, "positive"),
        (SPEC, NIGHTLY, -1.5, "positive"),
        (SPEC, NIGHTLY, float("nan"), "positive"),
    ],
)
def test_a_limit_of_a_run_that_cannot_be_is_refused(spec: sky.PoolSpec, work: sky.Work, usd: Any, words: str) -> None:
    with pytest.raises(sky.BadRequest, match=words):
        sky.ComputePool.from_spec(spec, work=work, run_max_cost=usd)


@pytest.mark.parametrize("usd", [None, 5, 0.25, float("inf")])
def test_other_limits_are_taken(usd: float | None) -> None:
    """Also for a pool without a run if there is none."""
    work = sky.Work() if usd is None else NIGHTLY
    assert sky.ComputePool.from_spec(SPEC, work=work, run_max_cost=usd).work == work


KILLED = """
import sys, time
import skyward_core as sky

work = sky.Work(system="cron", workflow="nightly", run=sys.argv[1])
spec = sky.PoolSpec.of(provider=sky.Local(price_per_hour=3.6), display="quiet")
pool = sky.ComputePool.from_spec(spec, work=work, run_max_cost=5.0).open()
print(pool.lease.pool_id, flush=True)
time.sleep(600)
"""


def test_a_killed_process_leaves_its_run_the_money_that_it_has_not_spent(tmp_path: Path) -> None:
    """The reaper ends the machines and settles, also without a budget. Another pool of the run reserves from the rest."""
    run = f"killed-{tmp_path.name}"
    work = sky.Work(system="cron", workflow="nightly", run=run)
    with Ledger(default_url()) as ledger:
        with subprocess.Popen([sys.executable, "-c", KILLED, run], stdout=subprocess.PIPE, text=True) as killed:
            assert killed.stdout is not None
            pool_id = killed.stdout.readline().strip()
            assert sum(one.reserved_usd for one in ledger.open_reservations(pool_id=pool_id)) > 0
            killed.kill()

        def has_ended() -> bool:
            entry = ledger.pool(pool_id)
            return entry is not None and entry.ended_at is not None

        wait_until(has_ended, "the reaper to end the pool", seconds=120)
        assert ledger.open_reservations(pool_id=pool_id) == []
        (row,) = ledger.cost_rows(CostBy.POOL, pool_id=pool_id)
        left = ledger.left_usd(account_of_run(work), "")
        assert left == 5 - row.cost_usd < 5
        spec = SPEC.with_(provider=sky.Local(price_per_hour=3.6), nodes=2)
        with sky.ComputePool.from_spec(spec, work=work, run_max_cost=5.0) as pool:
            (made,) = ledger.open_reservations(pool_id=pool.lease.pool_id)
            assert ledger.left_usd(account_of_run(work), "") == left - made.reserved_usd
