"""AWS EC2 as a provider: RunInstances for machines on demand, one zone after another, and a fleet over all zones for
spot; everything is found again by tag.

Its parts are the other modules of this package, which nothing else imports.

The SDK is botocore, on which boto3 stands; it is imported when a verb is called. Where a fact comes from is said beside
it; "EC2 guide" is the Amazon EC2 User Guide, "fact sheet" the one of 2026-11-20.
"""

from __future__ import annotations

import gzip
import logging
import math
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from ipaddress import ip_network
from typing import Any, ClassVar, Self

from pydantic import Field, PrivateAttr, SecretStr, field_validator, model_validator

from skyward_core.concurrency.backoff import Backoff
from skyward_core.errors import BadRequest, CredentialsError, InstancesLeft, ProviderFailed, SkywardError
from skyward_core.machines.instances import Endpoint, Instance, InstanceState
from skyward_core.machines.offers import Extra, Offer, Requirements, matches
from skyward_core.providers import userdata
from skyward_core.providers.aws import images as aws_images
from skyward_core.providers.aws.account import (
    COMING,
    Account,
    each,
    each_enabled,
    each_region,
    not_enabled,
    number,
    state_of,
    terminated,
    why_no_region,
)
from skyward_core.providers.aws.cluster import has_efa
from skyward_core.providers.aws.fleet import ranked, settled
from skyward_core.providers.aws.launch import (
    DEBIAN_ARCHITECTURES,
    ON_DEMAND_PRICE_TAG,
    PRICE_TAG,
    prune_launches,
    why_failed,
)
from skyward_core.providers.aws.launcher import Launcher, LaunchSettings
from skyward_core.providers.aws.offers import (
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
from skyward_core.providers.aws.session_manager import command, plugin
from skyward_core.providers.base import LAUNCH_TAG, OWNER_TAG, POOL_TAG, RANK_TAG, Provider, Sale, Tags
from skyward_core.providers.ssh_keys import Key, host_key, our_key
from skyward_core.providers.tagging import of_machine

ADDRESS_SECONDS = 300.0
"""How long a machine may take from the creating call to an address; seconds are usual."""
FIRST_LOOK_SECONDS, LONGEST_LOOK_SECONDS = 0.5, 5.0
USER_DATA_BYTES = 16 * 1024
DISK_GB = 100
LEAST_MEMORY_GB = 2.0
"""What a machine has at least if nobody has said how much it needs: the system, a node of ours and a call want some."""
IMAGE_KEEP_DAYS = 14
MACHINE_ID = "cat /var/lib/cloud/data/instance-id"

YOUNG_SECONDS = 60.0
"""After a creating call EC2 may say for seconds that it does not know the machine (`InvalidInstanceID.NotFound`): then
it is not gone, but still to come.
"""
CHIP_FAMILIES = ("g", "p", "trn", "inf")
ACCELERATED = tuple(f"{family}*" for family in CHIP_FAMILIES)
"""The families with chips that the catalogue knows; the whole list of types is a dozen pages."""


log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Young:
    """The machines that a creating call has returned in this process, and when, by time.monotonic.

    No part of a provider's value: any two are equal.
    """

    made: dict[str, float] = field(default_factory=dict[str, float], compare=False)

    def note(self, ids: Iterable[str]) -> None:
        now = time.monotonic()
        for old in [machine_id for machine_id, at in self.made.items() if at + YOUNG_SECONDS < now]:
            self.made.pop(old, None)
        self.made.update(dict.fromkeys(ids, now))

    def among(self, ids: Iterable[str]) -> set[str]:
        return {
            machine_id for machine_id in ids if self.made.get(machine_id, -math.inf) + YOUNG_SECONDS > time.monotonic()
        }


class AWS(Provider):
    """Rent machines of EC2. Credentials come from the fields, or from where AWS's own tools take them.

    Args:
        region: one, or several that offers are asked of and machines looked for in.
        use_ssm: log in through Session Manager, and open no port. Needs AWS's session-manager-plugin here and rights
            for the machines: docs/clouds/aws.md.
        profile: of ~/.aws/config and ~/.aws/credentials.
        subnet_ids: where machines may be; by default the default subnets, one a zone, of the region's default VPC.
        ssh_cidr: from where machines may be logged in to, as "203.0.113.7/32"; by default from the address that
            `checkip_url` sees us with.
        checkip_url: tells a caller's public address as plain text.
        use_private_ip: log in at the private addresses, and give machines no public ones. Their subnets need another
            way out, and `ssh_cidr` must be set unless nobody needs an address to log in, with `use_ssm`.
        disk_gb: size of the root disk, in GiB; the image may ask for more.
        spot_spread: zones whose spot prices are at most by this share above the cheapest one's are one offer, at the
            price of the dearest of them.
        instance_profile: name or ARN of the IAM instance profile that the machines get.
        ami: image to use in place of AWS's own; cloud-init must run in it. Chips that AWS has no image for are offered
            only with it.
        image_keep_days: for how long after its last use an image of a prepared machine (`Image(cache=True)`) is kept,
            until a sweep takes it away.
        ssh_key: path of an OpenSSH private key without passphrase; by default one that is made under the state
            directory.
        endpoint_url: of all of AWS's services, for tests and proxies; AWS_ENDPOINT_URL says the same.
        access_key_id: with `secret_access_key`, and `session_token` where there is one, in place of what the
            environment has.
        secret_access_key: see `access_key_id`.
        session_token: see `access_key_id`.
    """

    name: ClassVar[str] = "aws"
    end_command: ClassVar[str] = userdata.END_COMMAND
    notice_url: ClassVar[str] = "http://169.254.169.254"
    listing_lag_seconds: ClassVar[float] = 15.0
    ending_seconds: ClassVar[float] = 30.0
    """Until one that shuts down by itself is `shutting-down`, which is not billed (EC2 user guide, instance life
    cycle).
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

    _young: _Young = PrivateAttr(default_factory=_Young)

    # ── the four verbs ───────────────────────────────────────────────────────────────────────────────────────────────

    def offers(self, want: Requirements) -> list[Offer]:
        """Return what the regions sell. Prices on demand are those of AWS's price list, or of our own table where we
        may not ask for it.

        A region that cannot be asked is left out, which the log tells; raised if it might have had what no other one
        has.
        """
        with self._account() as account:
            answers, failures = each_region(self._regions, lambda region: self._offers_in(account, region, want))
        sold = Sale((offer for offers in answers for offer in offers), failures)
        if failures and not any(matches(offer, want) is None for offer in sold):
            raise why_no_region(failures)
        for region, error in failures.items():
            log.warning("%s is left out: %s", region, error)
        return sold

    def launch(self, offer: Offer, count: int, tags: Tags, startup: str) -> list[Instance]:
        """Rent all `count` machines in one zone, trying one after the other, or all at once for spot; return those that
        have an address.

        Raises NoCapacity if no zone has them all. The creating call may be sent again with its token, which makes no
        second machine.
        """
        if self.use_ssm:
            plugin()
        key = our_key(self.ssh_key)
        with self._account() as account:
            prices = spot_prices(account, offer.region, [offer.instance_type, *offer.or_types]) if offer.is_spot else {}
            made = self._launcher(account).run(offer, count, tags, self._user_data(key, tags, startup), prices)
            self._young.note(made)
            found = self._with_addresses(account, offer.region, tags[LAUNCH_TAG], made)
            if offer.is_spot:
                found = settled(account, offer.region, tags[LAUNCH_TAG], found, prices)
        keys = _HostKeys(key)
        return sorted(
            (self._instance(machine, offer.region, keys) for machine in found), key=lambda instance: instance.rank
        )

    def instances(self, pool_id: str | None = None) -> list[Instance]:
        """Return the machines that carry a pool's tag, in all regions that the account has enabled."""
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
        keys = _HostKeys(self._key())
        listed = [self._instance(machine, region, keys) for machines in found for region, machine in machines]
        return [
            instance
            for instance in listed
            if instance.state is not InstanceState.GONE and pool_id in (None, instance.pool_id)
        ]

    def terminate(self, ids: Sequence[str]) -> None:
        """Ask every region for the end of these machines; their disks go with them. An id tells no region, and one that
        nobody knows is gone.

        Unless it was made in this process less than YOUNG_SECONDS ago.
        """
        wanted = sorted(set(ids))
        if not wanted:
            return
        with self._account() as account:
            answers = each(self._regions, lambda region: terminated(account, region, wanted))
            unknown = self._young.among(wanted) - {
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
            machine_id: ProviderFailed(f"AWS does not know {machine_id} yet, which it has just made")
            for machine_id in unknown
        }
        if left:
            error = next(iter(left.values()))
            if len(left) == len(wanted) and not isinstance(error, BadRequest):
                raise error
            raise InstancesLeft(f"{', '.join(sorted(left))} may still run: {error}", sorted(left)) from error

    def keep_image(self, instance: Instance, image_hash: str) -> str | None:
        """Begin to make an AMI of a machine, for later launches with these packages; see `images.py`."""
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
        """Take away images of ours that are of no use any more, with their snapshots, and what launches have left that
        is no machine.
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
        """Power off terminates it."""
        return True

    def account(self) -> str:
        """Return the number of the AWS account, which is the same in all regions: the first one that answers tells
        it.
        """
        failures: dict[str, SkywardError] = {}
        with self._account() as account:
            for region in self._regions:
                try:
                    return str(account.ask(region, "sts", "get_caller_identity")["Account"])
                except (CredentialsError, ProviderFailed) as error:
                    failures[region] = error
        raise why_no_region(failures)

    def console_url(self, instance: Instance) -> str | None:
        """Return the machine's page in the console of its region."""
        return f"https://{instance.region}.console.aws.amazon.com/ec2/home?region={instance.region}#InstanceDetails:instanceId={instance.id}"

    # ── what is sold ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _offers_in(self, account: Account, region: str, want: Requirements) -> list[Offer]:
        filters: list[dict[str, Any]] = [
            {"Name": "processor-info.supported-architecture", "Values": list(DEBIAN_ARCHITECTURES)}
        ]
        families = (
            (want.instance_type,)
            if want.instance_type is not None
            else ACCELERATED
            if want.accelerator is not None
            else ()
        )
        if families:
            filters.append({"Name": "instance-type", "Values": list(families)})
        kinds = account.pages(region, "ec2", "describe_instance_types", "InstanceTypes", Filters=filters)
        machines = [machine for kind in kinds if (machine := machine_of(kind, region)) is not None]
        log.debug(
            "%s has %d types of machine with chips that the catalogue does not know, or with parts of one",
            region,
            len(kinds) - len(machines),
        )
        if self.ami is None:
            machines = [(offer, classes) for offer, classes in machines if offer.accelerator not in WITHOUT_IMAGE]
        any_price = want.model_copy(update={"max_price_per_hour": None, "memory_gb": _least_memory_gb(want)})
        machines = [(offer, classes) for offer, classes in machines if matches(offer, any_price) is None]
        # a region of several that has no place for machines is left out here, rather than refused for each of its types
        # when they are launched
        zones = (
            {subnet["AvailabilityZone"] for subnet in self._launcher(account).subnets(region)}
            if self.subnet_ids or len(self._regions) > 1
            else None
        )
        prices = prices_of(account, region, [offer.instance_type for offer, _ in machines])
        spot_types = [offer.instance_type for offer, classes in machines if "spot" in classes]
        spot: dict[str, set[float]] = {}
        for (instance_type, zone), price in self._spot_prices(account, region, spot_types).items():
            if zones is None or zone in zones:
                spot.setdefault(instance_type, set()).add(price)
        sold = [
            one.model_copy(
                update={"nodes": want.nodes, "extras_per_hour": self._beside(has_chips=offer.accelerator is not None)}
            )
            for offer, classes in machines
            for one in sold_as(
                offer,
                classes,
                prices.get(offer.instance_type),
                spread(spot.get(offer.instance_type, ()), self.spot_spread),
            )
        ]
        # with EFA all machines of a pool have it, or none: what is between them chooses one network for all
        alike = {
            kind["InstanceType"]: (
                "arm64" in kind["ProcessorInfo"]["SupportedArchitectures"],
                want.nodes > 1 and has_efa(kind),
            )
            for kind in kinds
        }
        return sold if want.instance_type is not None else with_others(sold, spot, alike)

    def _beside(self, *, has_chips: bool) -> tuple[Extra, ...]:
        return billed_beside(self.disk_gb, has_chips=has_chips, is_public=not self.use_private_ip)

    def _spot_prices(self, account: Account, region: str, types: Sequence[str]) -> Prices:
        """Return what spot machines cost; nothing where we may not ask for it: what is sold on demand is offered all
        the same.
        """
        try:
            return spot_prices(account, region, types)
        except CredentialsError as error:
            if error.code.partition(".")[0] != "UnauthorizedOperation":
                raise
            log.warning(
                "%s is offered on demand only: the credentials lack ec2:DescribeSpotPriceHistory. %s", region, error
            )
            return {}

    # ── how it is launched ───────────────────────────────────────────────────────────────────────────────────────────

    def _user_data(self, key: Key, tags: Tags, startup: str) -> bytes:
        boot = userdata.boot_script(startup, tags, MACHINE_ID)
        content = userdata.cloud_config(boot, key, host_key(tags[LAUNCH_TAG], key), may_be_a_copy=True).encode()
        if len(content) > USER_DATA_BYTES:
            content = gzip.compress(content, mtime=0)  # cloud-init unpacks it
        if len(content) > USER_DATA_BYTES:
            raise BadRequest(
                f"the startup script is too long: user data of EC2 is {USER_DATA_BYTES} bytes at most, and this is"
                f" {len(content)}, compressed"
            )
        return content

    def _launcher(self, account: Account) -> Launcher:
        settings = LaunchSettings(
            ami=self.ami,
            checkip_url=self.checkip_url,
            disk_gb=self.disk_gb,
            image_keep_days=self.image_keep_days,
            instance_profile=self.instance_profile,
            is_one_region=len(self._regions) == 1,
            ssh_cidr=self.ssh_cidr,
            subnet_ids=self.subnet_ids,
            use_private_ip=self.use_private_ip,
            use_ssm=self.use_ssm,
        )
        return Launcher(settings, account)

    def _with_addresses(self, account: Account, region: str, launch: str, ids: Sequence[str]) -> list[dict[str, Any]]:
        """Wait until each machine has an address or has failed.

        Raises NoCapacity, QuotaExceeded, BadRequest or ProviderFailed if all have failed.
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
                if machine_id not in failed and self._address(machine)
            }
            if len(ready) + len(failed) == len(ids) or time.monotonic() > deadline:
                break
            time.sleep(next(pauses))
        if left := [machine_id for machine_id in ids if machine_id not in ready]:
            terminated(account, region, left)  # a stopped one costs its disk; what fails here is found by its tags
        if not ready and not failed:
            raise ProviderFailed(f"{', '.join(left)} had no address after {ADDRESS_SECONDS:.0f} s; asked for their end")
        if not ready:
            raise why_failed(next(iter(failed.values())))
        return list(ready.values())

    # ── what is there ────────────────────────────────────────────────────────────────────────────────────────────────

    def _address(self, machine: Mapping[str, Any]) -> str | None:
        """Return what the machine is logged in at: its id, once it runs in its network, where Session Manager finds the
        way.
        """
        if self.use_ssm:
            return (
                machine["InstanceId"]
                if machine.get("PrivateIpAddress") and state_of(machine) is InstanceState.RUNNING
                else None
            )
        return machine.get("PrivateIpAddress" if self.use_private_ip else "PublicIpAddress") or None

    def _instance(self, machine: Mapping[str, Any], region: str, keys: _HostKeys) -> Instance:
        """Read what DescribeInstances says.

        All machines of a creating call have its tags: their ranks are told by their places in it.
        """
        tags = {tag["Key"]: tag["Value"] for tag in machine.get("Tags", [])}
        first = tags.get(RANK_TAG, "")
        rank = (int(first) if first.isdigit() else 0) + int(machine.get("AmiLaunchIndex", 0))
        return Instance(
            id=machine["InstanceId"],
            provider=self.name,
            pool_id=tags.get(POOL_TAG, ""),
            rank=rank,
            state=state_of(machine),
            region=region,
            instance_type=machine["InstanceType"],
            is_spot=machine.get("InstanceLifecycle") == "spot",
            price_per_hour=number(tags.get(PRICE_TAG)) or 0.0,
            on_demand_price_per_hour=number(tags.get(ON_DEMAND_PRICE_TAG)),
            extras_per_hour=self._beside(has_chips=machine["InstanceType"].startswith(CHIP_FAMILIES)),
            ip=machine.get("PublicIpAddress") or None,
            private_ip=machine.get("PrivateIpAddress") or None,
            tags=of_machine(tags, rank),
            directory=userdata.directory_of(machine["InstanceId"]),
            endpoint=keys.endpoint(
                self._address(machine), tags.get(LAUNCH_TAG), self._proxy_command(machine["InstanceId"], region)
            ),
        )

    def _proxy_command(self, machine_id: str, region: str) -> tuple[str, ...] | None:
        return command(machine_id, region, self.profile, self.endpoint_url) if self.use_ssm else None

    def _key(self) -> Key | None:
        """Our SSH key; None where it is not: machines are listed, and ended, without it."""
        try:
            return our_key(self.ssh_key)
        except BadRequest:
            return None

    def _account(self) -> Account:
        keys = None
        if self.access_key_id is not None and self.secret_access_key is not None:
            token = self.session_token.get_secret_value() if self.session_token is not None else None
            keys = (self.access_key_id.get_secret_value(), self.secret_access_key.get_secret_value(), token)
        return Account(self.profile, self.endpoint_url, keys)

    # ── what is set ──────────────────────────────────────────────────────────────────────────────────────────────────

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
                'write "us-east-1", or several different regions: zones, as "us-east-1a", are chosen when machines are'
                " launched"
            )
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
        if self.use_private_ip and self.ssh_cidr is None and not self.use_ssm:
            raise ValueError(
                "use_private_ip=True needs ssh_cidr=, the private network that you come from: no service can tell it;"
                " or use_ssm=True"
            )
        if self.use_ssm and self.ssh_cidr is not None:
            raise ValueError(
                "use_ssm=True opens no port, so ssh_cidr= has nothing to open it for: leave one of them out"
            )
        if self.use_ssm and self.access_key_id is not None:
            raise ValueError(
                "use_ssm=True takes credentials from the environment or a profile: every connection asks AWS anew, in a"
                " process of its own"
            )
        return self


def _least_memory_gb(want: Requirements) -> float | None:
    """Return how much memory is needed: what was asked for, or enough for a node; any will do where a type was
    named.
    """
    return LEAST_MEMORY_GB if want.memory_gb is None and want.instance_type is None else want.memory_gb


class _HostKeys:
    """How machines are logged in to; the host key of a launch is derived once."""

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
