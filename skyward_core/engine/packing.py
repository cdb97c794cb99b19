"""Calls as they travel: function, arguments, scattered values and surroundings; and what a starter wants of a detached
call. Needs no Dask.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import os
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from skyward_core.compute import PendingCompute
from skyward_core.engine.outbox import Entry
from skyward_core.events.console import levels_for_nodes
from skyward_core.serialization import pickling, sources
from skyward_core.serialization.plain_arguments import PlainTypes, named_arguments, plain_arguments
from skyward_core.wire import shared_values
from skyward_core.wire.log_records import LogLevels
from skyward_core.wire.messages import INLINE_BYTES, Call, Parcel
from skyward_core.wire.shared_values import SharedValue
from skyward_core.work import NO_WORK, Work, paying_use, run_context


@dataclass(frozen=True, slots=True)
class PackedFunction:
    """A function that was pickled once, for one or many calls."""

    name: str
    parcel: Parcel
    title: str
    """Its name in the source, for people."""
    shared: Mapping[str, SharedValue]
    """The scattered values among its variables: then runners load it for each call, and forget the values after it."""

    @staticmethod
    def of(fn: Callable[..., Any], replace_object: pickling.Replace | None) -> PackedFunction:
        """Pickle a function. Raises NotPicklable."""
        with shared_values.NotedValues() as used:
            name, parcel = packed_function(fn, replace_object)
        return PackedFunction(name, parcel, name_of(fn), used)

    def entry(
        self,
        pending: PendingCompute[Any],
        arguments: Parcel,
        shared: Mapping[str, SharedValue],
        job_id: str | None,
        worker: str | None,
        ahead: int,
        surroundings: Surroundings,
    ) -> Entry:
        """Return a new call of the function, whose arguments use these scattered values."""
        call_id = os.urandom(16).hex()  # `uuid.uuid4` takes five times as long
        used = {**self.shared, **shared} if self.shared else shared
        in_group = job_id is not None and pending.forms_group
        job_id = job_id or call_id
        names, keeps = tuple(used), not self.shared
        timeout_seconds, use, levels = pending.timeout_seconds, surroundings.use, surroundings.levels
        call = Call(
            call_id,
            self.name,
            arguments,
            job_id,
            timeout_seconds,
            names,
            keeps,
            ahead,
            None,
            use,
            levels,
            surroundings.env,
        )
        return Entry(call, self.parcel, worker, in_group, shared=used, title=self.title)


@dataclass(frozen=True, slots=True)
class ArgumentPacker:
    """Pickles functions and arguments of calls.

    `place` puts large arguments into a file, if client and nodes are on one machine. `is_copied`: the caller may change
    them before they are sent. `surroundings` are those of each call (`surroundings_of_calls`).
    """

    replace_object: pickling.Replace | None
    place: Callable[[Parcel], Parcel] | None
    is_copied: bool
    surroundings: Surroundings

    def arguments(self, pending: PendingCompute[Any]) -> Parcel:
        """Pickle the arguments of a call. Raises NotPicklable."""
        pickled = pickled_arguments(pending, self.surroundings.run, self.replace_object)
        parcel = Parcel(pickled.data, pickled.buffers)
        if parcel.nbytes <= INLINE_BYTES:
            return parcel
        if self.place is not None:
            with contextlib.suppress(OSError):  # no room: Dask carries it
                return self.place(parcel)
        return Parcel(parcel.data, tuple(bytearray(buffer) for buffer in parcel.buffers)) if self.is_copied else parcel


def pickled_arguments(
    pending: PendingCompute[Any], run: tuple[Any, ...], replace_object: pickling.Replace | None
) -> pickling.Pickled:
    """Pickle the arguments of a call with the fields of its run. Raises NotPicklable."""
    value = (pending.args, dict(pending.kwargs), run) if run else (pending.args, dict(pending.kwargs))
    return sources.pack(value, label=("args", "kwargs", "run context")[: len(value)], replace=replace_object)


class Surroundings(NamedTuple):
    """What a call finds on its node: the fields of its run (() outside of one), levels of loggers, and variables.

    `use` is the id of the use that pays for it; "" for none.
    """

    run: tuple[Any, ...]
    levels: LogLevels
    use: str
    env: tuple[tuple[str, str], ...] = ()


def surroundings_of_calls(own_use: Callable[[], str] = str) -> Surroundings:
    """Return the surroundings of calls that are submitted now. `own_use` pays for those that name no use."""
    context, use = run_context(), paying_use() or own_use()
    if context is None:
        return Surroundings((), levels_for_nodes(), use)
    # plain, so that plain arguments stay so: cloudpickle would take ten times as long
    return Surroundings(context.plain(), levels_for_nodes(context.log_level), use, tuple(context.env.items()))


def packed_entries(
    calls: Iterable[tuple[PendingCompute[Any], str | None]],
    packer: ArgumentPacker,
    job_id: str | None,
    ahead: int,
    undo: contextlib.ExitStack,
) -> list[Entry]:
    """Return new calls, each for a worker or for any (None). A function that they share is pickled once.

    `undo` removes the files of large arguments. Raises NotPicklable.
    """
    functions: dict[int, tuple[Any, PackedFunction]] = {}
    """By the function's id, with the function, so that no other one takes its id."""
    entries = list[Entry]()
    for pending, worker in calls:
        if id(pending.fn) not in functions:
            functions[id(pending.fn)] = (pending.fn, PackedFunction.of(pending.fn, packer.replace_object))
        _, function = functions[id(pending.fn)]
        with shared_values.NotedValues() as used:
            arguments = packer.arguments(pending)
        if arguments.path is not None:
            undo.callback(arguments.release)
        entries.append(function.entry(pending, arguments, used, job_id, worker, ahead, packer.surroundings))
    return entries


def name_of(fn: Callable[..., Any]) -> str:
    """Return the name of a function in its source; of an object that can be called, that of its class."""
    inner = getattr(fn, "func", fn)  # of a functools.partial
    return str(getattr(inner, "__name__", None) or type(inner).__name__)


def packed_function(fn: Callable[..., Any], replace_object: pickling.Replace | None) -> tuple[str, Parcel]:
    """Return a name for the function, the hash of its content, and its pickle.

    A runner loads each name once, so the function's globals stay between calls.
    """
    pickled = sources.pack(fn, label=getattr(fn, "__name__", "function"), replace=replace_object)
    digest = hashlib.sha256(pickled.data)
    for buffer in pickled.buffers:
        digest.update(buffer)
    return digest.hexdigest(), Parcel(pickled.data, pickled.buffers)


def plain_call[R](
    pending: PendingCompute[R],
    table: PlainTypes,
    *,
    names: tuple[str, str] | None = None,
    replace: pickling.Replace | None = None,
) -> PendingCompute[R]:
    """Return a call whose arguments are plain values by the table of an integration. Rents and sends nothing.

    `names` are what the user calls positional and keyword arguments (`("op_args", "op_kwargs")`); None: the function's
    parameters name them. `replace` is the pool's `replace_object`, by default that of the table. Raises NotPicklable
    for what cannot travel; its path begins with the user's name for it.
    """
    named = list(named_arguments(_parameters(pending.fn), pending.args, pending.kwargs, names))
    with shared_values.NotedValues():
        plain = plain_arguments(named, table, replace)
        pickling.refuse_what_cannot_travel(pending.fn, label=name_of(pending.fn), replace=replace or table.replace)
    count = len(pending.args)
    kwargs = dict(zip(pending.kwargs, plain[count:], strict=True))
    return PendingCompute(pending.fn, tuple(plain[:count]), kwargs, pending.timeout_seconds)


def _parameters(fn: Any) -> list[str]:
    """The names of the parameters that positional arguments go to."""
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):  # of C
        return []
    return [one.name for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]


@dataclass(frozen=True, slots=True)
class WantedCall:
    """What a starter wants of a detached call. `call_id` is the `run_id` if it has chosen none."""

    run_id: str
    call_id: str
    owner: str = ""
    result_ttl: float | None = None
    work: Work = NO_WORK
    """That starts it."""

    @staticmethod
    def of(call_id: str | None, owner: str, result_ttl: float | None, work: Work) -> WantedCall:
        """Return it with a new run id."""
        run_id = uuid.uuid4().hex
        return WantedCall(run_id, run_id if call_id is None else call_id, owner, result_ttl, work)
