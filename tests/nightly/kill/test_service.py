"""The rental service and its provider behave as a cloud and its provider do, including faults."""

from __future__ import annotations

import httpx
import pytest

from skyward_core.errors import NoCapacity
from skyward_core.machines.instances import InstanceState
from skyward_core.machines.offers import Offer, Requirements
from skyward_core.providers.base import LAUNCH_TAG, POOL_TAG, RANK_TAG
from tests.kill.console import RunningService
from tests.kill.provider import HttpRental


def tags(pool_id: str = "sky-1", token: str = "sky-1-1", rank: int = 0) -> dict[str, str]:
    return {POOL_TAG: pool_id, LAUNCH_TAG: token, RANK_TAG: str(rank)}


def offer(provider: HttpRental, *, is_spot: bool = False) -> Offer:
    return next(offer for offer in provider.offers(Requirements()) if offer.is_spot == is_spot)


def test_a_machine_is_listed_with_its_tags_until_its_termination(rental: RunningService) -> None:
    provider = HttpRental(url=rental.url)
    launched = provider.launch(offer(provider, is_spot=True), 2, tags(rank=3), "#!/bin/sh\n")
    assert [instance.rank for instance in launched] == [3, 4]
    assert provider.instances("sky-1") == launched
    assert launched[0].tags == {POOL_TAG: "sky-1", LAUNCH_TAG: "sky-1-1", RANK_TAG: "3"}
    assert (launched[0].price_per_hour, launched[0].on_demand_price_per_hour) == (1.2, pytest.approx(3.6))
    assert rental.look().billed() == {instance.id for instance in launched}
    assert rental.look().machines[0]["startup"] == "#!/bin/sh\n"
    provider.terminate([launched[0].id])
    assert rental.look().billed() == {launched[1].id}
    provider.terminate([instance.id for instance in launched])
    provider.terminate([launched[0].id])
    assert provider.instances() == []
    assert [request["verb"] for request in rental.look().requests].count("terminate") == 3


def test_more_machines_than_a_page_holds_are_all_listed(rental: RunningService) -> None:
    provider = HttpRental(url=rental.url)
    mine = {instance.id for instance in provider.launch(offer(provider), 9, tags(), "")}
    theirs = {instance.id for instance in provider.launch(offer(provider), 9, tags("sky-2", "sky-2-1"), "")}
    assert {instance.id for instance in provider.instances("sky-1")} == mine
    assert {instance.id for instance in provider.instances()} == mine | theirs


def test_the_same_token_gives_the_same_machines(rental: RunningService) -> None:
    provider = HttpRental(url=rental.url)
    sold = offer(provider)
    rental.break_down(lose_create_answers=1)
    with pytest.raises(httpx.TransportError):
        provider.launch(sold, 2, tags(), "")
    billed = rental.look().billed()
    assert len(billed) == 2
    assert {instance.id for instance in provider.launch(sold, 2, tags(), "")} == billed == rental.look().billed()


def test_a_new_machine_is_listed_only_after_the_lag(rental: RunningService) -> None:
    provider = HttpRental(url=rental.url)
    rental.break_down(create_lag_seconds=60)
    first, second = provider.launch(offer(provider), 2, tags(), "")
    assert provider.instances("sky-1") == []
    rental.clock.advance(59)
    assert provider.instances("sky-1") == []
    provider.terminate([first.id])
    assert rental.look().billed() == {second.id}
    rental.clock.advance(2)
    assert provider.instances("sky-1") == [second]


def test_fewer_machines_than_requested(rental: RunningService) -> None:
    provider = HttpRental(url=rental.url)
    rental.break_down(short_by=1)
    assert len(provider.launch(offer(provider), 3, tags(), "")) == 2
    rental.break_down(short_by=1)
    with pytest.raises(NoCapacity, match=r"rental\.1"):
        provider.launch(offer(provider), 1, tags(token="sky-1-2"), "")


def test_a_termination_may_do_nothing_or_only_stop(rental: RunningService) -> None:
    provider = HttpRental(url=rental.url)
    (machine,) = provider.launch(offer(provider), 1, tags(), "")
    rental.break_down(ignore_terminations=1, stop_instead=1)
    provider.terminate([machine.id])
    assert provider.instances("sky-1") == [machine]
    provider.terminate([machine.id])
    assert [instance.state for instance in provider.instances("sky-1")] == [InstanceState.STOPPING]
    assert rental.look().billed() == {machine.id}
    provider.terminate([machine.id])
    assert rental.look().billed() == set()


def test_a_machine_can_be_missing_in_one_listing_and_present_in_the_next(rental: RunningService) -> None:
    provider = HttpRental(url=rental.url)
    launched = provider.launch(offer(provider), 6, tags(), "")
    rental.break_down(hide_listings=1)
    assert provider.instances("sky-1") == []
    assert provider.instances("sky-1") == launched


@pytest.mark.parametrize(("faults", "status"), [({"errors": 1}, 500), ({"throttles": 1}, 429)])
def test_an_error_of_the_service_is_raised_and_changes_nothing(
    rental: RunningService, faults: dict[str, int], status: int
) -> None:
    provider = HttpRental(url=rental.url)
    sold = offer(provider)
    (machine,) = provider.launch(sold, 1, tags(), "")
    verbs = (
        lambda: provider.offers(Requirements()),
        lambda: provider.launch(sold, 1, tags(token="2"), ""),
        lambda: provider.instances("sky-1"),
        lambda: provider.terminate([machine.id]),
    )
    for verb in verbs:
        rental.break_down(**faults)
        with pytest.raises(httpx.HTTPStatusError) as caught:
            verb()
        assert caught.value.response.status_code == status
    assert rental.look().billed() == {machine.id}


def test_an_outage_ends_on_the_services_own_clock(rental: RunningService) -> None:
    provider = HttpRental(url=rental.url)
    rental.break_down(error_seconds=180)
    for seconds in (0, 100, 79):
        rental.clock.advance(seconds)
        with pytest.raises(httpx.HTTPStatusError):
            provider.instances()
    rental.clock.advance(2)
    assert provider.instances() == []


def test_a_hung_call_raises_and_may_have_taken_effect(rental: RunningService) -> None:
    provider = HttpRental(url=rental.url, timeout_seconds=0.2)
    sold = offer(HttpRental(url=rental.url))
    for faults, billed in (({"hangs": 1}, 0), ({"hangs_after": 1}, 1)):
        rental.break_down(verb="create", **faults)
        with pytest.raises(httpx.ReadTimeout):
            provider.launch(sold, 1, tags(), "")
        assert len(rental.look().billed()) == billed


def test_a_machine_ends_itself(rental: RunningService) -> None:
    provider = HttpRental(url=rental.url)
    (machine,) = provider.launch(offer(provider), 1, tags(), "")
    rental.shut_down(machine.id)
    seen = rental.look()
    assert seen.billed() == set()
    assert seen.machines[0]["ended_by"] == "shutdown"
