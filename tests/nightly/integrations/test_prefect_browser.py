"""The flows of flows/ on one real Prefect server, and its pages in a real browser: amounts, graph, forms.

Chromium is Debian's, and Playwright drives it. Without them the tests fail. `make screenshots` makes the pictures of
the docs. The browser reaches no other server.
"""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.request import Request, urlopen
from uuid import UUID

import pytest
from playwright.sync_api import Page

from prefect_skyward.report.flow_trend import RunFigures, trend_page
from tests.integrations import session_server
from tests.integrations.pictures import page, shown, take  # noqa: F401 - a fixture
from tests.ports import free_port
from tests.waiting import wait_until

pytestmark = [pytest.mark.timeout(400)]
ROOT = Path(__file__).parents[3]
BIN = Path(sys.executable).parent
FLOWS = {
    "hardware_per_step": {"nodes": 2, "accelerator": "T4"},
    "shared_warm_pool": {"is_shared": True},
    "checkpointed_training": {"begun_at": 120, "slope": 3.0},
    "digits_sweep": {"calls": 61},
}
RUNS = {"digits_sweep": 4}
"""How often a flow runs, if more than once: its card shows a trend then."""
"""The flows in the order in which they run, and a part of what each reports."""
PREPARE = """
from prefect_skyward.automations import deploy_budget_guard
deploy_budget_guard(flows=["digits-sweep"])
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    """A server with its UI: its address, and the environment of its programs."""
    home = tmp_path_factory.mktemp("prefect")
    port = free_port()
    address = f"http://127.0.0.1:{port}"
    environ = os.environ | {
        "PREFECT_HOME": str(home),
        "PREFECT_API_URL": f"{address}/api",
        "PREFECT_UI_API_URL": f"{address}/api",
        "PREFECT_UI_STATIC_DIRECTORY": str(home / "static"),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
    }
    command = [BIN / "prefect", "server", "start", "--port", str(port)]
    with subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            wait_until(lambda: session_server.is_healthy(port), "a server that is ready", 120)
            yield SimpleNamespace(address=address, environ=environ)
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(60)


@pytest.fixture(scope="module")
def reports(server: SimpleNamespace) -> dict[str, dict[str, Any]]:
    """What each flow has reported, by its name; all ran on the server, as their users run them."""
    found: dict[str, dict[str, Any]] = {}
    for name in FLOWS:
        for _ in range(RUNS.get(name, 1)):
            said = output([sys.executable, f"flows/{name}.py"], server)
        found[name] = json.JSONDecoder().raw_decode("{" + said.rpartition(f"{name}: {{")[2])[0]
    output([str(BIN / "prefect"), "block", "register", "-m", "prefect_skyward"], server)
    output([sys.executable, "-c", PREPARE], server)
    return found


def output(command: list[str], server: SimpleNamespace) -> str:
    done = subprocess.run(
        command, cwd=ROOT, env=server.environ, capture_output=True, text=True, check=False, timeout=200
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def costs(server: SimpleNamespace, reports: dict[str, Any]) -> dict[str, Any]:
    """The artifact with the cost of the last run of each flow, by the flow's name, as the API has it."""
    assert set(reports) == set(FLOWS)
    flows = {one["id"]: one["name"] for one in asked(server, "/flows/filter", {})}
    runs = {one["id"]: flows[one["flow_id"]] for one in asked(server, "/flow_runs/filter", {})}
    artifacts = asked(server, "/artifacts/filter", {"artifacts": {"key": {"any_": ["skyward-cost"]}}})
    return {
        runs[one["flow_run_id"]]: one for one in sorted(artifacts, key=lambda one: one["created"]) if one["flow_run_id"]
    }


def asked(server: SimpleNamespace, path: str, body: dict[str, Any]) -> Any:
    request = Request(f"{server.address}/api{path}", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urlopen(request, timeout=30) as answer:
        return json.load(answer)


@pytest.mark.parametrize("name", FLOWS)
def test_the_flow_reports_its_result(name: str, reports: dict[str, dict[str, Any]]) -> None:
    report = reports[name]
    assert FLOWS[name].items() <= report.items()
    assert 0 < report.get("cost_usd", 0.01) < 0.1
    assert report.get("accuracy", 1) > 0.97


def test_the_page_of_a_flow_run_has_its_graph_tasks_progress_and_cost(
    page: Page, server: SimpleNamespace, costs: dict[str, Any]
) -> None:
    cost = costs["hardware-per-step"]
    page.goto(f"{server.address}/runs/flow-run/{cost['flow_run_id']}")
    text = shown(page, "hardware-per-step", "looks for machines")
    assert "3 Task runs" in text
    assert "chose machines in local: $1.20 per hour" in text
    page.locator("canvas").first.wait_for(timeout=60_000)
    page.wait_for_function("document.querySelector('canvas').width > 0")
    take(page, "flow-run")
    page.get_by_role("tab", name="Artifacts").or_(page.get_by_text("Artifacts", exact=True).last).first.click()
    text = shown(page, "skyward-cost", "skyward-machines")
    assert cost["description"] in text
    assert re.search(r"ready after [0-9.]+ s", text)
    page.get_by_text(cost["description"]).last.scroll_into_view_if_needed()
    take(page, "flow-run-artifacts")


def test_the_page_of_the_cost_shows_the_amounts_of_the_artifact(
    page: Page, server: SimpleNamespace, costs: dict[str, Any]
) -> None:
    """Markdown became tables: no bar and no asterisk of it is left."""
    cost = costs["digits-sweep"]
    page.goto(f"{server.address}/artifacts/artifact/{cost['id']}")
    text = shown(page, "How it adds up", "By task")
    amount = cost["description"].split(" ")[0]
    assert text.count(amount) >= 3
    assert {"validate", "judge", "skyward receipt"} <= {
        words for words in ("validate", "judge", "skyward receipt") if words in text
    }
    assert "| " not in text
    assert "**" not in text
    take(page, "cost", block=(264, 60, 372, 345))


def test_the_list_of_artifacts_shows_the_newest_amount_and_the_page_of_the_key_all_runs(
    page: Page, server: SimpleNamespace, costs: dict[str, Any]
) -> None:
    """Prefect shows one amount there, that of the newest run."""
    page.goto(f"{server.address}/artifacts")
    assert costs["digits-sweep"]["description"] in shown(page, "skyward-cost", "skyward-nodes")
    take(page, "artifacts")
    page.goto(f"{server.address}/artifacts/key/skyward-cost")
    text = shown(page, costs["digits-sweep"]["id"][:8], costs["hardware-per-step"]["id"][:8])
    assert all(cost["id"][:8] in text for cost in costs.values())
    assert costs["digits-sweep"]["description"] in text


def test_the_page_of_a_flow_has_its_last_runs_in_a_table_that_is_not_cut_off(
    page: Page, server: SimpleNamespace, reports: dict[str, Any]
) -> None:
    """One of four real runs; and one of the longest names, amounts and states."""
    assert reports
    (card,) = asked(server, "/artifacts/latest/filter", {"artifacts": {"key": {"any_": ["skyward-flow-digits-sweep"]}}})
    assert card["description"].startswith("last run $")
    assert "the last 4 runs" in card["data"]
    url = f"{server.address}/runs/flow-run/{UUID(int=0)}"
    run = RunFigures("stupendous-hippopotamus", url, "CrashedByServer", "11-27 09:00", 37035.0, "accelerators", 100.0)
    wide = {"key": "skyward-flow-wide", "type": "markdown", "data": trend_page([replace(run, is_final=False)] * 30)}
    for artifact_id in (asked(server, "/artifacts/", wide)["id"], card["latest_id"]):
        page.goto(f"{server.address}/artifacts/artifact/{artifact_id}")
        shown(page, "utilisation", "begun (UTC)")
        width, room = page.locator("table").evaluate("one => [one.scrollWidth, one.parentElement.clientWidth]")
        assert width <= room
    take(page, "flow-card")


def test_the_form_of_a_pool_and_the_page_of_automations(
    page: Page, server: SimpleNamespace, reports: dict[str, Any]
) -> None:
    assert reports
    page.goto(f"{server.address}/blocks/catalog/skyward-pool/create")
    text = shown(page, "Who rents the machines", "Hard limit of the flow run's cost, in USD.")
    fields = {"Provider", "Credentials", "Accelerator", "Nodes (Optional)", "Max Cost", "Budget", "Spot", "Name"}
    assert fields <= {line.strip() for line in text.splitlines()}
    take(page, "pool-block")
    page.goto(f"{server.address}/automations")
    assert "Cancel flow run inferred from the triggering event" in shown(page, "cancel a run at 80 % of its budget")
    take(page, "automation")
