"""Processes of trainings, with plain functions and no framework."""

import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

import skyward_core as sky
from skyward_core.distributed.group import Group
from skyward_core.distributed.member import Place
from skyward_core.distributed.training_channel import TrainingJob
from skyward_core.distributed.training_process import TrainingProcess
from skyward_core.serialization import pickling
from skyward_core.worker.keeper import start_of


@dataclass(frozen=True)
class Plain:
    """A framework that sets a variable and exchanges a value; its teardown can hang."""

    needs_process: ClassVar[bool] = True
    hangs: bool = False

    @contextlib.contextmanager
    def running(self, group: Group) -> Generator[None]:
        group.set_environment({"PLAIN": str(group.exchange(group.place.rank))})
        yield
        while self.hangs:
            signal.pause()


def job(fn: Callable[..., Any], *args: Any, framework: Plain | None = None, mark: bytes = b"") -> TrainingJob:
    place = Place(3, 5, 0, 1, 3, 5, "127.0.0.1", "key")
    work = pickling.dumps((fn, args, {}))
    return TrainingJob(place, "127.0.0.1", (), pickling.dumps(framework or Plain()), work, mark)


def run(fn: Callable[..., Any], *args: Any, mark: bytes = b"") -> Any:
    with TrainingProcess({}) as process:
        value = process.run(job(fn, *args, mark=mark), lambda value: [value, "other"])
        process.end()
    return pickling.loads(value)


def test_output_records_and_metrics_are_those_of_the_runner(capfd: pytest.CaptureFixture[str]) -> None:
    """They go to the same descriptors. Records and metrics have the runner's mark; the last metrics are not lost."""

    def say() -> None:
        for step in range(30):
            sky.report(step=step)
        print("printed", end="")
        logging.warning("a\nrecord")

    run(say, mark=b"secret\n")
    out, err = capfd.readouterr()
    first, *_, last = out.splitlines()
    assert (first, last) == ("secret:report [0, {}]", "printedsecret:report [29, {}]")
    assert err == 'secret:30 "WARNING:root:a\\nrecord"\n'


def test_the_process_is_killed_with_all_that_it_has_started() -> None:
    """Also if a child of it has a session of its own, and keeps the connection open."""

    def start() -> int:
        child = os.fork()
        if not child:
            os.setsid()
            while True:
                signal.pause()
        return child

    child = run(start)
    wait_until(lambda: not start_of(child), "the end of its child")


RUNNER = """
import contextlib, time
from skyward_core.distributed.member import Place
from skyward_core.distributed.training_channel import TrainingJob
from skyward_core.distributed.training_process import TrainingProcess
from skyward_core.serialization import pickling

class Nothing:
    def running(self, group):
        return contextlib.nullcontext()

def hang():
    print("hangs", flush=True)
    while True:
        time.sleep(1)

with TrainingProcess({}) as process:
    print(process.pid, flush=True)
    place = Place(0, 1, 0, 1, 0, 1, "127.0.0.1", "key")
    work = pickling.dumps((hang, (), {}))
    process.run(TrainingJob(place, "127.0.0.1", (), pickling.dumps(Nothing()), work, b""), lambda value: [value])
"""


def test_the_kernel_kills_the_process_when_its_runner_is_killed() -> None:
    """Its function hangs, so it would not see the end of its connection."""
    with subprocess.Popen([sys.executable, "-c", RUNNER], stdout=subprocess.PIPE) as runner:
        assert runner.stdout is not None
        pid = int(runner.stdout.readline())
        assert runner.stdout.readline() == b"hangs\n"
        runner.kill()
        runner.wait()
        try:
            wait_until(lambda: not start_of(pid), "the end of the process")
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def wait_until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)
