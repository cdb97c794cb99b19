"""`SkywardTrigger`: follows the detached calls of a deferred task, and writes their lines into the task log.

    attached ──▶ following ──▶ all calls have ended, or the pool is gone: one event
        └───────────┴──cancelled by the triggerer──▶ left: the calls go on, another triggerer follows them
                    └──the user ends the task──▶ `on_kill`: the pool is ended

It changes nothing but the lease and the money of the pool, which any number of triggerers may renew, so two may run it
at once. Each trigger has a thread, so that a pool that does not answer delays no other trigger.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from airflow.triggers.base import BaseTrigger, TriggerEvent

import skyward_core as sky
from airflow_provider_skyward.airflow_compat import known_level
from airflow_provider_skyward.call_follower import CallFollower
from airflow_provider_skyward.connections import credentials_in_triggerer, ledger_of_triggerer, ledger_url_in_triggerer
from airflow_provider_skyward.task_log import TaskLog

FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 1.0, 10.0
PAUSE_SHARE = 0.02
"""The pause between two looks, as a share of the time since the first one."""
LEAVE_SECONDS = 5.0
LEAST_SECONDS = 5.0
"""For how long a task is followed at least. The scheduler of Airflow 3.3 fails a task as "killed externally" if it has
queued it again before it takes up that the worker which deferred it has exited (`process_executor_events`). Under load
both take seconds.
"""


class SkywardTrigger(BaseTrigger):
    """Waits until the calls of a pool have ended. `cursors` are the numbers of the lines that the log has already.

    `skyward_conn_id` and `provider_conn_id` are those of the operator, and `provider` is its provider as plain data.
    """

    def __init__(
        self,
        pool_id: str,
        call_ids: list[str],
        cursors: list[int],
        skyward_conn_id: str | None = None,
        provider_conn_id: str | None = None,
        provider: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.skyward_conn_id, self.provider_conn_id, self.provider = skyward_conn_id, provider_conn_id, provider
        self.pool_id, self.call_ids, self.cursors = pool_id, call_ids, cursors
        self._follower = CallFollower(pool_id, call_ids, cursors)
        self._thread: ThreadPoolExecutor | None = None

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Return the class path and the arguments: names only, because Airflow stores and shows them."""
        arguments: dict[str, Any] = {"pool_id": self.pool_id, "call_ids": self.call_ids, "cursors": self.cursors}
        for name in ("skyward_conn_id", "provider_conn_id", "provider"):
            if getattr(self, name):
                arguments[name] = getattr(self, name)
        return f"{SkywardTrigger.__module__}.{SkywardTrigger.__qualname__}", arguments

    @property
    def is_following(self) -> bool:
        """Whether there is a connection to the pool."""
        return self._follower.is_attached

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Yield one event, when all calls have ended or the pool is gone; the worker then finds out which."""
        loop, began = asyncio.get_running_loop(), time.monotonic()
        self._thread = ThreadPoolExecutor(1, "skyward-follow")
        try:
            await ledger_of_triggerer(self.skyward_conn_id)
            while True:
                lines, is_over = await loop.run_in_executor(self._thread, self._follower.look)
                self.cursors = list(self._follower.cursors)
                for level, line in lines:
                    TaskLog(self.log).log(known_level(level), "%s", line)
                if is_over:
                    break
                pause = PAUSE_SHARE * (time.monotonic() - began)
                await asyncio.sleep(min(LONGEST_PAUSE_SECONDS, max(FIRST_PAUSE_SECONDS, pause)))
        except (sky.NodeLost, sky.LeaseLost, sky.BadRequest) as error:
            TaskLog(self.log).warning("the pool %s cannot be followed any more: %s", self.pool_id, error)
        finally:
            await self._leave()
        await asyncio.sleep(max(0.0, LEAST_SECONDS - (time.monotonic() - began)))
        yield TriggerEvent({"calls": len(self.call_ids), "cursors": self.cursors, "money": self._follower.last_warning})

    async def cleanup(self) -> None:
        """Leave the pool as it is: a triggerer that ends, or gives the task to another one, calls this too."""
        await self._leave()

    async def on_kill(self) -> None:
        """End the pool: the user has marked or cleared the deferred task."""
        await self._leave()
        ledger_url = await ledger_url_in_triggerer(self.skyward_conn_id)
        credentials = await credentials_in_triggerer(self.provider_conn_id, self.provider)
        await asyncio.to_thread(sky.release, self.pool_id, credentials=credentials, ledger_url=ledger_url)

    async def _leave(self) -> None:
        """Close the connection. A look that waits for the pool is not waited for: it closes its connection itself."""
        leaving = asyncio.ensure_future(asyncio.to_thread(self._follower.leave))
        await asyncio.wait([leaving], timeout=LEAVE_SECONDS)
        if self._thread is not None:
            self._thread.shutdown(wait=False)
