"""Boot scripts of rented machines, in real shells and on real hosts: login, identity and the machine's end.

The handling of cloud-config was read in cloud-init's source (cloudinit/config/cc_ssh.py, cloudinit/util.py: shellify).
Images with cloud-init, systemd and a network for installations are not available here. So two things are not tested:
that sshd starts before the host key is set on a cloud's image, and `systemctl restart` and `apt-get`.
"""

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from skyward_core.machines.instances import Instance, InstanceState
from skyward_core.providers import userdata
from skyward_core.providers.base import POOL_TAG
from skyward_core.providers.ssh_keys import HostKey, Key, host_key, our_key
from skyward_core.providers.tagging import from_word
from skyward_core.provisioning.guard import guard_script
from skyward_core.transport.ssh_transport import SSHConnections
from tests.conftest import RecordedEvents, wait_until
from tests.system.providers.test_userdata import (  # noqa: F401 - fixtures
    GUARD,
    LAUNCH,
    TAGS,
    _home,
    bring_up,
    endpoint,
    host,
    inside,
    key,
    machine,
)
from tests.testbed import Host
from tests.testbed.fixtures import fleet  # noqa: F401 - a fixture

AWS_BYTES = 16 * 1024


def test_cloud_config_fits_every_cloud(tmp_path: Path) -> None:
    """It is below AWS's 16 KiB, the smallest limit, before base64. It has the real guard, all tags and an RSA key."""
    path = tmp_path / "rsa"
    subprocess.run(["ssh-keygen", "-q", "-t", "rsa", "-b", "4096", "-N", "", "-f", str(path)], check=True)
    key = our_key(str(path))
    boot = userdata.boot_script(GUARD, TAGS, "cat /var/lib/cloud/data/instance-id")
    size = len(userdata.cloud_config(boot, key, host_key(LAUNCH, key)).encode())
    print(
        f"cloud-config: {size} bytes; container script, packed: {len(userdata.packed(userdata.container_script(boot, key, host_key(LAUNCH, key))))}"
    )
    assert size < 0.9 * AWS_BYTES


@pytest.fixture
def transport(key: Key) -> Iterator[Callable[..., Any]]:
    """Return the transport to a machine, with the cloud's id and the directory of the machine's own id."""
    made: list[SSHConnections] = []
    transports: list[Any] = []

    def transport(machine: Host, called: str, lease_seconds: int = 60) -> Any:
        instance = Instance(
            id="the-clouds-id",
            provider="acme",
            pool_id=TAGS[POOL_TAG],
            rank=0,
            state=InstanceState.RUNNING,
            region="here",
            instance_type="any",
            directory=userdata.directory_of(called),
            endpoint=endpoint(machine, key),
        )
        made.append(SSHConnections(lease_seconds, RecordedEvents(), lambda: False, lambda: None))
        transports.append(made[-1].transport(instance))
        return transports[-1]

    yield transport
    for way in transports:
        way.close()
    for wires in made:
        wires.close()


def test_a_machine_with_another_id_than_the_clouds_starts_and_ends(
    machine: Host, key: Key, host: HostKey, transport: Callable[..., Any]
) -> None:
    """The node has the id of its guard, not the cloud's, and its tags."""
    end = "for place in /proc/[0-9]*; do tr '\\0' ' ' <\"$place/cmdline\"; echo; done >/root/alive 2>/dev/null; mv /root/alive /root/ended; sleep 100"
    bring_up(
        machine,
        userdata.script(
            userdata.boot_script(guard_script(8, None, userdata.END_COMMAND), TAGS, "echo m-1", end), key, host
        ),
    )
    way = transport(machine, "m-1", lease_seconds=8)
    way.start(
        'echo "$SKYWARD_INSTANCE_ID $SKYWARD_TAGS"\nsleep 4711 &\nwait\n', timeout_seconds=30, emit=RecordedEvents()
    )
    lines: list[str] = []

    def first() -> bool:
        lines.extend(line for line in way.new_lines() if line.startswith("m-1 "))
        return bool(lines)

    wait_until(first, "the node's first word")
    assert from_word(lines[0].partition(" ")[2], TAGS[POOL_TAG], 0) == TAGS
    log = inside(machine, userdata.directory_of("m-1")) / "log"
    way.close()
    wait_until(inside(machine, "/root/ended").exists, "the end script")
    alive = inside(machine, "/root/ended").read_text()
    assert "sleep 4711" not in alive
    assert "/root/.cache/skyward/end" in alive
    assert not log.parent.exists()
