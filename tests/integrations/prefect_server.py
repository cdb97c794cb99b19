"""A Prefect API in a separate process, for the modules that test what it has after a run. Import it before Prefect."""

import atexit
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any
from uuid import UUID

_home = tempfile.mkdtemp(prefix="skyward-prefect-")
atexit.register(shutil.rmtree, _home, ignore_errors=True)
# Prefect reads its environment when it is imported.
os.environ.update(
    PREFECT_HOME=_home,
    PREFECT_SERVER_ANALYTICS_ENABLED="false",
    PREFECT_LOGGING_TO_API_BATCH_INTERVAL="0.2",
    PREFECT_LOGGING_LEVEL="INFO",
)

from prefect.client.orchestration import get_client  # noqa: E402
from prefect.settings import PREFECT_API_URL  # noqa: E402
from prefect.testing.utilities import prefect_test_harness  # noqa: E402

import skyward_core as sky  # noqa: E402
from prefect_skyward import SkywardTaskRunner  # noqa: E402
from skyward_core.worker.watchdog import POOL_TAG, tagged_processes  # noqa: E402


def wait_for(what: Callable[[], Any], seconds: float = 90.0) -> Any:
    """Return what the function returns, once that is true."""
    deadline = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)
    return found


def asked(path: str, body: dict[str, Any]) -> Any:
    """Return the answer of a POST to the API."""
    with get_client(sync_client=True) as client:
        answer = client._client.post(path, json=body)
        answer.raise_for_status()
        return answer.json()


def artifacts(flow_run_id: UUID | str) -> list[dict[str, Any]]:
    return asked("/artifacts/filter", {"artifacts": {"flow_run_id": {"any_": [str(flow_run_id)]}}})


def events_of(flow_run_id: UUID | str, prefix: str = "skyward.") -> list[dict[str, Any]]:
    """Events of ours that are related to a flow run, in the order of their time."""
    found = asked(
        "/events/filter",
        {
            "limit": 50,
            "filter": {
                "event": {"prefix": [prefix]},
                "related": {"id": [f"prefect.flow-run.{flow_run_id}"]},
                "order": "ASC",
            },
        },
    )
    return found["events"]


def messages(flow_run_id: UUID | str) -> list[tuple[int, str]]:
    """Level and text of the log records of a flow run and its task runs."""
    body = {"logs": {"flow_run_id": {"any_": [str(flow_run_id)]}}, "sort": "TIMESTAMP_ASC", "limit": 200}
    return [(record["level"], record["message"]) for record in asked("/logs/filter", body)]


def served() -> Iterator[str]:
    """A server with an empty database; yields the address of its API."""
    with prefect_test_harness(server_startup_timeout=300):
        yield PREFECT_API_URL.value()


def recorded() -> Iterator[list[Any]]:
    """The events of a test's pools; after the test each of them has ended, and none of their processes is left."""
    found: list[Any] = []
    yield found
    pools = {event.pool_id for event in found if isinstance(event, sky.PoolReady)}
    assert sum(isinstance(event, sky.CostFinal) for event in found) >= len(pools)
    assert processes_of(pools) == []


def processes_of(pools: set[str]) -> list[int]:
    return [pid for pid, environ in tagged_processes() if environ.get(POOL_TAG) in pools]


def runner(events: list[Any], **options: Any) -> SkywardTaskRunner:
    return SkywardTaskRunner(**{"provider": sky.Local(price_per_hour=36.0), "on_event": events.append, **options})


def logs(flow_run_id: UUID) -> list[Any]:
    """All log records of a flow run and its task runs, in the order of their time."""
    records: dict[str, Any] = {}
    while True:
        body = {"logs": {"flow_run_id": {"any_": [str(flow_run_id)]}}, "sort": "TIMESTAMP_ASC", "limit": 200}
        page = asked("/logs/filter", {**body, "offset": len(records)})
        records.update((record["id"], record) for record in page)
        if len(page) < 200:
            return list(records.values())
