"""`Local` without its processes: what it refuses, and the folders of nodes that were killed with all their processes."""

import os
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import psutil
import pytest

import skyward_core as sky
from skyward_core.machines.owner import Owner
from skyward_core.providers import local as node_folders
from skyward_core.providers.local import make_folders
from skyward_core.wire import settings
from skyward_core.worker.node_clocks import uptime

HERE = Owner.here()
DEAD = replace(HERE, started="1")
REBOOTED = replace(HERE, boot="before")
NODE = "local-0123456789ab"
LAUNCH = {"skyward-pool": "sky-1", "skyward-rank": "0"}


@pytest.fixture(autouse=True)
def state(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """State and memory of its own: other nodes of this machine have theirs elsewhere."""
    for name in ("XDG_STATE_HOME", "XDG_RUNTIME_DIR", "TMPDIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
        (tmp_path / name).mkdir(mode=0o700)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "TMPDIR"))
    for module in (settings, node_folders):
        monkeypatch.setattr(module, "memory_directory", lambda instance_id: str(tmp_path / f"memory-{instance_id}"))
    return tmp_path / "XDG_STATE_HOME/skyward/nodes"


def folder_of(launcher: Owner | None, age_seconds: float = 0.0, *, is_empty: bool = False) -> Path:
    """Make the folders of a node that was launched by a process."""
    directory = make_folders(NODE)
    (directory / "launched-by").unlink()
    if launcher is not None:
        (directory / "launched-by").write_text(f"{launcher.name}\n{launcher.process}\n")
    if not is_empty:
        (directory / "log").write_text("killed")
    Path(node_folders.memory_directory(NODE), "value").write_text("large")
    changed_at = time.time() - age_seconds
    os.utime(directory, times=(changed_at, changed_at))
    return directory


def prune(*, is_dry_run: bool = False) -> list[str]:
    return sky.Local().prune(datetime.now(UTC), is_dry_run=is_dry_run)


@pytest.mark.parametrize(
    ("make", "is_abandoned"),
    [
        (lambda: folder_of(DEAD), True),
        (lambda: folder_of(DEAD, is_empty=True), True),
        (lambda: folder_of(HERE), False),
        (lambda: folder_of(HERE, 1e9), False),
        (lambda: folder_of(replace(DEAD, host="elsewhere"), 1e9), False),
        (lambda: folder_of(replace(DEAD, namespace="1"), 1e9), False),
        (lambda: folder_of(replace(REBOOTED, host="elsewhere"), 1e9), False),
        (lambda: folder_of(REBOOTED, uptime() + 60), True),
        (lambda: folder_of(REBOOTED, 0), False),
        (lambda: folder_of(None, is_empty=True), False),
        (lambda: folder_of(None, 90_000, is_empty=True), True),
        (lambda: folder_of(None, 90_000), False),
    ],
    ids=[
        "dead",
        "dead before the start",
        "alive",
        "alive for long",
        "another host",
        "another container",
        "another host before its reboot",
        "before a reboot",
        "written since the boot, by a computer of the same name",
        "being made",
        "killed while it was made",
        "of an earlier release",
    ],
)
def test_a_sweep_removes_the_folders_of_nodes_without_launcher_and_processes(
    make: Callable[[], Path], is_abandoned: bool
) -> None:
    """A dry run only names them. What may belong to a process that is not visible from here stays."""
    directory = make()
    expected = [f"folders of ended nodes in {directory.parent}: 1"] * is_abandoned
    assert (prune(is_dry_run=True), directory.exists()) == (expected, True)
    assert prune() == expected
    assert directory.exists() != is_abandoned
    assert Path(node_folders.memory_directory(NODE)).exists() != is_abandoned
    assert prune() == []


def test_a_node_with_a_process_keeps_its_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is detached: its launcher is dead."""
    directory = folder_of(DEAD)
    monkeypatch.setattr("skyward_core.providers.local.members", lambda instance_id: {4711: True})
    assert (prune(), directory.exists()) == ([], True)


@pytest.mark.parametrize("error", [OSError(12, "no memory"), SystemExit(143)])
def test_a_start_that_fails_leaves_no_folder(
    monkeypatch: pytest.MonkeyPatch, state: Path, error: BaseException
) -> None:
    """SIGTERM comes as an exception too."""

    def fail(*_: object, **__: object) -> None:
        assert [path.name[:6] for path in state.iterdir()] == ["local-"]
        raise error

    monkeypatch.setattr(subprocess, "Popen", fail)
    (offer,) = sky.Local().offers(sky.Requirements())
    with pytest.raises(type(error)):
        sky.Local().launch(offer, 3, LAUNCH, "")
    assert list(state.iterdir()) == []
    assert list(state.parents[2].glob("memory-*")) == []


def test_more_nodes_than_fit_into_memory_are_refused_before_one_begins() -> None:
    most = max(16, psutil.virtual_memory().total // 100_000_000)
    assert len(sky.Local().offers(sky.Requirements(nodes=most))) == 1
    with pytest.raises(sky.BadRequest, match=f"{most + 1} nodes are too many for this machine.*enough for {most}$"):
        sky.Local().offers(sky.Requirements(nodes=most + 1))
