"""Dagster for real: ephemeral instances, real pools of one or two local nodes."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

import skyward_core as sky
from skyward_core.worker.watchdog import tagged_processes

dg = pytest.importorskip("dagster")
from dagster_skyward import SkywardResource  # noqa: E402
from dagster_skyward.metadata import ACCELERATOR, COST_USD, NODES, SECONDS  # noqa: E402
from skyward_core.ledger.ledger import Ledger  # noqa: E402

PRICE = 36.0


def owned_processes(pid=None):
    """Processes of the local nodes that this process, or another one, has started."""
    return [
        found
        for found, environ in tagged_processes()
        if environ.get("SKYWARD_OWNER", "").split(":")[0] == str(pid or os.getpid())
    ]


@pytest.fixture(autouse=True)
def new_processes():
    """Processes of the local nodes of this test; after the test none of them is left, and no thread of ours.

    A pool that tests share may be open at the same time.
    """
    nodes, threads = set(owned_processes()), set(threading.enumerate())

    def new():
        return [pid for pid in owned_processes() if pid not in nodes]

    yield new
    assert new() == []
    deadline = time.monotonic() + 10
    while left := [
        thread.name for thread in threading.enumerate() if thread not in threads and thread.name.startswith("skyward")
    ]:
        assert time.monotonic() < deadline, left
        threading.Event().wait(0.05)


@pytest.fixture
def instance():
    with dg.DagsterInstance.ephemeral() as ephemeral:
        yield ephemeral


def resource(**options):
    return SkywardResource(**{"provider": sky.Local(price_per_hour=PRICE)} | options)


def materialize(assets, compute, instance, **more):
    return dg.materialize(assets, resources={"compute": compute}, instance=instance, **more)


def metadata_of(result, key):
    return next(
        event.materialization.metadata
        for event in result.get_asset_materialization_events()
        if event.asset_key == dg.AssetKey(key)
    )


def messages(instance, result, step):
    return [
        line
        for entry in instance.all_logs(result.run_id)
        if entry.step_key == step
        for line in entry.user_message.splitlines()
    ]


def chatter(lines):
    for number in range(lines):
        print(f"line {number} of the payload")
    return sky.instance_info().node, os.environ["SKYWARD_INSTANCE_ID"]


def where(number):
    return number, os.environ["SKYWARD_INSTANCE_ID"], os.environ["SKYWARD_POOL_ID"]


@sky.compute
def square(number):
    return number * number


# ── runs ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@dg.asset
def talkative(context: dg.AssetExecutionContext, compute: SkywardResource):
    return compute.run(context, chatter, lines=100).value


@dg.asset(deps=[talkative])
def spread(context: dg.AssetExecutionContext, compute: SkywardResource):
    places = compute.map(context, where, range(8))
    with compute.pool(context) as pool:
        squares = (square(3) & square(4)) >> pool
    return places, squares, compute.run(context, square, 5).value


def test_two_assets_share_one_pool_and_each_has_its_lines_cost_and_time(instance):
    """In one process two assets use one pool; values, all printed lines, and the shares of the bill are in the right
    place.
    """
    result = materialize([talkative, spread], resource(nodes=2, display="quiet"), instance)

    assert result.output_for_node("talkative")[0] in {0, 1}
    places, squares, five = result.output_for_node("spread")
    assert [number for number, _, _ in places] == list(range(8))
    assert (squares, five) == ((9, 16), 25)
    assert len({pool for _, _, pool in places}) == 1
    machines = {machine for _, machine, _ in places}
    assert len(machines) == 2
    assert result.output_for_node("talkative")[1] in machines

    logged = messages(instance, result, "talkative")
    lines = [line for line in logged if line.startswith("[node ")]
    assert [line.partition("] ")[2] for line in lines] == [f"line {number} of the payload" for number in range(100)]
    assert {line.partition("]")[0] for line in lines} == {f"[node {result.output_for_node('talkative')[0]}"}
    assert any(line.startswith("launching 2 x local") for line in logged)
    assert any(line.startswith("the pool is ready after") and "2 nodes" in line for line in logged)
    assert not any(line.startswith("launching") for line in messages(instance, result, "spread"))
    bills = [
        line
        for entry in instance.all_logs(result.run_id)
        for line in entry.user_message.splitlines()
        if line.startswith("done: ")
    ]
    assert len(bills) == 1

    for key in ("talkative", "spread"):
        metadata = metadata_of(result, key)
        assert isinstance(metadata[COST_USD], dg.FloatMetadataValue)
        assert isinstance(metadata[SECONDS], dg.FloatMetadataValue)
        assert (metadata[SECONDS].value, metadata[COST_USD].value) == (
            round(metadata[SECONDS].value, 3),
            round(metadata[COST_USD].value, 9),
        ), "for people to read"
        # Machines are paid from their request on, by begun seconds: a step may cost less than its own time, and at most
        # one second more.
        assert metadata[COST_USD].value <= (metadata[SECONDS].value + 1) * 2 * PRICE / 3600
        assert metadata[NODES] == dg.IntMetadataValue(2)
        assert metadata[ACCELERATOR] == dg.TextMetadataValue("none")
    opened = metadata_of(result, "talkative")
    assert opened[COST_USD].value >= 2 * PRICE / 3600, "a begun second of each machine"
    bill = float(bills[0].partition(": ")[2].split()[0])
    assert sum(metadata_of(result, key)[COST_USD].value for key in ("talkative", "spread")) <= bill


@dg.asset
def interrupted(context: dg.AssetExecutionContext, compute: SkywardResource):
    with compute.pool(context) as pool:
        assert pool.is_active
        assert any(environ.get("SKYWARD_POOL_ID") == pool.lease.pool_id for _, environ in tagged_processes())
        raise dg.DagsterExecutionInterruptedError


def test_an_interrupt_in_the_step_closes_the_pool(instance, new_processes):
    """Dagster's exception for a terminated run is no Exception. The pool is closed all the same, and the exception
    is raised again.
    """
    with pytest.raises(dg.DagsterExecutionInterruptedError):
        materialize([interrupted], resource(), instance)
    assert new_processes() == []


def test_max_cost_is_a_field_like_others_and_exceeding_it_fails_with_advice(instance):
    """`max_cost` and `budget` reach the spec, also from the run's config. If the first minute alone costs more, the
    step fails, and the error says what to do.
    """
    assert resource(max_cost=2.5, budget="team-a").spec == sky.PoolSpec.of(
        provider=sky.Local(price_per_hour=PRICE), max_cost=2.5, budget="team-a", display="quiet"
    )
    result = materialize([talkative], resource(max_cost=0.0001), instance, raise_on_error=False)
    error = result.failure_data_for_node("talkative").error.to_string()
    assert "BudgetExceeded" in error
    assert "max_cost" in error
    assert not any(line.startswith("launching") for line in messages(instance, result, "talkative"))


def slow_square(number):
    time.sleep(1.1)  # longer than one second, the least that is billed
    return number * number


@dg.multi_asset(outs={"made": dg.AssetOut(is_required=False), "unmade": dg.AssetOut(is_required=False)})
def optional(context: dg.AssetExecutionContext, compute: SkywardResource):
    compute.run(context, slow_square, 2)
    yield dg.Output(1, output_name="made")


def test_a_variable_called_env_is_not_a_reference_to_the_environment(instance, monkeypatch):
    """`Image(env={"env": "prod"})` and `env={"env": "prod"}` set a variable called env; values of these mappings may
    still come from the environment.
    """
    monkeypatch.delenv("prod", raising=False)
    monkeypatch.setenv("TEST_STAGE", "staging")
    seen = {}

    @dg.asset
    def look(context: dg.AssetExecutionContext, compute: SkywardResource):
        seen["spec"] = compute.spec

    for image in (sky.Image(env={"env": "prod"}), {"env": {"env": "prod"}}):
        assert materialize([look], resource(image=image, env={"env": "test"}), instance).success
        assert (seen["spec"].image.env, seen["spec"].env) == ({"env": "prod"}, {"env": "test"})
    assert materialize([look], resource(image={"env": {"STAGE": dg.EnvVar("TEST_STAGE")}}), instance).success
    assert seen["spec"].image.env == {"STAGE": "staging"}
    config = {"resources": {"compute": {"config": {"image": {"env": {"env": "prod"}}}}}}
    assert materialize([look], SkywardResource.configure_at_launch(), instance, run_config=config).success
    assert seen["spec"].image.env == {"env": "prod"}


# ── kills ────────────────────────────────────────────────────────────────────────────────────────────────────────────

ORPHAN = """
import os, sys, time
import dagster as dg
import skyward_core as sky
from dagster_skyward import SkywardResource

def forever():
    open(os.environ["RUNS"], "w").close()
    time.sleep(600)

@dg.asset
def endless(context: dg.AssetExecutionContext, compute: SkywardResource):
    with open("step.txt", "w") as file:  # Dagster captures what a step prints
        file.write(f"{os.getpid()} {context.run_id}")
    compute.run(context, forever)

defs = dg.Definitions(assets=[endless], jobs=[dg.define_asset_job("orphan")], resources={"compute": SkywardResource(provider=sky.Local(price_per_hour=36.0), env={"RUNS": os.path.abspath("runs.txt")})})
"""


@pytest.mark.parametrize("how", ["the run's process is killed", "the run is marked as canceled"])
def test_a_step_without_its_run_ends_its_pool(tmp_path, how):
    """Under the multiprocess executor a killed run process leaves its step processes running. They would cost money
    until the function ends: here for ten minutes.
    """
    (tmp_path / "dagster.yaml").write_text("telemetry: {enabled: false}\n")
    script = tmp_path / "orphan.py"
    script.write_text(ORPHAN)
    environ = {**os.environ, "DAGSTER_HOME": str(tmp_path), "SKYWARD_LEDGER": f"sqlite:///{tmp_path}/ledger.db"}

    def pools():
        with Ledger(environ["SKYWARD_LEDGER"]) as ledger:
            return ledger.pool_rows(include_ended=True)

    with (tmp_path / "run.log").open("w") as log:
        command = [sys.executable, "-m", "dagster", "job", "execute", "-f", str(script), "-j", "orphan"]
        run = subprocess.Popen(command, stdout=log, stderr=log, cwd=tmp_path, env=environ, start_new_session=True)
    try:
        while not (tmp_path / "runs.txt").exists():
            assert run.poll() is None, (tmp_path / "run.log").read_text()
            time.sleep(0.05)
        step, run_id = (tmp_path / "step.txt").read_text().split()
        assert owned_processes(step)
        if how == "the run's process is killed":
            os.kill(run.pid, signal.SIGKILL)
        else:
            with dg.DagsterInstance.from_config(str(tmp_path)) as instance:
                instance.report_run_canceled(instance.get_run_by_id(run_id))
        began = time.monotonic()
        while owned_processes(step) and time.monotonic() - began < 60:
            time.sleep(0.1)
        assert owned_processes(step) == []
        assert time.monotonic() - began < 30
        while not pools() or pools()[0].entry.ended_at is None:
            time.sleep(0.1)
        run.wait(timeout=60)
        while os.path.exists(f"/proc/{step}"):
            time.sleep(0.1)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(run.pid, signal.SIGKILL)
        run.wait()
    (row,) = pools()
    assert (row.open_resources, row.entry.work.run, row.entry.work.asset) == (0, run_id, "endless")
    assert row.cost_usd > 0


# ── configuration ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_keywords_become_plain_data_and_the_same_spec():
    """Values as objects and in their plain forms make equal resources, with the JSON and the spec of the core."""
    objects = resource(
        nodes=2, image=sky.Image(pip=["torch"]), accelerator="A100", spot=0.8, env={"A": "1"}, timeout=60
    )
    plain = SkywardResource(
        provider={"name": "local", "price_per_hour": PRICE},
        nodes=2,
        image={"pip": ["torch"]},
        accelerator="A100",
        spot=0.8,
        env={"A": "1"},
        timeout=60,
    )

    assert objects == plain
    json.dumps(objects.model_dump())
    assert objects.spec == sky.PoolSpec.of(
        provider=sky.Local(price_per_hour=PRICE),
        nodes=2,
        image=sky.Image(pip=["torch"]),
        accelerator="A100",
        spot=0.8,
        env={"A": "1"},
        timeout=60,
        display="quiet",
    )


def test_each_setting_is_a_config_field_with_its_description():
    """The config that Dagster shows has the fields of PoolSpec, all of them optional, with the texts of the core."""
    fields = SkywardResource.to_fields_dict()

    assert set(fields) == {*sky.PoolSpec.model_fields, "lifecycle", "sharing"}
    assert not any(field.is_required for field in fields.values())
    assert fields["nodes"].description.startswith("Number of machines; (least, most)")
    assert fields["nodes"].description.endswith("Default: 1.")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"acelerator": "A100"}, "did you mean 'accelerator'"),
        ({"nods": dg.EnvVar("NODES")}, "did you mean 'nodes'"),
        ({"nodes": 0}, "nodes=0"),
        ({"provider": "locl"}, "did you mean 'local'"),
        ({"memory": "32 gigs"}, "32GB"),
        ({"image": {"pipp": ["torch"]}}, "did you mean 'pip'"),
        ({"image": sky.Image(python="3.9")}, "Python 3.9"),
        ({"concurrency": dg.EnvVar("SLOTS")}, 'EnvVar.int("SLOTS")'),
        ({"timeout": dg.EnvVar.int("SECONDS")}, "SKYWARD_TIMEOUT"),
    ],
)
def test_a_wrong_keyword_is_refused_when_the_resource_is_made(options, message):
    """The error is the core's, and says what to do, before Dagster runs anything; also for values that are left to
    the launch.
    """
    with pytest.raises(sky.BadRequest) as error:
        SkywardResource(**options)
    assert message in str(error.value)
    with pytest.raises(sky.BadRequest):
        SkywardResource.configure_at_launch(**options)


def test_environment_variables_are_read_when_the_run_starts(instance, monkeypatch):
    """EnvVar works for text and whole numbers and inside plain data; the definition has the name, not the value."""
    compute = SkywardResource(
        provider={"name": "local", "price_per_hour": dg.EnvVar("TEST_PRICE")},
        nodes=dg.EnvVar.int("TEST_NODES"),
        env={"GREETING": dg.EnvVar("TEST_GREETING")},
    )
    with pytest.raises(sky.BadRequest, match="TEST_"):
        _ = compute.spec
    monkeypatch.setenv("TEST_PRICE", "7.5")
    monkeypatch.setenv("TEST_NODES", "2")
    monkeypatch.setenv("TEST_GREETING", "hello")
    seen = {}

    @dg.asset
    def look(context: dg.AssetExecutionContext, compute: SkywardResource):
        seen["spec"] = compute.spec

    assert materialize([look], compute, instance).success
    assert seen["spec"].provider == sky.Local(price_per_hour=7.5)
    assert seen["spec"].nodes == 2
    assert seen["spec"].env == {"GREETING": "hello"}


@pytest.mark.parametrize(
    "options",
    [
        {"env": {"HF_TOKEN": "hf_plaintext1"}},
        {"env": {"HF_TOKEN": "hf_plaintext1", "A": dg.EnvVar("A")}},
        {"image": sky.Image(env={"HF_TOKEN": "hf_plaintext1"})},
        {"image": {"env": {"HF_TOKEN": "hf_plaintext1"}}},
        {"secrets": {"HF_TOKEN": "hf_plaintext1"}},
        {"secrets": {"HF_TOKEN": sky.Secret.from_store("hf_plaintext1")}},
    ],
)
def test_a_secret_in_plain_text_is_refused(options):
    """Dagster would store it and show it; the message says what to write and does not repeat it."""
    for make in (SkywardResource, SkywardResource.configure_at_launch):
        with pytest.raises(sky.BadRequest) as caught:
            make(**options)
        assert "EnvVar" in str(caught.value) or "from_env" in str(caught.value)
        assert "hf_plaintext1" not in str(caught.value)


def test_the_run_config_decides_values_that_were_left_to_the_launch(instance):
    """configure_at_launch keeps its arguments as defaults; the run's config, in plain words, overrides them."""
    seen = {}

    @dg.asset
    def look(context: dg.AssetExecutionContext, compute: SkywardResource):
        seen["spec"] = compute.spec

    compute = SkywardResource.configure_at_launch(provider=sky.Local(price_per_hour=PRICE), nodes=3)
    config = {
        "resources": {"compute": {"config": {"nodes": 2, "spot": "never", "image": {"pip": ["torch"]}, "timeout": 90}}}
    }
    assert materialize([look], compute, instance, run_config=config).success
    assert seen["spec"] == sky.PoolSpec.of(
        provider=sky.Local(price_per_hour=PRICE),
        nodes=2,
        spot="never",
        image=sky.Image(pip=["torch"]),
        timeout=90,
        display="quiet",
    )


def test_given_values_have_precedence_over_the_settings(monkeypatch, instance):
    """A setting does not replace a given field, even one with the core's default; it replaces the others."""
    monkeypatch.setenv("SKYWARD_NODES", "5")
    monkeypatch.setenv("SKYWARD_CONCURRENCY", "2")
    seen = {}

    @dg.asset
    def look(context: dg.AssetExecutionContext, compute: SkywardResource):
        seen["spec"] = sky.ComputePool.from_spec(compute.spec).spec

    assert materialize([look], resource(nodes=1), instance).success
    assert (seen["spec"].nodes, seen["spec"].concurrency) == (1, 2)


def test_a_step_that_does_not_use_its_pool_opens_none(instance, new_processes):
    """A pool that is only listed costs nothing: no machine, no log line, no metadata."""

    @dg.asset
    def idle(context: dg.AssetExecutionContext, compute: SkywardResource):
        return len(new_processes())

    result = materialize([idle], resource(), instance)
    assert result.output_for_node("idle") == 0
    assert COST_USD not in metadata_of(result, "idle")


def test_the_library_is_known_to_dagster():
    """`import dagster_skyward` registers the library and its version with Dagster, for its UI and telemetry."""
    from dagster_shared.libraries import DagsterLibraryRegistry

    assert DagsterLibraryRegistry.get()["dagster-skyward"] == sky.__version__
