"""Locks, events, queues, semaphores and variables in calls on two nodes, and in the program."""

import signal
import subprocess
import sys

import skyward_core as sky
from tests.system.coordination.test_primitives import SOON_SECONDS, own_pool  # noqa: F401 - fixtures


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
