"""The images and snapshots of a fake AWS: AWS's own by their ids, and those of machines by owner, tags and states.

moto's have no states, its snapshots have no tags, and it accepts a name twice.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from xml.sax.saxutils import escape

NOW = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)
ROOT = "/dev/sda1"


@dataclass
class Snapshot:
    """A snapshot. `hidden` is how many listings do not show it yet."""

    id: str
    region: str
    volume: str
    gb: int
    tags: dict[str, str]
    state: str = "pending"
    started_at: datetime = NOW
    hidden: int = 0


@dataclass
class Image:
    """An image of a machine."""

    id: str
    region: str
    name: str
    machine: str
    gb: int
    tags: dict[str, str]
    snapshots: list[str]
    state: str = "pending"
    created_at: datetime = NOW


@dataclass
class FakeImages:
    """The images of an account, in all regions.

    `public` has the sizes of public images, by id; `disk_of` returns a machine's root volume and its size. `on_create`
    is called with the machine when an image of it is requested; `hidden_listings` is how many listings do not show the
    snapshot of a new one.
    """

    public: Mapping[str, int]
    disk_of: Callable[[str], tuple[str, int]]
    images: dict[str, Image] = field(default_factory=dict)
    snapshots: dict[str, Snapshot] = field(default_factory=dict)
    on_create: Callable[[str], None] = lambda _: None
    hidden_listings: int = 1
    now: datetime = NOW
    _numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    def finish(self, state: str = "available") -> None:
        """Complete all pending images, with this state."""
        for image in self.images.values():
            if image.state == "pending":
                image.state = state
        for snapshot in self.snapshots.values():
            snapshot.state = "completed"

    def add(
        self,
        tags: Mapping[str, str],
        *,
        region: str = "us-east-1",
        gb: int = 100,
        state: str = "available",
        at: datetime | None = None,
    ) -> Image:
        """Add an image to the account, with its snapshot."""
        number = next(self._numbers)
        snapshot = Snapshot(
            f"snap-{number:017x}", region, f"vol-{number:017x}", gb, dict(tags), "completed", at or self.now
        )
        image = Image(
            f"ami-{number:017x}", region, f"image {number}", "", gb, dict(tags), [snapshot.id], state, at or self.now
        )
        self.snapshots[snapshot.id] = snapshot
        self.images[image.id] = image
        return image

    def answer(self, action: str, parameters: Mapping[str, str], region: str) -> tuple[str, str | None] | None:
        """Answer requests about images: an error code and None, or "" and the inner XML; None for other requests."""
        own = {
            "CreateImage": self._create,
            "DescribeImages": self._describe,
            "DescribeSnapshots": self._describe_snapshots,
            "DeregisterImage": self._deregister,
            "DeleteSnapshot": self._delete_snapshot,
            "CreateTags": self._tag,
            "RunInstances": self._refuse_what_is_not_there,
        }
        return own[action](parameters, region) if action in own else None

    # ── actions ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _create(self, parameters: Mapping[str, str], region: str) -> tuple[str, str | None]:
        if any((image.region, image.name) == (region, parameters["Name"]) for image in self.images.values()):
            return "InvalidAMIName.Duplicate", None
        assert parameters["NoReboot"] == "true"
        self.on_create(parameters["InstanceId"])
        volume, gb = self.disk_of(parameters["InstanceId"])
        tags = _tag_specifications(parameters)
        number = next(self._numbers)
        snapshot = Snapshot(
            f"snap-{number:017x}",
            region,
            volume,
            gb,
            tags["snapshot"],
            started_at=self.now,
            hidden=self.hidden_listings,
        )
        image = Image(
            f"ami-{number:017x}",
            region,
            parameters["Name"],
            parameters["InstanceId"],
            gb,
            tags["image"],
            [snapshot.id],
            created_at=self.now,
        )
        self.snapshots[snapshot.id] = snapshot
        self.images[image.id] = image
        return "", f"<imageId>{image.id}</imageId>"

    def _describe(self, parameters: Mapping[str, str], region: str) -> tuple[str, str | None]:
        if (wanted := parameters.get("ImageId.1")) is not None:
            if wanted in self.images:
                return "", f"<imagesSet>{_image(self.images[wanted])}</imagesSet>"
            if wanted not in self.public:
                return "InvalidAMIID.NotFound", None
            return (
                "",
                f"<imagesSet>{_image(Image(wanted, region, wanted, '', self.public[wanted], {}, [], 'available'))}</imagesSet>",
            )
        assert parameters["Owner.1"] == "self"
        filters = _filters(parameters)
        found = [
            image
            for image in self.images.values()
            if image.region == region
            and _passes(filters, image.tags, {"state": image.state, "name": image.name, "image-id": image.id})
        ]
        return "", f"<imagesSet>{''.join(map(_image, found))}</imagesSet>"

    def _describe_snapshots(self, parameters: Mapping[str, str], region: str) -> tuple[str, str | None]:
        assert parameters["Owner.1"] == "self"
        filters, found = _filters(parameters), []
        for snapshot in self.snapshots.values():
            if snapshot.region == region and _passes(
                filters, snapshot.tags, {"volume-id": snapshot.volume, "status": snapshot.state}
            ):
                if snapshot.hidden:
                    snapshot.hidden -= 1
                else:
                    found.append(snapshot)
        return "", f"<snapshotSet>{''.join(map(_snapshot, found))}</snapshotSet>"

    def _deregister(self, parameters: Mapping[str, str], _: str) -> tuple[str, str | None]:
        if self.images.pop(parameters["ImageId"], None) is None:
            return "InvalidAMIID.Unavailable", None
        return "", "<return>true</return>"

    def _delete_snapshot(self, parameters: Mapping[str, str], _: str) -> tuple[str, str | None]:
        wanted = parameters["SnapshotId"]
        if any(wanted in image.snapshots for image in self.images.values()):
            return "InvalidSnapshot.InUse", None
        return (
            ("", "<return>true</return>")
            if self.snapshots.pop(wanted, None) is not None
            else ("InvalidSnapshot.NotFound", None)
        )

    def _tag(self, parameters: Mapping[str, str], _: str) -> tuple[str, str | None] | None:
        ids = [value for name, value in parameters.items() if name.startswith("ResourceId.")]
        if not all(one.startswith("ami-") for one in ids):
            return None
        if missing := [one for one in ids if one not in self.images]:
            return f"InvalidAMIID.NotFound {missing}", None
        for one in ids:
            self.images[one].tags |= _pairs(parameters, "Tag")
        return "", "<return>true</return>"

    def _refuse_what_is_not_there(self, parameters: Mapping[str, str], region: str) -> tuple[str, str | None] | None:
        wanted = parameters.get("ImageId", "")
        if not wanted.startswith("ami-0000"):
            return None
        image = self.images.get(wanted)
        if image is None or image.region != region:
            return "InvalidAMIID.NotFound", None
        return None if image.state == "available" else ("InvalidAMIID.Unavailable", None)


# ── requests
# ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _pairs(parameters: Mapping[str, str], prefix: str) -> dict[str, str]:
    keys = {
        name.removesuffix("Key"): value
        for name, value in parameters.items()
        if re.fullmatch(rf"{re.escape(prefix)}\.[0-9]+\.Key", name)
    }
    return {key: parameters[f"{place}Value"] for place, key in keys.items()}


def _tag_specifications(parameters: Mapping[str, str]) -> dict[str, dict[str, str]]:
    kinds = {
        name.removesuffix(".ResourceType"): value
        for name, value in parameters.items()
        if name.endswith(".ResourceType")
    }
    return {kind: _pairs(parameters, f"{place}.Tag") for place, kind in kinds.items()}


def _filters(parameters: Mapping[str, str]) -> dict[str, list[str]]:
    names = {
        name.removesuffix("Name"): value
        for name, value in parameters.items()
        if re.fullmatch(r"Filter\.[0-9]+\.Name", name)
    }
    return {
        name: [value for key, value in parameters.items() if key.startswith(f"{place}Value.")]
        for place, name in names.items()
    }


def _passes(filters: Mapping[str, list[str]], tags: Mapping[str, str], fields: Mapping[str, str]) -> bool:
    for name, values in filters.items():
        if name == "tag-key":
            if not set(values) & set(tags):
                return False
        elif name.startswith("tag:"):
            if tags.get(name.removeprefix("tag:")) not in values:
                return False
        elif fields[name] not in values:
            return False
    return True


# ── answers
# ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _tag_set(tags: Mapping[str, str]) -> str:
    return f"<tagSet>{''.join(f'<item><key>{escape(key)}</key><value>{escape(value)}</value></item>' for key, value in tags.items())}</tagSet>"


def _image(image: Image) -> str:
    snapshot = "".join(f"<snapshotId>{one}</snapshotId>" for one in image.snapshots[:1])
    return (
        f"<item><imageId>{image.id}</imageId><imageState>{image.state}</imageState><name>{escape(image.name)}</name>"
        f"<creationDate>{image.created_at:%Y-%m-%dT%H:%M:%S.000Z}</creationDate><rootDeviceName>{ROOT}</rootDeviceName><blockDeviceMapping>"
        f"<item><deviceName>{ROOT}</deviceName><ebs>{snapshot}<volumeSize>{image.gb}</volumeSize></ebs></item>"
        f"<item><deviceName>/dev/sdb</deviceName><virtualName>ephemeral0</virtualName></item></blockDeviceMapping>{_tag_set(image.tags)}</item>"
    )


def _snapshot(snapshot: Snapshot) -> str:
    return (
        f"<item><snapshotId>{snapshot.id}</snapshotId><volumeId>{snapshot.volume}</volumeId><status>{snapshot.state}</status>"
        f"<startTime>{snapshot.started_at:%Y-%m-%dT%H:%M:%S.000Z}</startTime><volumeSize>{snapshot.gb}</volumeSize>{_tag_set(snapshot.tags)}</item>"
    )
