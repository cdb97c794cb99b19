"""Faults during the bootstrap of bare hosts, and hosts that cannot reach each other."""

import contextlib
import os
import platform
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import skyward_core as sky
from skyward_core.events.events import InstanceProvisioned
from skyward_core.transport.ssh_connection import SSHConnection
from tests.conftest import RecordedEvents, members
from tests.real_hosts import owned_by, tagged
from tests.system.provisioning.test_bootstrap_hosts import (  # noqa: F401 - fixtures
    cloud,
    failure,
    imported,
    pool_on,
    square,
    steps,
)
from tests.testbed import Host
from tests.testbed.fixtures import PURE_PACKAGE, fleet, mirror  # noqa: F401 - fixtures
from tests.testbed.rental import Cloud
from tests.waiting import wait_until

MIB = 1 << 20

pytestmark = [pytest.mark.timeout(240)]


@sky.compute
def where() -> str:
    return platform.node()


@sky.compute
def raised(values: Any) -> Any:
    return values + 1


class Reaction(RecordedEvents):
    """A callback of a pool. It runs an action at the first event of a kind, or at the first report of a step."""

    def __init__(self, to: type | str, action: Callable[[str], object]) -> None:
        super().__init__()
        self._to = to
        self._action: Callable[[str], object] | None = action

    def __call__(self, event: Any) -> None:
        super().__call__(event)
        is_it = isinstance(event, self._to) if isinstance(self._to, type) else getattr(event, "step", "") == self._to
        if self._action is not None and is_it:
            action, self._action = self._action, None
            action(event.instance_id)


def kill_bootstrap(host: Host) -> None:
    """Kill only the script that prepares a host."""
    for pid in host._processes():
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"bash\0./bootstrap.sh"):
                os.kill(pid, signal.SIGKILL)


def test_a_killed_build_is_built_again_and_the_next_pool_uses_it(fleet, mirror, tmp_path):
    """A script that is killed leaves an incomplete environment, and the error has its signal.

    The next pool builds the environment again. The pool after that requests nothing from the mirror.
    """
    host = fleet.create()
    mirror.configure(host)
    provider = owned_by([host], tmp_path / "known_hosts")
    environments = host.root / "root/.cache/skyward/envs"
    image = sky.Image(pip=[PURE_PACKAGE])

    def kill(instance_id: str) -> None:
        wait_until(lambda: list(environments.glob("*/pyvenv.cfg")), "half of an environment")
        kill_bootstrap(host)

    with pytest.raises(sky.BootstrapFailed) as caught, pool_on(provider, Reaction("deps", kill), image=image):
        pass
    assert (caught.value.node, caught.value.phase, caught.value.exit_code) == (0, "deps", 128 + signal.SIGKILL)
    assert "Killed" in caught.value.output
    assert tagged(host) == []
    assert list(environments.glob("*/pyvenv.cfg")) != []
    assert list(environments.glob("*/.skyward-complete")) == []

    recorded = RecordedEvents()
    with pool_on(provider, recorded, image=image) as pool:
        assert (where() >> pool, imported("six") >> pool) == (host.name, PURE_PACKAGE.partition("==")[2])
    assert steps(recorded)[-3:] == ["deps", "skyward", "server"]

    recorded, asked = RecordedEvents(), mirror.requests
    with pool_on(provider, recorded, image=image) as pool:
        assert square(3) >> pool == 9
    assert steps(recorded) == ["skyward", "server"]
    assert mirror.requests == asked
    assert tagged(host) == []
    host.crash()


def test_a_debian_package_that_cannot_be_installed_is_named(cloud):
    """The error has apt's exit code and last line. The hosts cannot reach a Debian mirror."""
    error = failure(cloud, image=sky.Image(apt=["nonexistent-package"]))
    assert (error.node, error.phase, error.exit_code) == (0, "apt", 100)
    assert "apt-get -o DPkg::Lock::Timeout=300 install" in str(error)
    assert error.output[-1] == "E: Unable to locate package nonexistent-package"


def test_a_broken_index_is_reported(cloud, mirror):
    """It answers 503. The step that needs it fails, on any of two nodes, and the error has the status."""
    mirror.break_()
    try:
        error = failure(cloud, nodes=2, image=sky.Image(env={"UV_HTTP_RETRIES": "0"}))
    finally:
        mirror.mend()
    assert (error.node in (0, 1), error.phase, error.exit_code) == (True, "deps", 2)
    assert "command=uv venv" in str(error)
    assert "503" in error.output[-1]


@pytest.mark.parametrize(("disk", "phase"), [("24M", "uv"), ("64M", "deps")])
def test_a_full_disk_is_reported(fleet, mirror, disk, phase):
    """There is no space for uv, or for the interpreter. The error has the node, the step, the command and the reason."""
    error = failure(Cloud(fleet, prepare=mirror.configure, disk=disk))
    assert (error.node, error.phase) == (0, phase)
    assert error.exit_code
    assert "No space left on device" in "\n".join(error.output)


def test_a_node_that_its_guard_ends_during_the_bootstrap_is_reported(fleet, mirror):
    """It reaches its maximum lifetime. The error has that reason, and the client does not wait for the node."""
    lock = f"/root/.cache/skyward/envs/{sky.Image().content_hash()}.lock"

    def prepare(host: Host) -> None:
        mirror.configure(host)
        # another process holds the lock of the build and never finishes
        host.run(f"mkdir -p {Path(lock).parent}; setsid flock {lock} sleep 60 </dev/null >/dev/null 2>&1 &")

    started = time.monotonic()
    # a busy machine needs less time than this to reach that lock
    error = failure(Cloud(fleet, prepare=prepare), max_lifetime=10)
    assert (error.node, error.phase) == (0, "deps")
    assert "max_lifetime" in str(error)
    assert time.monotonic() - started < 50


def test_a_machine_that_dies_during_the_bootstrap_is_reported_long_before_the_deadline(cloud, monkeypatch):
    """It stops answering, and the provider does not list it any more."""
    # the failure detector needs 1.5 s here instead of 15 s
    monkeypatch.setitem(SSHConnection.__init__.__kwdefaults__, "keepalive_seconds", 0.5)

    def die(instance_id: str) -> None:
        settings = cloud.host(instance_id).root / f"root/.cache/skyward/instances/{instance_id}/settings.json"
        wait_until(settings.exists, "the settings of the head")
        cloud.preempt(instance_id)

    started = time.monotonic()
    error = failure(cloud, Reaction("deps", die), provision_timeout=600)
    assert (error.node, error.phase, error.exit_code) == (0, "deps", None)
    assert "gone" in str(error)
    assert time.monotonic() - started < 100


def test_a_short_network_failure_does_not_stop_the_bootstrap(cloud):
    """No packet passes for eight seconds during the installation, then all SSH connections are closed."""
    timers: list[threading.Timer] = []

    def cut(instance_id: str) -> None:
        host = cloud.host(instance_id)
        host.partition()

        def heal() -> None:
            host.heal()
            host.run("pkill -KILL -f '^sshd: root'")

        timers.append(threading.Timer(8, heal))
        timers[0].start()

    with pool_on(cloud.provider(), Reaction("deps", cut), lease_seconds=20) as pool:
        assert square(3) >> pool == 9
    timers[0].join()


def test_hosts_that_cannot_reach_each_other_are_one_pool(fleet, mirror):
    """Three hosts can reach only the client.

    Broadcast, map, large arrays and Dask's own tasks work, and these tasks move data between workers.
    """
    np = pytest.importorskip("numpy")
    cloud = Cloud(fleet, prepare=mirror.configure, isolated=True)
    with pool_on(cloud.provider(), RecordedEvents(), nodes=3, image=sky.Image(pip=["numpy"])) as pool:
        hosts = [cloud.host(node.instance.id) for node in pool.lease.nodes]
        assert hosts[0].run(f"timeout 2 bash -c 'exec 3<>/dev/tcp/{hosts[1].ip}/22'").returncode != 0
        assert where() @ pool == tuple(host.name for host in hosts)
        assert pool.map(square, range(50)) == [number * number for number in range(50)]
        values = np.arange(4 * MIB, dtype=np.int64)
        assert (raised(values) >> pool == values + 1).all()
        client = pool.dask_client()
        addresses = sorted(members(client))
        assert len(addresses) == 3
        parts = [client.submit(bytes, MIB, workers=[address], pure=False) for address in addresses]
        for address in addresses:
            # two of its three parts come from the other workers
            whole = client.submit(b"".join, parts, workers=[address], pure=False)
            assert client.submit(len, whole).result(timeout=30) == 3 * MIB
    assert cloud.machines == {}


def test_a_command_that_fails_ends_the_pool_with_its_last_lines(cloud):
    """No other machine is rented for it, and values of `env` that look like secrets are masked."""
    recorded = RecordedEvents()
    command = 'echo "asking with $HUB_TOKEN for $NAME"; exit 9'
    env = {"HUB_TOKEN": "t0k-of-the-team", "NAME": "weights"}
    error = failure(cloud, recorded, image=sky.Image(shell=["true", command], env=env))
    assert (error.phase, error.exit_code, len(recorded.of(InstanceProvisioned))) == ("shell", 9, 1)
    assert f"exit=9 command={command}" in str(error)
    assert error.output[-1] == "asking with *** for weights"
    assert "t0k-of-the-team" not in f"{error} {error.output} {recorded.events}"


def test_a_command_that_fails_on_a_replacement_leaves_the_other_node_and_is_tried_again(fleet, mirror):
    """Its machine ends, the error has the last lines, and the next machine on which the command succeeds is the node."""
    failing = [False]

    def prepare(host: Host) -> None:
        mirror.configure(host)
        if failing[0]:
            host.run("touch /root/no-licence")

    cloud, recorded = Cloud(fleet, prepare=prepare), RecordedEvents()
    command = "[ ! -e /root/no-licence ] || { echo the licence server is away; exit 9; }"
    with pool_on(cloud.provider(), recorded, nodes=2, image=sky.Image(shell=[command])) as pool:
        first = {node.instance.id for node in pool.lease.nodes}
        head = cloud.host(pool.lease.nodes[0].instance.id).name
        failing[0] = True
        cloud.preempt(pool.lease.nodes[1].instance.id)
        (text, *_) = wait_until(lambda: failures_of(recorded, 1), "the replacement to fail")
        assert "phase=shell" in text
        assert "exit=9" in text
        assert "the licence server is away" in text
        assert where() >> pool == head
        failing[0] = False
        wait_until(
            lambda: len(pool.lease.nodes) == 2 and not {node.instance.id for node in pool.lease.nodes} <= first,
            "a node in its place",
        )
        assert len(set(where() @ pool)) == 2
        wait_until(lambda: cloud.machines.keys() == {node.instance.id for node in pool.lease.nodes}, "no other machine")
    assert cloud.machines == {}
    assert pool.receipt["left"] == []
    assert len(pool.receipt["resources"]) == 3 + len(failures_of(recorded, 1))


def failures_of(recorded: RecordedEvents, rank: int) -> list[str]:
    """Return the messages about attempts to replace a node."""
    beginning = f"node {rank} is not replaced yet: "
    return [event.message for event in recorded.of(sky.Error) if event.message.startswith(beginning)]
