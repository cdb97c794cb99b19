"""Replacement of one node: who owns the new machine at each step, and what a failure leaves."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

import skyward_core as sky
from skyward_core.errors import BootstrapFailed, NodeLost, PoolClosed, Unreachable
from skyward_core.provisioning import replacement
from skyward_core.provisioning.bootstrap import LAST_PHASE
from skyward_core.provisioning.replacement import RETIRED, Replacement
from skyward_core.wire.settings import NodeSettings

SETTINGS = NodeSettings(
    pool_id="sky-test",
    instance_id="i",
    rank=9,
    total_nodes=2,
    slots=1,
    host="10.0.0.2",
    head_host="10.0.0.1",
    head_port=0,
    tls_certificate="",
    tls_key="",
    value_directories=(),
)


class Machine:
    """A machine in preparation. It records what it gets."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.instance = SimpleNamespace(id=name)
        self.phase = LAST_PHASE
        self.log = log
        self.sent: list[Any] = []
        self.written: list[tuple[str, str]] = []
        self.starts: list[tuple[str, float]] = []
        self.start_error: Exception | None = None
        self.transport = SimpleNamespace(
            opened=lambda: log.append(f"{name} opened"), write=lambda *what: self.written.append(what)
        )

    def start(self, script: str, timeout: float, files: object = ()) -> None:
        self.starts.append((script, timeout))
        if self.start_error is not None:
            raise self.start_error

    def follow(self) -> None:
        self.log.append(f"{self.instance.id} followed")

    def send_settings(self, settings: Any) -> None:
        self.sent.append(settings)

    def failure(self, words: str) -> BootstrapFailed:
        return BootstrapFailed(words)


class World:
    """A pool of two nodes whose second is replaced, with nodes, rental and selection that only record."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.old, self.new = Machine("old", self.log), Machine("new", self.log)
        self.machines = iter((self.new,))
        self.ended: list[str] = []
        self.ended_in_thread: list[str] = []
        self.rented: list[tuple[int, Any]] = []
        self.is_late = False
        self.lost: BaseException | None = None
        self.sees = True
        self.nodes: Any = SimpleNamespace(
            all={1: self.old},
            scheduler="tls://head",
            settings_lock=threading.Lock(),
            forwarding=SimpleNamespace(is_on=False, choose_for=lambda rank: self.log.append(f"ports of {rank}")),
            connect=lambda: self.log.append("connected"),
            sees_the_head=lambda node: self.sees,
            settings=lambda node, rank, scheduler: replace(SETTINGS, rank=rank, scheduler=scheduler),
            script=lambda: "script",
            preparation_of=lambda instance, rank: self._prepared(instance, rank),
            raise_if_lost=self._raise_if_lost,
            drop=lambda rank, node: self.nodes.all.pop(rank, None),
        )
        self.rental: Any = SimpleNamespace(
            end=lambda node: self.ended.append(node.instance.id),
            end_in_thread=lambda node: self.ended_in_thread.append(node.instance.id) or f"end of {node.instance.id}",
            go_on_until=self._go_on_until,
            transports=SimpleNamespace(forget=lambda instance: self.log.append(f"{instance.id} disconnected")),
        )
        self.selection: Any = SimpleNamespace(
            rent_one=self._rent_one,
            choose_for=lambda rank: None,
            forget=lambda rank: self.log.append(f"no offer for {rank}"),
            try_no_other=lambda rank: self.log.append(f"no other offer for {rank}"),
        )
        self.spec = sky.PoolSpec.of(provider=sky.Local(), nodes=2, provision_timeout=60.0)
        self.replacement = Replacement(self.spec, self.rental, self.selection, self.nodes)

    def _rent_one(self, rank: int, termination: Any) -> Machine:
        self.rented.append((rank, termination))
        return next(self.machines)

    def _prepared(self, instance: Machine, rank: int) -> Machine:
        self.log.append(f"{instance.instance.id} for {rank}")
        return instance

    def _go_on_until(self, deadline: float, what: str) -> None:
        self.deadline = deadline
        if self.is_late:
            raise sky.errors.SkywardError(what)

    def _raise_if_lost(self, node: Machine) -> None:
        if self.lost is not None:
            raise self.lost

    def joins_after(self, turns: int) -> Callable[[], bool]:
        left = iter(range(turns))
        return lambda: next(left, None) is None


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    """A world whose clock stands at 1000 seconds."""
    monkeypatch.setattr(replacement, "time", SimpleNamespace(monotonic=lambda: 1000.0))
    return World()


def test_a_lost_node_is_terminated_while_another_machine_takes_its_rank(world: World) -> None:
    """The new machine gets ports, settings with the head's address and its rank, and is opened when it has joined."""
    world.replacement.replace(1, world.joins_after(2))
    assert world.ended_in_thread == ["old"]
    assert world.rented == [(1, "end of old")]
    assert world.new.starts == [("script", 60.0)]
    assert world.new.sent == [replace(SETTINGS, rank=1, scheduler="tls://head")]
    assert world.log == ["new for 1", "ports of 1", "connected", "new followed", "new followed", "new opened"]
    assert world.deadline == 1060.0
    assert (world.nodes.all, world.ended) == ({1: world.new}, [])


def test_a_vacant_rank_is_filled(world: World) -> None:
    """There is nothing to terminate, so the search does not wait for an end."""
    world.nodes.all.clear()
    world.replacement.replace(1, world.joins_after(0))
    assert (world.ended_in_thread, world.rented) == ([], [(1, None)])
    assert world.nodes.all == {1: world.new}


def cannot_start(world: World) -> None:
    world.new.start_error = Unreachable("no answer")


def cut_off(world: World) -> None:
    world.sees = False


def late(world: World) -> None:
    world.is_late = True


def gone(world: World) -> None:
    world.lost = BootstrapFailed("its machine is gone")


def closing(world: World) -> None:
    world.rental.go_on_until = raise_closed


def raise_closed(*_: object) -> None:
    raise PoolClosed("the pool is closing")


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (cannot_start, "no answer"),
        (cut_off, "cannot connect to the head at tls://head"),
        (late, "node 1 did not join the pool in time"),
        (gone, "its machine is gone"),
        (closing, "the pool is closing"),
    ],
)
def test_a_machine_that_fails_before_it_has_joined_is_terminated(
    world: World, monkeypatch: pytest.MonkeyPatch, fault: Callable[[World], None], words: str
) -> None:
    """Its rank is vacant again, and the lock of the settings is free. One that is to stand by is terminated, too."""
    fault(world)
    times = iter(range(1000, 90_000, 30))
    monkeypatch.setattr(replacement, "time", SimpleNamespace(monotonic=lambda: float(next(times))))
    with pytest.raises(sky.errors.SkywardError, match=words):
        world.replacement.replace(1, world.joins_after(9))
    assert (world.ended, world.nodes.all) == (["new"], {})
    assert not world.nodes.settings_lock.locked()
    if fault is cut_off:
        return
    world.machines, world.new.phase = iter((world.new,)), "installing"
    with pytest.raises(sky.errors.SkywardError):
        world.replacement.stand_by(1)
    assert world.ended == ["new", "new"]
    world.replacement.dismiss(1)
    assert world.ended_in_thread == ["old"]


def test_a_machine_that_the_restart_of_the_head_has_dropped_is_terminated(world: World) -> None:
    """It does not take the rank from the machine that has it by then."""

    def drop() -> bool:
        world.nodes.all.pop(1, None)
        return False

    with pytest.raises(NodeLost, match="node 1 could not get the address"):
        world.replacement.replace(1, drop)
    assert world.ended == ["new"]


def test_a_machine_that_stands_by_takes_the_next_vacant_rank(world: World) -> None:
    """It is rented and prepared once, beside the node that is still there, and is not in the pool until then."""
    world.replacement.stand_by(1)
    world.replacement.stand_by(1)
    assert world.rented == [(1, None)]
    assert (world.nodes.all, world.ended_in_thread) == ({1: world.old}, [])
    assert world.log == ["new for 1", "new opened"]
    world.replacement.replace(1, world.joins_after(0))
    assert len(world.rented) == 1
    assert (world.ended_in_thread, world.nodes.all) == (["old"], {1: world.new})
    world.replacement.dismiss(1)
    assert world.ended_in_thread == ["old"], "it is a node now"
    world.machines = iter((world.new,))
    world.replacement.stand_by(1)
    for _ in range(2):
        world.replacement.dismiss(1)
    assert world.ended_in_thread == ["old", "new"]


def test_a_node_that_retires_has_no_workers_any_more(world: World) -> None:
    """It gets settings of a generation that ends it. Another machine that has the rank meanwhile gets nothing."""
    world.replacement.retire(1, "another")
    world.replacement.retire(7, "old")
    assert world.old.written == []
    world.replacement.retire(1, "old")
    ((name, text),) = world.old.written
    assert name == "settings.json"
    settings = NodeSettings.from_json(text)
    assert (settings.workers, settings.generation, settings.rank) == ((), RETIRED, 1)
    assert settings.scheduler == "tls://head"


def test_a_node_that_has_joined_just_before_its_process_leaves_stays(world: World) -> None:
    """The process stops waiting between two looks; other processes already use the node, so it is not terminated."""
    has_joined = False

    def leave(deadline: float, what: str) -> None:
        nonlocal has_joined
        has_joined = True
        raise PoolClosed("the pool is closing")

    world.rental.go_on_until = leave
    world.replacement.replace(1, lambda: has_joined)
    assert (world.ended, world.nodes.all) == ([], {1: world.new})


def test_a_machine_that_is_abandoned_when_it_has_joined_is_no_node(world: World) -> None:
    """While it is requested nothing can be closed, and no other one is requested after it. A node is not touched."""

    def rent_one(rank: int, termination: Any) -> Machine:
        world.replacement.abandon_coming()
        return world.new

    def joined() -> bool:
        world.replacement.abandon_coming()
        return True

    world.selection.rent_one = rent_one
    with pytest.raises(PoolClosed):
        world.replacement.add(2, joined)
    assert (world.ended, world.nodes.all) == (["new"], {1: world.old})
    world.ended.clear()
    world.replacement.add(2, lambda: True)
    world.replacement.abandon_coming()
    assert (world.ended, world.nodes.all) == ([], {1: world.old, 2: world.new})


def test_a_machine_that_is_to_be_a_new_node_is_abandoned_while_it_starts(world: World) -> None:
    """It may take minutes until it answers. Its connection is closed, so that what waits for it ends at once."""

    def start(script: str, timeout: float, files: object = ()) -> None:
        world.replacement.abandon_coming()
        raise Unreachable("the connection was closed")

    world.new.start = start  # type: ignore[method-assign]
    with pytest.raises(Unreachable):
        world.replacement.add(2, lambda: True)
    assert world.log == ["new for 2", "no other offer for 2", "new disconnected", "no offer for 2"]
    assert (world.ended, world.nodes.all) == (["new"], {1: world.old})
