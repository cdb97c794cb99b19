"""Calls of a pool that outlive the process that starts them: `start_detached`, `detached_call`, `detached_calls`."""

from __future__ import annotations

import math
import re
from typing import Any

from skyward_core.compute import PendingCompute
from skyward_core.engine.packing import WantedCall
from skyward_core.errors import BadRequest
from skyward_core.pool.calls import checked
from skyward_core.pool.current_session import CurrentSession
from skyward_core.pool.preparation import Prepared
from skyward_core.session.detached_call import DetachedCall
from skyward_core.spec import LONGEST_SECONDS
from skyward_core.work import WORK_CHARACTERS

CALL_ID = re.compile(r"[A-Za-z0-9._:/-]{1,128}")


class DetachedCalls:
    """The part of `ComputePool` for calls that outlive their client."""

    _session: CurrentSession
    _prepared: Prepared

    def start_detached[R](
        self,
        pending: PendingCompute[R],
        *,
        call_id: str | None = None,
        owner: str = "",
        result_ttl: float | None = None,
    ) -> DetachedCall[R]:
        """Submit a call that goes on when this process dies; return an object that represents it.

        Any attached process finds the call by its `call_id`. The call and its result live as long as the pool. The pool
        lives until it is closed, or the lease of its nodes runs out (`lease_seconds` after the last sign of life from a
        client). Arguments are sent in one message; the call should read large values itself.

        `call_id`, 1 to 128 letters, digits and `._:/-`, makes the start idempotent. If the pool has had a call of this
        id, from any process, that call is returned and nothing begins. This is so even if it has ended or was
        forgotten, and for another function or other arguments. `name` is the function of the existing call, and
        `is_new` says whether this start began it. If the head is lost with its records, the id is unknown.
        `result_ttl`: how many seconds after its end the call is forgotten; None: never. `owner` says in the ledger whom
        the call is for, such as "dag/run/task"; by default it is the pool's `work`, which bears the cost of the call:
        the price of the slots that it holds. Raises BadRequest for other values.
        """
        if call_id is not None and not (isinstance(call_id, str) and CALL_ID.fullmatch(call_id)):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise BadRequest(f"call_id={call_id!r}: write 1 to 128 letters, digits and characters of ._:/-")
        if result_ttl is not None and not (math.isfinite(result_ttl) and 0 <= result_ttl <= LONGEST_SECONDS):
            raise BadRequest(
                f"result_ttl={result_ttl!r}: write for how many seconds after the end of the call its result is kept,"
                f" from 0 to {LONGEST_SECONDS:.0f}"
            )
        if not (len(owner) <= WORK_CHARACTERS and owner.isprintable()):
            raise BadRequest(f"owner={owner!r}: write a printable text of at most {WORK_CHARACTERS} characters")
        cluster, calls = self._session.cluster, self._session.calls
        work = self._prepared.work
        call, wanted = checked(pending), WantedCall.of(call_id, owner, result_ttl, work)
        self._session.live_by_lease()
        calls.starts(wanted.call_id, getattr(call.fn, "__name__", ""), owner, work)
        known = cluster.detached.start(call, self._prepared.replace_object, wanted)
        calls.note(known)
        return self._represented(wanted.call_id, is_new=bool(known["is_new"]))

    def detached_call(self, call_id: str) -> DetachedCall[Any]:
        """Return the call of this id that was started detached, here or elsewhere.

        Raises BadRequest if the pool knows none.
        """
        self._session.cluster.detached.record(call_id)
        return self._represented(call_id)

    def detached_calls(self) -> list[DetachedCall[Any]]:
        """Return all calls that were started detached and not forgotten, in the order in which they came."""
        return [self._represented(str(known["call_id"])) for known in self._session.cluster.detached.all()]

    def _represented(self, call_id: str, *, is_new: bool = False) -> DetachedCall[Any]:
        return DetachedCall(
            call_id, lambda: self._session.cluster, lambda record: self._session.calls.note(record), is_new=is_new
        )
