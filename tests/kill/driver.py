"""The process that is killed: it opens a pool on the rental service, loses and replaces nodes, and ends the pool.

Everything that spends money is real. Stand-ins replace the nodes, their Dask cluster, and the reaper, unless that is
tested.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import signal
import sys
import time
import types
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import httpx

from tests.kill.boundaries import Boundaries, Phase
from tests.kill.clock import SharedClock
from tests.kill.provider import HttpRental, HttpRentalHere, PromptRental

LEASE_SECONDS, DETACHED_SECONDS = 120.0, 300.0
BEAT_SECONDS = 30.0
ACCOUNT = "team"


class Ends(StrEnum):
    """How the driver leaves its pool."""

    CLOSED = "closed"
    RAISED = "raised"
    DETACHED = "detached"
    TERMINATED = "terminate_now"
    KILLED = "killed"


@dataclass(frozen=True, slots=True)
class Scenario:
    """What a driver does until it is killed."""

    number: int = 0
    nodes: int = 2
    kind: str = HttpRental.name
    is_spot: bool = False
    faults: Mapping[str, Any] = field(default_factory=dict[str, Any])
    late_faults: Mapping[str, Any] = field(default_factory=dict[str, Any])
    beats: int = 0
    lost: tuple[int, ...] = ()
    is_loss_silent: bool = False
    """The lost machines still exist, and are billed."""
    is_head_lost: bool = False
    ends: Ends = Ends.CLOSED
    max_cost: float | None = None
    budget: str | None = None

    def __str__(self) -> str:
        settings = {"nodes": self.nodes, "kind": self.kind, "ends": str(self.ends)}
        settings |= {
            name: value
            for name in ("is_spot", "faults", "late_faults", "beats", "lost", "is_head_lost", "max_cost", "budget")
            if (value := getattr(self, name))
        }
        return f"scenario {self.number}: {', '.join(f'{name}={value}' for name, value in settings.items())}"

    def provider(self, url: str) -> HttpRental:
        hangs = any(name.startswith("hangs") for name in (*self.faults, *self.late_faults))
        return KINDS[self.kind](url=url, timeout_seconds=0.2 if hangs else 10.0)


KINDS: Mapping[str, type[HttpRental]] = {kind.name: kind for kind in (HttpRental, HttpRentalHere, PromptRental)}

EARLY: tuple[dict[str, Any], ...] = (
    *({} for _ in range(10)),
    {"lose_create_answers": 1},
    {"create_lag_seconds": 60.0},
    {"create_lag_seconds": 5.0},
    {"lose_create_answers": 1, "create_lag_seconds": 45.0},
    {"short_by": 1},
    {"verb": "create", "errors": 1},
    {"verb": "create", "throttles": 1},
    {"verb": "create", "hangs_after": 1},
    {"verb": "offers", "errors": 1},
)
LATE: tuple[dict[str, Any], ...] = (
    {},
    {},
    {"ignore_terminations": 1},
    {"ignore_terminations": 3},
    {"stop_instead": 2},
    {"verb": "terminate", "errors": 2},
    {"verb": "list", "errors": 2},
    {"error_seconds": 20.0},
    {"error_seconds": 300.0},
    {"throttles": 3},
    {"hide_listings": 1},
    {"verb": "terminate", "hangs": 1},
    {"verb": "terminate", "hangs_after": 1},
    {"lose_create_answers": 1},
    {"create_lag_seconds": 30.0},
    {"short_by": 1},
)


def scenarios(seed: int) -> Iterator[Scenario]:
    """Yield scenarios without end, the same for the same seed."""
    chance = random.Random(seed)
    number = 0
    while True:
        number += 1
        nodes = chance.randint(1, 4)
        faults, late_faults = chance.choice(EARLY), chance.choice(LATE)
        needs_lag = bool(
            faults.get("create_lag_seconds")
            or late_faults.get("create_lag_seconds")
            or late_faults.get("hide_listings")
        )
        kinds = [HttpRental.name, HttpRentalHere.name] if needs_lag else list(KINDS)
        yield Scenario(
            number=number,
            nodes=nodes,
            kind=chance.choice(kinds),
            is_spot=chance.random() < 0.5,
            faults=faults,
            late_faults=late_faults,
            beats=chance.randint(0, 2),
            lost=tuple(chance.sample(range(1, nodes), k=min(nodes - 1, chance.choice((0, 0, 1, 2))))),
            is_loss_silent=chance.random() < 0.5,
            is_head_lost=chance.random() < 0.2,
            ends=chance.choice((Ends.CLOSED, Ends.CLOSED, Ends.RAISED, Ends.DETACHED, Ends.TERMINATED)),
            max_cost=chance.choice((None, None, 5.0)),
            budget=chance.choice((None, ACCOUNT)),
        )


REAPED = (
    Scenario(number=1, nodes=2, kind=PromptRental.name, lost=(1,), is_loss_silent=True, budget=ACCOUNT),
    Scenario(
        number=2, nodes=3, kind=PromptRental.name, faults={"lose_create_answers": 1}, is_spot=True, ends=Ends.RAISED
    ),
    Scenario(number=3, nodes=4, kind=PromptRental.name, late_faults={"ignore_terminations": 3}, max_cost=5.0),
    Scenario(
        number=4, nodes=1, kind=PromptRental.name, late_faults={"verb": "terminate", "errors": 1}, ends=Ends.TERMINATED
    ),
    Scenario(number=5, nodes=2, kind=PromptRental.name, late_faults={"stop_instead": 2}, is_head_lost=True),
    Scenario(number=6, nodes=2, kind=PromptRental.name, ends=Ends.DETACHED),
)
"""For a real reaper, which uses real time: no scenario that waits for minutes."""


def faulty() -> Iterator[Scenario]:
    """Yield one scenario for each fault alone, from the beginning or after the pool is open, and one for each
    combination that only does harm together.
    """
    early, late = [
        [dict(its) for its in {tuple(sorted(faults.items())) for faults in menu if faults}] for menu in (EARLY, LATE)
    ]
    for faults in sorted(early, key=str):
        yield Scenario(faults=faults, beats=1)
    for late_faults in YOUNG:
        yield Scenario(faults={"create_lag_seconds": 45.0}, late_faults=late_faults)
    for faults in sorted([*late, *TOGETHER], key=str):
        yield Scenario(late_faults=faults, beats=1, lost=(1,), is_loss_silent=True)


YOUNG: tuple[dict[str, Any], ...] = (
    {"verb": "terminate", "errors": 1},
    {"ignore_terminations": 4},
    {"stop_instead": 2},
)
"""Terminations fail while no listing shows the machines yet. A machine that is missing in the listing is then not gone.
"""
TOGETHER: tuple[dict[str, Any], ...] = (
    {"hide_listings": 3, "ignore_terminations": 9},
    {"hide_listings": 2, "verb": "terminate", "errors": 2},
    {"hide_listings": 1, "stop_instead": 3},
)
"""A termination does nothing, or fails, and a listing is empty. A client that sees this once must conclude that the
machines are gone. A later sweep sees them.
"""


def drive(scenario: Scenario, url: str, boundaries: Boundaries, clock: SharedClock) -> None:
    from skyward_core.errors import SkywardError
    from skyward_core.pool import ComputePool
    from skyward_core.spec import PoolSpec

    operator = Operator(url)
    operator.break_down(**scenario.faults)
    spec = PoolSpec.of(
        nodes=scenario.nodes,
        spot="always" if scenario.is_spot else "never",
        lease_seconds=LEASE_SECONDS,
        provision_timeout=600,
        display="quiet",
        max_cost=scenario.max_cost,
        budget=scenario.budget,
    )
    with suppress(SkywardError, httpx.HTTPError, _Raised):
        pool = ComputePool.from_spec(spec, credentials=scenario.provider(url))
        pool.open()
        boundaries.enter(Phase.RUNNING)
        try:
            _work(scenario, pool, boundaries, clock, operator)
        finally:
            if scenario.ends is Ends.KILLED:
                os.kill(os.getpid(), signal.SIGKILL)
            if pool.is_active:
                boundaries.enter(Phase.ENDING)
            pool.close()
    boundaries.enter(Phase.AFTER)
    boundaries.reach("the end")


class _Raised(Exception):
    """The body of the `with` block has failed."""


def _work(scenario: Scenario, pool: Any, boundaries: Boundaries, clock: SharedClock, operator: Operator) -> None:
    """Run what happens while a pool is open, and how the driver leaves it."""
    from skyward_core.events.events import InstanceLost

    opened = pool._session._opened
    for _ in range(scenario.beats):
        clock.advance(BEAT_SECONDS)
        _beat(scenario, opened)
    operator.break_down(**scenario.late_faults)
    for rank in scenario.lost:
        boundaries.enter(Phase.REPLACING)
        machine = next(node.instance for node in pool.lease.nodes if node.rank == rank)
        if not scenario.is_loss_silent:
            operator.shut_down(machine.id)
        opened.emit(InstanceLost(machine.id, rank, "it is silent"))
        opened.machines.replace(rank, lambda: True)
        boundaries.enter(Phase.RUNNING)
    if scenario.is_head_lost:
        boundaries.enter(Phase.REPLACING)
        opened.machines.restart([node.instance.id for node in pool.lease.nodes], [])
        boundaries.enter(Phase.RUNNING)
    _beat(scenario, opened)
    match scenario.ends:
        case Ends.RAISED:
            raise _Raised
        case Ends.DETACHED:
            boundaries.enter(Phase.ENDING)
            pool.detach(DETACHED_SECONDS)
        case Ends.TERMINATED:
            boundaries.enter(Phase.ENDING)
            pool.terminate_now()
        case Ends.CLOSED | Ends.KILLED:
            pass


def _beat(scenario: Scenario, opened: Any) -> None:
    opened._bookkeeping.journal.renew()
    opened._bookkeeping.journal.note()
    opened._limits.check_money()
    for transport in opened.machines.transports.here():
        if scenario.kind == HttpRentalHere.name:
            transport.keep_alive()
        else:
            transport.extend_lease(LEASE_SECONDS)


class Operator:
    """The service's operator, for a forked process: a new connection for each request, so that none is shared."""

    def __init__(self, url: str) -> None:
        self._place = urlsplit(url).netloc

    def break_down(self, **faults: Any) -> None:
        self._ask("/admin/faults", faults)

    def shut_down(self, machine_id: str) -> None:
        self._ask(f"/machines/{machine_id}/shutdown", {})

    def _ask(self, path: str, body: Mapping[str, Any]) -> None:
        connection = http.client.HTTPConnection(self._place, timeout=30)
        connection.request("POST", path, json.dumps(body))
        answer = connection.getresponse()
        answer.read()
        connection.close()
        assert answer.status < 300


def prepare_process() -> None:
    """Install the stand-ins for what takes seconds; once in each process, before a pool is opened."""
    cluster = types.ModuleType("skyward_core.engine.cluster")
    cluster.Cluster = _Cluster  # type: ignore[attr-defined]
    sys.modules["skyward_core.engine.cluster"] = cluster

    from skyward_core.engine import certificates
    from skyward_core.transport import code_upload
    from skyward_core.transport import transport as transport

    certificate = certificates.make_certificate("sky-kill")
    certificates.make_certificate = lambda _: certificate
    code_upload.shipped_archive()
    code_upload.shipped_package()

    class BootingReach(transport.LocalTransport):
        """A node that starts at once: it logs its start as soon as it receives its settings."""

        def write(self, name: str, text: str) -> None:
            super().write(name, text)
            if name == "settings.json":
                settings = json.loads(text)
                said = "::skyward phase server\n"
                if settings["scheduler"] is None:
                    said += f"::skyward head {settings['generation']} tls://127.0.0.1:8786\n"
                with open(f"{self.instance.directory}/log", "a") as log:
                    log.write(said)

    transport.LocalTransport = BootingReach  # type: ignore[misc]


@contextmanager
def no_reaper() -> Generator[None]:
    from skyward_core.session import departure as session_reaper

    reaper = session_reaper.Reaper
    session_reaper.Reaper = _NoReaper  # type: ignore[assignment,misc]
    try:
        yield
    finally:
        session_reaper.Reaper = reaper  # type: ignore[misc]


class _NoReaper:
    """A reaper that was killed together with its driver."""

    is_alive = False

    @classmethod
    def start(cls, charge: object) -> _NoReaper:
        return cls()

    def __getattr__(self, verb: str) -> Callable[..., None]:
        return lambda *_, **__: None


class _Draining:
    """The nodes of a cluster that has no work: each may leave at once."""

    def __init__(self, ranks: set[int]) -> None:
        self._ranks = ranks

    @property
    def size(self) -> int:
        return len(self._ranks)

    def backlog(self) -> int:
        return 0

    def take_in(self, rank: int) -> None:
        self._ranks.add(rank)

    def leave_out(self, rank: int) -> None:
        self._ranks.discard(rank)

    def drain(self, rank: int) -> tuple[int, int]:
        return 0, 0

    def _ignore(self, *_: object) -> None: ...

    free = set_steward = announce = _ignore

    def left_nodes(self) -> dict[int, float]:
        return {}

    def strange_nodes(self) -> dict[int, str]:
        return {}


class _Cluster:
    """A cluster to which all nodes have joined, and which has no work."""

    is_connected = False

    slots = 1
    is_idle = True
    refusal = None
    busy_at = 0.0
    owner = SimpleNamespace(
        connection=None,
        futures={},
        slot_seconds=SimpleNamespace(of=lambda _: {}, seen_at=lambda _: None, reported_at=0.0),
    )
    topic = "the driver's"
    dispatcher = SimpleNamespace(members=SimpleNamespace(nodes={}))

    def __init__(
        self, lease: Any, certificate: object, transports: object, emit: Callable[[Any], object], *_: object
    ) -> None:
        from skyward_core.events.events import BootstrapCompleted

        self.draining = _Draining({node.rank for node in lease.nodes})
        for node in lease.nodes:
            emit(BootstrapCompleted(node.instance.id))

    def _ignore(self, *_: object) -> None: ...

    start = watch = close = leave = drain = fail_calls = update_nodes = resume = restart = remove_node = end_use = (
        take_sample
    ) = _ignore

    def user_client(self, address: object) -> Any:
        return SimpleNamespace(close=lambda: None)

    def slots_held(self) -> dict[str, int]:
        return {}

    def has_work(self) -> bool:
        return False

    def end_client(self, *_: object) -> tuple[bool, dict[str, dict[str, float]]]:
        """The dead client had no calls."""
        return True, {}

    @property
    def busy_at(self) -> float:
        """Just now: the pool's clock must not find it idle."""
        return time.monotonic()

    def has(self, rank: int) -> bool:
        return True

    def missing(self, rank: int) -> list[int]:
        return []
