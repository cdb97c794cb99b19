"""Lines, utilisation and stacks of a live pool, as JSON and as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TextIO

from skyward_core.cli.printing import duration, visible

if TYPE_CHECKING:
    from skyward_core.events.events import Metrics
    from skyward_core.live.logs import Line
    from skyward_core.live.metrics import NodeUse
    from skyward_core.live.stacks import WorkerStacks

BARS = "▁▂▃▄▅▆▇█"
ASCII_BARS = "12345678"
SPARKS = 20
OF_A_CALL = -1


def line(one: Line) -> dict[str, Any]:
    return {"node": None if one.node == OF_A_CALL else one.node, "text": one.text}


def words(one: Line) -> str:
    return one.text if one.node == OF_A_CALL else f"[node {one.node}] {one.text}"


def use(one: NodeUse) -> dict[str, Any]:
    return {
        "node": one.node,
        "instance": one.instance_id,
        "busy_slots": one.busy,
        "slots": one.slots,
        "samples": [_sample(sample) for sample in one.samples],
    }


def _sample(sample: Metrics) -> dict[str, Any]:
    fields = asdict(sample)
    del fields["instance_id"], fields["node"]
    return fields


def table_of_uses(uses: Sequence[NodeUse], *, is_unicode: bool) -> tuple[list[str], list[list[str]]]:
    heads = ["NODE", ">BUSY", ">CPU %", "CPU", ">MEMORY %", ">GPU %", "GPU", ">GPU MEMORY %", "INSTANCE"]
    return heads, [[str(one.node), *use_columns(one, is_unicode=is_unicode), one.instance_id] for one in uses]


def use_columns(one: NodeUse, *, is_unicode: bool) -> list[str]:
    """Return the columns from BUSY to GPU MEMORY %; empty texts for what is not known."""
    last = one.samples[-1] if one.samples else None
    gpus = [sample.gpu_utilization for sample in one.samples]
    return [
        f"{one.busy}/{one.slots}",
        "" if last is None else f"{last.cpu_percent:.0f}",
        sparks([sample.cpu_percent for sample in one.samples], is_unicode=is_unicode),
        "" if last is None else f"{last.memory_percent:.0f}",
        _percent(None if last is None else last.gpu_utilization),
        sparks(gpus, is_unicode=is_unicode) if any(value is not None for value in gpus) else "",
        "" if last is None else _percent(_share(last.gpu_memory_used_mb, last.gpu_memory_total_mb)),
    ]


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}"


def _share(part: float | None, whole: float | None) -> float | None:
    return 100 * part / whole if part is not None and whole else None


def sparks(percents: Sequence[float | None], *, is_unicode: bool) -> str:
    """Return one character for each of the last percentages; a space where there is none."""
    bars = BARS if is_unicode else ASCII_BARS
    return "".join(
        " " if value is None else bars[min(len(bars) - 1, max(0, int(value / 100 * len(bars))))]
        for value in percents[-SPARKS:]
    )


def is_unicode(stream: TextIO) -> bool:
    """Return whether a stream can show the bars."""
    try:
        BARS.encode(stream.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def stacks(found: Sequence[WorkerStacks]) -> list[dict[str, Any]]:
    return [
        {"worker": one.worker, "slot": number, "pid": slot.pid, "busy_seconds": slot.busy_seconds, "stacks": slot.text}
        for one in found
        for number, slot in enumerate(one.slots)
    ]


def text_of_stacks(found: Sequence[WorkerStacks]) -> str:
    """Return the stacks of all slots, the newest frame of each thread first."""
    parts = [
        f"worker {one.worker}, slot {number}, process {slot.pid}, {_state(slot.busy_seconds)}\n{_stacks(slot.text)}"
        for one in found
        for number, slot in enumerate(one.slots)
    ]
    return "\n\n".join(parts) or "the pool has no workers"


def _state(busy_seconds: float | None) -> str:
    return "idle" if busy_seconds is None else f"busy for {duration(busy_seconds)}"


def _stacks(text: str) -> str:
    return "\n".join(f"  {visible(one)}" for one in text.splitlines() if one) or "  no answer: it has just ended"
