"""What every test has: its own home (caches, settings), no access to the network, and a check that nothing is left.

A test that opens pools may share `pool`, two nodes that live as long as the test session; `recorded` has the
events of that pool.
"""

import gc
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import hypothesis
import pytest
import uvloop

import skyward_core as sky
from skyward_core.worker import node_clocks
from tests.waiting import pauses

SETTLE_SECONDS = 30.0
"""Time limit for what a test has closed to disappear; only a test that leaks waits this long."""

hypothesis.settings.register_profile("skyward", deadline=None)  # a slow machine is no fault
hypothesis.settings.load_profile("skyward")

# Process-wide pools of threads, made once by the first who needs them: Dask's two, asyncio's name lookups, hypothesis
# and pytest-timeout.
SHARED_THREADS = ("Dask-Offload", "TCP-Executor", "asyncio_", "pytest_timeout", "Profile", "AsyncProcess")

MEMORY, MEMORY_BYTES = Path("/dev/shm"), 4 << 30
"""A file system in memory, and the room that the tests need there."""

TEST_HOSTS = ip_network("10.77.0.0/16")
"""Addresses of the test bed's hosts (tests/testbed), in network namespaces of this machine."""

_strangers: list[str] = []
"""Other addresses to which this process tried to connect."""
connections: list[object] = []
"""Every address to which this process has connected."""
_launched: list[tuple[str, str]] = []
"""Id and directory of every local instance that this process has started."""
_shared_schedulers: set[int] = set()
"""The scheduler ports of the pools that tests share now."""
_home: Path | None = None
_default_ledger = ""


LONGEST_FIRST = (
    # mostly of tests/nightly
    "kill/test_points.py",
    "integrations/test_prefect_kill.py",
    "integrations/test_prefect_bills.py",
    "pool/test_named_crowd.py",
    "pool/test_named_hosts.py",
    "stack/test_stack.py",
    "integrations/test_airflow_kill.py",
    # mostly of tests/system
    "test_default_settings.py",
    "integrations/test_airflow_runs.py",
    "integrations/test_airflow_pools.py",
    "integrations/test_prefect.py",
    "integrations/test_prefect_steps.py",
    "integrations/test_bare_node.py",
    "integrations/test_airflow.py",
    "integrations/test_airflow_money.py",
    "integrations/test_prefect_behaviour.py",
    "integrations/test_prefect_flows.py",
    "integrations/test_prefect_money.py",
    "integrations/test_dagster_executor.py",
    "test_real_hosts.py",
    "engine/test_losses.py",
    "integrations/test_dagster.py",
    "pool/test_pool.py",
    "kill",
    "providers/test_end_to_end.py",
    "session/test_attached.py",
    "providers/test_hosts.py",
    "provisioning/test_bootstrap_hosts.py",
    "image/test_volume_hosts.py",
    "integrations/test_sweeps.py",
    "cleanup/test_reaper.py",
    "test_examples.py",
    "test_docs.py",
    "test_seed_blocks.py",
    "test_example_programs.py",
    "transport/test_ssh_transport.py",
    "worker/test_supervisor.py",
    "test_site.py",
    "test_packaging.py",
    "test_notebooks.py",
    "pool/test_named.py",
    "live/test_live.py",
    "accelerators/test_mig_hosts.py",
    "distributed/test_frameworks_hosts.py",
)
"""Files (or folders) that take longest. They begin first, so that test processes that share the files end at about the
same time.
"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests of files that take longest first; the order within a file stays."""
    root = Path(__file__).parent
    place = {name: number for number, name in enumerate(LONGEST_FIRST)}

    def rank(item: pytest.Item) -> int:
        path = Path(*item.path.relative_to(root).parts[1:])  # without unit, system or nightly
        return place.get(str(path), place.get(path.parts[0], len(place)))

    items.sort(key=rank)


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Keep all that is imported now out of later garbage collections, which look for what single tests have left."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Collect garbage after the last test of a file that allows warnings, because other files do not allow them."""
    yield
    is_last = nextitem is None or nextitem.path != item.path
    if is_last and item.get_closest_marker("filterwarnings") is not None:
        gc.collect()


def pytest_configure(config: pytest.Config) -> None:
    """Give the session its own settings and state, before any test module is imported.

    Each test process of pytest-xdist is a session. All of them have one cache, as the processes of a user have: each
    would make the archive of our code and of uv, and the environments of local images, once more.
    """
    global _home, _default_ledger
    _take_interrupts()
    if (memory := _folder_in_memory()) is not None:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(memory))  # of `tmp_path`
    _home = Path(tempfile.mkdtemp(prefix="skyward-tests-"))
    _default_ledger = f"{_home}/state/skyward/ledger.db"
    old_cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    os.environ.setdefault("UV_CACHE_DIR", str(old_cache / "uv"))  # packages are fetched once, not once a session
    if not hasattr(config, "workerinput"):  # the processes of pytest-xdist have the cache of the one that started them
        os.environ["XDG_CACHE_HOME"] = str(_home / "cache")
    os.environ["XDG_CONFIG_HOME"] = str(_home / "config")
    os.environ["XDG_STATE_HOME"] = str(_home / "state")  # the ledger, and the reapers' log
    for name in [name for name in os.environ if name.startswith("SKYWARD_")]:
        del os.environ[name]
    os.environ["DO_NOT_TRACK"] = "1"
    # libuv keeps one pipe for the signals of the whole process, created with its first loop
    uvloop.new_event_loop().close()
    sys.addaudithook(_on_audit)


def _folder_in_memory() -> Path | None:
    """Return a folder in memory for the files of tests, if this machine has one with enough room for programs.

    Each commit of a ledger waits for the disk, and some tests make thousands of them.
    """
    try:
        has = os.statvfs(MEMORY)
    except OSError:
        return None
    is_fit = has.f_bavail * has.f_frsize >= MEMORY_BYTES and not has.f_flag & os.ST_NOEXEC
    return MEMORY if is_fit and os.access(MEMORY, os.W_OK) else None


def _take_interrupts() -> None:
    """Let Ctrl-C raise KeyboardInterrupt here, and end the programs that tests start.

    A shell starts background jobs (`make test &`, some CI systems) with the signal ignored. Processes inherit that, and
    every test that interrupts a program would wait until its time limit.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGQUIT) is signal.SIG_IGN:
        signal.signal(signal.SIGQUIT, signal.SIG_DFL)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove the session's home, and the reapers of pools whose machines can never end: a test's providers
    end with it.
    """
    if _home is not None:
        for pid, home in processes_by_tag("XDG_STATE_HOME"):
            if home == os.environ["XDG_STATE_HOME"] and pid != os.getpid():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        shutil.rmtree(_home, ignore_errors=True)


def _on_audit(event: str, args: tuple[Any, ...]) -> None:
    if event == "open":
        _refuse_open_ledger(args[0])
    elif event == "socket.connect":
        connections.append(args[1])
        _refuse_strangers(args[1])
    elif event == "subprocess.Popen" and isinstance(env := args[3], dict) and "SKYWARD_INSTANCE_ID" in env:
        _launched.append((env["SKYWARD_INSTANCE_ID"], env["SKYWARD_INSTANCE_DIRECTORY"]))


def _refuse_open_ledger(path: object) -> None:
    """Raise for a test that opens a file of the default ledger itself (SQLite's own calls do not come here).

    Its closing drops all locks of this process on the file (fcntl(2)). Then the next process that closes the ledger
    deletes its log, and all later tests of this process fail with "disk I/O error".
    """
    if isinstance(path, str | Path) and str(path).removesuffix("-wal").removesuffix("-shm") == _default_ledger:
        raise RuntimeError(f"tests must not open {path}: read it with `content_of`")


def content_of(path: Path) -> bytes:
    """Return the content of a file, read by another process; b"" if it was removed meanwhile.

    A process that has a ledger open must not read its file: see `_refuse_open_ledger`.
    """
    return subprocess.run(["cat", path], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False).stdout


def _refuse_strangers(address: object) -> None:
    if not isinstance(address, tuple) or not isinstance(address[0], str) or address[0] in ("", "localhost"):
        return  # a Unix socket, or this machine
    try:
        asked = ip_address(address[0].partition("%")[0])
        is_ours = asked.is_loopback or asked in TEST_HOSTS
    except ValueError:
        is_ours = False
    if not is_ours:
        _strangers.append(f"{address[0]}:{address[1]}")
        raise ConnectionRefusedError(f"tests connect to this machine only, not to {address[0]}:{address[1]}")


# ── nothing is left behind ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(autouse=True)
def leaves_nothing(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves more threads, descriptors, processes or files of local instances than existed
    before it.
    """
    if "integrations" in request.path.parts:  # orchestrators keep threads of their own
        yield
        return
    strangers, launched = len(_strangers), len(_launched)
    threads, descriptors = set(threading.enumerate()), _descriptors(request)
    yield
    assert _strangers[strangers:] == [], "something wanted to connect to the outside"
    checks: list[Callable[[], object]] = [
        lambda: _new_threads(threads, request),
        lambda: _new_descriptors(descriptors, request),
    ]
    if ours := _launched[launched:]:
        checks.append(lambda: _left_of(ours))
    for check in checks:
        deadline = time.monotonic() + SETTLE_SECONDS
        for _ in pauses(0.02):
            if not (left := check()):
                break
            if time.monotonic() > deadline:
                pytest.fail(
                    f"left behind: {left}; the schedulers of the pools that tests share are at {sorted(f'{port:04X}' for port in _shared_schedulers)}"
                )
            gc.collect()


def _new_threads(before: set[threading.Thread], request: pytest.FixtureRequest) -> list[str]:
    """Names of new threads. Threads that move large values and call callbacks for a shared pool belong to that pool."""
    shared = (
        (*SHARED_THREADS, "skyward-upload", "skyward-fetch", "skyward-callbacks")
        if any("pool" in name for name in request.fixturenames)
        else SHARED_THREADS
    )
    return [
        thread.name for thread in threading.enumerate() if thread not in before and not thread.name.startswith(shared)
    ]


def _new_descriptors(before: dict[int, str], request: pytest.FixtureRequest) -> dict[int, str]:
    new = {number: what for number, what in _descriptors(request).items() if number not in before}
    return {
        number: _described(what)
        for number, what in new.items()
        if not (what.startswith("socket:") and _is_to_shared_pool(what))
    }


def _descriptors(request: pytest.FixtureRequest) -> dict[int, str]:
    """Open descriptors and what they are. Sockets do not count if a shared pool may open one more connection to its
    nodes.
    """
    shares = any("pool" in name or name == "crashing" for name in request.fixturenames)
    found, ledger = {}, str(_ledger())
    for entry in os.listdir("/proc/self/fd"):
        try:
            what = os.readlink(f"/proc/self/fd/{entry}")
        except OSError:
            continue
        # SQLite cannot close a file as long as this process holds locks on it elsewhere (fcntl's close drops them all):
        # it keeps it for its next connection.
        # with its log and index, "-wal" and "-shm"
        if not (shares and what.startswith("socket:")) and not what.startswith(ledger):
            found[int(entry)] = what
    return found


def _described(what: str) -> str:
    """Describe a descriptor; of a TCP socket both ends and its state.

    In /proc/net/tcp, in hexadecimal, 01 is established, 08 waits for us to close it.
    """
    inode = what.removeprefix("socket:[").removesuffix("]")
    lines = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    return next(
        (f"{what} {fields[1]} -> {fields[2]} in state {fields[3]}" for fields in lines if fields[9] == inode), what
    )


def _is_to_shared_pool(socket: str) -> bool:
    """Return whether a socket is connected to the scheduler of a shared pool, because its client may open one more
    during any test.
    """
    inode = socket.removeprefix("socket:[").removesuffix("]")
    lines = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    return any(fields[9] == inode and int(fields[2].rpartition(":")[2], 16) in _shared_schedulers for fields in lines)


def _ledger() -> Path:
    return Path(os.environ["XDG_STATE_HOME"]) / "skyward" / "ledger.db"


def _left_of(instances: list[tuple[str, str]]) -> list[str]:
    """Return what is left of local instances: processes, directories, folders in memory."""
    ids = {instance_id for instance_id, _ in instances}
    left = [f"process {pid} of {tag}" for pid, tag in processes_by_tag("SKYWARD_INSTANCE_ID") if tag in ids]
    left += [directory for _, directory in instances if os.path.exists(directory)]
    return left + [name for name in os.listdir("/dev/shm") if any(name.endswith(instance_id) for instance_id in ids)]


def processes_by_tag(variable: str) -> list[tuple[int, str]]:
    """Return (pid, value) of every living process of this user that was started with this environment variable."""
    found, start = [], f"{variable}=".encode()
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            with open(f"/proc/{entry}/environ", "rb", buffering=0) as file:  # a third of the time of a Path
                environ = file.read()
            if start not in environ:
                continue
            state = Path(f"/proc/{entry}/stat").read_text().rpartition(") ")[2][:1]
        except OSError:
            continue
        values = [item.partition(b"=")[2].decode() for item in environ.split(b"\0") if item.startswith(start)]
        if values and state not in "ZX":
            found.append((int(entry), values[0]))
    return found


# ── what is generated ────────────────────────────────────────────────────────────────────────────────────────────────


def examples(many: int) -> int:
    """Return how many cases a test generates: a fifth of `many`, and all of them in `make long`.

    Mark the test `generated`, so that it runs there again.
    """
    return many if os.environ.get("EXAMPLES") == "all" else many // 5


# ── waiting, and a pool to share ─────────────────────────────────────────────────────────────────────────────────────


def signal_members(instance_id: str, number: int) -> None:
    """Send a signal to each process of a local instance; one that has ended since it was listed needs none."""
    for pid in node_clocks.members(instance_id):
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def slowness() -> float:
    """Return how much slower a process is now than on an idle machine; 1 if no other process runs.

    For assertions in seconds that need processors.
    """
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    subprocess.run([sys.executable, "-IS", "-c", "sum(range(5_000_000))"], check=True)
    took, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    return max(1.0, took / (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime))


class RecordedEvents:
    """The events of a pool so far; an event sink."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def __call__(self, event: Any) -> None:
        self.events.append(event)

    def of[E](self, kind: type[E]) -> list[E]:
        """Return the events of one kind, in order."""
        return [event for event in list(self.events) if isinstance(event, kind)]

    def lines(self, call_id: str, stream: str = "stdout") -> list[str]:
        """Return the lines that one call wrote on one stream."""
        return [event.line for event in self.of(sky.LogLine) if event.call_id == call_id and event.stream == stream]


@contextmanager
def shared(pool: sky.ComputePool) -> Generator[sky.ComputePool]:
    """Open a pool that several tests share.

    Its client opens and closes connections by its own clock, and they are not a leak of any test.
    """
    with pool:
        # over SSH it is the port of the forward
        port = urlsplit(cast(Any, pool)._session.cluster.client.scheduler.address).port or 0
        _shared_schedulers.add(port)
        pool.dask_client()  # its thread belongs to the pool, not to the first test that uses it
        try:
            yield pool
        finally:
            _shared_schedulers.discard(port)


@pytest.fixture(scope="session")
def _shared() -> Iterator[tuple[sky.ComputePool, RecordedEvents]]:
    recorded = RecordedEvents()
    # a test moves the clock of all pools of this process by an hour, and a pool that is idle for an hour ends
    month = 30 * 86_400.0
    with shared(
        sky.ComputePool(
            provider=sky.Local(),
            nodes=2,
            image=sky.Image(includes=[str(Path(__file__).with_name("README.md"))]),
            timeout=month,
            display="quiet",
            output="head",
            on_event=recorded,
        )
    ) as pool:
        yield pool, recorded


@pytest.fixture
def pool(_shared: tuple[sky.ComputePool, RecordedEvents]) -> sky.ComputePool:
    """Two local nodes with one slot each, shared by the tests of a session. Tests must not change it permanently."""
    return _shared[0]


@pytest.fixture
def recorded(_shared: tuple[sky.ComputePool, RecordedEvents]) -> RecordedEvents:
    """The events of the shared pool since it was opened."""
    return _shared[1]


def members(client: Any) -> dict[str, Any]:
    """Return the scheduler's information about its workers, by address.

    `Client.scheduler_info` may return the answer to another thread's request: the client asks every two seconds about
    no workers at all.
    """
    workers: dict[str, Any] = client.sync(client.scheduler.identity, n_workers=-1)["workers"]
    return workers
