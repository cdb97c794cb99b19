"""What a sweep does at one provider with the findings of `policy.decide`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from skyward_core.cleanup.ends import ends_of
from skyward_core.cleanup.policy import Action, Finding
from skyward_core.cleanup.pool_record import Clock, close_entries, end_entries
from skyward_core.cleanup.release import end_machines
from skyward_core.cleanup.survey import Failure, ProviderListing
from skyward_core.concurrency.threads import side_by_side
from skyward_core.errors import LedgerConflict, LedgerError
from skyward_core.ledger.rows import Intent, UnreadableRow

if TYPE_CHECKING:
    from skyward_core.ledger.ledger import Ledger


class ProviderWork:
    """The work of a sweep at one provider. `do` carries out the findings and changes them to what was done."""

    def __init__(
        self,
        ledger: Ledger | None,
        listing: ProviderListing,
        findings: list[Finding],
        clock: Clock,
        monotonic: Callable[[], float],
        pause: Callable[[float], None],
    ) -> None:
        self.findings = findings
        self.ended: list[Finding] = []
        self.closed: list[Finding] = []
        self.adopted: list[Finding] = []
        self.failures: list[Failure] = []
        self._ledger = ledger
        self._provider = listing.provider
        self._pools = listing.pools
        self._known = listing.pools | {pool_id: entry for pool_id, (entry, _) in listing.other_accounts.items()}
        self._intents = {intent.id: intent for intent in listing.intents}
        self._clock = clock
        self._monotonic = monotonic
        self._pause = pause

    def do(self) -> None:
        """Adopt machines, condemn pools, close entries and end machines, in this order."""
        self._adopt(self._of(Action.ADOPT))
        self._condemn(
            {finding.pool_id for finding in self._of(Action.END, Action.CLOSE, Action.WAIT)} & self._known.keys()
        )
        ends = self._of(Action.END)
        ending = {finding.pool_id for finding in ends}
        closing = [finding for finding in self._of(Action.CLOSE) if finding.pool_id not in ending]
        self._close(closing)
        side_by_side(self._end, ends, "skyward-sweep")
        over = self._end_entries({finding.pool_id for finding in (*closing, *self.ended)} & self._pools.keys())
        self.closed = [finding for finding in closing if finding.pool_id in over]

    def _of(self, *actions: Action) -> list[Finding]:
        return [finding for finding in self.findings if finding.action in actions]

    def _fail(self, pool_id: str, error: Exception) -> None:
        self.failures.append(Failure(self._provider.name, pool_id, error))

    def _adopt(self, findings: Sequence[Finding]) -> None:
        for finding in findings:
            assert self._ledger is not None
            try:
                self._ledger.bind_all(dict(zip(finding.intents, finding.resource_ids, strict=True)))
            except LedgerConflict:  # its owner has bound the entry meanwhile
                pass
            except LedgerError as error:
                self._fail(finding.pool_id, error)
            else:
                self.adopted.append(finding)

    def _condemn(self, pool_ids: Iterable[str]) -> None:
        """Condemn these pools.

        Those whose lease was renewed meanwhile, and those that the ledger could not condemn, are left.
        """
        seen = {
            pool_id: entry.written_lease
            for pool_id in pool_ids
            if (entry := self._known[pool_id]).ended_at is None and entry.condemned_at is None
        }
        if not seen:
            return
        assert self._ledger is not None
        try:
            spared = dict.fromkeys(
                seen.keys() - self._ledger.condemn_all(seen), "its lease was renewed during the sweep"
            )
        except LedgerError as error:
            spared = dict.fromkeys(seen, "the ledger could not be written to")
            self._fail("", error)
        self.findings = [
            replace(finding, action=Action.LEAVE, reason=spared[finding.pool_id])
            if finding.pool_id in spared and finding.action is not Action.LEAVE
            else finding
            for finding in self.findings
        ]

    def _close(self, findings: Sequence[Finding]) -> None:
        """Close entries of pools without machines, in a few transactions."""
        if not (intents := [self._intents[number] for finding in findings for number in finding.intents]):
            return
        assert self._ledger is not None
        try:
            intents = self._still_missing(intents)
        except Exception as error:  # without a listing there is no proof that the machines are gone
            self._fail("", error)
            return
        now = self._clock()
        ends = ends_of(self._provider, self._pools, intents, now)
        try:
            close_entries(
                self._ledger, intents, f"{self._provider.name} does not list it; a sweep has closed it", now, ends
            )
        except LedgerError as error:
            self._fail("", error)

    def _still_missing(self, intents: Sequence[Intent]) -> list[Intent]:
        """Terminate machines that have an id and list again; return the intents that the second listing lacks too.

        One listing may have been wrong.
        """
        if not (ids := sorted(str(intent.cloud_id) for intent in intents if intent.cloud_id is not None)):
            return list(intents)
        self._provider.terminate(ids)
        listed = {instance.id for instance in self._provider.instances()}
        return [intent for intent in intents if intent.cloud_id not in listed]

    def _end_entries(self, pool_ids: Iterable[str]) -> set[str]:
        """End those of these pools that have no open entries, and return their ids."""
        wanted = set(pool_ids)
        if not wanted:
            return set()
        assert self._ledger is not None
        try:
            damaged: list[UnreadableRow] = []
            over = sorted(
                wanted
                - {intent.pool_id for intent in self._ledger.open_intents(unreadable=damaged)}
                - {error.pool_id for error in damaged}
            )
            end_entries(self._ledger, [self._pools[pool_id] for pool_id in over])
        except LedgerError as error:
            self._fail("", error)
            return set()
        return set(over)

    def _end(self, finding: Finding) -> None:
        """End a pool's machines, including those whose entries are to be closed.

        Entries of another account's machines do not change.
        """
        ledger = self._ledger if finding.pool_id in self._pools else None
        try:
            end_machines(
                ledger,
                self._provider,
                finding.pool_id,
                finding.reason,
                may_still_launch=False,
                clock=self._clock,
                monotonic=self._monotonic,
                pause=self._pause,
            )
        except Exception as error:  # the other pools' machines must still be ended
            self._fail(finding.pool_id, error)
        else:
            self.ended.append(finding)
