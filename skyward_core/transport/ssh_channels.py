"""Input and output of one command on an SSH connection, from asyncssh's callbacks. Part of `ssh_connection.py`.

Bytes go from the caller's buffers into the channel and from the channel into one buffer of the right size;
`ssh_connection.py` says why asyncssh's streams are left out.
"""

from __future__ import annotations

import asyncio
import codecs
import mmap
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import cast

import asyncssh  # noqa: TID253  a part of ssh_connection.py

from skyward_core.errors import BadRequest

PIECE_BYTES = 256 * 1024
WRITE_AHEAD_BYTES = 1 << 20
READ_AHEAD_BYTES = 1 << 20
TAIL_CHARACTERS = 64 * 1024
LARGE_BYTES = 4 << 20  # larger values get separate pages, which are freed with the last view of them


class ChannelSession(asyncssh.SSHClientSession[bytes]):
    """A command on the machine, with asyncssh's callbacks.

    Its callbacks must not raise: that would end the connection.
    """

    channel: asyncssh.SSHClientChannel[bytes]

    def __init__(self) -> None:
        self.name = ""  # KILL finds the command by it
        self.is_made = False
        self.feeding: asyncio.Task[None] | None = None
        self.ended = asyncio.Event()
        self._may_write = asyncio.Event()
        self._may_write.set()

    def connection_made(self, chan: asyncssh.SSHClientChannel[bytes]) -> None:
        self.channel, self.is_made = chan, True
        chan.set_write_buffer_limits(WRITE_AHEAD_BYTES)

    def eof_received(self) -> bool:
        """Keep our side open: input may still be sent."""
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        self._may_write.set()
        self.ended.set()

    def pause_writing(self) -> None:
        self._may_write.clear()

    def resume_writing(self) -> None:
        self._may_write.set()

    async def send(self, content: Path | bytes | Sequence[memoryview], *, end: bool = True) -> None:
        """Send the command's input, no faster than it reads, and then the end of file if `end`."""
        try:
            for piece in pieces(content):
                self.channel.write(piece)
                if not self._may_write.is_set():
                    await self._may_write.wait()
        except OSError:
            pass  # the command or the connection has ended: the reading side finds out which
        if end:
            self.finish()

    def finish(self) -> None:
        """Send the end of file to the command."""
        try:
            self.channel.write_eof()
        except OSError:
            pass  # the same


class ChannelBuffer(ChannelSession):
    """A command whose output is read piece by piece; it waits when it is too far ahead of its reader."""

    def __init__(self) -> None:
        super().__init__()
        self._pieces: list[bytes] = []
        self._size = 0
        self._is_paused = False
        self._is_at_end = False
        self._news = asyncio.Event()

    def data_received(self, data: bytes, datatype: int | None) -> None:
        self._pieces.append(data)
        self._size += len(data)
        self._news.set()
        if self._size > READ_AHEAD_BYTES and not self._is_paused:
            self._is_paused = True
            self.channel.pause_reading()

    def eof_received(self) -> bool:
        self._is_at_end = True
        self._news.set()
        return super().eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.eof_received()

    async def read(self) -> bytes:
        """Wait for output and return it; nothing at the end."""
        while not self._pieces and not self._is_at_end:
            self._news.clear()
            await self._news.wait()
        whole = b"".join(self._pieces)
        self._pieces.clear()
        self._size = 0
        if self._is_paused:
            self._is_paused = False
            self.channel.resume_reading()
        return whole

    async def read_until(self, mark: bytes) -> tuple[bytes, int | None]:
        """Return the output before a mark, and the number in the mark's line; None if the output ends before."""
        said, seen = bytearray(), 0
        while piece := await self.read():
            said += piece
            found = said.find(mark, seen)
            if found >= 0 and said.endswith(b"\n"):
                return bytes(said[:found]), int(said[found + len(mark) :])
            seen = found if found >= 0 else max(0, len(said) - len(mark))
        return bytes(said), None


class Download(ChannelSession):
    """The output of FETCH: the bytes of a file go directly into their buffer."""

    def __init__(self, mark: bytes, into: memoryview | None) -> None:
        super().__init__()
        self.settled = asyncio.Event()
        self.problem: Exception | None = None
        self.said = bytearray()
        self.content = memoryview(b"")
        self._mark = mark
        self._into = into
        self._head: bytes | None = b""
        self._filled = 0
        self._overflow = 0

    @property
    def is_begun(self) -> bool:
        return self._head is None

    @property
    def is_whole(self) -> bool:
        return self.is_begun and self._filled == len(self.content) and not self._overflow

    def data_received(self, data: bytes, datatype: int | None) -> None:
        if datatype is not None:
            self.said += data
            return
        if self.problem:
            return
        if self._head is not None:
            data = self._begin(data)
        taken = min(len(data), len(self.content) - self._filled)
        if taken:
            self.content[self._filled : self._filled + taken] = data[:taken]
        self._filled += taken
        self._overflow += len(data) - taken
        if self.problem or (self._head is None and self._filled == len(self.content)):
            self.settled.set()

    def eof_received(self) -> bool:
        self.settled.set()
        return super().eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.settled.set()

    def _begin(self, data: bytes) -> bytes:
        """Find the line with the size, after any output of a login shell; return the bytes after it."""
        assert self._head is not None
        *lines, self._head = (self._head + data).split(b"\n")
        for number, line in enumerate(lines):
            word, _, size = line.partition(b" ")
            if word == self._mark:
                rest = b"\n".join([*lines[number + 1 :], self._head])
                self._head = None
                try:
                    self.content = self._room(int(size))
                except (MemoryError, OSError, BadRequest) as error:
                    self.problem = error
                    return b""
                return rest
        return b""

    def _room(self, size: int) -> memoryview:
        if self._into is None:
            return memory(size)
        if size > len(self._into):
            raise BadRequest(f"the file has {size} bytes, more than there is room for: {len(self._into)}")
        return self._into[:size]


def memory(size: int) -> memoryview:
    """Return new, writable memory.

    In huge pages where the kernel has them: touching 100 MiB for the first time then takes 15 ms, not 70.
    """
    if size < LARGE_BYTES:
        return memoryview(bytearray(size))
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            pages.madvise(mmap.MADV_HUGEPAGE)
        except OSError:
            pass  # a kernel built without them
    return memoryview(pages)


def pieces(content: Path | bytes | Iterable[memoryview]) -> Iterator[bytes]:
    """Cut the content into pieces. Views pass for bytes: asyncssh copies its input in any case."""
    if isinstance(content, Path):
        with content.open("rb") as file:
            while piece := file.read(PIECE_BYTES):
                yield piece
        return
    for view in [memoryview(content)] if isinstance(content, bytes) else content:
        for start in range(0, len(view), PIECE_BYTES):
            yield cast(bytes, view[start : start + PIECE_BYTES])


class TextStream:
    """A command's output: bytes in, lines out. Keeps all of it, or only its end if there is a callback for lines."""

    def __init__(self, on_line: Callable[[str], None] | None) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._on_line = on_line
        self._parts: list[str] = []
        self._open_line = ""
        self._size = 0

    @property
    def whole(self) -> str:
        return "".join(self._parts)

    def feed(self, piece: bytes, *, last: bool = False) -> None:
        text = self._decoder.decode(piece, last)
        self._parts.append(text)
        if self._on_line:
            self._size += len(text)
            while self._size - len(self._parts[0]) >= TAIL_CHARACTERS:
                self._size -= len(self._parts.pop(0))
            *lines, self._open_line = (self._open_line + text).split("\n")
            if last and self._open_line:
                lines.append(self._open_line)
            for line in lines:
                self._on_line(line.removesuffix("\r"))
