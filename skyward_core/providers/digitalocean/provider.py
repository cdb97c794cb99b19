"""DigitalOcean: virtual machines ("droplets"), with GPUs or without, over its REST API.

Facts about the API are from the fact sheet of 2026-11-20, section 2, and from DigitalOcean's OpenAPI description
(github.com/digitalocean/openapi).

Two peculiarities. An accepted creating call (202) is no success: the machine's action has the outcome. And tags appear
on a machine some time after its creation. Until then only its name identifies it, which is chosen before the call.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

from pydantic import ConfigDict, Field, SecretStr, model_validator

from skyward_core.machines.instances import Instance
from skyward_core.machines.offers import Offer, Requirements
from skyward_core.providers._http import Api, Classify, Found, field_of, number_of
from skyward_core.providers.base import LAUNCH_TAG, POOL_TAG, RANK_TAG, Provider, Sale, Tags
from skyward_core.providers.digitalocean.api import (
    API_URL,
    URL_VARIABLE,
    advice_of,
    droplets,
    find_token,
    meaning_of,
    pages,
    refusal_of,
    reset_of,
    says_missing,
)
from skyward_core.providers.digitalocean.boot import MACHINE_ID, METADATA_ID, SELF_DELETION
from skyward_core.providers.digitalocean.instances import to_instance
from skyward_core.providers.digitalocean.launch import await_addresses, create_droplets, destroy_failed, registered
from skyward_core.providers.digitalocean.offers import LEAST_MEMORY_GB, SPOT_CHIPS, SPOT_SUFFIX, image_of, to_offers
from skyward_core.providers.digitalocean.tags import name_of, tags_of, to_tags
from skyward_core.providers.digitalocean.termination import destroy_droplets
from skyward_core.providers.ssh_keys import Key, host_key, our_key
from skyward_core.providers.tagging import of_machine
from skyward_core.providers.userdata import END_COMMAND, boot_script, cloud_config

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
    end_command: ClassVar[str] = END_COMMAND
    gone_deadline_seconds: ClassVar[float] = 300.0
    """A droplet cannot be deleted while it is being created ("already has a pending event"), with GPUs for minutes."""
    listing_lag_seconds: ClassVar[float] = 30.0
    """An assumption: a droplet is created after its call was accepted, and tagged after that."""
    sells_by_wish: ClassVar[bool] = True
    """Without a memory requirement, `offers` leaves out machines with too little."""
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
            fingerprint = registered(api, key)
            order = self._order(offer, tags, startup, key, fingerprint)
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

    def _api(self, classify: Classify = meaning_of) -> Api:
        found = Found(self.token.get_secret_value(), "token=") if self.token else find_token()
        secrets = (found.key, self.node_token.get_secret_value() if self.node_token else "")
        return Api(
            "DigitalOcean",
            self._url(),
            {"Authorization": f"Bearer {found.key}"},
            classify=classify,
            secrets=secrets,
            reset=reset_of,
            says_missing=says_missing,
            advice=advice_of(found.source),
        )
