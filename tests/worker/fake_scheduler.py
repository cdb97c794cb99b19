"""Dask's own broker, and streams that tests deliver from, or cut: a scheduler for its plug-ins."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from distributed.broker import Broker

from skyward_core.worker.calls import CallMemory

TOPIC = "skyward-0123"
FOR_EVER = 3600.0


@dataclass
class Wire:
    """The stream from the scheduler to one client: messages in transit, and whether it is open."""

    client_id: str
    handler: Callable[[Any], None]
    sent: list[Any] = field(default_factory=list)


class FakeScheduler:
    """Dask's own broker, and streams that tests deliver from, or cut."""

    def __init__(self, calls: CallMemory) -> None:
        self.plugins = {calls.name: calls}
        self.tasks: dict[str, Any] = {}
        self.workers: dict[str, Any] = {}
        self.stream_handlers: dict[str, Any] = {}
        self.handlers: dict[str, Any] = {}
        self.wires: dict[str, Wire] = {}
        self.clients = self.wires
        self.broker = Broker(0, self)  # type: ignore[arg-type]
        self.log_event, self.subscribe_topic, self.unsubscribe_topic = (
            self.broker.publish,
            self.broker.subscribe,
            self.broker.unsubscribe,
        )

    def send_all(self, client_msgs: dict[str, list[Any]], worker_msgs: Any) -> None:
        for client, messages in client_msgs.items():
            if wire := self.wires.get(client):
                wire.sent += [message["event"] for message in messages]

    def take(self, client: str, message: dict[str, Any]) -> None:
        """Handle a message of a client's stream as Dask does."""
        message = {"client": client, **message}
        self.stream_handlers[message.pop("op")](**message)
