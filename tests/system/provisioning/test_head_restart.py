"""A pool gets another head: which node it is, what the others receive, and which machines end.

The nodes are fakes, and no time passes: the clock of the code under test moves by a second at each pause.
"""

import threading
from collections.abc import Collection, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

import skyward_core as sky
from skyward_core.errors import BootstrapFailed, NodeLost, PoolClosed, SkywardError, Unreachable
from skyward_core.provisioning import bootstrap
from skyward_core.provisioning import replacement as head_restart
from skyward_core.provisioning.nodes import Nodes
from skyward_core.provisioning.replacement import BEGIN_SECONDS, HEIR_SECONDS, HeadRestart

SCRIPT = "make it a node"
SECONDS = 900.0
"""The time limit of the preparation."""


class Clock:
    """Moves by a second when the code under test pauses."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, _: float) -> None:
        self.now += 1


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of the code under test."""
    clock = Clock()
    monkeypatch.setattr(head_restart, "time", clock)
    monkeypatch.setattr(bootstrap, "time", clock)
    return clock


class RestartedNode:
    """A node that does what it is sent. It is the head if its settings name no scheduler."""

    def __init__(self, name: str, rank: int) -> None:
        self.rank = rank
        self.instance = SimpleNamespace(id=name, rank=rank)
        self.transport = self
        self.head: str | None = None
        self.done: list[Any] = []
        self.start_error: Exception | None = None
        self.settings_error: Exception | None = None
        self.is_slow = False
        """Whether its scheduler does not listen."""
        self.holds_start = threading.Event()
        """Cleared for a node that takes long to start."""
        self.holds_start.set()

    def start(self, script: str, timeout_seconds: float, files: object = ()) -> None:
        assert timeout_seconds == SECONDS
        self.holds_start.wait()
        self.done.append(script)
        if self.start_error is not None:
            raise self.start_error

    def send_settings(self, settings: Any) -> None:
        if self.settings_error is not None:
            raise self.settings_error
        self.done.append(settings)
        if settings[1] is None and not self.is_slow:
            self.head = f"tls://{self.instance.id}"

    def opened(self) -> None:
        self.done.append("opened")

    def follow(self) -> None:
        """Read nothing."""


class Pool:
    """The nodes of a pool, its selection of machines and its rental, as the restart of a head uses them."""

    def __init__(self, clock: Clock, nodes: int = 3, *, frees_machines: bool = True) -> None:
        self.all: dict[int, Any] = {rank: RestartedNode(f"i-{rank}", rank) for rank in range(nodes)}
        self.first = dict(self.all)
        self.settings_lock = threading.Lock()
        self.generation, self.scheduler = 0, "tls://i-0"
        self.forwarding = SimpleNamespace(is_on=False)
        self.rented: list[list[int]] = []
        self.ended: list[str] = []
        self.waited: list[float] = []
        self.clock = clock
        self.asked: list[float] = []
        """When the head was asked whether its processes live."""
        self.dead = set[int]()
        self.broken_starts: dict[int, Exception] = {}
        self.slow_starts = set[int]()
        self.pauses: list[tuple[float, str]] = []
        """For how long each pause may go on, and the text of the error after that time."""
        self.closes = False
        self.lost_machine = ""
        self.slow_head = ""
        """The machine whose scheduler does not listen."""
        spec = sky.PoolSpec.of(provider=sky.Local(), nodes=nodes, lease_seconds=60, provision_timeout=SECONDS)
        rental: Any = SimpleNamespace(
            provider=SimpleNamespace(is_local=False, terminate_confirms=frees_machines),
            end_in_thread=self._end,
            end=self._end,
            go_on_until=self._go_on_until,
        )
        selection: Any = SimpleNamespace(rent_again=self._rent_again)
        self.restarts = HeadRestart(spec, rental, selection, self)  # type: ignore[arg-type]

    def restart(self, heirs: Collection[str] = (), dead: Collection[str] = ()) -> Any:
        return self.restarts.restart(heirs, dead)

    def _end(self, node: RestartedNode) -> Any:
        self.ended.append(node.instance.id)
        return SimpleNamespace(over=SimpleNamespace(wait=self.waited.append))

    def _rent_again(self, ranks: Sequence[int], terminations: Any) -> list[Any]:
        assert {self.first[rank].instance.id for rank in terminations} == set(self.ended)
        self.rented.append(list(ranks))
        return [SimpleNamespace(id=f"new-{rank}", rank=rank) for rank in ranks]

    def _go_on_until(self, deadline: float, what: str) -> None:
        self.pauses.append((deadline - self.clock.now, what))
        # the new head begins in another thread: how often it is looked at depends on the machine
        self.clock.now += what != "the new head could not begin in time"
        if self.closes:
            raise PoolClosed("the pool is closing")

    def preparation_of(self, instance: Any, rank: int) -> RestartedNode:
        node = RestartedNode(instance.id, rank)
        node.start_error = self.broken_starts.get(rank)
        node.is_slow = instance.id == self.slow_head
        if rank in self.slow_starts:
            node.holds_start.clear()
        self.first[rank + 100] = node
        return node

    @property
    def lease(self) -> list[tuple[int, str]]:
        return [(rank, node.instance.id) for rank, node in sorted(self.all.items())]

    def script(self) -> str:
        return SCRIPT

    def settings(self, node: Any, rank: int, scheduler: str | None) -> Any:
        assert self.settings_lock.locked()
        assert self.all[rank] is node
        return rank, scheduler, self.generation

    def connect(self) -> None:
        """No port is forwarded."""

    def lives(self, ranks: Sequence[int]) -> dict[int, bool]:
        assert list(ranks) == [0]
        self.asked.append(self.clock.now)
        return {rank: rank not in self.dead for rank in ranks}

    def raise_if_lost(self, node: Any) -> None:
        if node.instance.id == self.lost_machine:
            raise BootstrapFailed("its machine is gone")

    def drop(self, rank: int, node: Any) -> bool:
        return Nodes.drop(self, rank, node)  # type: ignore[arg-type]


def test_the_node_of_the_lowest_rank_becomes_the_head(clock: Clock) -> None:
    """Its scheduler listens before the other nodes get its address. The lost head's machine ends, and so do dead nodes:
    their ranks are vacant.
    """
    pool = Pool(clock, 5)
    assert pool.restart(heirs={"i-2", "i-3"}, dead={"i-4"}) == [(0, "i-2"), (1, "i-1"), (3, "i-3")]
    assert (pool.scheduler, pool.generation) == ("tls://i-2", 1)
    assert pool.first[2].done == [(0, None, 1), "opened"]
    assert pool.first[1].done == [(1, "tls://i-2", 1), "opened"]
    assert pool.first[3].done == [(3, "tls://i-2", 1), "opened"]
    assert (pool.ended, pool.rented) == (["i-0", "i-4"], [])
    del pool.all[0]
    assert pool.restart(heirs={"i-3"})[0] == (0, "i-3")
    assert pool.first[3].done[-2:] == [(0, None, 2), "opened"], "each head has a number of its own"


@pytest.mark.parametrize("error", [Unreachable("cut"), OSError("cut")])
def test_a_node_that_does_not_receive_the_new_head_ends(clock: Clock, error: Exception) -> None:
    pool = Pool(clock, 4)
    pool.all[1].settings_error = error
    assert pool.restart(heirs={"i-2"}) == [(0, "i-2"), (3, "i-3")]
    assert pool.ended == ["i-0", "i-1"]
    assert pool.first[3].done == [(3, "tls://i-2", 1), "opened"]


@pytest.mark.parametrize(
    ("dead", "rented", "lease", "frees_machines"),
    [
        ((), [0], [(0, "new-0"), (1, "i-1"), (2, "i-2")], True),
        (("i-0",), [0], [(0, "new-0"), (1, "i-1"), (2, "i-2")], True),
        (("i-0", "i-1", "i-2"), [0, 1, 2], [(0, "new-0"), (1, "new-1"), (2, "new-2")], True),
        (("i-1", "i-2"), [1, 2], [(0, "new-1"), (2, "new-2")], False),
    ],
)
def test_without_an_heir_machines_are_rented_for_the_dead_nodes(
    clock: Clock, dead: tuple[str, ...], rented: list[int], lease: list[tuple[int, str]], frees_machines: bool
) -> None:
    """The first one becomes the head. If no node died, one machine is rented for the head that was lost.

    Their ends are awaited where the same machines are used again, as with hosts; a cloud rents others.
    """
    pool = Pool(clock, 3, frees_machines=frees_machines)
    assert pool.restart(dead=dead) == lease
    assert (pool.rented, pool.ended) == ([rented], sorted({"i-0", *dead}))
    assert len(pool.waited) == (len({"i-0", *dead}) if dead and frees_machines else 0)
    head, *others = [pool.first[rank + 100] for rank in rented]
    assert pool.scheduler == f"tls://{head.instance.id}"
    assert head.done == [SCRIPT, (0, None, 1), "opened"]
    for node in others:
        assert node.done == [SCRIPT, (node.rank, pool.scheduler, 1), "opened"]


def test_a_node_that_could_not_begin_ends_before_others_get_the_head(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """It gets no settings: a node without its script would take them, and never come. One may take BEGIN_SECONDS."""
    pool = Pool(clock, 4)
    pool.broken_starts, pool.slow_starts = {1: SkywardError("no space left")}, {3}
    assert pool.restart(dead={"i-0", "i-1", "i-2", "i-3"}) == [(0, "new-0"), (2, "new-2")]
    assert (pool.first[101].done, sorted(pool.ended[4:])) == ([SCRIPT], ["new-1", "new-3"])
    assert "node 1 could not be started again, and is replaced: no space left" in caplog.text
    assert "it takes too long" in caplog.text
    assert [what for _, what in pool.pauses].count("the nodes did not begin in time") == BEGIN_SECONDS
    pool.first[103].holds_start.set()
    headless = Pool(clock, 2)
    headless.broken_starts = {0: SkywardError("no space left")}
    with pytest.raises(SkywardError, match="no space left"):
        headless.restart(dead={"i-0", "i-1"})


@pytest.mark.parametrize(("fault", "error"), [("closes", PoolClosed), ("lost_machine", BootstrapFailed)])
@pytest.mark.parametrize("seconds", [HEIR_SECONDS, SECONDS])
def test_a_new_head_is_looked_at_until_its_scheduler_listens(
    clock: Clock, seconds: float, fault: str, error: type[Exception]
) -> None:
    """An heir has HEIR_SECONDS, a new machine the time limit of the pool. Meanwhile the pool may be closed, or the
    machine lost.
    """
    pool, is_heir = Pool(clock, 2), seconds == HEIR_SECONDS
    name = pool.slow_head = "i-1" if is_heir else "new-0"
    pool.all[1].is_slow = is_heir
    setattr(pool, fault, name)
    with pytest.raises(error):
        pool.restart(heirs={"i-1"} if is_heir else ())
    assert seconds - 30 < pool.pauses[-1][0] <= seconds


def test_an_heir_whose_processes_have_died_is_the_error(clock: Clock) -> None:
    """Its machine answers, and its scheduler would never listen."""
    pool = Pool(clock, 2)
    pool.all[1].is_slow = True
    pool.all[1].follow = lambda: pool.dead.add(0) if clock.now > 1007 else None
    with pytest.raises(NodeLost, match="the processes of the node that was to be the new head have died"):
        pool.restart(heirs={"i-1"})
    assert len(pool.asked) > 1
    assert all(later - earlier > 2 for earlier, later in pairwise(pool.asked))
