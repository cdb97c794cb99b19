"""The test bed itself: hosts are separate machines, each fault has its documented effect, and nothing is
left behind.
"""

import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.conftest import wait_until
from tests.testbed import Fleet, Host, leftovers, sweeping, why_not

REPOSITORY = Path(__file__).parents[3]
AT_ONCE = ("ConnectTimeout=1",)


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    """A fleet for the tests of this file; afterwards nothing of it exists."""
    if reason := why_not():
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(reason)
    with Fleet() as fleet:
        yield fleet
    lock = sweeping.take(fleet.number)
    if lock is None:
        return  # another test process may have the number by now
    try:
        assert leftovers(fleet.number) == []
        assert not Path(f"/run/skyward-testbed-{fleet.number}").exists()
    finally:
        sweeping.release(fleet.number, lock)


@pytest.fixture
def host(fleet: Fleet) -> Iterator[Host]:
    """A host of this test alone, with a small disk."""
    host = fleet.create(disk="48M")
    yield host
    host.crash()


@pytest.fixture
def session(host: Host) -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    """Begin commands on the host through OpenSSH that last as long as the test."""
    begun: list[subprocess.Popen[str]] = []

    def begin(command: str) -> subprocess.Popen[str]:
        begun.append(
            subprocess.Popen(
                [*host.ssh(), command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
        return begun[-1]

    yield begin
    for process in begun:
        process.kill()
        process.communicate()


def heard(process: subprocess.Popen[str], seconds: float = 30.0) -> str:
    """Return the next line that a command writes; fails if it takes longer."""
    assert select.select([process.stdout], [], [], seconds)[0], f"nothing heard in {seconds} s"
    return process.stdout.readline()


def said(host: Host, command: str) -> str:
    done = host.run(command)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# ── separate machines ────────────────────────────────────────────────────────────────────────────────────────────────


def test_hosts_are_separate_machines(fleet, host):
    """Two hosts differ in name, address, processes and files. Neither changes this machine's files, and they reach each
    other.
    """
    other = fleet.create(disk="48M")
    assert (said(host, "hostname"), said(other, "hostname")) == (host.name, other.name)
    assert f"inet {host.ip}/24" in said(host, "ip addr show eth0")
    said(host, "echo mine > /etc/testbed-mark")
    assert other.run("test -e /etc/testbed-mark").returncode == 1
    assert not Path("/etc/testbed-mark").exists()
    assert len(said(host, "ls -d /proc/[0-9]*").splitlines()) < 10
    assert said(host, "cat /proc/1/comm") == "sshd"
    assert (
        said(host, f"ssh-keyscan -t ed25519 {other.ip} 2>/dev/null") == other.known_hosts_line != host.known_hosts_line
    )
    other.crash()


def test_a_host_is_bare(host):
    """A host sees this machine's system, but not its homes, its caches or this repository."""
    assert said(host, f"find /root /home /mnt /tmp {REPOSITORY} -type f") == "/root/.ssh/authorized_keys"
    assert said(host, "/usr/bin/env sh -c 'touch /tmp/x /dev/shm/y && stat -c %a /tmp /dev/shm'").split() == [
        "1777",
        "1777",
    ]


def test_shared_folders_are_on_the_host_and_on_this_machine(fleet, host, tmp_path):
    """Each side sees what the other writes, at the same path; a host without them has none. They outlive the host."""
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
    (folders[0] / "greeting").write_text("hello")
    sharing = fleet.create(disk="48M", shared=folders)
    assert said(sharing, f"cat {folders[0]}/greeting && echo answer > {folders[1]}/answer") == "hello"
    assert (folders[1] / "answer").read_text() == "answer\n"
    assert host.run(f"test -e {folders[0]}").returncode == 1
    sharing.crash()
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == ["answer", "greeting"]


def test_a_host_reaches_nothing_outside(host):
    """A host has no route out of its own network: the kernel reports this at once."""
    assert "unreachable" in host.run("bash -c '< /dev/tcp/192.0.2.1/80'").stderr.lower()


def test_isolated_hosts_do_not_see_each_other(fleet):
    """Hosts that are not bridged to one another are reachable from this machine, and reach this machine alone."""
    one, two = fleet.create(isolated=True), fleet.create(isolated=True)
    assert said(two, "hostname") == two.name
    assert one.run(f"timeout 1 bash -c '< /dev/tcp/{two.ip}/22'").returncode == 124
    one.partition()
    one.heal()
    assert one.run(f"timeout 1 bash -c '< /dev/tcp/{two.ip}/22'").returncode == 124
    assert "refused" in one.run(f"bash -c '< /dev/tcp/{fleet.network.gateway}/1'").stderr
    one.crash()
    two.crash()


def test_only_the_fleets_key_logs_in(host, tmp_path):
    """Any key other than the fleet's is refused."""
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / "key")], check=True)
    argv = [str(tmp_path / "key") if item == str(host.key_path) else item for item in host.ssh()]
    done = subprocess.run([*argv, "true"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 255
    assert "Permission denied (publickey)" in done.stderr


# ── faults ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_changed_host_key_is_noticed(host):
    """After the key has changed, OpenSSH refuses the connection with the old line, and accepts it with the new one."""
    pinned = host.known_hosts_path.with_name("pinned")
    pinned.write_text(host.known_hosts_line)
    options = (f"UserKnownHostsFile={pinned}",)
    assert host.run("true", options=options).returncode == 0
    host.change_host_key()
    refused = host.run("true", options=options)
    assert refused.returncode == 255
    assert "REMOTE HOST IDENTIFICATION HAS CHANGED" in refused.stderr
    assert said(host, "hostname") == host.name


def test_a_killed_host_sends_no_packet(host, session):
    """After a power cut, an open session does not end, a new connection times out, and no process runs any more."""
    asleep = session("echo begun; sleep 60")
    assert heard(asleep) == "begun\n"
    pid = host.pid
    host.kill()
    assert not Path(f"/proc/{pid}").exists()
    assert not host.is_up
    assert "timed out" in host.run("true", options=AT_ONCE).stderr
    assert asleep.poll() is None


def test_a_crash_closes_connections_at_once(host, session):
    """When all processes of a host die while the network is up, an open session ends."""
    asleep = session("echo begun; sleep 60")
    assert heard(asleep) == "begun\n"
    host.crash()
    assert "closed by remote host" in asleep.communicate(timeout=30)[0]


def test_a_host_can_end_itself(host):
    """`poweroff`, run inside, ends the host."""
    host.run("poweroff")
    wait_until(lambda: not host.is_up, "the host to be off")


def test_a_partition_heals(host, session):
    """During a partition no packet arrives, and an open session continues after it."""
    echo = session("cat")
    echo.stdin.write("before\n")
    echo.stdin.flush()
    assert heard(echo) == "before\n"
    host.partition()
    echo.stdin.write("after\n")
    echo.stdin.flush()
    assert "timed out" in host.run("true", options=AT_ONCE).stderr
    assert (host.root / "proc/1").exists()
    host.heal()
    assert heard(echo) == "after\n"


def test_a_frozen_host_accepts_connections_and_does_not_answer(host):
    """A frozen host's kernel accepts the connection, but no process answers; after the thaw it works again."""
    host.freeze()
    frozen = host.run("true", options=AT_ONCE)
    assert frozen.returncode == 255
    assert "banner exchange" in frozen.stderr
    host.thaw()
    assert said(host, "hostname") == host.name


def test_a_full_disk_is_full(host):
    """On a full disk a write fails because there is no space, and works again once there is some."""
    host.fill_disk()
    full = host.run("head -c 65536 /dev/zero > /var/tmp/more")
    assert full.returncode == 1
    assert "No space left on device" in full.stderr
    host.empty_disk()
    said(host, "head -c 65536 /dev/zero > /var/tmp/more")


def test_memory_has_a_limit(fleet):
    """A process that takes more memory than its host has is killed. The host stays up and reports its limit."""
    small = fleet.create(memory="64M")
    assert small.run("head -c 200M /dev/zero | tail").returncode == 137
    assert said(
        small, "cat /sys/fs/cgroup/memory/memory.limit_in_bytes /sys/fs/cgroup/memory.max 2>/dev/null; true"
    ) == str(64 << 20)
    small.crash()


def test_a_clock_can_be_ahead(fleet):
    """A host's monotonic clock may be a day ahead, so other machines must not be compared by it. Its time of day is
    this machine's.
    """
    ahead = fleet.create(clock_ahead_seconds=86_400)
    begun = time.clock_gettime(time.CLOCK_BOOTTIME), time.time()
    uptime, now = (float(word) for word in said(ahead, "cut -d' ' -f1 /proc/uptime; date +%s.%N").split())
    ended = time.clock_gettime(time.CLOCK_BOOTTIME), time.time()
    assert begun[0] + 86_400 - 1 <= uptime <= ended[0] + 86_400 + 1
    assert begun[1] <= now <= ended[1]
    ahead.crash()


def test_bandwidth_is_limited(host):
    """Three megabytes through two megabytes a second take 1.5 seconds, less a burst, each way. Without a limit they are
    as fast as before.
    """
    host.limit("16mbit")
    for command, text in (("cat > /dev/null", "x" * 3_000_000), ("head -c 3000000 /dev/zero", "")):
        started = time.monotonic()
        assert host.run(command, text=text).returncode == 0
        assert time.monotonic() - started > 1.4
    host.limit(None)
    assert len(host.run("head -c 3000000 /dev/zero").stdout) == 3_000_000


def test_a_delay_lengthens_the_round_trip(host):
    """With 50 ms each way, a round trip takes at least 100 ms; without them, as little as before.

    If the kernel has no netem, the error says so.
    """
    try:
        host.impair(delay_milliseconds=50)
    except RuntimeError as error:
        assert "netem" in str(error)
        pytest.skip(f"this kernel has no netem: {error}")
    started = time.monotonic()
    assert host.run("true").returncode == 0
    assert time.monotonic() - started > 0.1
    host.impair()


# ── nothing is left behind ───────────────────────────────────────────────────────────────────────────────────────────


def test_a_closed_fleet_leaves_nothing(fleet):
    """After a fleet is closed, with hosts in any state, none of its processes, interfaces, groups, mounts and files
    exist.
    """
    with Fleet() as other:
        hosts = [other.create(), other.create(memory="64M"), other.create()]
        hosts[1].freeze()
        hosts[2].partition()
        assert other.number != fleet.number
        kinds = " ".join(leftovers(other.number))
        assert all(
            kind in kinds
            for kind in ("process", f"tb{other.number}-2", f"skyward-testbed-{other.number}-3", "/run/skyward-testbed")
        )
        pids = [host.pid for host in hosts]
    assert leftovers(other.number) == []
    assert [pid for pid in pids if Path(f"/proc/{pid}").exists()] == []


def test_up_prints_command_lines_and_ends_on_ctrl_c(fleet):
    """`python -m tests.testbed up 2` prints two lines that log in, and an interrupt removes both hosts."""
    with _up(2) as up:
        lines = _lines(up, 2)
        names = [
            subprocess.run(f"{line.strip()} hostname", shell=True, capture_output=True, text=True, timeout=60).stdout
            for line in lines
        ]
        assert names == ["host2\n", "host3\n"]
        up.send_signal(signal.SIGINT)
        assert up.wait(60) == 0
    assert leftovers(_number(lines[0])) == []


def test_a_killed_run_is_swept(fleet):
    """When the process that holds a fleet is killed with SIGKILL, its watcher removes everything."""
    with _up(2) as up:
        number = _number(_lines(up, 2)[0])
        up.kill()
    wait_until(lambda: leftovers(number) == [], f"fleet {number} to be swept")


def test_gc_sweeps_what_even_the_watcher_could_not(fleet):
    """When the watcher is killed too, `gc` removes the fleet, and leaves living fleets unchanged."""
    with _up(1) as up:
        number = _number(_lines(up, 1)[0])
        for child in Path(f"/proc/{up.pid}/task/{up.pid}/children").read_text().split():
            if b"watch" in Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0"):
                os.kill(int(child), signal.SIGKILL)
        up.kill()
    assert leftovers(number) != []
    swept = subprocess.run(
        [sys.executable, "-m", "tests.testbed", "gc"], cwd=REPOSITORY, capture_output=True, text=True, timeout=90
    )
    assert f"removed fleet {number}\n" in swept.stdout
    assert leftovers(number) == []
    assert leftovers(fleet.number) != []


def test_the_preflight_prints_one_line_with_the_reason(fleet):
    """If the kernel refuses, the preflight fails with one line that names the reason."""
    argv = ["setpriv", "--bounding-set=-sys_admin", sys.executable, "-m", "tests.testbed", "preflight"]
    refused = subprocess.run(argv, cwd=REPOSITORY, capture_output=True, text=True, timeout=90)
    assert refused.returncode == 1
    assert re.fullmatch(r"this kernel refuses the test bed: .*not permitted.*\n", refused.stderr)


@contextmanager
def _up(hosts: int) -> Iterator[subprocess.Popen[str]]:
    argv = [sys.executable, "-m", "tests.testbed", "up", str(hosts)]
    with subprocess.Popen(argv, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as up:
        try:
            yield up
        finally:
            up.kill()


def _lines(up: subprocess.Popen[str], hosts: int) -> list[str]:
    """The command lines it prints, once all of its hosts are up. Nothing more is printed then, so no line is lost in
    the buffer.
    """
    lines = [up.stdout.readline() for _ in range(hosts)]
    assert f"{hosts} hosts in" in up.stdout.readline()
    return lines


def _number(line: str) -> int:
    return int(re.search(r"@10\.77\.(\d+)\.", line)[1])
