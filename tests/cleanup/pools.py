"""A ledger and providers with pools whose owners are dead or alive, for the tests of this folder."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, ClassVar

import pytest

from skyward_core import Instance, InstanceState, Offer, Provider
from skyward_core.cleanup.release import end_pool
from skyward_core.cleanup.sweep import sweep
from skyward_core.errors import LedgerError
from skyward_core.ledger.ledger import Ledger
from skyward_core.ledger.rows import Intent, PoolEntry, Price, ResourceKind, ResourceRequest
from skyward_core.machines.owner import Owner, OwnerState
from skyward_core.providers import base
from skyward_core.providers.base import CREATED_TAG, LAUNCH_TAG, OWNER_TAG, POOL_TAG, PROCESS_TAG, RANK_TAG
from tests.fakes import FakeProvider
from tests.ledger.fixtures import open_pool

ROOT = Path(__file__).parents[2]
START = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)
HERE = Owner.here()
DEAD, STOPPED = replace(HERE, started="1"), replace(HERE, started="2")
ELSEWHERE = replace(HERE, host="elsewhere", boot="another")
STATES = {
    HERE: OwnerState.ALIVE,
    STOPPED: OwnerState.STOPPED,
    DEAD: OwnerState.DEAD,
    ELSEWHERE: OwnerState.UNKNOWN,
}


class Time:
    """A clock that a test sets; a pause advances it."""

    def __init__(self) -> None:
        self.now = START
        self.paused = 0.0

    def __call__(self) -> datetime:
        return self.now

    def monotonic(self) -> float:
        return self.now.timestamp()

    def pause(self, seconds: float) -> None:
        self.paused += seconds
        self.go(seconds)

    def go(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)

    @property
    def keywords(self) -> dict[str, Any]:
        return {"clock": self, "monotonic": self.monotonic, "pause": self.pause}


class CloudProvider(FakeProvider):
    """A cloud."""

    name: ClassVar[str] = "cloud"
    is_local: ClassVar[bool] = False


class SelfEndingProvider(CloudProvider):
    """A cloud whose machines end themselves permanently, which bills the minute in which they end."""

    name: ClassVar[str] = "self-ending"

    def ends_for_good(self) -> bool:
        return True


class LaggingProvider(CloudProvider):
    """A cloud that lists a machine only one minute after its creation, by the clock that it receives."""

    name: ClassVar[str] = "lagging"
    listing_lag_seconds: ClassVar[float] = 60.0
    made: ClassVar[dict[str, datetime]] = {}
    clock: ClassVar[Callable[[], datetime]]

    def _start(self, offer: Offer, pool_id: str, rank: int, tags: Mapping[str, str] | None = None) -> Instance:
        instance = super()._start(offer, pool_id, rank, tags)
        self.made[instance.id] = type(self).clock()
        return instance

    def instances(self, pool_id: str | None = None) -> list[Instance]:
        now = type(self).clock()
        return [
            instance for instance in super().instances(pool_id) if self.made[instance.id] + timedelta(seconds=60) <= now
        ]


class FolderProvider(Provider):
    """Machines are files in a folder, which any process may list. `log` has a line for each termination."""

    name: ClassVar[str] = "folder"
    folder: str

    def launch(self, offer: Offer | None, count: int, tags: Mapping[str, str], startup: str = "") -> list[Instance]:
        first = int(tags[RANK_TAG])
        return [self._start({**tags, RANK_TAG: str(rank)}) for rank in range(first, first + count)]

    def instances(self, pool_id: str | None = None) -> list[Instance]:
        found = []
        for path in sorted(Path(self.folder).glob("*.json")):
            try:
                found.append(self._instance(path.stem, json.loads(path.read_text())))
            except FileNotFoundError:
                pass  # another sweep was faster
        return [instance for instance in found if pool_id in (None, instance.pool_id)]

    def terminate(self, ids: Sequence[str]) -> None:
        with (Path(self.folder) / "log").open("a") as log:
            for instance_id in ids:
                log.write(f"{instance_id}\n")
                (Path(self.folder) / f"{instance_id}.json").unlink(missing_ok=True)

    def _start(self, tags: dict[str, str]) -> Instance:
        instance_id = f"{tags[POOL_TAG]}.{tags[RANK_TAG]}.{os.urandom(3).hex()}"
        path = Path(self.folder) / f"{instance_id}.json"
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(tags))
        partial.rename(path)
        return self._instance(instance_id, tags)

    def _instance(self, instance_id: str, tags: dict[str, str]) -> Instance:
        return machine(instance_id, tags[POOL_TAG], int(tags[RANK_TAG]), tags, provider=self.name)


def install_folder_provider(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the provider known by its name, as another distribution does by an entry point."""
    point = EntryPoint("folder", "tests.cleanup.pools:FolderProvider", base.ENTRY_POINTS)
    monkeypatch.setattr(base, "_entry_points", lambda _: {"folder": point})


def machine(
    instance_id: str, pool_id: str, rank: int = 0, tags: Mapping[str, str] | None = None, provider: str = "fake"
) -> Instance:
    return Instance(
        id=instance_id,
        provider=provider,
        pool_id=pool_id,
        rank=rank,
        state=InstanceState.RUNNING,
        region="nowhere-1",
        instance_type="fake.1",
        price_per_hour=36.0,
        tags={POOL_TAG: pool_id, RANK_TAG: str(rank), **(tags or {})},
    )


def owner_tags(owner: Owner, created: datetime = START, **more: str) -> dict[str, str]:
    return {OWNER_TAG: owner.name, PROCESS_TAG: owner.process, CREATED_TAG: str(int(created.timestamp())), **more}


class World:
    """A ledger, a provider, and pools whose owners died at different lines of their work."""

    def __init__(self, ledger: Ledger, provider: Provider, hands: Time) -> None:
        self.ledger, self.provider, self.hands = ledger, provider, hands

    def pool(
        self, pool_id: str = "sky-1", owner: Owner = DEAD, lease_seconds: float = 120, account: str | None = None
    ) -> str:
        expires = self.hands.now + timedelta(seconds=lease_seconds)
        provider = self.provider.to_json()
        open_pool(self.ledger, pool_id, owner, provider=provider, lease_expires_at=expires, account=account)
        return pool_id

    def intend(self, pool_id: str, nodes: int = 1, first: int = 0, owner: Owner = DEAD) -> list[Intent]:
        return self.ledger.intend_all(
            pool_id, [self.resource_request(pool_id, rank, first, owner) for rank in range(first, first + nodes)]
        )

    def resource_request(self, pool_id: str, rank: int, first: int = 0, owner: Owner = DEAD) -> ResourceRequest:
        return ResourceRequest(
            kind=ResourceKind.INSTANCE,
            provider=self.provider.name,
            region="nowhere-1",
            name=f"{pool_id}-{rank}",
            token=f"{pool_id}-launch{first}-{rank}",
            tags={**self.tags(pool_id, first, owner), RANK_TAG: str(rank)},
            expires_at=self.hands.now + timedelta(hours=1),
            price=Price(Decimal(36)),
        )

    def tags(self, pool_id: str, first: int = 0, owner: Owner = DEAD) -> dict[str, str]:
        return {
            POOL_TAG: pool_id,
            RANK_TAG: str(first),
            LAUNCH_TAG: f"{pool_id}-launch{first}",
            **owner_tags(owner, self.hands.now),
        }

    def launch(self, pool_id: str, nodes: int = 1, first: int = 0, owner: Owner = DEAD) -> list[Instance]:
        return self.provider.launch(self.offer(), nodes, self.tags(pool_id, first, owner), "")

    def offer(self) -> Offer:
        return Offer(
            provider=self.provider.name,
            instance_type="fake.1",
            region="nowhere-1",
            price_per_hour=36.0,
            vcpus=4,
            memory_gb=16,
        )

    def rent(self, pool_id: str, nodes: int = 1, first: int = 0, owner: Owner = DEAD) -> list[Instance]:
        intents = self.intend(pool_id, nodes, first, owner)
        instances = self.launch(pool_id, nodes, first, owner)
        self.ledger.bind_all({intent.id: instance.id for intent, instance in zip(intents, instances, strict=True)})
        return instances

    def end(self, pool_id: str = "sky-1", why: str = "its owner is dead") -> None:
        end_pool(self.ledger, self.provider, pool_id, why=why, **self.hands.keywords)

    def sweep(self, *, is_dry_run: bool = False, **how: Any) -> Any:
        return sweep(self.ledger, [self.provider], is_dry_run=is_dry_run, **{**self.hands.keywords, **how})

    def ids(self) -> set[str]:
        return {instance.id for instance in self.provider.instances()}


def of_kind(kind: type[FakeProvider], ledger: Ledger, tmp_path: Path, hands: Time, **fields: Any) -> World:
    return World(ledger, kind(folder=str(tmp_path), **fields), hands)


def life(its: Intent, now: datetime) -> float:
    return ((its.gone_at or now) - its.intended_at).total_seconds()


def entry(pool_id: str = "sky-1", owner: Owner = DEAD, lease_seconds: float = 100, **fields: Any) -> PoolEntry:
    opened, expires = START - timedelta(hours=1), START + timedelta(seconds=lease_seconds)
    return PoolEntry(pool_id, owner, {"name": "cloud"}, "{}", opened, expires, **fields)


def intent(
    number: int,
    pool_id: str = "sky-1",
    rank: int = 0,
    cloud_id: str | None = None,
    age_seconds: float = 1000,
    **fields: Any,
) -> Intent:
    intended = START - timedelta(seconds=age_seconds)
    defaults: dict[str, Any] = {
        "id": number,
        "pool_id": pool_id,
        "kind": ResourceKind.INSTANCE,
        "provider": "cloud",
        "region": "nowhere-1",
        "name": f"{pool_id}-{rank}",
        "token": f"t{number}",
        "tags": {POOL_TAG: pool_id, RANK_TAG: str(rank), LAUNCH_TAG: f"{pool_id}-1"},
        "price": Price(),
        "intended_at": intended,
        "expires_at": START,
        "cloud_id": cloud_id,
        "bound_at": None if cloud_id is None else intended,
        "end_asked_at": None,
        "gone_at": None,
        "evidence": None,
        "seconds": {},
    }
    return Intent(**(defaults | fields))


CLOUD = CloudProvider(folder="/nowhere")


class FailingLedger:
    """A ledger whose methods fail from the named one on; its pools' machines must still end."""

    def __init__(self, ledger: Ledger, fails: Sequence[str], times: int = 1_000_000) -> None:
        self._ledger, self._fails, self._times = ledger, fails, times

    def __getattr__(self, name: str) -> Any:
        verb = getattr(self._ledger, name)

        def failing(*args: Any, **keywords: Any) -> Any:
            if name in self._fails and self._times > 0:
                self._times -= 1
                raise LedgerError("the disk is full")
            return verb(*args, **keywords)

        return failing
