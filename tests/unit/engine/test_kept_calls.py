"""Calls that were in flight when their head was lost: who announces them, and which are lost."""

import pytest

from skyward_core.engine.kept_calls import DECIDED_SECONDS, KeptCalls, batch_of
from skyward_core.worker.wire import Report


def report(number: int) -> Report:
    return Report(0, "machine-000", (), f"worker/skyward-{number}-ours", 1)


def key(number: int) -> str:
    return f"skyward-{number}-ours"


def kept(awaited: tuple[str, ...] = ("0-0", "1-0")) -> KeptCalls:
    """The head is lost while two batches are in flight; a third has no calls left."""
    calls = KeptCalls()
    calls.begin({1: ["a", "b"], 2: ["c"], 3: []}, awaited, 4, {"old": 2})
    return calls


def test_the_end_of_each_batch_is_noted() -> None:
    """So that its functions stay in the memory of its node until then."""
    ended = list[int]()
    calls = KeptCalls(ended.append)
    calls.begin({1: ["a", "b"], 2: ["c"], 3: []}, ("0-0",), 4, {})
    assert ended == [3]
    calls.announced("0-0", "tls://0", [key(1)])
    assert calls.take_lost(0.0, is_live=True) == ["c"]
    assert ended == [3, 2]
    calls.ended(report(1), ["a"])
    assert ended == [3, 2]
    calls.ended(report(1), ["b"])
    assert ended == [3, 2, 1]


@pytest.mark.parametrize(
    ("origin", "number"),
    [("tls://w/skyward-12-ours", 12), ("skyward-0-ours", 0), ("", -1), ("w/array-sum-1", -1), ("w/skyward-x-1", -1)],
)
def test_the_origin_of_a_report_ends_with_the_key_of_its_batch(origin: str, number: int) -> None:
    assert batch_of(origin) == number


def test_all_workers_have_announced_so_the_other_calls_are_lost() -> None:
    """Until then none is lost, as long as there is time."""
    calls = kept()
    calls.listen(100.0)
    calls.announced("0-0", "tls://0", [key(1), key(9)])
    assert calls.take_lost(100.0, is_live=True) == []
    calls.announced("1-0", "tls://1", [])
    assert calls.take_lost(100.0, is_live=True) == ["c"]
    assert calls.calls == ["a", "b"]
    assert calls.take_lost(100.0, is_live=True) == []


def test_a_worker_that_does_not_announce_in_time_has_lost_its_calls() -> None:
    """Time without a connection does not count. The last moment is in time."""
    calls = kept()
    calls.listen(100.0)
    calls.announced("0-0", "tls://0", [key(1)])
    end = 100.0 + DECIDED_SECONDS
    assert calls.take_lost(end + 1, is_live=False) == []
    assert calls.take_lost(end, is_live=True) == []
    assert calls.take_lost(end + 1, is_live=True) == ["c"]


def test_a_replaced_worker_is_not_awaited() -> None:
    calls = kept()
    calls.without(["0-0"])
    assert calls.take_lost(0.0, is_live=False) == []
    calls.without(["1-0"])
    assert calls.take_lost(0.0, is_live=False) == ["a", "b", "c"]


def test_a_worker_that_leaves_loses_the_calls_that_it_kept() -> None:
    calls = kept()
    calls.announced("0-0", "tls://0", [key(1)])
    calls.announced("1-0", "tls://1", [key(2)])
    assert calls.left("tls://2") == []
    assert calls.left("tls://1") == ["c"]
    assert calls.left("tls://1") == []
    assert calls.calls == ["a", "b"]


def test_the_next_loss_of_a_head_makes_kept_calls_unknown_again() -> None:
    calls = kept()
    calls.announced("0-0", "tls://0", [key(1)])
    calls.begin({4: ["d"]}, ["0-0"], 5, {"new": 1})
    assert calls.left("tls://0") == []
    assert calls.calls == ["a", "b", "c", "d"]
    assert calls.heard == {"old": 2, "new": 1}
    calls.announced("0-0", "tls://0", [key(4)])
    assert calls.take_lost(0.0, is_live=True) == ["a", "b", "c"]


def test_a_call_has_ended_when_its_outcome_arrives() -> None:
    """Its worker may forget it, unless the call is in flight again. It forgets it once."""
    calls = kept()
    calls.announced("0-0", "tls://0", [key(1)])
    calls.ended(report(1), ["a"])
    assert calls.calls == ["b", "c"]
    calls.ended(report(1), ["b"])
    assert calls.calls == ["c"]
    assert 1 not in calls.batches
    assert calls.left("tls://0") == []
    assert calls.take_released(lambda call_id: call_id == "b") == ["a"]
    assert calls.take_released(lambda _: False) == ["b"]
    assert calls.take_released(lambda _: False) == []


def test_batches_that_the_present_head_has_are_not_released() -> None:
    calls = kept()
    calls.ended(report(4), ["new"])
    calls.ended(Report(0, "machine-000", (), "unknown", 1), ["unknown"])
    assert calls.take_released(lambda _: False) == []


def test_a_worker_that_announces_a_lost_batch_stops_the_calls_without_a_caller() -> None:
    """Those that run again elsewhere go on, until their outcome arrives."""
    calls = kept(())
    assert calls.take_lost(0.0, is_live=True) == ["a", "b", "c"]
    assert calls.was_lost(report(1), "a")
    assert not calls.was_lost(report(1), "c")
    assert not calls.was_lost(report(3), "c")
    calls.announced("0-0", "tls://0", [key(1)])
    assert calls.take_astray(lambda call_id: call_id == "a") == {"b"}
    assert calls.take_astray(lambda call_id: call_id == "a") == set()
    calls.ended(report(1), ["a"])
    assert calls.take_astray(lambda _: False) == set()


def test_a_batch_that_is_sent_again_under_its_number_is_not_lost_any_more() -> None:
    calls = kept(())
    calls.take_lost(0.0, is_live=True)
    calls.begin({1: ["a"]}, ["0-0"], 4, {})
    assert not calls.was_lost(report(1), "a")


def test_all_batches_before_a_number_are_lost_together() -> None:
    """No worker is awaited any more, and reports of them no longer count."""
    calls = kept()
    assert calls.forget(7) == ["a", "b", "c"]
    assert (calls.before, calls.calls) == (7, [])
    calls.ended(report(6), ["late"])
    assert calls.take_released(lambda _: False) == ["late"]
    calls.begin({7: ["d"]}, [], 8, {})
    assert calls.take_lost(0.0, is_live=False) == ["d"]


def test_nothing_is_known_after_clear() -> None:
    calls = kept()
    calls.announced("0-0", "tls://0", [key(1)])
    calls.clear()
    assert calls == KeptCalls()
