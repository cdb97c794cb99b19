"""Parts of EC2 for `fake_aws` that moto lacks: instant fleets, launch templates that are applied, placement groups.

Fleets choose a spot pool and fail with status 200. A fleet becomes a RunInstances in the chosen pool, so that its
machines start like all others.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from xml.sax.saxutils import escape

from moto.ec2.models.instance_types import INSTANCE_TYPES

PAGE = 2
UNTRIED = ("UnfulfillableCapacity", "Failed to fulfill capacity. Please review errors in the response.")

type Words = Mapping[str, str]
type FleetAnswer = tuple[str, str | None]
"""An error code and None, or a text and the content of the answer."""


@dataclass
class Group:
    """A placement group, and all machines that were in it."""

    tags: dict[str, str]
    machines: set[str] = field(default_factory=set)


class FakeFleets:
    """Fleets, templates and placement groups of all regions.

    `refusals` has the code and message with which a spot pool (type and zone) refuses; `untried` has the pools that EC2
    reports as not tried. A fleet gets `short_of` machines fewer than requested. With `is_split` each of its machines
    comes from a separate call, with the same index.
    """

    def __init__(self, cloud: Any) -> None:
        self._cloud = cloud
        self.refusals: dict[tuple[str, str], tuple[str, str]] = {}
        self.untried: set[tuple[str, str]] = set()
        self.short_of = 0
        self.is_split = False
        self.templates: dict[tuple[str, str], Words] = {}
        self.groups: dict[tuple[str, str], Group] = {}
        self._answers: dict[str, tuple[Words, str]] = {}

    def answer(
        self, action: str, parameters: Words, region: str, run: Callable[[Words], list[str]]
    ) -> FleetAnswer | None:
        """Answer one action, with `run` as RunInstances; None for other actions."""
        own: dict[str, Callable[..., FleetAnswer]] = {
            "CreateFleet": lambda: self._create_fleet(parameters, region, run),
            "CreateLaunchTemplate": lambda: self._create_template(parameters, region),
            "DescribeLaunchTemplates": lambda: self._describe_templates(parameters, region),
            "DeleteLaunchTemplate": lambda: self._delete_template(parameters, region),
            "CreatePlacementGroup": lambda: self._create_group(parameters, region),
            "DescribePlacementGroups": lambda: self._describe_groups(parameters, region),
            "DeletePlacementGroup": lambda: self._delete_group(parameters, region),
        }
        return own[action]() if action in own else None

    # ── fleets ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _create_fleet(self, parameters: Words, region: str, run: Callable[[Words], list[str]]) -> FleetAnswer:
        token = parameters["ClientToken"]
        if token in self._answers:
            before, reply = self._answers[token]
            return ("", reply) if before == parameters else ("IdempotentParameterMismatch", None)
        count = int(parameters["TargetCapacitySpecification.TotalTargetCapacity"])
        is_single = (
            parameters.get("SpotOptions.SingleInstanceType")
            == parameters.get("SpotOptions.SingleAvailabilityZone")
            == "true"
        )
        if (
            parameters["Type"] != "instant"
            or not is_single
            or parameters.get("SpotOptions.MinTargetCapacity") != str(count)
            or len(token) > 64
        ):
            return "InvalidParameterCombination", None
        pools = list(self._pools(parameters, region))
        if len({(name, zone) for name, zone, _, _ in pools}) < len(pools):
            return "InvalidFleetConfig", None  # the same pool occurs twice
        if any((region, template) not in self.templates for _, _, _, template in pools):
            return "InvalidLaunchTemplateName.NotFoundException", None
        errors: list[str] = []
        machines: list[str] = []
        chosen = ""
        for name, zone, subnet, template in sorted(
            pools, key=lambda pool: self._cloud.spot.get(pool[:2], float("inf"))
        ):
            refusal = (
                UNTRIED
                if (name, zone) in self.untried
                else self.refusals.get((name, zone), self.refusals.get(("*", "*")))
            )
            if refusal is not None:
                errors.append(self._error(refusal, name, subnet))
                continue
            given = count - self.short_of
            call = self._run_words(parameters, self.templates[region, template], name, subnet)
            parts = [1] * given if self.is_split else [given] if given else []
            for part in parts:
                machines += run({**call, "MinCount": str(part), "MaxCount": str(part)})
            if self.short_of:
                errors.append(
                    self._error(
                        (
                            "InsufficientInstanceCapacity",
                            "There is no Spot capacity available that matches your request.",
                        ),
                        name,
                        subnet,
                    )
                )
            chosen = self._got(machines, name, subnet)
            break
        reply = f"<fleetId>fleet-1</fleetId><errorSet>{'' if machines and not self.short_of else ''.join(errors)}</errorSet>"
        reply += f"<fleetInstanceSet>{chosen if machines else ''}</fleetInstanceSet>"
        self._answers[token] = (parameters, reply)
        return "", reply

    def _pools(self, parameters: Words, region: str) -> Iterator[tuple[str, str, str, str]]:
        """Yield type, zone, subnet and template of each override."""
        for key, subnet in parameters.items():
            if match := re.fullmatch(r"LaunchTemplateConfigs\.(\d+)\.Overrides\.(\d+)\.SubnetId", key):
                config = f"LaunchTemplateConfigs.{match[1]}"
                name = parameters[f"{config}.Overrides.{match[2]}.InstanceType"]
                zone = str(self._cloud.backend(region).get_subnet(subnet).availability_zone)
                yield name, zone, subnet, parameters[f"{config}.LaunchTemplateSpecification.LaunchTemplateName"]

    def _run_words(self, parameters: Words, template: Words, name: str, subnet: str) -> dict[str, str]:
        """Return the parameters of RunInstances for a fleet, with all tags."""
        call = {
            key.removeprefix("LaunchTemplateData."): value
            for key, value in template.items()
            if key.startswith("LaunchTemplateData.")
        }
        tags = {
            key: value
            for source in (call, parameters)
            for key, value in source.items()
            if key.startswith("TagSpecification.")
        }
        if len(tags) < sum(key.startswith("TagSpecification.") for source in (call, parameters) for key in source):
            moved = sum(bool(re.fullmatch(r"TagSpecification\.\d+\.ResourceType", key)) for key in parameters)
            tags = {key: value for key, value in parameters.items() if key.startswith("TagSpecification.")}
            for key, value in call.items():
                if match := re.fullmatch(r"TagSpecification\.(\d+)(\..+)", key):
                    tags[f"TagSpecification.{int(match[1]) + moved}{match[2]}"] = value
        cards = {key.split(".")[1] for key in call if key.startswith("NetworkInterface.")}
        call = {key: value for key, value in call.items() if not key.startswith("TagSpecification.")}
        call |= {f"NetworkInterface.{card}.SubnetId": subnet for card in cards}
        return {**call, **tags, "InstanceType": name, "InstanceMarketOptions.MarketType": "spot"}

    def _overrides(self, name: str, subnet: str) -> str:
        return f"<launchTemplateAndOverrides><overrides><instanceType>{name}</instanceType><subnetId>{subnet}</subnetId></overrides></launchTemplateAndOverrides>"

    def _error(self, refusal: tuple[str, str], name: str, subnet: str) -> str:
        code, message = refusal
        place = self._overrides(name, subnet)
        return f"<item>{place}<lifecycle>spot</lifecycle><errorCode>{code}</errorCode><errorMessage>{escape(message)}</errorMessage></item>"

    def _got(self, machines: list[str], name: str, subnet: str) -> str:
        ids = "".join(f"<item>{machine}</item>" for machine in machines)
        place = self._overrides(name, subnet)
        return f"<item>{place}<lifecycle>spot</lifecycle><instanceIds>{ids}</instanceIds><instanceType>{name}</instanceType></item>"

    # ── launch templates ─────────────────────────────────────────────────────────────────────────────────────────────

    def _create_template(self, parameters: Words, region: str) -> FleetAnswer:
        name = parameters["LaunchTemplateName"]
        if parameters["ClientToken"] in self._answers:
            return (
                ("", self._answers[parameters["ClientToken"]][1])
                if self._answers[parameters["ClientToken"]][0] == parameters
                else ("IdempotentParameterMismatch", None)
            )
        if not re.fullmatch(r"[A-Za-z0-9().\-/_]{3,128}", name):
            return "InvalidLaunchTemplateName.MalformedException", None
        if (region, name) in self.templates:
            return "InvalidLaunchTemplateName.AlreadyExistsException", None
        if any(key.startswith("LaunchTemplateData.InstanceMarketOptions") for key in parameters):
            return "InvalidParameterCombination", None
        self.templates[region, name] = dict(parameters)
        return "", f"<launchTemplate>{self._template(name)}</launchTemplate>"

    def _describe_templates(self, parameters: Words, region: str) -> FleetAnswer:
        found = [(name, _tags(template)) for (place, name), template in self.templates.items() if place == region]
        found = [(name, tags) for name, tags in found if parameters["Filter.1.Value.1"] in tags]
        start = int(parameters.get("NextToken") or 0)
        items = "".join(
            f"<item>{self._template(name)}{_tag_set(tags)}</item>" for name, tags in found[start : start + PAGE]
        )
        more = f"<nextToken>{start + PAGE}</nextToken>" if start + PAGE < len(found) else ""
        return "", f"<launchTemplates>{items}</launchTemplates>{more}"

    def _delete_template(self, parameters: Words, region: str) -> FleetAnswer:
        if self.templates.pop((region, parameters["LaunchTemplateName"]), None) is None:
            return "InvalidLaunchTemplateName.NotFoundException", None
        return "", ""

    def _template(self, name: str) -> str:
        return f"<launchTemplateId>lt-1</launchTemplateId><launchTemplateName>{name}</launchTemplateName>"

    # ── placement groups ─────────────────────────────────────────────────────────────────────────────────────────────

    def _create_group(self, parameters: Words, region: str) -> FleetAnswer:
        if (region, parameters["GroupName"]) in self.groups:
            return "InvalidPlacementGroup.Duplicate", None
        assert parameters["Strategy"] == "cluster"
        self.groups[region, parameters["GroupName"]] = Group(_tags(parameters))
        return "", ""

    def _describe_groups(self, parameters: Words, region: str) -> FleetAnswer:
        found = [
            (name, group.tags)
            for (place, name), group in self.groups.items()
            if place == region and parameters["Filter.1.Value.1"] in group.tags
        ]
        items = "".join(
            f"<item><groupName>{name}</groupName><strategy>cluster</strategy><state>available</state>{_tag_set(tags)}</item>"
            for name, tags in found
        )
        return "", f"<placementGroupSet>{items}</placementGroupSet>"

    def _delete_group(self, parameters: Words, region: str) -> FleetAnswer:
        group = self.groups.get((region, parameters["GroupName"]))
        if group is None:
            return "InvalidPlacementGroup.Unknown", None
        if any(self._cloud.machine(machine)._state.name != "terminated" for machine in group.machines):
            return "InvalidPlacementGroup.InUse", None
        del self.groups[region, parameters["GroupName"]]
        return "", ""

    # ── every launch ─────────────────────────────────────────────────────────────────────────────────────────────────

    def refusal_of(self, parameters: Words, region: str) -> str | None:
        """Return the error code for a RunInstances; None if it is accepted. The reason may be its network interfaces,
        its CPU credits or its placement.
        """
        if (
            "CreditSpecification.CpuCredits" in parameters
            and not INSTANCE_TYPES[parameters["InstanceType"]]["BurstablePerformanceSupported"]
        ):
            return "InvalidParameterCombination"
        cards = {key.split(".")[1] for key in parameters if key.startswith("NetworkInterface.")}
        if len(cards) > 1 and any(key.endswith("AssociatePublicIpAddress") for key in parameters):
            return "InvalidParameterCombination"
        name = parameters.get("Placement.GroupName")
        if name is None:
            return None
        group = self.groups.get((region, name))
        if group is None:
            return "InvalidPlacementGroup.Unknown"
        zone = str(self._cloud.backend(region).get_subnet(parameters["NetworkInterface.1.SubnetId"]).availability_zone)
        there = [self._cloud.machine(machine) for machine in group.machines]
        return (
            "Unsupported"
            if any(one._state.name != "terminated" and one._placement.zone != zone for one in there)
            else None
        )

    def by_group(self, request: Any) -> Any:
        """Return a DescribeInstances that moto supports, because moto lacks the filter for placement groups."""
        if request.parameters.get("Filter.1.Name") != "placement-group-name":
            return request
        names = {value for key, value in request.parameters.items() if key.startswith("Filter.1.Value.")}
        found = sorted(
            {machine for (_, name), group in self.groups.items() if name in names for machine in group.machines}
        ) or ["i-0"]
        parameters = {key: value for key, value in request.parameters.items() if not key.startswith("Filter.")}
        parameters |= {
            "Filter.1.Name": "instance-id",
            **{f"Filter.1.Value.{n}": machine for n, machine in enumerate(found, 1)},
        }
        return dataclasses.replace(request, parameters=parameters)

    def came_up(self, parameters: Words, region: str, machines: list[Any]) -> None:
        """Put new machines into their placement group. Remove public addresses that AWS would not give."""
        for machine in machines:
            if "NetworkInterface.2.DeviceIndex" in parameters:
                machine.nics[0].public_ip = None
            if name := parameters.get("Placement.GroupName"):
                machine._placement.group_name = name
                self.groups[region, name].machines.add(machine.id)
            if self.is_split and "InstanceMarketOptions.MarketType" in parameters:
                machine.ami_launch_index = 0


def _tags(parameters: Words) -> dict[str, str]:
    keys = {key: value for key, value in parameters.items() if re.fullmatch(r"TagSpecification\.1\.Tag\.\d+\.Key", key)}
    return {name: parameters[key.removesuffix("Key") + "Value"] for key, name in keys.items()}


def _tag_set(tags: Mapping[str, str]) -> str:
    items = "".join(
        f"<item><key>{escape(key)}</key><value>{escape(value)}</value></item>" for key, value in tags.items()
    )
    return f"<tagSet>{items}</tagSet>"
