"""`@sky.distributed.jax(...)`: JAX's distributed runtime around a function."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
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
