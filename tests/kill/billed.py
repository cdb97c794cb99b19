"""A provider whose nodes are real processes of this machine, each with a file as its bill."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from skyward_core import Instance, Local, Offer

LAUNCH_HANGS, ANSWER_HANGS, LISTING_HANGS, TERMINATE_HANGS = (
    "launch-hangs",
    "answer-hangs",
    "listing-hangs",
    "terminate-hangs",
)
"""A launch that hangs before it creates anything, one that hangs after, a listing and a termination that never return.
"""
IS_DOWN = "is-down"


class Billed(Local):
    """Local nodes that are billed until they are terminated. `folder` must exist."""

    name: ClassVar[str] = "billed"
    gone_deadline_seconds: ClassVar[float] = 2.0

    folder: str

    def launch(self, offer: Offer, count: int, tags: Mapping[str, str], startup: str) -> list[Instance]:
        """As `Local`; from then on each machine is on the bill."""
        self._hang_if(LAUNCH_HANGS)
        instances = Local.launch(self, offer, count, tags, startup)
        for instance in instances:
            written = Path(self.folder) / f"{instance.id}.new"
            written.write_text(instance.model_dump_json())
            written.rename(self._bill(instance.id))  # atomic: a reader sees the whole file or none
        self._hang_if(ANSWER_HANGS)
        return instances

    def instances(self, pool_id: str | None = None) -> list[Instance]:
        """The machines that live, and those on the bill although none of their processes lives."""
        self._fail_if_down()
        self._hang_if(LISTING_HANGS)
        found = {instance.id: instance for instance in Local.instances(self, pool_id)}
        for file in Path(self.folder).glob("local-*.json"):
            try:
                instance = Instance.model_validate_json(file.read_text())
            except FileNotFoundError:  # it was terminated a moment ago
                continue
            if pool_id in (None, instance.pool_id):
                found.setdefault(instance.id, instance)
        return sorted(found.values(), key=lambda instance: (instance.pool_id, instance.rank))

    def terminate(self, ids: Sequence[str]) -> None:
        """As `Local`; then the machines are removed from the bill."""
        self._fail_if_down()
        self._hang_if(TERMINATE_HANGS)
        Local.terminate(self, ids)
        for instance_id in ids:
            self._bill(instance_id).unlink(missing_ok=True)

    def _bill(self, instance_id: str) -> Path:
        return Path(self.folder) / f"{instance_id}.json"

    def _fail_if_down(self) -> None:
        if (Path(self.folder) / IS_DOWN).exists():
            raise ConnectionError("503 from the landlord")

    def _hang_if(self, fault: str) -> None:
        for file in sorted(Path(self.folder).glob(f"{fault}*")):
            try:
                if file.suffix != ".met":
                    file.rename(f"{file}.met")
                    threading.Event().wait()
            except FileNotFoundError:  # another call has met it
                pass
