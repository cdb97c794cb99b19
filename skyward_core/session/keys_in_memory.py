"""Texts of SSH keys as files in this process's memory: a kill leaves nothing of them on a disk."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from skyward_core.machines.instances import Lease, Node


class KeysInMemory:
    """Owns files without a name. Their paths are valid in this process, until `close`."""

    def __init__(self) -> None:
        self._files: list[int] = []
        self._paths: dict[str, str] = {}

    def path_of(self, key: str) -> str:
        """Write a key, unless it was written before, and return its path."""
        if key in self._paths:
            return self._paths[key]
        file = os.memfd_create("skyward-key")
        self._files.append(file)
        path = self._paths[key] = f"/proc/{os.getpid()}/fd/{file}"
        Path(path).write_text(key.strip() + "\n")
        return path

    def with_keys(self, lease: Lease, ssh_keys: Mapping[str, str]) -> Lease:
        """Return the lease with the paths of these keys, whose texts are given by the paths in the lease."""
        paths = {path: self.path_of(text) for path, text in ssh_keys.items()}
        return lease.model_copy(update={"nodes": tuple(_with_path(node, paths) for node in lease.nodes)})

    def close(self) -> None:
        """Remove the keys. May be called twice."""
        self._paths.clear()
        while self._files:
            os.close(self._files.pop())


def _with_path(node: Node, paths: Mapping[str, str]) -> Node:
    endpoint = node.instance.endpoint
    key = None if endpoint is None else endpoint.key
    return node if key is None or key not in paths else node.with_key(paths[key])
