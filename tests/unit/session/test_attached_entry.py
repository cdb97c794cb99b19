"""An attached client renews the lease of its pool in the ledger, and retries after an outage of the ledger."""

import logging
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from skyward_core.errors import LeaseLost, LedgerError
from skyward_core.ledger.ledger import Ledger, default_url
from skyward_core.machines.owner import Owner
from skyward_core.session.attached import KeptEntry

POOL = "sky-1"
LEASE_SECONDS = 3600.0


@pytest.fixture
def ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ledger]:
    """This process's ledger, with a detached pool of which a minute remains."""
    monkeypatch.setenv("SKYWARD_LEDGER", f"sqlite:///{tmp_path / 'ledger.db'}")
    monkeypatch.setattr(logging.getLogger("skyward"), "propagate", True)
    with Ledger(default_url()) as ledger:
        dead, end = replace(Owner.here(), started="1"), datetime.now(UTC) + timedelta(seconds=60)
        ledger.open_pool(POOL, owner=dead, provider={}, spec_json="{}", lease_expires_at=end)
        yield ledger


@pytest.fixture
def kept() -> Iterator[KeptEntry]:
    """The entry of that pool, as an attached client uses it."""
    entry = KeptEntry(POOL, LEASE_SECONDS)
    yield entry
    entry.close()


def is_renewed(ledger: Ledger) -> bool:
    entry = ledger.pool(POOL)
    assert entry is not None
    return entry.lease_expires_at > datetime.now(UTC) + timedelta(seconds=LEASE_SECONDS - 60)


def away(*_: Any, **__: Any) -> Any:
    raise LedgerError("the server is being restarted")


@pytest.mark.parametrize("verb", ["__init__", "pool", "renew"])
def test_an_outage_does_not_mean_that_the_pool_is_unknown(
    ledger: Ledger, kept: KeptEntry, verb: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A later renewal succeeds, and the outage is logged once."""
    with monkeypatch.context() as patch:
        patch.setattr(Ledger, verb, away)
        kept.renew()
        kept.renew()
    assert not is_renewed(ledger)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    kept.renew()
    assert is_renewed(ledger)


def test_the_lease_of_a_condemned_pool_is_not_renewed(
    ledger: Ledger, kept: KeptEntry, caplog: pytest.LogCaptureFixture
) -> None:
    """Its machines are being ended, which is logged once."""
    entry = ledger.pool(POOL)
    assert entry is not None
    ledger.condemn(POOL, seen=entry.lease_expires_at)
    assert kept.lost is None
    kept.renew()
    kept.renew()
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert not is_renewed(ledger)
    assert isinstance(kept.lost, LeaseLost), "the search for a scheduler asks for it"


def test_leaving_while_the_ledger_is_opened_leaves_nothing_open(
    ledger: Ledger, kept: KeptEntry, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[str] = []
    real, real_close = Ledger.__init__, Ledger.close

    def slow(self: Ledger, url: str) -> None:
        kept.close()
        real(self, url)

    monkeypatch.setattr(Ledger, "__init__", slow)
    monkeypatch.setattr(Ledger, "close", lambda self: (closed.append(self.url), real_close(self))[1])
    kept.renew()
    assert len(closed) == 1
    assert not is_renewed(ledger)
