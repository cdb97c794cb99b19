"""Blocks of Prefect: the settings of a pool as a form, and the credentials of each cloud."""

import subprocess
import sys

import pytest

pytest.importorskip("prefect")


def test_importing_the_blocks_loads_no_part_of_the_core_that_is_heavy() -> None:
    """Prefect's server imports the module."""
    code = (
        "import sys, prefect_skyward.blocks;"
        " print([m for m in ('distributed', 'sqlalchemy.orm.skyward', 'prefect_skyward.task_runner', 'asyncssh',"
        " 'skyward_core.pool.pool', 'skyward_core.spec') if m in sys.modules])"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"
