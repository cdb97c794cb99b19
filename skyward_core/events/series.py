"""The course of a number over time in few points, and its picture in one line of text."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

MOST_POINTS = 32
"""As many bars as fit beside four numbers in a table 1,300 pixels wide."""
BARS = "▁▂▃▄▅▆▇█"


class Series:
    """Keeps at most MOST_POINTS points of any number of values: when they are full, each two neighbours become one.

    Values that are no finite numbers are left out, except that one of them may be the `last`.
    """

    def __init__(self) -> None:
        self.count = 0
        self.last = self.least = self.greatest = math.nan
        self._total = 0.0
        self._points: list[float] = []
        self._values_per_point = 1
        self._begun: list[float] = []

    def add(self, value: float) -> None:
        """Add the next value."""
        self.last = value
        if not math.isfinite(value):
            return
        self.least = value if not self.count else min(self.least, value)
        self.greatest = value if not self.count else max(self.greatest, value)
        self.count, self._total = self.count + 1, self._total + value
        self._begun.append(value)
        if len(self._begun) == self._values_per_point:
            self._points.append(_mean(self._begun))
            self._begun = []
        if len(self._points) == MOST_POINTS:
            self._points = [_mean(self._points[index : index + 2]) for index in range(0, MOST_POINTS, 2)]
            self._values_per_point *= 2

    @property
    def mean(self) -> float:
        """The mean of all values; NaN without any."""
        return self._total / self.count if self.count else math.nan

    @property
    def text(self) -> str:
        """The last value in six digits."""
        return written(self.last)

    @property
    def points(self) -> list[float]:
        """The course: means of equally many neighbouring values, the last one perhaps of fewer."""
        return [*self._points, *([_mean(self._begun)] if self._begun else [])]

    def sparkline(self, low: float | None = None, high: float | None = None) -> str:
        """Return the points as bars between two values, by default the least and the greatest point."""
        if not (points := self.points):
            return ""
        bottom, top = min(points) if low is None else low, max(points) if high is None else high
        return "".join(_bar(point, bottom, top) for point in points)


def written(value: float) -> str:
    """Return a reported value in six digits; a loss that is no number any more as "NaN", which is what matters then.

    >>> written(0.123456789), written(math.nan), written(-math.inf)
    ('0.123457', 'NaN', '-Infinity')
    """
    return f"{value:.6g}" if math.isfinite(value) else json.dumps(value)


def as_json(value: float) -> float | str:
    """Return a reported value as JSON data: JSON has no number for NaN and infinities, and servers refuse them."""
    return value if math.isfinite(value) else json.dumps(value)


def _bar(point: float, bottom: float, top: float) -> str:
    share = (point - bottom) / (top - bottom) if top > bottom else 0.0
    return BARS[min(len(BARS) - 1, max(0, int(share * len(BARS))))]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
