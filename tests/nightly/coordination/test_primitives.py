"""Locks, events, queues, semaphores and variables in calls on two nodes, and in the program."""

import signal
import subprocess
import sys
import threading

import pytest

import skyward_core as sky
from tests.conftest import wait_until
from tests.system.coordination.test_primitives import (  # noqa: F401 - fixtures
    SOON_SECONDS,
    own_pool,
    raises,
)


def test_the_lock_of_a_program_that_is_killed_is_free(own_pool: sky.ComputePool) -> None:
    """Another program attaches to the pool, takes the lock, and dies."""
    code = (
        "import os, signal, sys, skyward_core as sky\n"
        "pool = sky.ComputePool.attach(sys.argv[1])\n"
        "sky.Lock('attached', pool=pool).acquire()\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    lock = sky.Lock("attached", pool=own_pool)
    done = subprocess.run([sys.executable, "-c", code, own_pool.lease.model_dump_json()], timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert lock.acquire(timeout=SOON_SECONDS)
    lock.release()


def test_a_wait_in_the_program_ends_with_the_pool_object(own_pool: sky.ComputePool) -> None:
    """It raises, and nothing is left of it."""
    with sky.ComputePool.attach(own_pool.lease) as pool:
        event, errors = sky.Event("never", pool=pool), list[BaseException]()

        def wait() -> None:
            try:
                event.wait()
            except sky.PoolClosed as error:
                errors.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        wait_until(lambda: pool.coordination().number() > 1, "the request")
    thread.join(60)
    assert len(errors) == 1
    with pytest.raises(sky.PoolClosed):
        event.is_set()
