"""The trigger's side of a deferred task, with pools that misbehave: outages, cuts, ends, and a user who is quicker."""

import importlib.util
import threading
from typing import Any

import pytest

from tests.unit.integrations.test_airflow_follower import (  # noqa: F401 - fixtures
    Pool,
    follower,
    pool,
)

if importlib.util.find_spec("airflow") is None:
    pytest.skip("Airflow is not installed", allow_module_level=True)

import skyward_core as sky
from airflow_provider_skyward.call_follower import ATTACH_AT_ONCE


def test_a_triggerer_does_not_attach_to_all_pools_at_once(pool: Pool) -> None:
    """After its restart it has hundreds of deferred tasks. One that is left while it waits makes no connection."""
    begun, may_go_on, most = threading.Semaphore(0), threading.Event(), 0
    lock = threading.Lock()
    attaching = [0]
    attach = pool.attach

    def slow(pool_id: str, **options: Any) -> Any:
        nonlocal most
        with lock:
            attaching[0] += 1
            most = max(most, attaching[0])
        begun.release()
        assert may_go_on.wait(60)
        with lock:
            attaching[0] -= 1
            return attach(pool_id, **options)

    pool.attach = slow  # type: ignore[method-assign]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sky.ComputePool, "attach", pool.attach)
        followers = [follower(0) for _ in range(3 * ATTACH_AT_ONCE)]
        threads = [threading.Thread(target=one.look) for one in followers]
        for thread in threads:
            thread.start()
        for _ in range(ATTACH_AT_ONCE):
            assert begun.acquire(timeout=60)
        for one in followers:
            one.leave()
        may_go_on.set()
        for thread in threads:
            thread.join()
    assert (most, pool.attached, pool.closed) == (ATTACH_AT_ONCE, ATTACH_AT_ONCE, ATTACH_AT_ONCE)
