"""Bootstrap of a bare host over SSH: all steps, all failures, and what a failure leaves.

Run as a program, with the data of a host, it is a client that opens a pool on that host. Tests kill this client.
"""

import contextlib
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, ClassVar, cast

import pytest
from pydantic import PrivateAttr

import skyward_core as sky
from skyward_core.events.events import BootstrapProgress, InstanceProvisioned, compose
from skyward_core.machines.instances import Instance
from skyward_core.machines.offers import Offer
from skyward_core.providers.base import POOL_TAG, Tags
from skyward_core.providers.hosts import Hosts
from skyward_core.transport import ssh_transport
from skyward_core.transport.ssh_connection import SSHConnection
from tests.conftest import RecordedEvents, members, wait_until
from tests.testbed import Fleet, Host
from tests.testbed.fixtures import PURE_PACKAGE, fleet, mirror  # noqa: F401 - fixtures
from tests.testbed.mirror import Mirror
from tests.testbed.network import Network
from tests.testbed.rental import Cloud, _boot, _instance  # pyright: ignore[reportPrivateUsage]

STEPS = ["uv", "deps", "skyward", "server"]
LEASE_SECONDS = 5
MIB = 1 << 20

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


@sky.compute
def square(number: int) -> int:
    return number * number


@sky.compute
def where() -> str:
    return platform.node()


@sky.compute
def raised(values: Any) -> Any:
    return values + 1


@sky.compute
def seen(name: str) -> str | None:
    return os.environ.get(name)


@sky.compute
def imported(name: str) -> str:
    return str(__import__(name).__version__)


@pytest.fixture
def cloud(fleet: Fleet, mirror: Mirror) -> Iterator[Cloud]:
    """Make a cloud for one test. Its bare machines install from the mirror."""
    cloud = Cloud(fleet, prepare=mirror.configure)
    yield cloud
    cloud.close()


def pool_on(provider: sky.Provider, recorded: Callable[..., Any], **options: Any) -> sky.ComputePool:
    return sky.ComputePool(
        **{"provider": provider, "on_event": recorded, "display": "quiet", "provision_timeout": 120, **options}
    )


def steps(recorded: RecordedEvents) -> list[str]:
    """Return the reported steps in their order. A step that is reported twice in a row counts once."""
    return [step for step, _ in groupby(event.step for event in recorded.of(BootstrapProgress))]


def tagged(host: Host) -> str:
    """Return the processes of nodes on a running host."""
    return host.run("grep -lsaz '^SKYWARD_INSTANCE_ID=' /proc/[0-9]*/environ").stdout


def kill_bootstrap(host: Host) -> None:
    """Kill only the script that prepares a host."""
    for pid in host._processes():
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"bash\0./bootstrap.sh"):
                os.kill(pid, signal.SIGKILL)


class Reaction(RecordedEvents):
    """A callback of a pool. It runs an action at the first event of a kind, or at the first report of a step."""

    def __init__(self, to: type | str, action: Callable[[str], object]) -> None:
        super().__init__()
        self._to = to
        self._action: Callable[[str], object] | None = action

    def __call__(self, event: Any) -> None:
        super().__call__(event)
        if self._action is not None and (
            isinstance(event, self._to) if isinstance(self._to, type) else getattr(event, "step", None) == self._to
        ):
            action, self._action = self._action, None
            action(event.instance_id)


# ── from bare ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.long
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


# ── failures ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def failure(cloud: Cloud, recorded: Callable[..., Any], **options: Any) -> sky.BootstrapFailed:
    """Open a pool that cannot open. Return the error after all machines of the pool have ended.

    The conftest checks that no thread and no socket is left.
    """
    launched = RecordedEvents()
    with (
        pytest.raises(sky.BootstrapFailed) as caught,
        pool_on(cloud.provider(), compose(launched, recorded), **options),
    ):
        pass
    assert launched.of(InstanceProvisioned) != []
    assert cloud.machines == {}  # a terminated host has been ended
    assert cloud.requests[-1] == "instances"
    return caught.value


def test_a_package_that_does_not_exist_is_named(cloud):
    """The error has the step, the exit code, the uv command and its output, for the node that failed first."""
    error = failure(cloud, RecordedEvents(), image=sky.Image(pip=["skyward-no-such-package==9"]))
    assert (error.node, error.phase, error.exit_code) == (0, "deps", 1)
    assert "command=uv pip install" in str(error)
    assert "skyward-no-such-package was not found" in error.output[-1]
    assert error.output[-1] in str(error)


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


def test_a_machine_that_dies_during_the_bootstrap_is_reported_long_before_the_deadline(cloud, monkeypatch):
    """The machine stops answering during a step, and the provider does not list it any more.

    The pool fails within seconds, for any provision_timeout.
    """
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


def test_a_host_that_refuses_our_key_is_reported(cloud, monkeypatch):
    """When the time for cloud-init is over, a refusal is final: CredentialsError names the host and has advice.

    The machine is terminated.
    """
    monkeypatch.setattr(ssh_transport, "AUTH_GRACE_SECONDS", 1.0)

    def lock_out(instance_id: str) -> None:
        (cloud.host(instance_id).root / "root/.ssh/authorized_keys").write_text("")

    with (
        pytest.raises(sky.CredentialsError, match="refuses our keys"),
        pool_on(cloud.provider(), Reaction(InstanceProvisioned, lock_out)),
    ):
        pass
    assert cloud.machines == {}


def test_another_host_key_is_refused(fleet, mirror):
    """A host shows another key than the one of its launch.

    The client sends it nothing and raises HostKeyChanged. The machine is terminated.
    """
    cloud = Cloud(fleet, prepare=lambda host: (mirror.configure(host), host.change_host_key()))
    recorded = RecordedEvents()
    with pytest.raises(sky.HostKeyChanged), pool_on(cloud.provider(), recorded):
        pass
    assert steps(recorded) == []
    assert cloud.machines == {}


# ── a dead client, and a broken network ──────────────────────────────────────────────────────────────────────────────


def test_the_guard_ends_a_machine_after_its_client_was_killed(fleet, mirror):
    """The client gets SIGKILL while a host installs packages.

    The host turns itself off within its lease plus ten seconds.
    """
    host = fleet.create()
    mirror.configure(host)
    argv = [sys.executable, "-m", "tests.provisioning.test_bootstrap_hosts", *_particulars(host)]
    client = subprocess.Popen(argv, cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, text=True)
    assert client.stdout is not None
    try:
        for line in client.stdout:
            if line == "deps\n":
                break
        else:
            pytest.fail("the client has ended before the host installed anything")
        time_of_death = time.monotonic()
    finally:
        client.kill()
        client.wait(60)
        client.stdout.close()
    assert host.is_up
    wait_until(lambda: not host.is_up, "the host to turn itself off", seconds=LEASE_SECONDS + 10)
    assert time.monotonic() - time_of_death > 1


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


@pytest.mark.long
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


# ── TLS, and the variables of an image ───────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def rented_pool(fleet: Fleet, mirror: Mirror) -> Iterator[sky.ComputePool]:
    """Yield a pool of one host that has no configured index.

    Only the image sets the index, and another index for one package.
    """
    env = {
        "UV_DEFAULT_INDEX": f"{mirror.url}/simple/",
        "UV_PYTHON_DOWNLOADS_JSON_URL": mirror.environment["UV_PYTHON_DOWNLOADS_JSON_URL"],
        "GREETING": "it's $HOME",
    }
    image = sky.Image(
        pip=[PURE_PACKAGE], pip_indexes={f"{mirror.url}/simple": [PURE_PACKAGE.partition("==")[0]]}, env=env
    )
    with pool_on(Cloud(fleet).provider(), RecordedEvents(), image=image) as pool:
        pool.dask_client()  # otherwise the thread would belong to the first test that needs it
        yield pool


def test_the_image_sets_indexes_and_variables(rented_pool):
    """uv uses the indexes that the image names. Calls get the variables of the image literally."""
    assert imported("six") >> rented_pool == PURE_PACKAGE.partition("==")[2]
    assert seen("GREETING") >> rented_pool == "it's $HOME"


STRANGER = """\
import socket, ssl, sys
host, port, certificate = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
if certificate:
    context.load_cert_chain(*certificate)
with socket.create_connection((host, port), timeout=10) as plain:
    print("connected")
    with context.wrap_socket(plain) as wire:
        print("answered", len(wire.recv(1)))
"""
OWN_CERTIFICATE = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=skyward -keyout /root/key -out /root/certificate -days 1"


def test_clients_without_the_pools_certificate_are_refused(rented_pool, fleet):
    """Another host connects by TLS without a certificate, or with its own certificate.

    Scheduler and workers answer nothing. With the pool's certificate they answer.
    """
    stranger = fleet.create()
    made = stranger.run(OWN_CERTIFICATE)
    assert made.returncode == 0, made.stderr
    client = rented_pool.dask_client()
    for name, text in (
        ("pool-certificate", client.security.tls_client_cert),
        ("pool-key", client.security.tls_client_key),
    ):
        stranger.run(f"cat >/root/{name}", text=text)
    for address in [rented_pool.lease.scheduler, *members(client)]:
        host, _, port = address.removeprefix("tls://").rpartition(":")
        heard = [
            stranger.run(f"python3 -c '{STRANGER}' {host} {port} {certificate}").stdout
            for certificate in ("", "/root/certificate /root/key", "/root/pool-certificate /root/pool-key")
        ]
        assert heard == ["connected\n", "connected\n", "connected\nanswered 1\n"]
    stranger.crash()
    assert square(3) >> rented_pool == 9


# ── a provider for a client that a test kills ────────────────────────────────────────────────────────────────────────


def _particulars(host: Host) -> list[str]:
    """Return the data of a host that another process needs."""
    return [str(host.network.number), str(host.index), str(host.directory), str(host.key_path), str(host.pid)]


class _Lent(sky.Provider):
    """A provider of one host that another process has created."""

    name: ClassVar[str] = "lent"
    end_command: ClassVar[str] = "poweroff"

    host: tuple[str, ...]
    _rented: list[Instance] = PrivateAttr(default_factory=list)

    def offers(self, want: sky.Requirements) -> list[Offer]:
        return [
            Offer(
                provider=self.name,
                instance_type="lent",
                region="testbed",
                price_per_hour=0,
                on_demand_price_per_hour=0,
                vcpus=2,
                memory_gb=4,
            )
        ]

    def launch(self, offer: Offer, count: int, tags: Tags, startup: str) -> list[Instance]:
        number, index, directory, key, pid = self.host
        host = Host(
            Network(int(number)),
            int(index),
            f"host{index}",
            Path(directory),
            Path(key),
            cast("subprocess.Popen[str]", None),
            int(pid),
            is_isolated=False,
        )
        instances = [
            _instance(offer, f"lent-{os.urandom(6).hex()}", rank, tags[POOL_TAG], host) for rank in range(count)
        ]
        self._rented.extend(instances)
        for instance in instances:
            _boot(host, instance, startup)
        return instances

    def instances(self, pool_id: str | None = None) -> list[Instance]:
        return list(self._rented)

    def terminate(self, ids: Sequence[str]) -> None:
        self._rented.clear()


class _Twice(_Lent):
    """A provider of one host, which it rents out for each request."""

    end_command: ClassVar[str] = ""


def main() -> None:
    """Open a pool on the host that the arguments describe, and print its events."""

    def tell(event: Any) -> None:
        if isinstance(event, BootstrapProgress):
            print(event.step, flush=True)

    with pool_on(_Lent(host=tuple(sys.argv[1:])), tell, lease_seconds=LEASE_SECONDS):
        time.sleep(60)


if __name__ == "__main__":
    main()
