"""How the nodes of a pool were used while calls ran, and what these have reported: numbers for the pages of
orchestrators.

`Series` is the course of a number over time in few points, and its picture in one line of text.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from skyward_core.events.events import CallProgress, CallReported, InstanceLost, Metrics, SkywardEvent

MEASURES: Mapping[str, str] = MappingProxyType(
    {
        "gpu_percent": "accelerators",
        "gpu_memory_percent": "accelerators' memory",
        "cpu_percent": "processor",
        "memory_percent": "memory",
    }
)
"""What is measured, each of it in percent of the whole machine, and its words."""


def percentages(sample: Metrics) -> dict[str, float]:
    """Return the values of a sample by the names of `MEASURES`, without those that the node does not have."""
    values = {
        "gpu_percent": sample.gpu_utilization,
        "gpu_memory_percent": _share(sample.gpu_memory_used_mb, sample.gpu_memory_total_mb),
        "cpu_percent": sample.cpu_percent,
        "memory_percent": sample.memory_percent,
    }
    return {name: value for name, value in values.items() if value is not None}


class Utilisation:
    """Event sink: adds up the samples of all nodes that were taken while calls ran, and keeps what calls have reported.

    Calls are those of this process's pool (`CallProgress`), or those that `running` counts. A sample says what happened
    in the two seconds before it, so each node's first one after the end of the calls is still theirs. One thread calls
    it; any may read.

        use = sky.Utilisation()
        with sky.ComputePool(..., on_event=use.see) as pool: ...
        use.numbers()["gpu_percent_mean"]
    """

    def __init__(self) -> None:
        self.measured: dict[str, Series] = {}
        """By the names of `MEASURES`: the course over time, of all nodes together."""
        self.memory_gb = Series()
        """The memory that the nodes use, of each node, in GB = 10⁹ bytes."""
        self.reported: dict[str, Series] = {}
        """By the names of `sky.report`, in the order in which they came."""
        self._last: dict[str, Metrics] = {}
        """By machine: its last sample."""
        self.step: int | None = None
        """The last step that a call has named."""
        self._calls = 0
        self._sampled_late: set[str] | None = None
        """Without calls: the nodes whose samples are not of calls any more. None: no call has begun."""

    def see(self, event: SkywardEvent) -> None:
        """Take an event of the pool."""
        match event:
            case Metrics():
                self._measure(event)
            case CallReported():
                self._report(event)
            case InstanceLost(instance_id):
                self._last.pop(instance_id, None)
            case CallProgress(submitted, done, _, cancelled):
                self.running(submitted - done - cancelled)
            case _:
                pass

    def running(self, calls: int, *, have_run: bool = False) -> None:
        """So many calls run, or wait for a slot, from now on. `have_run`: some have run since this was called last."""
        if calls or self._calls or have_run:
            self._sampled_late = set()
        self._calls = calls

    def anew(self) -> Utilisation:
        """Return one that begins now, with the calls that run."""
        new = Utilisation()
        new.running(self._calls)
        return new

    def numbers(self) -> dict[str, float]:
        """Return the mean and the maximum of each measure, as `cpu_percent_mean` and `cpu_percent_max`; none of what
        was not measured, as in calls of a moment.
        """
        named = ((name, self.measured[name]) for name in MEASURES if name in self.measured)
        return {
            f"{name}_{kind}": round(value, 1)
            for name, series in named
            for kind, value in (("mean", series.mean), ("max", series.greatest))
        }

    def now(self) -> dict[str, float]:
        """Return each measure by its name, as the mean of the nodes' last samples."""
        samples = [percentages(sample) for sample in list(self._last.values())]
        values = {name: [one[name] for one in samples if name in one] for name in MEASURES}
        return {name: round(sum(known) / len(known), 1) for name, known in values.items() if known}

    def last_values(self) -> dict[str, float | str]:
        """Return the last value of each reported metric, as JSON data: "NaN" for one that is no number any more."""
        return {name: as_json(series.last) for name, series in list(self.reported.items())}

    def words(self) -> str:
        """Return the means and the maxima in one line: "processor 34 % (most 90 %), memory 12 %"; "" without any."""
        return ", ".join(
            f"{words} {its.mean:.0f} %" + (f" (most {its.greatest:.0f} %)" if its.greatest - its.mean >= 1 else "")
            for name, words in MEASURES.items()
            if (its := self.measured.get(name)) is not None
        )

    @staticmethod
    def words_of(name: str) -> str:
        """Return the words for a measure."""
        return MEASURES[name]

    def _report(self, event: CallReported) -> None:
        self.step = self.step if event.step is None else event.step
        for name, value in event.values.items():
            series = self.reported.setdefault(name, Series())
            if not (event.is_last and as_json(series.last) == as_json(value)):  # it repeats what has come
                series.add(value)

    def _measure(self, sample: Metrics) -> None:
        self._last[sample.instance_id] = sample
        if not self._calls:
            if self._sampled_late is None or sample.instance_id in self._sampled_late:
                return
            self._sampled_late.add(sample.instance_id)
        for name, value in percentages(sample).items():
            self.measured.setdefault(name, Series()).add(value)
        self.memory_gb.add(sample.memory_used_mb / 1000)


def _share(used: float | None, total: float | None) -> float | None:
    return None if used is None or not total else 100 * used / total


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
