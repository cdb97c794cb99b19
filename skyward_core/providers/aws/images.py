"""Images of prepared machines that EC2 keeps between pools: AMIs of our own, found again by tag. "Fact sheet" is the
one of 2026-11-20, 1.7.

States of one, and who undoes what when a client is stopped between two lines:

    nothing ──keep──▶ asked for ──▶ pending ──▶ available ──prune──▶ deregistered ──prune──▶ its snapshots deleted
                          │            └──▶ failed ───────prune──▶
                          └── no snapshot in time: `keep` itself deregisters what came of it

Its tags are its record, set in the creating call: of what (IMAGE_TAG), made from which other image (BASE_TAG), until
when (EXPIRES_TAG). It stands in no ledger, for it is to outlive every pool that uses it: an entry would keep its pool's
page open. So whoever is stopped in between leaves what the next pool finds and uses, or what the next `prune` takes
away: snapshots carry the same tags, and are found without their image.

A machine is started from the newest one that was made from the very image that it would be started from otherwise. When
AWS brings out a newer one, with other drivers, none fits any more and the next pool makes one: what is kept saves time
and does not keep old systems alive.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from skyward_core.errors import BadRequest, CredentialsError, ProviderFailed, SkywardError
from skyward_core.providers.aws.account import Account, collected, number
from skyward_core.providers.base import CREATED_TAG, EXPIRES_TAG, IMAGE_TAG, OWNER_TAG

BASE_TAG = "skyward-image-base"
"""The id of the image that a kept one was made from."""
AVAILABLE, PENDING = "available", "pending"
FAILED = ("failed", "error", "invalid")
SNAPSHOT_SECONDS, LOOK_SECONDS = 30.0, 0.5
"""How long to wait for a snapshot that was asked for to be begun, and between two looks."""
YOUNG_SNAPSHOT = timedelta(days=1)
"""A snapshot without an image is younger than that while its image is being made."""
RENEWED_AFTER_SECONDS = 3600.0
"""How much longer an image must be going to live, for its tag to be written anew."""
GONE = ("InvalidAMIID.NotFound", "InvalidAMIID.Unavailable")
GONE_SNAPSHOT = "InvalidSnapshot.NotFound"
USED_SNAPSHOT = "InvalidSnapshot.InUse"
UNAUTHORIZED = "UnauthorizedOperation"
TAKEN_NAME = "InvalidAMIName.Duplicate"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which kept image fits: of what, made from which image, with a root disk of so many GiB at the most."""

    image_hash: str
    base: str
    most_gb: int


def root_gb(image: Mapping[str, Any]) -> int:
    """Return the size in GiB of the root disk that an image asks for; 0 if it does not tell."""
    devices = [
        device for device in image.get("BlockDeviceMappings", []) if device.get("DeviceName") == image["RootDeviceName"]
    ]
    return max((device.get("Ebs", {}).get("VolumeSize", 0) for device in devices), default=0)


def wanted(image_hash: str, base: Mapping[str, Any], disk_gb: int) -> Wanted:
    """Return what fits in place of `base` for machines that are to have `disk_gb`: a disk can be larger than its image,
    never smaller.
    """
    return Wanted(image_hash, base["ImageId"], max(disk_gb, root_gb(base)))


def kept(account: Account, region: str, want: Wanted, *states: str) -> list[dict[str, Any]]:
    """Return the kept images that fit and are in one of these states, the newest first."""
    filters = {f"tag:{IMAGE_TAG}": [want.image_hash], f"tag:{BASE_TAG}": [want.base], "state": list(states)}
    found = [image for image in _ours(account, region, filters) if root_gb(image) <= want.most_gb]
    return sorted(found, key=lambda image: str(image.get("CreationDate", "")), reverse=True)


def lengthen(account: Account, region: str, image: Mapping[str, Any], until: datetime) -> None:
    """Keep an image that is used until then at least.

    What fails costs the image some days of its life, and nobody a machine.
    """
    told = number(_tags(image).get(EXPIRES_TAG))
    if told is not None and told + RENEWED_AFTER_SECONDS > until.timestamp():
        return
    try:
        account.ask(
            region,
            "ec2",
            "create_tags",
            Resources=[image["ImageId"]],
            Tags=[{"Key": EXPIRES_TAG, "Value": str(int(until.timestamp()))}],
        )
    except SkywardError as error:
        log.warning("%s could not be marked as used: %s", image["ImageId"], error)


# ── making one ───────────────────────────────────────────────────────────────────────────────────────────────────────


def keep(
    account: Account,
    region: str,
    machine_id: str,
    image_hash: str,
    *,
    disk_gb: int,
    now: datetime,
    until: datetime,
    owner: str,
) -> str | None:
    """Begin to make an image of a machine; return its id once the snapshot of the root disk is begun. None if one that
    fits is there or on its way.

    A snapshot shows what was on the disk when it was asked for. CreateImage asks for it a moment after it has answered,
    so the answer does not prove that the moment is over: a snapshot that is listed does. Raises what AWS has refused it
    with; ProviderFailed if no snapshot was begun in time: whatever comes of it then is deregistered.
    """
    (machine,) = account.machines(region, {"Name": "instance-id", "Values": [machine_id]}) or [None]
    if machine is None:
        raise ProviderFailed(f"{machine_id} is not listed")
    (base,) = account.ask(region, "ec2", "describe_images", ImageIds=[machine["ImageId"]])["Images"]
    if IMAGE_TAG in _tags(base):
        return None
    if there := kept(account, region, wanted(image_hash, base, disk_gb), AVAILABLE, PENDING):
        log.info(
            "%s has the packages of %s, and is %s: no other image is made",
            there[0]["ImageId"],
            image_hash,
            there[0]["State"],
        )
        return None
    name = f"skyward-{image_hash}-{machine_id}"
    tags = {
        "Name": name,
        IMAGE_TAG: image_hash,
        BASE_TAG: base["ImageId"],
        OWNER_TAG: owner,
        CREATED_TAG: str(int(now.timestamp())),
        EXPIRES_TAG: str(int(until.timestamp())),
    }
    image_id = _asked_for(account, region, machine_id, name, tags)
    try:
        _await_snapshot(account, region, _root_volume(machine), image_hash)
    except BaseException:
        _give_up(account, region, name)
        raise
    return image_id or name


def _asked_for(account: Account, region: str, machine_id: str, name: str, tags: Mapping[str, str]) -> str | None:
    """Send the creating call, once: it has no token, but a name that only one image can have.

    None if its answer is lost, or it was sent before.
    """
    pairs = [{"Key": key, "Value": value} for key, value in tags.items()]
    try:
        answer = account.ask(
            region,
            "ec2",
            "create_image",
            once=True,
            InstanceId=machine_id,
            Name=name,
            Description=f"A machine of Skyward, prepared with the packages of image {tags[IMAGE_TAG]}",
            NoReboot=True,
            TagSpecifications=[{"ResourceType": kind, "Tags": pairs} for kind in ("image", "snapshot")],
        )
    except ProviderFailed as error:
        log.warning("nobody knows whether %s is being made: %s", name, error)
        return None
    except BadRequest as error:
        if error.code != TAKEN_NAME:
            raise
        return None
    return str(answer["ImageId"])


def _root_volume(machine: Mapping[str, Any]) -> str:
    devices = {
        device["DeviceName"]: device.get("Ebs", {}).get("VolumeId", "")
        for device in machine.get("BlockDeviceMappings", [])
    }
    return str(devices.get(machine.get("RootDeviceName", ""), ""))


def _await_snapshot(account: Account, region: str, volume_id: str, image_hash: str) -> None:
    deadline = time.monotonic() + SNAPSHOT_SECONDS
    trouble: SkywardError | None = None
    while True:
        try:
            if any(
                snapshot.get("State") != "error"
                for snapshot in _snapshots(
                    account, region, {"volume-id": [volume_id], f"tag:{IMAGE_TAG}": [image_hash]}
                )
            ):
                return
        except SkywardError as error:  # an outage may be over in time
            trouble = error
        if time.monotonic() > deadline:
            raise ProviderFailed(
                f"no snapshot of {volume_id} was begun within {SNAPSHOT_SECONDS:g} s: no image is kept"
            ) from trouble
        time.sleep(LOOK_SECONDS)


def _give_up(account: Account, region: str, name: str) -> None:
    """Take away what has come of a creating call so far: an image that is made later could have what nobody should
    read.
    """
    try:
        for image in _ours(account, region, {"name": [name]}):
            _remove(account, region, image)
    except SkywardError as error:
        log.warning("%s may be made all the same, and should be deregistered: %s", name, error)


# ── taking them away ─────────────────────────────────────────────────────────────────────────────────────────────────


def prune(account: Account, region: str, now: datetime, keep_days: float, *, is_dry_run: bool) -> list[str]:
    """Take away images that have failed, of which a newer one is there, or whose time is over, and snapshots without an
    image; say what, a line each.

    `keep_days` counts from its making for an image that has lost its tag. Asked for again after it was stopped
    anywhere, it goes on. Raises the first failure once everything else is done.
    """
    images = _ours(account, region, {"tag-key": [IMAGE_TAG]})
    doomed = list(_doomed(images, now, timedelta(days=keep_days)))
    orphans = _orphans(_listed_snapshots(account, region), images, now)
    told: list[str] = []
    failures: list[SkywardError] = []
    for image, why in doomed:
        line = (
            f"image {image['ImageId']} in {region}, {root_gb(image)} GiB with the packages of"
            f" {_tags(image)[IMAGE_TAG]}: {why}"
        )
        with collected(failures):
            if not is_dry_run:
                _remove(account, region, image)
                log.info("taken away: %s", line)
            told.append(line)
    for snapshot in orphans:
        line = (
            f"snapshot {snapshot['SnapshotId']} in {region}, {snapshot.get('VolumeSize', '?')} GiB: its image is gone"
        )
        with collected(failures):
            if is_dry_run or _deleted(account, region, snapshot["SnapshotId"]):
                told.append(line)
    if failures:
        raise failures[0]
    return told


def _doomed(
    images: Sequence[dict[str, Any]], now: datetime, keep_for: timedelta
) -> Iterator[tuple[dict[str, Any], str]]:
    newest: dict[tuple[str, str, int], dict[str, Any]] = {}
    for image in sorted(images, key=lambda image: str(image.get("CreationDate", ""))):
        if image["State"] == AVAILABLE:
            newest[_kind(image)] = image
    for image in images:
        until = number(_tags(image).get(EXPIRES_TAG))
        is_over = (
            now.timestamp() >= until if until is not None else _date(image.get("CreationDate"), now) + keep_for <= now
        )
        if image["State"] in FAILED:
            yield image, "it has failed"
        elif is_over:
            yield image, "it has not been used for long enough"
        elif image["State"] == AVAILABLE and newest[_kind(image)] is not image:
            yield image, f"{newest[_kind(image)]['ImageId']} has the same, and is newer"


def _kind(image: Mapping[str, Any]) -> tuple[str, str, int]:
    tags = _tags(image)
    return tags[IMAGE_TAG], tags.get(BASE_TAG, ""), root_gb(image)


def _listed_snapshots(account: Account, region: str) -> list[dict[str, Any]]:
    """Return the snapshots that carry our tag; none if these credentials may not list any: then they can have kept
    nothing.
    """
    try:
        return _snapshots(account, region, {"tag-key": [IMAGE_TAG]})
    except CredentialsError as error:
        if error.code != UNAUTHORIZED:
            raise
        log.info("snapshots in %s cannot be looked for: %s", region, error)
        return []


def _orphans(
    snapshots: Sequence[dict[str, Any]], images: Sequence[Mapping[str, Any]], now: datetime
) -> list[dict[str, Any]]:
    """Snapshots that belong to none of our images. One whose image is being made stands in none for a while."""
    used = {snapshot_id for image in images for snapshot_id in _snapshots_of(image)}
    return [
        one
        for one in snapshots
        if one["SnapshotId"] not in used and _date(one.get("StartTime"), now) + YOUNG_SNAPSHOT <= now
    ]


def _remove(account: Account, region: str, image: Mapping[str, Any]) -> None:
    """Deregister an image, then delete its snapshots, in the only order that EC2 allows.

    What somebody else has done meanwhile is done.
    """
    try:
        account.ask(region, "ec2", "deregister_image", ImageId=image["ImageId"])
    except BadRequest as error:
        if error.code not in GONE:
            raise
    for snapshot_id in _snapshots_of(image):
        _deleted(account, region, snapshot_id)


def _deleted(account: Account, region: str, snapshot_id: str) -> bool:
    """Delete a snapshot; False, and it stays, if another image stands on it."""
    try:
        account.ask(region, "ec2", "delete_snapshot", SnapshotId=snapshot_id)
    except BadRequest as error:
        if error.code == USED_SNAPSHOT:
            log.info("%s stays: %s", snapshot_id, error)
            return False
        if error.code != GONE_SNAPSHOT:
            raise
    return True


# ── what is there ────────────────────────────────────────────────────────────────────────────────────────────────────


def _ours(account: Account, region: str, filters: Mapping[str, Sequence[str]]) -> list[dict[str, Any]]:
    """Return this account's images that pass the filters and carry our tag: nobody else's has anything to say here."""
    found = account.pages(region, "ec2", "describe_images", "Images", Owners=["self"], Filters=_words(filters))
    return [image for image in found if IMAGE_TAG in _tags(image)]


def _snapshots(account: Account, region: str, filters: Mapping[str, Sequence[str]]) -> list[dict[str, Any]]:
    return account.pages(region, "ec2", "describe_snapshots", "Snapshots", OwnerIds=["self"], Filters=_words(filters))


def _words(filters: Mapping[str, Sequence[str]]) -> list[dict[str, Any]]:
    return [{"Name": name, "Values": list(values)} for name, values in filters.items()]


def _snapshots_of(image: Mapping[str, Any]) -> list[str]:
    return [
        snapshot_id
        for device in image.get("BlockDeviceMappings", [])
        if (snapshot_id := device.get("Ebs", {}).get("SnapshotId"))
    ]


def _tags(thing: Mapping[str, Any]) -> dict[str, str]:
    return {tag["Key"]: tag["Value"] for tag in thing.get("Tags", [])}


def _date(told: object, now: datetime) -> datetime:
    """Read a date of EC2, as text or as the SDK has read it; one that cannot be read is now: nothing is old for
    that.
    """
    if isinstance(told, datetime):
        return told
    try:
        return datetime.fromisoformat(str(told))
    except ValueError:
        return now
