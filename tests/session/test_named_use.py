"""One process's use of a pool with a name, on a ledger whose answers get lost: the pool always gets a steward again."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import skyward_core as sky
from skyward_core.errors import LedgerError
from skyward_core.ledger.names_policy import Join
from skyward_core.session.named_use import NamedUse
from skyward_core.spec import PoolSpec
from skyward_core.work import NO_WORK
from tests.ledger.test_names import opened

LEASE_SECONDS = 3600.0
"""The thread of the renewal does nothing during a test: the test renews."""


def use_of(**terms: Any) -> NamedUse:
    return NamedUse(PoolSpec(name="nightly", lease_seconds=LEASE_SECONDS, **terms), [sky.Local()], NO_WORK)


@pytest.fixture
def use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[NamedUse]:
    """This process has joined a pool whose opener has left."""
    monkeypatch.setenv("SKYWARD_LEDGER", f"sqlite:///{tmp_path}/ledger.db")
    mine = use_of()
    opened(mine.ledger, terms=mine.terms, lease_seconds=LEASE_SECONDS)
    assert isinstance(mine.claim("sky-b", time.monotonic() + 10), Join)
    mine.ledger.names.leave("nightly", "a")
    yield mine
    mine.left()


def lost_answer(monkeypatch: pytest.MonkeyPatch, owner: object, name: str, *, is_done: bool) -> None:
    """The ledger does not answer this call, after or without having done it; later ones it answers."""
    real: Callable[..., Any] = getattr(owner, name)

    def fail(*arguments: Any) -> None:
        monkeypatch.setattr(owner, name, real)
        if is_done:
            real(*arguments)
        raise LedgerError("the server is being restarted")

    monkeypatch.setattr(owner, name, fail)


def vacancies(use: NamedUse) -> list[int]:
    """Return a list that grows with each renewal which finds that this process is to become the steward."""
    found: list[int] = []
    use.on_vacant = lambda: found.append(1)
    return found


def test_a_process_whose_resignation_was_lost_takes_the_pool_again(
    use: NamedUse, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No other process can: the ledger names it, and it lives."""
    found = vacancies(use)
    assert use.take_stewardship()
    epoch = use.guard.epoch
    lost_answer(monkeypatch, use.ledger.stewards, "resign", is_done=False)
    use.resign()
    assert not use.guard.is_certain
    use.renew()
    assert found == [1]
    assert use.take_stewardship()
    assert (use.guard.is_certain, use.guard.epoch) == (True, epoch)
    use.renew()
    assert found == [1]


def test_a_process_that_did_not_learn_that_it_is_the_steward_takes_the_pool_again(
    use: NamedUse, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = vacancies(use)
    lost_answer(monkeypatch, use.ledger.stewards, "take", is_done=True)
    with pytest.raises(LedgerError, match="being restarted"):
        use.take_stewardship()
    use.resign()
    use.renew()
    assert found == [1]
    assert use.take_stewardship()
    assert use.guard.is_certain


def test_a_steward_is_told_of_no_vacancy(use: NamedUse) -> None:
    found = vacancies(use)
    assert use.take_stewardship()
    use.renew()
    assert (found, use.guard.is_certain) == ([], True)
