"""Which folders count as private: no other user can change them."""

import os
from pathlib import Path

import pytest

from skyward_core.paths import first_private
from skyward_core.wire import private_folders
from skyward_core.wire.private_folders import NotPrivate, check_private, is_private, make_private

STRANGER = 61_001
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give folders to others")


def made(path: Path, mode: int = 0o700, owner: int | None = None) -> Path:
    path.mkdir()
    path.chmod(mode)
    if owner is not None:
        os.chown(path, owner, owner)
    return path


def test_a_folder_is_made_with_its_parents_and_found_again(tmp_path: Path) -> None:
    """It is closed to other users, with any umask; the second time it is the same folder."""
    before = os.umask(0)
    try:
        path = make_private(tmp_path / "a" / "b")
    finally:
        os.umask(before)
    assert [folder.stat().st_mode & 0o777 for folder in (path, path.parent)] == [0o700, 0o700]
    assert make_private(path) == path


def test_a_folder_that_others_may_read_is_closed_to_them(tmp_path: Path) -> None:
    """No other user can have put a file there."""
    folder = made(tmp_path / "open", 0o755)
    assert is_private(folder)
    assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(("mode", "who"), [(0o777, "everybody"), (0o1777, "everybody"), (0o702, "everybody")])
def test_a_folder_that_others_may_write_to_is_refused(tmp_path: Path, mode: int, who: str) -> None:
    """Another user may have put a file there. The folder is not changed."""
    folder = made(tmp_path / "open", mode)
    with pytest.raises(NotPrivate, match=f"may be written to by {who}"):
        make_private(folder)
    assert folder.stat().st_mode & 0o7777 == mode


@pytest.mark.parametrize(("mode", "is_good"), [(0o755, True), (0o777, False), (0o1777, True)])
def test_no_other_user_can_rename_a_parent_folder(tmp_path: Path, mode: int, is_good: bool) -> None:
    """/tmp prevents it by its sticky bit."""
    above = made(tmp_path / "above", mode)
    mine = made(above / "mine")
    assert is_private(mine) is is_good


@as_root
@pytest.mark.parametrize("mode", [0o700, 0o755, 0o777])
def test_the_folder_of_another_user_is_refused(tmp_path: Path, mode: int) -> None:
    """It is refused by its owner, and so are all folders in it."""
    theirs = made(tmp_path / "theirs", mode, STRANGER)
    with pytest.raises(NotPrivate, match=f"{theirs} belongs to user {STRANGER}"):
        check_private(theirs)
    mine = made(theirs / "mine")
    with pytest.raises(NotPrivate, match=f"{theirs} belongs to user {STRANGER}, who could exchange"):
        check_private(mine)


@as_root
def test_a_group_that_others_are_in_counts_as_others(tmp_path: Path) -> None:
    """Root's group does not count, nor the user's own group of the same name without other members."""
    above = made(tmp_path / "above", 0o770)
    mine = made(above / "mine")
    os.chown(above, 0, 0)
    assert is_private(mine)
    os.chown(above, 0, STRANGER)
    with pytest.raises(NotPrivate, match=f"group {STRANGER}"):
        check_private(mine)


def test_a_symlink_does_not_count_as_a_folder(tmp_path: Path) -> None:
    """Also not a link to a private folder. A parent may be a link of this user, for a home on another disk."""
    folder = made(tmp_path / "folder")
    link = tmp_path / "link"
    link.symlink_to(folder)
    with pytest.raises(NotPrivate, match="is a symlink"):
        check_private(link)
    assert make_private(link / "inside") == folder / "inside"


@as_root
def test_the_symlink_of_another_user_is_refused(tmp_path: Path) -> None:
    """Wherever it points, because that user may change it."""
    folder = made(tmp_path / "folder")
    link = tmp_path / "link"
    link.symlink_to(folder)
    os.chown(link, STRANGER, STRANGER, follow_symlinks=False)
    with pytest.raises(NotPrivate, match=f"symlink of user {STRANGER}"):
        make_private(link / "inside")


@pytest.mark.parametrize("make", [True, False])
@pytest.mark.parametrize("folder", ["skyward", "skyward/nodes"])
def test_a_symlink_that_appears_after_the_check_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: bool, folder: str
) -> None:
    """In a folder that all users may write to, another user can make a link between the check of the path and its use;
    it may point to the victim's home.

    The link replaces the folder, or a parent of it.

    Looks inside: the symlink appears between two private steps.
    """
    shared = made(tmp_path / "shared", 0o1777)
    target = made(made(tmp_path / "home") / "nodes")
    monkeypatch.setattr(private_folders, "_without_links", lambda path: path)  # the link did not exist at the check
    (shared / "skyward").symlink_to(target.parent)
    with pytest.raises(NotPrivate, match="skyward is a symlink"):
        with private_folders.opened_private(shared / folder, make=make):
            pass


@pytest.mark.parametrize("target", ["link", "../link", "missing"])
def test_what_is_no_folder_is_refused(tmp_path: Path, target: str) -> None:
    """A file; a link to nothing or to itself."""
    (tmp_path / "file").touch()
    with pytest.raises(NotPrivate, match="is no folder"):
        make_private(tmp_path / "file")
    (made(tmp_path / "d") / "link").symlink_to(target)
    with pytest.raises(OSError):
        check_private(tmp_path / "d" / "link" / "x")


@pytest.mark.parametrize("between", ["theirs", "missing"])
def test_a_path_that_goes_through_a_folder_of_another_user_is_refused(tmp_path: Path, between: str) -> None:
    """`theirs/../mine` is `mine` until the other user replaces `theirs` by a symlink: then it is a folder beside the
    link's target.
    """
    (tmp_path / "mine").mkdir(mode=0o700)
    (tmp_path / "theirs").mkdir()
    path = tmp_path / between / ".." / "mine"
    with pytest.raises(NotPrivate, match=r"has '\.\.' in it"):
        check_private(path)
    assert not is_private(path)
    assert is_private(tmp_path / "mine")


def test_root_of_a_container_without_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If root is no user of the namespace, its files have the kernel's overflow user as their owner.

    Looks inside: the test has no namespace of users.
    """
    (tmp_path / "map").write_text("      1000       1000          1\n")
    monkeypatch.setattr(private_folders, "UID_MAP", tmp_path / "map")
    assert private_folders._roots() == (0, int(private_folders.OVERFLOW_UID.read_text()))
    (tmp_path / "map").write_text("         0       1000          1\n         1     100000      65536\n")
    assert private_folders._roots() == (0,)


def test_the_first_usable_place_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A place without locks for folders, as on NFS, is skipped; if no place is usable, each has its reason."""
    places = [
        ("A", lambda: made(tmp_path / "a", 0o777) if not (tmp_path / "a").exists() else tmp_path / "a"),
        ("B", lambda: tmp_path / "b"),
    ]
    assert [first_private("nodes", places, is_locked=is_locked) for is_locked in (False, True, True)] == [
        tmp_path / "b" / "nodes"
    ] * 3

    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(9, "Bad file descriptor")

    monkeypatch.setattr("fcntl.flock", refuse)
    assert first_private("nodes", places) == tmp_path / "b" / "nodes"
    with pytest.raises(NotPrivate, match=r"A: .*written to by everybody.*B: .*Bad file descriptor.*with A"):
        first_private("nodes", places, is_locked=True)


def test_a_folder_on_a_read_only_disk_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is ours, and not writable: the next place is used."""
    real = os.access

    def access(path: str, mode: int, *, dir_fd: int) -> bool:
        return os.readlink(f"/proc/self/fd/{dir_fd}") != str(tmp_path / "a/nodes") and real(path, mode, dir_fd=dir_fd)

    monkeypatch.setattr(os, "access", access)
    assert (
        first_private("nodes", [("A", lambda: tmp_path / "a"), ("B", lambda: tmp_path / "b")])
        == tmp_path / "b" / "nodes"
    )
