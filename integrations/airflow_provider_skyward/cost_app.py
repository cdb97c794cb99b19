"""The app behind the tabs: their module, and bills from the ledger as JSON. Only the api-server imports this file.

The ledger is that of the api-server's settings (`SKYWARD_LEDGER`). It also has the bill of a task that was killed.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

from airflow.api_fastapi.auth.managers.models.resource_details import DagAccessEntity
from airflow.api_fastapi.core_api.security import get_user, requires_access_dag
from fastapi import Depends, FastAPI, HTTPException, Query
from fastapi.responses import FileResponse

import skyward_core as sky

TABS = Path(__file__).with_name("tabs.js")

RunId = Annotated[str, Query(min_length=1)]
TaskId = Annotated[str, Query(min_length=1)]


def cost_app() -> FastAPI:
    """Return the app. It has no page of documentation: that would be a route without a guard."""
    app = FastAPI(title="Skyward", docs_url=None, redoc_url=None, openapi_url=None)
    may_see_run = Depends(requires_access_dag("GET", DagAccessEntity.RUN))
    may_see_task = Depends(requires_access_dag("GET", DagAccessEntity.TASK_INSTANCE))
    app.get("/tabs.js", dependencies=[Depends(get_user)], response_class=FileResponse)(tabs)
    app.get("/dags/{dag_id}/run", dependencies=[may_see_run, may_see_task])(bill_of_run)
    app.get("/dags/{dag_id}/task", dependencies=[may_see_task])(bill_of_task)
    return app


def tabs() -> FileResponse:
    """Return the module with both tabs."""
    return FileResponse(TABS, media_type="text/javascript", headers={"Cache-Control": "no-cache"})


def bill_of_run(dag_id: str, run_id: RunId) -> dict[str, Any]:
    """Return the bill of a DAG run: in all, of each pool, and its shares of pools that it has not opened."""
    return _bill(sky.Work(system="airflow", workflow=dag_id, run=run_id))


def bill_of_task(dag_id: str, run_id: RunId, task_id: TaskId, map_index: int = -1) -> dict[str, Any]:
    """Return the bill of a task instance, of all its tries, and what it has used of pools that others have opened."""
    task_run = "" if map_index < 0 else str(map_index)
    work = sky.Work(system="airflow", workflow=dag_id, run=run_id, task=task_id, task_run=task_run)
    bill = _bill(work)
    with _ledger_errors():
        used = [found for pool_id in bill["shares"] if (found := _used(pool_id, work)) is not None]
    return bill | {"used": sky.shown_text.visible_data(used)}


def _bill(work: sky.Work) -> dict[str, Any]:
    with _ledger_errors():
        pools = sky.receipts_of(work)
        costs = sky.cost_of(work)
    opened = {pool["pool_id"] for pool in pools}
    bill = {
        "cost_usd": sum(costs.values()),
        "shares": {pool_id: usd for pool_id, usd in costs.items() if pool_id not in opened},
        "on_demand_usd": sum(pool["on_demand_usd"] for pool in pools),
        "saved_usd": sum(pool["saved_usd"] for pool in pools),
        "pools": [pool | {"users": _users_of(pool, work.workflow)} for pool in pools],
    }
    return sky.shown_text.visible_data(bill)


@contextmanager
def _ledger_errors() -> Generator[None]:
    try:
        yield
    except sky.LedgerError as error:
        raise HTTPException(503, "the ledger could not be read; the api-server's log says why") from error


def _used(pool_id: str, work: sky.Work) -> dict[str, Any] | None:
    """Return the machines of a pool that another work has opened, and the uses of it by this one; None if the ledger
    does not have it any more.
    """
    try:
        pool = sky.receipt_of(pool_id)
    except sky.LedgerConflict:
        return None
    wanted = work.labels().items()
    its = {name: pool[name] for name in ("pool_id", "name", "created_at", "ended_at", "resources")}
    return its | {"users": [user for user in pool["users"] if wanted <= user["work"].items()]}


def _users_of(pool: dict[str, Any], dag_id: str) -> list[dict[str, Any]]:
    """Return those of this DAG: the reader may have no rights on the others."""
    return [user for user in pool["users"] if user["work"].get("workflow") == dag_id]
