"""Run a Prefect worker, and end its flow runs before it: `python end_runs_first.py prefect worker start ...`.

Prefect's process worker sends its flow runs SIGKILL when it is asked to end (seen with 3.7.7). Here SIGTERM goes to the
flow runs first, which give their machines back, and to the worker when they have ended. This program ends when nothing
is left of what they have started, such as the reaper of a pool: a container ends with its first program.
"""

import ctypes
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

import psutil

PR_SET_CHILD_SUBREAPER = 36
POLL_SECONDS = 0.1


def main(command: list[str]) -> int:
    """Return the exit code of the worker."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
    worker = psutil.Process(subprocess.Popen(command).pid)

    def end(*_: object) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        with suppress(psutil.NoSuchProcess):
            runs = worker.children()
            for run in runs:
                with suppress(psutil.NoSuchProcess):
                    run.terminate()
            while any(map(lives, runs)):
                time.sleep(POLL_SECONDS)
            worker.terminate()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)
    code = 0
    with suppress(ChildProcessError):  # nothing is left
        while True:
            pid, status = os.wait()
            if pid == worker.pid:
                code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def lives(run: psutil.Process) -> bool:
    try:
        return run.is_running() and run.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
