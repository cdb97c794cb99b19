"""Machines of a pool that another process keeps now: this one neither rents nor ends any (`PoolMachines`)."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

import skyward_core as sky
from skyward_core.ledger.metering import Meter
from skyward_core.ledger.names_policy import NotSteward
from skyward_core.provisioning.lifecycle import PoolMachines


def refuse() -> None:
    raise NotSteward("another process keeps the pool now")


@pytest.mark.parametrize(
    "act",
    [
        lambda machines: machines.raise_if_not_steward(),
        lambda machines: machines.add(1, lambda: True),
        lambda machines: machines.remove(1, "i-1"),
        lambda machines: machines.replace(1, lambda: True),
        lambda machines: machines.retire(1, "i-1"),
        lambda machines: machines.stand_by(1),
        lambda machines: machines.restart([], []),
    ],
    ids=["ask", "add", "remove", "replace", "retire", "stand by", "restart"],
)
def test_a_process_that_does_not_keep_the_pool_does_nothing_with_its_machines(
    act: Callable[[PoolMachines], object],
) -> None:
    nothing: Any = SimpleNamespace(paid_seconds=lambda: None, gone=lambda _: None)
    machines = PoolMachines(
        sky.PoolSpec.of(provider=sky.Local(), nodes=(1, 2)),
        [sky.Local()],
        "sky-1",
        Future(),
        emit=lambda _: None,
        meter=Meter(),
        journal=nothing,
        spending_limit=nothing,
        may_act=refuse,
    )
    with pytest.raises(NotSteward):
        act(machines)
    machines.transports.close()
