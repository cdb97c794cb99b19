"""A cache keeps what is used or was used lately, and is pruned by age and by size."""

import fcntl
import os
from dataclasses import replace
from pathlib import Path

import pytest

from skyward_core.machines.owner import Owner
from skyward_core.transport import caches
from skyward_core.transport.caches import COMPLETE, UNUSED_SECONDS, entries, note_use, prune_files, remove, superfluous

NOW = 2_000_000_000.0
DAY = 86_400.0


def entry(home: Path, place: str, days: float) -> Path:
    """Make an entry that was last used so many days ago."""
    folder = home / place
    folder.mkdir(parents=True)
    (folder / "content").write_bytes(b"x" * 100_000)
    if place.startswith("envs/"):
        (folder / COMPLETE).touch()
        os.utime(folder / COMPLETE, (NOW - days * DAY,) * 2)
        days = 400  # the folder itself does not change with a use
    os.utime(folder, (NOW - days * DAY,) * 2)
    return folder


def process(proc: Path, **environ: str) -> Path:
    folder = proc / "4711"
    folder.mkdir(parents=True)
    (folder / "environ").write_bytes(b"\0".join(f"{name}={value}".encode() for name, value in environ.items()))
    return proc


def test_what_a_living_process_uses_stays_however_old_it_is(tmp_path: Path) -> None:
    """A node names its environment and our package; a process that has sent files to nodes is noted beside them."""
    home = tmp_path / "skyward"
    used, package = entry(home, "envs/used", 90), entry(home, "ship/package", 80)
    unused, sent = entry(home, "envs/unused", 70), entry(home, "ship/files/sent", 60)
    note_use(sent)
    dead = entry(home, "ship/files/dead", 50)
    owner = replace(Owner.here(), started="1")
    (dead / f"{owner.process}{caches.USER_ENDING}").write_text(owner.name)
    os.utime(sent, (NOW - 60 * DAY,) * 2)
    os.utime(dead, (NOW - 50 * DAY,) * 2)
    young = entry(home, "files/young", 1)
    proc = process(tmp_path / "proc", SKYWARD_ENV_PYTHON=f"{used}/bin/python", PYTHONPATH=f"/other:{package}")
    found = entries(home, proc)
    assert [(item.kind, item.path.name, item.is_used) for item in found] == [
        ("environment", "used", True),
        ("package", "package", True),
        ("environment", "unused", False),
        ("files", "sent", True),
        ("files", "dead", False),
        ("uploaded files", "young", False),
    ]
    assert all(item.bytes >= 100_000 for item in found)
    old = superfluous(found, unused_seconds=UNUSED_SECONDS, now=NOW)
    assert [item.path for item in old] == [unused, dead]
    assert all(remove(item) for item in old)
    assert [item.path.name for item in entries(home, proc)] == ["used", "package", "sent", "young"]
    assert young.exists()


def test_a_cache_that_is_too_large_loses_what_was_used_longest_ago(tmp_path: Path) -> None:
    for days, name in ((1, "new"), (2, "middle"), (3, "old")):
        entry(tmp_path, f"envs/{name}", days)
    found = entries(tmp_path, tmp_path)
    size = found[0].bytes
    names = [item.path.name for item in superfluous(found, keep_bytes=size * 1.5, now=NOW)]
    assert names == ["old", "middle"]
    assert superfluous(found, keep_bytes=size * 3, now=NOW) == []


def test_what_was_used_after_the_look_stays(tmp_path: Path) -> None:
    """A pool may begin between the list and the removal."""
    folder = entry(tmp_path, "ship/files/again", 40)
    (old,) = entries(tmp_path, tmp_path)
    os.utime(folder)
    assert not remove(old)
    assert folder.exists()


def test_an_environment_that_a_node_makes_or_takes_stays(tmp_path: Path) -> None:
    """The node holds its lock meanwhile (`image/shell.py`)."""
    folder = entry(tmp_path, "envs/used", 40)
    lock = tmp_path / "envs" / "used.lock"
    lock.touch()
    (old,) = entries(tmp_path, tmp_path)
    with lock.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert not remove(old)
        assert folder.exists()
    assert remove(old)
    assert not folder.exists()


def test_files_whose_use_is_noted_during_the_removal_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process notes its use between the look and the renaming."""
    folder = entry(tmp_path, "ship/files/again", 40)
    (old,) = entries(tmp_path, tmp_path)
    rename = Path.rename

    def rename_later(path: Path, target: Path) -> Path:
        if path == folder:
            note_use(folder)
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", rename_later)
    assert not remove(old)
    assert [path.name for path in folder.iterdir() if path.suffix != ".user"] == ["content"]


def test_a_killed_removal_is_finished_by_the_next_look(tmp_path: Path) -> None:
    left = entry(tmp_path, "envs/.gone.1.removed", 40)
    assert entries(tmp_path, tmp_path) == []
    assert not left.exists()


def test_files_that_no_pool_has_used_for_long_go_when_others_come(tmp_path: Path) -> None:
    old, used, new = (entry(tmp_path, f"ship/files/{name}", days) for name, days in (("a", 31), ("b", 32), ("c", 29)))
    note_use(used)
    os.utime(used, (NOW - 32 * DAY,) * 2)
    prune_files(tmp_path / "ship" / "files", lambda: NOW)
    assert [old.exists(), used.exists(), new.exists()] == [False, True, True]


def test_marks_of_dead_processes_go_with_the_next_use(tmp_path: Path) -> None:
    """Each step of a flow is a process that may use the same files."""
    folder, dead = entry(tmp_path, "ship/files/a", 0), replace(Owner.here(), started="1")
    (folder / f"{dead.process}{caches.USER_ENDING}").write_text(dead.name)
    note_use(folder)
    assert [path.name for path in folder.glob(f"*{caches.USER_ENDING}")] == [f"{Owner.here().process}.user"]
