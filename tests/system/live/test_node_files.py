"""`skyward cp` and a node that lies: what it sends is content, and decides neither names, modes, sizes nor places."""

import io
import os
import shutil
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

import skyward_core as sky
from skyward_core.live import node_files
from skyward_core.live.node_files import copy_from, copy_to
from skyward_core.live.pool_nodes import PoolNodes
from tests.unit.live.test_live import machine

Tar = list[tuple[tarfile.TarInfo, bytes]]


class Node:
    """A node whose answers a test writes, in a shell of this machine. `here` is the folder of the user."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.here, self._patch = folder / "node", folder / "here", monkeypatch
        self.folder.mkdir()
        self.here.mkdir()
        self.nodes = PoolNodes("sky-1", (machine(directory=str(self.folder)),))

    def runs(self, script: str) -> None:
        self._patch.setattr(node_files, "READ", script)

    def sends(self, header: str, body: bytes = b"") -> None:
        (self.folder / "body").write_bytes(body)
        self.runs(f'echo "$3" {header}; cat "$1/body"')

    def sends_tar(self, entries: Tar, **options: int) -> None:
        content = tar_of(entries, **options)
        self.sends(f"folder {len(content)}", content)

    def copy(self, path: str = "out", target: str = "") -> None:
        copy_from(self.nodes, 0, path, self.here / target)

    def refuses(self, words: str, path: str = "out", target: str = "") -> None:
        """The copy fails with these words, and leaves nothing, neither here nor above."""
        before = paths_below(self.folder.parent)
        with pytest.raises(sky.BadRequest, match=words):
            self.copy(path, target)
        assert paths_below(self.folder.parent) == before


def paths_below(folder: Path) -> dict[str, tuple[int, str]]:
    return {
        str(path): (path.lstat().st_mode, os.readlink(path) if path.is_symlink() else "") for path in folder.rglob("*")
    }


def entry(
    name: str, kind: bytes = tarfile.REGTYPE, content: bytes = b"", **more: object
) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.type, info.size = kind, len(content)
    for field, value in more.items():
        setattr(info, field, value)
    return info, content


def tar_of(entries: Tar, **options: int) -> bytes:
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w", format=options.get("format", tarfile.GNU_FORMAT)) as archive:
        for info, content in entries:
            archive.addfile(info, io.BytesIO(content))
    return written.getvalue()


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    before = os.umask(0o022)
    yield Node(tmp_path, monkeypatch)
    os.umask(before)


@pytest.mark.parametrize(
    "words", ["06777", "file", "file x y", "file 3 69", "file -3 644", "folder", "folder 1 2", "link 3"]
)
def test_an_answer_of_other_words_is_an_error_that_shows_them(node: Node, words: str) -> None:
    node.sends(words, b"abc")
    node.refuses(f"the node does not say what it sends, but b'{words}': nothing was copied")


def test_a_copy_keeps_who_may_read_and_run_a_file_and_no_other_mode(node: Node) -> None:
    """Set-user-ID, set-group-ID and sticky go, and the umask takes away what it always does."""
    node.sends_tar(
        [
            entry("./inner", tarfile.DIRTYPE, mode=0o7777),
            entry("./inner/program", content=b"x", mode=0o6777),
            entry("./inner/private", content=b"x", mode=0o7000),
        ]
    )
    node.copy()
    modes = {path.name: path.stat().st_mode & 0o7777 for path in node.here.rglob("*")}
    assert modes == {"out": 0o755, "inner": 0o755, "program": 0o755, "private": 0o600}
    for sent, umask, kept in ((0o6777, 0o022, 0o755), (0o1777, 0o077, 0o700), (0o600, 0o022, 0o600), (0o4, 0, 0o604)):
        os.umask(umask)
        node.sends(f"file 3 {sent:03o}", b"abc")
        node.copy("other")
        assert (node.here / "other").stat().st_mode & 0o7777 == kept


@pytest.mark.parametrize("path", ["..", "a/..", "/", "../.."])
def test_a_path_without_a_name_is_not_written_above_the_target(node: Node, path: str) -> None:
    node.sends("file 3 644", b"abc")
    node.refuses(f"{path} has no name for the copy: name it, as .*/copy", path)
    node.copy(path, "copy")
    assert (node.here / "copy").read_bytes() == b"abc"


def test_a_folder_that_ends_in_no_name_is_called_work(node: Node) -> None:
    """It is the working directory of the calls, as before."""
    node.sends_tar([entry("./a", content=b"x")])
    node.copy("")
    node.copy(".")
    assert (node.here / "work" / "a").read_bytes() == b"x"


def chain(name: str) -> Tar:
    """The way out of CVE-2025-4517: a path longer than PATH_MAX, after which `realpath` sees no links."""
    long, entries, path = "d" * 247, list[tuple[tarfile.TarInfo, bytes]](), ""
    for step in "abcdefghijklmnop":
        entries.append(entry(os.path.join(path, long), tarfile.DIRTYPE))
        entries.append(entry(os.path.join(path, step), tarfile.SYMTYPE, linkname=long))
        path = os.path.join(path, long)
    link = os.path.join("/".join("abcdefghijklmnop"), "l" * 254)
    return [
        *entries,
        entry(link, tarfile.SYMTYPE, linkname="../" * 16),
        entry("escape", tarfile.SYMTYPE, linkname=f"{link}/../../"),
        entry(name, content=b"theirs"),
    ]


OUTSIDE: dict[str, tuple[Tar, str]] = {
    "an absolute name": ([entry("/tmp/theirs", content=b"x")], "'/tmp/theirs', which is outside of the folder"),
    "a name above": ([entry("a/../../theirs", content=b"x")], "'a/../../theirs', which is outside of the folder"),
    "a link to a file": ([entry("a", tarfile.SYMTYPE, linkname="/etc/passwd")], "'a' is a link to an absolute path"),
    "a link above": ([entry("a/b", tarfile.SYMTYPE, linkname="../../x")], "may lead out of the copy, to '../../x'"),
    "a link after a link": (
        [
            entry("a/b/up", tarfile.SYMTYPE, linkname="../.."),
            entry("out", tarfile.SYMTYPE, linkname="a/b/up/.."),
            entry("out/theirs", content=b"x"),
        ],
        "'out' is a link that may lead out of the copy",
    ),
    "a file through a link": (
        [
            entry("inner", tarfile.DIRTYPE),
            entry("link", tarfile.SYMTYPE, linkname="inner"),
            entry("link/x", content=b"x"),
        ],
        "'link/x' cannot be written: Not a directory",
    ),
    "a file over a link": (
        [entry("link", tarfile.SYMTYPE, linkname="new"), entry("link", content=b"x")],
        "'link' cannot be written: File exists",
    ),
    "a link of a file outside": (
        [entry("a", tarfile.LNKTYPE, linkname="../here/ours")],
        "'../here/ours', which is outside of the folder",
    ),
    "a hard link to a link": (
        [entry("a", tarfile.SYMTYPE, linkname="b"), entry("c", tarfile.LNKTYPE, linkname="a")],
        "'c' is a link to 'a', which is no file of the copy",
    ),
    "a device": ([entry("null", tarfile.CHRTYPE, devmajor=1, devminor=3)], "'null' is no file, folder or link"),
    "a pipe": ([entry("pipe", tarfile.FIFOTYPE)], "'pipe' is no file, folder or link"),
    "the chain of CVE-2025-4517": (chain("escape/theirs"), "cannot be written: Not a directory"),
    "a name that is too deep": ([entry("a/" * 300 + "b", content=b"x")], "which is too long for a path"),
}


@pytest.mark.parametrize("kind", OUTSIDE)
def test_no_member_of_a_folder_is_written_outside_of_it(node: Node, kind: str) -> None:
    """On every Python: `tarfile` has no part in it."""
    (node.here / "ours").write_text("ours")
    entries, words = OUTSIDE[kind]
    node.sends_tar(entries)
    node.refuses(words)
    node.sends_tar(entries, format=tarfile.PAX_FORMAT)
    node.refuses(words)


def test_a_folder_of_an_honest_node_comes_whole(node: Node) -> None:
    """With links inside, hard links, long names and names that are not UTF-8, as GNU tar writes them."""
    source = node.folder / "source"
    long = source / ("n" * 200) / ("m" * 200)
    long.mkdir(parents=True)
    (long / "file").write_bytes(b"x" * 100_000)
    os.link(long / "file", source / "same")
    (source / "link").symlink_to(f"{'n' * 200}/{'m' * 200}/file")
    (long / "up").symlink_to("../../same")
    (source / os.fsdecode(b"caf\xe9")).write_bytes(b"y")
    node.runs(node_files.READ.replace(node_files.ENTER, 'cd "$1"\n'))
    node.copy("source")
    (node.here / "ours").symlink_to("source")
    node.copy("source", "new")
    for copy in ("source", "new"):
        copied = node.here / copy
        assert (
            (copied / "link").read_bytes() == (copied / long.relative_to(source) / "up").read_bytes() == b"x" * 100_000
        )
        assert (copied / "same").stat().st_nlink == 2
        assert {path.relative_to(copied) for path in copied.rglob("*")} == {
            path.relative_to(source) for path in source.rglob("*")
        }


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ('echo "$3" file 5 644; yes', "goes on after the end"),
        ('echo "$3" folder 10240; yes', "no tar that can be read"),
        ('echo "$3" folder 10240; cat "$1/body" /dev/zero', "goes on after the end"),
        ('echo "$3" folder 10240; cat "$1/large" /dev/zero', r"more than the 16,788,\d+ bytes that it may"),
        (
            'echo "$3" folder 10240; while :; do cat "$1/small"; done',
            r"more than the 16,788,\d+ bytes that it may",
        ),
        ("tr '\\0' x </dev/zero", "other text than an answer"),
        ("yes", "other text than an answer"),
    ],
)
def test_a_stream_without_end_is_cut(node: Node, script: str, words: str) -> None:
    """What the node has said before is the limit; a folder may grow by a tenth and 16 MiB meanwhile."""
    (node.folder / "body").write_bytes(tar_of([entry("a", content=b"x")]))
    (node.folder / "large").write_bytes(entry("a", size=1 << 40)[0].tobuf(tarfile.GNU_FORMAT))
    (node.folder / "small").write_bytes(entry("a", tarfile.DIRTYPE)[0].tobuf(tarfile.GNU_FORMAT) * 8192)
    node.runs(script)
    node.refuses(words)


def test_words_of_a_node_without_end_fill_no_disk(node: Node) -> None:
    """The last ones are in the error."""
    node.runs("yes no | head -n 2000000 >&2; echo the reason >&2; exit 3")
    with pytest.raises(sky.SkywardError, match=r"node 0 of pool sky-1: no\n(  no\n){3}  the reason$"):
        node.copy()
    assert list(node.here.iterdir()) == []


@pytest.mark.parametrize("kind", ["folder {}", "file {} 644"])
def test_the_disk_is_asked_before_anything_is_written(node: Node, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10_000))
    node.sends(kind.format(10_001), b"x" * 10_001)
    node.refuses("out has 10,001 bytes, and the disk of .*/here has 10,000 bytes free: nothing was copied")


SPOILED: dict[str, Callable[[bytes], bytes]] = {
    "its sum": lambda tar: b"x" + tar[1:],
    "a number": lambda tar: summed(tar[:124] + b"0x0000000\0".ljust(12) + tar[136:]),
    "a negative number": lambda tar: summed(tar[:124] + b"\xff" * 12 + tar[136:]),
    "a long name of a gigabyte": lambda tar: summed(tar[:124] + b"10000000000\0" + tar[136:156] + b"L" + tar[157:]),
    "a negative size": lambda _: pax(b"14 size=-1024\n"),
    "a size that is none": lambda _: pax(b"11 size=1_0\n"),
    "a record of no length": lambda _: pax(b"0 path=a\n"),
    "a record that is none": lambda _: pax(b"nothing"),
    "a name with a NUL": lambda _: pax(b"12 path=a\0b\n"),
    "holes": lambda _: pax(b"22 GNU.sparse.major=1\n"),
}


def summed(tar: bytes) -> bytes:
    block = tar[:148] + b" " * 8 + tar[156:512]
    return block[:148] + f"{sum(block):06o}\0 ".encode() + block[156:] + tar[512:]


def pax(record: bytes) -> bytes:
    return tar_of([entry("pax", tarfile.XHDTYPE, record), entry("a", content=b"abc")])


@pytest.mark.parametrize("kind", SPOILED)
def test_a_tar_that_lies_about_itself_is_refused(node: Node, kind: str) -> None:
    """It takes neither memory nor time without end."""
    content = SPOILED[kind](tar_of([entry("a", content=b"abc")]))
    node.sends(f"folder {len(content)}", content)
    node.refuses("the node sends (no tar that can be read|a name that is too long|a file with holes)|more than the")


@pytest.mark.parametrize("bytes_sent", [0, 2, 512, 1024])
def test_a_copy_that_is_not_whole_leaves_nothing(node: Node, bytes_sent: int) -> None:
    """Neither a file nor a folder; a file that was there stays as it was."""
    (node.here / "out").write_text("ours")
    node.sends("file 2000 644", b"x" * bytes_sent)
    node.refuses("the copy is not whole")
    (node.here / "out").unlink()
    content = tar_of([entry("a", content=b"x" * 3000)])
    node.sends(f"folder {len(content)}", content[:bytes_sent])
    node.refuses("the copy is not whole")
    node.runs("exit 0")
    node.refuses("the copy is not whole: the node has sent nothing")


def test_a_copy_has_the_habits_of_cp(node: Node) -> None:
    """A file replaces a file, and is written where a link of ours leads. A folder is added to one of its name, and does
    not replace a file.
    """
    (node.here / "kept").write_text("old")
    (node.here / "link").symlink_to("kept")
    node.sends("file 3 644", b"new")
    node.copy("out", "link")
    assert (node.here / "link").is_symlink()
    assert (node.here / "kept").read_text() == "new"
    (node.here / "dangling").symlink_to("none")
    node.refuses("dangling is a link to nothing", "out", "dangling")
    node.refuses("there is no folder .*/no on this machine", "out", "no/such")
    node.sends_tar([entry("same", content=b"new"), entry("inner/b", content=b"new")])
    (node.here / "out" / "inner").mkdir(parents=True)
    for name in ("same", "inner/a"):
        (node.here / "out" / name).write_text("old")
    node.copy()
    found = {name: (node.here / "out" / name).read_text() for name in ("same", "inner/a", "inner/b")}
    assert found == {"same": "new", "inner/a": "old", "inner/b": "new"}
    node.refuses("kept is there already, and no folder", "out", "kept")
    shutil.rmtree(node.here / "out" / "inner")
    (node.here / "out" / "inner").symlink_to("/")
    (node.here / "out" / "same").write_text("old")
    node.refuses("inner is there already, and no folder")
    assert (node.here / "out" / "same").read_text() == "old"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give links to others")
def test_a_link_of_another_user_is_not_followed(node: Node) -> None:
    (node.here / "kept").write_text("ours")
    (node.here / "link").symlink_to("kept")
    os.chown(node.here / "link", 61_001, 61_001, follow_symlinks=False)
    node.sends("file 3 644", b"new")
    node.refuses("link is a link of another user, who chooses what is replaced", "out", "link")
    assert (node.here / "kept").read_text() == "ours"


def test_a_node_that_does_not_run_takes_and_gives_no_files(tmp_path: Path) -> None:
    """Its directory is there, and names a process that is not its supervisor."""
    (tmp_path / "work").mkdir()
    (tmp_path / "supervisor").write_text(f"{os.getpid()}\n")
    (tmp_path / "file").write_text("content")
    nodes = PoolNodes("sky-1", (machine(directory=str(tmp_path)),))
    with pytest.raises(sky.NodeLost, match="node 0 of pool sky-1 does not run: it is being prepared, or has ended"):
        copy_to(nodes, 0, tmp_path / "file", "copy")
    with pytest.raises(sky.NodeLost, match="does not run"):
        copy_from(nodes, 0, "a", tmp_path / "copy")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "supervisor", "work"]
