"""When and why a node has ended: what its keeper or its guard writes into a file that stays after the node.

    UPTIME EPOCH BOOT     of the machine: seconds since its boot, seconds since 1970, id of the boot
    REASON                one line

The uptime counts while the machine runs: its time of day may be set. After a reboot only the time of day is left.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta


@dataclass(frozen=True, slots=True)
class NodeEnd:
    """The end of a node. `reason` is what the node itself has written."""

    at: datetime
    reason: str

    def __str__(self) -> str:
        """Return it as evidence in words."""
        return f"it has written that it ended at {self.at:%Y-%m-%d %H:%M:%S} UTC: {self.reason}"


def node_end(text: str, *, now: datetime, uptime: float, boot: str) -> NodeEnd | None:
    """Return the end in the text of a file; None if it cannot be read. The other values are of its machine, now."""
    head, _, rest = text.partition("\n")
    words = head.split()
    reason = rest.partition("\n")[0].strip() or "it gave no reason"
    try:
        then, epoch = float(words[0]), float(words[1])
        of_boot = words[2] if len(words) > 2 else ""
        at = (
            now - timedelta(seconds=max(0.0, uptime - then))
            if boot and of_boot == boot
            else datetime.fromtimestamp(epoch, UTC)
        )
    except (IndexError, ValueError, OverflowError, OSError):
        return None
    return NodeEnd(min(at, now), reason)
