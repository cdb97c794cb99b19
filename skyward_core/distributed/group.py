"""One training on all workers of a pool: the group is formed before the user's function, and torn down after it.

`@sky.distributed.torch(...)` and its siblings make a `GroupFunction` of a function. Each rank of `fn(x) @ pool` calls
it. `fn(x) >> pool` is a group of one rank. What a framework needs is in its own module; this one knows none.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import secrets
import socket
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from numbers import Real
from typing import Any, ClassVar, Protocol, cast, overload

from skyward_core.distributed.member import Member, Place, find_hub, open_hub
from skyward_core.distributed.training_process import ProcessEnded, TrainingJob, TrainingProcess, run_all
from skyward_core.errors import BadRequest, CallCrashed
from skyward_core.serialization import pickling, sources
from skyward_core.wire.info import ENV, instance_info, to_env
from skyward_core.wire.log_records import kept_mark, of_this_process

RENDEZVOUS_SECONDS = 300.0


class Framework(Protocol):
    """What one framework needs around the user's function. It is pickled with the function, and imports nothing before
    `running`. `needs_process`: it cannot be ended and started again in one process.
    """

    needs_process: ClassVar[bool]

    def running(self, group: Group) -> AbstractContextManager[object]:
        """Start the framework's own communication, and end it. All ranks do this at the same time."""
        ...


class Decorator(Protocol):
    """Makes a `GroupFunction` of a function."""

    def __call__[**P, R](self, fn: Callable[P, R], /) -> GroupFunction[P, R]:
        """Return the function that forms a group first."""
        ...


class ListDecorator(Protocol):
    """Makes a `GroupFunction` of a function that several processes of a node run: it returns a list of their values."""

    def __call__[**P, R](self, fn: Callable[P, R], /) -> GroupFunction[P, list[R]]:
        """Return the function that forms a group first."""
        ...


class Group:
    """One rank's group while the user's function runs. It owns the environment variables that it sets."""

    def __init__(self, place: Place, address: str, exchange: Callable[[Any], list[Any]]) -> None:
        self.place = place
        self.address = address
        """This node's address in the network of the group."""
        self.exchange = exchange
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
    """A function that runs as one rank of a group, or as several: a list of their values, in the order of the local
    ranks. `fn` is the function itself, which forms no group.
    """

    forms_group = True
    """For pools (`pool/calls.py`): after a loss all ranks run again."""

    def __init__(
        self, fn: Callable[P, Any], framework: Framework, rendezvous_seconds: float, nproc_per_node: int | None = None
    ) -> None:
        self.fn = fn
        self.framework = framework
        self.rendezvous_seconds = rendezvous_seconds
        self.nproc_per_node = nproc_per_node
        functools.update_wrapper(self, fn)

    @property
    def __globals__(self) -> dict[str, Any]:
        """Those of the function: who reads its annotations needs them, such as decorators of Airflow."""
        return getattr(inspect.unwrap(self.fn), "__globals__", {})

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Form the group, run the function, and tear the group down.

        Raises GroupNotFormed, RankFailed, or the function's own error.
        """
        if self.nproc_per_node is None and not self.framework.needs_process:
            return self._run_here(args, kwargs)
        try:
            values = self._run_in_processes(self.nproc_per_node or 1, args, kwargs)
        except ProcessEnded as error:
            ended = error
        else:
            return cast("R", values if self.nproc_per_node is not None else values[0])
        if os.environ.get(ENV):
            ended.repeat()
        raise CallCrashed(str(ended), exit_code=ended.exit_code)

    def _run_here(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> R:
        """Run the function in this process."""
        from skyward_core.worker.runner import completed  # clients only decorate

        with members_of(places(1), self.rendezvous_seconds) as (member,), ExitStack() as undo:
            group = Group(member.place, member.address, member.exchange)
            undo.callback(group.restore_environment)
            try:
                undo.enter_context(self.framework.running(group))
                value = completed(self.fn(*args, **kwargs))
                member.finish()
            except BaseException as error:
                member.fail(error)
                raise
            return cast("R", value)

    def _run_in_processes(self, count: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """Run the function in this many separate processes. Raises ProcessEnded if one ends by itself."""
        ranks = places(count)
        framework = pickling.dumps(self.framework)
        work = pickling.dumps((self.fn, args, kwargs), label=("function", "args", "kwargs"))

        def job(member: Member) -> TrainingJob:
            return TrainingJob(
                member.place, member.address, sources.installed(), framework, work, kept_mark(), of_this_process.levels
            )

        with ExitStack() as undo:
            processes = [undo.enter_context(TrainingProcess(variables_of(place))) for place in ranks]
            members = undo.enter_context(members_of(ranks, self.rendezvous_seconds))
            return run_all(processes, members, job)

    def __repr__(self) -> str:
        return f"<{self.framework!r} training {getattr(self.fn, '__name__', self.fn)!r}>"


@overload
def decorator(framework: Framework, rendezvous_seconds: float, nproc_per_node: None = None) -> Decorator: ...
@overload
def decorator(framework: Framework, rendezvous_seconds: float, nproc_per_node: int | None) -> Any: ...
def decorator(framework: Framework, rendezvous_seconds: float, nproc_per_node: int | None = None) -> Any:
    """Return the decorator for a framework. Raises BadRequest for a wrong deadline or number of processes. The
    decorator raises TypeError for what is no function, or is decorated already.
    """
    is_number = isinstance(rendezvous_seconds, Real) and rendezvous_seconds is not True
    if not is_number or not 0 < rendezvous_seconds < float("inf"):
        raise BadRequest(f"rendezvous_seconds={rendezvous_seconds!r}: write how many seconds ranks wait for each other")
    if nproc_per_node is not None and (type(nproc_per_node) is not int or nproc_per_node < 1):
        raise BadRequest(f"nproc_per_node={nproc_per_node!r}: write how many processes run on each node, such as 8")

    def decorate[**P, R](fn: Callable[P, R], /) -> GroupFunction[P, Any]:
        if hasattr(fn, "local"):
            raise TypeError(f"{fn!r} is decorated with @sky.compute already: write @sky.compute above @sky.distributed")
        if isinstance(fn, GroupFunction):
            raise TypeError(f"{fn!r} is decorated with @sky.distributed already: its ranks form one group")
        if not callable(fn):
            raise TypeError(f"{fn!r} is no function: write @sky.distributed... directly above a function")
        return GroupFunction(fn, framework, rendezvous_seconds, nproc_per_node)

    return decorate


def places(processes: int) -> list[Place]:
    """Return the places of this call's processes in its group. A broadcast has one group of all workers of the pool;
    each other call has its own group.
    """
    info = instance_info()
    if not info.is_broadcast:
        key = secrets.token_hex(16)
        return [Place(rank, processes, rank, processes, 0, 1, "127.0.0.1", key) for rank in range(processes)]
    return [
        Place(
            rank=info.rank * processes + number,
            world_size=info.world_size * processes,
            local_rank=info.worker * processes + number,
            local_world_size=info.workers_per_node * processes,
            node=info.node,
            nodes=info.total_nodes,
            head_address=info.head_addr,
            key=info.job_id,
        )
        for number in range(processes)
    ]


def variables_of(place: Place) -> dict[str, str]:
    """Return the variables with which the process of a rank starts.

    In it, `sky.instance_info()` counts processes as workers, so that `sky.shard` gives each its own rows. Processes
    that share a node get one thread each for OpenMP, as torchrun has it, unless the user has set the number.
    """
    info = instance_info()
    of_process = replace(
        info,
        node=place.node,
        total_nodes=place.nodes,
        is_head=place.node == 0,
        worker=place.local_rank,
        workers_per_node=place.local_world_size,
    )
    threads = {"OMP_NUM_THREADS": "1"} if place.local_world_size > 1 and "OMP_NUM_THREADS" not in os.environ else {}
    return {ENV: to_env(of_process), **threads}


@contextlib.contextmanager
def members_of(places: Sequence[Place], rendezvous_seconds: float) -> Generator[list[Member]]:
    """Join the group of this call, all ranks of it; leave it at the end. The process of rank 0 runs the hub.

    Raises GroupNotFormed.
    """
    deadline = time.monotonic() + rendezvous_seconds
    members = list[Member]()
    with ExitStack() as undo:
        if places[0].rank == 0:
            undo.callback(open_hub(places[0], deadline).close)
        for place in places:
            members.append(Member(place, *find_hub(place, deadline)))
            undo.callback(members[-1].close)
        for member in members:
            member.wait_until_formed()
        yield members


@contextlib.contextmanager
def reserved_port(address: str, option: int = socket.SO_REUSEPORT) -> Generator[int]:
    """Reserve a free port of this machine for a server that sets this socket option: SO_REUSEPORT, as gRPC does, or
    SO_REUSEADDR.

    The socket does not listen. While it is bound, other programs of this user without that option, and those of other
    users, cannot take the port.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as reservation:
        reservation.setsockopt(socket.SOL_SOCKET, option, 1)
        reservation.bind((address, 0))
        yield reservation.getsockname()[1]


def host_and_port(address: str, port: int) -> str:
    """Return an address and a port as gRPC writes them."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def interface_of(address: str) -> str | None:
    """Return the name of the network interface that has an address; None if none has."""
    import psutil

    found = psutil.net_if_addrs().items()
    return next((name for name, entries in found if any(entry.address == address for entry in entries)), None)
