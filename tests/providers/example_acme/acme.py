"""A complete provider for Acme, a cloud that does not exist. docs/clouds/another-cloud.md explains it."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from pydantic import Field, SecretStr

from skyward_core.accelerators.catalog import find
from skyward_core.concurrency.threads import side_by_side
from skyward_core.errors import (
    BadRequest,
    CredentialsError,
    InstancesLeft,
    NoCapacity,
    ProviderFailed,
    QuotaExceeded,
    RateLimited,
    SkywardError,
)
from skyward_core.machines.instances import Endpoint, Instance, InstanceState
from skyward_core.machines.offers import Offer, Requirements
from skyward_core.providers._http import Api
from skyward_core.providers.base import LAUNCH_TAG, POOL_TAG, RANK_TAG, Provider, Tags, chips
from skyward_core.providers.tagging import launch_word, of_machine
from skyward_core.providers.userdata import END_COMMAND, Key, boot_script, cloud_config, directory_of, host_key, our_key

API_URL = "https://api.acme.example"
ID_SHAPE = re.compile("[a-z0-9-]+")
MACHINE_ID = "curl -sf -m 20 http://169.254.169.254/acme/id"
POLL_SECONDS, ADDRESS_SECONDS = 1.0, 300.0
STATES = {
    "creating": InstanceState.PENDING,
    "active": InstanceState.RUNNING,
    "off": InstanceState.STOPPING,
    "failed": InstanceState.STOPPING,
}
REFUSALS: Mapping[str, type[SkywardError]] = {"sold_out": NoCapacity, "limit_reached": QuotaExceeded}

type Row = Mapping[str, Any]


class Acme(Provider):
    """Rent machines of Acme."""

    name: ClassVar[str] = "acme"
    display_name: ClassVar[str] = "Acme"
    rents: ClassVar[frozenset[str]] = chips("H100")
    end_command: ClassVar[str] = END_COMMAND
    harmless_fields: ClassVar[frozenset[str]] = frozenset({"region"})

    region: str | None = None
    """One region, or None: all."""
    ssh_key: str | None = None
    """Path of a private key without passphrase; by default one is created."""
    endpoint_url: str | None = None
    """In place of Acme's own URL."""
    token: SecretStr | None = Field(default=None, exclude=True, repr=False)
    """A token that may create and delete machines; by default ACME_TOKEN."""

    def offers(self, want: Requirements) -> list[Offer]:
        with self._api() as api:
            offers = [_offer(row) for row in api.request("GET", "/v1/types")]
        return [offer for offer in offers if offer and self.region in (None, offer.region)]

    def launch(self, offer: Offer, count: int, tags: Tags, startup: str) -> list[Instance]:
        key = our_key(self.ssh_key)
        boot = boot_script(startup, tags, MACHINE_ID)
        user_data = cloud_config(boot, key, host_key(tags[LAUNCH_TAG], key))
        order = {"type": offer.instance_type, "region": offer.region, "user_data": user_data}
        ranks = range(int(tags[RANK_TAG]), int(tags[RANK_TAG]) + count)
        orders = [
            {**order, "name": f"{tags[POOL_TAG]}-{rank}-{launch_word(tags)}".lower(), "labels": of_machine(tags, rank)}
            for rank in ranks
        ]
        with self._api() as api:
            outcomes = side_by_side(lambda order: _created(api, order), orders, "skyward-acme")
            if not (made := [row["id"] for row in outcomes if not isinstance(row, SkywardError)]):
                raise next(error for error in outcomes if isinstance(error, SkywardError))
            rows = _with_addresses(api, made)
        if failed := sorted(set(made) - {row["id"] for row in rows}):
            self.terminate(failed)
        if not rows:
            raise NoCapacity(f"Acme's machines {', '.join(failed)} did not come up").coded("failed")
        return sorted((_instance(row, key) for row in rows), key=lambda instance: instance.rank)

    def instances(self, pool_id: str | None = None) -> list[Instance]:
        key = our_key(self.ssh_key)
        with self._api() as api:
            ours = [row for row in _machines(api) if POOL_TAG in row["labels"]]
        return [_instance(row, key) for row in ours if pool_id in (None, row["labels"][POOL_TAG])]

    def terminate(self, ids: Sequence[str]) -> None:
        left: dict[str, SkywardError] = {}
        with self._api() as api:
            for machine_id in filter(
                ID_SHAPE.fullmatch, ids
            ):  # they become paths, and the ledger may have been altered
                try:
                    api.request("DELETE", f"/v1/machines/{machine_id}", missing_is_none=True)
                except CredentialsError:
                    raise
                except SkywardError as error:
                    left[machine_id] = error
        if left:
            raise InstancesLeft(f"Acme has not ended {', '.join(left)}: {next(iter(left.values()))}", list(left))

    def account(self) -> str:
        with self._api() as api:
            return str(api.request("GET", "/v1/me")["email"])

    def _api(self) -> Api:
        token = self.token.get_secret_value() if self.token else os.environ.get("ACME_TOKEN")
        if not token:
            raise CredentialsError("no credentials for Acme: set ACME_TOKEN")
        headers = {"Authorization": f"Bearer {token}"}
        return Api("Acme", self.endpoint_url or API_URL, headers, classify=_meaning, secrets=(token,))


def _meaning(_: int, body: Mapping[str, Any], message: str) -> SkywardError | None:
    return REFUSALS[body["code"]](message) if body.get("code") in REFUSALS else None


def _offer(row: Row) -> Offer | None:
    try:
        chip = find(row["gpu"]) if row["gpu"] else None
    except BadRequest:
        return None  # no requirement can name a chip that the catalogue does not know
    return Offer(
        provider=Acme.name,
        instance_type=row["type"],
        region=row["region"],
        price_per_hour=row["usd_per_hour"],
        on_demand_price_per_hour=row["usd_per_hour"],
        vcpus=row["cpus"],
        memory_gb=row["memory_gb"],
        accelerator=chip.name if chip else None,
        accelerators=row["gpus"] if chip else 0,
        accelerator_memory_gb=row["gpu_memory_gb"] if chip else None,
        architecture="x86_64",
    )


def _created(api: Api, order: Row) -> Row | SkywardError:
    """Create one machine.

    If the answer is lost, its unique name shows whether it was created nevertheless.
    """
    try:
        return api.request("POST", "/v1/machines", body=order)
    except RateLimited as error:
        return error
    except ProviderFailed as error:
        return next((row for row in _machines(api) if row["name"] == order["name"]), error)
    except SkywardError as error:
        return error


def _with_addresses(api: Api, ids: Sequence[str]) -> list[Row]:
    """Wait until each machine has an address or has failed; return those with an address."""
    deadline = time.monotonic() + ADDRESS_SECONDS
    while True:
        rows = [
            row for row in _machines(api) if row["id"] in ids and STATES.get(row["state"]) is not InstanceState.STOPPING
        ]
        if all(row["ip"] for row in rows) or time.monotonic() > deadline:
            return [row for row in rows if row["ip"]]
        time.sleep(POLL_SECONDS)


def _machines(api: Api) -> Iterator[Row]:
    page: int | None = 1
    while page is not None:
        answer = api.request("GET", "/v1/machines", query={"page": page})
        yield from answer["machines"]
        page = answer["next"]


def _instance(row: Row, key: Key) -> Instance:
    public = host_key(row["labels"][LAUNCH_TAG], key).public
    return Instance(
        id=row["id"],
        provider=Acme.name,
        pool_id=row["labels"][POOL_TAG],
        rank=int(row["labels"][RANK_TAG]),
        state=STATES.get(row["state"], InstanceState.PENDING),
        region=row["region"],
        instance_type=row["type"],
        price_per_hour=row["usd_per_hour"],
        on_demand_price_per_hour=row["usd_per_hour"],
        ip=row["ip"],
        tags=row["labels"],
        directory=directory_of(row["id"]),
        endpoint=Endpoint(
            host=row["ip"], port=22, user="root", key=str(key.path), host_key=public, known_hosts="/dev/null"
        )
        if row["ip"]
        else None,
    )
