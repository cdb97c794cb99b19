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
import signal
import socket
import sys
import time
import traceback
from collections.abc import AsyncGenerator, Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn, cast

from skyward_core.errors import NodeLost, NotPicklable
from skyward_core.serialization import exceptions, pickling, sources
from skyward_core.wire import log_records, shared_values
from skyward_core.wire import messages as call_metrics
from skyward_core.wire.info import ENV, of_call
from skyward_core.wire.log_records import keep_levels
from skyward_core.wire.masking import Mask, SecretValues
from skyward_core.wire.messages import INLINE_BYTES, Call, Credit, Item, Outcome, OutcomeKind, Parcel
from skyward_core.work import RunContext, running_for
from skyward_core.worker.call_groups import MemoryAllowance
from skyward_core.worker.metrics import is_context_broken
from skyward_core.worker.stacks import answer_requests

NOTHING_AROUND = contextlib.nullcontext()
"""For a call without variables, or without a run: each block of `contextlib` costs it some microseconds."""
_SPARE_BYTES = 64
_libc = ctypes.CDLL(None, use_errno=True)


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
        if request.shared:
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
        with _variables(call.env) if call.env else NOTHING_AROUND:
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
    if packet.shared:
        shared_values.begin_call(dict(packet.shared))
    function = functions.get(packet.call.function)
    if function is None:
        assert packet.function is not None
        large = packet.function
        function = sources.unpack(*_in_memory("function", lambda: large.contents(is_last_reader=False)))
        if packet.call.keeps_function:
            functions[packet.call.function] = function
    sources.install(function.sources)  # another call may have brought other texts since
    memory, data, buffers = _in_memory("arguments", packet.call.arguments.open)
    args, kwargs, *run = sources.unpack(data, buffers).value
    log_records.of_this_process.set(packet.call.levels)
    with running_for(RunContext(*run[0])) if run else NOTHING_AROUND:
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


def _in_memory[T](what: str, read: Callable[[], T]) -> T:
    """Read a value of a call that may be in a file in memory. Raises NodeLost if the machine that had it is gone."""
    try:
        return read()
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
    ours = (__file__, __file__)
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
        return outcome if text is outcome.text else outcome._replace(text=text)
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


# What a call yields, in its runner: generators become lists, or streams of items that the client takes one by one.
#
# States of a streaming call in its runner:
#
#     may yield ──sent as many items as it has credit for──▶ waiting ──credit──▶ may yield
#         │                                                     │
#         ├──the generator ends or raises: the call's outcome   │
#         └──SIGTERM: it was cancelled, or its time is up───────┴──▶ closing (`finally` blocks run) ──▶ the process ends
#
# The runner takes no item from the generator without credit. A runner may be killed at any time, because its worker
# knows how many items it has sent.


def is_generator(value: Any) -> bool:
    """Return whether a value is a generator, plain or asynchronous."""
    return inspect.isgenerator(value) or inspect.isasyncgen(value)


def items_of(value: Any) -> Iterator[Any]:
    """Return an iterator over what a generator or another iterable yields.

    An asynchronous one has its own event loop, which runs while an item is awaited. Raises TypeError.
    """
    return _stepped(cast("AsyncGenerator[Any]", value)) if inspect.isasyncgen(value) else iter(value)


def _stepped(generator: AsyncGenerator[Any]) -> Generator[Any]:
    async def step() -> Any:
        return await anext(generator)

    with asyncio.Runner() as runner:
        try:
            while True:
                try:
                    item = runner.run(step())
                except StopAsyncIteration:
                    return
                yield item
        finally:
            runner.run(generator.aclose())


class _Stopped(BaseException):
    """The call was cancelled, or its time is up."""


class ItemSender:
    """Sends the items of one call after the other. `calls` is the runner's queue, which also brings credit.

    `send` sends a message to the worker; `stored` puts a large parcel into a file, and may raise OSError.
    """

    def __init__(
        self, calls: socket.socket, send: Callable[[Item], object], stored: Callable[[Parcel], Parcel]
    ) -> None:
        self._calls = calls
        self._send = send
        self._stored = stored
        self._may_stop = self._is_stopped = False
        """Whether a signal ends the call at once, and whether one has come while it may not. It may not while an item
        is written to a file, because that file would stay.
        """

    def send_all(self, call: Call, value: Any) -> None:
        """Send what a value yields, as far as the client's credit goes; return at its end. Raises what it raises."""
        items = items_of(value)
        self._may_stop = self._is_stopped = False
        before = signal.signal(signal.SIGTERM, self._stop)
        try:
            self._send_items(call, items)
        except _Stopped:
            _close_and_end(items)
        finally:
            signal.signal(signal.SIGTERM, before)

    def _send_items(self, call: Call, items: Iterator[Any]) -> None:
        number, below = 0, call.ahead
        while True:
            self._may_stop = True
            if self._is_stopped:
                raise _Stopped
            while number >= below:
                below = max(below, self._credit(call.call_id))
            try:
                value = next(items)
            except StopIteration:
                return
            finally:
                self._may_stop = False
            pickled = pickling.dumps(value, label=f"item {number}")
            parcel = Parcel(pickled.data, pickled.buffers)
            if parcel.nbytes >= INLINE_BYTES or parcel.buffers:
                parcel = self._stored(parcel)
            self._send(Item(call.call_id, number, parcel))
            number += 1
            del value, pickled, parcel

    def _credit(self, call_id: str) -> int:
        """Wait for a message of the worker; return the credit that it gives to this call."""
        packet = self._calls.recv(INLINE_BYTES * 4)
        if not packet:
            os._exit(0)  # the worker has closed the queue
        message = pickle.loads(packet)
        return message.below if type(message) is Credit and message.call_id == call_id else 0

    def _stop(self, *_: object) -> None:
        if self._may_stop:
            raise _Stopped
        self._is_stopped = True


def _close_and_end(items: Iterator[Any]) -> NoReturn:
    """Let the generator clean up, then end the process: the worker waits for that, two seconds at most."""
    with contextlib.suppress(BaseException):
        if isinstance(items, Generator):
            items.close()
    os._exit(128 + signal.SIGTERM)


_libc.calloc.restype = ctypes.c_void_p
_libc.calloc.argtypes = (ctypes.c_size_t, ctypes.c_size_t)
_libc.putenv.argtypes = (ctypes.c_void_p,)


# An environment variable that a process sets often without using more memory each time.
#
# setenv(3), and so `os.environ[name] = value`, keeps every value: glibc never frees one, because a caller may still use
# it. A runner that did so for each call grew by 272 bytes a call (measured: 54 to 68 MB after 50,000 calls).


class RewrittenVariable:
    """One variable of this process's environment, in memory that is reused. Its value is padded with spaces at its end.

    `set` is called from one thread. Processes that are started later see the value, as with `os.environ`. The memory is
    never freed, because the environment uses it: make one for the life of the process.
    """

    def __init__(self, name: str) -> None:
        self._name = os.fsencode(name)
        self._memory: int | None = None
        self._room = 0

    def set(self, value: str) -> None:
        """Set the variable. Raises ValueError for a NUL character, OSError where the system refuses."""
        text = self._name + b"=" + os.fsencode(value)
        if b"\0" in text:
            raise ValueError(f"an environment variable cannot hold a NUL character: {value!r}")
        if len(text) > self._room:  # rare: the texts of one runner differ by the id of a job
            self._room = len(text) + _SPARE_BYTES
            self._memory = _libc.calloc(1, self._room + 1)
        if not self._memory:
            raise MemoryError(f"no room for {len(text)} bytes")
        padded = text.ljust(self._room)
        ctypes.memmove(self._memory, padded, self._room)
        # putenv uses the pointer itself, setenv would copy; each time, because a call may have removed the variable
        if _libc.putenv(self._memory):
            raise OSError(ctypes.get_errno(), "putenv")
        _python_side()[self._name] = padded[len(self._name) + 1 :]


def _python_side() -> dict[Any, Any]:
    """Return the dictionary behind `os.environ`: a change of it does not call setenv."""
    return vars(os.environ)["_data"]
