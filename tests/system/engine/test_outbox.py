"""The client's queue: after any events in any order each call is in exactly one place, and none is lost."""

from hypothesis import HealthCheck, settings

from skyward_core.engine.outbox import BATCH_CALLS, LEAST_SECONDS, TARGET_SECONDS
from tests.unit.engine.test_outbox import (
    AnyOrder,
    entry,
    ids_of,
    learned,
)


def test_no_batch_holds_too_many_calls() -> None:
    """Calls that take no time are limited in number by the least cost of a call."""
    queue = learned(0.0)
    queue.add([entry(str(n)) for n in range(100_000)])
    sizes = [len(ids_of(shipment)) for shipment in queue.ship()]
    assert max(sizes) <= min(BATCH_CALLS, TARGET_SECONDS / LEAST_SECONDS + 2)
    assert min(sizes) > 100


AnyOrder.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
