"""Transfers, with a node that loses its connection."""

import queue
from collections.abc import Callable
from threading import Event
from typing import Any

import pytest

from skyward_core.engine.dispatcher import Dispatcher
from skyward_core.engine.transfers import Transfers
from skyward_core.errors import ConnectionLost, NodeLost
from skyward_core.worker.wire import Parcel
from tests.conftest import wait_until
from tests.engine.model import SPANS, node_of

NODE = node_of(0, 0, 1, 1)


class CutTransport:
    """A node from which nothing comes; `released` has the paths that it was requested to remove."""

    def __init__(self) -> None:
        self.released: list[str | None] = []

    def to(self, instance: object) -> "CutTransport":
        return self

    def take(self, parcel: Parcel) -> Parcel:
        raise ConnectionLost("cut on the way")

    def release(self, parcel: Parcel) -> None:
        self.released.append(parcel.path)


class SlowTransport(CutTransport):
    """A node whose values come when `go` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.go = Event()

    def take(self, parcel: Parcel) -> Parcel:
        self.go.wait(60)
        return parcel


@pytest.mark.parametrize("make", [SlowTransport, CutTransport])
def test_an_item_counts_until_it_is_here(make: type[CutTransport]) -> None:
    """Its node may not leave before; a generator that has ended does not count any more by then."""
    node: Any = make()
    posted = queue.SimpleQueue[Callable[[], None]]()
    transfers = Transfers(Dispatcher([NODE], "skyward-topic"), node, posted.put)
    parcel = Parcel(b"", (), f"/dev/shm/{NODE.instance.id}/item", SPANS)
    came = list[object]()
    for _ in range(2):
        transfers.fetch_item(NODE.instance.id, parcel, came.append, came.append)
    assert (transfers.items_from(NODE.instance.id), transfers.items_from("another")) == (2, 0)
    if isinstance(node, SlowTransport):
        node.go.set()
    for left in (1, 0):
        posted.get(timeout=60)()
        assert transfers.items_from(NODE.instance.id) == left
    assert len(came) == 2
    transfers.close()


def test_an_item_that_cannot_be_fetched_does_not_stay_on_its_node() -> None:
    """Its consumer gets the error, and does not ask for it again."""
    node: Any = CutTransport()
    transfers = Transfers(Dispatcher([NODE], "skyward-topic"), node, lambda message: None)
    errors = list[BaseException]()
    path = f"/dev/shm/{NODE.instance.id}/item"
    transfers.fetch_item(NODE.instance.id, Parcel(b"", (), path, SPANS), lambda parcel: None, errors.append)
    wait_until(lambda: node.released, "the removal")
    transfers.close()
    assert [type(error) for error in errors] == [NodeLost]
    assert node.released == [path]
