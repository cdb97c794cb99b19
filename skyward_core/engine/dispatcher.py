"""What becomes of calls: a pure state machine, messages in and actions out. It has no thread, no connection and no clock of its own.

States of a call:

    waiting ──sent──▶ out ──outcome──▶ ended
       ▲ │             │ └──large outcome──▶ fetching ──fetched──▶ ended
       │ │             │                        └──its node is lost──▶ lost
       │ │             ├──handed back: it was not begun──▶ waiting
       │ │             └──its worker, task or head is lost──▶ lost ──may run again──▶ waiting
       │ └──cancelled, given up──▶ ended                       └──retries are used up──▶ ended (NodeLost)

States of the connection; each connection has a number, its epoch:

    none ──connected──▶ asking ──resumed──▶ live ──three pings unanswered, or closed──▶ cut
     ▲                    │ └──the same──────┼──────────────────────────────────────────▶│
     └──disconnected──────┴──────────────────┴───────────────────────────────────────────┘

Calls go out only while the connection is live. What arrives from another epoch is dropped: the scheduler keeps it and sends it again to the connection
that resumes the topic, or it is lost with its scheduler. A batch that has not gone out when the connection ends was never begun: it waits again. For one
that has, the scheduler's answer decides: its task is known, it never came, or it is lost once all that was reported before has been heard.

A pool that is draining or closing takes nothing back into the queue: what comes back raises what the drain was given.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from skyward_core.engine import actions as do
from skyward_core.engine.function_files import FunctionFiles
from skyward_core.engine.kept_calls import KeptCalls, batch_of
from skyward_core.engine.members import Members, rank_of
from skyward_core.engine.outbox import Entry, Queue
from skyward_core.engine.shipments import Out, Phase, freest
from skyward_core.errors import NodeLost, SkywardError
from skyward_core.events import BootstrapCompleted, CallProgress, CallRetrying, LogLine, Metrics
from skyward_core.instances import Node
from skyward_core.worker.kept import WorkerFree, WorkerKept
from skyward_core.worker.news import HELD, Resumed, WorkerHeld, WorkerJoined, WorkerLeft
from skyward_core.worker.wire import INLINE_BYTES, Ending, Outcome, Output, Parcel, Report

TICK_SECONDS = 0.5
PING_SECONDS = 4.0
PINGS = 3  # unanswered in a row
ACKNOWLEDGED_TOGETHER = 1000
FETCH_SECONDS = 120.0  # for which a result whose wire is cut is asked for again, while its node lives: as long as a lease
PROGRESS_SECONDS = 0.1
HEAD_LOST = "the head of the pool was lost"

type PoolNews = WorkerJoined | WorkerLeft | WorkerHeld | WorkerKept | WorkerFree | Mapping[str, Any]


@dataclass(slots=True)
class Fetching:
    """A large outcome on its way from a node; `error` says why it waits for the way to that node to come back."""

    entry: Entry
    outcome: Outcome
    node: int
    instance_id: str
    lies_at: str
    until: float
    error: Exception | None = None


class Dispatcher:
    """The state of all calls of one client. One thread calls it, and does what `take_actions` returns, in that order."""

    def __init__(self, nodes: Iterable[Node], topic: str, retries: int = 0, *, is_here: bool = False) -> None:
        self.members = Members.of(nodes)
        self.topic = topic
        self.is_here = is_here
        """Whether all nodes are processes of this machine, which see the same memory."""
        self.entries: dict[str, Entry] = {}
        """The calls whose callers wait: waiting, out or being fetched."""
        self.fetching: dict[str, Fetching] = {}
        self.outs: dict[int, Out] = {}
        self.epoch = 0
        self.is_connected = False
        """From `connected` on, until it is known that nothing comes through any more."""
        self.is_live = False
        self.heard = 0
        """The number of the last message of the topic."""
        self._abandoned = 0
        """How often the scheduler has forgotten this client."""
        self._retries = retries
        self._kept = KeptCalls()
        self._queue = Queue(topic)
        self._files: dict[str, FunctionFiles] = {}
        self._actions: list[do.Action] = []
        self._to_stop: set[str] = set()
        self._unheard: dict[int, Out] = {}
        self._unheard_until = 0
        self._left_behind: list[int] = []
        """Batches whose workers have gone, until all is heard that these have told."""
        self._gone: list[str] = []
        """Addresses of workers that have gone, likewise."""
        self._is_load_asked = False
        self._drained: SkywardError | None = None
        self._ended: SkywardError | None = None
        self._is_closed = False
        self._acknowledged = 0
        self._unanswered = 0
        self._is_pinging = False
        self._pinged_at = -math.inf
        self._submitted = self._done = self._failed = self._cancelled = 0
        self._progress_at = -math.inf
        self._progress: tuple[int, int, int, int] = (0, 0, 0, 0)
        self._count_slots()

    def take_actions(self) -> list[do.Action]:
        """Return what is to be done, and forget it."""
        taken, self._actions = self._actions, []
        return taken

    # ── from callers ─────────────────────────────────────────────────────────────────────────────────────────────────

    def submit(self, entries: Sequence[Entry]) -> None:
        """Take calls in, last in the queue."""
        self._submitted += len(entries)
        self.entries.update((entry.call.call_id, entry) for entry in entries)
        self._queue.add(entries)
        self._refuse([entry.call.call_id for entry in entries])

    def cancel(self, call_id: str) -> None:
        """Stop a call that its caller has cancelled, or do not begin it."""
        entry = self.entries.pop(call_id, None)
        if entry is None:
            return
        self._cancelled += 1
        self._forget_fetching(call_id)
        if not self._queue.drop({call_id}) and self._queue.is_out(call_id):
            self._to_stop.add(call_id)
        self._do(do.Cancelled(call_id, entry.call.arguments))
        self._clear_aside(entry)

    def drain(self, error: SkywardError | None) -> None:
        """Begin no more calls: those that are not begun raise this, what runs may end. None: begin calls again."""
        self._drained = error
        if error is not None:
            for out in [out for out in self.outs.values() if not out.is_out]:
                self._queue.returned(self._forget(out))
            self._fail_all(self._queue.withdraw(), error)

    def give_up(self, error: SkywardError, rank: int | None = None) -> None:
        """Wait no longer for a node that is not replaced, or (None) for any: the calls that only it could run raise this, now and later."""
        if rank is None:
            self._end_all(error)
        else:
            ids = [call_id for name in self.members.names_at(rank) for call_id in self._queue.pinned_to(name)]
            self._queue.drop(set(ids))
            self._fail_all(ids, error)

    def close(self, error: SkywardError) -> None:
        """End: all calls that have not ended raise this."""
        self._is_closed = True
        self._end_all(error)

    def _end_all(self, error: SkywardError) -> None:
        """Nothing runs any more. What is being fetched may still arrive, unless the pool closes."""
        self._ended = self._ended or error
        self._queue.clear()
        self.outs.clear()
        self._forget_unheard()
        self._to_stop.clear()
        self._kept = KeptCalls()
        under_way = set() if self._is_closed else {call_id for call_id, fetching in self.fetching.items() if fetching.error is None}
        self._fail_all([call_id for call_id in self.entries if call_id not in under_way], error)

    # ── from the connection ──────────────────────────────────────────────────────────────────────────────────────────

    def connected(self, now: float) -> int:
        """There is a connection: return its epoch. Calls go out once `resumed` was called for it."""
        self.disconnected()
        self.epoch += 1
        self.is_connected = True
        self._unanswered, self._is_pinging, self._pinged_at = 0, False, now
        return self.epoch

    def disconnected(self) -> None:
        """There is no connection. What has not gone out waits again."""
        self.is_connected = self.is_live = False
        self._is_load_asked = False
        self._forget_unheard()
        for out in [out for out in self.outs.values() if not out.is_out]:
            self._take_back(self._forget(out))

    def restarted(self, nodes: Sequence[Node], is_there: Callable[[Parcel], bool], now: float) -> None:
        """Another scheduler takes the place of the one before. What was out is kept by workers that outlive the head, or lost with it.

        Arguments in the memory of a node that is lost are lost too (`is_there`).
        """
        self.disconnected()
        alive = {node.instance.id for node in self.members.nodes.values()}
        self.members.nodes = {node.rank: node for node in nodes}
        self.members.clear()
        self._abandoned = 0
        self._files = {instance_id: files for instance_id, files in self._files.items() if self.members_know(instance_id)}
        awaited = [name for node in nodes if node.instance.id in alive for name in self.members.names_at(node.rank)]
        heard = {origin: number for out in self.outs.values() for origin, number in out.heard.items()}
        before = self._queue.next_number
        batches = {out.number: self._forget(out) for out in list(self.outs.values())}
        arguments = [(call_id, entry.call.arguments) for call_id, entry in self.entries.items() if not self._queue.is_out(call_id)]
        gone = [call_id for call_id, parcel in arguments if parcel.path and call_id not in self.fetching and not is_there(parcel)]
        self._kept.begin(batches, awaited, before, heard)
        self._count_slots()
        self._lose(gone, HEAD_LOST)
        self._lose_unkept(now)

    def resumed(self, epoch: int, resumed: Resumed, now: float) -> None:
        """The scheduler has answered: what it knows of the batches that were out, and of its workers. The messages that were missed follow."""
        if epoch != self.epoch or not self.is_connected:
            return
        self.is_live, self.heard = True, resumed.number
        may_keep = bool(self._kept.before)
        if resumed.abandoned != self._abandoned:
            self._lose_abandoned(resumed.abandoned)
        if may_keep:  # also what is lost or has ended by now: workers are to forget it
            self._kept.listen(now)
            self._do(do.TellKept(epoch))
        self._count_in(resumed.workers)
        before = {self.key(out.number): out for out in self.outs.values() if out.epoch < epoch}
        for key, out in before.items():
            if key in resumed.tasks:
                out.phase, out.epoch = Phase.SENT, epoch
                self._do(do.Follow(epoch, out.number, key))
                if out.worker and self.members.workers.get(out.worker) != out.address:
                    self._left_behind.append(out.number)
            elif resumed.is_known and key not in resumed.gone:
                self._take_back(self._forget(out))  # it went out when nothing came through any more
            else:
                self._unheard[out.number] = out
        if ended := tuple(key for key in resumed.tasks if key not in before):
            self._do(do.Release(epoch, ended))
        self._to_stop.update(call_id for call_id in self._queue.all_out() if call_id not in self.entries)
        self._unheard_until = resumed.last
        self._lose_unheard()
        self._do(do.Answered(epoch))

    def _lose_abandoned(self, times: int) -> None:
        """The scheduler has waited for so long that it has forgotten this client, and has stopped all its calls."""
        self._abandoned = times
        out = [call_id for item in list(self.outs.values()) for call_id in self._forget(item)]
        out += self._kept.forget(self._queue.next_number)
        self._lose(out, "its scheduler has waited for this client for too long")

    def report(self, epoch: int, report: Report | None, now: float) -> None:
        """The next message of the topic: what a worker tells, in the order in which it happened. None: it could not be read."""
        if epoch != self.epoch or not self.is_live:
            return
        self.heard += 1
        if report is not None and not self._is_retold(report):
            self._ran(report.instance_id, (item for item in report.news if isinstance(item, Outcome)))
            for item in report.news:
                if isinstance(item, Output):
                    self._tell_lines(report, item)
                elif item.ending is not Ending.RETURNED:
                    self._on_outcome(item, report.node, report.instance_id, now)
            self._take_back([item.call_id for item in report.news if isinstance(item, Outcome) and item.ending is Ending.RETURNED])
        self._lose_unheard()
        if self.heard - self._acknowledged > ACKNOWLEDGED_TOGETHER:
            self._acknowledge()

    def pool_news(self, epoch: int, news: PoolNews, now: float) -> None:
        """A worker has come or gone, is held, or keeps calls, or a node has measured something."""
        if epoch != self.epoch or not self.is_live:  # who was there when the scheduler answered is in its answer
            if isinstance(news, Mapping) and epoch == self.epoch:
                self._do(do.Emit(Metrics(**news)))
            return
        match news:
            case WorkerJoined(name, address):
                self._join(name, address)
            case WorkerLeft(name, address):
                self._leave(name, address)
                self._lose_unheard()
            case WorkerKept():
                self._on_kept(news, now)
            case WorkerFree(_, address):
                self.members.held.pop(address, None)
                self._count_slots()
            case WorkerHeld():
                self.members.hold(news.address, news.left)
                self._count_slots()
            case _:
                self._do(do.Emit(Metrics(**news)))

    def task_ended(self, epoch: int, number: int, *, is_finished: bool, reason: str) -> None:
        """The task of a batch has ended: whatever its reports have not told is in its result, or was lost with its worker."""
        out = self._at(epoch, number, Phase.SENT)
        if out is None:
            return
        if is_finished and out.shipment.unended:
            out.phase = Phase.GATHERING
            self._do(do.Gather(epoch, number, self.key(number)))
            return
        self._do(do.Release(epoch, (self.key(number),)))
        self._lose(self._forget(out), reason)

    def gathered(self, epoch: int, number: int, outcomes: Mapping[str, Outcome], node: int, instance_id: str, now: float) -> None:
        """The result of a batch's task is here."""
        out = self._at(epoch, number, Phase.GATHERING)
        if out is None:
            return
        self._do(do.Release(epoch, (self.key(number),)))
        ids = self._forget(out)
        ended = [outcomes[call_id] for call_id in ids if call_id in outcomes and outcomes[call_id].ending is not Ending.RETURNED]
        self._ran(instance_id, ended)
        self._take_back([call_id for call_id in ids if call_id in outcomes and outcomes[call_id].ending is Ending.RETURNED])
        for outcome in ended:
            self._on_outcome(outcome, node, instance_id, now)
        self._lose([call_id for call_id in ids if call_id not in outcomes], "the call ended, but its result was not there")

    def not_gathered(self, epoch: int, number: int, error: Exception) -> None:
        """The result of a batch's task could not be had."""
        if (out := self._at(epoch, number, Phase.GATHERING)) is not None:
            self._do(do.Release(epoch, (self.key(number),)))
            self._lose(self._forget(out), f"the call ended, but its result could not be fetched: {error}", error)

    def taken_back(self, epoch: int, number: int) -> None:
        """A batch whose worker is gone had not ended, and is released: its calls are lost."""
        if (out := self._at(epoch, number, Phase.SENT)) is not None:
            self._lose(self._forget(out), "its worker is gone")

    def unsent(self, epoch: int, number: int, error: Exception, *, is_its_fault: bool) -> None:
        """A batch has not gone out. It waits again, if it is not its own fault."""
        out = self.outs.get(number)
        if out is None or out.epoch != epoch:
            return
        ids = self._forget(out)
        if not is_its_fault:
            self._rest(ids)
            return
        failure = NodeLost(f"the call could not be sent: {error}")
        failure.__cause__ = error
        for call_id in ids:
            self._queue.ended(call_id)
        self._fail_all(ids, failure)

    def load_known(self, epoch: int, load: Mapping[str, Sequence[str]]) -> None:
        """The scheduler has said which batches each worker has; empty if it has not."""
        if epoch != self.epoch:
            return
        self._is_load_asked = False
        for out in [out for out in self.outs.values() if out.phase is Phase.CHOOSING]:
            self._choose(out, load)

    def pinged(self, epoch: int, *, is_answered: bool) -> None:
        """The scheduler has answered whether it is there, or has not. Counted and not timed: a busy program misses one answer, not several in a row."""
        if epoch == self.epoch:
            self._is_pinging = False
            self._unanswered = 0 if is_answered else self._unanswered + 1
            if self._unanswered >= PINGS:
                self.cut(epoch)

    def cut(self, epoch: int) -> None:
        """The connection is closed, or the scheduler does not answer any more."""
        if epoch == self.epoch and self.is_connected:
            self.is_connected = self.is_live = False
            self._do(do.CutOff())

    # ── from transfers ───────────────────────────────────────────────────────────────────────────────────────────────

    def uploaded(self, number: int, instance_id: str, arguments: Mapping[str, Parcel], functions: Mapping[str, Parcel | None]) -> None:
        """Large values of a batch are in a node's memory. A function that is None found no room there and travels in the message."""
        files = self._files_at(instance_id)
        out = self.outs.get(number)
        for name, parcel in functions.items():
            files.failed([name])
            if parcel is not None and files.find(name) is None:
                files.arrived(name, parcel, sum(size for _, size in parcel.spans))
            elif parcel is not None:
                self._do(do.Remove(instance_id, parcel))
        if out is None or out.phase is not Phase.UPLOADING:
            for parcel in arguments.values():
                self._do(do.Remove(instance_id, parcel))
        else:
            self._lay_aside(out, instance_id, arguments)
            inline = {name for name, parcel in functions.items() if parcel is None}
            self._go_on(out, inline)
        self._evict(instance_id)
        self._unblock()

    def upload_failed(self, number: int, instance_id: str, functions: Collection[str], error: Exception, *, is_its_fault: bool) -> None:
        """Large values of a batch could not be put into a node's memory."""
        self._files_at(instance_id).failed(functions)
        if (out := self.outs.get(number)) is not None and out.phase is Phase.UPLOADING:
            self.unsent(out.epoch, number, error, is_its_fault=is_its_fault)
        self._unblock()

    def fetched(self, call_id: str, parcel: Parcel, lies_at: str) -> None:
        """A large outcome is here."""
        fetching = self.fetching.get(call_id)
        if fetching is None or fetching.lies_at != lies_at:
            self._do(do.Discard(parcel))
            return
        del self.fetching[call_id]
        self._finish(call_id, fetching.outcome._replace(parcel=parcel), fetching.node, fetching.instance_id)

    def not_fetched(self, call_id: str, lies_at: str, error: Exception, *, is_cut: bool) -> None:
        """A large outcome could not be fetched. `is_cut`: the wire to its node was cut, and it is tried again when that is there again."""
        fetching = self.fetching.get(call_id)
        if fetching is None or fetching.lies_at != lies_at:
            return
        fetching.error = error
        if not is_cut or self._ended is not None:
            self._give_up_fetching(call_id, fetching)

    # ── the clock ────────────────────────────────────────────────────────────────────────────────────────────────────

    def tick(self, now: float, is_reachable: Callable[[str], bool]) -> None:
        """Twice a second: look after the connection, and after what waits for a way to its node (`is_reachable`, by instance id)."""
        self._queue.wake()
        self._lose_unkept(now)
        for call_id, fetching in list(self.fetching.items()):
            if fetching.error is None:
                continue
            if now > fetching.until or not self.members_know(fetching.instance_id):
                self._give_up_fetching(call_id, fetching)
            elif is_reachable(fetching.instance_id):
                fetching.error = None
                self._do(do.Fetch(call_id, fetching.instance_id, fetching.outcome.parcel))
            elif self.is_live and not self.members.is_there(fetching.instance_id):
                self._give_up_fetching(call_id, fetching)
        if self.is_live:
            self._acknowledge()
        if self.is_connected and not self._is_pinging and now - self._pinged_at > PING_SECONDS:
            self._is_pinging, self._pinged_at = True, now
            self._do(do.Ping(self.epoch))

    def flush(self, now: float) -> None:
        """After one or several messages: send what may go out, stop what is to be stopped, tell the progress."""
        if self.is_live:
            self._stop_cancelled()
            if released := self._kept.take_released(self._queue.is_out):
                self._do(do.ReleaseKept(self.epoch, tuple(released)))
            self._ship()
        counts = (self._submitted, self._done, self._failed, self._cancelled)
        is_all = self._done + self._cancelled == self._submitted
        if counts != self._progress and (is_all or now - self._progress_at > PROGRESS_SECONDS):
            self._progress, self._progress_at = counts, now
            self._do(do.Emit(CallProgress(*counts)))

    # ── nodes ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def know(self, nodes: Iterable[Node]) -> None:
        """Take note of nodes that have come in the place of others."""
        for node in nodes:
            before = self.members.nodes.get(node.rank)
            if before is not None and before.instance.id != node.instance.id:
                self._kept.without(self.members.names_at(node.rank))
        self.members.nodes = {**self.members.nodes, **{node.rank: node for node in nodes}}
        self._count_slots()

    def forget_node(self, rank: int) -> None:
        """Have nothing to do with a node that is not there, nor with one that comes in its place."""
        self.members.nodes = {other: node for other, node in self.members.nodes.items() if other != rank}
        self._count_slots()

    def fetching_from(self, instance_id: str) -> int:
        """Return how many outcomes still lie on a node, on their way here."""
        return sum(fetching.instance_id == instance_id for fetching in self.fetching.values())

    def members_know(self, instance_id: str) -> bool:
        """Tell whether an instance is one of the pool's nodes."""
        return any(node.instance.id == instance_id for node in self.members.nodes.values())

    def key(self, number: int) -> str:
        """Return the key of a batch's task."""
        return f"skyward-{number}{self.key_end}"

    @property
    def key_end(self) -> str:
        """What the keys of this client's tasks end with."""
        return f"-{self.topic[-8:]}"

    def _count_in(self, workers: Mapping[str, tuple[str, str]]) -> None:
        self._gone += sorted(set(self._kept.at.values()) - workers.keys())
        there = {name: address for address, (name, _) in workers.items()}
        for name, address in list(self.members.workers.items()):
            if there.get(name) != address:
                self._leave(name, address)
        for address, (name, status) in workers.items():
            self._join(name, address)
            if status == HELD:
                self.members.hold(address, None)
            else:  # that it is free may have been said while nothing came through
                self.members.held.pop(address, None)
        self._count_slots()

    def _join(self, name: str, address: str) -> None:
        rank = rank_of(name)
        is_complete = self.members.join(name, address)
        self._count_slots()
        self._to_stop.update(call_id for call_id in self._queue.all_out() if call_id not in self.entries)  # their batch may go to this worker
        if is_complete:
            self._do(do.Emit(BootstrapCompleted(self.members.nodes[rank].instance.id)))
            self._do(do.Joined(rank))

    def _leave(self, name: str, address: str) -> None:
        if not self.members.leave(name, address):
            return  # its successor is there already
        self._count_slots()
        for out in list(self.outs.values()):
            if out.address != address:
                continue
            if not out.is_out:
                self._take_back(self._forget(out))
            elif out.epoch == self.epoch:
                self._do(do.TakeBack(self.epoch, out.number, self.key(out.number)))
        self._gone.append(address)
        self._do(do.Left(rank_of(name)))

    def _count_slots(self) -> None:
        self._queue.workers = self.members.free
        self._queue.slots = self.members.slots

    # ── calls out ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _ship(self) -> None:
        while shipments := self._queue.ship():
            for shipment in shipments:
                self._drop_unwanted(Out(shipment, Phase.CHOOSING, self.epoch, shipment.worker))

    def _drop_unwanted(self, out: Out) -> None:
        """Send a batch without the calls that were cancelled while they were out before, and were handed back."""
        calls = out.shipment.batch.calls
        kept = tuple(call for call in calls if call.call_id in self.entries)
        if len(kept) < len(calls):
            for call in calls:
                if call.call_id not in self.entries:
                    self._queue.ended(call.call_id)
            out.shipment.batch = out.shipment.batch._replace(calls=kept)
        if kept:
            self.outs[out.number] = out
            self._route(out)

    def _route(self, out: Out) -> None:
        """Decide where a batch goes: large values lie on one node, so the worker is chosen here; else the scheduler chooses."""
        batch = out.shipment.batch
        if out.worker:
            out.address = self.members.workers.get(out.worker)
        has_large_functions = any(function.nbytes > INLINE_BYTES for function in batch.functions.values())
        has_large_arguments = any(call.arguments.nbytes > INLINE_BYTES for call in batch.calls)
        if self.is_here and has_large_functions:
            self._upload(out, self.members.nodes[min(self.members.nodes)].instance.id)
        elif self.is_here or not (has_large_functions or has_large_arguments):
            self._go_on(out, set())
        elif out.worker or self._is_load_known:
            self._choose(out, {})
        elif not self._is_load_asked:
            self._is_load_asked = True
            self._do(do.AskLoad(self.epoch))

    @property
    def _is_load_known(self) -> bool:
        """Whether the scheduler need not be asked: all that is out was sent to workers that were chosen here, or there is no choice."""
        return len(self.members.free) < 2 or all(out.worker for out in self.outs.values() if out.is_out)

    def _choose(self, out: Out, load: Mapping[str, Sequence[str]]) -> None:
        if out.worker is None:
            out.worker = freest(self.members, [other for other in self.outs.values() if other is not out], load, self.key_end)
        node = self.members.node_of(out.worker) if out.worker else None
        out.address = self.members.workers.get(out.worker) if out.worker else None
        if node is None or out.address is None:
            self._rest(self._forget(out))
        else:
            self._upload(out, node.instance.id)

    def _upload(self, out: Out, instance_id: str) -> None:
        """Put the large values of a batch into the memory of the node that is to run it. Functions stay there for the calls to come."""
        out.instance_id = instance_id
        files = self._files_at(instance_id)
        functions = {name: function for name, function in out.shipment.batch.functions.items() if function.nbytes > INLINE_BYTES}
        if files.is_coming(functions):
            out.phase = Phase.BLOCKED
            return
        absent = tuple((name, function) for name, function in functions.items() if files.find(name) is None)
        arguments = () if self.is_here else tuple((call.call_id, call.arguments) for call in out.shipment.batch.calls if call.arguments.nbytes > INLINE_BYTES)
        out.phase = Phase.UPLOADING
        if absent or arguments:
            files.plan([name for name, _ in absent])
            self._do(do.Upload(out.number, instance_id, arguments, absent))
        else:
            self._go_on(out, set())

    def _lay_aside(self, out: Out, instance_id: str, arguments: Mapping[str, Parcel]) -> None:
        for call_id, parcel in arguments.items():
            entry = self.entries.get(call_id)
            if entry is None:
                self._do(do.Remove(instance_id, parcel))
            else:
                self._clear_aside(entry)
                entry.aside = (instance_id, parcel)

    def _go_on(self, out: Out, inline: Collection[str]) -> None:
        """All large values of a batch are where they should be: send it."""
        batch = out.shipment.batch
        if not self.is_live:
            self._rest(self._forget(out))
            return
        if out.instance_id is not None:
            names = [name for name, function in batch.functions.items() if function.nbytes > INLINE_BYTES]
            out.functions = self._files_at(out.instance_id).use(out.number, names)
            if set(names) - out.functions.keys() - set(inline):  # what was there has been evicted meanwhile
                self._upload(out, out.instance_id)
                return
        calls = tuple(self._with_arguments_aside(call, out) for call in batch.calls if call.call_id in self.entries)
        for call in batch.calls:
            if call.call_id not in self.entries:  # cancelled during the upload
                self._queue.ended(call.call_id)
        if not calls:
            self._forget(out)
            return
        out.shipment.batch = batch._replace(calls=tuple(call for call in batch.calls if call.call_id in self.entries))
        out.phase, out.epoch = Phase.SENT, self.epoch
        sent = batch._replace(calls=calls, functions={**batch.functions, **out.functions})
        self._do(do.Send(self.epoch, out.number, self.key(out.number), sent, out.address))

    def _with_arguments_aside(self, call: Any, out: Out) -> Any:
        aside = self.entries[call.call_id].aside
        return call._replace(arguments=aside[1]) if aside is not None and aside[0] == out.instance_id else call

    def _unblock(self) -> None:
        for out in [out for out in self.outs.values() if out.phase is Phase.BLOCKED and out.instance_id is not None]:
            self._upload(out, out.instance_id or "")

    def _files_at(self, instance_id: str) -> FunctionFiles:
        return self._files.setdefault(instance_id, FunctionFiles())

    def _evict(self, instance_id: str) -> None:
        for parcel in self._files_at(instance_id).evict():
            self._do(do.Remove(instance_id, parcel))

    def _forget(self, out: Out) -> list[str]:
        """A batch is not out any more; return its calls that have not ended."""
        self.outs.pop(out.number, None)
        self._unheard.pop(out.number, None)
        if out.instance_id is not None:
            self._files_at(out.instance_id).done(out.number)
            self._evict(out.instance_id)
        unended = self._queue.unended(out.shipment)
        if out.is_out and unended:
            self._kept.lose(out.number, unended)
        return unended

    def _at(self, epoch: int, number: int, phase: Phase) -> Out | None:
        """Return the batch that a message is about; None if it is of another connection, or in another phase: then the message comes too late."""
        out = self.outs.get(number)
        is_of_now = self.is_live and epoch == self.epoch
        return out if is_of_now and out is not None and out.epoch == epoch and out.phase is phase else None

    def _stop_cancelled(self) -> None:
        """Stop all calls that are to be stopped by now with one message, however many they are."""
        stop = {call_id for call_id in self._kept.astray if call_id not in self.entries}
        self._kept.astray -= stop
        if self._to_stop:
            stop.update(call_id for call_id in self._to_stop - self._queue.drop(self._to_stop) if self._queue.is_out(call_id))
            self._to_stop.clear()
        if stop:
            self._do(do.Stop(self.epoch, tuple(sorted(stop))))

    # ── outcomes in ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _tell_lines(self, report: Report, output: Output) -> None:
        for line in output.lines:
            event = LogLine(report.node, report.instance_id, line, output.timestamp, output.call_id, output.stream, output.level)
            self._do(do.Emit(event, output.call_id))

    def _ran(self, instance_id: str, outcomes: Iterable[Outcome]) -> None:
        if seconds := sum(outcome.seconds for outcome in outcomes):
            self._do(do.Ran(instance_id, seconds))

    def _on_outcome(self, outcome: Outcome, node: int, instance_id: str, now: float) -> None:
        call_id = outcome.call_id
        was_out = self._queue.ended(call_id, outcome.seconds if outcome.ending is Ending.RESULT else None)
        entry = self.entries.get(call_id)
        if entry is None:  # it was cancelled, or is lost
            self._discard(outcome.parcel)
        elif not was_out:  # it is told twice, and being fetched
            return
        elif outcome.parcel.path is None or self.is_here:
            self._finish(call_id, outcome, node, instance_id)
        else:
            self._fetch(entry, outcome, node, now)

    def _fetch(self, entry: Entry, outcome: Outcome, node: int, now: float) -> None:
        call_id, lies_on = outcome.call_id, self.members.instance_of(outcome.parcel)
        if lies_on is None:
            self._lose_result(entry, NodeLost("the value lies on a node that this client does not know: it came in the place of another one, or is lost"))
            return
        self.fetching[call_id] = Fetching(entry, outcome, node, lies_on, str(outcome.parcel.path), now + FETCH_SECONDS)
        self._do(do.Fetch(call_id, lies_on, outcome.parcel))

    def _finish(self, call_id: str, outcome: Outcome, node: int, instance_id: str) -> None:
        entry = self.entries.pop(call_id)
        self._done += 1
        self._failed += outcome.ending is not Ending.RESULT
        self._do(do.Finish(call_id, node, instance_id, outcome, entry.call.arguments))
        self._clear_aside(entry)

    def _discard(self, parcel: Parcel) -> None:
        """Remove an outcome that has no caller any more."""
        if parcel.path is None:
            return
        if self.is_here:
            self._do(do.Discard(parcel))
        elif (instance_id := self.members.instance_of(parcel)) is not None:
            self._do(do.Remove(instance_id, parcel))

    def _forget_fetching(self, call_id: str) -> None:
        """Forget an outcome that is being fetched, and remove it where it lies: it has no caller any more."""
        if (fetching := self.fetching.pop(call_id, None)) is not None:
            self._do(do.Remove(fetching.instance_id, fetching.outcome.parcel))

    def _give_up_fetching(self, call_id: str, fetching: Fetching) -> None:
        self._forget_fetching(call_id)
        assert fetching.error is not None
        self._lose_result(fetching.entry, fetching.error)

    def _lose_result(self, entry: Entry, cause: Exception) -> None:
        """A call ended, and its outcome cannot be had: it runs again if it may, from the end of the queue."""
        call_id = entry.call.call_id
        reason = f"the call ended, but its result could not be fetched: {cause}"
        entry.losses += 1
        if self._may_run_again(entry):
            self._do(do.Emit(CallRetrying(call_id, entry.losses + 1, self._retries + 1, reason)))
            self._queue.add([entry])
        else:
            self._fail_all([call_id], self._node_lost(entry, reason, cause))

    # ── calls that outlive their head ────────────────────────────────────────────────────────────────────────────────

    def _is_retold(self, report: Report) -> bool:
        """Tell whether a report was heard before, or is of a batch that is done with; note what is heard.

        Workers tell all again that was not released, when they join and when they are asked.
        """
        number = batch_of(report.origin)
        if number < 0:
            return False
        out = self.outs.get(number)
        heard = out.heard if out is not None else self._kept.heard
        is_retold = report.number <= heard.get(report.origin, 0)
        heard[report.origin] = max(report.number, heard.get(report.origin, 0))
        if out is not None:
            return is_retold
        is_done_with = number not in self._kept.batches
        outcomes = [item for item in report.news if isinstance(item, Outcome)]
        for outcome in outcomes if is_done_with and not is_retold else ():
            if self._kept.was_lost(report, outcome.call_id):
                self._discard(outcome.parcel)
        self._kept.ended(report, [outcome.call_id for outcome in outcomes])
        return is_done_with or is_retold

    def _on_kept(self, news: WorkerKept, now: float) -> None:
        """A worker says which calls it has from before."""
        self._kept.announced(news.name, news.address, news.keys)
        self._to_stop.update(call_id for call_id in news.calls if self._queue.is_out(call_id) and call_id not in self.entries)
        if news.is_paused:
            self.members.hold(news.address, None)
            self._count_slots()
        self._lose_unkept(now)

    def _lose_unkept(self, now: float) -> None:
        if lost := self._kept.take_lost(now, is_live=self.is_live):
            self._lose(lost, HEAD_LOST)

    # ── calls lost, and calls handed back ────────────────────────────────────────────────────────────────────────────

    def _lose_unheard(self) -> None:
        """All that was reported before the scheduler's answer has been heard: the batches that it does not have any more are lost."""
        if self.heard < self._unheard_until:
            return
        for out in list(self._unheard.values()):
            self._lose(self._forget(out), "it was lost while its scheduler could not be reached")
        for number in self._left_behind:
            self._do(do.TakeBack(self.epoch, number, self.key(number)))
        for address in self._gone:
            self._lose(self._kept.left(address), "its worker is gone")
        self._forget_unheard()

    def _forget_unheard(self) -> None:
        self._unheard.clear()
        self._left_behind.clear()
        self._gone.clear()

    def _take_back(self, call_ids: Sequence[str]) -> None:
        """Calls have not been begun: they wait again, first in the queue; on a pool that drains or closes they raise."""
        self._queue.returned(call_ids)
        self._refuse(call_ids)

    def _rest(self, call_ids: Sequence[str]) -> None:
        """Calls could not be sent just now: they are tried again with the next tick."""
        self._queue.rest(call_ids)
        self._refuse(call_ids)

    def _refuse(self, call_ids: Sequence[str]) -> None:
        """Have calls that wait raise, if the pool begins none; those whose callers have cancelled need not wait."""
        refusal = self._ended or self._drained
        if unwanted := set(call_ids) if refusal is not None else {call_id for call_id in call_ids if call_id not in self.entries}:
            self._queue.drop(unwanted)
        if refusal is not None:
            self._fail_all(call_ids, refusal)

    def _may_run_again(self, entry: Entry) -> bool:
        may_begin = self._ended is None and self._drained is None
        return may_begin and entry.losses <= self._retries and entry.call.arguments.path is None

    def _lose(self, call_ids: Iterable[str], reason: str, cause: BaseException | None = None) -> None:
        """Calls went away with their node: those that may run again wait for another one, the others raise NodeLost."""
        again, lost = list[str](), list[tuple[str, SkywardError]]()
        for call_id in call_ids:
            entry = self.entries.get(call_id)
            if entry is None:
                self._queue.ended(call_id)
                continue
            entry.losses += 1
            if self._may_run_again(entry):
                self._clear_aside(entry)
                again.append(call_id)
                self._do(do.Emit(CallRetrying(call_id, entry.losses + 1, self._retries + 1, reason)))
            else:
                if not self._queue.ended(call_id):
                    self._queue.drop({call_id})
                lost.append((call_id, self._node_lost(entry, reason, cause)))
        self._queue.returned(again)
        for call_id, error in lost:
            self._fail_all([call_id], error)
        if lost and self.is_live:  # one that its worker still has must not begin: its caller is about to hear that it is lost
            self._do(do.Stop(self.epoch, tuple(call_id for call_id, _ in lost)))

    def _node_lost(self, entry: Entry, reason: str, cause: BaseException | None) -> NodeLost:
        if not self._retries:
            advice = "submit it again if it may run twice, or open the pool with retries=1 or more"
        elif entry.losses <= self._retries and (self._ended or self._drained) is not None:
            advice = "it would run again, but the pool begins no calls any more"
        elif entry.call.arguments.path is not None:
            advice = "its arguments went with it, being too large to be kept here: submit it again"
        else:
            advice = f"it was lost {entry.losses} times (ComputePool(retries={self._retries}))"
        error = NodeLost(f"{reason}; {advice}")
        error.__cause__ = cause
        return error

    def _fail_all(self, call_ids: Iterable[str], error: SkywardError) -> None:
        for call_id in call_ids:
            entry = self.entries.pop(call_id, None)
            if entry is None:
                continue
            self._forget_fetching(call_id)
            self._done += 1
            self._failed += 1
            self._do(do.Fail(call_id, error, entry.call.arguments))
            self._clear_aside(entry)

    def _clear_aside(self, entry: Entry) -> None:
        """Remove arguments that lie on a node and are not needed there any more."""
        if entry.aside is not None:
            self._do(do.Remove(*entry.aside))
            entry.aside = None

    def _acknowledge(self) -> None:
        if self.heard != self._acknowledged:
            self._acknowledged = self.heard
            self._do(do.Acknowledge(self.epoch, self.heard))

    def _do(self, action: do.Action) -> None:
        self._actions.append(action)
