"""AWS EC2 as a provider: RunInstances, one zone after another, and everything found again by tag.

The SDK is botocore, on which boto3 stands; it is imported when a verb is called. Where a fact comes from is said beside it; "EC2 guide" is the Amazon EC2
User Guide, "fact sheet" the one of 2026-11-20.
"""

from __future__ import annotations

import functools
import gzip
import hashlib
import importlib
import json
import logging
import re
import threading
import time
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime
from http import HTTPStatus
from ipaddress import ip_address, ip_network
from typing import Any, ClassVar, Self, cast

from pydantic import Field, SecretStr, field_validator, model_validator

from skyward_core.accelerators.catalog import find
from skyward_core.errors import (
    BadRequest,
    CredentialsError,
    InstancesLeft,
    NoCapacity,
    NotYetSupported,
    ProviderFailed,
    QuotaExceeded,
    RateLimited,
    SkywardError,
)
from skyward_core.instances import Endpoint, Instance, InstanceState
from skyward_core.market import Offer, Requirements, matches
from skyward_core.providers import _http, userdata
from skyward_core.providers._aws_prices import PRICES, REGION
from skyward_core.providers.base import LAUNCH_TAG, POOL_TAG, RANK_TAG, Provider, Tags
from skyward_core.providers.login import Key, host_key, our_key
from skyward_core.providers.tagging import of_machine

GB = 1e9
MIB = 1024**2
PAGE = 100
MOST_THREADS = 8
CONNECT_SECONDS, READ_SECONDS = 10, 30
ATTEMPTS = 5
ADDRESS_SECONDS = 300.0
"""How long a machine may take from the creating call to an address; seconds are usual."""
FIRST_LOOK_SECONDS, LONGEST_LOOK_SECONDS = 0.5, 5.0
AGAIN_SECONDS = (0.5, 1.0, 2.0, 4.0)
"""Pauses before a creating call, whose answer is not known or which was throttled, is sent again with its token."""
MOST_PRICED_ONE_BY_ONE = 16
NO_SPOT_POOL = 0.95
"""At this share of the on-demand price, and above it, nothing is left over that is sold as spot (fact sheet, 1.2)."""
USER_DATA_BYTES = 16 * 1024
DISK_GB = 100
GROUP_NAME = "skyward-ssh"
MACHINE_ID = "cat /var/lib/cloud/data/instance-id"
PRICE_TAG, ON_DEMAND_PRICE_TAG = "skyward-price-per-hour", "skyward-on-demand-price-per-hour"

ACCELERATED = ("g*", "p*", "trn*", "inf*")
"""The families with chips that the catalogue knows; the whole list of types is a dozen pages."""
OTHER_DEVICES = ("FpgaInfo", "MediaAcceleratorInfo", "InferenceAcceleratorInfo")
UNTOLD_CHIPS: Mapping[str, tuple[str, int]] = {"trn2u.48xlarge": ("Trainium2", 16)}
"""What DescribeInstanceTypes leaves out (fact sheet, 1.2)."""

SXM = ("V100", "A100", "H100", "H200")
"""What EC2 has as SXM boards, in its families p3 to p5 (fact sheet, section 6). AWS does not tell."""

NVIDIA_IMAGE = "/aws/service/deeplearning/ami/{architecture}/base-oss-nvidia-driver-gpu-ubuntu-24.04/latest/ami-id"
NEURON_IMAGE = "/aws/service/neuron/dlami/base/ubuntu-24.04/latest/image_id"
UBUNTU_IMAGE = "/aws/service/canonical/ubuntu/server/24.04/stable/current/{debian_architecture}/hvm/ebs-gp3/ami-id"
DEBIAN_ARCHITECTURES: Mapping[str, str] = {"x86_64": "amd64", "arm64": "arm64"}
WITHOUT_IMAGE: Mapping[str, str] = {
    "V100": "the driver of AWS's images, branch 595, no longer knows Volta",
    "Inferentia1": "AWS's Neuron images no longer support it",
    "Radeon Pro V520": "AWS keeps no image with AMD's driver",
}

STATES: Mapping[str, InstanceState] = {
    "pending": InstanceState.PENDING,
    "running": InstanceState.RUNNING,
    "stopping": InstanceState.STOPPING,
    "stopped": InstanceState.STOPPING,  # its disk is paid for
    # Nothing leads back from it, and it is not billed (EC2 guide, "Instance lifecycle"); a large machine stays in it for minutes.
    "shutting-down": InstanceState.GONE,
    "terminated": InstanceState.GONE,
}
"""A state that is not here is PENDING: the machine is there, and must be ended."""

MEANINGS: Mapping[type[SkywardError], str] = {
    NoCapacity: r"Insufficient(Instance|Host|ReservedInstance)?Capacity|UnfulfillableCapacity|Unsupported|ReservationCapacityExceeded"
    r"|InsufficientFreeAddressesInSubnet|SpotMaxPriceTooLow|SpotInstance(Termination|Shutdown)",
    QuotaExceeded: r"(Vcpu|Instance|Volume|Address|NetworkInterface|MaxIOPS)LimitExceeded|Max(SpotInstance|Fleet)CountExceeded",
    CredentialsError: r"AuthFailure|UnauthorizedOperation|AccessDenied(Exception)?|OptInRequired|ExpiredToken(Exception)?|RequestExpired|Blocked"
    r"|InvalidClientTokenId|InvalidAccessKeyId|UnrecognizedClientException|SignatureDoesNotMatch|InvalidSignatureException|IncompleteSignature"
    r"|MissingAuthenticationToken|PendingVerification",
    RateLimited: r"RequestLimitExceeded|(Request)?Throttl(ing|ed)(Exception)?|SlowDown|EC2ThrottledException|TooManyRequestsException",
}
"""Error codes of EC2, SSM, STS and the price list (fact sheet, 0.2). What follows a dot in a code counts for nothing; a 5xx with another code is an outage."""

log = logging.getLogger(__name__)


class AWS(Provider):
    """Rent machines of EC2. Credentials come from the fields, or from where AWS's own tools take them.

    Args:
        region: one, or several that offers are asked of and machines looked for in.
        use_ssm: reach machines through Session Manager. Not yet.
        profile: of ~/.aws/config and ~/.aws/credentials.
        subnet_ids: where machines may be; by default the default subnets, one a zone, of the region's default VPC.
        ssh_cidr: from where machines may be logged in to, as "203.0.113.7/32"; by default from the address that `checkip_url` sees us with.
        checkip_url: tells a caller's public address as plain text.
        use_private_ip: log in at the private addresses, and give machines no public ones. Their subnets need another way out, and `ssh_cidr` must be set.
        disk_gb: size of the root disk, in GiB; the image may ask for more.
        instance_profile: name or ARN of the IAM instance profile that the machines get.
        ami: image to use in place of AWS's own; cloud-init must run in it. Chips that AWS has no image for are offered only with it.
        ssh_key: path of an OpenSSH private key without passphrase; by default one that is made under the state directory.
        endpoint_url: of all of AWS's services, for tests and proxies; AWS_ENDPOINT_URL says the same.
        access_key_id: with `secret_access_key`, and `session_token` where there is one, in place of what the environment has.
        secret_access_key: see `access_key_id`.
        session_token: see `access_key_id`.
    """

    name: ClassVar[str] = "aws"
    end_command: ClassVar[str] = userdata.END_COMMAND
    listing_lag_seconds: ClassVar[float] = 15.0
    billing_minimum_seconds: ClassVar[int] = 60

    region: str | tuple[str, ...] = "us-east-1"
    use_ssm: bool = False
    profile: str | None = None
    subnet_ids: tuple[str, ...] = ()
    ssh_cidr: str | None = None
    checkip_url: str = "https://checkip.amazonaws.com"
    use_private_ip: bool = False
    disk_gb: int = Field(default=DISK_GB, ge=8, le=16_384)
    instance_profile: str | None = None
    ami: str | None = None
    ssh_key: str | None = None
    endpoint_url: str | None = None
    access_key_id: SecretStr | None = Field(default=None, exclude=True, repr=False)
    secret_access_key: SecretStr | None = Field(default=None, exclude=True, repr=False)
    session_token: SecretStr | None = Field(default=None, exclude=True, repr=False)

    # ── the four verbs ───────────────────────────────────────────────────────────────────────────────────────────────

    def offers(self, want: Requirements) -> list[Offer]:
        """Return what the regions sell. Prices on demand are those of AWS's price list, or of our own table where we may not ask for it."""
        self._refuse_ssm()
        with _Account(self) as account:
            return [offer for offers in _each(self._regions, lambda region: self._offers_in(account, region, want)) for offer in offers]

    def launch(self, offer: Offer, count: int, tags: Tags, startup: str) -> list[Instance]:
        """Rent all `count` machines in one zone, trying one after the other; return those that have an address.

        Raises NoCapacity if no zone has them all. The creating call may be sent again with its token, which makes no second machine.
        """
        self._refuse_ssm()
        key = our_key(self.ssh_key)
        with _Account(self) as account:
            made = self._run(account, offer, count, tags, self._user_data(key, tags, startup))
            found = self._with_addresses(account, offer.region, tags[LAUNCH_TAG], [machine["InstanceId"] for machine in made])
        keys = _HostKeys(key)
        return sorted((self._instance(machine, offer.region, keys) for machine in found), key=lambda instance: instance.rank)

    def instances(self, pool_id: str | None = None) -> list[Instance]:
        """Return the machines that carry a pool's tag in all regions."""
        wanted = {"Name": "tag-key", "Values": [POOL_TAG]} if pool_id is None else {"Name": f"tag:{POOL_TAG}", "Values": [pool_id]}
        with _Account(self) as account:
            found = _each(self._regions, lambda region: [(region, machine) for machine in account.machines(region, wanted)])
        keys = _HostKeys(self._key())
        listed = [self._instance(machine, region, keys) for machines in found for region, machine in machines]
        return [instance for instance in listed if instance.state is not InstanceState.GONE and pool_id in (None, instance.pool_id)]

    def terminate(self, ids: Sequence[str]) -> None:
        """Ask every region for the end of these machines; their disks go with them. An id tells no region, and one that nobody knows is gone."""
        wanted = sorted(set(ids))
        if not wanted:
            return
        with _Account(self) as account:
            answers = _each(self._regions, lambda region: _terminated(account, region, wanted))
        ended = {machine_id for done, _ in answers for machine_id in done}
        left = {machine_id: error for _, failed in answers for machine_id, error in failed.items() if machine_id not in ended}
        if left:
            error = next(iter(left.values()))
            if len(left) == len(wanted) and not isinstance(error, BadRequest):
                raise error
            raise InstancesLeft(f"{', '.join(sorted(left))} may still run: {error}", sorted(left)) from error

    def account(self) -> str:
        """Return the number of the AWS account."""
        with _Account(self) as account:
            return str(account.ask(self._regions[0], "sts", "get_caller_identity")["Account"])

    def console_url(self, instance: Instance) -> str | None:
        """Return the machine's page in the console of its region."""
        return f"https://{instance.region}.console.aws.amazon.com/ec2/home?region={instance.region}#InstanceDetails:instanceId={instance.id}"

    # ── what is sold ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _offers_in(self, account: _Account, region: str, want: Requirements) -> list[Offer]:
        filters: list[dict[str, Any]] = [{"Name": "processor-info.supported-architecture", "Values": list(DEBIAN_ARCHITECTURES)}]
        families = (want.instance_type,) if want.instance_type is not None else ACCELERATED if want.accelerator is not None else ()
        if families:
            filters.append({"Name": "instance-type", "Values": list(families)})
        kinds = account.pages(region, "ec2", "describe_instance_types", "InstanceTypes", Filters=filters)
        machines = [machine for kind in kinds if (machine := _machine(kind, region)) is not None]
        log.debug("%s has %d types of machine with chips that the catalogue does not know, or with parts of one", region, len(kinds) - len(machines))
        if self.ami is None:
            machines = [(offer, classes) for offer, classes in machines if offer.accelerator not in WITHOUT_IMAGE]
        any_price = want.model_copy(update={"max_price_per_hour": None})
        machines = [(offer, classes) for offer, classes in machines if matches(offer, any_price) is None]
        prices = _prices(account, region, [offer.instance_type for offer, _ in machines])
        zones = {subnet["AvailabilityZone"] for subnet in self._subnets(account, region)} if self.subnet_ids else None
        spot_types = [offer.instance_type for offer, classes in machines if "spot" in classes]
        spot: dict[str, set[float]] = {}
        for (instance_type, zone), price in _spot_prices(account, region, spot_types).items():
            if zones is None or zone in zones:
                spot.setdefault(instance_type, set()).add(price)
        return [sold for offer, classes in machines for sold in _sold(offer, classes, prices.get(offer.instance_type), spot.get(offer.instance_type, set()))]

    # ── how it is launched ───────────────────────────────────────────────────────────────────────────────────────────

    def _user_data(self, key: Key, tags: Tags, startup: str) -> bytes:
        boot = userdata.boot_script(startup, tags, MACHINE_ID)
        content = userdata.cloud_config(boot, key, host_key(tags[LAUNCH_TAG], key)).encode()
        if len(content) > USER_DATA_BYTES:
            content = gzip.compress(content, mtime=0)  # cloud-init unpacks it
        if len(content) > USER_DATA_BYTES:
            raise BadRequest(f"the startup script is too long: user data of EC2 is {USER_DATA_BYTES} bytes at most, and this is {len(content)}, compressed")
        return content

    def _run(self, account: _Account, offer: Offer, count: int, tags: Tags, user_data: bytes) -> list[dict[str, Any]]:
        """Find out what a launch needs, and try zone after zone; spot machines in the cheapest first, and in none that is dearer than what was offered."""
        region = offer.region
        words = self._words(account, offer, tags, user_data)
        subnets = self._subnets(account, region)
        prices = _spot_prices(account, region, [offer.instance_type]) if offer.is_spot else {}
        if offer.is_spot:  # the bill and what the money allows are counted by the offer's price
            subnets = [subnet for subnet in subnets if prices.get((offer.instance_type, subnet["AvailabilityZone"]), float("inf")) <= offer.price_per_hour]
        if not subnets:
            raise NoCapacity(f"no zone of {region} sells {offer.instance_type} as spot for ${offer.price_per_hour:g} any more").coded("SpotPriceTooHigh")
        subnets.sort(key=lambda subnet: (prices.get((offer.instance_type, subnet["AvailabilityZone"]), float("inf")), subnet["AvailabilityZone"]))
        groups: dict[str, str] = {}
        cidr = self._ssh_cidr()
        refusals: dict[str, NoCapacity] = {}
        for subnet in subnets:
            zone, vpc = subnet["AvailabilityZone"], subnet["VpcId"]
            if vpc not in groups:
                groups[vpc] = _group(account, region, vpc, cidr)
            price = prices.get((offer.instance_type, zone), offer.price_per_hour)
            place = words | _placed(subnet["SubnetId"], groups[vpc], count, is_public=not self.use_private_ip) | _tagged(offer, tags, price)
            try:
                return _created(account, region, place, tags[LAUNCH_TAG])
            except QuotaExceeded:
                raise  # it is the region's
            except NoCapacity as error:
                refusals[f"{zone} ({subnet['SubnetId']})"] = error
        worst = next((error for error in refusals.values() if error.code != "Unsupported"), None) or next(iter(refusals.values()))
        told = ", ".join(f"{place}: {error.code}" for place, error in refusals.items())
        raise NoCapacity(f"no zone of {region} has {count} x {offer.instance_type}: {told}. {worst}").coded(worst.code) from worst

    def _words(self, account: _Account, offer: Offer, tags: Tags, user_data: bytes) -> dict[str, Any]:
        """What a creating call says in every zone."""
        image = self._image(account, offer)
        root = str(image["RootDeviceName"])
        disks = [device.get("Ebs", {}).get("VolumeSize", 0) for device in image.get("BlockDeviceMappings", []) if device.get("DeviceName") == root]
        words: dict[str, Any] = {
            "ImageId": image["ImageId"],
            "InstanceType": offer.instance_type,
            "UserData": user_data,
            "InstanceInitiatedShutdownBehavior": "terminate",
            "MetadataOptions": {"HttpTokens": "required", "HttpEndpoint": "enabled"},
            "BlockDeviceMappings": [
                {"DeviceName": root, "Ebs": {"VolumeSize": max(self.disk_gb, *disks, 0), "VolumeType": "gp3", "DeleteOnTermination": True}}
            ],
        }
        if self.instance_profile is not None:
            words["IamInstanceProfile"] = {"Arn" if self.instance_profile.startswith("arn:") else "Name": self.instance_profile}
        if offer.is_spot:
            words["InstanceMarketOptions"] = {
                "MarketType": "spot",
                "SpotOptions": {"SpotInstanceType": "one-time", "InstanceInterruptionBehavior": "terminate"},
            }
        return words

    def _image(self, account: _Account, offer: Offer) -> dict[str, Any]:
        image_id = self.ami
        if image_id is None:
            kinds = account.pages(
                offer.region, "ec2", "describe_instance_types", "InstanceTypes", Filters=[{"Name": "instance-type", "Values": [offer.instance_type]}]
            )
            if not kinds:
                raise BadRequest(f"there is no {offer.instance_type} in {offer.region}")
            parameter = _image_parameter(offer.accelerator, kinds[0]["ProcessorInfo"]["SupportedArchitectures"])
            image_id = str(account.ask(offer.region, "ssm", "get_parameter", Name=parameter)["Parameter"]["Value"])
        images = account.ask(offer.region, "ec2", "describe_images", ImageIds=[image_id])["Images"]
        if not images:
            raise BadRequest(f"there is no image {image_id} in {offer.region}")
        return cast("dict[str, Any]", images[0])

    def _subnets(self, account: _Account, region: str) -> list[dict[str, Any]]:
        wanted = {"Name": "subnet-id", "Values": list(self.subnet_ids)} if self.subnet_ids else {"Name": "default-for-az", "Values": ["true"]}
        subnets = account.pages(region, "ec2", "describe_subnets", "Subnets", Filters=[wanted])
        missing = set(self.subnet_ids) - {subnet["SubnetId"] for subnet in subnets}
        if missing and (not subnets or len(self._regions) == 1):  # several regions have each their own
            raise BadRequest(f"{region} has no subnet {', '.join(sorted(missing))}")
        if not subnets:
            raise BadRequest(f"{region} has no default subnets: name some with subnet_ids=, or make a default VPC (`aws ec2 create-default-vpc`)")
        return subnets

    def _ssh_cidr(self) -> str:
        if self.ssh_cidr is not None:
            return self.ssh_cidr
        try:
            with _http.Api("the service that tells our public address", "") as api:
                told = str(api.ask("GET", self.checkip_url))
            address = ip_address(told.strip())
        except (SkywardError, ValueError) as error:
            raise ProviderFailed(f"{self.checkip_url} did not tell from which address we come: {error}; say it with ssh_cidr=") from error
        return f"{address}/{address.max_prefixlen}"

    def _with_addresses(self, account: _Account, region: str, launch: str, ids: Sequence[str]) -> list[dict[str, Any]]:
        """Wait until each machine has an address or has failed. Raises NoCapacity, QuotaExceeded, BadRequest or ProviderFailed if all have failed."""
        deadline = time.monotonic() + ADDRESS_SECONDS
        pause = FIRST_LOOK_SECONDS
        while True:
            listed = account.machines(region, {"Name": f"tag:{LAUNCH_TAG}", "Values": [launch]})
            found = {machine["InstanceId"]: machine for machine in listed if machine["InstanceId"] in ids}
            failed = {machine_id: machine for machine_id, machine in found.items() if _state(machine) not in _COMING}
            ready = {machine_id: machine for machine_id, machine in found.items() if machine_id not in failed and self._address(machine)}
            if len(ready) + len(failed) == len(ids) or time.monotonic() > deadline:
                break
            time.sleep(pause)
            pause = min(1.5 * pause, LONGEST_LOOK_SECONDS)
        if left := [machine_id for machine_id in ids if machine_id not in ready]:
            _terminated(account, region, left)  # a stopped one costs its disk; what fails here is found by its tags
        if not ready and not failed:
            raise ProviderFailed(f"{', '.join(left)} had no address after {ADDRESS_SECONDS:.0f} s; asked for their end")
        if not ready:
            raise _why_failed(next(iter(failed.values())))
        return list(ready.values())

    # ── what is there ────────────────────────────────────────────────────────────────────────────────────────────────

    def _address(self, machine: Mapping[str, Any]) -> str | None:
        return machine.get("PrivateIpAddress" if self.use_private_ip else "PublicIpAddress") or None

    def _instance(self, machine: Mapping[str, Any], region: str, keys: _HostKeys) -> Instance:
        """Read what DescribeInstances says. All machines of a creating call have its tags: their ranks are told by their places in it."""
        tags = {tag["Key"]: tag["Value"] for tag in machine.get("Tags", [])}
        first = tags.get(RANK_TAG, "")
        rank = (int(first) if first.isdigit() else 0) + int(machine.get("AmiLaunchIndex", 0))
        return Instance(
            id=machine["InstanceId"],
            provider=self.name,
            pool_id=tags.get(POOL_TAG, ""),
            rank=rank,
            state=_state(machine),
            region=region,
            instance_type=machine["InstanceType"],
            is_spot=machine.get("InstanceLifecycle") == "spot",
            price_per_hour=_number(tags.get(PRICE_TAG)) or 0.0,
            on_demand_price_per_hour=_number(tags.get(ON_DEMAND_PRICE_TAG)),
            ip=machine.get("PublicIpAddress") or None,
            private_ip=machine.get("PrivateIpAddress") or None,
            tags=of_machine(tags, rank),
            directory=userdata.directory_of(machine["InstanceId"]),
            endpoint=keys.endpoint(self._address(machine), tags.get(LAUNCH_TAG)),
        )

    def _key(self) -> Key | None:
        """Our SSH key; None where it is not: machines are listed, and ended, without it."""
        try:
            return our_key(self.ssh_key)
        except BadRequest:
            return None

    # ── what is set ──────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def _regions(self) -> tuple[str, ...]:
        return (self.region,) if isinstance(self.region, str) else self.region

    def _refuse_ssm(self) -> None:
        if self.use_ssm:
            raise NotYetSupported(
                "use_ssm=True is not there yet: a connection through Session Manager needs AWS's session-manager-plugin under SSH. "
                "Leave it out; use_private_ip=True with ssh_cidr= reaches machines without public addresses over a VPN or from the same VPC"
            )

    @field_validator("region")
    @classmethod
    def _is_a_region(cls, region: str | tuple[str, ...]) -> str | tuple[str, ...]:
        regions = (region,) if isinstance(region, str) else region
        if not regions or len(set(regions)) < len(regions) or not all(re.fullmatch(r"[a-z]{2}(-[a-z]+)+-[0-9]", name) for name in regions):
            raise ValueError('write "us-east-1", or several different regions: zones, as "us-east-1a", are chosen when machines are launched')
        return region

    @field_validator("ssh_cidr")
    @classmethod
    def _is_a_network(cls, ssh_cidr: str | None) -> str | None:
        return ssh_cidr and str(ip_network(ssh_cidr))

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if (self.access_key_id is None) != (self.secret_access_key is None):
            raise ValueError("access_key_id= and secret_access_key= come together")
        if self.ami is not None and len(self._regions) > 1:
            raise ValueError("ami= needs one region: an image has another id in each")
        if self.use_private_ip and self.ssh_cidr is None:
            raise ValueError("use_private_ip=True needs ssh_cidr=, the private network that you come from: no service can tell it")
        return self


# ── asking AWS ───────────────────────────────────────────────────────────────────────────────────────────────────────


@functools.cache
def _models() -> Any:
    """The SDK's descriptions of the services, which are read from files: 0.1 s for EC2's, paid once a process."""
    return importlib.import_module("botocore.loaders").create_loader()


class _Account:
    """What is asked of AWS in one verb: a context manager. Failures become our errors; requests are repeated by the SDK, those said `once` are not."""

    def __init__(self, provider: AWS) -> None:
        try:
            self._sdk = importlib.import_module("botocore.session")
        except ModuleNotFoundError as error:
            raise BadRequest("provider aws needs AWS's SDK: pip install 'skyward-core[aws]'") from error
        self._endpoint_url = provider.endpoint_url
        self._clients: dict[tuple[str, str, bool], Any] = {}
        self._lock = threading.Lock()
        self._secrets: tuple[str, ...] = ()
        self._session = self._sdk.Session(profile=provider.profile)
        self._session.register_component("data_loader", _models())
        if provider.access_key_id is not None and provider.secret_access_key is not None:
            token = provider.session_token
            self._session.set_credentials(
                provider.access_key_id.get_secret_value(), provider.secret_access_key.get_secret_value(), token.get_secret_value() if token else None
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for client in self._clients.values():
            client.close()

    def ask(self, region: str, service: str, operation: str, *, once: bool = False, **words: Any) -> dict[str, Any]:
        with self._translated(f"{service} {operation} in {region}"):
            return getattr(self._client(region, service, once=once), operation)(**words)

    def pages(self, region: str, service: str, operation: str, what: str, **words: Any) -> list[Any]:
        """Ask for all pages of a list."""
        with self._translated(f"{service} {operation} in {region}"):
            pages = self._client(region, service).get_paginator(operation).paginate(PaginationConfig={"PageSize": PAGE}, **words)
            return [item for page in pages for item in page[what]]

    def machines(self, region: str, wanted: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the machines that pass a filter, ended ones too."""
        reservations = self.pages(region, "ec2", "describe_instances", "Reservations", Filters=[wanted])
        return [machine for reservation in reservations for machine in reservation["Instances"]]

    def wait_for(self, region: str, what: str, **words: Any) -> None:
        with self._translated(f"waiting for {what} in {region}"):
            self._client(region, "ec2").get_waiter(what).wait(WaiterConfig={"Delay": 1, "MaxAttempts": 20}, **words)

    def _client(self, region: str, service: str, *, once: bool = False) -> Any:
        with self._lock:  # making clients is not for several threads; using them is
            if (region, service, once) not in self._clients:
                if not self._clients and (credentials := self._session.get_credentials()) is not None:
                    frozen = credentials.get_frozen_credentials()
                    self._secrets = tuple(secret for secret in (frozen.secret_key, frozen.token) if secret)
                # InsufficientInstanceCapacity is a 500: the SDK would ask the same zone again for seconds (measured, fact sheet 1.4)
                settings = importlib.import_module("botocore.config").Config(
                    retries={"mode": "standard", "total_max_attempts": 1 if once else ATTEMPTS},
                    connect_timeout=CONNECT_SECONDS,
                    read_timeout=READ_SECONDS,
                    max_pool_connections=MOST_THREADS,
                )
                self._clients[region, service, once] = self._session.create_client(
                    service, region_name=region, endpoint_url=self._endpoint_url, config=settings
                )
            return self._clients[region, service, once]

    @contextmanager
    def _translated(self, what: str) -> Generator[None]:
        kinds = importlib.import_module("botocore.exceptions")
        garbled = importlib.import_module("botocore.parsers").ResponseParserError
        refused = (
            kinds.NoCredentialsError,
            kinds.PartialCredentialsError,
            kinds.CredentialRetrievalError,
            kinds.ProfileNotFound,
            kinds.SSOError,
            kinds.TokenRetrievalError,
            kinds.NoAuthTokenError,
        )
        try:
            yield
            return
        except kinds.ClientError as error:
            told, cause = error.response.get("Error", {}), error
            code = str(told.get("Code", ""))
            kind = _meaning(code, error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
            message = f"AWS answered {what} with {code}: {told.get('Message', '')}"
        except refused as error:
            kind, code, cause = CredentialsError, "", error
            message = "no credentials for AWS: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, or log in "
            message += f"(`aws configure`, `aws sso login`): {error}"
        except (kinds.HTTPClientError, kinds.ConnectionError, kinds.WaiterError, garbled) as error:
            kind, code, cause, message = ProviderFailed, "", error, f"AWS did not answer {what}: {error}"
        except (kinds.BotoCoreError, ValueError) as error:
            kind, code, cause, message = BadRequest, "", error, f"AWS cannot be asked {what}: {error}"
        text = functools.reduce(lambda text, secret: text.replace(secret, "***"), self._secrets, message)
        # SignatureDoesNotMatch repeats what was signed, a session token too: then its cause is not told either
        raise kind(text[: _http.TOLD_CHARACTERS]).coded(code) from (cause if text == message else None)


def _meaning(code: str, status: int) -> type[SkywardError]:
    head = code.partition(".")[0]
    for kind, codes in MEANINGS.items():
        if re.fullmatch(codes, head):
            return kind
    if status == HTTPStatus.TOO_MANY_REQUESTS:
        return RateLimited
    return ProviderFailed if status >= HTTPStatus.INTERNAL_SERVER_ERROR else BadRequest


def _each[T, R](things: Sequence[T], ask: Callable[[T], R]) -> list[R]:
    """Ask about several things at once, in threads of their own if there are several; in their order. Raises the first failure when all are through."""
    if len(things) == 1:
        return [ask(things[0])]
    with ThreadPoolExecutor(min(MOST_THREADS, max(1, len(things))), thread_name_prefix="skyward-aws") as threads:
        return [future.result() for future in [threads.submit(ask, thing) for thing in things]]


# ── offers ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _machine(kind: Mapping[str, Any], region: str) -> tuple[Offer, frozenset[str]] | None:
    """Read what DescribeInstanceTypes says: an offer without a price, and how it is sold. None for chips that we do not know and for parts of a chip."""
    chip = _chip(kind)
    if chip is None:
        return None
    accelerator, accelerators, accelerator_memory_gb = chip
    offer = Offer(
        provider=AWS.name,
        instance_type=kind["InstanceType"],
        region=region,
        price_per_hour=0.0,
        vcpus=kind["VCpuInfo"]["DefaultVCpus"],
        memory_gb=kind["MemoryInfo"]["SizeInMiB"] * MIB / GB,
        accelerator=accelerator,
        accelerators=accelerators,
        accelerator_memory_gb=accelerator_memory_gb,
        form_factor="SXM" if kind["InstanceType"].startswith("p") and accelerator in SXM else None,
    )
    return offer, frozenset(kind.get("SupportedUsageClasses", []))


def _chip(kind: Mapping[str, Any]) -> tuple[str | None, int, float | None] | None:
    """Name, number and memory of a type's chips: no name where it has none, None where they are not ours to offer.

    The memory is the catalogue's size that is nearest to what AWS tells: 22888 MiB are the L4's 24 GB, p4d and p4de are both "A100", and the 524288 MiB of
    a Trainium2 are wrong altogether (fact sheet, 1.2).
    """
    devices = [*(kind.get("GpuInfo") or {}).get("Gpus", []), *(kind.get("NeuronInfo") or {}).get("NeuronDevices", [])]
    name, count = UNTOLD_CHIPS.get(kind["InstanceType"], ("", 0))
    if devices:
        name, count = str(devices[0]["Name"]), int(devices[0].get("Count") or 0)
    elif not count:
        return None if any(kind.get(other) for other in OTHER_DEVICES) else (None, 0, None)
    try:
        chip = find(name)
    except BadRequest:
        return None
    told = (devices[0].get("MemoryInfo", {}).get("SizeInMiB", 0) if devices else 0) * MIB / GB
    return (chip.name, count, min(chip.memory_gb, key=lambda size: abs(size - told))) if count else None


def _sold(offer: Offer, classes: frozenset[str], price: float | None, spot: Collection[float]) -> list[Offer]:
    """Return the offers of one type of machine: on demand if that has a price, and spot at each price that some zone has."""
    sold: list[Offer] = []
    if price is not None and "on-demand" in classes:
        sold.append(offer.model_copy(update={"price_per_hour": price, "on_demand_price_per_hour": price}))
    for cost in sorted(spot):
        if price is not None and cost >= NO_SPOT_POOL * price:
            log.debug("spot %s costs $%g of $%g in %s: there is little to be had", offer.instance_type, cost, price, offer.region)
        dear = price if price is not None and price >= cost else None  # an estimate from another region may be too low
        sold.append(offer.model_copy(update={"is_spot": True, "price_per_hour": cost, "on_demand_price_per_hour": dear}))
    return sold


def _prices(account: _Account, region: str, types: Sequence[str]) -> dict[str, float]:
    """Return prices on demand, USD per hour: of the price list if it may be asked, else of our table."""
    table = {name: PRICES[name] for name in types if name in PRICES}
    if not types:
        return table
    few = len(types) <= MOST_PRICED_ONE_BY_ONE
    try:
        products = _each(types, lambda name: _products(account, region, instanceType=name)) if few else [_products(account, region)]
    except SkywardError as error:
        log.info("AWS's price list cannot be asked, our own table of %s stands in: %s", REGION, error)
        return table
    return {name: price for some in products for item in some for name, price in _listed(json.loads(item))}


def _products(account: _Account, region: str, **wish: str) -> list[str]:
    # locations have other names than regions, but for `regionCode`
    wanted = {"regionCode": region, "operatingSystem": "Linux", "tenancy": "Shared", "preInstalledSw": "NA", "capacitystatus": "Used", **wish}
    filters = [{"Type": "TERM_MATCH", "Field": name, "Value": value} for name, value in wanted.items()]
    return account.pages("us-east-1", "pricing", "get_products", "PriceList", ServiceCode="AmazonEC2", Filters=filters)


def _listed(item: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield type and price of a product, if it has one by the hour. Local Zones, which cost more, and Capacity Blocks are products of their own."""
    attributes = item["product"]["attributes"]
    if attributes.get("locationType", "AWS Region") != "AWS Region" or attributes.get("marketoption", "OnDemand") != "OnDemand":
        return
    for term in item.get("terms", {}).get("OnDemand", {}).values():
        for dimension in term["priceDimensions"].values():
            if (price := _number(dimension["pricePerUnit"].get("USD"))) and dimension.get("unit", "Hrs") == "Hrs":
                yield attributes["instanceType"], price


def _spot_prices(account: _Account, region: str, types: Sequence[str]) -> dict[tuple[str, str], float]:
    """Return what types cost now as spot, in USD per hour, by type and zone; Local Zones and the like left out."""
    chunks = [types[start : start + PAGE] for start in range(0, len(types), PAGE)]

    def ask(chunk: Sequence[str]) -> list[dict[str, Any]]:
        return account.pages(
            region,
            "ec2",
            "describe_spot_price_history",
            "SpotPriceHistory",
            InstanceTypes=list(chunk),
            ProductDescriptions=["Linux/UNIX"],
            StartTime=datetime.now(UTC),
        )

    found: dict[tuple[str, str], tuple[datetime, float]] = {}
    for entry in (entry for entries in _each(chunks, ask) for entry in entries):
        place, price = (entry["InstanceType"], entry["AvailabilityZone"]), _number(entry["SpotPrice"])
        is_usual = re.fullmatch(rf"{re.escape(region)}[a-z]", entry["AvailabilityZone"])
        if is_usual and price and (place not in found or found[place][0] < entry["Timestamp"]):
            found[place] = (entry["Timestamp"], price)
    return {place: price for place, (_, price) in found.items()}


# ── launching ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _image_parameter(accelerator: str | None, architectures: Sequence[str]) -> str:
    """Return where AWS keeps the id of the image for these chips (fact sheet, 1.7). Raises BadRequest if none fits."""
    architecture = "arm64" if "arm64" in architectures else "x86_64"
    if accelerator is None:
        return UBUNTU_IMAGE.format(debian_architecture=DEBIAN_ARCHITECTURES[architecture])
    if (reason := WITHOUT_IMAGE.get(accelerator)) is not None:
        raise BadRequest(f"there is no image for {accelerator}: {reason}. Name one with ami=")
    return NEURON_IMAGE if find(accelerator).vendor == "AWS" else NVIDIA_IMAGE.format(architecture=architecture)


def _placed(subnet_id: str, group_id: str, count: int, *, is_public: bool) -> dict[str, Any]:
    interface = {
        "DeviceIndex": 0,
        "SubnetId": subnet_id,
        "Groups": [group_id],
        "AssociatePublicIpAddress": is_public,
        "DeleteOnTermination": True,
    }
    return {"MinCount": count, "MaxCount": count, "NetworkInterfaces": [interface]}


def _tagged(offer: Offer, tags: Tags, price: float) -> dict[str, Any]:
    """Tags of machines, disks and interfaces, with what they cost: the price that is true when they are made is told nowhere later."""
    prices = {PRICE_TAG: repr(price)}
    if (dear := offer.on_demand_price_per_hour) is not None:
        prices[ON_DEMAND_PRICE_TAG] = repr(dear)
    pairs = [{"Key": name, "Value": value} for name, value in {"Name": tags[POOL_TAG], **tags, **prices}.items()]
    return {"TagSpecifications": [{"ResourceType": kind, "Tags": pairs} for kind in ("instance", "volume", "network-interface")]}


def _created(account: _Account, region: str, words: Mapping[str, Any], launch: str) -> list[dict[str, Any]]:
    """Send the creating call, again with its token while nobody knows what became of it; if that goes on, look for what it may have made.

    The token holds everything that tells this call from the launch's others: with other words than before, EC2 refuses it.
    """
    market = "spot" if "InstanceMarketOptions" in words else "on-demand"
    names = (launch, region, words["NetworkInterfaces"][0]["SubnetId"], market, words["InstanceType"], str(words["MinCount"]))
    token = hashlib.sha256(" ".join(names).encode()).hexdigest()  # of 64 characters, as many as it may have
    for pause in (*AGAIN_SECONDS, None):
        try:
            return account.ask(region, "ec2", "run_instances", once=True, ClientToken=token, **words)["Instances"]
        except ProviderFailed as error:
            if pause is not None:
                time.sleep(pause)
                continue
            found = [
                machine
                for machine in account.machines(region, {"Name": f"tag:{LAUNCH_TAG}", "Values": [launch]})
                if machine.get("ClientToken") == token and _state(machine) in _COMING
            ]
            if len(found) < words["MinCount"]:
                raise ProviderFailed(f"{error}; {len(found)} of {words['MinCount']} machines are listed so far").coded(error.code) from error
            return found
    raise AssertionError  # the last round returns or raises


def _group(account: _Account, region: str, vpc_id: str, cidr: str) -> str:
    """Return the security group of all pools in a VPC, made if it is not there, with rules for this client and for machines among themselves.

    A rule is added for each new address, and none is widened or taken away: another client may stand on it.
    """
    wanted = [{"Name": "group-name", "Values": [GROUP_NAME]}, {"Name": "vpc-id", "Values": [vpc_id]}]
    groups = account.pages(region, "ec2", "describe_security_groups", "SecurityGroups", Filters=wanted)
    if not groups:
        try:
            account.ask(
                region,
                "ec2",
                "create_security_group",
                GroupName=GROUP_NAME,
                VpcId=vpc_id,
                Description="Machines of Skyward pools: SSH from their clients, anything among themselves",
                TagSpecifications=[{"ResourceType": "security-group", "Tags": [{"Key": "Name", "Value": GROUP_NAME}]}],
            )
        except BadRequest as error:
            if error.code != "InvalidGroup.Duplicate":  # somebody was quicker
                raise
        account.wait_for(region, "security_group_exists", Filters=wanted)
        groups = account.pages(region, "ec2", "describe_security_groups", "SecurityGroups", Filters=wanted)
    group_id = str(groups[0]["GroupId"])
    rules = list(_rules(groups[0].get("IpPermissions", []), group_id, cidr))
    for rule in rules:
        try:
            account.ask(region, "ec2", "authorize_security_group_ingress", GroupId=group_id, IpPermissions=[rule])
        except BadRequest as error:
            if error.code != "InvalidPermission.Duplicate":
                raise
    return group_id


def _rules(there: Iterable[Mapping[str, Any]], group_id: str, cidr: str) -> Iterator[dict[str, Any]]:
    """Yield the rules that a security group lacks."""
    there = list(there)
    ranges = {
        cidr_there
        for rule in there
        if rule.get("IpProtocol") == "tcp" and (rule.get("FromPort"), rule.get("ToPort")) == (22, 22)
        for cidr_there in (*(one["CidrIp"] for one in rule.get("IpRanges", [])), *(one["CidrIpv6"] for one in rule.get("Ipv6Ranges", [])))
    }
    if cidr not in ranges:
        kind, word = ("IpRanges", "CidrIp") if ip_network(cidr).version == 4 else ("Ipv6Ranges", "CidrIpv6")
        yield {"IpProtocol": "tcp", "FromPort": 22, "ToPort": 22, kind: [{word: cidr, "Description": "a client of Skyward pools"}]}
    if not any(rule.get("IpProtocol") == "-1" and group_id in {pair.get("GroupId") for pair in rule.get("UserIdGroupPairs", [])} for rule in there):
        yield {"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": group_id}]}


def _why_failed(machine: Mapping[str, Any]) -> SkywardError:
    """Return the error that a machine has ended with before it had an address (fact sheet, 1.6)."""
    reason = machine.get("StateReason", {})
    code = str(reason.get("Code", ""))
    word = code.removeprefix("Server.").removeprefix("Client.")
    kind = _meaning(word, HTTPStatus.BAD_REQUEST if code.startswith("Client.") else HTTPStatus.INTERNAL_SERVER_ERROR)
    return kind(f"{machine['InstanceId']} ended while it was made: {code} {reason.get('Message', '')}").coded(word)


# ── machines ─────────────────────────────────────────────────────────────────────────────────────────────────────────

_COMING = (InstanceState.PENDING, InstanceState.RUNNING)


class _HostKeys:
    """How machines are logged in to; the host key of a launch is derived once."""

    def __init__(self, key: Key | None) -> None:
        self._key = key
        self._public: dict[str, str] = {}

    def endpoint(self, host: str | None, launch: str | None) -> Endpoint | None:
        if host is None or launch is None or self._key is None:
            return None
        if launch not in self._public:
            self._public[launch] = host_key(launch, self._key).public
        return Endpoint(
            host=host,
            port=22,
            user="root",
            key=str(self._key.path),
            host_key=self._public[launch],
            known_hosts="/dev/null",
            config="/dev/null",
        )


def _state(machine: Mapping[str, Any]) -> InstanceState:
    return STATES.get(machine["State"]["Name"], InstanceState.PENDING)


def _terminated(account: _Account, region: str, ids: Sequence[str]) -> tuple[set[str], dict[str, SkywardError]]:
    """Ask for the end of machines; return those that were ended, and what is in the way of others. What the region does not know is in neither.

    One id that it does not know, or refuses to end, fails the whole call (fact sheet, 1.5): then each is asked for alone.
    """
    try:
        account.ask(region, "ec2", "terminate_instances", InstanceIds=list(ids))
        return set(ids), {}
    except BadRequest as error:
        if len(ids) > 1:
            parts = _each(ids, lambda machine_id: _terminated(account, region, [machine_id]))
            return {machine_id for done, _ in parts for machine_id in done}, dict(item for _, failed in parts for item in failed.items())
        return set(), {} if error.code.startswith("InvalidInstanceID.") else {ids[0]: error}
    except SkywardError as error:
        return set(), dict.fromkeys(ids, error)


def _number(text: object) -> float | None:
    try:
        return float(str(text))
    except ValueError:
        return None
