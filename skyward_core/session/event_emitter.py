"""The events of one session, and its bill: an event is counted in the meter, then queued for callbacks and displays."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from skyward_core.errors import SkywardError
from skyward_core.events import console
from skyward_core.events.events import (
    BootstrapCompleted,
    BootstrapProgress,
    Callback,
    CostFinal,
    Error,
    InfraCreating,
    InstanceLost,
    SkywardEvent,
    compose,
    hide_other_nodes,
    registered_callback,
)
from skyward_core.events.queue import EventQueue
from skyward_core.ledger.metering import Meter
from skyward_core.ledger.rows import Bucket
from skyward_core.spec import PoolSpec


def event_queue(spec: PoolSpec, on_event: Callback | None, log: Callable[..., object], pool_id: str = "") -> EventQueue:
    """Return the queue of a pool's events: to the registered callback, `on_event` and the display, in this order.

    `pool_id` is that of a pool which is open already, `log` as in `EventQueue`.
    """
    display = console.display(spec.display, pool_id=pool_id)
    first = hide_other_nodes if spec.output == "head" else None
    sinks = [callback for callback in (first, registered_callback(), on_event) if callback is not None]
    return EventQueue(compose(*sinks, display), display.close, log=log)


class EventEmitter:
    """Owns the queue, the meter and the bill of one session. Any thread may emit."""

    def __init__(self, spec: PoolSpec, on_event: Callback | None, queue: EventQueue | None = None) -> None:
        """Use this queue, or one for all callbacks and the display."""
        self.meter = Meter()
        self.final: CostFinal | None = None
        """The bill, once it was emitted."""
        self._slots = spec.concurrency * spec.workers_per_node
        self.queue = queue or event_queue(spec, on_event, console.log_of(spec.display))

    def emit(self, event: SkywardEvent) -> int:
        """Count one event, and queue it for the callbacks; return its number in `queue`.

        Waits for no callback, except for the first event, `InfraCreating`. It is delivered before anything is rented: a
        callback can store the pool's id then, in case this process dies.
        """
        self._count(event)
        number = self.queue.put(event)
        if isinstance(event, InfraCreating):
            self.queue.flush()
        return number

    def _count(self, event: SkywardEvent) -> None:
        """Set in the meter the bucket of a machine's seconds from now on."""
        match event:
            case BootstrapProgress(instance_id):
                self.meter.enter(instance_id, Bucket.BOOTSTRAPPING)
            case BootstrapCompleted(instance_id):
                self.meter.slots(instance_id, self._slots)
                self.meter.enter(instance_id, Bucket.IDLE)
            case InstanceLost(instance_id):
                self.meter.enter(instance_id, Bucket.LOST)
            case _:
                pass

    def emit_error(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Emit an error of ours; the exit callback of an ExitStack."""
        if isinstance(error, SkywardError):
            self.emit(Error(str(error)))

    def emit_bill(self) -> None:
        """Emit the bill, unless that was done."""
        final = self.meter.final()
        if final is not None:
            self.final = final
            self.emit(final)
