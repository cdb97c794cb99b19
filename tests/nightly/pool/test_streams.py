"""Generators that stream, on a real pool: `for item in fn() >> pool`, `async for`, and how they end."""

import pytest

import skyward_core as sky
from tests.system.pool.test_streams import (  # noqa: F401 - fixtures
    count,
    log,
)


def test_a_stream_of_a_pool_that_closes() -> None:
    """It gives what has come, and raises PoolClosed."""
    with sky.ComputePool(provider=sky.Local(), display="quiet") as pool:
        items = count(10**9) >> pool
        assert next(items) == 0
    with pytest.raises(sky.PoolClosed):
        list(items)
