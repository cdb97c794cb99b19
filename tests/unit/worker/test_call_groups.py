"""Memory limits that the kernel enforces, on a fake of cgroupfs."""

import os
import re
import signal
from pathlib import Path

import pytest

import skyward_core as sky
from skyward_core.cleanup import reaper_process
from skyward_core.engine.futures import value_of
from skyward_core.providers import local as control_groups
from skyward_core.wire.messages import Outcome, OutcomeKind
from skyward_core.worker import call_groups
from skyward_core.worker.call_groups import CallGroups, MemoryAllowance
from skyward_core.worker.slot import BY_KERNEL
from tests.worker.fake_cgroup import FakeKernel

NODE_GROUP = "skyward.local-1.sky-1.0"
LIMIT = 300_000_000


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeKernel:
    kernel = FakeKernel(tmp_path / "cgroup")
    monkeypatch.setattr(call_groups, "read", kernel.read)
    monkeypatch.setattr(call_groups, "write", kernel.write)
    return kernel


@pytest.fixture
def group(kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The group of a node, with this process and two others in it."""
    group = kernel.make(NODE_GROUP, processes=f"11 12 {os.getpid()}")
    monkeypatch.setattr(call_groups, "own_group", lambda: group)
    return group


def bounded() -> CallGroups:
    groups = call_groups.call_groups("local-1", LIMIT)
    assert groups is not None
    return groups


def test_processes_forked_while_the_group_is_divided_are_moved_too(
    kernel: FakeKernel, group: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are missing in the first list of processes."""
    really = kernel.write

    def write(path: Path, text: str) -> None:
        really(path, text)
        if text == "12":
            kernel.put(group / "cgroup.procs", f"{kernel.read(group / 'cgroup.procs')} 13")

    monkeypatch.setattr(call_groups, "write", write)
    bounded()
    assert kernel.members(group / "node") == {11, 12, 13, os.getpid()}


def refusing(kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process cannot be moved."""
    really = kernel.write

    def write(path: Path, text: str) -> None:
        if text == "12":
            raise PermissionError
        really(path, text)

    monkeypatch.setattr(call_groups, "write", write)


@pytest.mark.parametrize("lack", ["limit", "group", "memory", "another group", "a process that stays"])
def test_without_a_usable_group_the_worker_limits_memory(
    lack: str, kernel: FakeKernel, group: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No limit; no visible group, or one without the controller, or not the node's; a process that stays."""
    if lack == "memory":
        kernel.put(group / "cgroup.controllers", "pids")
    elif lack == "a process that stays":
        refusing(kernel, monkeypatch)
    elif "group" in lack:
        other = kernel.make("skyward.local-12.sky-1.0") if lack == "another group" else None
        monkeypatch.setattr(call_groups, "own_group", lambda: other)
    assert call_groups.call_groups("local-1", None if lack == "limit" else LIMIT) is None


def test_each_process_of_calls_has_a_group_with_the_limit(kernel: FakeKernel, group: Path) -> None:
    """It may not use swap, and all of its processes end when the kernel ends one."""
    groups = bounded()
    first, second = groups.make(), groups.make()
    assert first is not None
    assert second not in {None, first}
    files = {name: kernel.read(first / name) for name in ("memory.max", "memory.swap.max", "memory.oom.group")}
    assert files == {"memory.max": str(LIMIT), "memory.swap.max": "0", "memory.oom.group": "1"}
    assert call_groups.enter(first)
    assert kernel.members(first) == {os.getpid()}
    assert call_groups.enter(group / "gone") is False


def test_a_group_that_cannot_be_made_or_removed_stops_no_process(kernel: FakeKernel, group: Path) -> None:
    """The next process tries again. What a call has left outlives its runner: its group goes when it is empty."""
    groups = bounded()
    kernel.put(group / "cgroup.subtree_control", "")
    assert groups.make() is None
    kernel.put(group / "cgroup.subtree_control", "memory")
    first, second = groups.make(), groups.make()
    assert first is not None
    assert second is not None
    (first / "left").mkdir()  # a folder that is not empty cannot be removed, as in the kernel
    assert (groups.end(first), first.exists()) == (False, True)
    (first / "left").rmdir()
    groups.end(second)
    assert [path.name for path in group.iterdir()] == ["node"]


@pytest.mark.parametrize(
    ("events", "expected"), [("oom_kill 0", False), ("oom 3\noom_kill 2\noom_group_kill 1", True), ("", False)]
)
def test_the_kernels_count_shows_whether_it_has_killed(
    events: str, expected: bool, kernel: FakeKernel, group: Path
) -> None:
    """The group belongs to that process alone, and is removed afterwards."""
    groups = bounded()
    path = groups.make()
    assert path is not None
    kernel.put(path / "memory.events", events)
    assert groups.end(path) is expected
    assert not path.exists()


def test_results_in_memory_do_not_count_against_the_limit(kernel: FakeKernel, group: Path, tmp_path: Path) -> None:
    """The kernel counts them as the process's memory: the limit is raised by their size, until they are fetched."""
    path = bounded().make()
    assert path is not None
    room = MemoryAllowance(path, LIMIT)
    room.make(50)
    assert kernel.read(path / "memory.max") == str(LIMIT + 50)
    (tmp_path / "result").touch()
    room.keep(str(tmp_path / "result"), 50)
    room.make(7)
    assert kernel.read(path / "memory.max") == str(LIMIT + 57)
    room.settle()
    assert kernel.read(path / "memory.max") == str(LIMIT + 50)
    (tmp_path / "result").unlink()
    room.settle()
    assert kernel.read(path / "memory.max") == str(LIMIT)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "was killed; ask for more"),
        (BY_KERNEL, "was killed by the kernel, which counts all that it has started too (control group); ask for more"),
    ],
)
def test_the_error_says_what_has_killed_the_call(text: str, words: str) -> None:
    outcome = Outcome("1", OutcomeKind.OUT_OF_MEMORY, text=text, exit_code=-signal.SIGKILL)
    with pytest.raises(sky.CallOutOfMemory, match=re.escape(words)):
        value_of(outcome, 3)


# ── where the node's group is made ───────────────────────────────────────────────────────────────────────────────────

UNLIMITED = {"memory.max": "max\n", "cpu.max": "max 100000\n", "pids.max": "max\n", "cpuset.cpus": "\n"}
PLACES = {
    "beside a session": ("cpu memory pids", UNLIMITED, "slice"),
    "no limit is known": ("memory", {}, "slice"),
    "memory is not handed down": ("cpu pids", UNLIMITED, "slice/session"),
    "nothing is handed down": ("", UNLIMITED, "slice/session"),
    "a limit of memory": ("memory", UNLIMITED | {"memory.max": "8000000000\n"}, "slice/session"),
    "a limit of processes": ("memory", UNLIMITED | {"pids.max": "4915\n"}, "slice/session"),
    "a limit of CPUs": ("memory", UNLIMITED | {"cpuset.cpus": "0-1\n"}, "slice/session"),
}


def hierarchy(tmp_path: Path, case: str) -> tuple[Path, str]:
    """Plain files: the group of this process, and the place for the group of a node."""
    handed_down, limits, expected = PLACES[case]
    own = tmp_path / "slice" / "session"
    own.mkdir(parents=True)
    (own.parent / "cgroup.subtree_control").write_text(handed_down)
    (own.parent / "cgroup.procs").touch()
    for name, text in limits.items():
        (own / name).write_text(text)
    return own, str(tmp_path / expected)


@pytest.mark.parametrize("case", PLACES)
def test_a_group_is_made_where_the_memory_controller_is_available(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is beside the group of this process, if no limit is escaped by that."""
    own, expected = hierarchy(tmp_path, case)
    monkeypatch.setattr(call_groups, "own_group", lambda: own)
    assert str(control_groups._home()) == expected


def test_a_reaper_leaves_the_node_if_the_group_above_takes_no_process(tmp_path: Path) -> None:
    """A group that passes controllers on takes no process; all reapers share a group below it.

    Looks inside: the groups are folders that the test has made.
    """
    (tmp_path / "cgroup.procs").mkdir()  # cannot be written to
    (tmp_path / "skyward-reapers").mkdir()
    reaper_process._enter_above(str(tmp_path))
    assert (tmp_path / "skyward-reapers" / "cgroup.procs").read_text() == "0"


# ── a real kernel ────────────────────────────────────────────────────────────────────────────────────────────────────
