"""`run_max_cost`: what a kill leaves of it."""

import subprocess
import sys
from pathlib import Path

import skyward_core as sky
from skyward_core.ledger.ledger import Ledger, default_url
from skyward_core.ledger.pools import account_of_run
from skyward_core.ledger.rows import CostBy
from tests.waiting import wait_until

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

        wait_until(has_ended, "the reaper to end the pool")
        assert ledger.open_reservations(pool_id=pool_id) == []
        (row,) = ledger.cost_rows(CostBy.POOL, pool_id=pool_id)
        left = ledger.left_usd(account_of_run(work), "")
        assert left == 5 - row.cost_usd < 5
        spec = sky.PoolSpec.of(provider=sky.Local(price_per_hour=3.6), nodes=2, display="quiet")
        with sky.ComputePool.from_spec(spec, work=work, run_max_cost=5.0) as pool:
            (made,) = ledger.open_reservations(pool_id=pool.lease.pool_id)
            assert ledger.left_usd(account_of_run(work), "") == left - made.reserved_usd
