"""Items of streaming calls on their way to their consumers: pure bookkeeping.

Items come in the order of their numbers, in reports. A missing item is lost, with the messages of a scheduler that is
gone or had no room. Then the call is stopped and raises NodeLost, because its generator cannot yield the item again. A
call whose first item has come does not run again (`CallTable`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from skyward_core.engine import actions as do
from skyward_core.engine.calls import CallTable
from skyward_core.engine.connection_state import ConnectionState
from skyward_core.engine.members import Members
from skyward_core.engine.outbox import Queue
from skyward_core.errors import NodeLost
from skyward_core.worker.wire import Item

LOST = "items of the call were lost with messages of the pool's scheduler: call it again"


class Items:
    """The streaming calls of a client: which items have come, and how far the calls may go on.

    `act` takes the actions.
    """

    def __init__(
        self,
        members: Members,
        connection: ConnectionState,
        queue: Queue,
        calls: CallTable,
        act: Callable[[do.Action], object],
    ) -> None:
        self._members = members
        self._connection = connection
        self._queue = queue
        self._calls = calls
        self._do = act
        self._credit: dict[str, int] = {}
        """By call: the items below this number may be yielded. Workers repeat nothing, so each connection gets it."""

    def arrived(self, item: Item, node: int) -> None:
        """An item has come: hand it to the consumer, after a fetch if it lies on another machine."""
        call_id = item.call_id
        entry = self._calls.entries.get(call_id)
        if entry is None or item.number < entry.items:
            self._calls.discard(item.parcel)
        elif item.number > entry.items:
            self._calls.discard(item.parcel)
            self._lose([call_id])
        else:
            entry.items += 1
            if item.parcel.path is None or self._members.is_here:
                self._do(do.DeliverItem(call_id, item.number, node, item.parcel))
            else:
                self._do(do.FetchItem(call_id, item.number, node, self._members.instance_of(item.parcel), item.parcel))

    def give_credit(self, call_id: str, below: int) -> None:
        """The consumer has taken items: the call may yield those below this number."""
        if call_id in self._calls.entries:
            self._credit[call_id] = below
            if self._connection.is_live:
                self._do(do.GiveCredit(self._connection.epoch, {call_id: below}))

    def repeat_credit(self) -> None:
        """A worker may have missed the last credit: there is another connection, or a worker has joined."""
        self._credit = {call_id: below for call_id, below in self._credit.items() if call_id in self._calls.entries}
        if self._credit and self._connection.is_live:
            self._do(do.GiveCredit(self._connection.epoch, dict(self._credit)))

    def lose_all(self) -> None:
        """Messages were lost: the calls in flight may wait for credit that their items would bring."""
        self._lose(
            [
                call_id
                for call_id, entry in self._calls.entries.items()
                if entry.call.ahead and self._queue.is_out(call_id)
            ]
        )

    def _lose(self, call_ids: Iterable[str]) -> None:
        call_ids = list(call_ids)
        self._calls.fail(call_ids, NodeLost(LOST))
        self._calls.stop_unwanted(call_ids)
