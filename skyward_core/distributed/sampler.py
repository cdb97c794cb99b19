"""PyTorch's `DistributedSampler`, for this worker.

The class is made from PyTorch's when it is first used, because a client may have no PyTorch. It can still import the
name, for functions that run on nodes.
"""

from __future__ import annotations

import functools
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any, override

from skyward_core.wire.info import instance_info

if TYPE_CHECKING:
    from collections.abc import Sized


class _MadeWhenUsed(type):
    """Stands for `TorchSampler`: calls, subclasses and checks are those of that class."""

    @override
    def __new__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> Any:
        if not bases:
            return super().__new__(cls, name, bases, namespace)
        real = tuple(_torch_sampler() if isinstance(base, _MadeWhenUsed) else base for base in bases)
        return type(real[0])(name, real, namespace)

    @override
    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return _torch_sampler()(*args, **kwargs)

    @override
    def __instancecheck__(cls, instance: Any) -> bool:
        return "torch.utils.data" in sys.modules and isinstance(instance, _torch_sampler())

    @override
    def __subclasscheck__(cls, subclass: type) -> bool:
        return "torch.utils.data" in sys.modules and issubclass(subclass, _torch_sampler())


class DistributedSampler(metaclass=_MadeWhenUsed):
    """`torch.utils.data.DistributedSampler` that knows this worker's rank, for `DataLoader(sampler=...)`.

    Its objects are PyTorch's: order, padding of uneven lengths, `drop_last` and `set_epoch(epoch)` are PyTorch's, and
    libraries recognise them. Rank and number of replicas are those of the process group if one is initialised, else
    those of the worker among all workers of the pool. All workers must give the same `seed`. It may be subclassed.
    Raises ModuleNotFoundError where PyTorch is not installed.

    >>> sampler = DistributedSampler(dataset, shuffle=True)  # doctest: +SKIP
    >>> loader = DataLoader(dataset, sampler=sampler)  # doctest: +SKIP
    """

    if TYPE_CHECKING:

        def __init__(
            self,
            dataset: Sized,
            num_replicas: int | None = None,
            rank: int | None = None,
            shuffle: bool = True,
            seed: int = 0,
            drop_last: bool = False,
        ) -> None: ...
        def set_epoch(self, epoch: int) -> None: ...
        def __iter__(self) -> Any: ...
        def __len__(self) -> int: ...


@functools.cache
def _torch_sampler() -> Any:
    base: Any = import_module("torch.utils.data").DistributedSampler

    def begin(
        self: Any, dataset: Sized, num_replicas: int | None = None, rank: int | None = None, *more: Any, **words: Any
    ) -> None:
        distributed = import_module("torch.distributed")
        if not (distributed.is_available() and distributed.is_initialized()):
            info = instance_info()
            num_replicas = info.world_size if num_replicas is None else num_replicas
            rank = info.rank if rank is None else rank
        base.__init__(self, dataset, num_replicas, rank, *more, **words)

    # pickle finds the class by this name, for the processes of a DataLoader
    return type(base)("TorchSampler", (base,), {"__init__": begin, "__module__": __name__})


def __getattr__(name: str) -> Any:
    if name == "TorchSampler":
        return _torch_sampler()
    raise AttributeError(name)
