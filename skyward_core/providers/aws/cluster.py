"""What joins the machines of a pool on EC2: Elastic Fabric Adapters (EFA), and a cluster placement group, which has
them near each other.

Only for machines that are to work together, and of a type that has EFA: whoever pays for that waits for the network.
Without EFA the gain of a placement group is small and its price is not: it finds no place more often, and capacity
matters more.

A placement group is of one pool and one zone, for its machines keep it there:

    absent --placement--> empty --launch--> in use --its machines are terminated, for minutes--> empty --tidy,
    prune_launches, a later launch--> absent

It costs nothing, and AWS refuses to delete one that is in use. So nobody waits for its end: those that a launch has
made and not used are deleted by it, the others when they are old, by whoever launches such machines next or by
`prune_launches`. A client that is killed anywhere in between leaves an empty group at most. It carries the tags of the
launch that has made it, the pool and the time among them.

"EC2 guide" is the Amazon EC2 User Guide, "fact sheet" the one of 2026-11-20.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

from skyward_core.errors import BadRequest, CredentialsError, SkywardError
from skyward_core.providers.aws.account import COMING, Account, each, state_of
from skyward_core.providers.aws.launch import OLD_SECONDS, created_at, placement_group_deleted, placement_groups
from skyward_core.providers.base import POOL_TAG, Tags

MOST_TIDIED = 8
"""So many old placement groups are taken away by one launch at most, all at once: it is in nobody's way."""

log = logging.getLogger(__name__)


def kinds_of(account: Account, region: str, types: Sequence[str]) -> list[dict[str, Any]]:
    """Return what DescribeInstanceTypes says of some types."""
    return account.pages(
        region,
        "ec2",
        "describe_instance_types",
        "InstanceTypes",
        Filters=[{"Name": "instance-type", "Values": list(types)}],
    )


def has_efa(kind: Mapping[str, Any]) -> bool:
    """Tell whether a type has EFA, by what DescribeInstanceTypes says of it."""
    return bool((kind.get("NetworkInfo") or {}).get("EfaInfo"))


def efa_cards(kind: Mapping[str, Any]) -> list[int]:
    """Return the indices of the network cards of a type that can have an EFA.

    The first card of a p6-b300 has none (fact sheet, 1.3).
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
    """Return the network interfaces of a machine, subnet left out: one, or one a card with EFA.

    A machine with more than one interface gets no public address in the creating call, and AWS refuses the very word
    (fact sheet, 1.3): with a public address there is one interface. The first one carries IP, and EFA if its card can;
    the others carry EFA alone, which needs no addresses.
    """
    first: dict[str, Any] = {"DeviceIndex": 0, "Groups": [group_id], "DeleteOnTermination": True}
    if 0 in cards:
        first |= {"NetworkCardIndex": 0, "InterfaceType": "efa"}
    others = [
        {
            "DeviceIndex": 1,
            "NetworkCardIndex": card,
            "InterfaceType": "efa-only",
            "Groups": [group_id],
            "DeleteOnTermination": True,
        }
        for card in cards
        if card and not is_public
    ]
    return [first, *others] if others else [first | {"AssociatePublicIpAddress": is_public}]


class Cluster:
    """What joins the machines of one launch. Without descriptions of their types (`kinds`) nothing does: they work
    alone.

    Credentials that do not allow it are no reason to have no machines: then there is no EFA, or no placement group, and
    the log says so.
    """

    def __init__(
        self, account: Account, region: str, tags: Tags, kinds: Sequence[Mapping[str, Any]] = (), *, is_public: bool
    ) -> None:
        self._account = account
        self._region = region
        self._tags = tags
        self._is_public = is_public
        self._kinds = {str(kind["InstanceType"]): kind for kind in kinds if has_efa(kind)}
        self._open_groups: dict[str, bool] = {}
        """Whether EFA can be had with a security group."""
        self._placements: dict[str, str | None] = {}
        """The placement group of each zone that was asked for; None where we may not have one."""
        self._told: set[str] = set()

    def interfaces(self, instance_type: str, group_id: str) -> list[dict[str, Any]]:
        """Return the network interfaces of a machine in a security group, which is opened for EFA."""
        kind = self._kinds.get(instance_type)
        if kind is None or not self._is_open(group_id):
            return interfaces(group_id, (), is_public=self._is_public)
        cards = efa_cards(kind)
        made = interfaces(group_id, cards, is_public=self._is_public)
        if instance_type not in self._told:
            self._told.add(instance_type)
            has = sum(one.get("InterfaceType") in ("efa", "efa-only") for one in made)
            why = (
                "; machines with a public address have one network interface: use_private_ip=True has them all"
                if has < len(cards)
                else ""
            )
            log.info("%s gets %d of its %d EFA interfaces%s", instance_type, has, len(cards), why)
        return made

    def _is_open(self, group_id: str) -> bool:
        """Let a security group's machines through to each other in both directions: EFA wants that said of the group
        itself (fact sheet, 1.3).
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
        """Return what a creating call says of the machines' place in a zone; the placement group is there when this
        returns.
        """
        kind = self._kinds.get(instance_type)
        if kind is None or "cluster" not in (kind.get("PlacementGroupInfo") or {}).get("SupportedStrategies", ()):
            return {}
        if zone not in self._placements:
            if not self._placements:
                self._take_old_ones_away()
            self._placements[zone] = self._made(zone)
        name = self._placements[zone]
        return {} if name is None else {"Placement": {"GroupName": name}}

    def _made(self, zone: str) -> str | None:
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
            if error.code != "InvalidPlacementGroup.Duplicate":  # of an earlier launch of the pool
                raise
        return name

    def _take_old_ones_away(self) -> None:
        """Delete placement groups that earlier pools have left.

        One listing; what is in the way of it is in the way of nobody.
        """
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
        """Return where the pool has machines now, if those launched must be beside them: EFA reaches no other zone.

        Nothing if any place will do.
        """
        if not self._kinds:
            return set()
        there = self._account.machines(self._region, {"Name": f"tag:{POOL_TAG}", "Values": [self._tags[POOL_TAG]]})
        return {str(machine["Placement"]["AvailabilityZone"]) for machine in there if state_of(machine) in COMING}

    def tidy(self, zone: str | None) -> None:
        """Delete the placement groups that were asked for, but for that of the zone with the machines.

        Never fails; one in use is left by AWS itself.
        """
        for name in [name for other, name in self._placements.items() if name is not None and other != zone]:
            try:
                placement_group_deleted(self._account, self._region, name)
            except SkywardError as error:
                log.info("placement group %s is left, and taken away later: %s", name, error)
