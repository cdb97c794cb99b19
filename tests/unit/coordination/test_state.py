"""The state of a pool's locks, semaphores, events, queues and variables, without connections."""

import pytest

from skyward_core.coordination.messages import Kind, Request
from skyward_core.coordination.state import CoordinationState, Holder, Letter

A, B, C = ("worker", 1), ("worker", 2), ("program", 0)


class State(CoordinationState):
    """Takes requests by their fields, and returns answers as tuples."""

    def ask(self, holder: Holder, number: int, kind: Kind, action: str, **fields: object) -> list[tuple[object, ...]]:
        request = Request(number, kind, "x", action)._replace(**fields)
        return plain(self.receive(holder, request))

    def acquire(self, holder: Holder, number: int, limit: int = 1, seconds: float | None = None) -> list[object]:
        return [*self.ask(holder, number, Kind.LOCK, "acquire", limit=limit, seconds=seconds)]

    def release(self, holder: Holder, number: int, target: int) -> list[object]:
        return [*self.ask(holder, number, Kind.LOCK, "release", target=target)]


def plain(letters: list[Letter]) -> list[tuple[object, ...]]:
    """Holder, number and status of each answer, and its value or amount if there is one."""
    return [
        (holder, answer.number, str(answer.status), *filter(None, (answer.value, answer.amount)))
        for holder, answer in letters
    ]


def test_what_a_holder_has_goes_to_the_next_when_it_is_dropped() -> None:
    """Its requests that wait are forgotten."""
    state = State()
    state.acquire(A, 1)
    state.acquire(B, 1)
    state.acquire(C, 1)
    assert plain(state.drop(B)) == []
    assert plain(state.drop(A)) == [(C, 1, "done")]
    assert plain(state.drop(C)) == []
    assert state.is_empty


def test_a_request_whose_time_is_up_does_not_wait_any_more() -> None:
    """With no time it is answered at once. The end of the time of an answered request has no effect."""
    state = State()
    state.acquire(A, 1)
    assert state.acquire(B, 1, seconds=0.0) == [(B, 1, "late")]
    assert state.acquire(B, 2, seconds=5.0) == []
    assert plain(state.expire(B, Request(2, Kind.LOCK, "x", "acquire"))) == [(B, 2, "late")]
    assert plain(state.expire(B, Request(2, Kind.LOCK, "x", "acquire"))) == []
    assert state.release(A, 2, target=1) == [(A, 2, "done")]
    assert state.ask(A, 3, Kind.LOCK, "count") == [(A, 3, "done")]


@pytest.mark.parametrize("is_granted", [False, True])
def test_a_withdrawn_request_leaves_nothing(is_granted: bool) -> None:
    """Whether it waits, or has been granted meanwhile."""
    state = State()
    if not is_granted:
        state.acquire(A, 1)
    state.acquire(B, 1)
    state.acquire(C, 1)
    after = state.ask(B, 2, Kind.LOCK, "withdraw", target=1)
    assert after == ([(C, 1, "done")] if is_granted else [])
    assert state.ask(A, 9, Kind.LOCK, "count") == [(A, 9, "done", 1)]


def test_a_queue_is_first_in_first_out_and_waits_when_it_is_full_or_empty() -> None:
    """A value that waits for room is in the queue as soon as there is some."""
    state = State()
    assert state.ask(A, 1, Kind.QUEUE, "get", seconds=None) == []
    assert state.ask(B, 1, Kind.QUEUE, "put", value=b"1", limit=1) == [(B, 1, "done"), (A, 1, "done", b"1")]
    assert state.ask(B, 2, Kind.QUEUE, "put", value=b"2", limit=1) == [(B, 2, "done")]
    assert state.ask(B, 3, Kind.QUEUE, "put", value=b"3", limit=1, seconds=None) == []
    assert state.ask(B, 4, Kind.QUEUE, "size") == [(B, 4, "done", 1)]
    assert state.ask(A, 2, Kind.QUEUE, "get") == [(A, 2, "done", b"2"), (B, 3, "done")]
    assert state.ask(A, 3, Kind.QUEUE, "get") == [(A, 3, "done", b"3")]


def test_a_value_is_kept_after_the_end_of_its_producer_and_its_wait_is_not() -> None:
    """What is in the queue belongs to the pool."""
    state = State()
    state.ask(A, 1, Kind.QUEUE, "put", value=b"1", limit=1)
    state.ask(A, 2, Kind.QUEUE, "put", value=b"2", limit=1, seconds=None)
    state.drop(A)
    assert state.ask(B, 1, Kind.QUEUE, "get") == [(B, 1, "done", b"1")]
    assert state.ask(B, 2, Kind.QUEUE, "get", seconds=0.0) == [(B, 2, "late")]


def test_all_values_of_a_pool_together_are_limited() -> None:
    """Those that wait for room count. Taken and replaced values do not."""
    state = State(total_bytes=10)
    assert state.ask(A, 1, Kind.QUEUE, "put", value=b"12345", limit=1) == [(A, 1, "done")]
    assert state.ask(A, 2, Kind.QUEUE, "put", value=b"1234", limit=1, seconds=None) == []
    assert state.ask(A, 3, Kind.VARIABLE, "set", value=b"12") == [(A, 3, "refused")]
    assert state.ask(B, 1, Kind.QUEUE, "get") == [(B, 1, "done", b"12345"), (A, 2, "done")]
    assert state.ask(A, 4, Kind.VARIABLE, "set", value=b"123456") == [(A, 4, "done")]
    assert state.ask(A, 5, Kind.QUEUE, "put", value=b"1") == [(A, 5, "refused")]
    state.ask(A, 6, Kind.VARIABLE, "delete")
    assert state.ask(A, 7, Kind.QUEUE, "put", value=b"123456") == [(A, 7, "done")]


def test_holders_that_are_dropped_together_get_nothing_of_each_other() -> None:
    """All processes of a lost node are gone: a queue's value must not go to one of them."""
    state = State()
    state.acquire(A, 1)
    state.acquire(B, 1)
    assert plain(state.drop(A, B)) == []
    assert state.is_empty
