"""What Prefect's UI shows of a run and its cost, and the end of the money, on a real API.

Automations are in nightly/integrations/test_prefect_automations.py: written on this server, they may stop it.
"""

import json
import re
import time
from dataclasses import replace
from decimal import Decimal
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import httpx
import pytest

pytest.importorskip("prefect")
from tests.integrations import prefect_server  # isort: skip
from tests.integrations.prefect_server import artifacts, asked, events_of, messages
from tests.waiting import wait_until

from prefect import flow, tags, task  # isort: skip
from prefect.blocks.notifications import CustomWebhookNotificationBlock
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import get_client
from prefect.runtime import flow_run as current_run
from prefect.states import Running

import skyward_core as sky
from prefect_skyward import SkywardTaskRunner, cost_so_far, settle_flow_runs
from prefect_skyward.after_sweep import complete_bills
from prefect_skyward.automations import deploy_budget_notification, deploy_crash_guard
from prefect_skyward.report import pages
from prefect_skyward.report.flow_trend import write_trend
from prefect_skyward.report.prefect_api import RunApi
from prefect_skyward.report.run_report import wait_for_late_reports
from skyward_core.ledger.ledger import Ledger, default_url
from skyward_core.ledger.rows import Account, Period

pytestmark = [pytest.mark.filterwarnings("default")]  # Prefect's own warnings are not our faults
api = pytest.fixture(scope="module", autouse=True)(prefect_server.served)
PRICE = 36.0


@task(cache_policy=NO_CACHE)
def train(step_count: int) -> int:
    for step in range(step_count):
        sky.report(step=step, loss=1.0 / (step + 1))
        time.sleep(0.05)
    return step_count


@task(cache_policy=NO_CACHE)
def double(x: int) -> int:
    return 2 * x


@pytest.fixture(scope="module")
def run(api: str) -> SimpleNamespace:
    """A flow run of two attempts, each with a pool; the first one fails."""
    events: list[Any] = []
    ids: list[str] = []
    trained: list[str] = []
    live: list[tuple[dict[str, float], float]] = []

    @flow(
        name="two attempts",
        retries=1,
        task_runner=SkywardTaskRunner(
            provider=sky.Local(price_per_hour=PRICE), nodes=2, on_event=events.append, max_cost=10
        ),
    )
    def attempts() -> None:
        ids.append(current_run.id)
        assert double.map([1, 2, 3]).result() == [2, 4, 6]
        if len(ids) == 1:
            raise LookupError("the first attempt")
        future = train.submit(5)
        assert future.result() == 5
        trained.append(str(future.task_run_id))
        work = sky.Work(system="prefect", run=current_run.id)
        live.append((sky.cost_of(work), cost_so_far()))

    with tags("of a user", "$5"):
        attempts()
    finals = [event for event in events if isinstance(event, sky.CostFinal)]
    pool_ids = [event.pool_id for event in events if isinstance(event, sky.InfraCreating)]
    assert len(finals) == len(pool_ids) == 2
    found = artifacts(ids[0])
    return SimpleNamespace(
        id=UUID(ids[0]),
        pool_ids=pool_ids,
        finals=finals,
        usd=sum(final.total_cost for final in finals),
        trained=trained[0],
        live=live[0],
        flow_id=asked("/flow_runs/filter", {"flow_runs": {"id": {"any_": [ids[0]]}}})[0]["flow_id"],
        of_run={one["key"]: one for one in found if one["task_run_id"] is None},
        of_tasks={one["task_run_id"]: one for one in found if one["task_run_id"] is not None},
        count=len(found),
        keys=[one["key"] for one in found if one["task_run_id"] is None],
        provisioned=[event.instance_id for event in events if isinstance(event, sky.InstanceProvisioned)],
    )


def amounts(page: str, row: str) -> float:
    """The last amount of the row that begins with these words."""
    (line,) = [line for line in page.splitlines() if line.startswith(f"| {row}")]
    return float(re.findall(r"\$([0-9.]+)", line)[-1])


def section(page: str, head: str) -> list[list[str]]:
    """The cells of the table below a head, without its own head."""
    lines = page.split(f"### {head}")[1].split("###", maxsplit=1)[0].splitlines()
    return [line.strip("| ").split(" | ") for line in lines if line.startswith("|")][2:]


def test_the_cost_of_a_retried_run_is_one_artifact_that_sums_its_attempts(run: SimpleNamespace) -> None:
    """Its description, which lists show, begins with the amount."""
    artifact = run.of_run["skyward-cost"]
    assert artifact["type"] == "markdown"
    assert amounts(artifact["data"], "Total |") == pytest.approx(run.usd, abs=1e-4)
    assert amounts(artifact["data"], "Earlier attempts") == pytest.approx(run.finals[0].total_cost, abs=1e-4)
    assert re.match(rf"{re.escape(pages.usd(run.usd))} · (processor \d+ % · )?2 x ", artifact["description"])
    assert run.keys.count("skyward-cost") == 1
    assert all(f"`skyward receipt {pool_id}`" in artifact["data"] for pool_id in run.pool_ids)


def test_the_page_of_the_cost_adds_up(run: SimpleNamespace) -> None:
    page = run.of_run["skyward-cost"]["data"]
    bill = run.finals[1].total_cost
    *machines, earlier, whole = section(page, "How it adds up")
    nodes = [cells for cells in machines if cells[0].startswith("node")]
    assert len(nodes) == 2
    for _, rate, seconds, cost in nodes:
        assert rate == "$36.00"
        assert float(cost.strip("$")) == pytest.approx(PRICE * float(seconds) / 3600, abs=PRICE / 3600 + 1e-4)
    assert sum(float(cells[-1].strip("$")) for cells in machines) == pytest.approx(bill, abs=1e-3)
    assert earlier[0] == "earlier attempts"
    assert float(whole[-1].strip("$*")) == pytest.approx(run.usd, abs=1e-4)
    *buckets, together = section(page, "What it went to")
    assert sum(float(cells[1].strip("$")) for cells in buckets) == pytest.approx(bill, abs=1e-3)
    assert float(together[1].strip("$*")) == pytest.approx(bill, abs=1e-4)
    *tasks, attempt = section(page, "By task")
    assert {cells[0] for cells in tasks} >= {"train", "double", "no task (opening, idle time, the end)"}
    assert sum(float(cells[2].strip("$")) for cells in tasks) == pytest.approx(bill, abs=1e-3)
    assert float(attempt[2].strip("$*")) == pytest.approx(bill, abs=1e-4)


def test_nodes_progress_tasks_and_reports_have_artifacts(run: SimpleNamespace) -> None:
    """The machines of all attempts are in one table, the task runs in another; the costliest ones have one too."""
    nodes, tasks = (json.loads(run.of_run[key]["data"]) for key in ("skyward-nodes", "skyward-tasks"))
    assert [(row["pool"], row["node"]) for row in nodes] == [(pool, node) for pool in run.pool_ids for node in (0, 1)]
    assert {row["instance id"] for row in nodes} == set(run.provisioned)
    assert sum(row["USD"] for row in nodes) == pytest.approx(run.usd, abs=1e-4)
    assert {(row["price per hour"], row["spot"], row["state"]) for row in nodes} == {(PRICE, "no", "ended")}
    progress = run.of_run["skyward-machines"]
    assert (progress["type"], float(progress["data"])) == ("progress", 100.0)
    assert "ready after" in progress["description"]
    assert sorted(row["task"] for row in tasks) == ["double"] * 6 + ["train"]
    assert all(row["USD"] > 0 for row in tasks)
    trained = next(row for row in tasks if row["task"] == "train")
    assert trained["task run"] == run.trained
    assert trained["loss"] == pytest.approx(0.2)
    assert set(run.of_tasks) <= {row["task run"] for row in tasks}
    reported = run.of_tasks[run.trained]
    assert re.search(r"\| loss \| 0\.2 \| 0\.2 \| 1 \| `[▁▂▃▄▅▆▇█]+` \|", reported["data"])
    assert "Step 4" in reported["data"]
    assert reported["description"].startswith("$")
    assert reported["description"].endswith("loss 0.2")


def test_events_are_few_and_name_run_and_pool(run: SimpleNamespace) -> None:
    """One when a pool is ready and one with its bill, each related to the flow run and its flow."""
    found = wait_until(lambda: found if len(found := events_of(run.id)) >= 4 else None)
    assert [one["event"] for one in found] == ["skyward.pool.ready", "skyward.cost.final"] * 2
    for one, pool_id in zip(found, [pool for pool in run.pool_ids for _ in (0, 1)], strict=True):
        assert one["resource"]["prefect.resource.id"] == f"skyward.pool.{pool_id}"
        roles = {related["prefect.resource.role"] for related in one["related"]}
        assert {"flow-run", "flow"} <= roles
    assert [one["payload"]["usd"] for one in found[1::2]] == [final.total_cost for final in run.finals]
    assert found[3]["payload"]["flow_run_usd"] == pytest.approx(run.usd, abs=1e-4)
    assert len(events_of(run.id, "prefect.artifact.")) <= 8


def test_live_figures_are_never_below_the_ledger_nor_above_the_bill(run: SimpleNamespace) -> None:
    """The ledger has each pool's cost up to the last entry; the bill is the ledger's last word."""
    first, second = run.pool_ids
    in_the_ledger, shown = run.live
    assert in_the_ledger[first] == pytest.approx(run.finals[0].total_cost, abs=1e-6)
    assert 0 < in_the_ledger[second] <= shown <= run.finals[1].total_cost
    final = sky.cost_of(sky.Work(system="prefect", run=str(run.id)))
    assert final == pytest.approx(
        dict(zip(run.pool_ids, (one.total_cost for one in run.finals), strict=True)), abs=1e-6
    )


def test_the_card_of_the_flow_has_the_cost_of_its_last_run_and_those_before(run: SimpleNamespace) -> None:
    """One artifact for each flow, of no run; another run changes it."""

    def card() -> dict[str, Any]:
        key = f"skyward-flow-two-attempts-{run.flow_id[:8]}"
        found = asked("/artifacts/latest/filter", {"artifacts": {"key": {"any_": [key]}}})
        return found[0] if found else {}

    last = f"last run {pages.usd(run.usd)}"
    first = wait_until(lambda: its if (its := card()) and its["description"].startswith(last) else None, last)
    assert first["flow_run_id"] is None
    write_trend(UUID(run.flow_id))
    assert (card()["latest_id"], card()["data"]) == (first["latest_id"], first["data"])
    (row,) = [line for line in first["data"].splitlines() if f"| {pages.usd(run.usd)} ████ |" in line]
    assert "| Completed |" in row


def test_the_card_has_the_bill_of_a_run_whose_labels_a_busy_server_has_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The next run writes the labels; the cost artifact has their figures."""
    ids: list[str] = []

    def refuse(*_: object) -> None:
        request = httpx.Request("PATCH", "http://prefect")
        raise httpx.HTTPStatusError("locked", request=request, response=httpx.Response(503, request=request))

    @flow(name="labels-refused", task_runner=SkywardTaskRunner(provider=sky.Local(price_per_hour=PRICE)))
    def refused() -> None:
        ids.append(current_run.id)
        assert double.submit(1).result() == 2

    with monkeypatch.context() as busy:
        busy.setattr(RunApi, "label", refuse)
        refused()
    usd = sum(sky.cost_of(sky.Work(system="prefect", run=ids[0])).values())
    key = {"key": {"any_": ["skyward-flow-labels-refused"]}}
    (card,) = wait_until(lambda: asked("/artifacts/latest/filter", {"artifacts": key}))
    assert card["description"].split(" · ")[0] == f"last run {pages.usd(usd)}"
    assert "≥" not in card["data"]
    refused()

    def labels() -> dict[str, Any]:
        return asked("/flow_runs/filter", {"flow_runs": {"id": {"any_": [ids[0]]}}})[0]["labels"]

    wait_until(lambda: labels().get("skyward.is_final"), "its labels")
    assert labels()["skyward.cost_usd"] == pytest.approx(usd, abs=1e-6)
    (page,) = [one for one in artifacts(ids[0]) if one["key"] == "skyward-cost"]
    assert "by the ledger" not in page["description"], "its process has written the page"


def test_a_second_attempt_whose_labels_are_refused_does_not_keep_the_bill_of_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first attempt's labels say that they are final: it does not know that another one follows."""
    ids: list[str] = []
    label = RunApi.label

    def refuse_second(self: RunApi, labels: dict[str, Any], *more: Any) -> None:
        if len(ids) > 1 and "skyward.cost_usd" in labels:
            request = httpx.Request("PATCH", "http://prefect")
            raise httpx.HTTPStatusError("locked", request=request, response=httpx.Response(503, request=request))
        label(self, labels, *more)

    @flow(name="labels-kept", retries=1, task_runner=SkywardTaskRunner(provider=sky.Local(price_per_hour=PRICE)))
    def twice() -> None:
        ids.append(current_run.id)
        assert double.submit(1).result() == 2
        if len(ids) == 1:
            raise LookupError("the first attempt")

    with monkeypatch.context() as busy:
        busy.setattr(RunApi, "label", refuse_second)
        twice()
        wait_for_late_reports()
    usd = sum(sky.cost_of(sky.Work(system="prefect", run=ids[0])).values())
    (card,) = asked("/artifacts/latest/filter", {"artifacts": {"key": {"any_": ["skyward-flow-labels-kept"]}}})
    assert card["description"].split(" · ")[0] == f"last run {pages.usd(usd)}"
    (run,) = asked("/flow_runs/filter", {"flow_runs": {"id": {"any_": [ids[0]]}}})
    assert run["labels"]["skyward.is_final"] is False, "the next run, or the sweep, writes them"
    assert settle_flow_runs() >= 1
    (run,) = asked("/flow_runs/filter", {"flow_runs": {"id": {"any_": [ids[0]]}}})
    assert (run["labels"]["skyward.is_final"], run["labels"]["skyward.cost_usd"]) == (
        True,
        pytest.approx(usd, abs=1e-6),
    )


def test_a_killed_run_is_settled_though_no_label_of_it_was_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy server has refused them, and then the process was killed: Prefect shows the run as Running for ever."""
    ids: list[str] = []

    @flow(name="unlabelled", task_runner=SkywardTaskRunner(provider=sky.Local(price_per_hour=PRICE)))
    def unlabelled() -> None:
        ids.append(current_run.id)
        assert double.submit(1).result() == 2

    with monkeypatch.context() as dead:
        dead.setattr(RunApi, "label", lambda *_: None)
        unlabelled()
        wait_for_late_reports()
    with get_client(sync_client=True) as client:
        client.set_flow_run_state(UUID(ids[0]), Running(), force=True)
    assert settle_flow_runs() >= 1
    (found,) = asked("/flow_runs/filter", {"flow_runs": {"id": {"any_": ids}}})
    assert found["labels"]["skyward.is_final"]


def test_a_bill_that_still_grows_is_not_called_final(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine may be left that is not confirmed gone. Whoever asks next, once it is gone, makes the bill final."""
    ids: list[str] = []
    parts = sky.cost_parts

    def growing(*which: Any, **more: Any) -> list[sky.CostPart]:
        return [replace(part, is_final=False) for part in parts(*which, **more)]

    @flow(name="growing", task_runner=SkywardTaskRunner(provider=sky.Local(price_per_hour=PRICE)))
    def grows() -> None:
        ids.append(current_run.id)
        assert double.submit(1).result() == 2

    def is_final() -> bool:
        (found,) = asked("/flow_runs/filter", {"flow_runs": {"id": {"any_": ids}}})
        return found["labels"]["skyward.is_final"]

    with monkeypatch.context() as early:
        early.setattr(sky, "cost_parts", growing)
        grows()
        wait_for_late_reports()
    assert not is_final()
    assert settle_flow_runs() >= 1
    assert is_final()


def test_a_run_whose_process_could_not_write_its_bill_gets_it_by_the_ledger(monkeypatch: pytest.MonkeyPatch) -> None:
    """From whoever asks next, also another process: total, labels, tag and the event, once however often it is asked.

    Its state in Prefect may be Running for ever. A run that cannot be settled keeps no other one from it.
    """
    ids: list[str] = []

    def fail() -> Any:
        raise OSError("as it was asked to")

    label = RunApi.label

    @flow(name="unwritten", task_runner=SkywardTaskRunner(provider=sky.Local(price_per_hour=PRICE)))
    def unwritten() -> None:
        ids.append(current_run.id)
        assert double.submit(1).result() == 2

    with monkeypatch.context() as dead:
        dead.setattr(RunApi, "emit", lambda *_, **__: None)
        dead.setattr(RunApi, "tag", lambda *_: None)
        dead.setattr(RunApi, "label", lambda api, *_: label(api, {"skyward.is_final": False}))
        node_rows = pages.node_rows
        dead.setattr(pages, "node_rows", lambda *of: [{**row, "state": "rented"} for row in node_rows(*of)])
        unwritten()
        unwritten()
        wait_for_late_reports()  # the second one settles the first one, as far as it may
    assert events_of(ids[0]) == []
    with get_client(sync_client=True) as client:  # SIGKILL and SIGTERM leave it Running
        client.set_flow_run_state(UUID(ids[0]), Running(), force=True)
    read = RunApi.read
    with monkeypatch.context() as fault, pytest.raises(OSError, match="as it was asked to") as refused:
        fault.setattr(RunApi, "read", lambda api, keys: fail() if api._flow_run_id == UUID(ids[1]) else read(api, keys))
        settle_flow_runs()
    assert ids[1] in refused.value.__notes__[0]
    (found,) = asked("/flow_runs/filter", {"flow_runs": {"id": {"any_": ids[:1]}}})
    usd = sum(sky.cost_of(sky.Work(system="prefect", run=ids[0])).values())
    assert found["labels"]["skyward.is_final"]
    assert found["labels"]["skyward.cost_usd"] == pytest.approx(usd, abs=1e-6)
    assert found["tags"][0].startswith(pages.usd(usd))
    assert (found["labels"]["skyward.provider"], found["labels"]["skyward.nodes"]) == ("local", 1)
    (nodes,) = [one for one in artifacts(ids[0]) if one["key"] == "skyward-nodes"]
    (node,) = json.loads(nodes["data"])
    assert (node["state"], node["USD"]) == ("ended", pytest.approx(usd, abs=1e-6))
    assert nodes["description"] == f"1 machine · {pages.usd(usd)}"
    RunApi(UUID(ids[0])).label({"skyward.is_final": False})
    assert complete_bills() >= 1
    (card,) = asked("/artifacts/latest/filter", {"artifacts": {"key": {"any_": ["skyward-flow-unwritten"]}}})
    assert "| Running |" in card["data"], "a run that will never end is in the sum of its flow"
    (event,) = wait_until(lambda: events_of(ids[0]))
    assert (event["event"], event["payload"]["flow_run_usd"]) == ("skyward.cost.final", pytest.approx(usd, abs=1e-6))
    assert {one["prefect.resource.role"] for one in event["related"]} >= {"flow-run", "flow"}


def test_labels_of_the_flow_run_have_the_cost_and_the_pool(run: SimpleNamespace) -> None:
    def seen() -> dict[str, Any]:
        return asked("/flow_runs/filter", {"flow_runs": {"id": {"any_": [str(run.id)]}}})[0]

    found = wait_until(lambda: its if (its := seen())["labels"].get("skyward.is_final") else None, "its last labels")
    labels = found["labels"]
    use = (
        f" · processor {labels['skyward.utilisation_percent']:.0f} %" if "skyward.utilisation_percent" in labels else ""
    )
    # one tag of two attempts; labels stay, so the use may be that of the first one if the second was too short for a sample
    (tag,) = {*found["tags"]} - {"of a user", "$5"}
    assert (len(found["tags"]), tag in {pages.usd(run.usd), pages.usd(run.usd) + use}) == (3, True)
    assert labels["skyward.cost_usd"] == pytest.approx(run.usd, abs=1e-4)
    assert labels["skyward.pool_id"] == run.pool_ids[1]
    assert (labels["skyward.provider"], labels["skyward.nodes"], labels["skyward.is_final"]) == ("local", 2, True)
    lines = wait_until(lambda: lines if len(lines := messages(run.id)) > 10 else None)
    assert [text for level, text in lines if level >= 30 and "incomplete" in text] == []
    said = "\n".join(text for _, text in lines)
    assert "$72.00 per hour; at most $10.00 (max_cost)" in said
    assert all(words in said for words in ("launching 2 x local on local", "is ready after", "done: "))


# ── the end of the money ─────────────────────────────────────────────────────────────────────────────────────────────


@task(retries=2, retry_delay_seconds=0, cache_policy=NO_CACHE)
def add(a: int, b: int) -> int:
    return a + b


def test_a_run_whose_money_is_used_up_fails_with_the_reason_and_is_not_tried_again() -> None:
    """Neither its task nor the flow; an event says so, and nothing was rented."""
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
    (event,) = wait_until(lambda: events_of(ids[0], "skyward.budget."))
    assert event["event"] == "skyward.budget.exceeded"
    assert event["payload"]["limit_usd"] == 0.0001
    assert "max_cost" in event["payload"]["reason"]
    said = ("The task is not tried again", "the money of the flow run is used up: it is not tried again")
    assert wait_until(lambda: all(any(words in text for _, text in messages(ids[0])) for words in said))


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
    (event,) = wait_until(lambda: events_of(begun[0], "skyward.budget."))
    assert (event["event"], event["payload"]["account"]) == ("skyward.budget.exceeded", "poor team")


def test_a_subflow_that_uses_the_pools_around_it_is_not_tried_again_either() -> None:
    """Neither one whose call finds that the money is used up, nor one that begins after it."""
    begun: list[str] = []

    @flow(retries=2, task_runner=SkywardTaskRunner(inherit=True))
    def inner(name: str) -> None:
        begun.append(name)
        add.submit(1, 1).result()

    @flow(retries=2, task_runner=SkywardTaskRunner(provider=sky.Local(price_per_hour=36.0), max_cost=0.0001))
    def outer() -> None:
        add.submit(1, 1).wait()
        inner("first", return_state=True)
        inner("second")

    assert "BudgetExceeded" in outer(return_state=True).message
    assert begun == ["first", "second"]


def test_automations_that_cannot_work_are_refused() -> None:
    with pytest.raises(sky.BadRequest, match="not saved"):
        deploy_budget_notification(CustomWebhookNotificationBlock(name="x", url="http://127.0.0.1/", method="POST"))
    with pytest.raises(sky.BadRequest, match="slack-webhook/alerts"):
        deploy_budget_notification("alerts")
    with pytest.raises(sky.BadRequest, match="prefect block ls"):
        deploy_budget_notification("slack-webhook/alerts")
    with pytest.raises(sky.BadRequest, match="10 seconds"):
        deploy_crash_guard(5)
