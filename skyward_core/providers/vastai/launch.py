"""One launch at Vast.ai: renting, waiting for addresses, and what failed on the way."""

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
"""Vast.ai requires this time between two creating calls, and refuses earlier ones ("threshold: 4.5, penalty: 12" in the
schema of the call). So a refused one is repeated after this time at least.
"""
TRIES = 3
"""Offers tried for each machine, because others rent some and some hosts cannot start a container."""
ADDRESS_SECONDS = 600.0
"""How long a machine may take until it runs and has an address. A host that loads an image for longer is a bad one."""
POLL_SECONDS = 3.0
LONGEST_POLL_SECONDS = 15.0
MISSES = 2
"""A container is gone when this number of listings in a row lack it, after one that had it."""
GONE = "gone"
"""The error code of such a container."""
LOOK_SECONDS = (0.0, 5.0, 15.0)
"""Pauses between lookups after a creating call without an answer, because listings are some seconds late."""


@dataclass(slots=True)
class LaunchRecord:
    """Containers of one launch.

    Attributes:
        unwanted: containers that came with the last refusal.
        known: containers already accounted for; a lost answer cannot be about one of them.
        stuck: containers that failed and could not be destroyed. Their label is ours, so a sweep finds them.
    """

    unwanted: list[int] = field(default_factory=list[int])
    known: set[int] = field(default_factory=set[int])
    stuck: set[int] = field(default_factory=set[int])

    def take_unwanted(self) -> list[int]:
        """Return the unwanted containers. From now on they are known."""
        left = list(self.unwanted)
        self.unwanted.clear()
        self.known |= set(left)
        return left


def in_order(choices: Sequence[MarketOffer], count: int) -> deque[MarketOffer]:
    """Return the offers to try: first those of the cheapest place with enough machines, then the others by price."""
    places = Counter(choice.place for choice in choices)
    together = next((choice.place for choice in choices if places[choice.place] >= count), None) if count > 1 else None
    return deque(sorted(choices, key=lambda choice: choice.place != together)[: TRIES * count])


def rent(
    api: Api,
    choices: deque[MarketOffer],
    machines: Sequence[Tags],
    order: Callable[[Tags], Row],
    record: LaunchRecord,
) -> tuple[dict[int, int], SkywardError | None]:
    """Rent one offer for each machine, one call after another.

    Returns the containers by rank, and the error if some are missing. Tried offers leave the queue. A container that
    comes with a refusal is destroyed at once.
    """
    created: dict[int, int] = {}
    refusal: SkywardError | None = None
    again_at = 0.0
    for tags in machines:
        while choices:
            time.sleep(max(0.0, again_at - time.monotonic()))
            choice = choices.popleft()
            try:
                created[int(tags[RANK_TAG])] = contract_of(
                    api.request("PUT", f"/api/v0/asks/{choice.id}/", body=order(tags), pause_seconds=CREATE_SECONDS),
                    record.unwanted,
                )
                break
            except SkywardError as error:
                refusal = error
            finally:
                again_at = time.monotonic() + CREATE_SECONDS
            destroy_failed(api, record.take_unwanted(), record)
            if type(refusal) is NoCapacity:
                continue
            # the outcome is unknown: it may have created a container
            if isinstance(refusal, ProviderFailed) and not isinstance(refusal, RateLimited):
                found = _look_up(api, tags, record.known)
                if found is not None:
                    created[int(tags[RANK_TAG])] = found
                    break
            return created, refusal
        else:
            return created, refusal
    return created, None


def await_addresses(
    api: Api, created: Mapping[int, int], deadline: float, record: LaunchRecord
) -> tuple[dict[int, Row], dict[int, SkywardError]]:
    """Wait until each machine runs and has an address, or has failed. Destroy those that failed.

    Returns the rows of the ones and the errors of the others, by rank.
    """
    waiting, up, down, missed = dict(created), dict[int, Row](), dict[int, SkywardError](), dict[int, int]()
    pauses = Backoff(POLL_SECONDS, LONGEST_POLL_SECONDS, 1.5).pauses()
    while waiting:
        rows = {row["id"]: row for row in all_containers(api)}
        is_late = time.monotonic() >= deadline
        for rank, contract in list(waiting.items()):
            row = rows.get(contract, {})
            if row or contract in missed:  # only after its first listing
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
    destroy_failed(api, [created[rank] for rank in down], record)
    return up, down


def _look_up(api: Api, tags: Tags, known: set[int]) -> int | None:
    """Return the container that an unanswered creating call has made, if the listing has it."""
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


def destroy_failed(api: Api, contracts: Sequence[int], record: LaunchRecord) -> None:
    """Destroy containers that did not start. Those that cannot be destroyed now are recorded as stuck."""
    for contract, error in destroy(api, contracts).items():
        record.stuck.add(contract)
        log.warning("Vast.ai did not destroy %d, which did not start: %s", contract, error)
