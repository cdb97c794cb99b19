"""Offers for tests: what a test does not name is usual."""

from typing import Any

from skyward_core.machines.offers import Offer


def offer(kind: str = "a", price: float = 1.0, **fields: Any) -> Offer:
    """Return an offer of `Local` with 4 vCPUs and 16 GB."""
    return Offer(
        **{
            "provider": "local",
            "instance_type": kind,
            "region": "r-1",
            "price_per_hour": price,
            "vcpus": 4,
            "memory_gb": 16,
            **fields,
        }
    )
