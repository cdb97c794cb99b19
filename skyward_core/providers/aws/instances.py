"""Machines of EC2 as `Instance` values: what DescribeInstances says, addresses, and how to log in."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from skyward_core.concurrency.backoff import Backoff
from skyward_core.errors import ProviderFailed
from skyward_core.machines.instances import Endpoint, Instance, InstanceState
from skyward_core.providers import userdata
from skyward_core.providers.aws.account import COMING, AwsAccount, number, state_of, terminated
from skyward_core.providers.aws.launch import ON_DEMAND_PRICE_TAG, PRICE_TAG, why_failed
from skyward_core.providers.aws.offers import billed_beside
from skyward_core.providers.aws.region_offers import CHIP_FAMILIES
from skyward_core.providers.aws.session_manager import command
from skyward_core.providers.base import LAUNCH_TAG, POOL_TAG, RANK_TAG
from skyward_core.providers.ssh_keys import Key, host_key
from skyward_core.providers.tagging import of_machine, rank_in

ADDRESS_SECONDS = 300.0
"""How long a machine may take from the creating call to an address. A few seconds are usual."""
FIRST_LOOK_SECONDS, LONGEST_LOOK_SECONDS = 0.5, 5.0
RECENT_SECONDS = 60.0
"""For some seconds after a creating call, EC2 may answer that it does not know the machine
(`InvalidInstanceID.NotFound`). Then the machine is not gone; it appears later.
"""


@dataclass(frozen=True, slots=True)
class RecentMachines:
    """The machines that creating calls of this process have returned, with the times (time.monotonic).

    They are no part of a provider's value: any two are equal.
    """

    created: dict[str, float] = field(default_factory=dict[str, float], compare=False)

    def note(self, ids: Iterable[str]) -> None:
        now = time.monotonic()
        for old in [machine_id for machine_id, at in self.created.items() if at + RECENT_SECONDS < now]:
            self.created.pop(old, None)
        self.created.update(dict.fromkeys(ids, now))

    def among(self, ids: Iterable[str]) -> set[str]:
        """Return those of these ids that are recent."""
        now = time.monotonic()
        return {machine_id for machine_id in ids if self.created.get(machine_id, -math.inf) + RECENT_SECONDS > now}


class HostKeys:
    """Our SSH key, and the host keys of launches. Each host key is derived once."""

    def __init__(self, key: Key | None) -> None:
        self._key = key
        self._public: dict[str, str] = {}

    def endpoint(
        self, host: str | None, launch: str | None, proxy_command: tuple[str, ...] | None = None
    ) -> Endpoint | None:
        if host is None or launch is None or self._key is None:
            return None
        if launch not in self._public:
            self._public[launch] = host_key(launch, self._key).public
        return Endpoint(
            host=host,
            port=22,
            user="root",
            key=str(self._key.path),
            host_key=self._public[launch],
            known_hosts="/dev/null",
            config="/dev/null",
            proxy_command=proxy_command,
        )


@dataclass(frozen=True, slots=True)
class InstanceReader:
    """Reads machines of DescribeInstances with the settings of a provider, which have the same names."""

    provider: str
    disk_gb: int
    use_private_ip: bool
    use_ssm: bool
    profile: str | None
    endpoint_url: str | None

    def address(self, machine: Mapping[str, Any]) -> str | None:
        """Return the address to log in at; None while there is none.

        With Session Manager it is the machine's id, as soon as the machine runs and has a private address.
        """
        if self.use_ssm:
            return (
                machine["InstanceId"]
                if machine.get("PrivateIpAddress") and state_of(machine) is InstanceState.RUNNING
                else None
            )
        return machine.get("PrivateIpAddress" if self.use_private_ip else "PublicIpAddress") or None

    def read(self, machine: Mapping[str, Any], region: str, keys: HostKeys) -> Instance:
        """Return a machine of DescribeInstances as an instance.

        All machines of a creating call have the same tags. A rank is the first rank, which is a tag, plus the
        machine's place in the call.
        """
        tags = {tag["Key"]: tag["Value"] for tag in machine.get("Tags", [])}
        rank = rank_in(tags.get(RANK_TAG, ""), machine["InstanceId"]) + int(machine.get("AmiLaunchIndex", 0))
        has_chips = machine["InstanceType"].startswith(CHIP_FAMILIES)
        return Instance(
            id=machine["InstanceId"],
            provider=self.provider,
            pool_id=tags.get(POOL_TAG, ""),
            rank=rank,
            state=state_of(machine),
            region=region,
            instance_type=machine["InstanceType"],
            is_spot=machine.get("InstanceLifecycle") == "spot",
            price_per_hour=number(tags.get(PRICE_TAG)) or 0.0,
            on_demand_price_per_hour=number(tags.get(ON_DEMAND_PRICE_TAG)),
            extras_per_hour=billed_beside(self.disk_gb, has_chips=has_chips, is_public=not self.use_private_ip),
            ip=machine.get("PublicIpAddress") or None,
            private_ip=machine.get("PrivateIpAddress") or None,
            tags=of_machine(tags, rank),
            directory=userdata.directory_of(machine["InstanceId"]),
            endpoint=keys.endpoint(
                self.address(machine), tags.get(LAUNCH_TAG), self._proxy_command(machine["InstanceId"], region)
            ),
        )

    def _proxy_command(self, machine_id: str, region: str) -> tuple[str, ...] | None:
        return command(machine_id, region, self.profile, self.endpoint_url) if self.use_ssm else None

    def wait_for_addresses(
        self, account: AwsAccount, region: str, launch: str, ids: Sequence[str]
    ) -> list[dict[str, Any]]:
        """Wait until each machine has an address or has failed; return those that have one.

        The others are terminated. Raises NoCapacity, QuotaExceeded, BadRequest or ProviderFailed if all have failed.
        """
        deadline = time.monotonic() + ADDRESS_SECONDS
        pauses = Backoff(FIRST_LOOK_SECONDS, LONGEST_LOOK_SECONDS, 1.5).pauses()
        while True:
            listed = account.machines(region, {"Name": f"tag:{LAUNCH_TAG}", "Values": [launch]})
            found = {machine["InstanceId"]: machine for machine in listed if machine["InstanceId"] in ids}
            failed = {machine_id: machine for machine_id, machine in found.items() if state_of(machine) not in COMING}
            ready = {
                machine_id: machine
                for machine_id, machine in found.items()
                if machine_id not in failed and self.address(machine)
            }
            if len(ready) + len(failed) == len(ids) or time.monotonic() > deadline:
                break
            time.sleep(next(pauses))
        if left := [machine_id for machine_id in ids if machine_id not in ready]:
            # The disk of a stopped machine costs money. If this fails, the sweep finds the machine by its tags.
            terminated(account, region, left)
        if not ready and not failed:
            raise ProviderFailed(
                f"{', '.join(left)} had no address after {ADDRESS_SECONDS:.0f} s; termination was requested"
            )
        if not ready:
            raise why_failed(next(iter(failed.values())))
        return list(ready.values())
