"""Dask's plain pages of the scheduler, served on request: no pool starts with them, because few need them."""

from __future__ import annotations

from typing import Any

MODULES = ("distributed.http.scheduler.info", "distributed.http.health", "distributed.http.statics")
START = "info/main/workers.html"
SERVED = "skyward_pages"


async def serve_pages(dask_scheduler: Any) -> int:
    """Add the pages to the scheduler's HTTP server, which listens on the loopback of its machine; return the port.

    Idempotent. Dask runs it in the scheduler's event loop.
    """
    from distributed.http.utils import get_handlers

    if not getattr(dask_scheduler, SERVED, False):
        dask_scheduler.http_application.add_handlers(".*$", get_handlers(dask_scheduler, list(MODULES)))
        setattr(dask_scheduler, SERVED, True)
    return int(dask_scheduler.services["dashboard"].port)
