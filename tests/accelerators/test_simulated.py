"""Simulated accelerators are used on a machine without accelerators, if the provider simulates or no provider is given."""

import logging
import os
from typing import Any

import pytest

import skyward_core as sky
from skyward_core.pool import complete
from skyward_core.providers import base, local


@sky.compute
def seen() -> tuple[sky.InstanceInfo, str | None, str | None]:
    return sky.instance_info(), sky.current_accelerator(), os.environ.get("CUDA_VISIBLE_DEVICES")


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, float]]:
    """Return the GPUs of this machine: an empty list, to which a test may add GPUs."""
    found: list[tuple[str, float]] = []
    monkeypatch.setattr(local, "gpus_here", lambda: tuple(found))
    return found


@pytest.mark.parametrize(
    ("requested", "name", "count", "memory_gb", "form_factor"),
    [
        ("A100", "A100", 1, 80, None),
        ("A100:2", "A100", 2, 80, None),
        ("4xH100-NVL", "H100", 4, 94, "NVL"),
        (sky.NVIDIA.A100_40GB, "A100", 1, 40, None),
        (sky.accelerators.RTX_4090(count=2), "RTX 4090", 2, 24, None),
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
    assert (offer.accelerator, offer.accelerators, offer.accelerator_memory_gb, offer.form_factor) == (
        name,
        count,
        memory_gb,
        form_factor,
    )
    assert offer.price_per_hour == 1.5
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


@pytest.mark.slow
def test_calls_know_that_accelerators_are_simulated(gpus: list[tuple[str, float]]) -> None:
    """The list of accelerators is filled as on a real machine, but no device is visible, not even a real one."""
    gpus.append(("NVIDIA GeForce RTX 4090", 24.0))
    with sky.ComputePool(provider=sky.Local(simulate="A100:2"), accelerator="A100:2", display="quiet") as pool:
        info, first, devices = pool.run(seen())
    assert (info.accelerators, info.is_simulated, first, devices) == (["A100", "A100"], True, "A100", "")


@pytest.mark.slow
def test_without_a_provider_this_machine_simulates(
    gpus: list[tuple[str, float]], caplog: pytest.LogCaptureFixture
) -> None:
    """A program for the cloud runs on a laptop, with one warning."""
    with caplog.at_level(logging.INFO, "skyward"), sky.ComputePool(accelerator="A100", display="quiet") as pool:
        info, _, _ = pool.run(seen())
        assert pool.spec.provider is None
    assert (info.accelerators, info.is_simulated) == (["A100"], True)
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "no provider was named" in warning
    assert "stands in for A100 80GB" in warning
    assert "\n" not in warning


def test_a_machine_with_gpus_simulates_nothing(gpus: list[tuple[str, float]]) -> None:
    """It holds without accelerators in the spec, for partitions, and if the settings name a provider."""
    assert complete(sky.PoolSpec.of())[1] == (sky.Local(),)
    assert complete(sky.PoolSpec.of(accelerator=sky.accelerators.H100(mig="3g.40gb")))[1] == (sky.Local(),)
    assert complete(sky.PoolSpec.of(accelerator="A100", provider="local"))[1] == (sky.Local(),)
    assert complete(sky.PoolSpec.of(accelerator="A100"))[1] == (sky.Local(simulate="1xA100-80GB"),)
    gpus.append(("NVIDIA GeForce RTX 4090", 24.0))
    assert complete(sky.PoolSpec.of(accelerator="A100"))[1] == (sky.Local(),)


def test_a_provider_in_the_settings_does_not_simulate(
    gpus: list[tuple[str, float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`SKYWARD_PROVIDER=local` is the user's choice."""
    monkeypatch.setenv("SKYWARD_PROVIDER", "local")
    assert complete(sky.PoolSpec.of(accelerator="A100"))[1] == (sky.Local(),)


def test_an_explicit_local_refuses_with_advice(gpus: list[tuple[str, float]]) -> None:
    """The message names the argument for a simulation."""
    with pytest.raises(sky.NoCapacity, match=r'has no accelerator.*Local\(simulate="A100"\) simulates one here'):
        sky.ComputePool(provider=sky.Local(), accelerator="A100", display="quiet").open()
    with pytest.raises(sky.NoCapacity, match=r'has A100.*Local\(simulate="H100"\)'):
        sky.ComputePool(provider=sky.Local(simulate="A100"), accelerator="H100", display="quiet").open()
