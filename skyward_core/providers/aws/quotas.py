"""EC2's quotas of running machines: vCPUs of a group of families, in each region, by their codes in Service Quotas.

The codes of G, P and DL are those of SkyPilot's table too; the others are from AWS's console (fact sheet, 1.10).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from skyward_core.errors import QuotaExceeded

IN_VCPUS = re.compile(r"VcpuLimitExceeded|InstanceLimitExceeded|MaxSpotInstanceCountExceeded")
"""The refusals that are about these quotas. Others are about disks, addresses and the like."""
ON_DEMAND: Mapping[str, tuple[str, str]] = {
    "standard": ("L-1216C47A", "Running On-Demand Standard instances"),
    "g": ("L-DB2E81BA", "Running On-Demand G and VT instances"),
    "p": ("L-417A185B", "Running On-Demand P instances"),
    "dl": ("L-6E869C2A", "Running On-Demand DL instances"),
    "inf": ("L-1945791B", "Running On-Demand Inf instances"),
    "trn": ("L-2C3B7624", "Running On-Demand Trn instances"),
}
SPOT: Mapping[str, tuple[str, str]] = {
    "standard": ("L-34B43A08", "All Standard Spot Instance Requests"),
    "g": ("L-3819A6DF", "All G and VT Spot Instance Requests"),
    "p": ("L-7212CCBC", "All P4, P3 and P2 Spot Instance Requests"),
    "p5": ("L-C4BD4855", "All P5 Spot Instance Requests"),
    "dl": ("L-85EED4F7", "All DL Spot Instance Requests"),
    "inf": ("L-B5D1601B", "All Inf Spot Instance Requests"),
    "trn": ("L-6B0D517C", "All Trn Spot Instance Requests"),
}
FAMILIES: Mapping[str, str] = {
    **dict.fromkeys(("a", "c", "d", "h", "i", "im", "is", "m", "r", "t", "z"), "standard"),
    **dict.fromkeys(("g", "gr", "vt"), "g"),
    **{letters: letters for letters in ("p", "dl", "inf", "trn")},
}
"""The group of a family, by the letters before its generation."""


def quota_of(instance_type: str, *, is_spot: bool) -> tuple[str, str]:
    """Return code and name of the quota that a type counts against; ("", "") if they are not known here."""
    match = re.match(r"([a-z]+)([0-9]+)", instance_type)
    group = FAMILIES.get(match[1], "") if match else ""
    if match and is_spot and group == "p" and int(match[2]) >= 5:
        group = f"p{match[2]}"  # newer P families have a quota of their own as spot
    return (SPOT if is_spot else ON_DEMAND).get(group, ("", ""))


def advised(error: QuotaExceeded, instance_type: str, region: str, *, is_spot: bool) -> QuotaExceeded:
    """Add to a refusal the quota that it is about, and the console's page where more is asked for."""
    page = f"https://{region}.console.aws.amazon.com/servicequotas/home/services/ec2/quotas"
    if not IN_VCPUS.fullmatch(error.code):
        return error.advised(f"The account's limits are at {page}")
    code, name = quota_of(instance_type, is_spot=is_spot)
    what = f"The quota is {code}, {name}, in vCPUs of {region}" if code else f"The quota counts vCPUs of {region}"
    return error.advised(f"{what}: new accounts often have 0. Ask for more at {page}{f'/{code}' if code else ''}")
