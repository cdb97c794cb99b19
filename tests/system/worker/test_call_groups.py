"""Memory limits that the kernel enforces.

Most tests use a fake of cgroupfs; the last test needs a kernel with cgroup v2's memory controller.
"""

import subprocess
from pathlib import Path

import pytest

from skyward_core.transport import ssh_transport
from tests.unit.worker.test_call_groups import (
    PLACES,
    hierarchy,
)


@pytest.mark.parametrize("case", PLACES)
def test_a_group_on_a_host_is_made_in_the_same_place(case: str, tmp_path: Path) -> None:
    """The shell script finds the same place."""
    own, expected = hierarchy(tmp_path, case)
    completed = subprocess.run(
        ["sh", "-euc", f'parent=$1\n{ssh_transport.PLACE}\necho "$parent"', "sh", str(own)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert completed.stdout.strip() == expected
