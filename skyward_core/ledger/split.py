"""Splits one sum among several parties, to the last unit: a pure function."""

from __future__ import annotations

from collections.abc import Sequence


def split_exactly(amount: int, weights: Sequence[int]) -> list[int]:
    """Split a whole number of units in proportion to whole weights (largest remainder); the parts add up to `amount`.

    No part differs from its exact share by a unit or more. Of equal remainders the earlier one is rounded up. Without
    any weight all parts are 0: then the caller has to name another bearer. Raises ValueError for a negative number.
    """
    if amount < 0 or any(weight < 0 for weight in weights):
        raise ValueError(f"an amount and weights are zero or more; given {amount} and {list(weights)}")
    total = sum(weights)
    if not total:
        return [0] * len(weights)
    parts = [amount * weight // total for weight in weights]
    remainders = [amount * weight % total for weight in weights]
    by_remainder = sorted(range(len(weights)), key=lambda place: -remainders[place])
    for place in by_remainder[: amount - sum(parts)]:
        parts[place] += 1
    return parts
