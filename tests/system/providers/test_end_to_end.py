"""Pools on each cloud's fake, which rents out hosts of the test bed.

A pool uses only data of the provider. It opens, runs, loses a machine, and ends. Afterwards all written data is
searched for credentials.
"""

from __future__ import annotations

import logging
import os
import platform
import subprocess
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import skyward_core as sky
from skyward_core import cli
from skyward_core.ledger.ledger import default_url
from skyward_core.providers.base import BUILT_IN
from tests.conftest import RecordedEvents
from tests.providers import hosted
from tests.providers.hosted import Hosting, Rented
from tests.testbed import Fleet
from tests.testbed.fixtures import fleet, mirror  # noqa: F401 - fixtures
from tests.testbed.mirror import Mirror
from tests.waiting import wait_until

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


CLOUDS = [name for name in BUILT_IN if find_spec(f"tests.providers.fake_{name}")]
"""Each fake has `hosted`, which makes it rent out hosts."""


@pytest.fixture(params=[pytest.param(name, marks=[] if name in ALWAYS else [pytest.mark.nightly]) for name in CLOUDS])
def rented(
    request: pytest.FixtureRequest, fleet: Fleet, mirror: Mirror, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Rented]:
    """Yield a cloud of bare machines that install from the mirror."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("SKYWARD_LEDGER", f"sqlite:///{tmp_path / 'ledger.db'}")
    hosting = Hosting(fleet, mirror.configure)
    try:
        with import_module(f"tests.providers.fake_{request.param}").hosted(hosting, monkeypatch) as rented:
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


def test_a_container_is_known_by_its_new_key_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its boot script removes the old key, and writes the new one, between any two looks."""
    looks = ["ssh-ed25519 old\n", "ssh-ed25519 old\n", "", "", "ssh-ed25519 new\n"]
    monkeypatch.setattr(hosted, "host_key_of", lambda _host: looks.pop(0) if len(looks) > 1 else looks[0])
    host: Any = SimpleNamespace(
        name="host5",
        ip="10.77.0.5",
        known_hosts_path=tmp_path / "known_hosts",
        run=lambda _command: subprocess.CompletedProcess([], 0),
    )
    hosted.container(host, {}, ["true"])
    assert host.known_hosts_path.read_text() == "10.77.0.5 ssh-ed25519 new\n"
