"""The present offers of several providers, ranked, with their age: for `sky.offers` and `skyward offers`.

A provider returns all of its offers. The answer is kept in a file of this user's cache for some minutes, and serves
later queries. A market returns only offers near the requirements, so each set of requirements has its own cached
answer. Pools do not use the cache.
"""

from __future__ import annotations

import contextlib
import hashlib
import html
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
from skyward_core.machines.offers import Offer, Requirements, matches
from skyward_core.providers.base import Provider, why_none
from skyward_core.provisioning.candidates import ProviderOffers, ask, refusal, refusals_of

MAX_AGE_SECONDS = 300.0


class CachedOffers(BaseModel):
    """All offers of a provider at a time, or all that were near some requirements."""

    asked_at: datetime
    offers: tuple[Offer, ...]


SHOWN = 20
"""The most offers of a list that are shown."""
HEADS = ("PROVIDER", "REGION", "TYPE", "MARKET", "USD/H", "CPUS", "MEMORY GB", "ACCELERATORS")


@dataclass(frozen=True, slots=True, repr=False)
class PriceList:
    """Offers that fit, the cheapest first, then the smallest. `refusals` are the reasons of the providers without one.

    `asked_at` is the time of the oldest answer, None if there is none. Iterating gives the offers. A terminal and a
    notebook show it as a table.
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

    @property
    def is_unknown(self) -> bool:
        """Whether no provider has said what it sells: an empty list does not mean then that nothing is sold."""
        return not self.offers and self.asked_at is None and bool(self.refusals)

    def __repr__(self) -> str:
        """Return a table of the first offers, and why providers are missing."""
        rows = [HEADS, *map(_row, self.offers[:SHOWN])]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows] if self.offers else []
        more = [f"... {len(self.offers) - SHOWN} more"] if len(self.offers) > SHOWN else []
        return "\n".join([*lines, *more, *map(str, self.refusals)]) or "no offers"

    def _repr_html_(self) -> str:
        """Return the same for a notebook."""
        heads = "".join(f"<th>{html.escape(head)}</th>" for head in HEADS)
        rows = "".join(
            "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in _row(offer)) + "</tr>"
            for offer in self.offers[:SHOWN]
        )
        table = f"<table><tr>{heads}</tr>{rows}</table>" if self.offers else ""
        more = [f"... {len(self.offers) - SHOWN} more"] if len(self.offers) > SHOWN else []
        reasons = "".join(f"<div>{html.escape(line)}</div>" for line in [*more, *map(str, self.refusals)])
        return table + reasons or "no offers"

    def age_seconds(self, now: datetime | None = None) -> float:
        """Return how old the oldest answer is; 0.0 if there is none."""
        return 0.0 if self.asked_at is None else max(0.0, ((now or datetime.now(UTC)) - self.asked_at).total_seconds())


def _row(offer: Offer) -> tuple[str, ...]:
    chips = f"{offer.accelerators} x {offer.accelerator}" if offer.accelerators else ""
    return (
        offer.provider,
        offer.region,
        offer.instance_type,
        "spot" if offer.is_spot else "on demand",
        f"{offer.total_per_hour:.4g}",
        f"{offer.vcpus:g}",
        f"{offer.memory_gb:.0f}",
        chips,
    )


def price_list(
    providers: Sequence[Provider],
    want: Requirements,
    folder: Path | None,
    *,
    max_age_seconds: float = MAX_AGE_SECONDS,
    clock: Callable[[], datetime] = lambda: datetime.now(UTC),
) -> PriceList:
    """Return the offers that fit. Providers without a recent answer in `folder` are queried, all at once. Without a
    folder all are, and nothing is kept.

    Raises BadRequest if all providers do.
    """
    questions = [want if type(provider).sells_by_wish else Requirements() for provider in providers]
    paths = [
        None if folder is None else _path(folder, provider, question)
        for provider, question in zip(providers, questions, strict=True)
    ]
    pages = [None if path is None else _young(_cached(path), clock(), max_age_seconds) for path in paths]
    missing = [index for index, page in enumerate(pages) if page is None]
    answers = dict(
        zip(
            missing,
            side_by_side(
                lambda index: ask([providers[index]], questions[index])[0], missing, "skyward-prices", len(missing)
            ),
            strict=True,
        )
    )
    wrong = [answer.error for answer in answers.values() if isinstance(answer.error, BadRequest)]
    if wrong and len(wrong) == len(providers):
        raise wrong[0]
    for index, answer in answers.items():
        if answer.error is None:
            pages[index] = page = CachedOffers(asked_at=clock(), offers=answer.offers)
            if (path := paths[index]) is not None and not answer.unasked:  # one without some regions is not cached
                _cache(path, page)
    known = [page for page in pages if page is not None]
    found = [offer for page in known for offer in page.offers if matches(offer, want) is None]
    reasons = [
        _why_none(provider, want, page, answers.get(index))
        for index, (provider, page) in enumerate(zip(providers, pages, strict=True))
    ]
    return PriceList(
        tuple(sorted(found, key=lambda offer: (offer.total_per_hour, offer.vcpus, offer.memory_gb))),
        tuple(reason for reasons_of_one in reasons for reason in reasons_of_one),
        min((page.asked_at for page in known), default=None),
    )


def _young(page: CachedOffers | None, now: datetime, max_age_seconds: float) -> CachedOffers | None:
    return page if page is not None and (now - page.asked_at).total_seconds() <= max_age_seconds else None


def _why_none(
    provider: Provider, want: Requirements, page: CachedOffers | None, answer: ProviderOffers | None
) -> list[Refusal]:
    """Return why a provider, or a region of it, is not in the list."""
    reasons = [] if answer is None else refusals_of(answer)
    offers = () if page is None else page.offers
    if (answer is not None and answer.error is not None) or any(matches(offer, want) is None for offer in offers):
        return reasons
    return [
        *reasons,
        refusal(provider, None, NoCapacity(why_none(offers, want)), 0.0 if answer is None else answer.seconds),
    ]


# ── the cache ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _path(folder: Path, provider: Provider, question: Requirements) -> Path:
    own = (
        {} if question == Requirements() else {"requirements": question.model_dump(mode="json", exclude_defaults=True)}
    )
    settings = json.dumps({**provider.to_json(), **own}, sort_keys=True)
    return folder / f"{provider.name}-{hashlib.sha256(settings.encode()).hexdigest()[:16]}.json"


def _cached(path: Path) -> CachedOffers | None:
    """Read an answer; None if it cannot be read, because another release has written it for instance."""
    try:
        return CachedOffers.model_validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return None


def _cache(path: Path, page: CachedOffers) -> None:
    """Write an answer atomically. Does nothing if the cache cannot be written to."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor, part = tempfile.mkstemp(dir=path.parent)
        try:
            with os.fdopen(descriptor, "w") as file:
                file.write(page.model_dump_json())
            os.replace(part, path)
        except BaseException:
            Path(part).unlink(missing_ok=True)
            raise
