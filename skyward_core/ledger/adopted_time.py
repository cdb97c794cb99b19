"""The time of machines that an earlier process has counted, from their ledger entries. Pure."""

from __future__ import annotations

from datetime import datetime

from skyward_core.ledger.metering import MeteredInstance
from skyward_core.ledger.rows import SECONDS_PER_HOUR, Bucket, Intent


def metered_of(intent: Intent, now: datetime, at: float, slots: int) -> MeteredInstance:
    """Return the time of a machine as it would be if this process had counted it from its request on.

    Args:
        intent: the entry, with the seconds that were recorded.
        now: the time of day.
        at: the same time on the meter's clock.
        slots: how many calls run at once on the machine.

    The time after the last record belongs to the phase that was recorded last. A machine that is gone has its recorded
    time only. The time is never shorter than the recorded one, which the ledger would refuse.
    """
    spent = {bucket: round(intent.seconds.get(bucket, 0.0) * 1000) for bucket in Bucket}
    recorded = sum(spent.values())
    lived = recorded
    if intent.gone_at is None:
        lived = max(recorded, round((now - intent.intended_at).total_seconds() * 1000))
    busy = spent[Bucket.RUNNING_CALLS]
    marks = [(Bucket.LAUNCHING, 0)]
    reached = spent[Bucket.LAUNCHING]
    for phase, length in (
        (Bucket.BOOTSTRAPPING, spent[Bucket.BOOTSTRAPPING]),
        (Bucket.IDLE, spent[Bucket.IDLE] + spent[Bucket.WARM] + busy),  # the ledger takes warm time out again
        (Bucket.LOST, spent[Bucket.LOST]),
        (Bucket.TERMINATING, spent[Bucket.TERMINATING]),
    ):
        if length:
            marks.append((phase, reached))
            reached += length
    return MeteredInstance(
        intent.cloud_id or "",
        intent.price,
        float(intent.price.per_hour) / SECONDS_PER_HOUR / max(1, slots),
        at - lived / 1000,
        None if intent.gone_at is None else at,
        max(1, slots),
        busy * max(1, slots) / 1000,
        marks=marks,
    )
