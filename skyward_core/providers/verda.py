"""Virtual machines of Verda (formerly DataCrunch): api.verda.com/v1.

Facts: Verda's documentation and SDKs up to November 2026 (docs/clouds/verda.md).

Peculiarities: a token that expires after an hour and needs two halves of a credential; prices as strings; ids as plain
text; boot scripts and disks that are separate objects without tags and may outlive the machine; no preemption notice.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from http import HTTPStatus
from pathlib import Path
from typing import Any, ClassVar, Self, cast
from urllib.parse import quote

from pydantic import Field, SecretStr, model_validator

from skyward_core.accelerators.catalog import find
from skyward_core.concurrency.backoff import Backoff
from skyward_core.concurrency.threads import side_by_side
from skyward_core.errors import BadRequest, CredentialsError, InstancesLeft, NoCapacity, ProviderFailed, SkywardError
from skyward_core.machines.instances import Instance, InstanceState
from skyward_core.machines.offers import Extra, Offer, Requirements, architecture_beside, by_month
from skyward_core.providers._http import (
    Row,
    before_creation,
    certain_if_refused,
    field_of,
    is_unsure,
    missing,
    number_of,
    rows_in,
    tried,
)
from skyward_core.providers.base import (
    CREATED_TAG,
    LAUNCH_TAG,
    POOL_TAG,
    RANK_TAG,
    WORK_TAG,
    Provider,
    Sale,
    Tags,
    chips,
)
from skyward_core.providers.tagging import from_codes, launch_word, of_machine, to_codes
from skyward_core.providers.userdata import (
    END_COMMAND,
    Key,
    boot_script,
    directory_of,
    endpoint_of,
    host_key,
    our_key,
    script,
)
from skyward_core.providers.verda_api import (
    CAPACITY,
    CONSOLE,
    GONE_WORDS,
    URL,
    Credentials,
    Json,
    VerdaApi,
    id_in,
    read_credentials,
    speaks_of,
)
from skyward_core.shown_text import visible_logger

log = visible_logger(__name__)


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
    display_name: ClassVar[str] = "Verda"
    rents: ClassVar[frozenset[str]] = chips(
        "L40S, A100, H100, H200, B200, B300, GB300, V100, RTX A6000, RTX 6000 Ada, RTX PRO 6000"
    )
    harmless_fields: ClassVar[frozenset[str]] = frozenset({"region", "os_volume_gb"})
    own_fields: ClassVar[frozenset[str]] = frozenset({"image"})
    end_command: ClassVar[str] = END_COMMAND
    gone_deadline_seconds: ClassVar[float] = 300.0
    listing_lag_seconds: ClassVar[float] = 60.0
    """Some creating calls took longer than our time-out. Their machines appear late in the listing."""
    ends_for_good_with: ClassVar[str] = "give node_client_id= and node_client_secret="

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
            with before_creation():
                order = self._order(api, offer, key)
                script_id = api.make(
                    "/scripts",
                    script_name_of(tags),
                    {"script": self._script(api, tags, startup, key)},
                    lambda script, name: script["name"] == name,
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

    def missing_credentials(self) -> str:
        """Return which variables or file are missing; "" if there are credentials."""
        return missing(self._credentials)

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


# ── offers and images ────────────────────────────────────────────────────────────────────────────────────────────────


NVME_USD_PER_GB_MONTH = 0.20
"""The price of disks where `/volume-types` does not tell it in USD (fact sheet, 3.2)."""
OLD_CHIPS = frozenset({"V100", "RTX A6000"})
"""Verda's images with CUDA 13 do not support these."""
OPEN_CHIPS = frozenset({"B200", "B300", "GB200", "GB300", "RTX PRO 6000"})
"""Blackwell: needs the open kernel module and CUDA 12.8."""


def image_of(images: Sequence[Json], accelerator: str | None) -> str:
    """Return the slug of the best image: Ubuntu 24.04, and for GPUs the newest CUDA that supports them, with Docker."""
    fitting = [str(image["image_type"]) for image in images if not image.get("is_cluster")]
    if not fitting:
        raise BadRequest("Verda names no image for this type of machine: give one with Verda(image=...)")

    def worth(slug: str) -> tuple[Any, ...]:
        cuda = re.search(r"cuda-?(\d+)\.(\d+)", slug)
        version: tuple[int, ...] = (int(cuda[1]), int(cuda[2])) if cuda else ()
        if accelerator is None:
            return (not cuda, "24.04" in slug, "docker" not in slug)
        suits = version < (13, 0) if accelerator in OLD_CHIPS else version >= (12, 8) or accelerator not in OPEN_CHIPS
        is_open = "open" in slug or not slug.startswith("ubuntu")  # newer slugs do not say so
        return (
            bool(cuda) and suits,
            accelerator not in OPEN_CHIPS or is_open,
            "jupyter" not in slug,
            "24.04" in slug,
            version,
            "docker" in slug,
        )

    return max(fitting, key=worth)


def disk_of(types: Sequence[Row], gb: int) -> Extra:
    """Return the cost of a disk, by Verda's list of volume types (`price.price_per_month_per_gb`, as its SDKs read)."""
    prices = [one.get("price") or {} for one in types if one.get("type") == "NVMe"]
    monthly = [usd(price.get("price_per_month_per_gb")) for price in prices if price.get("currency", "usd") == "usd"]
    if monthly and monthly[0]:
        return by_month("disk", gb * monthly[0], "Verda's /volume-types, NVMe", "at launch")
    return by_month(
        "disk", gb * NVME_USD_PER_GB_MONTH, "Verda's price of NVMe, about $0.20 per GB and month", "2026-11-20"
    )


def to_offer(sold: Json, location: str, *, is_spot: bool) -> Offer | None:
    """Return the offer; None without a price, for confidential machines, and for unknown chips.

    CUDA is reported to fail on confidential machines.
    """
    on_demand, price = usd(sold.get("price_per_hour")), usd(sold.get("spot_price" if is_spot else "price_per_hour"))
    name = str(sold["instance_type"])
    if not price or name.endswith(".CC"):
        return None
    gpu = cast("Json", sold.get("gpu") or {})
    chips = int(gpu.get("number_of_gpus") or 0)
    chip = form_factor = None
    if chips:
        text = re.sub(r"^\d+\s*x\s*|\s*\d+\s*GB$", "", str(gpu.get("description") or sold.get("model") or ""))
        found = re.search(r"\b(SXM|PCIe|NVL)\d*\b", text)
        form_factor = found[1] if found else None
        try:
            chip = find(re.sub(r"\s*\b(SXM|PCIe|NVL)\d*\b", "", text)).name
        except BadRequest:
            log.debug("Verda sells %s with %r, which the catalogue does not know", name, text)
            return None
    return Offer(
        provider="verda",
        instance_type=name,
        region=location,
        is_spot=is_spot,
        price_per_hour=price,
        on_demand_price_per_hour=on_demand,
        vcpus=float(sold["cpu"]["number_of_cores"]),
        memory_gb=float(sold["memory"]["size_in_gigabytes"]),
        accelerator=chip,
        accelerators=chips,
        # the row has the memory of all chips together
        accelerator_memory_gb=float(sold["gpu_memory"]["size_in_gigabytes"]) / chips if chips else None,
        form_factor=form_factor,
        architecture=architecture_beside(chip),
    )


def usd(price: object) -> float | None:
    """Return a price, which Verda writes as a string."""
    with contextlib.suppress(TypeError, ValueError):
        return float(cast("str", price))
    return None


# ── launching ────────────────────────────────────────────────────────────────────────────────────────────────────────


ADDRESS_SECONDS = 600.0
"""How long a machine may take from the creating call to its address."""
POLL_SECONDS, LONGEST_POLL_SECONDS = 1.0, 5.0


def create_machines(api: VerdaApi, orders: Mapping[int, Json]) -> dict[int, str]:
    """Create a machine of each order; return their ids by rank.

    A call with unknown outcome is not repeated: its machine is looked up by name. Raises the error if there is no
    machine.
    """
    created, failures = tried(
        lambda rank: id_in(api.request("POST", "/instances", body=orders[rank]), "/instances"),
        list(orders),
        "skyward-verda",
    )
    unsure = {rank: error for rank, error in failures.items() if is_unsure(error)}
    if unsure:
        by_name = {machine["hostname"]: machine["id"] for machine in api.list("/instances")}
        created |= {rank: by_name[name] for rank in unsure if (name := orders[rank]["hostname"]) in by_name}
    if created:
        for rank in failures.keys() - created.keys():
            log.warning("Verda did not create the machine of rank %d: %s", rank, failures[rank])
        return created
    error = next(
        iter([*(error for error in unsure.values() if error.code != "service_unavailable"), *failures.values()])
    )
    if error.code == "service_unavailable":  # Verda's code where it has no machine left
        raise NoCapacity(str(error)).coded(error.code).advised(CAPACITY) from error
    raise certain_if_refused(error)


def await_addresses(api: VerdaApi, created: Mapping[int, str]) -> dict[str, Json]:
    """Wait until each machine has an address or has failed. Delete those that failed; return the others by id.

    Raises NoCapacity if no machine is left.
    """
    up: dict[str, Json] = {}
    failed: dict[str, str] = {}
    deadline = time.monotonic() + ADDRESS_SECONDS
    pauses = Backoff(POLL_SECONDS, LONGEST_POLL_SECONDS).pauses()
    while True:
        listed = {machine["id"]: machine for machine in api.list("/instances")}
        waiting = [machine_id for machine_id in created.values() if machine_id not in up and machine_id not in failed]
        for machine_id in waiting:
            machine = listed.get(machine_id) or api.machine(machine_id)  # the list omits discontinued machines
            if machine is None:
                continue
            if state_of(machine) in (InstanceState.STOPPING, InstanceState.GONE):
                failed[machine_id] = machine["status"]
            elif machine.get("ip"):
                up[machine_id] = machine
        if len(up) + len(failed) == len(created):
            break
        if time.monotonic() + (pause := next(pauses)) > deadline:
            failed |= {
                machine_id: f"no address after {ADDRESS_SECONDS:.0f} s"
                for machine_id in waiting
                if machine_id not in up and machine_id not in failed
            }
            break
        time.sleep(pause)
    if failed:
        log.warning("machines at Verda failed: %s", failed)
        left = delete_all(api, [machine for machine_id in failed if (machine := api.machine(machine_id)) is not None])
        # not NoCapacity, because machines are left; not InstancesLeft, because the pool should try its next provider
        if left and not up:
            raise ProviderFailed(
                f"none of {len(created)} machines at Verda got an address ({failed}): {instances_left(left)}"
            ) from next(iter(left.values()))
        if left:
            log.warning("some could not be deleted: %s", instances_left(left))
    if not up:
        words = list(dict.fromkeys(failed.values()))
        raise NoCapacity(f"none of {len(created)} machines at Verda got an address: {', '.join(words)}").coded(words[0])
    return up


def order_of(order: Json, name: str, script_id: str, tags: Tags) -> Json:
    return {
        **order,
        "hostname": name,
        "description": description_of(name),
        "startup_script_id": script_id,
        "os_volume": {"name": DISK_PREFIX + name, **order["os_volume"]},
        "tags": to_tags(tags),
    }


# ── machines as instances ────────────────────────────────────────────────────────────────────────────────────────────

HOST_KEY_SECONDS = 180.0
"""How long after its first answer a machine may show its image's host key.

Its script may finish a minute after sshd answers.
"""
STATES: Mapping[str, InstanceState] = {
    **dict.fromkeys(("ordered", "new", "provisioning", "validating", "pending", "restoring"), InstanceState.PENDING),
    "running": InstanceState.RUNNING,
    **dict.fromkeys(
        (
            "offline",
            "starting_hibernation",
            "hibernating",
            "error",
            "no_capacity",
            "deleting",
            "notfound",
            "installation_failed",
        ),
        InstanceState.STOPPING,
    ),
    "discontinued": InstanceState.GONE,
}
"""States that are missing here ("unknown") are PENDING: the machine may be billed and is not usable."""


def to_instance(
    machine: Json, tags: dict[str, str], key: Key | None, extras: tuple[Extra, ...], offer: Offer | None = None
) -> Instance:
    """Return a machine as Instance; with the offer of its launch, at that offer's prices."""
    launch, ip = tags.get(LAUNCH_TAG), machine.get("ip")
    price = offer.price_per_hour if offer is not None else usd(machine.get("price_per_hour")) or 0.0
    is_spot = bool(machine.get("is_spot"))
    endpoint = None
    if ip and key is not None and launch is not None:
        endpoint = endpoint_of(ip, 22, launch, key, host_key_grace_seconds=HOST_KEY_SECONDS)
    return Instance(
        id=machine["id"],
        provider="verda",
        pool_id=tags[POOL_TAG],
        rank=int(tags[RANK_TAG]),
        state=state_of(machine),
        region=machine["location"],
        instance_type=machine["instance_type"],
        is_spot=is_spot,
        price_per_hour=price,
        on_demand_price_per_hour=offer.on_demand_price_per_hour if offer is not None else None if is_spot else price,
        extras_per_hour=extras,
        ip=ip,
        private_ip=machine.get("private_ip"),
        tags=tags,
        directory=directory_of(machine["hostname"]),
        endpoint=endpoint,
    )


def state_of(machine: Json) -> InstanceState:
    return STATES.get(machine["status"], InstanceState.PENDING)


# ── names and tags ───────────────────────────────────────────────────────────────────────────────────────────────────

TAG_CHARACTERS, MOST_TAGS, TAG_PLAIN = 127, 10, "A-Za-z0-9.-"
NAME = re.compile(r"(?P<pool>.+)-(?P<rank>\d+)-(?P<launch>[a-z0-9]{1,8})")
SCRIPT_NAME = re.compile(r"skyward-(?P<pool>.+)-(?P<launch>[a-z0-9]{1,8})-(?P<made>\d+)")


def tags_of(machine: Json) -> dict[str, str] | None:
    """Return the tags of a machine of ours; None for others.

    A machine that Verda has not tagged is recognised by name and description together.
    """
    tags = {str(tag["key"]): from_codes(str(tag.get("value") or "")) for tag in machine.get("tags") or ()}
    if POOL_TAG in tags and tags.get(RANK_TAG, "").isdecimal():
        return tags
    match = NAME.fullmatch(machine["hostname"])
    if match is None or machine.get("description") != description_of(machine["hostname"]):
        return None
    return {**tags, POOL_TAG: match["pool"], RANK_TAG: match["rank"]}


def to_tags(tags: Tags) -> list[Json]:
    """Return tags in Verda's format.

    Values have only letters, digits, "." and "-", because Verda documents no other characters.
    """
    words = {key: to_codes(value, TAG_PLAIN) for key, value in tags.items() if not key.startswith(WORK_TAG)}
    if len(words) < MOST_TAGS and (
        work := " ".join(
            f"{key.removeprefix(WORK_TAG)}:{value}" for key, value in tags.items() if key.startswith(WORK_TAG)
        )
    ):
        # one tag for all, cut to fit: it is for people, and the ledger has everything
        words[WORK_TAG.rstrip("-")] = _cut(work)
    long = [key for key, word in words.items() if len(word) > TAG_CHARACTERS]
    if long or len(words) > MOST_TAGS:
        raise BadRequest(
            f"Verda takes {MOST_TAGS} tags of {TAG_CHARACTERS} characters for a machine at most:"
            f" {', '.join(long or words)} is too much"
        )
    return [{"key": key, "value": word} for key, word in words.items()]


def _cut(text: str) -> str:
    """Return the longest beginning of a text that fits, without half a code."""
    word = ""
    for character in text:
        code = to_codes(character, TAG_PLAIN)
        if len(word) + len(code) > TAG_CHARACTERS:
            break
        word += code
    return word


def name_of(tags: Tags, rank: int) -> str:
    """Return the name of a machine. It is set in the creating call, and finds the machine after a lost answer."""
    return f"{tags[POOL_TAG]}-{rank}-{launch_word(tags)}".lower()


def script_name_of(tags: Tags) -> str:
    return f"skyward-{tags[POOL_TAG]}-{launch_word(tags)}-{tags.get(CREATED_TAG, str(int(time.time())))}".lower()


def launch_of(name: str) -> tuple[str, str]:
    """Return the pool and the launch in a machine's name."""
    match = NAME.fullmatch(name)
    return (match["pool"], match["launch"]) if match else ("", "")


def description_of(name: str) -> str:
    return f"skyward {name}"


# ── deleting ─────────────────────────────────────────────────────────────────────────────────────────────────────────


BUSY_SECONDS = 240.0
"""How long `terminate` tries again: Verda refuses to delete machines while it provisions them."""
PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 1.0, 5.0
ORPHAN_SECONDS = 3600
"""Age from which scripts and disks without a machine are deleted.

Another process may need a younger one for its launch.
"""
BUSY_WORDS = ("can't discontinue a", "cannot discontinue a", "can't delete a", "cannot delete a")
DISK_PREFIX = "skyward-"


def delete_all(api: VerdaApi, machines: Sequence[Json]) -> dict[str, SkywardError]:
    """Delete machines with their disks; return the error of each that was not deleted.

    Machines that are still provisioning are tried again, all of them in turn.
    """
    wanted = list(machines)
    deadline = time.monotonic() + BUSY_SECONDS
    pauses = Backoff(PAUSE_SECONDS, LONGEST_PAUSE_SECONDS).pauses()
    left: dict[str, SkywardError] = {}
    while wanted:
        errors = side_by_side(lambda machine: _delete(api, machine), wanted, "skyward-verda")
        failed = {machine["id"]: error for machine, error in zip(wanted, errors, strict=True) if error is not None}
        busy = {machine_id: error for machine_id, error in failed.items() if speaks_of(str(error), BUSY_WORDS)}
        left |= {machine_id: error for machine_id, error in failed.items() if machine_id not in busy}
        if busy:
            pause = next(pauses)
            if time.monotonic() + pause > deadline:
                return left | busy
            time.sleep(pause)
        again = side_by_side(api.machine, list(busy), "skyward-verda")  # a machine may have its disk by now, or be gone
        wanted = [
            machine
            for machine in again
            if machine is not None and machine["status"] not in ("deleting", "discontinued")
        ]
    return left


def instances_left(left: Mapping[str, SkywardError]) -> InstancesLeft:
    error = InstancesLeft(
        f"Verda could not delete {', '.join(sorted(left))}: {'; '.join(dict.fromkeys(map(str, left.values())))}",
        sorted(left),
    )
    error.__cause__ = next(iter(left.values()))
    return error


def _delete(api: VerdaApi, machine: Json) -> SkywardError | None:
    # without `volume_ids` the disk goes to the trash; with an empty list it stays and is billed
    disk = {"volume_ids": [machine["os_volume_id"]], "delete_permanently": True} if machine.get("os_volume_id") else {}
    body = {"id": [machine["id"]], "action": "delete", **disk}
    try:
        answer = api.request("PUT", "/instances", body=body, is_repeatable=True, missing_is_none=True)
    except SkywardError as error:
        return None if speaks_of(str(error), GONE_WORDS) else error
    try:
        rows = (
            []
            if answer is None
            else rows_in([answer] if isinstance(answer, dict) and answer else answer, "Verda answered PUT /instances")
        )
    except ProviderFailed as error:
        return error
    for one in rows:  # 207: each row has its own status
        code = int(one.get("statusCode") or 0)
        if (
            (one.get("error") or code >= HTTPStatus.BAD_REQUEST)
            and code != HTTPStatus.NOT_FOUND
            and not speaks_of(str(one.get("error")), GONE_WORDS)
        ):
            return ProviderFailed(f"{one.get('error') or one.get('status')}").coded(str(code))
    return None


def sweep(api: VerdaApi, machines: Iterable[Json], ended: Collection[str] = ()) -> None:
    """Delete our scripts and disks that serve no machine: those of the machines in `ended`, by name, and old ones.

    `machines` is the complete listing. A script holds the private host key of its machines in clear text until then.
    """
    living = {machine["hostname"] for machine in machines if machine["status"] != "discontinued"} - set(ended)
    serving = {launch_of(name) for name in living}
    over = {launch_of(name) for name in ended}
    now = time.time()
    for one in api.list("/scripts"):
        match = SCRIPT_NAME.fullmatch(str(one["name"]))
        launch = (match["pool"], match["launch"]) if match else ("", "")
        if match and launch not in serving and (launch in over or now - int(match["made"]) > ORPHAN_SECONDS):
            remove(api, f"/scripts/{quote(str(one['id']))}")
    for one in api.list("/volumes"):
        name = str(one["name"]).removeprefix(DISK_PREFIX)
        is_ours = one.get("is_os_volume") and name != one["name"] and NAME.fullmatch(name)
        is_free = (
            one.get("status") == "detached"
            and not one.get("instance_id")
            and not one.get("instances")
            and name not in living
        )
        if is_ours and is_free and (name in ended or now - _seconds(one.get("created_at")) > ORPHAN_SECONDS):
            remove(api, f"/volumes/{quote(str(one['id']))}", {"is_permanent": True})


def remove(api: VerdaApi, path: str, body: Json | None = None) -> None:
    """Delete an object that is not a machine. A failure is only logged, because the next sweep repeats it."""
    try:
        api.request("DELETE", path, body=body, missing_is_none=True)
    except SkywardError as error:
        log.warning("Verda keeps %s for now: %s", path, error)


def _seconds(moment: object) -> float:
    """Return a moment of Verda's in seconds since 1970; now if it is unreadable, so that nothing looks old."""
    with contextlib.suppress(ValueError):
        read = datetime.fromisoformat(str(moment))
        return (read if read.tzinfo else read.replace(tzinfo=UTC)).timestamp()
    return time.time()


# ── shell text on a machine ──────────────────────────────────────────────────────────────────────────────────────────

END_BY_ITSELF = """\
command -v python3 >/dev/null || exec poweroff
python3 - "$(hostname)" <<'SKYWARD_PYTHON'
import json, sys, urllib.request

URL, CLIENT_ID, CLIENT_SECRET = {words}

def ask(method, path, body=None, token=""):
    headers = {{"Content-Type": "application/json", "Authorization": "Bearer " + token}} if token else {{"Content-Type": "application/json"}}
    request = urllib.request.Request(URL + path, None if body is None else json.dumps(body).encode(), headers, method=method)
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.loads(answer.read() or b"null")

try:
    token = ask("POST", "/oauth2/token", {{"grant_type": "client_credentials", "client_id": CLIENT_ID, "client_secret": CLIENT_SECRET}})["access_token"]
    for machine in ask("GET", "/instances", token=token):
        if machine["hostname"] == sys.argv[1]:
            disk = {{"volume_ids": [machine["os_volume_id"]], "delete_permanently": True}} if machine.get("os_volume_id") else {{}}
            ask("PUT", "/instances", {{"id": [machine["id"]], "action": "delete", **disk}}, token)
except Exception as error:
    print("this machine cannot delete itself yet:", type(error).__name__, getattr(error, "code", ""), flush=True)
SKYWARD_PYTHON"""  # noqa: E501
"""Runs again until the machine is gone. A machine that is off would be billed too, and could not try again."""
