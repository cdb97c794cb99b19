"""Vast.ai: a market of other people's machines, rented as containers through its REST API.

An offer of the market is one machine, and is gone once it is rented. So an `Offer` of ours stands for a class of
machines: "RTX_4090x2" in a country, at a price at which at least one is for sale. `launch` searches the class again and
takes a different offer of the market for each machine. A container has no tags: its label holds ours. Our script is the
container's main process. It starts our sshd on a port that Vast.ai maps to a random port of the host's address.

Facts: fact sheet of 2026-11-20, section 4, and docs.vast.ai of 2026. docs/clouds/vastai.md lists what is untested.
"""

from __future__ import annotations

import os
import re
import shlex
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from itertools import batched
from pathlib import Path
from typing import Any, ClassVar, cast
from urllib.parse import quote, unquote

from pydantic import Field, SecretStr, field_validator

from skyward_core.accelerators import Accelerator, is_nvidia
from skyward_core.accelerators.catalog import cuda_of
from skyward_core.concurrency.backoff import Backoff
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
from skyward_core.machines.instances import Instance, InstanceState
from skyward_core.machines.offers import Offer, Requirements, total_of
from skyward_core.providers import userdata
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
    number_of,
    rows_of,
)
from skyward_core.providers.base import EXPIRES_TAG, LAUNCH_TAG, POOL_TAG, RANK_TAG, Provider, Tags, chips
from skyward_core.providers.tagging import MORE_TAGS, TagName, of_machine
from skyward_core.providers.userdata import Key, endpoint_of, host_key, our_key
from skyward_core.providers.vastai_market import (
    TYPE,
    UNKNOWN_REGION,
    Billing,
    MarketOffer,
    accelerator_of,
    country_names,
    country_of,
    gpu_names,
    instance_type_of,
    merge,
    search,
    spaced,
)
from skyward_core.providers.vastai_schedule import schedule, unschedule
from skyward_core.shown_text import visible_logger

log = visible_logger(__name__)

SECONDS_OF_AN_HOUR = 3600


class VastAI(Provider):
    """Containers on the machines of a market."""

    name: ClassVar[str] = "vastai"
    display_name: ClassVar[str] = "Vast.ai"
    rents: ClassVar[frozenset[str]] = chips(
        "T4, L4, L40, L40S, A10, A10G, A16, A30, A40, A100, H100, H200, B200, B300, GH200, V100, P100, RTX 3070, "
        "RTX 3080, RTX 3080 Ti, RTX 3090, RTX 3090 Ti, RTX 4070 Ti, RTX 4080, RTX 4080 SUPER, RTX 4090, RTX 4090D, "
        "RTX 5080, RTX 5090, RTX A2000, RTX A4000, RTX A4500, RTX A5000, RTX A6000, RTX 2000 Ada, RTX 4000 Ada, "
        "RTX 5000 Ada, RTX 6000 Ada, RTX PRO 6000, Quadro RTX 6000, Quadro RTX 8000, MI50, MI100, MI210, MI250X, "
        "MI300X"
    )
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
    harmless_fields: ClassVar[frozenset[str]] = frozenset(
        {
            "region",
            "disk_gb",
            "bid_margin",
            "price_tolerance",
            "traffic_down_gb_per_hour",
            "traffic_up_gb_per_hour",
            "min_download_mbps",
            "min_direct_ports",
            "min_cuda",
            "min_hours_left",
            "schedule_end",
        }
    )
    # whose computer it may be decides who reads what a pool sends there
    own_fields: ClassVar[frozenset[str]] = frozenset({"image", "verified_only", "min_reliability"})
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
        default=5.0, ge=0, description="Estimated download of a machine in an hour: hosts bill traffic by the GB."
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
    schedule_end: bool = Field(
        default=False,
        description="Have Vast.ai itself destroy each container at the first full hour after the pool's hard end, also"
        " one that it has stopped. Not confirmed on the real market. Needs max_lifetime or max_cost.",
    )

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
        expires = self._expires(tags)
        first = int(tags.get(RANK_TAG, "0"))
        wanted = list(range(first, first + count))
        rows: dict[int, Row] = {}
        trouble: SkywardError = NoCapacity(
            f"no machine at Vast.ai: a {offer.instance_type} in {offer.region} for ${offer.price_per_hour:.3f}"
        ).coded("no offers")
        deadline = time.monotonic() + ADDRESS_SECONDS
        with self._api(record.unwanted) as api:
            with before_creation():
                choices = in_order(self._matching(api, offer), count)
            while wanted and choices and time.monotonic() < deadline:
                machines = [of_machine(tags, rank) for rank in wanted]
                created, refusal = rent(
                    api, choices, machines, lambda machine: self._order(offer, machine, startup, key), record
                )
                record.known |= set(created.values())
                unscheduled = {} if expires is None else schedule_ends(api, created, expires, record)
                up, down = await_addresses(
                    api, {rank: created[rank] for rank in created.keys() - unscheduled.keys()}, deadline, record
                )
                rows |= up
                down |= unscheduled
                is_refused = refusal is not None and type(refusal) is not NoCapacity
                is_over = is_refused or bool(unscheduled) or any(error.code == GONE for error in down.values())
                trouble = (refusal if is_refused else next(reversed(down.values()), refusal)) or trouble
                wanted = [] if is_over else sorted(down)
            if expires is not None:
                forget_ends(api, record.known - {row["id"] for row in rows.values()})
        if not rows and record.stuck:  # not NoCapacity, which means that nothing is left running
            raise ProviderFailed(f"Vast.ai did not destroy {sorted(record.stuck)}, which did not start") from trouble
        if not rows:
            raise certain_if_refused(trouble)
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

    def _expires(self, tags: Tags) -> float | None:
        """Return the hard end after which Vast.ai is to destroy the containers; None without `schedule_end`."""
        if not self.schedule_end:
            return None
        if EXPIRES_TAG not in tags:
            raise BadRequest("schedule_end=True needs the hard end of the pool: give it max_lifetime or max_cost")
        return float(tags[EXPIRES_TAG])

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
            "env": {"-p 22:22": "1", **environment_of(packed_boot(startup, tags, LABELS.machine(tags), key), more)},
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
            if self.schedule_end:
                forget_ends(api, set(contracts) - errors.keys())
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

    def stopped_spot(self) -> str:
        """A stopped container keeps its disk."""
        disk = (
            "the disk of an interruptible container that Vast.ai stops, because it was outbid or the credit is used up,"
        )
        if self.schedule_end:
            return f"{disk} is billed until Vast.ai destroys it, at the first full hour after the pool's hard end"
        return (
            f"{disk} is billed until `skyward sweep --yes` deletes it: run that every few minutes on another computer,"
            " or give schedule_end=True"
        )

    def missing_credentials(self) -> str:
        """Return which variable or file is missing; "" if there is a key."""
        return missing(self._key)

    def account(self) -> str:
        """Return the number of the key's user."""
        with self._api() as api:
            return f"user {field_of(api.request('GET', USER), 'id', int, f'Vast.ai answered GET {USER}')}"

    def quotas(self) -> Mapping[str, float]:
        """Return what Vast.ai takes the price of machines from: the balance, and the credit, by its own names."""
        who = f"Vast.ai answered GET {USER}"
        with self._api() as api:
            user = api.request("GET", USER)
        names = [name for name in ("credit", "balance") if isinstance(user, dict) and cast("Row", user).get(name)]
        return {f"{name} in USD": number_of(user, name, who) for name in names or ["credit"]}

    def console_url(self, instance: Instance) -> str:
        """Return the page with all containers, because there is no page for one."""
        return CONSOLE

    # ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _key(self) -> Found:
        return Found(self.api_key.get_secret_value(), "api_key=") if self.api_key is not None else find_key()

    def _api(self, unwanted: list[int] | None = None) -> Api:
        """Open a client. Containers that a refused call created nevertheless are added to `unwanted`."""
        credential = self._key()
        url = (self.endpoint_url or os.environ.get("VAST_URL") or URL).rstrip("/").removesuffix("/api/v0")
        return Api(
            "Vast.ai",
            url,
            {"Authorization": f"Bearer {credential.key}"},
            classify=classify_and_note(unwanted, advice := advice_of(credential.source)),
            secrets=[credential.key],
            says_missing=says_missing,
            advice=advice,
        )


# ── launching ────────────────────────────────────────────────────────────────────────────────────────────────────────


CREATE_SECONDS = 4.5
"""Vast.ai requires this time between two creating calls, and refuses earlier ones ("threshold: 4.5, penalty: 12" in the
schema of the call). So a refused one is repeated after this time at least.
"""
TRIES = 3
"""Offers tried for each machine, because others rent some and some hosts cannot start a container."""
ADDRESS_SECONDS = 600.0
"""How long a machine may take until it runs and has an address. A host that loads an image for longer is a bad one."""
POLL_SECONDS = 3.0
LONGEST_POLL_SECONDS = 15.0
MISSES = 2
"""A container is gone when this number of listings in a row lack it, after one that had it."""
GONE = "gone"
"""The error code of such a container."""
LOOK_SECONDS = (0.0, 5.0, 15.0)
"""Pauses between lookups after a creating call without an answer, because listings are some seconds late."""


@dataclass(slots=True)
class LaunchRecord:
    """Containers of one launch.

    Attributes:
        unwanted: containers that came with the last refusal.
        known: containers already accounted for; a lost answer cannot be about one of them.
        stuck: containers that failed and could not be destroyed. Their label is ours, so a sweep finds them.
    """

    unwanted: list[int] = field(default_factory=list[int])
    known: set[int] = field(default_factory=set[int])
    stuck: set[int] = field(default_factory=set[int])

    def take_unwanted(self) -> list[int]:
        """Return the unwanted containers. From now on they are known."""
        left = list(self.unwanted)
        self.unwanted.clear()
        self.known |= set(left)
        return left


def in_order(choices: Sequence[MarketOffer], count: int) -> deque[MarketOffer]:
    """Return the offers to try: first those of the cheapest place with enough machines, then the others by price."""
    places = Counter(choice.place for choice in choices)
    together = next((choice.place for choice in choices if places[choice.place] >= count), None) if count > 1 else None
    return deque(sorted(choices, key=lambda choice: choice.place != together)[: TRIES * count])


def rent(
    api: Api, choices: deque[MarketOffer], machines: Sequence[Tags], order: Callable[[Tags], Row], record: LaunchRecord
) -> tuple[dict[int, int], SkywardError | None]:
    """Rent one offer for each machine, one call after another.

    Returns the containers by rank, and the error if some are missing. Tried offers leave the queue. A container that
    comes with a refusal is destroyed at once.
    """
    created: dict[int, int] = {}
    refusal: SkywardError | None = None
    again_at = 0.0
    for tags in machines:
        while choices:
            time.sleep(max(0.0, again_at - time.monotonic()))
            choice = choices.popleft()
            try:
                created[int(tags[RANK_TAG])] = contract_of(
                    api.request("PUT", f"/api/v0/asks/{choice.id}/", body=order(tags), pause_seconds=CREATE_SECONDS),
                    record.unwanted,
                )
                break
            except SkywardError as error:
                refusal = error
            finally:
                again_at = time.monotonic() + CREATE_SECONDS
            destroy_failed(api, record.take_unwanted(), record)
            if type(refusal) is NoCapacity:
                continue
            # the outcome is unknown: it may have created a container
            if is_unsure(refusal):
                found = _look_up(api, tags, record.known)
                if found is not None:
                    created[int(tags[RANK_TAG])] = found
                    break
            return created, refusal
        else:
            return created, refusal
    return created, None


def await_addresses(
    api: Api, created: Mapping[int, int], deadline: float, record: LaunchRecord
) -> tuple[dict[int, Row], dict[int, SkywardError]]:
    """Wait until each machine runs and has an address, or has failed. Destroy those that failed.

    Returns the rows of the ones and the errors of the others, by rank.
    """
    waiting, up, down, missed = dict(created), dict[int, Row](), dict[int, SkywardError](), dict[int, int]()
    pauses = Backoff(POLL_SECONDS, LONGEST_POLL_SECONDS, 1.5).pauses()
    while waiting:
        rows = {row["id"]: row for row in all_containers(api)}
        is_late = time.monotonic() >= deadline
        for rank, contract in list(waiting.items()):
            row = rows.get(contract, {})
            if row or contract in missed:  # only after its first listing
                missed[contract] = 0 if row else missed[contract] + 1
            if state_of(row) is InstanceState.RUNNING and address_of(row) is not None:
                up[rank] = row
            elif state_of(row) is InstanceState.STOPPING or is_late or missed.get(contract, 0) >= MISSES:
                word = str(row.get("actual_status") or ("created" if row else GONE))
                down[rank] = NoCapacity(
                    f"Vast.ai could not start {contract}: {word} {row.get('status_msg') or ''}".strip()
                ).coded(word)
            else:
                continue
            del waiting[rank]
        if waiting:
            time.sleep(next(pauses))
    destroy_failed(api, [created[rank] for rank in down], record)
    return up, down


def _look_up(api: Api, tags: Tags, known: set[int]) -> int | None:
    """Return the container that an unanswered creating call has made, if the listing has it."""
    wanted = {name: tags[name] for name in (POOL_TAG, RANK_TAG, LAUNCH_TAG)}
    for pause in LOOK_SECONDS:
        time.sleep(pause)
        try:
            rows = list(all_containers(api))
        except SkywardError:
            return None
        for row in rows:
            if row["id"] not in known and wanted.items() <= (tags_of(row) or {}).items():
                return int(row["id"])
    return None


def schedule_ends(
    api: Api, created: Mapping[int, int], expires: float, record: LaunchRecord
) -> dict[int, SkywardError]:
    """Have Vast.ai destroy these containers after `expires`. One without such an end is destroyed at once.

    Returns the errors by rank.
    """
    errors: dict[int, SkywardError] = {}
    for rank, contract in created.items():
        try:
            schedule(api, contract, expires)
        except SkywardError as error:
            errors[rank] = error.advised("Leave out schedule_end=True to rent without it")
    destroy_failed(api, [created[rank] for rank in errors], record)
    return errors


def forget_ends(api: Api, contracts: Collection[int]) -> None:
    """Remove the scheduled ends of containers that are gone. Those that cannot be removed now end within a week."""
    try:
        if contracts:
            unschedule(api, contracts)
    except SkywardError as error:
        log.info("the scheduled ends of %s stay at Vast.ai for a week: %s", sorted(contracts), error)


def destroy_failed(api: Api, contracts: Sequence[int], record: LaunchRecord) -> None:
    """Destroy containers that did not start. Those that cannot be destroyed now are recorded as stuck."""
    for contract, error in destroy(api, contracts).items():
        record.stuck.add(contract)
        log.warning("Vast.ai did not destroy %d, which did not start: %s", contract, error)


# ── containers as instances ──────────────────────────────────────────────────────────────────────────────────────────

LABEL_CHARACTERS = 256
OFF = frozenset({"stopped", "exited", "offline", "unknown", "frozen"})
BROKEN = re.compile(
    r"^error|OCI runtime create failed|Error response from daemon|manifest unknown|pull access denied|repository does"
    r" not exist",
    re.IGNORECASE,
)
"""Status message of a container that will never start."""


def to_instance(row: Row, key: Key) -> Instance | None:
    """Return a container as Instance; None without a label of ours."""
    tags = tags_of(row)
    if tags is None:
        return None
    address, is_spot, price = address_of(row), bool(row.get("is_bid")), float(row.get("dph_total") or 0)
    return Instance(
        id=str(row["id"]),
        provider="vastai",
        pool_id=tags[POOL_TAG],
        rank=int(tags[RANK_TAG]),
        state=state_of(row),
        region=country_of(row),
        instance_type=instance_type_of(row),
        is_spot=is_spot,
        price_per_hour=price,
        on_demand_price_per_hour=None if is_spot else price,
        ip=None if address is None else address[0],
        tags=tags,
        directory=userdata.directory_of(LABELS.machine(tags)),
        endpoint=None if address is None else endpoint_of(*address, tags[LAUNCH_TAG], key, config=os.devnull),
    )


def state_of(row: Row) -> InstanceState:
    """Return the state of a container.

    STOPPING is what costs money and will not run (again): outbid, exited, without contact to its host, or unable to
    start.
    """
    word = row.get("actual_status")
    if row.get("intended_status") == "stopped" or word in OFF:
        return InstanceState.STOPPING
    if word == "running":
        return InstanceState.RUNNING if row.get("cur_state") in (None, "running") else InstanceState.STOPPING
    return InstanceState.STOPPING if BROKEN.search(str(row.get("status_msg") or "")) else InstanceState.PENDING


def address_of(row: Row) -> tuple[str, int] | None:
    """Return host and port for port 22 of a container; None until its host has mapped it.

    Vast.ai puts spaces around the address.
    """
    host = str(row.get("public_ipaddr") or "").strip()
    ports = (row.get("ports") or {}).get("22/tcp") or []
    return (host, int(ports[0]["HostPort"])) if host and ports else None


def tags_of(row: Row) -> dict[str, str] | None:
    """Return the tags of a container; None if its label is not one of ours."""
    pairs: Any = row.get("extra_env") or []  # pairs in a list, or an object
    environment = cast("dict[str, str]", dict(pairs))
    return LABELS.unpack(row.get("label"), {MORE_TAGS: joined(environment, MORE_TAGS)})


def _quoted(text: str) -> str:
    """Return a text with percent codes for all but letters, digits and "-._~"."""
    return quote(text, safe="")


LABELS = TagName(":", LABEL_CHARACTERS, "a label of Vast.ai", _quoted, unquote)
"""Its word for pool and rank is also the machine's id, which we choose: no container needs to know its number."""


# ── destroying ───────────────────────────────────────────────────────────────────────────────────────────────────────

DESTROYED_AT_ONCE = 100


def destroy(api: Api, contracts: Sequence[int]) -> dict[int, SkywardError]:
    """Destroy containers; return the error of each that was not destroyed.

    Vast.ai skips unknown ids. If it refuses the common call, whatever its reason (404 if all ids are unknown, 403 for a
    key without that right, 410 if there is no such call any more), each container gets its own.
    """
    errors: dict[int, SkywardError] = {}
    for some in batched(contracts, DESTROYED_AT_ONCE):
        try:
            is_done = _is_done(api.request("DELETE", "/api/v0/instances/", body={"instance_ids": list(some)}))
        except ProviderFailed as error:  # an outage, or too many requests: other calls would fare no better
            errors |= dict.fromkeys(some, error)
            continue
        except SkywardError:
            is_done = False
        if not is_done:
            errors |= _destroy_each(api, some)
    return errors


def _destroy_each(api: Api, contracts: Iterable[int]) -> dict[int, SkywardError]:
    errors: dict[int, SkywardError] = {}
    for contract in contracts:
        try:
            answer = api.request("DELETE", f"/api/v0/instances/{contract}/", body={}, missing_is_none=True)
            if answer is not None and not _is_done(answer):
                errors[contract] = ProviderFailed(f"Vast.ai did not destroy {contract}: {reason_in(answer)}")
        except SkywardError as error:
            errors[contract] = error
    return errors


def _is_done(answer: object) -> bool:
    """Return whether an answer reports success; an empty answer or one that is no object does not."""
    return isinstance(answer, dict) and bool(cast("Row", answer).get("success", bool(answer)))


# ── the REST API ─────────────────────────────────────────────────────────────────────────────────────────────────────

URL = "https://console.vast.ai"
CONSOLE = "https://cloud.vast.ai/instances/"
LISTING, USER = "/api/v1/instances/", "/api/v0/users/current/"
LISTING_ROWS = 25
"""The most rows of one page of a listing."""
GONE_CODES = frozenset({"no_such_ask", "invalid_price"})
"""An offer that does not exist any more, and a bid that was outbid since the search."""
GONE_TEXTS = ("no_such_ask", "not available", "no ask by id", "blacklist")
QUOTA_CODES = frozenset({"insufficient_credit", "insufficient_credits", "missing_billing", "spend_rate_limit"})
QUOTA_TEXTS = ("credit", "balance", "spending limit", "spend rate", "spend_rate")
"""Texts of refusals whose code is "invalid_args", which Vast.ai uses for everything."""
KEY_TEXTS = ("invalid user key", "session expired")
"""Texts of a refused key, which some calls refuse with 404 (vast-ai/docs, search_offers.yaml; vast-cli's tests)."""
RIGHT_TEXT = "route access"
"""In the text of a key that lacks a right, which has the status 401: "lacks the api.instances route access"."""
KEYS_PAGE = "https://cloud.vast.ai/manage-keys/"
BILLING_PAGE = "https://cloud.vast.ai/billing/"
SEARCH_QUOTA = "search_quota_exceeded"


class SearchedTooMuch(RateLimited):
    """The daily quota of rows is used up. It is renewed at midnight UTC, and no request waits for that."""


def find_key() -> Found:
    """Return the key of the user's environment, or of Vast.ai's own tools. Raises CredentialsError."""
    if key := os.environ.get("VAST_API_KEY", "").strip():
        return Found(key, "the variable VAST_API_KEY")
    config = Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser()
    for file in (config / "vastai" / "vast_api_key", Path("~/.vast_api_key").expanduser()):
        try:
            if key := file.read_text(encoding="utf-8").strip():
                return Found(key, f"the file {file}")
        except (OSError, UnicodeDecodeError):
            continue
    raise CredentialsError("there is no key for Vast.ai: set VAST_API_KEY, run `vastai set api-key`, or give api_key=")


def advice_of(source: str) -> Advice:
    """Return what to do about refusals of a key from this source."""
    return Advice(
        key=f"The key of {source} is refused: make another at {KEYS_PAGE}",
        rights=(
            f"The key of {source} may not do this: give it instance_read, instance_write, user_read and misc at"
            f" {KEYS_PAGE}"
        ),
        quota=(
            f"Add credit at {BILLING_PAGE}. A new account may spend only so much in an hour. Verify your e-mail"
            " address, rent fewer or cheaper machines, or ask Vast.ai's support for a higher limit"
        ),
        capacity="Try again later, another country or another GPU (`skyward offers`)",
    )


def classify_and_note(unwanted: list[int] | None, advice: Advice) -> Classify:
    """Return the classifier of refusals. It adds containers that a refusal names to `unwanted`."""

    def meaning(status: int, body: Row, message: str) -> SkywardError | None:
        if unwanted is not None and body.get("new_contract"):
            unwanted.append(int(body["new_contract"]))
        if status == HTTPStatus.UNAUTHORIZED and RIGHT_TEXT in _text_of(body):
            return CredentialsError(message).advised(advice.rights)
        return _meaning(status, body, message)

    return meaning


def _meaning(status: int, body: Row, message: str) -> SkywardError | None:
    """Return the meaning of a refusal by its status and code, or by its text where the code says nothing."""
    code, text = str(body.get("error") or ""), _text_of(body)
    if status < 500 and any(part in text for part in KEY_TEXTS):  # after an error of the server a container may exist
        return CredentialsError(message)
    if status == HTTPStatus.FORBIDDEN and code == "invalid_args":  # an account of a host may rent its own machines only
        return BadRequest(message)
    if code == SEARCH_QUOTA:
        return SearchedTooMuch(f"{message}; searches are free again at midnight UTC")
    if code in QUOTA_CODES:
        return QuotaExceeded.of_money(message)
    if status in (401, 429) or status >= 500:
        return None
    if status == 402 or any(part in text for part in QUOTA_TEXTS):
        return QuotaExceeded.of_money(message)
    if status in (404, 410) or code in GONE_CODES or any(part in text for part in GONE_TEXTS):
        return NoCapacity(message)
    return None


def _text_of(body: Row) -> str:
    return str(body.get("msg") or body.get("message") or "").casefold()


def says_missing(body: Row) -> bool:
    return bool(re.fullmatch("no_such_[a-z]+|([a-z]+_)?not_found", str(body.get("error"))))


def contract_of(answer: Any, unwanted: list[int]) -> int:
    """Return the id of the created container. If a failed call created one nevertheless, add it to `unwanted`."""
    body = cast("Row", answer) if isinstance(answer, dict) else {}
    contract = body.get("new_contract")
    if body.get("success") and contract:
        return int(contract)
    if contract:
        unwanted.append(int(contract))
    if contract and not body.get("error") and not body.get("msg"):
        raise NoCapacity(f"Vast.ai could not start {contract} now, and stopped it").coded("stopped")
    if not body.get("error") and not body.get("msg"):
        fields = (
            f"an object with {', '.join(map(repr, body)) or 'nothing'}" if isinstance(answer, dict) else "no object"
        )
        # names only: one of the values may be a key
        raise ProviderFailed(f"Vast.ai's answer lacks the id of the new container: {fields}")
    message = f"Vast.ai refused to rent: {reason_in(body)}"
    error = _meaning(200, body, message) or NoCapacity(message)
    raise error.coded(str(body.get("error") or "success: false")).advised(advice_of("").about(error, 200))


def all_containers(api: Api) -> Iterator[Row]:
    """Yield all containers of the account."""
    token: str | None = None
    seen: set[str | None] = set()
    while token not in seen:
        seen.add(token)
        answer = api.request("GET", LISTING, query={"limit": LISTING_ROWS, "after_token": token})
        yield from rows_of(answer, "instances", f"Vast.ai answered GET {LISTING}")
        token = answer.get("next_token") or None
        if token is None:
            return
    raise ProviderFailed("the pages of Vast.ai's listing repeat")


def reason_in(answer: object) -> str:
    """Return the reason in an answer. Its other fields are left out, because one may be a key."""
    body = cast("Row", answer) if isinstance(answer, dict) else {}
    return f"{body.get('error')}: {body.get('msg')}"


# ── shell text in a container ────────────────────────────────────────────────────────────────────────────────────────

ENVIRONMENT_VALUE = 240
"""Characters of one value of the environment. The schema of the creating call allows 256
(docs.vast.ai/api-reference/openapi/yaml/create_instance.yaml, x-input-validation, 2026-11)."""
ENVIRONMENT = 32_768
"""The same of all names and values. Vast.ai refuses more ("total length > 32KB", reported on 2026-10-08)."""
BOOT = "SKYWARD_BOOT"
UNPACKED = (
    f'umask 077; n=0; while eval "part=\\${{{BOOT}_$n-}}"; [ -n "$part" ]; do printf %s "$part"; n=$((n + 1)); done |'
    " base64 -d | gzip -d >/run/skyward-boot && exec sh /run/skyward-boot"
)
"""Joins the parts of the script (`in_parts`) and runs it."""
MAIN = """trap 'exit 0' TERM; while :; do ({}) & wait "$!"; sleep 5 & wait "$!"; done"""
"""The first process of the container. It ends only on SIGTERM, which `sleep` as a first process would ignore.

If its only child is killed, it runs the child again, and that finds that the container was restarted.
"""
END = f"""\
variable() {{ tr '\\0' '\\n' </proc/1/environ | sed -n "s/^$1=//p"; }} # processes over SSH do not inherit the container's variables
request() {{ # method, path, body: succeeds if it was accepted
  answer=$(printf 'Authorization: Bearer %s' "$key" |
    curl -sS -m 20 -w ' %{{http_code}}' -X "$1" -H @- -H 'Content-Type: application/json' -d "$3" "{URL}/api/v0/instances/$2" 2>/dev/null)
  case $answer in *'"success": true'*' '2?? | *'"success":true'*' '2??) return 0 ;; *) return 1 ;; esac
}}
pause=5
while :; do
  id=${{CONTAINER_ID:-$(variable CONTAINER_ID)}} key=${{CONTAINER_API_KEY:-$(variable CONTAINER_API_KEY)}}
  [ -n "$id" ] || {{ id=$(variable VAST_CONTAINERLABEL) && id=${{id#C.}}; }}
  if [ -n "$id" ] && [ -n "$key" ]; then
    request DELETE "$id/" '{{}}' || request DELETE '' '{{"instance_ids": ['"$id"']}}' || request PUT "$id/" '{{"state": "stopped"}}' # then only its disk is billed
  fi
  sleep "$pause"
  [ "$pause" -ge 60 ] || pause=$((pause * 2))
done"""  # noqa: E501
"""Tries every documented method until one succeeds.

The first process never ends, because Vast.ai does not document what becomes of a container that has ended. After a
restart it ends itself as soon as it begins (`userdata`).
"""


def in_parts(name: str, value: str) -> dict[str, str]:
    """Return the variables that together have this value: NAME_0, NAME_1, ..., each short enough for Vast.ai."""
    parts = batched(value, ENVIRONMENT_VALUE)
    return {f"{name}_{number}": "".join(part) for number, part in enumerate(parts)}


def joined(environment: Mapping[str, str], name: str) -> str:
    """Return the value that `in_parts` has split; "" if there is none."""
    parts: list[str] = []
    while (part := environment.get(f"{name}_{len(parts)}")) is not None:
        parts.append(part)
    return "".join(parts)


def environment_of(boot: str, more: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a container: the packed script, and the tags that its label has no room for.

    Raises BadRequest if Vast.ai would refuse it.
    """
    split = [in_parts(name, value) for name, value in {BOOT: boot, **more}.items()]
    environment = {name: value for parts in split for name, value in parts.items()}
    length = sum(len(name) + len(value) for name, value in environment.items())
    if length >= ENVIRONMENT:
        raise BadRequest(
            f"the startup script is too long: an environment at Vast.ai has {ENVIRONMENT} characters at most, and this"
            f" has {length}, compressed"
        )
    return environment


def packed_boot(startup: str, tags: Tags, machine_id: str, key: Key) -> str:
    """Return the container's script, packed for its environment."""
    boot = userdata.boot_script(startup, tags, f"printf %s {shlex.quote(machine_id)}", END, is_container=True)
    return userdata.packed(userdata.container_script(boot, key, host_key(tags[LAUNCH_TAG], key)))
