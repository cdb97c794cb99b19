"""`sky.offers`: the offers of several providers, ranked, with their age."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import ClassVar

import pytest

from skyward_core.errors import BadRequest, CredentialsError, ProviderFailed, SkywardError
from skyward_core.machines.offers import Offer, Requirements
from skyward_core.provisioning.price_list import price_list
from tests.unit.provisioning.test_price_list import (
    NOW,
    Shop,
    prices,
)


class Market(Shop):
    """A provider that returns only offers near the requirements: machines with at most the required CPUs."""

    name: ClassVar[str] = "market"
    sells_by_wish: ClassVar[bool] = True

    def offers(self, want: Requirements) -> list[Offer]:
        return [offer for offer in super().offers(want) if offer.vcpus <= (want.vcpus or 4)]


def test_offers_of_several_providers_are_ranked_together(tmp_path: Path) -> None:
    """Offers that fit are returned, the cheapest first."""
    a, b = Shop(at="a").selling(3.0, 1.0), Shop(at="b").selling(2.0, 0.1)
    found = price_list([a, b], Requirements(vcpus=4), tmp_path, clock=lambda: NOW)
    assert prices(found) == [1.0, 2.0, 3.0]
    assert len(found) == 3
    assert found[0].region == "a"
    assert found.refusals == ()
    assert found.age_seconds(NOW + timedelta(seconds=7)) == 7


@pytest.mark.parametrize(
    "error",
    [ProviderFailed("down").coded("503"), CredentialsError("who").coded("401"), BadRequest("its SDK is not installed")],
    ids=lambda error: type(error).__name__,
)
def test_a_provider_that_fails_does_not_hide_the_others(tmp_path: Path, error: SkywardError) -> None:
    """The list has the reason. The next request queries the provider again."""
    down, up = Shop(at="down").selling(1.0).failing(error), Shop(at="up").selling(2.0)
    found = price_list([down, up], Requirements(), tmp_path)
    assert prices(found) == [2.0]
    assert [(one.provider, one.error, one.code) for one in found.refusals] == [
        ("shop", type(error).__name__, error.code)
    ]
    down.failing(None)
    assert prices(price_list([down, up], Requirements(), tmp_path)) == [1.0, 2.0]


def test_a_bad_request_is_raised_if_all_providers_raise_it(tmp_path: Path) -> None:
    """It holds for one provider and for several."""
    wrong = BadRequest("its SDK is not installed")
    one, other = Shop(at="one").failing(wrong), Shop(at="other").failing(wrong)
    for providers in ([one], [one, other]):
        with pytest.raises(BadRequest, match="SDK"):
            price_list(providers, Requirements(), tmp_path)


def test_a_market_is_queried_with_the_requirements(tmp_path: Path) -> None:
    """Its answer is cached only for these requirements.

    Another provider's answer, with all its offers, serves all requirements.
    """
    market, shop = Market().selling(1.0, 2.0, 4.0), Shop().selling(3.0)
    for _ in range(2):
        assert prices(price_list([market, shop], Requirements(vcpus=8), tmp_path)) == [2.0, 3.0]
        assert prices(price_list([market, shop], Requirements(vcpus=16), tmp_path)) == [4.0]
        assert prices(price_list([market, shop], Requirements(instance_type="t1"), tmp_path)) == [1.0]
    assert market._asked == [Requirements(vcpus=8), Requirements(vcpus=16), Requirements(instance_type="t1")]
    assert shop._asked == [Requirements()]
