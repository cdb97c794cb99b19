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
    [("A1000", "nearest are 'A100'"), (sky.accelerators.H100(mig="3g.40gb"), "not simulated"), (3, "string")],
)
def test_what_cannot_be_simulated_is_refused(requested: Any, words: str) -> None:
    """The provider cannot be created, and the message has the reason."""
    with pytest.raises(ValueError, match=words):
        sky.Local(simulate=requested)


def test_a_machine_with_gpus_simulates_nothing(gpus: list[tuple[str, float]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does one without accelerators in the spec, for partitions, or if spec or settings name a provider."""
    assert complete(sky.PoolSpec.of())[1] == (sky.Local(),)
    assert complete(sky.PoolSpec.of(accelerator=sky.accelerators.H100(mig="3g.40gb")))[1] == (sky.Local(),)
    assert complete(sky.PoolSpec.of(accelerator="A100", provider="local"))[1] == (sky.Local(),)
    assert complete(sky.PoolSpec.of(accelerator="A100"))[1] == (sky.Local(simulate="1xA100-80GB"),)
    with monkeypatch.context() as patch:
        patch.setenv("SKYWARD_PROVIDER", "local")
        assert complete(sky.PoolSpec.of(accelerator="A100"))[1] == (sky.Local(),)
    gpus.append(("NVIDIA GeForce RTX 4090", 24.0))
    assert complete(sky.PoolSpec.of(accelerator="A100"))[1] == (sky.Local(),)
