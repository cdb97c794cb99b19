"""`Image(cache=True)` in pools: a machine starts from the image of an earlier one; where there are no images, a log says so."""

from __future__ import annotations

import logging
import os
import subprocess
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import cast

import pytest

import skyward_core as sky
from skyward_core.providers import aws_images
from skyward_core.providers.base import STARTED_FROM_TAG
from skyward_core.provisioning.bootstrap import IMAGE_ENV, REST
from tests.conftest import RecordedEvents
from tests.providers.fake_aws import AWS_SECRET, HostedAWS
from tests.providers.hosted import Hosting
from tests.testbed import Fleet, Host
from tests.testbed.fixtures import fleet, mirror  # noqa: F401 - fixtures
from tests.testbed.mirror import Mirror

IMAGE_SECRET, POOL_SECRET = "image-secret-7d1f", "pool-secret-9c2e"


@sky.compute
def value() -> tuple[str | None, str | None]:
    """Return values of the environment of the call."""
    return os.environ.get("INDEX_TOKEN"), os.environ.get("HF_TOKEN")


def test_without_support_for_images_the_log_says_that_cache_has_no_effect(caplog: pytest.LogCaptureFixture) -> None:
    """It is no error, because a captured image only saves time."""
    caplog.set_level(logging.INFO)
    with sky.ComputePool(provider=sky.Local(), image=sky.Image(cache=True), display="quiet") as pool:
        assert tuple(value() @ pool) == ((None, None),)
    assert [record.getMessage() for record in caplog.records if "cache=True" in record.getMessage()] == [
        "local cannot keep the disks of machines: the image's packages are installed as if it had no cache=True"
    ]


class Disks(Hosting):
    """A cloud of hosts. Some start from a copy of another host's disk: only of files that Skyward has written."""

    def __init__(self, fleet: Fleet, prepare: Callable[[Host], object], folder: Path) -> None:
        super().__init__(fleet, prepare)
        self.folder = folder
        self.origin: Callable[[str], str] = lambda _: ""

    def copy(self, machine_id: str) -> None:
        """Copy a disk."""
        root = self.hosts[machine_id].root
        self.folder.mkdir()
        for place in ("root/.cache/skyward", "root/.ssh", "var/lib/cloud", "var/log", "etc/ssh"):
            if (root / place).exists():
                (self.folder / place).parent.mkdir(parents=True, exist_ok=True)
                subprocess.run(["cp", "-a", "--", root / place, self.folder / place], check=True)

    def rent(self, machine_id: str, boot: Callable[[Host], object]) -> None:
        def boot_from_copy(host: Host) -> None:
            if self.origin(machine_id):
                (host.root / "root/.cache").mkdir(exist_ok=True)
                subprocess.run(
                    ["cp", "-a", "--", self.folder / "root/.cache/skyward", host.root / "root/.cache/skyward"],
                    check=True,
                )
                with (host.root / "root/.ssh/authorized_keys").open("a") as allowed:
                    allowed.write("ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIKeyOfWhoeverMadeTheImage stranger\n")
            boot(host)

        super().rent(machine_id, boot_from_copy)


@pytest.fixture
def cloud(fleet: Fleet, mirror: Mirror, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HostedAWS]:
    """Make an AWS. Its machines are hosts that install from the mirror."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("SKYWARD_LEDGER", f"sqlite:///{tmp_path / 'ledger.db'}")
    hosting = Disks(fleet, mirror.configure, tmp_path / "disk")
    try:
        with HostedAWS(hosting) as fake:
            hosting.origin = lambda machine_id: (
                "" if fake.machine(machine_id).image_id not in fake.images.images else machine_id
            )
            fake.images.on_create = hosting.copy
            fake.images.now = datetime.now(UTC)
            monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAIOSFODNN7EXAMPLE")
            monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", AWS_SECRET)
            monkeypatch.setenv("AWS_ENDPOINT_URL", fake.url)
            yield fake
    finally:
        hosting.close()


def pool(recorded: RecordedEvents) -> sky.ComputePool:
    return sky.ComputePool(
        provider=sky.AWS(ssh_cidr="203.0.113.0/24"),
        cpu=4,
        image=sky.Image(cache=True, env={"INDEX_TOKEN": IMAGE_SECRET}),
        env={"HF_TOKEN": POOL_SECRET},
        on_event=recorded,
        display="quiet",
    )


@pytest.mark.timeout(180)
def test_the_second_pool_starts_from_the_image_of_the_first(
    cloud: HostedAWS, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The image has no secrets, and nothing is installed again. Both pools run calls.

    A user who could log in to the first machine cannot log in to the second.
    """
    monkeypatch.setattr(aws_images, "LOOK_SECONDS", 0.05)
    first = RecordedEvents()
    with pool(first) as running:
        assert tuple(value() @ running) == ((IMAGE_SECRET, POOL_SECRET),)
        assert [image.machine for image in cloud.images.images.values()] == [running.lease.nodes[0].instance.id]
    steps = [event.step for event in first.of(sky.BootstrapProgress)]
    assert steps.index("deps") < steps.index("keep") < steps.index("server")
    disk = tmp_path / "disk"
    (environment,) = (disk / "root/.cache/skyward/envs").glob("*/.skyward-complete")
    assert environment.parent.name == sky.Image().content_hash()
    (directory,) = (disk / "root/.cache/skyward/instances").iterdir()
    assert {"bootstrap.sh", "log", IMAGE_ENV} <= {path.name for path in directory.iterdir()}
    assert not {"settings.json", REST} & {path.name for path in directory.iterdir()}
    for secret in (IMAGE_SECRET, POOL_SECRET, AWS_SECRET):
        assert (
            subprocess.run(["grep", "-rlF", "-e", secret, disk], capture_output=True, text=True, check=False).stdout
            == ""
        )
    cloud.images.finish()
    second = RecordedEvents()
    with pool(second) as running:
        (node,) = running.lease.nodes
        assert node.instance.tags[STARTED_FROM_TAG] in cloud.images.images
        assert tuple(value() @ running) == ((IMAGE_SECRET, POOL_SECRET),)
        root = cast("Disks", cloud._hosting).hosts[node.instance.id].root
        assert [path.name for path in (root / "root/.cache/skyward/instances").iterdir()] == [node.instance.id]
        assert "stranger" not in (root / "root/.ssh/authorized_keys").read_text()
    assert not {"uv", "deps", "keep"} & {event.step for event in second.of(sky.BootstrapProgress)}
    assert len(cloud.parameters("CreateImage")) == 1
    assert cloud.alive() == set()
