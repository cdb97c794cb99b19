"""What an attachment that fails says: that the pool is gone, or that it does not answer just now."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from skyward_core.engine import cluster as engine_cluster
from skyward_core.errors import NodeLost, Unreachable
from skyward_core.events.queue import EventQueue
from skyward_core.session import attached as module
from skyward_core.session.attached import Attached
from tests.system.session.test_attached_keeping import lease

SETTINGS = {"tls_certificate": "", "tls_key": "", "instance_id": "i-0", "pool_id": "p"}


class World:
    """A head that answers, with a scheduler that does not."""

    def __init__(self) -> None:
        self.lives = [True]
        """The answers of the head, in their order; the last one stays."""
        self.unread: Exception | None = None
        self.connected = 0

    def head(self, _: Any) -> Any:
        return SimpleNamespace(
            is_connected=True, address=str, join=lambda **_: None, lives=self.next_life, read=self.read
        )

    def next_life(self, _: float) -> bool | None:
        return self.lives.pop(0) if len(self.lives) > 1 else self.lives[0]

    def read(self, name: str) -> str:
        assert name == "settings.json"
        if self.unread is not None:
            raise self.unread
        return json.dumps(SETTINGS)

    def connect(self, *_: Any) -> Any:
        self.connected += 1
        raise TimeoutError("timed out")


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    world = World()
    monkeypatch.setattr(module, "_verify_folder", lambda _: None)
    monkeypatch.setattr(engine_cluster, "connect", world.connect)
    return world


def attach(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    it = Attached(lease(), None, None, 60.0, 0, EventQueue(lambda _: None))
    monkeypatch.setattr(it.transports, "to", world.head)
    it.start(5.0)


@pytest.mark.parametrize("lives", [True, None])
def test_a_scheduler_that_does_not_answer_is_busy_while_its_head_lives(
    world: World, monkeypatch: pytest.MonkeyPatch, lives: bool | None
) -> None:
    """Whoever waits for the pool tries again, and gives nothing up."""
    world.lives = [True, lives]  # type: ignore[list-item]
    with pytest.raises(Unreachable, match="does not answer, although its head lives"):
        attach(world, monkeypatch)
    assert world.connected == 1


def test_a_scheduler_whose_head_has_died_meanwhile_is_gone(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.lives = [True, False]
    with pytest.raises(NodeLost, match="is not there any more, or has another head"):
        attach(world, monkeypatch)
    assert world.connected == 1
