"""Where hosts are, and what is there: told by `far.py` to the processes that measure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """Hosts that `root` reaches over SSH with this key file; a pool has one node on each.

    `packages` is what the user wants installed there.
    """

    addresses: Sequence[str]
    key: str
    packages: Sequence[str]
    requirements: Sequence[str]
    """All that is installed: `packages`, and what Dask needs in this client's versions."""
    python: str | None = None
    """The interpreter of the cached environment that has all of it; None on bare hosts."""
