"""RunPod: containers ("pods") in its own data centres and on machines of others, through its REST API v2.

The catalogue has chips and prices and no CPUs. So an offer promises CPUs and memory that the creating call then
requests. A pod has no tags: its name holds the most important of ours, and its environment, which is listed too, the
rest. Our script is the pod's main process. It starts our sshd on port 22, which RunPod maps to a port of the host's
address once the pod runs.

Facts: fact sheet of 2026-11-20, section 5, and RunPod's newer specification of the API (October 2026).
docs/clouds/runpod.md lists what is untested.
"""

from __future__ import annotations

import hashlib
import json
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
from skyward_core.accelerators.catalog import cuda_of
from skyward_core.concurrency.backoff import Backoff
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
from skyward_core.machines.offers import Extra, Offer, Requirements, architecture_beside, by_month, total_of
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
    nothing_in,
    rows_of,
    tried,
)
from skyward_core.providers.base import LAUNCH_TAG, POOL_TAG, RANK_TAG, Provider, Sale, Tags, chips
from skyward_core.providers.tagging import TagName, from_codes, of_machine, to_codes
from skyward_core.providers.userdata import Key, endpoint_of, host_key, our_key
from skyward_core.shown_text import visible_logger

log = visible_logger(__name__)

GPU_DISK_GB = 40
CPU_DISK_GB = 10
"""For each vCPU; the smaller flavours take no more."""
NVIDIA_IMAGE = "runpod/pytorch:1.0.2-cu1281-torch280-ubuntu2404"
AMD_IMAGE = "runpod/pytorch:2.4.0-py3.10-rocm6.1.0-ubuntu22.04"
CPU_IMAGE = "ubuntu:24.04"


class RunPod(Provider):
    """Containers by the second, with GPUs or without."""

    model_config = ConfigDict(hide_input_in_errors=True)

    name: ClassVar[str] = "runpod"
    display_name: ClassVar[str] = "RunPod"
    rents: ClassVar[frozenset[str]] = chips(
        "L4, L40, L40S, A30, A40, A100, H100, H200, B200, B300, V100, RTX 3070, RTX 3080, RTX 3080 Ti, RTX 3090, "
        "RTX 3090 Ti, RTX 4070 Ti, RTX 4080, RTX 4080 SUPER, RTX 4090, RTX 5080, RTX 5090, RTX A2000, RTX A4000, "
        "RTX A4500, RTX A5000, RTX A6000, RTX 2000 Ada, RTX 4000 Ada, RTX 5000 Ada, RTX 6000 Ada, RTX PRO 4500, "
        "RTX PRO 6000, MI300X"
    )
    refuses: ClassVar[Mapping[str, str]] = {
        "volume": (
            "its containers have neither FUSE nor the right to mount; read and write the bucket from your functions"
        ),
        "mig": "its containers do not own the GPU's driver; ask for a smaller GPU",
    }
    harmless_fields: ClassVar[frozenset[str]] = frozenset(
        {"region", "disk_gb", "min_cuda", "min_vcpus_per_gpu", "min_memory_gb_per_gpu"}
    )
    # whose computer it may be decides who reads what a pool sends there
    own_fields: ClassVar[frozenset[str]] = frozenset({"cloud", "image", "registry", "global_networking"})
    end_command: ClassVar[str] = userdata.END_COMMAND
    sells_by_wish: ClassVar[bool] = True
    listing_lag_seconds: ClassVar[float] = 30.0
    """An assumption: RunPod promises nothing."""

    api_key: SecretStr | None = Field(
        default=None,
        exclude=True,
        repr=False,
        description="By default RUNPOD_API_KEY, or the file of RunPod's own tools.",
    )
    cloud: Literal["secure", "community"] | None = Field(
        default="secure", description="RunPod's data centres, other people's machines, or None: both."
    )
    region: str | tuple[str, ...] | None = Field(
        default=None, description='Data centres, "EU-RO-1"; None is all of them. Community machines are in none.'
    )
    ssh_key: str | None = Field(
        default=None, min_length=1, description="Path of a private key without passphrase; by default one is created."
    )
    endpoint_url: str | None = Field(
        default=None, min_length=1, description="Overrides RUNPOD_API_BASE_URL and RunPod's own URL."
    )
    image: str | None = Field(
        default=None, min_length=1, description="An image of Debian's family, in place of the default for the chip."
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
        description="Lowest CUDA version of the host's driver. None: what the images need. Not used for AMD.",
    )
    min_vcpus_per_gpu: int | None = Field(
        default=None, ge=1, description="Promised and requested. None: what the type usually has."
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

        A required chip is offered in the required number, all other chips in 1, 2, 4 and 8.
        """
        gpu = GPU_TYPE.fullmatch(want.instance_type or "")
        count = int(gpu["count"]) if gpu else want.accelerator.count if want.accelerator else 1
        counts = (count,) if gpu or want.accelerator else USUAL_COUNTS
        has_gpus = gpu is not None or want.instance_type is None
        has_cpus = want.accelerator is None and gpu is None and self.cloud != "community" and not self.global_networking
        clouds = [cloud for cloud in (SECURE, COMMUNITY) if self.cloud in (None, cloud.lower())] if has_gpus else []
        offers: list[Offer] = []
        with self._api() as api:
            networked = networked_data_centers(api) if self.global_networking else None
            for cloud in clouds:
                rows = rows_at(api, "/v2/catalog/gpus", "gpus", {**IN_STOCK, "count": count, "cloud": cloud})
                offers += [offer for row in rows for offer in self._gpu_offers(row, cloud, counts)]
            if has_cpus:
                offers += [
                    offer for row in rows_at(api, "/v2/catalog/cpus", "cpus", IN_STOCK) for offer in cpu_offers(row)
                ]
        return Sale.within(
            self.region,
            (
                offer.model_copy(
                    update={"extras_per_hour": extras_of(self._hardware(offer)["disk"]), "min_cuda": want.min_cuda}
                )
                for offer in offers
                if not (self.region and offer.region == ANYWHERE)
                and (networked is None or offer.region in networked)
                and want.instance_type in (None, offer.instance_type)
            ),
        )

    def _gpu_offers(self, row: Row, cloud: str, counts: Sequence[int]) -> Iterator[Offer]:
        """Yield the offers of a type of GPU in one cloud.

        The row has prices of both clouds, even if only one sells the type; a flag says which does.
        """
        accelerator = accelerator_of(str(row["id"]))
        price = float((row.get("price") or {}).get(cloud.lower()) or 0)
        if accelerator is None:
            log.debug("RunPod sells a chip that the catalogue does not know: %s", row["id"])
            return
        if not row.get(cloud.lower()) or price <= 0 or (self.global_networking and not is_nvidia(accelerator)):
            return
        most = int((row.get("maxCount") or {}).get(cloud.lower()) or 1)
        vcpus, memory_gb = self._floor(str(row["id"]))
        for number in counts:
            for region in regions_of(row, cloud) if number <= most else ():
                yield Offer(
                    provider="runpod",
                    instance_type=gpu_type(row["id"], number, cloud),
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
        """Return the promised vCPUs and GB of memory for each GPU."""
        vcpus, memory_gb = FLOORS.get(gpu_id, FLOOR)
        return self.min_vcpus_per_gpu or vcpus, self.min_memory_gb_per_gpu or memory_gb

    # ── launch ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def launch(self, offer: Offer, count: int, tags: Tags, startup: str) -> list[Instance]:
        """Rent pods, one call each, and return those that have an address. Pods that fail are deleted and left out."""
        key = our_key(self.ssh_key)
        first = int(tags.get(RANK_TAG, "0"))
        orders = {
            rank: self._order(offer, of_machine(tags, rank), startup, key) for rank in range(first, first + count)
        }
        with self._api() as api, self._api(refusal_of(offer)) as creating:
            with before_creation():
                check_stock(api, offer)
            created = create_pods(creating, api, orders)
            up, down = await_addresses(api, created, offer, is_networked=self.global_networking)
            if down:
                delete_failed(api, [created[rank] for rank in down])
        if not up:
            raise next(reversed(down.values()))
        prices = {"price_per_hour": offer.price_per_hour, "on_demand_price_per_hour": offer.on_demand_price_per_hour}
        instances = [instance for _, row in sorted(up.items()) if (instance := to_instance(row, key)) is not None]
        return [instance if instance.price_per_hour else instance.model_copy(update=prices) for instance in instances]

    def _order(self, offer: Offer, tags: Tags, startup: str, key: Key) -> dict[str, Any]:
        """Return the body of the creating call, which accepts no unknown field.

        `startSsh` is left out: it only passes the account's keys to images with an sshd of their own, whose host keys
        are not known beforehand.
        """
        boot = userdata.boot_script(startup, tags, MACHINE_ID, self._end_script(), is_container=True)
        name, more = NAMES.pack(tags)
        # as JSON: it is not split into words, and it replaces the image's own entrypoint
        command = json.dumps({"entrypoint": ["/bin/sh", "-c"], "cmd": [userdata.UNPACKED]})
        boot_word = userdata.packed(userdata.container_script(boot, key, host_key(tags[LAUNCH_TAG], key)))
        order: dict[str, Any] = {
            "name": name,
            "args": command,
            "env": {"SKYWARD_BOOT": boot_word, PRICE_VARIABLE: str(offer.price_per_hour), **more},
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
        """Return the lowest CUDA version of the host's driver: `min_cuda`, or the higher need of image and packages."""
        needed = [version for version in (offer.min_cuda, cuda_of(self.image or NVIDIA_IMAGE)) if version is not None]
        least = self.min_cuda or (f"{max(needed):.1f}" if needed else None)
        return {} if least is None else {"minCudaVersion": least}

    def _end_script(self) -> str:
        url = self._url()
        return END.format(url=shlex.quote(url))

    def _hardware(self, offer: Offer) -> dict[str, Any]:
        """Return the part of the creating call that follows from an offer's type."""
        if cpu := CPU_TYPE.fullmatch(offer.instance_type):
            count = int(cpu["count"])
            disk_gb = self.disk_gb or min(GPU_DISK_GB, CPU_DISK_GB * count)
            return {
                "cloud": SECURE,
                "cpu": {"id": cpu["id"], "vcpuCount": count},
                "image": self.image or CPU_IMAGE,
                "disk": disk_gb,
            }
        gpu = gpu_of(offer)
        count = int(gpu["count"])
        floor = {"minVcpuCountPerGpu": ceil(offer.vcpus / count), "minRamPerGpu": ceil(offer.memory_gb / count)}
        accelerator = accelerator_of(gpu["id"])
        is_amd = accelerator is not None and not is_nvidia(accelerator)
        return {
            "cloud": COMMUNITY if gpu["community"] else SECURE,
            "gpu": {"id": gpu["id"], "count": count, **floor, **({} if is_amd else self._cuda(offer))},
            "image": self.image or (AMD_IMAGE if is_amd else NVIDIA_IMAGE),
            "disk": self.disk_gb or GPU_DISK_GB,
        }

    # ── the other verbs ──────────────────────────────────────────────────────────────────────────────────────────────

    def instances(self, pool_id: str | None = None) -> list[Instance]:
        """Return the pods with a name of ours, of one pool or of all, wherever they are."""
        key = our_key(self.ssh_key)
        with self._api() as api:
            found = [instance for row in all_pods(api) if (instance := to_instance(row, key)) is not None]
        return [
            instance
            for instance in found
            if pool_id in (None, instance.pool_id) and instance.state is not InstanceState.GONE
        ]

    def terminate(self, ids: Sequence[str]) -> None:
        """Delete pods with their disks. Nothing else is billed, because no volume is created."""
        # other texts are no id of a pod
        pods = [pod for pod in dict.fromkeys(ids) if re.fullmatch("[A-Za-z0-9_-]+", pod)]
        if not pods:
            return
        with self._api() as api:
            errors = delete_all(api, pods)
        for error in errors.values():
            if isinstance(error, CredentialsError):
                raise error
        if errors:
            left, why = sorted(errors), next(iter(errors.values()))
            raise InstancesLeft(f"RunPod did not delete {', '.join(left)}: {why}", left) from why

    def ends_for_good(self) -> bool:
        """True: a pod deletes itself."""
        return True

    def missing_credentials(self) -> str:
        """Return which variable or file is missing; "" if there is a key."""
        return missing(self._key)

    def account(self) -> str:
        """Return a name made from a hash of the key.

        The API has no account id, so two keys of one account are two accounts here.
        """
        with self._api() as api:
            rows_of(api.request("GET", "/v2/pods"), "pods", "RunPod answered GET /v2/pods")
        return f"key-{hashlib.sha256(self._key().key.encode()).hexdigest()[:12]}"

    def console_url(self, instance: Instance) -> str:
        """Return the pod's page."""
        return CONSOLE + quote(instance.id, safe="")

    # ── the wire ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _api(self, classify: Classify | None = None) -> Api:
        credential = self._key()
        return Api(
            "RunPod",
            self._url(),
            {"Authorization": f"Bearer {credential.key}"},
            classify=classify or meaning_of,
            secrets=[credential.key],
            says_missing=says_missing,
            advice=advice_of(credential.source),
        )

    def _key(self) -> Found:
        return Found(self.api_key.get_secret_value(), "api_key=") if self.api_key is not None else find_key()

    def _url(self) -> str:
        return (self.endpoint_url or os.environ.get("RUNPOD_API_BASE_URL") or URL).rstrip("/").removesuffix("/v2")


# ── types and offers ─────────────────────────────────────────────────────────────────────────────────────────────────

IN_STOCK = {"include": "AVAILABILITY", "product": "POD"}
"""Without these the catalogue returns prices only."""
USUAL_COUNTS = (1, 2, 4, 8)
"""A pod may have any number of GPUs up to the type's `maxCount`.

A required chip is offered in the required number; others in these.
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
"""Requested vCPUs and GB for each GPU: about two thirds of RunPod's figures for the type (fact sheet, 5.5).

Less than the figures, because hosts differ.
"""
FLOOR = (2, 8)
"""The same for all other types: the defaults of the API's version 1."""
DISK_USD_PER_GB_MONTH = 0.10
SECURE, COMMUNITY = "SECURE", "COMMUNITY"
ANYWHERE = "any"
"""The region of machines that RunPod places freely. Community machines are in no data centre."""
GPU_TYPE = re.compile(r"(?P<id>.+) x(?P<count>[1-9][0-9]*)(?P<community> community)?")
CPU_TYPE = re.compile(r"(?P<id>[a-z0-9]+)-(?P<count>[1-9][0-9]*)-(?P<memory>[0-9.]+)")


def accelerator_of(gpu_id: str) -> Accelerator | None:
    """Return the chip with this id; None if the catalogue has none, as for a fixed slice ("... MIG 1g.24gb")."""
    try:
        return parse(OTHER_NAMES.get(gpu_id, gpu_id))
    except BadRequest:
        return None


def regions_of(row: Row, cloud: str) -> list[str]:
    """Return the regions in which a type is in stock."""
    if row.get("availability") == "NONE":
        return []
    places: list[Row] = row.get("dataCenters") or []
    if cloud == COMMUNITY or not places:
        return [ANYWHERE]
    return [place["id"] for place in places if place.get("availability") != "NONE"]


def cpu_offers(row: Row) -> Iterator[Offer]:
    """Yield the offers of a flavour without GPU, with each number of vCPUs, which is a power of two."""
    price, limits, ratio = (row.get("price") or {}).get("securePerVcpu"), row.get("vcpu") or {}, row.get("ramGbPerVcpu")
    count = LEAST_CPU_COUNT
    while price and ratio and count <= int(limits.get("max") or 0):
        for region in regions_of(row, SECURE) if count >= int(limits.get("min") or 0) else ():
            yield Offer(
                provider="runpod",
                instance_type=cpu_type(row["id"], count, ratio * count),
                region=region,
                price_per_hour=price * count,
                on_demand_price_per_hour=price * count,
                vcpus=count,
                memory_gb=ratio * count,
                architecture=architecture_beside(None),
            )
        count *= 2


def extras_of(disk_gb: object) -> tuple[Extra, ...]:
    """Return the cost of a pod's disk.

    The catalogue's prices exclude it. RunPod does not document whether a pod's `cost` includes it.
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


def gpu_type(gpu_id: str, count: int, cloud: str) -> str:
    return f"{gpu_id} x{count}{' community' if cloud == COMMUNITY else ''}"


def cpu_type(flavor: str, count: int, memory_gb: float) -> str:
    """Return RunPod's own name, "cpu3c-2-4"."""
    return f"{flavor}-{count}-{memory_gb:g}"


def gpu_of(offer: Offer) -> re.Match[str]:
    """Return the parts of a type with GPUs. Raises BadRequest."""
    if gpu := GPU_TYPE.fullmatch(offer.instance_type):
        return gpu
    raise BadRequest(
        f'{offer.instance_type!r} is no type of RunPod: write "NVIDIA A100 80GB PCIe x2", with " community" behind it,'
        ' or "cpu3c-2-4"'
    )


# ── launching ────────────────────────────────────────────────────────────────────────────────────────────────────────


ADDRESS_SECONDS = 600.0
"""How long a pod may take until it runs and has an address, mostly to load its image."""
POLL_SECONDS = 2.0
LONGEST_POLL_SECONDS = 15.0
MISSES = 2
"""A pod is gone when list and its own URL lack it this often in a row."""
LOOK_SECONDS = (0.0, 5.0, 15.0)
"""Pauses between lookups after a creating call without an answer. RunPod does not document how late the list is."""


def check_stock(api: Api, offer: Offer) -> None:
    """Raise NoCapacity if there is none in stock. A creating call would only say that something is wrong."""
    if cpu := CPU_TYPE.fullmatch(offer.instance_type):
        path, query = f"/v2/catalog/cpus/{cpu['id']}", {"vcpuCount": int(cpu["count"])}
    else:
        gpu = gpu_of(offer)
        path, query = (
            f"/v2/catalog/gpus/{quote(gpu['id'], safe='')}",
            {"count": int(gpu["count"]), "cloud": COMMUNITY if gpu["community"] else SECURE},
        )
    row = thing_at(api, path, {**IN_STOCK, **query})
    if row is None:
        raise NoCapacity(f"RunPod sells no {offer.instance_type} any more").coded("Not Found")
    place = next((place for place in row.get("dataCenters") or [] if place["id"] == offer.region), row)
    if "NONE" in (row.get("availability"), place.get("availability")):
        others = [each["id"] for each in row.get("dataCenters") or [] if each.get("availability") != "NONE"]
        elsewhere = "" if row.get("availability") == "NONE" or not others else f"; {', '.join(others)} have it"
        raise (
            NoCapacity(f"RunPod has no {offer.instance_type} in {offer.region} in stock{elsewhere}")
            .coded("NONE")
            .advised(CAPACITY)
        )


def create_pods(creating: Api, api: Api, orders: Mapping[int, Row]) -> dict[int, str]:
    """Create a pod of each order; return their ids by rank, or raise the error if there is no pod.

    After the first refusal no further pod is requested. A call with unknown outcome is not repeated: its pod is looked
    up by name.
    """
    is_over = threading.Event()

    def create(rank: int) -> str | None:
        if is_over.is_set():
            return None
        try:
            answer = creating.request("POST", "/v2/pods", body=orders[rank])
            if isinstance(answer, dict) and (pod := cast("Row", answer).get("id")):
                return str(pod)
            raise ProviderFailed("RunPod does not say what it has created")
        except SkywardError:
            is_over.set()
            raise

    outcomes, failures = tried(create, list(orders), "skyward-runpod")
    created = {rank: pod for rank, pod in outcomes.items() if pod is not None}
    unsure = {rank: error for rank, error in failures.items() if is_unsure(error)}
    found = _look_up(api, {rank: str(orders[rank]["name"]) for rank in unsure})
    for rank in failures.keys() - found.keys():
        log.info("RunPod did not create the pod of rank %d: %s", rank, failures[rank])
    if not created and not found:
        raise certain_if_refused(next(iter([*unsure.values(), *failures.values()])))
    return dict(sorted({**created, **found}.items()))


def _look_up(api: Api, names: Mapping[int, str]) -> dict[int, str]:
    """Return the ids of the listed pods with these names.

    If the list fails too, the outcome remains unknown, and the first error is raised.
    """
    found: dict[int, str] = {}
    for pause in LOOK_SECONDS if names else ():
        time.sleep(pause)
        try:
            by_name = {
                row.get("name"): str(row["id"]) for row in all_pods(api) if state_of(row) is not InstanceState.GONE
            }
        except SkywardError as error:
            log.warning("RunPod does not list what an unanswered creating call has created: %s", error)
            break
        found = {rank: by_name[name] for rank, name in names.items() if name in by_name}
        if len(found) == len(names):
            break
    return found


def await_addresses(
    api: Api, created: Mapping[int, str], offer: Offer, *, is_networked: bool
) -> tuple[dict[int, Row], dict[int, NoCapacity]]:
    """Wait until each pod runs and has an address, or has failed.

    Returns the rows of the ones and the errors of the others, by rank.
    """
    waiting, up, down, missed = dict(created), dict[int, Row](), dict[int, NoCapacity](), dict.fromkeys(created, 0)
    deadline = time.monotonic() + ADDRESS_SECONDS
    pauses = Backoff(POLL_SECONDS, LONGEST_POLL_SECONDS, 1.5).pauses()
    while waiting:
        rows = {row["id"]: row for row in all_pods(api)}
        is_late = time.monotonic() >= deadline
        for rank, pod in list(waiting.items()):
            row: Row = rows.get(pod) or thing_at(api, path_of(pod)) or {}
            missed[rank] = 0 if row else missed[rank] + 1
            trouble = _trouble(pod, row, offer.region, is_gone=missed[rank] >= MISSES)
            if trouble is None and _is_up(row, is_networked=is_networked):
                up[rank] = row
            elif trouble is not None or is_late:
                word = word_of(row)
                down[rank] = trouble or NoCapacity(
                    f"RunPod's {pod} has no address after {ADDRESS_SECONDS:g} s: {word}"
                ).coded(word)
            else:
                continue
            del waiting[rank]
        if waiting:
            time.sleep(next(pauses))
    return up, down


def _is_up(row: Row, *, is_networked: bool) -> bool:
    return (
        state_of(row) is InstanceState.RUNNING
        and address_of(row) is not None
        and (not is_networked or private_ip_of(row) is not None)
    )


def _trouble(pod: str, row: Row, region: str, *, is_gone: bool) -> NoCapacity | None:
    """Return why a pod cannot become usable; None if it still can.

    RunPod treats the requested data centre as a preference; users may depend on it.
    """
    if is_gone or (row and state_of(row) in (InstanceState.STOPPING, InstanceState.GONE)):
        return NoCapacity(f"RunPod could not start {pod}: {word_of(row)}").coded(word_of(row))
    if region != ANYWHERE and (place := row.get("dataCenterId")) not in (None, region):
        return NoCapacity(f"RunPod has placed {pod} in {place} and not in {region}").coded(f"placed in {place}")
    return None


# ── pods as instances ────────────────────────────────────────────────────────────────────────────────────────────────

STATES = {
    "PROVISIONING": InstanceState.PENDING,
    "STARTING": InstanceState.PENDING,
    "RUNNING": InstanceState.RUNNING,
    "EXITED": InstanceState.STOPPING,
    "ERROR": InstanceState.STOPPING,
    "TERMINATED": InstanceState.GONE,
}
PRICE_VARIABLE = "SKYWARD_PRICE_PER_HOUR"
"""The catalogue's price of a pod when it was created, in USD. It splits the pod's `cost`; it never replaces it."""
NAME_CHARACTERS = 191
"""The limit of the API's version 1. Version 2 names none."""


def to_instance(row: Row, key: Key) -> Instance | None:
    """Return a pod as Instance; None without a name of ours."""
    tags = _tags(row)
    if tags is None:
        return None
    address, (price, extras) = address_of(row), prices_of(row)
    return Instance(
        id=str(row["id"]),
        provider="runpod",
        pool_id=tags[POOL_TAG],
        rank=int(tags[RANK_TAG]),
        state=state_of(row),
        region=ANYWHERE if row.get("cloud") == COMMUNITY else str(row.get("dataCenterId") or ANYWHERE),
        instance_type=_type(row),
        price_per_hour=price,
        on_demand_price_per_hour=price or None,
        extras_per_hour=extras,
        ip=None if address is None else address[0],
        private_ip=private_ip_of(row),
        tags=tags,
        directory=userdata.directory_of(str(row["id"])),
        endpoint=None if address is None else endpoint_of(*address, tags[LAUNCH_TAG], key, config=os.devnull),
    )


def prices_of(row: Row) -> tuple[float, tuple[Extra, ...]]:
    """Return what a pod costs in an hour without its disk, and its disk; together never more than RunPod's `cost`, if
    that has the disk in it.

    RunPod does not document whether it has (its OpenAPI description of 2026-10 says "cost"). So each pod keeps the
    catalogue's price, which is without disk (PRICE_VARIABLE): `cost` has the disk in it if it is nearer to the sum.
    """
    cost, extras = float(row.get("cost") or 0), extras_of(row.get("disk"))
    disk = total_of(extras)
    catalogue = cast("Row", row.get("env") or {}).get(PRICE_VARIABLE)
    try:
        price = float(str(catalogue))
    except ValueError:
        return cost, extras
    return (cost - disk if abs(cost - price - disk) < abs(cost - price) else cost), extras


def state_of(row: Row) -> InstanceState:
    """Return the state of a pod. An unknown status is PENDING: neither running nor gone."""
    return STATES.get(str(row.get("status")), InstanceState.PENDING)


def word_of(row: Row) -> str:
    """Return RunPod's word for the state of a pod; for a missing one the word for that."""
    return str(row.get("status") or "TERMINATED")


def _type(row: Row) -> str:
    gpu: Row = row.get("gpu") or {}
    cpu: Row = row.get("cpu") or {}
    if cpu:
        return cpu_type(cpu["id"], int(cpu["vcpuCount"]), float(cpu["memory"]))
    return gpu_type(str(gpu.get("id")), int(gpu.get("count") or 1), str(row.get("cloud")))


def address_of(row: Row) -> tuple[str, int] | None:
    """Return host and port for port 22 of a pod; None until it is mapped.

    The other listed address, `proxy`, carries a terminal and nothing else.
    """
    direct: Row = (row.get("ssh") or {}).get("direct") or {}
    return (str(direct["host"]), int(direct["port"])) if direct.get("host") and direct.get("port") else None


def private_ip_of(row: Row) -> str | None:
    network: Row = row.get("globalNetworking") or {}
    return network.get("ip") if network.get("enabled") else None


def _tags(row: Row) -> dict[str, str] | None:
    """Return the tags of a pod; None if its name is not one of ours."""
    return NAMES.unpack(row.get("name"), cast("Row", row.get("env") or {}))


def _escaped(text: str) -> str:
    """Return a text with only letters, digits and "-", because RunPod documents no other characters of names."""
    return to_codes(text, "A-Za-z0-9-")


NAMES = TagName(".", NAME_CHARACTERS, "a name of RunPod", _escaped, from_codes)


# ── deleting ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def delete_all(api: Api, pods: Sequence[str]) -> dict[str, SkywardError]:
    """Delete pods; return the error of each that was not deleted. One that is gone is no error."""

    def end(pod: str) -> None:
        nothing_in(api.request("DELETE", path_of(pod), missing_is_none=True), f"RunPod answered DELETE {path_of(pod)}")

    return tried(end, pods, "skyward-runpod")[1]


def delete_failed(api: Api, pods: Sequence[str]) -> None:
    """Delete pods that did not start. One that cannot be deleted now has a name of ours, so a sweep finds it."""
    for pod, error in delete_all(api, pods).items():
        log.warning("RunPod did not delete %s, which did not start: %s", pod, error)


# ── the REST API ─────────────────────────────────────────────────────────────────────────────────────────────────────

URL = "https://api.runpod.io"
CONSOLE = "https://console.runpod.io/pods?id="
KEYS_PAGE = "https://www.console.runpod.io/user/settings"
"""Where keys are made and get their rights (docs.runpod.io/get-started/api-keys)."""
BILLING_PAGE = "https://www.console.runpod.io/user/billing"
CAPACITY = "Try again later, another data centre or another GPU (`skyward offers`)"
SOLD_OUT = re.compile("availab|capacit|stock|suppl|resource|instance|machine|host|sold|again|required specification")
"""Words of a refusal that may mean that nothing is left. RunPod does not document its wording."""


def find_key() -> Found:
    """Return the key of the user's environment, or of RunPod's tools.

    Its Python package writes `[default] api_key`, runpodctl `apikey`.
    """
    if key := os.environ.get("RUNPOD_API_KEY", "").strip():
        return Found(key, "the variable RUNPOD_API_KEY")
    file = Path("~/.runpod/config.toml").expanduser()
    try:
        config = tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        config = {}
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        # the error's message may contain a line of the file
        raise CredentialsError(
            f"RUNPOD_API_KEY is not set, and {file} cannot be read: {type(error).__name__}"
        ) from None
    default = config.get("default")
    keys = [cast("Row", default).get("api_key")] if isinstance(default, dict) else []
    keys += [config.get(name) for name in ("apikey", "apiKey")]
    for key in keys:
        if isinstance(key, str) and key.strip():
            return Found(key.strip(), f"the file {file}")
    raise CredentialsError(
        "there is no key for RunPod: set RUNPOD_API_KEY, write it to ~/.runpod/config.toml, or give api_key="
    )


def advice_of(source: str) -> Advice:
    """Return what to do about refusals of a key from this source."""
    return Advice(
        key=f"The key of {source} is refused: make another at {KEYS_PAGE}",
        rights=f"The key of {source} may not do this: give it read and write access to pods at {KEYS_PAGE}",
        quota=f"Add credit at {BILLING_PAGE}; RunPod's support raises the spending limit",
        capacity=CAPACITY,
    )


def says_missing(body: Row) -> bool:
    """Return whether a body is a problem document (RFC 9457) about a missing object, as RunPod sends them."""
    return body.get("status") in (HTTPStatus.NOT_FOUND, HTTPStatus.GONE) and isinstance(body.get("title"), str)


def meaning_of(status: int, _: Row, message: str) -> SkywardError | None:
    """Return the meaning of a refusal beside the usual one. 402 is a lack of money, or the account's spending limit."""
    return QuotaExceeded.of_money(message) if status == HTTPStatus.PAYMENT_REQUIRED else None


def refusal_of(offer: Offer) -> Classify:
    """Return the classifier for a creating call.

    400 is a broken rule or a lack of stock, without a code that separates them. 403 is a key without the right
    (docs.runpod.io, "Create a pod": "a valid key lacks access to the requested resource or action"), or an account that
    may not use this pool of machines, where the next candidate is to be tried (RunPod's OpenAPI, version 2).
    """

    def meaning(status: int, body: Row, message: str) -> SkywardError | None:
        if status == HTTPStatus.FORBIDDEN:
            forbidden = NoCapacity(message)
            forbidden.if_all = CredentialsError(message)
            return forbidden
        if status != HTTPStatus.BAD_REQUEST:
            return meaning_of(status, body, message)
        error = NoCapacity(message)
        error.mistake = _mistake(str(body.get("detail") or ""), offer)
        return error

    return meaning


def _mistake(detail: str, offer: Offer) -> str:
    """Return the text of a refusal without the offer's names and without numbers; "" if it is about stock.

    So refusals of several offers can be compared.
    """
    text = detail.casefold()
    for name in (offer.instance_type, offer.instance_type.rpartition(" x")[0], offer.region):
        text = text.replace(name.casefold(), "...") if name else text
    return "" if SOLD_OUT.search(text) else " ".join(re.sub(r"\S*[0-9]\S*", "...", text).split())


def rows_at(api: Api, path: str, name: str, query: Row) -> list[Row]:
    return rows_of(api.request("GET", path, query=query), name, f"RunPod answered GET {path}")


def thing_at(api: Api, path: str, query: Row | None = None) -> Row | None:
    """Return an object of RunPod's; None if it does not exist."""
    answer = api.request("GET", path, query=query, missing_is_none=True)
    if answer is not None:
        field_of(answer, "id", str, f"RunPod answered GET {path}")
    return answer


def all_pods(api: Api) -> Iterator[Row]:
    """Yield all pods of the account. The list was one document at first, and has pages since autumn 2026."""
    cursor: str | None = None
    seen: set[str | None] = set()
    while cursor not in seen:
        seen.add(cursor)
        answer = api.request("GET", "/v2/pods", query={"cursor": cursor})
        yield from rows_of(answer, "pods", "RunPod answered GET /v2/pods")
        pages: Row = answer.get("pagination") or {}
        cursor = pages.get("nextCursor")
        if cursor is None and not pages.get("hasNextPage"):
            return
    raise ProviderFailed("the pages of RunPod's list of pods repeat")


def path_of(pod: str) -> str:
    return f"/v2/pods/{quote(pod, safe='')}"


def networked_data_centers(api: Api) -> set[str]:
    """Return the data centres with a private network."""
    return {row["id"] for row in rows_at(api, "/v2/catalog/datacenters", "dataCenters", {}) if row.get("globalNetwork")}


# ── shell text in a pod ──────────────────────────────────────────────────────────────────────────────────────────────

MACHINE_ID = 'printf %s "$RUNPOD_POD_ID"'
END = """\
variable() {{ tr '\\0' '\\n' </proc/1/environ | sed -n "s/^$1=//p"; }} # processes over SSH do not inherit the container's variables
request() {{ # method, address, body: succeeds if it was accepted
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
  id=${{RUNPOD_POD_ID:-$(variable RUNPOD_POD_ID)}} key=${{RUNPOD_API_KEY:-$(variable RUNPOD_API_KEY)}} is_accepted=
  if [ -n "$id" ] && [ -n "$key" ]; then
    request DELETE {url}/v2/pods/"$id" && is_accepted=yes
    request POST {url}/v2/pods/"$id"/action '{{"action": "terminate"}}' && is_accepted=yes
    request POST {url}/graphql '{{"query": "mutation {{ podTerminate(input: {{podId: \\\\"'"$id"'\\\\"}}) }}"}}' && is_accepted=yes
    if command -v runpodctl >/dev/null; then RUNPOD_API_KEY=$key runpodctl remove pod "$id" && is_accepted=yes; fi
    [ -n "$is_accepted" ] || request POST {url}/v2/pods/"$id"/action '{{"action": "stop"}}' # a pod that is off is billed for no GPU
  fi
  sleep "$pause"
  [ "$pause" -ge 60 ] || pause=$((pause * 2))
done"""  # noqa: E501
"""Tries every documented method until one succeeds. Version 1 of the REST API is not one any more: its date was
2026-11-15.

RunPod does not document which of them a pod's own key may use (fact sheet, "added"). The first process never ends,
because a container that ends is restarted and billed.
"""
