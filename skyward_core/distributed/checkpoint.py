"""Checkpoints of a training: `sky.checkpoint(path)`, on a volume or any directory that the next attempt can read.

    path/step-00000100-4f1c…/   the files of one checkpoint, never renamed
    path/step-00000100-4f1c….complete   JSON: its files and their sizes; written last

A checkpoint counts when its `.complete` file is there and all files that it names have their sizes. So a process that
is killed between any two lines leaves an older complete checkpoint, and a directory that the next `save` removes.
Directories are not renamed, because a volume on object storage (s3fs) renames a directory file by file. One process
writes to a path at a time (rank 0); any number may read.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import re
import secrets
import shutil
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import Any

from skyward_core.errors import BadRequest

COMPLETE = ".complete"
VALUE = "value.pickle"
_NAME = re.compile(r"step-(\d{8,})-[0-9a-f]{8}")


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """A complete checkpoint: the step that it was saved for, and the directory with its files."""

    step: int
    path: Path


class Checkpoint:
    """The checkpoints of one training. See `checkpoint`."""

    def __init__(self, path: str | os.PathLike[str], keep: int = 2) -> None:
        if not isinstance(path, str | os.PathLike) or not os.fspath(path):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise BadRequest(f"path={path!r}: write the directory of the checkpoints, such as /mnt/data/run-1")
        if not isinstance(keep, Integral) or keep < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise BadRequest(f"keep={keep!r} must be a whole number of 1 or more: how many checkpoints stay")
        self.path = Path(path)
        self._keep = keep

    def save(self, step: int, value: object) -> SavedCheckpoint:
        """Save a value with `pickle`; return when it is complete and on disk.

        Raises OSError, and what pickle raises.
        """
        with self.writing(step) as directory, open(directory / VALUE, "wb") as file:
            pickle.dump(value, file, protocol=5)
        return SavedCheckpoint(step, directory)

    def load(self, default: Any = None) -> Any:
        """Return the value of the newest complete checkpoint; `default` if there is none.

        Raises FileNotFoundError if that one was written with `writing`: read its files from `latest().path`. Only
        load what you trust: unpickling runs code.
        """
        newest = self.latest()
        while newest is not None:
            try:
                with open(newest.path / VALUE, "rb") as file:
                    return pickle.load(file)
            except FileNotFoundError:
                # the process that saves has removed it meanwhile, if there is a newer one
                before, newest = newest, self.latest()
                if newest == before:
                    raise
        return default

    @contextlib.contextmanager
    def writing(self, step: int) -> Generator[Path]:
        """Yield a new directory; the checkpoint is complete when the block ends without an exception.

        For files that a framework writes itself: `torch.save(state, directory / "model.pt")`. Older checkpoints than
        the newest `keep` are removed then, and so are those that were not completed. Raises BadRequest for a step
        that is no whole number.
        """
        if not isinstance(step, Integral) or step < 0:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise BadRequest(f"step={step!r} must be a whole number of 0 or more")
        self.path.mkdir(parents=True, exist_ok=True)
        directory = self.path / f"step-{step:08}-{secrets.token_hex(4)}"
        directory.mkdir()
        try:
            yield directory
            _complete(directory)
        except BaseException:
            _remove(directory)
            raise
        self._clean(directory.name)

    def latest(self) -> SavedCheckpoint | None:
        """Return the newest complete checkpoint, by its step; None if there is none. Raises OSError if it cannot be
        known.
        """
        return next(self._complete_ones(), None)

    def _complete_ones(self) -> Iterator[SavedCheckpoint]:
        """Yield the complete checkpoints, newest first. Of two for one step, the one completed later is first."""
        while True:
            marks = [mark for mark in _entries(self.path) if mark.name.endswith(COMPLETE)]
            complete = list[tuple[int, int, Path]]()
            for mark in marks:
                directory = mark.with_name(mark.name.removesuffix(COMPLETE))
                completed_at = _completed_at(directory, mark)
                if (step := _step(directory)) is not None and completed_at is not None:
                    complete.append((step, completed_at, directory))
            # one that is removed during the look has made room for a newer one, which the list may lack
            if all(map(os.path.exists, marks)):
                break
        for step, _, directory in sorted(complete, reverse=True):
            yield SavedCheckpoint(step, directory)

    def _clean(self, newest: str) -> None:
        """Remove all but the newest, and what was not completed. What cannot be removed stays: the next one tries."""
        kept = {newest, *(found.path.name for _, found in zip(range(self._keep), self._complete_ones(), strict=False))}
        for entry in _entries(self.path):
            if _step(entry) is not None and entry.name.removesuffix(COMPLETE) not in kept:
                _remove(entry.with_name(entry.name.removesuffix(COMPLETE)))


def checkpoint(path: str | os.PathLike[str], *, keep: int = 2) -> Checkpoint:
    """Return the checkpoints at `path`, a directory that outlives the machine, such as a mounted volume.

    A training that is begun again goes on from the newest complete one; the newest `keep` stay. One process saves (rank
    0), all may load. It is safe to kill a process at any point of `save`. Raises BadRequest for a path or a number that
    is none.

    >>> import tempfile
    >>> path = tempfile.mkdtemp()
    >>> found = checkpoint(path)
    >>> step, weights = found.load(default=(0, [0.0]))
    >>> saved = found.save(step + 1, (step + 1, [0.5]))
    >>> checkpoint(path).load()
    (1, [0.5])
    """
    return Checkpoint(path, keep)


def _complete(directory: Path) -> None:
    """Bring the files of a checkpoint to the disk, and then the file that says that they are there."""
    sizes = dict[str, int]()
    for file in sorted(directory.rglob("*")):
        if file.is_file():
            _sync(file)
            sizes[str(file.relative_to(directory))] = file.stat().st_size
    for folder in [*(entry for entry in directory.rglob("*") if entry.is_dir()), directory, directory.parent]:
        _sync(folder)
    mark = directory.with_name(directory.name + COMPLETE)
    unfinished = directory / COMPLETE
    with open(unfinished, "w", encoding="utf-8") as file:
        json.dump(sizes, file)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(mark)  # atomic, and one object on object storage
    _sync(mark.parent)


def _completed_at(directory: Path, mark: Path) -> int | None:
    """Return the time of a mark, in nanoseconds; None if a file of the checkpoint has not the size that it names, or
    the process that saves removes the checkpoint just now.
    """
    try:
        sizes = dict[str, int](json.loads(mark.read_bytes()))
        is_complete = all((directory / name).stat().st_size == size for name, size in sizes.items())
        return mark.stat().st_mtime_ns if is_complete else None
    except (FileNotFoundError, NotADirectoryError, ValueError, TypeError):  # another error is no absence
        return None


def _entries(path: Path) -> list[Path]:
    try:
        return list(path.iterdir())
    except FileNotFoundError:
        return []


def _step(entry: Path) -> int | None:
    match = _NAME.fullmatch(entry.name.removesuffix(COMPLETE))
    return int(match[1]) if match else None


def _remove(directory: Path) -> None:
    """Remove a checkpoint: first the file that says that it is complete. Never raises."""
    with contextlib.suppress(OSError):
        directory.with_name(directory.name + COMPLETE).unlink(missing_ok=True)
        shutil.rmtree(directory, ignore_errors=True)


def _sync(path: Path) -> None:
    """Bring a file or a folder to the disk. Some file systems (FUSE) cannot sync folders, and do not need it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:
        if not path.is_dir():
            raise
    finally:
        os.close(descriptor)
