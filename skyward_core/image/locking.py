"""Creates the lock of an image: on the client, with its own uv, before anything is rented.

The network is used only for the package index.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import uv

from skyward_core.errors import BadRequest
from skyward_core.image.packages import PROJECT, name_of, names_of, project, read_lock

COMPILE_SECONDS = 300.0
COMPILE = ("--universal", "--generate-hashes", "--quiet", "--no-header", "--no-annotate", "--no-progress")


def locked(
    python: str, requirements: Sequence[str], pinned: Mapping[str, Sequence[str]], known: str, env: Mapping[str, str]
) -> str:
    """Return a lock of these requirements and their dependencies, for Linux on every architecture.

    It begins with the `known` lock, whose versions are kept. `env` is the image's: its mirror or proxy is used here
    too. Raises BadRequest with uv's message.
    """
    with tempfile.TemporaryDirectory(prefix="skyward-lock-") as folder:
        (Path(folder) / PROJECT).write_text(project(requirements, pinned))
        (Path(folder) / "known.txt").write_text(known)
        command = [
            uv.find_uv_bin(),
            "pip",
            "compile",
            *COMPILE,
            "--python",
            sys.executable,
            "--python-version",
            python,
            "--constraints",
            "known.txt",
            PROJECT,
        ]
        environment = {name: value for name, value in {**os.environ, **env}.items() if name != "UV_NO_VERIFY_HASHES"}
        try:
            done = subprocess.run(
                command,
                check=True,
                capture_output=True,
                text=True,
                timeout=COMPILE_SECONDS,
                stdin=subprocess.DEVNULL,
                cwd=folder,
                env=environment,
            )
        except subprocess.CalledProcessError as error:
            raise BadRequest(f"the image's packages cannot be locked: {error.stderr.strip()}") from error
        except subprocess.TimeoutExpired as error:
            raise BadRequest(
                f"the package index did not resolve the image's packages within {COMPILE_SECONDS:.0f} s, so they cannot"
                " be locked"
            ) from error
    there = names_of(known)
    return known + "".join(f"{line}\n" for line in read_lock(done.stdout).splitlines() if name_of(line) not in there)
