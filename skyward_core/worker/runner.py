"""The process in which calls run: one call at a time, in its main thread, until its worker closes the queue.

It owns nothing that needs cleanup, and may die at any point. From the packets that it has taken and the outcomes that
it has sent, its worker knows which call was running.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import inspect
import mmap
import os
import pickle
import socket
import sys
import time
import traceback
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn, cast

from skyward_core.errors import NodeLost, NotPicklable
from skyward_core.serialization import exceptions, pickling, sources
from skyward_core.work import RunContext, running_for
from skyward_core.worker import call_metrics, item_sender, log_records, shared_values
from skyward_core.worker.call_groups import MemoryAllowance
from skyward_core.worker.environment_variable import RewrittenVariable
from skyward_core.worker.gpus import is_context_broken
from skyward_core.worker.info import ENV, of_call
from skyward_core.worker.item_sender import ItemSender, is_generator, items_of
from skyward_core.worker.log_records import keep_levels
from skyward_core.worker.masking import Mask, SecretValues
from skyward_core.worker.stacks import answer_requests
from skyward_core.worker.wire import INLINE_BYTES, Call, Credit, Outcome, OutcomeKind, Parcel

_libc = ctypes.CDLL(None)


@dataclass(frozen=True, slots=True)
class RunnerChannels:
    """The runner's ends of its channels to the worker: packets of calls, packets of outcomes, and two output pipes.

    `info` is the text of the instance's information (`info.to_env`) with JOB_PLACE in it. `mark` separates the output
    of one call from the next one's; it is secret, so that no call can forge it. `room` is set if the kernel limits
    this process's memory.
    """

    calls: socket.socket
    outcomes: socket.socket
    stdout: int
    stderr: int
    mark: bytes
    info: str
    value_directories: tuple[str, ...]
    env: dict[str, str]
    room: MemoryAllowance | None = None


class Packet(NamedTuple):
    """A message to a runner: a call, and its function unless the runner has it; `fresh` lets it forget its functions.

    `may_reuse`: the file of the arguments is the client's, and the result may take it over. `secrets` come with the
    first call that a runner gets; `needs_secrets` is set in each packet of a pool with secrets. `shared` are the
    scattered values that the call uses, by name.
    """

    call: Call
    function: Parcel | None
    fresh: bool = False
    may_reuse: bool = False
    secrets: SecretValues | None = None
    needs_secrets: bool = False
    shared: tuple[tuple[str, Parcel], ...] = ()


def run_calls(line: RunnerChannels) -> NoReturn:
    """Run calls until the queue is closed, or one has broken the CUDA context of this process. Then end the process."""
    _settle_in(line)
    reporter = call_metrics.Reporter(line.stdout, line.mark)
    call_metrics.use(reporter)
    sender = ItemSender(
        line.calls,
        lambda item: line.outcomes.send(pickle.dumps(item, protocol=5)),
        lambda parcel: _stored(parcel, line),
    )
    functions: dict[str, sources.Loaded] = {}
    info = RewrittenVariable(ENV)
    mask, is_furnished = Mask(), False
    pid = os.getpid()
    while packet := line.calls.recv(INLINE_BYTES * 4):
        request = pickle.loads(packet)
        if type(request) is Credit:
            continue  # it came too late: its call has ended
        request = cast(Packet, request)
        if line.room is not None:
            line.room.settle()
        call = request.call
        info.set(of_call(line.info, call.job_id, is_broadcast=call.job_id != call.call_id, place=call.place))
        if request.secrets is not None:
            os.environ.update(request.secrets)
            mask, is_furnished = Mask(request.secrets.values()), True
        outcome, spent = (
            _run(request, functions, mask, sender)
            if _is_complete(request, functions, is_furnished)
            else (_returned(request), None)
        )
        if os.getpid() != pid:
            _end_child(outcome)
        reporter.end_call()
        _end_output(line)
        line.outcomes.send(pickle.dumps(_fit(outcome, line, spent), protocol=5))
        if outcome.kind is OutcomeKind.ERROR and is_context_broken(outcome.text):
            break  # the next call gets a new process; the slot takes it from the queue
        shared_values.begin_call({})
        del packet, request, call, outcome, spent  # frees the memory of this call before the wait for the next one
    os._exit(0)


def _end_child(outcome: Outcome) -> NoReturn:
    """End a process that a call has forked and that has returned from the call.

    It must send no outcome: its parent does.
    """
    with contextlib.suppress(Exception):
        if outcome.kind is OutcomeKind.ERROR:
            sys.stderr.write(outcome.text)
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(outcome.exit_code or int(outcome.kind is not OutcomeKind.RESULT and outcome.exit_code is None))


def _is_complete(request: Packet, functions: dict[str, sources.Loaded], is_furnished: bool) -> bool:
    """Return whether this runner has the function and the secrets that the call needs.

    The slot may take back the packet with the function or the secrets while the runner takes a later one.
    """
    return (request.function is not None or request.call.function in functions) and (
        is_furnished or not request.needs_secrets
    )


def _returned(request: Packet) -> Outcome:
    return Outcome(request.call.call_id, OutcomeKind.RETURNED)


def _settle_in(line: RunnerChannels) -> None:
    os.dup2(line.stdout, 1)
    os.dup2(line.stderr, 2)
    sys.stdout = open(1, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)  # noqa: SIM115 - lives as long as the process
    sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)  # noqa: SIM115
    keep_levels(line.mark, (sys.stdout, sys.stderr))
    os.environ.update(line.env)
    answer_requests()
    if numpy_random := sys.modules.get("numpy.random"):
        numpy_random.seed()  # a fork copies NumPy's generator: without this all runners of a node get the same numbers


type Spent = tuple[str, mmap.mmap] | None
"""The file that a call's arguments came in and its mapping, if the result may take it over."""


def _run(packet: Packet, functions: dict[str, sources.Loaded], mask: Mask, sender: ItemSender) -> tuple[Outcome, Spent]:
    call = packet.call
    started = time.perf_counter()
    try:
        with _variables(call.env):
            value, memory = _invoke(packet, functions, sender)
        spent = (call.arguments.path, memory) if call.arguments.path and memory and packet.may_reuse else None
        return (
            Outcome(call.call_id, OutcomeKind.RESULT, _parcel(value, "result"), seconds=time.perf_counter() - started),
            spent,
        )
    except SystemExit as error:
        # sys.exit in a call must end neither this runner's other calls nor the client's program
        code = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
        text = mask.text(f"the call ended its process with sys.exit({error.code!r})")
        return (
            Outcome(call.call_id, OutcomeKind.CRASH, text=text, exit_code=code, seconds=time.perf_counter() - started),
            None,
        )
    except BaseException as error:
        return _failed(call.call_id, error, time.perf_counter() - started, mask), None


def _invoke(packet: Packet, functions: dict[str, sources.Loaded], sender: ItemSender) -> tuple[Any, mmap.mmap | None]:
    if packet.fresh:
        functions.clear()
    sources.begin_call()
    shared_values.begin_call(dict(packet.shared))
    function = functions.get(packet.call.function)
    if function is None:
        assert packet.function is not None
        with _lost_with_its_machine("function"):
            parts = packet.function.contents(is_last_reader=False)
        function = sources.unpack(*parts)
        if packet.call.keeps_function:
            functions[packet.call.function] = function
    sources.install(function.sources)  # another call may have brought other texts since
    with _lost_with_its_machine("arguments"):
        memory, data, buffers = packet.call.arguments.open()
    args, kwargs, *run = sources.unpack(data, buffers).value
    log_records.of_this_process.set(packet.call.levels)
    with running_for(RunContext(*run[0]) if run else None):
        value = function.value(*args, **kwargs)
        if packet.call.ahead:
            sender.send_all(packet.call, asyncio.run(value) if inspect.iscoroutine(value) else value)
            return None, None
        value = completed(value)
    _refuse_pending(value)
    return value, memory


def completed(value: Any) -> Any:
    """Return what a call returns: a coroutine is run to its end, a generator becomes a list."""
    if inspect.iscoroutine(value):
        return asyncio.run(value)
    return list(items_of(value)) if is_generator(value) else value


@contextlib.contextmanager
def _variables(env: tuple[tuple[str, str], ...]) -> Generator[None]:
    """Set the variables of a call in the block, which begins before its function is loaded: modules read them."""
    before = [(name, os.environ.get(name)) for name, _ in env]
    os.environ.update(env)
    try:
        yield
    finally:
        for name, value in before:
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _lost_with_its_machine(what: str) -> Generator[None]:
    """Raise NodeLost instead of FileNotFoundError, because the machine with the large value in its memory is gone."""
    try:
        yield
    except FileNotFoundError as error:
        raise NodeLost(
            f"the machine that had the call's large {what} in its memory is gone: submit it again"
        ) from error


def _refuse_pending(value: Any) -> None:
    """Raise TypeError for a result that is a pending call, or a container that begins with one.

    It is recognised by an attribute, because this layer must not import `compute`.
    """
    one = value
    if type(value) in (list, tuple, dict) and value:
        one = next(iter(value.values() if type(value) is dict else value))
    if isinstance(reason := getattr(type(one), "why_no_result", None), property):
        where = (
            "the function has returned" if one is value else f"the function has returned a {type(value).__name__} with"
        )
        raise TypeError(f"{where} {one!r}; {cast(Any, reason).fget(one)}")


def _failed(call_id: str, error: BaseException, seconds: float, mask: Mask) -> Outcome:
    mask.error(error)
    try:
        text = exceptions.take_process_text(error) or "".join(
            traceback.format_exception(error.with_traceback(_below_invoke(error)))
        )
        pickled = exceptions.pack(error, mask.value)
    except Exception:  # the exception's own code runs here, and may raise anything
        text, pickled = (
            f"{exceptions.name_of(type(error))}: {exceptions.text_of(error, mask.text)}",
            pickling.Pickled(b""),
        )
    error.with_traceback(None)  # its frames, and the values of their variables
    return Outcome(
        call_id,
        OutcomeKind.ERROR,
        Parcel(mask.pickle(pickled.data), tuple(mask.pickle(bytes(buffer)) for buffer in pickled.buffers)),
        text=mask.text(text),
        seconds=seconds,
    )


def _below_invoke(error: BaseException) -> Any:
    """Return the traceback without our own frames at its top."""
    tb = error.__traceback__
    ours = (__file__, item_sender.__file__)
    while tb is not None and tb.tb_next is not None and tb.tb_frame.f_code.co_filename in ours:
        tb = tb.tb_next
    return tb


def _parcel(value: Any, label: str) -> Parcel:
    pickled = pickling.dumps(value, label=label)
    return Parcel(pickled.data, pickled.buffers)


def _fit(outcome: Outcome, line: RunnerChannels, spent: Spent) -> Outcome:
    """Return an outcome that fits into a packet: a large parcel goes to a file, a long text loses its middle."""
    text = (
        outcome.text if len(outcome.text) < INLINE_BYTES else f"{outcome.text[:20_000]}\n ...\n{outcome.text[-20_000:]}"
    )
    if outcome.parcel.nbytes + len(text) < INLINE_BYTES and not outcome.parcel.buffers:
        return outcome._replace(text=text)
    if line.room is not None:
        line.room.make(outcome.parcel.nbytes)
    parcel, is_moved = outcome.parcel.moved_into_spent_file(*spent) if spent is not None else (outcome.parcel, False)
    try:
        parcel = parcel if is_moved else parcel.moved_to_file(line.value_directories)
        if line.room is not None and parcel.path is not None:
            line.room.keep(parcel.path, outcome.parcel.nbytes)
        return outcome._replace(parcel=parcel, text=text)
    except OSError as error:
        note = (
            f"the {outcome.kind} of {outcome.parcel.nbytes} bytes found no room in"
            f" {', '.join(line.value_directories)}: {error}"
        )
        return Outcome(
            outcome.call_id,
            OutcomeKind.ERROR,
            Parcel(exceptions.pack(NotPicklable(note)).data),
            text=note,
            seconds=outcome.seconds,
        )


def _stored(parcel: Parcel, line: RunnerChannels) -> Parcel:
    """Return the parcel in a file. Raises OSError if there is no room."""
    if line.room is not None:
        line.room.make(parcel.nbytes)
    stored = parcel.moved_to_file(line.value_directories)
    if line.room is not None and stored.path is not None:
        line.room.keep(stored.path, parcel.nbytes)
    return stored


def _end_output(line: RunnerChannels) -> None:
    """Flush the output of the call and write the mark after it, on both streams."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # the call may have closed or replaced them
            stream.flush()
    _libc.fflush(None)
    os.write(line.stdout, line.mark)
    os.write(line.stderr, line.mark)
