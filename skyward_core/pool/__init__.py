"""Pools: `ComputePool`, and several of them as a `MultiPool`."""

from skyward_core.pool.multi_pool import MultiPool as MultiPool
from skyward_core.pool.pool import ComputePool as ComputePool
from skyward_core.pool.preparation import complete as complete
