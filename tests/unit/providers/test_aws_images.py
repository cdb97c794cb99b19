"""Images that AWS keeps between pools.

They are found by tag and base image, created once, used, and deleted when they are useless.
"""

from __future__ import annotations

import base64
import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

import skyward_core as sky
from skyward_core.errors import CredentialsError, ProviderFailed
from skyward_core.machines.instances import Instance
from skyward_core.machines.offers import Offer
from skyward_core.providers import aws_images
from skyward_core.providers.base import EXPIRES_TAG, IMAGE_TAG, STARTED_FROM_TAG
from skyward_core.providers.userdata import FORGET
from tests.providers.aws import cloud, make_aws  # noqa: F401 - a fixture
from tests.providers.contract import STARTUP, tags
from tests.providers.fake_aws import NOW, FakeAWS, Image, Snapshot

HASH = "0123456789ab"
UBUNTU = "ami-0b0700000000000x8"
CPU = Offer(
    provider="aws", instance_type="c7i.xlarge", region="us-east-1", price_per_hour=0.1785, vcpus=4, memory_gb=8.6
)
OURS = {IMAGE_TAG: HASH, aws_images.BASE_TAG: UBUNTU}


def make(**fields: Any) -> sky.AWS:
    return make_aws(**{"ssh_cidr": "203.0.113.0/24", **fields})


def launch(provider: sky.AWS, offer: Offer = CPU, *, image: str | None = HASH, token: str = "L0") -> Instance:
    marked = tags(launch=token) | ({IMAGE_TAG: image} if image is not None else {})
    (machine,) = provider.launch(offer, 1, marked, STARTUP)
    return machine


def started_from(cloud: FakeAWS) -> list[str]:
    return [parameters["ImageId"] for parameters in cloud.parameters("RunInstances")]


def test_an_image_of_a_machine_is_created_and_the_next_machine_starts_from_it(cloud: FakeAWS) -> None:
    """Image and snapshot are tagged in the creating call, without a reboot."""
    cloud.images.hidden_listings = 2
    first = launch(make())
    assert started_from(cloud) == [UBUNTU]
    assert STARTED_FROM_TAG not in first.tags
    image_id = make().keep_image(first, HASH)
    (image,) = cloud.images.images.values()
    assert (image.id, image.machine, image.state) == (image_id, first.id, "pending")
    (snapshot,) = cloud.images.snapshots.values()
    assert OURS.items() <= image.tags.items()
    assert image.tags == snapshot.tags
    assert len(cloud.parameters("DescribeSnapshots")) == 3
    cloud.images.finish()
    second = launch(make(), token="L1")
    assert started_from(cloud) == [UBUNTU, image_id]
    assert second.tags[STARTED_FROM_TAG] == image_id
    assert {listed.id: listed.tags.get(STARTED_FROM_TAG) for listed in make().instances()} == {
        first.id: None,
        second.id: image_id,
    }
    assert make().keep_image(second, HASH) is None
    assert len(cloud.parameters("CreateImage")) == 1


@pytest.mark.parametrize(
    ("different", "state", "gb", "region"),
    [
        ({IMAGE_TAG: "ba9876543210"}, "available", 100, "us-east-1"),
        ({aws_images.BASE_TAG: "ami-0b0700000000000a4"}, "available", 100, "us-east-1"),
        ({}, "pending", 100, "us-east-1"),
        ({}, "failed", 100, "us-east-1"),
        ({}, "available", 500, "us-east-1"),
        ({}, "available", 100, "us-west-2"),
    ],
    ids=["packages", "base", "pending", "failed", "larger", "region"],
)
def test_an_image_that_does_not_fit_is_not_used(
    cloud: FakeAWS, different: dict[str, str], state: str, gb: int, region: str
) -> None:
    """It has other packages, another base image, a larger disk or another region, or it is not available."""
    cloud.images.add(OURS | different, state=state, gb=gb, region=region)
    launch(make())
    assert started_from(cloud) == [UBUNTU]


@pytest.mark.parametrize("state", ["pending", "available"])
def test_an_existing_or_pending_image_is_not_created_again(cloud: FakeAWS, state: str) -> None:
    """Another pool has begun earlier."""
    machine = launch(make())
    cloud.images.add(OURS, state=state)
    assert make().keep_image(machine, HASH) is None
    assert cloud.parameters("CreateImage") == []


def test_the_snapshot_is_of_the_root_disk_of_that_machine(cloud: FakeAWS) -> None:
    """A snapshot of another machine with the same packages proves nothing for this one."""
    machine = launch(make())
    cloud.images.snapshots["snap-x"] = Snapshot("snap-x", "us-east-1", "vol-other", 100, dict(OURS), "completed")
    make().keep_image(machine, HASH)
    wanted = {"Name": "volume-id", "Values": [cloud.machine(machine.id).volume]}
    assert all(wanted in call["Filters"] for call in cloud.parameters("DescribeSnapshots"))
    assert len(cloud.parameters("DescribeSnapshots")) == 2


def test_an_image_made_from_a_users_ami_is_only_for_that_ami(cloud: FakeAWS) -> None:
    """`ami=` is the base image, and no image with another base replaces it."""
    mine = cloud.images.add({}, gb=30)
    cloud.images.add(OURS)
    launch(make(ami=mine.id))
    kept = cloud.images.add(OURS | {aws_images.BASE_TAG: mine.id})
    launch(make(ami=mine.id), token="L1")
    assert started_from(cloud) == [mine.id, kept.id]


def test_the_newest_image_is_used(cloud: FakeAWS) -> None:
    """Two pools may have created images at the same time."""
    cloud.images.add(OURS, at=NOW - timedelta(hours=2))
    newest = cloud.images.add(OURS, at=NOW - timedelta(hours=1))
    cloud.images.add(OURS, at=NOW - timedelta(hours=3))
    launch(make())
    assert started_from(cloud) == [newest.id]


def test_without_cache_no_image_is_used(cloud: FakeAWS) -> None:
    """If `cache=True` is not set, no image is looked for."""
    cloud.images.add(OURS)
    launch(make(), image=None)
    assert started_from(cloud) == [UBUNTU]
    assert not [parameters for parameters in cloud.parameters("DescribeImages") if "Owners" in parameters]


def test_a_disk_is_at_least_as_large_as_its_image(cloud: FakeAWS) -> None:
    """It is larger if `disk_gb` is."""
    kept = cloud.images.add(OURS, gb=100)
    launch(make(disk_gb=100))
    launch(make(disk_gb=200), token="L1")
    launch(make(disk_gb=50), token="L2")
    assert started_from(cloud) == [kept.id, kept.id, UBUNTU]
    disks = [call["BlockDeviceMappings"][0]["Ebs"]["VolumeSize"] for call in cloud.parameters("RunInstances")]
    assert disks == [100, 200, 50]


def test_a_failed_search_for_images_does_not_fail_the_launch(cloud: FakeAWS, caplog: pytest.LogCaptureFixture) -> None:
    """The packages are installed, as without an image."""
    cloud.images.add(OURS)
    cloud.fail(
        "DescribeImages", "UnauthorizedOperation", 403, times=99, when=lambda request: "Owners" in request.parameters
    )
    launch(make())
    assert started_from(cloud) == [UBUNTU]
    assert "UnauthorizedOperation" in caplog.text


@pytest.mark.parametrize("code", aws_images.GONE)
def test_an_image_deleted_during_a_launch_does_not_fail_it(cloud: FakeAWS, code: str) -> None:
    """The machine starts from the base image, with another token."""
    kept = cloud.images.add(OURS)
    cloud.fail("RunInstances", code, when=lambda request: request.parameters["ImageId"] == kept.id)
    machine = launch(make())
    assert started_from(cloud) == [kept.id, UBUNTU]
    assert STARTED_FROM_TAG not in machine.tags
    assert len({parameters["ClientToken"] for parameters in cloud.parameters("RunInstances")}) == 2


def test_spot_machines_start_from_the_kept_image(cloud: FakeAWS) -> None:
    """The template of their fleet names it; the base image is used if it is deleted at that moment."""
    cloud.spot = {("c7i.xlarge", "us-east-1a"): 0.05}
    spot = CPU.model_copy(update={"is_spot": True, "price_per_hour": 0.05})
    kept = cloud.images.add(OURS)
    assert launch(make(), spot).tags[STARTED_FROM_TAG] == kept.id
    cloud.fleets.refusals = {("*", "*"): ("InvalidAMIID.NotFound", f"The image id '[{kept.id}]' does not exist")}
    with pytest.raises(sky.BadRequest, match="does not exist"):
        launch(make(), spot, token="L1")
    calls = cloud.parameters("CreateLaunchTemplate")
    assert [call["LaunchTemplateData"]["ImageId"] for call in calls] == [kept.id, kept.id, UBUNTU]


def test_a_machine_removes_the_identity_of_the_captured_machine(cloud: FakeAWS) -> None:
    """Host keys and authorized keys of the captured machine are replaced once for each machine, before logins."""
    launch(make())
    config = json.loads(
        base64.b64decode(cloud.parameters("RunInstances")[0]["UserData"]).decode().removeprefix("#cloud-config\n")
    )
    assert config["bootcmd"] == [["cloud-init-per", "instance", "skyward-forget", "sh", "-c", FORGET]]


def test_a_lost_answer_does_not_matter_if_the_snapshot_is_begun(cloud: FakeAWS) -> None:
    """The creating call is sent once: it has no token."""
    machine = launch(make())
    cloud.fail("CreateImage", is_done=True)
    assert make().keep_image(machine, HASH) == f"skyward-{HASH}-{machine.id}"
    assert len(cloud.parameters("CreateImage")) == len(cloud.images.images) == 1


def test_an_image_without_a_snapshot_in_time_is_deregistered(cloud: FakeAWS) -> None:
    """Data that is written later may be secret."""
    cloud.images.hidden_listings = 10**6
    machine = launch(make())
    with pytest.raises(ProviderFailed, match=r"no snapshot of vol-\w+ was begun within \d+ s"):
        make().keep_image(machine, HASH)
    assert (cloud.images.images, cloud.images.snapshots) == ({}, {})


def expires(image: Image) -> float:
    return float(image.tags[EXPIRES_TAG])


def test_each_use_extends_the_expiry(cloud: FakeAWS) -> None:
    """The provider's setting counts; less than an hour is not written."""
    now = datetime.now(UTC).timestamp()
    kept = cloud.images.add(OURS | {EXPIRES_TAG: str(int(now + 86_400))})
    launch(make(image_keep_days=3))
    assert expires(kept) == pytest.approx(now + 3 * 86_400, abs=60)
    launch(make(image_keep_days=3), token="L1")
    launch(make(image_keep_days=2), token="L2")
    assert len(cloud.parameters("CreateTags")) == 1
    assert expires(kept) == pytest.approx(now + 3 * 86_400, abs=60)


def until(days: float) -> dict[str, str]:
    return OURS | {EXPIRES_TAG: str(int((NOW + timedelta(days=days)).timestamp()))}


def prune(*, is_dry_run: bool = False, **fields: Any) -> list[str]:
    return make(**fields).prune(NOW, is_dry_run=is_dry_run)


def test_useless_images_are_deleted_with_their_snapshots(cloud: FakeAWS) -> None:
    """They are expired, failed or replaced. A dry run reports the same and deletes nothing."""
    over = cloud.images.add(until(-0.1) | {IMAGE_TAG: "over"})
    failed = cloud.images.add(until(9) | {IMAGE_TAG: "failed"}, state="failed")
    older = cloud.images.add(until(9), at=NOW - timedelta(days=2))
    newer = cloud.images.add(until(9), at=NOW - timedelta(days=1))
    untagged_old = cloud.images.add(OURS | {IMAGE_TAG: "old"}, at=NOW - timedelta(days=15))
    stay = [
        newer,
        cloud.images.add(until(9), state="pending"),
        cloud.images.add(until(9) | {aws_images.BASE_TAG: "ami-other"}, at=NOW - timedelta(days=3)),
        cloud.images.add(until(9), gb=500, at=NOW - timedelta(days=3)),
        cloud.images.add(OURS | {IMAGE_TAG: "young"}, at=NOW - timedelta(days=13)),
        cloud.images.add({"Name": "golden"}, at=NOW - timedelta(days=900)),
    ]
    planned = prune(is_dry_run=True)
    assert len(cloud.images.images) == len(cloud.images.snapshots) == 10
    assert prune() == planned
    assert {image.id for image in stay} == set(cloud.images.images)
    assert {snapshot for image in stay for snapshot in image.snapshots} == set(cloud.images.snapshots)
    assert planned == [
        f"image {over.id} in us-east-1, 100 GiB with the packages of over: it has not been used for too long",
        f"image {failed.id} in us-east-1, 100 GiB with the packages of failed: it has failed",
        f"image {older.id} in us-east-1, 100 GiB with the packages of {HASH}: {newer.id} has the same packages, and is newer",
        f"image {untagged_old.id} in us-east-1, 100 GiB with the packages of old: it has not been used for too long",
    ]
    assert prune() == []


def test_an_interrupted_deletion_continues(cloud: FakeAWS) -> None:
    """The client was killed between image and snapshot: the snapshot is found by its tag."""
    image = cloud.images.add(until(-1), at=NOW - timedelta(days=30))
    del cloud.images.images[image.id]
    (line,) = prune(is_dry_run=True)
    assert line == f"snapshot {image.snapshots[0]} in us-east-1, 100 GiB: its image is gone"
    assert prune() == [line]
    assert cloud.images.snapshots == {}


def test_the_snapshot_of_a_pending_image_stays(cloud: FakeAWS) -> None:
    """At first no image lists it. Snapshots of other users stay too."""
    image = cloud.images.add(until(9), at=NOW - timedelta(hours=23))
    del cloud.images.images[image.id]
    stranger = Snapshot(
        "snap-backup", "us-east-1", "vol-1", 100, {"Name": "backup"}, "completed", NOW - timedelta(days=900)
    )
    cloud.images.snapshots[stranger.id] = stranger
    assert prune() == []
    assert len(cloud.images.snapshots) == 2


def test_a_snapshot_that_another_image_uses_stays(cloud: FakeAWS) -> None:
    """A user has registered that image from it; AWS refuses the deletion."""
    image = cloud.images.add(until(-1), at=NOW - timedelta(days=30))
    cloud.images.add({"Name": "mine"}).snapshots.append(image.snapshots[0])
    assert len(prune()) == 1
    assert image.id not in cloud.images.images
    assert image.snapshots[0] in cloud.images.snapshots
    assert prune() == []


def test_an_outage_is_not_an_empty_list_of_images(cloud: FakeAWS) -> None:
    """If it counted as an empty list, every snapshot would look like an orphan."""
    image = cloud.images.add(until(9), at=NOW - timedelta(days=9))
    cloud.fail("DescribeImages", "Unavailable", 503, times=99)
    with pytest.raises(ProviderFailed):
        prune()
    assert image.snapshots[0] in cloud.images.snapshots


def test_a_failure_does_not_stop_other_deletions(cloud: FakeAWS) -> None:
    """The other resources are deleted, then the error is raised."""
    kept, gone = cloud.images.add(until(-1)), cloud.images.add(until(-1))
    cloud.fail(
        "DeregisterImage", "UnauthorizedOperation", 403, when=lambda request: request.parameters["ImageId"] == kept.id
    )
    with pytest.raises(CredentialsError):
        prune()
    assert set(cloud.images.images) == {kept.id}
    assert gone.snapshots[0] not in cloud.images.snapshots


def test_two_sweeps_at_the_same_time_do_not_fail(cloud: FakeAWS) -> None:
    """It is no error if the other sweep has deleted an image already."""
    image = cloud.images.add(until(-1))
    cloud.fail("DeregisterImage", "InvalidAMIID.Unavailable", is_done=True)
    cloud.fail("DeleteSnapshot", "InvalidSnapshot.NotFound", is_done=True)
    assert [line.split()[1] for line in prune()] == [image.id]
    assert (cloud.images.images, cloud.images.snapshots) == ({}, {})
