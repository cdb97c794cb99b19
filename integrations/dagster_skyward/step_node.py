"""What runs on a node for `skyward_executor`: one step, in its own process. It travels by value, and imports nothing of
Dagster or of this package.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping


def run_step(step: str, env: Mapping[str, str], folder: str) -> None:
    """Run Dagster's own command for one step; raise RuntimeError unless it ends properly.

    It runs in the folder of the run's process, if there is such a folder here: a job's file may be relative to it.

    A step that fails ends properly: it has written its failure. When the call is stopped, the whole process group gets
    SIGTERM. This process waits then for the step, which is interrupted, and has two seconds for its end.
    """
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "dagster", "api", "execute_step"],
            env={**os.environ, **env},
            cwd=folder if os.path.isdir(folder) else None,
            check=False,
        )
    finally:
        signal.signal(signal.SIGTERM, before)
    code = done.returncode
    if code:
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        raise RuntimeError(f"the process of the step {step} ended with {how}")
