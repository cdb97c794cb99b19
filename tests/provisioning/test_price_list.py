"""`sky.offers`: the offers of several providers, ranked, with their age."""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, ClassVar

import pytest
from pydantic import PrivateAttr

import skyward_core as sky
from skyward_core import operations
from skyward_core.errors import BadRequest, CredentialsError, ProviderFailed, SkywardError
from skyward_core.machines.offers import Offer, Requirements
from skyward_core.providers.base import Sale
from skyward_core.provisioning.price_list import price_list

NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)


class Shop(sky.Provider):
    """A provider that sells machines at given prices. It counts its requests."""

    name: ClassVar[str] = "shop"
    at: str = "here"
    _prices: list[float] = PrivateAttr(default_factory=list)
    _asked: list[Requirements] = PrivateAttr(default_factory=list)
    _error: SkywardError | None = PrivateAttr(default=None)

    def selling(self, *prices: float) -> Shop:
        self._prices[:] = prices
        return self

    def failing(self, error: SkywardError | None) -> Shop:
        self._error = error
        return self

    def offers(self, want: Requirements) -> list[Offer]:
        self._asked.append(want)
        if self._error is not None:
            raise self._error
        return [
            Offer(
                provider=self.name,
                instance_type=f"t{price:g}",
                region=self.at,
                price_per_hour=price,
                vcpus=4 * price,
                memory_gb=16,
            )
            for price in self._prices
        ]


class Market(Shop):
    """A provider that returns only offers near the requirements: machines with at most the required CPUs."""

    name: ClassVar[str] = "market"
    sells_by_wish: ClassVar[bool] = True

    def offers(self, want: Requirements) -> list[Offer]:
        return [offer for offer in super().offers(want) if offer.vcpus <= (want.vcpus or 4)]


def prices(found: Any) -> list[float]:
    return [offer.price_per_hour for offer in found]


def test_offers_of_several_providers_are_ranked_together(tmp_path: Path) -> None:
    """Offers that fit are returned, the cheapest first."""
    a, b = Shop(at="a").selling(3.0, 1.0), Shop(at="b").selling(2.0, 0.1)
    found = price_list([a, b], Requirements(vcpus=4), tmp_path, clock=lambda: NOW)
    assert prices(found) == [1.0, 2.0, 3.0]
    assert len(found) == 3
    assert found[0].region == "a"
    assert found.refusals == ()
    assert found.age_seconds(NOW + timedelta(seconds=7)) == 7


def test_an_answer_is_cached_for_some_time(tmp_path: Path) -> None:
    """The cache serves all requirements.

    Its key has the provider's settings, and an entry expires. The list has its age.
    """
    shop, other = Shop(at="a").selling(1.0, 2.0), Shop(at="b").selling(5.0)
    price_list([shop], Requirements(), tmp_path, clock=lambda: NOW)
    later = NOW + timedelta(seconds=300)
    found = price_list([Shop(at="a"), other], Requirements(vcpus=8), tmp_path, clock=lambda: later)
    assert prices(found) == [2.0, 5.0]
    assert found.asked_at == NOW
    assert len(shop._asked) == 1
    shop.selling(9.0)
    again = price_list([shop], Requirements(), tmp_path, clock=lambda: later + timedelta(seconds=1))
    assert prices(again) == [9.0]
    assert (
        price_list(
            [shop], Requirements(), tmp_path, max_age_seconds=0, clock=lambda: later + timedelta(seconds=2)
        ).asked_at
        > later
    )
    assert shop._asked == [Requirements()] * 3


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


class Wide(Shop):
    """A provider with two regions. While `_error` is set, one of them fails."""

    name: ClassVar[str] = "wide"

    def offers(self, want: Requirements) -> list[Offer]:
        error, self._error = self._error, None
        sold = super().offers(want)
        self._error = error
        return sold if error is None else Sale(sold, {"far": error})


def test_a_region_that_fails_is_reported_and_queried_again(tmp_path: Path) -> None:
    """The list has the other region's offers. They are not cached as if they were complete."""
    shop = Wide().selling(1.0).failing(ProviderFailed("down"))
    for _ in range(2):
        found = price_list([shop], Requirements(), tmp_path)
        assert (prices(found), [(one.region, one.message) for one in found.refusals]) == ([1.0], [("far", "down")])
    assert len(price_list([shop], Requirements(vcpus=99), tmp_path).refusals) == 2
    shop.failing(None)
    assert price_list([shop], Requirements(), tmp_path).refusals == ()
    assert len(shop._asked) == 4


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


def test_a_provider_without_a_fitting_offer_is_reported_with_the_reason(tmp_path: Path) -> None:
    """It holds for a cached answer too. Without any answer there is no age."""
    shop = Shop().selling(1.0)
    for _ in range(2):
        (refused,) = price_list([shop], Requirements(vcpus=64), tmp_path).refusals
        assert "shop/here t1 has 4 CPUs" in refused.message
    nothing = price_list([Shop().failing(ProviderFailed("down"))], Requirements(), tmp_path / "other")
    assert (nothing.asked_at, nothing.age_seconds(), len(nothing)) == (None, 0.0, 0)


@pytest.mark.parametrize("damage", [b"", b"{", b'{"asked_at": "2026-11-21T12:00:00Z", "offers": [{"price": 1}]}'])
def test_a_damaged_cache_is_ignored(tmp_path: Path, damage: bytes) -> None:
    """A cache that cannot be written is no error."""
    shop = Shop().selling(1.0)
    price_list([shop], Requirements(), tmp_path)
    (page,) = tmp_path.iterdir()
    page.write_bytes(damage)
    assert prices(price_list([shop], Requirements(), tmp_path)) == [1.0]
    assert len(shop._asked) == 2
    assert prices(price_list([shop], Requirements(), Path(os.devnull) / "no")) == [1.0]


def test_offers_accepts_names_and_requirements(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes one or several providers, also by name. Accelerator, CPUs, memory and price are keyword arguments."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    shop = Shop().selling(1.0, 2.0)
    assert prices(operations.offers(shop, cpu=8, memory="16GB")) == [2.0]
    assert prices(operations.offers([shop, "local"], max_price_per_hour=1.5, machine="t1")) == [1.0]
    assert prices(operations.offers(shop, accelerator="H100")) == []
    assert (tmp_path / "skyward/offers").stat().st_mode & 0o777 == 0o700
