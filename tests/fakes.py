"""Providers with faults, one each.

Their machines are names in a list; `Machines` is what a cloud's console would show.
"""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from pydantic import PrivateAttr

from skyward_core import Instance, InstanceState, Local, NoCapacity, Offer, Provider, Requirements


@dataclass
class Machines:
    """The real state of a fake cloud: the running machines, and the requests that it received."""

    running: dict[str, Instance] = field(default_factory=dict)
    launched: list[str] = field(default_factory=list)
    terminated: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Prevents pickling the fake for a reaper, because no process could end the machines of its copy."""


class FakeProvider(Provider):
    """Rents out machines that never answer, at `price_per_hour` USD each, their files in `folder`; each subclass breaks
    one method.
    """

    name: ClassVar[str] = "fake"
    is_local: ClassVar[bool] = True
    folder: str
    price_per_hour: float = 36.0
    spot_is_sold: bool = False
    _machines: Machines = PrivateAttr(default_factory=Machines)

    @property
    def machines(self) -> Machines:
        return self._machines

    def offers(self, want: Requirements) -> list[Offer]:
        on_demand = Offer(
            provider=self.name,
            instance_type="fake.1",
            region="nowhere-1",
            price_per_hour=self.price_per_hour,
            vcpus=4,
            memory_gb=16,
        )
        spot = on_demand.model_copy(
            update={
                "is_spot": True,
                "price_per_hour": self.price_per_hour / 3,
                "on_demand_price_per_hour": self.price_per_hour,
            }
        )
        return [on_demand, spot] if self.spot_is_sold else [on_demand]

    def launch(self, offer: Offer, count: int, tags: Mapping[str, str], startup: str) -> list[Instance]:
        first = int(tags.get("skyward-rank", "0"))
        return [self._start(offer, tags["skyward-pool"], rank, tags) for rank in range(first, first + count)]

    def instances(self, pool_id: str | None = None) -> list[Instance]:
        return [instance for instance in list(self._machines.running.values()) if pool_id in (None, instance.pool_id)]

    def terminate(self, ids: Sequence[str]) -> None:
        for instance_id in ids:
            self._machines.terminated.append(instance_id)
            self._machines.running.pop(instance_id, None)

    def _start(self, offer: Offer, pool_id: str, rank: int, tags: Mapping[str, str] | None = None) -> Instance:
        instance_id = f"fake-{len(self._machines.launched)}"
        directory = Path(self.folder) / instance_id
        directory.mkdir(parents=True)
        (directory / "log").touch()
        self._machines.launched.append(instance_id)
        self._machines.running[instance_id] = instance = Instance(
            id=instance_id,
            provider=self.name,
            pool_id=pool_id,
            rank=rank,
            tags={**(tags or {}), "skyward-pool": pool_id, "skyward-rank": str(rank)},
            state=InstanceState.RUNNING,
            region=offer.region,
            instance_type=offer.instance_type,
            is_spot=offer.is_spot,
            price_per_hour=offer.price_per_hour,
            on_demand_price_per_hour=offer.on_demand_price_per_hour,
            extras_per_hour=offer.extras_per_hour,
            directory=str(directory),
        )
        return instance


class NoCapacityProvider(FakeProvider):
    """Offers machines, and has no capacity at the launch."""

    def launch(self, offer: Offer, count: int, tags: Mapping[str, str], startup: str) -> list[Instance]:
        raise NoCapacity(f"no {offer.instance_type} left in {offer.region}")


class NothingSoldProvider(FakeProvider):
    """Has no offers."""

    def offers(self, want: Requirements) -> list[Offer]:
        return []


class LossyProvider(FakeProvider):
    """Launches, and then raises an error."""

    _error: BaseException = PrivateAttr(default_factory=lambda: ConnectionError("the answer was lost"))

    def fail_with(self, error: BaseException) -> "LossyProvider":
        """Set what `launch` raises."""
        self._error = error
        return self

    def launch(self, offer: Offer, count: int, tags: Mapping[str, str], startup: str) -> list[Instance]:
        super().launch(offer, count, tags, startup)
        raise self._error


class StuckProvider(FakeProvider):
    """Accepts every termination, and does not end the machines."""

    def terminate(self, ids: Sequence[str]) -> None:
        self._machines.terminated.extend(ids)


class SlowToGoProvider(FakeProvider):
    """Terminates only at the request number `asks`."""

    asks: int = 3

    def terminate(self, ids: Sequence[str]) -> None:
        self._machines.terminated.extend(ids)
        for instance_id in ids:
            if self._machines.terminated.count(instance_id) >= self.asks:
                self._machines.running.pop(instance_id, None)


class FlakyProvider(FakeProvider):
    """Loses the first request to terminate."""

    def terminate(self, ids: Sequence[str]) -> None:
        is_first = not self._machines.terminated
        if is_first:
            self._machines.terminated.extend(ids)
            raise ConnectionError("502 from the termination")
        super().terminate(ids)


class BlindProvider(FakeProvider):
    """Fails every listing as long as `is_blind`."""

    _is_blind: list[bool] = PrivateAttr(default_factory=lambda: [True])

    def see(self) -> None:
        """End the outage."""
        self._is_blind[0] = False

    def instances(self, pool_id: str | None = None) -> list[Instance]:
        if self._is_blind[0]:
            raise ConnectionError("503 from the listing")
        return super().instances(pool_id)


class UnpreparableLocal(Local):
    """Real local processes whose startup script fails in the phase "deps"."""

    def launch(self, offer: Offer, count: int, tags: Mapping[str, str], startup: str) -> list[Instance]:
        script = "echo '::skyward phase deps'; echo 'no such package: nonesuch'; echo '::skyward failed phase=deps exit=3 command=uv'; sleep 60"
        return super().launch(offer, count, tags, script)


class DyingLocal(Local):
    """Real local processes that end before they are nodes."""

    def launch(self, offer: Offer, count: int, tags: Mapping[str, str], startup: str) -> list[Instance]:
        return super().launch(offer, count, tags, "echo 'going down'; exit 7")


class StubbornLocal(Local):
    """Real local processes that their provider does not end while `trouble` has an item."""

    gone_deadline_seconds: ClassVar[float] = 0.5
    trouble: ClassVar[list[str]] = []

    def terminate(self, ids: Sequence[str]) -> None:
        if self.trouble:
            raise ConnectionError(self.trouble[0])
        super().terminate(ids)
