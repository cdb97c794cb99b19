"""The decorators `@sky.distributed.torch(...)`, `jax`, `tensorflow`, `transformers` and `keras`.

Each decorator makes one group of all workers of a pool. The frameworks are imported on the nodes only.

`DistributedSampler` is PyTorch's, for this worker. Its class is made from PyTorch's when it is first used, because a
client may have no PyTorch. It can still import the name, for functions that run on nodes.
"""

from __future__ import annotations

import contextlib
import functools
import json
import secrets
import socket
import sys
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast, get_args, overload, override

from skyward_core.distributed.group import (
    RENDEZVOUS_SECONDS,
    Decorator,
    Framework,
    Group,
    ListDecorator,
    decorator,
    host_and_port,
    interface_of,
    reserved_port,
)
from skyward_core.distributed.member import Place
from skyward_core.errors import BadRequest
from skyward_core.wire.info import instance_info

if TYPE_CHECKING:
    from collections.abc import Sized


# ── PyTorch: its process group, and the environment that torchrun sets ────────────────────────────────────────────────


@overload
def torch(
    *, backend: str | None = None, nproc_per_node: None = None, rendezvous_seconds: float = RENDEZVOUS_SECONDS
) -> Decorator: ...
@overload
def torch(
    *, backend: str | None = None, nproc_per_node: int, rendezvous_seconds: float = RENDEZVOUS_SECONDS
) -> ListDecorator: ...
def torch(
    *, backend: str | None = None, nproc_per_node: int | None = None, rendezvous_seconds: float = RENDEZVOUS_SECONDS
) -> Any:
    """Run a function as one rank of a `torch.distributed` process group, initialised before it and destroyed after it.

    `backend` is "nccl" (GPU), "gloo" (CPU), or another one of PyTorch's; None is "nccl" with a GPU and "gloo" without.
    Every rank must come within `rendezvous_seconds`: `sky.GroupNotFormed` names those that did not. Raises BadRequest
    for an argument that is none.

    The environment is torchrun's, so that Lightning, Accelerate and `init_method="env://"` work unchanged.

    >>> import skyward_core as sky
    >>> @sky.compute
    ... @sky.distributed.torch(backend="gloo")
    ... def train() -> float:
    ...     import torch, torch.distributed as dist
    ...     total = torch.ones(1)
    ...     dist.all_reduce(total)
    ...     return total.item()
    >>> train()
    <pending train()>
    """
    check_backend(backend)
    return decorator(Torch(backend), rendezvous_seconds, nproc_per_node)


def check_backend(backend: str | None) -> None:
    """Raise BadRequest for a backend that PyTorch cannot have: only PyTorch on a node knows the names of all."""
    if backend is not None and (not isinstance(backend, str) or not backend):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise BadRequest(f'backend={backend!r}: write "nccl", "gloo" or another backend of PyTorch, or None')


@dataclass(frozen=True, slots=True)
class Torch:
    """PyTorch around a function."""

    needs_process: ClassVar[bool] = False
    backend: str | None = None

    @contextlib.contextmanager
    def running(self, group: Group) -> Generator[None]:
        """Initialise the default process group, and destroy it."""
        with environment(group), process_group(self.backend, group.place):
            yield


@contextlib.contextmanager
def environment(group: Group) -> Generator[None]:
    """Set torchrun's variables. Rank 0 runs the store at MASTER_ADDR and MASTER_PORT that they name."""
    with _store(group) as port:
        group.set_environment(torchrun_variables(group.place, port))
        if (interface := interface_of(group.address)) is not None:
            # a host name may resolve to 127.0.1.1, which the other nodes cannot reach
            group.set_defaults({"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface})
        yield


@contextlib.contextmanager
def process_group(backend: str | None, place: Place) -> Generator[None]:
    """Initialise the default process group from the environment, and destroy it."""
    torch, dist = cast(Any, import_module("torch")), cast(Any, import_module("torch.distributed"))
    has_gpu = torch.cuda.is_available()
    chosen = backend or ("nccl" if has_gpu else "gloo")
    if has_gpu:
        torch.cuda.set_device(place.local_rank % torch.cuda.device_count())
    store, rank, world_size = next(dist.rendezvous("env://"))
    # A library may destroy this group and initialise another one from the environment. The prefix separates their keys:
    # otherwise a fast rank would read the addresses of this group, and wait for them forever.
    own = dist.PrefixStore("skyward", store)
    try:
        dist.init_process_group(chosen, store=own, rank=rank, world_size=world_size)
        yield
    finally:
        if not dist.is_initialized():  # it could not be initialised, or the function has destroyed it
            _initialise_alone(dist)
        if dist.is_initialized():
            dist.destroy_process_group()


def _initialise_alone(dist: Any) -> None:
    """Initialise a group of this rank alone, whose end sets PyTorch's number of the next group to 0.

    A group that could not be initialised has been counted. Ranks find each other by that number. In the next training
    of this process other ranks may run in new processes, and all would wait for each other forever.
    """
    if dist.is_gloo_available():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


@contextlib.contextmanager
def _store(group: Group) -> Generator[int]:
    """Run the store of the group on rank 0 until the end; yield its port on all ranks.

    The kernel chooses the port, and the store gets the socket that listens on it: no other program can take it.
    """
    if not group.is_first:
        yield next(port for port in group.exchange(None) if port)
        return
    address = group.place.head_address
    listener = socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
    port = int(listener.getsockname()[1])
    store = cast(Any, import_module("torch.distributed")).TCPStore(
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=RENDEZVOUS_SECONDS),
        master_listen_fd=listener.detach(),
    )
    group.exchange(port)
    yield port
    del store  # ends its server


def torchrun_variables(place: Place, port: int) -> dict[str, str]:
    """Return the variables that torchrun sets for a worker (its manual, "Environment Variables"), and NODE_RANK, which
    Lightning reads.

    TORCHELASTIC_USE_AGENT_STORE says that the store runs already: `init_method="env://"` connects to it on all ranks.
    """
    variables: dict[str, object] = {
        "MASTER_ADDR": place.head_address,
        "MASTER_PORT": port,
        "RANK": place.rank,
        "WORLD_SIZE": place.world_size,
        "LOCAL_RANK": place.local_rank,
        "LOCAL_WORLD_SIZE": place.local_world_size,
        "NODE_RANK": place.node,
        "GROUP_RANK": place.node,
        "GROUP_WORLD_SIZE": place.nodes,
        "ROLE_NAME": "default",
        "ROLE_RANK": place.rank,
        "ROLE_WORLD_SIZE": place.world_size,
        "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_MAX_RESTARTS": 0,
        "TORCHELASTIC_RUN_ID": place.run_id,
        "TORCHELASTIC_USE_AGENT_STORE": True,
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": 1,
    }
    return {name: str(value) for name, value in variables.items()}


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


# ── JAX: its distributed runtime ──────────────────────────────────────────────────────────────────────────────────────


@overload
def jax(*, nproc_per_node: None = None, rendezvous_seconds: float = RENDEZVOUS_SECONDS) -> Decorator: ...
@overload
def jax(*, nproc_per_node: int, rendezvous_seconds: float = RENDEZVOUS_SECONDS) -> ListDecorator: ...
def jax(*, nproc_per_node: int | None = None, rendezvous_seconds: float = RENDEZVOUS_SECONDS) -> Any:
    """Run a function as one process of JAX's distributed runtime: `jax.devices()` are the devices of all nodes.

    It runs in a separate process, with all devices of its node. With `nproc_per_node` it runs in so many processes,
    each with one device, and the call returns a list of their values for each node. Every rank must come within
    `rendezvous_seconds`: `sky.GroupNotFormed` names those that did not. Return NumPy arrays or numbers: arrays of JAX
    end with the process.

    >>> import skyward_core as sky
    >>> @sky.compute
    ... @sky.distributed.jax()
    ... def train() -> int:
    ...     import jax
    ...     return jax.process_count()
    >>> train()
    <pending train()>
    """
    return decorator(Jax(nproc_per_node), rendezvous_seconds, nproc_per_node)


@dataclass(frozen=True, slots=True)
class Jax:
    """JAX around a function. `processes` share the devices of a worker, one each; None: one process has all."""

    needs_process: ClassVar[bool] = True
    processes: int | None = None

    @contextlib.contextmanager
    def running(self, group: Group) -> Generator[None]:
        """Initialise JAX's distributed runtime, and shut it down. JAX must not have been used in this process."""
        with coordinator(group) as address:
            group.set_environment(jax_variables(group, address))
            jax = cast(Any, import_module("jax"))
            jax.distributed.initialize(
                address,
                group.place.world_size,
                group.place.rank,
                local_device_ids=None if self.processes is None else [group.place.local_rank % self.processes],
                coordinator_bind_address=address,
                cluster_detection_method="deactivate",
            )
            yield
            jax.distributed.shutdown()  # does nothing if the function has done it


@contextlib.contextmanager
def coordinator(group: Group) -> Generator[str]:
    """Yield the address of JAX's coordinator, which rank 0 starts; its port is reserved until the end."""
    address = group.place.head_address
    if not group.is_first:
        yield host_and_port(address, group.exchange(None)[0])
        return
    with reserved_port(address) as port:
        group.exchange(port)
        yield host_and_port(address, port)


def jax_variables(group: Group, address: str) -> dict[str, str]:
    """Return JAX's variables, for libraries that initialise it, and gRPC's for an address without a proxy."""
    return {
        "JAX_COORDINATOR_ADDRESS": address,
        "JAX_NUM_PROCESSES": str(group.place.world_size),
        "JAX_PROCESS_ID": str(group.place.rank),
        "no_grpc_proxy": group.place.head_address,
    }


# ── TensorFlow: TF_CONFIG for its strategies of several workers ───────────────────────────────────────────────────────


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


# ── Hugging Face's Trainer ────────────────────────────────────────────────────────────────────────────────────────────


@overload
def transformers(
    *, backend: str | None = None, nproc_per_node: None = None, rendezvous_seconds: float = RENDEZVOUS_SECONDS
) -> Decorator: ...
@overload
def transformers(
    *, backend: str | None = None, nproc_per_node: int, rendezvous_seconds: float = RENDEZVOUS_SECONDS
) -> ListDecorator: ...
def transformers(
    *, backend: str | None = None, nproc_per_node: int | None = None, rendezvous_seconds: float = RENDEZVOUS_SECONDS
) -> Any:
    """Run a function as one rank of a group that Hugging Face's `Trainer` and Accelerate detect.

    `backend` and `rendezvous_seconds` are those of `sky.distributed.torch`, and so is the environment. Besides, the
    state that Accelerate keeps for a whole process ends with the function, because the process runs other calls then.

    >>> import skyward_core as sky
    >>> @sky.compute
    ... @sky.distributed.transformers(backend="nccl")
    ... def train() -> None:
    ...     from transformers import Trainer
    >>> train()
    <pending train()>
    """
    check_backend(backend)
    return decorator(Transformers(backend), rendezvous_seconds, nproc_per_node)


@dataclass(frozen=True, slots=True)
class Transformers:
    """PyTorch's process group and Accelerate's state around a function."""

    needs_process: ClassVar[bool] = False
    backend: str | None = None

    @contextlib.contextmanager
    def running(self, group: Group) -> Generator[None]:
        """Initialise the default process group, and end Accelerate's state before and after the function."""
        with environment(group), process_group(self.backend, group.place):
            forget_state()
            try:
                yield
            finally:
                forget_state()


def forget_state() -> None:
    """End the state in which Accelerate keeps rank, world size and device of this process, if it is loaded.

    An earlier call may have left it. Accelerate's own tests use these methods; there are no public ones.
    """
    state = cast(Any, sys.modules.get("accelerate.state"))
    if state is not None:
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()


# ── Keras, with one of its backends ───────────────────────────────────────────────────────────────────────────────────

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
