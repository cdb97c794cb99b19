"""The pages of a real Airflow in a real browser: the two tabs, the links, the log, the form of a connection.

Chromium is Debian's, and Playwright drives it. Without them the tests fail. `make screenshots` makes the pictures of
the docs. The browser reaches no other server.
"""

import base64
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page

if importlib.util.find_spec("airflow") is None:
    pytest.skip("Airflow is not installed", allow_module_level=True)

from tests.integrations.airflow_server import DAGS, AirflowServer
from tests.integrations.pictures import page, shown, take  # noqa: F401 - a fixture
from tests.waiting import wait_until

pytestmark = [pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AirflowServer]:
    home = tmp_path_factory.mktemp("airflow") / "home"
    server = AirflowServer(home, DAGS, AIRFLOW__CORE__TEST_CONNECTION="Enabled")
    yield server
    server.close()


def test_the_pages_of_a_task_and_of_its_run(page: Page, server: AirflowServer, tmp_path: Path) -> None:
    """While the task runs, its page has the links, and the tab the present rate."""
    run = server.trigger("attended", folder=str(tmp_path))
    wait_until(lambda: run.links()["Receipt"], "links of the running task")
    address = f"{server.url}/dags/attended/runs/{run.run_id}"
    page.goto(f"{address}/tasks/work/details")
    shown(page, "Extra Links", "Receipt")
    for name in ("Skyward", "Receipt"):
        assert page.get_by_role("link", name=name, exact=True).last.get_attribute("href") == run.links()[name]
    page.goto(f"{address}/tasks/work/plugin/skyward")
    shown(page, "36.0000 USD per hour", "Machines now")
    (tmp_path / "go").touch()
    run.wait("success")
    cost = f"{run.xcom('skyward_cost')['cost_usd']:.4f} USD"
    page.goto(f"{address}/tasks/work/plugin/skyward")
    assert cost in shown(
        page,
        "0.0000 USD per hour",
        "running calls",
        "local lists it no more",
        "Events",
        "Receipt",
        "Done",
        "Utilisation",
    )
    take(page, "skyward-tab")
    one_sample(page, run.stored("skyward_metrics"))
    page.goto(f"{address}/plugin/skyward-cost")
    assert cost in shown(
        page, "Cost of the run", "At on-demand prices", "5.0000 USD", "% used", run.xcom("skyward_cost")["pool_id"]
    )
    take(page, "cost-tab", block=(332, 268, 760, 452))
    page.goto(f"{address}/tasks/work")
    text = shown(page, "the end", "Release", "returned value: 42")
    assert "releasing" not in text
    take(page, "task-log")


def test_the_page_of_a_task_on_the_pool_of_a_setup(page: Page, server: AirflowServer, tmp_path: Path) -> None:
    """It has the task's uses of the pool, by try, and the pool's machines. The rest of the pool is the setup's."""
    (tmp_path / "go").touch()
    run = server.trigger("shared", folder=str(tmp_path))
    run.wait("success")
    page.goto(f"{server.url}/dags/shared/runs/{run.run_id}/tasks/work/plugin/skyward")
    text = shown(page, "Slot time", "Machines of these pools", "36.0000", f"{run.tab()['cost_usd']:.4f} USD")
    assert "What the time was spent on" not in text


def one_sample(page: Page, metrics: dict[str, Any]) -> None:
    """The chart of a task with one sample, as short tasks have it, shows a point for each kind."""
    stored = {"key": "skyward_metrics", "value": metrics | {"course": [[1_800_000_000.0, 40.0, 70.0, 0.01]]}}
    page.route("**/state-store/skyward_metrics*", lambda route: route.fulfill(json=stored))
    page.reload()
    shown(page, "0 to 100 %, at ")
    points = page.locator("svg[aria-label='utilisation over time'] polyline").all()
    lengths = [point.evaluate("line => line.getTotalLength()") for point in points]
    assert [length > 0 for length in lengths] == [True, True], "a line without length is not drawn"
    page.unroute("**/state-store/skyward_metrics*")


def test_the_form_of_a_connection_has_masked_fields_and_a_test(page: Page, server: AirflowServer) -> None:
    """Neither the ledger's URL nor the secret key is readable on the page. A test reads the ledger."""
    page.goto(f"{server.url}/connections")
    page.get_by_role("button", name="Add Connection").first.click()
    page.locator("input[name=connection_id]").fill("skyward_default")
    page.get_by_role("combobox").last.click()
    page.keyboard.type("skyward")
    page.get_by_role("option", name="Skyward", exact=True).click()
    page.locator("input[name=password]").fill(base64.b64encode(b"k" * 32).decode())
    page.get_by_role("button", name="Extra Fields", exact=True).click()
    page.locator("input[name=element_ledger_url]").fill(server.ledger_url)
    fields = [page.locator(f"input[name={name}]") for name in ("element_ledger_url", "password")]
    assert [field.get_attribute("type") for field in fields] == ["password", "password"]
    take(page, "connection-form")
    page.get_by_role("button", name="Save").click()
    shown(page, "1 Connection")
    page.locator("input[name=element_ledger_url]").wait_for(state="detached")  # the form closes slowly, with its values
    assert page.get_by_role("button", name="Test Connection").is_enabled()
    assert server.ledger_url not in page.content()
    stored = server.ask("GET", "/api/v2/connections/skyward_default")
    body = {name: stored[name] for name in ("connection_id", "conn_type", "password", "extra")}
    assert body["password"] == "***"
    tested = server.ask("POST", "/api/v2/connections/test", json=body)
    assert tested == {"status": True, "message": "the ledger answers"}
