"""When an elastic pool grows and shrinks: the policy alone, with a manual clock."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from skyward_core.engine.scaling import RESTS, Load, ScalingPolicy

IDLE, BUSY = Load(0, is_busy=False), Load(0, is_busy=True)
UP, DOWN = 30.0, 300.0


def policy_of(least: int = 1, most: int = 8, slots: int = 1) -> ScalingPolicy:
    return ScalingPolicy(least, most, slots, UP, DOWN)


def queue_of(calls: int) -> Load:
    return Load(calls, is_busy=True)


def grown_to(nodes: int) -> ScalingPolicy:
    """A pool of 1 to 8 nodes that has grown, by the time 30."""
    policy = policy_of()
    policy.decide(0.0, 1, queue_of(nodes - 1))
    assert policy.decide(UP, 1, queue_of(nodes - 1)) == nodes
    return policy


def test_a_pool_grows_when_its_queue_has_waited_long_enough() -> None:
    """By as many nodes as the queue fills. The last moment before is too early."""
    policy = policy_of(slots=2)
    assert policy.target == 1
    assert policy.decide(10.0, 1, queue_of(5)) == 1
    assert policy.decide(10.0 + UP - 0.1, 1, queue_of(5)) == 1
    assert policy.decide(10.0 + UP, 1, queue_of(5)) == 4
    assert policy.reason == "5 calls wait for a slot"


def test_a_pool_never_grows_beyond_the_most() -> None:
    policy = policy_of()
    policy.decide(0.0, 1, queue_of(100))
    assert policy.decide(UP, 1, queue_of(100)) == 8


def test_a_queue_that_was_empty_meanwhile_waits_again() -> None:
    policy = policy_of()
    policy.decide(0.0, 1, queue_of(3))
    policy.decide(UP - 1.0, 1, BUSY)
    assert policy.decide(UP, 1, queue_of(3)) == 1
    assert policy.decide(UP + UP - 1.0, 1, queue_of(3)) == 1
    assert policy.decide(UP + UP, 1, queue_of(3)) == 4


def test_a_queue_does_not_count_while_new_nodes_are_on_their_way() -> None:
    """Then it has the whole time again, to show that they are too few."""
    policy = grown_to(3)
    assert policy.decide(1000.0, 1, queue_of(6)) == 3
    assert policy.decide(1001.0, 2, queue_of(6)) == 3
    assert policy.decide(1002.0, 3, queue_of(6)) == 3
    assert policy.decide(1002.0 + UP - 0.1, 3, queue_of(6)) == 3
    assert policy.decide(1002.0 + UP, 3, queue_of(2)) == 5


def test_an_idle_pool_shrinks_to_the_least_after_a_while() -> None:
    """A call in between begins the time again."""
    policy = grown_to(4)
    assert policy.decide(100.0, 4, IDLE) == 4
    assert policy.decide(100.0 + DOWN - 0.1, 4, IDLE) == 4
    assert policy.decide(100.0 + DOWN, 4, BUSY) == 4
    assert policy.decide(500.0, 4, IDLE) == 4
    assert policy.decide(500.0 + DOWN, 4, IDLE) == 1
    assert policy.reason == "no call for 300 s"


def test_after_a_failure_the_pool_goes_on_with_what_it_has_and_rests() -> None:
    """Of several machines that one growth cannot get the first begins the rest. Each growth that fails in a row makes the rest longer; a node that has come ends that."""
    policy = grown_to(4)
    assert policy.not_grown(100.0) == RESTS.seconds(1)
    assert policy.not_grown(100.0) is None
    assert policy.target == 2
    policy.decide(100.0, 2, queue_of(5))
    rested = 100.0 + RESTS.seconds(1)
    assert policy.decide(rested - 0.1, 2, queue_of(5)) == 2
    assert policy.decide(rested, 2, queue_of(5)) == 7
    assert policy.not_grown(200.0) == RESTS.seconds(2)
    target = policy.target
    assert [policy.decide(at, target, queue_of(1)) for at in (200.0, 201.0 + UP)] == [target, target]
    policy.grown()
    assert policy.not_grown(300.0) == RESTS.seconds(1)


def test_failures_never_lower_the_number_below_the_least() -> None:
    policy = policy_of(least=2)
    policy.decide(0.0, 2, queue_of(2))
    policy.decide(UP, 2, queue_of(2))
    for _ in range(5):
        policy.not_grown(UP)
    assert policy.target == 2


def test_a_number_that_the_user_has_set_stays() -> None:
    """Neither a queue nor idle time changes it, until the pool decides again, from there."""
    policy = policy_of()
    policy.fix(5)
    assert policy.is_fixed
    assert [policy.decide(at, 5, load) for at, load in ((0.0, queue_of(9)), (UP, queue_of(9)), (9000.0, IDLE))] == [
        5,
        5,
        5,
    ]
    assert policy.reason == "pool.scale()"
    policy.not_grown(9000.0)
    assert policy.target == 5
    policy.fix(None)
    assert policy.target == 5
    assert policy.decide(9001.0, 5, IDLE) == 5
    assert policy.decide(9001.0 + DOWN, 5, IDLE) == 1


def test_without_waiting_times_a_pool_changes_at_once() -> None:
    policy = ScalingPolicy(1, 3, 1, 0.0, 0.0)
    assert policy.decide(0.0, 1, queue_of(1)) == 2
    assert policy.decide(0.0, 2, IDLE) == 1


@given(
    st.lists(
        st.tuples(st.floats(0, 500), st.integers(0, 10), st.integers(0, 20), st.booleans(), st.booleans()), max_size=40
    )
)
def test_the_number_is_always_within_the_limits(steps: list[tuple[float, int, int, bool, bool]]) -> None:
    """For any history of loads and failures; and the pool never shrinks while a call runs or waits, unless a machine
    could not be had.
    """
    policy, now = policy_of(2, 6, 2), 0.0
    for seconds, nodes, waiting, is_busy, has_failed in steps:
        now += seconds
        before = policy.target
        target = policy.decide(now, nodes, Load(waiting, is_busy or waiting > 0))
        assert 2 <= target <= 6
        assert target >= before or not (is_busy or waiting)
        if has_failed:
            policy.not_grown(now)
            assert 2 <= policy.target <= 6
