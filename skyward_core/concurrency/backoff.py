"""Pauses that grow between tries and between polls: the one form of back-off of this package (ADR 0021)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

MOST_STEPS = 64  # the power of a float stays finite; every back-off has reached its longest pause by then


@dataclass(frozen=True, slots=True)
class Backoff:
    """Exponential back-off: each pause is `factor` times as long as the one before, and `longest` seconds at most.

    >>> [Backoff(0.5, 15.0).seconds(failures) for failures in (1, 2, 3, 9)]
    [0.5, 1.0, 2.0, 15.0]
    """

    first: float
    longest: float
    factor: float = 2.0

    def seconds(self, failures: int) -> float:
        """Return the pause after so many failures in a row, from 1 on."""
        return min(self.first * self.factor ** min(failures - 1, MOST_STEPS), self.longest)

    def pauses(self) -> Iterator[float]:
        """Return the pauses in their order, without end."""
        return (self.seconds(failures) for failures in count(1))
