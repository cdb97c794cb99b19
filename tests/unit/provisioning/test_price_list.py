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
from skyward_core.errors import ProviderFailed, SkywardError
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


def prices(found: Any) -> list[float]:
    return [offer.price_per_hour for offer in found]


def test_an_answer_is_cached_for_some_time(tmp_path: Path) -> None:
    """It serves all requirements. Its key has the provider's settings, and an entry expires. The list has its age."""
    shop, other = Shop(at="a").selling(1.0, 2.0), Shop(at="b").selling(5.0)
    price_list([shop], Requirements(), tmp_path, clock=lambda: NOW)
    later = NOW + timedelta(seconds=300)
    found = price_list([Shop(at="a"), other], Requirements(vcpus=8), tmp_path, clock=lambda: later)
    assert (prices(found), found.asked_at, len(shop._asked)) == ([2.0, 5.0], NOW, 1)
    shop.selling(9.0)
    expired = later + timedelta(seconds=1)
    assert prices(price_list([shop], Requirements(), tmp_path, clock=lambda: expired)) == [9.0]
    now = expired + timedelta(seconds=1)
    assert price_list([shop], Requirements(), tmp_path, max_age_seconds=0, clock=lambda: now).asked_at == now
    assert shop._asked == [Requirements()] * 3


class Wide(Shop):
    """A provider with two regions. While `_error` is set, one of them fails."""

    name: ClassVar[str] = "wide"

    def offers(self, want: Requirements) -> list[Offer]:
        error, self._error = self._error, None
        sold = super().offers(want)
        self._error = error
        return sold if error is None else Sale(sold, {"far": error})


def test_a_region_that_fails_is_reported_and_queried_again(tmp_path: Path) -> None:
    """The other region's offers are not cached as if they were complete."""
    shop = Wide().selling(1.0).failing(ProviderFailed("down"))
    for _ in range(2):
        found = price_list([shop], Requirements(), tmp_path)
        assert (prices(found), [(one.region, one.message) for one in found.refusals]) == ([1.0], [("far", "down")])
    shop.failing(None)
    assert price_list([shop], Requirements(), tmp_path).refusals == ()
    assert len(shop._asked) == 3


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
    """A cache that cannot be written is no error either."""
    shop = Shop().selling(1.0)
    price_list([shop], Requirements(), tmp_path)
    (page,) = tmp_path.iterdir()
    page.write_bytes(damage)
    assert prices(price_list([shop], Requirements(), tmp_path)) == [1.0]
    assert len(shop._asked) == 2
    assert prices(price_list([shop], Requirements(), Path(os.devnull) / "no")) == [1.0]


def test_offers_accepts_names_and_requirements(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One or several providers, also by name. The cache is private to the user."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    shop = Shop().selling(1.0, 2.0)
    assert prices(operations.offers(shop, cpu=8, memory="16GB")) == [2.0]
    assert prices(operations.offers([shop, "local"], max_price_per_hour=1.5, machine="t1")) == [1.0]
    assert prices(operations.offers(shop, accelerator="H100")) == []
    assert (tmp_path / "skyward/offers").stat().st_mode & 0o777 == 0o700
