"""Who is counted in while a pool opens: a worker that joins while the scheduler is asked has not left again."""

import threading
from types import SimpleNamespace
from typing import Any

import skyward_core as sky
from skyward_core.engine.cluster import Cluster, members


class Counting:
    """What of a cluster is needed to count its workers; `joins_meanwhile` come while the scheduler answers."""

    def __init__(self, known: dict[str, str], answered: dict[str, str], joins_meanwhile: dict[str, str]) -> None:
        self._workers = dict(known)
        self.told: list[tuple[str, str]] = []
        self._answered, self._meanwhile = answered, joins_meanwhile
        self.client = SimpleNamespace(sync=lambda ask, **how: ask(**how), scheduler=SimpleNamespace(identity=self._info))

    def _info(self, n_workers: int) -> dict[str, Any]:
        self._workers |= self._meanwhile
        return {"workers": {address: {"name": name, "status": "running"} for name, address in self._answered.items()}}

    def _join(self, name: str, _: str) -> None:
        self.told.append(("joins", name))

    def _leave(self, name: str, _: str) -> None:
        self.told.append(("leaves", name))


def test_who_joins_while_the_scheduler_is_asked_has_not_left() -> None:
    """The answer is older than the news: the node would be told ready twice."""
    counting = Counting({}, {}, {"0-0": "tls://a"})
    Cluster._count_in(counting)  # type: ignore[arg-type]
    assert counting.told == []


def test_who_is_missing_has_left_and_who_is_new_has_joined() -> None:
    """As far as was known before asking."""
    counting = Counting({"0-0": "tls://a", "1-0": "tls://old"}, {"1-0": "tls://new"}, {})
    Cluster._count_in(counting)  # type: ignore[arg-type]
    assert counting.told == [("leaves", "0-0"), ("leaves", "1-0"), ("joins", "1-0")]


def test_what_the_client_asks_by_itself_is_not_taken_for_the_answer(pool: sky.ComputePool) -> None:
    """Every two seconds it asks about the scheduler and no workers at all, and keeps the answer where `scheduler_info` looks; here all the time."""
    client: Any = pool.dask_client()
    over = threading.Event()

    def ask() -> None:
        while not over.is_set():
            client.sync(client._update_scheduler_info)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        assert [len(members(client)) for _ in range(300)] == [2] * 300
    finally:
        over.set()
        thread.join()
