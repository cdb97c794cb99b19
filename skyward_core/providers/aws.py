"""AWS EC2 as a provider: RunInstances for machines on demand, one zone after another; a fleet over all zones for spot.

All resources are found again by their tags. The modules `aws_*` are parts of this provider; nothing else
imports them.

The SDK is botocore, the base of boto3. It is imported when a method is called. Each fact has its source beside it:
"EC2 guide" is the Amazon EC2 User Guide, "fact sheet" the one of 2026-11-20.
"""

from __future__ import annotations

import gzip
import math
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address, ip_network
from typing import Any, ClassVar, Self, cast

from pydantic import Field, PrivateAttr, SecretStr, field_validator, model_validator

from skyward_core.concurrency.backoff import Backoff
from skyward_core.errors import (
    BadRequest,
    CredentialsError,
    InstancesLeft,
    NoCapacity,
    ProviderFailed,
    QuotaExceeded,
    SkywardError,
)
from skyward_core.machines.instances import Endpoint, Instance, InstanceState
from skyward_core.machines.offers import Extra, Offer, Requirements, matches
from skyward_core.providers import _http, aws_images, userdata
from skyward_core.providers.aws_account import (
    COMING,
    AwsAccount,
    advised_of_quota,
    each,
    each_enabled,
    each_region,
    not_enabled,
    number,
    state_of,
    tags_of,
    terminated,
    why_no_region,
)
from skyward_core.providers.aws_fleet import SpotPool, launched, ranked, settled
from skyward_core.providers.aws_launch import (
    DEBIAN_ARCHITECTURES,
    ON_DEMAND_PRICE_TAG,
    PRICE_TAG,
    ClusterNetwork,
    created,
    credit_of,
    group_of,
    has_efa,
    image_parameter,
    kinds_of,
    placed,
    prune_launches,
    tagged,
    why_failed,
)
from skyward_core.providers.aws_offers import (
    WITHOUT_IMAGE,
    Prices,
    billed_beside,
    machine_of,
    prices_of,
    sold_as,
    spot_prices,
    spread,
    with_others,
)
from skyward_core.providers.aws_session_manager import command, plugin
from skyward_core.providers.base import (
    IMAGE_TAG,
    LAUNCH_TAG,
    OWNER_TAG,
    POOL_TAG,
    RANK_TAG,
    STARTED_FROM_TAG,
    Provider,
    Sale,
    Tags,
    chips,
)
from skyward_core.providers.tagging import of_machine, rank_in
from skyward_core.providers.userdata import Key, host_key, our_key
from skyward_core.shown_text import visible_logger

USER_DATA_BYTES = 16 * 1024
DISK_GB = 100
IMAGE_KEEP_DAYS = 14
MACHINE_ID = "cat /var/lib/cloud/data/instance-id"

log = visible_logger(__name__)


class AWS(Provider):
    """Rent machines of EC2. Credentials come from the fields, or from where AWS's own tools take them.

    Args:
        region: one region, or several. Offers and machines are looked for in all of them.
        use_ssm: log in through Session Manager, and open no port. It needs AWS's session-manager-plugin on this
            machine, and rights for the rented machines: docs/clouds/aws.md.
        profile: a profile of ~/.aws/config and ~/.aws/credentials.
        subnet_ids: the subnets for machines. By default these are the default subnets of the region's default VPC, one
            in each zone.
        ssh_cidr: the network from which machines accept logins, as "203.0.113.7/32". By default it is the address with
            which `checkip_url` sees this client.
        checkip_url: a service that returns the caller's public address as plain text.
        use_private_ip: log in at the private addresses, and give machines no public ones. Their subnets need another
            route to the internet. `ssh_cidr` must be set, except with `use_ssm`.
        disk_gb: size of the root disk, in GiB. It is larger if the image needs more.
        spot_spread: zones whose spot prices are at most this share above the cheapest one are one offer. Its price is
            the highest of theirs.
        instance_profile: name or ARN of the IAM instance profile that the machines get.
        ami: the image to use in place of AWS's own; cloud-init must run in it. Chips without an image of AWS are
            offered only with it.
        image_keep_days: how many days after its last use an image of a prepared machine (`Image(cache=True)`) is kept,
            until a sweep deletes it.
        ssh_key: path of an OpenSSH private key without passphrase. By default one is made under the state directory.
        endpoint_url: endpoint of all of AWS's services, for tests and proxies; same as AWS_ENDPOINT_URL.
        access_key_id: used with `secret_access_key`, and `session_token` if there is one, in place of the credentials
            of the environment.
        secret_access_key: see `access_key_id`.
        session_token: see `access_key_id`.
    """

    name: ClassVar[str] = "aws"
    of_one_computer: ClassVar[frozenset[str]] = frozenset({"ssh_key", "profile"})
    display_name: ClassVar[str] = "AWS"
    rents: ClassVar[frozenset[str]] = chips(
        "T4, T4g, L4, L40S, A10G, A100, H100, H200, B200, B300, V100, RTX PRO 4500, RTX PRO 6000, Radeon Pro V520, "
        "Trainium1, Trainium2, Inferentia1, Inferentia2"
    )
    harmless_fields: ClassVar[frozenset[str]] = frozenset({"region", "disk_gb", "spot_spread", "image_keep_days"})
    own_fields: ClassVar[frozenset[str]] = frozenset(
        {
            "use_ssm",
            "subnet_ids",
            "ssh_cidr",
            "checkip_url",
            "use_private_ip",
            "instance_profile",
            "ami",
        }
    )
    end_command: ClassVar[str] = userdata.END_COMMAND
    notice_url: ClassVar[str] = "http://169.254.169.254"
    listing_lag_seconds: ClassVar[float] = 15.0
    ending_seconds: ClassVar[float] = 30.0
    """Seconds until a machine that shuts down by itself is `shutting-down`, a state that is not billed (EC2 guide,
    "Instance lifecycle").
    """
    billing_minimum_seconds: ClassVar[int] = 60
    tells_what_is_paid: ClassVar[bool] = True
    sells_by_wish: ClassVar[bool] = True
    keeps_images: ClassVar[bool] = True

    region: str | tuple[str, ...] = "us-east-1"
    use_ssm: bool = False
    profile: str | None = None
    subnet_ids: tuple[str, ...] = ()
    ssh_cidr: str | None = None
    checkip_url: str = "https://checkip.amazonaws.com"
    use_private_ip: bool = False
    disk_gb: int = Field(default=DISK_GB, ge=8, le=16_384)
    spot_spread: float = Field(default=0.1, ge=0)
    instance_profile: str | None = None
    ami: str | None = None
    image_keep_days: float = Field(default=IMAGE_KEEP_DAYS, ge=1)
    ssh_key: str | None = None
    endpoint_url: str | None = None
    access_key_id: SecretStr | None = Field(default=None, exclude=True, repr=False)
    secret_access_key: SecretStr | None = Field(default=None, exclude=True, repr=False)
    session_token: SecretStr | None = Field(default=None, exclude=True, repr=False)

    _recent: RecentMachines = PrivateAttr(default_factory=lambda: RecentMachines())

    # ── offers, launch, instances, terminate ─────────────────────────────────────────────────────────────────────────

    def offers(self, want: Requirements) -> list[Offer]:
        """Return the offers of all regions.

        On-demand prices are those of AWS's price list, or of our own table without the right to read the list. A region
        that does not answer is left out, with a warning. Raises its error if no other region has a matching offer.
        """
        with self._account() as account:
            finder = RegionOffers(self._launcher(account))
            answers, failures = each_region(self._regions, lambda region: finder.find(region, want))
        sold = Sale((offer for offers in answers for offer in offers), failures)
        if failures and not any(matches(offer, want) is None for offer in sold):
            raise why_no_region(failures)
        for region, error in failures.items():
            log.warning("%s is left out: %s", region, error)
        return sold

    def launch(self, offer: Offer, count: int, tags: Tags, startup: str) -> list[Instance]:
        """Rent all `count` machines in one zone; return those that have an address.

        On demand it tries one zone after the other; for spot a fleet tries all at once. Raises NoCapacity if no zone
        has them all. The creating call is idempotent: it may be sent again with its token.
        """
        if self.use_ssm:
            plugin()
        key = our_key(self.ssh_key)
        reader = InstanceReader(self)
        with self._account() as account:
            prices = spot_prices(account, offer.region, [offer.instance_type, *offer.or_types]) if offer.is_spot else {}
            made = self._launcher(account).run(offer, count, tags, self._user_data(key, tags, startup), prices)
            self._recent.note(made)
            found = reader.wait_for_addresses(account, offer.region, tags[LAUNCH_TAG], made)
            if offer.is_spot:
                found = settled(account, offer.region, tags[LAUNCH_TAG], found, prices)
        keys = HostKeys(key)
        return sorted(
            (reader.read(machine, offer.region, keys) for machine in found), key=lambda instance: instance.rank
        )

    def instances(self, pool_id: str | None = None) -> list[Instance]:
        """Return the machines that have a pool's tag, in all regions that the account has enabled."""
        wanted = (
            {"Name": "tag-key", "Values": [POOL_TAG]}
            if pool_id is None
            else {"Name": f"tag:{POOL_TAG}", "Values": [pool_id]}
        )
        with self._account() as account:
            found = each_enabled(
                account,
                self._regions,
                lambda region: [(region, machine) for machine in ranked(account.machines(region, wanted))],
            )
        keys, reader = HostKeys(self._key()), InstanceReader(self)
        listed = [reader.read(machine, region, keys) for machines in found for region, machine in machines]
        return [
            instance
            for instance in listed
            if instance.state is not InstanceState.GONE and pool_id in (None, instance.pool_id)
        ]

    def terminate(self, ids: Sequence[str]) -> None:
        """Terminate these machines in every region, because an id does not contain its region; disks are deleted too.

        A machine that no region knows is gone, except one that this process created less than RECENT_SECONDS ago.
        """
        wanted = sorted(set(ids))
        if not wanted:
            return
        with self._account() as account:
            answers = each(self._regions, lambda region: terminated(account, region, wanted))
            unknown = self._recent.among(wanted) - {
                machine_id for done, failed in answers for machine_id in (*done, *failed)
            }
            refusals = {
                region: next(iter(failed.values()))
                for region, (_, failed) in zip(self._regions, answers, strict=True)
                if failed
            }
            closed = not_enabled(account, self._regions, refusals)
        answers = [answer for region, answer in zip(self._regions, answers, strict=True) if region not in closed]
        ended = {machine_id for done, _ in answers for machine_id in done}
        left = {
            machine_id: error
            for _, failed in answers
            for machine_id, error in failed.items()
            if machine_id not in ended
        }
        left |= {
            machine_id: ProviderFailed(f"AWS does not know {machine_id} yet, which it has just created")
            for machine_id in unknown
        }
        if left:
            error = next(iter(left.values()))
            if len(left) == len(wanted) and not isinstance(error, BadRequest):
                raise error
            raise InstancesLeft(f"{', '.join(sorted(left))} may still run: {error}", sorted(left)) from error

    def keep_image(self, instance: Instance, image_hash: str) -> str | None:
        """Begin to create an AMI of a machine, for later launches with these packages; see `aws_images.py`."""
        now = datetime.now(UTC)
        with self._account() as account:
            return aws_images.keep(
                account,
                instance.region,
                instance.id,
                image_hash,
                disk_gb=self.disk_gb,
                now=now,
                until=now + timedelta(days=self.image_keep_days),
                owner=instance.tags.get(OWNER_TAG, ""),
            )

    def prune(self, now: datetime, *, is_dry_run: bool) -> list[str]:
        """Delete images of ours that are no longer needed, with their snapshots, and resources of launches that are not
        machines.
        """
        with self._account() as account:

            def images(region: str) -> list[str]:
                return aws_images.prune(account, region, now, self.image_keep_days, is_dry_run=is_dry_run)

            def launches(region: str) -> list[str]:
                return prune_launches(account, region, now, is_dry_run=is_dry_run)

            found = each_enabled(
                account, self._regions, lambda region: each((images, launches), lambda step: step(region))
            )
        return [line for steps in found for lines in steps for line in lines]

    def ends_for_good(self) -> bool:
        """Return True: a machine that powers off is terminated."""
        return True

    def missing_credentials(self) -> str:
        """Return what is missing, the SDK itself included; "" if it finds credentials."""
        try:
            with self._account() as account:
                return account.missing_credentials()
        except BadRequest as error:
            return str(error)

    def account(self) -> str:
        """Return the number of the AWS account, from the first region that answers. It is the same in all regions."""
        failures: dict[str, SkywardError] = {}
        with self._account() as account:
            for region in self._regions:
                try:
                    return str(account.ask(region, "sts", "get_caller_identity")["Account"])
                except (CredentialsError, ProviderFailed) as error:
                    failures[region] = error
        raise why_no_region(failures)

    def console_url(self, instance: Instance) -> str | None:
        """Return the URL of the machine's page in the console of its region."""
        return f"https://{instance.region}.console.aws.amazon.com/ec2/home?region={instance.region}#InstanceDetails:instanceId={instance.id}"

    # ── parts of the provider ────────────────────────────────────────────────────────────────────────────────────────

    def _user_data(self, key: Key, tags: Tags, startup: str) -> bytes:
        boot = userdata.boot_script(startup, tags, MACHINE_ID)
        content = userdata.cloud_config(boot, key, host_key(tags[LAUNCH_TAG], key), may_be_a_copy=True).encode()
        if len(content) > USER_DATA_BYTES:
            content = gzip.compress(content, mtime=0)  # cloud-init unpacks it
        if len(content) > USER_DATA_BYTES:
            raise BadRequest(
                f"the startup script is too long: user data of EC2 has at most {USER_DATA_BYTES} bytes, and this has"
                f" {len(content)}, compressed"
            )
        return content

    def _launcher(self, account: AwsAccount) -> Launcher:
        return Launcher(self, self._regions, account)

    def _key(self) -> Key | None:
        """Return our SSH key; None if there is none. Machines can be listed and terminated without it."""
        try:
            return our_key(self.ssh_key)
        except BadRequest:
            return None

    def _account(self) -> AwsAccount:
        keys = None
        if self.access_key_id is not None and self.secret_access_key is not None:
            token = self.session_token.get_secret_value() if self.session_token is not None else None
            keys = (self.access_key_id.get_secret_value(), self.secret_access_key.get_secret_value(), token)
        return AwsAccount(self.profile, self.endpoint_url, keys)

    # ── validation of the fields ─────────────────────────────────────────────────────────────────────────────────────

    @property
    def _regions(self) -> tuple[str, ...]:
        return (self.region,) if isinstance(self.region, str) else self.region

    @field_validator("region")
    @classmethod
    def _is_a_region(cls, region: str | tuple[str, ...]) -> str | tuple[str, ...]:
        regions = (region,) if isinstance(region, str) else region
        if (
            not regions
            or len(set(regions)) < len(regions)
            or not all(re.fullmatch(r"[a-z]{2}(-[a-z]+)+-[0-9]", name) for name in regions)
        ):
            raise ValueError(
                'write "us-east-1", or several different regions; a zone, such as "us-east-1a", is chosen when machines'
                " are launched"
            )
        return region

    @field_validator("ssh_cidr")
    @classmethod
    def _is_a_network(cls, ssh_cidr: str | None) -> str | None:
        return ssh_cidr and str(ip_network(ssh_cidr))

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if (self.access_key_id is None) != (self.secret_access_key is None):
            raise ValueError("access_key_id= and secret_access_key= must be given together")
        if self.ami is not None and len(self._regions) > 1:
            raise ValueError("ami= needs one region: an image has a different id in each region")
        if self.use_private_ip and self.ssh_cidr is None and not self.use_ssm:
            raise ValueError(
                "use_private_ip=True needs ssh_cidr=, the private network of this client, which no service can"
                " find out; or use_ssm=True"
            )
        if self.use_ssm and self.ssh_cidr is not None:
            raise ValueError("use_ssm=True opens no port, so ssh_cidr= has no effect: remove one of them")
        if self.use_ssm and self.access_key_id is not None:
            raise ValueError(
                "use_ssm=True takes credentials from the environment or a profile: every connection is a process of its"
                " own that calls AWS"
            )
        return self


# ── offers of one region ─────────────────────────────────────────────────────────────────────────────────────────────

LEAST_MEMORY_GB = 2.0
"""The memory that a machine has at least if the caller does not say how much it needs.

The system, a node and a call need some.
"""
CHIP_FAMILIES = ("g", "p", "trn", "inf")
ACCELERATED = tuple(f"{family}*" for family in CHIP_FAMILIES)
"""The families with chips of the catalogue. A list of all types has a dozen pages."""


type Machine = tuple[Offer, frozenset[str]]
"""A type as an offer without a price, and the usage classes in which it is sold."""


@dataclass(frozen=True, slots=True)
class RegionOffers:
    """Finds the offers of regions, with the account and the provider of a launcher."""

    launcher: Launcher

    def find(self, region: str, want: Requirements) -> list[Offer]:
        """Return the offers of a region that match; the price is checked by the caller."""
        account = self.launcher.account
        kinds = account.pages(region, "ec2", "describe_instance_types", "InstanceTypes", Filters=_type_filters(want))
        machines = self._matching(kinds, region, want)
        zones = self._zones(region)
        prices = prices_of(account, region, [offer.instance_type for offer, _ in machines])
        spot_types = [offer.instance_type for offer, classes in machines if "spot" in classes]
        spot: dict[str, set[float]] = {}
        for (instance_type, zone), price in self._spot_prices(region, spot_types).items():
            if zones is None or zone in zones:
                spot.setdefault(instance_type, set()).add(price)
        sold = [
            one.model_copy(
                update={"nodes": want.nodes, "extras_per_hour": self._extras(has_chips=offer.accelerator is not None)}
            )
            for offer, classes in machines
            for one in sold_as(
                offer,
                classes,
                prices.get(offer.instance_type),
                spread(spot.get(offer.instance_type, ()), self.launcher.aws.spot_spread),
            )
        ]
        return sold if want.instance_type is not None else with_others(sold, spot, _compatibility(kinds, want.nodes))

    def _matching(self, kinds: Sequence[Mapping[str, Any]], region: str, want: Requirements) -> list[Machine]:
        machines = [machine for kind in kinds if (machine := machine_of(kind, region)) is not None]
        log.debug(
            "%s has %d types of machine with chips that the catalogue does not know, or with parts of one",
            region,
            len(kinds) - len(machines),
        )
        if self.launcher.aws.ami is None:
            machines = [(offer, classes) for offer, classes in machines if offer.accelerator not in WITHOUT_IMAGE]
        any_price = want.model_copy(update={"max_price_per_hour": None, "memory_gb": _least_memory_gb(want)})
        return [(offer, classes) for offer, classes in machines if matches(offer, any_price) is None]

    def _zones(self, region: str) -> set[str] | None:
        """Return the zones that have a subnet for machines; None if all zones have one.

        One of several regions that has no subnet fails here. Otherwise the launch of each of its types would fail.
        """
        if not self.launcher.aws.subnet_ids and len(self.launcher.regions) == 1:
            return None
        return {subnet["AvailabilityZone"] for subnet in self.launcher.subnets(region)}

    def _extras(self, *, has_chips: bool) -> tuple[Extra, ...]:
        aws = self.launcher.aws
        return billed_beside(aws.disk_gb, has_chips=has_chips, is_public=not aws.use_private_ip)

    def _spot_prices(self, region: str, types: Sequence[str]) -> Prices:
        """Return the prices of spot machines; none without the right to ask for them.

        On-demand machines are still offered.
        """
        try:
            return spot_prices(self.launcher.account, region, types)
        except CredentialsError as error:
            if error.code.partition(".")[0] != "UnauthorizedOperation":
                raise
            log.warning(
                "%s is offered on demand only: the credentials lack ec2:DescribeSpotPriceHistory. %s", region, error
            )
            return {}


def _type_filters(want: Requirements) -> list[dict[str, Any]]:
    filters: list[dict[str, Any]] = [
        {"Name": "processor-info.supported-architecture", "Values": list(DEBIAN_ARCHITECTURES)}
    ]
    if want.instance_type is not None:
        filters.append({"Name": "instance-type", "Values": [want.instance_type]})
    elif want.accelerator is not None:
        filters.append({"Name": "instance-type", "Values": list(ACCELERATED)})
    return filters


def _least_memory_gb(want: Requirements) -> float | None:
    """Return the memory that is needed: the wanted one, or enough for a node.

    A type that the user names may have any memory.
    """
    return LEAST_MEMORY_GB if want.memory_gb is None and want.instance_type is None else want.memory_gb


def _compatibility(kinds: Sequence[Mapping[str, Any]], nodes: int) -> dict[str, tuple[bool, bool]]:
    """Return for each type what machines of one pool must have in common: the architecture, and EFA.

    All machines of a pool have EFA, or none has it: the pool chooses one network for all.
    """
    return {
        kind["InstanceType"]: ("arm64" in kind["ProcessorInfo"]["SupportedArchitectures"], nodes > 1 and has_efa(kind))
        for kind in kinds
    }


# ── launching ────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Launcher:
    """Rents machines with the fields of a provider, through one account."""

    aws: AWS
    regions: Sequence[str]
    account: AwsAccount

    def run(self, offer: Offer, count: int, tags: Tags, user_data: bytes, prices: Prices) -> list[str]:
        """Start machines from a kept image that fits, else from the base image; return their ids.

        The base image is used too if the kept image is deleted meanwhile. A full quota is raised with its name, and the
        page where more is asked for.
        """
        try:
            return self._run(offer, count, tags, user_data, prices)
        except QuotaExceeded as error:
            advised_of_quota(error, offer.instance_type, offer.region, is_spot=offer.is_spot)
            raise
        except NoCapacity as error:
            error.advised("Try again later, another region= or another type (`skyward offers`)")
            raise

    def _run(self, offer: Offer, count: int, tags: Tags, user_data: bytes, prices: Prices) -> list[str]:
        kinds = kinds_of(self.account, offer.region, (offer.instance_type, *offer.or_types))
        base = self._image(offer, kinds)
        if (image := self._kept_image(offer.region, tags, base)) is None:
            return self._run_from(offer, count, tags, user_data, base, prices, kinds)
        try:
            made = self._run_from(
                offer, count, {**tags, STARTED_FROM_TAG: image["ImageId"]}, user_data, image, prices, kinds
            )
        except BadRequest as error:
            if error.code not in aws_images.GONE:
                raise
            log.info("%s is gone, %s is used instead: %s", image["ImageId"], base["ImageId"], error)
            return self._run_from(offer, count, tags, user_data, base, prices, kinds)
        aws_images.lengthen(
            self.account, offer.region, image, datetime.now(UTC) + timedelta(days=self.aws.image_keep_days)
        )
        return made

    def _kept_image(self, region: str, tags: Tags, base: Mapping[str, Any]) -> dict[str, Any] | None:
        if IMAGE_TAG not in tags:
            return None
        try:
            found = aws_images.kept(
                self.account, region, aws_images.wanted(tags[IMAGE_TAG], base, self.aws.disk_gb), aws_images.AVAILABLE
            )
        except SkywardError as error:
            log.warning("images in %s cannot be listed, so the packages are installed: %s", region, error)
            return None
        return found[0] if found else None

    def _run_from(
        self,
        offer: Offer,
        count: int,
        tags: Tags,
        user_data: bytes,
        image: Mapping[str, Any],
        prices: Prices,
        kinds: Sequence[Mapping[str, Any]],
    ) -> list[str]:
        """Prepare what a launch needs, and rent the machines; return their ids."""
        region = offer.region
        types = (offer.instance_type, *offer.or_types)
        parameters = self._parameters(offer, user_data, image)
        credit = {str(kind["InstanceType"]): credit_of(kind) for kind in kinds}
        cluster = ClusterNetwork(
            self.account,
            region,
            tags,
            kinds if max(count, offer.nodes) > 1 else [],
            is_public=not self.aws.use_private_ip,
        )
        zones = cluster.zones()
        subnets = [subnet for subnet in self.subnets(region) if not zones or subnet["AvailabilityZone"] in zones]
        if not subnets:
            raise NoCapacity(f"the pool's machines are in {', '.join(sorted(zones))}, where it has no subnet").coded(
                "Unsupported"
            )
        zone = None
        try:
            if offer.is_spot:
                ids, zone = self._run_fleet(
                    offer, count, tags, parameters, credit, _pools(types, subnets, prices, offer), cluster
                )
            else:
                ids, zone = self._run_in_turn(
                    offer, count, tags, {**parameters, **credit.get(offer.instance_type, {})}, subnets, cluster
                )
        except NoCapacity:
            cluster.tidy(None)
            raise
        if zone:
            cluster.tidy(zone)
        return ids

    def _run_fleet(
        self,
        offer: Offer,
        count: int,
        tags: Tags,
        parameters: Mapping[str, Any],
        credit: Mapping[str, Mapping[str, Any]],
        places: Sequence[tuple[str, Mapping[str, Any]]],
        cluster: ClusterNetwork,
    ) -> tuple[list[str], str]:
        """Rent spot machines in one of these places; return their ids, and the zone if it is known.

        A place is a type and a subnet. `credit` has additional parameters of each type.
        """
        region = offer.region
        if not places:
            raise NoCapacity(
                f"no zone of {region} still sells {offer.instance_type} as spot for ${offer.price_per_hour:g}"
            ).coded("SpotPriceTooHigh")
        common = {name: value for name, value in parameters.items() if name != "InstanceType"}
        cidr = None if self.aws.use_ssm else self._ssh_cidr()
        groups = {
            vpc: group_of(self.account, region, vpc, cidr) for vpc in sorted({subnet["VpcId"] for _, subnet in places})
        }
        pools = [
            SpotPool(
                instance_type,
                subnet["AvailabilityZone"],
                subnet["SubnetId"],
                {
                    **common,
                    **credit.get(instance_type, {}),
                    "NetworkInterfaces": cluster.interfaces(instance_type, groups[subnet["VpcId"]]),
                    **cluster.placement(instance_type, subnet["AvailabilityZone"]),
                },
            )
            for instance_type, subnet in places
        ]
        return launched(
            self.account, region, pools, count, tags, tagged(offer, tags, offer.price_per_hour)["TagSpecifications"]
        )

    def _run_in_turn(
        self,
        offer: Offer,
        count: int,
        tags: Tags,
        parameters: Mapping[str, Any],
        subnets: Sequence[Mapping[str, Any]],
        cluster: ClusterNetwork,
    ) -> tuple[list[str], str]:
        """Rent machines on demand in the first zone that has them all; return their ids, and the zone."""
        region = offer.region
        groups: dict[str, str] = {}
        cidr = None if self.aws.use_ssm else self._ssh_cidr()
        refusals: dict[str, NoCapacity] = {}
        for subnet in sorted(subnets, key=lambda subnet: str(subnet["AvailabilityZone"])):
            zone, vpc = subnet["AvailabilityZone"], subnet["VpcId"]
            if vpc not in groups:
                groups[vpc] = group_of(self.account, region, vpc, cidr)
            place = placed(
                subnet["SubnetId"], cluster.interfaces(offer.instance_type, groups[vpc]), count
            ) | cluster.placement(offer.instance_type, zone)
            try:
                made = created(
                    self.account,
                    region,
                    {**parameters, **place, **tagged(offer, tags, offer.price_per_hour)},
                    tags[LAUNCH_TAG],
                )
                return [machine["InstanceId"] for machine in made], zone
            except QuotaExceeded:
                raise  # the quota holds for the whole region
            except NoCapacity as error:
                refusals[f"{zone} ({subnet['SubnetId']})"] = error
        worst = next((error for error in refusals.values() if error.code != "Unsupported"), None) or next(
            iter(refusals.values())
        )
        codes = ", ".join(f"{place}: {error.code}" for place, error in refusals.items())
        raise NoCapacity(f"no zone of {region} has {count} x {offer.instance_type}: {codes}. {worst}").coded(
            worst.code
        ) from worst

    def _parameters(self, offer: Offer, user_data: bytes, image: Mapping[str, Any]) -> dict[str, Any]:
        """Return the parameters of a creating call that are the same in every zone."""
        root, size_gb = str(image["RootDeviceName"]), max(self.aws.disk_gb, aws_images.root_gb(image))
        parameters: dict[str, Any] = {
            "ImageId": image["ImageId"],
            "InstanceType": offer.instance_type,
            "UserData": user_data,
            "InstanceInitiatedShutdownBehavior": "terminate",
            "MetadataOptions": {"HttpTokens": "required", "HttpEndpoint": "enabled"},
            "BlockDeviceMappings": [
                {"DeviceName": root, "Ebs": {"VolumeSize": size_gb, "VolumeType": "gp3", "DeleteOnTermination": True}}
            ],
        }
        if self.aws.instance_profile is not None:
            parameters["IamInstanceProfile"] = {
                "Arn" if self.aws.instance_profile.startswith("arn:") else "Name": self.aws.instance_profile
            }
        return parameters

    def _image(self, offer: Offer, kinds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        image_id = self.aws.ami
        if image_id is None:
            kind = next((kind for kind in kinds if kind["InstanceType"] == offer.instance_type), None)
            if kind is None:
                raise BadRequest(f"there is no {offer.instance_type} in {offer.region}")
            parameter = image_parameter(offer.accelerator, kind["ProcessorInfo"]["SupportedArchitectures"])
            image_id = str(self.account.ask(offer.region, "ssm", "get_parameter", Name=parameter)["Parameter"]["Value"])
        images = self.account.ask(offer.region, "ec2", "describe_images", ImageIds=[image_id])["Images"]
        if not images:
            raise BadRequest(f"there is no image {image_id} in {offer.region}")
        return cast("dict[str, Any]", images[0])

    def subnets(self, region: str) -> list[dict[str, Any]]:
        wanted = (
            {"Name": "subnet-id", "Values": list(self.aws.subnet_ids)}
            if self.aws.subnet_ids
            else {"Name": "default-for-az", "Values": ["true"]}
        )
        subnets = self.account.pages(region, "ec2", "describe_subnets", "Subnets", Filters=[wanted])
        missing = set(self.aws.subnet_ids) - {subnet["SubnetId"] for subnet in subnets}
        if missing and len(self.regions) == 1:  # each of several regions has its own subnets
            raise BadRequest(f"{region} has no subnet {', '.join(sorted(missing))}")
        if not subnets:
            what = f"subnet {', '.join(sorted(missing))}" if missing else "default subnets"
            message = (
                f"{region} has no {what}: name some with subnet_ids=, or create a default VPC (`aws ec2"
                f" create-default-vpc --region {region}`)"
            )
            raise BadRequest(message) if len(self.regions) == 1 else NoCapacity(message).coded("VPCIdNotSpecified")
        return subnets

    def _ssh_cidr(self) -> str:
        if self.aws.ssh_cidr is not None:
            return self.aws.ssh_cidr
        try:
            with _http.Api("the service that returns our public address", "") as api:
                text = str(api.request("GET", self.aws.checkip_url))
            address = ip_address(text.strip())
        except (SkywardError, ValueError) as error:
            raise ProviderFailed(
                f"{self.aws.checkip_url} did not return our public address: {error}; set ssh_cidr="
            ) from error
        return f"{address}/{address.max_prefixlen}"


def _pools(
    types: Sequence[str], subnets: Sequence[Mapping[str, Any]], prices: Prices, offer: Offer
) -> list[tuple[str, Mapping[str, Any]]]:
    """Return the types and subnets in which a spot machine costs at most the offered price.

    Costs and spending limits are counted by that price. There is one subnet for each zone, the one with the most free
    addresses: a fleet may name a type in a zone only once (Karpenter and ParallelCluster do the same).
    """
    largest: dict[str, Mapping[str, Any]] = {}
    for subnet in sorted(
        subnets, key=lambda subnet: (-int(subnet.get("AvailableIpAddressCount", 0)), str(subnet["SubnetId"]))
    ):
        largest.setdefault(str(subnet["AvailabilityZone"]), subnet)
    return [
        (name, subnet)
        for name in types
        for zone, subnet in sorted(largest.items())
        if prices.get((name, zone), float("inf")) <= offer.price_per_hour
    ]


# ── machines as instances ────────────────────────────────────────────────────────────────────────────────────────────

ADDRESS_SECONDS = 300.0
"""How long a machine may take from the creating call to an address. A few seconds are usual."""
FIRST_LOOK_SECONDS, LONGEST_LOOK_SECONDS = 0.5, 5.0
RECENT_SECONDS = 60.0
"""For some seconds after a creating call, EC2 may answer that it does not know the machine
(`InvalidInstanceID.NotFound`). Then the machine is not gone; it appears later.
"""


@dataclass(frozen=True, slots=True)
class RecentMachines:
    """The machines that creating calls of this process have returned, with the times (time.monotonic).

    They are no part of a provider's value: any two are equal.
    """

    created: dict[str, float] = field(default_factory=dict[str, float], compare=False)

    def note(self, ids: Iterable[str]) -> None:
        now = time.monotonic()
        for old in [machine_id for machine_id, at in self.created.items() if at + RECENT_SECONDS < now]:
            self.created.pop(old, None)
        self.created.update(dict.fromkeys(ids, now))

    def among(self, ids: Iterable[str]) -> set[str]:
        """Return those of these ids that are recent."""
        now = time.monotonic()
        return {machine_id for machine_id in ids if self.created.get(machine_id, -math.inf) + RECENT_SECONDS > now}


class HostKeys:
    """Our SSH key, and the host keys of launches. Each host key is derived once."""

    def __init__(self, key: Key | None) -> None:
        self._key = key
        self._public: dict[str, str] = {}

    def endpoint(
        self, host: str | None, launch: str | None, proxy_command: tuple[str, ...] | None = None
    ) -> Endpoint | None:
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
            proxy_command=proxy_command,
        )


@dataclass(frozen=True, slots=True)
class InstanceReader:
    """Reads machines of DescribeInstances, for a provider."""

    aws: AWS

    def address(self, machine: Mapping[str, Any]) -> str | None:
        """Return the address to log in at; None while there is none.

        With Session Manager it is the machine's id, as soon as the machine runs and has a private address.
        """
        if self.aws.use_ssm:
            return (
                machine["InstanceId"]
                if machine.get("PrivateIpAddress") and state_of(machine) is InstanceState.RUNNING
                else None
            )
        return machine.get("PrivateIpAddress" if self.aws.use_private_ip else "PublicIpAddress") or None

    def read(self, machine: Mapping[str, Any], region: str, keys: HostKeys) -> Instance:
        """Return a machine of DescribeInstances as an instance.

        All machines of a creating call have the same tags. A rank is the first rank, which is a tag, plus the
        machine's place in the call.
        """
        tags = tags_of(machine)
        rank = rank_in(tags.get(RANK_TAG, ""), machine["InstanceId"]) + int(machine.get("AmiLaunchIndex", 0))
        has_chips = machine["InstanceType"].startswith(CHIP_FAMILIES)
        return Instance(
            id=machine["InstanceId"],
            provider=self.aws.name,
            pool_id=tags.get(POOL_TAG, ""),
            rank=rank,
            state=state_of(machine),
            region=region,
            instance_type=machine["InstanceType"],
            is_spot=machine.get("InstanceLifecycle") == "spot",
            price_per_hour=number(tags.get(PRICE_TAG)) or 0.0,
            on_demand_price_per_hour=number(tags.get(ON_DEMAND_PRICE_TAG)),
            extras_per_hour=billed_beside(self.aws.disk_gb, has_chips=has_chips, is_public=not self.aws.use_private_ip),
            ip=machine.get("PublicIpAddress") or None,
            private_ip=machine.get("PrivateIpAddress") or None,
            tags=of_machine(tags, rank),
            directory=userdata.directory_of(machine["InstanceId"]),
            endpoint=keys.endpoint(
                self.address(machine), tags.get(LAUNCH_TAG), self._proxy_command(machine["InstanceId"], region)
            ),
        )

    def _proxy_command(self, machine_id: str, region: str) -> tuple[str, ...] | None:
        return command(machine_id, region, self.aws.profile, self.aws.endpoint_url) if self.aws.use_ssm else None

    def wait_for_addresses(
        self, account: AwsAccount, region: str, launch: str, ids: Sequence[str]
    ) -> list[dict[str, Any]]:
        """Wait until each machine has an address or has failed; return those that have one.

        The others are terminated. Raises NoCapacity, QuotaExceeded, BadRequest or ProviderFailed if all have failed.
        """
        deadline = time.monotonic() + ADDRESS_SECONDS
        pauses = Backoff(FIRST_LOOK_SECONDS, LONGEST_LOOK_SECONDS, 1.5).pauses()
        while True:
            listed = account.machines(region, {"Name": f"tag:{LAUNCH_TAG}", "Values": [launch]})
            found = {machine["InstanceId"]: machine for machine in listed if machine["InstanceId"] in ids}
            failed = {machine_id: machine for machine_id, machine in found.items() if state_of(machine) not in COMING}
            ready = {
                machine_id: machine
                for machine_id, machine in found.items()
                if machine_id not in failed and self.address(machine)
            }
            if len(ready) + len(failed) == len(ids) or time.monotonic() > deadline:
                break
            time.sleep(next(pauses))
        if left := [machine_id for machine_id in ids if machine_id not in ready]:
            # The disk of a stopped machine costs money. If this fails, the sweep finds the machine by its tags.
            terminated(account, region, left)
        if not ready and not failed:
            raise ProviderFailed(
                f"{', '.join(left)} had no address after {ADDRESS_SECONDS:.0f} s; termination was requested"
            )
        if not ready:
            raise why_failed(next(iter(failed.values())))
        return list(ready.values())
