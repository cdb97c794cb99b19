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
    """`refusal` answers creating calls. After `creates_left` machines they fail.

    A machine is active after some reads.
    """

    def __init__(self) -> None:
        self.machines: dict[str, dict[str, Any]] = {}
        self.refusal: Reply | None = None
        self.creates_left: int | None = None
        self.is_out = self.is_refusing = False
        self._numbers = itertools.count(0xA000)
        super().__init__()

    def refuse(self, request: Request) -> Reply | None:
        if self.is_out:
            return Reply(503, {"code": "down", "message": "try later"})
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
        if self.refusal is not None:
            return self.refusal
        if self.creates_left == 0:
            return Reply(500, {"code": "oops", "message": "something went wrong"})
        self.creates_left = None if self.creates_left is None else self.creates_left - 1
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
