"""The sweep: find the pools whose owners are dead, and end their machines. Third safeguard (decision 0008).

`survey.py` asks the ledger and the providers, `policy.py` decides, `provider_work.py` carries it out at one provider,
with `release.py` for each pool. Each of them may run in several processes at once, be killed at any line, and be called
again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from skyward_core.cleanup.policy import Action, Finding, ProviderFacts, decide, needing_second_look
from skyward_core.cleanup.pool_record import Clock, utc_now
from skyward_core.cleanup.provider_work import ProviderWork
from skyward_core.cleanup.survey import Failure, ProviderListing, SurveyView, owner_states, take_survey
from skyward_core.concurrency.threads import side_by_side
from skyward_core.machines.owner import Owner
from skyward_core.providers.base import Provider

if TYPE_CHECKING:
    from skyward_core.ledger.ledger import Ledger

MIN_AGE_SECONDS = 600.0
RENEWAL_SECONDS = 10.0
"""In this time an owner that lives renews its lease, and one time may fail (`session.clock.MOST_BEAT_SECONDS`)."""


@dataclass(frozen=True, slots=True)
class SweepReport:
    """The findings of a sweep, and what it has done about them: nothing if it was a dry run."""

    findings: tuple[Finding, ...] = ()
    ended: tuple[Finding, ...] = ()
    """The findings of END that were carried out: their machines are known to be gone."""
    failures: tuple[Failure, ...] = ()
    closed: tuple[Finding, ...] = ()
    """The findings of CLOSE that were carried out: the entries and the pool's own entry are closed."""
    adopted: tuple[Finding, ...] = ()
    """The findings of ADOPT that were carried out: the machines are in the ledger now."""
    pruned: tuple[str, ...] = ()
    """Descriptions of unused things that outlive pools and that the providers have removed, or would remove if this was
    no dry run (`Provider.prune`).
    """

    @property
    def to_do(self) -> tuple[Finding, ...]:
        """The findings that need an action, even if that is only to condemn a dead pool and look again."""
        return tuple(finding for finding in self.findings if finding.action is not Action.LEAVE)


def sweep(
    ledger: Ledger | None,
    providers: Sequence[Provider] = (),
    *,
    is_dry_run: bool = True,
    min_age_seconds: float = MIN_AGE_SECONDS,
    include_unknown: bool = False,
    clock: Clock = utc_now,
    monotonic: Callable[[], float] = time.monotonic,
    pause: Callable[[float], None] = time.sleep,
) -> SweepReport:
    """Find machines whose owner is dead, at these providers and at those of the ledger's open pools, and end them.

    Args:
        ledger: None decides by tags alone.
        providers: queried in addition to those that the ledger names.
        is_dry_run: only report.
        min_age_seconds: machines that the ledger does not know are left until they are older than that.
        include_unknown: also end such machines if it is unknown whether their owner lives. They may belong to another
            user.
        clock: returns the time of day.
        monotonic: counts seconds, for deadlines.
        pause: waits for so many seconds.

    Failures are in the report and stop nothing else. Nothing is done at a provider that cannot list its machines.
    Raises LedgerError if the ledger cannot be read.
    """
    view = take_survey(ledger, providers)

    def settle(listing: ProviderListing) -> ProviderWork:
        facts = _facts(listing, clock())
        findings = decide(facts, min_age_seconds=min_age_seconds, include_unknown=include_unknown)
        work = ProviderWork(ledger, listing, findings, clock, monotonic, pause)
        if not is_dry_run:
            if needing_second_look(facts):  # `condemn_all` refuses those whose leases are renewed meanwhile
                pause(RENEWAL_SECONDS)
            work.do()
        return work

    done = side_by_side(settle, view.listings, "skyward-sweep")
    # last: machines cost more
    pruned = side_by_side(
        lambda listing: _pruned(listing.provider, clock(), is_dry_run=is_dry_run), view.listings, "skyward-sweep"
    )
    return _report(view, done, pruned)


def _facts(listing: ProviderListing, now: datetime) -> ProviderFacts:
    return ProviderFacts(
        listing.provider,
        listing.machines,
        listing.pools,
        listing.intents,
        now,
        Owner.here(),
        owner_states(listing),
        listing.other_accounts,
    )


def _pruned(provider: Provider, now: datetime, *, is_dry_run: bool) -> list[str] | Failure:
    try:
        return [f"{provider.name}: {line}" for line in provider.prune(now, is_dry_run=is_dry_run)]
    except Exception as error:  # an error of any kind must not fail the sweep, which is done
        return Failure(provider.name, "", error)


def _report(view: SurveyView, done: Sequence[ProviderWork], pruned: Sequence[list[str] | Failure]) -> SweepReport:
    return SweepReport(
        (*(finding for work in done for finding in work.findings), *view.left),
        tuple(finding for work in done for finding in work.ended),
        (
            *view.failures,
            *(failure for work in done for failure in work.failures),
            *(one for one in pruned if isinstance(one, Failure)),
        ),
        closed=tuple(finding for work in done for finding in work.closed),
        adopted=tuple(finding for work in done for finding in work.adopted),
        # several listings may be of one account
        pruned=tuple(dict.fromkeys(line for lines in pruned if not isinstance(lines, Failure) for line in lines)),
    )
