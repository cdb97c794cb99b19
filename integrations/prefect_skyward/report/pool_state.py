"""The state of one pool, from its events. Money is USD, times are seconds of `time.monotonic`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import skyward_core as sky

SECONDS_PER_HOUR = 3600
STEPS = ("uv", "apt", "deps", "keep", "skyward", "volumes", "shell", "mig", "server")
"""The steps of a machine that is being prepared, in their order."""
RENTED_SHARE, PREPARED_SHARE = 0.3, 0.95
"""How far a machine is when it exists, and when it is a node. The rest is the start of the cluster."""


@dataclass(slots=True)
class MachineState:
    """One machine. After the end of the pool `seconds` and `cost_usd` are those of its receipt."""

    instance_id: str
    node: int
    provider: str
    instance_type: str
    accelerator: str
    is_spot: bool
    price_per_hour: float
    console_url: str | None
    began: float
    ended: float | None = None
    share: float = RENTED_SHARE
    is_lost: bool = False
    seconds: float | None = None
    cost_usd: float | None = None
    utilization: sky.Series = field(default_factory=sky.Series)

    def seconds_at(self, now: float) -> float:
        """Return for how long it was rented: by the receipt, before the end of the pool by the time of its events."""
        if self.seconds is not None:
            return self.seconds
        return (now if self.ended is None else self.ended) - self.began

    def cost_at(self, now: float) -> float:
        """Return its cost: by the receipt, before the end of the pool its price times its seconds."""
        return self.price_per_hour * self.seconds_at(now) / SECONDS_PER_HOUR if self.cost_usd is None else self.cost_usd


@dataclass(frozen=True, slots=True)
class SharedPool:
    """A pool with a name that a flow run has opened or joined, and its nodes at that time."""

    name: str
    pool_id: str
    accelerator: str
    nodes: tuple[sky.Node, ...]


@dataclass(slots=True)
class PoolState:
    """What is known of one pool. `after` changes it by an event."""

    name: str
    pool_id: str = ""
    machines: dict[str, MachineState] = field(default_factory=dict[str, MachineState])
    wanted: int = 0
    has_offers: bool = False
    ready_seconds: float | None = None
    slots: int = 0
    launched_at: float | None = None
    total_usd: float = 0.0
    rate_per_hour: float = 0.0
    seconds: float = 0.0
    calls: sky.CallProgress = field(default_factory=lambda: sky.CallProgress(0, 0, 0))
    final: sky.CostFinal | None = None
    is_left: bool = False
    """Whether this process has left it to others, and pays no more for it."""
    unconfirmed: tuple[str, ...] = ()
    use: sky.Utilisation = field(default_factory=sky.Utilisation)
    shared_name: str = ""
    """The name of a pool that other processes may use too; "" for a pool of this flow run alone."""
    share_usd: float | None = None
    """The part of a shared pool's cost that is for this flow run, by the ledger; `total_usd` is the pool's."""
    joined_at: float | None = None
    """When the flow run has joined a shared pool that another process had opened."""
    trouble: str = ""
    """Why it could not be opened, or why its money is used up."""

    def after(self, event: sky.SkywardEvent, at: float) -> None:
        """Take in an event that came at this time."""
        self.use.see(event)
        match event:
            case sky.InfraCreating(pool_id):
                self.pool_id = pool_id
            case sky.InfraCreated():
                self.has_offers = True
            case sky.InstanceLaunching(count):
                self.wanted, self.launched_at = max(self.wanted, count), at
            case sky.PoolReady(_, nodes, slots, seconds):
                self.wanted, self.slots, self.ready_seconds = nodes, slots, seconds
            case sky.NodesScaled(nodes):
                self.wanted = nodes
            case sky.CallProgress():
                self.calls = event
            case sky.InstancesUnconfirmed(machines):
                self.unconfirmed = machines
            case sky.CostUpdate(elapsed_seconds, accumulated_cost, hourly_rate):
                self.total_usd, self.rate_per_hour, self.seconds = accumulated_cost, hourly_rate, elapsed_seconds
            case sky.CostFinal(total_cost, total_seconds, hourly_rate):
                self.final = event
                self.total_usd, self.rate_per_hour, self.seconds = total_cost, hourly_rate, total_seconds
            case sky.PoolLeft(_, cost_so_far, elapsed_seconds, hourly_rate):
                self.is_left = True
                self.total_usd, self.rate_per_hour, self.seconds = cost_so_far, hourly_rate, elapsed_seconds
            case sky.Metrics():
                self._measure(event)
            case _:
                self._machine_after(event, at)

    @property
    def usd(self) -> float:
        """What the flow run pays for it so far."""
        if not self.shared_name:
            return self.total_usd
        return self.share_usd or 0.0

    def share(self, shared: SharedPool, at: float) -> None:
        """Note that other processes may use the pool. If one of them has opened it, there were no events of it yet."""
        self.shared_name = shared.name
        if self.pool_id:
            return
        self.pool_id, self.joined_at, self.ready_seconds = shared.pool_id, at, 0.0
        self.wanted, self.slots = len(shared.nodes), sum(node.workers * node.slots for node in shared.nodes)
        self.rate_per_hour = sum(node.instance.price_per_hour for node in shared.nodes)
        for node in shared.nodes:
            self.machines[node.instance.id] = _machine_of_node(node, shared.accelerator, at)

    def leave(self, at: float) -> None:
        """Note that the flow run uses a shared pool no more; its machines may go on."""
        if self.joined_at is not None:
            self.seconds = at - self.joined_at
        for machine in self.machines.values():
            machine.ended = machine.ended or at

    def settle(self, receipt: Mapping[str, Any]) -> None:
        """Take the seconds and the cost of each machine from the pool's receipt."""
        for resource in receipt["resources"]:
            machine = self.machines.get(str(resource["cloud_id"]))
            if machine is not None:
                machine.seconds, machine.cost_usd = sum(resource["seconds"].values()), resource["cost_usd"]
                machine.price_per_hour = resource["price_per_hour_usd"]

    @property
    def progress(self) -> float:
        """How far the opening of the pool is, from 0 to 100."""
        if self.ready_seconds is not None:
            return 100.0
        if not self.wanted:
            return 5.0 if self.has_offers else 0.0
        living = sorted((machine.share for machine in self.machines.values() if not machine.is_lost), reverse=True)
        return 10.0 + 85.0 * sum(living[: self.wanted]) / self.wanted

    @property
    def hardware(self) -> str:
        """The machines in words: "2 x A100"."""
        return in_words(self.machines.values())

    def _machine_after(self, event: sky.SkywardEvent, at: float) -> None:
        match event:
            case sky.InstanceProvisioned(instance_id):
                began = at if self.launched_at is None else self.launched_at
                self.machines[instance_id] = _machine_of(event, began)
            case sky.BootstrapProgress(instance_id, step) if step in STEPS:
                done = RENTED_SHARE + (PREPARED_SHARE - RENTED_SHARE) * STEPS.index(step) / len(STEPS)
                self._reach(instance_id, done)
            case sky.BootstrapCompleted(instance_id):
                self._reach(instance_id, PREPARED_SHARE)
            case sky.InstanceLost(instance_id):
                if machine := self.machines.get(instance_id):
                    machine.is_lost, machine.ended = True, machine.ended or at
            case sky.InstanceStopping(instance_id):
                if machine := self.machines.get(instance_id):
                    machine.ended = machine.ended or at
            case _:
                pass

    def _reach(self, instance_id: str, share: float) -> None:
        if machine := self.machines.get(instance_id):
            machine.share = max(machine.share, share)

    def _measure(self, event: sky.Metrics) -> None:
        if machine := self.machines.get(event.instance_id):
            machine.utilization.add(event.cpu_percent if event.gpu_utilization is None else event.gpu_utilization)


def in_words(machines: Iterable[MachineState]) -> str:
    """Return how many machines of each kind there are: "2 x A100, 1 x T4"."""
    kinds = dict[str, int]()
    for machine in machines:
        kind = machine.accelerator or machine.instance_type
        kinds[kind] = kinds.get(kind, 0) + 1
    return ", ".join(f"{count} x {kind}" for kind, count in kinds.items())


def _machine_of_node(node: sky.Node, accelerator: str, began: float) -> MachineState:
    instance = node.instance
    return MachineState(
        instance_id=instance.id,
        node=node.rank,
        provider=instance.provider,
        instance_type=instance.instance_type,
        accelerator=accelerator,
        is_spot=instance.is_spot,
        price_per_hour=instance.price_per_hour,
        console_url=None,
        began=began,
        share=1.0,
    )


def _machine_of(event: sky.InstanceProvisioned, began: float) -> MachineState:
    price = event.price_spot if event.spot else event.price_on_demand
    return MachineState(
        instance_id=event.instance_id,
        node=event.node,
        provider=event.provider,
        instance_type=event.instance_type or "",
        accelerator=event.accelerator or "",
        is_spot=event.spot,
        price_per_hour=0.0 if price is None or math.isnan(price) else price,
        console_url=event.console_url,
        began=began,
    )
