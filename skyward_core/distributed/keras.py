"""`@sky.distributed.keras(...)`: Keras on all workers of a pool, with one of its backends."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Generator
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar, Literal, cast, get_args, overload

from skyward_core.distributed.group import RENDEZVOUS_SECONDS, Decorator, Framework, Group, ListDecorator, decorator
from skyward_core.distributed.jax import Jax
from skyward_core.distributed.tensorflow import Tensorflow
from skyward_core.distributed.torch import Torch
from skyward_core.errors import BadRequest

type Backend = Literal["jax", "tensorflow", "torch"]


@overload
def keras(
    *, backend: Backend, nproc_per_node: None = None, rendezvous_seconds: float = RENDEZVOUS_SECONDS
) -> Decorator: ...
@overload
def keras(
    *, backend: Backend, nproc_per_node: int, rendezvous_seconds: float = RENDEZVOUS_SECONDS
) -> ListDecorator: ...
def keras(
    *, backend: Backend, nproc_per_node: int | None = None, rendezvous_seconds: float = RENDEZVOUS_SECONDS
) -> Any:
    """Run a function with Keras on this backend, as one rank of a group of it, in a separate process.

    With "jax" the data-parallel distribution of Keras is set. `fit` of each rank takes the rows of that rank
    (`sky.shard`), and gradients are those of all ranks. With "torch" and "tensorflow" only what the decorators of that
    name set up is there: `fit` would train each rank separately. Write the loop, with DistributedDataParallel or a
    strategy (`docs/training.md`).

    `nproc_per_node` and `rendezvous_seconds` are those of the backend's own decorator.

    >>> import skyward_core as sky
    >>> @sky.compute
    ... @sky.distributed.keras(backend="jax")
    ... def train() -> None:
    ...     import keras
    >>> train()
    <pending train()>
    """
    names = get_args(Backend.__value__)
    if backend not in names:
        raise BadRequest(f"backend={backend!r}: write one of Keras's backends, {', '.join(map(repr, names))}")
    return decorator(Keras(backend, nproc_per_node), rendezvous_seconds, nproc_per_node)


@dataclass(frozen=True, slots=True)
class Keras:
    """Keras and one of its backends around a function."""

    needs_process: ClassVar[bool] = True
    backend: Backend
    processes: int | None = None

    @contextlib.contextmanager
    def running(self, group: Group) -> Generator[None]:
        """Start the backend's communication and let Keras use it."""
        group.set_environment({"KERAS_BACKEND": self.backend})
        frameworks: dict[Backend, Framework] = {
            "jax": Jax(self.processes),
            "tensorflow": Tensorflow(self.processes),
            "torch": Torch(),
        }
        with frameworks[self.backend].running(group):
            if self.backend == "jax":
                # the variables of all ranks must begin with the same values, as after keras.distribution.initialize
                _distribute(seed=group.exchange(secrets.randbelow(1 << 31))[0])
            yield


def _distribute(seed: int) -> None:
    keras = cast(Any, import_module("keras"))
    keras.utils.set_random_seed(seed)
    keras.distribution.set_distribution(keras.distribution.DataParallel(auto_shard_dataset=False))
