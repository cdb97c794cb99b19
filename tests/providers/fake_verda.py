"""Verda's cloud API as its documentation and SDKs describe it.

The fake has its peculiarities: tokens, plain-text ids, prices as strings, objects that outlive machines.
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import pytest

import skyward_core as sky
from tests.providers.hosted import Hosting, Rented, boot_script
from tests.providers.http_fake import FakeCloud, Reply, Request, route

CLIENT_ID = "Fk7clientidofverda01"
CLIENT_SECRET = "s3cr3t-of-the-fake-verda-client-0001"
STRANGE_SCRIPT = "my-own-script"


def kind(
    name: str, gpu: str, chips: int, gpu_gb: int, cores: int, gb: int, price: str, spot: str | None
) -> dict[str, Any]:
    """Return a type as in `GET /instance-types`: all fields that Verda's Python package reads (1.25.0)."""
    return {
        "id": str(uuid.uuid5(uuid.NAMESPACE_URL, name)),
        "instance_type": name,
        "name": gpu,
        "display_name": gpu or "CPU node",
        "description": f"{chips} x {gpu}" if chips else "CPU node",
        "model": gpu.split(" ", maxsplit=1)[0],
        "manufacturer": "NVIDIA" if chips else "AMD",
        "best_for": [],
        "p2p": "",
        "supported_os": [],
        "storage": {"description": "dynamic"},
        "cpu": {"description": f"{cores} CPU", "number_of_cores": cores},
        "memory": {"description": f"{gb}GB RAM", "size_in_gigabytes": gb},
        "gpu": {"description": f"{chips}x {gpu}" if chips else "", "number_of_gpus": chips},
        "gpu_memory": {"description": f"{gpu_gb}GB GPU RAM", "size_in_gigabytes": gpu_gb},
        "price_per_hour": price,
        "spot_price": spot or "0.000",
        "currency": "usd",
    }


TYPES = [
    kind("1H100.80S.30V", "H100 SXM5 80GB", 1, 80, 30, 120, "3.700", "1.850"),
    kind("2H100.80S.80V", "H100 SXM5 80GB", 2, 160, 80, 240, "7.400", "3.700"),
    kind("1H100.80S.30V.CC", "H100 SXM5 80GB", 1, 80, 30, 120, "1.000", "0.500"),
    kind("8A100.176V", "A100 SXM4 80GB", 8, 640, 176, 960, "14.320", "7.160"),
    kind("1A100.40S.22V", "A100 SXM4 40GB", 1, 40, 22, 120, "1.290", "0.450"),
    kind("1RTX6000ADA.10V", "RTX6000 Ada 48GB", 1, 48, 10, 60, "1.200", "0.600"),
    kind("1RTXPRO6000.30V", "RTX PRO 6000 96GB", 1, 96, 30, 90, "2.044", "1.022"),
    kind("1A6000.10V", "RTX A6000 48GB", 1, 48, 10, 60, "0.820", "0.410"),
    kind("1V100.6V", "Tesla V100 16GB", 1, 16, 6, 23, "0.120", "0.060"),
    kind("1L40S.20V", "L40S 48GB", 1, 48, 20, 60, "1.880", "0.941"),
    kind("1B300.30V", "B300 SXM6 268GB", 1, 268, 30, 240, "7.500", "3.750"),
    kind("1X900.30V", "X900 SXM9 999GB", 1, 999, 30, 240, "0.010", "0.005"),
    kind("CPU.4V.16G", "", 0, 0, 4, 16, "0.112", None),
]
NAMES = [one["instance_type"] for one in TYPES]
GPU_SLUGS = (
    "ubuntu-24.04-cuda-13.0",
    "ubuntu-24.04-cuda-13.0-open-docker",
    "ubuntu-24.04-cuda-12.8-open",
    "ubuntu-22.04-cuda-12.4-docker",
    "24.04.cuda12.9.docker",
    "24.04.base",
    "jupyter-24.04-cuda-13.0-open-docker",
)
OLD_SLUGS = ("ubuntu-24.04-cuda-12.8", "24.04.cuda12.9.docker", "ubuntu-24.04-cuda-13.0-open-docker")
CPU_SLUGS = ("ubuntu-24.04-cuda-13.0-open-docker", "24.04.base", "26.04.base")


def error(status: int, code: str, message: str) -> Reply:
    """Return an error in Verda's format."""
    return Reply(status, {"code": code, "message": message})


class FakeVerda(FakeCloud):
    """The account of one team. `path`: the statuses of a new machine, a step each time it is read; its address comes with the last. `alive`: the
    billed machines.
    """

    cloud = "verda"
    usd = 100.0
    prefix = "/v1"
    creating, listing = ("POST", "/v1/instances$"), ("GET", "/v1/instances$")
    sold_out = error(503, "service_unavailable", "No such machine is free")
    over_limit = error(400, "invalid_request", "GPU quota exceeded")
    too_many = Reply(429, {"code": "too_many", "message": "Too many requests"}, {"Retry-After": "0.01"})

    def __init__(self) -> None:
        super().__init__()
        self.machines: dict[str, dict[str, Any]] = {}
        self.volumes: dict[str, dict[str, Any]] = {}
        self.trash: dict[str, dict[str, Any]] = {}
        self.scripts: dict[str, dict[str, Any]] = {}
        self.keys: dict[str, dict[str, Any]] = {}
        self.tokens: set[str] = set()
        self.secrets = {CLIENT_ID: CLIENT_SECRET}
        self.path = ["ordered", "provisioning", "running"]
        self.path_of: dict[str, list[str]] = {}
        self.sold = {
            ("FIN-01", False): NAMES,
            ("FIN-03", False): NAMES[:2],
            ("FIN-01", True): NAMES,
            ("FIN-02", True): NAMES[:1],
        }
        self.is_untagging = self.leaves_disks = False
        self.nvme_price = 0.20
        self._ids = 0

    # ── methods for tests ────────────────────────────────────────────────────────────────────────────────────────────

    def alive(self) -> set[str]:
        """Return the ids of the machines that are not being deleted."""
        with self.lock:
            return {
                machine_id
                for machine_id, machine in self.machines.items()
                if machine["status"] not in ("deleting", "discontinued")
            }

    def stop(self, machine_id: str) -> None:
        """Shut a machine down, as a user does."""
        self.machines[machine_id]["status"] = "offline"

    def preempt(self, machine_id: str) -> None:
        """Preempt a machine: it disappears from the list, and its disk is kept or deleted as requested."""
        with self.lock:
            self.machines[machine_id]["status"] = "discontinued"
            volume = self.volumes[self.machines[machine_id]["os_volume_id"]]
            self._detach(volume)
            if volume["on_spot_discontinue"] == "delete_permanently":
                del self.volumes[volume["id"]]

    def strangers(self) -> None:
        """Add machines of other members of the team. Some names resemble ours."""
        names = (
            "web",
            "sky-contract-a1b2c3",
            "sky-contract-a1b2c3-0-abcdef12",
            "my-sky-contract-a1b2c3-0-abcdef12",
            "job-1-abcdef",
        )
        for name in names:
            machine = self._add(
                {
                    "instance_type": "CPU.4V.16G",
                    "location_code": "FIN-01",
                    "hostname": name,
                    "description": name,
                    "tags": [{"key": "team"}],
                },
                50,
            )
            self.path_of[machine["id"]] = ["running"]

    def orphan(self, name: str, *, age_seconds: float = 0.0, is_os: bool = True) -> str:
        """Add a disk that belongs to no machine."""
        return self._volume(name, 50, None, is_os=is_os, age_seconds=age_seconds)["id"]

    def script(self, name: str) -> str:
        """Add a script."""
        script_id = str(uuid.uuid4())
        self.scripts[script_id] = {"id": script_id, "name": name, "script": "#!/bin/sh"}
        return script_id

    # ── the API ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def refuse(self, request: Request) -> Reply | None:
        if request.path in {"/v1/oauth2/token", "/v1/instance-types", "/v1/volume-types"}:
            return None
        token = request.headers.get("authorization", "").removeprefix("Bearer ")
        if self.is_refusing or token not in self.tokens:
            return error(401, "unauthorized_request", "Access token is missing or invalid")
        return None

    @route("POST", "/v1/oauth2/token")
    def token(self, request: Request) -> Reply:
        if self.is_refusing or self.secrets.get(request.body["client_id"]) != request.body["client_secret"]:
            return error(400, "invalid_request", f"Invalid client id or client secret: {request.body['client_secret']}")
        token = f"token-{uuid.uuid4()}"
        self.tokens.add(token)
        return Reply(
            200,
            {
                "access_token": token,
                "refresh_token": "r",
                "scope": "fullAccess",
                "expires_in": 3600,
                "token_type": "Bearer",
            },
        )

    @route("GET", "/v1/instance-types")
    def types(self, request: Request) -> Reply:
        return Reply(200, TYPES)

    @route("GET", "/v1/volume-types")
    def volume_types(self, request: Request) -> Reply:
        """Return the prices of disks (the format of Verda's Go and Python SDKs)."""
        price = {"price_per_month_per_gb": self.nvme_price, "cps_per_gb": 7.6e-8, "currency": "usd"}
        return Reply(
            200,
            [
                {"type": "HDD", "price": {**price, "price_per_month_per_gb": 0.05}, "is_shared_fs": False},
                {"type": "NVMe", "price": price, "is_shared_fs": False, "iops": "50k"},
            ],
        )

    @route("GET", "/v1/instance-availability")
    def availability(self, request: Request) -> Reply:
        # Verda's Python client and its REST documentation differ
        is_spot = request.query.get("is_spot", request.query.get("isSpot")) == "true"
        return Reply(
            200,
            [
                {"location_code": place, "availabilities": names}
                for (place, spot), names in self.sold.items()
                if spot == is_spot
            ],
        )

    @route("GET", "/v1/images")
    def images(self, request: Request) -> Reply:
        of = request.query.get("instance_type", "")
        slugs = CPU_SLUGS if of.startswith("CPU") else OLD_SLUGS if "V100" in of or "A6000" in of else GPU_SLUGS
        return Reply(
            200,
            [{"image_type": slug, "name": slug, "is_default": False, "is_cluster": False} for slug in slugs],
        )

    @route("GET", "/v1/balance")
    def balance(self, request: Request) -> Reply:
        return Reply(200, {"amount": self.usd, "currency": "usd"})

    @route("GET", "/v1/ssh-?keys")
    def list_keys(self, request: Request) -> Reply:
        return Reply(200, list(self.keys.values()))

    @route("POST", "/v1/ssh-?keys")
    def add_key(self, request: Request) -> Reply:
        if any(key["name"] == request.body["name"] for key in self.keys.values()):
            return error(400, "invalid_request", "An SSH key of this name exists")
        key_id = str(uuid.uuid4())
        self.keys[key_id] = {
            "id": key_id,
            "name": request.body["name"],
            "key": request.body["key"] + " added",
            "fingerprint": "SHA256:0",
            "created_at": datetime.now(UTC).isoformat(),
        }
        return Reply(201, key_id, is_text=True)

    @route("GET", "/v1/scripts")
    def list_scripts(self, request: Request) -> Reply:
        return Reply(200, list(self.scripts.values()))

    @route("POST", "/v1/scripts")
    def add_script(self, request: Request) -> Reply:
        script_id = self.script(request.body["name"])
        self.scripts[script_id]["script"] = request.body["script"]
        return Reply(201, script_id, is_text=True)

    @route("DELETE", "/v1/scripts/{id}")
    def remove_script(self, request: Request) -> Reply:
        return (
            Reply(200) if self.scripts.pop(request.words["id"], None) else error(404, "not_found", "Script not found")
        )

    @route("GET", "/v1/volumes")
    def list_volumes(self, request: Request) -> Reply:
        return Reply(200, list(self.volumes.values()))

    @route("DELETE", "/v1/volumes/{id}")
    def remove_volume(self, request: Request) -> Reply:
        volume = self.volumes.get(request.words["id"])
        if volume is None:
            return error(404, "not_found", "Volume not found")
        if volume["instance_id"]:
            return error(400, "invalid_request", "Can't delete an attached volume")
        del self.volumes[volume["id"]]
        if not (request.body or {}).get("is_permanent"):
            self.trash[volume["id"]] = volume
        return Reply(202)

    @route("GET", "/v1/instances")
    def list_machines(self, request: Request) -> Reply:
        for machine in self.machines.values():
            self._step(machine)
        machines = [
            machine
            for machine in self.machines.values()
            if (machine["status"] == "discontinued") == (request.query.get("status") == "discontinued")
        ]
        return Reply(200, [self._listed(machine) for machine in machines])

    @route("GET", "/v1/instances/{id}")
    def machine(self, request: Request) -> Reply:
        machine = self.machines.get(request.words["id"])
        if machine is None:
            return (
                error(400, "invalid_request", "Invalid instance id")
                if len(request.words["id"]) != 36
                else error(404, "not_found", "Instance not found")
            )
        self._step(machine)
        return Reply(200, self._listed(machine))

    @route("POST", "/v1/instances")
    def create(self, request: Request) -> Reply:
        if (wrong := self._wrong(request.body)) is not None:
            return error(400, "invalid_request", wrong)
        if (failure := self.spend_create()) is not None:
            return failure
        return Reply(202, self._add(request.body, request.body["os_volume"]["size"])["id"], is_text=True)

    @route("PUT", "/v1/instances")
    def act(self, request: Request) -> Reply:
        ids = request.body["id"] if isinstance(request.body["id"], list) else [request.body["id"]]
        if request.body["action"] != "delete":
            return error(400, "invalid_request", "Unknown action")
        if request.body.get("delete_permanently") and request.body.get("volume_ids") is None:
            return error(400, "invalid_request", "delete_permanently needs volume_ids")
        outcomes = [self._delete(machine_id, request.body) for machine_id in ids]
        is_good = all(one["status"] == "success" for one in outcomes)
        return Reply(202 if is_good else 207, outcomes)

    # ── internal functions ───────────────────────────────────────────────────────────────────────────────────────────

    def _wrong(self, body: dict[str, Any]) -> str | None:
        tags = body.get("tags", [])
        if not all(body.get(name) for name in ("instance_type", "image", "hostname", "description")):
            return "Missing field"
        if len(tags) > 10 or any(len(tag["key"]) > 63 or len(tag.get("value", "")) > 127 for tag in tags):
            return "Too many tags, or too long ones"
        if any(re.search(r"[^A-Za-z0-9._-]", tag["key"] + tag.get("value", "")) for tag in tags):
            return "Invalid character in a tag"
        if not all(key in self.keys for key in body["ssh_key_ids"]) or body["startup_script_id"] not in self.scripts:
            return "Invalid SSH key or startup script"
        if len(body["hostname"]) > 63 or not re.fullmatch(r"[a-z0-9-]+", body["hostname"]):
            return "Invalid hostname"
        slugs = [
            one["image_type"]
            for one in self.images(Request("GET", "", {"instance_type": body["instance_type"]}, None, {})).body
        ]  # type: ignore[attr-defined]
        if body["image"] not in slugs:
            return "Operating system is not valid for this instance type"
        if body.get("contract", "SPOT" if body.get("is_spot") else "PAY_AS_YOU_GO") not in (
            ["SPOT"] if body.get("is_spot") else ["PAY_AS_YOU_GO", "LONG_TERM"]
        ):
            return "Invalid contract"
        if body.get("pricing", "FIXED_PRICE") != "FIXED_PRICE":
            return "Invalid pricing"
        if body["os_volume"].get("on_spot_discontinue") and not body["is_spot"]:
            return "on_spot_discontinue is for spot instances"
        return None

    def _add(self, body: dict[str, Any], gb: int) -> dict[str, Any]:
        self._ids += 1
        sold = next(one for one in TYPES if one["instance_type"] == body["instance_type"])
        machine_id = str(uuid.uuid4())
        disk = body.get("os_volume", {"name": body["hostname"]})
        machine = {
            "id": machine_id,
            "ip": None,
            "private_ip": None,
            "status": "new",
            "created_at": datetime.now(UTC).isoformat(),
            "cpu": sold["cpu"],
            "gpu": sold["gpu"],
            "memory": sold["memory"],
            "gpu_memory": sold["gpu_memory"],
            "storage": sold["storage"],
            "hostname": body["hostname"],
            "description": body["description"],
            "location": body["location_code"],
            "price_per_hour": sold["spot_price" if body.get("is_spot") else "price_per_hour"],
            "is_spot": body.get("is_spot", False),
            "instance_type": body["instance_type"],
            "image": body.get("image"),
            "startup_script_id": body.get("startup_script_id"),
            "ssh_key_ids": body.get("ssh_key_ids", []),
            "os_volume_id": None,
            "volume_ids": [],
            "contract": "SPOT" if body.get("is_spot") else "PAY_AS_YOU_GO",
            "tags": [
                {"id": str(uuid.uuid4()), "key": tag["key"].lower(), "value": tag.get("value", "")}
                for tag in body.get("tags", [])
            ],
        }
        volume = self._volume(disk["name"], gb, machine_id, is_os=True)
        volume["on_spot_discontinue"] = disk.get("on_spot_discontinue", "keep_detached")
        machine["os_volume_id"] = volume["id"]
        machine["volume_ids"] = [volume["id"]]
        machine["number"] = self._ids
        self.machines[machine_id] = machine
        self.path_of[machine_id] = list(self.path)
        return machine

    def _volume(
        self, name: str, gb: int, machine_id: str | None, *, is_os: bool, age_seconds: float = 0.0
    ) -> dict[str, Any]:
        volume_id = str(uuid.uuid4())
        made = datetime.fromtimestamp(time.time() - age_seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S.000Z")
        self.volumes[volume_id] = volume = {
            "id": volume_id,
            "name": name,
            "size": gb,
            "type": "NVMe",
            "status": "attached" if machine_id else "detached",
            "created_at": made,
            "instance_id": machine_id,
            "instances": [{"id": machine_id}] if machine_id else [],
            "is_os_volume": is_os,
            "on_spot_discontinue": "keep_detached",
        }
        return volume

    def _step(self, machine: dict[str, Any]) -> None:
        if machine["status"] == "deleting":
            machine["status"] = "discontinued"
            if volume := self.volumes.get(machine["os_volume_id"]):
                self._detach(volume)
        elif self.path_of[machine["id"]]:
            machine["status"] = self.path_of[machine["id"]].pop(0)
            if machine["status"] == "running":
                machine["ip"] = f"203.0.113.{machine['number']}"

    def _listed(self, machine: dict[str, Any]) -> dict[str, Any]:
        return {**machine, "tags": []} if self.is_untagging else machine

    def _delete(self, machine_id: str, body: dict[str, Any]) -> dict[str, Any]:
        machine = self.machines.get(machine_id)
        wrong = {
            None: "Invalid instance id",
            "discontinued": "Can't discontinue a discontinued instance",
            "ordered": "Can't discontinue a provisioning instance",
        }
        status = machine["status"] if machine else None
        reason = wrong.get("ordered" if status in ("ordered", "new", "provisioning", "validating") else status)
        if machine is None or reason:
            return {"action": "delete", "instanceId": machine_id, "status": "error", "statusCode": 400, "error": reason}
        machine["status"] = "deleting"
        self.path_of[machine_id] = []
        asked = body.get("volume_ids")
        volume = self.volumes[machine["os_volume_id"]]
        if self.leaves_disks:
            return {"action": "delete", "instanceId": machine_id, "status": "success"}
        if asked is None:
            self.trash[volume["id"]] = self.volumes.pop(volume["id"])
        elif volume["id"] in asked:
            del self.volumes[volume["id"]]
            if not body.get("delete_permanently"):
                self.trash[volume["id"]] = volume
        return {"action": "delete", "instanceId": machine_id, "status": "success"}

    def _detach(self, volume: dict[str, Any]) -> None:
        volume.update(instance_id=None, instances=[], status="detached")


# ── machines that are hosts of the test bed ──────────────────────────────────────────────────────────────────────────


class HostedVerda(FakeVerda):
    """Machines that are hosts. A machine runs when its host has started."""

    def __init__(self, hosting: Hosting) -> None:
        super().__init__()
        self._hosting = hosting

    def _add(self, body: dict[str, Any], gb: int) -> dict[str, Any]:
        machine = super()._add(body, gb)
        text = self.scripts[body["startup_script_id"]]["script"]
        self._hosting.rent(machine["id"], lambda host: boot_script(host, body["hostname"], text))
        return machine

    def _step(self, machine: dict[str, Any]) -> None:
        if machine["status"] == "running" and self._hosting.is_off(machine["id"]):
            machine["status"] = "offline"
        if self.path_of[machine["id"]] == ["running"] and self._hosting.ip(machine["id"]) is None:
            return
        super()._step(machine)
        if machine["ip"] is not None:
            machine["ip"] = machine["private_ip"] = self._hosting.ip(machine["id"])

    def _delete(self, machine_id: str, body: dict[str, Any]) -> dict[str, Any]:
        answer = super()._delete(machine_id, body)
        if answer["status"] == "success":
            self._hosting.end(machine_id)
        return answer

    def preempt(self, machine_id: str) -> None:
        super().preempt(machine_id)
        self._hosting.end(machine_id)


@contextmanager
def hosted(hosting: Hosting, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rented]:
    """Rent out hosts of the test bed."""
    with HostedVerda(hosting) as fake:
        monkeypatch.setenv("VERDA_CLIENT_ID", CLIENT_ID)
        monkeypatch.setenv("VERDA_CLIENT_SECRET", CLIENT_SECRET)
        yield Rented(sky.Verda(endpoint_url=fake.url + "/v1"), hosting, fake.alive, fake.preempt, (CLIENT_SECRET,))
