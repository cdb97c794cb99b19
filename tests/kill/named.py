"""Kill -9 at every boundary of a pool with a name: claim, attach, leave, last leave, warm, taking over, scaling.

`python -m tests.kill.named FOLDER URL EVERY [FIRST [END]]` prints a line of JSON for each point, with the ledger at this
URL; EVERY=3 takes every third boundary; FIRST and END choose scenarios by their numbers. Processes are forks of this
one. Each opens the name with the real ComputePool, session, attachment and ledger; the stand-ins are those of `driver`.
After each kill another process opens the name.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.kill import driver, worker
from tests.kill.boundaries import Boundaries, run_in_fork, signal_of
from tests.kill.console import RunningService
from tests.kill.provider import PromptRental

NAME = "nightly"
LEASE_SECONDS, WARM_SECONDS = 120.0, 600.0
ELASTIC = (1, 2)
CHILD_SECONDS = 60
SCALE_SECONDS = 30.0
OPEN_SECONDS = 30.0
"""How long the next process may take, in real time; in milliseconds unless it waits for another one."""


@dataclass(slots=True)
class Point:
    """What came of one kill. `left` machines were billed after it, and `uses` had not ended; `alive` are those that
    no lease ends.
    """

    scenario: str
    database: str
    boundary: int
    label: str
    left: int = 0
    uses: int = 0
    alive: int = 0
    rentals: int = 0
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list[str])


class Stage:
    """The service, the ledger and the processes of one scenario. This process must have one thread."""

    def __init__(self, service: RunningService, folder: Path, url: str) -> None:
        self.service = service
        self.url = url
        self.boundaries = Boundaries()
        self._folder = folder
        self._stayers: list[tuple[int, int]] = []

    def fork(self, work: Callable[[], object], kill_at: int = 0) -> int:
        """Run a function in a process that dies at a boundary; return the signal that ended it, or minus its status."""
        return signal_of(self._start(work, kill_at))

    def _start(self, work: Callable[[], object], kill_at: int = 0) -> int:
        assert threading.active_count() == 1, threading.enumerate()
        (self._folder / "crash").unlink(missing_ok=True)
        self.boundaries.arm(kill_at)
        if pid := os.fork():
            return pid
        with driver.no_reaper():
            run_in_fork(self.boundaries, self._folder, work, CHILD_SECONDS)

    def pool(self, keep_warm: float = 0.0, nodes: int | tuple[int, int] = 1) -> Any:
        from skyward_core.pool import ComputePool

        return ComputePool(
            name=NAME,
            provider=PromptRental(url=self.service.url),
            nodes=nodes,
            keep_warm=keep_warm,
            lease_seconds=LEASE_SECONDS,
            provision_timeout=600,
            display="quiet",
        )

    def stay(self, keep_warm: float = 0.0) -> None:
        """Open the name in another process, which stays until `leave`."""
        there, go = os.pipe(), os.pipe()

        def work() -> None:
            with self.pool(keep_warm):
                os.write(there[1], b"1")
                os.read(go[0], 1)

        pid = self._start(work)
        self._stayers.append((pid, go[1]))
        for end in (there[1], go[0]):
            os.close(end)
        is_there = os.read(there[0], 1) == b"1"  # b"" if it has ended
        os.close(there[0])
        assert is_there, self.crash()

    def leave(self) -> None:
        """Let the processes that stay leave. In a fork: ask them, and wait until they have gone."""
        for pid, go in self._stayers:
            os.write(go, b"1")
            while _runs(pid):
                time.sleep(0.002)

    def end(self) -> None:
        for pid, go in self._stayers:
            os.close(go)
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        self._stayers.clear()

    def ledger(self) -> Any:
        from skyward_core.ledger.ledger import Ledger

        return Ledger(self.url, clock=self.service.clock.utc)

    def clear(self) -> None:
        self.service.reset()
        with self.ledger() as ledger, ledger._database.write() as connection:
            for table in ("uses", "clients", "names", "leases", "calls", "attempts", "resources", "shares", "pools"):
                with suppress(Exception), connection.begin_nested():
                    connection.exec_driver_sql(f"DELETE FROM skyward_{table}")

    def open_uses(self) -> int:
        """Return how many uses have not ended: their bills are not final."""
        with self.ledger() as ledger, ledger._database.read() as connection:
            found = connection.exec_driver_sql("SELECT COUNT(*) FROM skyward_uses WHERE ended_microseconds IS NULL")
            return int(found.scalar_one())

    def crash(self) -> str:
        path = self._folder / "crash"
        return path.read_text()[-1500:] if path.exists() else ""

    def passed(self) -> list[str]:
        return [label for _, label in json.loads((self._folder / "passed").read_text())]

    def let_leases_end(self) -> set[str]:
        """End the machines whose lease is over by the present clock, as their guards do; return those that are left."""
        from skyward_core.worker.node_clocks import read_lease, uptime

        now = uptime() + self.service.clock.offset_seconds
        for machine in self.service.look().machines:
            until = read_lease(Path(machine["directory"])) if Path(machine["directory"]).is_dir() else None
            age = self.service.clock.time() - machine["created_at"]
            if machine["is_billed"] and (age > LEASE_SECONDS if until is None else until < now):
                self.service.shut_down(machine["id"])
        return self.service.look().billed()


def _runs(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
    return False


def _use(stage: Stage, keep_warm: float = 0.0) -> None:
    with stage.pool(keep_warm):
        pass


def _step(stage: Stage) -> None:
    """One step's use of the pool, with its row in the ledger."""
    from skyward_core.pool.pool_use import PoolUse
    from skyward_core.work import Work

    with PoolUse(stage.pool(), Work(system="test", run="1", task="fit")):
        pass


def _use_last(stage: Stage) -> None:
    with stage.pool():
        stage.leave()


def _grow(stage: Stage) -> None:
    with stage.pool(nodes=ELASTIC) as pool:
        assert pool.scale(2, wait_seconds=SCALE_SECONDS) == 2


def _grow_and_shrink(stage: Stage) -> None:
    with stage.pool(nodes=ELASTIC) as pool:
        assert pool.scale(2, wait_seconds=SCALE_SECONDS) == 2
        assert pool.scale(1, wait_seconds=SCALE_SECONDS) == 1


def _late(stage: Stage) -> None:
    _check(stage, stage.fork(lambda: _use(stage, WARM_SECONDS)))
    stage.service.clock.advance(WARM_SECONDS + LEASE_SECONDS)
    stage.let_leases_end()


def _dead_owner(stage: Stage) -> None:
    stage.stay(WARM_SECONDS)
    stage.end()


def _dead_opener(stage: Stage) -> None:
    _check(stage, stage.fork(lambda: _use(stage)))
    half = stage.passed().index("http create after") + 1
    stage.clear()
    assert stage.fork(lambda: _use(stage), half) == signal.SIGKILL


def _check(stage: Stage, died: int) -> None:
    assert died == 0, stage.crash()


@dataclass(frozen=True, slots=True)
class Scenario:
    """What was before, and what the process does that is killed."""

    name: str
    before: Callable[[Stage], object]
    victim: Callable[[Stage], object]
    keep_warm: float = 0.0
    nodes: int | tuple[int, int] = 1
    """What the next process asks for: the nodes that the victim has asked for."""


SCENARIOS: Sequence[Scenario] = (
    Scenario("it rents, and leaves as the last", lambda stage: None, _use),
    Scenario(
        "it rents, and leaves a warm pool", lambda stage: None, lambda stage: _use(stage, WARM_SECONDS), WARM_SECONDS
    ),
    Scenario("it joins and leaves, another stays", lambda stage: stage.stay(), _use),
    Scenario("it joins, and leaves as the last", lambda stage: stage.stay(), _use_last),
    Scenario("it joins for a step, which ends", lambda stage: stage.stay(), _step),
    Scenario(
        "it finds a warm pool, and leaves it warm",
        lambda stage: _check(stage, stage.fork(lambda: _use(stage, WARM_SECONDS))),
        lambda stage: _use(stage, WARM_SECONDS),
        WARM_SECONDS,
    ),
    Scenario("the warm time is over: it rents anew", _late, lambda stage: _use(stage, WARM_SECONDS), WARM_SECONDS),
    Scenario("the opener was killed: it takes the name over", _dead_opener, _use),
    Scenario(
        "the owner of an open pool was killed: it joins and leaves",
        _dead_owner,
        lambda stage: _use(stage, WARM_SECONDS),
        WARM_SECONDS,
    ),
    Scenario("it grows, and leaves as the last", lambda stage: None, _grow, nodes=ELASTIC),
    Scenario("it grows and shrinks, and leaves as the last", lambda stage: None, _grow_and_shrink, nodes=ELASTIC),
)


def points(stage: Stage, scenario: Scenario, every: int) -> Iterator[Point]:
    """Yield the points of a scenario: first without a kill, to count the boundaries."""
    _prepare(stage, scenario)
    died = stage.fork(lambda: scenario.victim(stage))
    labels = stage.passed() if died == 0 else []
    stage.end()
    if died:
        yield Point(scenario.name, _database(stage), 0, "", problems=[f"without a kill: {died}: {stage.crash()}"])
    offset = SCENARIOS.index(scenario) % every
    for boundary in range(1 + offset, len(labels) + 1, every):
        _prepare(stage, scenario)
        died = stage.fork(lambda: scenario.victim(stage), boundary)
        if died == signal.SIGKILL:
            yield _judged(stage, scenario, Point(scenario.name, _database(stage), boundary, labels[boundary - 1]))
        elif died:
            yield Point(scenario.name, _database(stage), boundary, "", problems=[f"{died}: {stage.crash()}"])
        stage.end()


def _database(stage: Stage) -> str:
    return stage.url.partition(":")[0].partition("+")[0]


def _prepare(stage: Stage, scenario: Scenario) -> None:
    stage.clear()
    scenario.before(stage)


def _judged(stage: Stage, scenario: Scenario, point: Point) -> Point:
    """Let the next process open the name and leave, then let all leases end; write down what is wrong."""
    point.left, point.uses = len(stage.service.look().billed()), stage.open_uses()
    began = time.clock_gettime(time.CLOCK_MONOTONIC)
    died = stage.fork(lambda: _open_next(stage, scenario))
    point.seconds = time.clock_gettime(time.CLOCK_MONOTONIC) - began
    if died:
        point.problems.append(f"the next process: {died}: {stage.crash()}")
    elif point.seconds > OPEN_SECONDS:
        point.problems.append(f"the next process needed {point.seconds:.1f} s")
    else:
        point.rentals = int((stage._folder / "rentals").read_text())
        if point.rentals != 1:
            point.problems.append(f"{point.rentals} pools had machines that are not being ended")
        if open_uses := stage.open_uses():
            point.problems.append(f"{open_uses} uses of dead processes have not ended")
    stage.end()
    stage.service.clock.advance(max(LEASE_SECONDS, scenario.keep_warm) + 1)
    point.alive = len(stage.let_leases_end())
    if point.alive:
        point.problems.append("machines live after all leases")
    return point


def _open_next(stage: Stage, scenario: Scenario) -> None:
    with stage.pool(scenario.keep_warm, scenario.nodes) as pool:
        machines = {one.id: one.pool_id for one in PromptRental(url=stage.service.url).instances()}
        with stage.ledger() as ledger:
            ended = {
                entry.id
                for entry in ledger.pools(include_ended=True)
                if entry.condemned_at is not None or entry.ended_at is not None
            }
        pools = set(machines.values())
        assert pool.id in pools, f"its pool {pool.id} has no machine, of {sorted(pools)}; ended: {sorted(ended)}"
        (stage._folder / "rentals").write_text(str(len(pools - ended)))


def main(folder: Path, url: str, every: int, first: int = 0, end: int | None = None) -> None:
    os.environ |= {f"XDG_{kind}_HOME": str(folder / kind.lower()) for kind in ("CACHE", "CONFIG", "STATE")}
    os.environ["SKYWARD_LEDGER"] = url
    with RunningService(folder / "service") as service:
        put_back = service.clock.take_over()
        try:
            worker._prepare(service)
            __import__("skyward_core.session.attached")
            __import__("skyward_core.engine.connection")  # with Dask, for all forks
            stage = Stage(service, folder, url)
            for scenario in SCENARIOS[first:end]:
                for point in points(stage, scenario, every):
                    print(json.dumps({name: getattr(point, name) for name in Point.__slots__}), flush=True)
        finally:
            put_back()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:]))
