"""A client's place in a topic of the scheduler's, for tests that drive the scheduler without an engine."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

from skyward_core.wire import protocol
from skyward_core.wire.protocol import Resumed


class Following:
    """`number` is that of the last message delivered. The client subscribes to the topic with `handler(client.id)`.

    Live messages count only once `resume` has been answered on that client's stream: earlier messages come again, in
    their order.
    """

    def __init__(
        self, topic: str, deliver: Callable[[bytes], object], resumed: Callable[[Resumed], object] = lambda _: None
    ) -> None:
        self.topic = topic
        self.number = 0
        self._deliver = deliver
        self._resumed = resumed
        self._client = ""
        self._request = 0
        self._is_live = False

    def handler(self, client_id: str) -> Callable[[tuple[float, Any]], None]:
        return partial(self._on_event, client_id)

    def resume(self, client_id: str) -> dict[str, Any]:
        self._client, self._request, self._is_live = client_id, self._request + 1, False
        return protocol.resume(client_id, self.topic, self.number, self._request)

    def acknowledge(self) -> dict[str, Any]:
        return protocol.acknowledge(self.topic, self.number)

    def leave(self) -> dict[str, Any]:
        return protocol.leave(self.topic)

    def _on_event(self, client_id: str, event: tuple[float, Any]) -> None:
        content = event[1]
        if client_id != self._client:
            return
        if isinstance(content, Mapping):
            answer = cast("Mapping[str, Any]", content)
            if answer["request"] == self._request:
                self._is_live = True
                self.number = answer["number"]
                self._resumed(Resumed.of(answer))
        elif self._is_live:
            self.number += 1
            self._deliver(content)
