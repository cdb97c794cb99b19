"""Sweeping all pools: of several providers, by several processes at once, and with a ledger that fails."""

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, ClassVar

import pytest
from pydantic import PrivateAttr

from skyward_core import Instance, InstancesLeft
from skyward_core.cleanup import survey
from skyward_core.cleanup.policy import Action
from skyward_core.cleanup.sweep import sweep
from skyward_core.errors import LedgerError, ProviderFailed
from skyward_core.ledger.ledger import Ledger
from skyward_core.providers.base import (
    load,
)
from tests.cleanup.pools import (
    DEAD,
    ELSEWHERE,
    HERE,
    ROOT,
    CloudProvider,
    FailingLedger,
    FolderProvider,
    LaggingProvider,
    Time,
    World,
    life,
    of_kind,
)
from tests.fakes import BlindProvider, FlakyProvider, StuckProvider


def actions(report: Any) -> list[tuple[str, str]]:
    return [(finding.action.value, finding.pool_id) for finding in report.findings]


def test_a_dry_run_reports_and_changes_nothing(world: World) -> None:
    """A dry run is the default, and reports what the real sweep does."""
    dead = world.pool("sky-dead")
    world.rent(dead, 2)
    world.rent(world.pool("sky-live", HERE), 1, owner=HERE)
    before = world.ids(), world.ledger.open_intents(), world.ledger.pools()
    planned = sweep(world.ledger, [world.provider], **world.hands.keywords)
    assert actions(planned) == [("end", "sky-dead"), ("leave", "sky-live")]
    assert (world.ids(), world.ledger.open_intents(), world.ledger.pools()) == before
    assert planned.ended == ()
    assert [finding.pool_id for finding in planned.to_do] == ["sky-dead"]
    done = world.sweep()
    assert actions(done) == actions(planned)
    assert done.ended == planned.findings[:1]
    assert {instance.pool_id for instance in world.provider.instances()} == {"sky-live"}
    assert actions(world.sweep()) == [("leave", "sky-live")]


def test_a_sweep_finds_providers_in_the_ledger(
    ledger: Ledger, tmp_path: Path, hands: Time, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller names no provider, because the entries name them. One that cannot be loaded is reported and stops
    nothing.
    """
    folders = {"name": "folder", "folder": str(tmp_path)}
    monkeypatch.setattr(
        survey,
        "load",
        lambda requested: (
            FolderProvider(folder=requested["folder"]) if requested["name"] == "folder" else load(requested)
        ),
    )
    world = World(ledger, FolderProvider(folder=str(tmp_path)), hands)
    world.rent(world.pool("sky-folder"), 2)
    ledger.open_pool("sky-odd", owner=DEAD, provider={"name": "nonesuch"}, spec_json="{}", lease_expires_at=hands.now)
    assert world.provider.to_json() == folders
    report = sweep(ledger, is_dry_run=False, **hands.keywords)
    assert [failure.provider for failure in report.failures] == ["nonesuch"]
    assert "no provider is called 'nonesuch'" in str(report.failures[0])
    assert [finding.pool_id for finding in report.ended] == ["sky-folder"]
    assert [found.id for found in ledger.pools()] == ["sky-odd"]
    assert world.ids() == set()


def test_a_provider_that_cannot_list_is_not_swept(ledger: Ledger, tmp_path: Path, hands: Time) -> None:
    """Its entries and machines stay, because they could not be listed. The other providers are swept."""
    blind = of_kind(BlindProvider, ledger, tmp_path / "blind", hands)
    seeing = of_kind(CloudProvider, ledger, tmp_path / "seeing", hands)
    blind.rent(blind.pool("sky-blind"))
    seeing.rent(seeing.pool("sky-seeing"))
    hands.go(1000)
    report = sweep(ledger, [blind.provider, seeing.provider], is_dry_run=False, **hands.keywords)
    assert [(failure.provider, str(failure.error)) for failure in report.failures] == [("fake", "503 from the listing")]
    assert [finding.pool_id for finding in report.ended] == ["sky-seeing"]
    assert [its.pool_id for its in ledger.open_intents()] == ["sky-blind"]
    assert [(found.id, found.condemned_at) for found in ledger.pools()] == [("sky-blind", None)]
    assert blind.provider.machines.terminated == []


def test_a_machine_that_does_not_end_does_not_stop_the_others(ledger: Ledger, tmp_path: Path, hands: Time) -> None:
    """InstancesLeft of one pool is in the report; the next sweep requests the end again."""
    stuck = of_kind(StuckProvider, ledger, tmp_path / "stuck", hands)
    other = of_kind(FlakyProvider, ledger, tmp_path / "other", hands)
    for world in (stuck, other):
        world.rent(world.pool(f"sky-{type(world.provider).__name__}"))
    waited = threading.local()  # each pool ends in a thread of its own, and waits by a clock of its own

    def pause(seconds: float) -> None:
        waited.seconds = getattr(waited, "seconds", 0.0) + seconds

    report = sweep(
        ledger,
        [stuck.provider, other.provider],
        is_dry_run=False,
        clock=hands,
        monotonic=lambda: getattr(waited, "seconds", 0.0),
        pause=pause,
    )
    (failure,) = report.failures
    assert failure.pool_id == "sky-StuckProvider"
    assert isinstance(failure.error, InstancesLeft)
    assert other.ids() == set()
    assert [its.pool_id for its in ledger.open_intents()] == ["sky-StuckProvider"]
    assert actions(sweep(ledger, [stuck.provider], **hands.keywords)) == [("end", "sky-StuckProvider")]


def test_an_owner_that_renews_in_time_keeps_its_machines(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lease was renewed between the sweep's read and the condemnation: the sweep leaves the pool."""
    pool = world.pool(owner=ELSEWHERE, lease_seconds=-1)
    world.rent(pool, owner=ELSEWHERE)
    listing = CloudProvider.instances

    def slowly(self: CloudProvider, pool_id: str | None = None) -> list[Instance]:
        world.ledger.renew(pool, world.hands.now + timedelta(seconds=60))
        return listing(self, pool_id)

    monkeypatch.setattr(CloudProvider, "instances", slowly)
    report = world.sweep()
    assert [(finding.action, finding.reason) for finding in report.findings] == [
        (Action.LEAVE, "its lease was renewed during the sweep")
    ]
    assert world.provider.machines.terminated == []
    assert world.ledger.pools()[0].condemned_at is None


def test_a_late_launch_of_a_dead_pool_is_left_to_the_next_sweep(ledger: Ledger, tmp_path: Path, hands: Time) -> None:
    """The first sweep condemns the pool and does not wait. When a listing must show the machine, a later sweep ends it,
    or closes the entry without one.
    """
    LaggingProvider.clock = hands
    world = of_kind(LaggingProvider, ledger, tmp_path, hands)
    for pool_id in ("sky-came", "sky-never"):
        world.intend(world.pool(pool_id))
    world.launch("sky-came")
    assert actions(world.sweep()) == [("wait", "sky-came"), ("wait", "sky-never")]
    assert hands.paused == 0
    assert all(found.condemned_at for found in ledger.pools())
    hands.go(60)
    assert actions(world.sweep()) == [("end", "sky-came"), ("close", "sky-never")]
    assert world.provider.machines.running == {}
    assert (ledger.open_intents(), ledger.pools()) == ([], [])


def test_a_live_pool_adopts_the_machine_of_a_lost_answer(world: World) -> None:
    """The machine is bound to its entry, and nothing else happens to it."""
    pool = world.pool(owner=HERE)
    (its,) = world.intend(pool, owner=HERE)
    (instance,) = world.launch(pool, owner=HERE)
    assert actions(world.sweep()) == [("adopt", pool)]
    assert [(found.id, found.cloud_id) for found in world.ledger.open_intents()] == [(its.id, instance.id)]
    assert world.ids() == {instance.id}


def test_machines_that_no_ledger_has_are_swept_by_their_tags(world: World) -> None:
    """The ledger was lost. Old machines of a dead owner end; new ones and those of other users stay, unless
    `include_unknown` is set.
    """
    world.launch("sky-dead")
    world.launch("sky-theirs", owner=ELSEWHERE)
    world.launch("sky-mine", owner=HERE)
    assert {action for action, _ in actions(world.sweep())} == {"leave"}
    world.hands.go(601)
    for keep in (world.ledger, None):
        assert actions(sweep(keep, [world.provider], **world.hands.keywords)) == [
            ("end", "sky-dead"),
            ("leave", "sky-mine"),
            ("leave", "sky-theirs"),
        ]
    world.sweep()
    assert {instance.pool_id for instance in world.provider.instances()} == {"sky-mine", "sky-theirs"}
    sweep(None, [world.provider], is_dry_run=False, include_unknown=True, **world.hands.keywords)
    assert {instance.pool_id for instance in world.provider.instances()} == {"sky-mine"}
    assert world.hands.paused < 1


def test_machines_of_a_pool_that_has_ended_are_ended(world: World) -> None:
    """The pool has ended and its entries are closed, but the machine is listed again."""
    pool = world.pool()
    world.rent(pool)
    world.ledger.close_all([world.ledger.open_intents()[0].id], "cloud lists it no more")
    world.ledger.end_pool(pool)
    report = world.sweep()
    assert actions(report) == [("end", pool)]
    assert world.ids() == set()
    assert world.ledger.open_intents() == []


def test_machines_listed_by_two_settings_have_one_finding(ledger: Ledger, tmp_path: Path, hands: Time) -> None:
    """A provider that is named twice, with other settings, lists the same machines. The policy uses the settings with
    which the pool was opened.
    """
    world = of_kind(CloudProvider, ledger, tmp_path, hands)
    twin = CloudProvider(folder=str(tmp_path), price_per_hour=1.0)
    twin._machines = world.provider.machines
    world.rent(world.pool())
    world.launch("sky-stranger")
    hands.go(1000)
    report = sweep(ledger, [twin, world.provider], is_dry_run=False, **hands.keywords)
    assert sorted(actions(report)) == [("end", "sky-1"), ("end", "sky-stranger")]
    assert report.failures == ()
    alone = of_kind(CloudProvider, ledger, tmp_path / "alone", hands)
    alone.rent(alone.pool("sky-2"))
    twin._machines = alone.provider.machines
    report = sweep(ledger, [twin], is_dry_run=False, **hands.keywords)
    assert actions(report) == [("leave", "sky-2")]


class PruningProvider(CloudProvider):
    """Has an unused image that outlives its pools, and cannot remove it if it has a `trouble`."""

    name: ClassVar[str] = "pruning"
    trouble: str = ""
    _asked: list[tuple[datetime, bool]] = PrivateAttr(default_factory=list)

    def prune(self, now: datetime, *, is_dry_run: bool) -> list[str]:
        self._asked.append((now, is_dry_run))
        if self.trouble:
            raise ProviderFailed(self.trouble)
        return ["image ami-1 of the last year"]


@pytest.mark.parametrize("is_dry_run", [True, False])
def test_a_sweep_removes_what_outlives_pools(ledger: Ledger, tmp_path: Path, hands: Time, is_dry_run: bool) -> None:
    """A dry run only reports it. Two settings of one account report it once."""
    one, twin = PruningProvider(folder=str(tmp_path)), PruningProvider(folder=str(tmp_path), price_per_hour=1.0)
    report = sweep(ledger, [one, twin], is_dry_run=is_dry_run, **hands.keywords)
    assert report.pruned == ("pruning: image ami-1 of the last year",)
    assert report.failures == ()
    assert one._asked == twin._asked == [(hands.now, is_dry_run)]


def test_a_sweep_that_cannot_remove_what_outlives_pools_ends_machines(
    ledger: Ledger, tmp_path: Path, hands: Time
) -> None:
    """The error is in the report, after the machines are gone."""
    world = of_kind(PruningProvider, ledger, tmp_path, hands, trouble="503")
    world.rent(world.pool())
    report = world.sweep()
    assert world.ids() == set()
    assert [(failure.provider, failure.pool_id, str(failure.error)) for failure in report.failures] == [
        ("pruning", "", "503")
    ]
    assert (report.pruned, str(report.failures[0])) == ((), "pruning: 503")


def test_a_ledger_that_cannot_be_written_to_ends_nothing_of_its_pools(world: World) -> None:
    """A pool that cannot be condemned keeps its machines; unknown machines end. The other pools are not tried, because
    each would wait as long.
    """
    for number in range(3):
        world.rent(world.pool(f"sky-{number}"))
    world.launch("sky-stranger")
    world.hands.go(1000)
    failing: Any = FailingLedger(world.ledger, ["condemn_all"])
    report = sweep(failing, [world.provider], is_dry_run=False, **world.hands.keywords)
    assert len(report.failures) == 1
    assert [finding.pool_id for finding in report.ended] == ["sky-stranger"]
    assert {instance.pool_id for instance in world.provider.instances()} == {"sky-0", "sky-1", "sky-2"}


def test_a_ledger_that_cannot_be_read_ends_nothing(world: World) -> None:
    """Without the ledger every live pool would be unknown."""
    failing: Any = FailingLedger(world.ledger, ["open_intents"])
    world.launch("sky-stranger")
    world.hands.go(1000)
    with pytest.raises(LedgerError):
        sweep(failing, [world.provider], is_dry_run=False, **world.hands.keywords)
    assert world.provider.machines.terminated == []


# ── several at once, and many ────────────────────────────────────────────────────────────────────────────────────────


def real_world(tmp_path: Path) -> tuple[World, Time]:
    class Now(Time):
        def __call__(self) -> datetime:
            return datetime.now(UTC)

    hands = Now()
    (tmp_path / "machines").mkdir()
    provider = FolderProvider(folder=str(tmp_path / "machines"))
    world = World(Ledger(f"sqlite:///{tmp_path / 'ledger.db'}"), provider, hands)
    hands.now = datetime.now(UTC)
    return world, hands


SWEEPER = """
import sys
from skyward_core.ledger.ledger import Ledger
from skyward_core.cleanup.sweep import sweep
from tests.cleanup.pools import FolderProvider
with Ledger(sys.argv[1]) as ledger:
    report = sweep(ledger, [FolderProvider(folder=sys.argv[2])], is_dry_run=False)
for failure in report.failures:
    print(failure)
"""


@pytest.mark.long
def test_several_sweeps_at_once_end_dead_pools_only(tmp_path: Path) -> None:
    """Four threads and two processes sweep one ledger while a live pool renews its lease and launches.

    No sweep fails, every dead machine ends, and no live machine receives a request to end.
    """
    world, _ = real_world(tmp_path)
    with world.ledger:
        for number in range(20):
            world.rent(world.pool(f"sky-dead-{number:02}", lease_seconds=-60), 3)
            world.intend(f"sky-dead-{number:02}", 1, first=3)
        live = world.pool("sky-live", HERE)
        over = threading.Event()
        mine: list[str] = []

        def keep() -> None:
            rank = 0
            while not over.is_set():
                world.ledger.renew(live, datetime.now(UTC) + timedelta(seconds=120))
                mine.extend(instance.id for instance in world.rent(live, 1, rank, HERE))
                rank += 1

        with ThreadPoolExecutor(5) as threads:
            keeping = threads.submit(keep)
            command = [
                sys.executable,
                "-c",
                SWEEPER,
                world.ledger.url.render_as_string(hide_password=False),
                world.provider.folder,
            ]
            others = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(2)]
            reports = list(threads.map(lambda _: sweep(world.ledger, [world.provider], is_dry_run=False), range(4)))
            outputs = [other.communicate(timeout=110)[0] for other in others]
            over.set()
            keeping.result()
        assert outputs == ["", ""]
        assert [other.returncode for other in others] == [0, 0]
        assert [failure for report in reports for failure in report.failures] == []
        assert {instance.pool_id for instance in world.provider.instances()} == {"sky-live"}
        assert world.ids() == set(mine)
        assert {its.cloud_id for its in world.ledger.open_intents()} == set(mine)
        assert [found.id for found in world.ledger.pools()] == ["sky-live"]
        ended = (tmp_path / "machines" / "log").read_text().split()
        assert not set(ended) & set(mine)
        closed = [its for its in world.ledger.intents() if its.pool_id != "sky-live"]
        assert all(
            abs(sum(its.seconds.values()) - life(its, datetime.now(UTC))) < 0.002 for its in closed if its.cloud_id
        )


@pytest.mark.slow
@pytest.mark.parametrize(("pools", "nodes"), [(1, 1000), pytest.param(1000, 1, marks=pytest.mark.long)])
@pytest.mark.parametrize("left", ["listed", "gone", "never bound"])
def test_a_thousand_open_entries_are_handled(tmp_path: Path, hands: Time, pools: int, nodes: int, left: str) -> None:
    """Entries of one pool or of a thousand, with machines in any state. `benchmarks/ledger.py` measures the speed."""
    with Ledger(f"sqlite:///{tmp_path / 'ledger.db'}", clock=hands) as ledger:
        world = of_kind(CloudProvider, ledger, tmp_path, hands)
        for number in range(pools):
            pool = world.pool(f"sky-{number:04}")
            if left == "never bound":
                world.intend(pool, nodes)
            else:
                world.rent(pool, nodes)
        if left == "gone":
            world.provider.machines.running.clear()
        hands.go(1000)
        report = world.sweep()
        assert report.failures == ()
        assert world.ids() == set()
        assert (ledger.open_intents(), ledger.pools()) == ([], [])
