"""Make tables of the measurements in Markdown, with ratios and marks.

A mark is the value that a measurement should reach.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

type Measured = dict[str, dict[str, dict[str, list[float]]]]
"""Case, system, metric: one value for each round."""


@dataclass(frozen=True)
class Row:
    """A line of the table. `ours`, `dask` and `ray` name a metric of the system; `scale` converts it to `unit`."""

    what: str
    case: str
    ours: str
    unit: str
    scale: float = 1.0
    dask: str | None = None
    ray: str | None = None
    our_system: str = "skyward"
    more_is_better: bool = False
    dask_mark: float | None = None
    ray_mark: float | None = None
    least: float | None = None
    most: float | None = None


def table(rows: Iterable[Row], measured: Measured, rivals: Sequence[str] = ("dask", "ray")) -> list[str]:
    """Return the two lines of the head, and a line for each row with measurements."""
    head = ["case", "unit", "skyward", *rivals, *(f"to {rival}" for rival in rivals), "mark", ""]
    rule = ["---", "---", *["---:"] * (1 + 2 * len(rivals)), "---", "---"]
    return [_joined(head), _joined(rule), *(_line(row, measured, rivals) for row in rows if row.case in measured)]


def _joined(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _line(row: Row, measured: Measured, rivals: Sequence[str]) -> str:
    case = measured[row.case]
    ours = case[row.our_system][row.ours]
    metrics = {"dask": row.dask, "ray": row.ray}
    theirs = {rival: case[rival][metric] if (metric := metrics[rival]) else [] for rival in rivals}
    ratios = {rival: _ratio(ours, values) for rival, values in theirs.items()}
    cells = [_cell(row, values) for values in (ours, *theirs.values())]
    shown = ["" if ratio is None else f"{max(ratio, 0):.2f}" for ratio in ratios.values()]
    return _joined([row.what, row.unit, *cells, *shown, *_mark(row, ours, ratios.get("dask"), ratios.get("ray"))])


def _ratio(ours: Sequence[float], theirs: Sequence[float]) -> float | None:
    return statistics.median(ours) / middle if ours and theirs and (middle := statistics.median(theirs)) > 0 else None


def _cell(row: Row, values: list[float]) -> str:
    if not values:
        return "–"
    low, middle, high = (value * row.scale for value in (min(values), statistics.median(values), max(values)))
    digits = 0 if max(abs(low), abs(high)) >= 100 else 1 if max(abs(low), abs(high)) >= 20 else 2
    return f"{middle:,.{digits}f} [{low:,.{digits}f}, {high:,.{digits}f}]"


def _mark(row: Row, ours: list[float], to_dask: float | None, to_ray: float | None) -> tuple[str, str]:
    """Return the text of the mark, and whether it is met. A mark without a measurement is not met."""
    sign = "≥" if row.more_is_better else "≤"
    words: list[str] = []
    met: list[bool] = []
    for name, mark, ratio in (("dask", row.dask_mark, to_dask), ("ray", row.ray_mark, to_ray)):
        if mark is not None:
            words.append(f"{sign} {mark:g} {name}")
            met.append(ratio is not None and (ratio >= mark if row.more_is_better else ratio <= mark))
    value = statistics.median(ours) * row.scale if ours else None
    if row.least is not None:
        words.append(f"≥ {row.least:,g} {row.unit}")
        met.append(value is not None and value >= row.least)
    if row.most is not None:
        words.append(f"≤ {row.most:,g} {row.unit}")
        met.append(value is not None and value <= row.most)
    return ", ".join(words), "" if not met else "met" if all(met) else "MISSED"
