"""Ends a pool in a process of its own, with the credentials of a connection: what a kill of a task starts.

They come through stdin, because other users see the arguments of a process.
"""

from __future__ import annotations

import pickle
import subprocess
import sys

import skyward_core as sky


def order_stop(pool: str, credentials: sky.Provider | None = None) -> None:
    """Start the process. It survives a SIGKILL to this process group. Called in a signal handler: it waits for nothing,
    as the order fits into the pipe.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", __name__],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert process.stdin is not None
    process.stdin.write(pickle.dumps((pool, credentials)))
    process.stdin.close()


def main() -> None:
    """Read the order and end the pool."""
    pool, credentials = pickle.loads(sys.stdin.buffer.read())
    sky.release(pool, credentials=credentials)


if __name__ == "__main__":
    main()
