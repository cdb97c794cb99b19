"""Dagster: whole steps on nodes, by `skyward_executor`: losses, ends, and real hosts.

The hosts install what every node needs. Dagster and the project are those of this machine: their folders are shared
with the hosts, as on a network file system, and so is Dagster's storage.
"""

import json
import signal
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

dg = pytest.importorskip("dagster")

import skyward_core as sky  # noqa: E402
from dagster_skyward.configuration import plain  # noqa: E402
from tests.conftest import processes_by_tag, signal_members  # noqa: E402
from tests.real_hosts import owned_by  # noqa: E402
from tests.system.integrations.test_dagster_executor import (  # noqa: E402, F401 - fixtures
    assert_nothing_is_left,
    events,
    executed,
    is_ended,
    notes,
    printed,
    project,
    run_of,
    started,
)
from tests.testbed import Fleet, Host  # noqa: E402
from tests.testbed.fixtures import fleet, mirror  # noqa: E402, F401 - fixtures
from tests.testbed.mirror import Mirror  # noqa: E402
from tests.testbed.wheel import wheel_that_shows  # noqa: E402
from tests.waiting import WAIT_SECONDS, wait_until  # noqa: E402

pytestmark = [pytest.mark.timeout(400)]
REPOSITORY = Path(__file__).parents[3]
PACKAGES = Path(sysconfig.get_path("purelib"))


def test_a_step_whose_process_is_killed_is_tried_again_by_its_policy(project: Path) -> None:
    """Its call fails; the step gets a reason, and its retry runs on the same pool."""
    output = executed(project, "survives")
    run, log = run_of(project)
    assert run.status is dg.DagsterRunStatus.SUCCESS, output[-5000:]
    assert events(log, dg.DagsterEventType.STEP_UP_FOR_RETRY) == ["killed_once"]
    assert any(
        "signal SIGKILL" in str(entry.dagster_event.step_retry_data.error)
        for entry in log
        if entry.is_dagster_event and entry.dagster_event.event_type is dg.DagsterEventType.STEP_UP_FOR_RETRY
    )
    assert len({pool for _, pool, _, _ in notes(project)}) == 1
    assert_nothing_is_left(project)


def test_a_step_whose_node_is_lost_is_tried_again_on_another(project: Path) -> None:
    """The engine does not repeat the call; Dagster's retry policy does, in the same pool."""
    with started(project, "moves") as process:
        try:
            wait_until(lambda: bool(notes(project)), "the step to begin")
            ((_, pool, instance, _),) = notes(project)
            signal_members(instance, signal.SIGKILL)
            output, _ = process.communicate(timeout=WAIT_SECONDS)
        finally:
            process.kill()
    run, log = run_of(project)
    assert run.status is dg.DagsterRunStatus.SUCCESS, output[-5000:]
    assert events(log, dg.DagsterEventType.STEP_UP_FOR_RETRY) == ["loses_its_node"]
    assert [its for _, its, _, _ in notes(project)] == [pool, pool]
    assert notes(project)[1][2] != instance
    assert "NodeLost" in output
    assert_nothing_is_left(project)


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGKILL])
def test_a_run_that_is_ended_ends_its_steps_and_its_pool(project: Path, sig: signal.Signals) -> None:
    """A terminated run interrupts its steps, which clean up. A killed one cannot: its nodes end all the same."""
    with started(project, "never_ends") as process:
        try:
            wait_until(lambda: bool(notes(project)), "the step to begin")
            if sig is signal.SIGTERM:  # what the UI does: without a request Dagster takes the signal for a failure
                with dg.DagsterInstance.from_config(str(project)) as instance:
                    instance.report_run_canceling(run_of(project)[0])
            process.send_signal(sig)
            output, _ = process.communicate(timeout=WAIT_SECONDS)
        finally:
            process.kill()
    assert_nothing_is_left(project)
    run, log = run_of(project)
    assert (project / "interrupted").exists() == (sig is signal.SIGTERM)
    if sig is signal.SIGTERM:
        assert run.status is dg.DagsterRunStatus.CANCELED, output[-5000:]
        assert events(log, dg.DagsterEventType.STEP_FAILURE) == ["endless"]


def test_a_pool_that_cannot_open_fails_the_run_with_the_reason(project: Path) -> None:
    """Each try of the step fails; nothing is rented, and the error says what was looked for."""
    output = executed(project, "cannot_open")
    run, log = run_of(project)
    assert run.status is dg.DagsterRunStatus.FAILURE
    assert events(log, dg.DagsterEventType.STEP_FAILURE) == ["killed_once"]
    assert "NoCapacity" in output
    assert "A100" in output
    assert notes(project) == []


ON_HOSTS = """
import json, pathlib, platform, threading
import dagster as dg
from dagster_skyward import skyward_executor

HERE = pathlib.Path(__file__).parent

def on_host(name, other):
    print(name, "is on", platform.node())
    (HERE / name).touch()
    while not (HERE / other).exists():
        threading.Event().wait(0.05)
    return platform.node()

@dg.op
def left():
    return on_host("left", "right")

@dg.op
def right():
    return on_host("right", "left")

@dg.op
def both(one, other):
    (HERE / "names.json").write_text(json.dumps(sorted([one, other])))

@dg.job(executor_def=skyward_executor.configured({"compute": json.loads((HERE / "compute.json").read_text())}))
def on_hosts():
    both(left(), right())
"""


@pytest.fixture
def hosts(fleet: Fleet, mirror: Mirror, tmp_path: Path) -> Iterator[list[Host]]:
    """Two hosts with the folders of the test, of the packages and of this project."""
    hosts = [fleet.create(shared=(tmp_path, PACKAGES, REPOSITORY)) for _ in range(2)]
    for host in hosts:
        mirror.configure(host)
    yield hosts
    for host in hosts:
        host.crash()


def test_the_steps_of_a_run_are_calls_on_hosts(hosts: list[Host], tmp_path: Path) -> None:
    """Two steps run at once on two hosts, and the third gets their values. What they print is in the stored logs."""
    wheel = wheel_that_shows([PACKAGES, REPOSITORY / "integrations"], tmp_path)
    image = sky.Image(pip=[f"packages-of-the-tests @ {wheel.as_uri()}"])
    provider = owned_by(hosts, tmp_path / "known_hosts")
    compute = plain({"provider": provider, "nodes": 2, "image": image, "provision_timeout": 150})
    (tmp_path / "compute.json").write_text(json.dumps(compute))
    (tmp_path / "dagster.yaml").write_text("telemetry: {enabled: false}\n")
    (tmp_path / "project.py").write_text(ON_HOSTS)
    output = executed(tmp_path, "on_hosts")
    run, log = run_of(tmp_path)
    assert run.status is dg.DagsterRunStatus.SUCCESS, output[-5000:]
    names = sorted(host.name for host in hosts)
    lines = "".join(printed(tmp_path, run, log).values()).splitlines()
    assert sorted(line.split()[-1] for line in lines if " is on " in line) == names
    assert json.loads((tmp_path / "names.json").read_text()) == names
    (pool,) = {part.pool_id for part in sky.cost_parts(sky.Work(system="dagster", run=run.run_id))}
    assert is_ended(pool)
    there = {pid for host in hosts for pid in host._processes()}
    assert not [pid for pid, _ in processes_by_tag("SKYWARD_INSTANCE_ID") if pid in there]
