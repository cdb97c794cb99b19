"""The guard of a node, as a real process on this machine: when it ends the node, and what it removes."""

import pytest

from tests.system.provisioning.test_guard import (  # noqa: F401 - fixtures
    guarded,
)


@pytest.mark.parametrize("text", ["", "1", "12.5", "soon\n", "-5\n", "1e3\n", "9" * 40 + "\n", "\0\0\n", None])
def test_an_unreadable_lease_is_ignored(guarded, text):
    """An incomplete, invalid or missing file changes nothing. The last valid lease counts, and it expires."""
    node = guarded()
    node.write("lease", "3000\n")
    node.looked()
    if text is None:
        (node.directory / "lease").unlink()
    else:
        node.write("lease", text)
    node.set_uptime(2999)
    node.looked()
    node.set_uptime(3000)
    node.ended()
