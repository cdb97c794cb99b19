"""The check against a real cloud with money to spend, on this machine: a pool, and a pool whose client is killed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path


def test_a_machine_whose_client_and_reaper_were_killed_is_watched_until_it_has_ended(tmp_path: Path) -> None:
    """Both get SIGKILL, and nobody else terminates the machine. One of this computer ends with its owner, one of a cloud
    by its lease.
    """
    done = subprocess.run(
        [sys.executable, "-m", "tests.live", "local", "--spend", "0.01", "--record", str(tmp_path)],
        env=os.environ | {"SKYWARD_LEDGER": f"sqlite:///{tmp_path / 'ledger.db'}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"gone +[0-9]+ s, \$0", done.stdout)
    assert re.search(r"abandoned  ended by itself [0-9]+ s after kill -9 of its client and reaper", done.stdout)
    assert json.loads((tmp_path / "local.json").read_text()) == []
