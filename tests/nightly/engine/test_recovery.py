"""What an open pool does about lost nodes and heads: a small model of machines, a manual clock, one turn of recovery at
a time.
"""

from typing import Any

from hypothesis import HealthCheck, settings

from tests.unit.engine.test_recovery import (  # noqa: F401 - fixtures
    AnyOrder,
    world,
)

AnyOrder.TestCase.settings = settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestAnyOrder: Any = AnyOrder.TestCase
TestAnyOrder.__doc__ = "Whatever happens in whatever order: once all is mended every rank is there again, and each lost instance has exactly one event."
