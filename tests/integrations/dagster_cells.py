"""Dagster's part of the matrix of uses: an asset for each kind of pool and each end of a step."""

import os
import time
from pathlib import Path
from typing import Any

import dagster as dg

import skyward_core as sky
from dagster_skyward import SkywardResource

KINDS = ("own", "opener", "joiner")
"""The pool of the step alone; one with a name that it opens, and one that another process has opened."""
ENDS = ("ends", "fails", "times_out", "cancelled", "sigkill", "sigterm")
RETRIED = "joiner_retried"
PRICE = 36.0


def here() -> Path:
    return Path(os.environ["DAGSTER_HOME"])


def resource(cell: str) -> SkywardResource:
    named = {} if cell.startswith("own") else {"sharing": "deployment", "name": cell, "keep_warm": 60}
    return SkywardResource(provider=sky.Local(price_per_hour=PRICE), lease_seconds=120, **named)


def hold(cell: str, folder: str, seconds: float, *, fails: bool) -> None:
    """A call that says where it runs, and ends or not."""
    (Path(folder) / f"{cell}.runs").write_text(str(os.getpid()))
    time.sleep(seconds)
    if fails:
        raise LookupError("the payload's own error")


def hold_once(cell: str, folder: str) -> bool:
    """The first call runs until it is ended. The second one returns whether the first one has ended."""
    first = Path(folder) / f"{cell}.runs"
    if not first.exists():
        hold(cell, folder, 600, fails=False)
    time.sleep(0.3)
    return not Path(f"/proc/{first.read_text()}").exists()


def asset_of(cell: str) -> Any:
    how = cell.partition("_")[2]

    @dg.asset(
        name=cell,
        required_resource_keys={cell},
        partitions_def=dg.StaticPartitionsDefinition([f"of_{cell}"]),
        retry_policy=dg.RetryPolicy(max_retries=1) if cell == RETRIED else None,
    )
    def asset(context: dg.AssetExecutionContext) -> None:
        (here() / f"{cell}.pid").write_text(str(os.getpid()))
        compute: SkywardResource = getattr(context.resources, cell)
        if cell == RETRIED:
            assert compute.run(context, hold_once, cell, str(here())).value, "both attempts ran at the same time"
            return
        seconds = 0.3 if how in {"ends", "fails"} else 600
        call = sky.PendingCompute(hold, (cell, str(here()), seconds), {"fails": how == "fails"})
        with compute.pool(context) as pool:
            call.timeout(0.5 if how == "times_out" else None) >> pool

    return asset


CELLS = [*(f"{kind}_{how}" for kind in KINDS for how in ENDS), RETRIED]
defs = dg.Definitions(
    assets=[asset_of(cell) for cell in CELLS],
    jobs=[dg.define_asset_job(f"job_{cell}", selection=[cell]) for cell in CELLS],
    resources={cell: resource(cell) for cell in CELLS},
)
