"""Dagster: pools that several processes share, how long they live, and hardware for each step."""

import json
from typing import Any

import pytest

dg = pytest.importorskip("dagster")

import skyward_core as sky  # noqa: E402
from dagster_skyward import Lifecycle, SkywardResource, upkeep  # noqa: E402
from dagster_skyward.lifecycle import CONFIG_TAG, spec_of_run, spec_of_step  # noqa: E402
from dagster_skyward.run_steps import KEEP_TAG, WILL_RETRY_TAG  # noqa: E402
from dagster_skyward.upkeep import release_after  # noqa: E402

pytestmark = [pytest.mark.filterwarnings("default::DeprecationWarning")]

PRICE = 36.0


def resource(**options: Any) -> SkywardResource:
    return SkywardResource(**{"provider": sky.Local(price_per_hour=PRICE), "lease_seconds": 10} | options)


# ── what a user writes ───────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"sharing": "job"}, "'step', 'run', 'backfill', 'deployment'"),
        ({"sharing": "deployment"}, "needs a name"),
        ({"sharing": "run", "name": "team"}, "leave out one of the two"),
        ({"sharing": "backfill", "name": "team"}, "leave out one of the two"),
        ({"sharing": "run", "keep_warm": -1}, "keep_warm"),
        ({"lifecycle": {"cleanup": "sometimes"}}, "'on_exception'"),
        ({"lifecycle": {"keep_on_failure": -1}}, "at least 0"),
    ],
)
def test_what_cannot_be_is_refused_when_the_resource_is_made(keywords: dict[str, Any], message: str) -> None:
    """The error says what to write, also for values that are left to the launch."""
    for make in (resource, SkywardResource.configure_at_launch):
        with pytest.raises(sky.BadRequest) as caught:
            make(**keywords)
        assert message in str(caught.value)


@pytest.mark.parametrize(("keep_warm", "expected"), [(None, 300), (40, 60), (600, 600)])
def test_pools_of_runs_wait_for_keep_warm(keep_warm: float | None, expected: float) -> None:
    """The resource accepts it without a name, which the run gives; `keep_on_failure` is the least."""
    compute = resource(sharing="run", keep_warm=keep_warm, lifecycle=Lifecycle(keep_on_failure=60))
    given = 0.0 if compute.keep_warm is None else compute.keep_warm
    assert spec_of_run(compute.spec, "run", given, 60).keep_warm == expected


@pytest.mark.parametrize(
    "config",
    [{"env": {"HF_TOKEN": "hf_plaintext1"}}, {"image": {"env": {"HF_TOKEN": "hf_plaintext1"}}, "nodes": 2}],
)
def test_a_secret_in_the_tag_of_a_step_is_refused_before_anything_is_rented(config: dict[str, Any]) -> None:
    """Dagster stores and shows tags. The message says what to write, and does not repeat the value."""
    with pytest.raises(sky.BadRequest) as caught:
        spec_of_step(resource().spec, {CONFIG_TAG: json.dumps(config)})
    assert '"secrets": {"NAME": {"env": "NAME"}}' in str(caught.value)
    assert "hf_plaintext1" not in str(caught.value)
    written = {"secrets": {"HF_TOKEN": {"env": "TEST_SECRET"}}, "env": {"STAGE": "test"}}
    spec = spec_of_step(resource().spec, {CONFIG_TAG: json.dumps(written)})
    assert spec.secrets == resource(secrets={"HF_TOKEN": dg.EnvVar("TEST_SECRET")}).spec.secrets
    assert spec.env == {"STAGE": "test"}


def test_a_sensor_leaves_pools_that_a_run_still_needs() -> None:
    """A run that is tried again keeps its pools; so does a failed one whose resource says so."""
    failed = dg.DagsterRunStatus.FAILURE
    pool = {"skyward/pool/abc": "sky-none"}
    run = dg.DagsterRun("job", status=failed, tags=pool)
    assert "tried again" in release_after(run.with_tags({**pool, WILL_RETRY_TAG: "true"}))
    assert "stay after a failure" in release_after(run.with_tags({**pool, KEEP_TAG: "true"}))
    assert release_after(run.with_tags({})) == "the run has no shared pools"
    assert release_after(run) == "released: none"
    definitions = upkeep()
    names = sorted(sensor.name for sensor in definitions.sensors or ())  # pyright: ignore[reportAttributeAccessIssue]
    assert names == ["skyward_release_after_cancel", "skyward_release_after_failure", "skyward_report_costs"]
    assert [job.name for job in definitions.jobs or ()] == ["skyward_sweep"]  # pyright: ignore[reportAttributeAccessIssue]
