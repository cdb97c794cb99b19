"""Who bears the cost of a pool: the works of its uses, detached calls and recorded shares, and for the rest the work to
which the pool belongs. Pure functions, in micro-dollars.

The rest is what no call has held: start, idle and warm time, end, rounding. A pool to which its user has given a name
belongs to nobody: its rest is a part of its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from skyward_core.ledger.split import split_exactly
from skyward_core.work import NO_WORK, Work


@dataclass(frozen=True, slots=True)
class Bearer:
    """Who bears a part of a cost: a work, in processes of `owner` (user@host), or with `pool` the pool of that name."""

    work: Work = NO_WORK
    owner: str = ""
    pool: str = ""


type Part = tuple[Bearer, int]
"""A bearer and its micro-dollars."""


@dataclass(slots=True)
class Recorded:
    """What is recorded of a pool, in micro-dollars: who bears the rest, shares, and what uses and detached calls have
    held.
    """

    own: Bearer = Bearer()
    shares: list[Part] = field(default_factory=list[Part])
    held: list[Part] = field(default_factory=list[Part])


def parts_of(recorded: Recorded) -> list[Part]:
    """Return the parts of a pool's cost for others than its own bearer, who bears the rest.

    A share within the work of a use, such as one of its tasks, is a part of that use's part.
    """
    held: defaultdict[Bearer, int] = defaultdict(int)
    shared: defaultdict[Bearer, int] = defaultdict(int)
    for bearer, micro_usd in recorded.held:
        held[bearer] += micro_usd
    for bearer, micro_usd in recorded.shares:
        within = (user for user in held if user.work.labels() and is_for(bearer.work, user.work))
        if (user := next(within, None)) is not None:
            shared[user] += micro_usd
    left = [(bearer, part - shared[bearer]) for bearer, part in held.items() if bearer != recorded.own]
    return [*recorded.shares, *((bearer, part) for bearer, part in left if part > 0 or not shared[bearer])]


def divided(rest: int, costs: Sequence[int]) -> list[int]:
    """Divide what belongs to nobody among users, in proportion to their costs; equally if all are zero."""
    return split_exactly(rest, costs if any(costs) else [1] * len(costs))


def is_for(work: Work, wanted: Work) -> bool:
    """Return whether a work has the same text in each field that is not empty in `wanted`."""
    return wanted.labels().items() <= work.labels().items()
