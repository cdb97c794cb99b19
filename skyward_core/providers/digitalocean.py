"""DigitalOcean: virtual machines ("droplets"), with GPUs or without, over its REST API.

Facts about the API are from the fact sheet of 2026-11-20, section 2, and from DigitalOcean's OpenAPI description
(github.com/digitalocean/openapi).

Two peculiarities. An accepted creating call (202) is no success: the machine's action has the outcome. And tags appear
on a machine some time after its creation. Until then only its name identifies it, which is chosen before the call.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
import shlex
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import batched
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import ConfigDict, Field, SecretStr, model_validator

from skyward_core.accelerators.catalog import Chip, find
from skyward_core.concurrency.backoff import Backoff
from skyward_core.concurrency.threads import side_by_side
from skyward_core.errors import (
    BadRequest,
    CredentialsError,
    InstancesLeft,
    NoCapacity,
    ProviderFailed,
    QuotaExceeded,
    SkywardError,
)
from skyward_core.machines.instances import Instance, InstanceState
from skyward_core.machines.offers import Offer, Requirements, architecture_beside
from skyward_core.providers._http import (
    Advice,
    Api,
    Classify,
    Found,
    Row,
    before_creation,
    certain_if_refused,
    field_of,
    is_unsure,
    missing,
    nothing_in,
    number_of,
    rows_of,
    tried,
)
from skyward_core.providers.base import LAUNCH_TAG, POOL_TAG, RANK_TAG, Provider, Sale, Tags, chips
from skyward_core.providers.tagging import from_codes, launch_word, of_machine, rank_in, to_codes
from skyward_core.providers.userdata import (
    END_COMMAND,
    Key,
    boot_script,
    cloud_config,
    directory_of,
    endpoint_of,
    host_key,
    our_key,
)
from skyward_core.shown_text import visible_logger

ACCOUNT_ANSWER = "DigitalOcean answered GET /v2/account"


class DigitalOcean(Provider):
    """Rent droplets.

    >>> DigitalOcean(region=("nyc2", "tor1")).region
    ('nyc2', 'tor1')

    The token is `token`, else DIGITALOCEAN_TOKEN or DIGITALOCEAN_ACCESS_TOKEN, else that of doctl. `node_token` should
    be a token that can only delete droplets. With it machines delete themselves when they end. It is stored on them,
    and any process there can read it. Without it they power off, which DigitalOcean bills in full until they are
    terminated.
    """

    model_config = ConfigDict(hide_input_in_errors=True)

    name: ClassVar[str] = "digitalocean"
    display_name: ClassVar[str] = "DigitalOcean"
    rents: ClassVar[frozenset[str]] = chips(
        "L40S, H100, H200, B300, RTX 4000 Ada, RTX 6000 Ada, MI300X, MI325X, MI350X, MI355X"
    )
    harmless_fields: ClassVar[frozenset[str]] = frozenset({"region"})
    own_fields: ClassVar[frozenset[str]] = frozenset({"image", "vpc_uuid"})
    end_command: ClassVar[str] = END_COMMAND
    gone_deadline_seconds: ClassVar[float] = 300.0
    """A droplet cannot be deleted while it is being created ("already has a pending event"), with GPUs for minutes."""
    listing_lag_seconds: ClassVar[float] = 30.0
    """An assumption: a droplet is created after its call was accepted, and tagged after that."""
    sells_by_wish: ClassVar[bool] = True
    """Without a memory requirement, `offers` leaves out machines with too little."""
    ends_for_good_with: ClassVar[str] = "give node_token=, a token that may only delete droplets"
    billing_minimum_seconds: ClassVar[int] = 60
    billing_minimum_usd: ClassVar[float] = 0.01
    """The greater of both (price page, 2026-05; fact sheet, "added")."""

    region: str | tuple[str, ...] | None = None
    """One, several, or None: all. The seeds use "nyc1", where there are no H100 (decisions/0009)."""
    token: SecretStr | None = Field(default=None, exclude=True, repr=False)
    """A personal access token; by default DIGITALOCEAN_TOKEN, DIGITALOCEAN_ACCESS_TOKEN, or that of doctl."""
    node_token: SecretStr | None = Field(default=None, exclude=True, repr=False)
    """A token for the machines, which can only delete droplets."""
    image: str | None = Field(default=None, min_length=1)
    """Slug or number of an image with cloud-init, in place of the default for the size."""
    vpc_uuid: str | None = Field(default=None, min_length=1)
    """A network of one region; by default each region's own."""
    ssh_key: str | None = Field(default=None, min_length=1)
    """Path of a private key without passphrase; by default one is created."""
    endpoint_url: str | None = Field(default=None, min_length=1)
    """In place of DigitalOcean's own URL."""

    @model_validator(mode="after")
    def _network_is_of_one_region(self) -> Self:
        if self.vpc_uuid is not None and not isinstance(self.region, str):
            raise ValueError("vpc_uuid= is a network of one region: name that region with region=")
        return self

    # ── the four methods ─────────────────────────────────────────────────────────────────────────────────────────────

    def offers(self, want: Requirements) -> list[Offer]:
        """Return every size that can be ordered now in the configured regions.

        Sizes with an unknown chip are left out. So are sizes below LEAST_MEMORY_GB, unless the requirements name less
        memory or an instance type.
        """
        with self._api() as api:
            sizes = pages(api, "/v2/sizes", "sizes")
        least_gb = LEAST_MEMORY_GB if want.memory_gb is None and want.instance_type is None else 0.0
        return Sale.within(self.region, (offer for offer in to_offers(sizes) if offer.memory_gb >= least_gb))

    def may_sell_spot(self, want: Requirements) -> bool:
        """True for three chips only, found by name in the accelerator or the instance type."""
        named = want.accelerator.name if want.accelerator is not None else (want.instance_type or "").upper()
        return any(chip in named for chip in SPOT_CHIPS)

    def launch(self, offer: Offer, count: int, tags: Tags, startup: str) -> list[Instance]:
        """Rent up to `count` machines, ten in one call, and return when each has an address.

        Machines that fail are destroyed and left out.
        """
        key = our_key(self.ssh_key)
        first = int(tags[RANK_TAG])
        ranks = {name_of(tags, rank): rank for rank in range(first, first + count)}
        is_gpu = offer.accelerator is not None
        with self._api() as api, self._api(refusal_of(offer)) as creating:
            with before_creation():
                order = self._order(offer, tags, startup, key, registered(api, key))
            created = create_droplets(creating, api, order, list(ranks), is_gpu=is_gpu)
            ready, failed = await_addresses(api, created, is_gpu=is_gpu)
            if failed:
                destroy_failed(api, failed, is_any_ready=bool(ready))
        prices = {"price_per_hour": offer.price_per_hour, "on_demand_price_per_hour": offer.on_demand_price_per_hour}
        instances = [
            to_instance(row, of_machine(tags, ranks[row["name"]]), key).model_copy(update=prices) for row in ready
        ]
        return sorted(instances, key=lambda instance: instance.rank)

    def instances(self, pool_id: str | None = None) -> list[Instance]:
        """Return our machines in all regions.

        The machines of one pool are found by name while they have no tags yet.
        """
        key = our_key(self.ssh_key)
        with self._api() as api:
            rows = {row["id"]: row for is_gpu in (True, False) for row in droplets(api, is_gpu=is_gpu)}
        tagged = [
            (row, tags)
            for row in rows.values()
            if (tags := tags_of(row, pool_id)) and pool_id in (None, tags[POOL_TAG])
        ]
        return sorted(
            (to_instance(row, tags, key) for row, tags in tagged),
            key=lambda instance: (instance.pool_id, instance.rank),
        )

    def terminate(self, ids: Sequence[str]) -> None:
        """Destroy machines. Nothing else is billed, because no volume is created."""
        numbers = [machine_id for machine_id in dict.fromkeys(ids) if re.fullmatch("[0-9]+", machine_id)]
        if numbers:
            with self._api() as api:
                destroy_droplets(api, numbers)

    def ends_for_good(self) -> bool:
        """True only with a node token: then a machine deletes itself. One that is off is billed."""
        return self.node_token is not None

    def missing_credentials(self) -> str:
        """Return which variable or file is missing; "" if there is a key."""
        return missing(self._key)

    def account(self) -> str:
        """Return the id of the token's team, or of its user if there is no team."""
        account = self._account()
        return field_of(account.get("team") or account, "uuid", str, ACCOUNT_ANSWER)

    def quotas(self) -> Mapping[str, float]:
        """Return how many droplets the account may have at once."""
        return {"droplets at once": number_of(self._account(), "droplet_limit", ACCOUNT_ANSWER)}

    def _account(self) -> dict[str, Any]:
        with self._api() as api:
            return field_of(api.request("GET", "/v2/account"), "account", dict, ACCOUNT_ANSWER)

    def console_url(self, instance: Instance) -> str:
        """Return the droplet's page in the control panel."""
        return f"https://cloud.digitalocean.com/droplets/{instance.id}"

    # ── the creating call, URL and token ─────────────────────────────────────────────────────────────────────────────

    def _order(self, offer: Offer, tags: Tags, startup: str, key: Key, fingerprint: str) -> dict[str, Any]:
        """Return the body of the creating call, without names."""
        boot = boot_script(startup, tags, MACHINE_ID, self._end_script())
        image = self.image or image_of(offer)
        order: dict[str, Any] = {
            "region": offer.region,
            "size": offer.instance_type + (SPOT_SUFFIX if offer.is_spot else ""),
            "image": int(image) if image.isdecimal() else image,
            # cloud-init installs our key anyway; without one here, root's password is sent by e-mail
            "ssh_keys": [fingerprint],
            "tags": to_tags(tags),
            "user_data": cloud_config(boot, key, host_key(tags[LAUNCH_TAG], key)),
        }
        return order if self.vpc_uuid is None else {**order, "vpc_uuid": self.vpc_uuid}

    def _end_script(self) -> str:
        if self.node_token is None:
            return "poweroff"
        token = shlex.quote(self.node_token.get_secret_value())
        return SELF_DELETION.format(metadata_id=METADATA_ID, token=token, url=shlex.quote(self._url()))

    def _url(self) -> str:
        return (self.endpoint_url or os.environ.get(URL_VARIABLE) or API_URL).rstrip("/")

    def _key(self) -> Found:
        return Found(self.token.get_secret_value(), "token=") if self.token else find_token()

    def _api(self, classify: Classify | None = None) -> Api:
        credential = self._key()
        secrets = (credential.key, self.node_token.get_secret_value() if self.node_token else "")
        return Api(
            "DigitalOcean",
            self._url(),
            {"Authorization": f"Bearer {credential.key}"},
            classify=classify or meaning_of,
            secrets=secrets,
            reset=reset_of,
            says_missing=says_missing,
            advice=advice_of(credential.source),
        )


# ── offers ───────────────────────────────────────────────────────────────────────────────────────────────────────────

log = visible_logger(__name__)

LEAST_MEMORY_GB = 2.0
"""The least memory of a machine without a memory requirement. System, node and call need some."""
SPOT_SUFFIX = "-spot"
SPOT_CHIPS = ("B300", "MI350X", "MI355X")
"""All chips that are sold as spot (fact sheet, 2.4). They are listed only while they can be ordered."""
CPU_IMAGE, NVIDIA_IMAGE, NVIDIA_8_IMAGE, AMD_IMAGE = (
    "ubuntu-24-04-x64",
    "gpu-h100x1-base",
    "gpu-h100x8-base",
    "gpu-amd-base",
)
"""The image for one H100 also serves every other single NVIDIA GPU. The one for eight has the fabric manager.

All of them accept root.
"""


def to_offers(sizes: Iterable[Row]) -> list[Offer]:
    """Return an offer for each size and each region in which it can be ordered.

    A spot offer has the instance type of its on-demand offer.
    """
    sizes = list(sizes)
    prices = {size["slug"]: size["price_hourly"] for size in sizes}
    offers: list[Offer] = []
    unknown: list[str] = []
    for size in sizes:
        gpus = size.get("gpu_info") or {}
        count = int(gpus.get("count") or 0)
        chip = _chip(str(gpus.get("model"))) if count else None
        if count and chip is None:
            unknown.append(size["slug"])
        elif size["available"] and size["price_hourly"]:  # an empty `regions` means that none can be ordered
            slug = size["slug"].removesuffix(SPOT_SUFFIX)
            is_spot = slug != size["slug"]
            offers += [
                Offer(
                    provider="digitalocean",
                    instance_type=slug,
                    region=region,
                    is_spot=is_spot,
                    price_per_hour=size["price_hourly"],
                    on_demand_price_per_hour=prices.get(slug) if is_spot else size["price_hourly"],
                    vcpus=size["vcpus"],
                    memory_gb=size["memory"] * 1024**2 / 1e9,  # "MB"
                    accelerator=chip.name if chip else None,
                    accelerators=count,
                    architecture=architecture_beside(chip.name if chip else None),
                    # the row has the memory of all of them together
                    accelerator_memory_gb=gpus["vram"]["amount"] / count if chip else None,
                )
                for region in size["regions"]
            ]
    if unknown:
        log.debug(
            "DigitalOcean sells %d sizes with chips that the catalogue does not know: %s",
            len(unknown),
            ", ".join(unknown),
        )
    return offers


def _chip(model: str) -> Chip | None:
    """Return the catalogue's chip, for example for "nvidia_rtx4000_ada"."""
    try:
        return find(model)
    except BadRequest:
        return None


def image_of(offer: Offer) -> str:
    """Return the slug of the image with the drivers of the offer's chips."""
    if offer.accelerator is None:
        return CPU_IMAGE
    if find(offer.accelerator).vendor == "AMD":
        return AMD_IMAGE
    return NVIDIA_IMAGE if offer.accelerators == 1 else NVIDIA_8_IMAGE


# ── launching ────────────────────────────────────────────────────────────────────────────────────────────────────────


NAMES_PER_CALL = 10
ADDRESS_SECONDS = 600.0
"""How long a machine may take to get its address. One that has none by then is destroyed."""
POLL_SECONDS, LONGEST_POLL_SECONDS = 1.0, 15.0
ACTIONS_PER_POLL = 10
"""How many actions one poll reads, for machines without an address, in turns. The limit is 250 requests a minute."""
KEY_SECONDS, KEY_PAUSE_SECONDS = 60.0, 2.0
"""How long a registered key may be unknown to the creating call. Others report some seconds."""
KEY_IS_THERE = ("already been taken", "already in use")
KEY_IS_UNKNOWN = "invalid key identifiers"


def registered(api: Api, key: Key) -> str:
    """Register our public key in the account, where it stays; return its fingerprint.

    Keys are not listed, because that is limited to ten requests a minute.
    """
    kind, blob = key.public.split()[:2]
    digest = hashlib.md5(base64.b64decode(blob), usedforsecurity=False).hexdigest()
    try:
        api.request(
            "POST", "/v2/account/keys", body={"name": "skyward", "public_key": f"{kind} {blob}"}, is_repeatable=True
        )
    except BadRequest as error:
        if not any(part in str(error) for part in KEY_IS_THERE):
            raise
    return ":".join(map("".join, batched(digest, 2)))


def create_droplets(
    creating: Api, api: Api, order: Mapping[str, Any], names: Sequence[str], *, is_gpu: bool
) -> list[Row]:
    """Create machines with these names, ten in one call and one call at a time: only ten may be in creation at once.

    Stops at the first failure and returns the machines so far. If the outcome of that call is unknown, its machines are
    looked up by name. Raises the failure if there is no machine.
    """
    created: list[Row] = []
    for chunk in batched(names, NAMES_PER_CALL):
        try:
            created += _created(creating, {**order, **({"name": chunk[0]} if len(chunk) == 1 else {"names": chunk})})
        except SkywardError as error:
            if is_unsure(error):
                created += [row for row in droplets(api, is_gpu=is_gpu) if row["name"] in chunk]
            if not created:
                certain_if_refused(error)
                raise
            log.warning("DigitalOcean created %d of %d machines: %s", len(created), len(names), error)
            break
    return created


def _created(api: Api, body: Mapping[str, Any]) -> list[Row]:
    """Make one creating call. Repeat it for a while if our key was registered a moment ago."""
    deadline = time.monotonic() + KEY_SECONDS
    while True:
        try:
            answer = api.request("POST", "/v2/droplets", body=body)
            who = "DigitalOcean answered POST /v2/droplets"
            created: list[Row] = (
                rows_of(answer, "droplets", who) if "names" in body else [field_of(answer, "droplet", dict, who)]
            )
            return [row for row in created if field_of(row, "id", int, who)]
        except BadRequest as error:
            if KEY_IS_UNKNOWN not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(KEY_PAUSE_SECONDS)


def await_addresses(api: Api, created: Sequence[Row], *, is_gpu: bool) -> tuple[list[Row], dict[str, str]]:
    """Wait until each machine has an address or has failed.

    Returns those with an address, and the reasons of the others by id.
    """
    rows = {str(row["id"]): row for row in created}
    failed: dict[str, str] = {}
    requested_at: dict[str, float] = {}

    def waiting() -> list[str]:
        return [machine_id for machine_id, row in rows.items() if machine_id not in failed and not is_ready(row)]

    deadline = time.monotonic() + ADDRESS_SECONDS
    pauses = Backoff(POLL_SECONDS, LONGEST_POLL_SECONDS, 1.5).pauses()
    while waiting() and time.monotonic() < deadline:
        time.sleep(next(pauses))
        rows.update({str(row["id"]): row for row in droplets(api, is_gpu=is_gpu) if str(row["id"]) in rows})
        turn = sorted(waiting(), key=lambda machine_id: requested_at.get(machine_id, 0.0))[:ACTIONS_PER_POLL]
        requested_at |= dict.fromkeys(turn, time.monotonic())
        found = dict(
            zip(
                turn,
                side_by_side(lambda machine_id: _failure(api, rows[machine_id]), turn, "skyward-digitalocean"),
                strict=True,
            )
        )
        failed |= {machine_id: reason for machine_id, reason in found.items() if reason}
    failed |= dict.fromkeys(waiting(), f"no address within {ADDRESS_SECONDS:g} s")
    return [row for machine_id, row in rows.items() if machine_id not in failed], failed


def _failure(api: Api, row: Row) -> str:
    """Return why a machine without an address will never have one; "" while it may."""
    path = f"/v2/droplets/{row['id']}/actions"
    answer = api.request("GET", path, missing_is_none=True)
    if answer is None:
        return "it is gone"
    actions = rows_of(answer, "actions", f"DigitalOcean answered GET {path}")
    status = next((action["status"] for action in actions if action["type"] == "create"), None)
    if status == "errored":
        return "its creation is errored"
    return f"it is {row['status']}" if status == "completed" and state_of(row) is InstanceState.STOPPING else ""


def destroy_failed(api: Api, failed: Mapping[str, str], *, is_any_ready: bool) -> None:
    """Destroy machines that failed.

    Raises NoCapacity if no machine is ready, or ProviderFailed if failed machines may remain then.
    """
    reasons = "; ".join(f"droplet {machine_id}: {reason}" for machine_id, reason in failed.items())
    trouble: SkywardError | None = None
    try:
        destroy_droplets(api, list(failed))
    except SkywardError as error:
        trouble = error
    if not is_any_ready and trouble:
        raise ProviderFailed(
            f"DigitalOcean created no machine ({reasons}), and failed droplets could not be destroyed: {trouble}"
        ) from trouble
    if not is_any_ready:
        raise NoCapacity(f"DigitalOcean created no machine: {reasons}").coded("errored")
    log.warning("some machines of DigitalOcean failed: %s%s", reasons, f"; {trouble}" if trouble else "")


# ── droplets as instances ────────────────────────────────────────────────────────────────────────────────────────────


def to_instance(row: Row, tags: Mapping[str, str], key: Key) -> Instance:
    size = row["size"]
    slug = row.get("size_slug") or size["slug"]
    price = float(size.get("price_hourly") or 0.0)
    is_spot = slug.endswith(SPOT_SUFFIX)
    ip, launch = _address(row, "public"), tags.get(LAUNCH_TAG)
    return Instance(
        id=str(row["id"]),
        provider="digitalocean",
        pool_id=tags[POOL_TAG],
        rank=rank_in(tags.get(RANK_TAG, ""), str(row["id"])),
        state=state_of(row),
        region=row["region"]["slug"],
        instance_type=slug.removesuffix(SPOT_SUFFIX),
        is_spot=is_spot,
        price_per_hour=price,
        on_demand_price_per_hour=None if is_spot else price,
        ip=ip,
        private_ip=_address(row, "private"),
        tags=dict(tags),
        directory=directory_of(str(row["id"])),
        endpoint=endpoint_of(ip, 22, launch, key) if ip and launch else None,
    )


def state_of(row: Row) -> InstanceState:
    """Return the state of a droplet.

    One that is off is billed in full. An unknown status is PENDING, not RUNNING.
    """
    match row["status"]:
        case "active":
            return InstanceState.RUNNING
        case "off" | "archive":
            return InstanceState.STOPPING
        case _:
            return InstanceState.PENDING


def _address(row: Row, kind: str) -> str | None:
    networks = (row.get("networks") or {}).get("v4") or ()
    return next((network["ip_address"] for network in networks if network["type"] == kind), None)


def is_ready(row: Row) -> bool:
    return _address(row, "public") is not None and state_of(row) is not InstanceState.STOPPING


# ── names and tags ───────────────────────────────────────────────────────────────────────────────────────────────────

TAG = "skyward"
"""On every machine, for firewalls and for people.

Our own tags are beside it, in as many tags `skyward:1-2:...` as they need.
"""
TAG_CHARACTERS = 255
TAG_PART = re.compile(rf"{TAG}:([0-9]{{1,2}})-([0-9]{{1,2}}):([a-z0-9:_-]*)")


def name_of(tags: Tags, rank: int) -> str:
    """Return the unique name of a machine of a launch, the same each time, of letters, digits and "-"."""
    return f"{_word(tags[POOL_TAG])}-{rank}-{launch_word(tags)}"


def to_tags(tags: Tags) -> list[str]:
    """Return our tags as DigitalOcean's, which have up to 255 letters, digits, ":", "-" and "_".

    Capitals are codes too, because a listed tag has the capitals of its first use in the account.
    """
    text = ":".join(f"{_escaped(name)}:{_escaped(value)}" for name, value in tags.items())
    parts = ["".join(part) for part in batched(text, TAG_CHARACTERS - len(f"{TAG}:99-99:"))]
    return [TAG, *(f"{TAG}:{number}-{len(parts)}:{part}" for number, part in enumerate(parts, 1))]


def from_tags(listed: Iterable[str]) -> dict[str, str]:
    """Return our tags from those of a droplet; none unless all parts are present and name a pool."""
    found = [match for tag in listed if (match := TAG_PART.fullmatch(tag.lower()))]
    parts = {int(match[1]): match[3] for match in found}
    if not found or sorted(parts) != list(range(1, int(found[0][2]) + 1)):
        return {}
    words = "".join(parts[number] for number in sorted(parts)).split(":")
    tags = {from_codes(name): from_codes(value) for name, value in zip(words[::2], words[1::2], strict=False)}
    return tags if POOL_TAG in tags else {}


def tags_of(row: Row, pool_id: str | None = None) -> dict[str, str]:
    """Return the tags of one machine, with its own rank; none if it is not ours.

    A machine without our tags belongs to `pool_id` if its name has the form that only this pool uses. Its tags may be
    late.
    """
    if tags := from_tags(row.get("tags") or ()):
        found = (
            re.fullmatch(rf"{re.escape(_word(tags[POOL_TAG]))}-([0-9]+)-{launch_word(tags)}", row["name"])
            if LAUNCH_TAG in tags
            else None
        )
        return of_machine(tags, int(found[1])) if found else tags
    found = re.fullmatch(rf"{re.escape(_word(pool_id))}-([0-9]+)-[a-z0-9]{{1,8}}", row["name"]) if pool_id else None
    return {POOL_TAG: pool_id, RANK_TAG: found[1]} if found and pool_id else {}


def _word(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def _escaped(text: str) -> str:
    return to_codes(text, "a-z0-9-")


# ── destroying ───────────────────────────────────────────────────────────────────────────────────────────────────────


def destroy_droplets(api: Api, ids: Sequence[str]) -> None:
    """Destroy droplets. Raises CredentialsError if all were refused, else InstancesLeft with the rest."""
    # after the first failure the others are tried once each, so that the whole takes a limited time
    troubled: list[str] = []

    def destroy(machine_id: str) -> None:
        path = f"/v2/droplets/{machine_id}"
        try:
            answer = api.request("DELETE", path, missing_is_none=True, is_repeatable=not troubled)
            nothing_in(answer, f"DigitalOcean answered DELETE {path}")
        except SkywardError:
            troubled.append(machine_id)
            raise

    _, failures = tried(destroy, ids, "skyward-digitalocean")
    if not failures:
        return
    cause = next(iter(failures.values()))
    if len(failures) == len(ids) and all(isinstance(error, CredentialsError) for error in failures.values()):
        raise cause
    raise InstancesLeft(f"droplets {', '.join(sorted(failures))} may still run: {cause}", sorted(failures)) from cause


# ── the REST API ─────────────────────────────────────────────────────────────────────────────────────────────────────

API_URL = "https://api.digitalocean.com"
TOKEN_VARIABLES = ("DIGITALOCEAN_TOKEN", "DIGITALOCEAN_ACCESS_TOKEN")
URL_VARIABLE = "DIGITALOCEAN_API_URL"
PER_PAGE = 200
LISTING_TRIES = 5
REFUSALS: Mapping[type[SkywardError], tuple[str, ...]] = {
    # seen on 2026-08-16: "creating this/these droplet(s) will exceed your GPU limit", also where no droplet exists
    QuotaExceeded: ("droplet limit", "gpu limit"),
    NoCapacity: (
        "not available in this region",
        "region is not available",
        "temporarily unavailable",
        "not currently available",
        "size is unavailable",
        "at capacity",
        "insufficient capacity",
        "sold out",
    ),
}
"""Parts of the message separate capacity, quota and mistakes of the request, which share a status (422) and a code."""
MISTAKES = ("invalid", "only valid hostname", "tag names", "too long", "too many", "can't be blank", "unknown field")
"""Parts of the messages about a wrong creating call, as the API and its description word them."""
TOKENS_PAGE = "https://cloud.digitalocean.com/account/api/tokens"
LIMITS_PAGE = "https://cloud.digitalocean.com/account/team/droplet_limit_increase"
"""Where limits are raised (github.com/OpenRouterLabs/spawn/issues/3059, 2026-03-27)."""


def find_token() -> Found:
    """Return the token of the environment, else of doctl. Raises CredentialsError."""
    for variable in TOKEN_VARIABLES:
        if token := os.environ.get(variable):
            return Found(token, f"the variable {variable}")
    home = Path(
        "~/Library/Application Support"
        if sys.platform == "darwin"
        else os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    ).expanduser()
    file = home / "doctl" / "config.yaml"
    try:
        token = doctl_token(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        token = ""
    except (OSError, UnicodeDecodeError) as error:
        raise CredentialsError(f"{file} cannot be read: {error}") from error
    if not token:
        raise CredentialsError(
            f"no token for DigitalOcean: set {TOKEN_VARIABLES[0]} (or {TOKEN_VARIABLES[1]}), or log in with `doctl auth"
            " init`"
        )
    return Found(token, f"the file {file}")


def doctl_token(config: str) -> str:
    """Return the token of doctl's current context from the text of its config.yaml; "" if there is none.

    Two lines matter, so no YAML parser is needed.
    """
    lines = dict(re.findall(r"^([\w-]+): *[\"']?([^\"'\s]+)[\"']? *$", config, re.MULTILINE))
    context = lines.get("context", "default")
    if context == "default":
        return lines.get("access-token", "")
    found = re.search(
        rf"^auth-contexts:\s*\n(?:[ \t]+.*\n)*?[ \t]+{re.escape(context)}: *[\"']?([^\"'\s]+)", config, re.MULTILINE
    )
    return found[1] if found else ""


def advice_of(source: str) -> Advice:
    """Return what to do about refusals of a token from this source."""
    return Advice(
        key=f"The token of {source} is refused: make another at {TOKENS_PAGE}",
        rights=(
            f"The token of {source} lacks a scope: docs/clouds/digitalocean.md lists them, and {TOKENS_PAGE} sets them"
        ),
        quota=(
            "A new account may rent no GPU until it has paid an invoice or $50 in advance: ask for a higher limit at"
            f" {LIMITS_PAGE}"
        ),
        capacity="Try again later, another region or another size (`skyward offers`)",
    )


def refusal_of(offer: Offer) -> Classify:
    """Return the classifier for a creating call.

    An unknown text is taken for a lack of capacity, so that the next offer is tried. If several offers
    are refused with it, the request is wrong (`NoCapacity.mistake`).
    """

    def meaning(status: int, body: Row, message: str) -> SkywardError | None:
        text = str(body.get("message", "")).lower()
        known = meaning_of(status, body, message)
        if known is not None or status != 422 or any(part in text for part in MISTAKES):
            return known
        error = NoCapacity(message)
        for name in (offer.instance_type, offer.region):
            text = text.replace(name, "...")
        error.mistake = " ".join(re.sub(r"\S*[0-9]\S*", "...", text).split())
        return error

    return meaning


def meaning_of(status: int, body: Row, message: str) -> SkywardError | None:
    """Return the meaning of a refusal beside its status."""
    if status != 422:
        return None
    text = str(body.get("message", "")).lower()
    for kind, parts in REFUSALS.items():
        if any(part in text for part in parts):
            return kind(message)
    attributes = body.get("error_attributes")
    return NoCapacity(message) if isinstance(attributes, dict) and "available_regions" in attributes else None


def says_missing(body: Row) -> bool:
    return body.get("id") == "not_found" and isinstance(body.get("message"), str)


def reset_of(headers: Mapping[str, str]) -> float | None:
    """Return when the hourly limit has room again.

    Only bursts come with Retry-After. If requests remain, another limit has refused the request.
    """
    reset = headers.get("ratelimit-reset", "").strip()
    if headers.get("ratelimit-remaining", "0").strip() != "0" or not re.fullmatch("[0-9]{1,12}", reset):
        return None
    return float(reset)


def droplets(api: Api, *, is_gpu: bool) -> list[Row]:
    """Return the account's droplets with GPUs, or those without: no listing has both.

    A filter by tag cannot be combined with that.
    """
    return pages(api, "/v2/droplets", "droplets", type="gpus" if is_gpu else None)


def pages(api: Api, path: str, kind: str, **query: Any) -> list[Row]:
    """Return all pages of a listing. Read it again if its length changed meanwhile.

    Otherwise a row that moves to a page that was already read would seem to be gone.
    """
    for _ in range(LISTING_TRIES):
        rows: list[Row] = []
        totals: set[int | None] = set()
        page, is_more = 0, True
        while is_more:
            page += 1
            answer = api.request("GET", path, query={**query, "per_page": PER_PAGE, "page": page})
            rows += rows_of(answer, kind, f"DigitalOcean answered GET {path}")
            totals.add((answer.get("meta") or {}).get("total"))
            is_more = "next" in ((answer.get("links") or {}).get("pages") or {})
        if len(totals) == 1:
            return rows
    raise ProviderFailed(f"DigitalOcean's listing {path} changes while it is read")


# ── shell text on a droplet ──────────────────────────────────────────────────────────────────────────────────────────

METADATA_ID = "curl -sf --retry 5 -m 20 http://169.254.169.254/metadata/v1/id"
MACHINE_ID = f"grep -xE '[0-9]+' /var/lib/cloud/data/instance-id || {METADATA_ID}"
"""cloud-init's instance id is the droplet's id, unless its data source makes up another id."""
SELF_DELETION = """\
command -v curl >/dev/null || exec poweroff
id=$({metadata_id})
case $id in '' | *[!0-9]*) exit 1 ;; esac
printf 'header = "Authorization: Bearer %s"\\n' {token} | curl -sf -m 30 -o /dev/null -X DELETE -K - {url}/v2/droplets/"$id" && sleep 60
"""  # noqa: E501
"""Runs again until the machine is gone. A machine that is off would be billed too, and could not try again.

The token is on no command line.
"""
