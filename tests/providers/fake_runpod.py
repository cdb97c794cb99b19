"""RunPod's REST API v2 as a server on this machine: a catalogue with stock, and pods.

The formats are those of the fact sheet, section 5, and of the specification at docs.runpod.io as of October 2026. Each
listing advances the start of the pods by one step.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import jsonschema
import pytest

import skyward_core as sky
from tests.providers.hosted import Hosting, Rented, container
from tests.providers.http_fake import FakeCloud, Reply, Request, route

KEY = "rpa_KEY0123456789abcdefOFRUNPOD"
HOST = "198.51.100.9"
STEPS = ("PROVISIONING", "STARTING", "RUNNING")
"""Each listing changes a new pod: it runs, then its port is mapped, then it has its private address."""
SPECIFICATION = json.loads(Path(__file__).with_name("runpod_specification.json").read_text())
"""The part of RunPod's own specification that describes pods, orders and errors."""
LIMITS = {
    "RateLimit": '"minute";r=42;t=17',
    "RateLimit-Policy": '"minute";q=60;w=60, "hour";q=3000;w=3600, "day";q=50000;w=86400',
}
NO_CAPACITY = (
    "There are no longer any instances available with the requested specifications. Please refresh and try again."
)


def validator(what: str) -> jsonschema.Draft202012Validator:
    """Return the check of a value against RunPod's specification."""
    return jsonschema.Draft202012Validator({"$ref": f"#/$defs/{what}", "$defs": SPECIFICATION["$defs"]})


def problem(status: int, detail: str, errors: list[str] | None = None, headers: dict[str, str] | None = None) -> Reply:
    """Return an error of the API. It has no code but the status."""
    body = {
        "title": "Unprocessable Entity" if status == 422 else HTTPStatus(status).phrase,
        "status": status,
        "detail": detail,
    }
    return Reply(status, body if errors is None else {**body, "errors": errors}, LIMITS | (headers or {}))


def gpu(
    gpu_id: str,
    memory: int,
    secure: float | None,
    community: float | None = None,
    places: str = "EU-RO-1 US-TX-3",
    **others: Any,
) -> dict[str, Any]:
    """Return a type of GPU as in the catalogue. It has a price also for a cloud that does not sell it."""
    row = {
        "id": gpu_id,
        "name": gpu_id.removeprefix("NVIDIA ").removeprefix("GeForce "),
        "pool": None,
        "manufacturer": "AMD" if gpu_id.startswith("AMD") else "NVIDIA",
        "memory": memory,
        "secure": secure is not None,
        "community": community is not None,
        "price": {"secure": secure or 0.01, "community": community or 0.01, "serverless": 9.0},
        "maxCount": {"secure": 8, "community": 4},
        "availability": "MEDIUM",
        "dataCenters": [{"id": place, "name": place, "availability": "LOW"} for place in places.split()],
        "cudaVersions": ["12.8", "13.0"],
    }
    return {**row, **others}


def cpu(flavor: str, memory: float, price: float | None, most: int = 8) -> dict[str, Any]:
    """Return a flavour of machines without GPU."""
    return {
        "id": flavor,
        "name": "Compute-Optimized",
        "group": "Gen 3",
        "vcpu": {"min": 2, "max": most},
        "ramGbPerVcpu": memory,
        "price": {"securePerVcpu": price, "serverlessPerVcpu": 0.05},
        "availability": "HIGH",
        "dataCenters": [
            {"id": "EU-RO-1", "name": "EU-RO-1", "availability": "HIGH"},
            {"id": "US-WA-1", "name": "US-WA-1", "availability": "NONE"},
        ],
    }


class FakeRunPod(FakeCloud):
    """`gpus` and `cpus` are sold. `hidden`: this number of listings omits each pod that is created from now on.
    `becomes`: final status of pods of a rank, in place of RUNNING.
    `elsewhere`: the place of pods that requested another. `undying`: pods that cannot be deleted. `page`: rows of one
    page of the listing; None: one document without pages, as in the summer of 2026. `is_read_only`: the key may not
    write. `is_disk_in_cost`: the `cost` of new pods has their disk in it.
    """

    cloud = "runpod"
    usd = 12.5
    creating, listing = ("POST", "/v2/pods"), ("GET", "/v2/pods")
    sold_out, over_limit = problem(400, NO_CAPACITY), problem(402, "insufficient balance")
    too_many = problem(429, "rate limit exceeded for the minute window", headers={"Retry-After": "0"})
    outage = Reply(503, "upstream connect error", is_text=True)

    def __init__(self) -> None:
        super().__init__()
        self.gpus: dict[str, dict[str, Any]] = {}
        self.cpus: dict[str, dict[str, Any]] = {}
        self.networked = {"EU-RO-1"}
        self.pods: dict[str, dict[str, Any]] = {}
        self.steps: dict[str, int] = {}
        self.lags: dict[str, int] = {}
        self.becomes: dict[str, str] = {}
        self.elsewhere: str | None = None
        self.undying: set[str] = set()
        self.hidden = 0
        self.is_read_only = self.is_disk_in_cost = False
        self.page: int | None = 10
        self.next_pod = 0
        self.keys = ["ssh-ed25519 AAAAsomebodyelses"]

    def sell(self, *rows: dict[str, Any]) -> None:
        """Put types into the catalogue."""
        for row in rows:
            (self.cpus if "vcpu" in row else self.gpus)[row["id"]] = row

    def alive(self) -> set[str]:
        """Return all pods that are, or may be, billed."""
        with self.lock:
            return {pod for pod, row in self.pods.items() if row["status"] != "TERMINATED"}

    def stranger(self, name: str) -> None:
        """Rent a pod as another user of the account."""
        pod = self._make(
            {
                "name": name,
                "image": "vllm/vllm-openai:latest",
                "gpu": {"id": "NVIDIA L4", "count": 1},
                "ports": ["8000/http"],
            }
        )
        self.steps[pod] = len(STEPS)
        self.pods[pod]["status"] = "RUNNING"

    def halt(self, pod: str, status: str = "EXITED") -> None:
        """Stop or break a pod: it exists, and its GPU is not billed."""
        with self.lock:
            self.steps[pod] = 100
            self.pods[pod] |= {"status": status, "cost": 0.0, "runtime": None, "ssh": {"proxy": None, "direct": None}}

    def stop(self, machine_id: str) -> None:
        """Stop a pod. Its disk is billed."""
        self.halt(machine_id)

    def preempt(self, machine_id: str) -> None:
        """Terminate a pod, as RunPod does with an interruptible one."""
        self.halt(machine_id, "TERMINATED")

    def strangers(self) -> None:
        """Add more than a page of other users' pods. Some names resemble ours."""
        names = ("my-training-pod", "", "skyward", "sky-contract-a1b2c3-0", "skyward.sky-contract-a1b2c3-0")
        for name in (*names, "skyward.a.lL1", "skywards.a-0.lL1", "skyward.-0.lL", *["other"] * 22):
            self.stranger(name)

    def refuse(self, request: Request) -> Reply | None:
        if request.headers.get("authorization") != f"Bearer {KEY}" or self.is_refusing:
            return problem(401, "invalid bearer token")
        if self.is_read_only and request.method != "GET" and request.path != "/graphql":
            return problem(403, "the API key does not have access to this resource")
        return None

    # ── the catalogue ────────────────────────────────────────────────────────────────────────────────────────────────

    @route("GET", "/v2/catalog/gpus")
    def list_gpus(self, request: Request) -> Reply:
        return self._catalogue(request, lambda: {"gpus": [_in_cloud(row, request) for row in self.gpus.values()]})

    @route("GET", "/v2/catalog/gpus/{id}")
    def one_gpu(self, request: Request) -> Reply:
        return self._one(self.gpus, request)

    @route("GET", "/v2/catalog/cpus")
    def list_cpus(self, request: Request) -> Reply:
        return self._catalogue(request, lambda: {"cpus": list(self.cpus.values())})

    @route("GET", "/v2/catalog/cpus/{id}")
    def one_cpu(self, request: Request) -> Reply:
        return self._one(self.cpus, request)

    @route("GET", "/v2/catalog/datacenters")
    def data_centers(self, request: Request) -> Reply:
        return Reply(
            200,
            {
                "dataCenters": [
                    {"id": place, "globalNetwork": place in self.networked}
                    for place in ("EU-RO-1", "US-TX-3", "US-WA-1")
                ]
            },
            LIMITS,
        )

    def _one(self, rows: dict[str, dict[str, Any]], request: Request) -> Reply:
        row = rows.get(unquote(request.words["id"]))
        return (
            problem(404, "resource not found")
            if row is None
            else self._catalogue(request, lambda: _in_cloud(row, request))
        )

    def _catalogue(self, request: Request, answer: Any) -> Reply:
        if request.query.get("include") != "AVAILABILITY" or request.query.get("product") != "POD":
            return problem(400, "product is required with include=AVAILABILITY, and valid only with it")
        if int(request.query.get("vcpuCount", 2)) not in (2, 4, 8, 16, 32):
            return problem(400, "vcpuCount must be a power of two")
        return Reply(200, answer(), LIMITS)

    # ── pods ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    @route("POST", "/v2/pods")
    def create(self, request: Request) -> Reply:
        if (failure := self.spend_create()) is not None:
            return failure
        body = request.body
        if errors := [
            f"{error.json_path}: {error.message}" for error in validator("CreatePodRequest").iter_errors(body)
        ]:
            return problem(422, "Request validation failed.", errors)
        if wrong := self._wrong(body):
            return problem(400, wrong)
        return Reply(201, self.pods[self._make(body)], LIMITS)

    def _wrong(self, body: dict[str, Any]) -> str | None:
        if ("gpu" in body) == ("cpu" in body):
            return "exactly one of gpu or cpu must be set"
        if len(body.get("env", {})) > 50:
            return "env must have 50 entries at most"
        try:
            command = json.loads(body.get("args", ""))
        except ValueError:
            command = {"cmd": body.get("args", "").split()}
        if not command.get("cmd"):
            return "args could not be read"
        if "cpu" in body:
            count = body["cpu"]["vcpuCount"]
            if count not in (2, 4, 8, 16, 32) or body["cpu"]["id"] not in self.cpus:
                return "vcpuCount must be a power of two"
            return NO_CAPACITY if body["disk"] > 10 * count else None  # the answer does not always contain the reason
        row = self.gpus.get(body["gpu"]["id"])
        if row is None or row["availability"] == "NONE":
            return NO_CAPACITY
        return None

    def _make(self, body: dict[str, Any]) -> str:
        self.next_pod += 1
        pod = f"p{self.next_pod:04}x7h9k2m4n"
        cloud, card, flavor = body.get("cloud", "SECURE"), body.get("gpu"), body.get("cpu")
        requested = (body.get("dataCenterIds") or ["EU-RO-1"])[0]
        if flavor:
            memory = int(self.cpus[flavor["id"]]["ramGbPerVcpu"] * flavor["vcpuCount"])
            hardware: dict[str, Any] = {"cpu": {**flavor, "memory": memory}}
            cost = self.cpus[flavor["id"]]["price"]["securePerVcpu"] * flavor["vcpuCount"]
        else:
            assert card
            hardware = {"gpu": {"id": card["id"], "count": card.get("count", 1), "vcpuCount": 16, "memory": 117}}
            cost = (
                self.gpus[card["id"]]["price"][cloud.lower()] * card.get("count", 1) if card["id"] in self.gpus else 0.5
            )
        self.pods[pod] = {
            "id": pod,
            "name": body["name"],
            "status": STEPS[0],
            "actions": ["stop", "terminate"],
            "image": body["image"],
            "args": body.get("args", ""),
            "disk": body.get("disk", 20),
            "mounts": {},
            "ports": body.get("ports", []),
            "env": body.get("env", {}),
            "registry": body.get("registry"),
            **hardware,
            "cloud": cloud,
            "dataCenterId": None if cloud == "COMMUNITY" else (self.elsewhere or requested),
            "cudaVersion": None,
            "cost": cost + (body.get("disk", 20) * 0.10 / 720 if self.is_disk_in_cost else 0.0),
            "locked": False,
            "ssh": {"proxy": None, "direct": None},
            "runtime": None,
            "template": None,
            "globalNetworking": {"enabled": bool(body.get("globalNetworking"))},
            "createdAt": "2026-11-21T12:00:00Z",
            "startedAt": None,
        }
        self.steps[pod], self.lags[pod] = 0, self.hidden
        return pod

    @route("GET", "/v2/pods")
    def list_pods(self, request: Request) -> Reply:
        cursor = request.query.get("cursor")
        shown = sorted(pod for pod in self.pods if not self.lags[pod])
        if cursor is None:
            rows = [dict(self.pods[pod]) for pod in shown]
            self._go_on()
        else:
            if not cursor.startswith("after:"):
                return problem(400, "invalid cursor")
            rows = [dict(self.pods[pod]) for pod in shown if pod > cursor.removeprefix("after:")]
        if self.page is None:
            return Reply(200, {"pods": rows}, LIMITS)
        more = len(rows) > self.page
        rows = rows[: self.page]
        return Reply(
            200,
            {
                "pods": rows,
                "pagination": {"hasNextPage": more, "nextCursor": f"after:{rows[-1]['id']}" if more else None},
            },
            LIMITS,
        )

    @route("GET", "/v2/pods/{id}")
    def one(self, request: Request) -> Reply:
        row = self.pods.get(request.words["id"])
        return problem(404, "The requested Pod does not exist.") if row is None else Reply(200, row, LIMITS)

    def _go_on(self) -> None:
        for pod, row in list(self.pods.items()):
            self.lags[pod] = max(0, self.lags[pod] - 1)
            if row["status"] == "TERMINATED":  # it is listed once more, then no longer
                del self.pods[pod]
                continue
            step = self.steps[pod] = self.steps[pod] + 1
            if step < len(STEPS):
                row["status"] = STEPS[step]
            if row["status"] == "RUNNING" and (
                end := next((status for part, status in self.becomes.items() if part in row["name"]), None)
            ):
                self.halt(pod, end)
            elif step >= len(STEPS) - 1 and row["status"] != "PROVISIONING":
                row["ssh"] = {
                    "proxy": {"host": "ssh.runpod.io", "port": 22, "username": f"{pod}-64411eb2", "command": "ssh"},
                    "direct": row["ssh"]["direct"],
                }
            if row["status"] == "RUNNING" and step >= len(STEPS) and "22/tcp" in row["ports"]:
                port = 30000 + int(pod[1:5])
                row["ssh"]["direct"] = {
                    "host": self.host_of(pod),
                    "port": port,
                    "username": "root",
                    "command": f"ssh root@{HOST} -p {port}",
                }
            if row["globalNetworking"]["enabled"] and step > len(STEPS):
                row["globalNetworking"] = {
                    "enabled": True,
                    "ip": f"10.65.1.{int(pod[1:5])}",
                    "internalDns": f"{pod}.runpod.internal",
                }

    def host_of(self, pod: str) -> str:
        """Return the address to which a pod's ports are mapped."""
        return HOST

    @route("DELETE", "/v2/pods/{id}")
    def delete(self, request: Request) -> Reply:
        pod = request.words["id"]
        if pod in self.undying:
            return problem(409, "pod is a member of a cluster")
        if pod not in self.pods or self.pods[pod]["status"] == "TERMINATED":
            return problem(404, "The requested Pod does not exist.")
        self.halt(pod, "TERMINATED")
        return Reply(204, None, LIMITS)

    @route("POST", "/graphql")
    def balance(self, request: Request) -> Reply:
        return Reply(200, {"data": {"myself": {"clientBalance": self.usd, "currentSpendPerHr": 0.0, "spendLimit": 80}}})

    @route("PUT", "/v2/account/ssh-keys")
    def replace_keys(self, request: Request) -> Reply:
        """Replace the whole list of keys, as RunPod does: adding one key removes all others."""
        self.keys = request.body["keys"]
        return Reply(200, {"keys": self.keys}, LIMITS)


def _in_cloud(row: dict[str, Any], request: Request) -> dict[str, Any]:
    """Return the stock in the requested cloud. Community machines are in no data centre, and some numbers of GPUs are
    sold out.
    """
    sold_out = row.get("sold_out_from", 100) <= int(request.query.get("count", 1))
    listed = {name: value for name, value in row.items() if name != "sold_out_from"} | (
        {"availability": "NONE"} if sold_out else {}
    )
    return {**listed, "dataCenters": []} if request.query.get("cloud") == "COMMUNITY" else listed


# ── machines that are hosts of the test bed ──────────────────────────────────────────────────────────────────────────


class HostedRunPod(FakeRunPod):
    """Pods that are hosts. Each can delete itself with its own key."""

    def __init__(self, hosting: Hosting, address: str) -> None:
        self.address = address
        super().__init__()
        self._hosting = hosting

    def refuse(self, request: Request) -> Reply | None:
        own = re.fullmatch(r"/v2/pods/(\w+)", request.path)
        if own and request.method == "DELETE" and request.headers.get("authorization") == f"Bearer key-of-{own[1]}":
            return None
        return super().refuse(request)

    def _make(self, body: dict[str, Any]) -> str:
        pod = super()._make(body)
        command = json.loads(body["args"])
        variables = {**body["env"], "RUNPOD_POD_ID": pod, "RUNPOD_API_KEY": f"key-of-{pod}"}
        self._hosting.rent(pod, lambda host: container(host, variables, [*command["entrypoint"], *command["cmd"]]))
        return pod

    def _reply(self, request: Request) -> Reply:
        for pod, row in self.pods.items():
            if row["status"] == "RUNNING" and self._hosting.is_off(pod):
                self.halt(pod)
        reply = super()._reply(request)
        for row in self.pods.values():
            direct = row["ssh"]["direct"]
            if direct is not None:
                is_up = self._hosting.ip(row["id"]) is not None
                row["ssh"]["direct"] = {**direct, "host": self._hosting.ip(row["id"]), "port": 22} if is_up else None
        return reply

    def halt(self, pod: str, status: str = "EXITED") -> None:
        super().halt(pod, status)
        self._hosting.end(pod)


@contextmanager
def hosted(hosting: Hosting, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rented]:
    """Rent out hosts of the test bed."""
    with HostedRunPod(hosting, hosting.gateway) as fake:
        fake.sell(cpu("cpu3c", 2, 0.03))
        monkeypatch.setenv("RUNPOD_API_KEY", KEY)
        yield Rented(
            sky.RunPod(endpoint_url=fake.url),
            hosting,
            fake.alive,
            fake.preempt,
            (KEY,),
        )
