"""One process's use of a pool with a name, on a ledger whose answers get lost: the pool always gets a steward again."""

import logging
import logging.handlers
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import skyward_core as sky
from skyward_core.concurrency.threads import PeriodicThread
from skyward_core.errors import LedgerError
from skyward_core.ledger.names_policy import Join, NameState, NotSteward, Rent, Usage
from skyward_core.machines.owner import Owner
from skyward_core.providers.base import kind_of
from skyward_core.session import named_use
from skyward_core.session.named_use import EACH_ITS_OWN, NamedUse, terms_of
from skyward_core.session.steward_term import RENEW_SECONDS, Gap, LedgerContact
from skyward_core.spec import PoolSpec
from skyward_core.wire.protocol import ENDING_SECONDS
from skyward_core.work import NO_WORK

LEASE_SECONDS = 3600.0


@pytest.fixture
def use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[NamedUse]:
    """This process has joined a pool whose opener has left. No thread renews: the test does."""
    monkeypatch.setenv("SKYWARD_LEDGER", f"sqlite:///{tmp_path}/ledger.db")
    monkeypatch.setattr(PeriodicThread, "start", lambda _: None)
    mine = NamedUse(PoolSpec(name="nightly", lease_seconds=LEASE_SECONDS), [sky.Local()], NO_WORK)
    its = {"owner": Owner.here(), "terms": mine.terms, "keep_warm_seconds": 0.0, "lease_seconds": LEASE_SECONDS}
    rented = mine.ledger.names.claim("nightly", "sky-a", "a", **its)
    assert isinstance(rented, Rent)
    end = mine.ledger.names.now() + timedelta(seconds=120)
    mine.ledger.open_pool("sky-a", owner=Owner.here(), provider={}, spec_json="{}", lease_expires_at=end)
    mine.ledger.names.opened("nightly", rented.epoch)
    assert isinstance(mine.claim("sky-b", time.monotonic() + 10), Join)
    mine.ledger.names.leave("nightly", "a")
    yield mine
    mine.left()


class Clock:
    """The clock of the process and of its ledger; `passes` is called with each pause."""

    def __init__(self, use: NamedUse, monkeypatch: pytest.MonkeyPatch) -> None:
        self.began = datetime.now(UTC)
        self.seconds = 0.0
        self.passes: Callable[[], object] = lambda: None
        monkeypatch.setattr(use.term, "_clock", lambda: self.seconds)
        monkeypatch.setattr(use.ledger.names._database, "clock", lambda: self.began + timedelta(seconds=self.seconds))
        awake = time.monotonic()
        monkeypatch.setattr(use.ledger.names._database, "_awake", lambda: awake + self.seconds)
        monkeypatch.setattr(named_use, "time", SimpleNamespace(sleep=self.sleep, monotonic=time.monotonic))
        monkeypatch.setattr(use, "_contact", LedgerContact(5.0))
        use.renew()

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds
        self.passes()


@pytest.fixture
def clock(use: NamedUse, monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(use, monkeypatch)


def joined(use: NamedUse) -> None:
    """Another process, of a machine that this one does not see, has joined with a lease of 120 s."""
    owner = Owner("bob", "server", "boot", "1", 4712, "1")
    use.ledger.names.claim(
        "nightly", "sky-c", "c", owner=owner, terms=use.terms, keep_warm_seconds=0.0, lease_seconds=120.0
    )


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


@pytest.mark.parametrize("answer", ["free", "busy", "away", "broken"])
def test_the_calls_of_a_dead_client_end_with_a_renewal_that_does_not_wait_for_them(
    answer: str, use: NamedUse, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It has left when its slots are free, not before. One that cannot be ended yet is said once, and asked again."""
    joined(use)
    client = next(one for one in use.ledger.names.clients("sky-a") if one.id == "c")
    ended: list[str] = []
    waits: list[float] = []

    def end_client(topic: str, seconds: float) -> tuple[bool, dict[str, Any]]:
        waits.append(seconds)
        if answer in ("away", "broken"):
            raise {"away": sky.NodeLost("the head"), "broken": OSError("closed")}[answer]
        return answer == "free", {}

    monkeypatch.setattr(use.ledger.names, "ended_by", lambda *_: [replace(client, topic="t")])
    monkeypatch.setattr(use.ledger.names, "ended", lambda client_id, _: ended.append(client_id))
    dispatcher = SimpleNamespace(members=SimpleNamespace(nodes={}))
    cluster: Any = SimpleNamespace(topic="mine", dispatcher=dispatcher, end_client=end_client)
    with caplog.at_level(logging.WARNING, "skyward"):
        use.measure(lambda: Usage(0, 0.0), cluster)
        assert use.take_stewardship()
        use.renew()
    assert ended == (["c", "c"] if answer == "free" else [])
    assert waits == [ENDING_SECONDS, named_use.RENEWAL_WAIT_SECONDS]
    assert [record.message.count("it is dead") for record in caplog.records] == ([1] if answer == "free" else [1, 0])


@pytest.mark.parametrize("lost", ["release", "take"])
def test_a_process_whose_answer_was_lost_takes_the_pool_again(
    lost: str, use: NamedUse, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of its release, or of its taking the pool. No other process can: the ledger names it, and it lives."""
    found = vacancies(use)
    if lost == "release":
        assert use.take_stewardship()
    lost_answer(monkeypatch, use.ledger.stewards, lost, is_done=lost == "take")
    if lost == "take":
        with pytest.raises(LedgerError, match="being restarted"):
            use.take_stewardship()
    use.release_stewardship()
    assert not use.term.is_certain
    use.renew()
    assert found == [1]
    assert use.take_stewardship()
    use.renew()
    assert (use.term.is_certain, found) == (True, [1])


@pytest.mark.parametrize("is_renewed", [True, False])
def test_after_an_outage_of_the_ledger_the_first_that_leaves_lets_others_renew_their_rows(
    is_renewed: bool, use: NamedUse, clock: Clock
) -> None:
    """A process that renews nothing is then waited for: the pool goes on for the other one, and `close` goes on."""
    joined(use)
    clock.seconds = 200.0
    if is_renewed:
        use.renew()
    clock.passes = lambda: clock.seconds > 203.0 and use.ledger.names.renew("c", 120.0)
    assert use.leave() is NameState.IN_USE
    assert 203.0 < clock.seconds < 205.0
    assert [client.id for client in use.ledger.names.clients("sky-a") if client.left_at is None] == ["c"]


def test_a_process_that_is_the_last_one_after_an_outage_ends_the_pool(use: NamedUse, clock: Clock) -> None:
    """After the time in which others would have renewed their rows; asking twice makes it no longer."""
    joined(use)
    clock.seconds = 200.0
    assert use.is_last()
    assert use.leave() is NameState.CLOSING
    assert 200.0 + RENEW_SECONDS <= clock.seconds < 202.0 + RENEW_SECONDS


def test_without_an_outage_a_process_whose_row_has_run_out_is_not_waited_for(use: NamedUse, clock: Clock) -> None:
    joined(use)
    while clock.seconds < 200.0:
        clock.seconds += 5.0
        use.renew()
    assert use.leave() is NameState.CLOSING
    assert clock.seconds == 200.0


def state_of(use: NamedUse) -> tuple[NameState, str]:
    row = use.ledger.names.named("nightly")
    assert row is not None
    return row.state, row.steward


@pytest.mark.parametrize("is_lost", [False, True], ids=["it releases the pool", "its release is lost"])
def test_a_steward_that_ends_the_pool_at_a_limit_says_so_first(
    is_lost: bool, use: NamedUse, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its renewals go on until the end. Then it keeps the pool no more, does not take it again, and releases it until the
    ledger knows: else the next process would wait as long as this one lives.
    """
    lost: list[int] = []
    found, use.on_lost = vacancies(use), lambda: lost.append(1)
    assert use.take_stewardship()
    use.begin_to_end()
    use.renew()
    assert (state_of(use)[0], use.term.is_certain) == (NameState.CLOSING, True)
    if is_lost:
        lost_answer(monkeypatch, use.ledger.stewards, "release", is_done=False)
    use.release_stewardship()
    use.renew()
    assert state_of(use) == (NameState.CLOSING, "")
    use.ledger.end_pool("sky-a")
    use.renew()
    assert (found, lost) == ([], [])


def test_a_limit_holds_without_the_ledger_as_long_as_the_stewardship_is_certain(
    use: NamedUse, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not longer: then another process may keep the pool."""
    assert use.take_stewardship()
    lost_answer(monkeypatch, use.ledger.stewards, "close", is_done=False)
    use.begin_to_end()
    assert state_of(use)[0] is NameState.IN_USE
    clock.seconds += LEASE_SECONDS
    lost_answer(monkeypatch, use.ledger.names, "renew", is_done=False)
    with pytest.raises(LedgerError, match="being restarted"):
        use.begin_to_end()


def test_a_process_that_is_not_the_steward_any_more_ends_no_pool(use: NamedUse) -> None:
    """It is certain still, because its renewal has not looked yet."""
    assert use.take_stewardship()
    joined(use)
    assert use.term.epoch is not None
    use.ledger.stewards.release("nightly", state_of(use)[1], use.term.epoch)
    use.ledger.stewards.take("nightly", "c")
    with pytest.raises(NotSteward):
        use.begin_to_end()
    assert state_of(use) == (NameState.IN_USE, "c")


def test_a_steward_that_was_replaced_by_one_that_has_left_loses_the_pool_first(use: NamedUse) -> None:
    """What it keeps is old. It may take the pool again with the next renewal."""
    lost: list[int] = []
    found, use.on_lost = vacancies(use), lambda: lost.append(1)
    assert use.take_stewardship()
    term = use.term
    assert term.epoch is not None
    joined(use)
    use.ledger.stewards.release("nightly", state_of(use)[1], term.epoch)
    use.ledger.stewards.take("nightly", "c")
    use.ledger.names.leave("nightly", "c")
    use.renew()
    assert (lost, found) == ([1], [])
    use.renew()
    assert (lost, found) == ([1], [1])
    assert use.take_stewardship()
    assert (term.is_certain, use.term.is_certain, use.term.epoch) == (False, True, term.epoch + 2)


def contact(*answers: float) -> LedgerContact:
    """A process that renews its row every five seconds, and got these answers."""
    it = LedgerContact(5.0)
    for at in answers:
        it.answered(at)
    return it


@pytest.mark.parametrize(
    ("answers", "now", "expected"),
    [
        ((), 1000.0, None),
        ((100.0,), 110.0, None),
        ((100.0,), 111.0, Gap(100.0, 111.0)),
        ((100.0, 105.0, 115.0), 116.0, None),
        ((100.0, 105.0, 116.0), 116.0, Gap(105.0, 116.0)),
        ((100.0, 105.0, *range(116, 142, 5)), 115.0 + RENEW_SECONDS, Gap(105.0, 116.0)),
        ((100.0, 105.0, *range(116, 142, 5)), 116.0 + RENEW_SECONDS, None),
        ((100.0, 120.0, 125.0, 150.0), 151.0, Gap(100.0, 150.0)),
        ((100.0, 120.0, *range(125, 156, 5), 180.0), 181.0, Gap(155.0, 180.0)),
        ((100.0, 200.0, 150.0), 201.0, Gap(100.0, 200.0)),
    ],
)
def test_the_gap_after_which_others_may_not_have_renewed(
    answers: tuple[float, ...], now: float, expected: Gap | None
) -> None:
    """A second gap soon after the first belongs to it: a process may have had no chance in between."""
    assert contact(*answers).gap(now) == expected


@pytest.mark.parametrize(("display", "is_printed"), [("log", True), ("spinner", True), ("quiet", False)])
def test_warnings_are_logged_as_those_of_any_pool(
    display: Any,
    is_printed: bool,
    use: NamedUse,
    unconfigured: logging.Logger,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """By the logger "skyward"; a program that has not configured logging gets those of a quiet pool nowhere, one that
    has gets all of them.
    """
    quiet = NamedUse(use.spec.with_(display=display), [sky.Local()], NO_WORK)
    monkeypatch.setattr(quiet, "_client_id", "gone")
    for name in ("closed", "leave_unfinished"):
        monkeypatch.setattr(quiet.ledger.names, name, _no_answer)
    quiet.left()
    assert ("the ledger does not know yet that 'nightly' was left" in capfd.readouterr().err) == is_printed
    heard = logging.handlers.BufferingHandler(100)
    unconfigured.addHandler(heard)
    quiet.leave_unfinished(sky.NodeLost("it is gone"))
    assert [record.name for record in heard.buffer] == ["skyward"]


def _no_answer(*_: object) -> None:
    raise LedgerError("no answer")


SHARED_TERMS = """
    accelerator architecture budget concurrency cpu env image keep_warm machine max_cost max_hourly_cost max_lifetime
    memory nodes scale_down_after scale_up_after secrets selection spot timeout volume
"""


def test_for_each_field_it_is_decided_whether_processes_that_share_a_pool_may_differ_in_it() -> None:
    """A new field would else refuse processes that differ in it."""
    undecided = sorted(set(sky.PoolSpec.model_fields) - EACH_ITS_OWN - set(SHARED_TERMS.split()))
    assert not undecided, f"add {undecided} to EACH_ITS_OWN of session/named_use.py, or to SHARED_TERMS here"
    assert not EACH_ITS_OWN & set(SHARED_TERMS.split())


def test_paths_of_one_computer_are_no_terms_of_a_shared_name(tmp_path: Path) -> None:
    """The same project lies in another folder on each computer, and each reaches the same hosts in its own way."""
    ways: list[dict[str, str]] = [
        {},
        {"key": "/home/ada/key", "known_hosts": "/home/ada/known", "config": "/home/ada/c"},
    ]
    terms: list[dict[str, Any]] = []
    for folder, way, text in (("here", ways[0], "x"), ("there", ways[1], "x"), ("third", ways[0], "y")):
        (tmp_path / folder / "data").mkdir(parents=True)
        (tmp_path / folder / "data" / "file.txt").write_text(text)
        spec = sky.PoolSpec.of(name="n", image=sky.Image(includes=[str(tmp_path / folder / "data")]))
        terms.append(terms_of(spec, [sky.Hosts("10.0.0.5", **way)]))
    assert terms[0] == terms[1]
    assert terms[0] != terms[2], "the content is another"
    assert terms_of(spec, [sky.Hosts("10.0.0.6")]) != terms[2]
    assert str(tmp_path) not in str(terms)


def test_each_path_and_profile_of_a_provider_is_known_to_be_of_one_computer() -> None:
    """A new field of such a name must be declared."""
    for name in sky.PROVIDERS:
        kind = kind_of(name)
        paths = {
            field for field in kind.model_fields if field in {"ssh_key", "key", "known_hosts", "config", "profile"}
        }
        assert paths <= kind.of_one_computer, name
