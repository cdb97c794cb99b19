"""The end of the money, and the automations on it, on a real Prefect server.

The automations are for all flows of the server that other files use too: here flows have names that no other file has.
"""

import json
import threading
from collections.abc import Iterator
from decimal import Decimal
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

pytest.importorskip("prefect")
from tests.integrations import prefect_server
from tests.integrations.prefect_server import events_of, messages, wait_for

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
    deploy_budget_notification,
)
from skyward_core.ledger.ledger import Ledger, default_url
from skyward_core.ledger.rows import Account, Period

api = pytest.fixture(scope="module", autouse=True)(prefect_server.served)


pytestmark = [
    pytest.mark.filterwarnings("default"),  # Prefect's own warnings are not our faults
]


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


def test_a_notification_needs_a_saved_block() -> None:
    with pytest.raises(sky.BadRequest, match="not saved"):
        deploy_budget_notification(CustomWebhookNotificationBlock(name="x", url="http://127.0.0.1/", method="POST"))
    with pytest.raises(sky.BadRequest, match="slack-webhook/alerts"):
        deploy_budget_notification("alerts")
