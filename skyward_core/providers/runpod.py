"""RunPod: containers ("pods") in its own data centres and on machines of others, through its REST API v2.

The catalogue tells chips and prices and no CPUs, so an offer promises the CPUs and memory that the creating call then
asks for. A pod has no tags: its name has ours, in an order of importance, and its environment, which is told as well,
has the rest. Our script is the pod's main process and starts our sshd on port 22, which RunPod maps to some port of the
host's address once the pod runs.

Facts: fact sheet of 2026-11-20, section 5, and RunPod's newer specification of the API (October 2026); what nobody has
tried is in docs/clouds/runpod.md.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shlex
import threading
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from http import HTTPStatus
from math import ceil
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, cast
from urllib.parse import quote

from pydantic import ConfigDict, Field, SecretStr, model_validator

from skyward_core.accelerators import Accelerator, is_nvidia, parse
from skyward_core.accelerators.cuda import cuda_of
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
from skyward_core.machines.offers import Extra, Offer, Requirements, architecture_beside, by_month
from skyward_core.providers import userdata
from skyward_core.providers._http import Api, Classify, Row, field_of, nothing_in, rows_of
from skyward_core.providers.base import LAUNCH_TAG, POOL_TAG, RANK_TAG, Provider, Tags
from skyward_core.providers.ssh_keys import Key, host_key, our_key
from skyward_core.providers.tagging import TagName, from_codes, of_machine, to_codes

URL = "https://api.runpod.io"
REST_URL = "https://rest.runpod.io"
"""Where version 1 of the REST API is; its day was to be 2026-11-15, and it costs nothing to ask."""
CONSOLE = "https://console.runpod.io/pods?id="

ADDRESS_SECONDS = 600.0
"""How long a pod may take until it runs and has an address: loading its image is most of it."""
POLL_SECONDS = 2.0
LONGEST_POLL_SECONDS = 15.0
MISSES = 2
"""So many times in a row neither the list nor its own address tell of a pod: it is gone."""
LOOK_SECONDS = (0.0, 5.0, 15.0)
"""Pauses before the looks for what a creating call without an answer may have made; how far behind the list is, is told
nowhere.
"""

STATES = {
    "PROVISIONING": InstanceState.PENDING,
    "STARTING": InstanceState.PENDING,
    "RUNNING": InstanceState.RUNNING,
    "EXITED": InstanceState.STOPPING,
    "ERROR": InstanceState.STOPPING,
    "TERMINATED": InstanceState.GONE,
}

IN_STOCK = {"include": "AVAILABILITY", "product": "POD"}
"""Without these the catalogue tells prices only."""
USUAL_COUNTS = (1, 2, 4, 8)
"""A pod may have any number of GPUs up to the type's `maxCount`.

Who names a chip is offered the number that he names, for he can have it; others these.
"""
LEAST_CPU_COUNT = 2
OTHER_NAMES = {
    "NVIDIA H100 80GB HBM3": "H100-SXM",
    "NVIDIA H200": "H200-SXM",
    "NVIDIA B300 SXM6 AC": "B300",
    "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition": "RTX PRO 6000",
}
FLOORS = {
    "NVIDIA A100 80GB PCIe": (6, 80),
    "NVIDIA A100-SXM4-80GB": (6, 80),
    "NVIDIA H100 80GB HBM3": (14, 90),
    "NVIDIA H200": (16, 180),
    "NVIDIA B200": (20, 180),
    "NVIDIA B300 SXM6 AC": (20, 180),
}
"""vCPUs and GB for each GPU that are asked for: about two thirds of what RunPod lists for the type (fact sheet, 5.5),
because hosts differ.
"""
FLOOR = (2, 8)
"""The same for all other types: what the API before this one asked for unless told otherwise."""
DISK_USD_PER_GB_MONTH = 0.10
GPU_DISK_GB = 40
CPU_DISK_GB = 10
"""For each vCPU, the most that the smaller flavours take."""
NVIDIA_IMAGE = "runpod/pytorch:1.0.2-cu1281-torch280-ubuntu2404"
AMD_IMAGE = "runpod/pytorch:2.4.0-py3.10-rocm6.1.0-ubuntu22.04"
CPU_IMAGE = "ubuntu:24.04"

SECURE, COMMUNITY = "SECURE", "COMMUNITY"
SOLD_OUT = re.compile("availab|capacit|stock|suppl|resource|instance|machine|host|sold|again")
"""Words of a refusal that may mean that there is none left: how RunPod says so is documented nowhere."""
ANYWHERE = "any"
"""The region of machines that RunPod places as it likes: others' ones are in no data centre."""
GPU_TYPE = re.compile(r"(?P<id>.+) x(?P<count>[1-9][0-9]*)(?P<community> community)?")
CPU_TYPE = re.compile(r"(?P<id>[a-z0-9]+)-(?P<count>[1-9][0-9]*)-(?P<memory>[0-9.]+)")

NAME_CHARACTERS = 191
"""What the API before this one took; this one names no limit."""

MACHINE_ID = 'printf %s "$RUNPOD_POD_ID"'
TOOLS = """\
command -v curl >/dev/null || { apt-get update -qq; DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends curl ca-certificates; } \\
  </dev/null >/dev/null 2>&1 &
"""  # noqa: E501
"""What the end needs and small images lack; there may be no network when it is needed."""
END = """\
told() {{ tr '\\0' '\\n' </proc/1/environ | sed -n "s/^$1=//p"; }} # what is started over SSH does not inherit them
ask() {{ # method, address, body: succeeds if it was accepted
  answer=$(printf 'Authorization: Bearer %s' "$key" |
    curl -sS -m 20 -w ' %{{http_code}}' -X "$1" -H @- -H 'Content-Type: application/json' ${{3:+-d}} ${{3:+"$3"}} "$2" 2>/dev/null)
  case $answer in
    *'"errors"'*) return 1 ;; # GraphQL refuses with 200
    *' '2??) return 0 ;;
    *) return 1 ;;
  esac
}}
pause=5
while :; do
  id=${{RUNPOD_POD_ID:-$(told RUNPOD_POD_ID)}} key=${{RUNPOD_API_KEY:-$(told RUNPOD_API_KEY)}} is_accepted=
  if [ -n "$id" ] && [ -n "$key" ]; then
    ask DELETE {url}/v2/pods/"$id" && is_accepted=yes
    ask POST {url}/v2/pods/"$id"/action '{{"action": "terminate"}}' && is_accepted=yes
    ask DELETE {rest_url}/v1/pods/"$id" && is_accepted=yes
    ask POST {url}/graphql '{{"query": "mutation {{ podTerminate(input: {{podId: \\\\"'"$id"'\\\\"}}) }}"}}' && is_accepted=yes
    if command -v runpodctl >/dev/null; then RUNPOD_API_KEY=$key runpodctl remove pod "$id" && is_accepted=yes; fi
    [ -n "$is_accepted" ] || ask POST {url}/v2/pods/"$id"/action '{{"action": "stop"}}' # a pod that is off costs no GPU
  fi
  sleep "$pause"
  [ "$pause" -ge 60 ] || pause=$((pause * 2))
done"""  # noqa: E501
"""By every way that RunPod documents, for which of them a pod's own key may use is told nowhere (fact sheet, "added"),
and for as long as it takes: the first process is never ended, for a container that ends is started anew and paid for.
"""

log = logging.getLogger(__name__)


class RunPod(Provider):
    """Containers by the second, with GPUs or without."""

    model_config = ConfigDict(hide_input_in_errors=True)

    name: ClassVar[str] = "runpod"
    refuses: ClassVar[Mapping[str, str]] = {
        "volume": (
            "its containers have neither FUSE nor the right to mount; read and write the bucket from your functions"
        ),
        "mig": "its containers do not own the GPU's driver; ask for a smaller GPU",
    }
    end_command: ClassVar[str] = userdata.END_COMMAND
    sells_by_wish: ClassVar[bool] = True
    listing_lag_seconds: ClassVar[float] = 30.0
    """Nothing is promised."""

    api_key: SecretStr | None = Field(default=None, exclude=True, repr=False)
    cloud: Literal["secure", "community"] | None = Field(
        default="secure", description="RunPod's data centres, other people's machines, or None: both."
    )
    region: str | tuple[str, ...] | None = Field(
        default=None, description='Data centres, "EU-RO-1"; None is all of them. Community machines are in none.'
    )
    ssh_key: str | None = Field(
        default=None, min_length=1, description="Path of a private key without passphrase; without it one is made."
    )
    endpoint_url: str | None = Field(
        default=None, min_length=1, description="In place of RUNPOD_API_BASE_URL and of RunPod's own address."
    )
    image: str | None = Field(
        default=None, min_length=1, description="An image of Debian's family, in place of the one that suits the chip."
    )
    registry: str | None = Field(
        default=None, min_length=1, description="Id of a registry credential kept at RunPod, for a private image."
    )
    disk_gb: int | None = Field(
        default=None,
        ge=1,
        description="Disk of the container. None: 40, and for machines without GPU 10 for each vCPU up to that.",
    )
    min_cuda: str | None = Field(
        default=None,
        pattern=r"^[0-9]+\.[0-9]+$",
        description="CUDA of the host's driver at least. None: what the images need; not asked of AMD's.",
    )
    min_vcpus_per_gpu: int | None = Field(
        default=None, ge=1, description="What is promised, and asked for. None: what the type usually has."
    )
    min_memory_gb_per_gpu: int | None = Field(default=None, ge=1, description="The same for the machine's memory.")
    global_networking: bool = Field(
        default=False, description="A private network, 100 Mbit/s; NVIDIA GPUs in some data centres only."
    )

    @model_validator(mode="after")
    def _has_places(self) -> Self:
        if self.cloud == "community" and (self.region or self.global_networking):
            raise ValueError(
                'cloud="community": these machines are in no data centre: leave out region and global_networking'
            )
        return self

    # ── offers ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def offers(self, want: Requirements) -> list[Offer]:
        """Return what is in stock, for each data centre.

        A chip that is named is offered in the number that is wanted, all of them in 1, 2, 4 and 8.
        """
        gpu = GPU_TYPE.fullmatch(want.instance_type or "")
        count = int(gpu["count"]) if gpu else want.accelerator.count if want.accelerator else 1
        counts = (count,) if gpu or want.accelerator else USUAL_COUNTS
        has_gpus = gpu is not None or want.instance_type is None
        has_cpus = want.accelerator is None and gpu is None and self.cloud != "community" and not self.global_networking
        clouds = [cloud for cloud in (SECURE, COMMUNITY) if self.cloud in (None, cloud.lower())] if has_gpus else []
        offers: list[Offer] = []
        with self._api() as api:
            networked = _networked(api) if self.global_networking else None
            for cloud in clouds:
                rows = _rows(api, "/v2/catalog/gpus", "gpus", {**IN_STOCK, "count": count, "cloud": cloud})
                offers += [offer for row in rows for offer in self._gpu_offers(row, cloud, counts)]
            if has_cpus:
                offers += [
                    offer for row in _rows(api, "/v2/catalog/cpus", "cpus", IN_STOCK) for offer in _cpu_offers(row)
                ]
        wanted = {self.region} if isinstance(self.region, str) else set(self.region or ())
        return [
            offer.model_copy(
                update={"extras_per_hour": _beside(self._hardware(offer)["disk"]), "min_cuda": want.min_cuda}
            )
            for offer in offers
            if (not wanted or offer.region in wanted)
            and (networked is None or offer.region in networked)
            and want.instance_type in (None, offer.instance_type)
        ]

    def _gpu_offers(self, row: Row, cloud: str, counts: Sequence[int]) -> Iterator[Offer]:
        """Offers of a type of GPU in a cloud.

        Both clouds' prices are told where it is sold in one: the flag decides.
        """
        accelerator = _accelerator(str(row["id"]))
        price = float((row.get("price") or {}).get(cloud.lower()) or 0)
        if accelerator is None:
            log.debug("RunPod sells a chip that the catalogue does not know: %s", row["id"])
            return
        if not row.get(cloud.lower()) or price <= 0 or (self.global_networking and not is_nvidia(accelerator)):
            return
        most = int((row.get("maxCount") or {}).get(cloud.lower()) or 1)
        vcpus, memory_gb = self._floor(str(row["id"]))
        for number in counts:
            for region in _regions(row, cloud) if number <= most else ():
                yield Offer(
                    provider=RunPod.name,
                    instance_type=_gpu_type(row["id"], number, cloud),
                    region=region,
                    price_per_hour=price * number,
                    on_demand_price_per_hour=price * number,
                    vcpus=vcpus * number,
                    memory_gb=memory_gb * number,
                    accelerator=accelerator.name,
                    accelerators=number,
                    accelerator_memory_gb=float(row.get("memory") or accelerator.memory_gb),
                    form_factor=accelerator.form_factor,
                    architecture=architecture_beside(accelerator.name),
                )

    def _floor(self, gpu_id: str) -> tuple[int, int]:
        """How many vCPUs and GB of memory are promised for each GPU."""
        vcpus, memory_gb = FLOORS.get(gpu_id, FLOOR)
        return self.min_vcpus_per_gpu or vcpus, self.min_memory_gb_per_gpu or memory_gb

    # ── launch ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def launch(self, offer: Offer, count: int, tags: Tags, startup: str) -> list[Instance]:
        """Rent pods, each with a call of its own, and return those that have an address.

        Those that will not have one are given back and left out.
        """
        key = our_key(self.ssh_key)
        first = int(tags.get(RANK_TAG, "0"))
        orders = {
            rank: self._order(offer, of_machine(tags, rank), startup, key) for rank in range(first, first + count)
        }
        with self._api() as api, self._api(_refusal(offer)) as creating:
            _check_stock(api, offer)
            created = _create(creating, api, orders)
            up, down = self._await(api, created, offer)
            if down:
                _end_quietly(api, [created[rank] for rank in down])
        if not up:
            raise next(reversed(down.values()))
        prices = {"price_per_hour": offer.price_per_hour, "on_demand_price_per_hour": offer.on_demand_price_per_hour}
        instances = [instance for _, row in sorted(up.items()) if (instance := _instance(row, key)) is not None]
        return [instance if instance.price_per_hour else instance.model_copy(update=prices) for instance in instances]

    def _order(self, offer: Offer, tags: Tags, startup: str, key: Key) -> dict[str, Any]:
        """What is asked for in the creating call, which takes no field that it does not know.

        No `startSsh`: all it does is to hand the account's keys to images that start an sshd of their own, with host
        keys that nobody knows beforehand.
        """
        boot = userdata.boot_script(startup, tags, MACHINE_ID, self._end_script(), is_container=True) + TOOLS
        name, more = NAMES.pack(tags)
        # as JSON, for then nobody splits it into words, and the image's own entrypoint is not in front of it
        command = json.dumps({"entrypoint": ["/bin/sh", "-c"], "cmd": [userdata.UNPACKED]})
        boot_word = userdata.packed(userdata.container_script(boot, key, host_key(tags[LAUNCH_TAG], key)))
        order: dict[str, Any] = {
            "name": name,
            "args": command,
            "env": {"SKYWARD_BOOT": boot_word, **more},
            "ports": ["22/tcp"],
            **self._hardware(offer),
        }
        if offer.region != ANYWHERE:
            order["dataCenterIds"] = [offer.region]
        if self.registry is not None:
            order["registry"] = self.registry
        if self.global_networking:
            order["globalNetworking"] = True
        return order

    def _cuda(self, offer: Offer) -> dict[str, str]:
        """What the host's driver must know: as it is set, else what the container's image and the node's packages need,
        whichever is more.
        """
        needed = [version for version in (offer.min_cuda, cuda_of(self.image or NVIDIA_IMAGE)) if version is not None]
        least = self.min_cuda or (f"{max(needed):.1f}" if needed else None)
        return {} if least is None else {"minCudaVersion": least}

    def _end_script(self) -> str:
        url = self._url()
        return END.format(url=shlex.quote(url), rest_url=shlex.quote(REST_URL if url == URL else url))

    def _hardware(self, offer: Offer) -> dict[str, Any]:
        """The part of the creating call that an offer's type stands for."""
        if cpu := CPU_TYPE.fullmatch(offer.instance_type):
            count = int(cpu["count"])
            disk_gb = self.disk_gb or min(GPU_DISK_GB, CPU_DISK_GB * count)
            return {
                "cloud": SECURE,
                "cpu": {"id": cpu["id"], "vcpuCount": count},
                "image": self.image or CPU_IMAGE,
                "disk": disk_gb,
            }
        gpu = _gpu_of(offer)
        count = int(gpu["count"])
        floor = {"minVcpuCountPerGpu": ceil(offer.vcpus / count), "minRamPerGpu": ceil(offer.memory_gb / count)}
        accelerator = _accelerator(gpu["id"])
        is_amd = accelerator is not None and not is_nvidia(accelerator)
        return {
            "cloud": COMMUNITY if gpu["community"] else SECURE,
            "gpu": {"id": gpu["id"], "count": count, **floor, **({} if is_amd else self._cuda(offer))},
            "image": self.image or (AMD_IMAGE if is_amd else NVIDIA_IMAGE),
            "disk": self.disk_gb or GPU_DISK_GB,
        }

    def _await(
        self, api: Api, created: Mapping[int, str], offer: Offer
    ) -> tuple[dict[int, Row], dict[int, NoCapacity]]:
        """Wait until each pod runs and has an address, or never will; return what is told of the ones, and why by rank
        for the others.
        """
        waiting, up, down, missed = dict(created), dict[int, Row](), dict[int, NoCapacity](), dict.fromkeys(created, 0)
        deadline = time.monotonic() + ADDRESS_SECONDS
        pause = POLL_SECONDS
        while waiting:
            rows = {row["id"]: row for row in _pods(api)}
            is_late = time.monotonic() >= deadline
            for rank, pod in list(waiting.items()):
                row: Row = rows.get(pod) or _thing(api, _path(pod)) or {}
                missed[rank] = 0 if row else missed[rank] + 1
                trouble = _trouble(pod, row, offer.region, is_gone=missed[rank] >= MISSES)
                if trouble is None and self._is_up(row):
                    up[rank] = row
                elif trouble is not None or is_late:
                    word = _word(row)
                    down[rank] = trouble or NoCapacity(
                        f"RunPod's {pod} has no address after {ADDRESS_SECONDS:g} s: {word}"
                    ).coded(word)
                else:
                    continue
                del waiting[rank]
            if waiting:
                time.sleep(pause)
                pause = min(1.5 * pause, LONGEST_POLL_SECONDS)
        return up, down

    def _is_up(self, row: Row) -> bool:
        return (
            _state(row) is InstanceState.RUNNING
            and _address(row) is not None
            and (not self.global_networking or _private_ip(row) is not None)
        )

    # ── the other verbs ──────────────────────────────────────────────────────────────────────────────────────────────

    def instances(self, pool_id: str | None = None) -> list[Instance]:
        """Return the pods with a name of ours, of a pool or of all, wherever they are."""
        key = our_key(self.ssh_key)
        with self._api() as api:
            found = [instance for row in _pods(api) if (instance := _instance(row, key)) is not None]
        return [
            instance
            for instance in found
            if pool_id in (None, instance.pool_id) and instance.state is not InstanceState.GONE
        ]

    def terminate(self, ids: Sequence[str]) -> None:
        """Delete pods, with their disks. Nothing else is paid for: no volume is ever made."""
        # no pod has another kind of id
        pods = [pod for pod in dict.fromkeys(ids) if re.fullmatch("[A-Za-z0-9_-]+", pod)]
        if not pods:
            return
        with self._api() as api:
            errors = _end(api, pods)
        for error in errors.values():
            if isinstance(error, CredentialsError):
                raise error
        if errors:
            left, why = sorted(errors), next(iter(errors.values()))
            raise InstancesLeft(f"RunPod did not delete {', '.join(left)}: {why}", left) from why

    def ends_for_good(self) -> bool:
        """It deletes itself."""
        return True

    def account(self) -> str:
        """Return a name made of a part of the key's hash: the API tells none, so two keys of one account are two
        accounts here.
        """
        with self._api() as api:
            rows_of(api.ask("GET", "/v2/pods"), "pods", "RunPod answered GET /v2/pods")
        return f"key-{hashlib.sha256(self._key().encode()).hexdigest()[:12]}"

    def console_url(self, instance: Instance) -> str:
        """Return the pod's page."""
        return CONSOLE + quote(instance.id, safe="")

    # ── the wire ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _api(self, classify: Classify | None = None) -> Api:
        key = self._key()
        return Api(
            "RunPod",
            self._url(),
            {"Authorization": f"Bearer {key}"},
            classify=classify or _meaning,
            secrets=[key],
            says_missing=_says_missing,
        )

    def _key(self) -> str:
        return self.api_key.get_secret_value() if self.api_key is not None else _key_around()

    def _url(self) -> str:
        return (self.endpoint_url or os.environ.get("RUNPOD_API_BASE_URL") or URL).rstrip("/").removesuffix("/v2")


def _key_around() -> str:
    """The key of the user's environment, or the one of RunPod's tools: its Python package writes `[default] api_key`,
    runpodctl `apikey`.
    """
    if key := os.environ.get("RUNPOD_API_KEY", "").strip():
        return key
    place = Path("~/.runpod/config.toml").expanduser()
    try:
        config = tomllib.loads(place.read_text(encoding="utf-8"))
    except FileNotFoundError:
        config = {}
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        # its message may hold a line of it
        raise CredentialsError(
            f"RUNPOD_API_KEY is not set, and {place} cannot be read: {type(error).__name__}"
        ) from None
    default = config.get("default")
    told = [cast("Row", default).get("api_key")] if isinstance(default, dict) else []
    told += [config.get(name) for name in ("apikey", "apiKey")]
    for key in told:
        if isinstance(key, str) and key.strip():
            return key.strip()
    raise CredentialsError(
        "there is no key for RunPod: set RUNPOD_API_KEY, write it to ~/.runpod/config.toml, or give api_key="
    )


def _says_missing(body: Row) -> bool:
    """A problem document (RFC 9457), as all of RunPod's refusals are."""
    return body.get("status") in (HTTPStatus.NOT_FOUND, HTTPStatus.GONE) and isinstance(body.get("title"), str)


def _meaning(status: int, _: Row, message: str) -> SkywardError | None:
    """What a refusal means, besides what it means everywhere: 402 is no money, or the account's limit of it."""
    return QuotaExceeded(message) if status == HTTPStatus.PAYMENT_REQUIRED else None


def _refusal(offer: Offer) -> Classify:
    """The same for a creating call: 400 is a broken rule or that nothing is left, which no code tells apart, and 403
    that this cloud is not for us.
    """

    def meaning(status: int, body: Row, message: str) -> SkywardError | None:
        if status not in (HTTPStatus.BAD_REQUEST, HTTPStatus.FORBIDDEN):
            return _meaning(status, body, message)
        error = NoCapacity(message)
        if status == HTTPStatus.BAD_REQUEST:
            error.mistake = _mistake(str(body.get("detail") or ""), offer)
        return error

    return meaning


def _mistake(detail: str, offer: Offer) -> str:
    """What a refusal says without the names of this offer and without numbers, so that others can say the same; "" if
    it speaks of what there is to rent.
    """
    text = detail.casefold()
    for name in (offer.instance_type, offer.instance_type.rpartition(" x")[0], offer.region):
        text = text.replace(name.casefold(), "...") if name else text
    return "" if SOLD_OUT.search(text) else " ".join(re.sub(r"\S*[0-9]\S*", "...", text).split())


def _rows(api: Api, path: str, name: str, query: Row) -> list[Row]:
    return rows_of(api.ask("GET", path, query=query), name, f"RunPod answered GET {path}")


def _thing(api: Api, path: str, query: Row | None = None) -> Row | None:
    """One thing of RunPod's, None if there is no such thing."""
    answer = api.ask("GET", path, query=query, missing_is_none=True)
    if answer is not None:
        field_of(answer, "id", str, f"RunPod answered GET {path}")
    return answer


def _pods(api: Api) -> Iterator[Row]:
    """All pods of the account. The list came in one piece at first, and comes in pages since autumn 2026."""
    cursor: str | None = None
    seen: set[str | None] = set()
    while cursor not in seen:
        seen.add(cursor)
        answer = api.ask("GET", "/v2/pods", query={"cursor": cursor})
        yield from rows_of(answer, "pods", "RunPod answered GET /v2/pods")
        pages: Row = answer.get("pagination") or {}
        cursor = pages.get("nextCursor")
        if cursor is None and not pages.get("hasNextPage"):
            return
    raise ProviderFailed("RunPod's list of pods goes round in circles")


def _path(pod: str) -> str:
    return f"/v2/pods/{quote(pod, safe='')}"


def _networked(api: Api) -> set[str]:
    """The data centres with a private network."""
    return {row["id"] for row in _rows(api, "/v2/catalog/datacenters", "dataCenters", {}) if row.get("globalNetwork")}


def _check_stock(api: Api, offer: Offer) -> None:
    """Raise NoCapacity if there is none in stock: a creating call would say no more than that something is wrong."""
    if cpu := CPU_TYPE.fullmatch(offer.instance_type):
        path, query = f"/v2/catalog/cpus/{cpu['id']}", {"vcpuCount": int(cpu["count"])}
    else:
        gpu = _gpu_of(offer)
        path, query = (
            f"/v2/catalog/gpus/{quote(gpu['id'], safe='')}",
            {"count": int(gpu["count"]), "cloud": COMMUNITY if gpu["community"] else SECURE},
        )
    row = _thing(api, path, {**IN_STOCK, **query})
    if row is None:
        raise NoCapacity(f"RunPod sells no {offer.instance_type} any more").coded("Not Found")
    place = next((place for place in row.get("dataCenters") or [] if place["id"] == offer.region), row)
    if "NONE" in (row.get("availability"), place.get("availability")):
        raise NoCapacity(f"RunPod has no {offer.instance_type} in {offer.region} in stock").coded("NONE")


def _create(creating: Api, api: Api, orders: Mapping[int, Row]) -> dict[int, str]:
    """Make a pod of each order, by rank; return the ids of those that were made, or raise why there is none.

    After the first refusal no more is asked for. A call whose outcome is unknown is not repeated: its pod is looked for
    by name.
    """
    is_over = threading.Event()

    def create(order: Row) -> str | SkywardError | None:
        if is_over.is_set():
            return None
        try:
            answer = creating.ask("POST", "/v2/pods", body=order)
            if isinstance(answer, dict) and (pod := cast("Row", answer).get("id")):
                return str(pod)
            error: SkywardError = ProviderFailed("RunPod does not say what it has created")
        except SkywardError as caught:
            error = caught
        is_over.set()
        return error

    outcomes = dict(zip(orders, side_by_side(create, list(orders.values()), "skyward-runpod"), strict=True))
    made = {rank: outcome for rank, outcome in outcomes.items() if isinstance(outcome, str)}
    failures = {rank: outcome for rank, outcome in outcomes.items() if isinstance(outcome, SkywardError)}
    unsure = {
        rank: error
        for rank, error in failures.items()
        if isinstance(error, ProviderFailed) and not isinstance(error, RateLimited)
    }
    found = _look(api, {rank: str(orders[rank]["name"]) for rank in unsure})
    for rank in failures.keys() - found.keys():
        log.info("RunPod did not make the pod of rank %d: %s", rank, failures[rank])
    if not made and not found:
        raise next(iter([*unsure.values(), *failures.values()]))
    return dict(sorted({**made, **found}.items()))


def _look(api: Api, names: Mapping[int, str]) -> dict[int, str]:
    """Return the pods of these names that the list tells of.

    If it does not answer, that is not known either, and is the same error.
    """
    found: dict[int, str] = {}
    for pause in LOOK_SECONDS if names else ():
        time.sleep(pause)
        try:
            by_name = {row.get("name"): str(row["id"]) for row in _pods(api) if _state(row) is not InstanceState.GONE}
        except SkywardError as error:
            log.warning("RunPod does not say what came of a creating call without an answer: %s", error)
            break
        found = {rank: by_name[name] for rank, name in names.items() if name in by_name}
        if len(found) == len(names):
            break
    return found


def _trouble(pod: str, row: Row, region: str, *, is_gone: bool) -> NoCapacity | None:
    """Why a pod is not waited for any longer.

    The data centre of the call is a preferred one, says RunPod, and a user may have reasons to insist.
    """
    if is_gone or (row and _state(row) in (InstanceState.STOPPING, InstanceState.GONE)):
        return NoCapacity(f"RunPod could not start {pod}: {_word(row)}").coded(_word(row))
    if region != ANYWHERE and (place := row.get("dataCenterId")) not in (None, region):
        return NoCapacity(f"RunPod has placed {pod} in {place} and not in {region}").coded(f"placed in {place}")
    return None


def _end(api: Api, pods: Sequence[str]) -> dict[str, SkywardError]:
    """Delete pods; return those that were not deleted, and why. One that is gone is no error."""

    def end(pod: str) -> SkywardError | None:
        try:
            nothing_in(api.ask("DELETE", _path(pod), missing_is_none=True), f"RunPod answered DELETE {_path(pod)}")
        except SkywardError as error:
            return error
        return None

    outcomes = zip(pods, side_by_side(end, pods, "skyward-runpod"), strict=True)
    return {pod: error for pod, error in outcomes if error is not None}


def _end_quietly(api: Api, pods: Sequence[str]) -> None:
    """Delete what did not start. What cannot be deleted now has our name, and is found by it."""
    for pod, error in _end(api, pods).items():
        log.warning("RunPod did not delete %s, which did not start: %s", pod, error)


# ── offers ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _accelerator(gpu_id: str) -> Accelerator | None:
    """The chip that RunPod calls so; None if the catalogue has none, as of a fixed slice of one ("... MIG 1g.24gb")."""
    try:
        return parse(OTHER_NAMES.get(gpu_id, gpu_id))
    except BadRequest:
        return None


def _regions(row: Row, cloud: str) -> list[str]:
    """Where a type is in stock."""
    if row.get("availability") == "NONE":
        return []
    places: list[Row] = row.get("dataCenters") or []
    if cloud == COMMUNITY or not places:
        return [ANYWHERE]
    return [place["id"] for place in places if place.get("availability") != "NONE"]


def _cpu_offers(row: Row) -> Iterator[Offer]:
    """Offers of a flavour of machines without GPU, with each number of vCPUs, which is a power of two."""
    price, limits, ratio = (row.get("price") or {}).get("securePerVcpu"), row.get("vcpu") or {}, row.get("ramGbPerVcpu")
    count = LEAST_CPU_COUNT
    while price and ratio and count <= int(limits.get("max") or 0):
        for region in _regions(row, SECURE) if count >= int(limits.get("min") or 0) else ():
            yield Offer(
                provider=RunPod.name,
                instance_type=_cpu_type(row["id"], count, ratio * count),
                region=region,
                price_per_hour=price * count,
                on_demand_price_per_hour=price * count,
                vcpus=count,
                memory_gb=ratio * count,
                architecture=architecture_beside(None),
            )
        count *= 2


def _beside(disk_gb: object) -> tuple[Extra, ...]:
    """What is billed beside a pod: its disk.

    Whether a pod's `cost` has that in it is told nowhere; the catalogue's prices have not.
    """
    gb = float(disk_gb) if isinstance(disk_gb, int | float) else 0.0
    return (
        (
            by_month(
                "disk",
                gb * DISK_USD_PER_GB_MONTH,
                "docs.runpod.io/pods/storage: container disk, $0.10 per GB and month",
                "2026-11-22",
            ),
        )
        if gb
        else ()
    )


def _gpu_type(gpu_id: str, count: int, cloud: str) -> str:
    return f"{gpu_id} x{count}{' community' if cloud == COMMUNITY else ''}"


def _cpu_type(flavor: str, count: int, memory_gb: float) -> str:
    """As RunPod itself calls it, "cpu3c-2-4"."""
    return f"{flavor}-{count}-{memory_gb:g}"


def _gpu_of(offer: Offer) -> re.Match[str]:
    """Read a type with GPUs. Raises BadRequest."""
    if gpu := GPU_TYPE.fullmatch(offer.instance_type):
        return gpu
    raise BadRequest(
        f'{offer.instance_type!r} is no type of RunPod: write "NVIDIA A100 80GB PCIe x2", with " community" behind it,'
        ' or "cpu3c-2-4"'
    )


# ── pods ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _instance(row: Row, key: Key) -> Instance | None:
    """Read a pod; None for one without a name of ours."""
    tags = _tags(row)
    if tags is None:
        return None
    address, price = _address(row), float(row.get("cost") or 0)
    return Instance(
        id=str(row["id"]),
        provider=RunPod.name,
        pool_id=tags[POOL_TAG],
        rank=int(tags[RANK_TAG]),
        state=_state(row),
        region=ANYWHERE if row.get("cloud") == COMMUNITY else str(row.get("dataCenterId") or ANYWHERE),
        instance_type=_type(row),
        price_per_hour=price,
        on_demand_price_per_hour=price or None,
        extras_per_hour=_beside(row.get("disk")),
        ip=None if address is None else address[0],
        private_ip=_private_ip(row),
        tags=tags,
        directory=userdata.directory_of(str(row["id"])),
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
    """A word that nobody knows yet is no machine that runs, and none that is gone."""
    return STATES.get(str(row.get("status")), InstanceState.PENDING)


def _word(row: Row) -> str:
    """RunPod's own word for how a pod is; of one that is not told of, the word for that."""
    return str(row.get("status") or "TERMINATED")


def _type(row: Row) -> str:
    gpu: Row = row.get("gpu") or {}
    cpu: Row = row.get("cpu") or {}
    if cpu:
        return _cpu_type(cpu["id"], int(cpu["vcpuCount"]), float(cpu["memory"]))
    return _gpu_type(str(gpu.get("id")), int(gpu.get("count") or 1), str(row.get("cloud")))


def _address(row: Row) -> tuple[str, int] | None:
    """Where port 22 of a pod is reached; None until it is mapped.

    The other way that is told, `proxy`, carries a terminal and nothing else.
    """
    direct: Row = (row.get("ssh") or {}).get("direct") or {}
    return (str(direct["host"]), int(direct["port"])) if direct.get("host") and direct.get("port") else None


def _private_ip(row: Row) -> str | None:
    network: Row = row.get("globalNetworking") or {}
    return network.get("ip") if network.get("enabled") else None


# ── names ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _tags(row: Row) -> dict[str, str] | None:
    """Read the tags of a pod; None if its name is none of ours."""
    return NAMES.unpack(row.get("name"), cast("Row", row.get("env") or {}))


def _escaped(text: str) -> str:
    """Write a text with letters, digits and '-' alone: what else a name may have is told nowhere."""
    return to_codes(text, "A-Za-z0-9-")


NAMES = TagName(".", NAME_CHARACTERS, "a name of RunPod", _escaped, from_codes)
