"""Batches: the choice of a worker, the upload of their large values, and their flight, until each of their calls has
ended, waits again or is lost.

States of a batch:

    choosing ──load known──▶ uploading ──uploaded──▶ sent ──its task ended──▶ (gone)
        │                       │ └──a function is on its way there──▶ blocked ──it is there──▶ uploading
        │                       │                     │  └──ended, outcomes missing──▶ gathering ──gathered──▶ (gone)
        └───────────────────────┴──the connection is cut: its calls wait again (nothing has gone out)

A batch without large values is sent at once. A sent batch has the epoch of the connection that follows its task. When
another connection replaces that one, the scheduler's answer decides about each batch of an earlier epoch: its task is
known, it never came, or it is lost (`dispatcher.py`). A batch that has not gone out when its connection ends was never
begun: its calls wait again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from skyward_core.engine import actions as do
from skyward_core.engine.calls import Calls
from skyward_core.engine.state import Members, Out, Phase
from skyward_core.errors import NodeLost
from skyward_core.wire.messages import INLINE_BYTES, Batch, Call, Outcome, OutcomeKind, Parcel


class Shipments(Calls):
    """The transitions of batches: placed, sent, ended."""

    def key(self, number: int) -> str:
        """Return the key of a batch's task."""
        return f"skyward-{number}{self._key_end}"

    def _ours(self, keys: Iterable[str]) -> list[str]:
        """Return the keys of this client's batches. Other clients count theirs from 0 too."""
        return [key for key in keys if key.endswith(self._key_end)]

    def _in_phase(self, phase: Phase) -> list[Out]:
        """Return the batches in this state."""
        return [out for out in self.outs.values() if out.phase is phase]

    def _count_for(self, names: Collection[str]) -> int:
        """Return how many batches have one of these workers as their destination, by this client's choice. The
        scheduler may not know them yet.
        """
        return sum(out.worker in names for out in self.outs.values())

    def _forget_batch(self, out: Out) -> list[str]:
        """A batch is no longer in flight; return its calls that have not ended."""
        if out.instance_id is not None:
            self._functions.at(out.instance_id).done(out.number)
            self._functions.evict(out.instance_id)
        return self._forget_batch_of_lost_head(out)

    def _forget_batch_of_lost_head(self, out: Out) -> list[str]:
        """The head of a batch is lost; return its calls that have not ended. A worker may go on with them, and their
        functions stay until the batch has ended (`KeptCalls`).
        """
        self.outs.pop(out.number, None)
        unended = self.queue.unended(out.shipment)
        if out.is_out and unended:
            self._kept.lose(out.number, unended)
        return unended

    def _withdraw(self) -> Iterator[list[str]]:
        """Forget the batches that have not gone out; yield the calls of each."""
        for out in [out for out in self.outs.values() if not out.is_out]:
            yield self._forget_batch(out)

    def release_shared(self, name: str) -> None:
        """No call will use a scattered value any more: remove it from all nodes."""
        self._functions.release(name)

    # ── sent batches, and how they end ───────────────────────────────────────────────────────────────────────────────

    def _send(self, out: Out, batch: Batch) -> None:
        """Send a batch, in the form in which its large values are parcels on the node."""
        out.phase, out.epoch = Phase.SENT, self.epoch
        self._do(do.Send(out.epoch, out.number, self.key(out.number), batch, out.address))

    def unsent(self, epoch: int, number: int, error: Exception, *, is_its_fault: bool) -> None:
        """A batch was not sent. It waits again, unless the batch itself is the cause."""
        out = self.outs.get(number)
        if out is None or out.epoch != epoch:
            return
        ids = self._forget_batch(out)
        if not is_its_fault:
            self._rest(ids)
            return
        failure = NodeLost(f"the call could not be sent: {error}")
        failure.__cause__ = error
        for call_id in ids:
            self.queue.ended(call_id)
        self._fail(ids, failure)

    def task_ended(self, epoch: int, number: int, *, is_finished: bool, reason: str) -> None:
        """The task of a batch has ended: outcomes that were not reported are in its result, or were lost with its
        worker.
        """
        out = self._batch_at(epoch, number, Phase.SENT)
        if out is None:
            return
        if is_finished and out.shipment.unended:
            out.phase = Phase.GATHERING
            self._do(do.Gather(epoch, number, self.key(number)))
            return
        self._do(do.Release(epoch, (self.key(number),)))
        self._lose(self._forget_batch(out), reason)

    def gathered(
        self, epoch: int, number: int, outcomes: Mapping[str, Outcome], node: int, instance_id: str, now: float
    ) -> None:
        """The result of a batch's task is here."""
        out = self._batch_at(epoch, number, Phase.GATHERING)
        if out is None:
            return
        self._do(do.Release(epoch, (self.key(number),)))
        ids = self._forget_batch(out)
        ended = [
            outcomes[call_id]
            for call_id in ids
            if call_id in outcomes and outcomes[call_id].kind is not OutcomeKind.RETURNED
        ]
        if seconds := seconds_by_use(ended):
            self._do(do.MeterCalls(instance_id, seconds))
        self._take_back(
            [call_id for call_id in ids if call_id in outcomes and outcomes[call_id].kind is OutcomeKind.RETURNED]
        )
        for outcome in ended:
            self._call_ended(outcome, node, instance_id, now)
        self._lose(
            [call_id for call_id in ids if call_id not in outcomes], "the call ended, but its result was not there"
        )

    def not_gathered(self, epoch: int, number: int, error: Exception) -> None:
        """The result of a batch's task is out of reach."""
        if (out := self._batch_at(epoch, number, Phase.GATHERING)) is not None:
            self._do(do.Release(epoch, (self.key(number),)))
            self._lose(self._forget_batch(out), f"the call ended, but its result could not be fetched: {error}", error)

    def taken_back(self, epoch: int, number: int) -> None:
        """A batch whose worker is gone had not ended, and its task is released: its calls are lost."""
        if (out := self._batch_at(epoch, number, Phase.SENT)) is not None:
            self._lose(self._forget_batch(out), "its worker is gone")

    def _follow_batch(self, out: Out) -> None:
        """A batch that an earlier connection has sent belongs to the present one."""
        out.phase, out.epoch = Phase.SENT, self.epoch
        self._do(do.Follow(out.epoch, out.number, self.key(out.number)))

    def _take_back_from(self, address: str) -> None:
        """A worker has left: its batches wait again if they have not gone out, and are taken back if they have."""
        for out in [out for out in self.outs.values() if out.address == address]:
            if not out.is_out:
                self._take_back(self._forget_batch(out))
            elif out.epoch == self.epoch:
                self._do(do.TakeBack(out.epoch, out.number, self.key(out.number)))

    def _batch_at(self, epoch: int, number: int, phase: Phase) -> Out | None:
        """Return the batch of a message; None if the message comes too late: the batch has another epoch or is in
        another phase.
        """
        out = self.outs.get(number)
        return (
            out if self._is_live_in(epoch) and out is not None and out.epoch == epoch and out.phase is phase else None
        )

    # ── placement: a worker, and the upload of large values ───────────────────────────────────────────────────────────

    def _ship(self) -> None:
        """Send the calls that may go out now, after the upload of their large values."""
        while shipments := self.queue.ship():
            for shipment in shipments:
                self._drop_unwanted(Out(shipment, Phase.CHOOSING, self.epoch, shipment.worker))

    def load_known(self, epoch: int, load: Mapping[str, Sequence[str]]) -> None:
        """The scheduler has said which batches each worker has; empty if it did not answer."""
        if epoch != self.epoch:
            return
        self._is_load_requested = False
        for out in self._in_phase(Phase.CHOOSING):
            self._choose(out, load)

    def uploaded(
        self, number: int, instance_id: str, arguments: Mapping[str, Parcel], functions: Mapping[str, Parcel | None]
    ) -> None:
        """Large values of a batch are in a node's memory.

        A function that is None found no room there and travels in the message.
        """
        files = self._functions.at(instance_id)
        out = self.outs.get(number)
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
                self._set_remote_args(call_id, instance_id, parcel)
            inline = {name for name, parcel in functions.items() if parcel is None}
            self._go_on(out, inline)
        self._functions.evict(instance_id)
        self._unblock()

    def upload_failed(
        self, number: int, instance_id: str, functions: Collection[str], error: Exception, *, is_its_fault: bool
    ) -> None:
        """Large values of a batch could not be put into a node's memory."""
        self._functions.at(instance_id).failed(functions)
        if (out := self.outs.get(number)) is not None and out.phase is Phase.UPLOADING:
            self.unsent(out.epoch, number, error, is_its_fault=is_its_fault)
        self._unblock()

    def _drop_unwanted(self, out: Out) -> None:
        """Route a batch without the calls that were cancelled after an earlier batch was sent, and handed back."""
        calls = out.shipment.batch.calls
        kept = tuple(call for call in calls if call.call_id in self.entries)
        if len(kept) < len(calls):
            for call in calls:
                if call.call_id not in self.entries:
                    self.queue.ended(call.call_id)
            out.shipment.batch = out.shipment.batch._replace(calls=kept)
        if kept:
            self.outs[out.number] = out
            self._route(out)

    def _route(self, out: Out) -> None:
        """Choose the worker of a batch with large values, which lie on one node.

        The scheduler chooses for all others.
        """
        batch = out.shipment.batch
        is_local = self.members.is_local
        if out.worker:
            out.address = self.members.workers.get(out.worker)
        has_large_functions = any(function.nbytes > INLINE_BYTES for function in batch.functions.values())
        has_large_arguments = any(call.arguments.nbytes > INLINE_BYTES for call in batch.calls)
        if is_local and has_large_functions:
            self._upload(out, self.members.nodes[min(self.members.nodes)].instance.id)
        elif is_local or not (has_large_functions or has_large_arguments):
            self._go_on(out, ())
        elif out.worker or self._is_load_known:
            self._choose(out, {})
        elif not self._is_load_requested:
            self._is_load_requested = True
            self._do(do.AskLoad(self.epoch))

    @property
    def _is_load_known(self) -> bool:
        """Whether no request to the scheduler is needed: all batches in flight went to workers that were chosen here,
        or there is no choice.
        """
        return len(self.members.free) < 2 or all(out.worker for out in self.outs.values() if out.is_out)

    def _choose(self, out: Out, load: Mapping[str, Sequence[str]]) -> None:
        if out.worker is None:
            others = [other for other in self.outs.values() if other is not out]
            out.worker = freest(self.members, others, load, self._key_end)
        node = self.members.node_of(out.worker) if out.worker else None
        out.address = self.members.workers.get(out.worker) if out.worker else None
        if node is None or out.address is None:
            self._rest(self._forget_batch(out))
        else:
            self._upload(out, node.instance.id)

    def _upload(self, out: Out, instance_id: str) -> None:
        """Put the large values of a batch into the memory of the node that is to run it.

        Functions stay there for later calls.
        """
        if not self.members.has_instance(
            instance_id
        ):  # another node has replaced it while the batch waited for an upload
            self._rest(self._forget_batch(out))
            return
        out.instance_id = instance_id
        batch, files = out.shipment.batch, self._functions.at(instance_id)
        functions = {name: function for name, function in batch.functions.items() if function.nbytes > INLINE_BYTES}
        if files.is_coming(functions):
            out.phase = Phase.BLOCKED
            return
        absent = tuple((name, function) for name, function in functions.items() if files.find(name) is None)
        is_local = self.members.is_local
        arguments = (
            ()
            if is_local
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
        if not self.is_live:
            self._rest(self._forget_batch(out))
            return
        if out.instance_id is not None:
            names = [name for name, function in batch.functions.items() if function.nbytes > INLINE_BYTES]
            out.functions = self._functions.at(out.instance_id).use(out.number, names)
            if set(names) - out.functions.keys() - set(inline):  # a function was evicted meanwhile
                self._upload(out, out.instance_id)
                return
        calls = tuple(self._with_remote_args(call, out) for call in batch.calls if call.call_id in self.entries)
        for call in batch.calls:
            if call.call_id not in self.entries:  # cancelled during the upload
                self.queue.ended(call.call_id)
        if not calls:
            self._forget_batch(out)
            return
        out.shipment.batch = batch._replace(calls=tuple(call for call in batch.calls if call.call_id in self.entries))
        self._send(out, batch._replace(calls=calls, functions={**batch.functions, **out.functions}))

    def _with_remote_args(self, call: Call, out: Out) -> Call:
        remote_args = self.entries[call.call_id].remote_args
        return (
            call._replace(arguments=remote_args[1])
            if remote_args is not None and remote_args[0] == out.instance_id
            else call
        )

    def _unblock(self) -> None:
        for out in self._in_phase(Phase.BLOCKED):
            if out.instance_id is not None:
                self._upload(out, out.instance_id)


def seconds_by_use(outcomes: Iterable[Outcome]) -> dict[str, float]:
    """Return for how long ended calls have kept slots busy, by their uses."""
    sums = dict[str, float]()
    for outcome in outcomes:
        if outcome.seconds:
            sums[outcome.use] = sums.get(outcome.use, 0.0) + outcome.seconds
    return sums


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
