"""Texts of nodes, providers and others in what the orchestrators show and store: pages, metadata, logs, links."""

import importlib
import logging
import warnings
from contextlib import suppress
from contextvars import copy_context
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

import skyward_core as sky
from tests.hostile_texts import (
    HOSTILE_TEXTS,
    hidden_in,
    refuse_foreign_markdown,
    refuse_hidden,
    refuse_hidden_in_data,
    rendered,
    tags_of,
)

for _module in ("prefect_skyward", "airflow_provider_skyward.cost_app", "dagster_skyward"):
    with suppress(ImportError), warnings.catch_warnings(action="ignore"):  # without one its tests are skipped
        importlib.import_module(_module)  # orchestrators start processes when they are imported

pytestmark = [pytest.mark.filterwarnings("default")]  # the orchestrators' own warnings are not our faults
hostile = pytest.mark.parametrize("text", HOSTILE_TEXTS.values(), ids=HOSTILE_TEXTS)
HARMLESS = "a word"


# ── Prefect ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def state_of_run(text: str) -> Any:
    """Return the state of a flow run in which each text of others is this one."""
    pages, pool_state, task_costs = (_report(name) for name in ("pages", "pool_state", "task_costs"))
    pool = pool_state.PoolState(text, trouble=text)
    metrics = sky.Metrics("i", 0, 40.0, 10.0, 0.0, 0.0, gpu_utilization=50.0)
    for event in (
        sky.InfraCreating("sky-1"),
        sky.InstanceLaunching(2, text, text),
        sky.InstanceProvisioned(text, 0, spot=True, provider=text, instance_type=text, accelerator=text),
        sky.InstanceProvisioned("i-1", 1, spot=False, provider=text, console_url=f"https://console.example/{text}"),
        sky.CallProgress(1, 0, 0),
        metrics,
        sky.InstancesUnconfirmed((text,), text, is_free=False),
        sky.CostFinal(1.0, 10.0, 3.6, 0, 1, 0.0, {text: 1.0}),
    ):
        pool.after(event, 0.0)
    shared = pool_state.PoolState(text)
    instance = sky.Instance(
        id="i-9", provider="aws", pool_id="p-9", rank=0, state=sky.InstanceState.RUNNING, region="r", instance_type=text
    )
    shared.share(pool_state.SharedPool(text, "p-9", text, (sky.Node(instance=instance, rank=0),)), 10.0)
    tasks = task_costs.TaskCosts()
    use = sky.PoolUse(sky.ComputePool(provider=sky.Local()), sky.Work(task=text, task_run="run-1"), is_alone=False)
    tasks.begin(use)
    tasks.report(sky.CallReported(0, "i", "call", 7, {text: 1.0}, 0.0, use=use.id))
    return pages.RunState([pool, shared], tasks=tasks, earlier={"sky-0": 1.0})


def _report(name: str) -> Any:
    pytest.importorskip("prefect")
    return importlib.import_module(f"prefect_skyward.report.{name}")


def prefect_pages(text: str) -> list[str]:
    """Return every page and description in Markdown that Prefect gets."""
    pages, trend = _report("pages"), _report("flow_trend")
    state = state_of_run(text)
    (run,) = state.tasks.runs.values()
    figures = trend.RunFigures(text, "https://prefect.example/runs/1", text, "11-27 09:00", 1.0, text, 50.0)
    rows = [{"task": text, "USD": 1.0}, {"task": "other", "USD": 2.0}]
    opening = _report("pool_state").PoolState("", trouble=text)
    return [
        pages.cost_page(state, 10.0),
        pages.summary(state),
        pages.settled_page(3.0, rows, ["sky-1"]),
        pages.task_page(run),
        pages.task_summary(run),
        pages.progress_words(opening),
        pages.progress_words(state.pools[1]),
        trend.trend_page([figures]),
        trend.trend_summary([figures]),
    ]


@hostile
def test_a_hostile_text_makes_nothing_in_prefect_s_artifacts(text: str) -> None:
    """No image, link, tag or column: each page has the tags that it has with a harmless word."""
    for page, harmless in zip(prefect_pages(text), prefect_pages(HARMLESS), strict=True):
        refuse_foreign_markdown(page, harmless)


@hostile
def test_a_hostile_text_is_escaped_once_in_prefect_s_artifacts(text: str) -> None:
    """A reader sees the visible text, without backslashes or entities of ours."""
    seen = sky.shown_text.visible(" ".join(text.split()))
    page = prefect_pages(text)[0]
    assert tags_of(rendered(page))[1].count(seen) >= 6


@hostile
def test_a_hostile_text_can_be_sent_to_prefect_s_api(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Artifacts, rows of tables, labels and events; SQLite and PostgreSQL take each of them."""
    api = _report("prefect_api")
    pages = _report("pages")
    sent: list[Any] = []

    class Client:
        def create_artifact(self, artifact: Any) -> Any:
            sent.append(artifact.model_dump(mode="json"))
            return type("Made", (), {"id": UUID(int=2)})

        def update_flow_run_labels(self, _: UUID, labels: Any) -> None:
            sent.append(labels)

    monkeypatch.setattr(api, "asked", lambda ask, seconds=0.0: ask(Client()))
    monkeypatch.setattr(api, "emit_event", lambda event, **fields: sent.append(fields | {"id": "", "event": event}))
    run = api.RunApi(UUID(int=1))
    state = state_of_run(text)
    run.write("skyward-nodes", "table", pages.node_rows(state, 1.0), text)
    run.write("skyward-tasks", "table", pages.task_rows(state.tasks.runs.values()), text)
    run.write("skyward-cost", "markdown", text, text)
    run.label({"skyward.x": text})
    run.emit("skyward.instance.lost", "sky-1", text, {"reason": text})
    assert len(sent) == 5
    refuse_hidden_in_data(sent)


@hostile
def test_a_hostile_line_can_be_sent_to_prefect_s_log(text: str, caplog: pytest.LogCaptureFixture) -> None:
    """Each of its lines begins with its node. A lone surrogate in one record of a batch would lose all of them."""
    pytest.importorskip("prefect")
    from prefect_skyward.ui import RunLog

    log = RunLog(logging.getLogger("of the run"), copy_context(), has_nested_runs=True)
    with caplog.at_level(logging.DEBUG, "of the run"):
        for level, is_shown in ((None, True), (logging.WARNING, True), (logging.INFO, False)):
            log.say_line(sky.LogLine(0, "i", f"a\n{text}", 0.0, level=level, is_shown=is_shown))
        log.say(logging.ERROR, f"the pool could not be opened: {text}")
    *lines, words = [one.getMessage() for one in caplog.records]
    for line in lines:
        refuse_hidden(line)
        assert all(part.startswith("[node 0] ") for part in line.split("\n"))
    refuse_hidden(words)


def test_a_line_that_names_a_run_in_too_deep_data_is_a_line_of_its_node(caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("prefect")
    from prefect_skyward.ui import RunLog

    deep = '[task run {"a":' + "[" * 100_000 + "]" * 100_000 + "}] x"
    log = RunLog(logging.getLogger("of the run"), copy_context(), has_nested_runs=True)
    with caplog.at_level(logging.DEBUG, "of the run"):
        log.say_line(sky.LogLine(0, "i", deep, 0.0))
    assert caplog.records[0].getMessage() == f"[node 0] {deep}"


# ── Airflow ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@hostile
def test_a_hostile_line_is_marked_in_airflow_s_task_log(text: str, caplog: pytest.LogCaptureFixture) -> None:
    """Lines of detached calls, news of the pool, and errors as arguments; numbers keep their format."""
    pytest.importorskip("airflow")
    from airflow_provider_skyward.task_log import TaskLog, lines_for_log

    news = sky.CallNews("running", [text, "b"], 2, 1, [None, 30])
    for _, line in lines_for_log(news):
        refuse_hidden(line)
        assert all(part.startswith("[node 1] ") for part in line.split("\n"))
    log = TaskLog(logging.getLogger("of the task"))
    with caplog.at_level(logging.DEBUG, "of the task"):
        log.log(logging.INFO, "%s", text)
        log.info("it said %s in %.1f s", ValueError(text), 2.5)
        log.warning("%s", text)
        log.exception("try %d: %s", 2, text)
    for record in caplog.records:
        refuse_hidden(record.getMessage())
    assert " in 2.5 s" in caplog.records[1].getMessage()
    for record in caplog.records[1:]:
        assert all(line.startswith("  ") or not line for line in record.getMessage().split("\n")[1:])


@hostile
def test_a_hostile_text_can_be_stored_by_airflow(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bill of the tabs, and the live metrics: `tabs.js` gives React each of them as a text."""
    pytest.importorskip("airflow")
    from airflow_provider_skyward import cost_app, progress

    pool = {
        "pool_id": "sky-1", "name": text, "users": [{"work": {"workflow": "dag", "task": text}, "cost_usd": 1.0}],
        "on_demand_usd": 1.0, "saved_usd": 0.0, "resources": [{"cloud_id": text, "evidence": text}],
        "created_at": "", "ended_at": "",
    }  # fmt: skip
    monkeypatch.setattr(sky, "receipts_of", lambda work: [pool], raising=False)
    monkeypatch.setattr(sky, "receipt_of", lambda pool_id: pool, raising=False)
    monkeypatch.setattr(sky, "cost_of", lambda work: {"sky-1": 1.0, "sky-2": 2.0}, raising=False)
    refuse_hidden_in_data(cost_app.bill_of_run("dag", "run"))
    refuse_hidden_in_data(cost_app.bill_of_task("dag", "run", "task"))
    stored: list[Any] = []
    store = type("Store", (), {"set": staticmethod(lambda key, value: stored.append(value))})
    seen = progress.Progress(logging.getLogger("x"), {"task_state_store": store}, sky.Work())
    monkeypatch.setattr(progress, "gauge", lambda *_: None)
    for event in (
        sky.InfraCreating("sky-1"),
        sky.InstanceProvisioned("i", 0, spot=False, provider=text),
        sky.CallReported(0, "i", "call", 1, {text: 1.0}, 0.0),
        sky.BudgetWarning(1.0, 2.0, text, text),
    ):
        seen.see(event)
    seen.tick()
    assert len(stored) == 1
    refuse_hidden_in_data(stored)


def test_the_tabs_of_airflow_make_no_html_of_texts() -> None:
    """They hand texts to React, and make links of pages only: any task can write the XCom of a link."""
    pytest.importorskip("airflow")
    import airflow_provider_skyward

    script = (Path(airflow_provider_skyward.__file__).parent / "tabs.js").read_text()
    assert not [
        word for word in ("innerHTML", "dangerouslySetInnerHTML", "outerHTML", "document.write") if word in script
    ]
    assert script.count("href:") == 1
    assert r"/^(https?:\/)?\//i.test(url" in script


# ── Dagster ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@hostile
def test_a_hostile_text_can_be_stored_and_shown_by_dagster(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Metadata, spans, errors with their causes, and lines of the log: Dagster's event log takes each of them."""
    dg = pytest.importorskip("dagster")
    from dagster_skyward import dagster_events, metadata, settlement, step_log, step_report

    found = metadata.shown({f"skyward/reported/{text}": text, "skyward/pool_id": text, "n": 1.0})
    refuse_hidden_in_data(found)
    receipt = settlement._as_metadata([{"name": text, "resources": [{"evidence": text}]}])
    refuse_hidden_in_data(receipt["skyward/receipt"].value)
    instance = sky.Instance(
        id=text, provider="aws", pool_id="p", rank=0, state=sky.InstanceState.RUNNING, region=text, instance_type=text
    )
    refuse_hidden_in_data(step_report._record(sky.Node(instance=instance, rank=0), None).data)
    sent: list[Any] = []
    dagster = type("Instance", (), {"report_engine_event": staticmethod(lambda *args, **more: sent.append(args))})()
    run: Any = None
    error = sky.NodeLost(text)
    kind = text.replace("\0", "").encode(errors="ignore").decode()  # Python refuses others as the name of a class
    error.__cause__ = type(kind, (ValueError,), {})(text)
    try:
        raise error
    except sky.NodeLost as raised:
        dagster_events.report_error(dagster, run, "step", f"NodeLost: {text}", raised)
    dagster_events.report_note(dagster, run, "step", text, {text: text})
    dagster_events.report_span(dagster, run, "step", text, start="x")
    for message, _, data in sent:
        refuse_hidden(message)
        assert hidden_in(dg.serialize_value(data)) == []
        refuse_hidden(str(data.error.to_string()) if data.error is not None else "")
    refuse_hidden(sent[0][2].error.cause.cls_name)
    assert "\n" not in sent[0][2].error.cause.cls_name
    use = sky.Utilisation()
    use.running(1)
    use.see(sky.Metrics("i", 0, 40.0, 10.0, 0.0, 0.0))
    for value in step_report.charts_of(use).values():
        assert set(tags_of(rendered(value.md_str))[0]) <= {"p", "img", "table", "thead", "tbody", "tr", "th", "td"}
    queued: list[Any] = []
    writer = step_log.LogWriter()
    monkeypatch.setattr(writer, "_put", queued.append)
    writer.write(run, logging.INFO, text)
    refuse_hidden(queued[0][2])


@hostile
def test_a_hostile_line_is_marked_in_the_output_of_dagster(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("dagster")
    from dagster_skyward.step_report import print_line

    print_line(sky.LogLine(0, "i", f"a\n{text}", 0.0))
    lines = capsys.readouterr().out
    refuse_hidden(lines)
    assert all(line.startswith("[node 0] ") for line in lines.removesuffix("\n").split("\n"))
