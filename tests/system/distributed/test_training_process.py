"""Processes of trainings, with plain functions and no framework."""

import contextlib
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

import skyward_core as sky
from skyward_core.distributed.group import Group
from skyward_core.distributed.member import Place
from skyward_core.distributed.training_process import TrainingJob, TrainingProcess
from skyward_core.serialization import pickling
from skyward_core.worker.keeper import start_of
from tests.waiting import wait_until


@dataclass(frozen=True)
class Plain:
    """A framework that sets a variable and exchanges a value."""

    needs_process: ClassVar[bool] = True

    @contextlib.contextmanager
    def running(self, group: Group) -> Generator[None]:
        group.set_environment({"PLAIN": str(group.exchange(group.place.rank))})
        yield


def run(fn: Callable[..., Any], mark: bytes = b"") -> Any:
    place, work = Place(3, 5, 0, 1, 3, 5, "127.0.0.1", "key"), pickling.dumps((fn, (), {}))
    job = TrainingJob(place, "127.0.0.1", (), pickling.dumps(Plain()), work, mark)
    with TrainingProcess({}) as process:
        value = process.run(job, lambda value: [value, "other"])
        process.end()
    return pickling.loads(value)


def test_output_records_and_metrics_are_those_of_the_runner(capfd: pytest.CaptureFixture[str]) -> None:
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
from skyward_core.distributed.training_process import TrainingJob
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
