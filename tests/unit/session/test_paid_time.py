"""What an attached process reserves for a detached pool, and what `skyward warm NAME --for 2h` reserves and refuses."""

import math
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from skyward_core.errors import BadRequest, BudgetExceeded, NodeLost
from skyward_core.events.events import BudgetWarning
from skyward_core.ledger.ledger import Ledger
from skyward_core.ledger.metering import projection_of
from skyward_core.ledger.names_policy import Join, NameState
from skyward_core.ledger.rows import Account, Bucket, Intent, Period, Price, ResourceKind, ResourceRequest
from skyward_core.machines.owner import Owner
from skyward_core.session import warm_pools
from skyward_core.session.clock import LeasePayments, seconds_covered
from skyward_core.session.warm_pools import keep_warm

LEASE_SECONDS = 100.0
TEAM = "team"
ENDING_SECONDS = 1.0
"""Of `sky.Local`."""


class Clock:
    """A time that the test sets."""

    def __init__(self) -> None:
        self.time = datetime(2026, 11, 21, 12, tzinfo=UTC)

    def __call__(self) -> datetime:
        return self.time

    def later(self, seconds: float) -> None:
        self.time += timedelta(seconds=seconds)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def ledger(tmp_path: Path, clock: Clock) -> Iterator[Ledger]:
    with Ledger(f"sqlite:///{tmp_path}/ledger.db", clock=clock) as opened:
        yield opened


def rent(ledger: Ledger, clock: Clock, lease_seconds: float, account: str | None, spec: str = "{}") -> Intent:
    """Open the pool `sky-a` with one machine for a cent a second."""
    end = clock.time + timedelta(seconds=lease_seconds)
    provider = {"name": "local"}
    ledger.open_pool(
        "sky-a", owner=Owner.here(), provider=provider, spec_json=spec, lease_expires_at=end, account=account
    )
    tags = {"skyward-pool": "sky-a", "skyward-rank": "0"}
    price = Price(Decimal(36))
    request = ResourceRequest(ResourceKind.INSTANCE, "local", "here", "skyward-1", "1", tags, end, price)
    (intent,) = ledger.intend_all("sky-a", [request])
    ledger.bind(intent, "i-1")
    return intent


# ── an attached process pays for a detached pool ─────────────────────────────────────────────────────────────────────


class Payer:
    """One attached process, its clock, and the warnings of its money."""

    def __init__(self, ledger: Ledger, clock: Clock) -> None:
        self.warnings: list[BudgetWarning] = []
        began = clock.time
        self.payments = LeasePayments(
            "sky-a",
            LEASE_SECONDS,
            self.warnings.append,  # pyright: ignore[reportArgumentType]
            lambda: ledger,
            lambda: (clock.time - began).total_seconds(),
        )

    def renewed(self) -> float | None:
        self.payments.renew()
        return self.payments.paid_seconds()


type Open = Callable[..., Payer]
type Rented = Callable[..., None]


@pytest.fixture
def detached(ledger: Ledger, clock: Clock) -> Open:
    """Opens a pool with one machine, which its opener has left; `reserved` USD are reserved from the account."""

    def open_it(limit: str = "100", reserved: str = "2", *, account: str | None = TEAM, spec: str = "{}") -> Payer:
        if account is not None:
            ledger.set_account(Account(account, Decimal(limit), Period.RUN))
        rent(ledger, clock, 200, account, spec)
        if account is not None:
            ledger.reserve(account, "sky-a", Decimal(reserved))
        return Payer(ledger, clock)

    return open_it


def test_more_is_reserved_before_the_money_ends_and_not_earlier(detached: Open, ledger: Ledger, clock: Clock) -> None:
    """With less than one and a half leases left the pool is paid for two leases again; two processes pay once."""
    payer = detached()
    other = Payer(ledger, clock)
    assert payer.renewed() == 200
    assert ledger.committed_usd("sky-a") == 2
    for _ in range(5):
        clock.later(60)
        assert (payer.renewed(), other.renewed()) == (200, 200)
    assert ledger.committed_usd("sky-a") == projection_of(ledger, "sky-a").at(clock.time + timedelta(seconds=200))
    assert payer.warnings == []


def test_the_rest_of_an_account_is_used_to_the_last_second(detached: Open, ledger: Ledger, clock: Clock) -> None:
    """Of 2.50 USD two are reserved: the machines get 50 s more, and then a warning says why they end."""
    payer = detached(limit="2.5")
    clock.later(60)
    assert payer.renewed() == 190
    assert ledger.committed_usd("sky-a") == Decimal("2.5")
    assert payer.warnings == []
    clock.later(170)
    assert [payer.renewed(), payer.renewed()] == [20, 20]
    (warning,) = payer.warnings
    assert (warning.account, warning.spent_usd) == (TEAM, pytest.approx(2.3))
    assert "'team' has 0" in warning.reason
    assert "end in 20 s" in warning.reason


@pytest.mark.parametrize(("account", "max_cost", "later", "left"), [(TEAM, 2.5, 60, 190), (None, 1.0, 80, 20)])
def test_no_machine_lives_beyond_max_cost(
    account: str | None, max_cost: float, later: float, left: float, detached: Open, ledger: Ledger, clock: Clock
) -> None:
    """Neither is more reserved than it allows. A machine is billed until it is gone."""
    payer = detached(account=account, spec=f'{{"max_cost": {max_cost}}}')
    clock.later(later)
    assert payer.renewed() == left - ENDING_SECONDS
    if account is None:
        assert "max_cost=1 is nearly used up" in payer.warnings[0].reason
    else:
        assert ledger.committed_usd("sky-a") == Decimal("2.49")


def test_a_pool_that_has_ended_or_has_no_limit_is_not_paid_for(detached: Open, ledger: Ledger, clock: Clock) -> None:
    assert detached(account=None).renewed() is None
    assert ledger.open_reservations(pool_id="sky-a") == []
    assert seconds_covered(projection_of(ledger, "none"), clock.time, Decimal(0)) > 1e8
    (intent,) = ledger.open_intents(pool_id="sky-a")
    ledger.close_all([intent.id], "it is gone")
    ledger.end_pool("sky-a")
    clock.later(60)
    assert Payer(ledger, clock).renewed() is None


def test_the_first_payment_of_a_late_process_is_for_what_is_used_already(
    detached: Open, ledger: Ledger, clock: Clock
) -> None:
    """No process pays between two triggerers: the nodes end where the money does, and no time is paid for twice."""
    payer = detached(reserved="0.5")
    clock.later(40)
    assert payer.renewed() == 200
    assert ledger.committed_usd("sky-a") == Decimal("2.4")


# ── `skyward warm`: the nodes come in at the end ─────────────────────────────────────────────────────────────────────


class Nodes:
    """Stand in for the nodes: which leases they got, and whether they answer."""

    def __init__(self) -> None:
        self.leases: list[tuple[float, bool]] = []
        self.ends: list[tuple[float, str]] = []
        self.failure: Exception | None = None

    def keep(
        self, lease: object, keys: object, seconds: float, *, is_paid: bool = False, mark: str = "", **_: float
    ) -> None:
        if self.failure is not None:
            raise self.failure
        if mark:
            self.ends.append((seconds, mark))
        else:
            self.leases.append((seconds, is_paid))


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Nodes:
    found = Nodes()
    monkeypatch.setattr(warm_pools, "_keep_nodes", found.keep)
    monkeypatch.setattr(warm_pools, "find_lease", lambda pool_id, *, ledger: (pool_id, None))
    return found


@pytest.fixture
def open_pool(ledger: Ledger, clock: Clock) -> Rented:
    """Opens the pool `sky-a` of the name "nightly" with one machine, two minutes ago."""

    def open_it(*, account: str | None = None, is_left: bool = True, **terms: Any) -> None:
        its = {"timeout": 36000.0, "max_lifetime": None, "max_cost": None, "budget": account, **terms}
        ledger.names.claim(
            "nightly", "sky-a", "a", owner=Owner.here(), terms=its, keep_warm_seconds=600, lease_seconds=120.0
        )
        intent = rent(ledger, clock, 720, account)
        ledger.names.opened("nightly", 1)
        clock.later(120)
        ledger.note_all({intent.id: {Bucket.IDLE: 120}})
        if is_left:
            assert ledger.names.leave("nightly", "a") is NameState.WARM

    return open_it


def test_a_warm_pool_stays_longer_and_never_shorter(
    ledger: Ledger, clock: Clock, open_pool: Rented, nodes: Nodes
) -> None:
    open_pool()
    assert keep_warm(ledger, "nightly", 60).warm_until == clock.time + timedelta(seconds=600)
    row = keep_warm(ledger, "nightly", 7200)
    until = clock.time + timedelta(seconds=7200)
    assert (row.state, row.warm_until, row.keep_warm_seconds) == (NameState.WARM, until, 600)
    assert nodes.leases[-1] == (7200, False)
    entry = ledger.pool("sky-a")
    assert entry is not None
    assert entry.lease_expires_at == until
    assert ledger.names.named("nightly") == row


def test_the_nodes_of_a_warm_pool_end_when_the_ledger_says_so(
    ledger: Ledger, clock: Clock, open_pool: Rented, nodes: Nodes
) -> None:
    """The time since the leave counts. If a process has come meanwhile, nothing is sent."""
    open_pool()
    clock.later(2)
    row = warm_pools.end_in_time(ledger, "nightly", "sky-a", "a")
    assert row is not None
    assert row.warm_until == clock.time + timedelta(seconds=598)
    assert nodes.ends == [(598, "a")]
    join = ledger.names.claim(
        "nightly", "sky-b", "b", owner=Owner.here(), terms=row.terms, keep_warm_seconds=600, lease_seconds=120.0
    )
    assert isinstance(join, Join)
    assert warm_pools.end_in_time(ledger, "nightly", "sky-a", "a") is None
    assert nodes.ends == [(598, "a")]


@pytest.mark.parametrize(
    ("terms", "warm_seconds", "expected"),
    [
        ({}, math.inf, 600),
        ({}, 30, 30),
        ({"timeout": 60.0}, math.inf, 60),
        ({"max_lifetime": 180.0}, math.inf, 60),
        ({"max_lifetime": 100.0}, math.inf, 0),
    ],
    ids=["keep_warm", "paid for", "timeout", "max_lifetime", "over"],
)
def test_a_warm_pool_and_its_lease_end_with_the_first_clock_of_its_nodes(
    terms: dict[str, float], warm_seconds: float, expected: float, ledger: Ledger, clock: Clock, open_pool: Rented
) -> None:
    """Its lease may have been longer. A process that joins lengthens it again."""
    open_pool(is_left=False, **terms)
    ledger.renew("sky-a", clock.time + timedelta(seconds=900))
    assert ledger.names.leave("nightly", "a", warm_seconds=warm_seconds) is NameState.WARM
    row, entry = ledger.names.named("nightly"), ledger.pool("sky-a")
    assert row is not None
    assert entry is not None
    assert row.warm_until == entry.lease_expires_at == clock.time + timedelta(seconds=expected)
    assert f"warm until {row.warm_until:%H:%M:%S} UTC, 36.00 USD/h" in warm_pools.what_stays(ledger, "nightly", "sky-a")


def test_a_process_that_joins_a_warm_pool_at_its_end_keeps_it(ledger: Ledger, clock: Clock, open_pool: Rented) -> None:
    """Its lease had the end of the warm time: a sweep would find it dead before the first renewal."""
    open_pool()
    clock.later(599.9)
    row = ledger.names.named("nightly")
    assert row is not None
    ledger.names.claim(
        "nightly", "sky-b", "b", owner=Owner.here(), terms=row.terms, keep_warm_seconds=600, lease_seconds=120.0
    )
    entry = ledger.pool("sky-a")
    assert entry is not None
    assert entry.lease_expires_at == clock.time + timedelta(seconds=120)
    assert "with 1 other process, 36.00 USD/h" in warm_pools.what_stays(ledger, "nightly", "sky-a")


def test_a_pool_in_use_is_kept_when_it_is_left(ledger: Ledger, clock: Clock, open_pool: Rented, nodes: Nodes) -> None:
    """Nothing else happens now: its processes keep the nodes, and its opener pays when it leaves."""
    open_pool(is_left=False)
    row = keep_warm(ledger, "nightly", 7200)
    assert (row.state, row.warm_until, row.keep_warm_seconds) == (NameState.IN_USE, None, 7200)
    assert nodes.leases == []
    ledger.names.leave("nightly", "a")
    assert keep_warm(ledger, "nightly", 1).warm_until == clock.time + timedelta(seconds=7200)


@pytest.mark.parametrize("how", ["ended", "condemned", "closing", "over", "no such pool"])
def test_a_pool_that_is_not_there_any_more_is_refused(
    how: str, ledger: Ledger, clock: Clock, open_pool: Rented, nodes: Nodes
) -> None:
    open_pool(is_left=how != "closing")
    match how:
        case "ended":
            ledger.end_pool("sky-a")
        case "condemned":
            ledger.condemn("sky-a", seen=clock.time + timedelta(seconds=600))
        case "over":
            clock.later(601)
        case "closing":
            ledger.names.leave("nightly", "a", may_be_warm=False)
    before = ledger.names.named("nightly")
    words = "no pool with the name" if how == "no such pool" else "has ended, or is being ended"
    with pytest.raises(BadRequest, match=words):
        keep_warm(ledger, "nonesuch" if how == "no such pool" else "nightly", 7200)
    assert ledger.names.named("nightly") == before
    assert nodes.leases == []


@pytest.mark.parametrize(
    ("terms", "words"), [({"timeout": 3600.0}, "timeout"), ({"max_lifetime": 7300.0}, "max_lifetime")]
)
def test_clocks_that_end_the_nodes_before_are_named(
    terms: dict[str, float], words: str, ledger: Ledger, open_pool: Rented, nodes: Nodes
) -> None:
    open_pool(**terms)
    with pytest.raises(BadRequest, match=words):
        keep_warm(ledger, "nightly", 7200)
    assert nodes.leases == []
    assert keep_warm(ledger, "nightly", 3600).warm_until is not None


def test_nodes_that_do_not_answer_leave_everything_as_it_was(ledger: Ledger, open_pool: Rented, nodes: Nodes) -> None:
    ledger.set_account(Account(TEAM, Decimal(100), Period.RUN))
    open_pool(account=TEAM)
    before, nodes.failure = ledger.names.named("nightly"), NodeLost("it is gone")
    with pytest.raises(NodeLost):
        keep_warm(ledger, "nightly", 3600)
    assert ledger.names.named("nightly") == before
    assert ledger.committed_usd("sky-a") == 0


def test_max_cost_ends_what_may_be_kept(ledger: Ledger, open_pool: Rented, nodes: Nodes) -> None:
    """1.20 USD were spent; 3600 more seconds and those of the end cost 36.60 USD."""
    open_pool(max_cost=37.79)
    with pytest.raises(BudgetExceeded, match=r"would have cost 37\.80\d* USD by then, and its max_cost is 37\.79"):
        keep_warm(ledger, "nightly", 3600)
    assert nodes.leases == []
    keep_warm(ledger, "nightly", 3599)
    assert nodes.leases == [(3599, True)]


def test_the_account_pays_for_the_longer_time(ledger: Ledger, open_pool: Rented, nodes: Nodes) -> None:
    """What is missing is reserved, and not what was reserved before; too little is refused with what to do."""
    ledger.set_account(Account(TEAM, Decimal("37.80"), Period.RUN))
    open_pool(account=TEAM)
    ledger.reserve(TEAM, "sky-a", Decimal(7))
    with pytest.raises(BudgetExceeded, match="skyward budget set team") as refused:
        keep_warm(ledger, "nightly", 3601)
    assert refused.value.left_usd == Decimal("30.80")
    assert nodes.leases == []
    keep_warm(ledger, "nightly", 3600)
    assert nodes.leases == [(3600, True)]
    end = ledger.names.now() + timedelta(seconds=3660)
    assert ledger.committed_usd("sky-a") == Decimal("37.80") == projection_of(ledger, "sky-a").at(end)
    keep_warm(ledger, "nightly", 3000)
    assert ledger.committed_usd("sky-a") == Decimal("37.80")
