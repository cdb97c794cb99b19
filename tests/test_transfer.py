"""Large values where the client does not see the node's memory: Dask carries them, straight between client and worker."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import skyward_core as sky
from skyward_core.cluster import Cluster
from skyward_core.provisioning import lifecycle


@pytest.fixture(scope="module")
def far_pool() -> Iterator[sky.ComputePool]:
    """A pool whose nodes and client believe that they share no memory, as machines do."""
    settings_of, init = lifecycle.settings_of, Cluster.__init__

    def far_settings(*args: Any) -> Any:
        return dataclasses.replace(settings_of(*args), client_shares_memory=False)

    def far_init(self: Cluster, *args: Any) -> None:
        init(self, *args)
        self._shares_memory = False

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lifecycle, "settings_of", far_settings)
        patch.setattr(Cluster, "__init__", far_init)
        pool = sky.ComputePool(provider=sky.Local(), nodes=2, display="quiet").open()
    with pool:
        yield pool


@sky.compute
def add_one(array: Any) -> Any:
    array += 1
    return array


@sky.compute
def total(array: Any) -> float:
    return float(array.sum())


def test_a_large_array_goes_there_and_back(far_pool: sky.ComputePool) -> None:
    """An array of 20 MB arrives writable on the node and writable at the client, and the client's own is untouched."""
    array = np.arange(2_500_000, dtype=float)
    back = add_one(array) >> far_pool
    assert np.array_equal(back, np.arange(1, 2_500_001, dtype=float))
    assert array[0] == 0
    back[0] = 7


def test_every_worker_gets_the_large_argument(far_pool: sky.ComputePool) -> None:
    """A broadcast brings the array to each worker."""
    assert total(np.ones(1_000_000)) @ far_pool == (1e6, 1e6)


def test_many_large_values_at_once(far_pool: sky.ComputePool) -> None:
    """Several large arguments and results in flight do not get mixed up."""
    arrays = [np.full(200_000, float(i)) for i in range(12)]
    assert [float(back[0]) for back in far_pool.map(add_one, arrays)] == [i + 1.0 for i in range(12)]


def test_nothing_stays_behind_on_the_workers(far_pool: sky.ComputePool) -> None:
    """Once the calls have ended, no worker holds a value."""
    add_one(np.ones(500_000)) >> far_pool
    client = far_pool.dask_client()
    for _ in range(200):
        if not any(client.run(lambda dask_worker: len(dask_worker.data)).values()):
            break
    assert not any(client.run(lambda dask_worker: len(dask_worker.data)).values())


# ── on this machine: the result may take over the file that the arguments came in ────────────────────────────────────────────────────────────

_kept: list[Any] = []


@sky.compute
def keep_and_return(array: Any = None) -> Any:
    if array is None:
        return float(_kept[0][0])
    _kept.append(array)
    return array


@sky.compute
def doubled_and_longer(array: Any) -> Any:
    return np.concatenate([array * 2, array])


@sky.compute
def shorter(array: Any) -> Any:
    return array[: len(array) // 2] * 3


@sky.compute
def twice(array: Any) -> tuple[Any, Any]:
    return array, array[10:] + 1


def test_an_argument_that_is_returned_comes_back(pool: sky.ComputePool) -> None:
    """The array itself, changed in place, comes back; the client's own is untouched and both are writable."""
    array = np.arange(500_000, dtype=float)
    back = add_one(array) >> pool
    assert np.array_equal(back, array + 1)
    back[:] = 0
    assert array[-1] == 499_999


@pytest.mark.parametrize("call", [doubled_and_longer, shorter])
def test_results_longer_and_shorter_than_the_argument_come_back_whole(pool: sky.ComputePool, call: Any) -> None:
    """What is written over the argument's file is exactly the result."""
    array = np.arange(300_000, dtype=float)
    assert np.array_equal(call(array) >> pool, call.local(array))


def test_a_result_partly_new_and_partly_the_argument_comes_back(pool: sky.ComputePool) -> None:
    """A tuple of the argument and of something computed from it holds both."""
    array = np.arange(300_000, dtype=float)
    same, more = twice(array) >> pool
    assert np.array_equal(same, array)
    assert np.array_equal(more, array[10:] + 1)


def test_what_a_node_keeps_is_not_what_the_client_gets() -> None:
    """A function that keeps its argument and returns it has its own: what the client does to the result does not reach it."""
    with sky.ComputePool(provider=sky.Local(), display="quiet") as pool:
        back = keep_and_return(np.ones(200_000)) >> pool
        back[:] = 5
        assert keep_and_return() >> pool == 1.0
