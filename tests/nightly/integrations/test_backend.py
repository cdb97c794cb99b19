"""joblib and scikit-learn on a pool: two local nodes with two slots each, which the tests of this file share."""

import functools
import os
import signal
import time
from pathlib import Path
from typing import Any

import joblib
import pytest
from joblib import Parallel, delayed

import skyward_core as sky
from tests.conftest import RecordedEvents, shared
from tests.system.integrations.test_backend import (  # noqa: F401 - fixtures
    RECORDED,
    SLOTS,
    active,
    assert_equal_searches,
    digits,
    in_background,
    length_when_allowed,
    pool,
    pool_of_four,
    score_when_allowed,
    search,
)
from tests.waiting import WAIT_SECONDS, wait_until

pytestmark = [pytest.mark.timeout(600)]
FROZEN_SECONDS = 20.0


def test_the_scheduler_is_frozen_during_a_search(
    pool: sky.ComputePool, digits: tuple[Any, Any], tmp_path: Path
) -> None:
    """Sleeps: the freeze has to last, longer than the engine waits for the answer to a ping."""
    scheduler: Any = pool.dask_client().run_on_scheduler(os.getpid)
    found = in_background(lambda: search(digits, functools.partial(score_when_allowed, str(tmp_path))), pool)
    wait_until(lambda: len(list(tmp_path.glob("runs-*"))) == SLOTS, "fits in every slot")
    os.kill(scheduler, signal.SIGSTOP)
    try:
        (tmp_path / "go").touch()
        time.sleep(FROZEN_SECONDS)
        assert not found.done()
    finally:
        os.kill(scheduler, signal.SIGCONT)
    with joblib.parallel_config(backend="threading"):
        assert_equal_searches(found.result(WAIT_SECONDS), search(digits))


def test_n_jobs_limits_what_runs_at_once(tmp_path: Path) -> None:
    """joblib hands over twice as many batches. The pool, which has more slots, gets two of them."""
    recorded = RecordedEvents()
    one = sky.ComputePool(provider=sky.Local(), concurrency=SLOTS, display="quiet", on_event=recorded)
    with shared(one) as pool, sky.joblib_backend(pool):
        parallel = Parallel(n_jobs=2, batch_size=1, return_as="generator")
        found = parallel(delayed(length_when_allowed)(str(tmp_path), [0.0]) for _ in range(8))
        wait_until(lambda: len(list(tmp_path.glob("runs-*"))) == 2, "two tasks")
        wait_until(lambda: recorded.of(sky.CallProgress)[-1].submitted == 2, "the progress")
        assert parallel.n_dispatched_batches == 4
        (tmp_path / "go").touch()
        assert list(found) == [1] * 8


def test_a_pool_of_one_slot_runs_the_tasks(tmp_path: Path) -> None:
    """joblib itself would run them in this process if there was only one job."""
    outside = active()
    with sky.ScikitLearnPool(provider=sky.Local(), display="quiet"):
        assert os.getpid() not in Parallel(n_jobs=-1)(delayed(os.getpid)() for _ in range(3))
    assert active() == outside
