"""Automations on money, on a server of this file: `prefect_server.served_alone` has the reason."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("prefect")
from tests.integrations import prefect_server  # isort: skip
from tests.integrations.prefect_server import deployment_named, events_of
from tests.waiting import wait_until

from prefect import flow, task  # isort: skip
from prefect.blocks.notifications import CustomWebhookNotificationBlock
from prefect.client.orchestration import get_client

import skyward_core as sky
from prefect_skyward import SkywardTaskRunner
from prefect_skyward.automations import GUARD_NAME, deploy_budget_guard, deploy_budget_notification

pytestmark = [pytest.mark.timeout(400), pytest.mark.filterwarnings("default")]
api = pytest.fixture(scope="module", autouse=True)(prefect_server.served_alone)


@pytest.fixture(scope="module")
def received() -> Iterator[list[dict[str, Any]]]:
    """What a web server has received: Prefect's custom webhook posts to it."""
    found: list[dict[str, Any]] = []

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            found.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    with HTTPServer(("127.0.0.1", 0), Receiver) as server:
        thread = threading.Thread(target=server.serve_forever, name="receiver")
        thread.start()
        CustomWebhookNotificationBlock(
            name="alerts",
            url=f"http://127.0.0.1:{server.server_port}/",
            method="POST",
            json_data={"subject": "{{subject}}", "body": "{{body}}"},
            allow_private_urls=True,
        ).save("alerts", overwrite=True)
        yield found
        server.shutdown()
        thread.join()


@task
def add(a: int, b: int) -> int:
    return a + b


def test_a_notification_says_that_the_money_is_used_up(received: list[dict[str, Any]]) -> None:
    deploy_budget_notification("custom-webhook/alerts")

    @flow(name="without money", task_runner=SkywardTaskRunner(provider=sky.Local(price_per_hour=36.0), max_cost=0.0001))
    def poor() -> None:
        add.submit(1, 1).result()

    assert poor(return_state=True).is_failed()
    notes = wait_until(lambda: [one for one in received if one["subject"].startswith("Skyward: without money, ")])
    (note,) = [one for one in notes if "skyward.budget.exceeded" in one["subject"]]
    assert "0.0001" in note["body"]


SERVED = """
import time
from decimal import Decimal
from prefect import flow, task
from prefect_skyward import SkywardTaskRunner
import skyward_core as sky
import skyward_core.ledger.budgets as budgets

# a short test: it begins at once, and is warned long before the end
budgets.FIRST_MINUTE_SECONDS, budgets.WARNING_SHARE = 1.0, Decimal("0.3")

@task
def hang() -> None:
    time.sleep(600)

@flow(name="guarded", task_runner=SkywardTaskRunner(provider=sky.Local(price_per_hour=3600.0), max_cost=40))
def guarded() -> None:
    hang.submit().result()

if __name__ == "__main__":
    guarded.serve("guarded", print_starting_message=False, limit=1, pause_on_shutdown=False)
"""


def test_the_budget_guard_cancels_a_run_at_80_percent_of_its_budget(
    api: str, tmp_path: Path, received: list[dict[str, Any]]
) -> None:
    deploy_budget_guard(flows=["other"])
    guard = deploy_budget_guard(flows=["guarded"])
    deploy_budget_notification("custom-webhook/alerts")
    with get_client(sync_client=True) as client:
        assert [one.id for one in client.read_automations_by_name(GUARD_NAME)] == [guard.id]
    (tmp_path / "served.py").write_text(SERVED)
    environ = {**os.environ, "PREFECT_API_URL": api}
    with (
        subprocess.Popen([sys.executable, "served.py"], cwd=tmp_path, env=environ) as server,
        get_client(sync_client=True) as client,
    ):
        try:
            deployment = wait_until(lambda: deployment_named("guarded"), 60)
            run = client.create_flow_run_from_deployment(deployment.id)
            wait_until(lambda: client.read_flow_run(run.id).state.name == "Cancelled", 120)
            states = client.read_flow_run_states(run.id)
        finally:
            server.send_signal(signal.SIGINT)
            server.wait(timeout=60)
    assert any(f"Cancelled by Automation {guard.id}" in (state.message or "") for state in states)
    (warning,) = wait_until(lambda: events_of(run.id, "skyward.budget.warning"))
    assert warning["payload"]["limit_usd"] == 40
    assert 0.3 <= warning["payload"]["share"] < 1
    assert {related["prefect.resource.role"] for related in warning["related"]} >= {"flow-run", "flow", "deployment"}
    assert wait_until(lambda: [one for one in received if "skyward.budget.warning" in one["subject"]])
    costs = sky.cost_of(sky.Work(system="prefect", workflow="guarded", run=str(run.id)))
    assert 12 <= sum(costs.values()) < 40
