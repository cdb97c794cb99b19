"""The creating calls of EC2, and what they need to be there."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from http import HTTPStatus
from ipaddress import ip_network
from typing import Any

from skyward_core.accelerators.catalog import find
from skyward_core.errors import (
    BadRequest,
    CredentialsError,
    ProviderFailed,
    SkywardError,
)
from skyward_core.machines.offers import Offer
from skyward_core.providers.aws.account import COMING, Account, collected, meaning, number, state_of
from skyward_core.providers.aws.offers import WITHOUT_IMAGE
from skyward_core.providers.base import CREATED_TAG, LAUNCH_TAG, POOL_TAG, Tags

AGAIN_SECONDS = (0.5, 1.0, 2.0, 4.0)
"""Pauses before a creating call, whose answer is not known or which was throttled, is sent again with its token."""
OLD_SECONDS = 3600.0
"""What a launch leaves beside machines is taken away by others when it is so old."""
GROUP_NAME, CLOSED_GROUP_NAME = "skyward-ssh", "skyward-ssm"
PRICE_TAG, ON_DEMAND_PRICE_TAG = "skyward-price-per-hour", "skyward-on-demand-price-per-hour"

NVIDIA_IMAGE = "/aws/service/deeplearning/ami/{architecture}/base-oss-nvidia-driver-gpu-ubuntu-24.04/latest/ami-id"
NEURON_IMAGE = "/aws/service/neuron/dlami/base/ubuntu-24.04/latest/image_id"
UBUNTU_IMAGE = "/aws/service/canonical/ubuntu/server/24.04/stable/current/{debian_architecture}/hvm/ebs-gp3/ami-id"
DEBIAN_ARCHITECTURES: Mapping[str, str] = {"x86_64": "amd64", "arm64": "arm64"}

log = logging.getLogger(__name__)


def image_parameter(accelerator: str | None, architectures: Sequence[str]) -> str:
    """Return where AWS keeps the id of the image for these chips (fact sheet, 1.7). Raises BadRequest if none fits."""
    architecture = "arm64" if "arm64" in architectures else "x86_64"
    if accelerator is None:
        return UBUNTU_IMAGE.format(debian_architecture=DEBIAN_ARCHITECTURES[architecture])
    if (reason := WITHOUT_IMAGE.get(accelerator)) is not None:
        raise BadRequest(f"there is no image for {accelerator}: {reason}. Name one with ami=")
    return NEURON_IMAGE if find(accelerator).vendor == "AWS" else NVIDIA_IMAGE.format(architecture=architecture)


def credit_of(kind: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a creating call says of a type's CPU credits, by what DescribeInstanceTypes says of it: that there
    are to be no more than it earns.

    Left out, T3, T3a and T4g are "unlimited": what they use beyond their share is billed beside their price, by the
    vCPU-hour (EC2 guide, "Unlimited mode"). Other types refuse the word.
    """
    return {"CreditSpecification": {"CpuCredits": "standard"}} if kind.get("BurstablePerformanceSupported") else {}


def placed(subnet_id: str, interfaces: Iterable[Mapping[str, Any]], count: int) -> dict[str, Any]:
    return {
        "MinCount": count,
        "MaxCount": count,
        "NetworkInterfaces": [{**interface, "SubnetId": subnet_id} for interface in interfaces],
    }


def tagged(offer: Offer, tags: Tags, price: float) -> dict[str, Any]:
    """Tags of machines, disks and interfaces, with what they cost: the price that is true when they are made is told
    nowhere later.
    """
    prices = {PRICE_TAG: repr(price)}
    if (dear := offer.on_demand_price_per_hour) is not None:
        prices[ON_DEMAND_PRICE_TAG] = repr(dear)
    pairs = [{"Key": name, "Value": value} for name, value in {"Name": tags[POOL_TAG], **tags, **prices}.items()]
    return {
        "TagSpecifications": [
            {"ResourceType": kind, "Tags": pairs} for kind in ("instance", "volume", "network-interface")
        ]
    }


def created(account: Account, region: str, words: Mapping[str, Any], launch: str) -> list[dict[str, Any]]:
    """Send the creating call, again with its token while nobody knows what became of it; if that goes on, look for what
    it may have made.

    The token holds everything that tells this call from the launch's others: with other words than before, EC2 refuses
    it.
    """
    names = (
        launch,
        region,
        words["NetworkInterfaces"][0]["SubnetId"],
        words["InstanceType"],
        str(words["MinCount"]),
        words["ImageId"],
    )
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
                if machine.get("ClientToken") == token and state_of(machine) in COMING
            ]
            if len(found) < words["MinCount"]:
                raise ProviderFailed(f"{error}; {len(found)} of {words['MinCount']} machines are listed so far").coded(
                    error.code
                ) from error
            return found
    raise AssertionError  # the last round returns or raises


def group_of(account: Account, region: str, vpc_id: str, cidr: str | None) -> str:
    """Return the security group of all pools in a VPC, made if it is not there, with rules for this client and for
    machines among themselves.

    A rule is added for each new address, and none is widened or taken away: another client may stand on it. Without
    `cidr` it is another group, of machines that nobody logs in to from outside: a port that the first one has open for
    one pool is not open for the other.
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
                TagSpecifications=[{"ResourceType": "security-group", "Tags": [{"Key": "Name", "Value": name}]}],
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


# ── what launches leave ──────────────────────────────────────────────────────────────────────────────────────────────


def created_at(tags: Tags) -> float:
    """Return when something was made, in seconds since 1970; now if its tag does not tell: it counts as new."""
    return number(tags.get(CREATED_TAG)) or time.time()


def placement_groups(account: Account, region: str) -> dict[str, dict[str, str]]:
    """Return the placement groups of pools, by name, with their tags."""
    found = account.ask(
        region, "ec2", "describe_placement_groups", Filters=[{"Name": "tag-key", "Values": [POOL_TAG]}]
    )["PlacementGroups"]
    return {
        group["GroupName"]: {POOL_TAG: "", **{tag["Key"]: tag["Value"] for tag in group.get("Tags", [])}}
        for group in found
    }


def placement_group_deleted(account: Account, region: str, name: str) -> bool:
    """Delete a placement group; False if it is in use, as it is until its machines are terminated.

    One that is gone already is as good as deleted.
    """
    try:
        account.ask(region, "ec2", "delete_placement_group", GroupName=name)
    except BadRequest as error:
        if error.code not in ("InvalidPlacementGroup.InUse", "InvalidPlacementGroup.Unknown"):
            raise
        return error.code == "InvalidPlacementGroup.Unknown"
    return True


def template_deleted(account: Account, region: str, name: str) -> None:
    """Delete a launch template; one that is gone already is as good as deleted."""
    try:
        account.ask(region, "ec2", "delete_launch_template", LaunchTemplateName=name)
    except BadRequest as error:
        if "NotFound" not in error.code:
            raise


def prune_launches(account: Account, region: str, now: datetime, *, is_dry_run: bool = False) -> list[str]:
    """Take away what launches have left in a region: launch templates of clients that were killed, and placement groups
    that nobody is in any more.

    Only what is older than OLD_SECONDS: no launch takes as long. Returns what went, or would go, in words. Raises the
    first failure once everything else is done; what credentials may not even list is left alone, for then they have
    made none of it.
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
        log.info("launch templates and placement groups in %s cannot be looked for: %s", region, error)
        return []
    for template in templates:
        name, tags = template["LaunchTemplateName"], {tag["Key"]: tag["Value"] for tag in template.get("Tags", [])}
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


def _used(account: Account, region: str, names: Sequence[str]) -> set[str]:
    """Return which of these placement groups have machines that are not terminated."""
    machines = account.machines(region, {"Name": "placement-group-name", "Values": list(names)})
    return {
        machine["Placement"].get("GroupName", "") for machine in machines if machine["State"]["Name"] != "terminated"
    }


def why_failed(machine: Mapping[str, Any]) -> SkywardError:
    """Return the error that a machine has ended with before it had an address (fact sheet, 1.6)."""
    reason = machine.get("StateReason", {})
    code = str(reason.get("Code", ""))
    word = code.removeprefix("Server.").removeprefix("Client.")
    kind = meaning(word, HTTPStatus.BAD_REQUEST if code.startswith("Client.") else HTTPStatus.INTERNAL_SERVER_ERROR)
    return kind(f"{machine['InstanceId']} ended while it was made: {code} {reason.get('Message', '')}").coded(word)
