"""The hub's states: who is there, values from all to all, and which rank failed first."""

from skyward_core.distributed.member import SETTLE_SECONDS, Hub, HubState


def formed(world: int) -> Hub:
    hub = Hub(world, deadline=100.0)
    for rank in range(world):
        hub.join(rank)
    return hub


def test_the_group_is_formed_when_the_last_rank_joins() -> None:
    hub = Hub(3, deadline=100.0)
    assert [hub.join(2), hub.join(0)] == [[], []]
    assert hub.join(1) == [(2, {"formed": True}), (1, {"formed": True}), (0, {"formed": True})]
    assert hub.next_deadline is None


def test_at_the_deadline_those_present_learn_who_is_absent() -> None:
    hub = Hub(4, deadline=100.0)
    for rank in (0, 3, 2):
        hub.join(rank)
    hub.leave(3)
    assert hub.expire(99.0) == []
    assert hub.expire(100.0) == [(2, {"absent": [1, 3]}), (0, {"absent": [1, 3]})]
    assert hub.refusal()


def test_values_are_exchanged_round_by_round() -> None:
    hub = formed(2)
    assert hub.receive(0, {"value": "a"}, 0.0) == []
    assert hub.receive(0, {"value": "c"}, 0.0) == []
    assert hub.receive(1, {"value": "b"}, 0.0) == [(1, {"values": ["a", "b"]}), (0, {"values": ["a", "b"]})]
    assert hub.receive(1, {"value": None}, 0.0) == [(1, {"values": ["c", None]}), (0, {"values": ["c", None]})]


def test_the_first_error_is_decided_after_a_moment() -> None:
    hub = formed(3)
    assert hub.receive(1, {"failed": "ValueError: no"}, 10.0) == []
    assert hub.receive(2, {"failed": "RuntimeError: peer closed"}, 10.0) == []
    assert hub.next_deadline == 10.0 + SETTLE_SECONDS
    verdict = {"first": 1, "text": "ValueError: no"}
    assert hub.expire(10.0 + SETTLE_SECONDS) == [(2, verdict), (1, verdict), (0, verdict)]
    assert hub.receive(0, {"failed": "late"}, 11.0) == [(0, verdict)]
    assert hub.state is HubState.FAILED


def test_a_crash_precedes_the_errors_that_it_causes() -> None:
    """The error of a rank arrives before the end of the process that has caused it."""
    hub = formed(3)
    hub.receive(0, {"failed": "RuntimeError: connection closed by peer"}, 10.0)
    (two, _), (zero, verdict) = hub.leave(1)
    assert (zero, two, verdict["first"]) == (0, 2, 1)
    assert hub.expire(20.0) == []


def test_all_ranks_end_together() -> None:
    """Rank 0 must not end its hub, and the framework's store, while others still work."""
    hub = formed(2)
    assert hub.receive(0, {"done": True}, 0.0) == []
    assert hub.receive(1, {"done": True}, 0.0) == [(1, {"ended": True}), (0, {"ended": True})]
    assert [hub.leave(1), hub.leave(0)] == [[], []]
    assert hub.state is HubState.ENDED
