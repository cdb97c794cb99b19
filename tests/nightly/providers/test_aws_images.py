"""Images that AWS keeps between pools.

They are found by tag and base image, created once, used, and deleted when they are useless.
"""

from __future__ import annotations

import pytest

from skyward_core.providers.aws import images
from skyward_core.providers.base import CREATED_TAG, EXPIRES_TAG, IMAGE_TAG, OWNER_TAG, STARTED_FROM_TAG
from tests.providers.fake_aws import FakeAWS
from tests.providers.fake_images import Image, Snapshot
from tests.system.providers.test_aws_images import (  # noqa: F401 - fixtures
    CPU,
    HASH,
    OURS,
    UBUNTU,
    _at_once,
    cloud,
    launch,
    make,
    started_from,
)


def tags_of(image: Image | Snapshot) -> dict[str, str]:
    return {
        name: value for name, value in image.tags.items() if name not in ("Name", CREATED_TAG, EXPIRES_TAG, OWNER_TAG)
    }


# ── creating an image, and starting from it ──────────────────────────────────────────────────────────────────────────


def test_an_image_of_a_machine_is_created_and_the_next_machine_starts_from_it(cloud: FakeAWS) -> None:
    """Image and snapshot are tagged in the creating call, without a reboot. A machine started from it is not captured
    again.
    """
    cloud.images.hidden_listings = 2
    first = launch(make())
    assert started_from(cloud) == [UBUNTU]
    assert STARTED_FROM_TAG not in first.tags
    image_id = make().keep_image(first, HASH)
    (image,) = cloud.images.images.values()
    assert (image.id, image.machine, image.state) == (image_id, first.id, "pending")
    (snapshot,) = cloud.images.snapshots.values()
    assert tags_of(image) == tags_of(snapshot) == OURS
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
        ({images.BASE_TAG: "ami-0b0700000000000a4"}, "available", 100, "us-east-1"),
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
