"""One training on all workers of a pool: the group is formed before the user's function, and torn down after it.

`@sky.distributed.torch(...)` and its siblings make a `GroupFunction` of a function. Each rank of `fn(x) @ pool` calls
it. `fn(x) >> pool` is a group of one rank. What a framework needs is in its own module; this one knows none.
"""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import socket
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Protocol, cast

from skyward_core.distributed.member import Member, Place, find_hub, open_hub
from skyward_core.errors import BadRequest
from skyward_core.worker.info import instance_info

RENDEZVOUS_SECONDS = 300.0


class Framework(Protocol):
    """What one framework needs around the user's function. It is pickled with the function, and imports nothing before
    `running`.
    """

    def running(self, group: Group) -> AbstractContextManager[object]:
        """Start the framework's own communication, and end it. All ranks do this at the same time."""
        ...


class Decorator(Protocol):
    """Makes a `GroupFunction` of a function."""

    def __call__[**P, R](self, fn: Callable[P, R], /) -> GroupFunction[P, R]:
        """Return the function that forms a group first."""
        ...


class Group:
    """One rank's group while the user's function runs. It owns the environment variables that it sets."""

    def __init__(self, member: Member) -> None:
        self.place: Place = member.place
        self.address: str = member.address
        """This node's address in the network of the group."""
        self.exchange: Callable[[Any], list[Any]] = member.exchange
        """Returns the values of all ranks, in their order. All ranks must call it the same number of times."""
        self._before = dict[str, str | None]()

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0."""
        return self.place.rank == 0

    def set_environment(self, variables: Mapping[str, str]) -> None:
        """Set environment variables until the end of the group."""
        for name, value in variables.items():
            self._before.setdefault(name, os.environ.get(name))
            os.environ[name] = value

    def set_defaults(self, variables: Mapping[str, str]) -> None:
        """Set those environment variables that the user has not set, until the end of the group."""
        self.set_environment({name: value for name, value in variables.items() if name not in os.environ})

    def restore_environment(self) -> None:
        """Give the variables that were set their earlier values."""
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        self._before.clear()


class GroupFunction[**P, R]:
    """A function that runs as one rank of a group."""

    forms_group = True
    """For pools (`pool/groups.py`): after a loss all ranks run again."""

    def __init__(self, fn: Callable[P, R], framework: Framework, rendezvous_seconds: float) -> None:
        self.fn = fn
        self.framework = framework
        self.rendezvous_seconds = rendezvous_seconds
        functools.update_wrapper(self, fn)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Form the group, run the function, and tear the group down.

        Raises GroupNotFormed, RankFailed, or the function's own error.
        """
        from skyward_core.worker.runner import completed  # clients only decorate

        with member_of(this_place(), self.rendezvous_seconds) as member, ExitStack() as undo:
            group = Group(member)
            undo.callback(group.restore_environment)
            try:
                undo.enter_context(self.framework.running(group))
                value = completed(self.fn(*args, **kwargs))
                member.finish()
            except BaseException as error:
                member.fail(error)
                raise
            return cast("R", value)

    def __repr__(self) -> str:
        return f"<{self.framework!r} training {getattr(self.fn, '__name__', self.fn)!r}>"


def decorator(framework: Framework, rendezvous_seconds: float) -> Decorator:
    """Return the decorator for a framework. Raises BadRequest for a deadline that is none."""
    if not 0 < rendezvous_seconds < float("inf"):
        raise BadRequest(f"rendezvous_seconds={rendezvous_seconds!r}: write how many seconds ranks wait for each other")

    def decorate[**P, R](fn: Callable[P, R], /) -> GroupFunction[P, R]:
        if hasattr(fn, "local"):
            raise TypeError(f"{fn!r} is decorated with @sky.compute already: write @sky.compute above @sky.distributed")
        return GroupFunction(fn, framework, rendezvous_seconds)

    return decorate


def this_place() -> Place:
    """Return this call's place in its group: all workers of the pool for a broadcast, else a group of one rank."""
    info = instance_info()
    if not info.is_broadcast:
        return Place(0, 1, 0, 1, 0, 1, "127.0.0.1", secrets.token_hex(16))
    return Place(
        rank=info.rank,
        world_size=info.world_size,
        local_rank=info.worker,
        local_world_size=info.workers_per_node,
        node=info.node,
        nodes=info.total_nodes,
        head_address=info.head_addr,
        key=info.job_id,
    )


@contextlib.contextmanager
def member_of(place: Place, rendezvous_seconds: float) -> Generator[Member]:
    """Join the group of this call, all ranks of it; leave it at the end. Rank 0 runs the hub.

    Raises GroupNotFormed.
    """
    deadline = time.monotonic() + rendezvous_seconds
    with ExitStack() as undo:
        if place.rank == 0:
            undo.callback(open_hub(place, deadline).close)
        member = Member(place, *find_hub(place, deadline))
        undo.callback(member.close)
        member.wait_until_formed()
        yield member


@contextlib.contextmanager
def reserved_port(address: str) -> Generator[int]:
    """Reserve a free port of this machine for a server of this user that sets SO_REUSEPORT, as gRPC does.

    The socket does not listen. While it is bound, other programs cannot take the port.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as reservation:
        reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reservation.bind((address, 0))
        yield reservation.getsockname()[1]


def interface_of(address: str) -> str | None:
    """Return the name of the network interface that has an address; None if none has."""
    import psutil

    found = psutil.net_if_addrs().items()
    return next((name for name, entries in found if any(entry.address == address for entry in entries)), None)
