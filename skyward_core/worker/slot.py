"""One slot of a worker: it drives a runner, the process in which calls run, and survives it.

Slot and runner share a queue of packets (a Unix socket whose receiving end both have), so the kernel decides whether a
call has begun: it has not if the slot can take its packet back. All else follows: a crash takes one call, a cancelled
call stops alone, and calls behind a long one are handed back to run elsewhere. No call runs twice.

The slot's knowledge of the running call may be out of date: its outcome may be unread, and the runner may have begun
the next call. So before the slot kills a runner because of its call, it stops the runner (SIGSTOP), takes back the
queue and reads the outcomes. Then it knows the runner's call, and the runner begins no other. If this process dies
while a runner is stopped, the supervisor kills the runner, like all runners of a dead worker.
"""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import secrets
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from skyward_core.wire.log_records import LogLines, split_records
from skyward_core.wire.masking import Mask, SecretValues
from skyward_core.wire.messages import (
    INLINE_BYTES,
    Batch,
    Call,
    CallMetrics,
    Credit,
    Item,
    News,
    Outcome,
    OutcomeKind,
    Output,
    Parcel,
    ReportedMetrics,
)
from skyward_core.worker.runner import Packet
from skyward_core.worker.runner_process import (
    LAST_LINES,
    READ_BYTES,
    RunnerFactory,
    StrayProcess,
    Stream,
    kill_group,
    ready,
    resident_bytes,
    send_signal,
    stop,
    strays_of,
)
from skyward_core.worker.topic_seconds import TopicSeconds, key_of

PATIENCE_SECONDS = 0.1  # the calls behind one that runs longer than this are handed back
MEMORY_CHECK_SECONDS = 0.1
LOOK_SECONDS = 5.0  # how long a slot with one call waits for anything to happen
BY_KERNEL = "the kernel, which counts all that it has started too (control group)"
"""What has killed a call that was out of memory, if not its worker."""
TOGETHER_SECONDS = 0.005  # news within this time is reported together
TOPIC_PREFIX = "skyward-"  # of topics; ids of calls have none
KILLED = frozenset({-signal.SIGKILL, -signal.SIGTERM})
KILLED_SECONDS = 0.5
"""How long the crash of a call that was killed from outside is kept back."""
TERM_SECONDS = 2.0  # from SIGTERM, for a call that is cancelled or out of time, to SIGKILL
CANCELLED_LIMIT = 10_000
KNOWN_FUNCTIONS = 64  # a runner with more different ones forgets them all


class Slot:
    """Runs batches, one at a time. It owns the runner and the descriptors to it; `close` ends both."""

    def __init__(
        self,
        factory: RunnerFactory,
        value_directories: tuple[str, ...],
        memory_limit_bytes: int | None = None,
        patience_seconds: float = PATIENCE_SECONDS,
    ) -> None:
        self.factory = factory
        self.value_directories = value_directories
        self.memory_limit_bytes = memory_limit_bytes
        self.patience_seconds = patience_seconds
        self.send: socket.socket | None = None
        self.take: socket.socket | None = None
        """The two ends of this runner's queue.

        The next runner gets another queue: a runner that was given up finds its queue closed, and ends.
        """
        self.wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.lock = threading.Lock()
        self.cancelled: set[str] = set()
        self._topic = ""
        """The topic of the running batch."""
        self.credit: Credit | None = None
        """The last credit for the running call, if it streams."""
        self._streaming = ""
        """The id of that call."""
        self.outcomes: socket.socket | None = None
        self.pid = 0
        self.is_runner_gone = False
        """Whether the supervisor has reported its end. The outcomes' socket does not end if a process that a call has
        left behind holds it too.
        """
        self.strays: set[StrayProcess] = set()
        """The processes of its last call that are not in its group, once it got a signal that ends it."""
        self.streams: tuple[Stream, Stream] | tuple[()] = ()
        self.known: set[str] = set()
        self.secrets: SecretValues | None = None
        """The secrets that each runner gets with its first call; set before the first batch runs."""
        self.secrecy = Mask()
        """Masks the secrets in the output of runners."""
        self.is_furnished = False
        """Whether this runner has got the secrets."""
        self.ended = 0  # how many calls this runner has ended: a mark follows the output of each
        self.killed_for: OutcomeKind | None = None
        self.kill_at: float | None = None
        self.busy_since: float | None = None
        self._run: _BatchRun | None = None
        """The running batch."""
        self.ended_seconds = 0.0
        self.by_topic = TopicSeconds()
        """The same for each client and use, by `key_of`."""
        self.is_outdated = False
        """Whether the runner was forked for another rank or head of the node: the next batch gets a new one."""
        self.start()

    def start(self) -> None:
        """Get a runner from the supervisor.

        Raises ConnectionError if none comes: then the slot has none, and `run` tries again.
        """
        send, take = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        outcomes, runner_outcomes = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        mark = b"\x1e" + secrets.token_hex(8).encode() + b"\x1e"
        pipes = [os.pipe2(os.O_CLOEXEC) for _ in range(2)]
        send.settimeout(0)
        outcomes.settimeout(0)
        for read, _ in pipes:
            os.set_blocking(read, False)
        self.send, self.take, self.outcomes = send, take, outcomes
        self.streams = (Stream("stdout", pipes[0][0], mark), Stream("stderr", pipes[1][0], mark))
        self.known, self.ended, self.killed_for, self.kill_at, self.is_furnished = set(), 0, None, None, False
        self.is_outdated = self.is_runner_gone = False  # before the fork: the node may move meanwhile
        self.strays = set()
        try:
            self.pid = self.factory.fork([take.fileno(), runner_outcomes.fileno(), pipes[0][1], pipes[1][1]], mark)
        except BaseException:
            self.drop_lines()
            raise
        finally:
            runner_outcomes.close()
            for _, write in pipes:
                os.close(write)
        pid = self.pid
        self.factory.watch(pid, lambda: self._note_exit(pid))

    def _note_exit(self, pid: int) -> None:
        with self.lock:  # `close` closes the pipe
            if self.pid == pid:
                self.is_runner_gone = True
                with contextlib.suppress(BlockingIOError):
                    os.write(self._wake_write, b"x")

    def make_ready(self) -> None:
        """Make sure that there is a runner, forked for the node's present rank and head.

        Raises ConnectionError if none comes.
        """
        if self.pid and self.is_outdated:
            pid = self.pid
            kill_group(pid)
            self.drop_lines()
            self.factory.exit_of(pid)
        if not self.pid:
            self.start()

    def furnish(self, secrets: SecretValues) -> None:
        """Give these secrets to every runner, and mask them in its output. To be called before the first batch."""
        self.secrets, self.secrecy = secrets, Mask(secrets.values())

    def cancel(self, call_id: str) -> None:
        """Stop a call of the running batch, or do not begin it; with a topic in place of its id, stop all calls that
        report on that topic.

        Called from any thread; unknown ids are ignored.
        """
        with self.lock:
            if call_id.startswith(TOPIC_PREFIX) and call_id != self._topic:
                return  # not kept, because it would stop later calls of a client that has come back
            if len(self.cancelled) > CANCELLED_LIMIT:
                self.cancelled.clear()
            self.cancelled.add(call_id)  # kept: the batch with this call may be in transit
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_write, b"c")

    def give_credit(self, call_id: str, below: int) -> None:
        """Let a streaming call yield the items below this number, if it runs here. Called from any thread."""
        with self.lock:
            if call_id != self._streaming or (self.credit is not None and self.credit.below >= below):
                return
            self.credit = Credit(call_id, below)
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_write, b"i")

    @property
    def ran_seconds(self) -> float:
        """How long calls have kept this slot busy, the running one included. Called from any thread."""
        # first: a call that ends meanwhile is then missing rather than counted twice
        ended_seconds = self.ended_seconds
        busy_since = self.busy_since
        return ended_seconds + (0.0 if busy_since is None else time.monotonic() - busy_since)

    @property
    def ran_by_topic(self) -> dict[str, float]:
        """How long the calls of each recent client and use have kept this slot busy. Called from any thread."""
        key = self._running_key
        seconds = self.by_topic.recent(key)
        busy_since = self.busy_since  # after the ended calls, as above
        if key in seconds and busy_since is not None and self._running_key == key:
            seconds[key] += time.monotonic() - busy_since
        return seconds

    def ran_for(self, topic: str) -> tuple[bool, dict[str, float]]:
        """Return whether a call of this client runs, and how long its calls have kept this slot busy, by use."""
        seconds, running = self.by_topic.by_use(topic), self.running
        if running is None or running[0] != topic:
            return False, seconds
        run = self._run
        call = None if run is None else run.first_sent
        use = "" if call is None else call.use
        return True, seconds | {use: seconds.get(use, 0.0) + running[2]}

    @property
    def _running_key(self) -> str:
        run, topic = self._run, self._topic
        call = None if run is None else run.first_sent
        return topic if call is None else key_of(topic, call.use)

    @property
    def running(self) -> tuple[str, str, float] | None:
        """The topic and the id of the running call, and for how many seconds it has run; None: the slot is idle.

        Called from any thread: the call may have ended just now.
        """
        run, topic = self._run, self._topic
        call = None if run is None else run.first_sent
        return None if run is None or call is None else (topic, call.call_id, run.first_seconds)

    def spent(self, seconds: float, use: str) -> None:
        """A call of the running batch, for this use, has kept the slot busy for so long."""
        self.ended_seconds += seconds
        self.by_topic.add(key_of(self._topic, use), seconds)

    def run(self, batch: Batch, report: Callable[[list[News]], None]) -> None:
        """Run the calls of a batch in their order, and pass their reports to `report` in order; return
        when each call has an outcome.

        Calls behind one that runs longer than `patience_seconds` get the outcome RETURNED, unless they have begun.
        """
        self._topic = batch.topic
        with self.lock:
            self._streaming = next((call.call_id for call in batch.calls if call.ahead), "")
        try:
            self._run = _BatchRun(self, batch, report)
            self._run.run()
        finally:
            self._run = None
            with self.lock:
                self._topic = self._streaming = ""
                self.credit = None
                self.cancelled -= {batch.topic, *(call.call_id for call in batch.calls)}

    def close(self) -> None:
        """End the runner and close its descriptors."""
        if self.pid:
            kill_group(self.pid)
        with self.lock:
            self.drop_lines()
        os.close(self.wake_read)
        os.close(self._wake_write)

    def drop_lines(self) -> None:
        for line in (self.send, self.take, self.outcomes):
            if line is not None:
                line.close()
        for stream in self.streams:
            os.close(stream.descriptor)
        self.send = self.take = self.outcomes = None
        self.streams, self.pid = (), 0


class _BatchRun:
    """One batch in one slot.

    Every call is in exactly one state: `waiting` (here), `sent` (in the queue or the runner), or reported.
    """

    def __init__(self, slot: Slot, batch: Batch, report: Callable[[list[News]], None]) -> None:
        self.slot = slot
        self._batch = batch
        self._report = report
        self._waiting = deque(batch.calls)
        self._sent: deque[Call] = deque()
        self._news: list[News] = []
        self._progress_at = self._reported_at = self._first_since = time.monotonic()
        """`_first_since`: when the first of the sent calls became that; the time of its `timeout_seconds` begins."""
        self._moved: list[Parcel] = []
        self._items = 0
        """How many items the call has yielded: one that streams is alone in its batch."""
        self._below = 0
        """The last credit that the runner has got."""

    def run(self) -> None:
        try:
            self.slot.make_ready()
            self.slot.busy_since = self._progress_at
            self._read_output()  # of earlier calls' background threads: these lines belong to no call
            while True:
                self._obey_cancellations()
                self._flush()
                if not self._waiting and not self._sent and not self._is_runner_doomed:
                    return
                if not self._is_runner_doomed:
                    self._send()
                    self._send_credit()
                self._listen()
                self._check_time()
                self._check_memory()
                self._check_patience()
        except ConnectionError:  # no runner comes: outcomes so far are reported
            self._report(self._news)
            raise
        finally:
            self.slot.busy_since = None
            for parcel in self._moved:
                parcel.release()

    @property
    def first_sent(self) -> Call | None:
        """The call that the runner has, or gets next."""
        try:
            return self._sent[0]
        except IndexError:
            return None

    @property
    def first_seconds(self) -> float:
        """For how long it has been the first."""
        return time.monotonic() - self._first_since

    @property
    def _is_runner_doomed(self) -> bool:
        """Whether the runner got a signal that ends it.

        Its call may have ended before, but it must get no other: that one would die with it.
        """
        return self.slot.killed_for is not None

    @property
    def _queue_end(self) -> socket.socket:
        assert self.slot.send is not None
        return self.slot.send

    # ── to the runner ────────────────────────────────────────────────────────────────────────────────────────────────

    def _send(self) -> None:
        while self._waiting:
            try:
                packet = self._packet(self._waiting[0])
            except OSError as error:
                text = f"the arguments found no room in {', '.join(self.slot.value_directories)}: {error}"
                self._news.append(Outcome(self._waiting.popleft().call_id, OutcomeKind.ERROR, text=text))
                continue
            try:
                self._queue_end.send(pickle.dumps(packet, protocol=5))
            except BlockingIOError:
                return
            call = self._waiting.popleft()
            self.slot.is_furnished = True
            if packet.fresh:
                self.slot.known.clear()
            if call.keeps_function:
                self.slot.known.add(call.function)
            if not self._sent:
                self._first_since = time.monotonic()
            self._sent.append(call)

    def _send_credit(self) -> None:
        credit = self.slot.credit
        if credit is not None and self._sent and credit.below > self._below:
            with contextlib.suppress(BlockingIOError):
                self._queue_end.send(pickle.dumps(credit, protocol=5))
                self._below = credit.below

    def _packet(self, call: Call) -> Packet:
        function = None if call.function in self.slot.known else self._batch.functions[call.function]
        if function is not None and (function.buffers or function.nbytes > INLINE_BYTES):
            function = self._batch.functions[call.function] = self._moved_to_file(function)
        if call.arguments.buffers or call.arguments.nbytes > INLINE_BYTES:
            call = self._waiting[0] = call._replace(arguments=self._moved_to_file(call.arguments))
        own = {parcel.path for parcel in self._moved}
        may_reuse = call.arguments.path is not None and call.arguments.path not in own
        secrets = None if self.slot.is_furnished else self.slot.secrets
        is_fresh = function is not None and len(self.slot.known) >= KNOWN_FUNCTIONS
        return Packet(
            call,
            function,
            may_reuse=may_reuse,
            fresh=is_fresh,
            secrets=secrets,
            needs_secrets=self.slot.secrets is not None,
            shared=tuple((name, self._batch.functions[name]) for name in call.shared),
        )

    def _moved_to_file(self, parcel: Parcel) -> Parcel:
        moved = parcel.moved_to_file(self.slot.value_directories)
        self._moved.append(moved)
        return moved

    def _take_back(self) -> list[Call]:
        """Take the calls from the queue that the runner has not begun."""
        taken: list[Call] = []
        take = self.slot.take
        assert take is not None
        with contextlib.suppress(BlockingIOError):
            while True:
                packet: Packet | Credit = pickle.loads(take.recv(INLINE_BYTES * 4, socket.MSG_DONTWAIT))
                if isinstance(packet, Credit):
                    self._below = 0  # it is sent again
                    continue
                taken.append(packet.call)
                if packet.secrets is not None:
                    self.slot.is_furnished = False
        ids = {call.call_id for call in taken}
        if ids:
            self._sent = deque(call for call in self._sent if call.call_id not in ids)
            self.slot.known -= {call.function for call in taken}  # their packets may have carried the function
        return taken

    # ── from the runner ──────────────────────────────────────────────────────────────────────────────────────────────

    def _listen(self) -> None:
        slot = self.slot
        assert slot.outcomes is not None
        sources: list[int] = [slot.outcomes.fileno(), slot.wake_read, *(stream.descriptor for stream in slot.streams)]
        full = [self._queue_end.fileno()] if self._waiting and not self._is_runner_doomed else []
        awake = ready(sources, full, self._wait_seconds())
        if slot.wake_read in awake:
            os.read(slot.wake_read, READ_BYTES)
        is_gone = slot.is_runner_gone  # first: all outcomes of a runner that is gone are there
        self._read_output()
        if slot.outcomes.fileno() in awake or is_gone:
            self._receive(is_runner_gone=is_gone)

    def _wait_seconds(self) -> float:
        if self._news:
            return TOGETHER_SECONDS
        if self.slot.kill_at is not None or self.slot.memory_limit_bytes is not None:
            seconds = MEMORY_CHECK_SECONDS
        else:
            seconds = self.slot.patience_seconds if len(self._sent) > 1 or self._waiting else LOOK_SECONDS
        return seconds if self._is_runner_doomed else min(seconds, max(0.0, self._seconds_left))

    def _receive(self, *, is_runner_gone: bool = False) -> None:
        slot = self.slot
        assert slot.outcomes is not None
        while True:
            try:
                message = slot.outcomes.recv(INLINE_BYTES * 4)
            except BlockingIOError:
                if is_runner_gone:
                    self._replace_dead_runner()
                return
            except ConnectionResetError:
                message = b""
            if not message:
                self._replace_dead_runner()
                return
            outcome: Outcome | Item = pickle.loads(message)
            if isinstance(outcome, Item):
                self._items += 1
                self._news.append(outcome)
                continue
            self._await_marks()
            self._progress_at = slot.busy_since = time.monotonic()
            call, self._first_since = self._sent.popleft(), self._progress_at
            slot.spent(outcome.seconds, call.use)
            assert call.call_id == outcome.call_id
            tails = self._forget_output()
            slot.ended += 1
            if outcome.kind is OutcomeKind.RETURNED:
                # it has not begun: its function was in a packet that was taken back
                self._waiting.appendleft(call)
                continue
            if slot.killed_for is OutcomeKind.TIMED_OUT:  # it has handled the signal, and ended after its deadline
                outcome.parcel.release()
                outcome = _timed_out(call, outcome.seconds)
            if (outcome.items, outcome.use) != (self._items, call.use):
                outcome = outcome._replace(items=self._items, use=call.use)
            is_killed = outcome.kind in {OutcomeKind.CRASH, OutcomeKind.TIMED_OUT}
            self._news.append(outcome._replace(output=self._last_lines(tails)) if is_killed else outcome)

    def _await_marks(self) -> None:
        """Read the output of the call that has just ended, to its mark: the runner writes the marks before the outcome,
        so they are in the pipes.
        """
        for stream in self.slot.streams:
            while stream.marks_seen <= self.slot.ended and stream.read():
                self._cut(stream)

    def _read_output(self) -> None:
        for stream in self.slot.streams:
            stream.read()
            self._cut(stream)

    def _cut(self, stream: Stream, *, flush: bool = False) -> None:
        for mark, lines in stream.lines(flush=flush):
            if lines:
                position = mark - self.slot.ended
                call_id = self._sent[position].call_id if 0 <= position < len(self._sent) else None
                now, mask = time.time(), self.slot.secrecy.text
                for item in split_records(stream.mark, lines):
                    if isinstance(item, CallMetrics):
                        masked = item._replace(values={mask(name): value for name, value in item.values.items()})
                        self._news.append(ReportedMetrics(call_id, masked, now))
                    else:
                        self._news.append(Output(call_id, stream.name, tuple(map(mask, item.texts)), now, item.level))

    def _forget_output(self) -> list[tuple[bytes, tuple[str, ...]]]:
        """Return the last output of the call that has just ended or died, of each stream with its mark."""
        return [(stream.mark, stream.forget(self.slot.ended)) for stream in self.slot.streams]

    def _last_lines(self, tails: Sequence[tuple[bytes, tuple[str, ...]]]) -> tuple[str, ...]:
        """Return the last lines of a call from what `_forget_output` has returned."""
        lines = (
            text
            for mark, output in tails
            for item in split_records(mark, output)
            if isinstance(item, LogLines)
            for text in item.texts
        )
        return tuple(line for text in lines for line in self.slot.secrecy.text(text).split("\n"))[-LAST_LINES:]

    # ── runners that die, or must ────────────────────────────────────────────────────────────────────────────────────

    def _replace_dead_runner(self) -> None:
        """The runner is gone: the call that it had begun is lost, the others go to the next runner."""
        slot = self.slot
        ran_seconds = time.monotonic() - self._progress_at
        for stream in slot.streams:
            while stream.read():
                self._cut(stream)
            self._cut(stream, flush=True)
        unstarted = self._take_back()
        output, pid = self._last_lines(self._forget_output()), slot.pid
        end = slot.factory.exit_of(pid)
        is_by_kernel = slot.killed_for is None and end is not None and end.is_out_of_memory
        kind, text = (
            (OutcomeKind.OUT_OF_MEMORY, BY_KERNEL) if is_by_kernel else (slot.killed_for or OutcomeKind.CRASH, "")
        )
        if kind is OutcomeKind.CRASH and self._sent and end is not None and end.code in KILLED:
            # Whoever ends a node kills its processes one after the other. If this one is next, the call was lost with
            # its node, and runs again elsewhere; else it has crashed.
            time.sleep(KILLED_SECONDS)
        # at most one: a runner takes the next call after it has reported the outcome of the last
        for call in self._sent:
            if kind is OutcomeKind.TIMED_OUT:
                outcome = _timed_out(call, ran_seconds)
            else:
                outcome = Outcome(call.call_id, kind, text=text, seconds=ran_seconds)
            outcome = outcome._replace(exit_code=end and end.code, output=output, items=self._items, use=call.use)
            self._news.append(outcome)
            slot.busy_since = None
            slot.spent(ran_seconds, call.use)
        self._sent.clear()
        self._waiting.extendleft(reversed(unstarted))
        kill_group(pid)  # processes that the call has left behind
        for stray in slot.strays:
            stray.send(signal.SIGKILL)
        slot.drop_lines()
        slot.start()
        self._progress_at = slot.busy_since = time.monotonic()

    def _obey_cancellations(self) -> None:
        slot = self.slot
        with slot.lock:
            wanted = {call.call_id for call in self._batch.calls} if slot.cancelled else set[str]()
            if self._batch.topic not in slot.cancelled:
                wanted &= slot.cancelled
        if wanted & {call.call_id for call in self._sent} and not self._is_runner_doomed:
            self._kill_if(OutcomeKind.CANCELLED, signal.SIGTERM, lambda running: running.call_id in wanted)
        if wanted:
            self._news.extend(
                Outcome(call.call_id, OutcomeKind.CANCELLED) for call in self._waiting if call.call_id in wanted
            )
            self._waiting = deque(call for call in self._waiting if call.call_id not in wanted)
        if slot.kill_at is not None and time.monotonic() > slot.kill_at:
            self._kill(slot.killed_for or OutcomeKind.CANCELLED, signal.SIGKILL)

    @property
    def _seconds_left(self) -> float:
        """How long the first of the sent calls may still run."""
        timeout_seconds = self._sent[0].timeout_seconds if self._sent else None
        return math.inf if timeout_seconds is None else self._first_since + timeout_seconds - time.monotonic()

    def _check_time(self) -> None:
        if self._seconds_left <= 0 and not self._is_runner_doomed:
            late = self._sent[0].call_id
            self._kill_if(
                OutcomeKind.TIMED_OUT, signal.SIGTERM, lambda call: call.call_id == late and self._seconds_left <= 0
            )

    def _check_memory(self) -> None:
        limit = self.slot.memory_limit_bytes
        if limit is not None and self._sent and not self._is_runner_doomed and resident_bytes(self.slot.pid) > limit:
            self._kill_if(OutcomeKind.OUT_OF_MEMORY, signal.SIGKILL, lambda _: resident_bytes(self.slot.pid) > limit)

    def _kill_if(self, kind: OutcomeKind, sig: signal.Signals, is_meant: Callable[[Call], bool]) -> None:
        """Kill the runner if its running call is meant, after its queue was taken back and its outcomes were read."""
        slot, pid = self.slot, self.slot.pid
        self._waiting.extendleft(reversed(self._take_back()))
        if not any(map(is_meant, self._sent)):
            return
        stop(pid)
        try:
            self._receive()
            if slot.pid == pid and self._sent and is_meant(self._sent[0]):
                self._kill(kind, sig)
                if sig is signal.SIGTERM:
                    slot.kill_at = time.monotonic() + TERM_SECONDS
        finally:
            if slot.pid == pid:
                send_signal(pid, signal.SIGCONT)

    def _kill(self, kind: OutcomeKind, sig: signal.Signals) -> None:
        """Send a signal to the runner's group, and to the processes of its call that have left the group."""
        slot = self.slot
        slot.killed_for = kind
        slot.strays |= strays_of(slot.pid)
        kill_group(slot.pid, sig)
        for stray in slot.strays:
            stray.send(sig)

    def _check_patience(self) -> None:
        if (
            time.monotonic() - self._progress_at < self.slot.patience_seconds
            or len(self._sent) + len(self._waiting) < 2
        ):
            return
        back = [*self._take_back(), *self._waiting]
        self._waiting.clear()
        self._news.extend(Outcome(call.call_id, OutcomeKind.RETURNED) for call in back)

    def _flush(self) -> None:
        if not self._news:
            return
        now = time.monotonic()
        if not (self._waiting or self._sent) or now - self._reported_at > TOGETHER_SECONDS:
            self._reported_at = now
            news, self._news = self._news, []
            self._report(news)


def _timed_out(call: Call, seconds: float) -> Outcome:
    return Outcome(call.call_id, OutcomeKind.TIMED_OUT, text=str(call.timeout_seconds), seconds=seconds)
