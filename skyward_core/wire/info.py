"""Where a call runs: its node, its worker, its place among all workers of the pool, its share of data (`shard`), and
notices that its machine is taken back.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from importlib.util import find_spec
from typing import Any, overload

from skyward_core.errors import BadRequest

ENV = "SKYWARD_INSTANCE_INFO"
"""The environment variable that carries an `InstanceInfo` as JSON, so that processes started by a call (torchrun) see
it too.
"""
JOB_PLACE = "{job}"  # stands for the job's id in the text of the instance's information
_DEFAULT_HEAD_PORT = 29500  # torch.distributed's own default, see the torchrun manual, --master-port
NOTICE_SECONDS = 120.0
"""How long before a machine is taken AWS announces it. A longer time means that a clock is wrong."""


@dataclass(frozen=True, slots=True)
class InstanceInfo:
    """The surroundings of one call.

    `node` counts from 0 (the head) to `total_nodes - 1`, `worker` from 0 to `workers_per_node - 1` on its node.
    `accelerators` are the names of what this worker may use, one per device. `head_addr` and `head_port` are where the
    workers of this call can meet: an address that all nodes reach and a port that is free on the head. `job_id` is the
    same on all workers of one broadcast, and different for each call. `neuron_cores` are the numbers of the NeuronCores
    (Trainium, Inferentia) that this process may use, also in NEURON_RT_VISIBLE_CORES for AWS's runtime: a part of the
    node's if calls run there at once. Empty elsewhere, and if the runtime chooses. `is_simulated`: `Local` simulates
    these accelerators. `is_broadcast`: the same call runs on every worker of the pool (`call @ pool`).

    In a pool of `nodes=(least, most)`, `node` and `total_nodes` of a broadcast count the nodes that it runs on. In
    other calls `total_nodes` is the most that the pool may have.
    """

    node: int
    total_nodes: int
    is_head: bool
    accelerators: list[str]
    head_addr: str
    head_port: int
    job_id: str
    worker: int
    workers_per_node: int
    neuron_cores: list[int] = field(default_factory=list[int])
    is_simulated: bool = False
    is_broadcast: bool = False

    @property
    def rank(self) -> int:
        """This worker among all workers of the pool, from 0; node by node."""
        return self.node * self.workers_per_node + self.worker

    @property
    def world_size(self) -> int:
        """How many workers the pool has."""
        return self.total_nodes * self.workers_per_node


def instance_info() -> InstanceInfo:
    """Return where this code runs; outside a pool, the only worker of the only node, with `job_id` "local".

    Raises `BadRequest` if the environment variable `SKYWARD_INSTANCE_INFO` has a value that `to_env` does not write.

    >>> instance_info().rank
    0
    """
    text = os.environ.get(ENV)
    if not text:
        return _outside_a_pool()
    try:
        return InstanceInfo(**json.loads(text))
    except (ValueError, TypeError) as error:
        raise BadRequest(
            f"{ENV} is set, but not to what skyward writes there ({error}): unset it outside a pool"
        ) from error


def to_env(info: InstanceInfo) -> str:
    """Return the value for the environment variable `SKYWARD_INSTANCE_INFO` that `instance_info` reads."""
    fields = asdict(info)
    if not info.neuron_cores:  # an older version in the user's own environment does not know the field
        del fields["neuron_cores"]
    if not info.is_simulated:  # the same
        del fields["is_simulated"]
    if not info.is_broadcast:  # the same
        del fields["is_broadcast"]
    return json.dumps(fields)


def of_call(text: str, job_id: str, *, is_broadcast: bool, place: tuple[int, int] | None = None) -> str:
    """Return the text of `to_env` for one call, from the text that has JOB_PLACE in place of its job's id.

    `place` is that of its node among the nodes of the broadcast, and their number; None: as the text says.
    """
    filled = text.replace(JOB_PLACE, job_id)
    if place is not None:
        fields = json.loads(filled)
        if place != (fields["node"], fields["total_nodes"]):
            fields["node"], fields["total_nodes"] = place
            filled = json.dumps(fields)
    return f'{filled[:-1]}, "is_broadcast": true}}' if is_broadcast else filled


def current_accelerator() -> str | None:
    """Return the name of the first accelerator of this worker, such as "H100"; None if it has none."""
    return next(iter(instance_info().accelerators), None)


def _outside_a_pool() -> InstanceInfo:
    return InstanceInfo(
        node=0,
        total_nodes=1,
        is_head=True,
        accelerators=[],
        head_addr="127.0.0.1",
        head_port=_DEFAULT_HEAD_PORT,
        job_id="local",
        worker=0,
        workers_per_node=1,
    )


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


class Kind(StrEnum):
    """What is announced."""

    INTERRUPTION = "interruption"
    """The machine is taken back."""
    REBALANCE = "rebalance"
    """It is more likely than before that it will be."""


@dataclass(frozen=True, slots=True)
class Notice:
    """A notice for a machine. `action` is what will be done with it ("terminate", "stop", "hibernate"; "" if nothing
    is said).

    `at` is when, in seconds since 1970 (of a recommendation: when it was made), `seconds_left` how long that was off
    when it was heard, by the metadata service's own clock: 0 to NOTICE_SECONDS.
    """

    kind: Kind
    action: str
    at: float
    seconds_left: float = 0.0

    def to_text(self) -> str:
        """Return the text that `from_text` reads."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Notice:
        """Rebuild a notice. Raises ValueError for any other text."""
        try:
            fields = dict(json.loads(text))
            return cls(
                Kind(fields["kind"]),
                str(fields["action"]),
                float(fields["at"]),
                within_a_notice(float(fields["seconds_left"])),
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"no notice: {text!r}") from error


def within_a_notice(seconds: float) -> float:
    if not math.isfinite(seconds):
        raise ValueError(f"no number of seconds: {seconds}")
    return min(max(0.0, seconds), NOTICE_SECONDS)
