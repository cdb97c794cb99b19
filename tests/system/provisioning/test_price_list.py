"""`sky.offers` of several providers, which are asked at the same time."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import ClassVar

import pytest

from skyward_core.errors import BadRequest, CredentialsError, ProviderFailed, SkywardError
from skyward_core.machines.offers import Offer, Requirements
from skyward_core.provisioning.price_list import price_list
from tests.unit.provisioning.test_price_list import NOW, Shop, prices


class Market(Shop):
    """A provider that returns only offers near the requirements: machines with at most the required CPUs."""

    name: ClassVar[str] = "market"
    sells_by_wish: ClassVar[bool] = True

    def offers(self, want: Requirements) -> list[Offer]:
        return [offer for offer in super().offers(want) if offer.vcpus <= (want.vcpus or 4)]


def test_offers_of_several_providers_are_ranked_together(tmp_path: Path) -> None:
    a, b = Shop(at="a").selling(3.0, 1.0), Shop(at="b").selling(2.0, 0.1)
    found = price_list([a, b], Requirements(vcpus=4), tmp_path, clock=lambda: NOW)
    assert (prices(found), found[0].region, found.refusals) == ([1.0, 2.0, 3.0], "a", ())
    assert found.age_seconds(NOW + timedelta(seconds=7)) == 7


@pytest.mark.parametrize(
    "error",
    [ProviderFailed("down").coded("503"), CredentialsError("who").coded("401"), BadRequest("its SDK is not installed")],
    ids=lambda error: type(error).__name__,
)
def test_a_provider_that_fails_does_not_hide_the_others(tmp_path: Path, error: SkywardError) -> None:
    """The next request queries it again. A BadRequest is raised only if all raise it."""
    down, up = Shop(at="down").selling(1.0).failing(error), Shop(at="up").selling(2.0)
    found = price_list([down, up], Requirements(), tmp_path)
    assert prices(found) == [2.0]
    assert [(one.provider, one.error, one.code) for one in found.refusals] == [
        ("shop", type(error).__name__, error.code)
    ]
    down.failing(None)
    assert prices(price_list([down, up], Requirements(), tmp_path)) == [1.0, 2.0]
    wrong = [Shop(at=at).failing(BadRequest("its SDK is not installed")) for at in ("one", "other")]
    for providers in (wrong[:1], wrong):
        with pytest.raises(BadRequest, match="SDK"):
            price_list(providers, Requirements(), tmp_path)


def test_a_market_is_queried_with_the_requirements(tmp_path: Path) -> None:
    """Its answer is cached only for these; the answer of another provider serves all requirements."""
    market, shop = Market().selling(1.0, 2.0, 4.0), Shop().selling(3.0)
    for _ in range(2):
        assert prices(price_list([market, shop], Requirements(vcpus=8), tmp_path)) == [2.0, 3.0]
        assert prices(price_list([market, shop], Requirements(vcpus=16), tmp_path)) == [4.0]
    assert market._asked == [Requirements(vcpus=8), Requirements(vcpus=16)]
    assert shop._asked == [Requirements()]
