"""The provider of the rental service (service.py): four methods over HTTP, on a real socket."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any, ClassVar

import httpx

from skyward_core.errors import NoCapacity
from skyward_core.machines.instances import Instance, InstanceState
from skyward_core.machines.offers import Offer, Requirements
from skyward_core.providers.base import LAUNCH_TAG, POOL_TAG, Provider, Tags

WIRE = "tests.kill.wire"
"""Referred to by name. A direct reference to the module would be pickled by value for the reaper, including the kill
points.
"""
STATES = {"running": InstanceState.RUNNING, "stopped": InstanceState.STOPPING, "terminated": InstanceState.GONE}
"""A stopped machine does not change its state and is billed. It is treated as one that is stopping, and is terminated
again.
"""


class HttpRental(Provider):
    """Rents machines of the service at `url`."""

    name: ClassVar[str] = "http-rental"
    end_command: ClassVar[str] = """exec bash -c 'exec 9<>"/dev/tcp/127.0.0.1/$RENTAL_PORT"
printf "POST /machines/%s/shutdown HTTP/1.1\\r\\n\\r\\n" "$SKYWARD_INSTANCE_ID" >&9; read -r -t 10 answer <&9'"""
    listing_lag_seconds: ClassVar[float] = 60.0

    url: str
    timeout_seconds: float = 10.0

    def offers(self, want: Requirements) -> list[Offer]:
        sold: list[dict[str, Any]] = self._ask("GET", "/offers")["offers"]
        return [offer for machine in sold for offer in self._both(machine)]

    def launch(self, offer: Offer, count: int, tags: Tags, startup: str) -> list[Instance]:
        requested = {"count": count, "type": offer.instance_type, "is_spot": offer.is_spot, "tags": dict(tags)}
        requested |= {"startup": startup, "token": tags[LAUNCH_TAG]}
        return [self._instance(machine) for machine in self._ask("POST", "/machines", requested)["machines"]]

    def instances(self, pool_id: str | None = None) -> list[Instance]:
        found: list[dict[str, Any]] = []
        page: int | None = 0
        with self._client() as client:
            while page is not None:
                query = {"page": str(page)} | ({"tag": f"{POOL_TAG}:{pool_id}"} if pool_id is not None else {})
                answer = self._body_of(client.get("/machines", params=query))
                found += answer["machines"]
                page = answer["next"]
        listed = [self._instance(machine) for machine in found if POOL_TAG in machine["tags"]]
        return [instance for instance in listed if instance.state is not InstanceState.GONE]

    def terminate(self, ids: Sequence[str]) -> None:
        if len(ids) == 1:
            with self._client() as client:
                answer = client.delete(f"/machines/{ids[0]}")
                # the service documents this as: it is gone or never existed
                if answer.status_code != HTTPStatus.NOT_FOUND:
                    self._body_of(answer)
        elif ids:
            query = httpx.QueryParams([("id", machine_id) for machine_id in ids])
            self._ask("DELETE", f"/machines?{query}")

    def _ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        with self._client() as client:
            return self._body_of(client.request(method, path, json=body))

    def _client(self) -> httpx.Client:
        return httpx.Client(
            base_url=self.url,
            timeout=self.timeout_seconds,
            transport=importlib.import_module(WIRE).transport(),
            trust_env=False,
        )

    def _body_of(self, answer: httpx.Response) -> Any:
        if answer.status_code == HTTPStatus.CONFLICT and answer.json().get("code") == "capacity":
            raise NoCapacity(f"{self.url}: {answer.json()['error']}")
        return answer.raise_for_status().json()

    def _both(self, machine: Mapping[str, Any]) -> list[Offer]:
        price = machine["price_per_hour"]
        kind = {"provider": self.name, "instance_type": machine["type"], "region": machine["region"]}
        on_demand = Offer(**kind, price_per_hour=price, vcpus=4, memory_gb=16)
        spot = {"is_spot": True, "price_per_hour": machine["spot_price_per_hour"], "on_demand_price_per_hour": price}
        return [on_demand, on_demand.model_copy(update=spot)]

    def _instance(self, machine: Mapping[str, Any]) -> Instance:
        price = machine["price_per_hour"]
        return Instance(
            id=machine["id"],
            provider=self.name,
            pool_id=machine["tags"].get(POOL_TAG, ""),
            state=STATES[machine["state"]],
            region="here-1",
            instance_type=machine["type"],
            price_per_hour=price,
            on_demand_price_per_hour=3 * price if machine["is_spot"] else price,
            **{name: machine[name] for name in ("rank", "is_spot", "tags", "directory")},
        )


class HttpRentalHere(HttpRental):
    """The same with machines that run the whole bootstrap as their startup script."""

    name: ClassVar[str] = "http-rental-here"
    is_local: ClassVar[bool] = True


class PromptRental(HttpRental):
    """The same, of a service that promises to list existing machines at once."""

    name: ClassVar[str] = "http-rental-prompt"
    listing_lag_seconds: ClassVar[float] = 0.0
