"""The test bed as a cloud: its provider keeps the contract of `Provider` with real machines, and its faults are those
of clouds.
"""

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from skyward_core import HostKeyChanged, Instance, InstanceState, NoCapacity, PoolSpec, Requirements
from skyward_core.transport.ssh_connection import SSHConnection
from tests.conftest import wait_until
from tests.testbed import Fleet
from tests.testbed.fixtures import fleet  # noqa: F401 - a fixture
from tests.testbed.rental import Cloud, Rental

STARTUP = """\
env | grep -e ^SKYWARD -e ^HOME -e ^SSH | sort
id -un
touch started
exec sleep 600
"""


@pytest.fixture
def cloud(fleet: Fleet) -> Iterator[Cloud]:
    cloud = Cloud(fleet, disk="32M")
    yield cloud
    cloud.close()


@pytest.fixture
def provider(cloud: Cloud) -> Rental:
    return cloud.provider()


def launch(
    provider: Rental, count: int = 1, pool_id: str = "sky-one", first_rank: int = 0, startup: str = STARTUP
) -> list[Instance]:
    offer = provider.offers(Requirements())[0]
    return provider.launch(offer, count, {"skyward-pool": pool_id, "skyward-rank": str(first_rank)}, startup)


def text_of(log: Path) -> str:
    """Return the output of a startup script; the script creates the file itself, some time after its launch."""
    try:
        return log.read_text()
    except FileNotFoundError:
        return ""


# ── the four methods ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_machines_are_rented_listed_and_terminated(provider, cloud):
    """Machines are listed for their own pool only, with all values of their launch. Terminated ones are gone; a second
    termination is allowed.
    """
    ours, theirs = launch(provider, 2, first_rank=3), launch(provider, 1, pool_id="sky-on")
    assert provider.instances("sky-one") == ours
    assert provider.instances("sky-on") == theirs
    assert [(instance.rank, instance.state, instance.price_per_hour, instance.is_spot) for instance in ours] == [
        (3, InstanceState.RUNNING, 3.6, False),
        (4, InstanceState.RUNNING, 3.6, False),
    ]
    assert len({instance.ip for instance in (*ours, *theirs)}) == 3
    hosts = [cloud.host(instance.id) for instance in ours]
    provider.terminate([ours[0].id, "rental-never"])
    assert [host.is_up for host in hosts] == [False, True]
    assert provider.instances("sky-one") == ours[1:]
    wait_until(
        lambda: not Path(f"/sys/class/net/{hosts[0].network.port(hosts[0].index)}").exists(),
        "the wire of a terminated host to go",
    )
    provider.terminate([instance.id for instance in ours])
    assert provider.instances("sky-one") == []
    assert provider.instances("sky-on") == theirs


def test_all_pools_are_listed_with_their_tags(provider, cloud):
    """Without a pool all machines are listed. Each has the tags of its launch with its own rank, for every provider
    object of this cloud.
    """
    tags = {"skyward-owner": "Jo Doe@box", "skyward-expires": "1790003600"}
    (offer,) = provider.offers(Requirements())
    one = provider.launch(offer, 2, {"skyward-pool": "sky-one", "skyward-rank": "3", **tags}, "")
    other = launch(provider, 1, pool_id="sky-other")
    assert [instance.tags for instance in one] == [
        {"skyward-pool": "sky-one", "skyward-rank": rank, **tags} for rank in ("3", "4")
    ]
    assert cloud.provider(price_per_hour=1.0).instances() == [*one, *other]
    provider.terminate([one[0].id])
    assert provider.instances() == [one[1], *other]


def test_the_startup_script_is_the_machines_own(provider):
    """It runs as root in the instance's directory with its four variables and none of a login. Its log and host key are
    where the instance says.
    """
    (instance,) = launch(provider, first_rank=7)
    with SSHConnection(instance.endpoint).connect(30) as connection:
        wait_until(lambda: connection.run(f"test -e {instance.directory}/started").exit_code == 0, "the startup script")
        assert connection.run(f"cat {instance.directory}/log").output.splitlines() == [
            "HOME=/root",
            f"SKYWARD_INSTANCE_DIRECTORY={instance.directory}",
            f"SKYWARD_INSTANCE_ID={instance.id}",
            "SKYWARD_POOL_ID=sky-one",
            "SKYWARD_RANK=7",
            "root",
        ]
        wait_until(
            lambda: connection.run("pgrep -xc sleep").output.strip() == "1", "the script to become its last command"
        )
    assert instance.directory == f"/root/.cache/skyward/instances/{instance.id}"


def test_the_host_key_of_a_machine_is_known_at_launch(provider, cloud):
    """The endpoint has the key of its own machine: another machine at its address is refused at the first login."""
    (instance,) = launch(provider)
    cloud.host(instance.id).change_host_key()
    with SSHConnection(instance.endpoint) as connection, pytest.raises(HostKeyChanged):
        connection.connect(30)


def test_the_first_line_of_the_script_chooses_its_interpreter(provider, cloud):
    """The interpreter that a script names runs it, as with cloud-init."""
    (instance,) = launch(provider, startup="#!/bin/bash\necho ${BASH_VERSION:+bash}\n")
    log = cloud.host(instance.id).root / instance.directory[1:] / "log"
    wait_until(lambda: text_of(log) == "bash\n", "the startup script")


def test_a_machine_that_powers_itself_off_is_gone(provider, cloud):
    """The end command, run inside, ends the machine: it is not listed any more, and may still be terminated."""
    stays, goes = launch(provider, 2)
    assert provider.instances("sky-one") == [stays, goes]
    cloud.host(goes.id).run(provider.end_command)
    wait_until(lambda: provider.instances("sky-one") == [stays], "the machine to be off")
    provider.terminate([goes.id])


def test_spot_machines_cost_less(cloud):
    """If spot machines are sold, they are a separate offer, and their instances say that they are spot."""
    provider = cloud.provider(spot_is_sold=True, price_per_hour=3.0)
    _, spot = provider.offers(Requirements())
    (instance,) = provider.launch(spot, 1, {"skyward-pool": "sky-one", "skyward-rank": "0"}, "")
    assert (instance.is_spot, instance.price_per_hour, instance.on_demand_price_per_hour) == (True, 1.0, 3.0)


def test_machines_are_prepared_before_they_start(fleet):
    """The files of the machine image exist when the startup script runs."""
    cloud = Cloud(fleet, prepare=lambda host: (host.root / "etc/image").write_text("prepared\n"), disk="32M")
    (instance,) = launch(cloud.provider(), startup="cat /etc/image")
    log = cloud.host(instance.id).root / instance.directory[1:] / "log"
    wait_until(lambda: text_of(log) == "prepared\n", "the startup script")
    cloud.close()


def test_the_provider_is_a_value(provider, cloud):
    """It is pickled in a spec and stays equal, with its cloud; its JSON has its settings and no cloud."""
    cheap = cloud.provider(price_per_hour=0.5)
    assert PoolSpec(provider=cheap).provider is cheap
    assert json.loads(json.dumps(cheap.to_json())) == {"name": "rental", "price_per_hour": 0.5}
    assert provider.to_json() == {"name": "rental"}
    assert cheap != provider == cloud.provider()


# ── faults of clouds ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_preempted_machine_does_not_answer_and_is_not_listed(provider, cloud):
    """A preempted machine is down and not listed. Until the cloud has noticed the preemption, it is listed
    as running.
    """
    noticed, unnoticed = launch(provider, 2)
    cloud.preempt(noticed.id)
    cloud.preempt(unnoticed.id, unnoticed_seconds=3600)
    assert not cloud.host(noticed.id).is_up
    assert not cloud.host(unnoticed.id).is_up
    assert provider.instances("sky-one") == [unnoticed]
    provider.terminate([noticed.id, unnoticed.id])
    assert provider.instances("sky-one") == []


def test_a_launch_is_limited_by_the_capacity(provider, cloud):
    """If the capacity is smaller than the request, that many machines are launched; if it is zero, NoCapacity is
    raised. A terminated machine frees capacity.
    """
    cloud.capacity = 3
    assert len(launch(provider, 2)) == 2
    (last,) = launch(provider, 2)
    with pytest.raises(NoCapacity):
        launch(provider, 1)
    provider.terminate([last.id])
    assert len(launch(provider, 5)) == 1
    assert len(provider.instances("sky-one")) == 3


def test_launches_at_once_do_not_exceed_the_capacity(provider, cloud):
    """However many launches run at once, the number of machines equals the capacity."""
    cloud.capacity = 4
    with ThreadPoolExecutor(3) as threads:
        launched = list(threads.map(lambda number: _count(provider, f"sky-{number}"), range(3)))
    assert sorted(launched) == [0, 2, 2]
    assert len(cloud.machines) == 4


def _count(provider: Rental, pool_id: str) -> int:
    try:
        return len(launch(provider, 2, pool_id))
    except NoCapacity:
        return 0


def test_an_outage_fails_every_verb(provider, cloud):
    """During an outage every method raises, nothing is launched or ended, and the machines stay up."""
    (instance,) = launch(provider)
    offer = provider.offers(Requirements())[0]
    cloud.outage = True
    for verb in (
        lambda: provider.offers(Requirements()),
        lambda: provider.launch(offer, 1, {"skyward-pool": "sky-one", "skyward-rank": "1"}, ""),
        lambda: provider.instances("sky-one"),
        lambda: provider.terminate([instance.id]),
    ):
        with pytest.raises(ConnectionError, match="503"):
            verb()
    cloud.outage = False
    assert provider.instances("sky-one") == [instance]
    assert cloud.host(instance.id).is_up
    assert cloud.requests[-5:] == ["offers", "launch", "instances", "terminate", "instances"]


def test_a_slow_cloud_delays_every_method(provider, cloud):
    """Every method takes as much longer as it is set to."""
    cloud.delay_seconds = 0.2
    started = time.monotonic()
    provider.instances("sky-one")
    provider.terminate([])
    assert time.monotonic() - started >= 0.4
