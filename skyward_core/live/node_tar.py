"""A tar that a node sends, and the folder that is written from it.

The members are read and written by this code, and not by `tarfile`: its filter lets files out in Python 3.12.10, 3.13.3
and before (CVE-2025-4330, -4435, -4517), it takes any amount of memory for a long name, and it can be made to read
for ever (CVE-2025-8194). It reads the format of POSIX (ustar and pax) and of GNU, as far as the tar(1) of GNU, busybox
and BSD writes it for a folder (https://www.gnu.org/software/tar/manual/html_node/Standard.html, pax(1) of POSIX).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import IO, NamedTuple

from skyward_core.errors import BadRequest

PIECE_BYTES = 1 << 20
BLOCK = 512
LONGEST_EXTENSION = 1 << 20
MOST_FOLDERS, LONGEST_NAME = 200, 4096
"""Of a path in a tar: a longer one cannot be opened (PATH_MAX of Linux)."""
STOPPED = "nothing was copied; copy what is beside it by itself"
FILE, HARD_LINK, SYMLINK, FOLDER = b"0", b"1", b"2", b"5"
_LONG_NAME, _LONG_LINK, _PAX, _PAX_FOR_ALL = b"L", b"K", b"x", b"g"


class _Entry(NamedTuple):
    """A member of a tar: its path below the folder, its kind, and the path to which it links."""

    parts: tuple[str, ...]
    kind: bytes
    mode: int
    size: int
    link: str

    def __str__(self) -> str:
        return repr("/".join(self.parts))


class Bounded:
    """What a node sends, as far as it may."""

    def __init__(self, file: IO[bytes], limit: int) -> None:
        self._file = file
        self._left = limit
        self._limit = limit

    def pieces(self, size: int) -> Iterator[bytes]:
        """Yield so many bytes. Raises EOFError if they end before, and BadRequest beyond the limit."""
        if size > self._left:
            raise BadRequest(f"the node sends more than the {self._limit:,} bytes that it may: nothing was copied")
        self._left -= size
        while size:
            piece = self._file.read(min(size, PIECE_BYTES))
            if not piece:
                raise EOFError(f"{size} bytes are missing")
            size -= len(piece)
            yield piece

    def take(self, size: int) -> bytes:
        """Return so many bytes, which are few. Raises as `pieces`."""
        return b"".join(self.pieces(size))


def kept_mode(mode: int) -> int:
    """Return what a copy keeps of a node's mode: never set-user-ID, set-group-ID or sticky.

    The umask takes away what it always does when the file is made.
    """
    return mode & 0o777 | 0o600


def receive_folder(stream: Bounded, part: Path) -> None:
    """Write the members below a new folder. Each is opened from the descriptor of that folder, and through no link."""
    part.mkdir()
    root = os.open(part, os.O_RDONLY | os.O_DIRECTORY)
    files: set[tuple[str, ...]] = set()
    try:
        for entry in _entries(stream):
            try:
                _write_entry(stream, entry, root, files)
            except OSError as error:
                raise BadRequest(f"{entry} cannot be written: {error.strerror}; {STOPPED}") from error
    finally:
        os.close(root)


def _write_entry(stream: Bounded, entry: _Entry, root: int, files: set[tuple[str, ...]]) -> None:
    if entry.kind == FOLDER:
        os.close(_folder(root, entry.parts))
        return
    if not entry.parts:
        raise BadRequest(f"the node sends a folder that is none; {STOPPED}")
    name, parent = entry.parts[-1], _folder(root, entry.parts[:-1])
    try:
        if entry.kind == FILE:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
            with os.fdopen(os.open(name, flags, kept_mode(entry.mode), dir_fd=parent), "wb") as file:
                file.writelines(stream.pieces(entry.size))
            files.add(entry.parts)
        elif entry.kind == SYMLINK:
            os.symlink(_link_inside(entry), name, dir_fd=parent)
        elif entry.kind == HARD_LINK:
            source = _parts(entry.link)
            if source not in files:
                raise BadRequest(f"{entry} is a link to {entry.link!r}, which is no file of the copy; {STOPPED}")
            there = _folder(root, source[:-1])
            try:
                os.link(source[-1], name, src_dir_fd=there, dst_dir_fd=parent, follow_symlinks=False)
            finally:
                os.close(there)
            files.add(entry.parts)
        else:
            raise BadRequest(f"{entry} is no file, folder or link; {STOPPED}")
    finally:
        os.close(parent)


def _folder(root: int, parts: tuple[str, ...]) -> int:
    """Open a folder of the copy, and make it where it is missing. No part of its path is a link."""
    folder = os.dup(root)
    for part in parts:
        with suppress(FileExistsError):
            os.mkdir(part, dir_fd=folder)
        try:
            inner = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
        finally:
            os.close(folder)
        folder = inner
    return folder


def _link_inside(entry: _Entry) -> str:
    """Return the target of a symbolic link. Raises BadRequest if it may lead out of the copy.

    It may go up, and then down: never up after a name, because that may be a link itself. Each folder above the link is
    none, so that as many steps up as there are folders stay inside.
    """
    path = PurePosixPath(entry.link)
    if path.is_absolute():
        raise BadRequest(f"{entry} is a link to an absolute path: {STOPPED}")
    parts = [part for part in path.parts if part != "."]
    ups = next((number for number, part in enumerate(parts) if part != ".."), len(parts))
    if ups > len(entry.parts) - 1 or ".." in parts[ups:]:
        raise BadRequest(f"{entry} is a link that may lead out of the copy, to {entry.link!r}: {STOPPED}")
    return entry.link


def _entries(stream: Bounded) -> Iterator[_Entry]:
    """Yield the members. Whoever takes a file reads its bytes before the next one."""
    known: dict[str, str] = {}
    while any(block := stream.take(BLOCK)):
        entry, size = _read_member(block, known)
        if entry is None:
            if size > LONGEST_EXTENSION:
                raise BadRequest("the node sends a name that is too long: nothing was copied")
            known |= _read_extension(block[156:157], stream.take(size))
        else:
            known = {}
            yield entry
        stream.take(-size % BLOCK)


def _read_member(block: bytes, known: Mapping[str, str]) -> tuple[_Entry | None, int]:
    """Return a member, or None for a block of names for the next one, and how many bytes follow."""
    try:
        _check_sum(block)
        size, mode, kind = _number(block[124:136]), _number(block[100:108]), block[156:157]
        if kind in (_LONG_NAME, _LONG_LINK, _PAX, _PAX_FOR_ALL):
            return None, size
        name = _text(block[:100])
        if block[257:263] == b"ustar\0" and (prefix := _text(block[345:500])):
            name = f"{prefix}/{name}"
        name, link = known.get("path", name), known.get("linkpath", _text(block[157:257]))
        size = _decimal(known["size"]) if "size" in known else size
    except ValueError as error:
        raise BadRequest(f"the node sends no tar that can be read ({error}): nothing was copied") from error
    if kind in (b"\0", b"7"):
        kind = FOLDER if name.endswith("/") else FILE
    if kind != FILE:
        size = 0
    return _Entry(_parts(name), kind, mode, size, link), size


def _check_sum(block: bytes) -> None:
    if sum(block[:148]) + sum(block[156:]) + 8 * ord(" ") != _number(block[148:156]):
        raise ValueError("its sum does not match")


def _read_extension(kind: bytes, content: bytes) -> dict[str, str]:
    """Return what an additional member says of the next one. One for all members says nothing of use.

    Raises BadRequest.
    """
    if kind in (_LONG_NAME, _LONG_LINK):
        return {"path" if kind == _LONG_NAME else "linkpath": _text(content)}
    found: dict[str, str] = {}
    while kind == _PAX and content:
        try:
            length = _decimal(os.fsdecode(content.split(b" ", 1)[0]))
            record, content = content[:length], content[max(1, length) :]
            key, value = record.split(b" ", 1)[1].removesuffix(b"\n").split(b"=", 1)
        except (ValueError, IndexError) as error:
            raise BadRequest("the node sends no tar that can be read: nothing was copied") from error
        if key.startswith(b"GNU.sparse"):
            raise BadRequest(f"the node sends a file with holes, whose size nobody can check; {STOPPED}")
        if b"\0" in value:
            raise BadRequest("the node sends no tar that can be read: nothing was copied")
        if key in (b"path", b"linkpath", b"size"):
            found[key.decode()] = os.fsdecode(value)
    return found


def _parts(name: str) -> tuple[str, ...]:
    """Return the parts of a name below the folder. Raises BadRequest for one that leads elsewhere."""
    path = PurePosixPath(name)
    if len(name) > LONGEST_NAME or len(path.parts) > MOST_FOLDERS:
        raise BadRequest(f"the node sends the name {name[:80]!r}..., which is too long for a path; {STOPPED}")
    if path.is_absolute() or ".." in path.parts:
        raise BadRequest(f"the node sends the name {name!r}, which is outside of the folder; {STOPPED}")
    return path.parts


def _number(field: bytes) -> int:
    """Return a number of a header: octal digits, or a binary number as GNU tar has for 8 GiB and more."""
    if field[:1] == b"\x80":
        return int.from_bytes(field[1:])
    if re.fullmatch(rb" *[0-7]*[ \0]*", field) is None:
        raise ValueError("it has a number that is none")
    return int(field.strip(b" \0") or b"0", 8)


def _decimal(text: str) -> int:
    if re.fullmatch(r"[0-9]{1,18}", text, re.ASCII) is None:
        raise ValueError("it has a number that is none")
    return int(text)


def _text(field: bytes) -> str:
    return os.fsdecode(field.split(b"\0", 1)[0])
