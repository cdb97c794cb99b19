"""Volumes in pools: calls read and write them on every node, and nothing is mounted when the pool has ended."""

from pathlib import Path

import pytest

import skyward_core as sky
from tests.conftest import RecordedEvents
from tests.system.image.test_volume_hosts import KEYS, SECRET, Service, service
from tests.testbed import Fleet
from tests.testbed.fixtures import fleet, mirror
from tests.testbed.mirror import Mirror
from tests.waiting import wait_until

__all__ = ["fleet", "mirror", "service"]


@sky.compute
def read(path: str) -> str:
    return Path(path).read_text()


@sky.compute
def write(path: str, text: str) -> str:
    """Write a file, or return the reason of a failure."""
    try:
        Path(path).write_text(text)
    except OSError as error:
        return type(error).__name__
    return ""


def test_calls_read_and_write_buckets(fleet: Fleet, mirror: Mirror, service: Service) -> None:
    service.fill("pool-data", {"datasets/a.txt": "a", "other/b.txt": "b"})
    service.fill("pool-results", {})
    hosts = [fleet.create() for _ in range(2)]
    for host in hosts:
        mirror.configure(host)
    recorded = RecordedEvents()
    provider = sky.Hosts(
        *[host.ip for host in hosts], user="root", key=str(fleet.key_path), known_hosts="/dev/null", config="/dev/null"
    )
    volumes = (
        sky.S3Volume(mount_path="/data", bucket="pool-data", prefix="datasets"),
        sky.S3Volume(mount_path="/results", bucket="pool-results", read_only=False),
    )
    env = {"AWS_ENDPOINT_URL_S3": service.url, **KEYS}
    with sky.ComputePool(
        provider=provider, nodes=2, volume=volumes, env=env, display="quiet", on_event=recorded
    ) as pool:
        assert read("/data/a.txt") @ pool == ("a", "a")
        assert write("/data/new.txt", "x") >> pool == "OSError"
        assert write("/results/done.txt", "result") >> pool == ""
        assert service.objects("pool-results") == {"done.txt": "result"}
    assert "volumes" in {event.step for event in recorded.of(sky.BootstrapProgress)}
    assert SECRET not in repr(recorded.events)
    for host in hosts:
        assert host.run("findmnt --noheadings --raw --output FSTYPE | grep -c fuse.s3fs").stdout.strip() == "0"
        wait_until(lambda host=host: host.run("pgrep -x s3fs").returncode == 1, "s3fs to end")
        assert host.run(f"grep -rls {SECRET} /root /tmp /dev/shm").stdout == ""


def test_a_missing_bucket_fails_the_pool_with_the_reason(fleet: Fleet, mirror: Mirror, service: Service) -> None:
    host = fleet.create()
    mirror.configure(host)
    provider = sky.Hosts(host.ip, user="root", key=str(fleet.key_path), known_hosts="/dev/null", config="/dev/null")
    pool = sky.ComputePool(
        provider=provider,
        volume=sky.S3Volume(mount_path="/data", bucket="not-there"),
        env={"AWS_ENDPOINT_URL_S3": service.url, **KEYS},
        display="quiet",
    )
    with pytest.raises(sky.BootstrapFailed) as caught:
        pool.open()
    assert caught.value.phase == "volumes"
    assert "not-there" in str(caught.value)
    assert SECRET not in str(caught.value)
    assert provider.instances(str(pool)) == []
