"""`skyward warm NAME --for 2h`: what is refused, what is reserved, and what is written; the nodes come in at the end."""

from collections.abc import Callable
from datetime import timedelta
from decimal import Decimal
from typing import Any

import pytest

from skyward_core.errors import BadRequest, BudgetExceeded, NodeLost
from skyward_core.ledger.ledger import Ledger
from skyward_core.ledger.names_policy import NameState
from skyward_core.ledger.projection import projection_of
from skyward_core.ledger.rows import Account, Bucket, Period, Price
from skyward_core.machines.owner import Owner
from skyward_core.session import warm_pools
from skyward_core.session.warm_pools import keep_warm
from tests.system.ledger.test_names import LEASE_SECONDS
from tests.unit.ledger.test_ledger import (  # noqa: F401 - fixtures
    PROVIDER,
    Clock,
    clock,
    ledger,
    postgresql_server,
    postgresql_url,
    resource_request,
    sqlite_url,
    url,
)

TERMS: dict[str, Any] = {"timeout": 36000.0, "max_lifetime": None, "max_cost": None, "budget": None}
PRICE = Price(Decimal(36))
"""A cent a second."""


class Nodes:
    """Stand in for the nodes: which leases they got, and whether they answer."""

    def __init__(self) -> None:
        self.leases: list[tuple[float, bool]] = []
        self.failure: Exception | None = None

    def extend(self, lease: object, keys: object, seconds: float, *, is_paid: bool) -> None:
        if self.failure is not None:
            raise self.failure
        self.leases.append((seconds, is_paid))


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Nodes:
    found = Nodes()
    monkeypatch.setattr(warm_pools, "_extend_nodes", found.extend)
    monkeypatch.setattr(warm_pools, "find_lease", lambda pool_id, *, ledger: (pool_id, None))
    return found


type Open = Callable[..., None]


@pytest.fixture
def open_pool(ledger: Ledger, clock: Clock) -> Open:
    """Opens the pool `sky-a` of the name "nightly" with one machine, two minutes ago."""

    def open_it(*, account: str | None = None, is_left: bool = True, **terms: Any) -> None:
        names, its = ledger.names, {**TERMS, "budget": account, **terms}
        names.claim(
            "nightly", "sky-a", "a", owner=Owner.here(), terms=its, keep_warm_seconds=600, lease_seconds=LEASE_SECONDS
        )
        ledger.open_pool(
            "sky-a",
            owner=Owner.here(),
            provider=PROVIDER,
            spec_json="{}",
            lease_expires_at=clock.time + timedelta(seconds=720),
            account=account,
        )
        names.opened("nightly", 1)
        (intent,) = ledger.intend_all("sky-a", [resource_request("1", "sky-a", PRICE)])
        ledger.bind(intent, "i-1")
        clock.time += timedelta(seconds=120)
        ledger.note_all({intent.id: {Bucket.IDLE: 120}})
        if is_left:
            assert names.leave("nightly", "a") is NameState.WARM

    return open_it


def test_a_shorter_time_changes_nothing(ledger: Ledger, clock: Clock, open_pool: Open, nodes: Nodes) -> None:
    open_pool()
    assert keep_warm(ledger, "nightly", 60).warm_until == clock.time + timedelta(seconds=600)


def test_a_pool_in_use_is_kept_when_it_is_left(ledger: Ledger, clock: Clock, open_pool: Open, nodes: Nodes) -> None:
    """Nothing else happens now: its processes keep the nodes, and its opener pays when it leaves."""
    open_pool(is_left=False)
    row = keep_warm(ledger, "nightly", 7200)
    assert (row.state, row.warm_until, row.keep_warm_seconds) == (NameState.IN_USE, None, 7200)
    assert nodes.leases == []
    ledger.names.leave("nightly", "a")
    named = ledger.names.named("nightly")
    assert named is not None
    assert named.warm_until == clock.time + timedelta(seconds=7200)


def test_a_name_without_a_pool_is_refused(ledger: Ledger) -> None:
    with pytest.raises(BadRequest, match="no pool with the name 'nonesuch'"):
        keep_warm(ledger, "nonesuch", 60)


@pytest.mark.parametrize("how", ["ended", "condemned", "closing", "over"])
def test_a_pool_that_is_not_there_any_more_is_refused(
    how: str, ledger: Ledger, clock: Clock, open_pool: Open, nodes: Nodes
) -> None:
    open_pool(is_left=how != "closing")
    if how == "ended":
        ledger.end_pool("sky-a")
    elif how == "condemned":
        ledger.condemn("sky-a", seen=clock.time + timedelta(seconds=600))
    elif how == "over":
        clock.time += timedelta(seconds=601)
    else:
        ledger.names.leave("nightly", "a", may_be_warm=False)
    before = ledger.names.named("nightly")
    with pytest.raises(BadRequest, match="has ended, or is being ended"):
        keep_warm(ledger, "nightly", 7200)
    assert ledger.names.named("nightly") == before
    assert nodes.leases == []


@pytest.mark.parametrize(
    ("terms", "words"), [({"timeout": 3600.0}, "timeout"), ({"max_lifetime": 7300.0}, "max_lifetime")]
)
def test_clocks_that_end_the_nodes_before_are_named(
    terms: dict[str, float], words: str, ledger: Ledger, open_pool: Open, nodes: Nodes
) -> None:
    open_pool(**terms)
    with pytest.raises(BadRequest, match=words):
        keep_warm(ledger, "nightly", 7200)
    assert nodes.leases == []
    assert keep_warm(ledger, "nightly", 3600).warm_until is not None


def test_the_nodes_that_do_not_answer_leave_everything_as_it_was(
    ledger: Ledger, clock: Clock, open_pool: Open, nodes: Nodes
) -> None:
    ledger.set_account(Account("team", Decimal(100), Period.RUN))
    open_pool(account="team")
    before, nodes.failure = ledger.names.named("nightly"), NodeLost("it is gone")
    with pytest.raises(NodeLost):
        keep_warm(ledger, "nightly", 3600)
    assert ledger.names.named("nightly") == before
    assert ledger.committed_usd("sky-a") == 0


def test_max_cost_ends_what_may_be_kept(ledger: Ledger, open_pool: Open, nodes: Nodes) -> None:
    """1.20 USD were spent; 3600 more seconds and those of the end cost 36.60 USD."""
    open_pool(max_cost=37.79)
    with pytest.raises(BudgetExceeded, match=r"would have cost 37\.80\d* USD by then, and its max_cost is 37\.79"):
        keep_warm(ledger, "nightly", 3600)
    assert nodes.leases == []
    keep_warm(ledger, "nightly", 3599)
    assert nodes.leases == [(3599, True)]


def test_the_account_pays_for_the_longer_time(ledger: Ledger, open_pool: Open, nodes: Nodes) -> None:
    """What is missing is reserved, and not what was reserved before; too little is refused with what to do."""
    ledger.set_account(Account("team", Decimal("37.80"), Period.RUN))
    open_pool(account="team")
    ledger.reserve("team", "sky-a", Decimal(7))
    with pytest.raises(BudgetExceeded, match="skyward budget set team") as refused:
        keep_warm(ledger, "nightly", 3601)
    assert refused.value.left_usd == Decimal("30.80")
    assert nodes.leases == []
    keep_warm(ledger, "nightly", 3600)
    assert nodes.leases == [(3600, True)]
    assert (
        ledger.committed_usd("sky-a")
        == Decimal("37.80")
        == projection_of(ledger, "sky-a").at(ledger.names.now() + timedelta(seconds=3660))
    )
    keep_warm(ledger, "nightly", 3000)
    assert ledger.committed_usd("sky-a") == Decimal("37.80")


def test_machines_that_are_gone_cost_what_is_recorded(ledger: Ledger, clock: Clock, open_pool: Open) -> None:
    open_pool()
    (intent,) = ledger.open_intents(pool_id="sky-a")
    ledger.close_all([intent.id], "it is gone")
    assert projection_of(ledger, "sky-a").at(clock.time + timedelta(days=1)) == Decimal("1.2")
