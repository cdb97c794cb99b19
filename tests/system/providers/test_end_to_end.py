"""Pools on each cloud's fake, which rents out hosts of the test bed.

A pool uses only data of the provider. It opens, runs, loses a machine, and ends. Afterwards all written data is
searched for credentials.
"""

from __future__ import annotations

import base64
import gzip
import json
import logging
import os
import platform
import re
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import skyward_core as sky
from skyward_core import cli
from skyward_core.ledger.ledger import default_url
from skyward_core.providers.vastai import END as VAST_END
from skyward_core.providers.vastai import URL as VAST_URL
from tests.conftest import RecordedEvents
from tests.providers.fake_aws import FakeAWS, Machine
from tests.providers.fake_digitalocean import TOKEN, Droplet, FakeDigitalOcean
from tests.providers.fake_runpod import KEY as RUNPOD_KEY
from tests.providers.fake_runpod import FakeRunPod, cpu
from tests.providers.fake_vastai import KEY, STEPS, FakeVast, ask
from tests.providers.fake_verda import CLIENT_ID, CLIENT_SECRET, FakeVerda
from tests.providers.hosted import Hosting, boot_script, cloud_init, container
from tests.providers.http_fake import Reply, Request
from tests.testbed import Fleet
from tests.testbed.fixtures import fleet, mirror  # noqa: F401 - fixtures
from tests.testbed.mirror import Mirror
from tests.waiting import wait_until

AWS_SECRET = "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"
ALWAYS = ("aws", "runpod")
"""The clouds of `make test`: virtual machines and containers. `make long` has all."""

pytestmark = [pytest.mark.timeout(400)]  # a minute on an idle machine


@sky.compute
def where() -> str:
    """Return the name of the host."""
    return platform.node()


@sky.compute
def square(number: int) -> int:
    """Return a square after a short pause."""
    time.sleep(0.1)
    return number * number


@sky.compute
def talks() -> str:
    """Print a secret and return it reversed."""
    print("it is", os.environ["HF_TOKEN"])
    return os.environ["HF_TOKEN"][::-1]


@dataclass(frozen=True)
class Rented:
    """A cloud with hosts as machines, and a method to preempt one."""

    provider: sky.Provider
    hosting: Hosting
    alive: Callable[[], set[str]]
    preempt: Callable[[str], None]
    secrets: tuple[str, ...]


class HostedDigitalOcean(FakeDigitalOcean):
    """Droplets that are hosts."""

    def __init__(self, hosting: Hosting) -> None:
        super().__init__()
        self._hosting = hosting

    def add(self, name: str, found: dict[str, Any] | None, order: dict[str, Any]) -> Droplet:
        droplet = super().add(name, found, order)
        droplet.ip = ""
        self._hosting.rent(str(droplet.id), lambda host: cloud_init(host, str(droplet.id), order["user_data"]))
        return droplet

    def _reply(self, request: Any) -> Any:
        for droplet in self.droplets.values():
            droplet.ip = self._hosting.ip(str(droplet.id)) or ""
            droplet.status = "off" if self._hosting.is_off(str(droplet.id)) else None
        before = set(self.droplets)
        reply = super()._reply(request)
        for machine_id in before - set(self.droplets):
            self._hosting.end(str(machine_id))
        return reply

    def preempt(self, machine_id: str) -> None:
        super().preempt(machine_id)
        self._hosting.end(machine_id)


@contextmanager
def digitalocean(hosting: Hosting, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rented]:
    with HostedDigitalOcean(hosting) as fake:
        monkeypatch.setenv("DIGITALOCEAN_TOKEN", TOKEN)
        yield Rented(
            sky.DigitalOcean(endpoint_url=fake.url),
            hosting,
            fake.alive,
            fake.preempt,
            (TOKEN,),
        )


class HostedVerda(FakeVerda):
    """Machines that are hosts. A machine runs when its host has started."""

    def __init__(self, hosting: Hosting) -> None:
        super().__init__()
        self._hosting = hosting

    def _add(self, body: dict[str, Any], gb: int) -> dict[str, Any]:
        machine = super()._add(body, gb)
        text = self.scripts[body["startup_script_id"]]["script"]
        self._hosting.rent(machine["id"], lambda host: boot_script(host, body["hostname"], text))
        return machine

    def _step(self, machine: dict[str, Any]) -> None:
        if machine["status"] == "running" and self._hosting.is_off(machine["id"]):
            machine["status"] = "offline"
        if self.path_of[machine["id"]] == ["running"] and self._hosting.ip(machine["id"]) is None:
            return
        super()._step(machine)
        if machine["ip"] is not None:
            machine["ip"] = machine["private_ip"] = self._hosting.ip(machine["id"])

    def _delete(self, machine_id: str, body: dict[str, Any]) -> dict[str, Any]:
        answer = super()._delete(machine_id, body)
        if answer["status"] == "success":
            self._hosting.end(machine_id)
        return answer

    def preempt(self, machine_id: str) -> None:
        super().preempt(machine_id)
        self._hosting.end(machine_id)


@contextmanager
def verda(hosting: Hosting, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rented]:
    with HostedVerda(hosting) as fake:
        monkeypatch.setenv("VERDA_CLIENT_ID", CLIENT_ID)
        monkeypatch.setenv("VERDA_CLIENT_SECRET", CLIENT_SECRET)
        yield Rented(sky.Verda(endpoint_url=fake.url + "/v1"), hosting, fake.alive, fake.preempt, (CLIENT_SECRET,))


class HostedAWS(FakeAWS):
    """Instances that are hosts."""

    def __init__(self, hosting: Hosting) -> None:
        super().__init__()
        self._hosting = hosting

    def _machine(self, call: Mapping[str, Any], *where: Any) -> Machine:
        machine = super()._machine(call, *where)
        machine.pending = 10**6
        data = base64.b64decode(call["UserData"])
        text = (gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data).decode()
        self._hosting.rent(machine.id, lambda host: cloud_init(host, machine.id, text))
        return machine

    def _DescribeInstances(self, words: Any, region: str) -> dict[str, Any]:
        for machine in self.machines.values():
            if (ip := self._hosting.ip(machine.id)) is not None:
                machine.public_ip, machine.private_ip, machine.pending = ip, ip, 0
            if self._hosting.is_off(machine.id) and not machine.is_ended:
                self.put(machine.id, "terminated", "Client.InstanceInitiatedShutdown")
        return super()._DescribeInstances(words, region)

    def put(self, machine_id: str, state: str, code: str = "", message: str = "") -> None:
        super().put(machine_id, state, code, message)
        if state == "terminated":
            self._hosting.end(machine_id)


@contextmanager
def aws(hosting: Hosting, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rented]:
    with HostedAWS(hosting) as fake:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAIOSFODNN7EXAMPLE")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", AWS_SECRET)
        monkeypatch.setenv("AWS_ENDPOINT_URL", fake.url)
        yield Rented(sky.AWS(ssh_cidr="203.0.113.0/24"), hosting, fake.alive, fake.preempt, (AWS_SECRET,))


class HostedVast(FakeVast):
    """Containers that are hosts. Each can destroy itself with its own key."""

    def __init__(self, hosting: Hosting, address: str) -> None:
        self.address = address
        super().__init__()
        self._hosting = hosting

    def refuse(self, request: Request) -> Reply | None:
        own = re.fullmatch(r"/api/v0/instances/([0-9]+)/", request.path)
        if own and request.method == "DELETE" and request.headers.get("authorization") == f"Bearer key-of-{own[1]}":
            return None
        return super().refuse(request)

    def _contract(self, row: dict[str, Any], body: dict[str, Any]) -> int:
        contract = super()._contract(row, body)
        variables = {name: value for name, value in body["env"].items() if not name.startswith("-")}
        variables |= {"CONTAINER_ID": str(contract), "CONTAINER_API_KEY": f"key-of-{contract}"}
        self._hosting.rent(str(contract), lambda host: container(host, variables, [body["onstart"], *body["args"]]))
        return contract

    def _go_on(self) -> None:
        for contract, row in self.containers.items():
            if self._hosting.is_off(str(contract)) and row["actual_status"] == "running":
                self.halt(contract)
            elif self.steps[contract] < len(STEPS) and self._hosting.ip(str(contract)) is None:
                self.steps[contract] = min(self.steps[contract], len(STEPS) - 3)
        super()._go_on()
        for contract, row in self.containers.items():
            if row["ports"] is not None:
                row |= {
                    "public_ipaddr": self._hosting.ip(str(contract)),
                    "ports": {"22/tcp": [{"HostIp": "0.0.0.0", "HostPort": "22"}]},
                }

    def _destroy(self, contract: int) -> None:
        super()._destroy(contract)
        self._hosting.end(str(contract))

    def preempt(self, machine_id: str) -> None:
        super().preempt(machine_id)
        self._hosting.end(machine_id)


@contextmanager
def vastai(hosting: Hosting, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rented]:
    with HostedVast(hosting, hosting.gateway) as fake:
        fake.sell(*(ask(number) for number in range(1, 9)))
        monkeypatch.setenv("VAST_API_KEY", KEY)
        monkeypatch.setenv("VAST_URL", fake.url)
        monkeypatch.setattr("skyward_core.providers.vastai.END", VAST_END.replace(VAST_URL, fake.url))
        yield Rented(sky.VastAI(), hosting, fake.alive, fake.preempt, (KEY,))


class HostedRunPod(FakeRunPod):
    """Pods that are hosts. Each can delete itself with its own key."""

    def __init__(self, hosting: Hosting, address: str) -> None:
        self.address = address
        super().__init__()
        self._hosting = hosting

    def refuse(self, request: Request) -> Reply | None:
        own = re.fullmatch(r"/v2/pods/(\w+)", request.path)
        if own and request.method == "DELETE" and request.headers.get("authorization") == f"Bearer key-of-{own[1]}":
            return None
        return super().refuse(request)

    def _make(self, body: dict[str, Any]) -> str:
        pod = super()._make(body)
        command = json.loads(body["args"])
        variables = {**body["env"], "RUNPOD_POD_ID": pod, "RUNPOD_API_KEY": f"key-of-{pod}"}
        self._hosting.rent(pod, lambda host: container(host, variables, [*command["entrypoint"], *command["cmd"]]))
        return pod

    def _reply(self, request: Request) -> Reply:
        for pod, row in self.pods.items():
            if row["status"] == "RUNNING" and self._hosting.is_off(pod):
                self.halt(pod)
        reply = super()._reply(request)
        for row in self.pods.values():
            direct = row["ssh"]["direct"]
            if direct is not None:
                is_up = self._hosting.ip(row["id"]) is not None
                row["ssh"]["direct"] = {**direct, "host": self._hosting.ip(row["id"]), "port": 22} if is_up else None
        return reply

    def halt(self, pod: str, status: str = "EXITED") -> None:
        super().halt(pod, status)
        self._hosting.end(pod)


@contextmanager
def runpod(hosting: Hosting, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rented]:
    with HostedRunPod(hosting, hosting.gateway) as fake:
        fake.sell(cpu("cpu3c", 2, 0.03))
        monkeypatch.setenv("RUNPOD_API_KEY", RUNPOD_KEY)
        yield Rented(
            sky.RunPod(endpoint_url=fake.url),
            hosting,
            fake.alive,
            fake.preempt,
            (RUNPOD_KEY,),
        )


CLOUDS = {"aws": aws, "digitalocean": digitalocean, "runpod": runpod, "vastai": vastai, "verda": verda}


@pytest.fixture(params=[pytest.param(name, marks=[] if name in ALWAYS else [pytest.mark.nightly]) for name in CLOUDS])
def rented(
    request: pytest.FixtureRequest, fleet: Fleet, mirror: Mirror, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Rented]:
    """Yield a cloud of bare machines that install from the mirror."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("SKYWARD_LEDGER", f"sqlite:///{tmp_path / 'ledger.db'}")
    hosting = Hosting(fleet, mirror.configure)
    try:
        with CLOUDS[request.param](hosting, monkeypatch) as rented:
            if request.param in ALWAYS:  # in the gate: this fake lists new machines at once, so the wait is not needed
                monkeypatch.setattr(type(rented.provider), "listing_lag_seconds", 1.0)
            yield rented
    finally:
        hosting.close()


def contents(folder: Path) -> Iterator[str]:
    """Yield the contents of a folder's files. SQLite may delete some files meanwhile."""
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError, IsADirectoryError):
            yield path.read_bytes().decode(errors="replace")


def places_of(value: str, rented: Rented) -> list[str]:
    """Return the places that contain a value, on the running machines. The places are files of nodes, on disk and in
    memory, and start environments and arguments of all processes.
    """
    look = "cat /proc/[0-9]*/environ /proc/[0-9]*/cmdline 2>/dev/null | grep -c -a -f /dev/shm/look.$$; grep -rl -f /dev/shm/look.$$"
    command = f"umask 077; cat >/dev/shm/look.$$; {look} ~/.cache /tmp /var/lib /var/log /dev/shm 2>/dev/null | grep -v /look; rm /dev/shm/look.$$"
    return [
        f"{host.name}: {line}"
        for host in rented.hosting.hosts.values()
        if host.is_up
        for line in host.run(command, text=value).stdout.splitlines()
        if line != "0"
    ]


def test_a_pool_runs_on_a_cloud(
    rented: Rented,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is launched, prepared over SSH with a known host key, and used. Files are copied to a machine and back."""
    caplog.set_level(logging.DEBUG)
    token, password, recorded = f"tok-{uuid.uuid4().hex}", f"pw-{uuid.uuid4().hex}", RecordedEvents()
    monkeypatch.setenv("HF_TOKEN", token)
    options: dict[str, Any] = {"secrets": ("HF_TOKEN",), "env": {"DB_PASSWORD": password}}
    pool = sky.ComputePool(
        provider=rented.provider,
        nodes=2,
        cpu=4,
        image=sky.Image(),
        on_event=recorded,
        display="log",
        lease_seconds=60,
        **options,
    )
    with pool:
        assert rented.alive() == {node.instance.id for node in pool.lease.nodes}
        assert all(node.instance.endpoint.host_key for node in pool.lease.nodes)
        assert sorted(where() @ pool) == sorted(host.name for host in rented.hosting.hosts.values())
        lost = pool.lease.nodes[1].instance.id
        futures = pool.submit_all([square(number) for number in range(40)])
        rented.preempt(lost)
        assert [future.result(300) for future in futures] == [number * number for number in range(40)]
        wait_until(lambda: len(prepared(recorded)) == 3, "another machine")
        assert len(where() @ pool) == 2
        assert list(talks() @ pool) == [token[::-1]] * 2
        here, there = tmp_path / "weights.txt", f"{pool.id}:1:weights.txt"
        here.write_text("1 2 3\n")
        assert cli.main(["cp", str(here), there]) == 0
        assert sky.compute(os.path.exists)(here.name) @ pool == (False, True)
        assert cli.main(["cp", there, f"{here}.back"]) == 0
        assert Path(f"{here}.back").read_text() == "1 2 3\n"
        assert places_of(password, rented) != []  # plain text, to check that the search finds existing values
        assert places_of(token, rented) == []
        wait_until(
            lambda: rented.alive() == {node.instance.id for node in pool.lease.nodes},
            "the lost one to be given back",
        )
        written = pool.lease.model_dump_json() + repr(pool.lease) + repr(pool.spec) + pool.spec.model_dump_json()
    assert rented.alive() == set()
    assert not any(host.is_up for host in rented.hosting.hosts.values())
    assert pool.receipt["left"] == []
    assert len(pool.receipt["resources"]) == 3
    out, err = capfd.readouterr()
    texts = [written, out, err, caplog.text, repr(recorded.events), repr(pool.receipt), default_url()]
    texts += contents(tmp_path)
    for secret in (*rented.secrets, token, password):
        assert not [text[:200] for text in texts if secret in text]


def prepared(recorded: RecordedEvents) -> set[str]:
    """Return the ids of the machines that were prepared."""
    return {event.instance_id for event in recorded.of(sky.BootstrapCompleted)}
