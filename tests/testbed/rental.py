"""A cloud that rents out hosts of the test bed: real machines behind the four methods of a provider.

cloud = Cloud(fleet, prepare=mirror.configure)
with ComputePool(provider=cloud.provider(), nodes=2) as pool:
    cloud.preempt(pool_instance_id)
"""

import shlex
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import PrivateAttr

from skyward_core import Instance, InstanceState, Offer, Provider, Requirements
from skyward_core.machines.instances import Endpoint
from skyward_core.providers.base import POOL_TAG, RANK_TAG, Tags
from tests.testbed.fleet import Fleet
from tests.testbed.host import Host

HOME = "/root/.cache/skyward"
BOOT = """\
set -eu
mkdir -p -m 700 {directory}
cd {directory}
cat >startup.sh
chmod 700 startup.sh
setsid env -i PATH="$PATH" HOME=/root {variables} ./startup.sh </dev/null >>log 2>&1 &
"""
"""As cloud-init runs user data: the script is independent of the connection that sent it, and has the variables of a
boot, not of a login.
"""


@dataclass
class Machine:
    """One rented host, as the cloud has it. Ids are never reused."""

    instance: Instance
    host: Host


class Cloud:
    """The owner of the machines.

    Args:
        fleet: creates the hosts, and removes them at its end.
        prepare: called with every new host before its startup script runs, such as `Mirror.configure`: it stands for
            the machine image.
        host: options of `Fleet.create`, such as `disk="512M"`.
    """

    def __init__(self, fleet: Fleet, *, prepare: Callable[[Host], object] = lambda host: None, **host: Any) -> None:
        self._fleet = fleet
        self._prepare = prepare
        self._options = host
        self.machines: dict[str, Machine] = {}
        """Every machine that was rented and not terminated, by instance id."""
        self.requests: list[str] = []
        """The methods that were called, in order."""

    def provider(self, **fields: Any) -> "Rental":
        """Return the provider value that rents from this cloud."""
        provider = Rental(**fields)
        provider._cloud = self  # pyright: ignore[reportPrivateUsage]
        return provider

    def host(self, instance_id: str) -> Host:
        """Return the host of an instance, up or not, to change it. Raises KeyError once it was terminated."""
        return self.machines[instance_id].host

    def preempt(self, instance_id: str) -> None:
        """Preempt a machine: its packets are dropped, then it ends."""
        self.machines[instance_id].host.kill()

    def rent(self, offer: Offer, count: int, tags: Tags, startup: str) -> list[Instance]:
        """Create hosts, all at once."""
        ranks = range(first_rank := int(tags[RANK_TAG]), first_rank + count)
        with ThreadPoolExecutor(count, thread_name_prefix="rental") as threads:
            return list(threads.map(lambda rank: self._rent_one(offer, rank, tags, startup), ranks))

    def listed(self, pool_id: str | None) -> list[Instance]:
        """Return the machines with this pool's tag, or all, that are up."""
        found = [
            machine.instance
            for machine in list(self.machines.values())
            if pool_id in (None, machine.instance.pool_id) and machine.host.is_up
        ]
        return sorted(found, key=lambda instance: (instance.pool_id, instance.rank))

    def take_back(self, instance_id: str) -> None:
        """End a machine and forget it; an unknown one is ignored."""
        if (machine := self.machines.get(instance_id)) is not None:
            if machine.host.is_up:  # the pid of a machine that is down may belong to another process by now
                machine.host.crash()
            self.machines.pop(instance_id, None)

    def close(self) -> None:
        """Terminate every machine."""
        for instance_id in list(self.machines):
            self.take_back(instance_id)

    def _rent_one(self, offer: Offer, rank: int, tags: Tags, startup: str) -> Instance:
        host = self._fleet.create(**self._options)
        instance = _instance(offer, {**tags, RANK_TAG: str(rank)}, host)
        self.machines[instance.id] = Machine(instance, host)
        self._prepare(host)
        _boot(host, instance, startup)
        return instance


class Rental(Provider):
    """Rents hosts of a test bed for `price_per_hour` USD. Made by `Cloud.provider`."""

    name: ClassVar[str] = "rental"
    end_command: ClassVar[str] = "poweroff"

    price_per_hour: float = 3.6
    _cloud: Cloud = PrivateAttr()

    def offers(self, want: Requirements) -> list[Offer]:
        """Return one offer."""
        self._cloud.requests.append("offers")
        return [
            Offer(
                provider=self.name,
                instance_type="rental.1",
                region="testbed",
                price_per_hour=self.price_per_hour,
                on_demand_price_per_hour=self.price_per_hour,
                vcpus=2,
                memory_gb=4,
            )
        ]

    def launch(self, offer: Offer, count: int, tags: Tags, startup: str) -> list[Instance]:
        """Create hosts, all at once.

        Each runs the startup script as root, detached, with its output in the instance directory's `log`.
        """
        self._cloud.requests.append("launch")
        return self._cloud.rent(offer, count, tags, startup)

    def instances(self, pool_id: str | None = None) -> list[Instance]:
        """Return the hosts of the pool, or all, that are up: one that has powered itself off is gone."""
        self._cloud.requests.append("instances")
        return self._cloud.listed(pool_id)

    def terminate(self, ids: Sequence[str]) -> None:
        """Crash these hosts; this machine's memory that they used is free when it returns."""
        self._cloud.requests.append("terminate")
        for instance_id in ids:
            self._cloud.take_back(instance_id)


def _instance(offer: Offer, tags: Tags, host: Host) -> Instance:
    _, kind, key = host.known_hosts_line.split()
    instance_id = f"rental-{uuid.uuid4().hex[:12]}"
    return Instance(
        id=instance_id,
        provider=Rental.name,
        pool_id=tags[POOL_TAG],
        rank=int(tags[RANK_TAG]),
        tags=dict(tags),
        state=InstanceState.RUNNING,
        region=offer.region,
        instance_type=offer.instance_type,
        price_per_hour=offer.price_per_hour,
        on_demand_price_per_hour=offer.on_demand_price_per_hour,
        ip=host.ip,
        private_ip=host.ip,
        directory=f"{HOME}/instances/{instance_id}",
        endpoint=Endpoint(
            host=host.ip,
            port=host.port,
            user=host.user,
            key=str(host.key_path),
            host_key=f"{kind} {key}",
            config="/dev/null",
        ),
    )


def _boot(host: Host, instance: Instance, startup: str) -> None:
    """Run the startup script independently of the connection that sends it.

    Raises RuntimeError with the host's output.
    """
    assert instance.directory is not None
    environment = {
        "SKYWARD_INSTANCE_ID": instance.id,
        "SKYWARD_POOL_ID": instance.pool_id,
        "SKYWARD_RANK": str(instance.rank),
        "SKYWARD_INSTANCE_DIRECTORY": instance.directory,
    }
    variables = shlex.join(f"{name}={value}" for name, value in environment.items())
    done = host.run(BOOT.format(directory=shlex.quote(instance.directory), variables=variables), text=startup)
    if done.returncode:
        raise RuntimeError(
            f"{host.name} did not start its startup script: exit code {done.returncode}: {done.stderr.strip()}"
        )
