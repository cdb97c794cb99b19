"""Checkpoints: a process may be killed at any point, and the newest complete one is found."""

import signal
import subprocess
import sys
from pathlib import Path

import skyward_core as sky
from tests.unit.distributed.test_checkpoint import names

SAVES = """
import os, sys
import skyward_core as sky
left = int(sys.argv[2])
def count(event, args):
    global left
    if event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree") and armed:
        left -= 1
        if left < 0:
            os.kill(os.getpid(), 9)
armed = False
sys.addaudithook(count)
found = sky.checkpoint(sys.argv[1], keep=1)
found.save(1, "one")
armed = True
found.save(2, "two")
"""


def test_a_process_may_be_killed_at_any_point_of_saving(tmp_path: Path):
    loaded = []
    for point in range(200):
        path = tmp_path / str(point)
        process = subprocess.run([sys.executable, "-c", SAVES, path, str(point)], check=False, timeout=60)
        found = sky.checkpoint(path)
        loaded.append(found.load())
        if process.returncode == 0:
            break
        assert process.returncode == -signal.SIGKILL
        found.save(3, "three")
        assert (found.load(), names(path)[0]) == ("three", "step")
    assert loaded == sorted(loaded)
    assert set(loaded) == {"one", "two"}
    assert len(loaded) > 8
