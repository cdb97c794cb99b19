"""AWS EC2 as a provider: RunInstances for machines on demand, one zone after another; a fleet over all zones for spot.

All resources are found again by their tags. The other modules of this package are parts of this provider; nothing else
imports them.

The SDK is botocore, the base of boto3. It is imported when a method is called. Each fact has its source beside it:
"EC2 guide" is the Amazon EC2 User Guide, "fact sheet" the one of 2026-11-20.
"""

from __future__ import annotations

import gzip
import logging
import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from ipaddress import ip_network
from typing import ClassVar, Self

from pydantic import Field, PrivateAttr, SecretStr, field_validator, model_validator

from skyward_core.errors import BadRequest, CredentialsError, InstancesLeft, ProviderFailed, SkywardError
from skyward_core.machines.instances import Instance, InstanceState
from skyward_core.machines.offers import Offer, Requirements, matches
from skyward_core.providers import userdata
from skyward_core.providers.aws import images as aws_images
from skyward_core.providers.aws.account import (
    AwsAccount,
    each,
    each_enabled,
    each_region,
    not_enabled,
    terminated,
    why_no_region,
)
from skyward_core.providers.aws.fleet import ranked, settled
from skyward_core.providers.aws.instances import HostKeys, InstanceReader, RecentMachines
from skyward_core.providers.aws.launch import prune_launches
from skyward_core.providers.aws.launcher import Launcher, LaunchSettings
from skyward_core.providers.aws.offers import spot_prices
from skyward_core.providers.aws.region_offers import RegionOffers
from skyward_core.providers.aws.session_manager import plugin
from skyward_core.providers.base import LAUNCH_TAG, OWNER_TAG, POOL_TAG, Provider, Sale, Tags
from skyward_core.providers.ssh_keys import Key, host_key, our_key

USER_DATA_BYTES = 16 * 1024
DISK_GB = 100
IMAGE_KEEP_DAYS = 14
MACHINE_ID = "cat /var/lib/cloud/data/instance-id"

log = logging.getLogger(__name__)


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

    _recent: RecentMachines = PrivateAttr(default_factory=RecentMachines)

    # ── offers, launch, instances, terminate ─────────────────────────────────────────────────────────────────────────

    def offers(self, want: Requirements) -> list[Offer]:
        """Return the offers of all regions.

        On-demand prices are those of AWS's price list, or of our own table without the right to read the list. A region
        that does not answer is left out, with a warning. Raises its error if no other region has a matching offer.
        """
        with self._account() as account:
            finder = RegionOffers(self._launcher(account), self.spot_spread)
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
        reader = self._reader()
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
        keys, reader = HostKeys(self._key()), self._reader()
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
        """Begin to create an AMI of a machine, for later launches with these packages; see `images.py`."""
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

    def _reader(self) -> InstanceReader:
        return InstanceReader(
            provider=self.name,
            disk_gb=self.disk_gb,
            use_private_ip=self.use_private_ip,
            use_ssm=self.use_ssm,
            profile=self.profile,
            endpoint_url=self.endpoint_url,
        )

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
