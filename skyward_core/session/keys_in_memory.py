"""Texts of SSH keys as files in this process's memory: a kill leaves nothing of them on a disk."""

from __future__ import annotations

import os
from pathlib import Path


class KeysInMemory:
    """Owns files without a name. Their paths are valid in this process, until `close`."""

    def __init__(self) -> None:
        self._files: list[int] = []

    def path_of(self, key: str) -> str:
        """Write a key, and return its path."""
        file = os.memfd_create("skyward-key")
        self._files.append(file)
        path = f"/proc/{os.getpid()}/fd/{file}"
        Path(path).write_text(key.strip() + "\n")
        return path

    def close(self) -> None:
        """Remove the keys. May be called twice."""
        while self._files:
            os.close(self._files.pop())
