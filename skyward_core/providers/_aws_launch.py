"""The creating calls of EC2, and what they need to be there."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from http import HTTPStatus
from ipaddress import ip_network
from typing import Any

from skyward_core.accelerators.catalog import find
from skyward_core.errors import (
    BadRequest,
    ProviderFailed,
    SkywardError,
)
from skyward_core.market import Offer
from skyward_core.providers._aws_account import COMING, Account, meaning, state_of
from skyward_core.providers._aws_offers import WITHOUT_IMAGE
from skyward_core.providers.base import LAUNCH_TAG, POOL_TAG, Tags

AGAIN_SECONDS = (0.5, 1.0, 2.0, 4.0)
"""Pauses before a creating call, whose answer is not known or which was throttled, is sent again with its token."""
GROUP_NAME = "skyward-ssh"
PRICE_TAG, ON_DEMAND_PRICE_TAG = "skyward-price-per-hour", "skyward-on-demand-price-per-hour"

NVIDIA_IMAGE = "/aws/service/deeplearning/ami/{architecture}/base-oss-nvidia-driver-gpu-ubuntu-24.04/latest/ami-id"
NEURON_IMAGE = "/aws/service/neuron/dlami/base/ubuntu-24.04/latest/image_id"
UBUNTU_IMAGE = "/aws/service/canonical/ubuntu/server/24.04/stable/current/{debian_architecture}/hvm/ebs-gp3/ami-id"
DEBIAN_ARCHITECTURES: Mapping[str, str] = {"x86_64": "amd64", "arm64": "arm64"}


def image_parameter(accelerator: str | None, architectures: Sequence[str]) -> str:
    """Return where AWS keeps the id of the image for these chips (fact sheet, 1.7). Raises BadRequest if none fits."""
    architecture = "arm64" if "arm64" in architectures else "x86_64"
    if accelerator is None:
        return UBUNTU_IMAGE.format(debian_architecture=DEBIAN_ARCHITECTURES[architecture])
    if (reason := WITHOUT_IMAGE.get(accelerator)) is not None:
        raise BadRequest(f"there is no image for {accelerator}: {reason}. Name one with ami=")
    return NEURON_IMAGE if find(accelerator).vendor == "AWS" else NVIDIA_IMAGE.format(architecture=architecture)


def placed(subnet_id: str, group_id: str, count: int, *, is_public: bool) -> dict[str, Any]:
    interface = {
        "DeviceIndex": 0,
        "SubnetId": subnet_id,
        "Groups": [group_id],
        "AssociatePublicIpAddress": is_public,
        "DeleteOnTermination": True,
    }
    return {"MinCount": count, "MaxCount": count, "NetworkInterfaces": [interface]}


def tagged(offer: Offer, tags: Tags, price: float) -> dict[str, Any]:
    """Tags of machines, disks and interfaces, with what they cost: the price that is true when they are made is told nowhere later."""
    prices = {PRICE_TAG: repr(price)}
    if (dear := offer.on_demand_price_per_hour) is not None:
        prices[ON_DEMAND_PRICE_TAG] = repr(dear)
    pairs = [{"Key": name, "Value": value} for name, value in {"Name": tags[POOL_TAG], **tags, **prices}.items()]
    return {"TagSpecifications": [{"ResourceType": kind, "Tags": pairs} for kind in ("instance", "volume", "network-interface")]}


def created(account: Account, region: str, words: Mapping[str, Any], launch: str) -> list[dict[str, Any]]:
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
                if machine.get("ClientToken") == token and state_of(machine) in COMING
            ]
            if len(found) < words["MinCount"]:
                raise ProviderFailed(f"{error}; {len(found)} of {words['MinCount']} machines are listed so far").coded(error.code) from error
            return found
    raise AssertionError  # the last round returns or raises


def group_of(account: Account, region: str, vpc_id: str, cidr: str) -> str:
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


def why_failed(machine: Mapping[str, Any]) -> SkywardError:
    """Return the error that a machine has ended with before it had an address (fact sheet, 1.6)."""
    reason = machine.get("StateReason", {})
    code = str(reason.get("Code", ""))
    word = code.removeprefix("Server.").removeprefix("Client.")
    kind = meaning(word, HTTPStatus.BAD_REQUEST if code.startswith("Client.") else HTTPStatus.INTERNAL_SERVER_ERROR)
    return kind(f"{machine['InstanceId']} ended while it was made: {code} {reason.get('Message', '')}").coded(word)
