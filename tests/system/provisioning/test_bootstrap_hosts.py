"""Bootstrap of bare machines of a cloud over SSH, and who may connect to the nodes."""

import os
from collections.abc import Callable, Iterator
from itertools import groupby
from typing import Any

import pytest

import skyward_core as sky
from skyward_core.events.events import BootstrapProgress, InstanceProvisioned
from tests.conftest import RecordedEvents, members
from tests.testbed import Fleet
from tests.testbed.fixtures import PURE_PACKAGE, fleet, mirror  # noqa: F401 - fixtures
from tests.testbed.mirror import Mirror
from tests.testbed.rental import Cloud
from tests.wheels import write_wheel

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


def failure(cloud: Cloud, recorded: RecordedEvents | None = None, **options: Any) -> sky.BootstrapFailed:
    """Open a pool that cannot open. Return the error after all machines of the pool have ended.

    The conftest checks that no thread and no socket is left.
    """
    recorded = recorded or RecordedEvents()
    with pytest.raises(sky.BootstrapFailed) as caught, pool_on(cloud.provider(), recorded, **options):
        pass
    assert recorded.of(InstanceProvisioned) != []
    assert cloud.machines == {}  # a terminated host has been ended
    assert cloud.requests[-1] == "instances"
    return caught.value


def test_a_package_that_does_not_exist_is_named(cloud):
    """The error has the step, the exit code, the uv command and its output, for the node that failed first."""
    error = failure(cloud, image=sky.Image(pip=["skyward-no-such-package==9"]))
    assert (error.node, error.phase, error.exit_code) == (0, "deps", 1)
    assert "command=uv pip install" in str(error)
    assert "skyward-no-such-package was not found" in error.output[-1]
    assert error.output[-1] in str(error)


# ── TLS, and the variables of an image ───────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def rented_pool(fleet: Fleet, mirror: Mirror, tmp_path_factory: pytest.TempPathFactory) -> Iterator[sky.ComputePool]:
    """Yield a pool of one host that has no configured index.

    Only the image sets the index, and another index for one package.
    """
    env = {
        "UV_DEFAULT_INDEX": f"{mirror.url}/simple/",
        "UV_PYTHON_DOWNLOADS_JSON_URL": mirror.environment["UV_PYTHON_DOWNLOADS_JSON_URL"],
        "GREETING": "it's $HOME",
    }
    wheel = write_wheel(tmp_path_factory.mktemp("built files"), found="of this machine")
    image = sky.Image(
        pip=[PURE_PACKAGE, str(wheel)], pip_indexes={f"{mirror.url}/simple": [PURE_PACKAGE.partition("==")[0]]}, env=env
    )
    with pool_on(Cloud(fleet).provider(), RecordedEvents(), image=image) as pool:
        pool.dask_client()  # otherwise the thread would belong to the first test that needs it
        yield pool


def test_a_wheel_of_this_machine_is_uploaded(rented_pool):
    assert imported("own_thing") >> rented_pool == "of this machine"


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
OWN_CERTIFICATE = (
    "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=skyward"
    " -keyout /root/key -out /root/certificate -days 1"
)


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
