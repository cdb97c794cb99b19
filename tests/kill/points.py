"""One point: a driver is killed at a boundary, one safeguard recovers, and what is alive is judged."""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from decimal import Decimal
from enum import StrEnum
from pathlib import Path
from typing import Any

from tests.kill import driver, guards
from tests.kill.boundaries import Boundaries, Phase, run_in_fork, signal_of
from tests.kill.console import RunningService, Seen
from tests.kill.driver import LEASE_SECONDS, Ends, Scenario
from tests.kill.provider import HttpRental, HttpRentalHere

CHILD_SECONDS = 90
NEVER = 10**6
MOST_IN_TURN = 9
ROUNDS = 10
"""Sweeps, a minute apart, after which all must be correct: longer than any fault lasts."""
ROUND_SECONDS = 61.0
TOLERANCE_SECONDS = 2.0
"""Allowed difference between the service's clock and the ledger's, which are read at different moments on a busy
machine.
"""
AGE, DAY_SECONDS = timedelta(hours=2), 86400.0


class Killed(StrEnum):
    """Which processes are killed."""

    NONE = "none"
    DRIVER = "driver"
    SWEEP = "driver and sweep"
    REAPER = "driver and reaper"


class Safeguard(StrEnum):
    """Which safeguard ends the spending after that."""

    CLOSE = "close"
    SWEEP = "sweep"
    SWEEPS = "two sweeps at once"
    REAPER = "reaper"
    NODE = "node"


@dataclass(frozen=True, slots=True)
class Point:
    """The result of one point: machines of the pool that were billed after the kill, and that live after the safeguard
    and should not.
    """

    scenario: str
    boundary: int
    then: int
    killed: Killed
    safeguard: Safeguard
    phase: Phase
    alive_before: int
    alive: int
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Others:
    """Pools and machines of other users, which must not change: the service's records of them, and their ledger."""

    machines: Sequence[dict[str, Any]]
    ledger: Path
    pools: frozenset[str]
    ids: frozenset[str] = field(default_factory=frozenset[str])


@dataclass(slots=True)
class Round:
    """A worker's tools. The processes to kill are forks of this one, which must have one thread."""

    service: RunningService
    folder: Path
    boundaries: Boundaries = field(default_factory=Boundaries)
    others: dict[str, Others] = field(default_factory=dict[str, Others])

    def warm_up(self) -> None:
        """Do everything once in this process, so that its forks find all modules loaded."""
        for scenario in (
            Scenario(lost=(1,), is_head_lost=True, beats=1, max_cost=5.0, budget=driver.ACCOUNT),
            Scenario(ends=Ends.DETACHED),
        ):
            self.boundaries.arm(0)
            provider = self._begin(scenario)
            self._drive(scenario)
            assert not (problems := self._recover(provider, Safeguard.SWEEP) + self._judge(provider)[1]), problems
        while threading.active_count() > 1:
            time.sleep(0.001)
        gc.collect()
        gc.freeze()  # a garbage collection in a fork would copy every page that it reads

    def _kill(
        self, scenario: Scenario, boundary: int, safeguard: Safeguard, killed: Killed = Killed.DRIVER, **how: Any
    ) -> tuple[HttpRental, Point | None, bool]:
        """Kill the driver at a boundary. Return the provider, the point as far as it is known, and whether it died.

        There is no point if the boundary was not reached; if the process failed by itself, the point has the problem.
        """
        provider = self._begin(scenario)
        died = self._fork(lambda: self._drive(scenario, **how), boundary)
        if died == 0:
            return provider, None, False
        point = Point(str(scenario), boundary, 0, killed, safeguard, self.boundaries.phase, 0, 0)
        if died != signal.SIGKILL:
            return provider, replace(point, problems=(self._crash(died),)), False
        return provider, replace(point, alive_before=self._alive_of_victims(provider)), True

    def _judged(self, point: Point, provider: HttpRental, problems: list[str], **changes: Any) -> Point:
        alive, more = self._judge(provider)
        return replace(point, **{"alive": alive, "problems": tuple(problems + more), **changes})

    def points(self, scenario: Scenario) -> Iterator[Point]:
        """Yield the points of a scenario; some also with other safeguards, or with their process killed in turn."""
        yield self.unharmed(scenario)
        for boundary in self._boundaries():
            if (point := self.swept(scenario, boundary)) is None:
                break  # this run had fewer boundaries, because of threads
            yield point
            match (boundary + scenario.number) % 12:
                case 0:
                    yield from self._killed_in_turn(scenario, boundary, Killed.SWEEP)
                case 3:
                    yield from _some(self.swept(scenario, boundary, Safeguard.SWEEPS))
                case 6:
                    yield from self._killed_in_turn(scenario, boundary, Killed.REAPER)
                case 1 | 4 | 9 if scenario.kind != HttpRentalHere.name:
                    yield from _some(self.left_to_nodes(scenario, boundary))
                case _:
                    pass

    def _boundaries(self) -> list[int]:
        alike: dict[tuple[str, str], list[int]] = {}
        for boundary, passed in enumerate(json.loads((self.folder / "passed").read_text()), 1):
            alike.setdefault(tuple(passed), []).append(boundary)
        return sorted({boundary for its in alike.values() for boundary in (its[0], its[len(its) // 2], its[-1])})

    def _killed_in_turn(self, scenario: Scenario, boundary: int, killed: Killed) -> Iterator[Point]:
        """Kill the driver, then the recovering process: at its first, its last, and some other boundaries."""
        provider, point, is_dead = self._kill(scenario, boundary, Safeguard.SWEEP, killed)
        if not is_dead or point is None:
            yield from _some(point)
            return
        work = self._sweep if killed is Killed.SWEEP else self._end_pool
        self._save()
        self._fork(lambda: work(provider), 0)
        count, third = self.boundaries.count, MOST_IN_TURN // 3
        for then in sorted(
            {
                *range(1, min(count, third) + 1),
                *range(max(1, count - third + 1), count + 1),
                *range(1, count + 1, count // third + 1),
            }
        ):
            self._restore()
            died = self._fork(lambda: work(provider), then)
            if died == signal.SIGKILL:
                yield self._judged(point, provider, self._recover(provider, Safeguard.SWEEP), then=then)
            elif died:
                yield replace(point, problems=(self._crash(died),))

    def _save(self) -> None:
        """Save the state that the killed driver has left, including unfinished transactions of the ledger."""
        self.service.save()
        for path in self._ledger_files():
            shutil.copy(path, f"{path}.saved")

    def _restore(self) -> None:
        self.service.restore()
        for path in self.folder.glob(f"{self._path.name}*"):
            if path.suffix != ".saved":
                path.unlink()
        for path in self.folder.glob(f"{self._path.name}*.saved"):
            shutil.copy(path, path.with_suffix(""))

    def _ledger_files(self) -> list[Path]:
        return [path for suffix in ("", "-wal") if (path := Path(f"{self._path}{suffix}")).exists()]

    def unharmed(self, scenario: Scenario) -> Point:
        """Kill no process: closing alone must leave nothing, or report what it leaves; then a sweep finds it."""
        provider = self._begin(scenario)
        died = self._fork(lambda: self._drive(scenario), 0)
        problems = [] if died == 0 else [self._crash(died)]
        before, phase = self._alive_of_victims(provider), self.boundaries.phase
        point = Point(str(scenario), 0, 0, Killed.NONE, Safeguard.CLOSE, phase, before, 0)
        return self._judged(point, provider, problems + self._recover(provider, Safeguard.SWEEP))

    def swept(self, scenario: Scenario, boundary: int, safeguard: Safeguard = Safeguard.SWEEP) -> Point | None:
        """Kill the driver; then sweep. None if the boundary was not reached."""
        provider, point, is_dead = self._kill(scenario, boundary, safeguard)
        if not is_dead or point is None:
            return point
        return self._judged(point, provider, self._recover(provider, safeguard))

    def left_to_nodes(self, scenario: Scenario, boundary: int) -> Point | None:
        """Kill the driver; only the guards on the machines recover, on a clock that is advanced."""
        provider, point, is_dead = self._kill(scenario, boundary, Safeguard.NODE)
        if not is_dead or point is None:
            return point
        others = self._others(provider).ids
        machines = [its for its in self.service.look().machines if its["is_billed"] and its["id"] not in others]
        problems = guards.left_alone(self.service, machines, LEASE_SECONDS)
        alive = self._alive_of_victims(provider)
        return self._judged(point, provider, problems + self._recover(provider, Safeguard.SWEEP), alive=alive)

    def faulty(self, scenario: Scenario) -> Iterator[Point]:
        """Yield a point where the pool closes, and one where the driver is killed just before that."""
        yield self.unharmed(scenario)
        yield from _some(self.swept(replace(scenario, ends=Ends.KILLED), NEVER))

    def reaped_points(self, scenario: Scenario, wanted: int) -> Iterator[Point]:
        """Yield this many points of a scenario, evenly over its boundaries, at which the reaper recovers."""
        yield self.unharmed(scenario)
        count = self.boundaries.count
        for number in range(wanted):
            yield from _some(self.reaped(scenario, 1 + number * (count - 1) // max(1, wanted - 1)))

    def reaped(self, scenario: Scenario, boundary: int) -> Point | None:
        """Kill the driver; its reaper, a real one, recovers in real time."""
        provider, point, is_dead = self._kill(scenario, boundary, Safeguard.REAPER, has_reaper=True)
        problems = self._await_orphans()
        if not is_dead or point is None:
            return point
        if live := self._live(provider):
            if (left := self._alive_of_victims(provider)) != len(live):
                problems.append(f"the reaper has touched a detached pool: {left} of {len(live)} are left")
            self._sweep(provider)
            return replace(point, problems=tuple(problems))
        return self._judged(point, provider, problems)

    def _crash(self, died: int) -> str:
        path = self.folder / "crash"
        return f"the process ended with {died}: {path.read_text() if path.exists() else ''}"

    def _fork(self, work: Callable[[], object], kill_at: int) -> int:
        """Run a function in a fork that dies at a boundary; return 0, the signal that ended it, or minus its exit
        status.
        """
        assert threading.active_count() == 1, threading.enumerate()
        (self.folder / "crash").unlink(missing_ok=True)
        self.boundaries.arm(kill_at)
        pid = os.fork()
        if pid == 0:
            run_in_fork(self.boundaries, self.folder, work, CHILD_SECONDS)
        return signal_of(pid)

    def _drive(self, scenario: Scenario, *, has_reaper: bool = False) -> None:
        if has_reaper:
            driver.drive(scenario, self.service.url, self.boundaries, self.service.clock)
        else:
            with driver.no_reaper():
                driver.drive(scenario, self.service.url, self.boundaries, self.service.clock)

    def _sweep(self, provider: HttpRental, where: str = "") -> list[Any]:
        from skyward_core.cleanup.sweep import sweep

        with self._ledger(where) as ledger:
            return list(sweep(ledger, [provider], is_dry_run=False, clock=self.service.clock.utc).failures)

    def _end_pool(self, provider: HttpRental) -> None:
        """Do what the reaper does once its driver has ended."""
        from skyward_core.cleanup.release import end_pool
        from skyward_core.errors import SkywardError

        with self._ledger() as ledger:
            for entry in ledger.pools():
                if entry.id not in self._others(provider).pools and not entry.lives_by_lease:
                    try:
                        end_pool(ledger, provider, entry.id, why="its driver is gone", clock=self.service.clock.utc)
                    except SkywardError:
                        return  # the reaper would try again; here the sweep does

    def _others(self, provider: HttpRental) -> Others:
        return self.others[repr(provider.to_json())]

    def _begin(self, scenario: Scenario) -> HttpRental:
        """Prepare a ledger and a service with the pools of other users; return the provider."""
        provider = scenario.provider(self.service.url)
        key = repr(provider.to_json())
        if key not in self.others:
            self.service.reset()
            self.others[key] = self._make_others(provider, self.folder / f"others-{len(self.others)}.db")
        others = self._others(provider)
        self.service.reset(list(others.machines))
        for path in self.folder.glob(f"{self._path.name}*"):
            path.unlink()
        shutil.copy(others.ledger, self._path)
        return provider

    def _make_others(self, provider: HttpRental, path: Path) -> Others:
        """Rent machines for a pool of this living process, for one of another host with a long lease, and for one that
        is not in the ledger.
        """
        from skyward_core.ledger.ledger import Ledger
        from skyward_core.ledger.rows import Account, Period
        from skyward_core.machines.owner import Owner
        from tests.cleanup.pools import Time, World

        elsewhere = Owner("another", "elsewhere", "another-boot", "1", 4242, "17")
        clock = self.service.clock.utc
        with Ledger(f"sqlite:///{path}", clock=clock) as ledger:
            ledger.set_account(Account(driver.ACCOUNT, Decimal(1000), Period.RUN))
            hands = Time()
            hands.now = clock() - AGE
            world = World(ledger, provider, hands)
            for pool_id, owner in (("sky-mine", Owner.here()), ("sky-theirs", elsewhere)):
                world.rent(world.pool(pool_id, owner, lease_seconds=DAY_SECONDS), 2, 0, owner)
            world.launch("sky-strange", 2, 0, elsewhere)
        seen = self.service.look()
        pools = frozenset({"sky-mine", "sky-theirs", "sky-strange"})
        return Others(seen.machines, path, pools, frozenset(seen.billed()))

    @property
    def _path(self) -> Path:
        return self.folder / "ledger.db"

    def _ledger(self, where: str = "") -> Any:
        """The ledger; `where` spells its path in another way, so that it gets its own engine."""
        from skyward_core.ledger.ledger import Ledger

        return Ledger(f"sqlite:///{self.folder}/{where}{self._path.name}", clock=self.service.clock.utc)

    def _alive_of_victims(self, provider: HttpRental) -> int:
        return len(self.service.look().billed() - self._others(provider).ids)

    def _recover(self, provider: HttpRental, safeguard: Safeguard) -> list[str]:
        problems: list[str] = []
        live = self._live(provider)
        if live:
            problems += self._sweeps(provider, safeguard)
            if (left := self.service.look().billed() - self._others(provider).ids) != live:
                problems.append(f"machines of a live, detached pool were touched: {sorted(live ^ left)}")
            self.service.clock.advance(driver.DETACHED_SECONDS + 1)
        for _ in range(ROUNDS):
            problems += self._sweeps(provider, safeguard)
            if self._is_clean(provider):
                break
            self.service.clock.advance(ROUND_SECONDS)
        else:
            problems.append(f"after {ROUNDS} sweeps there is still something to do")
        return problems + self._sweeps_idly(provider)

    def _live(self, provider: HttpRental) -> set[str]:
        with self._ledger() as ledger:
            entries = [
                entry
                for entry in ledger.pools()
                if entry.id not in self._others(provider).pools and entry.lives_by_lease
            ]
            if not entries:
                return set()
            assert entries[0].lease_expires_at > self.service.clock.utc()
            return self.service.look().billed(entries[0].id)

    def _sweeps(self, provider: HttpRental, safeguard: Safeguard) -> list[str]:
        """Run one sweep, or two at once. Errors of a service with faults are expected."""
        crashes: list[str] = []

        def once(where: str = "") -> None:
            try:
                self._sweep(provider, where)
            except BaseException:
                crashes.append(traceback.format_exc())

        other = threading.Thread(target=once, args=("./",))
        if safeguard is Safeguard.SWEEPS:
            other.start()
        once()
        if safeguard is Safeguard.SWEEPS:
            other.join()
        return crashes

    def _is_clean(self, provider: HttpRental) -> bool:
        """Return whether the ledger has no open entry of the killed pool. Living machines are checked afterwards."""
        others = self._others(provider).pools
        with self._ledger() as ledger:
            return all(intent.pool_id in others for intent in ledger.open_intents()) and all(
                entry.id in others for entry in ledger.pools()
            )

    def _sweeps_idly(self, provider: HttpRental) -> list[str]:
        """Another sweep finds nothing to do, and requests no termination."""
        from skyward_core.cleanup.sweep import sweep

        self.service.break_down()
        asked = self.service.look().count("terminate")
        with self._ledger() as ledger:
            report = sweep(ledger, [provider], is_dry_run=False, clock=self.service.clock.utc)
        busy = [finding for finding in report.findings if finding.action not in ("leave",)]
        problems = [f"another sweep still finds {finding}" for finding in busy] + [
            f"another sweep fails: {failure}" for failure in report.failures
        ]
        if self.service.look().count("terminate") != asked:
            problems.append("another sweep has terminated something")
        return problems

    def _await_orphans(self) -> list[str]:
        """Wait for the reaper, which is this process's child now (`worker` adopts orphans)."""
        deadline = time.monotonic() + CHILD_SECONDS
        while orphans := _children() - {self.service.pid}:
            if time.monotonic() > deadline:
                return ["the reaper is still there"]
            for pid in orphans:
                os.waitpid(pid, os.WNOHANG)
            time.sleep(0.01)
        return []

    def _judge(self, provider: HttpRental) -> tuple[int, list[str]]:
        """Compare living machines with those that may live, and the ledger with the service; return how many machines
        were left, and the problems.
        """
        others = self._others(provider)
        seen = self.service.look()
        problems: list[str] = []
        alive = seen.billed()
        if left := alive - others.ids:
            problems.append(f"left running: {sorted(left)}")
        if lost := others.ids - alive:
            problems.append(f"machines of live pools were ended: {sorted(lost)}")
        if touched := others.ids & seen.touched():
            problems.append(f"the end of machines of live pools was asked for: {sorted(touched)}")
        with self._ledger() as ledger:
            problems += _audit(ledger, seen, others.pools)
        return len(left), problems


def _audit(ledger: Any, seen: Seen, others: frozenset[str]) -> Iterator[str]:
    """Return the problems of the ledger, compared with what the service has rented and for how long."""
    from skyward_core.ledger.rows import CostBy

    for intent in ledger.open_intents():
        if intent.pool_id not in others:
            yield f"open intent {intent}"
    for entry in ledger.pools(include_ended=True):
        if entry.id in others:
            if entry.condemned_at is not None or entry.ended_at is not None:
                yield f"the live pool {entry.id} was condemned or ended"
            continue
        if entry.ended_at is None:
            yield f"pool {entry.id} has not ended"
        if ledger.open_reservations(pool_id=entry.id):
            yield f"pool {entry.id} has open reservations"
        intents = [intent for intent in ledger.intents(pool_id=entry.id) if intent.cloud_id is not None]
        by_id = {intent.cloud_id: intent for intent in reversed(intents)}
        for machine in seen.of(entry.id):
            yield from _audit_machine(machine, by_id.get(machine["id"]))
        cost = sum((intent.price.cost(sum(intent.seconds.values())) for intent in intents), Decimal(0))
        rows = sum((row.cost_usd for row in ledger.cost_rows(CostBy.BUCKET, pool_id=entry.id)), Decimal(0))
        if cost != rows:
            yield f"the machines cost {cost} USD, the bill is over {rows}"


def _audit_machine(machine: dict[str, Any], intent: Any) -> Iterator[str]:
    """Return the problems of the ledger's entry of one machine."""
    if intent is None:
        # it ended itself before any client listed it, so no process can know of it or of its cost
        if machine["ended_by"] != "shutdown":
            yield f"the ledger does not know {machine['id']}"
        return
    if intent.gone_at is None or machine["ended_at"] is None:
        return  # reported already
    if intent.intended_at.timestamp() > machine["created_at"] + TOLERANCE_SECONDS:
        yield f"{machine['id']} was there before its intent"
    if intent.gone_at.timestamp() < machine["ended_at"] - TOLERANCE_SECONDS:
        yield f"{machine['id']} lived on after it was said to be gone ({intent.evidence})"
    life = (intent.gone_at - intent.intended_at).total_seconds()
    recorded = sum(intent.seconds.values())
    if abs(life - recorded) > TOLERANCE_SECONDS:
        yield f"{machine['id']} lived for {life:.3f} s, its buckets have {recorded:.3f}: {dict(intent.seconds)}"


def _children() -> set[int]:
    me = os.getpid()
    return set(map(int, Path(f"/proc/{me}/task/{me}/children").read_text().split()))


def _some(point: Point | None) -> Iterator[Point]:
    if point is not None:
        yield point
