"""What several providers sell now, ranked, and how old that is: for `sky.offers` and `skyward offers`.

A provider is asked for all that it sells and the answer is kept in a file of this user's cache for some minutes: one
that asks for H100s after one that has asked for CPUs asks nobody. Of a market, which tells only what is near a wish,
each wish has an answer of its own. Pools do not look here: they ask.
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

from skyward_core.concurrency.threads import side_by_side
from skyward_core.errors import BadRequest, NoCapacity, Refusal
from skyward_core.machines.offers import Offer, Requirements, matches, why_none
from skyward_core.providers.base import Provider
from skyward_core.provisioning.candidates import Sold, ask, not_asked, refusal

MAX_AGE_SECONDS = 300.0


class Page(BaseModel):
    """All that a provider sold at a time, or all that was near a wish."""

    asked_at: datetime
    offers: tuple[Offer, ...]


@dataclass(frozen=True, slots=True)
class PriceList:
    """Offers that fit, cheapest first, then the smallest; `refusals` are the providers that have none or could not be
    asked, with the reasons.

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
    """Ask those providers whose answer in `folder` is missing or too old, all at once; return what fits.

    Raises BadRequest if that is what all of them say; said by some it hides no other.
    """
    wishes = [want if type(provider).sells_by_wish else Requirements() for provider in providers]
    places = [_path(folder, provider, wish) for provider, wish in zip(providers, wishes, strict=True)]
    pages = [_young(_kept(place), clock(), max_age_seconds) for place in places]
    missing = [index for index, page in enumerate(pages) if page is None]
    answers = dict(
        zip(
            missing,
            side_by_side(
                lambda index: ask([providers[index]], wishes[index])[0], missing, "skyward-prices", len(missing)
            ),
            strict=True,
        )
    )
    wrong = [answer.error for answer in answers.values() if isinstance(answer.error, BadRequest)]
    if wrong and len(wrong) == len(providers):
        raise wrong[0]
    for index, answer in answers.items():
        if answer.error is None:
            pages[index] = page = Page(asked_at=clock(), offers=answer.offers)
            if not answer.unasked:  # the next one asks for the rest
                _keep(places[index], page)
    told = [page for page in pages if page is not None]
    found = [offer for page in told for offer in page.offers if matches(offer, want) is None]
    reasons = [
        _why_none(provider, want, page, answers.get(index))
        for index, (provider, page) in enumerate(zip(providers, pages, strict=True))
    ]
    return PriceList(
        tuple(sorted(found, key=lambda offer: (offer.total_per_hour, offer.vcpus, offer.memory_gb))),
        tuple(reason for reasons_of_one in reasons for reason in reasons_of_one),
        min((page.asked_at for page in told), default=None),
    )


def _young(page: Page | None, now: datetime, max_age_seconds: float) -> Page | None:
    return page if page is not None and (now - page.asked_at).total_seconds() <= max_age_seconds else None


def _why_none(provider: Provider, want: Requirements, page: Page | None, answer: Sold | None) -> list[Refusal]:
    """Why a provider, or a region of it, is not in the list."""
    reasons = [] if answer is None else not_asked(answer)
    offers = () if page is None else page.offers
    if (answer is not None and answer.error is not None) or any(matches(offer, want) is None for offer in offers):
        return reasons
    return [
        *reasons,
        refusal(provider, None, NoCapacity(why_none(offers, want)), 0.0 if answer is None else answer.seconds),
    ]


# ── what is kept ─────────────────────────────────────────────────────────────────────────────────────────────────────


def _path(folder: Path, provider: Provider, wish: Requirements) -> Path:
    asked = {} if wish == Requirements() else {"wish": wish.model_dump(mode="json", exclude_defaults=True)}
    settings = json.dumps({**provider.to_json(), **asked}, sort_keys=True)
    return folder / f"{provider.name}-{hashlib.sha256(settings.encode()).hexdigest()[:16]}.json"


def _kept(place: Path) -> Page | None:
    """Read an answer; one that cannot be read, another release's for instance, is none."""
    try:
        return Page.model_validate_json(place.read_bytes())
    except (OSError, ValidationError):
        return None


def _keep(place: Path, page: Page) -> None:
    """Write an answer, whole or not at all. A cache that cannot be written to is no reason to fail."""
    with contextlib.suppress(OSError):
        place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor, part = tempfile.mkstemp(dir=place.parent)
        try:
            with os.fdopen(descriptor, "w") as file:
                file.write(page.model_dump_json())
            os.replace(part, place)
        except BaseException:
            Path(part).unlink(missing_ok=True)
            raise
