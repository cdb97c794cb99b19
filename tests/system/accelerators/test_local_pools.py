"""Pools of this machine with simulated accelerators: what calls see, and what is refused."""

import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import skyward_core as sky
from skyward_core import accelerators
from tests.conftest import RecordedEvents
from tests.unit.accelerators.test_simulated import gpus  # noqa: F401 - a fixture
from tests.waiting import wait_until


def test_the_import_loads_few_modules():
    """A new interpreter loads only the standard library and this package. It loads difflib only for a refusal."""
    root = Path(accelerators.__file__).parents[2]
    program = (
        f"import sys; sys.path.insert(0, {str(root)!r}); before = {{*sys.modules}};"
        " import skyward_core.accelerators; print(*({*sys.modules} - before))"
    )
    argv = [sys.executable, "-I", "-S", "-c", program]
    loaded = subprocess.run(argv, capture_output=True, text=True, check=True).stdout.split()
    assert "skyward_core.accelerators.mig" in loaded
    assert {name.partition(".")[0] for name in loaded} - sys.stdlib_module_names == {"skyward_core"}
    assert "difflib" not in loaded


@sky.compute
def seen() -> tuple[sky.InstanceInfo, str | None, str | None]:
    return sky.instance_info(), sky.current_accelerator(), os.environ.get("CUDA_VISIBLE_DEVICES")


def test_calls_know_that_accelerators_are_simulated(gpus: list[tuple[str, float]]) -> None:
    """The list of accelerators is filled as on a real machine, but no device is visible, not even a real one."""
    gpus.append(("NVIDIA GeForce RTX 4090", 24.0))
    with sky.ComputePool(provider=sky.Local(simulate="A100:2"), accelerator="A100:2", display="quiet") as pool:
        info, first, devices = pool.run(seen())
    assert (info.accelerators, info.is_simulated, first, devices) == (["A100", "A100"], True, "A100", "")


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
    with pytest.raises(sky.NoCapacity, match=r'has A100.*Local\(simulate="H100"\)'):
        sky.ComputePool(provider=sky.Local(simulate="A100"), accelerator="H100", display="quiet").open()
    gpus.append(("NVIDIA GeForce RTX 4090", 24.0))
    with pytest.raises(sky.NoCapacity, match=r'has RTX 4090.*Local\(simulate="H100"\) simulates one here'):
        sky.ComputePool(provider=sky.Local(), accelerator="H100", display="quiet").open()


# ── NeuronCores ──────────────────────────────────────────────────────────────────────────────────────────────────────


class NeuronBox(sky.Local):
    """This machine, with two simulated Trainium chips."""

    def offers(self, want: sky.Requirements) -> list[sky.Offer]:
        (offer,) = super().offers(sky.Requirements())
        return [offer.model_copy(update={"accelerator": "Trainium1", "accelerators": 2, "accelerator_memory_gb": 32.0})]


@sky.compute
def cores(folder: str, calls: int) -> tuple[str, list[int], list[str], str]:
    """Wait until this number of calls run at the same time; return the cores of this one and those of a child."""
    (Path(folder) / str(os.getpid())).touch()
    wait_until(lambda: len(os.listdir(folder)) >= calls, "the other calls")
    code = (
        "import os, skyward_core;"
        " print(os.environ['NEURON_RT_VISIBLE_CORES'], skyward_core.instance_info().neuron_cores)"
    )
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    info = sky.instance_info()
    return os.environ["NEURON_RT_VISIBLE_CORES"], info.neuron_cores, info.accelerators, child


@sky.compute
def crash() -> None:
    """Kill the process of the call."""
    os.kill(os.getpid(), signal.SIGKILL)


def test_calls_at_the_same_time_have_different_cores(tmp_path: Path) -> None:
    """Three calls share four cores without overlap. A process that replaces a crashed one gets only the free cores.

    Without `accelerator=` they are those of the machine.
    """
    rows = {"0": [0], "1": [1], "2-3": [2, 3]}
    with sky.ComputePool(provider=NeuronBox(), concurrency=3, retries=0, display="quiet") as pool:
        for round_ in range(2):
            folder = tmp_path / str(round_)
            folder.mkdir()
            found = list(pool.map(cores, [str(folder)] * 3, [3] * 3))
            assert {visible: numbers for visible, numbers, *_ in found} == rows
            assert {tuple(names) for _, _, names, _ in found} == {("Trainium1", "Trainium1")}
            assert all(child == f"{visible} {numbers}" for visible, numbers, _, child in found)
            with pytest.raises(sky.CallCrashed):
                crash() >> pool
    recorded = RecordedEvents()
    with pytest.raises(sky.BadRequest, match="4 NeuronCores"):
        sky.ComputePool(provider=NeuronBox(), concurrency=5, display="quiet", on_event=recorded).open()
    assert recorded.of(sky.InstanceLaunching) == []
