"""A script as a separate process of a call: what `skyward run` runs on a node.

The script and the modules of its project that it imports come as texts, and are written into a folder that is removed
with the process. The process has the call's output, environment and process group, so it ends with the call.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from skyward_core.worker.info import instance_info

BY_SIGNAL = 128
"""Shells add the number of the signal that has ended a process to this."""


class Script(NamedTuple):
    """A Python file with its arguments. `files` has its text and those of its modules, by their paths."""

    name: str
    files: Mapping[str, str]
    args: tuple[str, ...]


def run_script(script: Script) -> int:
    """Run a script to its end; return its exit code, as a shell has it."""
    with tempfile.TemporaryDirectory(prefix="skyward-run-") as folder:
        for path, text in script.files.items():
            place = Path(folder, path)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(text, encoding="utf-8")
        done = subprocess.run(
            [sys.executable, "-u", os.path.join(folder, script.name), *script.args],
            stdin=subprocess.DEVNULL,
            env={**os.environ, **rank_variables(), "PYTHONPATH": os.pathsep.join(_search_path())},
            check=False,
        )
    return done.returncode if done.returncode >= 0 else BY_SIGNAL - done.returncode


def rank_variables() -> dict[str, str]:
    """Return the variables by which the processes of one program find each other, named as those of torchrun."""
    info = instance_info()
    return {
        "RANK": str(info.rank),
        "WORLD_SIZE": str(info.world_size),
        "LOCAL_RANK": str(info.worker),
        "LOCAL_WORLD_SIZE": str(info.workers_per_node),
        "MASTER_ADDR": info.head_addr,
        "MASTER_PORT": str(info.head_port),
    }


def _search_path() -> Sequence[str]:
    """Return where this process finds modules: the script may import skyward_core too."""
    return [entry for entry in sys.path if entry]
