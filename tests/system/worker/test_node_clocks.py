"""The node's clocks, lease and marks: values in, a reason out. No test here waits."""

import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

from skyward_core.worker.node_clocks import read_lease, write_lease


def test_many_clients_may_extend_a_lease_at_once(tmp_path: Path) -> None:
    """Clients that write at the same moment neither fail nor shorten what another has written."""
    threads = [
        threading.Thread(target=lambda base=base: [write_lease(tmp_path, base + step) for step in range(100)])
        for base in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert read_lease(tmp_path) == 106
    assert os.listdir(tmp_path) == ["lease"]


# ── paid time ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_mark_is_seen_across_a_fork() -> None:
    """The supervisor sees what the runner notes, also after the runner's death."""
    alone("""
        busy = BusyFlag()
        pid = os.fork()
        if pid == 0:
            busy.begin()
            os._exit(0)
        os.waitpid(pid, 0)
        assert busy.look()
    """)


def test_spared_processes_are_not_killed() -> None:
    """All descendants of a process are killed, also orphans and those in other sessions, except earlier processes
    and their descendants.
    """
    alone("""
        adopt_orphans()
        kept = subprocess.Popen(["sh", "-c", "sleep 1000 & echo; wait"], stdout=subprocess.PIPE)
        kept.stdout.readline()
        spared = frozenset(birth for birth in descendants() if birth.pid == kept.pid)
        for text in ("sleep 1000 & echo; wait", "sleep 1000 & echo", "setsid sleep 1000 & echo"):
            subprocess.Popen(["sh", "-c", text], stdout=subprocess.PIPE).stdout.readline()
        assert len(descendants()) > 4, descendants()
        assert kill_descendants(spared, 10.0) == set()
        assert descendants(spared) == set()
        assert len(descendants()) == 2, descendants()
        assert kill_descendants(frozenset(), 10.0) == set()
        assert descendants() == set()
    """)


def alone(script: str) -> None:
    """Run a script in a separate process, without this one's threads and children."""
    imports = "import os, subprocess\nfrom skyward_core.worker.keeper import adopt_orphans\nfrom skyward_core.worker.node_clocks import *\n"
    done = subprocess.run(
        [sys.executable, "-c", imports + textwrap.dedent(script)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
