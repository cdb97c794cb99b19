"""`shard` gives each row to exactly one worker; `instance_info` says which worker this is."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyward_core.errors import BadRequest
from skyward_core.wire.info import (
    ENV,
    InstanceInfo,
    _permutation_in_python,
    current_accelerator,
    instance_info,
    shard,
    to_env,
)


def place(rank: int, world: int, job_id: str = "job-1") -> InstanceInfo:
    return InstanceInfo(
        node=rank,
        total_nodes=world,
        is_head=rank == 0,
        accelerators=["H100", "H100"],
        head_addr="10.0.0.1",
        head_port=29500,
        job_id=job_id,
        worker=0,
        workers_per_node=1,
    )


def on_each[R](world: int, call: Callable[[], R], job_id: str = "job-1") -> list[R]:
    results: list[R] = []
    with pytest.MonkeyPatch.context() as patch:
        for rank in range(world):
            patch.setenv(ENV, to_env(place(rank, world, job_id)))
            results.append(call())
    return results


@settings(deadline=None)
@given(
    rows=st.integers(0, 200),
    world=st.integers(1, 9),
    shuffle=st.booleans(),
    seed=st.none() | st.integers(-(2**70), 2**70),
)
def test_the_shares_are_a_partition(rows: int, world: int, shuffle: bool, seed: int | None) -> None:
    """Over all workers each row comes exactly once, shares differ by at most one row, and arrays stay aligned."""
    x, y = list(range(rows)), np.arange(rows) * 10
    shares = on_each(world, lambda: shard(x, y, shuffle=shuffle, seed=seed))
    assert sorted(row for share, _ in shares for row in share) == x
    sizes = [len(share) for share, _ in shares]
    assert max(sizes) - min(sizes) <= 1
    assert all([10 * row for row in xs] == ys.tolist() for xs, ys in shares)


def test_worker_r_gets_every_wth_row_from_r() -> None:
    """With 7 rows and 3 workers the shares are 0 3 6, 1 4 and 2 5."""
    assert on_each(3, lambda: shard([0, 1, 2, 3, 4, 5, 6])) == [[0, 3, 6], [1, 4], [2, 5]]


def arrays(kind: str) -> tuple[Any, Callable[[Any], list[int]]]:
    """Return four rows, and what reads them."""
    rows, labels = [3, 1, 2, 4], [9, 8, 7, 6]
    if kind in {"series", "frame"}:
        import pandas as pd  # half a second, which each test process would need at its start

        series = pd.Series(rows, index=labels)
        return (series, lambda s: s.tolist()) if kind == "series" else (series.to_frame("a"), lambda f: f["a"].tolist())
    if kind == "numpy":
        return np.array(rows)[:, None], lambda a: a[:, 0].tolist()
    return (rows if kind == "list" else tuple(rows)), list


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("kind", ["list", "tuple", "numpy", "series", "frame"])
def test_the_type_is_kept(kind: str, shuffle: bool) -> None:
    """Series and frames are taken by position, not by label."""
    array, values = arrays(kind)
    shares = on_each(2, lambda: shard(array, shuffle=shuffle, seed=5))
    assert all(type(share) is type(array) for share in shares)
    assert sorted(values(shares[0]) + values(shares[1])) == [1, 2, 3, 4]


def test_a_range_stays_a_range_unless_shuffled() -> None:
    """A share of a range is a range; shuffled, it is a list of ints."""
    assert on_each(2, lambda: shard(range(10, 15))) == [range(10, 16, 2), range(11, 15, 2)]
    shuffled = on_each(2, lambda: shard(range(10, 15), shuffle=True))
    assert [type(share) for share in shuffled] == [list, list]
    assert sorted([*shuffled[0], *shuffled[1]]) == [10, 11, 12, 13, 14]


def test_an_unshuffled_array_is_a_view() -> None:
    """Taking a share of a NumPy array copies nothing."""
    array = np.arange(10)
    assert all(np.shares_memory(share, array) for share in on_each(2, lambda: shard(array)))


def test_a_shuffle_shuffles_and_the_seed_decides() -> None:
    """The same seed gives the same order, another seed another one; without a seed the job decides."""
    rows = list(range(100))
    assert shard(rows, shuffle=True, seed=1) == shard(rows, shuffle=True, seed=1) != shard(rows, shuffle=True, seed=2)
    assert shard(rows, shuffle=True) != rows
    by_job = [on_each(2, lambda: shard(rows, shuffle=True), job_id=job) for job in ("a", "a", "b")]
    assert by_job[0] == by_job[1] != by_job[2]


@pytest.mark.parametrize("seed", [0, 1, -1, 42, 2**32 - 1, 2**32, 2**40 + 7, 2**64 + 1])
def test_a_node_without_numpy_shuffles_in_the_same_order(seed: int) -> None:
    """The order without NumPy is the order with it, so that different nodes still partition the data."""
    assert shard(list(range(1000)), shuffle=True, seed=seed) == _permutation_in_python(1000, seed)


@pytest.mark.parametrize(
    ("arrays", "hint"),
    [
        ((), "at least one array"),
        (([1, 2], [1]), r"\[2, 1\]"),
        (("text",), r"shard\(list\("),
        (({1, 2},), "cannot split a set"),
        (({"a": 1},), "cannot split a dict"),
        ((np.array(3),), "without axes"),
    ],
)
def test_values_without_rows_are_refused(arrays: tuple[Any, ...], hint: str) -> None:
    """No arrays, unequal lengths and values without rows raise a BadRequest, which is a ValueError, that says what
    to pass.
    """
    with pytest.raises(BadRequest, match=hint) as caught:
        shard(*arrays)
    assert isinstance(caught.value, ValueError)


def test_outside_a_pool_there_is_one_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the environment variable this is node 0 of 1, with the job "local" and no accelerator."""
    monkeypatch.delenv(ENV, raising=False)
    info = instance_info()
    assert (info.rank, info.world_size, info.is_head, info.job_id) == (0, 1, True, "local")
    assert current_accelerator() is None


@pytest.mark.parametrize("text", ["{", "[]", '{"node": 0}'])
def test_a_broken_environment_is_named(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """A value that skyward did not write is refused with the name of the variable."""
    monkeypatch.setenv(ENV, text)
    with pytest.raises(BadRequest, match=ENV):
        instance_info()


@given(rows=st.integers(0, 60), world=st.integers(1, 9), shuffle=st.booleans())
@settings(deadline=None)
def test_with_drop_last_all_shares_are_equal(rows: int, world: int, shuffle: bool) -> None:
    """The rows that are left over belong to no worker; the others keep their places."""
    whole = on_each(world, lambda: shard(list(range(rows)), shuffle=shuffle, seed=3))
    shares = on_each(world, lambda: shard(list(range(rows)), shuffle=shuffle, seed=3, drop_last=True))
    assert {len(share) for share in shares} == {rows // world}
    assert shares == [share[: rows // world] for share in whole]
    arrays = on_each(world, lambda: shard(np.arange(rows), shuffle=shuffle, seed=3, drop_last=True))
    assert [one.tolist() for one in arrays] == shares


class Dataset:
    """The methods of Hugging Face's `datasets.Dataset` that matter here."""

    features = {"text": "string"}

    def __init__(self, rows: list[str]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def select(self, indices: Any) -> "Dataset":
        assert all(type(index) is int for index in indices)
        return Dataset([self.rows[index] for index in indices])


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_hugging_face_dataset_is_sharded_by_its_own_method(shuffle: bool) -> None:
    """Its rows stay in its own storage."""
    rows = list("abcdefg")
    shares = on_each(3, lambda: shard(Dataset(rows), rows, shuffle=shuffle, seed=1))
    assert all(dataset.rows == share for dataset, share in shares)
    assert sorted(row for dataset, _ in shares for row in dataset.rows) == rows
