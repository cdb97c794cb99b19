"""Placement: which worker gets a batch, and the upload of its large values, until the batch is sent.

`shipments.py` draws the states of a batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence

from skyward_core.engine import actions as do
from skyward_core.engine.calls import CallTable
from skyward_core.engine.connection_state import ConnectionState
from skyward_core.engine.function_files import FunctionsOnNodes
from skyward_core.engine.members import Members
from skyward_core.engine.outbox import Queue
from skyward_core.engine.shipments import Out, Phase, Shipments
from skyward_core.worker.wire import INLINE_BYTES, Call, Parcel


def freest(members: Members, outs: Sequence[Out], load: Mapping[str, Sequence[str]], key_end: str) -> str | None:
    """Return the worker with most free slots, by the scheduler's answer (`load`: task keys by worker) and the batches
    in flight to it.

    The client knows that a batch has ended before the scheduler does.
    """
    unended = {f"skyward-{out.number}{key_end}" for out in outs if out.shipment.unended}
    meant = Counter(out.worker for out in outs if out.worker and (out.shipment.unended or not out.is_out))

    def free(name: str) -> int:
        node = members.node_of(name)
        there = sum(key in unended or not key.endswith(key_end) for key in load.get(name, ()))
        return (node.slots if node is not None else 0) - max(there, meant[name])

    return max((name for name in members.free if not members.is_strange(name)), key=free, default=None)


class Placement:
    """Places batches that have not gone out: chooses a worker, uploads to its node, and sends.

    `act` takes the actions.
    """

    def __init__(
        self,
        members: Members,
        connection: ConnectionState,
        queue: Queue,
        calls: CallTable,
        shipments: Shipments,
        functions: FunctionsOnNodes,
        act: Callable[[do.Action], object],
    ) -> None:
        self._members = members
        self._connection = connection
        self._queue = queue
        self._calls = calls
        self._shipments = shipments
        self._functions = functions
        self._do = act
        self._is_load_requested = False

    def disconnected(self) -> None:
        """There is no connection: the scheduler will not answer the question for its load."""
        self._is_load_requested = False

    def ship(self) -> None:
        """Send the calls that may go out now, after the upload of their large values."""
        while shipments := self._queue.ship():
            for shipment in shipments:
                self._drop_unwanted(Out(shipment, Phase.CHOOSING, self._connection.epoch, shipment.worker))

    def load_known(self, epoch: int, load: Mapping[str, Sequence[str]]) -> None:
        """The scheduler has said which batches each worker has; empty if it did not answer."""
        if epoch != self._connection.epoch:
            return
        self._is_load_requested = False
        for out in self._shipments.in_phase(Phase.CHOOSING):
            self._choose(out, load)

    def uploaded(
        self, number: int, instance_id: str, arguments: Mapping[str, Parcel], functions: Mapping[str, Parcel | None]
    ) -> None:
        """Large values of a batch are in a node's memory.

        A function that is None found no room there and travels in the message.
        """
        files = self._functions.at(instance_id)
        out = self._shipments.outs.get(number)
        for name, parcel in functions.items():
            if parcel is not None and files.find(name) is None:
                files.arrived(name, parcel, sum(size for _, size in parcel.spans))
            else:
                files.failed([name])
                if parcel is not None:
                    self._do(do.Remove(instance_id, parcel))
        if out is None or out.phase is not Phase.UPLOADING:
            for parcel in arguments.values():
                self._do(do.Remove(instance_id, parcel))
        else:
            for call_id, parcel in arguments.items():
                self._calls.set_remote_args(call_id, instance_id, parcel)
            inline = {name for name, parcel in functions.items() if parcel is None}
            self._go_on(out, inline)
        self._functions.evict(instance_id)
        self._unblock()

    def upload_failed(
        self, number: int, instance_id: str, functions: Collection[str], error: Exception, *, is_its_fault: bool
    ) -> None:
        """Large values of a batch could not be put into a node's memory."""
        self._functions.at(instance_id).failed(functions)
        if (out := self._shipments.outs.get(number)) is not None and out.phase is Phase.UPLOADING:
            self._shipments.unsent(out.epoch, number, error, is_its_fault=is_its_fault)
        self._unblock()

    def _drop_unwanted(self, out: Out) -> None:
        """Route a batch without the calls that were cancelled after an earlier batch was sent, and handed back."""
        calls = out.shipment.batch.calls
        kept = tuple(call for call in calls if call.call_id in self._calls.entries)
        if len(kept) < len(calls):
            for call in calls:
                if call.call_id not in self._calls.entries:
                    self._queue.ended(call.call_id)
            out.shipment.batch = out.shipment.batch._replace(calls=kept)
        if kept:
            self._shipments.add(out)
            self._route(out)

    def _route(self, out: Out) -> None:
        """Choose the worker of a batch with large values, which lie on one node.

        The scheduler chooses for all others.
        """
        batch = out.shipment.batch
        is_here = self._members.is_here
        if out.worker:
            out.address = self._members.workers.get(out.worker)
        has_large_functions = any(function.nbytes > INLINE_BYTES for function in batch.functions.values())
        has_large_arguments = any(call.arguments.nbytes > INLINE_BYTES for call in batch.calls)
        if is_here and has_large_functions:
            self._upload(out, self._members.nodes[min(self._members.nodes)].instance.id)
        elif is_here or not (has_large_functions or has_large_arguments):
            self._go_on(out, ())
        elif out.worker or self._is_load_known:
            self._choose(out, {})
        elif not self._is_load_requested:
            self._is_load_requested = True
            self._do(do.AskLoad(self._connection.epoch))

    @property
    def _is_load_known(self) -> bool:
        """Whether no request to the scheduler is needed: all batches in flight went to workers that were chosen here,
        or there is no choice.
        """
        return len(self._members.free) < 2 or all(out.worker for out in self._shipments.outs.values() if out.is_out)

    def _choose(self, out: Out, load: Mapping[str, Sequence[str]]) -> None:
        if out.worker is None:
            others = [other for other in self._shipments.outs.values() if other is not out]
            out.worker = freest(self._members, others, load, self._shipments.key_end)
        node = self._members.node_of(out.worker) if out.worker else None
        out.address = self._members.workers.get(out.worker) if out.worker else None
        if node is None or out.address is None:
            self._calls.rest(self._shipments.forget(out))
        else:
            self._upload(out, node.instance.id)

    def _upload(self, out: Out, instance_id: str) -> None:
        """Put the large values of a batch into the memory of the node that is to run it.

        Functions stay there for later calls.
        """
        if not self._members.knows(instance_id):  # another node has replaced it while the batch waited for an upload
            self._calls.rest(self._shipments.forget(out))
            return
        out.instance_id = instance_id
        batch, files = out.shipment.batch, self._functions.at(instance_id)
        functions = {name: function for name, function in batch.functions.items() if function.nbytes > INLINE_BYTES}
        if files.is_coming(functions):
            out.phase = Phase.BLOCKED
            return
        absent = tuple((name, function) for name, function in functions.items() if files.find(name) is None)
        is_here = self._members.is_here
        arguments = (
            ()
            if is_here
            else tuple((call.call_id, call.arguments) for call in batch.calls if call.arguments.nbytes > INLINE_BYTES)
        )
        out.phase = Phase.UPLOADING
        if absent or arguments:
            files.plan([name for name, _ in absent])
            self._do(do.Upload(out.number, instance_id, arguments, absent))
        else:
            self._go_on(out, ())

    def _go_on(self, out: Out, inline: Collection[str]) -> None:
        """The large values of a batch are on its node: send the batch."""
        batch = out.shipment.batch
        if not self._connection.is_live:
            self._calls.rest(self._shipments.forget(out))
            return
        if out.instance_id is not None:
            names = [name for name, function in batch.functions.items() if function.nbytes > INLINE_BYTES]
            out.functions = self._functions.at(out.instance_id).use(out.number, names)
            if set(names) - out.functions.keys() - set(inline):  # a function was evicted meanwhile
                self._upload(out, out.instance_id)
                return
        calls = tuple(self._with_remote_args(call, out) for call in batch.calls if call.call_id in self._calls.entries)
        for call in batch.calls:
            if call.call_id not in self._calls.entries:  # cancelled during the upload
                self._queue.ended(call.call_id)
        if not calls:
            self._shipments.forget(out)
            return
        out.shipment.batch = batch._replace(
            calls=tuple(call for call in batch.calls if call.call_id in self._calls.entries)
        )
        self._shipments.send(out, batch._replace(calls=calls, functions={**batch.functions, **out.functions}))

    def _with_remote_args(self, call: Call, out: Out) -> Call:
        remote_args = self._calls.entries[call.call_id].remote_args
        return (
            call._replace(arguments=remote_args[1])
            if remote_args is not None and remote_args[0] == out.instance_id
            else call
        )

    def _unblock(self) -> None:
        for out in self._shipments.in_phase(Phase.BLOCKED):
            if out.instance_id is not None:
                self._upload(out, out.instance_id)
