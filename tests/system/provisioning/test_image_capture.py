"""`Image(cache=True)`: an image is captured from the first machine before secrets reach it.

Later machines start from it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from skyward_core.image.image import Image
from skyward_core.provisioning.bootstrap import IMAGE_ENV, KEEP_PHASE, REST, node_script_in_two
from skyward_core.spec import PoolSpec
from tests.testbed.fixtures import fleet, mirror  # noqa: F401 - fixtures
from tests.unit.provisioning.test_image_capture import SPEC

SHELLCHECK = Path(sys.executable).with_name("shellcheck")


@pytest.mark.parametrize("spec", [SPEC, PoolSpec(image=Image(cache=True, apt=["git"]))], ids=["env", "no env"])
def test_both_parts_pass_shellcheck(spec: PoolSpec) -> None:
    """The whole script passes too.

    Two findings are ignored: files that do not exist yet (SC1090, SC1091), and literal text that the whole script
    explains at its beginning (SC2016).
    """
    for piece in node_script_in_two(spec):
        done = subprocess.run(
            [SHELLCHECK, "-s", "bash", "-e", "SC1090,SC1091,SC2016,SC2154", "-"],
            input=piece,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.stdout == ""


def test_the_first_part_waits_for_the_second(tmp_path: Path) -> None:
    """It reads the image's environment from the named file, which it then deletes.

    The second part runs in the same shell.
    """
    first, _ = node_script_in_two(PoolSpec(image=Image(env={"INDEX_TOKEN": "x"}, cache=True)))
    head, installs, tail = first.partition("\n#!/usr/bin/env bash\n")
    wait = tail[tail.index("skyward_run sync") :]
    script = f'{head}{installs}skyward_run() {{ "$@"; }}\nskyward_phase() {{ echo "::skyward phase $1"; }}\necho "token $INDEX_TOKEN"\n{wait}'
    process = subprocess.Popen(
        ["bash", "-euo", "pipefail"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "SKYWARD_INSTANCE_DIRECTORY": str(tmp_path)},
    )
    with process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(script)
        process.stdin.close()
        memory = tmp_path / "memory"
        memory.write_text("export INDEX_TOKEN='to ken'\n")
        (tmp_path / "partial").write_text(f". {memory}; rm -f -- {memory}\n")
        (tmp_path / "partial").rename(tmp_path / IMAGE_ENV)
        assert process.stdout.readline() == "token to ken\n"
        assert process.stdout.readline() == f"::skyward phase {KEEP_PHASE}\n"
        assert not memory.exists()
        (tmp_path / "partial").write_text('echo "rest $INDEX_TOKEN"\n')
        (tmp_path / "partial").rename(tmp_path / REST)
        assert process.stdout.readline() == "rest to ken\n"
        assert process.wait(30) == 0
