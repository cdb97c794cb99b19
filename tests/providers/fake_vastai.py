"""Vast.ai as a server on this machine: containers, and a market that removes an offer when it is rented.

The formats are those of docs.vast.ai and of the fact sheet, section 4. Each listing advances the start of the
containers by one step.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

import skyward_core as sky
from skyward_core.providers.vastai import END as VAST_END
from skyward_core.providers.vastai import URL as VAST_URL
from tests.providers.hosted import Hosting, Rented, container
from tests.providers.http_fake import FakeCloud, Reply, Request, route

KEY = "vast-key-0123456789abcdef"


def refusal(status: int, code: str, message: str, **others: Any) -> Reply:
    """Return an error of the API."""
    return Reply(status, {"success": False, "error": code, "msg": message, **others})


GONE = refusal(404, "no_such_ask", "error 404/3603: no_such_ask Instance type by id is not available.")
SPENT = refusal(400, "spend_rate_limit", "Your account's spend rate limit would be exceeded by this instance.")
POOR = refusal(400, "insufficient_credit", "Your account lacks credit; see the billing page.")
STEPS: tuple[dict[str, Any], ...] = (
    {"actual_status": None},
    {"actual_status": "created"},
    {"actual_status": "loading", "status_msg": "Pulling from nvidia/cuda"},
    {"actual_status": "running", "status_msg": "success, running nvidia/cuda_12.4.1-runtime-ubuntu22.04/args"},
)


def ask(number: int, gpu_name: str = "RTX 4090", gpus: int = 1, price: float = 0.35, **others: Any) -> dict[str, Any]:
    """Return an offer of the market, which Vast.ai calls an ask. Memory is in MB. `cpu_ram` is that of the whole
    machine. Each GPU has an eighth of its CPUs.
    """
    row = {
        "id": number,
        "ask_contract_id": number,
        "machine_id": 10 * number,
        "host_id": 5,
        "gpu_name": gpu_name,
        "num_gpus": gpus,
        "gpu_ram": 24564,
        "gpu_frac": gpus / 8,
        "cpu_cores": 128,
        "cpu_cores_effective": 16.0 * gpus,
        "cpu_ram": 512000,
        "disk_space": 800.5,
        "dph_base": price - 0.01,
        "dph_total": price,
        "min_bid": round(price / 2, 6),
        "reliability2": 0.995,
        "verification": "verified",
        "geolocation": "Texas, US",
        "inet_down": 900.0,
        "direct_port_count": 100,
        "duration": 30 * 86400.0,
        "cuda_max_good": 12.8,
        "cluster_id": None,
        "rentable": True,
        "rented": False,
        "external": False,
    }
    return {**row, **others}


class FakeVast(FakeCloud):
    """`asks` of the market by number, `containers` of the account by contract.

    `broken`: asks with hosts that fail, with the fields of the failed container. `refused`: asks that answer with an
    error and still with a contract. `hidden`: this number of listings omits each new container. `is_sloppy`: the market
    ignores filters on numbers. `undying`: containers that cannot be destroyed. `refuses_bulk`: the answer to a call that
    would destroy several. `jobs` of the scheduler by id; `refuses_jobs`: the answer to a new one.
    """

    cloud = "vastai"
    usd = 12.5
    creating, listing = ("PUT", "/api/v0/asks/"), ("GET", "/api/v1/instances/")
    sold_out, over_limit = GONE, POOR
    too_many = Reply(429, "API requests too frequent: endpoint threshold=1.0", is_text=True)
    outage = Reply(502, "<html>Bad Gateway</html>", is_text=True)

    def __init__(self) -> None:
        super().__init__()
        self.asks: dict[int, dict[str, Any]] = {}
        self.containers: dict[int, dict[str, Any]] = {}
        self.steps: dict[int, int] = {}
        self.lags: dict[int, int] = {}
        self.broken: dict[int, dict[str, Any]] = {}
        self.refused: dict[int, Reply] = {}
        self.undying: set[int] = set()
        self.is_sloppy = False
        self.refuses_bulk: Reply | None = None
        self.jobs: dict[int, dict[str, Any]] = {}
        self.refuses_jobs: Reply | None = None
        self.hidden = 0
        self.next_contract = 30000000

    def sell(self, *asks: dict[str, Any]) -> None:
        """Put asks on the market."""
        self.asks |= {row["id"]: row for row in asks}

    def stranger(self, label: str | None) -> None:
        """Rent a container as another user of the account."""
        contract = self._contract(ask(1), {"label": label, "image": "vllm/vllm-openai:latest", "env": {}})
        self.steps[contract] = len(STEPS)

    def alive(self) -> set[str]:
        """Return the ids of all billed containers."""
        return {str(contract) for contract in list(self.containers)}

    def stop(self, machine_id: str) -> None:
        """Stop a container. Its disk is billed."""
        self.halt(int(machine_id))

    def preempt(self, machine_id: str) -> None:
        """Preempt a container: another user bids more, and it is stopped."""
        with self.lock:
            self.halt(int(machine_id))

    def strangers(self) -> None:
        """Add more than a page of other users' containers. Some labels resemble ours."""
        labels = (None, "", "ML Training Job 2025", "sky-contract-a1b2c3-0", "skyward", "skyward:sky-contract-a1b2c3")
        for label in (*labels, "skyward:a-0", "skyward:a-x:lL1", *[None] * 22):
            self.stranger(label)

    def refuse(self, request: Request) -> Reply | None:
        is_let_in = request.headers.get("authorization") == f"Bearer {KEY}" and not self.is_refusing
        if is_let_in or (request.path == "/api/v0/bundles/" and not self.is_refusing):  # a search needs no credentials
            return None
        # a search has another status for it (vast-ai/docs, search_offers.yaml)
        status = 404 if request.path == "/api/v0/bundles/" else 401
        return Reply(status, {"success": False, "error": "auth_error", "msg": "Invalid user key"})

    # ── the market ───────────────────────────────────────────────────────────────────────────────────────────────────

    @route("POST", "/api/v0/bundles/")
    def search(self, request: Request) -> Reply:
        filters = dict(request.body)
        kind, order, limit = filters.pop("type"), filters.pop("order", []), filters.pop("limit", 64)
        filters.pop("allocated_storage", None)
        if kind not in ("on-demand", "ondemand", "bid"):
            return Reply(400, {"success": False, "error": "invalid_args", "msg": f"Invalid type: {kind}"})
        found = [
            row
            for row in self.asks.values()
            if all(self._fits(row, field, conditions) for field, conditions in filters.items())
        ]
        for field, direction in reversed(order):
            found.sort(key=lambda row: row.get(field, 0), reverse=direction == "desc")
        return Reply(200, {"offers": found[: min(limit, 64)]})

    def _fits(self, row: dict[str, Any], field: str, conditions: dict[str, Any]) -> bool:
        """Return whether an ask matches a query. Names are compared literally, and places by country only. Another
        spelling finds nothing and is no error.
        """
        actual = {
            "verified": row["verification"] == "verified",
            "geolocation": row["geolocation"].rpartition(", ")[2],
        }.get(field, row.get(field))
        for op, given in conditions.items():
            # Vast's own package sends numbers as texts
            value = float(given) if isinstance(given, str) and isinstance(actual, int | float) else given
            match op:
                case "eq" if actual != value:
                    return False
                case "in" if actual not in value:
                    return False
                case "gte" if not self.is_sloppy and (actual is None or actual < value):
                    return False
                case "lte" if not self.is_sloppy and (actual is None or actual > value):
                    return False
                case "eq" | "in" | "gte" | "lte":
                    pass
                case _:
                    raise AssertionError(f"no such operator: {op}")
        return True

    @route("PUT", "/api/v0/asks/{id}/")
    def rent(self, request: Request) -> Reply:
        number, body = int(request.words["id"]), request.body
        if (failure := self.spend_create()) is not None:
            return failure
        if number in self.refused:
            reply = replace(self.refused[number], is_of_test=True)
            if isinstance(reply.body, dict) and "new_contract" in reply.body:
                contract = self._contract(self.asks[number], body)
                self.containers[contract] |= {
                    "intended_status": "stopped",
                    "cur_state": "stopped",
                    "next_state": "stopped",
                }
                return replace(reply, body={**reply.body, "new_contract": contract})
            return reply
        if number not in self.asks:
            return Reply(
                410,
                {
                    "success": False,
                    "error": "no_such_ask",
                    "msg": f"error 410/3592: Instance type by id {number} is not available.",
                    "ask_id": number,
                },
            )
        if wrong := self._wrong(body):
            return Reply(400, {"success": False, "error": "invalid_args", "msg": wrong})
        price = body.get("price")
        if price is not None and not (0.001 <= price <= 128 and price >= self.asks[number]["min_bid"]):
            return Reply(
                400,
                {
                    "success": False,
                    "error": "invalid_price",
                    "msg": f"error 400/3513: bid {price} is below the minimum",
                    "ask_id": number,
                },
            )
        contract = self._contract(self.asks.pop(number), body)
        self.containers[contract] |= self.broken.get(number, {})
        if number in self.broken:
            self.steps[contract] = len(STEPS)
        return Reply(200, {"success": True, "new_contract": contract, "instance_api_key": "instance-key"})

    def _wrong(self, body: dict[str, Any]) -> str | None:
        if len(body["label"]) > 256:
            return "label must be <= 256 characters"
        if body["disk"] < 8:
            return "disk must be >= 8"
        if len(body.get("onstart") or "") + sum(map(len, body.get("args") or ())) > 4048:
            return "args + args_str + onstart must be <= 4048 characters"
        if any(len(value) > 256 for value in body["env"].values()):
            return "invalid env arguments, a value has more than 256 characters"
        if sum(len(name) + len(value) for name, value in body["env"].items()) > 32 * 1024:
            return "invalid env arguments, total length > 32KB"
        return None

    def _contract(self, row: dict[str, Any], body: dict[str, Any]) -> int:
        self.next_contract += 1
        contract, is_bid = self.next_contract, body.get("price") is not None
        fields = (
            "machine_id",
            "host_id",
            "gpu_name",
            "num_gpus",
            "gpu_ram",
            "cpu_cores_effective",
            "geolocation",
            "min_bid",
            "cluster_id",
        )
        self.containers[contract] = {
            **{name: row[name] for name in fields},
            "id": contract,
            "label": body["label"],
            "image_uuid": body["image"],
            "image_runtype": "args",
            "extra_env": [[name, value] for name, value in body["env"].items()],
            "is_bid": is_bid,
            "dph_total": body["price"] if is_bid else row["dph_total"],
            "intended_status": "running",
            "cur_state": "running",
            "next_state": "running",
            "status_msg": None,
            "public_ipaddr": None,
            "ports": None,
            "ssh_host": "ssh5.vast.ai",
            "ssh_port": 10000 + contract % 1000,
            "local_ipaddrs": "172.17.0.2",
            "start_date": 1790000000.0,
            **STEPS[0],
        }
        self.steps[contract], self.lags[contract] = -1, self.hidden
        return contract

    # ── containers ───────────────────────────────────────────────────────────────────────────────────────────────────

    @route("GET", "/api/v1/instances/")
    def list_containers(self, request: Request) -> Reply:
        limit = int(request.query.get("limit", 25))
        if not 1 <= limit <= 25:
            return Reply(400, {"success": False, "error": "invalid_args", "msg": "limit must be between 1 and 25"})
        token = request.query.get("after_token")
        after = json.loads(base64.b64decode(token))["values"]["id"] if token else 0
        shown = sorted(contract for contract in self.containers if not self.lags[contract])
        if not token:
            self._go_on()
        page = [contract for contract in shown if contract > after][:limit]
        more = bool(page) and page[-1] != shown[-1]
        next_token = base64.b64encode(json.dumps({"values": {"id": page[-1]}}).encode()).decode() if more else None
        rows = [self.containers[contract] for contract in page]
        return Reply(
            200,
            {
                "success": True,
                "instances_found": len(rows),
                "total_instances": len(shown),
                "next_token": next_token,
                "instances": rows,
            },
        )

    def _go_on(self) -> None:
        for contract, row in self.containers.items():
            self.lags[contract] = max(0, self.lags[contract] - 1)
            step = self.steps[contract] = self.steps[contract] + 1
            if step < len(STEPS):
                row |= STEPS[step]
            if row["actual_status"] == "running":
                row |= {
                    "public_ipaddr": " 198.51.100.7\n",
                    "ports": {"22/tcp": [{"HostIp": "0.0.0.0", "HostPort": str(20000 + contract % 1000)}]},
                }

    @route("DELETE", "/api/v0/instances/")
    def destroy_many(self, request: Request) -> Reply:
        ids = request.body["instance_ids"]
        if not ids:
            return Reply(400, {"error": "invalid_args", "msg": "instance_ids array is required"})
        if self.refuses_bulk is not None:
            return replace(self.refuses_bulk, is_of_test=True)
        if not self.containers.keys() & set(ids):
            return Reply(404, {"error": "instances_not_found", "msg": f"Instances {ids} not found."})
        for contract in ids:
            self._destroy(contract)
        return Reply(200, {"success": True})

    @route("PUT", "/api/v0/instances/{id}/")
    def put_into_a_state(self, request: Request) -> Reply:
        contract = int(request.words["id"])
        if contract not in self.containers:
            return Reply(404, {"success": False, "error": "no_such_instance", "msg": f"Instance {contract} not found."})
        if request.body.get("state") != "stopped":
            return Reply(
                400, {"success": False, "error": "invalid_args", "msg": "this fake stops containers, and no more"}
            )
        self.halt(contract)
        return Reply(200, {"success": True})

    @route("DELETE", "/api/v0/instances/{id}/")
    def destroy(self, request: Request) -> Reply:
        contract = int(request.words["id"])
        if contract in self.undying:
            return Reply(200, {"success": False, "msg": "try again later"})
        if contract not in self.containers:  # docs.vast.ai, "Destroy Instance": the schema of its 404
            return Reply(404, {"success": False, "error": "not_found", "msg": f"Instance {contract} not found."})
        self._destroy(contract)
        return Reply(200, {"success": True, "msg": "Instance destroyed successfully"})

    def _destroy(self, contract: int) -> None:
        self.containers.pop(contract, None)

    def halt(self, contract: int) -> None:
        """Stop a container, as a user or a higher bid does. Its disk is kept and billed."""
        self.steps[contract] = len(STEPS)
        self.containers[contract] |= {
            "actual_status": "exited",
            "intended_status": "stopped",
            "cur_state": "stopped",
            "next_state": "stopped",
        }

    # ── the scheduler ────────────────────────────────────────────────────────────────────────────────────────────────

    @route("POST", "/api/v0/commands/schedule_job/")
    def add_job(self, request: Request) -> Reply:
        if self.refuses_jobs is not None:
            return replace(self.refuses_jobs, is_of_test=True)
        fields = {
            "api_endpoint",
            "request_method",
            "request_body",
            "instance_id",
            "start_time",
            "end_time",
            "frequency",
        }
        if missing := fields - request.body.keys():
            return refusal(400, "invalid_args", f"missing {sorted(missing)}")
        if any({**job, **request.body} == job for job in self.jobs.values()):
            return Reply(422, {"error": "job_exists", "msg": "this job exists"})
        number = 500 + len(self.jobs)
        self.jobs[number] = {"id": number, **request.body}
        return Reply(200, {"success": True, "scheduled_job_id": number})

    @route("GET", "/api/v0/commands/schedule_job/")
    def list_jobs(self, request: Request) -> Reply:
        return Reply(200, list(self.jobs.values()))

    @route("DELETE", "/api/v0/commands/schedule_job/{id}/")
    def remove_job(self, request: Request) -> Reply:
        if self.jobs.pop(int(request.words["id"]), None) is None:
            return Reply(404, {"error": "not_found"})
        return Reply(200, {"success": True, "msg": f"Scheduled job {request.words['id']} deleted successfully"})

    def run_jobs(self, now: float) -> None:
        """Run the jobs that are due. An hourly job runs at each full hour, from that of its start on."""
        for job in self.jobs.values():
            assert (job["frequency"], job["request_method"]) == ("HOURLY", "DELETE")
            if job["start_time"] // 3600 * 3600 <= now < job["end_time"]:
                self._destroy(int(job["api_endpoint"].split("/")[-2]))

    @route("GET", "/api/v0/users/current/")
    def user(self, request: Request) -> Reply:
        return Reply(
            200,
            {"id": 4711, "username": "jo", "email": "jo@example.org", "api_key": KEY, "credit": self.usd, "balance": 0},
        )


# ── machines that are hosts of the test bed ──────────────────────────────────────────────────────────────────────────


class HostedVast(FakeVast):
    """Containers that are hosts. Each can destroy itself with its own key."""

    def __init__(self, hosting: Hosting, address: str) -> None:
        self.address = address
        super().__init__()
        self._hosting = hosting

    def refuse(self, request: Request) -> Reply | None:
        own = re.fullmatch(r"/api/v0/instances/([0-9]+)/", request.path)
        if own and request.method == "DELETE" and request.headers.get("authorization") == f"Bearer key-of-{own[1]}":
            return None
        return super().refuse(request)

    def _contract(self, row: dict[str, Any], body: dict[str, Any]) -> int:
        contract = super()._contract(row, body)
        variables = {name: value for name, value in body["env"].items() if not name.startswith("-")}
        variables |= {"CONTAINER_ID": str(contract), "CONTAINER_API_KEY": f"key-of-{contract}"}
        self._hosting.rent(str(contract), lambda host: container(host, variables, [body["onstart"], *body["args"]]))
        return contract

    def _go_on(self) -> None:
        for contract, row in self.containers.items():
            if self._hosting.is_off(str(contract)) and row["actual_status"] == "running":
                self.halt(contract)
            elif self.steps[contract] < len(STEPS) and self._hosting.ip(str(contract)) is None:
                self.steps[contract] = min(self.steps[contract], len(STEPS) - 3)
        super()._go_on()
        for contract, row in self.containers.items():
            if row["ports"] is not None:
                row |= {
                    "public_ipaddr": self._hosting.ip(str(contract)),
                    "ports": {"22/tcp": [{"HostIp": "0.0.0.0", "HostPort": "22"}]},
                }

    def _destroy(self, contract: int) -> None:
        super()._destroy(contract)
        self._hosting.end(str(contract))

    def preempt(self, machine_id: str) -> None:
        super().preempt(machine_id)
        self._hosting.end(machine_id)


@contextmanager
def hosted(hosting: Hosting, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rented]:
    """Rent out hosts of the test bed."""
    with HostedVast(hosting, hosting.gateway) as fake:
        fake.sell(*(ask(number) for number in range(1, 9)))
        monkeypatch.setenv("VAST_API_KEY", KEY)
        monkeypatch.setenv("VAST_URL", fake.url)
        monkeypatch.setattr("skyward_core.providers.vastai.END", VAST_END.replace(VAST_URL, fake.url))
        yield Rented(sky.VastAI(), hosting, fake.alive, fake.preempt, (KEY,))
