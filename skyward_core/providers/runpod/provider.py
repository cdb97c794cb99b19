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
import logging
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from math import ceil
from typing import Any, ClassVar, Literal, Self
from urllib.parse import quote

from pydantic import ConfigDict, Field, SecretStr, model_validator

from skyward_core.accelerators import is_nvidia
from skyward_core.accelerators.cuda import cuda_of
from skyward_core.errors import (
    CredentialsError,
    InstancesLeft,
)
from skyward_core.machines.instances import Instance, InstanceState
from skyward_core.machines.offers import Offer, Requirements, architecture_beside
from skyward_core.providers import userdata
from skyward_core.providers._http import Api, Classify, Found, Row, rows_of
from skyward_core.providers.base import LAUNCH_TAG, RANK_TAG, Provider, Sale, Tags
from skyward_core.providers.runpod.api import (
    CONSOLE,
    URL,
    advice_of,
    all_pods,
    find_key,
    meaning_of,
    networked_data_centers,
    refusal_of,
    rows_at,
    says_missing,
)
from skyward_core.providers.runpod.boot import END, MACHINE_ID, TOOLS
from skyward_core.providers.runpod.instances import NAMES, PRICE_VARIABLE, to_instance
from skyward_core.providers.runpod.launch import await_addresses, check_stock, create_pods
from skyward_core.providers.runpod.offers import (
    ANYWHERE,
    COMMUNITY,
    CPU_TYPE,
    FLOOR,
    FLOORS,
    GPU_TYPE,
    IN_STOCK,
    SECURE,
    USUAL_COUNTS,
    accelerator_of,
    cpu_offers,
    extras_of,
    gpu_of,
    gpu_type,
    regions_of,
)
from skyward_core.providers.runpod.termination import delete_all, delete_failed
from skyward_core.providers.ssh_keys import Key, host_key, our_key
from skyward_core.providers.tagging import of_machine

log = logging.getLogger(__name__)

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
    refuses: ClassVar[Mapping[str, str]] = {
        "volume": (
            "its containers have neither FUSE nor the right to mount; read and write the bucket from your functions"
        ),
        "mig": "its containers do not own the GPU's driver; ask for a smaller GPU",
    }
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
        boot = userdata.boot_script(startup, tags, MACHINE_ID, self._end_script(), is_container=True) + TOOLS
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
        found = self._key()
        return Api(
            "RunPod",
            self._url(),
            {"Authorization": f"Bearer {found.key}"},
            classify=classify or meaning_of,
            secrets=[found.key],
            says_missing=says_missing,
            advice=advice_of(found.source),
        )

    def _key(self) -> Found:
        return Found(self.api_key.get_secret_value(), "api_key=") if self.api_key is not None else find_key()

    def _url(self) -> str:
        return (self.endpoint_url or os.environ.get("RUNPOD_API_BASE_URL") or URL).rstrip("/").removesuffix("/v2")
