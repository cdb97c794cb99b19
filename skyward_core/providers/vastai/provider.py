"""Vast.ai: a market of other people's machines, rented as containers through its REST API.

An offer of the market is one machine, and is gone once it is rented. So an `Offer` of ours stands for a class of
machines: "RTX_4090x2" in a country, at a price at which at least one is for sale. `launch` searches the class again and
takes a different offer of the market for each machine. A container has no tags: its label holds ours. Our script is the
container's main process. It starts our sshd on a port that Vast.ai maps to a random port of the host's address.

Facts: fact sheet of 2026-11-20, section 4, and docs.vast.ai of 2026. docs/clouds/vastai.md lists what is untested.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic import Field, SecretStr, field_validator

from skyward_core.accelerators import Accelerator, is_nvidia
from skyward_core.accelerators.cuda import cuda_of
from skyward_core.errors import (
    BadRequest,
    CredentialsError,
    InstancesLeft,
    NoCapacity,
    ProviderFailed,
    SkywardError,
)
from skyward_core.machines.instances import Instance
from skyward_core.machines.offers import (
    Offer,
    Requirements,
    total_of,
)
from skyward_core.providers import userdata
from skyward_core.providers._http import Api, Found, Row, field_of, number_of
from skyward_core.providers.base import RANK_TAG, Provider, Tags
from skyward_core.providers.ssh_keys import Key, our_key
from skyward_core.providers.tagging import of_machine
from skyward_core.providers.vastai.api import (
    CONSOLE,
    URL,
    USER,
    advice_of,
    all_containers,
    classify_and_note,
    find_key,
    says_missing,
)
from skyward_core.providers.vastai.boot import MAIN, UNPACKED, environment_of, packed_boot
from skyward_core.providers.vastai.instances import LABELS, to_instance
from skyward_core.providers.vastai.launch import ADDRESS_SECONDS, GONE, LaunchRecord, await_addresses, in_order, rent
from skyward_core.providers.vastai.market import Billing, MarketOffer, merge, search
from skyward_core.providers.vastai.names import TYPE, UNKNOWN_REGION, accelerator_of, country_names, gpu_names, spaced
from skyward_core.providers.vastai.termination import destroy

log = logging.getLogger(__name__)

SECONDS_OF_AN_HOUR = 3600


class VastAI(Provider):
    """Containers on the machines of a market."""

    name: ClassVar[str] = "vastai"
    refuses: ClassVar[Mapping[str, str]] = {
        "volume": (
            "its containers have neither FUSE nor the right to mount; read and write the bucket from your functions"
        ),
        "mig": "its containers do not own the GPU's driver; ask for a smaller GPU",
        "private network": (
            "its machines see each other only through mapped ports; nodes talk through the client, or ask for one"
            " machine with more GPUs"
        ),
    }
    end_command: ClassVar[str] = userdata.END_COMMAND
    sells_by_wish: ClassVar[bool] = True
    """Without an accelerator in the requirements, `offers` returns the cheapest of all machines."""
    listing_lag_seconds: ClassVar[float] = 30.0
    """A container was seen to be missing in the list right after it was rented. No document says for how long."""

    api_key: SecretStr | None = Field(
        default=None,
        exclude=True,
        repr=False,
        description="By default VAST_API_KEY, or the file of Vast.ai's own tools.",
    )
    region: str | tuple[str, ...] | None = Field(
        default=None, description='Countries by two-letter code, "SE" or ("SE", "FI"); None: all.'
    )
    ssh_key: str | None = Field(
        default=None, description="Path of a private key without passphrase; by default one is created."
    )
    endpoint_url: str | None = Field(default=None, description="Overrides VAST_URL and Vast.ai's own URL.")
    image: str = Field(
        default="nvidia/cuda:12.4.1-runtime-ubuntu22.04", description="A public image of Debian's family."
    )
    disk_gb: int = Field(default=40, ge=8, description="Size for the life of the container.")
    bid_margin: float = Field(
        default=0.1, ge=0, description="Margin above the lowest bid for a spot machine, as a share."
    )
    price_tolerance: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="Highest excess over the offer's price, as a share. Bills use the offer's price.",
    )
    traffic_down_gb_per_hour: float = Field(
        default=5.0,
        ge=0,
        description="Estimated download of a machine in an hour: hosts bill traffic by the GB.",
    )
    traffic_up_gb_per_hour: float = Field(default=1.0, ge=0, description="The same for upload.")
    verified_only: bool = Field(default=True, description="Only machines that Vast.ai has verified.")
    min_reliability: float = Field(
        default=0.98, ge=0, le=1, description="Vast.ai's own measure of a host's reliability, at least."
    )
    min_download_mbps: float = Field(default=200.0, ge=0, description="Download of the host in Mbit/s, at least.")
    min_direct_ports: int = Field(default=2, ge=1, description="Open ports of the host, at least.")
    min_cuda: float | None = Field(
        default=None,
        ge=0,
        description="Lowest CUDA version of the host's driver. None: what the images need. Not used for AMD.",
    )
    min_hours_left: float = Field(default=24.0, ge=0, description="How long the host must still be for rent, at least.")

    @field_validator("region")
    @classmethod
    def _countries(cls, value: str | tuple[str, ...] | None) -> str | tuple[str, ...] | None:
        for country in (value,) if isinstance(value, str) else value or ():
            if not re.fullmatch("[A-Z]{2}", country):
                raise ValueError(f'region {country!r}: a country is two capital letters, such as "US"')
        return value

    # ── offers ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def offers(self, want: Requirements) -> list[Offer]:
        """Return the classes of machines for sale, at each of their prices, on demand and for a bid (spot).

        A wide search returns the cheapest 256 of each kind.
        """
        match = TYPE.fullmatch(want.instance_type) if want.instance_type is not None else None
        if want.instance_type is not None and match is None:
            return []
        filters = self._filters(
            want.accelerator if match is None else accelerator_of(spaced(match["gpu"])), want.min_cuda
        )
        if match is not None:
            filters |= {"gpu_name": {"eq": spaced(match["gpu"])}, "num_gpus": {"eq": int(match["gpus"])}}
        if self.region:
            filters["geolocation"] = {
                "in": country_names([self.region] if isinstance(self.region, str) else self.region)
            }
        with self._api() as api:
            on_demand, spot = (
                search(api, filters, want.max_price_per_hour, self._billing(), is_spot=is_spot)
                for is_spot in (False, True)
            )
        regular = {(choice.machine, choice.offer.instance_type): choice.offer.price_per_hour for choice in on_demand}
        bids = [
            choice.as_bid(self.bid_margin, regular.get((choice.machine, choice.offer.instance_type))) for choice in spot
        ]
        offers = [choice.offer for choice in on_demand] + [
            bid
            for bid in bids
            if bid.on_demand_price_per_hour is None or bid.price_per_hour <= bid.on_demand_price_per_hour
        ]
        fitting = (offer for offer in offers if want.instance_type in (None, offer.instance_type))
        return [offer.model_copy(update={"min_cuda": want.min_cuda}) for offer in merge(fitting)]

    def _filters(self, accelerator: Accelerator | None, min_cuda: float | None) -> dict[str, Mapping[str, Any]]:
        """Return what every machine must have, and which chips are accepted."""
        filters: dict[str, Mapping[str, Any]] = {
            "rentable": {"eq": True},
            "rented": {"eq": False},
            "external": {"eq": False},
            "reliability2": {"gte": self.min_reliability},
            "direct_port_count": {"gte": self.min_direct_ports},
            "inet_down": {"gte": self.min_download_mbps},
            "disk_space": {"gte": self.disk_gb},
            "duration": {"gte": self.min_hours_left * SECONDS_OF_AN_HOUR},
        }
        if self.verified_only:
            filters["verified"] = {"eq": True}
        if accelerator is None or is_nvidia(accelerator):
            needed = (
                [self.min_cuda]
                if self.min_cuda is not None
                else [version for version in (min_cuda, cuda_of(self.image)) if version is not None]
            )
            if needed:
                filters["cuda_max_good"] = {"gte": max(needed)}
        if accelerator is not None:
            filters["gpu_name"] = {"in": gpu_names(accelerator)}
            filters["num_gpus"] = {"gte": accelerator.count}
        return filters

    # ── launch ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def may_sell_spot(self, want: Requirements) -> bool:
        """True: Vast.ai lists a bid only while the machine is free."""
        return True

    def launch(self, offer: Offer, count: int, tags: Tags, startup: str) -> list[Instance]:
        """Rent machines of the offer's class, neighbours first, and return those that have an address.

        The highest price is the offer's, plus `price_tolerance`; for spot it is the bid. If a host cannot start the
        container, it is destroyed and the next offer is tried. A container that disappears ends the launch: another
        process may be tearing the pool down, and would not see machines that are rented later.
        """
        key = our_key(self.ssh_key)
        record = LaunchRecord()
        first = int(tags.get(RANK_TAG, "0"))
        wanted = list(range(first, first + count))
        rows: dict[int, Row] = {}
        trouble: SkywardError = NoCapacity(
            f"no machine at Vast.ai: a {offer.instance_type} in {offer.region} for ${offer.price_per_hour:.3f}"
        ).coded("no offers")
        deadline = time.monotonic() + ADDRESS_SECONDS
        with self._api(record.unwanted) as api:
            choices = in_order(self._matching(api, offer), count)
            while wanted and choices and time.monotonic() < deadline:
                machines = [of_machine(tags, rank) for rank in wanted]
                created, refusal = rent(
                    api, choices, machines, lambda machine: self._order(offer, machine, startup, key), record
                )
                record.known |= set(created.values())
                up, down = await_addresses(api, created, deadline, record)
                rows |= up
                is_refused = refusal is not None and type(refusal) is not NoCapacity
                is_over = is_refused or any(error.code == GONE for error in down.values())
                trouble = (refusal if is_refused else next(reversed(down.values()), refusal)) or trouble
                wanted = [] if is_over else sorted(down)
        if not rows and record.stuck:  # not NoCapacity, which means that nothing is left running
            raise ProviderFailed(f"Vast.ai did not destroy {sorted(record.stuck)}, which did not start") from trouble
        if not rows:
            raise trouble
        if len(rows) < count:
            log.info(
                "Vast.ai had %d of %d %s at $%.3f and %g more: %s",
                len(rows),
                count,
                offer.instance_type,
                offer.price_per_hour,
                self.price_tolerance,
                trouble,
            )
        return [instance for _, row in sorted(rows.items()) if (instance := self._instance(row, key)) is not None]

    def _matching(self, api: Api, offer: Offer) -> list[MarketOffer]:
        """Return the market's offers of the offer's class, at its price at most, cheapest first."""
        match = TYPE.fullmatch(offer.instance_type)
        if match is None:
            raise BadRequest(f'{offer.instance_type!r} is no class of machines of Vast.ai; an example is "RTX_4090x2"')
        accelerator = None if offer.accelerator is None else accelerator_of(spaced(match["gpu"]))
        filters = self._filters(accelerator, offer.min_cuda) | {
            "gpu_name": {"eq": spaced(match["gpu"])},
            "num_gpus": {"eq": int(match["gpus"])},
            "cpu_cores_effective": {"gte": offer.vcpus},
        }
        if offer.region != UNKNOWN_REGION:
            filters["geolocation"] = {"in": country_names([offer.region])}
        # the bid is the price: a machine whose lowest bid is higher would not start
        most = offer.price_per_hour if offer.is_spot else offer.price_per_hour * (1 + self.price_tolerance)
        total = most + total_of(offer.extras_per_hour)
        return [
            choice
            for choice in search(api, filters, most, self._billing(), is_spot=offer.is_spot)
            if (choice.offer.instance_type, choice.offer.region) == (offer.instance_type, offer.region)
            and choice.offer.memory_gb >= offer.memory_gb
            and offer.architecture in {None, choice.offer.architecture}
            and (offer.price_per_hour if offer.is_spot else choice.offer.price_per_hour)
            + total_of(choice.offer.extras_per_hour)
            <= total + 1e-9
        ]

    def _order(self, offer: Offer, tags: Tags, startup: str, key: Key) -> dict[str, Any]:
        """Return the body of the creating call.

        With a price it is a bid; without one it is on demand, wherever the search found the offer.
        """
        label, more = LABELS.pack(tags)
        order: dict[str, Any] = {
            "client_id": "me",
            "image": self.image,
            "disk": self.disk_gb,
            "label": label,
            "runtype": "args",  # other types start their own sshd, whose host key is not known beforehand
            "user": "root",
            "onstart": "/bin/sh",  # with "args", the entrypoint
            "args": ["-c", MAIN.format(UNPACKED)],
            "env": {
                "-p 22:22": "1",
                **environment_of(packed_boot(startup, tags, LABELS.machine(tags), key), more),
            },
            "target_state": "running",
            "cancel_unavail": True,
        }
        return order | {"price": offer.price_per_hour} if offer.is_spot else order

    def _billing(self) -> Billing:
        return Billing(self.disk_gb, self.traffic_down_gb_per_hour, self.traffic_up_gb_per_hour)

    def _instance(self, row: Row, key: Key) -> Instance | None:
        """Return a container as Instance, with its extra costs; None without a label of ours."""
        found = to_instance(row, key)
        return found and found.model_copy(
            update={"extras_per_hour": self._billing().extras_of(row, is_spot=found.is_spot)}
        )

    # ── the other methods ────────────────────────────────────────────────────────────────────────────────────────────

    def instances(self, pool_id: str | None = None) -> list[Instance]:
        """Return the containers with a label of ours, of one pool or of all."""
        key = our_key(self.ssh_key)
        with self._api() as api:
            found = [instance for row in all_containers(api) if (instance := self._instance(row, key)) is not None]
        return [instance for instance in found if pool_id in (None, instance.pool_id)]

    def terminate(self, ids: Sequence[str]) -> None:
        """Destroy containers and their disks, many in one call."""
        contracts = [int(each) for each in ids if each.isdecimal()]  # other texts are no id of a container
        if not contracts:
            return
        with self._api() as api:
            errors = destroy(api, contracts)
        for error in errors.values():
            if isinstance(error, CredentialsError):
                raise error
        if errors:
            left = sorted(map(str, errors))
            raise InstancesLeft(
                f"Vast.ai did not destroy {', '.join(left)}: {next(iter(errors.values()))}", left
            ) from next(iter(errors.values()))

    def ends_for_good(self) -> bool:
        """True: a container destroys itself."""
        return True

    def account(self) -> str:
        """Return the number of the key's user."""
        with self._api() as api:
            return f"user {field_of(api.request('GET', USER), 'id', int, f'Vast.ai answered GET {USER}')}"

    def quotas(self) -> Mapping[str, float]:
        """Return the credit, from which Vast.ai takes the price of machines."""
        with self._api() as api:
            return {"credit in USD": number_of(api.request("GET", USER), "credit", f"Vast.ai answered GET {USER}")}

    def console_url(self, instance: Instance) -> str:
        """Return the page with all containers, because there is no page for one."""
        return CONSOLE

    # ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _api(self, unwanted: list[int] | None = None) -> Api:
        """Open a client. Containers that a refused call created nevertheless are added to `unwanted`."""
        found = Found(self.api_key.get_secret_value(), "api_key=") if self.api_key is not None else find_key()
        url = (self.endpoint_url or os.environ.get("VAST_URL") or URL).rstrip("/").removesuffix("/api/v0")
        return Api(
            "Vast.ai",
            url,
            {"Authorization": f"Bearer {found.key}"},
            classify=classify_and_note(unwanted),
            secrets=[found.key],
            says_missing=says_missing,
            advice=advice_of(found.source),
        )
