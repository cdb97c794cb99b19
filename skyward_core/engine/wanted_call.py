"""What a starter wants of a detached call. Needs no Dask."""

from __future__ import annotations

import uuid
from dataclasses import dataclass

from skyward_core.work import NO_WORK, Work


@dataclass(frozen=True, slots=True)
class WantedCall:
    """What a starter wants of a detached call. `call_id` is the `run_id` if it has chosen none."""

    run_id: str
    call_id: str
    owner: str = ""
    result_ttl: float | None = None
    work: Work = NO_WORK
    """That starts it."""

    @staticmethod
    def of(call_id: str | None, owner: str, result_ttl: float | None, work: Work) -> WantedCall:
        """Return it with a new run id."""
        run_id = uuid.uuid4().hex
        return WantedCall(run_id, run_id if call_id is None else call_id, owner, result_ttl, work)
