"""Where this process keeps files that no other user of the computer may touch."""

from __future__ import annotations

import errno
import fcntl
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from platformdirs import user_cache_path, user_state_path

from skyward_core.wire.private_folders import NotPrivate, opened_private, real_path

type Place = tuple[str, Callable[[], Path]]
"""The variable that names a folder, and what returns it."""


def state_places() -> list[Place]:
    """Return where state of this user may lie, best first.

    The state folder goes before XDG_RUNTIME_DIR: systemd gives the latter a tenth of the memory, and takes it away with
    the user's last session (docs/decisions/0015). Below TMPDIR another user may have made the folder of that name
    first: then it is refused, and the others are left.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    return [
        ("XDG_STATE_HOME", lambda: user_state_path("skyward")),
        *([("XDG_RUNTIME_DIR", lambda: Path(runtime) / "skyward")] if os.path.isabs(runtime) else []),
        ("TMPDIR", lambda: Path(tempfile.gettempdir()) / f"skyward-{os.getuid()}"),
    ]


def cache_places() -> list[Place]:
    """Return where a cache of this user may lie, best first."""
    return [("XDG_CACHE_HOME", lambda: user_cache_path("skyward")), *state_places()]


def first_private(name: str, places: Sequence[Place], *, is_locked: bool = False) -> Path:
    """Return the folder `name` of the first place where it is private, or can be made so, and can be written to.

    `is_locked` says that it, or one in it, will be locked, as a folder on NFS cannot be. Raises NotPrivate with the
    reason against each.
    """
    reasons: list[str] = []
    for variable, place in places:
        try:
            path = real_path(place() / name)
            with opened_private(path, make=True) as folder:
                _try_write(folder, path)
                if is_locked:
                    _try_lock(folder)
                return path
        except (OSError, RuntimeError, KeyError) as error:  # the latter two: no home, and no entry for this user
            reasons.append(f"{variable}: {error}")
    raise NotPrivate(
        f"no folder is safe from other users of this computer: {'; '.join(reasons)}. Name one of your own with"
        f" {places[0][0]}"
    )


def existing(name: str, places: Sequence[Place]) -> list[Path]:
    """Return the path of `name` in each of these places that is known, whether it exists or not."""
    found: list[Path] = []
    for _, place in places:
        try:
            found.append(Path(os.path.realpath(place())) / name)
        except (OSError, RuntimeError, KeyError):
            continue
    return found


def _try_write(folder: int, path: Path) -> None:
    """A folder may be ours and closed to others, and the file system be read-only."""
    if not os.access(".", os.W_OK, dir_fd=folder):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))


def _try_lock(folder: int) -> None:
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return  # another process of this user is looking
    fcntl.flock(folder, fcntl.LOCK_UN)
