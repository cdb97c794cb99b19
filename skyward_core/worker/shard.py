"""Each worker's share of the data."""

import hashlib
import random
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any, overload

from skyward_core.errors import BadRequest
from skyward_core.worker.info import instance_info


@overload
def shard(
    array: range, /, *, shuffle: bool = False, seed: int | None = None, drop_last: bool = False
) -> Sequence[int]: ...
@overload
def shard[T](
    array: tuple[T, ...], /, *, shuffle: bool = False, seed: int | None = None, drop_last: bool = False
) -> tuple[T, ...]: ...
@overload
def shard[A](array: A, /, *, shuffle: bool = False, seed: int | None = None, drop_last: bool = False) -> A: ...
@overload
def shard[A, B](
    a: A, b: B, /, *, shuffle: bool = False, seed: int | None = None, drop_last: bool = False
) -> tuple[A, B]: ...
@overload
def shard[A, B, C](
    a: A, b: B, c: C, /, *, shuffle: bool = False, seed: int | None = None, drop_last: bool = False
) -> tuple[A, B, C]: ...
@overload
def shard(*arrays: Any, shuffle: bool = False, seed: int | None = None, drop_last: bool = False) -> Any: ...
def shard(*arrays: Any, shuffle: bool = False, seed: int | None = None, drop_last: bool = False) -> Any:
    """Return this worker's share of each array, along its first axis: one array for one array, a tuple for several.

    With n rows and w workers, worker r gets rows r, r + w, r + 2w, ...: ⌈n/w⌉ or ⌊n/w⌋ of them, never padded. With
    `shuffle` the rows are put into a random order first, the same for all arrays and on all workers. Without `seed`
    that order depends on the call's `job_id`, which all workers of one broadcast share: it differs from broadcast to
    broadcast. Give `seed` to get the same order each time, for example if calls of `shard` in different broadcasts must
    agree.

    With `drop_last` the last n mod w rows of that order are left out, so that all workers get ⌊n/w⌋: a training in
    which all ranks make the same steps needs that.

    Takes lists, tuples, ranges, NumPy arrays, torch tensors, pandas frames and series, and Hugging Face datasets. It
    returns the same type, but a shuffled range becomes a list. Other sequences become lists. Without `shuffle`, arrays
    and tensors come back as views where slicing makes them.

    Raises `BadRequest`, a ValueError, if the arrays differ in length, if there are none, and for what has no rows.

    >>> shard([1, 2, 3], ("a", "b", "c"))
    ([1, 2, 3], ('a', 'b', 'c'))
    """
    rows = _common_length(arrays)
    info = instance_info()
    order = _permutation(rows, _seed_of(info.job_id) if seed is None else seed) if shuffle else range(rows)
    end = rows - rows % info.world_size if drop_last else rows
    share = order[info.rank : end : info.world_size]
    shares = tuple(_take(array, share) for array in arrays)
    return shares[0] if len(shares) == 1 else shares


def _common_length(arrays: tuple[Any, ...]) -> int:
    if not arrays:
        raise BadRequest("shard() needs at least one array, as in shard(x) or shard(x, y)")
    lengths = [_length(array) for array in arrays]
    if len(set(lengths)) > 1:
        raise BadRequest(f"shard() keeps rows together, so the arrays must have the same length; these have {lengths}")
    return lengths[0]


def _length(array: Any) -> int:
    if not _has_rows(array):
        raise BadRequest(
            f"shard() cannot split a {type(array).__name__}: it takes lists, tuples, ranges, NumPy arrays, torch"
            " tensors, pandas frames and Hugging Face datasets (for anything else that can be iterated over:"
            " shard(list(...)))"
        )
    if _is_tensor(array) and len(array.shape) == 0:
        raise BadRequest(
            "shard() splits along the first axis, and an array without axes has none: give it shape (n,) or (n, d)"
        )
    return len(array)


def _has_rows(array: Any) -> bool:
    text = isinstance(array, str | bytes | bytearray)
    return not text and (
        isinstance(array, Sequence) or hasattr(array, "iloc") or _is_tensor(array) or _is_dataset(array)
    )


def _is_dataset(array: Any) -> bool:
    """Return whether this is a `datasets.Dataset` of Hugging Face, whose `select` takes the numbers of rows."""
    return hasattr(array, "select") and hasattr(array, "features") and hasattr(array, "__len__")


def _is_tensor(array: Any) -> bool:
    return hasattr(array, "shape") and hasattr(array, "dtype")


def _seed_of(job_id: str) -> int:
    return int.from_bytes(hashlib.sha256(job_id.encode()).digest()[:8])


def _permutation(rows: int, seed: int) -> Sequence[int]:
    """Return 0 ... rows - 1 in an order that depends on the arguments alone: the same on all machines, with NumPy or
    without.

    Both ways are the Fisher-Yates shuffle on the same Mersenne Twister. NumPy's `RandomState` stream is frozen (NEP
    19), and it is seeded here as CPython seeds `random.Random` (Modules/_randommodule.c, random_seed: 32-bit words,
    lowest first).
    """
    if find_spec("numpy") is None:
        return _permutation_in_python(rows, seed)
    import numpy as np

    magnitude = abs(seed)
    words = [magnitude >> shift & 0xFFFFFFFF for shift in range(0, max(magnitude.bit_length(), 1), 32)]
    return np.random.RandomState(words).permutation(rows)  # pyright: ignore[reportReturnType]


def _permutation_in_python(rows: int, seed: int) -> list[int]:
    word = random.Random(seed).getrandbits  # noqa: S311 - an order of rows, no secret
    order = list(range(rows))
    for i in range(rows - 1, 0, -1):
        mask = (1 << i.bit_length()) - 1
        while (j := word(32) & mask) > i:
            pass
        order[i], order[j] = order[j], order[i]
    return order


def _take(array: Any, share: Sequence[int]) -> Any:
    """Return the rows of the array that `share` names, in that order; a range is taken as a slice."""
    where: Any = share
    if isinstance(share, range):
        where = slice(share.start, share.stop, share.step)
    if _is_dataset(array):
        return array.select(share if isinstance(share, range) else [int(i) for i in share])
    if hasattr(array, "iloc"):
        return array.iloc[where]
    if _is_tensor(array):
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(array, torch.Tensor) and not isinstance(where, slice):
            where = torch.as_tensor(where)
        return array[where]
    if isinstance(where, slice) and isinstance(array, list | tuple | range):
        part: Any = array[where]  # pyright: ignore[reportUnknownVariableType]
        return tuple(part) if isinstance(array, tuple) else part  # pyright: ignore[reportUnknownArgumentType]
    part = [array[i] for i in share]
    return tuple(part) if isinstance(array, tuple) else part
