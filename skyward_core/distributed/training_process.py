"""A separate process for one rank of a training: the runner starts it, follows it, and ends it.

Some frameworks configure a process once, or end it when another rank fails; and a node with several GPUs needs a
process for each. The process (`training_main.py`) is a new interpreter, not a fork: the runner may have threads and a
CUDA context of earlier calls. It has the runner's environment, output and process group, so a signal to the runner's
group ends it too. The kernel kills it when the runner dies. The runner keeps the connection to the group's hub, so the
group learns of the end of the process, and which rank failed first.

States of a process, as its runner sees them:

    started ──────► running ──────► returned ──────► over
        │  (job)       │  (value)       │ (all ranks)    │
        └──────────────┴─────────┬──────┴────────────────┘
                               killed, with all that it has started
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, NoReturn, Self, cast

from skyward_core.distributed.member import Member, Place
from skyward_core.serialization import exceptions, pickling
from skyward_core.serialization.pickling import Pickled
from skyward_core.serialization.sources import Source
from skyward_core.wire.log_records import LogLevels
from skyward_core.worker.keeper import kill_all

LOOK_SECONDS = 0.2
"""How often to look whether the other process lives, because its own children may keep the connection open."""
TEARDOWN_SECONDS = 30.0
"""How long a framework may take to end its communication, when the functions of all ranks have returned."""
_COMMAND = (
    "import json, sys; sys.path[:] = json.loads(sys.argv.pop());"
    " from skyward_core.distributed.training_main import main; main()"
)


# What a runner and the process of its training say to each other: messages over a socket pair, never to the disk.
#
# runner → process      start (TrainingJob), values (of all ranks), end (the functions of all ranks have returned)
# process → runner      exchange (a value for all ranks), returned, failed, exited, over (all is torn down)


class TrainingJob(NamedTuple):
    """What the process of a rank needs: its place and its node's address in the group, and, pickled, the framework, the
    function and the arguments. The arguments may have the framework's arrays, and are loaded when it runs. `mark` is
    for log records, see `wire.log_records`, and `log_levels` are those of its call.
    """

    place: Place
    address: str
    sources: tuple[Source, ...]
    framework: Pickled
    work: Pickled
    mark: bytes
    log_levels: LogLevels = ()


class Failure(NamedTuple):
    """An exception as `serialization.exceptions` packs it, and its traceback."""

    packed: Pickled
    text: str


class Channel:
    """One end of the connection. Large buffers of a pickle travel by themselves and are not copied into a message."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def send(self, kind: str, value: object = None) -> None:
        """Send a message. Raises OSError if the other side is gone."""
        buffers: list[pickle.PickleBuffer] = []
        head = pickle.dumps((kind, value), protocol=5, buffer_callback=buffers.append)
        views = [buffer.raw() for buffer in buffers]
        self._connection.send_bytes(pickle.dumps([view.nbytes for view in views]))
        self._connection.send_bytes(head)
        for view in views:
            self._connection.send_bytes(view)

    def poll(self, seconds: float) -> bool:
        """Return whether a message has begun to arrive, or the other side is gone, within this time."""
        return self._connection.poll(seconds)

    def receive(self) -> tuple[str, object]:
        """Wait for a message; return its kind and its value. Raises EOFError or OSError if the other side is gone."""
        sizes: Sequence[int] = pickle.loads(self._connection.recv_bytes())
        head = self._connection.recv_bytes()
        buffers = [bytearray(size) for size in sizes]  # arrays that are made of them can be written to
        for buffer in buffers:
            self._connection.recv_bytes_into(buffer)
        kind, value = pickle.loads(head, buffers=buffers)
        return kind, value

    def close(self) -> None:
        """Close this end."""
        self._connection.close()


class ProcessEnded(Exception):
    """The process of a rank ended by itself: its function was not over. `exit_code` is negative for a signal."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(exit_code)
        self.exit_code = exit_code

    def __str__(self) -> str:
        if self.exit_code >= 0:
            return f"the process of a training ended with exit code {self.exit_code}"
        with contextlib.suppress(ValueError):
            return f"the process of a training was ended by {signal.Signals(-self.exit_code).name}"
        return f"the process of a training was ended by signal {-self.exit_code}"

    @property
    def may_be_consequence(self) -> bool:
        """Whether another rank's failure may have caused it: libraries abort when they lose their coordinator."""
        return self.exit_code == -signal.SIGABRT

    def repeat(self) -> NoReturn:
        """End this process in the same way, so that its worker reports the same as for a call without a separate
        process.
        """
        with contextlib.suppress(Exception):  # the call may have closed or replaced them
            sys.stdout.flush()
            sys.stderr.flush()
        if self.exit_code < 0:
            with contextlib.suppress(OSError, ValueError):  # SIGKILL has no handler
                signal.signal(-self.exit_code, signal.SIG_DFL)
            os.kill(os.getpid(), -self.exit_code)
            time.sleep(LOOK_SECONDS)
        os._exit(self.exit_code if self.exit_code >= 0 else 1)


class TrainingProcess:
    """The process of one rank. It is killed at the end of the context, with all that it has started."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        ours, theirs = Pipe()
        self._channel = Channel(ours)
        arguments = [str(theirs.fileno()), str(os.getpid()), json.dumps(sys.path)]
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _COMMAND, *arguments],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, **variables},
            )
        except BaseException:
            self._channel.close()
            raise
        finally:
            theirs.close()

    @property
    def pid(self) -> int:
        """The id of the process."""
        return self._process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._channel.close()

    def kill(self) -> None:
        """Kill the process and all below it. It may be called again, and from another thread."""
        if self._process.poll() is None:
            kill_all([self._process.pid])
        self._process.wait()

    def run(self, job: TrainingJob, exchange: Callable[[Any], list[Any]]) -> pickling.Pickled:
        """Let the process run a job, and return its pickled value. Serves the process's exchanges.

        Raises the function's or the framework's error, SystemExit, or ProcessEnded.
        """
        self._send("start", job)
        while True:
            match self._receive():
                case "exchange", value:
                    self._send("values", exchange(value))
                case "returned", pickling.Pickled() as value:
                    return value
                case "failed", Failure(packed, text):
                    raise exceptions.unpack_here(packed.data, packed.buffers, text)
                case "exited", code:
                    raise SystemExit(code)
                case other:
                    raise AssertionError(f"the process of a training sent {other}")

    def end(self, seconds: float = TEARDOWN_SECONDS) -> None:
        """Let the process tear its framework down, all ranks at the same time, then kill it.

        The value is there already: a teardown that fails or takes too long is not waited for.
        """
        with contextlib.suppress(ProcessEnded):
            self._send("end", None)
            self._await_message(time.monotonic() + seconds)
        self.kill()

    def _send(self, kind: str, value: object) -> None:
        try:
            self._channel.send(kind, value)
        except OSError:
            raise ProcessEnded(self._exit_code()) from None

    def _receive(self) -> tuple[str, object]:
        self._await_message(float("inf"))
        try:
            return self._channel.receive()
        except (EOFError, OSError):
            raise ProcessEnded(self._exit_code()) from None

    def _await_message(self, deadline: float) -> None:
        """Return when a message has begun to arrive, or at the deadline."""
        while not self._channel.poll(LOOK_SECONDS) and time.monotonic() < deadline:
            if self._process.poll() is not None and not self._channel.poll(0):
                raise ProcessEnded(self._exit_code())

    def _exit_code(self) -> int:
        """Return the exit code of a process that has closed its connection."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(LOOK_SECONDS)
        self.kill()
        return cast(int, self._process.returncode)


def run_all(
    processes: Sequence[TrainingProcess], members: Sequence[Member], job: Callable[[Member], TrainingJob]
) -> Any:
    """Run one job in each process, as the rank of the member at the same position; return their values.

    Raises the first error of a rank. Then all processes are killed and all members closed: the group has its verdict.
    """
    with ThreadPoolExecutor(len(members), thread_name_prefix="skyward-training") as threads:
        pairs = zip(processes, members, strict=True)
        futures = [threads.submit(_run_as, process, member, job(member)) for process, member in pairs]
        try:
            for future in as_completed(futures):
                future.result()
        except BaseException:
            for process in processes:
                process.kill()
            for member in members:
                member.close()
            raise
    values = [future.result() for future in futures]
    return [pickling.loads(value) for value in values]


def _run_as(process: TrainingProcess, member: Member, job: TrainingJob) -> pickling.Pickled:
    """Run a job as a rank of the group, until the functions of all ranks have returned.

    Says which of several ranks of a node has failed first: in a note of its error, or in the output of the call.
    """
    try:
        value = process.run(job, member.exchange)
        member.finish()
    except (ProcessEnded, SystemExit) as error:
        member.fail(error, is_certain=isinstance(error, ProcessEnded) and not error.may_be_consequence)
        if member.place.local_world_size > 1:
            text = f"sys.exit({error.code!r})" if isinstance(error, SystemExit) else error
            print(f"skyward: {_name_of(member.place)} failed first: {text}", file=sys.stderr, flush=True)
        raise
    except BaseException as error:
        member.fail(error)
        if member.place.local_world_size > 1:
            error.add_note(f"raised by {_name_of(member.place)}")
        raise
    process.end()
    return value


def _name_of(place: Place) -> str:
    return f"rank {place.rank} of {place.world_size}, which is local rank {place.local_rank} of node {place.node}"
