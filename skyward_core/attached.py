"""A pool that somebody else has opened: used, kept alive and left, but neither replaced in part nor paid for from here."""

from __future__ import annotations

import importlib
import json
import logging
import pickle
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from skyward_core.certificates import PoolCertificate
from skyward_core.errors import CallCrashed, CommandFailed, LeaseLost, LedgerError, NodeLost, SkywardError
from skyward_core.events import CostFinal, SkywardEvent
from skyward_core.instances import Lease
from skyward_core.reach import Reaches
from skyward_core.worker.settings import write_atomically
from skyward_core.worker.wire import Ending, Outcome, Output, Report

if TYPE_CHECKING:
    from skyward_core.cluster import Cluster
    from skyward_core.ledger import Ledger

_log = logging.getLogger("skyward")
KEY_BEGINS = "-----BEGIN "
POLL_SECONDS = 0.2
GUARD_SECONDS = 2.0  # a node that was opened has had its guard for long
FIRST_POLL_SECONDS = 0.01
RESUME_SECONDS = 2.0
ENDED = frozenset({"ended", "cancelled", "lost"})


class Attached:
    """One attachment to an open pool; the counterpart of what the opener has. `start` and `stop` belong to the pool object."""

    final: CostFinal | None = None
    receipt: Mapping[str, Any] | None = None
    why_ended: SkywardError | None = None

    def __init__(
        self, lease: Lease, key: str | None, lease_seconds: float, retries: int, emit: Callable[[SkywardEvent], object], close_display: Callable[[], None]
    ) -> None:
        self.lease = lease
        self._key = key
        self._key_folder: tempfile.TemporaryDirectory[str] | None = None
        self.cluster: Cluster | None = None
        self.is_running = False
        self.emit = emit
        self._lease_seconds = lease_seconds
        self._retries = retries
        self._close_display = close_display
        self._reaches = Reaches(lease_seconds, emit)
        self._stopping = threading.Lock()
        self._ended = threading.Event()
        self._ledger: Ledger | None = None
        """The ledger that knows the pool, if this process has it."""

    def start(self, timeout_seconds: float) -> None:
        """Reach all nodes and connect. Raises Unreachable, CredentialsError, HostKeyChanged or NodeLost; then nothing is left open."""
        deadline = time.monotonic() + timeout_seconds
        try:
            if self._key is not None:
                self.lease = self.lease.with_key(self._key_path(self._key))
            settings = self._reach_all(deadline)
            head = self._reaches.to(self.lease.nodes[0].instance)
            certificate = PoolCertificate(settings["tls_certificate"], settings["tls_key"])
            module = importlib.import_module("skyward_core.cluster")
            self.cluster = cluster = cast("Cluster", module.Cluster(self.lease, certificate, self._reaches, self.emit, self._retries))
            cluster.start(head.address(self.lease.scheduler), deadline, lambda: None)
            cluster.watch(self)
            self.is_running = True
        except BaseException as error:
            self._leave("the pool could not be attached to")
            if isinstance(error, NodeLost):
                raise NodeLost(f"pool {self.lease.pool_id} is not there any more, or has another head than its lease tells of: {error}") from error
            raise
        self._ledger = _ledger_of(self.lease.pool_id)
        threading.Thread(target=self._keep, name="skyward-clock", daemon=True).start()

    def _key_path(self, key: str) -> str:
        """Return the path of a key that is given by its path or its text."""
        if KEY_BEGINS not in key:
            return key
        self._key_folder = tempfile.TemporaryDirectory(prefix="skyward-key-")  # of mode 0700
        path = Path(self._key_folder.name) / "key"
        write_atomically(path, key.strip() + "\n")
        return str(path)

    def _reach_all(self, deadline: float) -> Mapping[str, Any]:
        """Reach all nodes; return what the head was told by its opener. Raises NodeLost if a node has ended, which its machine may outlive."""
        if not self.lease.nodes:
            raise NodeLost("its lease names no node")
        try:
            for node in self.lease.nodes:
                self._reaches.to(node.instance).join(timeout_seconds=max(1.0, deadline - time.monotonic()), guard_seconds=GUARD_SECONDS)
            return json.loads(self._reaches.to(self.lease.nodes[0].instance).read("settings.json"))
        except (CommandFailed, OSError) as error:
            raise NodeLost("a node has ended, for the pool was closed or its lease has run out") from error

    def stop(self, reason: str) -> None:
        """Leave; the pool lives on until its lease runs out."""
        with self._stopping:
            if not self.is_running:
                return
            self.is_running = False
        self._leave(reason)

    def release(self) -> None:
        """Nothing to give back: the machines are their opener's."""

    def _leave(self, reason: str) -> None:
        self._ended.set()
        try:
            if self.cluster is not None:
                self.cluster.leave(reason)
        finally:
            self._reaches.close()
            if self._ledger is not None:
                self._ledger.close()
            if self._key_folder is not None:
                self._key_folder.cleanup()
            self._close_display()

    def _keep(self) -> None:
        """Signs of life for nodes of this machine (over SSH each way sees to its own), and for the pool's entry in the ledger."""
        while not self._ended.wait(min(5.0, self._lease_seconds / 6)):
            self._renew()
            self._reaches.is_busy = self.cluster is not None and self.cluster.has_work()
            for reach in self._reaches.here():
                try:
                    reach.extend_lease(self._lease_seconds)
                except OSError:
                    continue  # it has ended, which the cluster tells

    def _renew(self) -> None:
        if self._ledger is None:
            return
        try:
            self._ledger.renew(self.lease.pool_id, datetime.now(UTC) + timedelta(seconds=self._lease_seconds))
        except LeaseLost as error:
            _log.error("%s", error)
            self._ledger = None
        except LedgerError as error:
            _log.debug("the pool's lease could not be renewed in the ledger: %s", error)  # the next beat tries again

    # ── what the cluster tells ───────────────────────────────────────────────────────────────────────────────────────

    def joined(self, rank: int) -> None:
        """Nodes come and go by their opener's doing."""

    def left(self, rank: int) -> None:
        """Likewise."""

    def cut(self) -> None:
        """The scheduler is out of reach: try to reach it again as long as the lease may live."""
        threading.Thread(target=self._resume, name="skyward-resume", daemon=True).start()

    def _resume(self) -> None:
        assert self.cluster is not None
        head = self._reaches.to(self.lease.nodes[0].instance)
        since = time.monotonic()
        error: Exception | None = None
        while not self._ended.wait(POLL_SECONDS) and time.monotonic() - since < self._lease_seconds:
            if head.is_connected:
                try:
                    self.cluster.resume(head.address(self.lease.scheduler), RESUME_SECONDS)
                    return
                except (SkywardError, OSError) as failure:
                    error = failure
        lost = NodeLost("the head of the pool is gone: its opener may have brought the cluster up anew, attach with the pool's present lease")
        lost.__cause__ = error
        self.cluster.give_up(lost)


class DetachedCall[R]:
    """A call that runs whether or not anybody waits for it. Made by `ComputePool.start_detached` and `detached_call`; safe to use from several processes."""

    def __init__(self, call_id: str, cluster: Callable[[], Cluster]) -> None:
        self.call_id = call_id
        self._cluster = cluster
        self._lock = threading.Lock()
        self._number = 0
        self._lines: list[str] = []
        self._outcome: Outcome | None = None

    def __repr__(self) -> str:
        return f"<DetachedCall {self.call_id}>"

    @property
    def state(self) -> str:
        """One of "waiting", "running", "ended" (with a result or an exception), "cancelled" and "lost" (with its node)."""
        return str(self._look()["state"])

    def log(self, offset: int = 0) -> list[str]:
        """Return the lines that the call has written so far, from line number `offset` on. Those of an attempt that was lost stay."""
        self._look()
        return self._lines[offset:]

    def result(self, timeout: float | None = None) -> R:
        """Wait for the call to end; return its result or raise its exception. May be asked again, and by others.

        Raises TimeoutError, NodeLost (its node was lost under it, or took the result along) and CallCrashed.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        pause = FIRST_POLL_SECONDS
        while (known := self._look())["state"] not in ENDED or (known["state"] == "ended" and self._outcome is None):
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"call {self.call_id} is {known['state']} after {timeout} s")
            time.sleep(pause)
            pause = min(pause * 2, POLL_SECONDS)
        if known["state"] == "lost":
            raise NodeLost(f"call {self.call_id} was lost with its node: {known['reason']}")
        if self._outcome is None:
            raise CallCrashed(f"call {self.call_id} was cancelled before it began")
        return cast(R, self._cluster().detached_value(self._outcome))

    def cancel(self) -> None:
        """Stop the call, or do not begin it. One that has ended stays as it is."""
        self._cluster().cancel_detached(self.call_id)

    def forget(self) -> None:
        """Drop all there is of the call, its result too. One that runs is not stopped by it: `cancel` it first."""
        self._look()
        self._cluster().forget_detached(self.call_id, self._outcome)

    def _look(self) -> Any:
        """Ask what is new, and take it in."""
        with self._lock:
            known = self._cluster().detached_call(self.call_id, self._number)
            if known["missed"]:
                self._lines.append(f"[{known['missed']} messages were dropped: there were too many]")
            for message in known["messages"]:
                report: Report = pickle.loads(message)
                for item in report.news:
                    if isinstance(item, Output):
                        self._lines.extend(item.lines)
                    elif item.ending is not Ending.RETURNED:
                        self._outcome = item
            self._number = known["number"] + len(known["messages"])
            return known


def _ledger_of(pool_id: str) -> Ledger | None:
    """Return this process's ledger if the pool is in it: whoever uses a pool keeps a sweep from taking it for dead."""
    module = importlib.import_module("skyward_core.ledger")
    try:
        ledger = cast("Ledger", module.Ledger(module.default_url()))
    except LedgerError as error:
        _log.warning("pool %s is not kept alive in the ledger, and a sweep may take it for dead: %s", pool_id, error)
        return None
    try:
        is_known = ledger.pool(pool_id) is not None
    except LedgerError:
        is_known = False
    if not is_known:
        ledger.close()
        return None
    return ledger
