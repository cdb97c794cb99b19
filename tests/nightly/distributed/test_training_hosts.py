"""Trainings in processes of their own on three hosts of the test bed, with a framework of the test."""

import contextlib
import json
import os
import platform
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest

import skyward_core as sky
from skyward_core.distributed.group import Group, decorator
from tests.conftest import shared
from tests.testbed import Fleet, Host
from tests.testbed.fixtures import fleet, mirror  # noqa: F401 - fixtures
from tests.testbed.mirror import Mirror

pytestmark = [pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def hosts(fleet: Fleet, mirror: Mirror) -> Iterator[list[Host]]:
    """Three bare hosts, except for the configuration of the mirror."""
    hosts = [fleet.create() for _ in range(3)]
    for host in hosts:
        mirror.configure(host)
    yield hosts
    for host in hosts:
        host.crash()


@pytest.fixture(scope="module")
def host_pool(hosts: list[Host], tmp_path_factory: pytest.TempPathFactory) -> Iterator[sky.ComputePool]:
    """One pool on all of them."""
    known_hosts = tmp_path_factory.mktemp("hosts") / "known_hosts"
    known_hosts.write_text("".join(f"{host.known_hosts_line}\n" for host in hosts))
    provider = sky.Hosts(
        *(host.ip for host in hosts),
        user="root",
        key=str(hosts[0].key_path),
        known_hosts=str(known_hosts),
        config="/dev/null",
    )
    with shared(sky.ComputePool(provider=provider, nodes=3, display="quiet", provision_timeout=150)) as pool:
        yield pool


@dataclass(frozen=True)
class Addresses:
    """A framework that collects the addresses of all ranks."""

    needs_process: ClassVar[bool] = True

    @contextlib.contextmanager
    def running(self, group: Group) -> Generator[None]:
        found = group.exchange(group.address)
        group.set_environment({"ADDRESSES": json.dumps(found)})
        yield


def by_two() -> Any:
    return decorator(Addresses(), 60.0, 2)


def test_ranks_of_three_hosts_are_one_group(
    host_pool: sky.ComputePool, hosts: list[Host], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They reach the hub at the head's address. The function's own module, which no host has, travels to each process."""
    (tmp_path / "helper_of_hosts.py").write_text("def name(number):\n    return f'rank {number}'\n")
    monkeypatch.syspath_prepend(tmp_path)

    @sky.compute
    @by_two()
    def ranks() -> tuple[str, str, list[str]]:
        import helper_of_hosts

        return helper_of_hosts.name(sky.instance_info().rank), platform.node(), json.loads(os.environ["ADDRESSES"])

    for _ in range(2):
        found = [one for node in ranks() @ host_pool for one in node]
        assert [one[0] for one in found] == [f"rank {rank}" for rank in range(6)]
        assert len({one[1] for one in found}) == 3
        addresses = found[0][2]
        assert set(addresses) == {host.ip for host in hosts}
        assert all(one[2] == addresses for one in found)
        assert addresses[0::2] == addresses[1::2]
