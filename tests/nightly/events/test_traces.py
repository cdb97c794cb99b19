"""Spans of a pool: their tree, their attributes, and their ends in every way that a pool ends."""

import skyward_core as sky
from tests.system.events.test_traces import (  # noqa: F401 - fixtures
    Recorded,
    recorded,
)


def test_a_pool_is_below_the_span_in_which_it_is_opened(recorded: Recorded) -> None:
    """The events have a thread; spans find the caller's span all the same."""
    with (
        recorded.provider.get_tracer("test").start_as_current_span("task"),
        sky.ComputePool(
            provider=sky.Local(price_per_hour=3.6), display="quiet", on_event=sky.Traces(recorded.provider)
        ) as pool,
    ):
        assert pool.map(lambda x: 2 * x, [1, 2]) == [2, 4]
    assert recorded.tree()["skyward.pool"] == "task"
    attributes = recorded.spans["skyward.pool"].attributes or {}
    assert attributes["skyward.total_cost"] == pool.cost > 0
    assert (recorded.spans["skyward.calls"].attributes or {})["skyward.calls.done"] == 2
