"""`make live` for a new account with 5 USD, at the fake of each cloud: what it prints when it looks and when it rents.

A machine whose client was killed is in test_end_to_end.py: `make live` needs a second process for that, which finds no
fake. `LIVE=FOLDER` keeps what it prints, one file for each cloud.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests import live
from tests.providers.fake_runpod import FakeRunPod
from tests.providers.fake_vastai import FakeVast
from tests.providers.fake_verda import FakeVerda
from tests.providers.hosted import Rented
from tests.system.providers.test_end_to_end import rented  # noqa: F401 - a fixture
from tests.testbed.fixtures import fleet, mirror  # noqa: F401 - fixtures

ACCOUNT_USD, SPEND_USD = 5.0, 0.5

pytestmark = [pytest.mark.timeout(400)]


@pytest.fixture
def poor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accounts have 5 USD. AWS and DigitalOcean have no balance, and are paid later."""
    for fake in (FakeRunPod, FakeVast, FakeVerda):
        monkeypatch.setattr(fake, "usd", ACCOUNT_USD)


@pytest.mark.usefixtures("poor")
def test_a_new_account_finds_out_what_it_has_and_rents_for_minutes(
    rented: Rented, capsys: pytest.CaptureFixture[str]
) -> None:
    live.look(rented.provider)
    live.spend(rented.provider, SPEND_USD, None)
    printed = capsys.readouterr()
    if folder := os.environ.get("LIVE"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / f"{rented.provider.name}.txt").write_text(printed.out + printed.err)
    assert "machines   0 of ours" in printed.out
    assert re.search(r"gone +[0-9]+ s, \$0\.[0-9]+, left: \[\]", printed.out), printed.out
    assert rented.alive() == set()
    if rented.provider.name in ("runpod", "vastai", "verda"):
        assert re.search(r"(balance|credit)[^\n]*\b5(\.0+)?\b", printed.out), printed.out
