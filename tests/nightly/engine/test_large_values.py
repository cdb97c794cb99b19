"""Large values: over SSH they go directly into the memory of the node that needs them and back; on this machine both
sides see the same memory.
"""

from typing import Any

import numpy as np

import skyward_core as sky
from tests.system.engine.test_large_values import (  # noqa: F401 - fixtures
    add_one,
    far_pool,
)


def test_a_large_array_travels_to_a_node_and_back(far_pool: sky.ComputePool) -> None:
    """An array of 20 MB arrives writable on the node and writable at the client; the client's own array is unchanged."""
    array = np.arange(2_500_000, dtype=float)
    back = add_one(array) >> far_pool
    assert np.array_equal(back, np.arange(1, 2_500_001, dtype=float))
    assert array[0] == 0
    back[0] = 7


# ── on this machine: the result may take over the file that the arguments came in
# ────────────────────────────────────────────────────────────

_kept: list[Any] = []


@sky.compute
def keep_and_return(array: Any = None) -> Any:
    if array is None:
        return float(_kept[0][0])
    _kept.append(array)
    return array


def test_a_value_kept_on_a_node_is_not_shared_with_the_client() -> None:
    """A function that keeps its argument and returns it has its own copy: changes of the result by the client do not
    reach it.
    """
    with sky.ComputePool(provider=sky.Local(), display="quiet") as pool:
        back = keep_and_return(np.ones(200_000)) >> pool
        back[:] = 5
        assert keep_and_return() >> pool == 1.0
