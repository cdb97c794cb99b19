"""Renting machines again for ranks that have lost theirs: `Selection.rent_one` and `Selection.rent_again`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

import skyward_core as sky
from skyward_core.errors import BudgetExceeded, NoCapacity
from skyward_core.machines.instances import Instance, InstanceState
from skyward_core.machines.offers import Offer
from skyward_core.provisioning import selection as selection_module
from skyward_core.provisioning.candidates import ProviderOffers
from skyward_core.provisioning.selection import Selection
from skyward_core.provisioning.termination import Termination
from tests.conftest import RecordedEvents
from tests.unit.provisioning.test_candidates import CHEAP, offer

A, B, C = offer("a", 1.0), offer("b", 2.0), offer("c", 3.0)


class Stock:
    """A rental that has some machines of each type. `launched` is type, count and first rank of each launch."""

    provider = CHEAP

    def __init__(self, stock: Mapping[str, int]) -> None:
        self.stock, self.launched = Counter(stock), list[tuple[str, int, int]]()

    def launch(self, offer: Offer, count: int, first_rank: int) -> list[Instance]:
        if self.stock[offer.instance_type] < count:
            raise NoCapacity(f"no {offer.instance_type}")
        return self.launch_up_to(offer, count, first_rank)

    def launch_up_to(self, offer: Offer, count: int, first_rank: int) -> list[Instance]:
        count = min(count, self.stock[offer.instance_type])
        if not count:
            raise BudgetExceeded(f"no money for {offer.instance_type}")
        self.stock[offer.instance_type] -= count
        self.launched.append((offer.instance_type, count, first_rank))
        return [machine(offer, first_rank + index) for index in range(count)]


class Returned:
    """The event of a machine's end: a machine of the type a is free after the wait."""

    def __init__(self, stock: Stock) -> None:
        self._stock = stock

    def wait(self, seconds: float) -> None:
        assert 0 < seconds < 3600
        self._stock.stock["a"] = 1


def machine(offer: Offer, rank: int) -> Instance:
    return Instance(
        id=f"{offer.instance_type}-{rank}",
        provider="cheap",
        pool_id="sky-p",
        rank=rank,
        state=InstanceState.PENDING,
        region="r",
        instance_type=offer.instance_type,
    )


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


def test_a_lost_machine_is_replaced_by_one_of_its_kind_at_its_rank() -> None:
    stock = Stock({"a": 2, "b": 2})
    assert selection_of(stock, {3: A}, [B]).rent_one(3, None).rank == 3
    assert stock.launched == [("a", 1, 3)]


def test_without_one_of_its_kind_another_offer_replaces_it_at_its_rank() -> None:
    stock = Stock({"c": 1})
    assert selection_of(stock, {3: A}, [A, B, C]).rent_one(3, None).id == "c-3"
    assert stock.launched == [("c", 1, 3)]


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
    stock, ended = Stock({}), Termination("a-3", CHEAP)
    with pytest.raises(NoCapacity):
        selection_of(stock, {3: A}).rent_one(3, None)

    ended.over = Returned(stock)  # type: ignore[assignment]
    assert selection_of(stock, {3: A}).rent_one(3, ended).rank == 3
    assert stock.launched == [("a", 1, 3)]


def test_ranks_are_rented_again_in_runs_of_one_kind() -> None:
    """A gap and another kind begin another run; the machines come in the order of their ranks."""
    stock = Stock({"a": 5, "b": 5})
    offers = {0: A, 1: A, 2: B, 3: B, 5: B}
    rented = selection_of(stock, offers).rent_again([0, 1, 2, 3, 5], {})
    assert stock.launched == [("a", 2, 0), ("b", 2, 2), ("b", 1, 5)]
    assert [instance.rank for instance in rented] == [0, 1, 2, 3, 5]


def test_the_first_refusal_ends_renting_again() -> None:
    """The lowest ranks come first. What is there is enough to go on."""
    stock = Stock({"a": 1, "c": 5})
    rented = selection_of(stock, {0: A, 1: B, 2: C}).rent_again([0, 1, 2], {})
    assert [instance.id for instance in rented] == ["a-0"]


def test_if_nothing_can_be_rented_again_the_lowest_rank_gets_a_replacement() -> None:
    """Another type may stand for its own."""
    stock = Stock({"c": 1})
    rented = selection_of(stock, {1: A, 2: A}, [C]).rent_again([1, 2], {})
    assert [(instance.id, instance.rank) for instance in rented] == [("c-1", 1)]


def test_if_nothing_can_be_rented_again_the_end_of_the_lowest_rank_s_machine_is_awaited() -> None:
    stock, ended = Stock({}), Termination("a-1", CHEAP)
    ended.over = Returned(stock)  # type: ignore[assignment]
    rented = selection_of(stock, {1: A, 2: A}).rent_again([1, 2], {1: ended})
    assert [instance.id for instance in rented] == ["a-1"]


# ── of a pool that another process has rented ────────────────────────────────────────────────────────────────────────


def adopted(stock: Stock, rented: Mapping[int, Offer], sold: list[Offer], monkeypatch: pytest.MonkeyPatch) -> Selection:
    """Return the selection of a pool with these machines, while the provider sells those offers."""
    selection = selection_of(stock, {}, nodes=len(rented))
    selection._journal = SimpleNamespace(recent_attempts=lambda _: [], note_refusal=lambda _: None)  # type: ignore[assignment]
    selection.adopted = {
        rank: machine(offer, rank).model_copy(update={"region": offer.region, "is_spot": offer.is_spot})
        for rank, offer in rented.items()
    }
    monkeypatch.setattr(selection_module, "ask", lambda *_: [ProviderOffers(CHEAP, tuple(sold))])
    return selection


def test_a_machine_of_another_process_is_replaced_by_one_of_its_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = Stock({"a": 1, "b": 1})
    selection = adopted(stock, {0: A, 1: B}, [A, B, C], monkeypatch)
    assert selection.rent_one(1, None).instance_type == "b"
    assert selection.rent_one(0, None).instance_type == "a"


def test_a_machine_of_another_process_that_is_sold_no_more_is_replaced_by_another_kind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The cheapest in its region."""
    stock = Stock({"b": 1, "c": 1})
    assert adopted(stock, {0: A, 1: A}, [C, B], monkeypatch).rent_one(1, None).instance_type == "b"


def test_no_machine_of_another_region_replaces_one_of_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The nodes would not reach each other."""
    far = A.model_copy(update={"region": "far"})
    with pytest.raises(NoCapacity):
        adopted(Stock({"a": 1}), {0: A}, [far], monkeypatch).rent_one(0, None)


def test_all_machines_of_another_process_are_rented_again(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = Stock({"a": 2, "b": 1})
    rented = adopted(stock, {0: A, 1: A, 2: B}, [A, B], monkeypatch).rent_again([0, 1, 2], {})
    assert [(one.rank, one.instance_type) for one in rented] == [(0, "a"), (1, "a"), (2, "b")]
