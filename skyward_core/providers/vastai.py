"""Vast.ai: a market of other people's machines, rented as containers through its REST API.

An offer of the market (an "ask") is one machine and is gone once it is rented, so ours stand for a class of machines:
"RTX_4090x2" in a country, at a price at which at least one is for sale. `launch` searches the class again and takes a
different ask for each machine. A container has no tags: its label has ours. Our script is the container's main process
and starts our sshd on a port that Vast maps to a random one of the host's address.

Facts: fact sheet of 2026-11-20, section 4, and docs.vast.ai of 2026; what nobody has tried is in docs/clouds/vastai.md.
"""

from __future__ import annotations

import logging
import operator
import os
import re
import shlex
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import batched
from pathlib import Path
from typing import Any, ClassVar, cast
from urllib.parse import quote, unquote

from pydantic import Field, SecretStr, field_validator

from skyward_core.accelerators import Accelerator, is_nvidia, parse
from skyward_core.accelerators.catalog import find
from skyward_core.accelerators.cuda import cuda_of
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
from skyward_core.machines.offers import (
    ARCHITECTURES,
    Extra,
    Offer,
    Requirements,
    architecture_beside,
    by_month,
    total_of,
)
from skyward_core.providers import userdata
from skyward_core.providers._http import Api, Classify, Row, field_of, rows_of
from skyward_core.providers.base import LAUNCH_TAG, POOL_TAG, RANK_TAG, Provider, Tags
from skyward_core.providers.ssh_keys import Key, host_key, our_key
from skyward_core.providers.tagging import TagName, of_machine

URL = "https://console.vast.ai"
CONSOLE = "https://cloud.vast.ai/instances/"
GB_OF_A_MB = 1e-3
SECONDS_OF_AN_HOUR = 3600

SEARCH, LISTING, USER = "/api/v0/bundles/", "/api/v1/instances/", "/api/v0/users/current/"
SEARCH_ROWS = 64
"""The most that one search tells, whatever limit is asked for; the next page begins at the last one's price."""
SEARCH_PAGES = 4
"""There is a quota of rows a day, and whoever names an accelerator has seen all of them long before."""
LISTING_ROWS = 25
"""The most that one page of a listing tells."""
DESTROYED_AT_ONCE = 100
LABEL_CHARACTERS = 256

CREATE_SECONDS = 4.5
"""Vast wants so much time between two creating calls, and refuses those in between."""
TRIES = 3
"""So many asks are tried for each machine, for some are taken by others and some hosts cannot start a container."""
ADDRESS_SECONDS = 600.0
"""How long a machine may take until it runs and has an address; a host that loads an image for longer is a bad one."""
POLL_SECONDS = 3.0
LONGEST_POLL_SECONDS = 15.0
MISSES = 2
"""So many listings in a row do not tell a container that they have told before: it is gone."""
GONE = "gone"
"""The code for that."""
LOOK_SECONDS = (0.0, 5.0, 15.0)
"""Pauses before the looks for what a creating call without an answer may have made: a listing is some seconds behind.
"""

GONE_CODES = frozenset({"no_such_ask", "invalid_price"})
"""An ask that is not there any more, and a bid that has been outbid since the search."""
GONE_TEXTS = ("no_such_ask", "not available")
QUOTA_CODES = frozenset({"insufficient_credit", "insufficient_credits"})
QUOTA_TEXTS = ("credit", "balance", "spending limit")
"""Where a refusal has no code of its own ("invalid_args" for everything)."""
SEARCH_QUOTA = "search_quota_exceeded"
OFF = frozenset({"stopped", "exited", "offline", "unknown", "frozen"})
BROKEN = re.compile(
    r"^error|OCI runtime create failed|Error response from daemon|manifest unknown|pull access denied|repository does"
    r" not exist",
    re.IGNORECASE,
)
"""What a container that will never start says of itself before it runs."""

TYPE = re.compile(r"(?P<gpu>.+?)(?:_[0-9]+GB)?x(?P<gpus>[0-9]+)")
UNKNOWN_REGION = "unknown"
COUNTRIES: Mapping[str, str] = {
    "United Arab Emirates": "AE",
    "Argentina": "AR",
    "Austria": "AT",
    "Australia": "AU",
    "Belgium": "BE",
    "Bulgaria": "BG",
    "Brazil": "BR",
    "Canada": "CA",
    "Switzerland": "CH",
    "Chile": "CL",
    "China": "CN",
    "Colombia": "CO",
    "Cyprus": "CY",
    "Czechia": "CZ",
    "Czech Republic": "CZ",
    "Germany": "DE",
    "Denmark": "DK",
    "Estonia": "EE",
    "Spain": "ES",
    "Finland": "FI",
    "France": "FR",
    "United Kingdom": "GB",
    "Georgia": "GE",
    "Greece": "GR",
    "Hong Kong": "HK",
    "Croatia": "HR",
    "Hungary": "HU",
    "Indonesia": "ID",
    "Ireland": "IE",
    "Israel": "IL",
    "India": "IN",
    "Iceland": "IS",
    "Italy": "IT",
    "Japan": "JP",
    "South Korea": "KR",
    "Korea": "KR",
    "Kazakhstan": "KZ",
    "Lithuania": "LT",
    "Luxembourg": "LU",
    "Latvia": "LV",
    "Moldova": "MD",
    "Mexico": "MX",
    "Malaysia": "MY",
    "Netherlands": "NL",
    "The Netherlands": "NL",
    "Norway": "NO",
    "New Zealand": "NZ",
    "Philippines": "PH",
    "Poland": "PL",
    "Portugal": "PT",
    "Qatar": "QA",
    "Romania": "RO",
    "Serbia": "RS",
    "Russia": "RU",
    "Saudi Arabia": "SA",
    "Sweden": "SE",
    "Singapore": "SG",
    "Slovenia": "SI",
    "Slovakia": "SK",
    "Thailand": "TH",
    "Turkey": "TR",
    "Türkiye": "TR",
    "Taiwan": "TW",
    "Ukraine": "UA",
    "United States": "US",
    "United States of America": "US",
    "Vietnam": "VN",
    "South Africa": "ZA",
}
"""The code of each country (ISO 3166-1) by the names that Vast's listings may have for it, where offers have the code.

What is not here stays as it is told.
"""

OTHER_NAMES = {
    "A100X": "A100",
    "B300 PC": "B300",
    "GH200 SXM": "GH200",
    "Q RTX 6000": "Quadro RTX 6000",
    "Q RTX 8000": "Quadro RTX 8000",
    "RTX 4080S": "RTX 4080 SUPER",
    "RTX PRO 6000 Max-Q": "RTX PRO 6000",
    "RTX PRO 6000 S": "RTX PRO 6000",
    "RTX PRO 6000 WS": "RTX PRO 6000",
}
GPU_NAMES = (
    *OTHER_NAMES,
    *(
        "A10",
        "A10g",
        "A16",
        "A30",
        "A40",
        "A100 PCIE",
        "A100 SXM4",
        "H100 PCIE",
        "H100 NVL",
        "H100 SXM",
        "H200",
        "H200 NVL",
        "B200",
        "B300",
    ),
    *("L4", "L40", "L40S", "Tesla T4", "Tesla V100", "Tesla P100"),
    *(
        "RTX 3070",
        "RTX 3080",
        "RTX 3080 Ti",
        "RTX 3090",
        "RTX 3090 Ti",
        "RTX 4070 Ti",
        "RTX 4080",
        "RTX 4090",
        "RTX 4090D",
        "RTX 5080",
        "RTX 5090",
    ),
    *(
        "RTX A2000",
        "RTX A4000",
        "RTX A4500",
        "RTX A5000",
        "RTX A6000",
        "RTX 2000Ada",
        "RTX 4000Ada",
        "RTX 5000Ada",
        "RTX 6000Ada",
    ),
    *("InstinctMI50", "InstinctMI100", "InstinctMI210", "InstinctMI250X", "InstinctMI300X"),
)
"""How the market calls the chips of the catalogue; a search takes no other spelling, and finds nothing for one."""

MAIN = """trap 'exit 0' TERM; while :; do ({}) & wait "$!"; sleep 5 & wait "$!"; done"""
"""The first process of the container. It ends when it is told to, which `sleep` as a first process would not, and at no
other moment: who kills its only child has it run again, and find that it was started anew.
"""
TOOLS = """\
command -v curl >/dev/null || { apt-get update -qq; DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends curl ca-certificates; } \\
  </dev/null >/dev/null 2>&1 &
"""  # noqa: E501
"""What the end needs and small images lack; there may be no network when it is needed."""
END = f"""\
told() {{ tr '\\0' '\\n' </proc/1/environ | sed -n "s/^$1=//p"; }} # what is started over SSH does not inherit them
ask() {{ # method, path, body: succeeds if it was accepted
  answer=$(printf 'Authorization: Bearer %s' "$key" |
    curl -sS -m 20 -w ' %{{http_code}}' -X "$1" -H @- -H 'Content-Type: application/json' -d "$3" "{URL}/api/v0/instances/$2" 2>/dev/null)
  case $answer in *'"success": true'*' '2?? | *'"success":true'*' '2??) return 0 ;; *) return 1 ;; esac
}}
pause=5
while :; do
  id=${{CONTAINER_ID:-$(told CONTAINER_ID)}} key=${{CONTAINER_API_KEY:-$(told CONTAINER_API_KEY)}}
  [ -n "$id" ] || {{ id=$(told VAST_CONTAINERLABEL) && id=${{id#C.}}; }}
  if [ -n "$id" ] && [ -n "$key" ]; then
    ask DELETE "$id/" '{{}}' || ask DELETE '' '{{"instance_ids": ['"$id"']}}' || ask PUT "$id/" '{{"state": "stopped"}}' # that costs its disk alone
  fi
  sleep "$pause"
  [ "$pause" -ge 60 ] || pause=$((pause * 2))
done"""  # noqa: E501
"""By every way that Vast documents, and for as long as it takes: the first process is never ended, for what becomes of
a container that has ended is told nowhere. If it is started anew, it ends itself as soon as it begins (`userdata`).
"""

type Filters = Mapping[str, Mapping[str, Any]]
"""Field to {operator: value}."""

COMPARED: Mapping[str, Callable[[Any, Any], bool]] = {
    "eq": operator.eq,
    "gte": operator.ge,
    "lte": operator.le,
    "in": lambda value, values: value in values,
}

log = logging.getLogger(__name__)


class SearchedTooMuch(RateLimited):
    """The rows of a day are used up; they come back at midnight UTC, which is not waited for."""


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
    """Who names no accelerator sees the cheapest of all machines."""
    listing_lag_seconds: ClassVar[float] = 30.0
    """A container was seen to be missing in the list right after it was rented; for how long is told nowhere."""

    api_key: SecretStr | None = Field(default=None, exclude=True, repr=False)
    region: str | tuple[str, ...] | None = Field(
        default=None, description='Countries by two letters, "SE" or ("SE", "FI"); None is the world.'
    )
    ssh_key: str | None = Field(
        default=None, description="Path of a private key without passphrase; without it one is made."
    )
    endpoint_url: str | None = Field(default=None, description="In place of VAST_URL and of Vast's own address.")
    image: str = Field(
        default="nvidia/cuda:12.4.1-runtime-ubuntu22.04", description="A public image of Debian's family."
    )
    disk_gb: int = Field(default=40, ge=8, description="For the life of the container.")
    bid_margin: float = Field(
        default=0.1, ge=0, description="How much more than the least bid is bid for a spot machine, as a share."
    )
    price_tolerance: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="How much more than its offer, by which the bill is counted, a machine may cost, as a share.",
    )
    traffic_down_gb_per_hour: float = Field(
        default=5.0,
        ge=0,
        description="What a machine loads in an hour, as an estimate: hosts have traffic paid for by the GB.",
    )
    traffic_up_gb_per_hour: float = Field(default=1.0, ge=0, description="The same for what it sends.")
    verified_only: bool = Field(default=True, description="Only machines that Vast has checked.")
    min_reliability: float = Field(default=0.98, ge=0, le=1)
    min_download_mbps: float = Field(default=200.0, ge=0)
    min_direct_ports: int = Field(default=2, ge=1)
    min_cuda: float | None = Field(
        default=None,
        ge=0,
        description="CUDA of the host's driver at least. None: what the images need; not asked of AMD's.",
    )
    min_hours_left: float = Field(
        default=24.0, ge=0, description="For so long at least the host must still be for rent."
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

        Of a wide search the cheapest 256 each.
        """
        wish = TYPE.fullmatch(want.instance_type) if want.instance_type is not None else None
        if want.instance_type is not None and wish is None:
            return []
        filters = self._filters(want.accelerator if wish is None else _accelerator(_spaced(wish["gpu"])), want.min_cuda)
        if wish is not None:
            filters |= {"gpu_name": {"eq": _spaced(wish["gpu"])}, "num_gpus": {"eq": int(wish["gpus"])}}
        if self.region:
            filters["geolocation"] = {"in": _names([self.region] if isinstance(self.region, str) else self.region)}
        with self._api() as api:
            on_demand, spot = (
                self._search(api, filters, want.max_price_per_hour, is_spot=is_spot) for is_spot in (False, True)
            )
        regular = {(ask.machine, ask.offer.instance_type): ask.offer.price_per_hour for ask in on_demand}
        bids = [ask.as_bid(self.bid_margin, regular.get((ask.machine, ask.offer.instance_type))) for ask in spot]
        offers = [ask.offer for ask in on_demand] + [
            bid
            for bid in bids
            if bid.on_demand_price_per_hour is None or bid.price_per_hour <= bid.on_demand_price_per_hour
        ]
        fitting = (offer for offer in offers if want.instance_type in (None, offer.instance_type))
        return [offer.model_copy(update={"min_cuda": want.min_cuda}) for offer in _merged(fitting)]

    def _filters(self, accelerator: Accelerator | None, min_cuda: float | None) -> dict[str, Mapping[str, Any]]:
        """What every machine must be, and which chips it may have."""
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
            filters["gpu_name"] = {"in": _gpu_names(accelerator)}
            filters["num_gpus"] = {"gte": accelerator.count}
        return filters

    def _search(self, api: Api, filters: Filters, most: float | None, *, is_spot: bool) -> list[_Ask]:
        """Return the asks that fit, cheapest first, a page at a time.

        What the filters say is looked at again: Vast does not always apply them.
        """
        price = "min_bid" if is_spot else "dph_total"
        found: dict[int, _Ask | None] = {}
        limits: dict[str, float] = {} if most is None else {"lte": most}
        for _ in range(SEARCH_PAGES):
            fitting = {**filters, **({price: limits} if limits else {})}
            rest = {
                "type": "bid" if is_spot else "on-demand",
                "order": [[price, "asc"]],
                "limit": SEARCH_ROWS,
                "allocated_storage": self.disk_gb,
            }
            told = rows_of(
                api.ask("POST", SEARCH, body={**fitting, **rest}, is_repeatable=True),
                "offers",
                f"Vast.ai answered POST {SEARCH}",
            )
            rows = [row for row in told if row["id"] not in found]
            found |= {
                row["id"]: (
                    _ask(row, self._beside(row, is_spot=is_spot), is_spot=is_spot) if _holds(row, fitting) else None
                )
                for row in rows
            }
            if len(told) < SEARCH_ROWS or not rows:
                break
            limits = {**limits, "gte": rows[-1][price]}
        asks = [ask for ask in found.values() if ask is not None]
        log.debug(
            "%d of %d asks do not fit, or have a chip that is in no catalogue", len(found) - len(asks), len(found)
        )
        return sorted(asks, key=lambda ask: ask.offer.total_per_hour)

    def _beside(self, row: Row, *, is_spot: bool) -> tuple[Extra, ...]:
        """What is billed beside a machine.

        The price on demand has the disk in it (`allocated_storage`), and a bid has not.
        """
        down, up = (float(row.get(f"inet_{way}_cost") or 0) for way in ("down", "up"))
        traffic = down * self.traffic_down_gb_per_hour + up * self.traffic_up_gb_per_hour
        told = (
            f"an estimate: {self.traffic_down_gb_per_hour:g} GB an hour in and {self.traffic_up_gb_per_hour:g} GB out,"
            " at the host's prices"
        )
        disk = by_month(
            "disk",
            float(row.get("storage_cost") or 0) * self.disk_gb,
            "the host's price by GB and month, as its offer tells it",
            "at launch",
        )
        parts = (
            disk if is_spot else None,
            Extra(name="traffic", usd_per_hour=round(traffic, 6), source=told, checked="at launch"),
        )
        return tuple(part for part in parts if part is not None and part.usd_per_hour)

    # ── launch ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def may_sell_spot(self, want: Requirements) -> bool:
        """A market: bids are taken only while a machine is free."""
        return True

    def launch(self, offer: Offer, count: int, tags: Tags, startup: str) -> list[Instance]:
        """Rent machines of the offer's class, at its price at most and `price_tolerance` above it, neighbours first;
        return those that have an address.

        Hosts that cannot start the container are given back, and the next ones tried. A container that was there and is
        gone ends the launch: somebody may be giving the pool back, and would not see what is rented after that. Spot:
        the bid is the offer's price.
        """
        key = our_key(self.ssh_key)
        made = _Made()
        first = int(tags.get(RANK_TAG, "0"))
        wanted = list(range(first, first + count))
        rows: dict[int, Row] = {}
        trouble: SkywardError = NoCapacity(
            f"nobody at Vast.ai sells a {offer.instance_type} in {offer.region} for ${offer.price_per_hour:.3f}"
        ).coded("no offers")
        deadline = time.monotonic() + ADDRESS_SECONDS
        with self._api(made.left) as api:
            asks = self._asks(api, offer, count)
            while wanted and asks and time.monotonic() < deadline:
                created, refusal = self._rent(
                    api, offer, asks, [of_machine(tags, rank) for rank in wanted], startup, key, made
                )
                made.known |= set(created.values())
                up, down = self._await(api, created, deadline, made)
                rows |= up
                is_refused = refusal is not None and type(refusal) is not NoCapacity
                is_over = is_refused or any(error.code == GONE for error in down.values())
                trouble = (refusal if is_refused else next(reversed(down.values()), refusal)) or trouble
                wanted = [] if is_over else sorted(down)
        if not rows and made.stuck:  # not NoCapacity, which says that there is nothing
            raise ProviderFailed(f"Vast.ai did not destroy {sorted(made.stuck)}, which did not start") from trouble
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

    def _asks(self, api: Api, offer: Offer, count: int) -> deque[_Ask]:
        """Return the asks to try, in this order: of the cheapest place that has all of them, if one has, then the rest
        by price.
        """
        wish = TYPE.fullmatch(offer.instance_type)
        if wish is None:
            raise BadRequest(f'{offer.instance_type!r} is no class of machines of Vast.ai: write "RTX_4090x2"')
        accelerator = None if offer.accelerator is None else _accelerator(_spaced(wish["gpu"]))
        filters = self._filters(accelerator, offer.min_cuda) | {
            "gpu_name": {"eq": _spaced(wish["gpu"])},
            "num_gpus": {"eq": int(wish["gpus"])},
            "cpu_cores_effective": {"gte": offer.vcpus},
        }
        if offer.region != UNKNOWN_REGION:
            filters["geolocation"] = {"in": _names([offer.region])}
        # what we bid is the price: an ask whose least bid is above it would not start
        most = offer.price_per_hour if offer.is_spot else offer.price_per_hour * (1 + self.price_tolerance)
        total = most + total_of(offer.extras_per_hour)
        asks = [
            ask
            for ask in self._search(api, filters, most, is_spot=offer.is_spot)
            if (ask.offer.instance_type, ask.offer.region) == (offer.instance_type, offer.region)
            and ask.offer.memory_gb >= offer.memory_gb
            and offer.architecture in {None, ask.offer.architecture}
            and (offer.price_per_hour if offer.is_spot else ask.offer.price_per_hour)
            + total_of(ask.offer.extras_per_hour)
            <= total + 1e-9
        ]
        places = Counter(ask.place for ask in asks)
        together = next((ask.place for ask in asks if places[ask.place] >= count), None) if count > 1 else None
        return deque(sorted(asks, key=lambda ask: ask.place != together)[: TRIES * count])

    def _instance(self, row: Row, key: Key) -> Instance | None:
        """Read a container, with what is billed beside it; None for one without a label of ours."""
        found = _instance(row, key)
        return found and found.model_copy(update={"extras_per_hour": self._beside(row, is_spot=found.is_spot)})

    def _rent(
        self, api: Api, offer: Offer, asks: deque[_Ask], machines: Sequence[Tags], startup: str, key: Key, made: _Made
    ) -> tuple[dict[int, int], SkywardError | None]:
        """Rent an ask for each machine, one call after another; return what came of it by rank, and why it is fewer, if
        it is.

        Asks that are tried are taken off the queue. A container that comes with a refusal is given back at once.
        """
        created: dict[int, int] = {}
        refusal: SkywardError | None = None
        again_at = 0.0
        for tags in machines:
            while asks:
                time.sleep(max(0.0, again_at - time.monotonic()))
                ask, again_at = asks.popleft(), time.monotonic() + CREATE_SECONDS
                try:
                    created[int(tags[RANK_TAG])] = _contract(
                        api.ask("PUT", f"/api/v0/asks/{ask.id}/", body=self._order(offer, tags, startup, key)),
                        made.left,
                    )
                    break
                except SkywardError as error:
                    refusal = error
                _end_quietly(api, made.take_left(), made)
                if type(refusal) is NoCapacity:
                    continue
                # nobody knows what came of it
                if isinstance(refusal, ProviderFailed) and not isinstance(refusal, RateLimited):
                    found = _look(api, tags, made.known)
                    if found is not None:
                        created[int(tags[RANK_TAG])] = found
                        break
                return created, refusal
            else:
                return created, refusal
        return created, None

    def _order(self, offer: Offer, tags: Tags, startup: str, key: Key) -> dict[str, Any]:
        """What is asked for in the creating call.

        A price makes it a bid, and no price an on-demand machine, wherever the ask was found.
        """
        boot = (
            userdata.boot_script(
                startup, tags, f"printf %s {shlex.quote(LABELS.machine(tags))}", END, is_container=True
            )
            + TOOLS
        )
        label, more = LABELS.pack(tags)
        order: dict[str, Any] = {
            "client_id": "me",
            "image": self.image,
            "disk": self.disk_gb,
            "label": label,
            "runtype": "args",  # the others bring an sshd of their own, with a host key that nobody knows beforehand
            "user": "root",
            "onstart": "/bin/sh",  # with "args", the entrypoint
            "args": ["-c", MAIN.format(userdata.UNPACKED)],
            "env": {
                "-p 22:22": "1",
                "SKYWARD_BOOT": userdata.packed(userdata.container_script(boot, key, host_key(tags[LAUNCH_TAG], key))),
                **more,
            },
            "target_state": "running",
            "cancel_unavail": True,
        }
        return order | {"price": offer.price_per_hour} if offer.is_spot else order

    def _await(
        self, api: Api, created: Mapping[int, int], deadline: float, made: _Made
    ) -> tuple[dict[int, Row], dict[int, SkywardError]]:
        """Wait until each machine runs and has an address, or never will; return what is told of the ones, and why by
        rank for the others, which are ended.
        """
        waiting, up, down, missed = dict(created), dict[int, Row](), dict[int, SkywardError](), dict[int, int]()
        pause = POLL_SECONDS
        while waiting:
            rows = {row["id"]: row for row in _listing(api)}
            is_late = time.monotonic() >= deadline
            for rank, contract in list(waiting.items()):
                row = rows.get(contract, {})
                if row or contract in missed:  # from its first listing on
                    missed[contract] = 0 if row else missed[contract] + 1
                if _state(row) is InstanceState.RUNNING and _address(row) is not None:
                    up[rank] = row
                elif _state(row) is InstanceState.STOPPING or is_late or missed.get(contract, 0) >= MISSES:
                    word = str(row.get("actual_status") or ("created" if row else GONE))
                    down[rank] = NoCapacity(
                        f"Vast.ai could not start {contract}: {word} {row.get('status_msg') or ''}".strip()
                    ).coded(word)
                else:
                    continue
                del waiting[rank]
            if waiting:
                time.sleep(pause)
                pause = min(1.5 * pause, LONGEST_POLL_SECONDS)
        _end_quietly(api, [created[rank] for rank in down], made)
        return up, down

    # ── the other verbs ──────────────────────────────────────────────────────────────────────────────────────────────

    def instances(self, pool_id: str | None = None) -> list[Instance]:
        """Return the containers with a label of ours, of a pool or of all."""
        key = our_key(self.ssh_key)
        with self._api() as api:
            found = [instance for row in _listing(api) if (instance := self._instance(row, key)) is not None]
        return [instance for instance in found if pool_id in (None, instance.pool_id)]

    def terminate(self, ids: Sequence[str]) -> None:
        """Destroy containers and their disks, many in a call."""
        contracts = [int(each) for each in ids if each.isdecimal()]  # no container has another kind of id
        if not contracts:
            return
        with self._api() as api:
            errors = _end(api, contracts)
        for error in errors.values():
            if isinstance(error, CredentialsError):
                raise error
        if errors:
            left = sorted(map(str, errors))
            raise InstancesLeft(
                f"Vast.ai did not destroy {', '.join(left)}: {next(iter(errors.values()))}", left
            ) from next(iter(errors.values()))

    def ends_for_good(self) -> bool:
        """It destroys itself."""
        return True

    def account(self) -> str:
        """Return the number of the user whose key it is."""
        with self._api() as api:
            return f"user {field_of(api.ask('GET', USER), 'id', int, f'Vast.ai answered GET {USER}')}"

    def console_url(self, instance: Instance) -> str:
        """Return the page with all containers; one alone has none."""
        return CONSOLE

    # ── the wire ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _api(self, left: list[int] | None = None) -> Api:
        """Open a session. What was made although it was refused is noted in `left`."""
        key = self.api_key.get_secret_value() if self.api_key is not None else _key_around()
        url = (self.endpoint_url or os.environ.get("VAST_URL") or URL).rstrip("/").removesuffix("/api/v0")
        return Api(
            "Vast.ai",
            url,
            {"Authorization": f"Bearer {key}"},
            classify=_classify(left),
            secrets=[key],
            says_missing=_says_missing,
        )


@dataclass(slots=True)
class _Made:
    """What one launch has made.

    Attributes:
        left: containers that came with the last refusal.
        known: all that are told of, so that none of them is taken for what an answer that was lost has made.
        stuck: those that have failed and could not be destroyed. They have our label, and are found by it.
    """

    left: list[int] = field(default_factory=list[int])
    known: set[int] = field(default_factory=set[int])
    stuck: set[int] = field(default_factory=set[int])

    def take_left(self) -> list[int]:
        """Return what is left over, and know it from now on."""
        left = list(self.left)
        self.left.clear()
        self.known |= set(left)
        return left


def _key_around() -> str:
    """The key of the user's environment, or the one of Vast's own tools. Raises CredentialsError."""
    if key := os.environ.get("VAST_API_KEY", "").strip():
        return key
    config = Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser()
    for place in (config / "vastai" / "vast_api_key", Path("~/.vast_api_key").expanduser()):
        try:
            if key := place.read_text().strip():
                return key
        except OSError:
            continue
    raise CredentialsError("there is no key for Vast.ai: set VAST_API_KEY, run `vastai set api-key`, or give api_key=")


def _classify(left: list[int] | None) -> Classify:
    def meaning(status: int, body: Row, message: str) -> SkywardError | None:
        if left is not None and body.get("new_contract"):
            left.append(int(body["new_contract"]))
        return _meaning(status, body, message)

    return meaning


def _meaning(status: int, body: Row, message: str) -> SkywardError | None:
    """What a refusal means, by its status and code, and by its text where the code says nothing."""
    code, told = str(body.get("error") or ""), str(body.get("msg") or body.get("message") or "").casefold()
    if code == SEARCH_QUOTA:
        return SearchedTooMuch(f"{message}; searches are free again at midnight UTC")
    if status in (401, 429) or status >= 500:
        return None
    if status == 402 or code in QUOTA_CODES or any(text in told for text in QUOTA_TEXTS):
        return QuotaExceeded(message)
    if status in (404, 410) or code in GONE_CODES or any(text in told for text in GONE_TEXTS):
        return NoCapacity(message)
    return None


def _says_missing(body: Row) -> bool:
    return bool(re.fullmatch("no_such_[a-z]+|[a-z]+_not_found", str(body.get("error"))))


def _contract(answer: Any, left: list[int]) -> int:
    """The id of what was created. A call that did not succeed may have made one nevertheless, which goes to `left`."""
    body = cast("Row", answer) if isinstance(answer, dict) else {}
    contract = body.get("new_contract")
    if body.get("success") and contract:
        return int(contract)
    if contract:
        left.append(int(contract))
    if not body.get("error") and not body.get("msg"):
        fields = (
            f"an object with {', '.join(map(repr, body)) or 'nothing'}" if isinstance(answer, dict) else "no object"
        )
        # not what is in them: one may be a key
        raise ProviderFailed(f"Vast.ai does not say what it has created: {fields}")
    message = f"Vast.ai did not rent it: {_said(body)}"
    raise (_meaning(200, body, message) or NoCapacity(message)).coded(str(body.get("error") or "success: false"))


def _listing(api: Api) -> Iterator[Row]:
    """All containers of the account."""
    token: str | None = None
    seen: set[str | None] = set()
    while token not in seen:
        seen.add(token)
        answer = api.ask("GET", LISTING, query={"limit": LISTING_ROWS, "after_token": token})
        yield from rows_of(answer, "instances", f"Vast.ai answered GET {LISTING}")
        token = answer.get("next_token") or None
        if token is None:
            return
    raise ProviderFailed("Vast.ai's listing goes round in circles")


def _look(api: Api, tags: Tags, known: set[int]) -> int | None:
    """Return the container that a creating call without an answer has made, if the listing tells of one."""
    wanted = {name: tags[name] for name in (POOL_TAG, RANK_TAG, LAUNCH_TAG)}
    for pause in LOOK_SECONDS:
        time.sleep(pause)
        try:
            rows = list(_listing(api))
        except SkywardError:
            return None
        for row in rows:
            if row["id"] not in known and wanted.items() <= (_tags(row) or {}).items():
                return int(row["id"])
    return None


def _end(api: Api, contracts: Sequence[int]) -> dict[int, SkywardError]:
    """Destroy containers; return those that were not, and why.

    Ids that nobody has are passed over by Vast, and are a 404 if they are all.
    """
    errors: dict[int, SkywardError] = {}
    for some in batched(contracts, DESTROYED_AT_ONCE):
        try:
            answer = api.ask("DELETE", "/api/v0/instances/", body={"instance_ids": list(some)}, missing_is_none=True)
            is_done = answer is None or _is_done(answer)
        except BadRequest:
            is_done = False
        except SkywardError as error:
            errors |= dict.fromkeys(some, error)
            continue
        if not is_done:  # one of them is in the way of all
            errors |= _end_each(api, some)
    return errors


def _end_quietly(api: Api, contracts: Sequence[int], made: _Made) -> None:
    """Destroy what did not start; what cannot be destroyed now is noted."""
    for contract, error in _end(api, contracts).items():
        made.stuck.add(contract)
        log.warning("Vast.ai did not destroy %d, which did not start: %s", contract, error)


def _end_each(api: Api, contracts: Iterable[int]) -> dict[int, SkywardError]:
    errors: dict[int, SkywardError] = {}
    for contract in contracts:
        try:
            answer = api.ask("DELETE", f"/api/v0/instances/{contract}/", body={}, missing_is_none=True)
            if answer is not None and not _is_done(answer):
                errors[contract] = ProviderFailed(f"Vast.ai was asked to destroy {contract}: {_said(answer)}")
        except SkywardError as error:
            errors[contract] = error
    return errors


def _is_done(answer: object) -> bool:
    """Whether an answer says that something was done; what is no object, or an empty one, says nothing."""
    return isinstance(answer, dict) and bool(cast("Row", answer).get("success", bool(answer)))


def _said(answer: object) -> str:
    """What an answer says in words; of its other fields one may be a key."""
    body = cast("Row", answer) if isinstance(answer, dict) else {}
    return f"{body.get('error')}: {body.get('msg')}"


# ── asks ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class _Ask:
    """One machine, or a part of one, that can be rented once.

    The price of the offer is for spot the least bid; `place` is where its neighbours are.
    """

    id: int
    machine: int
    place: str
    offer: Offer

    def as_bid(self, margin: float, regular: float | None) -> Offer:
        """Return the offer with what we bid as its price."""
        return self.offer.model_copy(
            update={"price_per_hour": self.offer.price_per_hour * (1 + margin), "on_demand_price_per_hour": regular}
        )


def _ask(row: Row, beside: tuple[Extra, ...], *, is_spot: bool) -> _Ask | None:
    """Read an ask; None for a chip that the catalogue does not know, and for what has no price."""
    accelerator, price = (
        _accelerator(str(row.get("gpu_name") or "")),
        float(row.get("min_bid" if is_spot else "dph_total") or 0),
    )
    if accelerator is None or price <= 0:
        return None
    cores, effective = float(row.get("cpu_cores") or 0), float(row.get("cpu_cores_effective") or 0)
    cluster, machine = row.get("cluster_id"), int(row.get("machine_id") or 0)
    offer = Offer(
        provider=VastAI.name,
        instance_type=_instance_type(row),
        region=_country(row),
        is_spot=is_spot,
        price_per_hour=price,
        on_demand_price_per_hour=None if is_spot else price,
        vcpus=effective,
        # the memory told is the whole machine's
        memory_gb=float(row.get("cpu_ram") or 0) * GB_OF_A_MB * (effective / cores if cores else 1.0),
        accelerator=accelerator.name,
        accelerators=int(row.get("num_gpus") or 1),
        accelerator_memory_gb=_chip_memory_gb(row, accelerator),
        form_factor=accelerator.form_factor,
        architecture=ARCHITECTURES.get(str(row.get("cpu_arch")), architecture_beside(accelerator.name)),
        extras_per_hour=beside,
    )
    return _Ask(int(row["id"]), machine, f"machine {machine}" if cluster is None else f"cluster {cluster}", offer)


def _merged(offers: Iterable[Offer]) -> list[Offer]:
    """Make one offer of those of a class at the same price: what each of them has at least, with what is billed beside
    the dearest.
    """
    merged: dict[tuple[str, str, str | None, bool, float], Offer] = {}
    for offer in offers:
        key = (offer.instance_type, offer.region, offer.architecture, offer.is_spot, offer.price_per_hour)
        other = merged.setdefault(key, offer)
        least = {"vcpus": min(offer.vcpus, other.vcpus), "memory_gb": min(offer.memory_gb, other.memory_gb)}
        least |= {"extras_per_hour": max(offer.extras_per_hour, other.extras_per_hour, key=total_of)}
        merged[key] = other.model_copy(update=least)
    return list(merged.values())


def _holds(row: Row, filters: Filters) -> bool:
    """Whether a row keeps to the filters, as far as it tells: `verified` is told by none, and a country is the end of
    its place.
    """
    told = {**row, "geolocation": _country(row)}
    return all(
        COMPARED[comparison](told[name], value)
        for name, conditions in filters.items()
        if told.get(name) is not None
        for comparison, value in conditions.items()
    )


@lru_cache
def _accelerator(gpu_name: str) -> Accelerator | None:
    """The chip that Vast calls so; None if the catalogue has none. Its memory and count are the row's business."""
    try:
        return parse(OTHER_NAMES.get(gpu_name, gpu_name.removeprefix("Instinct")))
    except BadRequest:
        return None


def _gpu_names(accelerator: Accelerator) -> list[str]:
    """What Vast calls a chip; with a form factor only those of it."""
    known = [
        (name, chip) for name in GPU_NAMES if (chip := _accelerator(name)) is not None and chip.name == accelerator.name
    ]
    names = [name for name, chip in known if accelerator.form_factor in (None, chip.form_factor)]
    return sorted({*names, accelerator.name})


def _chip_memory_gb(row: Row, accelerator: Accelerator) -> float:
    """Memory of one chip in the vendor's figure.

    Vast tells what the driver sees, in units of 1024², up to a tenth less.
    """
    told = float(row.get("gpu_ram") or 0) / 1024
    choices = find(accelerator.name).memory_choices(accelerator.form_factor)
    nearest = min(choices, key=lambda choice: abs(choice - told))
    return float(nearest) if abs(nearest - told) <= nearest / 10 else round(told, 1)


def _instance_type(row: Row) -> str:
    """The class of a machine: "RTX_4090x2", and "A100_SXM4_40GBx8" where the chip comes with several memories."""
    gpu_name = str(row.get("gpu_name") or "unknown")
    accelerator = _accelerator(gpu_name)
    has_choice = (
        accelerator is not None
        and row.get("gpu_ram")
        and len(find(accelerator.name).memory_choices(accelerator.form_factor)) > 1
    )
    memory = f"_{_chip_memory_gb(row, accelerator):.0f}GB" if accelerator is not None and has_choice else ""
    return f"{gpu_name.replace(' ', '_')}{memory}x{row.get('num_gpus') or 1}"


def _spaced(gpu_name: str) -> str:
    return gpu_name.replace("_", " ")


def _country(row: Row) -> str:
    """The country of a place that is told as "Texas, US" or, in listings, "California, United States"."""
    told = str(row.get("geolocation") or "").rpartition(",")[2].strip()
    return COUNTRIES.get(told, told) or UNKNOWN_REGION


def _names(countries: Iterable[str]) -> list[str]:
    """All names that a place may have for these countries."""
    wanted = list(countries)
    return [*wanted, *(name for name, code in COUNTRIES.items() if code in wanted)]


# ── containers ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _instance(row: Row, key: Key) -> Instance | None:
    """Read a container; None for one without a label of ours."""
    tags = _tags(row)
    if tags is None:
        return None
    address, is_spot, price = _address(row), bool(row.get("is_bid")), float(row.get("dph_total") or 0)
    return Instance(
        id=str(row["id"]),
        provider=VastAI.name,
        pool_id=tags[POOL_TAG],
        rank=int(tags[RANK_TAG]),
        state=_state(row),
        region=_country(row),
        instance_type=_instance_type(row),
        is_spot=is_spot,
        price_per_hour=price,
        on_demand_price_per_hour=None if is_spot else price,
        ip=None if address is None else address[0],
        tags=tags,
        directory=userdata.directory_of(LABELS.machine(tags)),
        endpoint=None if address is None else _endpoint(*address, tags[LAUNCH_TAG], key),
    )


def _endpoint(host: str, port: int, launch: str, key: Key) -> Endpoint:
    return Endpoint(
        host=host,
        port=port,
        user="root",
        key=str(key.path),
        host_key=host_key(launch, key).public,
        known_hosts="/dev/null",
        config="/dev/null",
    )


def _state(row: Row) -> InstanceState:
    """What is paid for and will not run (again) is STOPPING: outbid, exited, without a sign of its host, or unable to
    start.
    """
    word = row.get("actual_status")
    if row.get("intended_status") == "stopped" or word in OFF:
        return InstanceState.STOPPING
    if word == "running":
        return InstanceState.RUNNING if row.get("cur_state") in (None, "running") else InstanceState.STOPPING
    return InstanceState.STOPPING if BROKEN.search(str(row.get("status_msg") or "")) else InstanceState.PENDING


def _address(row: Row) -> tuple[str, int] | None:
    """Where port 22 of a container is reached; None until its host has mapped it.

    The address is told with spaces around it.
    """
    host = str(row.get("public_ipaddr") or "").strip()
    ports = (row.get("ports") or {}).get("22/tcp") or []
    return (host, int(ports[0]["HostPort"])) if host and ports else None


# ── labels ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _tags(row: Row) -> dict[str, str] | None:
    """Read the tags of a container; None if its label is none of ours."""
    told: Any = row.get("extra_env") or []  # pairs in a list, or an object
    return LABELS.unpack(row.get("label"), cast("dict[str, str]", dict(told)))


def _quoted(text: str) -> str:
    """Write a text with per cent signs for what is no letter, digit or one of "-._~"."""
    return quote(text, safe="")


LABELS = TagName(":", LABEL_CHARACTERS, "a label of Vast.ai", _quoted, unquote)
"""Its word for pool and rank is also what a machine calls itself, told to it by us: no container needs to know its
number for that.
"""
