"""NeuronCores: the cores that a node's calls may use, and the environment of each call's process.

Expected numbers are those of AWS's Neuron documentation ("Neuron Runtime configuration", "Logical NeuronCore
configuration") and of EC2's own descriptions of its types. These tests have never run on a Trainium.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import skyward_core as sky
from tests.conftest import wait_until
from tests.unit.accelerators.test_neuron import (
    Trainium,
)

# ── a pool on a machine with simulated chips ─────────────────────────────────────────────────────────────────────────


class NeuronBox(sky.Local):
    """This machine, with two simulated Trainium chips."""

    def offers(self, want: sky.Requirements) -> list[sky.Offer]:
        (offer,) = super().offers(sky.Requirements())
        return [offer.model_copy(update={"accelerator": "Trainium1", "accelerators": 2, "accelerator_memory_gb": 32.0})]


@sky.compute
def seen(folder: str, calls: int) -> tuple[str, list[int], list[str], str, int]:
    """Wait until this number of calls run at the same time; return the cores of this one.

    They come from the environment, from our API, and from a child process.
    """
    (Path(folder) / str(os.getpid())).touch()
    wait_until(lambda: len(os.listdir(folder)) >= calls, "the other calls")
    code = "import os, skyward_core; print(os.environ['NEURON_RT_VISIBLE_CORES'], skyward_core.instance_info().neuron_cores)"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    info = sky.instance_info()
    return os.environ["NEURON_RT_VISIBLE_CORES"], info.neuron_cores, info.accelerators, child, os.getpid()


@sky.compute
def crash() -> None:
    """Kill the process of the call."""
    os.kill(os.getpid(), signal.SIGKILL)


def test_calls_at_the_same_time_have_different_cores(tmp_path: Path) -> None:
    """Three calls share four cores without overlap. A process that replaces a crashed one gets only the free cores."""
    rows = {"0": [0], "1": [1], "2-3": [2, 3]}
    with sky.ComputePool(
        provider=NeuronBox(), accelerator=Trainium(1, 2), concurrency=3, retries=0, display="quiet"
    ) as pool:
        for round_ in range(3):
            folder = tmp_path / str(round_)
            folder.mkdir()
            found = list(pool.map(seen, [str(folder)] * 3, [3] * 3))
            assert {visible: cores for visible, cores, *_ in found} == rows
            assert {tuple(names) for _, _, names, *_ in found} == {("Trainium1", "Trainium1")}
            assert all(child == f"{visible} {cores}" for visible, cores, _, child, _ in found)
            with pytest.raises(sky.CallCrashed):
                crash() >> pool


def test_a_pool_without_accelerators_gets_those_of_its_machine() -> None:
    """The machine is `machine="trn1.2xlarge"`.

    More calls at the same time than cores are refused before anything is rented.
    """
    events: list[Any] = []
    with sky.ComputePool(provider=NeuronBox(), display="quiet", on_event=events.append) as pool:
        assert (chips_of_this_call() >> pool) == ("Trainium1", ["Trainium1", "Trainium1"], [0, 1, 2, 3])
    with pytest.raises(sky.BadRequest, match="4 NeuronCores"):
        sky.ComputePool(provider=NeuronBox(), concurrency=5, display="quiet", on_event=events.append).open()
    assert len([event for event in events if isinstance(event, sky.InstanceLaunching)]) == 1


@sky.compute
def chips_of_this_call() -> tuple[str | None, list[str], list[int]]:
    """Return the chips in the environment of a call."""
    return sky.current_accelerator(), sky.instance_info().accelerators, sky.instance_info().neuron_cores
