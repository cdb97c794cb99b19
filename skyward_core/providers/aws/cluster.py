"""Network and placement of a pool's machines on EC2: Elastic Fabric Adapters (EFA) and cluster placement groups.

Both are only for machines that work together, and whose type has EFA. Without EFA a placement group gains little, and
it makes capacity harder to find.

A placement group belongs to one pool and one zone, because its machines keep it in that zone:

    absent ──placement──> empty ──launch──> in use ──its machines are terminated, takes minutes──> empty
    empty ──tidy, prune_launches, or a later launch──> absent

It costs nothing, and AWS refuses to delete one that is in use. So no process waits for its end. A launch deletes the
groups that it has created and not used. Old groups are deleted by a later launch of such machines, or by
`prune_launches`. A client that is killed leaves at most an empty group. A group carries the tags of the launch that
created it, with the pool and the time.

"EC2 guide" is the Amazon EC2 User Guide, "fact sheet" the one of 2026-11-20.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

from skyward_core.errors import BadRequest, CredentialsError, SkywardError
from skyward_core.providers.aws.account import COMING, AwsAccount, each, state_of
from skyward_core.providers.aws.launch import OLD_SECONDS, created_at, placement_group_deleted, placement_groups
from skyward_core.providers.base import POOL_TAG, Tags

MOST_TIDIED = 8
"""The most old placement groups that one launch deletes, all at once, so that the launch is not delayed."""

log = logging.getLogger(__name__)


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
        pairs = [{"Key": key, "Value": value} for key, value in {"Name": name, **self._tags}.items()]
        try:
            self._account.ask(
                self._region,
                "ec2",
                "create_placement_group",
                GroupName=name,
                Strategy="cluster",
                TagSpecifications=[{"ResourceType": "placement-group", "Tags": pairs}],
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
