"""DigitalOcean: virtual machines ("droplets"), with GPUs or without, over its REST API.

What is said of the API here was read in the fact sheet of 2026-11-20, section 2, and in DigitalOcean's OpenAPI
description (github.com/digitalocean/openapi).

Two things are different here. A creating call that is accepted (202) is no success: whether the machine came to be
stands in its action. And tags are put on a machine after it was created, without a promise when: until then it is known
by its name alone, which is chosen before the call.
"""

from __future__ import annotations

import base64
import hashlib
import logging
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
from skyward_core.machines.offers import Offer, Requirements, architecture_beside
from skyward_core.providers._http import Api, Row, field_of, nothing_in, rows_of
from skyward_core.providers.base import LAUNCH_TAG, POOL_TAG, RANK_TAG, Provider, Tags
from skyward_core.providers.ssh_keys import Key, host_key, our_key
from skyward_core.providers.tagging import from_codes, launch_word, of_machine, to_codes
from skyward_core.providers.userdata import END_COMMAND, boot_script, cloud_config, directory_of

API_URL = "https://api.digitalocean.com"
TOKEN_VARIABLES = ("DIGITALOCEAN_TOKEN", "DIGITALOCEAN_ACCESS_TOKEN")
URL_VARIABLE = "DIGITALOCEAN_API_URL"
METADATA_ID = "curl -sf --retry 5 -m 20 http://169.254.169.254/metadata/v1/id"
MACHINE_ID = f"grep -xE '[0-9]+' /var/lib/cloud/data/instance-id || {METADATA_ID}"
"""cloud-init's instance id is the droplet's id, unless its data source is one that makes up another."""

PER_PAGE = 200
LISTING_TRIES = 5
NAMES_PER_CALL = 10
ADDRESS_SECONDS = 600.0
"""How long a machine may take to get its address; one that has none by then is given back."""
POLL_SECONDS, LONGEST_POLL_SECONDS = 1.0, 15.0
ACTIONS_PER_POLL = 10
"""How many machines without an address are asked for their action in one poll, in turns: all requests together may be
250 a minute.
"""
KEY_SECONDS, KEY_PAUSE_SECONDS = 60.0, 2.0
"""How long a key that was registered may be unknown to the creating call: some seconds, as others report."""

LEAST_MEMORY_GB = 2.0
"""What a machine has at least if nobody has said how much it needs: the system, a node of ours and a call want some."""
SPOT_SUFFIX = "-spot"
SPOT_CHIPS = ("B300", "MI350X", "MI355X")
"""All that is sold as spot (fact sheet, 2.4); listed only while it can be ordered."""
CPU_IMAGE, NVIDIA_IMAGE, NVIDIA_8_IMAGE, AMD_IMAGE = (
    "ubuntu-24-04-x64",
    "gpu-h100x1-base",
    "gpu-h100x8-base",
    "gpu-amd-base",
)
"""The image of one H100 is also that of every other single NVIDIA GPU; that of eight has the fabric manager.

All let root in.
"""

REFUSALS: Mapping[type[SkywardError], tuple[str, ...]] = {
    QuotaExceeded: ("droplet limit",),
    NoCapacity: (
        "not available in this region",
        "region is not available",
        "temporarily unavailable",
        "not currently available",
        "size is unavailable",
    ),
}
"""Capacity, quota and what is wrong in the request itself are one status (422) and one code: these parts of the message
tell them apart.
"""
KEY_IS_THERE = ("already been taken", "already in use")
KEY_IS_UNKNOWN = "invalid key identifiers"

TAG = "skyward"
"""On every machine, for firewalls and for the eye.

Beside it are as many tags `skyward:1-2:...` as our own tags need.
"""
TAG_CHARACTERS = 255
TAG_PART = re.compile(rf"{TAG}:([0-9]{{1,2}})-([0-9]{{1,2}}):([a-z0-9:_-]*)")

log = logging.getLogger(__name__)

SELF_DELETION = """\
command -v curl >/dev/null || exec poweroff
id=$({metadata_id})
case $id in '' | *[!0-9]*) exit 1 ;; esac
printf 'header = "Authorization: Bearer %s"\\n' {token} | curl -sf -m 30 -o /dev/null -X DELETE -K - {url}/v2/droplets/"$id" && sleep 60
"""  # noqa: E501
"""Is run again until the machine is gone: one that were off would be paid for as well, and try no more.

The token is on no command line.
"""


class DigitalOcean(Provider):
    """Rent droplets.

    >>> DigitalOcean(region=("nyc2", "tor1")).region
    ('nyc2', 'tor1')

    The token is `token`, else DIGITALOCEAN_TOKEN or DIGITALOCEAN_ACCESS_TOKEN, else that of doctl. With `node_token`,
    one that may do no more than delete droplets, machines delete themselves when they end; it is planted on them, where
    whatever runs there can read it. Without, they power off, which DigitalOcean goes on to bill, and somebody has to
    terminate them.
    """

    model_config = ConfigDict(hide_input_in_errors=True)

    name: ClassVar[str] = "digitalocean"
    end_command: ClassVar[str] = END_COMMAND
    gone_deadline_seconds: ClassVar[float] = 300.0
    """A droplet that is still being created cannot be deleted ("already has a pending event"): with GPUs that takes
    minutes.
    """
    listing_lag_seconds: ClassVar[float] = 30.0
    """Nothing is promised; a droplet is created after its call was accepted, and tagged after that."""
    sells_by_wish: ClassVar[bool] = True
    """Who does not say how much memory sees no machine with too little."""
    billing_minimum_seconds: ClassVar[int] = 60
    billing_minimum_usd: ClassVar[float] = 0.01
    """The greater of both (price page, 2026-05; fact sheet, "added")."""

    region: str | tuple[str, ...] | None = None
    """One, several, or None: all. The seeds say "nyc1", where there are no H100 (decisions/0009)."""
    token: SecretStr | None = Field(default=None, exclude=True, repr=False)
    node_token: SecretStr | None = Field(default=None, exclude=True, repr=False)
    image: str | None = Field(default=None, min_length=1)
    """Slug or number of an image with cloud-init, in place of the one that goes with the size."""
    vpc_uuid: str | None = Field(default=None, min_length=1)
    """A network of one region; by default each region's own."""
    ssh_key: str | None = Field(default=None, min_length=1)
    """Path of a private key without passphrase; by default one that is made for you."""
    endpoint_url: str | None = Field(default=None, min_length=1)

    @model_validator(mode="after")
    def _network_is_of_one_region(self) -> Self:
        if self.vpc_uuid is not None and not isinstance(self.region, str):
            raise ValueError("vpc_uuid= is a network of one region: say which with region=")
        return self

    # ── the four verbs ───────────────────────────────────────────────────────────────────────────────────────────────

    def offers(self, want: Requirements) -> list[Offer]:
        """Return every size that can be ordered now in the configured regions; sizes with a chip that the catalogue
        does not know are left out.

        So are those with less than LEAST_MEMORY_GB, unless less is asked for, or a size by its name.
        """
        with self._api() as api:
            sizes = _pages(api, "/v2/sizes", "sizes")
        regions = {self.region} if isinstance(self.region, str) else set(self.region or ())
        least_gb = LEAST_MEMORY_GB if want.memory_gb is None and want.instance_type is None else 0.0
        return [
            offer
            for offer in to_offers(sizes)
            if (not regions or offer.region in regions) and offer.memory_gb >= least_gb
        ]

    def may_sell_spot(self, want: Requirements) -> bool:
        """Of three chips only, by the names of the machines or of the chips."""
        named = want.accelerator.name if want.accelerator is not None else (want.instance_type or "").upper()
        return any(chip in named for chip in SPOT_CHIPS)

    def launch(self, offer: Offer, count: int, tags: Tags, startup: str) -> list[Instance]:
        """Rent up to `count` machines, ten a call, and return when each has an address.

        Those that fail meanwhile are given back and left out.
        """
        key = our_key(self.ssh_key)
        first = int(tags[RANK_TAG])
        ranks = {name_of(tags, rank): rank for rank in range(first, first + count)}
        is_gpu = offer.accelerator is not None
        with self._api() as api:
            fingerprint = _registered(api, key)
            created = _create(api, self._wish(offer, tags, startup, key, fingerprint), list(ranks), is_gpu=is_gpu)
            ready, failed = _await_addresses(api, created, is_gpu=is_gpu)
            if failed:
                _give_back(api, failed, is_any_ready=bool(ready))
        prices = {"price_per_hour": offer.price_per_hour, "on_demand_price_per_hour": offer.on_demand_price_per_hour}
        instances = [
            _instance(row, of_machine(tags, ranks[row["name"]]), key).model_copy(update=prices) for row in ready
        ]
        return sorted(instances, key=lambda instance: instance.rank)

    def instances(self, pool_id: str | None = None) -> list[Instance]:
        """Return our machines, whatever their region.

        Those of a pool are found before they are tagged as well, by their names.
        """
        key = our_key(self.ssh_key)
        with self._api() as api:
            rows = {row["id"]: row for is_gpu in (True, False) for row in _droplets(api, is_gpu=is_gpu)}
        told = [
            (row, tags)
            for row in rows.values()
            if (tags := tags_of(row, pool_id)) and pool_id in (None, tags[POOL_TAG])
        ]
        return sorted(
            (_instance(row, tags, key) for row, tags in told), key=lambda instance: (instance.pool_id, instance.rank)
        )

    def terminate(self, ids: Sequence[str]) -> None:
        """Destroy machines. Nothing else is paid for: no volume is ever made."""
        ours = [machine_id for machine_id in dict.fromkeys(ids) if re.fullmatch("[0-9]+", machine_id)]
        if ours:
            with self._api() as api:
                _destroy(api, ours)

    def ends_for_good(self) -> bool:
        """Only with a token of its own it can delete itself; one that is off is paid for."""
        return self.node_token is not None

    def account(self) -> str:
        """Return the id of the token's team, or of its user if there is none."""
        with self._api() as api:
            who = "DigitalOcean answered GET /v2/account"
            account = field_of(api.ask("GET", "/v2/account"), "account", dict, who)
        return field_of(account.get("team") or account, "uuid", str, who)

    def console_url(self, instance: Instance) -> str:
        """Return the droplet's page in the control panel."""
        return f"https://cloud.digitalocean.com/droplets/{instance.id}"

    # ── what is asked for, and with which token ──────────────────────────────────────────────────────────────────────

    def _wish(self, offer: Offer, tags: Tags, startup: str, key: Key, fingerprint: str) -> dict[str, Any]:
        """The creating call without names."""
        boot = boot_script(startup, tags, MACHINE_ID, self._end_script())
        image = self.image or image_of(offer)
        wish: dict[str, Any] = {
            "region": offer.region,
            "size": offer.instance_type + (SPOT_SUFFIX if offer.is_spot else ""),
            "image": int(image) if image.isdecimal() else image,
            # cloud-init lets ours in anyway; without one here, a password for root goes out by e-mail
            "ssh_keys": [fingerprint],
            "tags": to_tags(tags),
            "user_data": cloud_config(boot, key, host_key(tags[LAUNCH_TAG], key)),
        }
        return wish if self.vpc_uuid is None else {**wish, "vpc_uuid": self.vpc_uuid}

    def _end_script(self) -> str:
        if self.node_token is None:
            return "poweroff"
        token = shlex.quote(self.node_token.get_secret_value())
        return SELF_DELETION.format(metadata_id=METADATA_ID, token=token, url=shlex.quote(self._url()))

    def _url(self) -> str:
        return (self.endpoint_url or os.environ.get(URL_VARIABLE) or API_URL).rstrip("/")

    def _api(self) -> Api:
        token = self.token.get_secret_value() if self.token else _token()
        secrets = (token, self.node_token.get_secret_value() if self.node_token else "")
        return Api(
            "DigitalOcean",
            self._url(),
            {"Authorization": f"Bearer {token}"},
            classify=_meaning,
            secrets=secrets,
            reset=_reset,
            says_missing=_says_missing,
        )


def _token() -> str:
    """The token of the environment, else of doctl. Raises CredentialsError."""
    for variable in TOKEN_VARIABLES:
        if token := os.environ.get(variable):
            return token
    home = Path(
        "~/Library/Application Support"
        if sys.platform == "darwin"
        else os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    ).expanduser()
    place = home / "doctl" / "config.yaml"
    try:
        token = doctl_token(place.read_text(encoding="utf-8"))
    except FileNotFoundError:
        token = ""
    except (OSError, UnicodeDecodeError) as error:
        raise CredentialsError(f"{place} cannot be read: {error}") from error
    if not token:
        raise CredentialsError(
            f"no token for DigitalOcean: set {TOKEN_VARIABLES[0]} (or {TOKEN_VARIABLES[1]}), or log in with `doctl auth"
            " init`"
        )
    return token


def doctl_token(config: str) -> str:
    """Return the token of doctl's current context from the text of its config.yaml, "" if there is none.

    No reader of YAML: two lines of it matter.
    """
    lines = dict(re.findall(r"^([\w-]+): *[\"']?([^\"'\s]+)[\"']? *$", config, re.MULTILINE))
    context = lines.get("context", "default")
    if context == "default":
        return lines.get("access-token", "")
    found = re.search(
        rf"^auth-contexts:\s*\n(?:[ \t]+.*\n)*?[ \t]+{re.escape(context)}: *[\"']?([^\"'\s]+)", config, re.MULTILINE
    )
    return found[1] if found else ""


def _meaning(status: int, body: Row, message: str) -> SkywardError | None:
    """What a refusal means beyond its status."""
    if status != 422:
        return None
    text = str(body.get("message", "")).lower()
    for kind, parts in REFUSALS.items():
        if any(part in text for part in parts):
            return kind(message)
    attributes = body.get("error_attributes")
    return NoCapacity(message) if isinstance(attributes, dict) and "available_regions" in attributes else None


def _says_missing(body: Row) -> bool:
    return body.get("id") == "not_found" and isinstance(body.get("message"), str)


def _reset(headers: Mapping[str, str]) -> float | None:
    """When the hourly limit has room again.

    Retry-After comes with bursts only; where requests are left it is not this limit that has refused us.
    """
    told = headers.get("ratelimit-reset", "").strip()
    if headers.get("ratelimit-remaining", "0").strip() != "0" or not re.fullmatch("[0-9]{1,12}", told):
        return None
    return float(told)


# ── offers ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def to_offers(sizes: Iterable[Row]) -> list[Offer]:
    """Return an offer for each size and region where it can be ordered.

    A spot size is its on-demand twin, and that one's name is its `instance_type`.
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
        elif size["available"] and size["price_hourly"]:  # and where `regions` is empty, there is none to be had
            slug = size["slug"].removesuffix(SPOT_SUFFIX)
            is_spot = slug != size["slug"]
            offers += [
                Offer(
                    provider=DigitalOcean.name,
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
                    # told for all of them together
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
    """The catalogue's chip for, say, "nvidia_rtx4000_ada"."""
    try:
        return find(model)
    except BadRequest:
        return None


def image_of(offer: Offer) -> str:
    """Return the slug of the image that has the drivers of the offer's chips."""
    if offer.accelerator is None:
        return CPU_IMAGE
    if find(offer.accelerator).vendor == "AMD":
        return AMD_IMAGE
    return NVIDIA_IMAGE if offer.accelerators == 1 else NVIDIA_8_IMAGE


# ── names and tags ───────────────────────────────────────────────────────────────────────────────────────────────────


def name_of(tags: Tags, rank: int) -> str:
    """Return the name of a machine of a launch: unique, and the same whenever it is asked for.

    Letters, digits and '-'.
    """
    return f"{_word(tags[POOL_TAG])}-{rank}-{launch_word(tags)}"


def to_tags(tags: Tags) -> list[str]:
    """Return what carries our tags: letters, digits, ':', '-' and '_', up to 255 of them, are all that a tag may have.

    Capitals are written as codes too: a tag is told with the capitals of whoever has used it first in the account.
    """
    text = ":".join(f"{_escaped(name)}:{_escaped(value)}" for name, value in tags.items())
    parts = ["".join(part) for part in batched(text, TAG_CHARACTERS - len(f"{TAG}:99-99:"))]
    return [TAG, *(f"{TAG}:{number}-{len(parts)}:{part}" for number, part in enumerate(parts, 1))]


def from_tags(told: Iterable[str]) -> dict[str, str]:
    """Return our tags from those of a droplet; nothing unless all parts of them are there and name a pool."""
    found = [match for tag in told if (match := TAG_PART.fullmatch(tag.lower()))]
    parts = {int(match[1]): match[3] for match in found}
    if not found or sorted(parts) != list(range(1, int(found[0][2]) + 1)):
        return {}
    words = "".join(parts[number] for number in sorted(parts)).split(":")
    tags = {from_codes(name): from_codes(value) for name, value in zip(words[::2], words[1::2], strict=False)}
    return tags if POOL_TAG in tags else {}


def tags_of(row: Row, pool_id: str | None = None) -> dict[str, str]:
    """Return the tags of one machine, with its own rank; nothing if it is none of ours.

    One that has no tags of ours is of the pool asked for, if it has a name as only that pool gives it: its tags may be
    still to come.
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


# ── droplets ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _instance(row: Row, tags: Mapping[str, str], key: Key) -> Instance:
    size = row["size"]
    slug = row.get("size_slug") or size["slug"]
    price = float(size.get("price_hourly") or 0.0)
    is_spot = slug.endswith(SPOT_SUFFIX)
    ip, launch = _address(row, "public"), tags.get(LAUNCH_TAG)
    return Instance(
        id=str(row["id"]),
        provider=DigitalOcean.name,
        pool_id=tags[POOL_TAG],
        rank=int(tags.get(RANK_TAG, "0")),
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
        endpoint=(
            Endpoint(
                host=ip,
                port=22,
                user="root",
                key=str(key.path),
                host_key=host_key(launch, key).public,
                known_hosts=os.devnull,
            )
            if ip and launch
            else None
        ),
    )


def state_of(row: Row) -> InstanceState:
    """Return what a droplet's status means.

    One that is off is billed in full; a word that is not known is not taken for a machine that runs.
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


def _is_ready(row: Row) -> bool:
    return _address(row, "public") is not None and state_of(row) is not InstanceState.STOPPING


def _droplets(api: Api, *, is_gpu: bool) -> list[Row]:
    """The account's droplets with GPUs, or those without: no listing has both.

    A filter by tag can not be combined with that.
    """
    return _pages(api, "/v2/droplets", "droplets", type="gpus" if is_gpu else None)


def _pages(api: Api, path: str, kind: str, **query: Any) -> list[Row]:
    """All pages of a listing, read again if something was made or deleted meanwhile: what moves up to a page that was
    read already would seem to be gone.
    """
    for _ in range(LISTING_TRIES):
        rows: list[Row] = []
        totals: set[int | None] = set()
        page, is_more = 0, True
        while is_more:
            page += 1
            answer = api.ask("GET", path, query={**query, "per_page": PER_PAGE, "page": page})
            rows += rows_of(answer, kind, f"DigitalOcean answered GET {path}")
            totals.add((answer.get("meta") or {}).get("total"))
            is_more = "next" in ((answer.get("links") or {}).get("pages") or {})
        if len(totals) == 1:
            return rows
    raise ProviderFailed(f"DigitalOcean's listing {path} changes while it is read")


# ── creating ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _registered(api: Api, key: Key) -> str:
    """Register our public key in the account, where it stays; return its fingerprint.

    Listing keys is limited to ten requests a minute: not needed.
    """
    kind, blob = key.public.split()[:2]
    digest = hashlib.md5(base64.b64decode(blob), usedforsecurity=False).hexdigest()
    try:
        api.ask(
            "POST", "/v2/account/keys", body={"name": "skyward", "public_key": f"{kind} {blob}"}, is_repeatable=True
        )
    except BadRequest as error:
        if not any(part in str(error) for part in KEY_IS_THERE):
            raise
    return ":".join(map("".join, batched(digest, 2)))


def _create(api: Api, wish: Mapping[str, Any], names: Sequence[str], *, is_gpu: bool) -> list[Row]:
    """Ask for machines of these names, ten a call, one call after the other: no more than ten may be in creation at
    once.

    Ends at the first failure: what there is until then is returned, with what is found by name if the outcome of that
    call is not known. Raises it if that is nothing.
    """
    created: list[Row] = []
    for chunk in batched(names, NAMES_PER_CALL):
        try:
            created += _created(api, {**wish, **({"name": chunk[0]} if len(chunk) == 1 else {"names": chunk})})
        except SkywardError as error:
            if isinstance(error, ProviderFailed) and not isinstance(error, RateLimited):
                created += [row for row in _droplets(api, is_gpu=is_gpu) if row["name"] in chunk]
            if not created:
                raise
            log.warning("DigitalOcean created %d of %d machines: %s", len(created), len(names), error)
            break
    return created


def _created(api: Api, body: Mapping[str, Any]) -> list[Row]:
    """One creating call, refused for a while if our key was registered a moment ago."""
    deadline = time.monotonic() + KEY_SECONDS
    while True:
        try:
            answer = api.ask("POST", "/v2/droplets", body=body)
            who = "DigitalOcean answered POST /v2/droplets"
            created: list[Row] = (
                rows_of(answer, "droplets", who) if "names" in body else [field_of(answer, "droplet", dict, who)]
            )
            return [row for row in created if field_of(row, "id", int, who)]
        except BadRequest as error:
            if KEY_IS_UNKNOWN not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(KEY_PAUSE_SECONDS)


def _await_addresses(api: Api, created: Sequence[Row], *, is_gpu: bool) -> tuple[list[Row], dict[str, str]]:
    """Wait until each machine has an address or has failed; return those that have one, and why not by id."""
    rows = {str(row["id"]): row for row in created}
    failed: dict[str, str] = {}
    asked: dict[str, float] = {}

    def waiting() -> list[str]:
        return [machine_id for machine_id, row in rows.items() if machine_id not in failed and not _is_ready(row)]

    deadline = time.monotonic() + ADDRESS_SECONDS
    pause = POLL_SECONDS
    while waiting() and time.monotonic() < deadline:
        time.sleep(pause)
        pause = min(1.5 * pause, LONGEST_POLL_SECONDS)
        rows.update({str(row["id"]): row for row in _droplets(api, is_gpu=is_gpu) if str(row["id"]) in rows})
        turn = sorted(waiting(), key=lambda machine_id: asked.get(machine_id, 0.0))[:ACTIONS_PER_POLL]
        asked |= dict.fromkeys(turn, time.monotonic())
        reasons = dict(
            zip(
                turn,
                side_by_side(lambda machine_id: _failure(api, rows[machine_id]), turn, "skyward-digitalocean"),
                strict=True,
            )
        )
        failed |= {machine_id: reason for machine_id, reason in reasons.items() if reason}
    failed |= dict.fromkeys(waiting(), f"no address within {ADDRESS_SECONDS:g} s")
    return [row for machine_id, row in rows.items() if machine_id not in failed], failed


def _failure(api: Api, row: Row) -> str:
    """Why a machine without an address will never have one; "" while it may."""
    path = f"/v2/droplets/{row['id']}/actions"
    answer = api.ask("GET", path, missing_is_none=True)
    if answer is None:
        return "it is gone"
    actions = rows_of(answer, "actions", f"DigitalOcean answered GET {path}")
    status = next((action["status"] for action in actions if action["type"] == "create"), None)
    if status == "errored":
        return "its creation is errored"
    return f"it is {row['status']}" if status == "completed" and state_of(row) is InstanceState.STOPPING else ""


def _give_back(api: Api, failed: Mapping[str, str], *, is_any_ready: bool) -> None:
    """Destroy machines that came to nothing.

    Raises NoCapacity if there are no others, and ProviderFailed if they may be left then.
    """
    told = "; ".join(f"droplet {machine_id}: {reason}" for machine_id, reason in failed.items())
    trouble: SkywardError | None = None
    try:
        _destroy(api, list(failed))
    except SkywardError as error:
        trouble = error
    if not is_any_ready and trouble:
        raise ProviderFailed(
            f"DigitalOcean created no machine ({told}), and what there is could not be ended: {trouble}"
        ) from trouble
    if not is_any_ready:
        raise NoCapacity(f"DigitalOcean created no machine: {told}").coded("errored")
    log.warning("DigitalOcean did not bring up all machines: %s%s", told, f"; {trouble}" if trouble else "")


# ── ending ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _destroy(api: Api, ids: Sequence[str]) -> None:
    """Destroy each one. Raises CredentialsError if none was let through, InstancesLeft with those that are left."""
    # after the first that an outage has stopped, the others are asked once each: all of it has to come to an end
    troubled: list[str] = []

    def destroy(machine_id: str) -> SkywardError | None:
        try:
            path = f"/v2/droplets/{machine_id}"
            nothing_in(
                api.ask("DELETE", path, missing_is_none=True, is_repeatable=not troubled),
                f"DigitalOcean answered DELETE {path}",
            )
        except SkywardError as error:
            troubled.append(machine_id)
            return error
        return None

    failures = {
        machine_id: error
        for machine_id, error in zip(ids, side_by_side(destroy, ids, "skyward-digitalocean"), strict=True)
        if error
    }
    if not failures:
        return
    cause = next(iter(failures.values()))
    if len(failures) == len(ids) and all(isinstance(error, CredentialsError) for error in failures.values()):
        raise cause
    raise InstancesLeft(f"droplets {', '.join(sorted(failures))} may still run: {cause}", sorted(failures)) from cause
