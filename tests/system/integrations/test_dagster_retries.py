"""Errors that another try meets again end a step at once, whatever its retry policy."""

import time
from typing import Any

import pytest

dg = pytest.importorskip("dagster")
import skyward_core as sky  # noqa: E402
from dagster_skyward import SkywardResource  # noqa: E402
from dagster_skyward.final_errors import FINAL, refuse_retries  # noqa: E402


@pytest.mark.parametrize(("error", "tries"), [(kind("no"), 1) for kind in FINAL] + [(sky.NodeLost("gone"), 2)])
def test_a_step_is_tried_again_only_if_that_may_help(error: Exception, tries: int) -> None:
    """The step itself can catch the error by its class."""
    caught: list[tuple[type[BaseException], str]] = []

    @dg.op(retry_policy=dg.RetryPolicy(max_retries=1))
    def work(context: dg.OpExecutionContext, compute: SkywardResource) -> None:
        try:
            with compute.pool(context):
                raise error
        except type(error) as found:
            caught.append((type(found).__mro__[1], str(found)))
            raise

    @dg.job(resource_defs={"compute": SkywardResource(provider=sky.Local(), display="quiet")})
    def job() -> None:
        work()

    result = job.execute_in_process(raise_on_error=False)
    assert not result.success
    assert [text for _, text in caught] == [str(error)] * tries
    (failed,) = [event for event in result.all_events if event.is_step_failure]
    assert type(error).__name__ in failed.step_failure_data.error.to_string()


def test_a_pool_that_may_not_cost_enough_fails_its_step_once() -> None:
    """Nothing is rented, and nothing waits for the next try."""
    tries: list[float] = []

    @dg.op(retry_policy=dg.RetryPolicy(max_retries=3, delay=600))
    def work(context: dg.OpExecutionContext, compute: SkywardResource) -> None:
        tries.append(time.monotonic())
        compute.run(context, abs, -1)

    compute = SkywardResource(provider=sky.Local(price_per_hour=3600.0), max_cost=0.01, display="quiet")

    @dg.job(resource_defs={"compute": compute})
    def job() -> None:
        work()

    result = job.execute_in_process(raise_on_error=False)
    assert not result.success
    assert len(tries) == 1
    (failed,) = [event for event in result.all_events if event.is_step_failure]
    assert "BudgetExceeded" in failed.step_failure_data.error.to_string()
    assert "max_cost" in failed.step_failure_data.error.to_string()


def test_the_error_keeps_what_it_has() -> None:
    """Attributes, cause and notes. An error that is no such error stays as it is."""
    error = sky.BudgetExceeded("the money of team is used up", "team")
    error.add_note("try later")
    error.__cause__ = KeyError("x")
    refuse_retries(error)
    found: Any = error
    assert isinstance(found, sky.BudgetExceeded)
    assert (found.account, found.__notes__, found.allow_retries) == ("team", ["try later"], False)
    assert isinstance(found.__cause__, KeyError)
    other = ValueError("x")
    refuse_retries(other)
    assert type(other) is ValueError
