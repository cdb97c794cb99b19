"""A fake AWS behind botocore's stubber: it gets each call's parameters, and botocore checks both them and the answer.

    with FakeAWS() as cloud:
        sky.AWS().offers(...)

The types of machines are AWS's own descriptions (moto's copy of them). Requests are not signed, sent or repeated: for
that there are tests with a server (tests/system/providers/test_aws.py).
"""

from __future__ import annotations

import base64
import fnmatch
import functools
import gzip
import importlib.util
import itertools
import json
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self
from unittest import mock

import pytest
from botocore import session as botocore_session
from botocore.awsrequest import AWSResponse
from botocore.exceptions import ConnectionClosedError, NoCredentialsError
from botocore.stub import Stubber

import skyward_core as sky
from tests.providers.hosted import Hosting, Rented, cloud_init
from tests.providers.http_fake import FakeCloud, Reply, Request, route

ACCOUNT = "123456789012"
OUR_ADDRESS = "203.0.113.7"
NOW = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)
ROOT = "/dev/sda1"
REFUSAL_CODES = {"sts": "InvalidClientTokenId", "ec2": "AuthFailure"}
UNTRIED = ("UnfulfillableCapacity", "Failed to fulfill capacity. Please review errors in the response.")
NO_SPOT_ROLE = (
    "AuthFailure.ServiceLinkedRoleCreationNotPermitted",
    "The provided credentials do not have permission to create the service-linked role for EC2 Spot Instances.",
)
FREE_PLAN = (
    "InvalidParameterCombination",
    (
        "The specified instance type is not eligible for Free Tier. For a list of Free Tier instance types, run"
        " 'describe-instance-types' with the filter 'free-tier-eligible=true'."
    ),
)
FREE_TYPES = frozenset({"t3.micro", "t3.small", "t4g.micro", "t4g.small", "c7i-flex.large", "m7i-flex.large"})
"""What an account on the free plan may rent (DescribeInstanceTypes with that filter, as reported in 2026)."""
NONE_LEFT = ("InsufficientInstanceCapacity", "There is no Spot capacity available that matches your request.")
_PARAMETER = "/aws/service/"
IMAGES = {
    "deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-ubuntu-24.04/latest/ami-id": ("ami-0d1a00000000000x8", 75),
    "deeplearning/ami/arm64/base-oss-nvidia-driver-gpu-ubuntu-24.04/latest/ami-id": ("ami-0d1a0000000000a64", 75),
    "neuron/dlami/base/ubuntu-24.04/latest/image_id": ("ami-0e0700000000000x8", 120),
    "canonical/ubuntu/server/24.04/stable/current/amd64/hvm/ebs-gp3/ami-id": ("ami-0b0700000000000x8", 8),
    "canonical/ubuntu/server/24.04/stable/current/arm64/hvm/ebs-gp3/ami-id": ("ami-0b0700000000000a4", 8),
}
"""Public images: the name of the parameter with the latest one, its id, and the size of its disk in GiB."""


@functools.cache
def every_type() -> dict[str, dict[str, Any]]:
    """Return AWS's own descriptions of its types."""
    moto = importlib.util.find_spec("moto")
    assert moto is not None and moto.origin is not None
    with gzip.open(Path(moto.origin).parent / "ec2/resources/instance_types.json.gz") as content:
        return json.load(content)


@dataclass(frozen=True)
class AwsRequest:
    """A call: service, action, parameters and region."""

    service: str
    action: str
    parameters: dict[str, Any]
    region: str


@dataclass
class Fault:
    """A failure of the next calls of an action. Without a code the answer is lost.

    With `is_done` the call takes effect before it fails.
    """

    action: str
    code: str = ""
    status: int = 400
    message: str = "injected"
    is_done: bool = False
    times: int = 1
    when: Callable[[AwsRequest], bool] = lambda _: True


class RefusedError(Exception):
    """AWS's refusal of a call."""

    def __init__(self, code: str, status: int = 400, message: str = "") -> None:
        super().__init__(code)
        self.code, self.status, self.message = code, status, message or code


@dataclass
class Machine:
    """An instance. `hidden` and `pending` are how many listings lack it, and then lack its public address."""

    id: str
    region: str
    call: Mapping[str, Any]
    zone: str
    index: int
    tags: dict[str, str]
    number: int
    hidden: int = 0
    pending: int = 0
    state: str = "pending"
    reason: tuple[str, str] = ("", "")
    public_ip: str | None = None
    private_ip: str = ""

    @property
    def image_id(self) -> str:
        return str(self.call["ImageId"])

    @property
    def type(self) -> str:
        return str(self.call["InstanceType"])

    @property
    def group(self) -> str | None:
        return self.call.get("Placement", {}).get("GroupName")

    @property
    def is_ended(self) -> bool:
        return self.state in ("terminated", "shutting-down")

    def row(self) -> dict[str, Any]:
        row = {
            "InstanceId": self.id,
            "InstanceType": self.type,
            "ImageId": self.image_id,
            "State": {"Name": self.state, "Code": 0},
            "StateReason": dict(zip(("Code", "Message"), self.reason, strict=True)),
            "AmiLaunchIndex": self.index,
            "ClientToken": self.call.get("ClientToken", ""),
            "Placement": {"AvailabilityZone": self.zone, "GroupName": self.group or ""},
            "PrivateIpAddress": self.private_ip,
            "RootDeviceName": ROOT,
            "BlockDeviceMappings": [{"DeviceName": ROOT, "Ebs": {"VolumeId": self.volume}}],
            "Tags": pairs(self.tags),
        }
        if self.state == "running" and self.public_ip:
            row["PublicIpAddress"] = self.public_ip
        return row | ({"InstanceLifecycle": "spot"} if self.call.get("is_spot") else {})

    @property
    def volume(self) -> str:
        return f"vol-{self.number:017x}"

    @property
    def disk_gb(self) -> int:
        return int(self.call["BlockDeviceMappings"][0]["Ebs"]["VolumeSize"])


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
    """The images of the account. `on_create` is called with the machine of a new one."""

    images: dict[str, Image] = field(default_factory=dict)
    snapshots: dict[str, Snapshot] = field(default_factory=dict)
    on_create: Callable[[str], None] = lambda _: None
    hidden_listings: int = 1
    now: datetime = NOW
    numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    def finish(self) -> None:
        """Complete all pending images."""
        for image in self.images.values():
            image.state = "available"
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
        volume: str = "",
        machine: str = "",
        name: str = "",
    ) -> Image:
        """Add an image to the account, with its snapshot."""
        number, at = next(self.numbers), at or self.now
        snapshot = Snapshot(f"snap-{number:017x}", region, volume or f"vol-f{number:016x}", gb, dict(tags))
        snapshot.started_at, snapshot.state = at, "pending" if state == "pending" else "completed"
        image = Image(f"ami-{number:017x}", region, name or f"image {number}", machine, gb, dict(tags), [snapshot.id])
        image.state, image.created_at = state, at
        self.snapshots[snapshot.id], self.images[image.id] = snapshot, image
        return image


@dataclass
class FakeFleets:
    """Fleets, templates and placement groups.

    `refusals` has the code and message with which a spot pool (type and zone) refuses; `untried` has the pools that EC2
    reports as not tried. A fleet gets `short_of` machines fewer than requested. With `is_split` all of its machines
    have the same index. `templates` and `groups` are by region and name: their tags.
    """

    refusals: dict[tuple[str, str], tuple[str, str]] = field(default_factory=dict)
    untried: set[tuple[str, str]] = field(default_factory=set)
    short_of: int = 0
    is_split: bool = False
    templates: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    groups: dict[tuple[str, str], dict[str, str]] = field(default_factory=dict)


class CheckIp(FakeCloud):
    """The service that returns the caller's address."""

    caller = OUR_ADDRESS

    @route("GET", "/checkip")
    def answer(self, request: Request) -> Reply:
        return Reply(200, f"{self.caller}\n", is_text=True)


class AnsweringStubber(Stubber):
    """A stubber that computes each answer, in place of a queue of answers."""

    def __init__(self, client: Any, answer: Callable[[str, dict[str, Any]], dict[str, Any]]) -> None:
        super().__init__(client)
        self._answer_call = answer

    def _assert_expected_params(self, model: Any, params: Any, context: Any, **_: Any) -> None:
        context["parameters"] = params

    def _get_response_handler(self, model: Any, params: Any, context: Any, **_: Any) -> tuple[AWSResponse, Any]:
        try:
            answer, status = self._answer_call(model.name, dict(context["parameters"])), 200
        except RefusedError as refusal:
            answer, status = {"Error": {"Code": refusal.code, "Message": refusal.message}}, refusal.status
        else:
            self._validate_operation_response(model.name, answer)
        answer["ResponseMetadata"] = {"HTTPStatusCode": status}
        return AWSResponse(None, status, {}, None), answer


class FakeAWS:
    """One account; a context manager.

    `spot` has prices by type and zone, `list_prices` those of the price list by region and type; with None the
    credentials may not read it. `pending_listings` is how many listings show a new machine as pending, without its
    public address, and `hidden_listings` how many do not show it at all. `on_listing` is called before each listing.
    `has_spot_role`, `is_on_free_plan` and `vcpus` (by the code of the quota) are what a new account may lack and have. `not_enabled` are regions that the
    account has not enabled, `without_families` the beginnings of types that no region sells, `subnets` those of a region by zone, `rules` those of the security groups.
    """

    url = "https://aws.test"

    def __init__(self) -> None:
        self.requests: list[AwsRequest] = []
        self.faults: list[Fault] = []
        self.is_refusing = self.is_out = False
        self.creates_left: int | None = None
        self.pending_listings, self.hidden_listings = 1, 0
        self.spot: dict[tuple[str, str], float] = {}
        self.list_prices: dict[tuple[str, str], float] | None = {
            ("us-east-1", "g4dn.xlarge"): 0.526,
            ("us-east-1", "c7i.xlarge"): 0.1785,
        }
        self.not_enabled: set[str] = set()
        self.has_spot_role, self.is_on_free_plan = True, False
        self.vcpus = {"L-1216C47A": 5.0}
        self.machines: dict[str, Machine] = {}
        self.without_subnets: set[str] = set()
        self.without_families: tuple[str, ...] = ()
        self.rules: dict[tuple[str, str], list[dict[str, Any]]] = {}
        self.images, self.fleets, self.checkip = FakeImages(), FakeFleets(), CheckIp()
        self.on_listing: Callable[[], object] = lambda: None
        self.lock = threading.RLock()
        self._answers: dict[str, tuple[dict[str, Any], Any]] = {}
        self._numbers = itertools.count(1)

    def __enter__(self) -> Self:
        create_client = botocore_session.Session.create_client

        def stubbed(session: Any, service: str, region_name: str, **how: Any) -> Any:
            client = create_client(session, service, region_name=region_name, **how)

            def answer(action: str, parameters: dict[str, Any]) -> dict[str, Any]:
                if session.get_credentials() is None:  # signing would find that
                    raise NoCredentialsError
                return self.answer(AwsRequest(service, action, parameters, region_name))

            AnsweringStubber(client, answer).activate()
            return client

        self._patch = mock.patch.object(botocore_session.Session, "create_client", stubbed)
        self._patch.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._patch.stop()

    # ── what a test of the contract causes ───────────────────────────────────────────────────────────────────────────

    def fail(self, action: str, code: str = "", status: int = 400, **how: Any) -> None:
        """Let the next calls of an action fail."""
        with self.lock:
            self.faults.append(Fault(action, code, status, **how))

    def no_capacity(self) -> None:
        self.fail("RunInstances", "InsufficientInstanceCapacity", 500, times=99)

    def quota(self) -> None:
        self.fail("RunInstances", "VcpuLimitExceeded", times=99)

    def throttle(self) -> None:
        self.fail("DescribeInstances", "RequestLimitExceeded", 503)

    def lose_create_answer(self) -> None:
        self.fail("RunInstances", is_done=True)

    def recover(self) -> None:
        self.is_out, self.creates_left = False, None

    def alive(self) -> set[str]:
        """Return the ids of all billed machines."""
        with self.lock:
            return {machine.id for machine in self.machines.values() if not machine.is_ended}

    def put(self, machine_id: str, state: str, code: str = "", message: str = "") -> None:
        """Set the state of a machine, with its reason."""
        with self.lock:
            machine = self.machines[machine_id]
            machine.state, machine.reason, machine.hidden = state, (code, message), 0

    def stop(self, machine_id: str) -> None:
        self.put(machine_id, "stopped", "Client.UserInitiatedShutdown")

    def preempt(self, machine_id: str) -> None:
        self.put(machine_id, "terminated", "Server.SpotInstanceTermination")

    def strangers(self) -> None:
        """Add more than a page of other users' machines."""
        call = {"ImageId": "ami-1", "InstanceType": "t3.micro"}
        for _ in range(101):
            self._machine(call, "us-east-1", "us-east-1a", 0, {"skyward": "no", "Name": "theirs"}).state = "running"

    def parameters(self, action: str) -> list[dict[str, Any]]:
        """Return the parameters of each call of an action."""
        with self.lock:
            return [request.parameters for request in self.requests if request.action == action]

    def machine(self, machine_id: str) -> Machine:
        return self.machines[machine_id]

    # ── answers ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def answer(self, request: AwsRequest) -> dict[str, Any]:
        """Answer one call."""
        with self.lock:
            self.requests.append(request)
            if self.is_refusing or request.region in self.not_enabled:
                code = REFUSAL_CODES.get(request.service, "UnrecognizedClientException")
                raise RefusedError(code, 401, "AWS was not able to validate the provided access credentials")
            if self.is_out:
                raise RefusedError("Unavailable", 503)
            faults = (one for one in self.faults if one.action in (request.action, "*") and one.times)
            fault = next((one for one in faults if one.when(request)), None)
            if fault is None:
                return self._do(request)
            fault.times -= 1
            if fault.is_done:
                self._do(request)
            if fault.code:
                raise RefusedError(fault.code, fault.status, fault.message)
            raise ConnectionClosedError(endpoint_url=self.url)

    def _do(self, request: AwsRequest) -> dict[str, Any]:
        return getattr(self, f"_{request.action}")(request.parameters, request.region) or {}

    def _once(self, words: dict[str, Any], make: Callable[[], Any]) -> Any:
        """Return the first answer again for a token that was used before."""
        if (token := words["ClientToken"]) in self._answers:
            before, made = self._answers[token]
            if before != words:
                raise RefusedError("IdempotentParameterMismatch")
            return made
        assert len(token) <= 64
        made = make()
        self._answers[token] = (words, made)
        return made

    def _GetCallerIdentity(self, *_: object) -> dict[str, Any]:
        return {"Account": ACCOUNT}

    def _GetRole(self, words: Any, _: str) -> dict[str, Any]:
        if not self.has_spot_role:
            raise RefusedError("NoSuchEntity", 404, f"The role with name {words['RoleName']} cannot be found.")
        role = {
            "Path": "/aws-service-role/spot.amazonaws.com/",
            "RoleName": words["RoleName"],
            "RoleId": "AROA" + "A" * 17,
        }
        return {"Role": {**role, "Arn": f"arn:aws:iam::{ACCOUNT}:role/{words['RoleName']}", "CreateDate": NOW}}

    def _GetServiceQuota(self, words: Any, _: str) -> dict[str, Any]:
        return {"Quota": {"QuotaCode": words["QuotaCode"], "Value": self.vcpus.get(words["QuotaCode"], 0.0)}}

    def _GetParameter(self, words: Any, _: str) -> dict[str, Any]:
        if (found := IMAGES.get(words["Name"].removeprefix(_PARAMETER))) is None:
            raise RefusedError("ParameterNotFound")
        return {"Parameter": {"Name": words["Name"], "Value": found[0]}}

    def _GetProducts(self, words: Any, _: str) -> dict[str, Any]:
        if self.list_prices is None:
            raise RefusedError("AccessDeniedException")
        wanted = {one["Field"]: one["Value"] for one in words["Filters"]}
        products = [
            _product(name, price, place)
            for (region, name), price in self.list_prices.items()
            for place, price in (("AWS Region", price), ("AWS Local Zone", 9.0))
            if region == wanted["regionCode"] and name == wanted.get("instanceType", name)
        ]
        return page({**words, "MaxResults": 2}, "PriceList", products)

    def _DescribeSpotPriceHistory(self, words: Any, _: str) -> dict[str, Any]:
        assert words["ProductDescriptions"] == ["Linux/UNIX"]
        entries = [
            {"InstanceType": name, "AvailabilityZone": zone, "SpotPrice": str(price), "Timestamp": stamp}
            for (name, zone), price in self.spot.items()
            for stamp, price in ((NOW, price), (NOW.replace(day=20), 99.0))
            if name in words["InstanceTypes"]
        ]
        return page({**words, "MaxResults": 2}, "SpotPriceHistory", entries)

    def _DescribeRegions(self, words: Any, _: str) -> dict[str, Any]:
        assert words["AllRegions"], "without it a region that is not enabled is an error"
        states = {True: "not-opted-in", False: "opt-in-not-required"}
        return {
            "Regions": [
                {"RegionName": name, "OptInStatus": states[name in self.not_enabled]} for name in words["RegionNames"]
            ]
        }

    def _DescribeInstanceTypes(self, words: Any, _: str) -> dict[str, Any]:
        filters = {one["Name"]: one["Values"] for one in words["Filters"]}
        architectures = set(filters.get("processor-info.supported-architecture", ["x86_64", "arm64", "x86_64_mac"]))
        found = [
            kind
            for name, kind in every_type().items()
            if any(fnmatch.fnmatchcase(name, pattern) for pattern in filters.get("instance-type", ["*"]))
            and not name.startswith(self.without_families)
            and architectures & set(kind["ProcessorInfo"]["SupportedArchitectures"])
        ]
        return page(words, "InstanceTypes", found)

    # ── networks ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _DescribeSubnets(self, words: Any, region: str) -> dict[str, Any]:
        rows = [] if region in self.without_subnets else [subnet(f"{region}{letter}") for letter in "abcdef"]
        (wanted,) = words["Filters"]
        if wanted["Name"] == "subnet-id":
            rows = [row for row in rows if row["SubnetId"] in wanted["Values"]]
        return {"Subnets": rows}

    def _DescribeSecurityGroups(self, words: Any, region: str) -> dict[str, Any]:
        name = words["Filters"][0]["Values"][0]
        rules = self.rules.get((region, name))
        found = {"GroupId": f"sg-{name}", "GroupName": name, "IpPermissions": rules}
        return {"SecurityGroups": [] if rules is None else [found]}

    def _CreateSecurityGroup(self, words: Any, region: str) -> dict[str, Any]:
        self.rules[region, words["GroupName"]] = []
        return {"GroupId": f"sg-{words['GroupName']}"}

    def _AuthorizeSecurityGroupIngress(self, words: Any, region: str) -> None:
        self.rules[region, words["GroupId"].removeprefix("sg-")] += words["IpPermissions"]

    def _AuthorizeSecurityGroupEgress(self, *_: object) -> None:
        """Allow it."""

    # ── machines ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _machine(self, call: Mapping[str, Any], region: str, zone: str, index: int, tags: dict[str, str]) -> Machine:
        number = next(self._numbers)
        is_private = len(call.get("NetworkInterfaces", [])) > 1 or not call.get("NetworkInterfaces", [{}])[0].get(
            "AssociatePublicIpAddress", True
        )
        machine = Machine(f"i-{number:014x}abc", region, call, zone, index, tags, number)
        machine.hidden, machine.pending = self.hidden_listings, self.pending_listings
        machine.public_ip = None if is_private else f"198.51.100.{number % 250}"
        machine.private_ip = f"172.31.0.{number % 250 + 1}"
        self.machines[machine.id] = machine
        return machine

    def make(self, call: Mapping[str, Any], region: str, count: int) -> list[Machine]:
        """Create machines. Refuse their image, credits or network as EC2 does."""
        interfaces, credits = call["NetworkInterfaces"], call.get("CreditSpecification")
        if credits and not every_type()[call["InstanceType"]]["BurstablePerformanceSupported"]:
            raise RefusedError("InvalidParameterCombination")
        if len(interfaces) > 1 and any("AssociatePublicIpAddress" in one for one in interfaces):
            raise RefusedError("InvalidParameterCombination")
        image, public = self.images.images.get(call["ImageId"]), {image_id for image_id, _ in IMAGES.values()}
        if call["ImageId"] not in public and (image is None or image.region != region):
            raise RefusedError("InvalidAMIID.NotFound")
        if image is not None and image.state != "available":
            raise RefusedError("InvalidAMIID.Unavailable")
        zone = interfaces[0]["SubnetId"].removeprefix("subnet-")
        if (name := call.get("Placement", {}).get("GroupName")) is not None:
            if (region, name) not in self.fleets.groups:
                raise RefusedError("InvalidPlacementGroup.Unknown")
            if any(one.group == name and not one.is_ended and one.zone != zone for one in self.machines.values()):
                raise RefusedError("Unsupported")
        specs = {one["ResourceType"]: untagged(one["Tags"]) for one in call["TagSpecifications"]}
        is_split = self.fleets.is_split and call.get("is_spot")
        return [
            self._machine(call, region, zone, 0 if is_split else index, dict(specs["instance"]))
            for index in range(count)
        ]

    def _RunInstances(self, words: Any, region: str) -> dict[str, Any]:
        if words.get("DryRun"):
            raise RefusedError("DryRunOperation", 412, "Request would have succeeded, but DryRun flag is set.")

        def run() -> list[Machine]:
            if self.is_on_free_plan and words["InstanceType"] not in FREE_TYPES:
                raise RefusedError(FREE_PLAN[0], 400, FREE_PLAN[1])
            count = words["MinCount"]
            assert count == words["MaxCount"]
            if self.creates_left is not None and count > self.creates_left:
                count, self.creates_left = self.creates_left, 0
                self.make(words, region, count)
                raise RefusedError("InternalError", 500)
            return self.make(words, region, count)

        return {"Instances": [machine.row() for machine in self._once(words, run)]}

    def _DescribeInstances(self, words: Any, region: str) -> dict[str, Any]:
        self.on_listing()
        shown = []
        for machine in self.machines.values():
            if machine.hidden:
                machine.hidden -= 1
                continue
            if machine.state == "pending" and machine.pending:
                machine.pending -= 1
            elif machine.state == "pending":
                machine.state = "running"
            fields = {"instance-id": machine.id, "placement-group-name": machine.group or ""}
            if machine.region == region and passes(words, machine.tags, fields):
                shown.append({"Instances": [machine.row()]})
        return page(words, "Reservations", shown)

    def _TerminateInstances(self, words: Any, region: str) -> None:
        its = {machine_id: self.machines.get(machine_id) for machine_id in words["InstanceIds"]}
        if any(machine is None or machine.region != region for machine in its.values()):
            raise RefusedError("InvalidInstanceID.NotFound")
        for machine_id in its:
            self.put(machine_id, "terminated")

    def _CreateTags(self, words: Any, _: str) -> None:
        for thing in words["Resources"]:
            if thing.startswith("ami-") and thing not in self.images.images:
                raise RefusedError("InvalidAMIID.NotFound")
            tags = (self.images.images if thing.startswith("ami-") else self.machines)[thing].tags
            tags.update(untagged(words["Tags"]))

    # ── fleets ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _CreateLaunchTemplate(self, words: Any, region: str) -> None:
        key = region, words["LaunchTemplateName"]
        if key in self.fleets.templates:
            raise RefusedError("InvalidLaunchTemplateName.AlreadyExistsException")
        if {"InstanceMarketOptions", "InstanceType"} & words["LaunchTemplateData"].keys():
            raise RefusedError("InvalidParameterCombination")
        self.fleets.templates[key] = words

    def _DescribeLaunchTemplates(self, words: Any, region: str) -> dict[str, Any]:
        found = [
            {"LaunchTemplateName": name, "Tags": pairs(tags)}
            for (place, name), template in self.fleets.templates.items()
            if place == region and passes(words, tags := untagged(template["TagSpecifications"][0]["Tags"]))
        ]
        return page({**words, "MaxResults": 2}, "LaunchTemplates", found)

    def _DeleteLaunchTemplate(self, words: Any, region: str) -> None:
        if self.fleets.templates.pop((region, words["LaunchTemplateName"]), None) is None:
            raise RefusedError("InvalidLaunchTemplateName.NotFoundException")

    def spot_pools(self, words: Mapping[str, Any]) -> list[tuple[str, str, str]]:
        """Return type, zone and template of each pool that a fleet names."""
        return [
            (
                override["InstanceType"],
                override["SubnetId"].removeprefix("subnet-"),
                config["LaunchTemplateSpecification"]["LaunchTemplateName"],
            )
            for config in words["LaunchTemplateConfigs"]
            for override in config["Overrides"]
        ]

    def _CreateFleet(self, words: Any, region: str) -> dict[str, Any]:
        return self._once(words, lambda: self._fleet(words, region))

    def _fleet(self, words: Any, region: str) -> dict[str, Any]:
        fleets, count = self.fleets, words["TargetCapacitySpecification"]["TotalTargetCapacity"]
        options = words["SpotOptions"]
        is_single = options["SingleInstanceType"] and options["SingleAvailabilityZone"]
        if words["Type"] != "instant" or not is_single or options["MinTargetCapacity"] != count:
            raise RefusedError("InvalidParameterCombination")
        pools = self.spot_pools(words)
        if len({(name, zone) for name, zone, _ in pools}) < len(pools):
            raise RefusedError("InvalidFleetConfig")  # the same pool occurs twice
        errors, got = [], []
        for name, zone, template in sorted(pools, key=lambda pool: self.spot.get(pool[:2], float("inf"))):
            place = {"Overrides": {"InstanceType": name, "SubnetId": f"subnet-{zone}"}}
            refusal = fleets.refusals.get((name, zone), fleets.refusals.get(("*", "*")))
            if self.is_on_free_plan and name not in FREE_TYPES:
                refusal = FREE_PLAN
            if not self.has_spot_role:
                refusal = NO_SPOT_ROLE
            if (name, zone) in fleets.untried:
                refusal = UNTRIED
            if refusal is None:
                data = fleets.templates[region, template]["LaunchTemplateData"]
                call = {**data, "InstanceType": name, "is_spot": True, "ClientToken": words["ClientToken"]}
                call["TagSpecifications"] = [*data["TagSpecifications"], *words["TagSpecifications"]]
                call["NetworkInterfaces"] = [{**one, "SubnetId": f"subnet-{zone}"} for one in data["NetworkInterfaces"]]
                ids = [machine.id for machine in self.make(call, region, count - fleets.short_of)]
                got = [{"InstanceIds": ids, "InstanceType": name, "LaunchTemplateAndOverrides": place}]
                refusal = NONE_LEFT if fleets.short_of else None
            if refusal is not None:
                code, message = refusal
                errors.append({"ErrorCode": code, "ErrorMessage": message, "LaunchTemplateAndOverrides": place})
            if got:
                break
        is_complete = got and not fleets.short_of
        return {"FleetId": "fleet-1", "Errors": [] if is_complete else errors, "Instances": got}

    def _CreatePlacementGroup(self, words: Any, region: str) -> None:
        assert words["Strategy"] == "cluster"
        if (region, words["GroupName"]) in self.fleets.groups:
            raise RefusedError("InvalidPlacementGroup.Duplicate")
        self.fleets.groups[region, words["GroupName"]] = untagged(words["TagSpecifications"][0]["Tags"])

    def _DescribePlacementGroups(self, words: Any, region: str) -> dict[str, Any]:
        return {
            "PlacementGroups": [
                {"GroupName": name, "Tags": pairs(tags)}
                for (place, name), tags in self.fleets.groups.items()
                if place == region and passes(words, tags)
            ]
        }

    def _DeletePlacementGroup(self, words: Any, region: str) -> None:
        name = words["GroupName"]
        if (region, name) not in self.fleets.groups:
            raise RefusedError("InvalidPlacementGroup.Unknown")
        if any(machine.group == name and machine.state != "terminated" for machine in self.machines.values()):
            raise RefusedError("InvalidPlacementGroup.InUse")
        del self.fleets.groups[region, name]

    # ── images ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _CreateImage(self, words: Any, region: str) -> dict[str, Any]:
        if any((image.region, image.name) == (region, words["Name"]) for image in self.images.images.values()):
            raise RefusedError("InvalidAMIName.Duplicate")
        assert words["NoReboot"]
        assert {one["ResourceType"] for one in words["TagSpecifications"]} == {"image", "snapshot"}
        machine = self.machines[words["InstanceId"]]
        self.images.on_create(machine.id)
        image = self.images.add(
            untagged(words["TagSpecifications"][0]["Tags"]),
            region=region,
            gb=machine.disk_gb,
            state="pending",
            volume=machine.volume,
            machine=machine.id,
            name=words["Name"],
        )
        self.images.snapshots[image.snapshots[0]].hidden = self.images.hidden_listings
        return {"ImageId": image.id}

    def _DescribeImages(self, words: Any, region: str) -> dict[str, Any]:
        public = {
            image_id: Image(image_id, region, image_id, "", gb, {}, [], "available") for image_id, gb in IMAGES.values()
        }
        if "ImageIds" in words:
            found = [(public | self.images.images).get(image_id) for image_id in words["ImageIds"]]
            if None in found:
                raise RefusedError("InvalidAMIID.NotFound")
        else:
            assert words["Owners"] == ["self"]
            found = [
                image
                for image in self.images.images.values()
                if image.region == region and passes(words, image.tags, {"state": image.state, "name": image.name})
            ]
        return {
            "Images": [
                {
                    "ImageId": image.id,
                    "Name": image.name,
                    "State": image.state,
                    "CreationDate": f"{image.created_at:%Y-%m-%dT%H:%M:%S.000Z}",
                    "RootDeviceName": ROOT,
                    "BlockDeviceMappings": [
                        {
                            "DeviceName": ROOT,
                            "Ebs": {"VolumeSize": image.gb, **{"SnapshotId": one for one in image.snapshots[:1]}},
                        },
                        {"DeviceName": "/dev/sdb", "VirtualName": "ephemeral0"},
                    ],
                    "Tags": pairs(image.tags),
                }
                for image in found
                if image is not None
            ]
        }

    def _DescribeSnapshots(self, words: Any, region: str) -> dict[str, Any]:
        assert words["OwnerIds"] == ["self"]
        found = []
        for one in self.images.snapshots.values():
            if one.region == region and passes(words, one.tags, {"volume-id": one.volume}):
                if one.hidden:
                    one.hidden -= 1
                    continue
                row = {"SnapshotId": one.id, "VolumeId": one.volume, "State": one.state, "VolumeSize": one.gb}
                found.append(row | {"StartTime": one.started_at, "Tags": pairs(one.tags)})
        return {"Snapshots": found}

    def _DeregisterImage(self, words: Any, _: str) -> None:
        if self.images.images.pop(words["ImageId"], None) is None:
            raise RefusedError("InvalidAMIID.Unavailable")

    def _DeleteSnapshot(self, words: Any, _: str) -> None:
        if any(words["SnapshotId"] in image.snapshots for image in self.images.images.values()):
            raise RefusedError("InvalidSnapshot.InUse")
        if self.images.snapshots.pop(words["SnapshotId"], None) is None:
            raise RefusedError("InvalidSnapshot.NotFound")


def subnet(zone: str) -> dict[str, Any]:
    """Return the default subnet of a zone."""
    return {"SubnetId": f"subnet-{zone}", "AvailabilityZone": zone, "VpcId": "vpc-1", "AvailableIpAddressCount": 99}


def pairs(tags: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"Key": name, "Value": value} for name, value in tags.items()]


def untagged(listed: Iterable[Mapping[str, str]]) -> dict[str, str]:
    return {pair["Key"]: pair["Value"] for pair in listed}


def passes(words: Mapping[str, Any], tags: Mapping[str, str], fields: Mapping[str, str] | None = None) -> bool:
    """Return whether a thing passes the filters of a call. Their values have wildcards."""
    for wanted in words.get("Filters", ()):
        name, values = wanted["Name"], wanted["Values"]
        if name == "tag-key":
            has: Iterable[str] = tags
        else:
            has = [tags.get(name.removeprefix("tag:"), "") if name.startswith("tag:") else (fields or {})[name]]
        if not any(fnmatch.fnmatchcase(one, value) for one in has for value in values):
            return False
    return True


def page(words: Mapping[str, Any], name: str, rows: list[Any]) -> dict[str, Any]:
    """Return one page of a list."""
    start, count = int(words.get("NextToken") or 0), int(words.get("MaxResults") or 1000)
    more = {"NextToken": str(start + count)} if start + count < len(rows) else {}
    return {name: rows[start : start + count], **more}


def _product(name: str, price: float, place: str) -> str:
    dimension = {"unit": "Hrs", "pricePerUnit": {"USD": f"{price:.10f}"}}
    attributes = {"instanceType": name, "locationType": place, "operatingSystem": "Linux"}
    return json.dumps(
        {
            "product": {"productFamily": "Compute Instance", "attributes": attributes, "sku": "x"},
            "terms": {"OnDemand": {"x.JRTCKXETXF": {"priceDimensions": {"x.JRTCKXETXF.6YS6EN2CT7": dimension}}}},
        }
    )


# ── machines that are hosts of the test bed ──────────────────────────────────────────────────────────────────────────


AWS_SECRET = "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"


class HostedAWS(FakeAWS):
    """Instances that are hosts."""

    def __init__(self, hosting: Hosting) -> None:
        super().__init__()
        self._hosting = hosting

    def _machine(self, call: Mapping[str, Any], *where: Any) -> Machine:
        machine = super()._machine(call, *where)
        machine.pending = 10**6
        data = base64.b64decode(call["UserData"])
        text = (gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data).decode()
        self._hosting.rent(machine.id, lambda host: cloud_init(host, machine.id, text))
        return machine

    def _DescribeInstances(self, words: Any, region: str) -> dict[str, Any]:
        for machine in self.machines.values():
            if (ip := self._hosting.ip(machine.id)) is not None:
                machine.public_ip, machine.private_ip, machine.pending = ip, ip, 0
            if self._hosting.is_off(machine.id) and not machine.is_ended:
                self.put(machine.id, "terminated", "Client.InstanceInitiatedShutdown")
        return super()._DescribeInstances(words, region)

    def put(self, machine_id: str, state: str, code: str = "", message: str = "") -> None:
        super().put(machine_id, state, code, message)
        if state == "terminated":
            self._hosting.end(machine_id)


@contextmanager
def hosted(hosting: Hosting, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rented]:
    """Rent out hosts of the test bed."""
    with HostedAWS(hosting) as fake:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAIOSFODNN7EXAMPLE")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", AWS_SECRET)
        monkeypatch.setenv("AWS_ENDPOINT_URL", fake.url)
        yield Rented(sky.AWS(ssh_cidr="203.0.113.0/24"), hosting, fake.alive, fake.preempt, (AWS_SECRET,))
