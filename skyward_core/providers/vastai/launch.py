"""One launch at Vast.ai: renting asks, waiting for addresses, and what failed on the way."""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from skyward_core.concurrency.backoff import Backoff
from skyward_core.errors import (
    NoCapacity,
    ProviderFailed,
    RateLimited,
    SkywardError,
)
from skyward_core.machines.instances import InstanceState
from skyward_core.providers._http import Api, Row
from skyward_core.providers.base import LAUNCH_TAG, POOL_TAG, RANK_TAG, Tags
from skyward_core.providers.vastai.api import all_containers, contract_of
from skyward_core.providers.vastai.instances import address_of, state_of, tags_of
from skyward_core.providers.vastai.market import MarketOffer
from skyward_core.providers.vastai.termination import destroy

log = logging.getLogger(__name__)

CREATE_SECONDS = 4.5
"""Vast wants so much time between two creating calls, and refuses those in between."""
TRIES = 3
"""So many asks are tried for each machine, for some are taken by others and some hosts cannot start a container."""
ADDRESS_SECONDS = 600.0
"""How long a machine may take until it runs and has an address; a host that loads an image for longer is a bad one."""
POLL_SECONDS = 3.0
LONGEST_POLL_SECONDS = 15.0
MISSES = 2
"""So many listings in a row do not tell a container that they have told before: it is gone."""
GONE = "gone"
"""The code for that."""
LOOK_SECONDS = (0.0, 5.0, 15.0)
"""Pauses before the looks for what a creating call without an answer may have made: a listing is some seconds behind.
"""


@dataclass(slots=True)
class LaunchRecord:
    """What one launch has made.

    Attributes:
        left: containers that came with the last refusal.
        known: all that are told of, so that none of them is taken for what an answer that was lost has made.
        stuck: those that have failed and could not be destroyed. They have our label, and are found by it.
    """

    left: list[int] = field(default_factory=list[int])
    known: set[int] = field(default_factory=set[int])
    stuck: set[int] = field(default_factory=set[int])

    def take_left(self) -> list[int]:
        """Return what is left over, and know it from now on."""
        left = list(self.left)
        self.left.clear()
        self.known |= set(left)
        return left


def in_order(asks: Sequence[MarketOffer], count: int) -> deque[MarketOffer]:
    """Return the asks to try, in this order: of the cheapest place that has all of them, if one has, then the rest
    by price.
    """
    places = Counter(ask.place for ask in asks)
    together = next((ask.place for ask in asks if places[ask.place] >= count), None) if count > 1 else None
    return deque(sorted(asks, key=lambda ask: ask.place != together)[: TRIES * count])


def rent(
    api: Api, asks: deque[MarketOffer], machines: Sequence[Tags], order: Callable[[Tags], Row], made: LaunchRecord
) -> tuple[dict[int, int], SkywardError | None]:
    """Rent an ask for each machine, one call after another; return what came of it by rank, and why it is fewer, if
    it is.

    Asks that are tried are taken off the queue. A container that comes with a refusal is given back at once.
    """
    created: dict[int, int] = {}
    refusal: SkywardError | None = None
    again_at = 0.0
    for tags in machines:
        while asks:
            time.sleep(max(0.0, again_at - time.monotonic()))
            ask, again_at = asks.popleft(), time.monotonic() + CREATE_SECONDS
            try:
                created[int(tags[RANK_TAG])] = contract_of(
                    api.ask("PUT", f"/api/v0/asks/{ask.id}/", body=order(tags)),
                    made.left,
                )
                break
            except SkywardError as error:
                refusal = error
            destroy_failed(api, made.take_left(), made)
            if type(refusal) is NoCapacity:
                continue
            # nobody knows what came of it
            if isinstance(refusal, ProviderFailed) and not isinstance(refusal, RateLimited):
                found = _look(api, tags, made.known)
                if found is not None:
                    created[int(tags[RANK_TAG])] = found
                    break
            return created, refusal
        else:
            return created, refusal
    return created, None


def await_addresses(
    api: Api, created: Mapping[int, int], deadline: float, made: LaunchRecord
) -> tuple[dict[int, Row], dict[int, SkywardError]]:
    """Wait until each machine runs and has an address, or never will; return what is told of the ones, and why by
    rank for the others, which are ended.
    """
    waiting, up, down, missed = dict(created), dict[int, Row](), dict[int, SkywardError](), dict[int, int]()
    pauses = Backoff(POLL_SECONDS, LONGEST_POLL_SECONDS, 1.5).pauses()
    while waiting:
        rows = {row["id"]: row for row in all_containers(api)}
        is_late = time.monotonic() >= deadline
        for rank, contract in list(waiting.items()):
            row = rows.get(contract, {})
            if row or contract in missed:  # from its first listing on
                missed[contract] = 0 if row else missed[contract] + 1
            if state_of(row) is InstanceState.RUNNING and address_of(row) is not None:
                up[rank] = row
            elif state_of(row) is InstanceState.STOPPING or is_late or missed.get(contract, 0) >= MISSES:
                word = str(row.get("actual_status") or ("created" if row else GONE))
                down[rank] = NoCapacity(
                    f"Vast.ai could not start {contract}: {word} {row.get('status_msg') or ''}".strip()
                ).coded(word)
            else:
                continue
            del waiting[rank]
        if waiting:
            time.sleep(next(pauses))
    destroy_failed(api, [created[rank] for rank in down], made)
    return up, down


def _look(api: Api, tags: Tags, known: set[int]) -> int | None:
    """Return the container that a creating call without an answer has made, if the listing tells of one."""
    wanted = {name: tags[name] for name in (POOL_TAG, RANK_TAG, LAUNCH_TAG)}
    for pause in LOOK_SECONDS:
        time.sleep(pause)
        try:
            rows = list(all_containers(api))
        except SkywardError:
            return None
        for row in rows:
            if row["id"] not in known and wanted.items() <= (tags_of(row) or {}).items():
                return int(row["id"])
    return None


def destroy_failed(api: Api, contracts: Sequence[int], made: LaunchRecord) -> None:
    """Destroy what did not start; what cannot be destroyed now is noted."""
    for contract, error in destroy(api, contracts).items():
        made.stuck.add(contract)
        log.warning("Vast.ai did not destroy %d, which did not start: %s", contract, error)
