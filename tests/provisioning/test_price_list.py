"""`sky.offers`: what several providers sell, ranked, and how old that is."""

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
    """Sells machines at some prices, and counts how often it was asked."""

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
    """Tells only what is near a wish: machines of at most the CPUs that are asked for."""

    name: ClassVar[str] = "market"
    sells_by_wish: ClassVar[bool] = True

    def offers(self, want: Requirements) -> list[Offer]:
        return [offer for offer in super().offers(want) if offer.vcpus <= (want.vcpus or 4)]


def prices(found: Any) -> list[float]:
    return [offer.price_per_hour for offer in found]


def test_offers_of_several_are_ranked_together(tmp_path: Path) -> None:
    """Those that fit, cheapest first."""
    a, b = Shop(at="a").selling(3.0, 1.0), Shop(at="b").selling(2.0, 0.1)
    found = price_list([a, b], Requirements(vcpus=4), tmp_path, clock=lambda: NOW)
    assert prices(found) == [1.0, 2.0, 3.0]
    assert len(found) == 3
    assert found[0].region == "a"
    assert found.refusals == ()
    assert found.age_seconds(NOW + timedelta(seconds=7)) == 7


def test_an_answer_is_kept_for_a_while(tmp_path: Path) -> None:
    """For all wishes, by settings of the provider, and until it is too old; how old it is, is told."""
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
def test_who_cannot_be_asked_hides_no_other(tmp_path: Path, error: SkywardError) -> None:
    """It is told with the reason, and asked again the next time."""
    down, up = Shop(at="down").selling(1.0).failing(error), Shop(at="up").selling(2.0)
    found = price_list([down, up], Requirements(), tmp_path)
    assert prices(found) == [2.0]
    assert [(one.provider, one.error, one.code) for one in found.refusals] == [
        ("shop", type(error).__name__, error.code)
    ]
    down.failing(None)
    assert prices(price_list([down, up], Requirements(), tmp_path)) == [1.0, 2.0]


class Wide(Shop):
    """Has two regions, of which one cannot be asked as long as `_error` says why."""

    name: ClassVar[str] = "wide"

    def offers(self, want: Requirements) -> list[Offer]:
        error, self._error = self._error, None
        sold = super().offers(want)
        self._error = error
        return sold if error is None else Sale(sold, {"far": error})


def test_a_region_that_cannot_be_asked_is_told_and_asked_again(tmp_path: Path) -> None:
    """What the others sell is in the list, and is not kept as if it were all."""
    shop = Wide().selling(1.0).failing(ProviderFailed("down"))
    for _ in range(2):
        found = price_list([shop], Requirements(), tmp_path)
        assert (prices(found), [(one.region, one.message) for one in found.refusals]) == ([1.0], [("far", "down")])
    assert len(price_list([shop], Requirements(vcpus=99), tmp_path).refusals) == 2
    shop.failing(None)
    assert price_list([shop], Requirements(), tmp_path).refusals == ()
    assert len(shop._asked) == 4


def test_a_bad_request_that_is_all_there_is_to_hear_is_raised(tmp_path: Path) -> None:
    """Of one provider, or of all."""
    wrong = BadRequest("its SDK is not installed")
    one, other = Shop(at="one").failing(wrong), Shop(at="other").failing(wrong)
    for providers in ([one], [one, other]):
        with pytest.raises(BadRequest, match="SDK"):
            price_list(providers, Requirements(), tmp_path)


def test_a_market_is_asked_with_the_wish(tmp_path: Path) -> None:
    """And what it says is kept for that wish alone, beside one who tells all that he sells."""
    market, shop = Market().selling(1.0, 2.0, 4.0), Shop().selling(3.0)
    for _ in range(2):
        assert prices(price_list([market, shop], Requirements(vcpus=8), tmp_path)) == [2.0, 3.0]
        assert prices(price_list([market, shop], Requirements(vcpus=16), tmp_path)) == [4.0]
        assert prices(price_list([market, shop], Requirements(instance_type="t1"), tmp_path)) == [1.0]
    assert market._asked == [Requirements(vcpus=8), Requirements(vcpus=16), Requirements(instance_type="t1")]
    assert shop._asked == [Requirements()]


def test_who_sells_nothing_that_fits_says_why(tmp_path: Path) -> None:
    """From a kept answer too; with none at all there is no age."""
    shop = Shop().selling(1.0)
    for _ in range(2):
        (refused,) = price_list([shop], Requirements(vcpus=64), tmp_path).refusals
        assert "shop/here t1 has 4 CPUs" in refused.message
    nothing = price_list([Shop().failing(ProviderFailed("down"))], Requirements(), tmp_path / "other")
    assert (nothing.asked_at, nothing.age_seconds(), len(nothing)) == (None, 0.0, 0)


@pytest.mark.parametrize("damage", [b"", b"{", b'{"asked_at": "2026-11-21T12:00:00Z", "offers": [{"price": 1}]}'])
def test_a_damaged_cache_is_none(tmp_path: Path, damage: bytes) -> None:
    """Nor is one that cannot be written to a reason to fail."""
    shop = Shop().selling(1.0)
    price_list([shop], Requirements(), tmp_path)
    (page,) = tmp_path.iterdir()
    page.write_bytes(damage)
    assert prices(price_list([shop], Requirements(), tmp_path)) == [1.0]
    assert len(shop._asked) == 2
    assert prices(price_list([shop], Requirements(), Path(os.devnull) / "no")) == [1.0]


def test_the_face_takes_names_and_wishes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A provider or several, by name too; accelerator, CPUs, memory and price as words."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    shop = Shop().selling(1.0, 2.0)
    assert prices(operations.offers(shop, cpu=8, memory="16GB")) == [2.0]
    assert prices(operations.offers([shop, "local"], max_price_per_hour=1.5, machine="t1")) == [1.0]
    assert prices(operations.offers(shop, accelerator="H100")) == []
    assert (tmp_path / "skyward/offers").stat().st_mode & 0o777 == 0o700
