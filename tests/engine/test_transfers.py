"""Transfers, with a node that loses its connection."""

from typing import Any

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
