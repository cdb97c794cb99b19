"""What runs in the process of one rank's training; see `training_process.py`."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import traceback
from contextlib import ExitStack
from multiprocessing.connection import Connection
from typing import Any, NoReturn, cast

from skyward_core.distributed.group import Group
from skyward_core.distributed.training_process import Channel, Failure, TrainingJob
from skyward_core.serialization import exceptions, pickling, sources
from skyward_core.wire import log_records
from skyward_core.wire import messages as call_metrics
from skyward_core.wire.log_records import keep_levels
from skyward_core.worker.node_clocks import die_with_parent
from skyward_core.worker.runner import completed

_OWN_FOLDER = os.path.dirname(__file__)


def main() -> NoReturn:
    """Run the job that the runner sends, then wait to be killed. Arguments: a descriptor, and the runner's pid."""
    descriptor, runner = map(int, sys.argv[1:])
    die_with_parent(runner)
    del sys.argv[1:]
    os.set_inheritable(descriptor, False)  # noqa: FBT003
    channel = Channel(Connection(descriptor))
    with contextlib.suppress(EOFError, OSError):  # the runner has ended
        _run(channel, cast(TrainingJob, channel.receive()[1]))
        _flush()
        channel.send("over")
        channel.receive()
    os._exit(0)


def _run(channel: Channel, job: TrainingJob) -> None:
    """Run the job and send its end. Tear the framework down only if all ranks have returned."""
    reporter = _settle_in(job.mark)
    log_records.of_this_process.set(job.log_levels)
    undo, pid = ExitStack(), os.getpid()
    try:
        value = _value(channel, job, undo)
    except SystemExit as error:
        code = cast(object, error.code)
        end = "exited", code if isinstance(code, int | str | None) else str(code)
    except BaseException as error:
        end = "failed", _failure(error)
    else:
        end = "returned", value
    _flush()
    if os.getpid() != pid:
        os._exit(int(end[0] != "returned"))  # a fork of the function: its parent sends the end
    if reporter is not None:
        reporter.end_call()
    channel.send(*end)
    channel.receive()  # never comes after an error: a teardown would make other ranks fail
    try:
        undo.close()
    except Exception:  # the value counts; what the framework says of its end is for the log
        traceback.print_exc()


def _value(channel: Channel, job: TrainingJob, undo: ExitStack) -> pickling.Pickled:
    def exchange(value: Any) -> list[Any]:
        channel.send("exchange", value)
        return cast("list[Any]", channel.receive()[1])

    sources.install(job.sources)
    group = Group(job.place, job.address, exchange)
    undo.callback(group.restore_environment)
    undo.enter_context(pickling.loads(job.framework).running(group))
    fn, args, kwargs = pickling.loads(job.work)
    return pickling.dumps(completed(fn(*args, **kwargs)), label="result")


def _settle_in(mark: bytes) -> call_metrics.Reporter | None:
    """Write as the runner does: whole lines, log records with their levels, and metrics, whose reporter is returned."""
    sys.stdout = open(1, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)  # noqa: SIM115 - lives as long as the process
    sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)  # noqa: SIM115
    if not mark:
        return None
    keep_levels(mark, (sys.stdout, sys.stderr))
    reporter = call_metrics.Reporter(1, mark)
    call_metrics.use(reporter)
    return reporter


def _failure(error: BaseException) -> Failure:
    tb = error.__traceback__
    while tb is not None and tb.tb_next is not None and os.path.dirname(tb.tb_frame.f_code.co_filename) == _OWN_FOLDER:
        tb = tb.tb_next
    try:
        return Failure(exceptions.pack(error), "".join(traceback.format_exception(error.with_traceback(tb))))
    except Exception:  # the exception's own code runs here, and may raise anything
        text = f"{exceptions.name_of(type(error))}: {exceptions.text_of(error)}"
        return Failure(exceptions.pack(RuntimeError(text)), text)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # the function may have closed or replaced them
            stream.flush()
    ctypes.CDLL(None).fflush(None)
