"""The pages of a real Airflow in a real browser: the two tabs, the links, the log, the form of a connection.

Chromium is Debian's, and Playwright drives it. Without them the tests fail. The pages are kept as PNGs as in
test_prefect_browser.py; `make screenshots` makes those of the docs. The browser reaches no other server.
"""

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page

if importlib.util.find_spec("airflow") is None:
    pytest.skip("Airflow is not installed", allow_module_level=True)

from tests.integrations.airflow_server import AirflowServer, DagRun, wait_for
from tests.nightly.integrations.test_prefect_browser import keep, page, shown  # noqa: F401 - a fixture

pytestmark = [pytest.mark.timeout(600)]
MOST_BYTES = 250_000
"""Of one picture."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AirflowServer]:
    dags = (Path(__file__).parents[2] / "integrations" / "airflow_dags.py").read_text()
    home = tmp_path_factory.mktemp("airflow")
    server = AirflowServer(home / "home", {"airflow_dags.py": dags}, AIRFLOW__CORE__TEST_CONNECTION="Enabled")
    yield server
    server.close()


def address_of(run: DagRun) -> str:
    return f"{run.server.url}/dags/{run.dag_id}/runs/{run.run_id}"


def test_the_pages_of_a_task_and_of_its_run(page: Page, server: AirflowServer, tmp_path: Path) -> None:
    """While the task runs, its page has the links, and the tab the present rate. Afterwards the log is folded, and both
    tabs have the cost of the bill.
    """
    run = server.trigger("attended", folder=str(tmp_path))
    wait_for(lambda: run.links()["Receipt"], "links of the running task")
    page.goto(f"{address_of(run)}/tasks/work/details")
    shown(page, "Extra Links", "Receipt")
    for name in ("Skyward", "Receipt"):
        assert page.get_by_role("link", name=name, exact=True).last.get_attribute("href") == run.links()[name]
    page.goto(f"{address_of(run)}/tasks/work/plugin/skyward")
    shown(page, "36.0000 USD per hour", "Machines now")
    (tmp_path / "go").touch()
    run.wait("success")
    cost = f"{run.xcom('skyward_cost')['cost_usd']:.4f} USD"
    page.goto(f"{address_of(run)}/tasks/work/plugin/skyward")
    assert cost in shown(page, "0.0000 USD per hour", "running calls", "local lists it no more")
    assert keep(page, "skyward-tab") < MOST_BYTES
    page.goto(f"{address_of(run)}/plugin/skyward-cost")
    assert cost in shown(page, "Cost of the run", "At on-demand prices", run.xcom("skyward_cost")["pool_id"])
    assert keep(page, "cost-tab") < MOST_BYTES
    page.goto(f"{address_of(run)}/tasks/work")
    text = shown(page, "the end", "Release", "returned value: 42")
    assert "releasing" not in text
    assert keep(page, "task-log") < MOST_BYTES


def test_the_form_of_a_connection_has_masked_fields_and_a_test(page: Page, server: AirflowServer) -> None:
    """Neither the ledger's URL nor the secret key is readable on the page. A test reads the ledger.

    The button of Airflow 3.3.2 sends port 0 where a connection has none, which its server refuses: the test sends the
    rest of the button's request.
    """
    page.goto(f"{server.url}/connections")
    page.get_by_role("button", name="Add Connection").first.click()
    page.locator("input[name=connection_id]").fill("skyward_default")
    page.get_by_role("combobox").last.click()
    page.keyboard.type("skyward")
    page.get_by_role("option", name="Skyward", exact=True).click()
    page.locator("input[name=password]").fill("a-key-of-32-characters-or-more-0123")
    page.get_by_role("button", name="Extra Fields", exact=True).click()
    page.locator("input[name=element_ledger_url]").fill(server.ledger_url)
    fields = [page.locator(f"input[name={name}]") for name in ("element_ledger_url", "password")]
    assert [field.get_attribute("type") for field in fields] == ["password", "password"]
    assert keep(page, "connection-form") < MOST_BYTES
    page.get_by_role("button", name="Save").click()
    shown(page, "1 Connection")
    assert page.get_by_role("button", name="Test Connection").is_enabled()
    assert server.ledger_url not in page.content()
    stored = server.ask("GET", "/api/v2/connections/skyward_default")
    body = {name: stored[name] for name in ("connection_id", "conn_type", "password", "extra")}
    assert body["password"] == "***"
    tested = server.ask("POST", "/api/v2/connections/test", json=body)
    assert tested == {"status": True, "message": "the ledger answers"}
