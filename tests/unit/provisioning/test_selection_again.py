"""Renting machines again for ranks that have lost theirs: `Selection.rent_one` and `Selection.rent_again`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

import skyward_core as sky
from skyward_core.errors import BudgetExceeded, NoCapacity, QuotaExceeded, SkywardError
from skyward_core.machines.instances import Instance, InstanceState
from skyward_core.machines.offers import Offer
from skyward_core.provisioning import selection as selection_module
from skyward_core.provisioning.candidates import ProviderOffers
from skyward_core.provisioning.selection import Selection
from skyward_core.provisioning.teardown import Termination
from tests.conftest import RecordedEvents
from tests.offers import offer

CHEAP = sky.Local(price_per_hour=1.0)
A, B, C = offer("a", 1.0), offer("b", 2.0), offer("c", 3.0)


class Stock:
    """A rental that has some machines of each type. `launched` is type, count and first rank of each launch."""

    provider = CHEAP
    spec = sky.PoolSpec()

    def __init__(self, stock: Mapping[str, int], errors: Mapping[str, SkywardError] | None = None) -> None:
        self.stock, self.launched, self.asked = Counter(stock), list[tuple[str, int, int]](), list[str]()
        self.errors = errors or {}

    def launch(self, offer: Offer, count: int, first_rank: int) -> list[Instance]:
        self.asked.append(offer.instance_type)
        if self.stock[offer.instance_type] < count:
            raise self.errors.get(offer.instance_type, NoCapacity(f"no {offer.instance_type}"))
        return self.launch_up_to(offer, count, first_rank)

    def launch_up_to(self, offer: Offer, count: int, first_rank: int) -> list[Instance]:
        count = min(count, self.stock[offer.instance_type])
        if not count:
            raise BudgetExceeded(f"no money for {offer.instance_type}")
        self.stock[offer.instance_type] -= count
        self.launched.append((offer.instance_type, count, first_rank))
        return [machine(offer, first_rank + index) for index in range(count)]


def machine(offer: Offer, rank: int) -> Instance:
    return Instance(
        id=f"{offer.instance_type}-{rank}",
        provider="cheap",
        pool_id="sky-p",
        rank=rank,
        state=InstanceState.PENDING,
        region=offer.region,
        instance_type=offer.instance_type,
        is_spot=offer.is_spot,
    )


def ending(stock: Stock) -> Termination:
    """Return the end of a machine; when it is awaited, a machine of the type a becomes free."""

    def wait(seconds: float) -> None:
        assert 0 < seconds < 3600
        stock.stock["a"] = 1

    termination = Termination("a-1", CHEAP)
    termination.over = SimpleNamespace(wait=wait)  # type: ignore[assignment]
    return termination


def selection_of(
    stock: Stock, offers: Mapping[int, Offer], others: list[Offer] | None = None, **options: Any
) -> Selection:
    """Return a selection whose pool has these offers by rank. `others` may replace them; None: as it was made."""
    rental: Any = stock
    selection = Selection(sky.PoolSpec.of(**options), [CHEAP], rental, emit=RecordedEvents(), journal=None)  # type: ignore[arg-type]
    selection.offers = dict(offers)
    if others is not None:
        selection.others = others
    return selection


@pytest.mark.parametrize(("stock", "launched"), [({"a": 2, "b": 2}, ("a", 1, 3)), ({"c": 1}, ("c", 1, 3))])
def test_a_lost_machine_is_replaced_at_its_rank(stock: dict[str, int], launched: tuple[str, int, int]) -> None:
    """By one of its kind, else by another offer."""
    rental = Stock(stock)
    assert selection_of(rental, {3: A}, [A, B, C]).rent_one(3, None).rank == 3
    assert rental.launched == [launched]


@pytest.mark.parametrize("is_spot", [False, True])
def test_with_a_share_of_spot_machines_a_replacement_is_of_the_same_sale(is_spot: bool) -> None:
    """Otherwise the share would change. Without a share any offer will do."""
    own, other, same = (
        one.model_copy(update={"is_spot": spot}) for one, spot in ((A, is_spot), (B, not is_spot), (C, is_spot))
    )
    assert selection_of(Stock({"b": 1, "c": 1}), {0: own}, [other, same], spot=0.5).rent_one(0, None).id == "c-0"
    assert selection_of(Stock({"b": 1, "c": 1}), {0: own}, [other, same]).rent_one(0, None).id == "b-0"


def test_without_any_offer_the_end_of_the_lost_machine_is_awaited() -> None:
    """Its type may be free then; without a machine that ends there is nothing to wait for."""
    stock = Stock({})
    with pytest.raises(NoCapacity):
        selection_of(stock, {3: A}).rent_one(3, None)
    assert selection_of(stock, {3: A}).rent_one(3, ending(stock)).rank == 3
    assert stock.launched == [("a", 1, 3)]


def test_a_replacement_that_is_too_dear_is_skipped() -> None:
    """Later candidates may be affordable."""
    stock = Stock({}, {"b": BudgetExceeded("too dear"), "c": QuotaExceeded("none")})
    selection_of(stock, {0: A}, [A, B, C]).rent_one(0, ending(stock))
    assert stock.asked == ["a", "b", "c", "a"]


@pytest.mark.parametrize(
    ("stock", "offers", "launched"),
    [
        # in runs of one kind: a gap and another kind begin another run
        ({"a": 5, "b": 5}, {0: A, 1: A, 2: B, 3: B, 5: B}, [("a", 2, 0), ("b", 2, 2), ("b", 1, 5)]),
        # the first refusal ends it, because what is there is enough to go on
        ({"a": 1, "c": 5}, {0: A, 1: B, 2: C}, [("a", 1, 0)]),
        # if nothing can be rented, the lowest rank gets another type, or the one that becomes free
        ({"c": 1}, {1: A, 2: A}, [("c", 1, 1)]),
        ({}, {1: A, 2: A}, [("a", 1, 1)]),
    ],
)
def test_ranks_are_rented_again(
    stock: dict[str, int], offers: dict[int, Offer], launched: list[tuple[str, int, int]]
) -> None:
    rental = Stock(stock)
    rented = selection_of(rental, offers, [C]).rent_again([*offers], {1: ending(rental)})
    assert rental.launched == launched
    assert [one.rank for one in rented] == [first + n for _, count, first in launched for n in range(count)]


# ── of a pool that another process has rented ────────────────────────────────────────────────────────────────────────


def adopted(stock: Stock, rented: Mapping[int, Offer], sold: list[Offer], monkeypatch: pytest.MonkeyPatch) -> Selection:
    """Return the selection of a pool with these machines, while the provider sells those offers."""
    selection = selection_of(stock, {}, nodes=len(rented))
    selection._journal = SimpleNamespace(recent_attempts=lambda _: [], note_refusal=lambda _: None)  # type: ignore[assignment]
    selection.adopted = {rank: machine(offer, rank) for rank, offer in rented.items()}
    monkeypatch.setattr(selection_module, "ask_each", lambda _: [[ProviderOffers(CHEAP, tuple(sold))]])
    return selection


def test_machines_of_another_process_are_replaced_by_their_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """If it is sold no more, by the cheapest in its region: nodes of two regions would not reach each other."""
    selection = adopted(Stock({"a": 1, "b": 1}), {0: A, 1: B}, [A, B, C], monkeypatch)
    assert [selection.rent_one(rank, None).instance_type for rank in (1, 0)] == ["b", "a"]
    assert adopted(Stock({"b": 1, "c": 1}), {0: A, 1: A}, [C, B], monkeypatch).rent_one(1, None).instance_type == "b"
    far = A.model_copy(update={"region": "far"})
    with pytest.raises(NoCapacity):
        adopted(Stock({"a": 1}), {0: A}, [far], monkeypatch).rent_one(0, None)
    rented = adopted(Stock({"a": 2, "b": 1}), {0: A, 1: A, 2: B}, [A, B], monkeypatch).rent_again([0, 1, 2], {})
    assert [(one.rank, one.instance_type) for one in rented] == [(0, "a"), (1, "a"), (2, "b")]
