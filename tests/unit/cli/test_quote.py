"""`skyward quote TARGET`: what the tasks of an orchestrator would rent, by a plugin that an entry point names."""

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

import skyward_core as sky
from skyward_core.machines.offers import Offer
from skyward_core.provisioning import plan as plans
from tests.cleanup.pools import FolderProvider
from tests.unit.cli.test_commands import Skyward, folder, lines, skyward, url  # noqa: F401 - fixtures

type Planner = Callable[[str], sky.Plan | None]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Sell one type at 2 USD per hour; return the requests for offers."""
    requests: list[object] = []
    sold = [Offer(provider="folder", instance_type="t", region="here", price_per_hour=2.0, vcpus=4, memory_gb=8)]

    def offers(_: FolderProvider, want: object) -> list[Offer]:
        requests.append(want)
        return sold

    monkeypatch.setattr(FolderProvider, "offers", offers)
    return requests


def install(monkeypatch: pytest.MonkeyPatch, **planners: Planner | ImportError) -> None:
    """Install plugins by their names; an ImportError is one whose orchestrator is not installed."""

    def loaded(planner: Planner | ImportError) -> Planner:
        if isinstance(planner, ImportError):
            raise planner
        return planner

    entries = [
        SimpleNamespace(name=name, load=lambda planner=planner: loaded(planner)) for name, planner in planners.items()
    ]
    monkeypatch.setattr(plans, "entry_points", lambda group: entries if group == "skyward.quotes" else [])


def test_each_task_has_its_candidates_its_price_and_its_ceiling(
    skyward: Skyward, monkeypatch: pytest.MonkeyPatch, asked: list[object]
) -> None:
    """The ceiling comes from `max_cost`, `max_lifetime` and the task's timeout, the lowest of them. That of a run
    counts tries and mapped tasks. Tasks with equal hardware share the providers' answers; nothing is rented.
    """
    tasks = (
        sky.PlannedTask("nightly", "train", sky.PoolSpec.of(nodes=2, max_cost=3.0), tries=2),
        sky.PlannedTask("nightly", "score", sky.PoolSpec.of(nodes=2), timeout_seconds=1800, instances=3),
        sky.PlannedTask("other", "embed", sky.PoolSpec.of(nodes=2, max_lifetime=900, max_cost=3.0)),
        sky.PlannedTask("free", "play", sky.PoolSpec.of(nodes=2)),
        sky.PlannedTask("free", "guess", None, reason="accelerator is a template"),
    )
    install(monkeypatch, cron=lambda target: sky.Plan(tasks) if target == "jobs/" else None)
    monkeypatch.setattr(FolderProvider, "launch", lambda *_: pytest.fail("rented"))
    head, *rows = lines(skyward("quote jobs/"))
    assert head[:5] == ["WORKFLOW", "TASK", "TASKS", "TRIES", "ASKS FOR"]
    assert rows[0][:3] == ["cron:nightly", "train", "1"]
    assert rows[0][-2:] == ["4.0000", "6.0000"]
    assert rows[1][-2:] == ["4.0000", "6.0000"]
    assert rows[2][-2:] == ["4.0000", "1.0000"]
    assert "not known: accelerator is a template" in " ".join(rows[4])
    shown = skyward("quote jobs/")
    assert "cron:nightly: a run costs at most 12.0000 USD" in shown
    assert "cron:free: the cost of a run is not limited, or not known, in 2 tasks: play, guess" in shown
    assert len(asked) == 2, "once for each command"
    found = json.loads(skyward("quote jobs/ --json"))
    assert [(one["ceiling_usd"], one["run_ceiling_usd"]) for one in found["tasks"]] == [
        (3.0, 6.0),
        (2.0, 6.0),
        (1.0, 1.0),
        (None, None),
        (None, None),
    ]
    assert [one["ceiling_usd"] for one in found["workflows"]] == [12.0, 1.0, None]


def test_what_the_definitions_print_is_not_among_the_json(
    skyward: Skyward, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from skyward_core import cli

    def loud(_: str) -> sky.Plan:
        print("a DAG says hello")
        return sky.Plan()

    install(monkeypatch, cron=loud)
    assert cli.main(["quote", "jobs/", "--json"]) == 0
    output = capsys.readouterr()
    assert json.loads(output.out)["tasks"] == []
    assert "hello" in output.err


def test_a_pool_that_could_not_be_opened_is_a_fault(
    skyward: Skyward, monkeypatch: pytest.MonkeyPatch, asked: list[object]
) -> None:
    """So is a definition that cannot be read. All other tasks are shown."""
    tasks = (
        sky.PlannedTask("w", "huge", sky.PoolSpec.of(cpu=1000)),
        sky.PlannedTask("w", "old", sky.PoolSpec.of(image=sky.Image(python="3.9"))),
    )
    install(monkeypatch, cron=lambda _: sky.Plan(tasks, ("jobs/bad.py: SyntaxError",)))
    errors = skyward("quote jobs/", code=1)
    assert "cron:w/huge: nothing to rent" in errors
    assert "cron:w/old: the image wants Python 3.9" in errors
    assert "cron: jobs/bad.py: SyntaxError" in errors


@pytest.mark.parametrize(
    ("planners", "words"),
    [
        ({}, ["none is installed"]),
        (
            {"cron": lambda _: None, "airflow": ImportError("No module named 'airflow'")},
            ["cron does not know it", "airflow cannot be imported"],
        ),
        ({"cron": lambda _: 1 / 0}, ["cron cannot read", "ZeroDivisionError"]),
    ],
)
def test_a_target_that_no_orchestrator_reads_is_an_error(
    planners: dict[str, Any], words: list[str], skyward: Skyward, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, **planners)
    errors = skyward("quote jobs/", code=1)
    for word in words:
        assert word in errors
