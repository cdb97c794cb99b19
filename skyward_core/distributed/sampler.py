"""PyTorch's `DistributedSampler`, for this worker."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from skyward_core.worker.info import instance_info

if TYPE_CHECKING:
    from collections.abc import Sized


def DistributedSampler(  # noqa: N802 - the name of PyTorch's class, of which it returns an object
    dataset: Sized,
    *,
    shuffle: bool = True,
    seed: int = 0,
    drop_last: bool = False,
    num_replicas: int | None = None,
    rank: int | None = None,
) -> Any:
    """Return a `torch.utils.data.DistributedSampler` that knows this worker's rank, for `DataLoader(sampler=...)`.

    It is PyTorch's own object: order, padding of uneven lengths, `drop_last` and `set_epoch(epoch)` are PyTorch's, and
    libraries recognise it. Rank and number of replicas are those of the process group if one is initialised, else those
    of the worker among all workers of the pool. All workers must give the same `seed`.

    >>> sampler = DistributedSampler(dataset, shuffle=True)  # doctest: +SKIP
    >>> loader = DataLoader(dataset, sampler=sampler)  # doctest: +SKIP
    """
    distributed, data = import_module("torch.distributed"), import_module("torch.utils.data")
    if not (distributed.is_available() and distributed.is_initialized()):
        info = instance_info()
        num_replicas = info.world_size if num_replicas is None else num_replicas
        rank = info.rank if rank is None else rank
    return data.DistributedSampler(
        dataset, num_replicas=num_replicas, rank=rank, shuffle=shuffle, seed=seed, drop_last=drop_last
    )
