"""The Prefect API of the test session, and what modules read from it after a run. Import it before Prefect."""

import atexit
import contextvars
import os
import queue
import shutil
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import UUID

import certifi
import pytest

from tests.integrations import session_server

_home = tempfile.mkdtemp(prefix="skyward-prefect-")
atexit.register(shutil.rmtree, _home, ignore_errors=True)


def _one_certificate(folder: Path) -> Path:
    """Write a file with one certificate. Each of Prefect's clients loads a file of certificates, also for a server
    without TLS, and to load the usual 120 takes longer than a request.
    """
    end = "-----END CERTIFICATE-----\n"
    file = folder / "certificate.pem"
    file.write_text(Path(certifi.where()).read_text().partition(end)[0] + end)
    return file


# Prefect reads its environment when it is imported.
os.environ.update(
    PREFECT_HOME=_home,
    PREFECT_API_SSL_CERT_FILE=str(_one_certificate(Path(_home))),
    PREFECT_SERVER_ANALYTICS_ENABLED="false",
    PREFECT_LOGGING_TO_API_BATCH_INTERVAL="0.2",
    PREFECT_LOGGING_LEVEL="INFO",
)

from prefect import flow  # noqa: E402
from prefect.client.orchestration import SyncPrefectClient, get_client  # noqa: E402
from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterName  # noqa: E402
from prefect.client.schemas.responses import DeploymentResponse  # noqa: E402
from prefect.events.worker import EventsWorker  # noqa: E402
from prefect.settings import PREFECT_API_URL, temporary_settings  # noqa: E402

import skyward_core as sky  # noqa: E402
from prefect_skyward import SkywardTaskRunner  # noqa: E402
from prefect_skyward.report import run_report  # noqa: E402
from skyward_core.worker.node_clocks import POOL_TAG, tagged_processes  # noqa: E402


def _close_forgotten_clients() -> None:
    """Close the HTTP client of each client of Prefect's that is collected.

    Prefect does not close all that it makes (`_read_server_default_result_storage_block_id` in prefect/results.py). A
    socket that is collected while open is a warning, and fails the test that runs then, in any file.
    """
    made = SyncPrefectClient.__init__

    def make(self: SyncPrefectClient, *args: Any, **keywords: Any) -> None:
        made(self, *args, **keywords)
        weakref.finalize(self, self._client.close)

    SyncPrefectClient.__init__ = make


_close_forgotten_clients()
# tests read what the report has written when a flow has ended, on a machine that is busy
run_report.CLOSE_SECONDS = 60.0
run_report.OTHERS_SECONDS = run_report.LAST_LABEL_SECONDS = run_report.EXIT_SECONDS

type InFlow = Callable[[Callable[[], Any]], Any]


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


def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The server of the test session; yields the address of its API. It has what all files have written."""
    address = session_server.address(tmp_path_factory)
    with temporary_settings({PREFECT_API_URL: address}):
        yield address
        run_report.wait_for_late_reports()  # their threads write into the ledger of the file that comes next


def served_alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server for this file only, for tests that write automations or disturb the server; yields the address of its API.

    On SQLite, Prefect's server (3.7.7) may stop answering for ever when an automation is created or deleted:
    `update_cache_after_commit` (server/events/models/automations.py) blocks the event loop until it has the lock of the
    automations, and `reconcile_automations`, which holds it, needs the loop.
    """
    address = session_server.address_in(tmp_path_factory.mktemp("prefect") / "server", os.getpid())
    _end_connections()
    with temporary_settings({PREFECT_API_URL: address}):
        yield address
        run_report.wait_for_late_reports()
        _end_connections()


def _end_connections() -> None:
    """Send what Prefect's threads of this process have to send, and end them: they keep the server that they began with,
    also after PREFECT_API_URL has changed, so events would go to that of an earlier file.
    """
    EventsWorker.drain_all(timeout=10)  # and all other services of Prefect: they share this list


def database_text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """All that the server's database has in plain text."""
    files = sorted(session_server.folder(tmp_path_factory).glob(f"{session_server.DATABASE}*"))
    assert files
    return "".join(path.read_bytes().decode(errors="replace") for path in files)


def recorded() -> Iterator[list[Any]]:
    """The events of a test's pools; after the test each of them has ended, and none of their processes is left."""
    found: list[Any] = []
    yield found
    pools = {event.pool_id for event in found if isinstance(event, sky.PoolReady)}
    assert sum(isinstance(event, sky.CostFinal | sky.PoolLeft) for event in found) >= len(pools)
    assert processes_of(pools) == []


@contextmanager
def flow_body(task_runner: SkywardTaskRunner) -> Iterator[InFlow]:
    """Run a flow in a thread; yields a function that calls what it gets in the body of the flow.

    So one flow run has the pool of many tests. The result of the call is returned, or its error is raised.
    """
    inbox: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()

    @flow(name="one body", task_runner=task_runner)
    def body() -> None:
        while (message := inbox.get()) is not None:
            future, what = message
            try:
                future.set_result(what())
            except BaseException as error:
                future.set_exception(error)

    def call(what: Callable[[], Any]) -> Any:
        future: Future[Any] = Future()
        inbox.put((future, what))
        return future.result(100)

    thread = threading.Thread(target=contextvars.copy_context().run, args=(body,), name="flow")
    thread.start()
    try:
        yield call
    finally:
        inbox.put(None)
        thread.join()


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][:1] not in "ZX"
    except OSError:
        return False


def deployment_named(name: str) -> DeploymentResponse | None:
    """The deployment of this name, of any flow; None if there is none yet."""
    with get_client(sync_client=True) as client:
        wanted = DeploymentFilter(name=DeploymentFilterName(any_=[name]))
        return next(iter(client.read_deployments(deployment_filter=wanted)), None)


def processes_of(pools: set[str]) -> list[int]:
    return [pid for pid, environ in tagged_processes() if environ.get(POOL_TAG) in pools]


def runner(events: list[Any], **options: Any) -> SkywardTaskRunner:
    return SkywardTaskRunner(**{"provider": sky.Local(price_per_hour=36.0), "on_event": events.append, **options})


def logs(flow_run_id: UUID, *, of_flow_only: bool = False) -> list[Any]:
    """All log records of a flow run and its task runs, or without those, in the order of their time."""
    records: dict[str, Any] = {}
    wanted: dict[str, Any] = {"flow_run_id": {"any_": [str(flow_run_id)]}}
    if of_flow_only:
        wanted["task_run_id"] = {"is_null_": True}
    while True:
        body = {"logs": wanted, "sort": "TIMESTAMP_ASC", "limit": 200, "offset": len(records)}
        page = asked("/logs/filter", body)
        records.update((record["id"], record) for record in page)
        if len(page) < 200:
            return list(records.values())
