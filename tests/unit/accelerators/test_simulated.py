"""Simulated accelerators are used on a machine without accelerators, if the provider simulates or no provider is given."""

from typing import Any

import pytest

import skyward_core as sky
from skyward_core.pool import complete
from skyward_core.providers import base, local


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, float]]:
    """Return the GPUs of this machine: an empty list, to which a test may add GPUs."""
    found: list[tuple[str, float]] = []
    monkeypatch.setattr(local, "gpus_here", lambda: tuple(found))
    return found


@pytest.mark.parametrize(
    ("requested", "name", "count", "memory_gb", "form_factor"),
    [
        ("A100:2", "A100", 2, 80, None),
        ("4xH100-NVL", "H100", 4, 94, "NVL"),
        (sky.NVIDIA.A100_40GB, "A100", 1, 40, None),
        (sky.accelerators.H100(form_factor="SXM"), "H100", 1, 80, "SXM"),
    ],
)
def test_local_offers_what_it_simulates(
    requested: Any, name: str, count: int, memory_gb: int, form_factor: str | None
) -> None:
    """It holds in every spelling, and after JSON."""
    provider = sky.Local(simulate=requested, price_per_hour=1.5)
    assert base.load(provider.to_json()) == provider
    (offer,) = provider.offers(sky.Requirements())
    chip = (offer.accelerator, offer.accelerators, offer.accelerator_memory_gb, offer.form_factor)
    assert (*chip, offer.price_per_hour) == (name, count, memory_gb, form_factor, 1.5)
    assert provider.simulates
    assert not sky.Local().simulates


@pytest.mark.parametrize(
    ("requested", "words"),
    [
        ("A1000", "nearest are 'A100'"),
        (sky.accelerators.H100(mig="3g.40gb"), "not simulated"),
        (3, "simulate=3: write a text or None"),
    ],
)
def test_what_cannot_be_simulated_is_refused(requested: Any, words: str) -> None:
    """The provider cannot be created, and the message has the reason."""
    with pytest.raises(ValueError, match=words):
        sky.Local(simulate=requested)


def chosen(**options: Any) -> tuple[Any, ...]:
    """Return the providers of a pool with these settings."""
    return complete(sky.PoolSpec.of(**options))[1]


A100_HERE = sky.Local(simulate="1xA100-80GB")


def test_this_machine_stands_in_for_an_accelerator_that_it_does_not_have(
    gpus: list[tuple[str, float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If it is the only provider: named, by the settings, or by default. It keeps its price, and says what it does."""
    assert chosen(accelerator="A100") == chosen(accelerator="A100", provider="local") == (A100_HERE,)
    priced = sky.Local(price_per_hour=2.0)
    _, (here,), why = complete(sky.PoolSpec.of(accelerator=["A100", "T4"], provider=priced))
    assert here == sky.Local(price_per_hour=2.0, simulate="1xA100-80GB")
    assert "stands in for A100 80GB" in why
    assert "at $2.00 per hour" in why
    with monkeypatch.context() as patch:
        patch.setenv("SKYWARD_PROVIDER", "local")
        assert chosen(accelerator="A100") == (A100_HERE,)
    gpus.append(("NVIDIA GeForce RTX 4090", 24.0))
    assert chosen(accelerator="A100") == chosen(accelerator="A100", provider="local") == (sky.Local(),)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"accelerator": sky.accelerators.H100(mig="3g.40gb")},
        {"accelerator": "H100", "provider": sky.Local(simulate="A100")},
        {"accelerator": "H100", "spot": "always", "provider": [sky.Local(), sky.AWS()]},
        {"spot": "if-available", "provider": sky.Local(price_per_hour=1.0)},
        {"spot": "never", "provider": sky.Local(price_per_hour=1.0)},
        {"spot": "always", "provider": sky.Local(price_per_hour=1.0, spot_price_per_hour=0.25)},
    ],
    ids=str,
)
def test_what_this_machine_does_not_stand_in_for(gpus: list[tuple[str, float]], options: dict[str, Any]) -> None:
    """Partitions; what else its user has set; and nothing beside a cloud, which it would always undercut."""
    spec, providers, _ = complete(sky.PoolSpec.of(**options))
    assert providers == (spec.providers or (sky.Local(),))


@pytest.mark.parametrize("strategy", ["always", 0.5, sky.Spot.Always(retries=0)])
def test_this_machine_simulates_spot_machines_for_who_demands_them(strategy: Any) -> None:
    """At its own price, until the user sets another one."""
    _, (here,), why = complete(sky.PoolSpec.of(spot=strategy, provider=sky.Local(price_per_hour=2.0)))
    assert here == sky.Local(price_per_hour=2.0, spot_price_per_hour=2.0)
    assert "spot machines are simulated, at $2.00 per hour" in why
    on_demand, spot = here.model_copy(update={"spot_price_per_hour": 0.5}).offers(sky.Requirements())
    assert (on_demand.is_spot, on_demand.price_per_hour) == (False, 2.0)
    assert (spot.is_spot, spot.price_per_hour, spot.on_demand_price_per_hour) == (True, 0.5, 2.0)
