"""The rules of tests/unit: its audit hook, with a suite of a few lines."""

import os
import subprocess
import sys
from pathlib import Path

from tests.unit import conftest as rules

ROOT = Path(__file__).parents[2]
DOES = {
    "time.sleep": "time.sleep(0)",
    "subprocess.Popen": "subprocess.Popen(['true'])",
    "os.fork": "os.fork() or os._exit(0)",
    "os.forkpty": "pty.fork()[0] or os._exit(0)",
    "os.posix_spawn": "os.posix_spawn('/bin/true', ['true'], {})",
    "os.system": "os.system('true')",
    "os.kill": "os.kill(os.getpid(), 0)",
    "os.killpg": "os.killpg(os.getpgid(0), 0)",
    "socket.connect": "socket.socket().connect(('127.0.0.1', 9))",
    "_thread.start_new_thread": "_thread.start_new_thread(print, ())",
    "_thread.start_joinable_thread": "threading.Thread(target=print).start()",
}
SUITE = """
import _thread, os, pty, pytest, socket, subprocess, threading, time

def test_passes(): pass

@pytest.mark.parametrize("event", {does!r})
def test_fails(event):
    try:
        exec({does!r}[event])
    except RuntimeError:
        pass  # a test that has caught the refusal fails all the same
"""


def test_each_event_fails_its_test_and_names_the_rule(tmp_path: Path) -> None:
    assert DOES.keys() == rules.REFUSED.keys()
    folder = tmp_path / "unit"
    folder.mkdir()
    (folder / "conftest.py").write_text((ROOT / "tests/unit/conftest.py").read_text())
    (folder / "test_suite.py").write_text(SUITE.format(does=DOES))
    argv = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-rA",
        "--tb=no",
        "-n",
        "0",
        "-p",
        "no:cacheprovider",
        "-c",
        "/dev/null",
        folder,
    ]
    environ = os.environ | {"COLUMNS": "300"}  # pytest cuts its lines
    done = subprocess.run(argv, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
    assert f"{len(DOES)} failed, 1 passed" in done.stdout, done.stdout
    for event, rule in rules.REFUSED.items():
        reason = f"a unit test must not {rule} ({event}): it belongs to tests/system"
        assert f"test_fails[{event}] - Failed: {reason}" in done.stdout
