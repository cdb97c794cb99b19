"""Images of prepared machines that EC2 keeps between pools: AMIs of our own, found again by tag.

"Fact sheet" is the one of 2026-11-20, 1.7. The states of an image:

    absent ──keep──▶ requested ──▶ pending ──▶ available ──prune──▶ deregistered ──prune──▶ its snapshots deleted
                          │            └──▶ failed ───────prune──▶
                          └── no snapshot in time: `keep` itself deregisters the image

Its tags are its record, set in the creating call: its packages (IMAGE_TAG), the image it was made from (BASE_TAG), and
its expiry (EXPIRES_TAG). It has no row in the ledger, because it outlives every pool that uses it: a row would keep the
pool's entry open. If the client is stopped in between, the next pool uses the image, or the next `prune` deletes it.
Snapshots have the same tags, and are found without their image.

A machine starts from the newest kept image that was made from its own base image. When AWS publishes a newer base
image, with other drivers, no kept image fits, and the next pool makes one. So kept images save time but do not preserve
old systems.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from skyward_core.errors import BadRequest, CredentialsError, ProviderFailed, SkywardError
from skyward_core.providers.aws_account import AwsAccount, collected, number, pairs_of, tags_of
from skyward_core.providers.base import CREATED_TAG, EXPIRES_TAG, IMAGE_TAG, OWNER_TAG
from skyward_core.shown_text import visible_logger

BASE_TAG = "skyward-image-base"
"""The id of the image from which a kept one was made."""
AVAILABLE, PENDING = "available", "pending"
FAILED = ("failed", "error", "invalid")
SNAPSHOT_SECONDS, LOOK_SECONDS = 30.0, 0.5
"""How long to wait until a requested snapshot is begun, and how long between two checks."""
NEW_SNAPSHOT_AGE = timedelta(days=1)
"""A younger snapshot without an image may belong to an image that is being made."""
RENEWED_AFTER_SECONDS = 3600.0
"""The expiry tag is written again only if it moves by more than this."""
GONE = ("InvalidAMIID.NotFound", "InvalidAMIID.Unavailable")
GONE_SNAPSHOT = "InvalidSnapshot.NotFound"
USED_SNAPSHOT = "InvalidSnapshot.InUse"
UNAUTHORIZED = "UnauthorizedOperation"
TAKEN_NAME = "InvalidAMIName.Duplicate"

log = visible_logger(__name__)


@dataclass(frozen=True, slots=True)
class KeptImageQuery:
    """Which kept image fits: its packages, its base image, and the largest size of its root disk in GiB."""

    image_hash: str
    base: str
    most_gb: int


def root_gb(image: Mapping[str, Any]) -> int:
    """Return the size in GiB of the root disk that an image asks for; 0 if it is not given."""
    devices = [
        device for device in image.get("BlockDeviceMappings", []) if device.get("DeviceName") == image["RootDeviceName"]
    ]
    return max((device.get("Ebs", {}).get("VolumeSize", 0) for device in devices), default=0)


def wanted(image_hash: str, base: Mapping[str, Any], disk_gb: int) -> KeptImageQuery:
    """Return which images can replace `base` for machines with `disk_gb`.

    A disk can be larger than its image, never smaller.
    """
    return KeptImageQuery(image_hash, base["ImageId"], max(disk_gb, root_gb(base)))


def kept(account: AwsAccount, region: str, want: KeptImageQuery, *states: str) -> list[dict[str, Any]]:
    """Return the kept images that fit and are in one of these states, newest first."""
    filters = {f"tag:{IMAGE_TAG}": [want.image_hash], f"tag:{BASE_TAG}": [want.base], "state": list(states)}
    found = [image for image in _ours(account, region, filters) if root_gb(image) <= want.most_gb]
    return sorted(found, key=lambda image: str(image.get("CreationDate", "")), reverse=True)


def lengthen(account: AwsAccount, region: str, image: Mapping[str, Any], until: datetime) -> None:
    """Keep a used image at least until that time. A failure is logged; it only shortens the image's life."""
    expires_at = number(tags_of(image).get(EXPIRES_TAG))
    if expires_at is not None and expires_at + RENEWED_AFTER_SECONDS > until.timestamp():
        return
    try:
        account.ask(
            region,
            "ec2",
            "create_tags",
            Resources=[image["ImageId"]],
            Tags=pairs_of({EXPIRES_TAG: str(int(until.timestamp()))}),
        )
    except SkywardError as error:
        log.warning("%s could not be marked as used: %s", image["ImageId"], error)


# ── creating an image ────────────────────────────────────────────────────────────────────────────────────────────────


def keep(
    account: AwsAccount,
    region: str,
    machine_id: str,
    image_hash: str,
    *,
    disk_gb: int,
    now: datetime,
    until: datetime,
    owner: str,
) -> str | None:
    """Begin to create an image of a machine; return its id once the snapshot of the root disk is begun.

    Returns None if an image that fits exists or is being made. A snapshot has the content of the disk at its begin.
    CreateImage begins it only after it has answered, so the answer is no proof; a listed snapshot is. Raises AWS's
    refusal, or ProviderFailed if no snapshot was begun in time; then the image is deregistered.
    """
    (machine,) = account.machines(region, {"Name": "instance-id", "Values": [machine_id]}) or [None]
    if machine is None:
        raise ProviderFailed(f"{machine_id} is not listed")
    (base,) = account.ask(region, "ec2", "describe_images", ImageIds=[machine["ImageId"]])["Images"]
    if IMAGE_TAG in tags_of(base):
        return None
    if there := kept(account, region, wanted(image_hash, base, disk_gb), AVAILABLE, PENDING):
        log.info(
            "%s has the packages of %s, and is %s: no other image is created",
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
    image_id = _request(account, region, machine_id, name, tags)
    try:
        _await_snapshot(account, region, _root_volume(machine), image_hash)
    except BaseException:
        _delete_failed(account, region, name)
        raise
    return image_id or name


def _request(account: AwsAccount, region: str, machine_id: str, name: str, tags: Mapping[str, str]) -> str | None:
    """Send the creating call, once: it has no token, but a name that only one image can have.

    Returns None if its answer is lost, or if the image exists already.
    """
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
            TagSpecifications=[{"ResourceType": kind, "Tags": pairs_of(tags)} for kind in ("image", "snapshot")],
        )
    except ProviderFailed as error:
        log.warning("it is unknown whether %s is being created: %s", name, error)
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


def _await_snapshot(account: AwsAccount, region: str, volume_id: str, image_hash: str) -> None:
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
        except SkywardError as error:  # an outage may end in time
            trouble = error
        if time.monotonic() > deadline:
            raise ProviderFailed(
                f"no snapshot of {volume_id} was begun within {SNAPSHOT_SECONDS:g} s: no image is kept"
            ) from trouble
        time.sleep(LOOK_SECONDS)


def _delete_failed(account: AwsAccount, region: str, name: str) -> None:
    """Delete the image of a creating call that has failed: a later snapshot could contain private data."""
    try:
        for image in _ours(account, region, {"name": [name]}):
            _remove(account, region, image)
    except SkywardError as error:
        log.warning("%s may still be created, and should be deregistered: %s", name, error)


# ── deleting images ──────────────────────────────────────────────────────────────────────────────────────────────────


def prune(account: AwsAccount, region: str, now: datetime, keep_days: float, *, is_dry_run: bool) -> list[str]:
    """Delete images that have failed, are replaced or have expired, and snapshots without an image; return a line each.

    An image without its expiry tag expires `keep_days` after its creation. The call is idempotent and can continue
    after it was stopped. Raises the first failure once everything else is done.
    """
    images = _ours(account, region, {"tag-key": [IMAGE_TAG]})
    doomed = list(_doomed(images, now, timedelta(days=keep_days)))
    orphans = _orphans(_listed_snapshots(account, region), images, now)
    lines: list[str] = []
    failures: list[SkywardError] = []
    for image, why in doomed:
        line = (
            f"image {image['ImageId']} in {region}, {root_gb(image)} GiB with the packages of"
            f" {tags_of(image)[IMAGE_TAG]}: {why}"
        )
        with collected(failures):
            if not is_dry_run:
                _remove(account, region, image)
                log.info("deleted: %s", line)
            lines.append(line)
    for snapshot in orphans:
        line = (
            f"snapshot {snapshot['SnapshotId']} in {region}, {snapshot.get('VolumeSize', '?')} GiB: its image is gone"
        )
        with collected(failures):
            if is_dry_run or _deleted(account, region, snapshot["SnapshotId"]):
                lines.append(line)
    if failures:
        raise failures[0]
    return lines


def _doomed(
    images: Sequence[dict[str, Any]], now: datetime, keep_for: timedelta
) -> Iterator[tuple[dict[str, Any], str]]:
    newest: dict[tuple[str, str, int], dict[str, Any]] = {}
    for image in sorted(images, key=lambda image: str(image.get("CreationDate", ""))):
        if image["State"] == AVAILABLE:
            newest[_kind(image)] = image
    for image in images:
        until = number(tags_of(image).get(EXPIRES_TAG))
        is_over = (
            now.timestamp() >= until if until is not None else _date(image.get("CreationDate"), now) + keep_for <= now
        )
        if image["State"] in FAILED:
            yield image, "it has failed"
        elif is_over:
            yield image, "it has not been used for too long"
        elif image["State"] == AVAILABLE and newest[_kind(image)] is not image:
            yield image, f"{newest[_kind(image)]['ImageId']} has the same packages, and is newer"


def _kind(image: Mapping[str, Any]) -> tuple[str, str, int]:
    tags = tags_of(image)
    return tags[IMAGE_TAG], tags.get(BASE_TAG, ""), root_gb(image)


def _listed_snapshots(account: AwsAccount, region: str) -> list[dict[str, Any]]:
    """Return the snapshots with our tag; none if the credentials may not list them, because then they created none."""
    try:
        return _snapshots(account, region, {"tag-key": [IMAGE_TAG]})
    except CredentialsError as error:
        if error.code != UNAUTHORIZED:
            raise
        log.info("snapshots in %s cannot be listed: %s", region, error)
        return []


def _orphans(
    snapshots: Sequence[dict[str, Any]], images: Sequence[Mapping[str, Any]], now: datetime
) -> list[dict[str, Any]]:
    """Return the snapshots that belong to none of our images, except new ones: their image may be in the making."""
    used = {snapshot_id for image in images for snapshot_id in _snapshots_of(image)}
    return [
        one
        for one in snapshots
        if one["SnapshotId"] not in used and _date(one.get("StartTime"), now) + NEW_SNAPSHOT_AGE <= now
    ]


def _remove(account: AwsAccount, region: str, image: Mapping[str, Any]) -> None:
    """Deregister an image, then delete its snapshots: the only order that EC2 allows.

    It is no error if another client has done it already.
    """
    try:
        account.ask(region, "ec2", "deregister_image", ImageId=image["ImageId"])
    except BadRequest as error:
        if error.code not in GONE:
            raise
    for snapshot_id in _snapshots_of(image):
        _deleted(account, region, snapshot_id)


def _deleted(account: AwsAccount, region: str, snapshot_id: str) -> bool:
    """Delete a snapshot; return False, and leave it, if another image uses it."""
    try:
        account.ask(region, "ec2", "delete_snapshot", SnapshotId=snapshot_id)
    except BadRequest as error:
        if error.code == USED_SNAPSHOT:
            log.info("%s stays: %s", snapshot_id, error)
            return False
        if error.code != GONE_SNAPSHOT:
            raise
    return True


# ── listing ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _ours(account: AwsAccount, region: str, filters: Mapping[str, Sequence[str]]) -> list[dict[str, Any]]:
    """Return this account's images that pass the filters and have our tag, never images of other accounts."""
    found = account.pages(region, "ec2", "describe_images", "Images", Owners=["self"], Filters=_filters(filters))
    return [image for image in found if IMAGE_TAG in tags_of(image)]


def _snapshots(account: AwsAccount, region: str, filters: Mapping[str, Sequence[str]]) -> list[dict[str, Any]]:
    return account.pages(region, "ec2", "describe_snapshots", "Snapshots", OwnerIds=["self"], Filters=_filters(filters))


def _filters(filters: Mapping[str, Sequence[str]]) -> list[dict[str, Any]]:
    return [{"Name": name, "Values": list(values)} for name, values in filters.items()]


def _snapshots_of(image: Mapping[str, Any]) -> list[str]:
    return [
        snapshot_id
        for device in image.get("BlockDeviceMappings", [])
        if (snapshot_id := device.get("Ebs", {}).get("SnapshotId"))
    ]


def _date(value: object, now: datetime) -> datetime:
    """Return a date of EC2, which is text or a datetime; `now` if it is unreadable, so that nothing counts as old."""
    if isinstance(value, datetime):
        return value
    try:
        return datetime.fromisoformat(str(value))
    except ValueError:
        return now
