"""One more node of an open pool: which offers are tried, what it may cost, and which machines are rented."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from pydantic import PrivateAttr

import skyward_core as sky
from skyward_core import Instance, Offer
from skyward_core.errors import NoCapacity, SkywardError
from skyward_core.ledger.metering import Meter
from skyward_core.machines import spot
from skyward_core.provisioning import candidates as growth
from skyward_core.provisioning import selection as selection_module
from tests.fakes import FakeProvider
from tests.offers import offer
from tests.unit.ledger.test_budgets import Clock
from tests.unit.provisioning.test_lifecycle import Opened, Pool, opened  # noqa: F401 - a fixture

HEAD, CHEAP, SPOT, OTHER = offer("a", 2.0), offer("b", 1.0), offer("a", 0.5, is_spot=True), offer("c", 1.5)
ELSEWHERE = offer("a", 0.1, region="r-2")
HALF = spot.Percent(0.5)
LARGE = HEAD.model_copy(update={"instance_type": "l", "vcpus": 64, "price_per_hour": 7.0})


def chips(count: int, price: float, *, is_spot: bool = False) -> Offer:
    return offer(f"{count}x", price, is_spot=is_spot, accelerator="H100", accelerators=count)


ONE, TWO, EIGHT, EIGHT_FOR_ONE = chips(1, 2.0), chips(2, 4.0), chips(8, 16.0), chips(8, 2.0)
SMALL_SPOT, LARGE_SPOT = chips(1, 0.5, is_spot=True), chips(8, 1.5, is_spot=True)


@pytest.mark.parametrize(
    ("strategy", "present", "sold", "accelerator", "tried"),
    [
        # the type of the pool first, then the cheapest, in the region of the head only; each once
        (spot.Never(), [HEAD], [OTHER, CHEAP, ELSEWHERE, HEAD], None, [HEAD, CHEAP, OTHER]),
        (None, [HEAD, HEAD], [HEAD, HEAD, CHEAP, HEAD], None, [HEAD, CHEAP]),
        (None, [HEAD], [HEAD, SPOT], None, [SPOT, HEAD]),
        (spot.IfAvailable(), [HEAD], [HEAD, SPOT], None, [SPOT, HEAD]),
        (spot.IfAvailable(), [HEAD], [HEAD], None, [HEAD]),
        (spot.Always(), [SPOT], [HEAD], None, []),
        (spot.Always(), [SPOT], [HEAD, SPOT], None, [SPOT]),
        (spot.Never(), [HEAD], [HEAD, SPOT], None, [HEAD]),
        # the share of spot machines holds with the new node; of five nodes three are spot
        (HALF, [HEAD, HEAD, SPOT], [HEAD, SPOT], None, [SPOT]),
        (HALF, [HEAD, SPOT, SPOT], [HEAD, SPOT], None, [HEAD]),
        (HALF, [HEAD, HEAD, SPOT, SPOT], [HEAD, SPOT], None, [SPOT]),
        # no machine has more chips than those of the pool, unless it costs no more
        (None, [ONE], [EIGHT, ONE, TWO], "H100", [ONE]),
        (spot.Never(), [ONE], [EIGHT], "H100", []),
        (spot.IfAvailable(), [ONE], [EIGHT_FOR_ONE, ONE], "H100", [ONE, EIGHT_FOR_ONE]),
        (None, [ONE], [EIGHT_FOR_ONE], "H100", [EIGHT_FOR_ONE]),
        (None, [EIGHT], [EIGHT, ONE], "H100", [ONE]),
        (None, [EIGHT], [EIGHT], "H100", [EIGHT]),
        (HALF, [ONE], [ONE, SMALL_SPOT, LARGE_SPOT], "H100", [SMALL_SPOT]),
        (HALF, [SMALL_SPOT], [ONE, SMALL_SPOT, LARGE_SPOT], "H100", [ONE]),
        # without chips machines of all sizes are alike, up to four times the price of the dearest
        (None, [HEAD], [LARGE, HEAD], None, [HEAD, LARGE]),
        (None, [HEAD, CHEAP], [LARGE.model_copy(update={"price_per_hour": 8.1})], None, []),
    ],
)
def test_the_offers_that_are_tried_for_one_more_node(
    strategy: spot.Strategy | None,
    present: Sequence[Offer],
    sold: Sequence[Offer],
    accelerator: str | None,
    tried: list[Offer],
) -> None:
    options = {} if strategy is None else {"spot": strategy}
    spec = sky.PoolSpec.of(nodes=(1, 9), accelerator=accelerator, **options)
    assert growth.offers_for_one_more(spec, sky.Local(), present, sold) == tried


# ── the money, with the real rental and spending limit ───────────────────────────────────────────────────────────────


class Market(FakeProvider):
    """Sells what the test says. A type that is sold out is still listed."""

    _sold: list[Offer] = PrivateAttr(default_factory=list[Offer])
    _sold_out: set[str] = PrivateAttr(default_factory=set[str])

    def offers(self, want: sky.Requirements) -> list[Offer]:
        return [*self._sold]

    def launch(self, offer: Offer, count: int, tags: Mapping[str, str], startup: str) -> list[Instance]:
        if offer.instance_type in self._sold_out:
            raise NoCapacity(f"no {offer.instance_type}")
        return super().launch(offer, count, tags, startup)


class Growing:
    """A pool of one node, on a market. It keeps the refusals."""

    def __init__(self, pool: Pool) -> None:
        self.market, self.limit, self.selection = pool.provider, pool.limit, pool.machines._selection
        self.refusals: list[SkywardError] = []

    def sell(self, *offers: Offer, sold_out: Sequence[str] = ()) -> None:
        self.market._sold, self.market._sold_out = [*offers], {*sold_out}

    def add(self, rank: int, before_renting: Callable[[], object] = lambda: None) -> None:
        """Do what `Replacement.add` does, and keep the refusal."""
        try:
            self.selection.choose_for(rank)
            before_renting()
            self.selection.rent_one(rank, None)
        except SkywardError as error:
            self.selection.forget(rank)
            self.refusals.append(error)

    @property
    def rented(self) -> list[str]:
        """The types of the machines, the head's first."""
        return [instance.instance_type for instance in self.market.instances()]

    @property
    def paid_seconds(self) -> float:
        seconds = self.limit.paid_seconds()
        assert seconds is not None
        return seconds


type Make = Callable[..., Growing]


@pytest.fixture
def make(opened: Opened) -> Make:
    """Open a pool with these options, whose machines hear at once for how long they are paid."""

    def made(*offers: Offer, **options: Any) -> Growing:
        pool = opened(Market, meter=Meter(Clock()), nodes=(1, 9), **options)
        pool.rental.transports.send_paid_time = pool.meter.rented  # type: ignore[method-assign]
        it = Growing(pool)
        it.sell(*offers)
        it.selection.rent_all(float("inf"))
        return it

    return made


A, DEAR, NEW = offer("a", 36.0), offer("dear", 180.0), offer("new", 40.0)  # A: a cent a second
SINGLE = offer("one", 36.0, accelerator="H100", accelerators=1)
EIGHTFOLD = offer("eight", 72.0, accelerator="H100", accelerators=8)


def test_the_offer_that_is_tried_next_must_leave_ten_minutes_too(make: Make) -> None:
    """The first one is sold out. The other one would end the pool after 250 s."""
    it = make(A, DEAR, max_cost=15)
    before = it.paid_seconds
    it.sell(A, DEAR, sold_out=["a"])
    it.add(1)
    it.limit.check()  # the machine that was sold out had shortened the head's life
    assert (it.rented, it.paid_seconds) == (["a"], before)
    assert [type(error) for error in it.refusals] == [NoCapacity]


def test_a_cheaper_offer_is_tried_if_the_first_would_end_the_pool_too_early(make: Make) -> None:
    it = make(A, max_cost=15)
    it.sell(A.model_copy(update={"price_per_hour": 180.0}), offer("cheap", 30.0))
    it.add(1)
    assert (it.rented, it.refusals) == (["a", "cheap"], [])


def test_a_pool_grows_up_to_its_hourly_limit(make: Make) -> None:
    """Two machines of 36 USD per hour are within 80. A third is within it only if it is cheap enough."""
    it = make(A, max_hourly_cost=80)
    it.add(1)
    it.add(2)
    assert it.rented == ["a", "a"]
    ((message,),) = [str(error).splitlines() for error in it.refusals]
    assert message == (
        "with 1 x local/r-1 a more the pool costs $108.00 per hour, and max_hourly_cost=80 is less: write"
        " max_hourly_cost=108"
    )
    it.sell(A, offer("cheap", 8.0))
    it.add(2)
    assert it.rented == ["a", "a", "cheap"]


def test_nodes_that_come_at_once_stay_within_the_hourly_limit(make: Make) -> None:
    it = make(A, max_hourly_cost=80)
    it.selection.choose_for(1)
    with pytest.raises(NoCapacity, match="max_hourly_cost=80"):
        it.selection.choose_for(2)


def test_a_node_that_has_left_counts_no_more_to_the_hourly_limit(make: Make) -> None:
    it = make(A, max_hourly_cost=80)
    it.add(1)
    it.selection.forget(1)
    it.add(1)
    assert it.refusals == []


def test_a_replacement_stays_within_the_hourly_limit(make: Make) -> None:
    """Also where another kind of machine must stand for the lost one."""
    it = make(A, DEAR, max_hourly_cost=80)
    it.add(1)
    it.selection.others = [A, DEAR]
    it.sell(A, DEAR, sold_out=["a"])
    with pytest.raises(NoCapacity, match="no a"):
        it.selection.rent_one(0, None)
    it.selection.others = [A, DEAR, offer("other", 20.0)]
    assert it.selection.rent_one(0, None).instance_type == "other"
    it.sell(A, offer("small", 24.0))
    it.add(2)  # the pool costs 56 USD per hour without it
    assert it.rented == ["a", "a", "other", "small"]


def test_the_price_of_a_stand_in_counts_when_the_lost_kind_is_there_again(make: Make) -> None:
    """A cheaper machine stood for the head, and the pool grew meanwhile: the head's own kind is too dear now."""
    it = make(A, max_hourly_cost=80)
    it.selection.others = [offer("other", 4.0)]
    it.sell(A, sold_out=["a"])
    assert it.selection.rent_one(0, None).instance_type == "other"
    it.sell(A)
    it.add(1)
    it.add(2)
    assert (it.rented, it.refusals) == (["a", "other", "a", "a"], [])
    assert it.selection.rent_one(0, None).instance_type == "other"


def test_a_refusal_says_what_is_missing(make: Make) -> None:
    it = make(A, max_cost=11)
    it.add(1)
    ((message,),) = [str(error).splitlines() for error in it.refusals]
    assert "max_cost=11.0 would not last for 600 s with 1 x 36.0 USD per hour more" in message


def test_a_replacement_needs_money_for_a_minute_only(make: Make) -> None:
    """Also that of a node which came with a growth: without it the calls of a group could not go on."""
    it = make(A, max_cost=15)
    it.add(1)
    it.selection.rent_one(1, None)
    assert (it.rented, it.refusals) == (["a", "a", "a"], [])


def test_no_larger_machine_comes_when_those_of_the_pool_are_sold_out(make: Make) -> None:
    """Neither for a new node nor for a replaced one."""
    it = make(SINGLE, EIGHTFOLD, accelerator="H100")
    it.sell(SINGLE, EIGHTFOLD, sold_out=["one"])
    it.add(1)
    with pytest.raises(NoCapacity):
        it.selection.rent_one(0, None)
    assert it.rented == ["one"]


def test_a_new_node_keeps_the_offer_that_was_rented(make: Make) -> None:
    """Its replacement is of that kind; the head's may be what it was. A node that did not come leaves no offer."""
    other = offer("other", 100.0)
    it = make(A, other)
    it.sell(A, NEW, sold_out=["a"])
    it.add(1)
    it.selection.rent_one(1, None)
    assert it.rented == ["a", "new", "new"]
    assert it.selection.others == [A, other]
    it.sell(A, sold_out=["a"])
    it.add(2)
    assert [*it.selection.offers] == [0, 1]


def test_nodes_that_come_at_once_keep_the_share_of_spot_machines(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each choice counts those before it, although their machines are not there yet: no two threads choose at once."""
    it = make(A, offer("a", 12.0, is_spot=True), spot=0.5)
    chosen = selection_module.offers_for_one_more

    def alone(*arguments: Any) -> list[Offer]:
        assert it.selection._choice_lock.locked()
        return chosen(*arguments)

    monkeypatch.setattr(selection_module, "offers_for_one_more", alone)
    for rank in (1, 2, 3):
        it.selection.choose_for(rank)
    assert [it.selection.offers[rank].is_spot for rank in range(4)] == [True, False, True, False]
