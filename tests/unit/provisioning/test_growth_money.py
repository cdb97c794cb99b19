"""What one more node may cost, and which machines a growth rents, with the real rental and spending limit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import PrivateAttr

import skyward_core as sky
from skyward_core import Instance, Offer
from skyward_core.errors import NoCapacity, SkywardError
from skyward_core.ledger.budgets import SpendingLimit
from skyward_core.ledger.journal import Journal
from skyward_core.ledger.ledger import Ledger
from skyward_core.ledger.metering import Meter
from skyward_core.provisioning import selection as selection_module
from skyward_core.provisioning.rental import Rental
from skyward_core.provisioning.selection import Selection
from tests.conftest import RecordedEvents
from tests.fakes import FakeProvider
from tests.offers import offer
from tests.unit.ledger.test_budgets import Clock


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


@dataclass
class Pool:
    """A pool of one node, on a market."""

    selection: Selection
    market: Market
    limit: SpendingLimit
    refusals: list[SkywardError] = field(default_factory=list[SkywardError])

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


type Make = Callable[..., Pool]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Open a pool with these options, whose machines hear at once for how long they are paid."""
    with ExitStack() as undo:

        def made(*offers: Offer, **options: Any) -> Pool:
            market, meter, recorded = Market(folder=str(tmp_path)), Meter(Clock()), RecordedEvents()
            spec = sky.PoolSpec.of(nodes=(1, 9), **options)
            ledger = undo.enter_context(Ledger(f"sqlite:///{tmp_path / 'ledger.db'}"))
            journal = Journal(ledger, "sky-1", spec, market, meter, recorded)
            journal.open()
            limit = SpendingLimit("sky-1", meter, max_cost=spec.max_cost)
            transports: Any = SimpleNamespace(send_paid_time=meter.rented)
            rental = Rental(
                spec,
                market,
                "sky-1",
                emit=recorded,
                meter=meter,
                journal=journal,
                spending_limit=limit,
                transports=transports,
            )
            undo.callback(rental.stop)
            it = Pool(Selection(spec, [market], rental, emit=recorded, journal=journal), market, limit)
            it.sell(*offers)
            it.selection.rent_all(float("inf"))
            return it

        yield made


A, DEAR = offer("a", 36.0), offer("dear", 180.0)  # a cent and five cents a second
ONE = offer("one", 36.0, accelerator="H100", accelerators=1)
EIGHT = offer("eight", 72.0, accelerator="H100", accelerators=8)


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


# ── the machines ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_no_larger_machine_comes_when_those_of_the_pool_are_sold_out(make: Make) -> None:
    """A user who wants one H100 does not want to pay for eight, neither for a new node nor for a replaced one."""
    it = make(ONE, EIGHT, accelerator="H100")
    it.sell(ONE, EIGHT, sold_out=["one"])
    it.add(1)
    with pytest.raises(NoCapacity):
        it.selection.rent_one(0, None)
    assert it.rented == ["one"]


def test_a_growth_does_not_change_what_a_replacement_may_be(make: Make) -> None:
    """Offers that have come since the opening are for new nodes."""
    it = make(A, DEAR)
    others = [*it.selection.others]
    it.sell(A, offer("new", 40.0))
    it.add(1)
    it.add(2)
    assert others == [A, DEAR]
    assert it.selection.others == others


def test_the_offer_of_a_new_node_is_the_one_that_was_rented(make: Make) -> None:
    """Its replacement is of the same kind."""
    it = make(A)
    it.sell(A, offer("new", 40.0), sold_out=["a"])
    it.add(1)
    it.selection.rent_one(1, None)
    assert it.rented == ["a", "new", "new"]


def test_a_node_that_did_not_come_leaves_no_offer(make: Make) -> None:
    """The share of spot machines would count it."""
    it = make(A)
    it.sell(A, sold_out=["a"])
    it.add(1)
    assert [*it.selection.offers] == [0]


def test_nodes_that_come_at_once_keep_the_share_of_spot_machines(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each choice counts those before it, although their machines are not there yet.

    Looks inside: whether two threads may choose at the same time.
    """
    it = make(A, offer("a", 12.0, is_spot=True), spot=0.5)
    chosen = selection_module.offers_for_one_more

    def alone(*arguments: Any) -> list[Offer]:
        assert it.selection._choice_lock.locked()
        return chosen(*arguments)

    monkeypatch.setattr(selection_module, "offers_for_one_more", alone)
    for rank in (1, 2, 3):
        it.selection.choose_for(rank)
    assert [it.selection.offers[rank].is_spot for rank in range(4)] == [True, False, True, False]
