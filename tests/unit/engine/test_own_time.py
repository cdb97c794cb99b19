"""For how long the calls of one client have held slots: as they have reported, and as the workers have counted."""

from hypothesis import given
from hypothesis import strategies as st

from skyward_core.engine.own_time import OwnTime

SECONDS = st.floats(0, 1e6)
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("ran"), st.sampled_from("ab"), st.just(""), SECONDS),
        st.tuples(st.just("seen"), st.sampled_from("ab"), st.sampled_from("12"), SECONDS),
    )
)


def test_ended_calls_count_with_what_they_report() -> None:
    time = OwnTime()
    time.ran("a", 2.0)
    time.ran("a", 1.0)
    time.ran("b", 4.0)
    assert time.seconds == 7.0


def test_a_call_that_runs_counts_before_it_has_reported() -> None:
    """And not twice when it has."""
    time = OwnTime()
    time.seen("a", "0-1", 5.0)
    assert time.seconds == 5.0
    time.ran("a", 5.5)
    assert time.seconds == 5.5


def test_a_call_that_was_lost_with_its_worker_counts() -> None:
    """The worker that follows counts from zero."""
    time = OwnTime()
    time.seen("a", "0-1", 5.0)
    time.seen("a", "0-2", 1.0)
    time.ran("a", 1.5)
    assert time.seconds == 6.0


def test_a_worker_that_has_forgotten_the_client_changes_nothing() -> None:
    time = OwnTime()
    for seconds in (5.0, 2.0, 0.0, 6.0):
        time.seen("a", "0-1", seconds)
    assert time.seconds == 6.0


@given(EVENTS)
def test_the_time_never_shrinks(events: list[tuple[str, str, str, float]]) -> None:
    """It is at least what ended calls have reported."""
    time, reported, before = OwnTime(), 0.0, 0.0
    for kind, instance_id, process, seconds in events:
        if kind == "ran":
            time.ran(instance_id, seconds)
            reported += seconds
        else:
            time.seen(instance_id, process, seconds)
        assert time.seconds >= before
        before = time.seconds
    assert time.seconds >= reported - 1e-6 * max(1.0, reported)
