"""The end of the money, and the automations on it, on a real Prefect server.

The automations are for all flows of the server that other files use too: here flows have names that no other file has.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.system.integrations.test_prefect_money import (  # noqa: F401 - fixtures
    add,
    received,
)

pytest.importorskip("prefect")
from tests.integrations import prefect_server  # isort: skip
from tests.integrations.prefect_server import deployment_named, events_of, messages, wait_for

from prefect import flow  # isort: skip
from prefect.client.orchestration import get_client
from prefect.runtime import flow_run as current_run

import skyward_core as sky
from prefect_skyward import SkywardTaskRunner
from prefect_skyward.automations import (
    GUARD_NAME,
    deploy_budget_guard,
    deploy_budget_notification,
)

pytestmark = [
    pytest.mark.filterwarnings("default"),  # Prefect's own warnings are not our faults
]


api = pytest.fixture(scope="module", autouse=True)(prefect_server.served)


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
