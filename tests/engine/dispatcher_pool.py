"""A dispatcher without a simulation: tests pass messages one by one, and take its actions by kind."""

from collections.abc import Mapping, Sequence
from typing import Any

from skyward_core.engine import actions as do
from skyward_core.engine.dispatcher import Dispatcher
from skyward_core.engine.outbox import Entry
from skyward_core.errors import SkywardError
from skyward_core.events.events import CallProgress
from skyward_core.wire.messages import Call, Item, Outcome, OutcomeKind, Output, Parcel, Report
from skyward_core.wire.protocol import Resumed
from tests.engine.model import FUNCTION_SPANS, LARGE, SPANS, machine_id, node_of

SMALL = Parcel(b"small")
TOPIC = "skyward-topic"
ADDRESSES = {"0-0": "tls://zero", "1-0": "tls://one"}


def entry(
    call_id: str, *, arguments: Parcel = SMALL, function: str = "f", is_large: bool = False, worker: str | None = None
) -> Entry:
    return Entry(Call(call_id, function, arguments, "job"), LARGE if is_large else SMALL, worker)


def in_file(path: str) -> Parcel:
    return Parcel(b"", (), path, SPANS)


def value(call_id: str, path: str | None = None, ending: OutcomeKind = OutcomeKind.RESULT) -> Outcome:
    return Outcome(call_id, ending, in_file(path) if path else Parcel(b"value"), seconds=1.0)


class Pool:
    """A connected dispatcher of a pool of two nodes, each with a worker of one slot; and its actions, by kind."""

    def __init__(self, retries: int = 0, *, workers: Sequence[str] = ("0-0", "1-0"), is_local: bool = False) -> None:
        self.nodes = [node_of(rank, rank, 1, 1) for rank in range(2)]
        self.dispatcher = Dispatcher(self.nodes, TOPIC, retries, is_local=is_local)
        self.workers = dict.fromkeys(workers, "running")
        self.done: list[do.Action] = []
        self.connect(is_known=False)

    def connect(self, *, is_known: bool = True, tasks: Mapping[str, str] | None = None, **answer: Any) -> None:
        """Connect; the scheduler answers at once."""
        self.epoch = self.dispatcher.connected(0.0)
        workers = {ADDRESSES[name]: (name, status) for name, status in self.workers.items()}
        number = self.dispatcher.heard
        resumed = Resumed(number, 0, is_known, tasks or {}, **{"last": number, "workers": workers} | answer)
        self.dispatcher.resumed(self.epoch, resumed, 0.0)
        self.go_on()

    def go_on(self, now: float = 0.0) -> None:
        """Flush, and take the actions."""
        self.dispatcher.flush(now)
        self.done += self.dispatcher.take_actions()

    def tick(self, now: float, *, is_reachable: bool = True) -> None:
        self.dispatcher.tick(now, lambda _: is_reachable)

    def take(self, kind: type) -> list[Any]:
        """Return the actions of this kind since the last time."""
        self.go_on()
        taken = [action for action in self.done if isinstance(action, kind)]
        self.done = [action for action in self.done if not isinstance(action, kind)]
        return taken

    def submit(self, *entries: Entry) -> list[Any]:
        """Submit calls; return the batches that go out."""
        self.dispatcher.submit(entries)
        return self.take(do.Send)

    def news(self, message: Any) -> None:
        """The scheduler says something about the pool."""
        self.dispatcher.pool_news(self.epoch, message, 0.0)

    def report(self, *news: Outcome | Output | Item, node: int = 0, origin: str = "", number: int = 0) -> None:
        """A worker reports."""
        self.dispatcher.report(self.epoch, Report(node, machine_id(node), news, origin, number), 0.0)
        self.go_on()

    def lose(self, sent: do.Send, reason: str = "gone") -> None:
        """The task of a batch has failed."""
        self.dispatcher.task_ended(self.epoch, sent.number, is_finished=False, reason=reason)

    def end(self, call_id: str, number: int, node: int = 0) -> None:
        """A call is reported, and its task ends."""
        self.report(value(call_id), node=node)
        self.dispatcher.task_ended(self.epoch, number, is_finished=True, reason="")

    def upload(self, action: do.Upload) -> None:
        """An upload succeeds."""
        place = f"/dev/shm/{action.instance_id}"
        arguments = {call_id: in_file(f"{place}/a-{call_id}") for call_id, _ in action.arguments}
        functions = {name: Parcel(b"", (), f"{place}/{name}", FUNCTION_SPANS) for name, _ in action.functions}
        self.dispatcher.uploaded(action.number, action.instance_id, arguments, functions)
        self.go_on()

    def run(self, call: Entry) -> list[str]:
        """Run one call to its end on node 0; return the names of the files that are removed from the node."""
        sent = self.submit(call)
        for action in self.take(do.Upload):
            self.upload(action)
        sent += self.take(do.Send)
        self.end(call.call.call_id, sent[0].number)
        return self.removed()

    def removed(self) -> list[str]:
        return [str(action.parcel.path).rpartition("/")[2] for action in self.take(do.Remove)]

    def errors(self) -> dict[str, SkywardError]:
        """Return the errors of calls since the last time."""
        return {action.call_id: action.error for action in self.take(do.Fail)}

    def finished(self) -> list[str]:
        return [action.call_id for action in self.take(do.Finish)]

    def events[E](self, kind: type[E]) -> list[E]:
        return [action.event for action in self.take(do.EmitEvent) if isinstance(action.event, kind)]

    def progress(self) -> tuple[int, int, int, int]:
        """Return the counts of the last progress event."""
        event = self.events(CallProgress)[-1]
        return event.submitted, event.done, event.failed, event.cancelled
