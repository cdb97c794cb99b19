"""The parts of a pool's cost that are for works beside the pool's own: recorded shares, and the users of a pool with a
name.

A user's part is its part of the cost of the time in which calls ran, by the seconds for which its calls held slots. It
is not written anywhere: each bill computes it from the rows of the users, so a killed process loses nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from skyward_core.ledger.split import split_exactly
from skyward_core.work import WORK_CHARACTERS, Work

type Part = tuple[Work, int]
"""A work and its micro-dollars, or its milliseconds of slots."""


@dataclass(slots=True)
class Recorded:
    """What is recorded of the uses of a pool: shares, and the uses themselves, in micro-dollars; milliseconds of slots
    of each process that has used it by its name and has no use recorded, and of its detached calls.
    """

    shares: list[Part] = field(default_factory=list[Part])
    uses: list[Part] = field(default_factory=list[Part])
    users: list[Part] = field(default_factory=list[Part])
    detached_milliseconds: int = 0
    """Those of the detached calls that belong to none of the users."""

    def add_detached(self, milliseconds_by_owner: Mapping[str, int]) -> None:
        """Count detached calls: for the user of whose work their owner is the text, if there is one.

        A detached call outlives the process that has started it, so its time is not in that of the process.
        """
        users = {str(user)[:WORK_CHARACTERS]: user for user, _ in self.users if user.labels()}
        for owner, milliseconds in milliseconds_by_owner.items():
            if owner in users:
                self.users.append((users[owner], milliseconds))
            else:
                self.detached_milliseconds += milliseconds


def parts_of(own: Work, busy_micro_usd: int, use: Recorded) -> list[Part]:
    """Return the parts of a pool's cost for the works of its shares, uses and users; the rest is for `own`.

    A share within the work of a user, such as one of its tasks, is a part of that user's part. Detached calls that
    belong to no user are for `own`.

    Args:
        own: the work for which the pool was opened.
        busy_micro_usd: the cost of the time in which calls ran.
        use: the shares, the uses and the users.
    """
    weights = [max(0, milliseconds) for _, milliseconds in use.users]
    left = busy_micro_usd - sum(micro_usd for _, micro_usd in use.uses)
    split = split_exactly(max(0, left), [*weights, max(0, use.detached_milliseconds)])
    rests: defaultdict[Work, int] = defaultdict(int)
    for (user, _), part in zip(use.users, split, strict=False):
        rests[user] += part
    for work, micro_usd in use.shares:
        for user in rests:
            if user.labels() and is_for(work, user):
                rests[user] -= micro_usd
                break
    others = [(user, part) for user, part in (*use.uses, *rests.items()) if user != own and part > 0]
    return [*use.shares, *others]


def is_for(work: Work, wanted: Work) -> bool:
    """Return whether a work has the same text in each field that is not empty in `wanted`."""
    return wanted.labels().items() <= work.labels().items()
