"""SSH to one machine, against a real SSH server on this machine."""

import tracemalloc

from skyward_core.transport.ssh_files import FETCH_WINDOW_BYTES
from tests.system.transport.test_ssh_connection import (  # noqa: F401 - fixtures
    connection,
    endpoint,
    key,
    own_home,
    server,
)


def test_a_large_value_is_not_copied_as_a_whole(connection):
    """Neither writing a value to a file nor reading it back makes a second copy of it."""
    size = 8 * FETCH_WINDOW_BYTES
    content, room = bytes(size), bytearray(size)
    tracemalloc.start()
    try:
        connection.put([content], "value")
        connection.fetch("value", into=room, remove=True)
        # the server is in this process too, and may be some windows ahead of us
        assert tracemalloc.get_traced_memory()[1] < size * 3 / 4
    finally:
        tracemalloc.stop()
