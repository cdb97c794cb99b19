"""Virtual machines of Verda (formerly DataCrunch): api.verda.com/v1.

Facts: Verda's documentation and SDKs up to November 2026 (docs/clouds/verda.md).

Peculiarities: a token that expires after an hour and needs two halves of a credential; prices as strings; ids as plain
text; boot scripts and disks that are separate objects without tags and may outlive the machine; no preemption notice.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Self
from urllib.parse import quote

from pydantic import Field, SecretStr, model_validator

from skyward_core.concurrency.threads import side_by_side
from skyward_core.errors import (
    BadRequest,
    CredentialsError,
    NoCapacity,
    ProviderFailed,
    SkywardError,
)
from skyward_core.machines.instances import Instance, InstanceState
from skyward_core.machines.offers import Extra, Offer, Requirements
from skyward_core.providers._http import field_of, number_of, rows_in
from skyward_core.providers.base import LAUNCH_TAG, POOL_TAG, RANK_TAG, Provider, Sale, Tags
from skyward_core.providers.ssh_keys import Key, host_key, our_key
from skyward_core.providers.tagging import of_machine
from skyward_core.providers.userdata import END_COMMAND, boot_script, script
from skyward_core.providers.verda.api import CONSOLE, URL, Credentials, Json, VerdaApi, read_credentials
from skyward_core.providers.verda.boot import END_BY_ITSELF
from skyward_core.providers.verda.instances import to_instance
from skyward_core.providers.verda.launch import await_addresses, create_machines, order_of
from skyward_core.providers.verda.offers import disk_of, image_of, to_offer
from skyward_core.providers.verda.tags import name_of, script_name_of, tags_of
from skyward_core.providers.verda.termination import delete_all, instances_left, remove, sweep

log = logging.getLogger(__name__)


class Verda(Provider):
    """Rent virtual machines of Verda, formerly DataCrunch.

    Args:
        region: one location such as "FIN-03", or several; all if not given.
        client_id, client_secret: credentials of the cloud API; by default VERDA_CLIENT_ID and VERDA_CLIENT_SECRET, then
            the file of Verda's own tools.
        node_client_id, node_client_secret: credentials that are put on each machine, so that it can delete itself.
            The user's code can read them there, and Verda has no credentials with fewer rights. Without them a machine
            that ends itself powers off, and is billed until it is terminated.
        image: an image's slug ("ubuntu-24.04-cuda-13.0-open-docker"); by default one that fits the machine.
        os_volume_gb: size of a machine's disk in GB. The disk is billed in addition.
        ssh_key: path of your own SSH key.
        endpoint_url: URL of the API, with its version.
    """

    name: ClassVar[str] = "verda"
    end_command: ClassVar[str] = END_COMMAND
    gone_deadline_seconds: ClassVar[float] = 300.0
    listing_lag_seconds: ClassVar[float] = 60.0
    """Some creating calls took longer than our time-out. Their machines appear late in the listing."""
    billing_increment_seconds: ClassVar[int] = 600

    region: str | tuple[str, ...] | None = None
    client_id: SecretStr | None = Field(default=None, exclude=True, repr=False)
    client_secret: SecretStr | None = Field(default=None, exclude=True, repr=False)
    node_client_id: SecretStr | None = Field(default=None, exclude=True, repr=False)
    node_client_secret: SecretStr | None = Field(default=None, exclude=True, repr=False)
    image: str | None = None
    os_volume_gb: int = Field(default=100, ge=50)
    ssh_key: str | None = None
    endpoint_url: str | None = None

    @model_validator(mode="after")
    def _node_credentials_are_whole(self) -> Self:
        if (self.node_client_id is None) != (self.node_client_secret is None):
            raise ValueError(
                "node_client_id and node_client_secret are the two halves of one credential: give both, or neither"
            )
        return self

    # ── the methods ──────────────────────────────────────────────────────────────────────────────────────────────────

    def offers(self, want: Requirements) -> list[Offer]:
        """Return what can be rented now: each type at each location, on demand and as spot, at current prices in USD.

        Raises NoCapacity, with the locations that have machines, if Verda has none at the configured ones.
        """
        with self._api() as api:
            types = api.list("/instance-types", currency="usd")
            places = {is_spot: api.list("/instance-availability", is_spot=is_spot) for is_spot in (False, True)}
            extras = self._extras(api)
        wanted = None if self.region is None else {self.region} if isinstance(self.region, str) else set(self.region)
        known = {place["location_code"] for listed in places.values() for place in listed}
        if wanted is not None and known and not wanted & known:
            raise NoCapacity(
                f"Verda has no machines at {', '.join(sorted(wanted))}; it has some at {', '.join(sorted(known))}"
            )
        sold = {one["instance_type"]: one for one in types if want.instance_type in (None, one["instance_type"])}
        every = (
            offer.model_copy(update={"extras_per_hour": extras})
            for is_spot, listed in places.items()
            for place in listed
            for name in dict.fromkeys(place["availabilities"])
            if name in sold and (offer := to_offer(sold[name], place["location_code"], is_spot=is_spot)) is not None
        )
        return Sale.within(self.region, every)

    def may_sell_spot(self, want: Requirements) -> bool:
        """True: spot is listed only while a machine is free."""
        return True

    def launch(self, offer: Offer, count: int, tags: Tags, startup: str) -> list[Instance]:
        """Rent machines, one call each, and wait until they have addresses.

        Machines that fail are deleted and left out.
        """
        key = our_key(self.ssh_key)
        names = {rank: name_of(tags, rank) for rank in range(int(tags[RANK_TAG]), int(tags[RANK_TAG]) + count)}
        with self._api() as api:
            order = self._order(api, offer, key)
            script_id = api.make(
                "/scripts",
                script_name_of(tags),
                {"script": self._script(api, tags, startup, key)},
                lambda one, name: one["name"] == name,
            )
            created: dict[int, str] = {}
            try:
                created = create_machines(
                    api,
                    {rank: order_of(order, name, script_id, of_machine(tags, rank)) for rank, name in names.items()},
                )
                up = await_addresses(api, created)
            except SkywardError as error:
                # otherwise a machine may exist and need the script
                if isinstance(error, NoCapacity) or not (created or isinstance(error, ProviderFailed)):
                    remove(api, f"/scripts/{quote(script_id)}")
                raise
            try:
                sweep(api, api.list("/instances"))
            except SkywardError as error:
                log.warning("old scripts and disks at Verda could not be swept: %s", error)
        return [
            to_instance(up[machine_id], of_machine(tags, rank), key, offer.extras_per_hour, offer)
            for rank, machine_id in sorted(created.items())
            if machine_id in up
        ]

    def instances(self, pool_id: str | None = None) -> list[Instance]:
        """Return the pool's machines at all locations.

        A machine without a known address, or without a readable key here, has no endpoint.
        """
        with self._api() as api:
            machines = api.list("/instances")
            extras = self._extras(api)
        key = self._key_if_here()
        tagged = [
            (machine, tags)
            for machine in machines
            if (tags := tags_of(machine)) is not None and pool_id in (None, tags[POOL_TAG])
        ]
        found = [to_instance(machine, tags, key, extras) for machine, tags in tagged]
        return [instance for instance in found if instance.state is not InstanceState.GONE]

    def terminate(self, ids: Sequence[str]) -> None:
        """Delete machines with their disks and scripts, and objects that earlier machines of ours have left.

        Machines that are still provisioning are tried again.
        """
        if not ids:
            return
        with self._api() as api:
            listed = api.list("/instances")
            known = {machine["id"]: machine for machine in listed}
            hidden = [machine_id for machine_id in dict.fromkeys(ids) if machine_id not in known]
            known |= {
                machine["id"]: machine
                for machine in side_by_side(api.machine, hidden, "skyward-verda")
                if machine is not None
            }
            named = [known[machine_id] for machine_id in dict.fromkeys(ids) if machine_id in known]
            left = delete_all(
                api, [machine for machine in named if machine["status"] not in ("deleting", "discontinued")]
            )
            try:
                sweep(api, listed, {machine["hostname"] for machine in named if machine["id"] not in left})
            finally:
                if left:
                    raise instances_left(left)

    def ends_for_good(self) -> bool:
        """True only with node credentials: then a machine deletes itself. One that is off is billed."""
        return self.node_client_id is not None

    def account(self) -> str:
        """Return a name made from a hash of the client id, which is half a credential.

        Verda offers nothing better, so two credentials of one team are two accounts here.
        """
        with self._api() as api:
            field_of(api.request("GET", "/balance"), "currency", str, "Verda answered GET /balance")
            return f"client-{hashlib.sha256(api.credentials.client_id.encode()).hexdigest()[:12]}"

    def quotas(self) -> Mapping[str, float]:
        """Return the balance, from which Verda takes the price of machines."""
        with self._api() as api:
            balance, who = api.request("GET", "/balance"), "Verda answered GET /balance"
        currency = field_of(balance, "currency", str, who).upper()
        return {f"balance in {currency}": number_of(balance, "amount", who)}

    def console_url(self, instance: Instance) -> str | None:
        """Return the start page of the console: no permanent address of one machine's page is documented."""
        return CONSOLE

    # ── what is requested ────────────────────────────────────────────────────────────────────────────────────────────

    def _order(self, api: VerdaApi, offer: Offer, key: Key) -> Json:
        """Return the fields that all creating calls of a launch share."""
        image = self.image or image_of(api.list("/images", instance_type=offer.instance_type), offer.accelerator)
        key_name = f"skyward-{hashlib.sha256(key.public.encode()).hexdigest()[:12]}"
        key_id = api.make(
            "/ssh-keys",
            key_name,
            {"key": key.public},
            lambda one, _: one["key"].split()[:2] == key.public.split()[:2],
            is_kept=True,
        )
        # by default the disk is kept and billed
        fate = {"on_spot_discontinue": "delete_permanently"} if offer.is_spot else {}
        return {
            "instance_type": offer.instance_type,
            "image": image,
            "ssh_key_ids": [key_id],
            "location_code": offer.region,
            "os_volume": {"size": self.os_volume_gb, **fate},
            "is_spot": offer.is_spot,
            "contract": "SPOT" if offer.is_spot else "PAY_AS_YOU_GO",
            "pricing": "FIXED_PRICE",
        }

    def _extras(self, api: VerdaApi) -> tuple[Extra, ...]:
        """Return the cost of the disk, which is a separate object, at today's price.

        Its price is asked for once: a listing of machines must neither fail nor wait for it.
        """
        try:
            types = rows_in(
                api.request("GET", "/volume-types", query={"currency": "usd"}, is_repeatable=False),
                "Verda answered GET /volume-types",
            )
        except SkywardError as error:
            log.warning("the price of disks at Verda is assumed: %s", error)
            types = []
        return (disk_of(types, self.os_volume_gb),)

    def _script(self, api: VerdaApi, tags: Tags, startup: str, key: Key) -> str:
        end = "poweroff"
        if self.node_client_id is not None and self.node_client_secret is not None:
            words = (
                api.credentials.url,
                self.node_client_id.get_secret_value(),
                self.node_client_secret.get_secret_value(),
            )
            end = END_BY_ITSELF.format(words=", ".join(map(json.dumps, words)))
        return script(boot_script(startup, tags, "hostname", end), key, host_key(tags[LAUNCH_TAG], key))

    def _key_if_here(self) -> Key | None:
        """Return our key; None if it cannot be read, because listed machines can be terminated without it."""
        try:
            return our_key(self.ssh_key)
        except BadRequest as error:
            log.warning("machines at Verda are listed without endpoint: %s", error)
            return None

    def _api(self) -> VerdaApi:
        planted = (self.node_client_id, self.node_client_secret)
        return VerdaApi(self._credentials(), [half.get_secret_value() for half in planted if half is not None])

    def _credentials(self) -> Credentials:
        """Return the given credentials, or those of environment or Verda's tools. Raises CredentialsError."""
        environ = os.environ
        given = tuple(
            None if half is None else half.get_secret_value() for half in (self.client_id, self.client_secret)
        )
        names = ("VERDA_CLIENT_ID", "VERDA_CLIENT_SECRET"), ("DATACRUNCH_CLIENT_ID", "DATACRUNCH_CLIENT_SECRET")
        fields = [
            f"{field}=" if value else f"the variable {name}"
            for field, value, name in zip(("client_id", "client_secret"), given, names[0], strict=True)
        ]
        pairs = (
            (given[0] or environ.get(names[0][0]), given[1] or environ.get(names[0][1]), " and ".join(fields)),
            (environ.get(names[1][0]), environ.get(names[1][1]), f"the variables {' and '.join(names[1])}"),
        )
        for client_id, client_secret, source in pairs:
            if client_id and client_secret:
                return Credentials(client_id, client_secret, self.endpoint_url or URL, source)
        file = Path(
            environ.get("VERDA_SHARED_CREDENTIALS_FILE")
            or Path(environ.get("VERDA_HOME") or "~/.verda") / "credentials"
        ).expanduser()
        found = read_credentials(file, environ.get("VERDA_PROFILE") or "default")
        if found.get("verda_client_id") and found.get("verda_client_secret"):
            return Credentials(
                found["verda_client_id"],
                found["verda_client_secret"],
                self.endpoint_url or found.get("verda_base_url") or URL,
                f"the file {file}",
            )
        raise CredentialsError(
            f"no credentials for Verda: set VERDA_CLIENT_ID and VERDA_CLIENT_SECRET, or write them to {file} (`verda"
            f" auth login`). They are created at {CONSOLE}"
        )
