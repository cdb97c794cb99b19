"""A provider whose machines are files in a folder. Any process of this computer can launch, list and end them."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, ClassVar

from pydantic import SecretStr

from skyward_core import Instance
from skyward_core.cleanup.reaper import ReaperInput
from skyward_core.ledger.ledger import Ledger
from skyward_core.ledger.rows import PoolEntry
from skyward_core.machines.owner import Owner
from tests.cleanup import pools
from tests.ledger.fixtures import open_pool

SECRET = "ge-heim-4711"


class FolderProvider(pools.FolderProvider):
    """A provider of this computer. Listing fails while the file `is-down` exists."""

    is_local: ClassVar[bool] = True
    secret: SecretStr = SecretStr("")

    def instances(self, pool_id: str | None = None) -> list[Instance]:
        if (Path(self.folder) / "is-down").exists():
            raise ConnectionError("503 from the folder")
        return super().instances(pool_id)


_lock = threading.Lock()


class LockingProvider(FolderProvider):
    """Uses a lock of its module, so that its class cannot travel by value."""

    name: ClassVar[str] = "locking"

    def terminate(self, ids: Sequence[str]) -> None:
        with _lock:
            super().terminate(ids)


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
            open_pool(
                ledger, self.pool_id, Owner.here(), provider=self.provider.to_json(), lease_expires_at=in_an_hour()
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
        return (self.folder / "log").stat().st_mtime

    def is_ended(self) -> bool:
        return not self.living() and self.entry().ended_at is not None


def in_an_hour() -> datetime:
    return datetime.now(UTC) + timedelta(hours=1)
