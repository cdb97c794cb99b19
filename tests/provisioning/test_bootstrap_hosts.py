"""From a bare host to a node, over SSH: the way there, everything that can stop it, and what is left when it was
stopped.

Run as a program, with a host's particulars, it is a client that opens a pool on that host, for tests that kill it.
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
from tests.conftest import Told, members, wait_until
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
    """A cloud of its own for a test, whose bare machines install from the mirror."""
    cloud = Cloud(fleet, prepare=mirror.configure)
    yield cloud
    cloud.close()


def pool_on(provider: sky.Provider, told: Callable[..., Any], **wishes: Any) -> sky.ComputePool:
    return sky.ComputePool(
        **{"provider": provider, "on_event": told, "display": "quiet", "provision_timeout": 120, **wishes}
    )


def steps(told: Told) -> list[str]:
    """The steps that were told, in their order; one that was told twice in a row counts once."""
    return [step for step, _ in groupby(event.step for event in told.of(BootstrapProgress))]


def tagged(host: Host) -> str:
    """The processes of nodes on a host that is up."""
    return host.run("grep -lsaz '^SKYWARD_INSTANCE_ID=' /proc/[0-9]*/environ").stdout


def kill_bootstrap(host: Host) -> None:
    """Kill the script that prepares a host, and nothing else."""
    for pid in host._processes():
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"bash\0./bootstrap.sh"):
                os.kill(pid, signal.SIGKILL)


class Reaction(Told):
    """What a pool tells; does something the first time that it tells an event of a kind, or a step."""

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


def test_a_killed_build_is_built_anew_and_the_next_pool_finds_it_whole(fleet, mirror):
    """On a host of ours: a script killed in the middle leaves half an environment, the next pool builds it anew, and
    one more asks the mirror for nothing.
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
        kill_bootstrap(host)  # from here: a login takes as long as the other half

    with pytest.raises(sky.BootstrapFailed) as caught, pool_on(provider, Reaction("deps", kill), image=image):
        pass
    assert (caught.value.node, caught.value.phase, caught.value.exit_code) == (0, "deps", 128 + signal.SIGKILL)
    assert tagged(host) == ""
    assert list(environments.glob("*/pyvenv.cfg")) != []
    assert list(environments.glob("*/.skyward-complete")) == []

    told = Told()
    with pool_on(provider, told, image=image) as pool:
        assert (where() >> pool, imported("six") >> pool) == (host.name, PURE_PACKAGE.partition("==")[2])
    assert steps(told)[-3:] == STEPS[1:]
    assert tagged(host) == ""

    told, asked = Told(), mirror.requests
    started = time.monotonic()
    with pool_on(provider, told, image=image) as pool:
        assert square(3) >> pool == 9
        seconds = time.monotonic() - started
    assert steps(told) == STEPS[2:]
    assert mirror.requests == asked
    assert seconds < 20  # three or four on an idle machine
    assert tagged(host) == ""
    host.crash()


def test_two_pools_at_once_do_not_disturb_each_other(cloud):
    """Two pools from the same image, opened at the same time on two bare hosts, each go through all steps in order and
    compute.
    """
    tolds = [Told(), Told()]
    image = sky.Image(pip=[PURE_PACKAGE])
    with sky.MultiPool(*(pool_on(cloud.provider(), told, image=image) for told in tolds)) as pools:
        names = [where() >> pool for pool in pools]
        assert sorted(names) == sorted(machine.host.name for machine in cloud.machines.values())
    assert [steps(told) for told in tolds] == [STEPS, STEPS]


def test_two_bootstraps_of_one_image_on_one_host_share_the_work(fleet, mirror):
    """Two machines that are one host: both want the same environment at once; one builds it, the other waits, and both
    are nodes that compute.
    """
    host = fleet.create()
    mirror.configure(host)
    told = Told()
    with pool_on(_Twice(host=_particulars(host)), told, nodes=2, image=sky.Image(pip=[PURE_PACKAGE])) as pool:
        assert square(3) @ pool == (9, 9)
    environments = list((host.root / "root/.cache/skyward/envs").glob("*/.skyward-complete"))
    assert len(environments) == 1
    host.crash()


# ── what can stop it ─────────────────────────────────────────────────────────────────────────────────────────────────


def failure(cloud: Cloud, told: Callable[..., Any], **wishes: Any) -> sky.BootstrapFailed:
    """Open a pool that cannot be opened; return why, once every machine of it is known to be down.

    That no thread or socket is left is for conftest.
    """
    launched = Told()
    with pytest.raises(sky.BootstrapFailed) as caught, pool_on(cloud.provider(), compose(launched, told), **wishes):
        pass
    assert launched.of(InstanceProvisioned) != []
    assert cloud.machines == {}  # a host that was given back has been ended
    assert cloud.requests[-1] == "instances"
    return caught.value


def test_a_package_that_does_not_exist_is_named(cloud):
    """The step, the exit code and the command of uv are told, and what it said, of the node that failed first."""
    error = failure(cloud, Told(), image=sky.Image(pip=["skyward-no-such-package==9"]))
    assert (error.node, error.phase, error.exit_code) == (0, "deps", 1)
    assert "command=uv pip install" in str(error)
    assert "skyward-no-such-package was not found" in error.output[-1]
    assert error.output[-1] in str(error)


def test_a_debian_package_that_cannot_be_had_is_named(cloud):
    """apt's exit code and its last line are told; the hosts have no way to a Debian mirror."""
    error = failure(cloud, Told(), image=sky.Image(apt=["nonexistent-package"]))
    assert (error.node, error.phase, error.exit_code) == (0, "apt", 100)
    assert "apt-get -o DPkg::Lock::Timeout=300 install" in str(error)
    assert error.output[-1] == "E: Unable to locate package nonexistent-package"


def test_an_index_that_is_broken_is_told(cloud, mirror):
    """An index that answers 503 fails the step that needs it, with the address and the status; also on the other of two
    nodes.
    """
    mirror.break_()
    try:
        error = failure(cloud, Told(), nodes=2, image=sky.Image(env={"UV_HTTP_RETRIES": "0"}))
    finally:
        mirror.mend()
    assert (error.node in (0, 1), error.phase, error.exit_code) == (True, "deps", 2)
    assert "command=uv venv" in str(error)
    assert "503" in error.output[-1]


@pytest.mark.parametrize(("disk", "phase"), [("24M", "uv"), ("64M", "deps")])
def test_a_disk_that_is_too_small_is_told(fleet, mirror, disk, phase):
    """No room for uv itself, or for the interpreter: which node, which step and which command is told, and that there
    is no space.
    """
    error = failure(Cloud(fleet, prepare=mirror.configure, disk=disk), Told())
    assert (error.node, error.phase) == (0, phase)
    assert error.exit_code
    assert "No space left on device" in "\n".join(error.output)


def test_a_machine_that_dies_meanwhile_is_told_long_before_the_deadline(cloud, monkeypatch):
    """A machine that falls silent in the middle of a step and that the provider lists no more fails the pool within
    seconds, whatever provision_timeout is.
    """
    # silence is noticed after 1.5 s, not 15
    monkeypatch.setitem(SSHConnection.__init__.__kwdefaults__, "keepalive_seconds", 0.5)

    def die(instance_id: str) -> None:
        settings = cloud.host(instance_id).root / f"root/.cache/skyward/instances/{instance_id}/settings.json"
        wait_until(settings.exists, "the head to have been told what it is")
        cloud.preempt(instance_id)

    started = time.monotonic()
    error = failure(cloud, Reaction("deps", die), provision_timeout=600)
    assert (error.node, error.phase, error.exit_code) == (0, "deps", None)
    assert "gone" in str(error)
    assert time.monotonic() - started < 100


def test_a_script_that_was_killed_is_told(cloud):
    """The end of a script that could not say why it failed is told with its signal and the last lines before it."""
    error = failure(
        cloud,
        Reaction("deps", lambda instance_id: cloud.host(instance_id).run("pkill -KILL -f '^bash ./bootstrap.sh'")),
    )
    assert (error.node, error.phase, error.exit_code) == (0, "deps", 128 + signal.SIGKILL)
    assert "Killed" in error.output


def test_a_node_that_its_guard_ends_meanwhile_is_told(fleet, mirror):
    """A node that ends by itself during the bootstrap, here because it lives as long as it may, says why; it is not
    waited for.
    """
    lock = f"/root/.cache/skyward/envs/{sky.Image().content_hash()}.lock"

    def prepare(host: Host) -> None:
        mirror.configure(host)
        host.run(
            f"mkdir -p {Path(lock).parent}; setsid flock {lock} sleep 60 </dev/null >/dev/null 2>&1 &"
        )  # somebody else builds, and does not come to an end

    started = time.monotonic()
    # longer than a busy machine takes to come to that lock
    error = failure(Cloud(fleet, prepare=prepare), Told(), max_lifetime=6)
    assert (error.node, error.phase) == (0, "deps")
    assert "max_lifetime" in str(error)
    assert time.monotonic() - started < 50


def test_a_host_that_refuses_our_key_is_told(cloud, monkeypatch):
    """A refusal is final once cloud-init had its time: CredentialsError names the host and says what to look at, and
    the machine is given back.
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
    """A host that shows another key than the one it was launched with gets nothing from us: HostKeyChanged, and the
    machine is given back.
    """
    cloud = Cloud(fleet, prepare=lambda host: (mirror.configure(host), host.change_host_key()))
    told = Told()
    with pytest.raises(sky.HostKeyChanged), pool_on(cloud.provider(), told):
        pass
    assert steps(told) == []
    assert cloud.machines == {}


# ── when the client is gone, or its wire ─────────────────────────────────────────────────────────────────────────────


def test_the_guard_ends_a_machine_whose_client_was_killed_meanwhile(fleet, mirror):
    """SIGKILL for the client while a host installs: the host turns itself off within its lease and ten seconds more."""
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


def test_a_wire_that_is_cut_for_a_while_does_not_stop_it(cloud):
    """Eight seconds without a packet in the middle of the installation, and all SSH connections ended after that: the
    pool opens and computes.
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


# ── hosts that do not see each other ─────────────────────────────────────────────────────────────────────────────────


def test_hosts_that_do_not_see_each_other_are_one_pool(fleet, mirror):
    """Three hosts that reach nobody but us: broadcast, map, large arrays and Dask's own tasks, which move data between
    workers, all work.
    """
    np = pytest.importorskip("numpy")
    cloud = Cloud(fleet, prepare=mirror.configure, isolated=True)
    with pool_on(cloud.provider(), Told(), nodes=3, image=sky.Image(pip=["numpy"])) as pool:
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


# ── what a pool keeps to itself, and what it is given ────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def rented_pool(fleet: Fleet, mirror: Mirror) -> Iterator[sky.ComputePool]:
    """One host that knows of no index; the image alone says where to install from, and which package from an index of
    its own.
    """
    env = {
        "UV_DEFAULT_INDEX": f"{mirror.url}/simple/",
        "UV_PYTHON_DOWNLOADS_JSON_URL": mirror.environment["UV_PYTHON_DOWNLOADS_JSON_URL"],
        "GREETING": "it's $HOME",
    }
    image = sky.Image(
        pip=[PURE_PACKAGE], pip_indexes={f"{mirror.url}/simple": [PURE_PACKAGE.partition("==")[0]]}, env=env
    )
    with pool_on(Cloud(fleet).provider(), Told(), image=image) as pool:
        pool.dask_client()  # its thread is the pool's, and not that of the first test which asks for it
        yield pool


def test_what_the_image_says_reaches_the_installer_and_the_calls(rented_pool):
    """uv asks the indexes that the image names; calls see its variables, literally."""
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


def test_strangers_are_refused_by_the_scheduler_and_the_workers(rented_pool, fleet):
    """From another host, TLS without a certificate, or with one of its own making, gets no word from scheduler or
    workers; with the pool's own it does.
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


# ── a provider for a client that is killed ───────────────────────────────────────────────────────────────────────────


def _particulars(host: Host) -> list[str]:
    """What another process must know of a host."""
    return [str(host.network.number), str(host.index), str(host.directory), str(host.key_path), str(host.pid)]


class _Lent(sky.Provider):
    """One host, made by another process, that is rented out."""

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
    """One host, rented out as often as is asked for."""

    end_command: ClassVar[str] = ""


def main() -> None:
    """Open a pool on the host whose particulars are the arguments, and say what it tells."""

    def tell(event: Any) -> None:
        if isinstance(event, BootstrapProgress):
            print(event.step, flush=True)

    with pool_on(_Lent(host=tuple(sys.argv[1:])), tell, lease_seconds=LEASE_SECONDS):
        time.sleep(60)


if __name__ == "__main__":
    main()
