"""What several providers sell now, ranked, and how old that is: for `sky.offers` and `skyward offers`.

A provider is asked for all that it sells and the answer is kept in a file of this user's cache for some minutes: one that asks for H100s after one that has
asked for CPUs asks nobody. Pools do not look here: they ask.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from pydantic import BaseModel, ValidationError

from skyward_core.errors import NoCapacity, Refusal
from skyward_core.market import Offer, Requirements, matches, why_none
from skyward_core.providers.base import Provider
from skyward_core.provisioning.placing import Sold, ask, refusal

MAX_AGE_SECONDS = 300.0


class Page(BaseModel):
    """All that a provider sold at a time."""

    asked_at: datetime
    offers: tuple[Offer, ...]


@dataclass(frozen=True, slots=True)
class PriceList:
    """Offers that fit, cheapest first, then the smallest; `refusals` are the providers that have none or could not be asked, with the reasons.

    `asked_at` is when the oldest of the answers was given, None if there is none. Iterating gives the offers.
    """

    offers: tuple[Offer, ...]
    refusals: tuple[Refusal, ...] = ()
    asked_at: datetime | None = None

    def __iter__(self) -> Iterator[Offer]:
        return iter(self.offers)

    def __len__(self) -> int:
        return len(self.offers)

    def __getitem__(self, index: int) -> Offer:
        return self.offers[index]

    def age_seconds(self, now: datetime | None = None) -> float:
        """Return how old the oldest answer is; 0.0 if there is none."""
        return 0.0 if self.asked_at is None else max(0.0, ((now or datetime.now(UTC)) - self.asked_at).total_seconds())


def price_list(
    providers: Sequence[Provider],
    want: Requirements,
    folder: Path,
    *,
    max_age_seconds: float = MAX_AGE_SECONDS,
    clock: Callable[[], datetime] = lambda: datetime.now(UTC),
) -> PriceList:
    """Ask those providers whose answer in `folder` is missing or too old, all at once; return what fits. Lets an error through that no waiting would mend."""
    pages = [_young(_kept(folder, provider), clock(), max_age_seconds) for provider in providers]
    missing = [index for index, page in enumerate(pages) if page is None]
    answers = dict(zip(missing, ask([providers[index] for index in missing], Requirements()), strict=True)) if missing else {}
    for index, answer in answers.items():
        if answer.error is None:
            pages[index] = page = Page(asked_at=clock(), offers=answer.offers)
            _keep(folder, providers[index], page)
    told = [page for page in pages if page is not None]
    found = [offer for page in told for offer in page.offers if matches(offer, want) is None]
    reasons = [_why_none(provider, want, page, answers.get(index)) for index, (provider, page) in enumerate(zip(providers, pages, strict=True))]
    return PriceList(
        tuple(sorted(found, key=lambda offer: (offer.price_per_hour, offer.vcpus, offer.memory_gb))),
        tuple(reason for reason in reasons if reason is not None),
        min((page.asked_at for page in told), default=None),
    )


def _young(page: Page | None, now: datetime, max_age_seconds: float) -> Page | None:
    return page if page is not None and (now - page.asked_at).total_seconds() <= max_age_seconds else None


def _why_none(provider: Provider, want: Requirements, page: Page | None, answer: Sold | None) -> Refusal | None:
    """Why a provider is not in the list; None if it is."""
    seconds = 0.0 if answer is None else answer.seconds
    if answer is not None and answer.error is not None:
        return refusal(provider, None, answer.error, seconds)
    offers = () if page is None else page.offers
    if any(matches(offer, want) is None for offer in offers):
        return None
    return refusal(provider, None, NoCapacity(why_none(offers, want)), seconds)


# ── what is kept ─────────────────────────────────────────────────────────────────────────────────────────────────────


def _path(folder: Path, provider: Provider) -> Path:
    settings = json.dumps(provider.to_json(), sort_keys=True)
    return folder / f"{provider.name}-{hashlib.sha256(settings.encode()).hexdigest()[:16]}.json"


def _kept(folder: Path, provider: Provider) -> Page | None:
    """Read an answer; one that cannot be read, another release's for instance, is none."""
    try:
        return Page.model_validate_json(_path(folder, provider).read_bytes())
    except (OSError, ValidationError):
        return None


def _keep(folder: Path, provider: Provider, page: Page) -> None:
    """Write an answer, whole or not at all. A cache that cannot be written to is no reason to fail."""
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor, part = tempfile.mkstemp(dir=folder)
        try:
            with os.fdopen(descriptor, "w") as file:
                file.write(page.model_dump_json())
            os.replace(part, _path(folder, provider))
        except BaseException:
            Path(part).unlink(missing_ok=True)
            raise
