"""Who is counted in while a pool opens: a worker that joins while the scheduler is asked has not left again."""

from types import SimpleNamespace
from typing import Any

from skyward_core.cluster import Cluster


class Counting:
    """What of a cluster is needed to count its workers; `joins_meanwhile` come while the scheduler answers."""

    def __init__(self, known: dict[str, str], answered: dict[str, str], joins_meanwhile: dict[str, str]) -> None:
        self._workers = dict(known)
        self.told: list[tuple[str, str]] = []
        self._answered, self._meanwhile = answered, joins_meanwhile
        self.client = SimpleNamespace(scheduler_info=self._info)

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
