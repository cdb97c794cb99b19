"""The pages of a real `dagster dev` in a real browser: plots of the cost, Gantt chart, metadata, resources.

Chromium is Debian's, and Playwright drives it. Without them the tests fail. `make screenshots` makes the pictures of
the docs. The browser reaches no other server.
"""

import re
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Page

pytest.importorskip("dagster")

from dagster_skyward.metadata import COST_USD, OTHER_COST_USD, POOL_ID
from dagster_skyward.pool_asset import MACHINES, PHASES, POOLS, TOTAL_USD, USERS
from dagster_skyward.step_report import BOOTSTRAP, CHART, NODES_TABLE, PROVISION, RUN
from tests.integrations.dagster_server import DagsterServer, Run, metadata_of, served
from tests.integrations.pictures import page, take  # noqa: F401 - a fixture
from tests.waiting import wait_until

pytestmark = [pytest.mark.timeout(900)]
SECRETS = {"HF_TOKEN": "hf_kept_by_nodes", "TEAM_AWS_ID": "AKIA_kept_by_aws", "TEAM_AWS_KEY": "key_kept_by_aws"}

DEFINITIONS = '''
import time
import dagster as dg
import skyward_core as sky
from dagster_skyward import AWSCredentials, SkywardResource

def train(epochs):
    for epoch in range(epochs):
        print(f"epoch {epoch}")
        time.sleep(0.5)
    return 0.98

@dg.asset
def features(context: dg.AssetExecutionContext, compute: SkywardResource) -> float:
    """The training data."""
    return compute.run(context, train, 2).value

@dg.asset
def model(context: dg.AssetExecutionContext, compute: SkywardResource, features: float) -> dg.MaterializeResult:
    """A model that is trained on an ephemeral pool."""
    accuracy = compute.run(context, train, int(context.run.tags["epochs"])).value
    return dg.MaterializeResult(metadata={"accuracy": accuracy})

keys = AWSCredentials(access_key_id=dg.EnvVar("TEAM_AWS_ID"), secret_access_key=dg.EnvVar("TEAM_AWS_KEY"))
defs = dg.Definitions(
    assets=[features, model],
    jobs=[dg.define_asset_job("training", executor_def=dg.in_process_executor)],
    resources={
        "compute": SkywardResource(
            accelerator="A100", nodes=2, provider=sky.Local(price_per_hour=36.0, simulate="A100"), max_cost=10.0,
            secrets={"HF_TOKEN": dg.EnvVar("HF_TOKEN")},
        ),
        "keys": keys,
        "rented": SkywardResource(accelerator="A100", provider={"name": "aws"}, credentials=keys),
    },
)
'''

LAUNCHED = """resources:
  compute:
    config:
      accelerator: {name: A100, count: 2}
      nodes: {least: 1, most: 4}
      spot: if-available
      max_cost: 5.0
      WRONG
"""

POINTS = """canvas => {
    let part = canvas[Object.keys(canvas).find(key => key.startsWith("__reactFiber"))];
    while (!part.memoizedProps?.data?.datasets) part = part.return;
    return part.memoizedProps.data.datasets.map(one => [one.label, one.data.map(point => point.y).filter(Number.isFinite)]);
}"""
"""What a plot draws: the properties of the component around its canvas."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DagsterServer]:
    with served(tmp_path_factory.mktemp("dagster"), DEFINITIONS, **SECRETS) as it:
        yield it


@pytest.fixture(scope="module")
def runs(server: DagsterServer) -> list[Run]:
    """Three runs that have ended, with more and more epochs."""
    launched = [server.launch("training", epochs=epochs) for epochs in ("2", "4", "7")]
    assert [run.await_end() for run in launched] == ["SUCCESS"] * 3
    return launched


def move_up(page: Page, words: str) -> None:
    """Scroll until these words are the first of the page."""
    page.get_by_text(words, exact=True).first.evaluate("found => found.scrollIntoView({block: 'start'})")


def events_of(runs: list[Run], kind: str) -> list[dict[str, Any]]:
    """The metadata of the asset's events of a kind, oldest first."""
    found = [event for run in runs for event in run.events() if event["__typename"] == kind]
    return [metadata_of(event) for event in found if event["assetKey"]["path"] == ["model"]]


def test_the_plots_have_a_point_of_cost_for_each_materialization(
    page: Page, server: DagsterServer, runs: list[Run]
) -> None:
    """And one for the rest of each bill, from the observations. The points are the amounts of the events."""
    costs = [metadata[COST_USD]["floatValue"] for metadata in events_of(runs, "MaterializationEvent")]
    others = [one[OTHER_COST_USD]["floatValue"] for one in events_of(runs, "ObservationEvent") if OTHER_COST_USD in one]
    assert len(costs) == 3
    assert min(costs) > 0
    page.goto(f"{server.url}/assets/model")
    page.get_by_text("Plots", exact=True).click()
    page.get_by_text(COST_USD, exact=True).wait_for()
    plots = dict(row for one in page.locator("canvas").all() for row in one.evaluate(POINTS))
    assert sorted(plots[COST_USD]) == pytest.approx(sorted(costs))
    assert sorted(plots.get(OTHER_COST_USD, [])) == pytest.approx(sorted(others))
    move_up(page, "accuracy")
    page.wait_for_timeout(1000)  # the plots are drawn with an animation
    take(page, "cost-plot", block=(596, 104, 340, 206))


def test_the_metadata_are_a_table_with_the_machines(page: Page, server: DagsterServer, runs: list[Run]) -> None:
    """And the utilisation as bars and as a chart. Dagster shows Markdown of 1,000 characters and more after a click."""
    newest = events_of(runs, "MaterializationEvent")[-1]
    page.set_viewport_size({"width": 1600, "height": 1000})
    page.goto(f"{server.url}/assets/model")
    page.get_by_text(NODES_TABLE, exact=True).wait_for()
    text = page.inner_text("body")
    assert "0 to 100 % over time" in text
    assert newest[POOL_ID]["text"] in text
    assert "A100 80GB" in text
    machines = re.findall(r"local-[0-9a-f]{12}", str(newest[NODES_TABLE]["table"]["records"]))
    assert len(machines) == 2
    assert all(machine in text for machine in machines)
    move_up(page, "accuracy")
    take(page, "metadata")
    if len(newest[CHART]["mdStr"]) >= 1000:
        page.get_by_text("[Show Markdown]").first.click()
    chart = page.locator('img[src^="data:image/svg+xml"]').first
    assert chart.evaluate("image => image.decode().then(() => image.naturalWidth)") > 400
    page.set_viewport_size({"width": 1280, "height": 800})


def test_the_gantt_chart_has_the_spans_of_the_steps(page: Page, server: DagsterServer, runs: list[Run]) -> None:
    """The step that opens the pool has the opening, and both have the use."""
    page.goto(f"{server.url}/runs/{runs[-1].id}")
    spans = page.locator(".marker-whiskers[data-tooltip*=skyward]")
    expected = {f"features:{PROVISION}", f"features:{BOOTSTRAP}", f"features:{RUN}", f"model:{RUN}"}

    def shown() -> set[str | None]:  # in one look: the page draws the chart anew while it reads the run's log
        return set(spans.evaluate_all("all => all.map(one => one.getAttribute('data-tooltip'))"))

    wait_until(lambda: shown() == expected, f"the spans {sorted(expected)}")
    take(page, "gantt")


def test_the_tab_stdout_has_the_lines_of_the_nodes(page: Page, server: DagsterServer, runs: list[Run]) -> None:
    """Once the step is chosen: with several steps the page shows none."""
    page.goto(f"{server.url}/runs/{runs[-1].id}")
    page.get_by_text("stdout", exact=True).first.click()
    page.get_by_placeholder("Select a step").click()
    page.get_by_role("menuitem").first.click()
    page.get_by_text("epoch 6").first.wait_for()
    text = page.inner_text("body")
    assert re.search(r"\[node [01]\] epoch 6", text)
    assert "RESOURCE_INIT" not in text, "these are the events"
    take(page, "stdout")


def test_the_asset_of_the_pools_has_what_no_step_has_used(page: Page, server: DagsterServer, runs: list[Run]) -> None:
    """A point for each run, and the newest bill by phase, machine and user."""
    wait_until(lambda: len(server.observations(*POOLS, "training")) == len(runs), "the rests of the runs", 300)
    newest = server.observations(*POOLS, "training")[0]
    page.goto(f"{server.url}/assets/{'/'.join(POOLS)}/training?view=events")
    page.get_by_text(USERS, exact=True).first.wait_for()
    text = page.inner_text("body")
    assert newest[POOL_ID]["text"] in text
    assert all(words in text for words in (TOTAL_USD, PHASES, MACHINES, "none: start, idle time and end"))
    move_up(page, PHASES)
    take(page, "pool-asset")


def test_the_launchpad_knows_the_fields_of_a_pool(page: Page, server: DagsterServer) -> None:
    """It marks a field that is none, and may launch without it."""
    page.goto(f"{server.url}/locations/__repository__@definitions.py/jobs/training/playground")
    page.locator(".CodeMirror").first.wait_for()
    page.wait_for_load_state("networkidle")
    for wrong, words in (("colour: red", 'unexpected config entry "colour"'), ("", "No errors")):
        page.locator(".CodeMirror").first.evaluate(
            "(found, text) => found.CodeMirror.setValue(text)", LAUNCHED.replace("WRONG", wrong)
        )
        page.get_by_text(words).first.wait_for(timeout=60_000)
    take(page, "launchpad")


def test_the_pages_of_the_resources_show_names_and_no_secrets(
    page: Page, server: DagsterServer, runs: list[Run]
) -> None:
    """Nor do the answers of the server to these pages, and to the page of a run."""
    answers: list[Any] = []
    page.on("response", lambda answer: answers.append(answer))

    def shown(path: str, words: str) -> str:
        """The page once it has these words, with all that the server has answered to it."""
        answers.clear()
        page.goto(f"{server.url}{path}")
        page.get_by_text(words).first.wait_for()
        page.wait_for_load_state("networkidle")
        bodies = [answer.text() for answer in answers if "/graphql" in answer.url]
        assert bodies
        return "\n".join((page.content(), *bodies))

    resources = "/locations/__repository__@definitions.py/resources"
    texts = [
        shown(f"{resources}/rented", "credentials"),
        shown(f"{resources}/keys", "TEAM_AWS_KEY"),
        shown(f"/runs/{runs[-1].id}", "ENGINE_EVENT"),
        shown(f"{resources}/compute", "HF_TOKEN"),
    ]
    assert not any(secret in text for secret in SECRETS.values() for text in texts)
    page.set_viewport_size({"width": 2000, "height": 800})
    move_up(page, "secrets")
    take(page, "resource")
