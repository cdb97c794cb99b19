"""A connection to a scheduler on which nothing is unpickled: what arrives is data, or stays bytes (`Opaque`).

Dask's own connections unpickle whatever a message marks so, and a scheduler passes on what workers send. Each of them
runs calls, which can take the pool's certificate and send what they like. Here Dask's frames are read by the rules of
its protocol (one frame of msgpack, and frames to which it refers), and nothing in them is called or imported.

It is a scheme of its own beside Dask's `tls`: only the clients that ask for it have it (`connection.py`).
"""

from __future__ import annotations

import struct
from ssl import SSLError
from typing import Any, NamedTuple, NoReturn, cast

import msgpack
from distributed.comm import registry  # noqa: TID253 - with connection.py owns Dask
from distributed.comm.core import CommClosedError  # noqa: TID253
from distributed.comm.tcp import (  # noqa: TID253
    TLS,
    TLSBackend,
    TLSConnector,
    convert_stream_closed_error,
    read_bytes_rw,
)
from distributed.protocol.utils import unpack_frames  # noqa: TID253
from tornado.iostream import StreamClosedError

from skyward_core.wire.checks import Unreadable

SCHEME = "skyward-tls"
MOST_BYTES = 1 << 30
"""The largest message. After a cut a scheduler sends all that a client has missed at once, and keeps 64 MiB of it."""
MOST_FRAMES = 1 << 16
_LENGTH = struct.Struct("Q")


class Opaque(NamedTuple):
    """A value that Dask has pickled, or serialized in another way: its frames, as they came."""

    frames: tuple[bytes | bytearray | memoryview, ...]


def address_of(address: str) -> str:
    """Return the address of a scheduler in the form that leads to connections of this kind."""
    return f"{SCHEME}://{address.rpartition('://')[2]}"


class DataStream(TLS):
    """Dask's connection over TLS, which reads data only."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.deserialize = False
        """For Dask: an error in an answer is its text, and no pickle."""

    async def read(self, deserializers: Any = None) -> Any:
        """Return the next message. Raises Unreadable, after which the next message can be read; and CommClosedError,
        also if what arrives has no frames.
        """
        if (stream := self.stream) is None:
            raise CommClosedError
        try:
            frames = await _frames(stream)
        except (StreamClosedError, SSLError) as error:
            self.stream = None
            self._closed = True
            convert_stream_closed_error(self, error)
            raise  # it has raised
        except BaseException as error:  # it is not known what was read: the next message cannot be found
            self.abort()
            if isinstance(error, Unreadable | MemoryError):
                raise CommClosedError(f"the scheduler has sent something else: {error}") from error
            raise
        return loaded(frames)


async def _frames(stream: Any) -> list[bytes | bytearray | memoryview]:
    first = await read_bytes_rw(stream, _bounded(*_LENGTH.unpack(await stream.read_bytes(_LENGTH.size))))
    try:
        frames, others = unpack_frames(first, partial=True)
    except (struct.error, ValueError, AssertionError, OverflowError, MemoryError) as error:
        raise Unreadable("the frames of a message have no lengths") from error
    if len(frames) + len(others) > MOST_FRAMES:
        raise Unreadable("a message has too many frames")
    _bounded(first.nbytes + sum(others))
    return [*frames, *[await read_bytes_rw(stream, size) for size in others]]


def _bounded(nbytes: int) -> int:
    if nbytes > MOST_BYTES:
        raise Unreadable("a message is too large")
    return nbytes


def loaded(frames: list[bytes | bytearray | memoryview]) -> Any:
    """Return the message of these frames. Raises Unreadable."""

    def decode(value: dict[Any, Any]) -> Any:
        place = value.get("__Serialized__") or value.get("__Pickled__")
        if type(place) is int:
            return _opaque(frames, place)
        if "__Set__" in value:  # Dask's form of a set; the members need not be hashable here
            return value.get("as-list")
        return value

    try:
        return msgpack.loads(
            frames[0], object_hook=decode, ext_hook=_refuse_type, use_list=False, strict_map_key=False, raw=False
        )
    except (ValueError, TypeError, LookupError, OverflowError, msgpack.exceptions.UnpackException) as error:
        raise Unreadable(f"a message of Dask is not readable: {type(error).__name__}") from error


def _opaque(frames: list[bytes | bytearray | memoryview], place: int) -> Opaque:
    header: Any = msgpack.loads(frames[place], strict_map_key=False, raw=False, ext_hook=_refuse_type)
    number, compression = header["num-sub-frames"], header.get("compression") or ()
    if type(number) is not int or not 0 <= number < len(frames) - place or any(compression):
        raise Unreadable("a value has no frames, or frames that are compressed")
    return Opaque(tuple(frames[place + 1 : place + 1 + number]))


def _refuse_type(_: int, __: bytes) -> NoReturn:
    raise Unreadable("a message has a value of another type")


class _Connector(TLSConnector):
    prefix = f"{SCHEME}://"
    comm_class = DataStream


class _Backend(TLSBackend):
    _connector_class = _Connector


cast(Any, registry).backends[SCHEME] = _Backend()
