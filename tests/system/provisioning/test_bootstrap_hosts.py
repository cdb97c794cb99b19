"""Bootstrap of a bare host over SSH: all steps, all failures, and what a failure leaves.

Run as a program, with the data of a host, it is a client that opens a pool on that host. Tests kill this client.
"""

import os
import subprocess
import sys
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
from skyward_core.transport import ssh_transport
from skyward_core.transport.ssh_connection import SSHConnection
from tests.conftest import RecordedEvents, members, wait_until
from tests.testbed import Fleet, Host
from tests.testbed.fixtures import PURE_PACKAGE, fleet, mirror  # noqa: F401 - fixtures
from tests.testbed.mirror import Mirror
from tests.testbed.network import Network
from tests.testbed.rental import Cloud, _boot, _instance  # pyright: ignore[reportPrivateUsage]

LEASE_SECONDS = 5

pytestmark = [pytest.mark.timeout(240)]


@sky.compute
def square(number: int) -> int:
    return number * number


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
    argv = [sys.executable, "-m", "tests.system.provisioning.test_bootstrap_hosts", *_particulars(host)]
    client = subprocess.Popen(argv, cwd=Path(__file__).parents[3], stdout=subprocess.PIPE, text=True)
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


def main() -> None:
    """Open a pool on the host that the arguments describe, and print its events."""

    def tell(event: Any) -> None:
        if isinstance(event, BootstrapProgress):
            print(event.step, flush=True)

    with pool_on(_Lent(host=tuple(sys.argv[1:])), tell, lease_seconds=LEASE_SECONDS):
        time.sleep(60)


if __name__ == "__main__":
    main()
