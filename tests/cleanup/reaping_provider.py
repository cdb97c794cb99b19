"""A provider whose machines are files in a folder. Any process of this computer can launch, list and end them."""

import json
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, ClassVar

from pydantic import SecretStr

from skyward_core import Instance, InstanceState, Offer, Provider
from skyward_core.cleanup.reaper import ReaperInput
from skyward_core.ledger.ledger import Ledger
from skyward_core.ledger.rows import PoolEntry
from skyward_core.machines.owner import Owner

SECRET = "ge-heim-4711"


class FolderProvider(Provider):
    """A provider that creates a file for each machine."""

    name: ClassVar[str] = "folder"
    is_here: ClassVar[bool] = True

    folder: str
    secret: SecretStr = SecretStr("")

    def launch(self, offer: Offer | None, count: int, tags: Mapping[str, str], startup: str = "") -> list[Instance]:
        for rank in range(count):
            fields = {
                "id": f"{tags['skyward-pool']}-{rank}",
                "pool_id": tags["skyward-pool"],
                "rank": rank,
                "tags": dict(tags),
            }
            written = self._folder / f"{fields['id']}.new"
            written.write_text(json.dumps(fields))
            written.rename(written.with_suffix(".json"))  # atomic: a reader sees the whole file or none
        return self.instances(tags["skyward-pool"])

    def instances(self, pool_id: str | None = None) -> list[Instance]:
        if (self._folder / "is-down").exists():
            raise ConnectionError("503 from the folder")
        found = [instance for file in sorted(self._folder.glob("*.json")) for instance in _read(file)]
        return [instance for instance in found if pool_id in (None, instance.pool_id)]

    def terminate(self, ids: Sequence[str]) -> None:
        for instance_id in ids:
            with (self._folder / "ended").open("a") as log:
                log.write(f"{time.time()} {instance_id}\n")
            (self._folder / f"{instance_id}.json").unlink(missing_ok=True)

    @property
    def _folder(self) -> Path:
        return Path(self.folder)


_lock = threading.Lock()


class LockingProvider(FolderProvider):
    """Uses a lock of its module, so that its class cannot travel by value."""

    name: ClassVar[str] = "locking"

    def terminate(self, ids: Sequence[str]) -> None:
        with _lock:
            super().terminate(ids)


def _read(file: Path) -> list[Instance]:
    """The machine of a file, or none if it has just ended."""
    try:
        fields = json.loads(file.read_text())
    except FileNotFoundError:
        return []
    return [
        Instance(
            **fields,
            provider="folder",
            state=InstanceState.RUNNING,
            region="here",
            instance_type="file",
            price_per_hour=1.0,
        )
    ]


@dataclass(frozen=True)
class Pool:
    """A pool that is recorded in a ledger and has launched two machines."""

    folder: Path
    pool_id: str = "sky-p"
    provider: FolderProvider = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "provider", FolderProvider(folder=str(self.folder), secret=SECRET))

    @classmethod
    def at(cls, folder: str) -> "Pool":
        return cls(Path(folder))

    @property
    def url(self) -> str:
        return f"sqlite:///{self.folder}/ledger.db"

    def open(self) -> None:
        with Ledger(self.url) as ledger:
            ledger.open_pool(
                self.pool_id,
                owner=Owner.here(),
                provider=self.provider.to_json(),
                spec_json="{}",
                lease_expires_at=in_an_hour(),
            )

    def launch(self, count: int = 2) -> None:
        self.provider.launch(None, count, {"skyward-pool": self.pool_id, "skyward-rank": "0"})

    def reaper_input(self, **changes: Any) -> ReaperInput:
        return replace(ReaperInput.of([self.provider], self.pool_id, self.url), **changes)

    def entry(self) -> PoolEntry:
        with Ledger(self.url) as ledger:
            entry = ledger.pool(self.pool_id)
        assert entry is not None
        return entry

    def living(self) -> list[str]:
        return [instance.id for instance in self.provider.instances()]

    def first_end(self) -> float:
        return float((self.folder / "ended").read_text().split()[0])

    def is_ended(self) -> bool:
        return not self.living() and self.entry().ended_at is not None


def in_an_hour() -> datetime:
    return datetime.now(UTC) + timedelta(hours=1)
