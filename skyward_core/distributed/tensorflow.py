"""`@sky.distributed.tensorflow(...)`: TF_CONFIG for TensorFlow's strategies of several workers."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar, cast, overload

from skyward_core.distributed.group import (
    RENDEZVOUS_SECONDS,
    Decorator,
    Group,
    ListDecorator,
    decorator,
    host_and_port,
    reserved_port,
)


@overload
def tensorflow(*, nproc_per_node: None = None, rendezvous_seconds: float = RENDEZVOUS_SECONDS) -> Decorator: ...
@overload
def tensorflow(*, nproc_per_node: int, rendezvous_seconds: float = RENDEZVOUS_SECONDS) -> ListDecorator: ...
def tensorflow(*, nproc_per_node: int | None = None, rendezvous_seconds: float = RENDEZVOUS_SECONDS) -> Any:
    """Run a function as one worker of a TensorFlow cluster: TF_CONFIG is set, and
    `tf.distribute.MultiWorkerMirroredStrategy()` finds the others.

    It runs in a separate process, with all GPUs of its node. With `nproc_per_node` it runs in so many processes, each
    with one GPU, and the call returns a list of their values for each node. Every rank must come within
    `rendezvous_seconds`: `sky.GroupNotFormed` names those that did not.

    >>> import skyward_core as sky
    >>> @sky.compute
    ... @sky.distributed.tensorflow()
    ... def train() -> int:
    ...     import tensorflow as tf
    ...     return tf.distribute.MultiWorkerMirroredStrategy().num_replicas_in_sync
    >>> train()
    <pending train()>
    """
    return decorator(Tensorflow(nproc_per_node), rendezvous_seconds, nproc_per_node)


@dataclass(frozen=True, slots=True)
class Tensorflow:
    """TensorFlow's cluster around a function. `processes` share the GPUs of a worker, one each; None: one has all."""

    needs_process: ClassVar[bool] = True
    processes: int | None = None

    @contextlib.contextmanager
    def running(self, group: Group) -> Generator[None]:
        """Set TF_CONFIG. TensorFlow starts its server when the function makes a strategy, and ends it with the process.

        The port is reserved until the end. TensorFlow binds it with SO_REUSEADDR, at all addresses of the node.
        """
        any_address = "::" if ":" in group.address else "0.0.0.0"  # noqa: S104 - reserved, nothing listens
        with reserved_port(any_address, socket.SO_REUSEADDR) as port:
            workers = group.exchange(host_and_port(group.address, port))
            group.set_environment(
                {
                    "TF_CONFIG": tf_config(workers, group.place.rank),
                    "no_grpc_proxy": ",".join(worker.rpartition(":")[0] for worker in workers),
                }
            )
            if self.processes is not None:
                _take_one_gpu(group.place.local_rank % self.processes)
            yield


def tf_config(workers: Sequence[str], rank: int) -> str:
    """Return TF_CONFIG for one of these workers, in the order of the ranks; the first is the chief."""
    return json.dumps({"cluster": {"worker": list(workers)}, "task": {"type": "worker", "index": rank}})


def _take_one_gpu(number: int) -> None:
    config = cast(Any, import_module("tensorflow")).config
    if gpus := config.list_physical_devices("GPU"):
        config.set_visible_devices(gpus[number % len(gpus)], "GPU")
