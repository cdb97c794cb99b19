"""The first process of a node, started as on a machine: when it ends, which processes it ends, how it becomes another
node.

Most nodes here have a clock in a file, and workers without Dask that run the text of the file `call`. They start
quickly, and hours pass at once.
"""

import contextlib
import dataclasses
import os
import pickle
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from distributed import Client, Future, Security

from skyward_core.engine.certificates import make_certificate
from skyward_core.wire.messages import Batch, Call, Outcome, OutcomeKind, Output, Parcel, Report
from skyward_core.wire.private_folders import NotPrivate
from skyward_core.wire.protocol import POOL_TOPIC, RUN_BATCH, WorkerKept, release, repeat_reports
from skyward_core.wire.reports import decode_news, decode_report
from skyward_core.wire.settings import NodeOwner, NodeSettings, memory_directory, this_process, write_atomically
from skyward_core.worker import supervisor
from skyward_core.worker.node_clocks import write_lease
from tests.conftest import members, processes_by_tag
from tests.waiting import wait_until

HOUR = 3600.0
START = 1000.0
"""The time on the clock in the file when a node is started."""

DRIVER = """
import os, pickle, signal, sys, time, types
from pathlib import Path
node = sys.modules["skyward_core.worker.node"] = types.ModuleType("node")
node.LEFT = 72
from skyward_core.worker import supervisor
from skyward_core.worker.runner_process import RunnerFactory
from skyward_core.worker.slot import Slot
from skyward_core.wire.messages import Batch, Call, Parcel

directory = Path(sys.argv[1])

def uptime():
    with open(directory / "looks", "ab") as looks:
        looks.write(b".")
    return float((directory / "uptime").read_text())

def run_worker(directory, settings, index, control):
    with open(directory / "workers", "a") as workers:
        workers.write(f"{settings.generation} {settings.rank}\\n")
    if (directory / "no-scheduler").exists():
        os._exit(7)
    factory = RunnerFactory(control)
    slots = [Slot(factory, settings.value_directories) for _ in range(settings.slots)]
    (directory / f"ready-{settings.generation}").touch()
    while True:
        if (directory / "call").exists():
            call = Call("1", "exec", Parcel(pickle.dumps((((directory / "call").read_text(),), {}))), "job")
            slots[0].run(Batch("", (call,), {"exec": Parcel(pickle.dumps(exec))}), lambda news: None)
            (directory / "call").unlink()
        time.sleep(0.005)

def run_scheduler(directory, settings):
    while True:
        signal.pause()

supervisor.uptime, node.run_worker, node.run_scheduler = uptime, run_worker, run_scheduler
"""


class Machine:
    """A node of a test: its directory, its settings and its first process."""

    def __init__(self, driver: str, certificate: Any, **fields: Any) -> None:
        self.instance_id = f"local-{uuid.uuid4().hex[:12]}"
        self.directory = Path(tempfile.mkdtemp(prefix="skyward-node-"))
        defaults = {"pool_id": "sky-test", "instance_id": self.instance_id, "rank": 1, "total_nodes": 2, "slots": 1}
        defaults |= {"host": "127.0.0.1", "head_host": "127.0.0.1", "head_port": 29500}
        defaults |= {"scheduler": "tls://127.0.0.1:9", "metrics_interval_seconds": None}
        defaults |= {"tls_certificate": certificate.certificate, "tls_key": certificate.key}
        defaults |= {"value_directories": (memory_directory(self.instance_id), str(self.directory))}
        self.settings = NodeSettings(**defaults | {"is_guarded": True, "lease_seconds": 1e6} | fields)
        self.set_clock(START)
        self.tell()
        environ = {name: os.environ[name] for name in ("PATH", "HOME")} | {
            "SKYWARD_INSTANCE_ID": self.instance_id,
            "SKYWARD_INSTANCE_DIRECTORY": str(self.directory),
            "PYTHONPATH": os.pathsep.join(sys.path),
        }
        program = ["-c", f"{driver}\nsupervisor.main()"] if driver else ["-m", "skyward_core.worker.supervisor"]
        command = [sys.executable, *program, str(self.directory)]
        with (self.directory / "log").open("wb") as log:
            self.process = subprocess.Popen(
                command, cwd=self.directory, env=environ, stdout=log, stderr=log, start_new_session=True
            )

    def tell(self, **changes: Any) -> None:
        """Write the node's settings with these changes."""
        self.settings = dataclasses.replace(self.settings, **changes)
        write_atomically(self.directory / "settings.json", self.settings.to_json())

    def set_clock(self, now: float) -> None:
        write_atomically(self.directory / "uptime", f"{now}")

    def await_looks(self, count: int = 4) -> None:
        """Wait until the supervisor has read its clock this many times more."""
        looks = len(self.text("looks")) + count
        wait_until(
            lambda: len(self.text("looks")) >= looks or self.process.poll() is not None, "the supervisor to look"
        )

    def text(self, name: str) -> str:
        try:
            return (self.directory / name).read_text()
        except FileNotFoundError:  # not there yet, or just removed
            return ""

    def await_file(self, name: str, seconds: float = 120.0) -> str:
        wait_until(lambda: self.text(name), f"{name}, log: {self.text('log')}", seconds)
        return self.text(name)

    def await_ready(self) -> None:
        """Wait until the workers without Dask have their slots."""
        path = self.directory / f"ready-{self.settings.generation}"
        wait_until(path.exists, f"the node to be ready, log: {self.text('log')}")

    def await_pids(self, count: int, what: str) -> set[int]:
        wait_until(lambda: len(self.pids()) == count, what)
        return set(self.pids())

    def call(self, text: str) -> None:
        """Have a call run this text."""
        write_atomically(self.directory / "call", textwrap.dedent(text))

    def await_end(self) -> str:
        """Wait until no process is left; return the reason that the first one has reported to the guard."""
        wait_until(lambda: self.process.poll() is not None, f"the node to end, log: {self.text('log')}")
        self.await_pids(0, "all its processes to be gone")
        return self.text("ended").strip()

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None and not (self.directory / "ended").exists()

    def pids(self) -> list[int]:
        return [pid for pid, tag in processes_by_tag("SKYWARD_INSTANCE_ID") if tag == self.instance_id]

    def kill_children(self) -> None:
        """Kill all processes of the node except its first. Some may end by themselves meanwhile."""
        for pid in self.pids():
            if pid != self.process.pid:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        while self.pids():
            self.kill_children()
        for folder in (self.directory, memory_directory(self.instance_id)):
            shutil.rmtree(folder, ignore_errors=True)


type Start = Callable[..., Machine]


@pytest.fixture(scope="module")
def certificate() -> Any:
    return make_certificate("sky-test")


@pytest.fixture
def start(certificate: Any) -> Iterator[Start]:
    """Start nodes with a clock in a file and workers without Dask (`driver`), or unchanged (`driver=""`)."""
    with contextlib.ExitStack() as stack:

        def start_one(driver: str = DRIVER, **fields: Any) -> Machine:
            machine = Machine(driver, certificate, **fields)
            stack.callback(machine.close)
            return machine

        yield start_one


# ── the end of a node ────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_running_call_keeps_the_node_alive_and_an_idle_node_ends(start: Start) -> None:
    """It writes `ended` for the guard. None of its processes runs any more, and no file of it is in memory."""
    machine = start(timeout_seconds=HOUR)
    assert int(machine.await_file("supervisor")) == machine.process.pid
    machine.await_ready()
    machine.call("""
        import pathlib, time
        pathlib.Path("begun").touch()
        while not pathlib.Path("go").exists():
            time.sleep(0.005)
    """)
    wait_until((machine.directory / "begun").exists, "the call to begin")
    machine.set_clock(START + 20 * HOUR)
    machine.await_looks()
    assert machine.is_alive
    (machine.directory / "go").touch()
    wait_until(lambda: not (machine.directory / "call").exists(), "the call to end")
    machine.await_looks()
    machine.set_clock(START + 21 * HOUR - 1)
    machine.await_looks()
    assert machine.is_alive
    machine.set_clock(START + 21 * HOUR)
    assert machine.await_end() == "idle for 3600 s (timeout)"
    assert "idle for 3600 s (timeout)" in machine.text("log")
    assert not os.path.exists(memory_directory(machine.instance_id))


def runner_and_worker(machine: Machine) -> tuple[int, int]:
    """Begin a call; return the pids of its runner and of its worker."""
    machine.await_ready()
    machine.call("import os, time; open('runner', 'w').write(str(os.getpid())); time.sleep(1000)")
    runner = int(machine.await_file("runner"))
    (machine.directory / "call").unlink()
    (worker,) = machine.await_pids(3, "supervisor, worker, runner") - {machine.process.pid, runner}
    return runner, worker


@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_call_ends_with_its_worker_and_keeps_no_node_alive(start: Start, is_stopped: bool) -> None:
    """No client waits for it any more. A worker stops a runner for a moment, and may die just then."""
    machine = start(timeout_seconds=HOUR)
    runner, worker = runner_and_worker(machine)
    if is_stopped:
        os.kill(runner, signal.SIGSTOP)
    os.kill(worker, signal.SIGKILL)
    wait_until(lambda: not os.path.exists(f"/proc/{runner}"), "the call to end")
    wait_until(lambda: machine.text("workers").count("\n") == 2, "another worker")
    machine.await_looks()
    machine.set_clock(START + HOUR)
    assert machine.await_end() == "idle for 3600 s (timeout)"


def test_the_first_reason_is_kept(start: Start) -> None:
    """The reason that the guard, or another process, has written stays."""
    machine = start()
    machine.await_ready()
    write_atomically(machine.directory / "ended", "max_lifetime, says the guard")
    machine.process.terminate()
    assert machine.await_end() == "max_lifetime, says the guard"


def test_a_detached_node_lives_by_its_lease(start: Start) -> None:
    """Its owner is gone, and the lease decides. It has no guard: it kills every process with its tag."""
    with subprocess.Popen(["sleep", "1000"]) as client:
        started = Path(f"/proc/{client.pid}/stat").read_text().rpartition(") ")[2].split()[19]
        owner = dataclasses.replace(this_process(), pid=client.pid, started=started)
        try:
            machine = start(owner=owner, is_guarded=False)
            machine.await_ready()
            write_lease(machine.directory, START + 500)
            machine.set_clock(START + 501)
            machine.await_looks()
            assert machine.is_alive
            write_lease(machine.directory, START + 1000)
        finally:
            client.kill()
    machine.await_looks()
    assert machine.is_alive
    machine.set_clock(START + 1000)
    machine.await_end()
    assert not machine.directory.exists()  # no process is left to read in it
    assert not os.path.exists(memory_directory(machine.instance_id))


def test_a_node_without_its_owner_ends(start: Start) -> None:
    """Without a lease the client's process keeps it alive."""
    machine = start(owner=NodeOwner(os.getpid(), "1"), is_guarded=False)
    machine.await_end()
    assert not machine.directory.exists()


def test_a_crash_loop_on_the_head_ends_it(start: Start) -> None:
    """The scheduler is on the same node: a worker that dies five times in a minute will not start."""
    machine = start(DRIVER + "(directory / 'no-scheduler').touch()", rank=0, scheduler=None)
    assert machine.await_end() == "worker 0 died 5 times within 60 s, last with 7"
    assert machine.text("workers").count("\n") == 5


def test_without_its_scheduler_the_head_ends(start: Start) -> None:
    machine = start(DRIVER.replace("signal.pause()", "time.sleep(0.1); os._exit(3)"), rank=0, scheduler=None)
    assert machine.await_end() == "the scheduler died with 3"
    assert "the scheduler died with 3" in machine.text("log")


# ── new settings, and lost workers ───────────────────────────────────────────────────────────────────────────────────


def test_with_new_settings_a_node_ends_all_processes_and_restarts(start: Start) -> None:
    """Worker, runners, and processes that calls have started, in any session, end; the supervisor stays."""
    machine = start()
    machine.await_ready()
    machine.call("""
        import os, signal, subprocess, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        started = [subprocess.Popen(["sleep", "1000"]), subprocess.Popen(["sleep", "1000"], start_new_session=True)]
        subprocess.run("setsid sleep 1000 & ", shell=True)
        open("call-pids", "w").write(" ".join(str(process.pid) for process in started) + f" {os.getpid()}")
        time.sleep(1000)
    """)
    machine.await_file("call-pids")
    before = machine.await_pids(6, "supervisor, worker, runner and three sleepers")
    (machine.directory / "call").unlink()
    machine.tell(generation=1)
    machine.await_ready()
    assert before & machine.await_pids(3, "supervisor, worker, runner") == {machine.process.pid}
    assert machine.is_alive


def test_with_new_settings_during_forks_the_last_settings_count(start: Start) -> None:
    """However often and whenever settings come: the node follows the last ones, and no process of earlier ones runs."""
    machine = start(slots=12)
    for generation in range(1, 16):
        machine.tell(generation=generation, slots=12 - generation % 3)
        if generation % 2:
            begun = f"{generation} 1"
            wait_until(lambda begun=begun: begun in machine.text("workers"), "a worker that asks for runners")
    machine.await_ready()
    machine.await_pids(2 + 12, "supervisor, worker and 12 runners")
    machine.await_looks()
    assert len(machine.pids()) == 2 + 12
    machine.call("open('done', 'w').write('yes')")
    assert machine.await_file("done") == "yes"


def test_max_lifetime_counts_from_the_start_whatever_settings_come(start: Start) -> None:
    """Those of the same generation change nothing, unreadable ones are logged. The address of an old head goes."""
    machine = start(max_lifetime_seconds=500.0)
    machine.await_ready()
    pids = machine.await_pids(3, "supervisor, worker, runner")
    machine.tell(timeout_seconds=1.0)
    machine.await_looks()
    write_atomically(machine.directory / "settings.json", '{"generation": 2}')
    machine.await_looks()
    machine.set_clock(START + 499)
    machine.await_looks()
    assert set(machine.pids()) == pids
    assert machine.text("log").count("the new settings cannot be read: KeyError") == 1
    (machine.directory / "head.json").write_text("old")
    machine.tell(generation=3, timeout_seconds=HOUR)
    machine.await_ready()
    assert (machine.is_alive, machine.text("head.json")) == (True, "")
    machine.set_clock(START + 500)
    assert machine.await_end() == "alive for 500 s (max_lifetime)"


def test_a_signal_for_a_child_that_was_just_forked_ends_the_child_only(start: Start) -> None:
    """The supervisor ends the node on SIGTERM: the child must not inherit that handler."""
    machine = start(DRIVER + EARLY_SIGNAL)
    machine.await_ready()
    assert machine.is_alive
    assert "worker 0 died with -15" in machine.text("log")


EARLY_SIGNAL = """
def die_with_parent(parent, really=supervisor.die_with_parent):
    really(parent)
    if not (directory / "early").exists():
        (directory / "early").touch()
        os.kill(os.getpid(), signal.SIGTERM)
supervisor.die_with_parent = die_with_parent
"""


def test_processes_older_than_the_supervisor_stay(start: Start) -> None:
    """Those that the startup script has left running, such as the guard: when the node restarts, and when it ends."""
    before = "import subprocess; guard = subprocess.Popen(['sleep', '1000']); open('guard', 'w').write(str(guard.pid))"
    machine = start(before + DRIVER)
    machine.await_ready()
    guard = int(machine.await_file("guard"))
    machine.tell(generation=1)
    machine.await_ready()
    machine.call("import subprocess; subprocess.Popen(['sleep', '1000'], start_new_session=True)")
    machine.await_pids(5, "supervisor, worker, runner, and the two that sleep")
    machine.process.terminate()
    wait_until(lambda: machine.process.poll() is not None, "the node to end")
    assert (machine.pids(), machine.text("ended")) == ([guard], "asked to\n")


def test_without_a_scheduler_workers_are_started_again_and_again(start: Start) -> None:
    """A node that is not the head waits for a new one, with pauses, as long as its lease lives."""
    machine = start(rank=1)
    machine.await_ready()
    (machine.directory / "no-scheduler").touch()
    machine.kill_children()
    wait_until(lambda: machine.text("workers").count("\n") > 8, "nine workers")
    assert machine.is_alive
    (machine.directory / "no-scheduler").unlink()
    machine.tell(generation=1)
    machine.await_ready()


def test_a_frozen_worker_is_killed_when_the_pool_misses_it(start: Start) -> None:
    """Only the missing worker is killed; and not again while its replacement may be starting."""
    machine = start(workers=({}, {}), rank=1)
    wait_until(lambda: machine.text("workers").count("\n") == 2, "two workers")
    machine.await_ready()
    write_atomically(machine.directory / "missed", "1")
    wait_until(lambda: machine.text("workers").count("\n") == 3, "the successor of the second")
    killed = "worker 1 is missed by the pool, and is killed\nskyward: node 1: worker 1 died with -9"
    assert killed in machine.text("log")
    write_atomically(machine.directory / "missed", "1")
    wait_until(lambda: not (machine.directory / "missed").exists(), "the supervisor to look")
    machine.await_looks()
    assert (machine.text("workers").count("\n"), "worker 0" in machine.text("log")) == (3, False)
    assert machine.is_alive


@pytest.mark.parametrize("kind", ["symlink", "open to all"])
def test_a_node_uses_no_folder_in_memory_that_another_user_may_have_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """The client has checked it too, but from elsewhere, and earlier: large values are pickles."""
    (tmp_path / "node").mkdir(mode=0o700)
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs").chmod(0o777)
    place = tmp_path / "memory"
    place.symlink_to(tmp_path / "theirs") if kind == "symlink" else (tmp_path / "theirs").rename(place)
    fields = dict.fromkeys(("pool_id", "instance_id", "host", "head_host", "tls_certificate", "tls_key"), "x")
    folders = (str(place), str(tmp_path / "node"))
    settings = NodeSettings(**fields, rank=0, total_nodes=1, slots=1, head_port=1, value_directories=folders)
    write_atomically(tmp_path / "node" / "settings.json", settings.to_json())
    monkeypatch.setattr(sys, "argv", ["supervisor", str(tmp_path / "node")])
    monkeypatch.setattr(supervisor, "Supervisor", lambda *_: pytest.fail("it goes on"))
    with pytest.raises(NotPrivate):
        supervisor.main()


# ── memory of calls ──────────────────────────────────────────────────────────────────────────────────────────────────


GROUPS = """
from skyward_core.worker import call_groups
from skyward_core.wire.messages import Outcome
from tests.worker.fake_cgroup import FakeKernel

kernel = FakeKernel(Path(sys.argv[1]) / "cgroup")
call_groups.read, call_groups.write = kernel.read, kernel.write
name = f"skyward.{os.environ['SKYWARD_INSTANCE_ID']}"
group = kernel.root / name if kernel.root.exists() else kernel.make(name, "memory", str(os.getpid()))
call_groups.own_group = lambda: group

def value_of(text):
    exec(text, names := {"directory": directory})
    return names.get("value")

def run_worker(directory, settings, index, control):
    slot = Slot(RunnerFactory(control), settings.value_directories)
    while not (directory / "call").exists():
        time.sleep(0.005)
    for text in [*(directory / "call").read_text().split("---"), "pass"]:
        news = []
        call = Call("1", "exec", Parcel(pickle.dumps(((text,), {}))), "job")
        slot.run(Batch("", (call,), {"exec": Parcel(pickle.dumps(value_of))}), news.extend)
        with open(directory / "outcomes", "a") as outcomes:
            outcomes.writelines(f"{item.kind.name} {item.exit_code}\\n" for item in news if isinstance(item, Outcome))
    (directory / "done").write_text("done")
    while True:
        signal.pause()

node.run_worker = run_worker
"""
LOOK = """
import os, signal
from skyward_core.worker import call_groups
(group,) = [path for path in call_groups.own_group().glob("calls-*") if f" {os.getpid()} " in call_groups.read(path / "cgroup.procs") + " "]
with open("limits", "a") as limits:
    print(call_groups.read(group / "memory.max"), file=limits)
"""
DIE = """
call_groups.write(group / "memory.events", "oom_kill %s")
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("kills", [1, 0])
def test_a_call_that_the_kernel_kills_for_its_memory_reports_it(start: Start, kills: int) -> None:
    """On a fake of cgroupfs: each process of calls has a group with the limit. A process that was killed there had
    used too much memory; any other dead process has crashed.
    """
    machine = start(DRIVER + GROUPS, memory_limit_bytes=300_000_000)
    machine.call(LOOK + DIE % kills)
    machine.await_file("done")
    assert machine.text("limits") == "300000000\n"
    assert machine.text("outcomes").splitlines() == [f"{'OUT_OF_MEMORY' if kills else 'CRASH'} -9", "RESULT None"]
    groups = (machine.directory / "cgroup" / f"skyward.{machine.instance_id}").iterdir()
    assert sorted(path.name.partition("-")[0] for path in groups) == ["calls", "node"]  # not that of the dead process
    assert "the memory of calls is bounded by the kernel" in machine.text("log")


# ── calls that outlive their head ────────────────────────────────────────────────────────────────────────────────────


class NoticePoller:
    """A client of one scheduler: its messages about the pool and its calls."""

    TOPIC = "skyward-kept-test"

    def __init__(self, address: str, certificate: Any) -> None:
        pem, key = certificate.certificate, certificate.key
        security = Security(require_encryption=True, tls_ca_file=pem, tls_client_cert=pem, tls_client_key=key)
        self.client: Any = Client(address, security=security, set_as_default=False, timeout=60)
        self.heard: list[Any] = []
        self.futures: list[Any] = []
        for topic, read in ((self.TOPIC, decode_report), (POOL_TOPIC, decode_news)):
            self.client.subscribe_topic(topic, lambda event, read=read: self.heard.append(read(event[1])))
        self.send(repeat_reports())

    def send(self, message: dict[str, Any]) -> None:
        self.client._send_to_scheduler(message)

    def run(self, worker: str, **texts: str) -> None:
        """Have a worker of this name run these calls."""
        self.await_worker(worker)
        address = next(address for address, there in members(self.client).items() if there["name"] == worker)
        calls = tuple(
            Call(call_id, "exec", Parcel(pickle.dumps(((text,), {}))), "job") for call_id, text in texts.items()
        )
        batch = Batch(self.TOPIC, calls, {"exec": Parcel(pickle.dumps(exec))})
        key = f"skyward-{'-'.join(texts)}"
        self.futures.append(Future(key, self.client))
        self.send(
            {
                "op": RUN_BATCH,
                "key": key,
                "batch": pickle.dumps(batch, protocol=5),
                "annotations": {"workers": [address]},
            }
        )

    def await_worker(self, name: str, status: str = "running") -> None:
        wait_until(
            lambda: (name, status) in {(there["name"], there["status"]) for there in members(self.client).values()},
            f"{name}, {status}",
        )

    def kept(self, name: str) -> list[tuple[str, ...]]:
        return [tuple(sorted(news.calls)) for news in self.heard if isinstance(news, WorkerKept) and news.name == name]

    def reports(self) -> list[Report]:
        return [news for news in self.heard if isinstance(news, Report)]

    def endings(self) -> dict[str, OutcomeKind]:
        return {
            item.call_id: item.kind for report in self.reports() for item in report.news if isinstance(item, Outcome)
        }

    def close(self) -> None:
        self.futures.clear()
        self.client.close()


@pytest.fixture
def listen(certificate: Any) -> Iterator[Callable[[str], NoticePoller]]:
    listeners: list[NoticePoller] = []

    def listen_at(address: str) -> NoticePoller:
        listeners.append(NoticePoller(address, certificate))
        return listeners[-1]

    yield listen_at
    for listener in listeners:
        listener.close()


def long_call(directory: Path) -> str:
    """A call that notes its beginning and its head, prints, and waits for `go`."""
    return textwrap.dedent(f"""
        import os, time
        with open({str(directory / "begun")!r}, "a") as begun:
            begun.write("begun\\n")
        print("before")
        while not os.path.exists({str(directory / "go")!r}):
            time.sleep(0.01)
        print("after")
    """)


def two_nodes(
    start: Start, listen: Callable[[str], NoticePoller], **fields: Any
) -> tuple[Machine, Machine, NoticePoller]:
    head = start("", rank=0, scheduler=None, keeps_calls=True)
    other = start("", rank=1, scheduler=head.await_file("head.json"), keeps_calls=True, **fields)
    return head, other, listen(head.text("head.json"))


@pytest.mark.parametrize("ends", ["before", pytest.param("after", marks=pytest.mark.nightly)])
def test_a_call_outlives_its_head_and_is_reported_to_the_next(
    start: Start, listen: Callable[[str], NoticePoller], tmp_path: Path, ends: str
) -> None:
    """It is begun once.

    The new head learns which worker has it, then gets all its reports. No more calls go to that worker until it has
    ended.
    """
    head, other, first = two_nodes(start, listen)
    first.run("1-0", long=long_call(tmp_path), next="pass")
    wait_until(lambda: "next" in first.endings(), "the call behind it to be handed back")
    head.process.kill()
    wait_until(lambda: "has lost its scheduler" in other.text("log"), "the loss to be noticed")
    if ends == "before":
        (tmp_path / "go").touch()
    new = start("", rank=0, scheduler=None, keeps_calls=True)
    second = listen(new.await_file("head.json"))
    other.tell(rank=2, scheduler=new.text("head.json"), generation=1)
    if ends == "after":
        second.await_worker("2-0", "paused")
        wait_until(lambda: ("long", "next") in second.kept("2-0"), "what is kept")
        wait_until(lambda: second.reports(), "what was reported")
        assert second.endings() == {"next": OutcomeKind.RETURNED}
        (tmp_path / "go").touch()
    wait_until(
        lambda: second.endings() == {"next": OutcomeKind.RETURNED, "long": OutcomeKind.RESULT}, "the call to end"
    )
    second.await_worker("2-0")
    reports = [report for report in second.reports() if report.origin.endswith("/skyward-long-next")]
    assert list(dict.fromkeys(report.number for report in reports)) == list(
        range(1, max(report.number for report in reports) + 1)
    )
    lines = {
        report.number: [line for item in report.news if isinstance(item, Output) for line in item.lines]
        for report in reports
    }
    assert [line for number in sorted(lines) for line in lines[number]] == ["before", "after"]
    assert second.kept("0-0")[0] == ()
    second.send(release(["long", "next", "unknown"]))
    second.send(repeat_reports())
    wait_until(lambda: second.kept("2-0")[-1] == (), "the release")
    assert (tmp_path / "begun").read_text() == "begun\n"
    second.run(
        "2-0", place=f"import os; open({str(tmp_path / 'place')!r}, 'w').write(os.environ['SKYWARD_INSTANCE_INFO'])"
    )
    wait_until(lambda: "place" in second.endings(), "a call after it")
    assert '"node": 2' in (tmp_path / "place").read_text()
    second.send(repeat_reports())
    wait_until(lambda: second.kept("2-0")[-1] == ("place",), "it to be kept")
    del second.futures[:]
    wait_until(lambda: second.send(repeat_reports()) or second.kept("2-0")[-1] == (), "Dask to free it")


# ── what the system refuses ──────────────────────────────────────────────────────────────────────────────────────────

REFUSES = f"""
{DRIVER}
fork, forks = os.fork, []

def refuse():
    forks.append(1)
    if str(len(forks)) in sys.argv[2:]:
        raise BlockingIOError(11, "Resource temporarily unavailable")
    return fork()

os.fork = refuse
"""


@pytest.mark.parametrize(
    ("refused", "what"),
    [
        ((1, 2), "the scheduler is started later"),
        ((2,), "worker 0 is started later"),
        ((3, 4), "a process for calls is started later"),
    ],
)
def test_a_fork_that_the_system_refuses_is_tried_again(start: Start, refused: tuple[int, ...], what: str) -> None:
    """Of the scheduler, of a worker, of a process for calls: the node has other calls, and does not end."""
    machine = start(f"{REFUSES}\nsys.argv[2:] = {[str(number) for number in refused]}", rank=0)
    machine.await_ready()
    machine.call("open('done', 'w').write('it ran')")
    assert machine.await_file("done") == "it ran"
    assert machine.is_alive
    assert f"{what}: [Errno 11] Resource temporarily unavailable" in machine.text("log")
    machine.process.terminate()
    assert machine.await_end() == "asked to"


def test_calls_have_the_limit_of_open_files_with_which_the_node_was_started(start: Start) -> None:
    """The node raises its own: `select` in a user's call takes no descriptor above 1,023."""
    limits = "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (400, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))"
    machine = start(f"{limits}\n{DRIVER}", slots=60)
    machine.await_ready()
    machine.call("import resource; open('limit', 'w').write(str(resource.getrlimit(resource.RLIMIT_NOFILE)[0]))")
    assert machine.await_file("limit") == "400"
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    assert resource.prlimit(machine.process.pid, resource.RLIMIT_NOFILE)[0] == hard


def test_a_node_says_that_it_may_open_too_few_files(start: Start) -> None:
    """It ends at once, and names the number of calls for which the limit is enough."""
    limits = "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (600, 600))"
    machine = start(f"{limits}\n{DRIVER}", slots=60)
    assert machine.await_end().endswith(
        "this machine allows 600: raise its hard limit (ulimit -Hn), or set concurrency to 49"
    )
