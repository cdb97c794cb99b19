"""Checkpoints: a process may be killed at any point, and the newest complete one is found."""

import builtins
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

import skyward_core as sky
from skyward_core.distributed.checkpoint import COMPLETE, VALUE


def names(path: Path) -> list[str]:
    return sorted(entry.name.partition("-")[0] + entry.suffix for entry in path.iterdir())


def test_the_newest_value_is_loaded(tmp_path: Path):
    found = sky.checkpoint(tmp_path / "run" / "1")
    assert (found.latest(), found.load(), found.load(default=0)) == (None, None, 0)
    for step in (1, 2, 10, 9):
        found.save(step, {"step": step})
    assert found.load() == {"step": 10}
    assert sky.checkpoint(tmp_path / "run" / "1").latest() == found.latest()
    assert names(found.path) == ["step", "step", "step.complete", "step.complete"]


def test_a_framework_writes_its_own_files(tmp_path: Path):
    found = sky.checkpoint(tmp_path)
    with found.writing(5) as directory:
        (directory / "shards").mkdir()
        (directory / "shards" / "0.bin").write_bytes(b"weights")
        assert found.latest() is None
    saved = found.latest()
    assert saved is not None
    assert (saved.step, (saved.path / "shards" / "0.bin").read_bytes()) == (5, b"weights")


def test_a_block_that_raises_leaves_nothing(tmp_path: Path):
    found = sky.checkpoint(tmp_path)
    with pytest.raises(ZeroDivisionError), found.writing(1) as directory:
        (directory / "half").touch()
        _ = 1 / 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("damage", ["shortened", "gone", "unreadable mark", "no mark"])
def test_an_incomplete_one_is_passed_over_and_removed_later(tmp_path: Path, damage: str):
    found = sky.checkpoint(tmp_path)
    found.save(1, "one")
    second = found.save(2, "two" * 100)
    mark = second.path.with_name(second.path.name + COMPLETE)
    match damage:
        case "shortened":
            os.truncate(second.path / "value.pickle", 10)
        case "gone":
            shutil.rmtree(second.path)
        case "unreadable mark":
            mark.write_text("{")
        case _:
            mark.unlink()
    assert found.load() == "one"
    found.save(3, "three")
    assert (found.load(), names(tmp_path)) == ("three", ["step", "step", "step.complete", "step.complete"])
    assert not mark.exists()
    assert not second.path.exists()


@pytest.mark.parametrize("at", ["stat", "open"])
def test_what_is_removed_while_it_is_read_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str):
    """Another process loads while the training saves: it gets the newer one."""
    saving, real = sky.checkpoint(tmp_path, keep=1), {"stat": Path.stat, "open": builtins.open}[at]
    saving.save(1, "old")
    saved = list[int]()

    def late(path: Any, *args: Any, **options: Any) -> Any:
        name = str(path)
        if not saved and "step-00000001" in name and name.endswith(COMPLETE if at == "stat" else VALUE):
            saved.append(2)
            saving.save(2, "new")
        return real(path, *args, **options)

    monkeypatch.setattr(*((Path, "stat") if at == "stat" else (builtins, "open")), late)
    assert sky.checkpoint(tmp_path).load(default="none: the training would begin anew") == "new"
    assert saved == [2]


def test_two_for_one_step_do_not_disturb_each_other(tmp_path: Path):
    """The second attempt saves and cleans; the first one, which was thought dead, gets an error and spoils nothing."""
    found = sky.checkpoint(tmp_path)
    with pytest.raises(FileNotFoundError), found.writing(7) as first:
        (first / "value.pickle").write_bytes(b"half")
        found.save(7, "second")
    assert found.load() == "second"
    assert names(tmp_path) == ["step", "step.complete"]


@pytest.mark.parametrize(
    ("keep", "step", "wrong"),
    [(0, 1, "keep=0"), ("2", 1, "keep='2'"), (2.5, 1, "keep=2.5"), (1, -1, "step=-1"), (1, "3", "step='3'")],
)
def test_wrong_numbers_are_refused(tmp_path: Path, keep: Any, step: Any, wrong: str):
    with pytest.raises(sky.BadRequest, match=wrong):
        sky.checkpoint(tmp_path, keep=keep).save(step, "value")
    assert list(tmp_path.iterdir()) == []


def test_an_unreadable_directory_is_no_absence(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        sky.checkpoint(tmp_path / "file").latest()
