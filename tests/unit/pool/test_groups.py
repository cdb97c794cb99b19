"""Broadcasts of groups: they run again as a whole after the loss of a node."""

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import pytest

import skyward_core as sky
from skyward_core.engine.futures import CallFuture
from skyward_core.pool import calls as groups
from skyward_core.pool.calls import group_results


@sky.compute
@sky.distributed.torch()
def train() -> int:
    return 1


@sky.compute
def plain() -> int:
    return 1


def future_of(outcome: object) -> Future[Any]:
    """Return a future that has ended with a value or an error; None: that has not ended."""
    future = CallFuture[Any]("first", lambda _: None)
    if isinstance(outcome, BaseException):
        future.set_exception(outcome)
    elif outcome is not None:
        future.set_result(outcome)
    return future


class Broadcasts:
    """A pool that answers each broadcast of the group with the next outcomes."""

    def __init__(self, *attempts: Sequence[object]) -> None:
        self.attempts = [[future_of(outcome) for outcome in outcomes] for outcomes in attempts]
        self.begun: list[Sequence[Future[Any]]] = []
        self.names: list[str] = []
        self.retries: list[tuple[int, str]] = []

    def __call__(self, call: sky.PendingCompute[Any]) -> Sequence[Future[Any]]:
        self.names.append(call.fn.__name__)
        if not call.forms_group:
            return [future_of(0)]
        self.begun.append(self.attempts.pop(0))
        return self.begun[-1]

    def results(self, retries: int) -> tuple[Any, ...]:
        return group_results(self, train(), retries, self._note)

    def _note(self, call_id: str, attempt: int, loss: sky.NodeLost) -> None:
        assert call_id == "first"
        self.retries.append((attempt, str(loss)))


def test_only_distributed_functions_form_groups():
    assert (train().forms_group, plain().forms_group) == (True, False)


def test_after_a_loss_all_run_again_when_all_workers_are_there():
    broadcasts = Broadcasts([1, sky.NodeLost("node 1 is lost"), None], [None, sky.NodeLost("again")], [1, 2])
    assert broadcasts.results(retries=2) == (1, 2)
    assert broadcasts.names == ["train", "_be_there", "train", "_be_there", "train"]
    assert broadcasts.retries == [(2, "node 1 is lost"), (3, "again")]
    assert [future.cancelled() for future in broadcasts.begun[0]] == [False, False, True]


@pytest.mark.parametrize("retries", [0, 1])
def test_the_last_loss_is_raised(retries: int):
    broadcasts = Broadcasts(*([None, sky.NodeLost(f"loss {number}")] for number in range(3)))
    with pytest.raises(sky.NodeLost, match=f"loss {retries}"):
        broadcasts.results(retries)
    assert len(broadcasts.retries) == retries


@pytest.mark.parametrize("error", [ValueError("wrong"), sky.CallCrashed("killed"), sky.GroupNotFormed("absent")])
def test_another_error_is_raised_at_once(error: Exception):
    broadcasts = Broadcasts([None, error], [1, 2])
    with pytest.raises(type(error), match=str(error)):
        broadcasts.results(retries=1)
    assert broadcasts.begun[0][0].cancelled()
    assert broadcasts.names == ["train"]


@pytest.mark.parametrize("cause", [sky.NodeLost("node 1 is lost"), sky.CallCrashed("exit code -9"), None])
def test_the_cause_of_a_rank_that_failed_is_waited_for(cause: Exception | None, monkeypatch: pytest.MonkeyPatch):
    """The other ranks notice a loss before this client does. None: it never comes."""
    broadcasts, wait = Broadcasts([sky.RankFailed("rank 1 is gone", 1), None], [1, 2]), groups.wait

    def cause_comes(futures: Any, *args: Any, **kwargs: Any) -> Any:
        if args and cause is not None and not broadcasts.begun[0][1].done():
            broadcasts.begun[0][1].set_exception(cause)
        return wait(futures, *args, **kwargs)

    monkeypatch.setattr(groups, "wait", cause_comes)
    monkeypatch.setattr(groups, "LOSS_SECONDS", 0.01)
    if isinstance(cause, sky.NodeLost):
        assert broadcasts.results(retries=1) == (1, 2)
    else:
        with pytest.raises(type(cause or sky.RankFailed("", 1)), match=str(cause or "rank 1 is gone")):
            broadcasts.results(retries=1)
