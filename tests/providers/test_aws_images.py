"""Images that AWS keeps between pools: found by tag and what they were made from, made once, used, and taken away when
they are of no use.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import skyward_core as sky
from skyward_core.cli import main
from skyward_core.errors import CredentialsError, ProviderFailed
from skyward_core.machines.instances import Instance
from skyward_core.machines.offers import Offer
from skyward_core.providers.aws import images
from skyward_core.providers.aws import instances as aws_instances
from skyward_core.providers.aws import launch as aws_launch
from skyward_core.providers.aws import provider as aws_provider
from skyward_core.providers.base import CREATED_TAG, EXPIRES_TAG, IMAGE_TAG, OWNER_TAG, STARTED_FROM_TAG, load
from skyward_core.providers.userdata import FORGET
from tests.providers.contract import STARTUP, tags
from tests.providers.fake_aws import IMAGES, FakeAWS
from tests.providers.fake_images import NOW, Image, Snapshot

HASH = "0123456789ab"
UBUNTU = IMAGES["/aws/service/canonical/ubuntu/server/24.04/stable/current/amd64/hvm/ebs-gp3/ami-id"]
CPU = Offer(
    provider="aws", instance_type="c7i.xlarge", region="us-east-1", price_per_hour=0.1785, vcpus=4, memory_gb=8.6
)
OURS = {IMAGE_TAG: HASH, images.BASE_TAG: UBUNTU}

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from botocore.retries import standard

    monkeypatch.setattr(standard.ExponentialBackoff, "delay_amount", lambda *_: 0)
    monkeypatch.setattr(aws_launch, "AGAIN_SECONDS", (0.0,))
    monkeypatch.setattr(images, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(aws_instances, "FIRST_LOOK_SECONDS", 0.0)


@pytest.fixture
def cloud(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeAWS]:
    with FakeAWS() as fake:
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
        for name in (
            "AWS_SESSION_TOKEN",
            "AWS_PROFILE",
            "AWS_REGION",
            "AWS_DEFAULT_REGION",
            "AWS_CONFIG_FILE",
            "AWS_SHARED_CREDENTIALS_FILE",
        ):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAIOSFODNN7EXAMPLE")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY")
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        monkeypatch.setenv("AWS_ENDPOINT_URL", fake.url)
        yield fake


def make(**fields: Any) -> sky.AWS:
    return sky.AWS(**{"ssh_cidr": "203.0.113.0/24", **fields})


def launch(provider: sky.AWS, offer: Offer = CPU, *, image: str | None = HASH, token: str = "L0") -> Instance:
    marked = tags(launch=token) | ({IMAGE_TAG: image} if image is not None else {})
    (machine,) = provider.launch(offer, 1, marked, STARTUP)
    return machine


def started_from(cloud: FakeAWS) -> list[str]:
    return [words["ImageId"] for words in cloud.words("RunInstances")]


def tags_of(image: Image | Snapshot) -> dict[str, str]:
    return {
        name: value for name, value in image.tags.items() if name not in ("Name", CREATED_TAG, EXPIRES_TAG, OWNER_TAG)
    }


# ── making one, and starting from it ─────────────────────────────────────────────────────────────────────────────────


def test_a_machine_is_made_into_an_image_and_the_next_one_starts_from_it(cloud: FakeAWS) -> None:
    """Without a reboot, tagged in the creating call, its snapshot too; what started from it says so, and is not made
    into another one.
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
    assert len(cloud.words("DescribeSnapshots")) == 3
    cloud.images.finish()
    second = launch(make(), token="L1")
    assert started_from(cloud) == [UBUNTU, image_id]
    assert second.tags[STARTED_FROM_TAG] == image_id
    assert {listed.id: listed.tags.get(STARTED_FROM_TAG) for listed in make().instances()} == {
        first.id: None,
        second.id: image_id,
    }
    assert make().keep_image(second, HASH) is None
    assert len(cloud.words("CreateImage")) == 1


def test_the_snapshot_is_of_the_root_disk_of_that_machine(cloud: FakeAWS) -> None:
    """That another machine with the same packages has one says nothing of this one's moment."""
    machine = launch(make())
    cloud.images.snapshots["snap-x"] = Snapshot("snap-x", "us-east-1", "vol-other", 100, dict(OURS), "completed")
    make().keep_image(machine, HASH)
    volume, _ = cloud.images.disk_of(machine.id)
    assert {(words["Filter.1.Name"], words["Filter.1.Value.1"]) for words in cloud.words("DescribeSnapshots")} == {
        ("volume-id", volume)
    }
    assert len(cloud.words("DescribeSnapshots")) == 2


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
def test_what_does_not_fit_is_not_used(
    cloud: FakeAWS, different: dict[str, str], state: str, gb: int, region: str
) -> None:
    """Other packages, made from another image, not ready, with a larger disk than was asked for, elsewhere."""
    cloud.images.add(OURS | different, state=state, gb=gb, region=region)
    launch(make())
    assert started_from(cloud) == [UBUNTU]


@pytest.mark.parametrize(
    "offer",
    [
        CPU.model_copy(update={"instance_type": "c7g.xlarge"}),
        CPU.model_copy(update={"instance_type": "g4dn.xlarge", "accelerator": "T4", "accelerators": 1}),
    ],
    ids=["arm64", "NVIDIA"],
)
def test_machines_of_another_kind_start_from_another_image(cloud: FakeAWS, offer: Offer) -> None:
    """What AWS has for them is not what it was made from."""
    cloud.images.add(OURS)
    launch(make(), offer)
    assert started_from(cloud)[0] in set(IMAGES.values()) - {UBUNTU}


def test_an_image_made_from_ones_own_is_for_that_one(cloud: FakeAWS) -> None:
    """`ami=` is what is started from when nothing is kept, and nothing else's image stands in for it."""
    mine = cloud.images.add({}, gb=30)
    cloud.images.add(OURS)
    launch(make(ami=mine.id))
    kept = cloud.images.add(OURS | {images.BASE_TAG: mine.id})
    launch(make(ami=mine.id), token="L1")
    assert started_from(cloud) == [mine.id, kept.id]


def test_the_newest_one_is_taken(cloud: FakeAWS) -> None:
    """Of several that two pools have made at once."""
    cloud.images.add(OURS, at=NOW - timedelta(hours=2))
    newest = cloud.images.add(OURS, at=NOW - timedelta(hours=1))
    cloud.images.add(OURS, at=NOW - timedelta(hours=3))
    launch(make())
    assert started_from(cloud) == [newest.id]


def test_nobody_who_has_not_asked_for_it_gets_one(cloud: FakeAWS) -> None:
    """Without `cache=True` nothing is looked for."""
    cloud.images.add(OURS)
    launch(make(), image=None)
    assert started_from(cloud) == [UBUNTU]
    assert not [words for words in cloud.words("DescribeImages") if "Owner.1" in words]


def test_a_disk_is_as_large_as_its_image_at_least(cloud: FakeAWS) -> None:
    """And as `disk_gb` says if that is more."""
    kept = cloud.images.add(OURS, gb=100)
    launch(make(disk_gb=100))
    launch(make(disk_gb=200), token="L1")
    launch(make(disk_gb=50), token="L2")
    assert started_from(cloud) == [kept.id, kept.id, UBUNTU]
    assert [words["BlockDeviceMapping.1.Ebs.VolumeSize"] for words in cloud.words("RunInstances")] == [
        "100",
        "200",
        "50",
    ]


@pytest.mark.parametrize("state", ["pending", "available"])
def test_what_is_there_or_on_its_way_is_not_made_again(cloud: FakeAWS, state: str) -> None:
    """Another pool was quicker."""
    machine = launch(make())
    cloud.images.add(OURS, state=state)
    assert make().keep_image(machine, HASH) is None
    assert cloud.words("CreateImage") == []


def test_one_that_has_failed_or_is_too_large_is_made_again(cloud: FakeAWS) -> None:
    """Nobody would use it."""
    machine = launch(make())
    cloud.images.add(OURS, state="failed")
    cloud.images.add(OURS, gb=500)
    assert make().keep_image(machine, HASH) is not None


def test_an_image_that_cannot_be_looked_for_costs_no_machine(cloud: FakeAWS, caplog: pytest.LogCaptureFixture) -> None:
    """The packages are installed, as if none were there."""
    cloud.images.add(OURS)
    cloud.fail("DescribeImages", "UnauthorizedOperation", 403, times=99, when=lambda asked: "Owner.1" in asked.words)
    launch(make())
    assert started_from(cloud) == [UBUNTU]
    assert "UnauthorizedOperation" in caplog.text


@pytest.mark.parametrize("code", images.GONE)
def test_an_image_that_is_taken_away_at_that_moment_costs_no_machine(cloud: FakeAWS, code: str) -> None:
    """The machine is started from what it would be started from without it, with another token."""
    kept = cloud.images.add(OURS)
    cloud.fail("RunInstances", code, when=lambda asked: asked.words["ImageId"] == kept.id)
    machine = launch(make())
    assert started_from(cloud) == [kept.id, UBUNTU]
    assert STARTED_FROM_TAG not in machine.tags
    assert len({words["ClientToken"] for words in cloud.words("RunInstances")}) == 2


def test_spot_machines_start_from_it_too(cloud: FakeAWS) -> None:
    """By the template of their fleet; and from what it was made from, if it is taken away at that moment."""
    cloud.spot = {("c7i.xlarge", "us-east-1a"): 0.05}
    spot = CPU.model_copy(update={"is_spot": True, "price_per_hour": 0.05})
    kept = cloud.images.add(OURS)
    assert launch(make(), spot).tags[STARTED_FROM_TAG] == kept.id
    cloud.fleets.refusals = {("*", "*"): ("InvalidAMIID.NotFound", f"The image id '[{kept.id}]' does not exist")}
    with pytest.raises(sky.BadRequest, match="does not exist"):
        launch(make(), spot, token="L1")
    assert [words["LaunchTemplateData.ImageId"] for words in cloud.words("CreateLaunchTemplate")] == [
        kept.id,
        kept.id,
        UBUNTU,
    ]


def test_a_machine_forgets_whose_disk_it_has(cloud: FakeAWS) -> None:
    """Before anybody is let in, once for each machine: who the other one was, and whose key could log in there."""
    launch(make())
    config = json.loads(
        base64.b64decode(cloud.words("RunInstances")[0]["UserData"]).decode().removeprefix("#cloud-config\n")
    )
    assert config["bootcmd"] == [["cloud-init-per", "instance", "skyward-forget", "sh", "-c", FORGET]]


# ── what goes wrong while one is made ────────────────────────────────────────────────────────────────────────────────


def test_a_refusal_is_told(cloud: FakeAWS) -> None:
    """By credentials that may not make images; nothing is waited for."""
    machine = launch(make())
    cloud.fail("CreateImage", "UnauthorizedOperation", 403)
    with pytest.raises(CredentialsError):
        make().keep_image(machine, HASH)
    assert cloud.words("DescribeSnapshots") == []


def test_a_lost_answer_does_not_matter_if_the_snapshot_is_begun(cloud: FakeAWS) -> None:
    """The creating call is sent once: it has no token."""
    machine = launch(make())
    cloud.fail("CreateImage", is_done=True)
    assert make().keep_image(machine, HASH) == f"skyward-{HASH}-{machine.id}"
    assert len(cloud.words("CreateImage")) == len(cloud.images.images) == 1


def test_asked_for_again_by_its_name_it_is_the_same(cloud: FakeAWS) -> None:
    """A listing that comes late must not make two of it."""
    machine = launch(make())
    make().keep_image(machine, HASH)
    (image,) = cloud.images.images.values()
    image.tags[images.BASE_TAG] = "not listed yet"
    assert make().keep_image(machine, HASH) == image.name
    assert list(cloud.images.images) == [image.id]


def test_nothing_is_kept_of_a_moment_that_is_not_known(cloud: FakeAWS, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written next may be secret: an image whose snapshot is not begun in time is taken away again."""
    monkeypatch.setattr(images, "SNAPSHOT_SECONDS", 0.05)
    cloud.images.hidden_listings = 10**6
    machine = launch(make())
    with pytest.raises(ProviderFailed, match=r"no snapshot of vol-\w+ was begun within 0.05 s"):
        make().keep_image(machine, HASH)
    assert (cloud.images.images, cloud.images.snapshots) == ({}, {})


def test_an_outage_while_it_is_waited_for_is_waited_out(cloud: FakeAWS) -> None:
    """It proves nothing."""
    machine = launch(make())
    cloud.fail("DescribeSnapshots", "Unavailable", 503, times=7)
    assert make().keep_image(machine, HASH) in cloud.images.images


def test_a_machine_that_is_gone_is_not_kept(cloud: FakeAWS) -> None:
    """A client asks for it that has not noticed yet."""
    machine = launch(make())
    with pytest.raises(ProviderFailed, match="i-0123 is not listed"):
        make().keep_image(machine.model_copy(update={"id": "i-0123"}), HASH)


# ── how long they are kept ───────────────────────────────────────────────────────────────────────────────────────────


def expires(image: Image) -> float:
    return float(image.tags[EXPIRES_TAG])


def test_each_use_lengthens_its_life(cloud: FakeAWS) -> None:
    """As the provider that uses it says; what would add less than an hour is not written."""
    now = datetime.now(UTC).timestamp()
    kept = cloud.images.add(OURS | {EXPIRES_TAG: str(int(now + 86_400))})
    launch(make(image_keep_days=3))
    assert expires(kept) == pytest.approx(now + 3 * 86_400, abs=60)
    launch(make(image_keep_days=3), token="L1")
    launch(make(image_keep_days=2), token="L2")
    assert len(cloud.words("CreateTags")) == 1
    assert expires(kept) == pytest.approx(now + 3 * 86_400, abs=60)


def test_a_tag_that_cannot_be_written_costs_no_machine(cloud: FakeAWS) -> None:
    """And one without a date gets one."""
    kept = cloud.images.add(OURS)
    cloud.fail("CreateTags", "UnauthorizedOperation", 403)
    launch(make())
    assert EXPIRES_TAG not in kept.tags
    launch(make(), token="L1")
    assert EXPIRES_TAG in kept.tags
    assert started_from(cloud) == [kept.id, kept.id]


def until(days: float) -> dict[str, str]:
    return OURS | {EXPIRES_TAG: str(int((NOW + timedelta(days=days)).timestamp()))}


def prune(*, is_dry_run: bool = False, **fields: Any) -> list[str]:
    return make(**fields).prune(NOW, is_dry_run=is_dry_run)


def test_what_is_of_no_use_is_taken_away_with_its_snapshots(cloud: FakeAWS) -> None:
    """One whose time is over, one that has failed, one of which a newer one is there; a dry run says the same and
    touches nothing.
    """
    over = cloud.images.add(until(-0.1) | {IMAGE_TAG: "over"})
    failed = cloud.images.add(until(9) | {IMAGE_TAG: "failed"}, state="failed")
    older = cloud.images.add(until(9), at=NOW - timedelta(days=2))
    newer = cloud.images.add(until(9), at=NOW - timedelta(days=1))
    untagged_old = cloud.images.add(OURS | {IMAGE_TAG: "old"}, at=NOW - timedelta(days=15))
    stay = [
        newer,
        cloud.images.add(until(9), state="pending"),
        cloud.images.add(until(9) | {images.BASE_TAG: "ami-other"}, at=NOW - timedelta(days=3)),
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


def test_days_are_the_providers_where_the_tag_is_missing(cloud: FakeAWS) -> None:
    """Somebody has taken the tag off."""
    cloud.images.add(OURS, at=NOW - timedelta(days=20))
    assert prune(image_keep_days=30) == []
    assert len(prune(image_keep_days=10)) == 1


def test_an_interrupted_one_goes_on(cloud: FakeAWS) -> None:
    """Killed after an image was deregistered and before its snapshot was deleted: that one is found by its tag."""
    image = cloud.images.add(until(-1), at=NOW - timedelta(days=30))
    del cloud.images.images[image.id]
    (line,) = prune(is_dry_run=True)
    assert line == f"snapshot {image.snapshots[0]} in us-east-1, 100 GiB: its image is gone"
    assert prune() == [line]
    assert cloud.images.snapshots == {}


def test_the_snapshot_of_an_image_that_is_being_made_stays(cloud: FakeAWS) -> None:
    """For a while nothing says that it belongs to one; and one that is not ours is none of our business."""
    image = cloud.images.add(until(9), at=NOW - timedelta(hours=23))
    del cloud.images.images[image.id]
    stranger = Snapshot(
        "snap-backup", "us-east-1", "vol-1", 100, {"Name": "backup"}, "completed", NOW - timedelta(days=900)
    )
    cloud.images.snapshots[stranger.id] = stranger
    assert prune() == []
    assert len(cloud.images.snapshots) == 2


def test_a_snapshot_that_somebody_else_uses_stays(cloud: FakeAWS) -> None:
    """An image that a user has registered from it; AWS does not let it be deleted."""
    image = cloud.images.add(until(-1), at=NOW - timedelta(days=30))
    cloud.images.add({"Name": "mine"}).snapshots.append(image.snapshots[0])
    assert len(prune()) == 1
    assert image.id not in cloud.images.images
    assert image.snapshots[0] in cloud.images.snapshots
    assert prune() == []


def test_one_failure_hides_no_other_image(cloud: FakeAWS) -> None:
    """The others go, then it is raised."""
    kept, gone = cloud.images.add(until(-1)), cloud.images.add(until(-1))
    cloud.fail("DeregisterImage", "UnauthorizedOperation", 403, when=lambda asked: asked.words["ImageId"] == kept.id)
    with pytest.raises(CredentialsError):
        prune()
    assert set(cloud.images.images) == {kept.id}
    assert gone.snapshots[0] not in cloud.images.snapshots


def test_two_sweeps_at_once_do_not_trip_over_each_other(cloud: FakeAWS) -> None:
    """What another one has taken away meanwhile is gone, and that is what was wanted."""
    image = cloud.images.add(until(-1))
    cloud.fail("DeregisterImage", "InvalidAMIID.Unavailable", is_done=True)
    cloud.fail("DeleteSnapshot", "InvalidSnapshot.NotFound", is_done=True)
    assert [line.split()[1] for line in prune()] == [image.id]
    assert (cloud.images.images, cloud.images.snapshots) == ({}, {})


def test_all_regions_are_looked_at(cloud: FakeAWS) -> None:
    """An image is its region's."""
    here, there = cloud.images.add(until(-1)), cloud.images.add(until(-1), region="us-west-2")
    cloud.images.add(until(-1), region="eu-west-1")
    assert [line.split()[1] for line in prune(region=("us-east-1", "us-west-2"))] == [here.id, there.id]


def test_a_region_that_the_account_has_not_enabled_holds_nothing(
    cloud: FakeAWS, caplog: pytest.LogCaptureFixture
) -> None:
    """It is named in the log, and the others are pruned; where nobody can say that it is not enabled, its refusal is
    raised as ever.
    """
    cloud.not_enabled = {"us-west-2"}
    here = cloud.images.add(until(-1))
    assert [line.split()[1] for line in prune(region=("us-east-1", "us-west-2"))] == [here.id]
    assert [
        record.getMessage().split(" is not enabled")[0]
        for record in caplog.records
        if "not enabled" in record.getMessage()
    ] == ["us-west-2"]
    with pytest.raises(CredentialsError):
        prune(region="us-west-2")


def test_an_outage_is_not_read_as_nothing_there(cloud: FakeAWS) -> None:
    """Without the list of images every snapshot would look like an orphan."""
    image = cloud.images.add(until(9), at=NOW - timedelta(days=9))
    cloud.fail("DescribeImages", "Unavailable", 503, times=99)
    with pytest.raises(ProviderFailed):
        prune()
    assert image.snapshots[0] in cloud.images.snapshots


def test_who_may_not_list_snapshots_has_kept_nothing(cloud: FakeAWS) -> None:
    """A sweep with the credentials of one who has never used this goes well; an outage, and credentials that are no
    good at all, are told.
    """
    cloud.images.add(until(-1))
    for code, kind in (("Unavailable", ProviderFailed), ("AuthFailure", CredentialsError)):
        fault = {"code": code, "status": 503 if kind is ProviderFailed else 401}
        cloud.fail("DescribeSnapshots", **fault, times=5 if kind is ProviderFailed else 1)
        with pytest.raises(kind):
            prune()
    cloud.fail("DescribeSnapshots", "UnauthorizedOperation", 403)
    assert len(prune()) == 1


def test_what_launches_have_left_goes_too(cloud: FakeAWS, monkeypatch: pytest.MonkeyPatch) -> None:
    """Templates and groups of `prune_launches`; that one of the two fails keeps the other from nothing."""
    monkeypatch.setattr(
        aws_provider,
        "prune_launches",
        lambda _, region, now, *, is_dry_run: [f"template in {region} at {now:%H:%M}, {is_dry_run}"],
    )
    image = cloud.images.add(until(-1))
    assert [line.split(",")[0] for line in prune(is_dry_run=True)] == [
        f"image {image.id} in us-east-1",
        "template in us-east-1 at 12:00",
    ]

    def fail(*_: object, **__: object) -> list[str]:
        raise ProviderFailed("out")

    monkeypatch.setattr(aws_provider, "prune_launches", fail)
    with pytest.raises(ProviderFailed):
        prune()
    assert cloud.images.images == {}


def test_the_command_tells_what_it_would_take_away(
    cloud: FakeAWS, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In words and as JSON; there is something to do then (3). With --yes it does it."""
    image = cloud.images.add(OURS | {EXPIRES_TAG: "1"})
    url = f"sqlite:///{tmp_path / 'ledger.db'}"
    words = ["--ledger", url, "sweep", "--provider", '{"name": "aws"}']
    line = f"aws: image {image.id} in us-east-1, 100 GiB with the packages of {HASH}: it has not been used for too long"
    assert main(words) == 3
    assert capsys.readouterr().out == f"to be taken away: {line}\nnothing was touched; `skyward sweep --yes` does it\n"
    assert main([*words, "--json"]) == 3
    assert json.loads(capsys.readouterr().out)["pruned"] == [line]
    assert main([*words, "--yes"]) == 0
    assert capsys.readouterr().out == f"taken away: {line}\n1 thing of no use taken away\n"
    assert main(words) == 0
    assert capsys.readouterr().out == "nothing is to be done\n"


# ── the sweep ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_sweep_takes_them_away(cloud: FakeAWS, tmp_path: Path) -> None:
    """It says so in its report; a dry run says what it would take away. A failure there is one of the report's."""
    cloud.images.add(OURS | {EXPIRES_TAG: "1"})
    url = f"sqlite:///{tmp_path / 'ledger.db'}"
    assert len(cloud.images.images) == 1
    planned = sky.sweep([make()], ledger_url=url)
    assert len(planned.pruned) == 1
    assert planned.pruned[0].startswith("aws: image ami-")
    cloud.fail("DeregisterImage", "UnauthorizedOperation", 403)
    failed = sky.sweep([make()], ledger_url=url, is_dry_run=False)
    assert [failure.provider for failure in failed.failures] == ["aws"]
    assert failed.pruned == ()
    done = sky.sweep([make(), make(disk_gb=50)], ledger_url=url, is_dry_run=False)
    assert set(done.pruned) == set(planned.pruned)
    assert len(done.pruned) == 1
    assert cloud.images.images == {}


def test_how_long_is_plain_data() -> None:
    """A day at least: what is used every day is not made every day."""
    assert load(json.loads(json.dumps(sky.AWS(image_keep_days=30).to_json()))) == sky.AWS(image_keep_days=30)
    with pytest.raises(ValueError, match="greater than or equal to 1"):
        sky.AWS(image_keep_days=0)
