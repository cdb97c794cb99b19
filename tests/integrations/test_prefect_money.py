"""The end of the money, and the automations on it, on a real Prefect server.

The automations are for all flows of the server that other files use too: here flows have names that no other file has.
"""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from decimal import Decimal
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("prefect")
from tests.integrations import prefect_server  # isort: skip
from tests.integrations.prefect_server import deployment_named, events_of, messages, wait_for

from prefect import flow, task  # isort: skip
from prefect.blocks.notifications import CustomWebhookNotificationBlock
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import get_client
from prefect.runtime import flow_run as current_run

import skyward_core as sky
from prefect_skyward import SkywardTaskRunner
from prefect_skyward.automations import (
    GUARD_NAME,
    NOTIFICATION_NAME,
    deploy_budget_guard,
    deploy_budget_notification,
)
from skyward_core.ledger.ledger import Ledger, default_url
from skyward_core.ledger.rows import Account, Period

pytestmark = [
    pytest.mark.slow,  # starts a server
    pytest.mark.filterwarnings("default"),  # Prefect's own warnings are not our faults
]


api = pytest.fixture(scope="module", autouse=True)(prefect_server.served)


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
        with get_client(sync_client=True) as client:
            for name in (GUARD_NAME, NOTIFICATION_NAME):
                for automation in client.read_automations_by_name(name):
                    client.delete_automation(automation.id)
        server.shutdown()
        thread.join()


@task(retries=2, retry_delay_seconds=0, cache_policy=NO_CACHE)
def add(a: int, b: int) -> int:
    return a + b


def test_a_run_whose_money_is_used_up_fails_with_the_reason_and_is_not_tried_again(
    received: list[dict[str, Any]],
) -> None:
    """Neither its task nor the flow; an event and a notification say so, and nothing was rented."""
    deploy_budget_notification("custom-webhook/alerts")
    events: list[Any] = []
    ids: list[str] = []

    @flow(
        name="without money",
        retries=2,
        task_runner=SkywardTaskRunner(provider=sky.Local(price_per_hour=36.0), max_cost=0.0001, on_event=events.append),
    )
    def poor() -> None:
        ids.append(current_run.id)
        add.submit(1, 1).result()

    state = poor(return_state=True)
    assert state.is_failed()
    assert "BudgetExceeded" in state.message
    assert "max_cost" in state.message
    assert len(ids) == 1, "the flow was tried again"
    assert not any(isinstance(event, sky.InstanceLaunching) for event in events)
    assert sum(isinstance(event, sky.InfraCreating) for event in events) == 1, "the task was tried again"
    (event,) = wait_for(lambda: events_of(ids[0], "skyward.budget."))
    assert event["event"] == "skyward.budget.exceeded"
    assert event["payload"]["limit_usd"] == 0.0001
    assert "max_cost" in event["payload"]["reason"]
    notes = wait_for(lambda: [one for one in received if one["subject"].startswith("Skyward: without money, ")])
    (note,) = [one for one in notes if "skyward.budget.exceeded" in one["subject"]]
    assert "0.0001" in note["body"]
    said = ("The task is not tried again", "the money of the flow run is used up: it is not tried again")
    assert wait_for(lambda: all(any(words in text for _, text in messages(ids[0])) for words in said))


def test_a_run_whose_account_has_no_money_fails_with_the_reason_and_is_not_tried_again() -> None:
    """`budget=` names the account, which several runs share."""
    with Ledger(default_url()) as ledger:
        ledger.set_account(Account("poor team", Decimal("0.0001"), Period.MONTH))
    begun: list[str] = []

    @flow(retries=2, task_runner=SkywardTaskRunner(provider=sky.Local(price_per_hour=36.0), budget="poor team"))
    def of_a_team() -> None:
        begun.append(current_run.id)
        add.submit(1, 1).result()

    state = of_a_team(return_state=True)
    assert state.is_failed()
    assert "BudgetExceeded" in state.message
    assert "poor team" in state.message
    assert len(begun) == 1, "the flow was tried again"
    (event,) = wait_for(lambda: events_of(begun[0], "skyward.budget."))
    assert (event["event"], event["payload"]["account"]) == ("skyward.budget.exceeded", "poor team")


def test_a_subflow_that_uses_the_pools_around_it_is_not_tried_again_either() -> None:
    """Neither one whose call finds that the money is used up, nor one that begins after it."""
    begun: list[str] = []

    @flow(retries=2, task_runner=SkywardTaskRunner(inherit=True))
    def inner(name: str) -> None:
        begun.append(name)
        add.submit(1, 1).result()

    @flow(
        retries=2,
        task_runner=SkywardTaskRunner(provider=sky.Local(price_per_hour=36.0), max_cost=0.0001),
    )
    def outer() -> None:
        add.submit(1, 1).wait()
        inner("first", return_state=True)
        inner("second")

    assert "BudgetExceeded" in outer(return_state=True).message
    assert begun == ["first", "second"]


def test_a_pool_without_calls_reports_that_its_money_is_used_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its end raises nothing in the flow, which goes on."""
    monkeypatch.setattr("skyward_core.ledger.budgets.FIRST_MINUTE_SECONDS", 1.0)
    ids: list[str] = []

    @flow(task_runner=SkywardTaskRunner(provider=sky.Local(price_per_hour=3600.0), max_cost=20))
    def idle() -> None:
        ids.append(current_run.id)
        add.submit(1, 1).result()
        wait_for(lambda: events_of(ids[0], "skyward.budget.exceeded"))

    idle()
    (event,) = events_of(ids[0], "skyward.budget.exceeded")
    assert event["payload"]["limit_usd"] == 20
    assert "max_cost" in event["payload"]["reason"]


def test_the_log_begins_with_the_price_and_its_limit_and_a_quote_has_them_too() -> None:
    """Before anything is rented."""
    runner = SkywardTaskRunner(provider=sky.Local(price_per_hour=36.0), nodes=2, max_cost=5.0)
    quoted = runner.quote()
    assert (quoted.price_per_hour, quoted.ceiling_usd, len(quoted.ways)) == (72.0, 5.0, 1)
    ids: list[str] = []

    @flow(task_runner=runner)
    def quick() -> int:
        ids.append(current_run.id)
        return add.submit(1, 1).result()

    assert quick() == 2
    expected = "found what you asked for in local: $72.00 per hour, of 1 candidate; at most $5.00 (max_cost)"

    def lines() -> list[str]:
        return [text for _, text in messages(ids[0]) if text.startswith(("found", "launching"))]

    found = wait_for(lambda: lines() if len(lines()) == 2 else None)
    assert found[0].replace(found[0].split(" in ")[1].split(":")[0], "local") == expected
    assert found[1].startswith("launching 2 x local")


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


@pytest.mark.long
def test_the_budget_guard_cancels_a_run_at_80_percent_of_its_budget(
    api: str, tmp_path: Path, received: list[dict[str, Any]]
) -> None:
    """It is deployed by one call, which may be repeated; the run is Cancelled before its money is used up, the ledger
    has its cost, and a notification was sent. (Here the core warns at 30 %: else the test waits for a minute.)
    """
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
            deployment = wait_for(lambda: deployment_named("guarded"), 60)
            run = client.create_flow_run_from_deployment(deployment.id)
            wait_for(lambda: client.read_flow_run(run.id).state.name == "Cancelled", 120)
            states = client.read_flow_run_states(run.id)
        finally:
            server.send_signal(signal.SIGINT)
            server.wait(timeout=60)
    assert any(f"Cancelled by Automation {guard.id}" in (state.message or "") for state in states)
    (warning,) = wait_for(lambda: events_of(run.id, "skyward.budget.warning"))
    assert warning["payload"]["limit_usd"] == 40
    assert 0.3 <= warning["payload"]["share"] < 1
    assert {related["prefect.resource.role"] for related in warning["related"]} >= {"flow-run", "flow", "deployment"}
    assert wait_for(lambda: [one for one in received if "skyward.budget.warning" in one["subject"]])
    costs = sky.cost_of(sky.Work(system="prefect", workflow="guarded", run=str(run.id)))
    assert 12 <= sum(costs.values()) < 40


def test_a_notification_needs_a_saved_block() -> None:
    with pytest.raises(sky.BadRequest, match="not saved"):
        deploy_budget_notification(CustomWebhookNotificationBlock(name="x", url="http://127.0.0.1/", method="POST"))
    with pytest.raises(sky.BadRequest, match="slack-webhook/alerts"):
        deploy_budget_notification("alerts")
