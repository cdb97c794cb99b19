"""The creating calls of EC2, and the resources that they need."""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from http import HTTPStatus
from ipaddress import ip_network
from typing import Any

from skyward_core.accelerators.catalog import find
from skyward_core.errors import BadRequest, CredentialsError, ProviderFailed, SkywardError
from skyward_core.machines.offers import Offer
from skyward_core.providers.aws_account import (
    COMING,
    AwsAccount,
    collected,
    each,
    meaning,
    number,
    pairs_of,
    state_of,
    tags_of,
)
from skyward_core.providers.aws_offers import WITHOUT_IMAGE
from skyward_core.providers.base import CREATED_TAG, LAUNCH_TAG, POOL_TAG, Tags
from skyward_core.shown_text import visible_logger

AGAIN_SECONDS = (0.5, 1.0, 2.0, 4.0)
"""Pauses before a creating call whose answer was lost, or that was throttled, is sent again with its token."""
OLD_SECONDS = 3600.0
"""Resources of a launch, other than machines, are deleted by other clients when they are this old."""
GROUP_NAME, CLOSED_GROUP_NAME = "skyward-ssh", "skyward-ssm"
PRICE_TAG, ON_DEMAND_PRICE_TAG = "skyward-price-per-hour", "skyward-on-demand-price-per-hour"

NVIDIA_IMAGE = "/aws/service/deeplearning/ami/{architecture}/base-oss-nvidia-driver-gpu-ubuntu-24.04/latest/ami-id"
NEURON_IMAGE = "/aws/service/neuron/dlami/base/ubuntu-24.04/latest/image_id"
UBUNTU_IMAGE = "/aws/service/canonical/ubuntu/server/24.04/stable/current/{debian_architecture}/hvm/ebs-gp3/ami-id"
DEBIAN_ARCHITECTURES: Mapping[str, str] = {"x86_64": "amd64", "arm64": "arm64"}

log = visible_logger(__name__)


def image_parameter(accelerator: str | None, architectures: Sequence[str]) -> str:
    """Return the SSM parameter with the id of AWS's image for these chips (fact sheet, 1.7).

    Raises BadRequest if none fits.
    """
    architecture = "arm64" if "arm64" in architectures else "x86_64"
    if accelerator is None:
        return UBUNTU_IMAGE.format(debian_architecture=DEBIAN_ARCHITECTURES[architecture])
    if (reason := WITHOUT_IMAGE.get(accelerator)) is not None:
        raise BadRequest(f"there is no image for {accelerator}: {reason}. Name one with ami=")
    return NEURON_IMAGE if find(accelerator).vendor == "AWS" else NVIDIA_IMAGE.format(architecture=architecture)


def credit_of(kind: Mapping[str, Any]) -> dict[str, Any]:
    """Return the creating call's parameters for a type's CPU credits: no more credits than the machine earns.

    `kind` is the type's description of DescribeInstanceTypes. Without these parameters T3, T3a and T4g are "unlimited":
    CPU beyond their share is billed by the vCPU-hour (EC2 guide, "Unlimited mode"). Other types refuse them.
    """
    return {"CreditSpecification": {"CpuCredits": "standard"}} if kind.get("BurstablePerformanceSupported") else {}


def placed(subnet_id: str, interfaces: Iterable[Mapping[str, Any]], count: int) -> dict[str, Any]:
    return {
        "MinCount": count,
        "MaxCount": count,
        "NetworkInterfaces": [{**interface, "SubnetId": subnet_id} for interface in interfaces],
    }


def tagged(offer: Offer, tags: Tags, price: float) -> dict[str, Any]:
    """Return the tags of machines, disks and interfaces, with the price at their creation, which EC2 does not keep."""
    prices = {PRICE_TAG: repr(price)}
    if (dear := offer.on_demand_price_per_hour) is not None:
        prices[ON_DEMAND_PRICE_TAG] = repr(dear)
    pairs = pairs_of({"Name": tags[POOL_TAG], **tags, **prices})
    return {
        "TagSpecifications": [
            {"ResourceType": kind, "Tags": pairs} for kind in ("instance", "volume", "network-interface")
        ]
    }


def created(account: AwsAccount, region: str, parameters: Mapping[str, Any], launch: str) -> list[dict[str, Any]]:
    """Send the creating call, again with its token while its outcome is unknown; return the machines.

    If the outcome stays unknown, look for machines that it may have created. The token is made from all parameters that
    differ between the calls of a launch: EC2 refuses a token with other parameters than before.
    """
    names = (
        launch,
        region,
        parameters["NetworkInterfaces"][0]["SubnetId"],
        parameters["InstanceType"],
        str(parameters["MinCount"]),
        parameters["ImageId"],
    )
    token = hashlib.sha256(" ".join(names).encode()).hexdigest()  # a token has at most 64 characters
    for pause in (*AGAIN_SECONDS, None):
        try:
            return account.ask(region, "ec2", "run_instances", once=True, ClientToken=token, **parameters)["Instances"]
        except ProviderFailed as error:
            if pause is not None:
                time.sleep(pause)
                continue
            found = [
                machine
                for machine in account.machines(region, {"Name": f"tag:{LAUNCH_TAG}", "Values": [launch]})
                if machine.get("ClientToken") == token and state_of(machine) in COMING
            ]
            if len(found) < parameters["MinCount"]:
                raise ProviderFailed(
                    f"{error}; {len(found)} of {parameters['MinCount']} machines are listed so far"
                ).coded(error.code) from error
            return found
    raise AssertionError  # the last pass returns or raises


def group_of(account: AwsAccount, region: str, vpc_id: str, cidr: str | None) -> str:
    """Return the security group of all pools in a VPC, created if it does not exist.

    Its rules allow SSH from this client, and all traffic between the machines. A rule is added for each new address; no
    rule is widened or removed, because another client may need it. Without `cidr` it is another group, without logins
    from outside, so that a port opened for one pool is not open for the other.
    """
    name, from_clients = (
        (GROUP_NAME, "SSH from their clients") if cidr is not None else (CLOSED_GROUP_NAME, "nothing from outside")
    )
    wanted = [{"Name": "group-name", "Values": [name]}, {"Name": "vpc-id", "Values": [vpc_id]}]
    groups = account.pages(region, "ec2", "describe_security_groups", "SecurityGroups", Filters=wanted)
    if not groups:
        try:
            account.ask(
                region,
                "ec2",
                "create_security_group",
                GroupName=name,
                VpcId=vpc_id,
                Description=f"Machines of Skyward pools: {from_clients}, anything among themselves",
                TagSpecifications=[{"ResourceType": "security-group", "Tags": pairs_of({"Name": name})}],
            )
        except BadRequest as error:
            if error.code != "InvalidGroup.Duplicate":  # another client has created it meanwhile
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


def _rules(there: Iterable[Mapping[str, Any]], group_id: str, cidr: str | None) -> Iterator[dict[str, Any]]:
    """Yield the rules that a security group lacks."""
    there = list(there)
    ranges = {
        cidr_there
        for rule in there
        if rule.get("IpProtocol") == "tcp" and (rule.get("FromPort"), rule.get("ToPort")) == (22, 22)
        for cidr_there in (
            *(one["CidrIp"] for one in rule.get("IpRanges", [])),
            *(one["CidrIpv6"] for one in rule.get("Ipv6Ranges", [])),
        )
    }
    if cidr is not None and cidr not in ranges:
        kind, word = ("IpRanges", "CidrIp") if ip_network(cidr).version == 4 else ("Ipv6Ranges", "CidrIpv6")
        yield {
            "IpProtocol": "tcp",
            "FromPort": 22,
            "ToPort": 22,
            kind: [{word: cidr, "Description": "a client of Skyward pools"}],
        }
    if not any(
        rule.get("IpProtocol") == "-1"
        and group_id in {pair.get("GroupId") for pair in rule.get("UserIdGroupPairs", [])}
        for rule in there
    ):
        yield {"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": group_id}]}


# ── resources that launches leave ────────────────────────────────────────────────────────────────────────────────────


def created_at(tags: Tags) -> float:
    """Return the time of creation, in seconds since 1970, from a tag; now without the tag, so that it counts as new."""
    return number(tags.get(CREATED_TAG)) or time.time()


def placement_groups(account: AwsAccount, region: str) -> dict[str, dict[str, str]]:
    """Return the placement groups of pools, by name, with their tags."""
    found = account.ask(
        region, "ec2", "describe_placement_groups", Filters=[{"Name": "tag-key", "Values": [POOL_TAG]}]
    )["PlacementGroups"]
    return {group["GroupName"]: {POOL_TAG: "", **tags_of(group)} for group in found}


def placement_group_deleted(account: AwsAccount, region: str, name: str) -> bool:
    """Delete a placement group; return False if it is in use, which ends when its machines are terminated.

    One that does not exist counts as deleted.
    """
    try:
        account.ask(region, "ec2", "delete_placement_group", GroupName=name)
    except BadRequest as error:
        if error.code not in ("InvalidPlacementGroup.InUse", "InvalidPlacementGroup.Unknown"):
            raise
        return error.code == "InvalidPlacementGroup.Unknown"
    return True


def template_deleted(account: AwsAccount, region: str, name: str) -> None:
    """Delete a launch template; one that does not exist counts as deleted."""
    try:
        account.ask(region, "ec2", "delete_launch_template", LaunchTemplateName=name)
    except BadRequest as error:
        if "NotFound" not in error.code:
            raise


def prune_launches(account: AwsAccount, region: str, now: datetime, *, is_dry_run: bool = False) -> list[str]:
    """Delete what launches have left in a region: launch templates of killed clients, and unused placement groups.

    Only resources older than OLD_SECONDS are deleted: no launch takes as long. Returns a text for each resource that is
    deleted, or would be. Raises the first failure once everything else is done. Resources that the credentials may not
    list are skipped, because the same credentials cannot have created them.
    """
    oldest_kept = now.timestamp() - OLD_SECONDS
    gone: list[str] = []
    failures: list[SkywardError] = []
    wanted = [{"Name": "tag-key", "Values": [POOL_TAG]}]
    try:
        templates = account.pages(region, "ec2", "describe_launch_templates", "LaunchTemplates", Filters=wanted)
        groups = placement_groups(account, region)
    except CredentialsError as error:
        if error.code.partition(".")[0] != "UnauthorizedOperation":
            raise
        log.info("launch templates and placement groups in %s cannot be listed: %s", region, error)
        return []
    for template in templates:
        name, tags = template["LaunchTemplateName"], tags_of(template)
        if created_at(tags) < oldest_kept:
            with collected(failures):
                if not is_dry_run:
                    template_deleted(account, region, name)
                gone.append(f"launch template {name} in {region}")
    old = [name for name, tags in groups.items() if created_at(tags) < oldest_kept]
    used = _used(account, region, old) if is_dry_run and old else set[str]()
    for name in old:
        with collected(failures):
            if name not in used and (is_dry_run or placement_group_deleted(account, region, name)):
                gone.append(f"placement group {name} in {region}")
    if failures:
        raise failures[0]
    return gone


def _used(account: AwsAccount, region: str, names: Sequence[str]) -> set[str]:
    """Return which of these placement groups have machines that are not terminated."""
    machines = account.machines(region, {"Name": "placement-group-name", "Values": list(names)})
    return {
        machine["Placement"].get("GroupName", "") for machine in machines if machine["State"]["Name"] != "terminated"
    }


def why_failed(machine: Mapping[str, Any]) -> SkywardError:
    """Return the error for a machine that ended before it had an address (fact sheet, 1.6)."""
    reason = machine.get("StateReason", {})
    code = str(reason.get("Code", ""))
    reason_code = code.removeprefix("Server.").removeprefix("Client.")
    kind = meaning(
        reason_code, HTTPStatus.BAD_REQUEST if code.startswith("Client.") else HTTPStatus.INTERNAL_SERVER_ERROR
    )
    return kind(f"{machine['InstanceId']} ended during its creation: {code} {reason.get('Message', '')}").coded(
        reason_code
    )


# ── network and placement of machines that work together ─────────────────────────────────────────────────────────────

MOST_TIDIED = 8
"""The most old placement groups that one launch deletes, all at once, so that the launch is not delayed."""


def kinds_of(account: AwsAccount, region: str, types: Sequence[str]) -> list[dict[str, Any]]:
    """Return the descriptions of instance types by DescribeInstanceTypes."""
    return account.pages(
        region,
        "ec2",
        "describe_instance_types",
        "InstanceTypes",
        Filters=[{"Name": "instance-type", "Values": list(types)}],
    )


def has_efa(kind: Mapping[str, Any]) -> bool:
    """Return whether a type has EFA, by its description of DescribeInstanceTypes."""
    return bool((kind.get("NetworkInfo") or {}).get("EfaInfo"))


def efa_cards(kind: Mapping[str, Any]) -> list[int]:
    """Return the indices of a type's network cards that can have an EFA.

    The first card of a p6-b300 cannot (fact sheet, 1.3).
    """
    network = kind.get("NetworkInfo") or {}
    most = (network.get("EfaInfo") or {}).get("MaximumEfaInterfaces", 0)
    cards = network.get("NetworkCards") or [{}]
    return [
        card.get("NetworkCardIndex", 0)
        for card in cards
        if {"efa", "efa-only"} & set(card.get("InterfaceTypes") or ("efa",))
    ][:most]


def interfaces(group_id: str, cards: Sequence[int], *, is_public: bool) -> list[dict[str, Any]]:
    """Return the network interfaces of a machine, without the subnet: one, or one for each card with EFA.

    A machine with several interfaces cannot get a public address in the creating call: AWS refuses the parameter (fact
    sheet, 1.3). So a machine with a public address has one interface. The first interface carries IP, and EFA if its
    card can. The others carry EFA only, and need no addresses; each is the first device of its card (EC2 guide,
    "Maximize network bandwidth on instances with multiple network cards", 2026-11).
    """
    first: dict[str, Any] = {"DeviceIndex": 0, "Groups": [group_id], "DeleteOnTermination": True}
    if 0 in cards:
        first |= {"NetworkCardIndex": 0, "InterfaceType": "efa"}
    others = [
        {
            "DeviceIndex": 0,
            "NetworkCardIndex": card,
            "InterfaceType": "efa-only",
            "Groups": [group_id],
            "DeleteOnTermination": True,
        }
        for card in cards
        if card and not is_public
    ]
    return [first, *others] if others else [first | {"AssociatePublicIpAddress": is_public}]


class ClusterNetwork:
    """EFA and placement groups for the machines of one launch; neither, without descriptions of their types (`kinds`).

    If the credentials do not allow EFA or placement groups, the machines start without them, with a warning.
    """

    def __init__(
        self, account: AwsAccount, region: str, tags: Tags, kinds: Sequence[Mapping[str, Any]] = (), *, is_public: bool
    ) -> None:
        self._account = account
        self._region = region
        self._tags = tags
        self._is_public = is_public
        self._kinds = {str(kind["InstanceType"]): kind for kind in kinds if has_efa(kind)}
        self._open_groups: dict[str, bool] = {}
        """Whether EFA is possible with a security group, by its id."""
        self._placements: dict[str, str | None] = {}
        """The placement group of each zone; None where the credentials do not allow one."""
        self._logged_types: set[str] = set()

    def interfaces(self, instance_type: str, group_id: str) -> list[dict[str, Any]]:
        """Return the network interfaces of a machine; open its security group for EFA."""
        kind = self._kinds.get(instance_type)
        if kind is None or not self._is_open(group_id):
            return interfaces(group_id, (), is_public=self._is_public)
        cards = efa_cards(kind)
        made = interfaces(group_id, cards, is_public=self._is_public)
        if instance_type not in self._logged_types:
            self._logged_types.add(instance_type)
            has = sum(one.get("InterfaceType") in ("efa", "efa-only") for one in made)
            why = (
                "; machines with a public address have one network interface: use_private_ip=True has them all"
                if has < len(cards)
                else ""
            )
            log.info("%s gets %d of its %d EFA interfaces%s", instance_type, has, len(cards), why)
        return made

    def _is_open(self, group_id: str) -> bool:
        """Allow all traffic between a security group's machines, both ways; return whether EFA is possible.

        EFA needs rules that name the group itself (fact sheet, 1.3).
        """
        if group_id not in self._open_groups:
            rule = {"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": group_id}]}
            try:
                self._account.ask(
                    self._region, "ec2", "authorize_security_group_egress", GroupId=group_id, IpPermissions=[rule]
                )
            except CredentialsError as error:
                log.warning("no EFA between the machines: %s", error)
                self._open_groups[group_id] = False
                return False
            except BadRequest as error:
                if error.code != "InvalidPermission.Duplicate":
                    raise
            self._open_groups[group_id] = True
        return self._open_groups[group_id]

    def placement(self, instance_type: str, zone: str) -> dict[str, Any]:
        """Return the placement parameters of a creating call; the placement group exists when this returns."""
        kind = self._kinds.get(instance_type)
        if kind is None or "cluster" not in (kind.get("PlacementGroupInfo") or {}).get("SupportedStrategies", ()):
            return {}
        if zone not in self._placements:
            if not self._placements:
                self._delete_old_groups()
            self._placements[zone] = self._create_group(zone)
        name = self._placements[zone]
        return {} if name is None else {"Placement": {"GroupName": name}}

    def _create_group(self, zone: str) -> str | None:
        name = f"skyward-{re.sub(r'[^A-Za-z0-9._-]', '_', self._tags[POOL_TAG])}-{zone}"
        try:
            self._account.ask(
                self._region,
                "ec2",
                "create_placement_group",
                GroupName=name,
                Strategy="cluster",
                TagSpecifications=[{"ResourceType": "placement-group", "Tags": pairs_of({"Name": name, **self._tags})}],
            )
        except CredentialsError as error:
            log.warning("no placement group for the machines: %s", error)
            return None
        except BadRequest as error:
            if error.code != "InvalidPlacementGroup.Duplicate":  # an earlier launch of the pool has created it
                raise
        return name

    def _delete_old_groups(self) -> None:
        """Delete placement groups that earlier pools have left. A failure is logged and stops no launch."""
        oldest_kept = time.time() - OLD_SECONDS
        try:
            there = placement_groups(self._account, self._region)
            old = [
                name
                for name, tags in there.items()
                if tags[POOL_TAG] != self._tags[POOL_TAG] and created_at(tags) < oldest_kept
            ]
            each(old[:MOST_TIDIED], lambda name: placement_group_deleted(self._account, self._region, name))
        except SkywardError as error:
            log.info("placement groups of earlier pools are left: %s", error)

    def zones(self) -> set[str]:
        """Return the zones in which new machines must be, because EFA works only within a zone; empty if any zone does.

        These are the zones in which the pool has machines now.
        """
        if not self._kinds:
            return set()
        there = self._account.machines(self._region, {"Name": f"tag:{POOL_TAG}", "Values": [self._tags[POOL_TAG]]})
        return {str(machine["Placement"]["AvailabilityZone"]) for machine in there if state_of(machine) in COMING}

    def tidy(self, zone: str | None) -> None:
        """Delete the placement groups of this launch, except in the zone that has the machines.

        Never fails. AWS refuses to delete a group that is in use.
        """
        for name in [name for other, name in self._placements.items() if name is not None and other != zone]:
            try:
                placement_group_deleted(self._account, self._region, name)
            except SkywardError as error:
                log.info("placement group %s is left, and deleted later: %s", name, error)
