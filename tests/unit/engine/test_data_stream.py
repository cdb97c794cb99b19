"""A connection on which nothing is unpickled: Dask's own messages are read as Dask reads them, and all else is bytes."""

import os
import re
import struct
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any

import msgpack
import pytest
from distributed import protocol
from distributed.comm.core import CommClosedError
from distributed.protocol.serialize import ToPickle, to_serialize
from distributed.protocol.utils import pack_frames
from hypothesis import example, given
from hypothesis import strategies as st
from tornado.iostream import StreamClosedError

from skyward_core.engine.connection import DataClient, _answer
from skyward_core.engine.data_stream import MOST_BYTES, DataStream, Opaque, address_of, loaded
from skyward_core.errors import NodeLost
from skyward_core.wire.checks import Unreadable
from skyward_core.wire.messages import Outcome, OutcomeKind, Parcel, Report
from skyward_core.wire.streams import ReportedOutcomes, read_outcomes
from tests.unit.wire.test_reports import anything, nothing_is_unpickled


class Evil:
    """Would make a folder when it is loaded."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("/dev/null/evil",)


def frames_of(message: Any) -> list[Any]:
    return [bytes(frame) for frame in protocol.dumps(message)]


def done[T](coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that waits for nothing."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError("it waits")


PLAIN = {"op": "event", "topic": "t", "event": (0.5, b"bytes"), "list": ["a", 1, None, {"b": (True, 2.5)}], 7: "seven"}


def test_a_plain_message_is_read_as_dask_reads_it() -> None:
    assert (
        loaded(frames_of([PLAIN]))
        == protocol.loads(frames_of([PLAIN]))
        == ({**PLAIN, "list": ("a", 1, None, {"b": (True, 2.5)})},)
    )


@pytest.mark.parametrize(
    "wrapped", [to_serialize(Evil()), ToPickle(Evil()), Evil()], ids=["serialized", "pickled", "own"]
)
def test_a_pickle_stays_bytes(wrapped: Any) -> None:
    """Wherever it is in a message; what is beside it is read."""
    frames = frames_of({"op": "a", "what": [wrapped], "then": 1})
    with nothing_is_unpickled():
        message = loaded(frames)
    assert isinstance(message["what"][0], Opaque) and message["then"] == 1
    with pytest.raises(OSError):
        protocol.loads(frames)


def test_outcomes_of_a_task_are_read_from_their_frames() -> None:
    """As Dask gathers them; also if it has split a large one."""
    outcomes = {name: Outcome(name, OutcomeKind.RESULT, Parcel(os.urandom(1000) * 100)) for name in "ab"}
    frames = [
        bytes(frame)
        for frame in protocol.dumps({"k": to_serialize(ReportedOutcomes(outcomes, 3, "i"))}, frame_split_size=5000)
    ]
    with nothing_is_unpickled():
        answer = loaded(frames)
        assert read_outcomes(answer["k"].frames) == Report(3, "i", tuple(outcomes.values()))
    assert protocol.loads(frames)["k"].data == outcomes, "another worker gets them as they were"


@given(
    st.lists(st.binary(max_size=60), min_size=1, max_size=4),
    st.dictionaries(st.sampled_from(["__Serialized__", "__Pickled__", "__Set__", "__Enum__", "op"]), anything),
)
@example([b"\x81" * 2000], {})
def test_frames_that_are_no_message_are_refused(frames: list[bytes], marked: Any) -> None:
    for these in (frames, [msgpack.packb(marked), *frames]):
        with nothing_is_unpickled():
            try:
                loaded(list(these))
            except Unreadable as error:
                assert len(str(error)) < 200


class Wire:
    """A stream that has these bytes, and then ends."""

    def __init__(self, content: bytes) -> None:
        self.content = content

    async def read_bytes(self, count: int) -> bytes:
        if len(self.content) < count:
            raise StreamClosedError
        taken, self.content = self.content[:count], self.content[count:]
        return taken

    async def read_into(self, buffer: memoryview) -> int:
        buffer[:] = await self.read_bytes(len(buffer))
        return len(buffer)


def stream_of(content: bytes) -> Any:
    stream: Any = DataStream.__new__(DataStream)
    stream.stream, stream._closed, stream._finalizer, stream.name = Wire(content), False, None, "test"
    stream._local_addr = stream._peer_addr = "tls://test"
    stream.abort = lambda: setattr(stream, "stream", None)
    return stream


def sent(message: Any) -> bytes:
    body = pack_frames(frames_of(message))
    return struct.pack("Q", len(body)) + bytes(body)


def test_the_next_message_is_read_after_one_that_cannot_be() -> None:
    body = pack_frames([b"\xc1"])
    stream = stream_of(sent([PLAIN]) + struct.pack("Q", len(body)) + bytes(body) + sent("after"))
    assert done(stream.read())[0]["op"] == "event"
    with pytest.raises(Unreadable):
        done(stream.read())
    assert done(stream.read()) == "after"
    with pytest.raises(CommClosedError):
        done(stream.read())


@given(st.binary(max_size=80))
@example(struct.pack("Q", MOST_BYTES + 1))
@example(struct.pack("Q", 2**64 - 1))
@example(struct.pack("QQ", 8, 2**63))
@example(struct.pack("QQQ", 16, 1, 2**63))
def test_what_has_no_frames_ends_the_connection(content: bytes) -> None:
    """Nothing is reserved for a size that is a lie."""
    stream = stream_of(content)
    with pytest.raises((CommClosedError, Unreadable)):
        done(stream.read())
        done(stream.read())


def test_our_addresses_have_their_own_scheme() -> None:
    assert address_of("tls://127.0.0.1:5") == address_of(address_of("tls://127.0.0.1:5")) == "skyward-tls://127.0.0.1:5"


# ── the client's stream ──────────────────────────────────────────────────────────────────────────────────────────────


def client_of(*messages: Any) -> Any:
    """A client whose stream has these messages, and ends; what it has heard, and could not."""
    client: Any = DataClient.__new__(DataClient)
    left = [*messages, ({"op": "close"},)]

    async def read() -> Any:
        if isinstance(left[0], Exception):
            raise left.pop(0)
        return left.pop(0)

    client.heard, client.lies = [], []
    client.scheduler_comm = SimpleNamespace(comm=SimpleNamespace(read=read))
    client.on_unreadable = lambda sender, error: client.lies.append((sender, str(error)))
    client._event_handlers = {"t": client.heard.append}
    client._stream_handlers = {"event": client._handle_event, "error": client._handle_error}
    client.left = left
    return client


def test_a_message_of_another_form_is_dropped_and_the_next_is_heard() -> None:
    """Each is counted. Dask's own loop would end by some, unpickle others, and log a traceback for each."""
    event = {"op": "event", "topic": "t", "event": (0.0, b"x")}
    lies = [
        "text",
        (7,),
        ({},),
        ({"op": ["event"]},),
        ({"op": "no such"},),
        ({"op": "event", "more": 1},),
        ({"op": "event", "topic": ["t"]},),
        ({"op": "event", 5: 1},),
        Unreadable("frames"),
    ]
    client = client_of(*[message for lie in lies for message in (lie, (dict(event),))])
    with nothing_is_unpickled():
        done(client._handle_report())
    assert (client.left, len(client.heard)) == ([], len(lies))
    assert len(client.lies) == len(lies)
    assert {sender for sender, _ in client.lies} == {"the scheduler"}


def test_dask_s_own_topics_and_errors_are_not_heard() -> None:
    """Dask unpickles them: a warning's text, and the exception of a stream's error."""
    client = client_of(
        ({"op": "event", "topic": "warn", "event": (0.0, {"message": b"cos\nmkdir\n(V/dev/null/a\ntR."})},),
        ({"op": "error", "status": "error", "exception": b"cos\nmkdir\n(V/dev/null/a\ntR."},),
    )
    client.subscribe_topic("warn", print)
    with nothing_is_unpickled():
        done(client._handle_report())
    assert (client.heard, client.lies, list(client._event_handlers)) == ([], [], ["t"])


# ── questions ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (Exception("ValueError('no such node')"), "has failed at hold: ValueError"),
        (Exception("x" * 10_000), "has failed at hold: x"),
        (KeyError("exception_text"), "has sent an answer that is none: KeyError"),
        (Unreadable("a message of Dask is not readable"), "has sent an answer that is none"),
    ],
    ids=["failed", "long", "no text", "unreadable"],
)
def test_a_question_that_fails_is_an_error_in_words(error: Exception, words: str) -> None:
    """The scheduler's own error comes as a text, and any other answer is none."""

    async def hold(**_: Any) -> None:
        raise error

    client: Any = SimpleNamespace(scheduler=SimpleNamespace(hold=hold), status="running")
    with pytest.raises(NodeLost, match=re.escape(words)) as raised:
        done(_answer(client, "hold", {"rank": 0}))
    assert len(str(raised.value)) < 600
