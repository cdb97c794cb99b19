"""`make live` for a new account with 5 USD, at the fake of each cloud: it looks, rents, and loses a client to `kill -9`.

`LIVE=FOLDER` keeps what it prints, one file for each cloud.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.providers.fake_runpod import FakeRunPod
from tests.providers.fake_vastai import FakeVast
from tests.providers.fake_verda import FakeVerda
from tests.providers.hosted import Rented
from tests.system.providers.test_end_to_end import rented  # noqa: F401 - a fixture
from tests.testbed.fixtures import fleet, mirror  # noqa: F401 - fixtures

REPOSITORY = Path(__file__).parents[3]
ACCOUNT_USD, SPEND_USD = 5.0, "0.50"

pytestmark = [pytest.mark.timeout(900)]


def test_a_new_account_finds_out_what_it_lacks_and_pays_for_minutes(
    rented: Rented, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It ends with a machine that has ended itself: without a client and a reaper, within the lease. AWS and
    DigitalOcean have no balance, and pay later.
    """
    for fake in (FakeRunPod, FakeVast, FakeVerda):
        monkeypatch.setattr(fake, "usd", ACCOUNT_USD)
    name = rented.provider.name
    done = subprocess.run(
        [sys.executable, "-m", "tests.live", name, "--spend", SPEND_USD, "--record", str(tmp_path)],
        cwd=REPOSITORY,
        env={**os.environ, "AWS_EC2_METADATA_DISABLED": "true"},
        capture_output=True,
        text=True,
        check=False,
    )
    if folder := os.environ.get("LIVE"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / f"{name}.txt").write_text(done.stdout + done.stderr)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"gone +[0-9]+ s, \$0\.", done.stdout), done.stdout
    assert "abandoned  ended by itself" in done.stdout
    assert rented.alive() == set()
