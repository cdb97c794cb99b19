"""Utilisation of a live pool: the samples of its nodes, from the moment on at which a reader has connected.

The nodes sample every two seconds. The scheduler passes the samples on and keeps none.
"""

from __future__ import annotations

import pickle
import time
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from skyward_core.errors import SkywardError
from skyward_core.events.events import Metrics
from skyward_core.live.observer import Observer
from skyward_core.live.pool_nodes import find_nodes
from skyward_core.worker.scheduler_messages import POOL_TOPIC

if TYPE_CHECKING:
    from skyward_core.ledger.ledger import Ledger

AGAIN_SECONDS = 30.0
FIRST_SECONDS = 6.0
"""How long the first samples may take: three times the interval."""
POLL_SECONDS = 0.05
MOST_SAMPLES = 60
"""Of one node: two minutes."""


@dataclass(frozen=True, slots=True)
class NodeUse:
    """The last samples of one node, the oldest first, and how many of its slots have calls."""

    node: int
    instance_id: str
    samples: tuple[Metrics, ...]
    busy: int
    slots: int


class SampleFeed:
    """Hears the samples of one pool for as long as its observer is open."""

    def __init__(self, observer: Observer, most_samples: int = MOST_SAMPLES) -> None:
        """Subscribe, and keep so many samples of each node. Raises what `Observer.client` raises."""
        self._observer = observer
        self._most_samples = most_samples
        self._samples: dict[str, deque[Metrics]] = {}
        self._client: Any = observer.client()
        self._client.subscribe_topic(POOL_TOPIC, self._hear)

    def await_first(self) -> None:
        """Wait until each node has sent a sample, but not for long: a pool may have `collect_metrics=False`."""
        deadline = time.monotonic() + FIRST_SECONDS
        while time.monotonic() < deadline and any(one.id not in self._samples for one in self._observer.instances):
            time.sleep(POLL_SECONDS)

    def uses(self) -> list[NodeUse]:
        """Return the use of each node, by rank. Raises OSError if the scheduler does not answer."""
        slots = _slots(self._client.scheduler_info(n_workers=-1)["workers"], self._client.processing())
        return [
            NodeUse(one.rank, one.id, tuple(self._samples.get(one.id, ())), *slots.get(one.rank, (0, 0)))
            for one in self._observer.instances
        ]

    def _hear(self, event: tuple[float, Any]) -> None:
        """Keep a sample. In the thread of Dask's client."""
        message = pickle.loads(event[1]) if type(event[1]) is bytes else None
        if isinstance(message, Mapping) and "cpu_percent" in message:  # others are of workers that come and go
            sample = Metrics(**message)
            self._samples.setdefault(sample.instance_id, deque(maxlen=self._most_samples)).append(sample)


def uses_of(observer: Observer) -> list[NodeUse]:
    """Return the use of each node now; a node without samples (`collect_metrics=False`) has none."""
    feed = SampleFeed(observer)
    feed.await_first()
    return feed.uses()


class PoolUses:
    """Feeds of several pools, for a reader that comes again and again."""

    def __init__(self, ledger: Ledger, *, awaits_first: bool = False, most_samples: int = MOST_SAMPLES) -> None:
        """`awaits_first`: wait for the first samples of each pool, because there is only one look. `most_samples` are
        kept of each node.
        """
        self._ledger = ledger
        self._awaits_first = awaits_first
        self._most_samples = most_samples
        self._feeds: dict[str, tuple[Observer, SampleFeed]] = {}
        self._failed: dict[str, tuple[float, str]] = {}
        """Why a pool was out of reach, and when (time.monotonic)."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.keep(())

    def keep(self, pool_ids: Collection[str]) -> None:
        """Close the connections to all other pools: they have ended."""
        for pool_id in self._feeds.keys() - set(pool_ids):
            self._feeds.pop(pool_id)[0].__exit__(None, None, None)

    def of(self, pool_id: str) -> list[NodeUse] | str:
        """Return the uses of the nodes of a pool, or why it is out of reach; that is tried again later."""
        at, why = self._failed.get(pool_id, (0.0, ""))
        if why and time.monotonic() - at < AGAIN_SECONDS:
            return why
        try:
            return self._feed(pool_id).uses()
        except (SkywardError, OSError, ImportError) as error:
            if (known := self._feeds.pop(pool_id, None)) is not None:
                known[0].__exit__(None, None, None)
            self._failed[pool_id] = (time.monotonic(), str(error).partition("\n")[0])
            return self._failed[pool_id][1]

    def _feed(self, pool_id: str) -> SampleFeed:
        if pool_id not in self._feeds:
            observer = Observer(find_nodes(self._ledger, pool_id))
            try:
                feed = SampleFeed(observer, self._most_samples)
            except BaseException:
                observer.__exit__(None, None, None)
                raise
            self._feeds[pool_id] = (observer, feed)
            if self._awaits_first:
                feed.await_first()
        return self._feeds[pool_id][1]


def _slots(workers: Mapping[str, Any], processing: Mapping[str, Any]) -> dict[int, tuple[int, int]]:
    """Return how many slots of each rank have calls, and how many there are."""
    found: dict[int, tuple[int, int]] = {}
    for address, worker in workers.items():
        rank = str(worker["name"]).partition("-")[0]
        if rank.isdecimal():
            busy, slots = found.get(int(rank), (0, 0))
            threads = int(worker["nthreads"])
            found[int(rank)] = (busy + min(threads, len(processing.get(address, ()))), slots + threads)
    return found
