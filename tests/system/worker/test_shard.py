"""`shard` gives each row to exactly one worker; `instance_info` says which worker this is."""

import os
import subprocess
import sys

from skyward_core.worker.info import ENV, to_env
from tests.unit.worker.test_shard import (
    place,
)


def test_a_process_started_by_the_call_sees_the_same() -> None:
    """The place travels in the environment, so a child process has the rank and the accelerators of its parent."""
    code = "from skyward_core.worker.info import *; i = instance_info(); print(i.rank, i.world_size, i.job_id, current_accelerator())"
    env = {**os.environ, ENV: to_env(place(1, 2))}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["1", "2", "job-1", "H100"]
