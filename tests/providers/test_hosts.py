"""`Hosts`: as a value, and on the machines of the test bed, with real guards that tests kill."""

import contextlib
import json
import logging
import os
import pickle
import re
import shlex
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import skyward_core as sky
from skyward_core.accelerators import parse
from skyward_core.errors import CommandFailed
from skyward_core.machines.offers import rank
from skyward_core.providers import base, host_connections, hosts
from skyward_core.provisioning.guard import guard_script
from skyward_core.transport.ssh_connection import SSHConnection
from tests.conftest import wait_until
from tests.testbed import Fleet, Host, leftovers, why_not

REPOSITORY = Path(__file__).parents[2]
SHELLCHECK = Path(sys.executable).with_name("shellcheck")
ANY = sky.Requirements()
POOL = "sky-test-hosts"


class FakeHosts:
    """Hosts without a network: `keys` are the keys that they show, `gpus` what their driver lists."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.keys: dict[str, str | None] = {}
        self.gpus: list[str] = []
        self.endpoints: dict[str, sky.Endpoint] = {}
        """Where the last connections went, by address."""
        self.asked: list[tuple[str, dict[str, Sequence[str]]]] = []
        """The scripts that ran, and their arguments by address."""
        monkeypatch.setattr(hosts, "HostConnections", partial(FakeConnections, self))


class FakeConnections(contextlib.nullcontext[Any]):
    """The connections of one request to fake hosts."""

    def __init__(self, fakes: FakeHosts, endpoints: dict[str, sky.Endpoint], keys: host_connections.SeenKeys) -> None:
        super().__init__(self)
        self._fakes, self._keys = fakes, keys
        fakes.endpoints = endpoints

    def connect(self, straggler_seconds: float | None = None) -> dict[str, sky.SkywardError]:
        failures: dict[str, sky.SkywardError] = {}
        for address in self._fakes.endpoints:
            try:
                self._keys.note(address, self._fakes.keys.get(address))
            except sky.HostKeyChanged as error:
                failures[address] = error
        return failures

    def ask(
        self, script: str, arguments: dict[str, Sequence[str]], **_: object
    ) -> tuple[dict[str, host_connections.HostAnswer], dict[str, sky.SkywardError]]:
        self._fakes.asked.append((script, dict(arguments)))
        values = {
            "vcpus": ["4"],
            "memory_kib": ["1000000"],
            "machine": ["x86_64"],
            "ip": ["10.0.0.1"],
            "directory": [""],
        }
        answer = host_connections.HostAnswer({**values, "gpu": self._fakes.gpus})
        return dict.fromkeys(arguments, answer), {}

    def endpoint(self, address: str) -> sky.Endpoint:
        return self._fakes.endpoints[address]


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> FakeHosts:
    return FakeHosts(monkeypatch)


# ── as a value ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_provider_survives_json() -> None:
    """The fields come back equal; copies and the text contain no more than them."""
    provider = sky.Hosts("10.0.0.5", "ubuntu@gpu-box:2222", key="~/.ssh/id", price_per_hour=1.5)
    fields = provider.to_json()
    assert fields == {
        "name": "hosts",
        "addresses": ["10.0.0.5", "ubuntu@gpu-box:2222"],
        "key": "~/.ssh/id",
        "price_per_hour": 1.5,
    }
    assert base.load(json.loads(json.dumps(fields))) == provider
    assert sky.Hosts(addresses=["10.0.0.5"]) == sky.Hosts("10.0.0.5") != sky.Hosts("10.0.0.6")
    assert provider.model_copy() == provider
    with pytest.raises(ValueError, match="frozen"):
        provider.key = "other"
    pools = provider.for_pool()
    assert pools == provider
    assert (hash(pools), pools.to_json()) == (hash(provider), fields)


def test_a_pools_own_copy_remembers_host_keys(fakes: FakeHosts) -> None:
    """Each copy has its own keys, one for each address. A provider outside a pool remembers none."""

    def pinned(hosts: sky.Hosts) -> list[str | None]:
        hosts.instances()
        return [fakes.endpoints[address].host_key for address in ("gpu-1", "gpu-2")]

    provider = sky.Hosts("gpu-1", "gpu-2")
    one, other = provider.for_pool(), provider.for_pool()
    fakes.keys = {"gpu-1": "key a", "gpu-2": None}
    assert [pinned(it) for it in (one, one, provider, provider)] == [
        [None, None],
        ["key a", None],
        [None, None],
        [None, None],
    ]
    fakes.keys = {"gpu-1": "key b"}
    with pytest.raises(sky.HostKeyChanged, match="two host keys: key a and key b"):
        one.instances()
    assert [pinned(it) for it in (provider, other, other)] == [[None, None], [None, None], ["key b", None]]
    fakes.keys = {}
    assert pinned(pickle.loads(pickle.dumps(one))) == ["key a", None]


@pytest.mark.parametrize(
    ("address", "fields", "endpoint"),
    [
        ("10.0.0.5", {}, {"host": "10.0.0.5"}),
        (
            "gpu-box",
            {"user": "me", "port": 2200, "key": "k", "known_hosts": "h", "config": "c"},
            {"host": "gpu-box", "user": "me", "port": 2200, "key": "k", "known_hosts": "h", "config": "c"},
        ),
        ("you@gpu-box:22", {"user": "me", "port": 2200}, {"host": "gpu-box", "user": "you", "port": 22}),
        ("me@corp.example@gpu-box", {}, {"host": "gpu-box", "user": "me@corp.example"}),
        ("[fd00::5]", {}, {"host": "fd00::5"}),
        ("root@[fe80::1%eth0]:2222", {}, {"host": "fe80::1%eth0", "user": "root", "port": 2222}),
    ],
)
def test_an_address_sets_host_user_and_port(fakes: FakeHosts, address: str, fields: dict, endpoint: dict) -> None:
    """User and port of an address have precedence over the provider's, and both over ~/.ssh/config."""
    sky.Hosts(address, **fields).instances()
    assert fakes.endpoints == {address: sky.Endpoint(**endpoint)}


@pytest.mark.parametrize(
    ("addresses", "fields"),
    [
        ((), {}),
        (("a", "b", "a"), {}),
        (("gpu-box", "you@GPU-box"), {}),
        (("gpu-box", "gpu-box:2222"), {"port": 2222}),
        (("gpu-box:0",), {}),
        (("gpu-box:65536",), {}),
        (("gpu-box:ssh",), {}),
        (("gpu-box:",), {}),
        (("fd00::5",), {}),
        (("",), {}),
        (("@gpu-box",), {}),
        (("gpu box",), {}),
        (("ssh://gpu-box",), {}),
        (("gpu-box",), {"port": 0}),
        (("gpu-box",), {"price_per_hour": -1}),
        (("gpu-box",), {"key": ""}),
        (("gpu-box",), {"adresses": ["b"]}),
        (("gpu-box",), {"addresses": ["b"]}),
        ((), {"addresses": "gpu-box"}),
    ],
)
def test_invalid_fields_are_refused(addresses: tuple[str, ...], fields: dict) -> None:
    """No host, a host named twice, and an invalid address, port or price raise ValueError at once."""
    with pytest.raises(ValueError):
        sky.Hosts(*addresses, **fields)


def test_two_ports_of_one_address_are_two_hosts() -> None:
    """Ports distinguish machines behind one address."""
    assert len(sky.Hosts("gate:2201", "gate:2202").addresses) == 2


@pytest.mark.parametrize(
    "make",
    [
        lambda: sky.Hosts("root:hunter2@gpu-box"),
        lambda: sky.Hosts("gpu-box", key="-----BEGIN OPENSSH PRIVATE KEY-----\nhunter2"),
    ],
)
def test_a_secret_in_the_wrong_field_is_not_repeated(make: Callable[[], object]) -> None:
    """A password in an address, or a key in place of its path, is refused without repeating it."""
    with pytest.raises(ValueError) as caught:
        make()
    assert "hunter2" not in str(caught.value)
    assert "hunter2" not in repr(caught.value)


@pytest.mark.parametrize("name", ["LOOK", "START", "LIST", "END", "SWEEP"])
def test_the_scripts_are_plain_sh(name: str) -> None:
    """shellcheck and dash report nothing for the scripts for hosts. Functions that a script does not use are ignored."""
    script = getattr(hosts, name)
    lines = subprocess.run(
        [SHELLCHECK, "--shell=sh", "--exclude=SC2329,SC2317,SC2034", "-"],
        input=script,
        capture_output=True,
        text=True,
        check=False,
    ).stdout
    assert lines == ""
    assert subprocess.run(["dash", "-n"], input=script, capture_output=True, text=True, check=False).stderr == ""


def test_an_id_determines_its_possible_hosts(fakes: FakeHosts) -> None:
    """An id with a host's mark is looked for only there; one with an unknown mark, on all hosts.

    The mark does not depend on the user.
    """

    def launched(provider: sky.Hosts) -> str:
        (offer,) = provider.offers(ANY)
        tags = {base.POOL_TAG: POOL, base.RANK_TAG: "0"}
        (instance,) = provider.launch(offer, 1, tags, "true")
        return instance.id

    of_a, of_b, of_another = (launched(sky.Hosts(address, user="you")) for address in ("a", "b", "c"))
    sky.Hosts("a", "b").terminate([of_a, of_b, of_another])
    script, arguments = fakes.asked[-1]
    assert script == hosts.END
    assert {address: set(its[1:]) for address, its in arguments.items()} == {
        "a": {of_a, of_another},
        "b": {of_b, of_another},
    }


def test_only_hosts_without_a_price_may_be_left_to_their_lease() -> None:
    """A host with a price is billed until it is confirmed gone, and so is every machine of a cloud."""
    assert sky.Hosts("10.0.0.1").may_be_left_to_its_lease()
    assert not sky.Hosts("10.0.0.1", price_per_hour=1.5).may_be_left_to_its_lease()
    assert not any(
        kind().may_be_left_to_its_lease() for kind in (sky.AWS, sky.DigitalOcean, sky.Verda, sky.VastAI, sky.RunPod)
    )


def test_foreign_ids_cause_no_connection() -> None:
    """Ids of another shape, prefixes of ids, and paths are ignored."""
    sky.Hosts("host.invalid").terminate(
        ["local-000000000000", "host-00000000000", "host-", "", ".", "host-/../../../../x", "i-0123456789abcdef0"]
    )


def test_the_drivers_output_becomes_accelerators(fakes: FakeHosts) -> None:
    """Names become the catalogue's, MiB become GB.

    A second kind of GPU does not count. Memory or name may be unknown.
    """

    def host(*gpus: str) -> sky.Offer:
        fakes.gpus = list(gpus)
        (offer,) = sky.Hosts("gpu-1").offers(ANY)
        return offer

    four = host(*["NVIDIA A100-SXM4-80GB, 81920"] * 4)
    assert (four.accelerator, four.accelerators, four.accelerator_memory_gb) == ("A100", 4, 81920 * 1024**2 / 1e9)
    assert four.memory_gb == 1.024
    mixed = host("Tesla T4, 15360", "NVIDIA A100-SXM4-80GB, 81920")
    assert (mixed.accelerator, mixed.accelerators) == ("T4", 1)
    shared = host("NVIDIA GB10, [N/A]")
    assert (shared.accelerators, shared.accelerator_memory_gb) == (1, None)
    assert host("Quadro Nobody Knows, 1000").accelerator == "Quadro Nobody Knows"
    assert (host().accelerator, host().accelerators) == (None, 0)


# ── on the test bed ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    if reason := why_not():
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(reason)
    with Fleet() as fleet:
        yield fleet
    assert leftovers(fleet.number) == []


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


REPOSITORY = Path(__file__).parents[2]


def left_on(host: Host) -> list[str]:
    """Return the files of a host that it did not have at its start."""
    found = said(
        host, "find /root /tmp /dev/shm -mindepth 1; ps -eo args= | grep -v -e sshd -e 'ps -eo' -e grep -e find || true"
    ).splitlines()
    # the test bed hides the repository behind an empty folder
    hidden = {str(REPOSITORY), *map(str, REPOSITORY.parents)}
    return [line for line in found if not line.startswith("/root/.ssh") and line not in hidden]


CACHE_ONLY = ["/root/.cache", "/root/.cache/skyward", "/root/.cache/skyward/instances"]


@pytest.mark.slow
def test_a_host_offers_its_cpus_and_memory(machines) -> None:
    """CPUs and memory are the host's own, whatever the environment of the caller.

    Without GPUs there is no GPU offer.
    """
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_hosts_with_equal_gpus_are_one_offer(machines) -> None:
    """The driver reports the GPUs, and hosts are grouped by them. A node that needs GPUs starts on one of these hosts."""
    plain, one, two = machines(3)
    for host in (one, two):
        smi = host.root / "usr/local/bin/nvidia-smi"
        smi.write_text(
            "#!/bin/sh\n[ \"$1\" = --query-gpu=name,memory.total ] && yes 'NVIDIA A100-SXM4-40GB, 40960' | head -n 2\n"
        )
        smi.chmod(0o755)
    (plain.root / "usr/local/bin/nvidia-smi").write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed'; exit 9\n")
    (plain.root / "usr/local/bin/nvidia-smi").chmod(0o755)
    provider = provider_of([plain, one, two])
    want = sky.Requirements(accelerator=parse("2xA100-40GB"))
    without, offer = provider.offers(want)
    assert (without.instance_type, without.accelerators) == ("hosts", 0)
    assert (offer.instance_type, offer.accelerator, offer.accelerators) == ("2 x A100", "A100", 2)
    assert rank([without, offer], want) == [offer]
    instances = provider.launch(offer, 3, {"skyward-pool": POOL, "skyward-rank": "0"}, guard_script(300, None))
    assert [instance.ip for instance in instances] == [one.ip, two.ip]
    assert (
        {instance.instance_type for instance in instances}
        == {"2 x A100"}
        == {instance.instance_type for instance in provider.instances(POOL)}
    )
    with pytest.raises(sky.NoCapacity, match=rf"{plain.ip} has no GPU; {one.ip} is held by pool {POOL}"):
        provider.launch(offer, 1, {"skyward-pool": "other", "skyward-rank": "0"}, guard_script(300, None))
    assert len(provider.offers(ANY)) == 1


@pytest.mark.slow
def test_instances_are_found_by_tag_from_another_process(machines) -> None:
    """Another process finds the instances, complete and in the order of ranks, and can terminate them."""
    pair = machines(2)
    provider = provider_of(pair, price_per_hour=2.5)
    launched = launch(provider, 2, first=3)
    assert [(i.rank, i.ip, i.private_ip, i.price_per_hour) for i in launched] == [
        (3, pair[0].ip, pair[0].ip, 2.5),
        (4, pair[1].ip, pair[1].ip, 2.5),
    ]
    for host, instance in zip(pair, launched, strict=True):
        assert instance.directory == f"/root/.cache/skyward/instances/{instance.id}"
        assert f"{host.ip} {instance.endpoint.host_key}" == host.known_hosts_line
        assert guard_of(host, instance)
    code = f"""
        from skyward_core.providers import base
        provider = base.load({provider.to_json()!r})
        found = provider.instances({POOL!r})
        print("[" + ",".join(instance.model_dump_json() for instance in found) + "]")
        assert provider.instances({POOL[:-1]!r}) == []
        provider.terminate([instance.id for instance in found])
        assert provider.instances({POOL!r}) == []
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=REPOSITORY,
    )
    assert done.returncode == 0, done.stderr
    assert [sky.Instance.model_validate(fields) for fields in json.loads(done.stdout)] == launched
    assert provider.instances(POOL) == []


TAGS = {
    "skyward-launch": "token-1",
    "skyward-owner": "Jo Doe@box",
    "skyward-process": "boot.4026531836.7.123",
    "skyward-created": "1790000000",
    "skyward-expires": "1790003600",
    "odd": "a b\"c'd$(touch pwned)\n\\é=;\t*",
}
"""The tags of a pool, and a value with characters that shells and line-wise readers may misinterpret."""


@pytest.mark.slow
def test_all_pools_are_listed_with_their_tags(machines) -> None:
    """A process that knows only the provider lists all pools.

    Each machine has its complete tags, with its own rank, so the machines can be ended.
    """
    trio = machines(3)
    provider = provider_of(trio)
    (offer,) = provider.offers(ANY)
    of_one = provider.launch(
        offer, 2, {"skyward-pool": "sky-one", "skyward-rank": "3", **TAGS}, guard_script(300, None)
    )
    of_other = provider.launch(offer, 1, {"skyward-pool": "sky-on", "skyward-rank": "0"}, guard_script(300, None))
    assert [instance.tags for instance in of_one] == [
        {"skyward-pool": "sky-one", "skyward-rank": rank, **TAGS} for rank in ("3", "4")
    ]
    for host, instance in zip(trio, [*of_one, *of_other], strict=True):
        guard_of(host, instance)
    said(
        trio[0],
        "SKYWARD_INSTANCE_ID=local-0123456789ab SKYWARD_POOL_ID=sky-one setsid sleep 300 </dev/null >/dev/null 2>&1 &",
    )
    code = f"""
        from skyward_core.providers import base
        provider = base.load({provider.to_json()!r})
        found = provider.instances()
        print("[" + ",".join(instance.model_dump_json() for instance in found) + "]")
        provider.terminate([instance.id for instance in found])
        assert provider.instances() == []
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=REPOSITORY,
    )
    assert done.returncode == 0, done.stderr
    assert [sky.Instance.model_validate(fields) for fields in json.loads(done.stdout)] == [*of_other, *of_one]


@pytest.mark.slow
def test_a_node_with_a_dead_guard_is_listed_by_its_processes(machines) -> None:
    """It is listed with its pool and its rank, even without valid tags."""
    (host,) = machines(1)
    provider = provider_of([host])
    (instance,) = launch(provider, first=4)
    guard = guard_of(host, instance)
    start_in(host, instance, "SKYWARD_TAGS='{' exec sleep 300")
    said(host, f"kill -9 {guard}")
    wait_until(
        lambda: [found.tags for found in provider.instances()] == [{"skyward-pool": POOL, "skyward-rank": "4"}],
        "the guard to be dead",
    )
    provider.terminate([instance.id])


@pytest.mark.slow
def test_terminate_restores_the_host(machines, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that ignore signals, folders in memory and the directory are gone when terminate returns.

    Caches stay. A second call is no error.
    """
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
    # 40 s; then the provider ends it
    monkeypatch.setattr(hosts, "END", hosts.END.replace("patience=100\n", "patience=2000\n"))
    begun = time.monotonic()
    provider.terminate([instance.id, "host-000000000000"])
    assert time.monotonic() - begun < 30, "the guard did not do it"
    assert sorted(left_on(host)) == sorted([*CACHE_ONLY, "/root/.cache/skyward/envs", "/root/.cache/skyward/envs/e"])
    provider.terminate([instance.id, "host-000000000000"])
    provider.terminate([])


@pytest.mark.slow
def test_terminate_works_without_a_guard(machines) -> None:
    """If the guard was killed or stopped, the provider ends the node.

    Another pool's node on another host still runs.
    """
    dead, still, _ = trio = machines(3)
    provider = provider_of(trio)
    launched = launch(provider, 2)
    (neighbour,) = launch(provider, 1, "sky-other")
    for host, instance, signal in zip((dead, still), launched, ("KILL", "STOP"), strict=True):
        guard = guard_of(host, instance)
        start_in(host, instance, "sleep 1234")
        said(host, f"mkdir /dev/shm/skyward-node-{instance.id}; kill -{signal} {guard}")
    assert [instance.rank for instance in provider.instances(POOL)] == [0, 1]
    provider.terminate([instance.id for instance in launched])
    assert provider.instances(POOL) == []
    assert [sorted(left_on(host)) for host in (dead, still)] == [CACHE_ONLY, CACHE_ONLY]
    assert provider.instances("sky-other") == [neighbour]


@pytest.mark.slow
def test_a_host_carries_one_node(machines) -> None:
    """Hosts with another pool's node are skipped. If all are in use, NoCapacity names the hosts and the pools.

    When a guard was killed, its host becomes free again.
    """
    first, second = pair = machines(2)
    provider = provider_of(pair)
    (mine,) = launch(provider, 1)
    (other,) = launch(provider, 2, "sky-other")
    assert (mine.ip, other.ip, other.rank) == (first.ip, second.ip, 0)
    with pytest.raises(
        sky.NoCapacity, match=rf"{first.ip} is held by pool {POOL}; {second.ip} is held by pool sky-other"
    ):
        launch(provider, 1, "sky-third")
    said(second, f"kill -9 {guard_of(second, other)}")
    (third,) = launch(provider, 1, "sky-third")
    assert third.ip == second.ip


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_another_user_cannot_block_a_host(machines) -> None:
    """A file, pipe or link with the lock's former name has no effect. A held lock without a pool has no effect either.

    Our own pools still exclude each other.
    """
    (host,) = machines(1)
    nobody = "setpriv --reuid=nobody --clear-groups"
    said(
        host,
        f"{nobody} mkfifo -m 600 /tmp/skyward-host.lock; setsid {nobody} flock /proc sleep 300 </dev/null >/dev/null 2>&1 &",
    )
    wait_until(lambda: host.run("flock -n /proc true").returncode == 1, "the lock to be taken")
    provider = provider_of([host])
    (instance,) = launch(provider)
    with pytest.raises(sky.NoCapacity, match=f"held by pool {POOL}"):
        launch(provider, 1, "sky-other")
    provider.terminate([instance.id])
    (again,) = launch(provider)
    provider.terminate([again.id])


@pytest.mark.slow
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


@pytest.mark.slow
def test_an_expired_lease_ends_the_node(machines) -> None:
    """If the client never returns, the guard ends the whole node. The host is free and unchanged."""
    (host,) = machines(1)
    provider = provider_of([host])
    (instance,) = launch(provider, lease_seconds=6)
    start_in(host, instance, "sleep 1234")
    wait_until(lambda: provider.instances(POOL) == [], "the lease to run out", 60)
    assert sorted(left_on(host)) == CACHE_ONLY


@pytest.mark.slow
def test_a_different_host_key_is_refused(machines) -> None:
    """With a known key, every method raises HostKeyChanged for a different one.

    So does a connection to an instance with its pinned key.
    """
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


@pytest.mark.slow
def test_a_key_is_pinned_for_the_life_of_a_pool(machines) -> None:
    """No file has the key. A pool keeps the first key that it sees for all methods, also of hosts that it does not use.

    The next pool pins again.
    """
    used, spare = pair = machines(2)
    plain = provider_of(pair)
    provider = plain.for_pool()
    (instance,) = launch(provider)
    (offer,) = provider.offers(ANY)
    spare.change_host_key()
    with pytest.raises(sky.HostKeyChanged):
        provider.launch(offer, 1, {"skyward-pool": POOL, "skyward-rank": "1"}, guard_script(300, None))
    used.change_host_key()
    with pytest.raises(sky.HostKeyChanged):
        provider.instances(POOL)
    with pytest.raises(sky.InstancesLeft) as caught:
        provider.terminate([instance.id])
    assert isinstance(caught.value.__cause__, sky.HostKeyChanged)
    assert [found.id for found in plain.for_pool().instances(POOL)] == [instance.id]
    plain.terminate([instance.id])


@pytest.mark.slow
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


@pytest.mark.slow
def test_an_instance_is_terminated_under_another_name_of_its_host(machines) -> None:
    """If the host does not answer, the instance is not reported as gone."""
    (host,) = machines(1)
    (instance,) = launch(provider_of([host]))
    same = sky.Hosts(f"root@{host.ip}:22", key=str(host.key_path), known_hosts="/dev/null", config="/dev/null")
    assert [found.id for found in same.instances(POOL)] == [instance.id]
    same.terminate([instance.id])
    assert same.instances(POOL) == []


@pytest.mark.slow
def test_a_refused_or_malformed_key_is_an_error(machines, tmp_path: Path) -> None:
    """A host that refuses our key is CredentialsError; a malformed key file is BadRequest."""
    (host,) = machines(1)
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / "key")], check=True)
    with pytest.raises(sky.CredentialsError):
        provider_of([host], key=str(tmp_path / "key")).offers(ANY)
    with pytest.raises(sky.BadRequest):
        provider_of([host], key=str(tmp_path / "none")).offers(ANY)


@pytest.mark.slow
def test_a_full_disk_starts_nothing(machines) -> None:
    """NoCapacity names the host's reason. The host keeps no files and its lock is free; a pool uses the next host."""
    full, good = pair = machines(2)
    said(full, "mkdir -p ~/.cache/skyward/instances")
    full.fill_disk()
    with pytest.raises(sky.NoCapacity, match="could not start a node"):
        launch(provider_of([full]))
    (instance,) = launch(provider_of(pair))
    assert (instance.ip, instance.rank) == (good.ip, 0)
    full.empty_disk()
    assert sorted(left_on(full)) == CACHE_ONLY
    launch(provider_of([full]))


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize(
    "squatted",
    ["-o nobody -m 755 /shared/home", "-o nobody -m 755 /shared/home /shared/home/instances", "-m 777 /shared/home"],
)
def test_a_home_that_another_user_could_replace_is_refused(machines, squatted: str) -> None:
    """Its programs would be the other user's: nothing is started, and the error has advice.

    A private folder of our own is accepted.
    """
    (host,) = machines(1)
    said(host, f"mkdir -m 1777 /shared; install -d {squatted}")
    (host.root / "root/.bashrc").write_text("export SKYWARD_HOME=/shared/home\n")
    provider = provider_of([host])
    with pytest.raises(
        sky.NoCapacity, match=r"/shared/home belongs to another user, or every user may write to it.*SKYWARD_HOME"
    ):
        launch(provider)
    assert provider.instances(POOL) == []
    said(host, "chown -R root /shared/home; chmod 755 /shared/home")
    (instance,) = launch(provider)
    provider.terminate([instance.id])


@pytest.mark.slow
def test_environments_are_swept_on_hosts_without_nodes(machines) -> None:
    """Cached environments are removed on request, but not while a node runs. Other files in the directory stay."""
    busy, idle = pair = machines(2)
    for host in pair:
        said(host, "mkdir -p ~/.cache/skyward/envs/e/bin ~/.cache/skyward/ship ~/.cache/skyward/mine")
    provider = provider_of(pair)
    (instance,) = launch(provider)
    assert provider.sweep_environments() == [busy.ip]
    assert said(busy, "ls ~/.cache/skyward").split() == ["envs", "instances", "mine", "ship"]
    assert said(idle, "ls ~/.cache/skyward").split() == ["mine"]
    provider.terminate([instance.id])
    assert provider.sweep_environments() == []
    assert said(busy, "ls ~/.cache/skyward").split() == ["mine"]


@pytest.mark.slow
def test_environments_can_be_removed_with_the_node(machines) -> None:
    """With keep_environments=False only the parent folder of the node's home remains."""
    (host,) = machines(1)
    provider = provider_of([host], keep_environments=False)
    (instance,) = launch(provider)
    said(host, "mkdir -p ~/.cache/skyward/envs/e/bin ~/.cache/skyward/uv/bin")
    provider.terminate([instance.id])
    assert sorted(left_on(host)) == ["/root/.cache"]
