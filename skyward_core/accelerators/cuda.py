"""The CUDA version in a text: the version that a driver must support for an image or a package."""

from __future__ import annotations

import re

CUDA = re.compile(r"(?<![a-z0-9])cu(?:da)?[-:]?(1[0-9])[.-]?([0-9])?")
"""As in cu128, cu1281, cuda12x, cuda:12.4.1, cuda-13.0, nvidia-cublas-cu12.

Versions before 10 work with every driver.
"""


def cuda_of(text: str) -> float | None:
    """Return the newest CUDA version in a requirement, an index's URL or an image's name; None if it has none.

    >>> [cuda_of(text) for text in ("torch==2.9.1+cu128", "cupy-cuda12x", "nvidia/cuda:12.4.1-ubuntu22.04", "torch")]
    [12.8, 12.0, 12.4, None]
    """
    found = [(int(major), int(minor or 0)) for major, minor in CUDA.findall(text.casefold())]
    major, minor = max(found, default=(0, 0))
    return float(f"{major}.{minor}") if found else None
