"""Sweeping all pools: of several providers, by several processes at once, and with a ledger that fails."""

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from skyward_core.cleanup.sweep import sweep
from skyward_core.ledger.ledger import Ledger
from tests.cleanup.pools import HERE, ROOT, CloudProvider, FolderProvider, Time, World, life, of_kind


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


def test_several_sweeps_at_once_end_dead_pools_only(tmp_path: Path) -> None:
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


@pytest.mark.parametrize(("pools", "nodes"), [(1, 1000), (1000, 1)])
@pytest.mark.parametrize("left", ["listed", "gone", "never bound"])
def test_a_thousand_open_entries_are_handled(tmp_path: Path, hands: Time, pools: int, nodes: int, left: str) -> None:
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
