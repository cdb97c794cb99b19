"""Watches the run of a step, and under the multiprocess executor the run's process.

Without these the results of a step are not used, and it costs money for nothing.
"""

import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable

import dagster as dg

import skyward_core as sky

PARENT_SECONDS = 1.0
RUN_SECONDS = 5.0
OVER = (dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.CANCELED)

_log = logging.getLogger("skyward")


class RunWatch:
    """Watches the run of this process in a separate thread, and calls `stop` with the reason, once, when the run has
    ended.

    If the run's process is killed, the run stays "started" until a monitor notices, and its step processes go on: so
    the watch checks both.
    """

    def __init__(
        self,
        instance: dg.DagsterInstance,
        run_id: str,
        stop: Callable[[str], None],
        tick: Callable[[], object] = lambda: None,
    ) -> None:
        """`tick` is called every second too."""
        self._tick = tick
        self._instance = instance
        self._run_id = run_id
        self._stop = stop
        self._over = threading.Event()
        self._looks = 0
        self._thread = sky.LoopThread("skyward-dagster-run", self._look)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def close(self) -> None:
        """End, and wait for the thread unless it is the one that calls."""
        self._over.set()
        self._thread.join(RUN_SECONDS)

    def _look(self) -> None:
        is_step: bool | None = None
        """None: the storage has not said yet whether the parent process is the run's."""
        while not self._over.wait(PARENT_SECONDS):
            self._looks += 1
            if is_step is None and self._looks % RUN_SECONDS == 1:
                is_step = self._is_step_process()
            parent = multiprocessing.parent_process() if is_step else None
            try:
                self._tick()
            except Exception:  # what a tick shows is not worth the watch
                _log.exception("a step's progress could not be shown")
            if parent is not None and not parent.is_alive():
                why = f"the run's process {parent.pid} is gone"
            elif self._looks * PARENT_SECONDS % RUN_SECONDS or not (status := self._status()):
                continue
            else:
                why = f"its run is {status}"
            self._over.set()
            self._stop(why)

    def _is_step_process(self) -> bool | None:
        """Whether the run's process has started this one; None if its storage does not answer."""
        try:
            return is_step_process(self._instance, self._run_id)
        except Exception:
            _log.warning("the run's log could not be read, and is again in %.0f s", RUN_SECONDS, exc_info=True)
            return None

    def _status(self) -> str:
        """How the run has ended; "" if it has not ended, or its storage does not answer."""
        try:
            run = self._instance.get_run_by_id(self._run_id)
        except Exception:
            _log.warning("the run's status could not be read, and is again in %.0f s", RUN_SECONDS, exc_info=True)
            return ""
        if run is None:
            return "deleted"
        return run.status.value.lower() if run.status in OVER else ""


def is_step_process(instance: dg.DagsterInstance, run_id: str) -> bool:
    """Whether the run's process has started this process for one step: then the run's log has that process's pid as the
    executor's.

    The parent of a run's own process is the code server, which may restart while runs go on.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return False
    for entry in instance.all_logs(run_id, of_type=dg.DagsterEventType.ENGINE_EVENT):
        event = entry.dagster_event
        pid = event.engine_event_data.metadata.get("pid") if event is not None else None
        if pid is not None and str(pid.value) == str(parent.pid):
            return True
    return False


def step_of_process(instance: dg.DagsterInstance, run_id: str) -> str:
    """Return the key of the one step for which the multiprocess executor has started this process; "" for others."""
    if not is_step_process(instance, run_id):
        return ""
    for entry in instance.all_logs(run_id, of_type=dg.DagsterEventType.STEP_WORKER_STARTED):
        event = entry.dagster_event
        pid = event.engine_event_data.metadata.get("pid") if event is not None else None
        if pid is not None and str(pid.value) == str(os.getpid()):
            return entry.step_key or ""
    return ""


def interrupt_step() -> None:
    """Raise in the step's main thread the exception that Dagster raises when it terminates the run.

    For a process that Dagster has started.
    """
    if multiprocessing.parent_process() is not None and os.name == "posix":
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
