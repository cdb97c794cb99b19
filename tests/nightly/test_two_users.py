"""Two users of one computer: files of one user under names that can be guessed do not affect the other user.

They run no code as the other user and read none of his data. The tests start real processes under two other user ids.
These may read all files (CAP_DAC_READ_SEARCH), because Python and this repository are in root's home. The rights to
write, rename and own files are those of any two users.
"""

import os
from pathlib import Path

import pytest

from tests.conftest import wait_until
from tests.system.test_two_users import (  # noqa: F401 - fixtures
    ALICE,
    ALICE_RENAMES,
    BOB,
    BOB_LAUNCHES,
    CAN_BECOME_OTHERS,
    CAP_DAC_READ_SEARCH,
    Users,
    alice_owns,
    alice_squats,
    users,
)

pytestmark = [
    pytest.mark.skipif(not CAN_BECOME_OTHERS, reason="two other users can only be had by root with CAP_DAC_READ_SEARCH")
]


def test_a_folder_made_by_another_user_beforehand_gets_no_node(users: Users) -> None:
    """The attack of issue 10: the folder exists and is open to all, and Bob's files in it are renamed away before his
    script starts.
    """
    squatted = alice_squats(users, 0o777)
    proof = users.tmp / "proof"
    users.start(ALICE, ALICE_RENAMES, squatted, proof)
    wait_until((squatted / "ready").exists, "Alice")
    out, errors = users.run(BOB, BOB_LAUNCHES, 5)
    assert not proof.exists(), f"Alice's script ran as user {proof.read_text()}"
    assert [line.split()[0] for line in out.splitlines()] == ["ours"] * 5, errors
    assert sorted(squatted.iterdir()) == [squatted / "ready"]


BOB_IS_PREDICTABLE = """
import sys, types, uuid

uuid.uuid4 = lambda: types.SimpleNamespace(hex=sys.argv[1])
import skyward_core as sky
from skyward_core.transport.transport import LocalTransport
from skyward_core.worker.settings import memory_directory

provider = sky.Local()
(offer,) = provider.offers(sky.Requirements())
(instance,) = provider.launch(offer, 1, {"skyward-pool": "sky-two", "skyward-rank": "0"}, "sleep 300")
print(*LocalTransport(instance, bool, lambda: None).value_directories, sep="\\n")
provider.terminate([instance.id])
"""


@pytest.mark.parametrize("kind", ["folder", "symlink"])
def test_a_folder_in_memory_that_another_user_made_is_not_used(users: Users, kind: str) -> None:
    """Even if Alice could guess the id of a node: large values, which are pickles, go to a folder that she can neither
    read nor write. Hers does not change.
    """
    word = os.urandom(6).hex()
    squatted = Path(f"/dev/shm/skyward-{BOB}-local-{word}")
    try:
        if kind == "symlink":
            squatted.symlink_to(alice_owns(users, "hers"))
        else:
            squatted.mkdir()
            squatted.chmod(0o777)
        os.chown(squatted, ALICE, ALICE, follow_symlinks=False)
        out, errors = users.run(BOB, BOB_IS_PREDICTABLE, word)
        assert out.splitlines() == [f"{users.home(BOB)}/.local/state/skyward/nodes/local-{word}"], errors
        assert squatted.is_dir()
    finally:
        squatted.unlink() if squatted.is_symlink() else squatted.rmdir()


BOB_SHIPS = """
from skyward_core.transport.code_upload import shipped_archive

print(shipped_archive().path)
"""


@pytest.mark.parametrize("squatted", ["folder", "symlink"])
def test_code_sent_to_nodes_is_not_kept_in_a_folder_of_another_user(users: Users, squatted: str) -> None:
    """The code runs here and on every node of Bob's.

    The next folder is used, and if none is left he gets the reasons.
    """
    cache, hers = users.folder / "cache", alice_owns(users, "hers")
    cache.mkdir(mode=0o755)
    if squatted == "folder":
        (cache / "skyward" / "ship").mkdir(parents=True)
        (cache / "skyward" / "ship").chmod(0o777)
        for folder in (cache / "skyward", cache / "skyward" / "ship"):
            os.chown(folder, ALICE, ALICE)
    else:
        (cache / "skyward").symlink_to(hers)
        os.chown(cache / "skyward", ALICE, ALICE, follow_symlinks=False)
    out, errors = users.run(BOB, BOB_SHIPS, XDG_CACHE_HOME=str(cache))
    assert out.startswith(f"{users.home(BOB)}/.local/state/skyward/ship/"), errors
    alice_squats(users, 0o777)
    nowhere = {"XDG_CACHE_HOME": str(cache), "XDG_STATE_HOME": str(users.folder / "nowhere")}
    out, errors = users.run(BOB, BOB_SHIPS, **nowhere)
    assert out == ""
    assert "BadRequest: the archives for nodes cannot be stored" in errors.splitlines()[-1]
    assert list(hers.rglob("*")) == []


BOB_LEDGER = """
import sys
from skyward_core.ledger.ledger import Ledger

Ledger(sys.argv[1]).close()
print("opened")
"""


@pytest.mark.parametrize("beside", ["", "-wal", "-shm"])
def test_the_ledger_of_another_user_is_refused(users: Users, beside: str) -> None:
    """Even if all users may write to it, and even if only a file beside Bob's own is hers."""
    folder = users.folder / "ledgers"
    folder.mkdir()
    os.chown(folder, BOB, BOB)
    path = folder / f"ledger.db{beside}"
    path.write_bytes(b"")
    path.chmod(0o666)
    os.chown(path, ALICE, ALICE)
    out, errors = users.run(BOB, BOB_LEDGER, f"sqlite:///{folder / 'ledger.db'}")
    assert out == ""
    assert (
        f"{path} belongs to user {ALICE}: a ledger that several users share is kept in PostgreSQL"
        in errors.splitlines()[-1]
    )
