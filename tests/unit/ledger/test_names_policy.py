"""What a process that opens a pool by name does, for each state of the name."""

from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from skyward_core.ledger.names_policy import (
    SKEW_SECONDS,
    Client,
    Join,
    LookAgain,
    NamedPool,
    NameFacts,
    NameState,
    Refused,
    Rent,
    Standing,
    Wait,
    decide_claim,
    ended_by,
    is_earlier_attempt,
    is_last,
    may_be_condemned,
    may_come_back,
    standing,
)
from skyward_core.ledger.rows import PoolEntry
from skyward_core.machines.owner import Owner, OwnerState
from skyward_core.work import Work

NOON = datetime(2026, 11, 23, 12, tzinfo=UTC)
ADA = Owner("ada", "laptop", "boot", "1", 4711, "1")
BOB = Owner("bob", "server", "boot", "1", 4712, "1")
TERMS = {"nodes": 2}
ROW = NamedPool("nightly", "sky-1", TERMS, NameState.IN_USE, "a", 3, 600.0)
POOL = PoolEntry("sky-1", ADA, {}, "{}", NOON, NOON + timedelta(seconds=120), lives_by_lease=True)
CLIENT = Client("a", "sky-1", ADA, NOON, NOON + timedelta(seconds=120))
OTHER = Client("b", "sky-1", BOB, NOON, NOON + timedelta(seconds=120))
LONG = Client("b", "sky-1", BOB, NOON, NOON + timedelta(seconds=9999))


def facts(
    row: NamedPool = ROW,
    pool: PoolEntry | None = POOL,
    clients: tuple[Client, ...] = (CLIENT,),
    *,
    seconds: float = 0.0,
    states: Mapping[Owner, OwnerState] | None = None,
) -> NameFacts:
    """What is known so many seconds after noon."""
    return NameFacts(row, pool, clients, NOON + timedelta(seconds=seconds), states or {ADA: OwnerState.ALIVE})


def in_state(state: NameState, **changes: Any) -> NamedPool:
    return replace(ROW, state=state, **changes)


DEAD = {ADA: OwnerState.DEAD}


def test_a_name_without_a_pool_or_whose_pool_has_ended_is_free() -> None:
    """Whatever its state says: the pool may have ended itself."""
    assert decide_claim(None, TERMS) == Rent(1)
    ended = replace(POOL, ended_at=NOON)
    for state in NameState:
        assert decide_claim(facts(in_state(state), ended), TERMS) == Rent(4)


@pytest.mark.parametrize("state", [NameState.IN_USE, NameState.WARM])
def test_a_pool_in_use_or_warm_is_joined_on_the_same_terms(state: NameState) -> None:
    row = in_state(state)
    assert decide_claim(facts(row), {**TERMS, "machine": None}) == Join(row)
    claim = decide_claim(facts(row), {"nodes": 3, "machine": "big"})
    assert claim == Refused("sky-1", {"nodes": (2, 3), "machine": (None, "big")})


@pytest.mark.parametrize("state", [NameState.OPENING, NameState.CLOSING])
def test_a_pool_that_is_opened_or_closed_is_waited_for(state: NameState) -> None:
    claim = decide_claim(facts(in_state(state), None), {"nodes": 3})
    assert isinstance(claim, Wait)
    assert claim.pool_id == "sky-1"


@pytest.mark.parametrize("state", [NameState.OPENING, NameState.CLOSING])
def test_a_pool_with_a_dead_opener_or_closer_is_taken_over_at_once(state: NameState) -> None:
    claim = decide_claim(facts(in_state(state), states=DEAD), TERMS)
    assert isinstance(claim, Rent)
    assert (claim.epoch, claim.dead_pool) == (4, "sky-1")
    assert "dead" in claim.why_dead


@pytest.mark.parametrize("state", [NameState.OPENING, NameState.CLOSING])
def test_another_client_does_not_stand_for_a_dead_opener(state: NameState) -> None:
    bob = Client("b", "sky-1", BOB, NOON, NOON + timedelta(seconds=120))
    states = {ADA: OwnerState.DEAD, BOB: OwnerState.ALIVE}
    assert isinstance(decide_claim(facts(in_state(state), clients=(CLIENT, bob), states=states), TERMS), Rent)


@pytest.mark.parametrize(
    ("state", "seconds", "lives"),
    [
        (OwnerState.ALIVE, 119, True),
        (OwnerState.ALIVE, 121, False),
        (OwnerState.UNKNOWN, 119, True),
        (OwnerState.UNKNOWN, 121, False),
        (OwnerState.DEAD, 0, False),
    ],
)
def test_how_long_a_client_lives(state: OwnerState, seconds: float, lives: bool) -> None:
    assert CLIENT.lives(NOON + timedelta(seconds=seconds), state) is lives
    assert not replace(CLIENT, left_at=NOON).lives(NOON, state)


def test_a_pool_whose_opener_has_died_is_joined_as_long_as_its_lease_lasts() -> None:
    assert isinstance(decide_claim(facts(states=DEAD, seconds=119), TERMS), Join)
    assert isinstance(decide_claim(facts(states=DEAD, seconds=121), TERMS), Rent)


def test_a_pool_with_a_living_client_is_joined_although_its_lease_seems_to_be_over() -> None:
    bob = Client("b", "sky-1", BOB, NOON, NOON + timedelta(seconds=300))
    assert isinstance(decide_claim(facts(clients=(bob,), seconds=200, states={}), TERMS), Join)


def test_the_lease_of_a_pool_has_the_allowance_for_the_clocks_of_machines() -> None:
    for seconds, expected in ((120 + SKEW_SECONDS - 1, Join), (120 + SKEW_SECONDS + 1, Rent)):
        found = replace(facts(states=DEAD, seconds=seconds), lease_skew_seconds=SKEW_SECONDS)
        assert isinstance(decide_claim(found, TERMS), expected)


def test_a_warm_pool_is_joined_until_its_time_is_over() -> None:
    row = in_state(NameState.WARM, warm_until=NOON + timedelta(seconds=60), steward="")
    pool = replace(POOL, lease_expires_at=NOON + timedelta(seconds=600))
    gone = (replace(CLIENT, left_at=NOON),)
    assert isinstance(decide_claim(facts(row, pool, gone, seconds=59), TERMS), Join)
    claim = decide_claim(facts(row, pool, gone, seconds=61), TERMS)
    assert isinstance(claim, Rent)
    assert claim.dead_pool == "sky-1"


@pytest.mark.parametrize("pool", [replace(POOL, condemned_at=NOON), None], ids=["condemned", "not in the ledger"])
def test_a_pool_that_is_not_there_is_not_joined(pool: PoolEntry | None) -> None:
    assert isinstance(decide_claim(facts(pool=pool), TERMS), Rent)


def test_the_last_client_is_the_one_beside_which_no_other_lives() -> None:
    bob = Client("b", "sky-1", BOB, NOON, NOON + timedelta(seconds=120))
    both = facts(clients=(CLIENT, bob))
    assert not is_last(both, "a")
    assert not is_last(both, "b")
    assert is_last(facts(clients=(CLIENT, replace(bob, left_at=NOON))), "a")
    assert is_last(facts(clients=(CLIENT, bob), states={BOB: OwnerState.DEAD, ADA: OwnerState.ALIVE}), "a")


@pytest.mark.parametrize(
    ("seconds", "clients", "expected"),
    [
        (0, (CLIENT,), True),
        (0, (CLIENT, LONG), False),
        (120 + SKEW_SECONDS - 1, (LONG,), False),
        (120 + SKEW_SECONDS, (LONG,), True),
        (420, (CLIENT, LONG), True),
    ],
)
def test_who_cannot_reach_a_pool_condemns_it_if_nobody_reaches_it(
    seconds: float, clients: tuple[Client, ...], expected: bool
) -> None:
    found = replace(facts(clients=clients, seconds=seconds), lease_skew_seconds=SKEW_SECONDS)
    assert may_be_condemned(found, "a") is expected


@pytest.mark.parametrize(
    ("other", "states", "expected"),
    [
        (OTHER, {}, True),
        (OTHER, {BOB: OwnerState.ALIVE}, True),
        (OTHER, {BOB: OwnerState.DEAD}, False),
        (replace(OTHER, left_at=NOON), {}, False),
        (replace(OTHER, lease_expires_at=NOON + timedelta(seconds=99)), {}, False),
        (LONG, {}, False),
    ],
)
def test_who_may_come_back_after_an_outage_of_the_ledger(
    other: Client, states: Mapping[Owner, OwnerState], expected: bool
) -> None:
    found = facts(clients=(CLIENT, other), seconds=200.0, states=states)
    assert may_come_back(found, "a", 100.0) is expected
    assert not may_come_back(facts(clients=(other,), seconds=200.0, states=states), "a", 100.0), "it has left itself"


BOTH = (CLIENT, LONG)
ALIVE = {ADA: OwnerState.ALIVE, BOB: OwnerState.ALIVE}


@pytest.mark.parametrize(
    ("row", "pool", "clients", "seconds", "states", "expected"),
    [
        (ROW, POOL, BOTH, 0, ALIVE, Standing.OTHER),
        (replace(ROW, steward="b"), POOL, BOTH, 0, ALIVE, Standing.HELD),
        (replace(ROW, steward=""), POOL, BOTH, 0, ALIVE, Standing.VACANT),
        (ROW, POOL, BOTH, 0, {**ALIVE, ADA: OwnerState.DEAD}, Standing.VACANT),
        (ROW, POOL, BOTH, 119, ALIVE, Standing.OTHER),
        (ROW, POOL, BOTH, 121, ALIVE, Standing.VACANT),
        (ROW, POOL, BOTH, 119, {**ALIVE, ADA: OwnerState.UNKNOWN}, Standing.OTHER),
        (ROW, POOL, BOTH, 121, {**ALIVE, ADA: OwnerState.UNKNOWN}, Standing.VACANT),
        (replace(ROW, steward="gone"), POOL, BOTH, 0, ALIVE, Standing.VACANT),
        (ROW, POOL, (replace(CLIENT, left_at=NOON), LONG), 0, ALIVE, Standing.VACANT),
        (replace(ROW, steward="", state=NameState.OPENING), POOL, BOTH, 0, ALIVE, Standing.OTHER),
        (replace(ROW, steward="", state=NameState.CLOSING), POOL, BOTH, 0, ALIVE, Standing.OTHER),
        (replace(ROW, steward="", state=NameState.WARM), POOL, BOTH, 0, ALIVE, Standing.OTHER),
        (replace(ROW, steward=""), replace(POOL, ended_at=NOON), BOTH, 0, ALIVE, Standing.GONE),
        (replace(ROW, steward=""), replace(POOL, condemned_at=NOON), BOTH, 0, ALIVE, Standing.GONE),
        (replace(ROW, steward=""), None, BOTH, 0, ALIVE, Standing.GONE),
        (replace(ROW, steward="b", state=NameState.OPENING), None, BOTH, 0, ALIVE, Standing.HELD),
        (replace(ROW, steward="b"), POOL, (CLIENT, replace(LONG, left_at=NOON)), 0, ALIVE, Standing.GONE),
        (replace(ROW, steward="", pool_id="sky-2"), POOL, BOTH, 0, ALIVE, Standing.GONE),
        (replace(ROW, steward=""), POOL, (CLIENT,), 0, ALIVE, Standing.GONE),
        (replace(ROW, steward=""), POOL, BOTH, 9999, ALIVE, Standing.OTHER),
    ],
)
def test_what_a_client_is_to_the_steward(
    row: NamedPool,
    pool: PoolEntry | None,
    clients: tuple[Client, ...],
    seconds: float,
    states: Mapping[Owner, OwnerState],
    expected: Standing,
) -> None:
    assert standing(facts(row, pool, clients, seconds=seconds, states=states), "b") is expected
    assert standing(None, "b") is Standing.GONE


def test_clients_that_are_silent_by_the_servers_clock_alone_are_in_doubt() -> None:
    """The server's clock was set forward by an hour. Nothing is condemned before a second look."""
    later = facts(clients=(CLIENT, OTHER, LONG), seconds=3600.0, states={ADA: OwnerState.DEAD})
    found = replace(later, machine_now=NOON)
    silent = (OTHER.id, OTHER.lease_expires_at)
    assert found.in_doubt() == {silent}, "one is dead, one is not silent"
    both = replace(found, clients=(CLIENT, OTHER), row=in_state(NameState.CLOSING))
    assert decide_claim(both, TERMS) == LookAgain("sky-1", frozenset({silent}))
    assert decide_claim(both, TERMS, [(OTHER.id, NOON)]) == LookAgain("sky-1", frozenset({silent}))
    assert isinstance(decide_claim(both, TERMS, [silent]), Rent)
    assert not may_be_condemned(both, CLIENT.id)
    by_both_clocks = replace(both, machine_now=both.now)
    assert by_both_clocks.in_doubt() == frozenset()
    assert isinstance(decide_claim(by_both_clocks, TERMS), Rent)
    assert may_be_condemned(by_both_clocks, CLIENT.id)


EARLIER = Work(system="airflow", workflow="train", run="1", task="fit", attempt="1")


@pytest.mark.parametrize(
    ("theirs", "ours", "expected"),
    [
        ({}, {"attempt": "2"}, True),
        ({"attempt": "2"}, {"attempt": "10"}, True),
        ({"attempt": "2"}, {"attempt": "2"}, False),
        ({"attempt": "3"}, {"attempt": "2"}, False),
        ({"attempt": ""}, {"attempt": "2"}, False),
        ({"attempt": "x"}, {"attempt": "2"}, False),
        ({"task_run": "0"}, {"attempt": "2", "task_run": "1"}, False),
        ({"run": ""}, {"run": "", "attempt": "2"}, False),
        ({"task": ""}, {"task": "", "attempt": "2"}, False),
    ],
)
def test_an_earlier_attempt_is_of_the_same_work(theirs: dict[str, str], ours: dict[str, str], expected: bool) -> None:
    """Of one task of one run: other processes may share a pool, and a work without a run or a try names none."""
    assert is_earlier_attempt(replace(EARLIER, **theirs), replace(EARLIER, **ours)) is expected


def test_whose_calls_a_client_ends() -> None:
    """Those of earlier attempts, and of processes that are seen to be dead, unless they have left."""
    mine = replace(CLIENT, id="mine", work=replace(EARLIER, attempt="2"))
    attempt = replace(OTHER, id="attempt", work=EARLIER)
    dead = Client("dead", "sky-1", Owner("eve", "laptop", "boot", "1", 4713, "1"), NOON, NOON + timedelta(seconds=9))
    left = replace(attempt, id="left", left_at=NOON)
    found = facts(clients=(mine, attempt, dead, left, OTHER), states={dead.owner: OwnerState.DEAD})
    assert [client.id for client in ended_by(mine, found)] == ["attempt", "dead"]
