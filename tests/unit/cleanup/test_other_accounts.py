"""A machine that one account's credentials do not list is not gone, because it may belong to another account."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, ClassVar

import pytest
from pydantic import PrivateAttr

import skyward_core as sky
from skyward_core.cleanup.policy import Action
from skyward_core.cleanup.release import release
from skyward_core.cleanup.sweep import ProviderListing, owner_states, sweep
from skyward_core.errors import CredentialsError
from skyward_core.ledger.ledger import Ledger
from skyward_core.machines.owner import Owner, OwnerState
from tests.cleanup.pools import CLOUD, DEAD, ELSEWHERE, HERE, CloudProvider, Time, World, entry, machine, owner_tags
from tests.ledger.fixtures import open_pool, resource_request

POOL = "sky-1"
LONG_AGO = datetime(2026, 11, 21, tzinfo=UTC)


class Quiet(sky.Provider):
    """Lists nothing, for the credentials of any account."""

    name: ClassVar[str] = "quiet"
    _account: str = PrivateAttr(default="")
    _ended: list[str] = PrivateAttr(default_factory=list)

    def of(self, account: str) -> Quiet:
        self._account = account
        return self

    def account(self) -> str:
        return self._account

    def instances(self, pool_id: str | None = None) -> list[sky.Instance]:
        return []

    def terminate(self, ids: Sequence[str]) -> None:
        self._ended += ids


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    """A ledger with a dead pool that has one machine in the account "theirs"."""
    with Ledger(f"sqlite:///{tmp_path / 'ledger.db'}") as ledger:
        open_pool(ledger, POOL, DEAD, provider=Quiet().to_json(), lease_expires_at=LONG_AGO)
        ledger.bind(ledger.intend(POOL, replace(resource_request(POOL, POOL), provider="quiet")), "i-1")
        ledger.turn_to(POOL, Quiet().to_json(), "theirs")
        yield ledger


def states(ledger: Ledger) -> tuple[bool, bool]:
    """Return whether the pool has ended, and whether the entry of its machine is open."""
    entry = ledger.pool(POOL)
    assert entry is not None
    return entry.ended_at is not None, bool(ledger.open_intents())


def test_a_sweep_with_other_credentials_leaves_the_entry_open(ledger: Ledger) -> None:
    report = sweep(ledger, [Quiet().of("ours")], is_dry_run=False)
    assert states(ledger) == (False, True)
    (failure,) = report.failures
    assert failure.pool_id == POOL
    assert isinstance(failure.error, CredentialsError)
    assert "'theirs'" in str(failure)
    assert "'ours'" in str(failure)
    assert sweep(ledger, [Quiet().of("theirs")], is_dry_run=False).failures == ()
    assert states(ledger) == (True, False)


def test_a_pool_is_not_stopped_with_other_credentials(ledger: Ledger) -> None:
    ours = Quiet().of("ours")
    with pytest.raises(CredentialsError, match="'theirs'"):
        release(POOL, ledger=ledger, credentials=ours)
    assert ours._ended == []
    assert states(ledger)[1]
    release(POOL, ledger=ledger, credentials=Quiet().of("theirs"))
    assert states(ledger) == (True, False)


def test_an_entry_without_an_account_needs_no_matching_account(ledger: Ledger) -> None:
    ledger.turn_to(POOL, Quiet().to_json(), "")
    assert sweep(ledger, [Quiet().of("another")], is_dry_run=False).failures == ()
    assert states(ledger) == (True, False)


def test_a_provider_that_cannot_return_its_account_is_not_swept(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:

    def fail(_: Any) -> str:
        raise sky.ProviderFailed("it does not answer")

    monkeypatch.setattr(Quiet, "account", fail)
    report = sweep(ledger, [Quiet()], is_dry_run=False)
    assert states(ledger) == (False, True)
    assert [type(failure.error) for failure in report.failures] == [sky.ProviderFailed]


class Keyed(CloudProvider):
    """Identifies the account by its key, as RunPod and Verda do."""

    name: ClassVar[str] = "keyed"
    _key: str = PrivateAttr(default="old")

    def account(self) -> str:
        return self._key


def rotated(tmp_path: Path, owner: Owner, *, lease_seconds: float, lives_by_lease: bool) -> tuple[Ledger, Keyed]:
    """A pool with one machine, and the provider with a key that is newer than the pool."""
    provider = Keyed(folder=str(tmp_path))
    ledger = Ledger(f"sqlite:///{tmp_path / 'keyed.db'}")
    now = datetime.now(UTC)
    expires_at = now + timedelta(seconds=lease_seconds)
    open_pool(ledger, POOL, owner, provider=provider.to_json(), lease_expires_at=expires_at)
    ledger.turn_to(POOL, provider.to_json(), "old")
    if lives_by_lease:
        ledger.live_by_lease(POOL, expires_at)
    world = World(ledger, provider, Time())
    world.rent(POOL, owner=owner)
    provider._key = "new"
    return ledger, provider


@pytest.mark.parametrize("include_unknown", [False, True])
@pytest.mark.parametrize("owner", [DEAD, ELSEWHERE], ids=["its opener has ended", "its opener is elsewhere"])
def test_a_live_pool_stays_when_the_key_was_changed(tmp_path: Path, owner: Owner, include_unknown: bool) -> None:
    ledger, provider = rotated(tmp_path, owner, lease_seconds=3600, lives_by_lease=owner is DEAD)
    with ledger:
        report = sweep(ledger, [provider], is_dry_run=False, min_age_seconds=0, include_unknown=include_unknown)
        assert [finding.action for finding in report.findings] == [Action.LEAVE]
        assert "'old'" in report.findings[0].reason
        assert "'new'" in report.findings[0].reason
        assert len(provider.instances()) == 1


@pytest.mark.parametrize(
    ("owner", "lease_seconds"), [(ELSEWHERE, -1), (DEAD, 3600)], ids=["its lease ran out", "its owner is dead"]
)
def test_a_dead_pool_is_ended_when_the_key_was_changed(tmp_path: Path, owner: Owner, lease_seconds: float) -> None:
    """Its entry stays open, because the new key may not list all its machines."""
    ledger, provider = rotated(tmp_path, owner, lease_seconds=lease_seconds, lives_by_lease=owner is ELSEWHERE)
    with ledger:
        report = sweep(ledger, [provider], is_dry_run=False)
        assert [finding.action for finding in report.ended] == [Action.END]
        assert provider.instances() == []
        assert states(ledger) == (False, True)
        entry = ledger.pool(POOL)
        assert entry is not None
        assert entry.condemned_at is not None
        assert [type(failure.error) for failure in report.failures] == [CredentialsError]


def test_the_states_of_all_owners_are_known() -> None:
    """Those of pools, of pools of other accounts, and of machines by their tags."""
    tagged = machine("fake-0", "sky-9", tags=owner_tags(ELSEWHERE))
    others = {"sky-2": (entry("sky-2", HERE), "another account")}
    states = owner_states(ProviderListing(CLOUD, "ours", [tagged], {"sky-1": entry()}, other_accounts=others))
    assert (states[DEAD], states[HERE]) == (OwnerState.DEAD, OwnerState.ALIVE)
    assert [state for owner, state in states.items() if owner.host == "elsewhere"] == [OwnerState.UNKNOWN]
