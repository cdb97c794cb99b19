"""`Hosts`: as a value, and on the machines of the test bed, with real guards that tests kill."""

import logging
import os
import re
import shlex
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import skyward_core as sky
from skyward_core.accelerators import parse
from skyward_core.errors import CommandFailed
from skyward_core.providers import host_connections, hosts
from skyward_core.provisioning.bootstrap import guard_script
from skyward_core.transport.ssh_connection import SSHConnection
from tests.testbed import Fleet, Host
from tests.testbed.fixtures import fleet  # noqa: F401 - a fixture
from tests.waiting import WAIT_SECONDS, wait_until

REPOSITORY = Path(__file__).parents[3]
ANY = sky.Requirements()
POOL = "sky-test-hosts"


@pytest.fixture
def machines(fleet: Fleet) -> Iterator[Callable[[int], list[Host]]]:
    """Create bare hosts for one test."""
    made: list[Host] = []

    def make(count: int) -> list[Host]:
        made.extend(fleet.create(disk="48M") for _ in range(count))
        return made[-count:]

    yield make
    for host in made:
        host.crash()


def provider_of(machines: list[Host], **fields: object) -> sky.Hosts:
    known = {"known_hosts": "/dev/null", "config": "/dev/null"}
    return sky.Hosts(
        *(host.ip for host in machines), **{"user": "root", "key": str(machines[0].key_path), **known, **fields}
    )


def launch(
    provider: sky.Hosts,
    count: int = 1,
    pool_id: str = POOL,
    first: int = 0,
    lease_seconds: float = 300,
    script: str | None = None,
) -> list[sky.Instance]:
    (offer,) = provider.offers(ANY)
    return provider.launch(
        offer, count, {"skyward-pool": pool_id, "skyward-rank": str(first)}, script or guard_script(lease_seconds, None)
    )


def said(host: Host, command: str) -> str:
    done = host.run(command)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def guard_of(host: Host, instance: sky.Instance) -> str:
    """Return the pid, on the host, of a guard that has started."""
    wait_until(lambda: (host.root / f"{instance.directory}/guard".lstrip("/")).exists(), "the guard to be up")
    return said(host, f"cat {instance.directory}/guard")


def start_in(host: Host, instance: sky.Instance, command: str) -> None:
    """Start another process of the node, as its bootstrap does."""
    tags = f"SKYWARD_INSTANCE_ID={instance.id} SKYWARD_POOL_ID={instance.pool_id} SKYWARD_RANK={instance.rank} SKYWARD_INSTANCE_DIRECTORY={instance.directory}"
    mark = host.root / f"{instance.directory}/begun".lstrip("/")
    program = 'touch "$SKYWARD_INSTANCE_DIRECTORY/begun"; ' + command
    said(host, f"{tags} setsid sh -c {shlex.quote(program)} </dev/null >/dev/null 2>&1 &")
    wait_until(mark.exists, "the process to run")


def left_on(host: Host) -> list[str]:
    """Return the files of a host that it did not have at its start."""
    found = said(
        host, "find /root /tmp /dev/shm -mindepth 1; ps -eo args= | grep -v -e sshd -e 'ps -eo' -e grep -e find || true"
    ).splitlines()
    # the test bed hides the repository behind an empty folder
    hidden = {str(REPOSITORY), *map(str, REPOSITORY.parents)}
    return [line for line in found if not line.startswith("/root/.ssh") and line not in hidden]


CACHE_ONLY = ["/root/.cache", "/root/.cache/skyward", "/root/.cache/skyward/instances"]


def test_a_host_offers_its_cpus_and_memory(machines) -> None:
    """CPUs and memory are the host's own, whatever the environment of the caller. Without GPUs there is no GPU offer."""
    (host,) = machines(1)
    (host.root / "root/.bashrc").write_text("echo welcome; export OMP_NUM_THREADS=1\n")
    (offer,) = provider_of([host], price_per_hour=0.5).offers(ANY)
    assert offer.vcpus == len(os.sched_getaffinity(0))
    assert offer.memory_gb == pytest.approx(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9, rel=0.01)
    assert (offer.provider, offer.instance_type, offer.region, offer.price_per_hour, offer.is_spot) == (
        "hosts",
        "hosts",
        "hosts",
        0.5,
        False,
    )
    (offer,) = provider_of([host]).offers(sky.Requirements(accelerator=parse("T4")))
    assert (offer.accelerator, offer.accelerators) == (None, 0)


def test_hosts_with_two_architectures_are_one_offer_unless_one_is_required(machines) -> None:
    """The architecture comes from `uname -m`. With `architecture` only such hosts are offered and used."""
    hosts = machines(2)
    uname = hosts[1].root / "usr/local/bin/uname"
    uname.write_text("#!/bin/sh\necho aarch64\n")
    uname.chmod(0o755)
    provider = provider_of(hosts)
    assert [offer.architecture for offer in provider.offers(sky.Requirements())] == [None]
    offers = {offer.architecture: offer for offer in provider.offers(sky.Requirements(architecture="arm64"))}
    assert offers.keys() == {"x86_64", "arm64"}
    (instance,) = provider.launch(offers["arm64"], 2, {"skyward-pool": "sky-arm", "skyward-rank": "0"}, "sleep 60")
    assert instance.endpoint is not None
    assert instance.endpoint.host == hosts[1].ip
    provider.terminate([instance.id])


def test_terminate_restores_the_host(machines, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that ignore signals, folders in memory and the directory are gone when terminate returns."""
    (host,) = machines(1)
    provider = provider_of([host])
    (instance,) = launch(provider)
    guard_of(host, instance)
    said(
        host,
        f"mkdir -p /dev/shm/skyward-node-{instance.id} ~/.cache/skyward/envs/e && dd if=/dev/zero of=/dev/shm/skyward-node-{instance.id}/v bs=1M count=1 2>/dev/null",
    )
    start_in(host, instance, "trap '' TERM; sleep 300; sleep 300")
    assert "patience=100\n" in hosts.END
    # 800 s; then the provider ends it
    monkeypatch.setattr(hosts, "END", hosts.END.replace("patience=100\n", "patience=2000\n"))
    begun = time.monotonic()
    provider.terminate([instance.id, "host-000000000000"])
    assert time.monotonic() - begun < WAIT_SECONDS, "the guard did not do it"
    assert sorted(left_on(host)) == sorted([*CACHE_ONLY, "/root/.cache/skyward/envs", "/root/.cache/skyward/envs/e"])
    provider.terminate([instance.id, "host-000000000000"])
    provider.terminate([])


def test_a_node_without_its_guard_still_holds_its_host(machines) -> None:
    """While processes of a node live, no second node starts on its host."""
    (host,) = machines(1)
    provider = provider_of([host])
    (instance,) = launch(provider)
    guard = guard_of(host, instance)
    start_in(host, instance, "sleep 1234")
    said(host, f"kill -9 {guard}")
    with pytest.raises(sky.NoCapacity, match=f"held by pool {POOL}"):
        launch(provider, 1, "sky-other")
    (found,) = provider.instances(POOL)
    assert found == instance


def test_another_users_pool_holds_the_host(machines) -> None:
    """The lock is the machine's: another user's pool is visible by the command line of its guard."""
    (host,) = machines(1)
    script = "exec 9</proc; flock -n 9; exec sh -c 'sleep 300; :' skyward-pool=sky-nobody"
    said(
        host,
        f"setsid setpriv --reuid=nobody --clear-groups env -i PATH=/bin:/usr/bin sh -c {shlex.quote(script)} </dev/null >/dev/null 2>&1 &",
    )
    provider = provider_of([host])
    wait_until(lambda: host.run("pgrep -f skyward-pool=sky-nobod[y]").returncode == 0, "the stranger")
    with pytest.raises(sky.NoCapacity, match="held by pool sky-nobody"):
        launch(provider)


def test_a_tag_of_another_users_process_is_no_machine(machines) -> None:
    """We log in as root, which can read all environments. The stranger is neither listed nor ended, and delays nothing.

    A process of our own with unreadable tags hides no other.
    """
    (host,) = machines(1)
    provider = provider_of([host])
    (instance,) = launch(provider)
    tags = f"SKYWARD_INSTANCE_ID={instance.id} SKYWARD_POOL_ID={POOL} SKYWARD_PRICE_PER_HOUR=9999999"
    said(host, f"setsid setpriv --reuid=nobody --clear-groups env -i {tags} sleep 299 </dev/null >/dev/null 2>&1 &")
    other = tags.replace(instance.id, "host-0123456789ab").replace("9999999", "abc SKYWARD_RANK=x")
    said(host, f"setsid setpriv --reuid=nobody --clear-groups env -i {other} sleep 299 </dev/null >/dev/null 2>&1 &")
    wait_until(lambda: host.run("pgrep -fc 'sleep 29[9]'").stdout.strip() == "2", "the strangers")
    assert provider.instances() == [instance]
    said(host, f"setsid env -i {other} sleep 298 </dev/null >/dev/null 2>&1 &")
    wait_until(lambda: len(provider.instances()) == 2, "our own process")
    odd = next(one for one in provider.instances() if one.id != instance.id)
    assert (odd.id, odd.rank, odd.price_per_hour) == ("host-0123456789ab", 0, 0.0)
    provider.terminate([instance.id, odd.id])
    assert provider.instances() == []
    assert host.run("pgrep -fc 'sleep 29[9]'").stdout.strip() == "2"
    said(host, "pkill -f 'sleep 29[9]'")


def test_pools_that_launch_at_the_same_time_share_no_host(machines) -> None:
    """Two launches at the same moment, without an earlier check: only one of them gets the host."""
    (host,) = machines(1)
    provider = provider_of([host])
    script = guard_script(300, None)
    with (
        ThreadPoolExecutor(2) as threads,
        provider._connections([host.ip]) as one,
        provider._connections([host.ip]) as two,
    ):
        assert one.connect() == two.connect() == {}
        pending = [
            threads.submit(
                lines.ask,
                hosts.START,
                {host.ip: (f"host-00000000000{n}", f"sky-{n}", "0", "0.0", "hosts", str(len(script)))},
                stdin=script,
            )
            for n, lines in enumerate((one, two))
        ]
        answered = [answers[host.ip] for answers, failures in (future.result() for future in pending) if not failures]
    assert sorted(bool(answer.all("taken")) for answer in answered) == [False, True]
    assert sum(len(provider.instances(f"sky-{n}")) for n in range(2)) == 1


def test_a_different_host_key_is_refused(machines) -> None:
    """With a known key, every method raises HostKeyChanged for a different one."""
    good, bad = pair = machines(2)
    known = bad.directory / "both"
    known.write_text(f"{good.known_hosts_line}\n{bad.known_hosts_line}\n")
    provider = provider_of(pair, known_hosts=str(known))
    (offer,) = provider.offers(ANY)
    _, instance = launch(provider, 2)
    bad.change_host_key()
    with pytest.raises(sky.HostKeyChanged):
        provider.offers(ANY)
    with pytest.raises(sky.HostKeyChanged):
        provider.launch(offer, 1, {"skyward-pool": "sky-other", "skyward-rank": "0"}, "")
    with pytest.raises(sky.HostKeyChanged):
        provider.instances(POOL)
    with pytest.raises(sky.InstancesLeft) as caught:
        provider.terminate([instance.id])
    assert caught.value.ids == (instance.id,)
    assert isinstance(caught.value.__cause__, sky.HostKeyChanged)
    with (
        pytest.raises(sky.HostKeyChanged),
        SSHConnection(instance.endpoint.model_copy(update={"known_hosts": "/dev/null"})) as connection,
    ):
        connection.connect(30)


@pytest.mark.nightly
def test_a_host_that_does_not_answer_is_skipped_or_an_error(
    machines, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Offers and launches skip it with a warning. Listing is an error, and its instances count as left."""
    monkeypatch.setattr(host_connections, "CONNECT_SECONDS", 1.0)
    monkeypatch.setattr(hosts, "STRAGGLER_SECONDS", 0.3)
    lost, good = pair = machines(2)
    provider = provider_of(pair)
    on_lost, on_good = launch(provider, 2)
    lost.partition()
    provider.terminate([on_good.id])  # not on the lost host, which is not contacted
    with caplog.at_level(logging.WARNING):
        (instance,) = launch(provider, 2, "sky-other")
    assert instance.ip == good.ip
    assert f"{lost.ip} is left out" in caplog.text
    with pytest.raises(sky.Unreachable, match=re.escape(lost.ip)):
        provider.instances("sky-other")
    with pytest.raises(sky.InstancesLeft) as caught:
        provider.terminate([on_lost.id, instance.id])
    assert caught.value.ids == (on_lost.id,)
    good.partition()
    with pytest.raises(sky.Unreachable):
        provider.offers(ANY)
    lost.heal()
    monkeypatch.setattr(host_connections, "CONNECT_SECONDS", 30.0)  # a busy machine needs more than one second
    assert provider_of([lost]).instances(POOL) == [on_lost]


def test_a_refused_or_malformed_key_is_an_error(machines, tmp_path: Path) -> None:
    """A host that refuses our key is CredentialsError; a malformed key file is BadRequest."""
    (host,) = machines(1)
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / "key")], check=True)
    with pytest.raises(sky.CredentialsError):
        provider_of([host], key=str(tmp_path / "key")).offers(ANY)
    with pytest.raises(sky.BadRequest):
        provider_of([host], key=str(tmp_path / "none")).offers(ANY)


def test_a_search_without_any_result_is_an_error(machines) -> None:
    """If grep on a host does not work, its answer does not mean that there are no instances."""
    (host,) = machines(1)
    provider = provider_of([host])
    (instance,) = launch(provider)
    guard_of(host, instance)
    grep = host.root / "usr/local/bin/grep"
    grep.write_text("#!/bin/sh\nexit 2\n")
    grep.chmod(0o755)
    with pytest.raises(CommandFailed):
        provider.instances(POOL)
    with pytest.raises(sky.InstancesLeft):
        provider.terminate([instance.id])


def test_the_hosts_own_home_is_used(machines) -> None:
    """Files are in the host's SKYWARD_HOME."""
    (host,) = machines(1)
    (host.root / "root/.bashrc").write_text("export SKYWARD_HOME='/root/my files/'\n")
    provider = provider_of([host])
    (instance,) = launch(provider)
    assert instance.directory == f"/root/my files/instances/{instance.id}"
    assert provider.instances(POOL) == [instance]
    provider.terminate([instance.id])
    assert sorted(left_on(host)) == ["/root/.bashrc", "/root/my files", "/root/my files/instances"]


def test_environments_can_be_removed_with_the_node(machines) -> None:
    """With keep_environments=False only the parent folder of the node's home remains."""
    (host,) = machines(1)
    provider = provider_of([host], keep_environments=False)
    (instance,) = launch(provider)
    said(host, "mkdir -p ~/.cache/skyward/envs/e/bin ~/.cache/skyward/uv/bin")
    provider.terminate([instance.id])
    assert sorted(left_on(host)) == ["/root/.cache"]
