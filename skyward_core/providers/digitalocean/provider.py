"""DigitalOcean: virtual machines ("droplets"), with GPUs or without, over its REST API.

What is said of the API here was read in the fact sheet of 2026-11-20, section 2, and in DigitalOcean's OpenAPI
description (github.com/digitalocean/openapi).

Two things are different here. A creating call that is accepted (202) is no success: whether the machine came to be
stands in its action. And tags are put on a machine after it was created, without a promise when: until then it is known
by its name alone, which is chosen before the call.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from typing import Any, ClassVar, Self

from pydantic import ConfigDict, Field, SecretStr, model_validator

from skyward_core.machines.instances import Instance
from skyward_core.machines.offers import Offer, Requirements
from skyward_core.providers._http import Api, field_of
from skyward_core.providers.base import LAUNCH_TAG, POOL_TAG, RANK_TAG, Provider, Tags
from skyward_core.providers.digitalocean.api import (
    API_URL,
    URL_VARIABLE,
    droplets,
    find_token,
    meaning_of,
    pages,
    reset_of,
    says_missing,
)
from skyward_core.providers.digitalocean.boot import MACHINE_ID, METADATA_ID, SELF_DELETION
from skyward_core.providers.digitalocean.instances import to_instance
from skyward_core.providers.digitalocean.launch import await_addresses, create_droplets, give_back, registered
from skyward_core.providers.digitalocean.offers import LEAST_MEMORY_GB, SPOT_CHIPS, SPOT_SUFFIX, image_of, to_offers
from skyward_core.providers.digitalocean.tags import name_of, tags_of, to_tags
from skyward_core.providers.digitalocean.termination import destroy_droplets
from skyward_core.providers.ssh_keys import Key, host_key, our_key
from skyward_core.providers.tagging import of_machine
from skyward_core.providers.userdata import END_COMMAND, boot_script, cloud_config


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
            sizes = pages(api, "/v2/sizes", "sizes")
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
            fingerprint = registered(api, key)
            created = create_droplets(
                api, self._wish(offer, tags, startup, key, fingerprint), list(ranks), is_gpu=is_gpu
            )
            ready, failed = await_addresses(api, created, is_gpu=is_gpu)
            if failed:
                give_back(api, failed, is_any_ready=bool(ready))
        prices = {"price_per_hour": offer.price_per_hour, "on_demand_price_per_hour": offer.on_demand_price_per_hour}
        instances = [
            to_instance(row, of_machine(tags, ranks[row["name"]]), key).model_copy(update=prices) for row in ready
        ]
        return sorted(instances, key=lambda instance: instance.rank)

    def instances(self, pool_id: str | None = None) -> list[Instance]:
        """Return our machines, whatever their region.

        Those of a pool are found before they are tagged as well, by their names.
        """
        key = our_key(self.ssh_key)
        with self._api() as api:
            rows = {row["id"]: row for is_gpu in (True, False) for row in droplets(api, is_gpu=is_gpu)}
        told = [
            (row, tags)
            for row in rows.values()
            if (tags := tags_of(row, pool_id)) and pool_id in (None, tags[POOL_TAG])
        ]
        return sorted(
            (to_instance(row, tags, key) for row, tags in told), key=lambda instance: (instance.pool_id, instance.rank)
        )

    def terminate(self, ids: Sequence[str]) -> None:
        """Destroy machines. Nothing else is paid for: no volume is ever made."""
        ours = [machine_id for machine_id in dict.fromkeys(ids) if re.fullmatch("[0-9]+", machine_id)]
        if ours:
            with self._api() as api:
                destroy_droplets(api, ours)

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
        token = self.token.get_secret_value() if self.token else find_token()
        secrets = (token, self.node_token.get_secret_value() if self.node_token else "")
        return Api(
            "DigitalOcean",
            self._url(),
            {"Authorization": f"Bearer {token}"},
            classify=meaning_of,
            secrets=secrets,
            reset=reset_of,
            says_missing=says_missing,
        )
