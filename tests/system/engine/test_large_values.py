"""Large values: over SSH they go directly into the memory of the node that needs them and back; on this machine both
sides see the same memory.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import skyward_core as sky
from tests.conftest import shared
from tests.testbed import Fleet
from tests.testbed.fixtures import fleet, mirror
from tests.testbed.mirror import Mirror
from tests.waiting import wait_until

__all__ = ["fleet", "mirror"]


@pytest.fixture(scope="module")
def far_pool(fleet: Fleet, mirror: Mirror) -> Iterator[sky.ComputePool]:
    """A pool on two hosts."""
    hosts = [fleet.create() for _ in range(2)]
    for host in hosts:
        mirror.configure(host)
    provider = sky.Hosts(
        *[host.ip for host in hosts], user="root", key=str(fleet.key_path), known_hosts="/dev/null", config="/dev/null"
    )
    with shared(sky.ComputePool(provider=provider, nodes=2, image=sky.Image(pip=["numpy"]), display="quiet")) as pool:
        yield pool


@sky.compute
def add_one(array: Any) -> Any:
    array += 1
    return array


@sky.compute
def total(array: Any) -> float:
    return float(array.sum())


@sky.compute
def files_in_memory() -> int:
    """How many files the node has in its memory."""
    instance = json.loads(Path(os.environ["SKYWARD_INSTANCE_DIRECTORY"], "settings.json").read_text())
    return len(os.listdir(instance["value_directories"][0]))


def test_many_large_values_at_once(far_pool: sky.ComputePool) -> None:
    """Several large arguments and results in flight do not get mixed up."""
    arrays = [np.full(200_000, float(i)) for i in range(12)]
    assert [float(back[0]) for back in far_pool.map(add_one, arrays)] == [i + 1.0 for i in range(12)]


def test_no_value_stays_on_the_workers(far_pool: sky.ComputePool) -> None:
    """Once the calls have ended, no node keeps a value in its memory: for calls that returned, failed or were
    cancelled.
    """
    add_one(np.ones(500_000)) >> far_pool
    with pytest.raises(TypeError):
        add_one("x" * 500_000) >> far_pool
    wait_until(lambda: files_in_memory() @ far_pool == (0, 0), "the nodes' memory to be empty")


def test_a_function_with_a_large_closure_is_sent_once(far_pool: sky.ComputePool) -> None:
    """A function with megabytes in its closure stays in a node's memory for later calls."""
    baggage = np.arange(1_000_000.0)

    @sky.compute
    def weigh(index: int) -> float:
        return float(baggage[index])

    assert far_pool.map(weigh, range(20)) == [float(index) for index in range(20)]
    assert sum(files_in_memory() @ far_pool) <= 2


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
    """The same array, changed in place, comes back; the client's own array is unchanged, and both are writable."""
    array = np.arange(500_000, dtype=float)
    back = add_one(array) >> pool
    assert np.array_equal(back, array + 1)
    back[:] = 0
    assert array[-1] == 499_999


@pytest.mark.parametrize("call", [doubled_and_longer, shorter])
def test_results_longer_and_shorter_than_the_argument_come_back_whole(pool: sky.ComputePool, call: Any) -> None:
    """The file of the arguments contains exactly the result afterwards."""
    array = np.arange(300_000, dtype=float)
    assert np.array_equal(call(array) >> pool, call.local(array))


def test_a_result_partly_new_and_partly_the_argument_comes_back(pool: sky.ComputePool) -> None:
    array = np.arange(300_000, dtype=float)
    same, more = twice(array) >> pool
    assert np.array_equal(same, array)
    assert np.array_equal(more, array[10:] + 1)


@sky.compute
def many_arrays(n: int) -> Iterator[Any]:
    for number in range(n):
        yield np.full(50_000, float(number))


def test_large_items_of_a_stream_are_fetched_from_their_node(far_pool: sky.ComputePool) -> None:
    """They come in their order, and none stays in the node's memory, also when the consumer stops early."""
    before = files_in_memory() @ far_pool  # large functions of other tests stay
    assert [float(array[0]) for array in many_arrays(40) >> far_pool] == [float(number) for number in range(40)]
    for array in many_arrays(10**9) >> far_pool:
        if array[0] == 20:
            break
    wait_until(lambda: files_in_memory() @ far_pool == before, "the nodes' memory to be as before")


def test_each_node_gets_a_scattered_value_once(far_pool: sky.ComputePool) -> None:
    """It stays there between calls, and is removed with its reference."""
    before = files_in_memory() @ far_pool  # large functions of other tests stay
    array = sky.scatter(np.ones(500_000))
    assert total(array) @ far_pool == (5e5, 5e5)
    assert far_pool.map(total, [array] * 8) == [5e5] * 8
    assert files_in_memory() @ far_pool == tuple(files + 1 for files in before)
    del array
    wait_until(lambda: files_in_memory() @ far_pool == before, "the nodes' memory to be as before")
