"""Two users of one computer: files of one user under names that can be guessed do not affect the other user.

They run no code as the other user and read none of his data. The tests start real processes under two other user ids.
These may read all files (CAP_DAC_READ_SEARCH), because Python and this repository are in root's home. The rights to
write, rename and own files are those of any two users.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

import skyward_core as sky
from skyward_core.ledger import Account, Ledger, Period, default_url
from tests.waiting import wait_until

ALICE, BOB = 61_001, 61_002
"""Alice attacks, Bob opens pools."""
CAP_DAC_READ_SEARCH = 2
CAPABILITIES = int(Path("/proc/self/status").read_text().partition("CapBnd:")[2].split()[0], 16)

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or not CAPABILITIES >> CAP_DAC_READ_SEARCH & 1,
    reason="two other users can only be had by root with CAP_DAC_READ_SEARCH",
)

BOB_LAUNCHES = """
import pathlib, sys, time, os
import skyward_core as sky

provider = sky.Local()
(offer,) = provider.offers(sky.Requirements())
for number in range(int(sys.argv[1])):
    (instance,) = provider.launch(offer, 1, {"skyward-pool": f"sky-two-{number}", "skyward-rank": "0"}, "echo ours >ran; sleep 300")
    ran, deadline = pathlib.Path(instance.directory) / "ran", time.monotonic() + 60
    while time.monotonic() < deadline and not ran.exists():
        time.sleep(0.005)
    print("ours" if ran.exists() else "not ours", instance.directory, flush=True)
    provider.terminate([instance.id])
"""

ALICE_RENAMES = """
import os, pathlib, sys

folder, proof = pathlib.Path(sys.argv[1]), sys.argv[2]
(folder / "ready").touch()
n = 0
while True:
    for name in os.listdir(folder):
        if name.startswith("local-"):
            n += 1
            try:
                os.rename(folder / name, folder / f"away-{n}")
                os.mkdir(folder / name, 0o777)
                os.chmod(folder / name, 0o777)
                (folder / name / "startup.sh").write_text(f"id -u >>{proof}; sleep 1")
            except OSError:
                pass
"""


class Users:
    """Homes for two users, a temporary folder in which all may write, as /tmp, and the processes that run as them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tmp = folder / "tmp"
        self.tmp.mkdir()
        self.tmp.chmod(0o1777)
        self._processes: list[subprocess.Popen[str]] = []
        for user in (ALICE, BOB):
            self.home(user).mkdir(mode=0o700)
            os.chown(self.home(user), user, user)

    def home(self, user: int) -> Path:
        return self.folder / f"home-{user}"

    def start(self, user: int, program: str, *words: object, **variables: str) -> subprocess.Popen[str]:
        """Start a program as a user; it can read from a pipe."""
        environ = {
            "PATH": os.environ["PATH"],
            "HOME": str(self.home(user)),
            "TMPDIR": str(self.tmp),
            "PYTHONPATH": str(Path(__file__).parents[2]),
        }
        may_read = ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]
        as_user = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", *may_read]
        argv = [*as_user, sys.executable, "-c", program, *map(str, words)]
        pipes: Any = {name: subprocess.PIPE for name in ("stdin", "stdout", "stderr")} | {"text": True}
        process = subprocess.Popen(argv, env=environ | variables, cwd=self.home(user), **pipes)
        self._processes.append(process)
        return process

    def run(self, user: int, program: str, *words: object, **variables: str) -> tuple[str, str]:
        """Run a program to its end; return its stdout and stderr."""
        return self.start(user, program, *words, **variables).communicate(timeout=120)

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.communicate()


@pytest.fixture
def users() -> Iterator[Users]:
    folder = Path(tempfile.mkdtemp(prefix="skyward-users-"))
    folder.chmod(0o755)
    users = Users(folder)
    yield users
    users.close()
    shutil.rmtree(folder)


def alice_owns(users: Users, name: str, mode: int = 0o777) -> Path:
    folder = users.tmp / name
    folder.mkdir()
    folder.chmod(mode)
    os.chown(folder, ALICE, ALICE)
    return folder


def alice_squats(users: Users, mode: int) -> Path:
    """Alice creates the folder that Bob's nodes would have in the temporary folder."""
    return alice_owns(users, f"skyward-{BOB}", mode)


SQUATTED = {
    "open to all": lambda users: alice_squats(users, 0o777),
    "closed": lambda users: alice_squats(users, 0o700),
    "symlink to hers": lambda users: alice_links(users, alice_owns(users, "hers")),
    "symlink to his": lambda users: alice_links(users, users.home(BOB)),
    "hard link to his file": lambda users: os.link(file_of_bob(users), users.tmp / f"skyward-{BOB}"),
}


def alice_links(users: Users, target: Path) -> None:
    link = users.tmp / f"skyward-{BOB}"
    link.symlink_to(target)
    os.chown(link, ALICE, ALICE, follow_symlinks=False)


def file_of_bob(users: Users) -> Path:
    file = users.home(BOB) / "file"
    file.write_text("his")
    os.chown(file, BOB, BOB)
    return file


@pytest.mark.parametrize("squatted", SQUATTED)
def test_folders_of_another_user_are_not_used(users: Users, squatted: str) -> None:
    SQUATTED[squatted](users)
    home_of_root = {"XDG_STATE_HOME": str(users.folder / "nowhere")}
    out, errors = users.run(BOB, BOB_LAUNCHES, 1, **home_of_root)
    assert out == ""
    last = errors.strip().splitlines()[-1]
    assert last.startswith("skyward_core.errors.BadRequest: nodes of this machine need a separate folder")
    assert "XDG_STATE_HOME: [Errno 13] Permission denied" in last
    assert f"TMPDIR: {users.tmp}/skyward-{BOB}" in last
    assert [path.name for path in users.home(BOB).iterdir()] == (["file"] if "hard" in squatted else [])
    runtime = users.folder / "runtime"
    runtime.mkdir(mode=0o700)
    os.chown(runtime, BOB, BOB)
    out, errors = users.run(BOB, BOB_LAUNCHES, 1, XDG_RUNTIME_DIR=str(runtime), **home_of_root)
    assert out.split() == ["ours", str(Path(out.split()[-1]))], errors
    assert out.split()[1].startswith(f"{runtime}/skyward/nodes/local-")


ALICE_CLAIMS = """
import ctypes, time

ctypes.CDLL(None).prctl(4, int("{dumpable}"))  # PR_SET_DUMPABLE: with 0 the files of /proc/PID belong to root
print("ready", flush=True)
time.sleep(300)
"""


def alice_claims(users: Users, pool_id: str, *, dumpable: bool = True, **more: str) -> subprocess.Popen[str]:
    """Start a process of Alice's with the tags of a node."""
    tags = {
        "SKYWARD_INSTANCE_ID": "local-0123456789ab",
        "SKYWARD_INSTANCE_DIRECTORY": "/nowhere/local-0123456789ab",
        "SKYWARD_POOL_ID": pool_id,
        "SKYWARD_RANK": "0",
        **more,
    }
    process = users.start(ALICE, ALICE_CLAIMS.format(dumpable=int(dumpable)), **tags)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("dumpable", [True, False])
def test_roots_cleanup_ignores_folders_named_by_another_users_process(users: Users, dumpable: bool) -> None:
    """A process of Alice's may have the tags of a node, with any folder as its directory."""
    victim = users.folder / "local-0123456789ab"
    (victim / "precious").mkdir(parents=True)
    hers = alice_claims(users, "sky-two", dumpable=dumpable, SKYWARD_INSTANCE_DIRECTORY=str(victim))
    assert sky.Local().instances("sky-two") == []
    assert "sky-two" not in [instance.pool_id for instance in sky.Local().instances()]
    sky.Local().terminate([victim.name])
    assert (victim / "precious").is_dir()
    assert hers.poll() is None


@pytest.mark.parametrize("price", ["9999999", pytest.param("abc", marks=pytest.mark.nightly)])
def test_another_users_process_costs_root_nothing_and_delays_no_close(
    users: Users, price: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root can read the tags of Alice's process. Its pool is billed for its own node, and the sweep sees its own."""
    monkeypatch.setenv("SKYWARD_LEDGER", f"sqlite:///{users.folder}/root/ledger.db")
    with Ledger(default_url()) as ledger:
        ledger.set_account(Account("team", Decimal(200), Period.MONTH))
        provider = sky.Local(price_per_hour=1.0)
        with sky.ComputePool(provider=provider, max_cost=5, budget="team", display="quiet") as pool:
            node, pool_id = pool.lease.nodes[0].instance.id, pool.lease.pool_id
            hers = alice_claims(users, pool_id, SKYWARD_PRICE_PER_HOUR=price)
            assert found_of(pool_id) == [(node,)]
        assert pool.receipt is not None
        assert [machine["cloud_id"] for machine in pool.receipt["resources"]] == [node]
        assert (pool.receipt["left"], pool.cost < 1) == ([], True)
        assert ledger.left_usd("team", pool_id) > 199
        assert found_of(pool_id) == []
    assert hers.poll() is None


def found_of(pool_id: str) -> list[tuple[str, ...]]:
    """Return what a sweep of root finds of a pool. It fails nowhere."""
    report = sky.sweep(is_dry_run=True)
    assert report.failures == ()
    return [finding.resource_ids for finding in report.findings if finding.pool_id == pool_id]


@pytest.mark.parametrize("name", ["SKYWARD_PRICE_PER_HOUR", "SKYWARD_RANK", "SKYWARD_POOL_ID", "SKYWARD_TAGS"])
def test_one_process_with_unreadable_tags_hides_no_other(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """It is a process of the same user, for instance of a call. It is listed with what can be read, and ended."""
    provider = sky.Local()
    (offer,) = provider.offers(sky.Requirements())
    (good,) = provider.launch(offer, 1, {"skyward-pool": "sky-two", "skyward-rank": "0"}, "sleep 300")
    tags = {"SKYWARD_INSTANCE_ID": "local-0123456789ab", "SKYWARD_POOL_ID": "sky-two", name: "\udcff[" * 1000}
    odd = subprocess.Popen(["env", "-i", f"PATH={os.environ['PATH']}", *map("=".join, tags.items()), "sleep", "300"])
    try:
        wait_until(lambda: "local-0123456789ab" in [one.id for one in provider.instances()], "the odd process")
        listed = {instance.id: instance for instance in provider.instances()}
        assert {good.id, "local-0123456789ab"} <= listed.keys()
        assert (listed["local-0123456789ab"].price_per_hour, listed["local-0123456789ab"].rank) == (0.0, 0)
        provider.terminate([*listed.keys() & {good.id, "local-0123456789ab"}])
        assert odd.wait(10) != 0
    finally:
        odd.kill()
        odd.wait()
        provider.terminate([good.id])
    said = [
        record.getMessage() for record in caplog.records if record.getMessage().startswith("local-0123456789ab: its")
    ]
    assert len(said) == (name in ("SKYWARD_PRICE_PER_HOUR", "SKYWARD_RANK"))


@pytest.mark.nightly
def test_a_folder_made_by_another_user_beforehand_gets_no_node(users: Users) -> None:
    """The attack of issue 10: Bob's files in it are renamed away before his script starts."""
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
from skyward_core.wire.settings import memory_directory

provider = sky.Local()
(offer,) = provider.offers(sky.Requirements())
(instance,) = provider.launch(offer, 1, {"skyward-pool": "sky-two", "skyward-rank": "0"}, "sleep 300")
print(*LocalTransport(instance, bool, lambda: None).value_directories, sep="\\n")
provider.terminate([instance.id])
"""


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["folder", "symlink"])
def test_a_folder_in_memory_that_another_user_made_is_not_used(users: Users, kind: str) -> None:
    """Large values are pickles. Even if Alice could guess the id of a node, they go to another folder."""
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


@pytest.mark.nightly
@pytest.mark.parametrize("squatted", ["folder", "symlink"])
def test_code_sent_to_nodes_is_not_kept_in_a_folder_of_another_user(users: Users, squatted: str) -> None:
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


@pytest.mark.nightly
@pytest.mark.parametrize("beside", ["", "-wal", "-shm"])
def test_the_ledger_of_another_user_is_refused(users: Users, beside: str) -> None:
    folder = users.folder / "ledgers"
    folder.mkdir()
    os.chown(folder, BOB, BOB)
    path = folder / f"ledger.db{beside}"
    path.write_bytes(b"")
    path.chmod(0o666)
    os.chown(path, ALICE, ALICE)
    out, errors = users.run(BOB, BOB_LEDGER, f"sqlite:///{folder / 'ledger.db'}")
    assert out == ""
    expected = f"{path} belongs to user {ALICE}: a ledger that several users share is kept in PostgreSQL"
    assert expected in errors.splitlines()[-1]


@pytest.mark.parametrize("owned", ["above", "above/folder", "above/folder/ledger.db", "link"])
@pytest.mark.parametrize("victim", ["root", "bob"])
def test_a_ledger_that_another_user_could_exchange_is_refused(users: Users, owned: str, victim: str) -> None:
    """As OpenSSH does with its files: each folder above it belongs to this user or to root. That holds for root too."""
    folder = users.folder / "above" / "folder"
    folder.mkdir(parents=True)
    (folder / "ledger.db").touch(mode=0o600)
    (users.folder / "link").symlink_to(users.folder / "above")
    if victim == "bob":
        for path in (folder.parent, folder, folder / "ledger.db"):
            os.chown(path, BOB, BOB)
    os.chown(users.folder / owned, ALICE, ALICE, follow_symlinks=False)
    start = users.folder / ("link" if owned == "link" else "above")
    url = f"sqlite:///{start}/folder/ledger.db"
    if victim == "bob":
        out, errors = users.run(BOB, BOB_LEDGER, url)
        assert out == ""
        said = errors.splitlines()[-1]
    else:
        with pytest.raises(sky.LedgerError) as caught:
            Ledger(url)
        said = str(caught.value)
    words = f"is a symlink of user {ALICE}" if owned == "link" else f"belongs to user {ALICE}"
    assert f"{users.folder / owned} {words}" in said
    assert "SKYWARD_LEDGER" in said
    assert (folder / "ledger.db").stat().st_size == 0


BOB_POOL = """
import numpy, pathlib, sys
import skyward_core as sky

with sky.ComputePool(provider=sky.Local(), display="quiet") as pool:
    print(int(pool.submit(sky.compute(lambda values: values.sum())(numpy.ones(1_000_000))).result()))
    (instance,) = [node.instance for node in pool.lease.nodes]
    print(instance.directory)
"""


def test_a_pool_works_beside_an_attacker(users: Users) -> None:
    squatted = alice_squats(users, 0o777)
    proof = users.tmp / "proof"
    users.start(ALICE, ALICE_RENAMES, squatted, proof)
    out, errors = users.run(BOB, BOB_POOL)
    total, directory = out.split()
    assert total == "1000000", errors
    assert directory.startswith(f"{users.home(BOB)}/.local/state/skyward/nodes/")
    assert not Path(directory).exists()
    assert not proof.exists()
    assert [name for name in os.listdir("/dev/shm") if name.startswith(f"skyward-{BOB}-")] == []
    for path in users.home(BOB).rglob("*"):
        if path.parent.name in ("skyward", "state") or path.name == "skyward":
            assert path.stat().st_mode & 0o022 == 0, path


BOB_SETTINGS = """
import os, sys
import skyward_core as sky
from skyward_core import cli

os.chdir(sys.argv[1])
print(cli.main(["offers"]), cli.main(["doctor", "--limit", "60"]))
"""


def test_settings_of_another_user_run_no_command(users: Users) -> None:
    """In a folder as /tmp, Alice's `skyward.toml` names an SSH configuration of hers with `Match exec`."""
    proof = users.tmp / "proof"
    hers = users.tmp / "config"
    hers.write_text(f'Match exec "id -u >{proof}"\n')
    settings = users.tmp / "skyward.toml"
    settings.write_text(f'[provider]\nname = "hosts"\naddresses = ["127.0.0.1:9"]\nconfig = "{hers}"\n')
    for path in (hers, settings):
        os.chown(path, ALICE, ALICE)
    (below := users.tmp / "his").mkdir(mode=0o700)
    os.chown(below, BOB, BOB)
    out, errors = users.run(BOB, BOB_SETTINGS, below, USER="bob")
    assert not proof.exists()
    assert f"{settings} belongs to user {ALICE}, not to user {BOB} or root" in errors
    assert f"the settings {settings} are refused" in " ".join(out.split())
    assert out.splitlines()[-1] == "1 1"
    out, errors = users.run(BOB, BOB_SETTINGS, below, USER="bob", SKYWARD_CONFIG="/dev/null")
    assert "belongs to" not in out + errors


BOB_FINDS = {
    "the SSH key of machines": """
from skyward_core.providers.userdata import our_key
our_key()
""",
    "the key that seals leases": """
from skyward_core.machines.signing import KeyRing
KeyRing.to_seal()
""",
    "the key that signs leases": """
import skyward_core.machines.signing as signing
signing._key_to_sign()
""",
    "the log of the reaper": """
import os
import skyward_core.cleanup.reaper as reaper
os.write(reaper._opened_log(), b"his")
""",
    "the prices of clouds": """
import skyward_core as sky
print(len(sky.offers(providers=sky.Local())))
""",
}


@pytest.mark.parametrize("kind", BOB_FINDS)
def test_no_file_of_ours_is_made_or_read_in_a_folder_of_another_user(users: Users, kind: str) -> None:
    """XDG_STATE_HOME and XDG_CACHE_HOME name a folder as /tmp, and Alice has made `skyward` in it. Prices are looked up
    anew, the reaper has no log, and for a key there is an error that names the folder.
    """
    hers = alice_owns(users, "skyward")
    for name in ("ssh", "offers"):
        (hers / name).mkdir()
        (hers / name).chmod(0o777)
        os.chown(hers / name, ALICE, ALICE)
    his = users.home(BOB) / "precious"
    his.write_text("")
    os.chown(his, BOB, BOB)
    (hers / "reaper.log").symlink_to(his)
    before = sorted(hers.rglob("*"))
    places = {"XDG_STATE_HOME": str(users.tmp), "XDG_CACHE_HOME": str(users.tmp)}
    _, errors = users.run(BOB, BOB_FINDS[kind], **places)
    assert sorted(hers.rglob("*")) == before
    assert his.read_text() == ""
    assert (f"{hers} belongs to user {ALICE}" in errors) == ("key" in kind), errors


BOB_LOGS_IN = """
import os
import skyward_core as sky
from skyward_core.machines.instances import Endpoint
from skyward_core.transport.ssh_connection import SSHConnection

with SSHConnection(Endpoint(host="127.0.0.1", port=9, user="bob")) as connection:
    connection.connect(1)
"""


@pytest.mark.parametrize("mode", ["hers", "writable"])
def test_an_ssh_configuration_of_another_user_runs_no_command(users: Users, mode: str) -> None:
    """HOME is Alice's, as after `sudo -E` in her shell, or she may write to the file. OpenSSH refuses both too."""
    home = users.home(ALICE if mode == "hers" else BOB)
    (home / ".ssh").mkdir()
    proof, config = users.tmp / "proof", home / ".ssh" / "config"
    config.write_text(f'Match exec "id -u >{proof}"\n')
    config.chmod(0o644 if mode == "hers" else 0o666)
    for path in (config.parent, config):
        os.chown(path, *[ALICE if mode == "hers" else BOB] * 2)
    _, errors = users.run(BOB, BOB_LOGS_IN, HOME=str(home), USER="bob")
    words = f"belongs to user {ALICE}" if mode == "hers" else "may be written to by everybody (mode 0666)"
    assert f"BadRequest: the SSH configuration is refused, as OpenSSH does: {config} {words}" in errors
    assert not proof.exists()


BOB_WORKS = """
import os, subprocess, sys
from pathlib import Path

import numpy

os.umask(0)
import skyward_core as sky

def work():
    print("printed")
    Path("written").write_text("his")

local = sky.Local(price_per_hour=1.0)
with sky.ComputePool(provider=local, nodes=2, name="nightly", max_cost=5, display="quiet") as pool:
    pool.run(sky.compute(work)())
    pool.run(sky.compute(lambda values: values.sum())(numpy.ones(1_000_000)))
    pool.start_detached(sky.compute(work)(), call_id="detached:1").result(60)
    for command in ("offers", "logs nightly", "sweep --yes", "users nightly"):
        subprocess.run([sys.executable, "-m", "skyward_core.cli", *command.split()], stdout=subprocess.DEVNULL)
    print("open", flush=True)
    sys.stdin.readline()
print("closed", flush=True)
sys.stdin.readline()
"""


def readable_by_others(folder: Path) -> set[str]:
    """Return the files to which another user has rights, and the folders that he may list or write to."""
    found: set[str] = set()
    for path in folder.iterdir() if folder.stat().st_mode & 0o011 else ():
        if path.is_symlink():
            continue
        if path.stat().st_mode & (0o066 if path.is_dir() else 0o077):
            found.add(path.name)
        if path.is_dir():
            found |= readable_by_others(path)
    return found


def test_other_users_can_read_no_file_of_a_pool(users: Users) -> None:
    """Ledger, keys, settings and logs of nodes, the reaper's log, caches, working directories and values in memory, while
    the pool is open and after its end: even if the umask of its owner takes no rights away, and his home is open.
    """
    home = users.home(BOB)
    home.chmod(0o755)
    before = set(os.listdir("/dev/shm"))
    process = users.start(BOB, BOB_WORKS)
    assert process.stdin is not None
    assert process.stdout is not None
    for state in ("open", "closed"):
        assert process.stdout.readline() == f"{state}\n"
        his = [Path("/dev/shm", name) for name in set(os.listdir("/dev/shm")) - before if f"-{BOB}-" in name]
        assert not [path for path in his if path.stat().st_mode & 0o077]
        assert bool(his) == (state == "open")
        made = {str(path.relative_to(home)) for path in home.rglob("*")}
        assert {".local/state/skyward/ledger.db", ".local/state/skyward/reaper.log"} <= made
        assert readable_by_others(home) <= {".local", ".cache", "state"}
        process.stdin.write("\n")
        process.stdin.flush()
    assert process.wait(60) == 0
