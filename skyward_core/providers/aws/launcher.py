"""Rents machines of EC2: the image, the subnets and the creating calls of one launch."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from typing import Any, cast

from skyward_core.errors import BadRequest, NoCapacity, ProviderFailed, QuotaExceeded, SkywardError
from skyward_core.machines.offers import Offer
from skyward_core.providers import _http
from skyward_core.providers.aws import images as aws_images
from skyward_core.providers.aws import quotas
from skyward_core.providers.aws.account import AwsAccount
from skyward_core.providers.aws.cluster import ClusterNetwork, kinds_of
from skyward_core.providers.aws.fleet import SpotPool, launched
from skyward_core.providers.aws.launch import created, credit_of, group_of, image_parameter, placed, tagged
from skyward_core.providers.aws.offers import Prices
from skyward_core.providers.base import IMAGE_TAG, LAUNCH_TAG, STARTED_FROM_TAG, Tags

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LaunchSettings:
    """The fields of `AWS` that a launch needs, under the same names."""

    ami: str | None
    checkip_url: str
    disk_gb: int
    image_keep_days: float
    instance_profile: str | None
    is_one_region: bool
    ssh_cidr: str | None
    subnet_ids: tuple[str, ...]
    use_private_ip: bool
    use_ssm: bool


@dataclass(frozen=True, slots=True)
class Launcher:
    """Rents machines with the settings of a provider, through one account."""

    settings: LaunchSettings
    account: AwsAccount

    def run(self, offer: Offer, count: int, tags: Tags, user_data: bytes, prices: Prices) -> list[str]:
        """Start machines from a kept image that fits, else from the base image; return their ids.

        The base image is used too if the kept image is deleted meanwhile. A full quota is raised with its name, and the
        page where more is asked for.
        """
        try:
            return self._run(offer, count, tags, user_data, prices)
        except QuotaExceeded as error:
            quotas.advised(error, offer.instance_type, offer.region, is_spot=offer.is_spot)
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
            self.account, offer.region, image, datetime.now(UTC) + timedelta(days=self.settings.image_keep_days)
        )
        return made

    def _kept_image(self, region: str, tags: Tags, base: Mapping[str, Any]) -> dict[str, Any] | None:
        if IMAGE_TAG not in tags:
            return None
        try:
            found = aws_images.kept(
                self.account,
                region,
                aws_images.wanted(tags[IMAGE_TAG], base, self.settings.disk_gb),
                aws_images.AVAILABLE,
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
            is_public=not self.settings.use_private_ip,
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
        cidr = None if self.settings.use_ssm else self._ssh_cidr()
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
        cidr = None if self.settings.use_ssm else self._ssh_cidr()
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
        root, size_gb = str(image["RootDeviceName"]), max(self.settings.disk_gb, aws_images.root_gb(image))
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
        if self.settings.instance_profile is not None:
            parameters["IamInstanceProfile"] = {
                "Arn" if self.settings.instance_profile.startswith("arn:") else "Name": self.settings.instance_profile
            }
        return parameters

    def _image(self, offer: Offer, kinds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        image_id = self.settings.ami
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
            {"Name": "subnet-id", "Values": list(self.settings.subnet_ids)}
            if self.settings.subnet_ids
            else {"Name": "default-for-az", "Values": ["true"]}
        )
        subnets = self.account.pages(region, "ec2", "describe_subnets", "Subnets", Filters=[wanted])
        missing = set(self.settings.subnet_ids) - {subnet["SubnetId"] for subnet in subnets}
        if missing and self.settings.is_one_region:  # each of several regions has its own subnets
            raise BadRequest(f"{region} has no subnet {', '.join(sorted(missing))}")
        if not subnets:
            what = f"subnet {', '.join(sorted(missing))}" if missing else "default subnets"
            message = (
                f"{region} has no {what}: name some with subnet_ids=, or create a default VPC (`aws ec2"
                f" create-default-vpc --region {region}`)"
            )
            raise BadRequest(message) if self.settings.is_one_region else NoCapacity(message).coded("VPCIdNotSpecified")
        return subnets

    def _ssh_cidr(self) -> str:
        if self.settings.ssh_cidr is not None:
            return self.settings.ssh_cidr
        try:
            with _http.Api("the service that returns our public address", "") as api:
                text = str(api.request("GET", self.settings.checkip_url))
            address = ip_address(text.strip())
        except (SkywardError, ValueError) as error:
            raise ProviderFailed(
                f"{self.settings.checkip_url} did not return our public address: {error}; set ssh_cidr="
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
