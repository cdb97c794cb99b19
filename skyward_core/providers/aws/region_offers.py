"""Offers of one region of EC2: instance types that match the requirements, with their prices."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from skyward_core.errors import CredentialsError
from skyward_core.machines.offers import Extra, Offer, Requirements, matches
from skyward_core.providers.aws.cluster import has_efa
from skyward_core.providers.aws.launch import DEBIAN_ARCHITECTURES
from skyward_core.providers.aws.launcher import Launcher
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

LEAST_MEMORY_GB = 2.0
"""The memory that a machine has at least if the caller does not say how much it needs.

The system, a node and a call need some.
"""
CHIP_FAMILIES = ("g", "p", "trn", "inf")
ACCELERATED = tuple(f"{family}*" for family in CHIP_FAMILIES)
"""The families with chips of the catalogue. A list of all types has a dozen pages."""

log = logging.getLogger(__name__)

type Machine = tuple[Offer, frozenset[str]]
"""A type as an offer without a price, and the usage classes in which it is sold."""


@dataclass(frozen=True, slots=True)
class RegionOffers:
    """Finds the offers of regions, through the account and with the settings of a launcher."""

    launcher: Launcher
    spot_spread: float

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
                spread(spot.get(offer.instance_type, ()), self.spot_spread),
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
        if self.launcher.settings.ami is None:
            machines = [(offer, classes) for offer, classes in machines if offer.accelerator not in WITHOUT_IMAGE]
        any_price = want.model_copy(update={"max_price_per_hour": None, "memory_gb": _least_memory_gb(want)})
        return [(offer, classes) for offer, classes in machines if matches(offer, any_price) is None]

    def _zones(self, region: str) -> set[str] | None:
        """Return the zones that have a subnet for machines; None if all zones have one.

        One of several regions that has no subnet fails here. Otherwise the launch of each of its types would fail.
        """
        if not self.launcher.settings.subnet_ids and self.launcher.settings.is_one_region:
            return None
        return {subnet["AvailabilityZone"] for subnet in self.launcher.subnets(region)}

    def _extras(self, *, has_chips: bool) -> tuple[Extra, ...]:
        settings = self.launcher.settings
        return billed_beside(settings.disk_gb, has_chips=has_chips, is_public=not settings.use_private_ip)

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
        kind["InstanceType"]: (
            "arm64" in kind["ProcessorInfo"]["SupportedArchitectures"],
            nodes > 1 and has_efa(kind),
        )
        for kind in kinds
    }
