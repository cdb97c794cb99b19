"""Bootstrap of a bare host over SSH: all steps, all failures, and what a failure leaves.

Run as a program, with the data of a host, it is a client that opens a pool on that host. Tests kill this client.
"""

import contextlib
import os
import platform
import signal
import threading
import time
from pathlib import Path
from typing import Any, ClassVar

import pytest

import skyward_core as sky
from skyward_core.providers.hosts import Hosts
from tests.conftest import RecordedEvents, members, wait_until
from tests.system.provisioning.test_bootstrap_hosts import (  # noqa: F401 - fixtures
    Reaction,
    _Lent,
    _particulars,
    cloud,
    failure,
    imported,
    main,
    pool_on,
    square,
    steps,
)
from tests.testbed import Host
from tests.testbed.fixtures import PURE_PACKAGE, fleet, mirror  # noqa: F401 - fixtures
from tests.testbed.rental import Cloud  # pyright: ignore[reportPrivateUsage]

STEPS = ["uv", "deps", "skyward", "server"]
MIB = 1 << 20

pytestmark = [pytest.mark.timeout(240)]


@sky.compute
def where() -> str:
    return platform.node()


@sky.compute
def raised(values: Any) -> Any:
    return values + 1


def tagged(host: Host) -> str:
    """Return the processes of nodes on a running host."""
    return host.run("grep -lsaz '^SKYWARD_INSTANCE_ID=' /proc/[0-9]*/environ").stdout


def kill_bootstrap(host: Host) -> None:
    """Kill only the script that prepares a host."""
    for pid in host._processes():
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"bash\0./bootstrap.sh"):
                os.kill(pid, signal.SIGKILL)


# ── from bare ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_killed_build_is_built_again_and_the_next_pool_uses_it(fleet, mirror):
    """A script that is killed on a user's own host leaves an incomplete environment.

    The next pool builds the environment again. The pool after that requests nothing from the mirror.
    """
    host = fleet.create()
    mirror.configure(host)
    provider = Hosts(
        host.ip, user="root", key=str(host.key_path), known_hosts=str(host.known_hosts_path), config="/dev/null"
    )
    environments = host.root / "root/.cache/skyward/envs"
    image = sky.Image(pip=[PURE_PACKAGE])

    def kill(instance_id: str) -> None:
        wait_until(lambda: list(environments.glob("*/pyvenv.cfg")), "half of an environment")
        kill_bootstrap(host)  # the time starts here: a login takes as long as all later steps

    with pytest.raises(sky.BootstrapFailed) as caught, pool_on(provider, Reaction("deps", kill), image=image):
        pass
    assert (caught.value.node, caught.value.phase, caught.value.exit_code) == (0, "deps", 128 + signal.SIGKILL)
    assert tagged(host) == ""
    assert list(environments.glob("*/pyvenv.cfg")) != []
    assert list(environments.glob("*/.skyward-complete")) == []

    recorded = RecordedEvents()
    with pool_on(provider, recorded, image=image) as pool:
        assert (where() >> pool, imported("six") >> pool) == (host.name, PURE_PACKAGE.partition("==")[2])
    assert steps(recorded)[-3:] == STEPS[1:]
    assert tagged(host) == ""

    recorded, asked = RecordedEvents(), mirror.requests
    started = time.monotonic()
    with pool_on(provider, recorded, image=image) as pool:
        assert square(3) >> pool == 9
        seconds = time.monotonic() - started
    assert steps(recorded) == STEPS[2:]
    assert mirror.requests == asked
    assert seconds < 20  # an idle machine takes three or four seconds
    assert tagged(host) == ""
    host.crash()


def test_two_pools_at_the_same_time_do_not_disturb_each_other(cloud):
    """Two pools with the same image open at the same time on two bare hosts.

    Each goes through all steps in order and runs calls.
    """
    recorders = [RecordedEvents(), RecordedEvents()]
    image = sky.Image(pip=[PURE_PACKAGE])
    with sky.MultiPool(*(pool_on(cloud.provider(), sink, image=image) for sink in recorders)) as pools:
        names = [where() >> pool for pool in pools]
        assert sorted(names) == sorted(machine.host.name for machine in cloud.machines.values())
    assert [steps(sink) for sink in recorders] == [STEPS, STEPS]


def test_two_bootstraps_of_one_image_on_one_host_share_the_work(fleet, mirror):
    """Two machines are one host and need the same environment at the same time.

    One builds it and the other waits. Both become nodes that run calls.
    """
    host = fleet.create()
    mirror.configure(host)
    recorded = RecordedEvents()
    with pool_on(_Twice(host=_particulars(host)), recorded, nodes=2, image=sky.Image(pip=[PURE_PACKAGE])) as pool:
        assert square(3) @ pool == (9, 9)
    environments = list((host.root / "root/.cache/skyward/envs").glob("*/.skyward-complete"))
    assert len(environments) == 1
    host.crash()


def test_a_debian_package_that_cannot_be_installed_is_named(cloud):
    """The error has apt's exit code and last line. The hosts cannot reach a Debian mirror."""
    error = failure(cloud, RecordedEvents(), image=sky.Image(apt=["nonexistent-package"]))
    assert (error.node, error.phase, error.exit_code) == (0, "apt", 100)
    assert "apt-get -o DPkg::Lock::Timeout=300 install" in str(error)
    assert error.output[-1] == "E: Unable to locate package nonexistent-package"


def test_a_broken_index_is_reported(cloud, mirror):
    """An index answers 503. The step that needs it fails, and the error has the address and the status.

    The same holds for the second of two nodes.
    """
    mirror.break_()
    try:
        error = failure(cloud, RecordedEvents(), nodes=2, image=sky.Image(env={"UV_HTTP_RETRIES": "0"}))
    finally:
        mirror.mend()
    assert (error.node in (0, 1), error.phase, error.exit_code) == (True, "deps", 2)
    assert "command=uv venv" in str(error)
    assert "503" in error.output[-1]


@pytest.mark.parametrize(("disk", "phase"), [("24M", "uv"), ("64M", "deps")])
def test_a_full_disk_is_reported(fleet, mirror, disk, phase):
    """There is no space for uv, or for the interpreter. The error has the node, the step, the command and the reason."""
    error = failure(Cloud(fleet, prepare=mirror.configure, disk=disk), RecordedEvents())
    assert (error.node, error.phase) == (0, phase)
    assert error.exit_code
    assert "No space left on device" in "\n".join(error.output)


def test_a_killed_script_is_reported(cloud):
    """A killed script cannot report its reason. The error has the signal and the last lines of the output."""
    error = failure(
        cloud,
        Reaction("deps", lambda instance_id: cloud.host(instance_id).run("pkill -KILL -f '^bash ./bootstrap.sh'")),
    )
    assert (error.node, error.phase, error.exit_code) == (0, "deps", 128 + signal.SIGKILL)
    assert "Killed" in error.output


def test_a_node_that_its_guard_ends_during_the_bootstrap_is_reported(fleet, mirror):
    """The node reaches its maximum lifetime during the bootstrap.

    The error has that reason, and the client does not wait for the node.
    """
    lock = f"/root/.cache/skyward/envs/{sky.Image().content_hash()}.lock"

    def prepare(host: Host) -> None:
        mirror.configure(host)
        host.run(
            f"mkdir -p {Path(lock).parent}; setsid flock {lock} sleep 60 </dev/null >/dev/null 2>&1 &"
        )  # another process holds the lock of the build and never finishes

    started = time.monotonic()
    # a busy machine needs less time than this to reach that lock
    error = failure(Cloud(fleet, prepare=prepare), RecordedEvents(), max_lifetime=10)
    assert (error.node, error.phase) == (0, "deps")
    assert "max_lifetime" in str(error)
    assert time.monotonic() - started < 50


def test_a_short_network_failure_does_not_stop_the_bootstrap(cloud):
    """No packet passes for eight seconds during the installation, then all SSH connections are closed.

    The pool opens and runs calls.
    """

    def cut(instance_id: str) -> None:
        host = cloud.host(instance_id)
        host.partition()

        def heal() -> None:
            host.heal()
            host.run("pkill -KILL -f '^sshd: root'")

        timer = threading.Timer(8, heal)
        timer.start()
        timers.append(timer)

    timers: list[threading.Timer] = []
    with pool_on(cloud.provider(), Reaction("deps", cut), lease_seconds=20) as pool:
        assert square(3) >> pool == 9
    timers[0].join()


# ── hosts that cannot reach each other ───────────────────────────────────────────────────────────────────────────────


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


class _Twice(_Lent):
    """A provider of one host, which it rents out for each request."""

    end_command: ClassVar[str] = ""
