"""The values of a pool's secrets on its nodes: in memory, from the scheduler to the workers to the processes of calls,
over the pool's TLS.

The pool's opener tells the scheduler on each connection that it makes to one, before the first call. A worker asks the
scheduler before its first batch and gives them to each runner with its first call. So a replaced node, a worker that
begins anew and a new head have them like the first ones, and a client that attaches needs none. Nothing here is
written: neither to a file nor to the environment of a process that is being started.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any

from distributed import Scheduler  # noqa: TID253 - with calls.py, draining.py, node.py and streams.py stands in the scheduler
from distributed.diagnostics.plugin import SchedulerPlugin  # noqa: TID253

from skyward_core.worker.masking import SecretValues

PUT_SECRETS = "skyward-put-secrets"
"""The operation of a client's stream that hands the values over."""
GET_SECRETS = "skyward_get_secrets"
"""The operation that waits for them."""
PATIENCE_SECONDS = 60.0
"""For how long a worker waits for a pool's opener that is to come: after a change of the head somebody else's call may
be there first.
"""


class SecretStore(SchedulerPlugin):
    """Keeps the values in the scheduler as they came, packed: it has no use for them itself."""

    name = "skyward-secrets"

    def __init__(self) -> None:
        self._packed: Any = None
        self._are_here = asyncio.Event()

    async def start(self, scheduler: Scheduler) -> None:
        """Take up the operations."""
        streams: dict[str, Any] = scheduler.stream_handlers
        streams[PUT_SECRETS] = self.put
        scheduler.handlers[GET_SECRETS] = self.get

    def put(self, client: str, secrets: Any) -> None:
        """Take the values from the pool's opener."""
        self._packed = secrets
        self._are_here.set()

    async def get(self) -> Any:
        """Return them, when they are here; None if nobody brings them."""
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                await self._are_here.wait()
        except TimeoutError:
            return None
        return self._packed


async def ask_for(scheduler: Any, names: Collection[str]) -> SecretValues:
    """Ask the scheduler, over a worker's connection to it. Raises LookupError if it has not got all of them."""
    found: SecretValues | None = await getattr(scheduler, GET_SECRETS)()
    if missing := [name for name in names if found is None or name not in found]:
        raise LookupError(f"the pool's secrets are not here: {', '.join(missing)}")
    return found or SecretValues()
