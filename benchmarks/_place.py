"""The hosts of a measurement and their software. `_far.py` passes them to the processes that measure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """Hosts on which `root` logs in over SSH with this key file. A pool has one node on each.

    `packages` are the packages of the image.
    """

    addresses: Sequence[str]
    key: str
    packages: Sequence[str]
    requirements: Sequence[str]
    """All packages to install: `packages`, and those of Dask, in the versions of this client."""
    python: str | None = None
    """The interpreter of the cached environment with these packages; None on bare hosts."""
