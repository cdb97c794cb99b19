"""The values of a pool's secrets on its nodes: only in memory, from scheduler to workers to runners, over the pool's
TLS.

The pool's owner sends them to the scheduler on each new connection, before the first call. A worker gets them from the
scheduler before its first batch, and sends them to each runner with its first call. So replaced nodes, restarted
workers and a new head get them too, and an attached client needs none. They are never written to a file, nor to the
environment of a process that starts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any

from distributed import Scheduler  # noqa: TID253 - with calls.py, draining.py, node.py and streams.py stands in the scheduler
from distributed.diagnostics.plugin import SchedulerPlugin  # noqa: TID253

from skyward_core.worker.masking import SecretValues

PUT_SECRETS = "skyward-put-secrets"
"""The operation of a client's stream that sends the values."""
GET_SECRETS = "skyward_get_secrets"
"""The operation that waits for them."""
PATIENCE_SECONDS = 60.0
"""How long a worker waits for the pool's owner: after a change of the head another client's call may come first."""


class SecretStore(SchedulerPlugin):
    """Keeps the values in the scheduler, still pickled: the scheduler does not use them."""

    name = "skyward-secrets"

    def __init__(self) -> None:
        self._packed: Any = None
        self._are_here = asyncio.Event()

    async def start(self, scheduler: Scheduler) -> None:
        """Add the operations to the scheduler."""
        streams: dict[str, Any] = scheduler.stream_handlers
        streams[PUT_SECRETS] = self.put
        scheduler.handlers[GET_SECRETS] = self.get

    def put(self, client: str, secrets: Any) -> None:
        """Take the values from the pool's owner."""
        self._packed = secrets
        self._are_here.set()

    async def get(self) -> Any:
        """Wait for the values and return them; None if they do not come."""
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                await self._are_here.wait()
        except TimeoutError:
            return None
        return self._packed


async def ask_for(scheduler: Any, names: Collection[str]) -> SecretValues:
    """Get the values from the scheduler. Raises LookupError if some are missing."""
    found: SecretValues | None = await getattr(scheduler, GET_SECRETS)()
    if missing := [name for name in names if found is None or name not in found]:
        raise LookupError(f"the pool's secrets are not here: {', '.join(missing)}")
    return found or SecretValues()
