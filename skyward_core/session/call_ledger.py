"""The states of detached calls that this process sees, written into the ledger.

The ledger never stops a call or a result. If it cannot be written, that is logged once, and the next look at a call
tries again, at the earliest after PAUSE_SECONDS. An attached client whose ledger does not know the pool writes nothing.
"""

from __future__ import annotations

import importlib
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, cast

from skyward_core.errors import LedgerConflict, LedgerError
from skyward_core.ledger.rows import CallState, SlotUse
from skyward_core.work import Work
from skyward_core.worker.wire import OutcomeKind

if TYPE_CHECKING:
    from skyward_core.engine.cluster import Cluster
    from skyward_core.ledger.ledger import Ledger

BUSY_SECONDS = 2.0
PAUSE_SECONDS = 5.0
ASK_SECONDS = 2.0


class CallLedger:
    """Writes the states of one pool's detached calls. Any thread may use it; `slots_at` is `Cluster.slots_at`."""

    def __init__(self, pool_id: str, slots_at: Callable[[int], int], log: Callable[..., object]) -> None:
        self._pool_id = pool_id
        self._slots_at = slots_at
        self._log = log
        """Takes a level, a message and its arguments."""
        self._lock = threading.Lock()
        self._ledger: Ledger | None = None
        self._written: dict[str, tuple[int, str]] = {}
        """By call: the last attempt and state that was written."""
        self._is_unknown = False
        self._has_warned = False
        self._again_at = 0.0

    def starts(self, call_id: str, name: str, owner: str, work: Work) -> None:
        """Write that a call is about to be handed over, for this work. Raises nothing."""
        self._write([CallState(call_id, name, owner, 0, "waiting", datetime.now(UTC), work=work)])

    def note(self, *records: Mapping[str, Any]) -> None:
        """Write the states of records of the scheduler that are new. Raises nothing."""
        states = [state_of(record, self._slots_at, time.time()) for record in records]
        self._write([one for one in states if self._written.get(one.call_id) != (one.generation, one.state)])

    def close(self) -> None:
        """Close the connection to the ledger; a later write opens another."""
        with self._lock:
            if self._ledger is not None:
                self._ledger.close()
                self._ledger = None

    def _write(self, states: Sequence[CallState]) -> None:
        if not states or self._is_unknown:
            return
        with self._lock:
            if time.monotonic() < self._again_at:
                return
            try:
                self._opened().note_calls(self._pool_id, states)
            except LedgerConflict:  # the ledger of another machine: it does not know the pool
                self._is_unknown = True
            except LedgerError as error:
                self._again_at = time.monotonic() + PAUSE_SECONDS
                self._log(
                    logging.DEBUG if self._has_warned else logging.WARNING,
                    "detached calls of pool %s are not in the ledger just now; they go on, and the next look at one"
                    " writes it again: %s",
                    self._pool_id,
                    error,
                )
                self._has_warned = True
            else:
                self._written.update({one.call_id: (one.generation, one.state) for one in states})

    def _opened(self) -> Ledger:
        if self._ledger is None:
            module = importlib.import_module("skyward_core.ledger.ledger")
            self._ledger = cast("Ledger", module.Ledger(module.default_url(), busy_timeout_seconds=BUSY_SECONDS))
        return self._ledger


def note_all(cluster: Cluster, pool_id: str, log: Callable[..., object]) -> None:
    """Write what the scheduler knows of all detached calls, before its machine ends. Raises nothing: an error here must
    not stop the end of the pool.
    """
    if cluster.owner.connection is None:
        return
    calls = CallLedger(pool_id, cluster.slots_at, log)
    try:
        calls.note(*cluster.detached.known(ASK_SECONDS))
    except Exception as error:
        log(logging.DEBUG, "the last states of the detached calls of pool %s are not known: %s", pool_id, error)
    finally:
        calls.close()


def state_of(record: Mapping[str, Any], slots_at: Callable[[int], int], now: float) -> CallState:
    """Return what a record of the scheduler says for the ledger. Times are seconds since 1970.

    A call had its slot for as long as its outcome says; an attempt that was lost, or that runs, for as long as a node
    had the call.
    """
    used = list[SlotUse]()
    for number, (worker, instance_id, began_at, ended_at, _) in enumerate(record["attempts"], 1):
        is_last = number == len(record["attempts"])
        seconds = (now if ended_at is None else ended_at) - began_at
        if is_last and record["seconds"] is not None:
            seconds = record["seconds"]
        if is_last and record["state"] == "waiting":
            seconds = 0.0 if ended_at is None else seconds
        used.append(SlotUse(instance_id, slots_at(int(worker.partition("-")[0])), max(0.0, seconds)))
    return CallState(
        record["call_id"],
        record["name"],
        record["owner"],
        len(record["attempts"]),
        _state(record),
        datetime.fromtimestamp(record["submitted_at"], UTC),
        None if record["ended_at"] is None else datetime.fromtimestamp(record["ended_at"], UTC),
        tuple(used),
        Work.of(record["work"]),
    )


def _state(record: Mapping[str, Any]) -> str:
    """Return the state; of calls that have ended, "failed" and "cancelled" ones are separate."""
    state, outcome = str(record["state"]), record["outcome"]
    if state != "ended" or outcome in ("", OutcomeKind.RESULT):
        return state
    return "cancelled" if outcome == OutcomeKind.CANCELLED else "failed"
