"""The plain pages of Dask's scheduler (workers, tasks, their logs), made on request: `skyward dashboard` shows them.

A page travels as the answer to an operation, over the pool's own connection, which wants the pool's certificate. No
HTTP server of the node has the pages, because all users of its computer reach a port of the loopback. So nothing is
left on the node when the command has ended, in whatever way.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from distributed.diagnostics.plugin import SchedulerPlugin  # noqa: TID253 - this module is imported on nodes
from distributed.http.utils import get_handlers  # noqa: TID253
from tornado.httputil import HTTPHeaders, HTTPServerRequest, ResponseStartLine
from tornado.web import Application

from skyward_core.wire.protocol import DASK_PAGE, PAGE_SECONDS

MODULES = ("distributed.http.scheduler.info",)


class DaskPages(SchedulerPlugin):
    """Adds the operation to the scheduler, and makes its pages."""

    name = "skyward-dask-pages"

    def __init__(self) -> None:
        self._application = Application()

    async def start(self, scheduler: Any) -> None:
        """Add the operation."""
        self._application = Application(
            get_handlers(scheduler, list(MODULES)),  # pyright: ignore[reportArgumentType]
            log_function=lambda _: None,
        )
        scheduler.handlers[DASK_PAGE] = self.page

    async def page(self, *, path: str) -> dict[str, Any]:
        """Return the page of a path such as "/info/main/workers.html": its HTTP status and its HTML."""
        answer = _Answer()
        request = HTTPServerRequest(method="GET", uri=path, connection=answer)  # pyright: ignore[reportArgumentType]
        self._application.find_handler(request).execute()
        with contextlib.suppress(TimeoutError):  # a worker does not answer: the status is 500
            await asyncio.wait_for(answer.finished.wait(), PAGE_SECONDS)
        return {"status": answer.status, "text": answer.body.decode(errors="replace")}


class _Answer:
    """What Tornado takes for the connection of a browser: it keeps the answer."""

    context: Any = None

    def __init__(self) -> None:
        self.status, self.body = 500, b""
        self.finished = asyncio.Event()

    def set_close_callback(self, _: Any) -> None:
        """Never call it: an answer is always taken."""

    def write_headers(
        self, start_line: ResponseStartLine, _: HTTPHeaders, chunk: bytes | None = None
    ) -> asyncio.Future[None]:
        self.status = start_line.code
        return self.write(chunk or b"")

    def write(self, chunk: bytes) -> asyncio.Future[None]:
        self.body += chunk
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        done.set_result(None)
        return done

    def finish(self) -> None:
        self.finished.set()
