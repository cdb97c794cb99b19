"""A fake DigitalOcean, after the fact sheet of 2026-11-20, section 2, and DigitalOcean's OpenAPI description.

Sizes are those of gpuhunt (src/tests/providers/test_digitalocean.py) and of the fact sheet. Each read changes the state
of a new droplet: new without address and tags, new with both, active.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

import skyward_core as sky
from tests.providers.hosted import Hosting, Rented, cloud_init
from tests.providers.http_fake import FakeCloud, Reply, Request, route

TOKEN = "dop_v1_4f6c0ffee4f6c0ffee4f6c0ffee4f6c0ffee"
TEAM = "5df3e3004a17e242b7c20ca6c9fc25b701a47ece"
REGIONS = ("ams3", "atl1", "mem1", "nyc1", "nyc2", "ric1", "tor1")
IMAGES = ("ubuntu-24-04-x64", "gpu-h100x1-base", "gpu-h100x8-base", "gpu-amd-base", 42)
FIELDS = frozenset({"name", "names", "region", "size", "image", "ssh_keys", "tags", "user_data", "vpc_uuid"})


def size(
    slug: str,
    memory: int,
    vcpus: int,
    price: float | None,
    regions: Sequence[str],
    gpus: tuple[int, str, int] | None = None,
    **more: Any,
) -> dict[str, Any]:
    """Return a row of /v2/sizes; `gpus` are count, model, and the memory of all of them."""
    row = {
        "slug": slug,
        "memory": memory,
        "vcpus": vcpus,
        "disk": 80,
        "transfer": 5.0,
        "price_hourly": price,
        "price_monthly": (price or 0) * 672,
    }
    row |= {
        "regions": list(regions),
        "available": True,
        "description": "",
        "disk_info": [{"type": "local", "size": {"amount": 80, "unit": "gib"}}],
    }
    if gpus is not None:
        row["gpu_info"] = {"count": gpus[0], "model": gpus[1], "vram": {"amount": gpus[2], "unit": "gib"}}
    return row | more


SIZES = (
    size("s-1vcpu-512mb-10gb", 512, 1, 0.00595, ["ams3", "nyc1", "nyc2"]),
    size("s-2vcpu-4gb", 4096, 2, 0.03571, ["ams3", "nyc1", "tor1"]),
    size("c-8", 16384, 8, 0.25, ["nyc1"]),
    size("s-8vcpu-retired", 16384, 8, 0.2, ["nyc1"], available=False),
    size("s-priceless", 16384, 8, None, ["nyc1"]),
    size("gpu-4000adax1-20gb", 32768, 8, 0.76, ["nyc1", "tor1"], (1, "nvidia_rtx4000_ada", 20)),
    size("gpu-6000adax1-48gb", 65536, 8, 1.57, ["tor1"], (1, "nvidia_rtx6000_ada", 48)),
    size("gpu-l40sx1-48gb", 65536, 8, 1.57, ["tor1"], (1, "nvidia_l40s", 48)),
    size("gpu-h100x1-80gb", 245760, 20, 4.41, ["nyc1", "tor1"], (1, "nvidia_h100", 80)),
    size("gpu-h100x8-640gb", 1966080, 160, 35.28, ["nyc1"], (8, "nvidia_h100", 640)),
    size("gpu-h200x1-141gb", 245760, 24, 4.47, [], (1, "nvidia_h200", 141)),
    size("gpu-mi300x8-1536gb", 1966080, 160, 20.72, ["nyc1"], (8, "amd_mi300x", 1536)),
    size("gpu-mi350x1-288gb", 262144, 24, 5.75, [], (1, "amd_mi350x", 288)),
    size("gpu-mi350x1-288gb-spot", 262144, 24, 2.46, ["ric1"], (1, "amd_mi350x", 288)),
    size("gpu-mi355x8-2304gb", 1966080, 160, 52.0, ["mem1"], (8, "amd_mi355x", 2304)),
    size("gpu-mi355x8-2304gb-spot", 1966080, 160, 23.76, ["mem1"], (8, "amd_mi355x", 2304)),
    size("gpu-quantumx1", 65536, 8, 9.99, ["nyc1"], (1, "acme_quantum_9000", 512)),
)


def refusal(status: int, code: str, message: str, headers: dict[str, str] | None = None, **more: Any) -> Reply:
    """Return an error in the API's format."""
    return Reply(
        status,
        {"id": code, "message": message, "request_id": "4d9d8375-3c56-4925-a3e7-eb137fed17e9", **more},
        headers or {},
    )


def unprocessable(message: str, **more: Any) -> Reply:
    """Return the error that the API uses for capacity, quota and validation."""
    return refusal(422, "unprocessable_entity", message, **more)


SOLD_OUT = unprocessable("Size is not available in this region.")
OVER_LIMIT = unprocessable("creating this/these droplet(s) will exceed your droplet limit")
OVER_GPU_LIMIT = unprocessable("creating this/these droplet(s) will exceed your GPU limit")
"""A new account may have no GPU (reported on 2026-08-16 for gpu-rtx4000 in tor1, `droplet_limit` was not reached)."""
OUTAGE = refusal(500, "server_error", "Unexpected server-side error")
TOO_MANY = refusal(429, "too_many_requests", "API rate limit exceeded.")


@dataclass(slots=True)
class Droplet:
    """A machine. `looks` is the number of reads since its creation."""

    id: int
    order: dict[str, Any]
    name: str
    size: dict[str, Any]
    slow: int = 1
    """Number of reads until address and tags appear."""
    hidden: int = 0
    """Number of listings that omit the droplet."""
    is_errored: bool = False
    status: str | None = None
    """A status that overrides the one of its reads."""
    looks: int = 0
    ip: str | None = None
    """The address of its host, "" while the host starts."""

    def row(self) -> dict[str, Any]:
        """Return it in the API's format."""
        is_up = self.looks > self.slow and not self.is_errored and self.ip != ""
        place = f"{self.id >> 8 & 255}.{self.id & 255}"
        networks = [
            {"ip_address": self.ip or f"10.116.{place}", "netmask": "255.255.240.0", "gateway": "", "type": "private"},
            {
                "ip_address": self.ip or f"198.51.{place}",
                "netmask": "255.255.240.0",
                "gateway": "198.51.100.1",
                "type": "public",
            },
        ]
        return {
            "id": self.id,
            "name": self.name,
            "memory": self.size["memory"],
            "vcpus": self.size["vcpus"],
            "disk": self.size["disk"],
            "locked": False,
            "status": self.status or ("active" if is_up and self.looks > self.slow + 1 else "new"),
            "created_at": "2026-11-21T12:00:00Z",
            "image": {"id": 1, "slug": self.order["image"]},
            "volume_ids": [],
            "size": {key: value for key, value in self.size.items() if key != "gpu_info"},
            "size_slug": self.size["slug"],
            "gpu_info": self.size.get("gpu_info"),
            "networks": {"v4": networks if is_up else [], "v6": []},
            "region": {"slug": self.order["region"], "available": True},
            "tags": self.order["tags"] if is_up else [],
            "vpc_uuid": self.order.get("vpc_uuid", "default"),
        }


class FakeDigitalOcean(FakeCloud):
    """`droplets` are all billed ones; `mails` are the root passwords that were sent.

    New droplets get address and tags after `slow` reads, and `hidden` listings omit them; the next `errored` of them
    fail after a read. A call for more than `stock` droplets, or for more GPU droplets than `gpu_limit`, is refused as a
    whole. While the listing is `shrinking`, a
    droplet of its first page is deleted after that page was read.
    """

    cloud = "digitalocean"
    creating, listing = ("POST", "/v2/droplets"), ("GET", "/v2/droplets")
    sold_out, over_limit, too_many, outage = SOLD_OUT, OVER_LIMIT, TOO_MANY, OUTAGE

    def __init__(self) -> None:
        super().__init__()
        self.slow, self.hidden, self.errored, self.shrinking = 1, 0, 0, 0
        self.stock: int | None = None
        self.gpu_limit: int | None = None
        self.closed_paths: set[str] = set()
        self.sizes = list(SIZES)
        self.droplets: dict[int, Droplet] = {}
        self.keys: dict[str, str] = {}
        self.mails: list[str] = []
        self._next = 420_001_001
        self._left = 5000

    def alive(self) -> set[str]:
        """Return the ids of all billed machines."""
        return {str(machine_id) for machine_id in list(self.droplets)}

    def stop(self, machine_id: str) -> None:
        """Power a droplet off. It exists and is billed."""
        self.droplets[int(machine_id)].status = "off"

    def preempt(self, machine_id: str) -> None:
        """Preempt a spot droplet: it is destroyed, and no listing has it."""
        with self.lock:
            del self.droplets[int(machine_id)]

    def strangers(self) -> None:
        """Add more than a page of droplets of each kind, with names and tags that resemble ours."""
        pool = "sky-contract-a1b2c3"
        looks = [
            ("web", ["skyward-demo"]),
            (f"{pool}x-0-l0a1b2c3", []),
            (f"x-{pool}-0-l0a1b2c3", []),
            (pool, ["skyward"]),
            ("worker-0-l0a1b2c3", [f"skyward-pool:{pool}", "skyward:1-2:skyward-pool"]),
            (f"{pool}-0-l0a1b2c3-clone", [f"skyward:1-9:skyward-pool:{pool}"]),
        ]
        for index in range(208):
            name, its = looks[index % len(looks)]
            for kind in (SIZES[0], SIZES[5]):
                self.add(name, kind, {"region": "nyc1", "image": 42, "tags": its}).looks = 9

    def refuse(self, request: Request) -> Reply | None:
        """Refuse requests without the token, and those for which it has no scope."""
        if self.is_refusing or request.headers.get("authorization") != f"Bearer {TOKEN}":
            return refusal(401, "unauthorized", "Unable to authenticate you")
        if request.path in self.closed_paths:
            return refusal(403, "forbidden", "You are not authorized to perform this operation")
        return None

    def _reply(self, request: Request) -> Reply:
        reply = super()._reply(request)
        self._left -= 1
        limits = {"ratelimit-limit": "5000", "ratelimit-remaining": str(self._left), "ratelimit-reset": "1790003600"}
        return Reply(reply.status, reply.body, {**limits, **reply.headers}, reply.is_text)

    # ── account, sizes, keys ─────────────────────────────────────────────────────────────────────────────────────────

    @route("GET", "/v2/account")
    def account(self, request: Request) -> Reply:
        return Reply(
            200,
            {
                "account": {
                    "droplet_limit": 25,
                    "email": "jo@example.org",
                    "uuid": "b6fr89dbf6d9156c",
                    "status": "active",
                    "team": {"uuid": TEAM, "name": "My Team"},
                }
            },
        )

    @route("GET", "/v2/sizes")
    def list_sizes(self, request: Request) -> Reply:
        return self._paged(request, "sizes", self.sizes)

    @route("GET", "/v2/images/{slug}")
    def image(self, request: Request) -> Reply:
        if request.words["slug"] not in IMAGES:
            return refusal(404, "not_found", "The resource you were accessing could not be found.")
        return Reply(200, {"image": {"slug": request.words["slug"], "status": "available"}})

    @route("GET", "/v2/(regions|images|vpcs|actions|tags)")
    def list_others(self, request: Request) -> Reply:
        return self._paged(request, request.path.removeprefix("/v2/"), [])

    @route("GET", "/v2/account/keys")
    def list_keys(self, request: Request) -> Reply:
        return refusal(
            429, "too_many_requests", "Too many requests: keys may be listed ten times a minute", {"retry-after": "60"}
        )

    @route("POST", "/v2/account/keys")
    def add_key(self, request: Request) -> Reply:
        words = str(request.body.get("public_key", "")).split()
        if len(words) < 2 or not request.body.get("name"):
            return unprocessable("Key invalid, key should be of the format `type key [comment]`")
        fingerprint = hashlib.md5(base64.b64decode(words[1])).hexdigest()
        fingerprint = ":".join(fingerprint[index : index + 2] for index in range(0, 32, 2))
        if fingerprint in self.keys:
            return unprocessable("SSH Key is already in use on your account")
        self.keys[fingerprint] = " ".join(words[:2])
        return Reply(
            201,
            {
                "ssh_key": {
                    "id": len(self.keys),
                    "fingerprint": fingerprint,
                    "public_key": self.keys[fingerprint],
                    "name": request.body["name"],
                }
            },
        )

    # ── droplets ─────────────────────────────────────────────────────────────────────────────────────────────────────

    @route("GET", "/v2/droplets")
    def list_droplets(self, request: Request) -> Reply:
        if request.query.get("type") not in (None, "gpus", "droplets") or {"type", "tag_name"} <= request.query.keys():
            return unprocessable("type is invalid, or cannot be combined with tag_name")
        is_gpu = request.query.get("type") == "gpus"
        listed = []
        for droplet in list(self.droplets.values()):
            if ("gpu_info" in droplet.size) == is_gpu:
                droplet.looks += 1
                if droplet.looks > droplet.hidden:
                    listed.append(droplet.row())
        return self._paged(
            request, "droplets", [row for row in listed if request.query.get("tag_name") in (None, *row["tags"])]
        )

    @route("POST", "/v2/droplets")
    def create(self, request: Request) -> Reply:
        names = request.body.get("names") or [request.body.get("name")]
        found = {row["slug"]: row for row in self.sizes}.get(request.body.get("size"))
        if problem := self._problem(request.body, names, found):
            return problem
        if not request.body["ssh_keys"]:
            self.mails.append("jo@example.org")
        created = []
        for name in names:
            if (failure := self.spend_create()) is not None:
                return failure
            if self.stock is not None:
                self.stock -= 1
            created.append(self.add(name, found, request.body))
        rows = [droplet.row() for droplet in created]
        actions = [
            {"id": droplet.id + 10**9, "rel": "create" if "name" in request.body else "multiple_create", "href": ""}
            for droplet in created
        ]
        return Reply(
            202,
            {**({"droplet": rows[0]} if "name" in request.body else {"droplets": rows}), "links": {"actions": actions}},
        )

    def _problem(self, body: dict[str, Any], names: list[str], found: dict[str, Any] | None) -> Reply | None:
        if unknown := body.keys() - FIELDS:
            return unprocessable(f"unknown fields: {unknown}")
        if ("name" in body) == ("names" in body) or not 1 <= len(names) <= 10:
            return unprocessable("name or names, and up to ten of them")
        if not all(re.fullmatch(r"[A-Za-z0-9.-]+", name or "") for name in names):
            return unprocessable("Only valid hostname characters are allowed. (a-z, A-Z, 0-9, . and -)")
        if body.get("region") not in REGIONS:
            return unprocessable("You specified an invalid region for Droplet creation.")
        if found is None:
            return unprocessable("You specified an invalid size for Droplet creation.")
        if not found["available"]:
            return unprocessable("This size is unavailable")
        if self.stock is not None and len(names) > self.stock:
            return SOLD_OUT
        if self.gpu_limit is not None and "gpu_info" in found:
            present = sum("gpu_info" in droplet.size for droplet in self.droplets.values())
            if present + len(names) > self.gpu_limit:
                return OVER_GPU_LIMIT
        if body["region"] not in found["regions"]:
            return SOLD_OUT
        if body.get("image") not in IMAGES:
            return unprocessable("You specified an invalid image for Droplet creation.")
        if not all(re.fullmatch(r"[a-zA-Z0-9_\-:]{1,255}", tag) for tag in body.get("tags") or ()):
            return unprocessable("Tag names may have letters, numbers, colons, dashes and underscores, and 255 of them")
        if len(body.get("user_data") or "") > 65536:
            return unprocessable("User data is too long (maximum is 64 KiB)")
        keys = {*self.keys, *range(1, len(self.keys) + 1)}  # by fingerprint, or by id
        if missing := [key for key in body.get("ssh_keys") or () if key not in keys]:
            return unprocessable(f"{missing[0]} are invalid key identifiers for Droplet creation.")
        return None

    def add(self, name: str, found: dict[str, Any] | None, order: dict[str, Any]) -> Droplet:
        """Create a droplet."""
        assert found is not None
        self._next += 7
        droplet = Droplet(
            self._next,
            {**order, "tags": list(order.get("tags") or ())},
            name,
            found,
            slow=self.slow,
            hidden=self.hidden,
        )
        if self.errored:
            self.errored -= 1
            droplet.is_errored = True
        self.droplets[droplet.id] = droplet
        return droplet

    @route("GET", "/v2/droplets/{id}/actions")
    def actions(self, request: Request) -> Reply:
        droplet = self.droplets.get(int(request.words["id"]))
        if droplet is None:
            return refusal(404, "not_found", "The resource you were accessing could not be found.")
        status = (
            "errored"
            if droplet.is_errored and droplet.looks > 1
            else "completed"
            if droplet.looks > droplet.slow + 1
            else "in-progress"
        )
        kind = {
            "id": droplet.id + 10**9,
            "type": "create",
            "resource_id": droplet.id,
            "resource_type": "droplet",
            "region_slug": droplet.order["region"],
        }
        return self._paged(request, "actions", [{**kind, "status": status}])

    @route("DELETE", "/v2/droplets/{id}")
    def destroy(self, request: Request) -> Reply:
        if self.droplets.pop(int(request.words["id"]), None) is None:
            return refusal(404, "not_found", "The resource you were accessing could not be found.")
        return Reply(204)

    def _paged(self, request: Request, kind: str, rows: list[dict[str, Any]]) -> Reply:
        """Return a page: 20 rows by default, 200 at most."""
        count, page = int(request.query.get("per_page", 20)), int(request.query.get("page", 1))
        if not 1 <= count <= 200:
            return refusal(400, "bad_request", "per_page must be between 1 and 200")
        shown = rows[(page - 1) * count : page * count]
        total = len(rows)
        links = (
            {"next": f"{self.url}{request.path}?page={page + 1}&per_page={count}"} if page * count < len(rows) else {}
        )
        if kind == "droplets" and links and page == 1 and self.shrinking:
            self.shrinking -= 1
            del self.droplets[shown[0]["id"]]
        return Reply(200, {kind: shown, "links": {"pages": links} if links else {}, "meta": {"total": total}})


def boot_of(order: dict[str, Any]) -> str:
    """Return the boot script in a droplet's user data."""
    head, _, text = order["user_data"].partition("\n")
    assert head == "#cloud-config"
    return json.loads(text)["runcmd"][0][2]


# ── machines that are hosts of the test bed ──────────────────────────────────────────────────────────────────────────


class HostedDigitalOcean(FakeDigitalOcean):
    """Droplets that are hosts."""

    def __init__(self, hosting: Hosting) -> None:
        super().__init__()
        self._hosting = hosting

    def add(self, name: str, found: dict[str, Any] | None, order: dict[str, Any]) -> Droplet:
        droplet = super().add(name, found, order)
        droplet.ip = ""
        self._hosting.rent(str(droplet.id), lambda host: cloud_init(host, str(droplet.id), order["user_data"]))
        return droplet

    def _reply(self, request: Any) -> Any:
        for droplet in self.droplets.values():
            droplet.ip = self._hosting.ip(str(droplet.id)) or ""
            droplet.status = "off" if self._hosting.is_off(str(droplet.id)) else None
        before = set(self.droplets)
        reply = super()._reply(request)
        for machine_id in before - set(self.droplets):
            self._hosting.end(str(machine_id))
        return reply

    def preempt(self, machine_id: str) -> None:
        super().preempt(machine_id)
        self._hosting.end(machine_id)


@contextmanager
def hosted(hosting: Hosting, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rented]:
    """Rent out hosts of the test bed."""
    with HostedDigitalOcean(hosting) as fake:
        monkeypatch.setenv("DIGITALOCEAN_TOKEN", TOKEN)
        yield Rented(
            sky.DigitalOcean(endpoint_url=fake.url),
            hosting,
            fake.alive,
            fake.preempt,
            (TOKEN,),
        )
