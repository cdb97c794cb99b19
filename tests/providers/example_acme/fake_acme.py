"""Acme as a server on this machine, for the tests of its provider."""

from __future__ import annotations

import itertools
from typing import Any

from tests.providers.http_fake import FakeCloud, Reply, Request, route

TOKEN = "acme-0123456789abcdef"
PAGE = 20
LOOKS_UNTIL_ACTIVE = 2
TYPES = [
    {
        "type": "gpu.1",
        "region": "here",
        "cpus": 16,
        "memory_gb": 120,
        "gpu": "H100",
        "gpus": 1,
        "gpu_memory_gb": 80,
        "usd_per_hour": 2.5,
    },
    {
        "type": "gpu.1",
        "region": "there",
        "cpus": 16,
        "memory_gb": 120,
        "gpu": "H100",
        "gpus": 1,
        "gpu_memory_gb": 80,
        "usd_per_hour": 2.0,
    },
    {
        "type": "cpu.4",
        "region": "here",
        "cpus": 4,
        "memory_gb": 16,
        "gpu": None,
        "gpus": 0,
        "gpu_memory_gb": None,
        "usd_per_hour": 0.2,
    },
    {
        "type": "odd.1",
        "region": "here",
        "cpus": 4,
        "memory_gb": 16,
        "gpu": "Abacus",
        "gpus": 1,
        "gpu_memory_gb": 1,
        "usd_per_hour": 9.0,
    },
]


class FakeAcme(FakeCloud):
    """A machine is active after some reads."""

    creating, listing = ("POST", "/v1/machines"), ("GET", "/v1/machines")
    sold_out = Reply(409, {"code": "sold_out", "message": "not now"})
    over_limit = Reply(409, {"code": "limit_reached", "message": "not now"})
    too_many = Reply(429, {"code": "slow"})

    def __init__(self) -> None:
        super().__init__()
        self.machines: dict[str, dict[str, Any]] = {}
        self._numbers = itertools.count(0xA000)

    def alive(self) -> set[str]:
        return set(self.machines)

    def stop(self, machine_id: str) -> None:
        self.machines[machine_id].update(state="off")

    def preempt(self, machine_id: str) -> None:
        del self.machines[machine_id]

    def strangers(self) -> None:
        for number in range(25):
            self.add(name=f"theirs-{number}", type="cpu.4", region="here", labels={"skyward": "no"})

    def refuse(self, request: Request) -> Reply | None:
        if self.is_refusing or request.headers.get("authorization") != f"Bearer {TOKEN}":
            return Reply(
                401, {"code": "unauthorized", "message": f"not let in: {request.headers.get('authorization')}"}
            )
        return None

    @route("GET", "/v1/me")
    def me(self, request: Request) -> Reply:
        return Reply(200, {"email": "jo@example.org"})

    @route("GET", "/v1/types")
    def types(self, request: Request) -> Reply:
        return Reply(200, TYPES)

    @route("POST", "/v1/machines")
    def create(self, request: Request) -> Reply:
        if (failure := self.spend_create()) is not None:
            return failure
        return Reply(201, self.add(**request.body))

    @route("GET", "/v1/machines")
    def machines_page(self, request: Request) -> Reply:
        for machine in self.machines.values():
            machine["looks"] += 1
            if machine["state"] == "creating" and machine["looks"] > LOOKS_UNTIL_ACTIVE:
                machine |= {"state": "active", "ip": f"203.0.113.{machine['looks']}"}
        page = int(request.query["page"])
        rows = list(self.machines.values())
        return Reply(
            200,
            {"machines": rows[PAGE * (page - 1) : PAGE * page], "next": page + 1 if len(rows) > PAGE * page else None},
        )

    @route("DELETE", "/v1/machines/{id}")
    def delete(self, request: Request) -> Reply:
        known = self.machines.pop(request.words["id"], None)
        return Reply(204) if known else Reply(404, {"code": "not_found", "message": "no such machine"})

    def add(self, **order: Any) -> dict[str, Any]:
        """Create a machine."""
        price = next(
            row["usd_per_hour"] for row in TYPES if (row["type"], row["region"]) == (order["type"], order["region"])
        )
        machine = {
            "id": f"m-{next(self._numbers):x}",
            "state": "creating",
            "ip": None,
            "looks": 0,
            "usd_per_hour": price,
            "labels": {},
            **order,
        }
        self.machines[machine["id"]] = machine
        return machine
