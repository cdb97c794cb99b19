"""Messages of earlier connections, pings of the scheduler, and silence that ends a connection."""

from skyward_core.engine import actions as do
from skyward_core.engine.connection_state import ACKNOWLEDGED_TOGETHER, PING_SECONDS, PINGS, ConnectionState


def live() -> tuple[ConnectionState, list[do.Action]]:
    """A connection, made at time 0, whose scheduler has answered; and its actions."""
    done: list[do.Action] = []
    state = ConnectionState(done.append)
    assert state.resumed(state.connected(0.0), 0)
    return state, done


def test_there_is_one_ping_at_a_time_and_none_too_early() -> None:
    """The next ping waits for the answer to the last, and for the interval since that was sent."""
    state, done = live()
    state.tick(PING_SECONDS)
    assert done == []
    state.tick(PING_SECONDS + 0.1)
    state.tick(2 * PING_SECONDS + 0.2)
    assert done == [do.Ping(1)]
    state.pinged(1, is_answered=True)
    state.tick(2 * PING_SECONDS + 0.1)
    assert done == [do.Ping(1)]
    state.tick(2 * PING_SECONDS + 0.3)
    assert done == [do.Ping(1)] * 2


def test_a_new_connection_gets_its_own_pings() -> None:
    """It does not wait for the answer to a ping of the earlier connection, nor count its misses."""
    state, done = live()
    state.tick(PING_SECONDS + 0.1)
    for _ in range(PINGS - 1):
        state.pinged(1, is_answered=False)
    state.disconnected()
    assert (state.is_connected, state.is_live) == (False, False)
    state.resumed(state.connected(100.0), 0)
    state.tick(100.0 + PING_SECONDS)
    assert done == [do.Ping(1)]
    state.tick(100.0 + PING_SECONDS + 0.1)
    assert done == [do.Ping(1), do.Ping(2)]
    state.pinged(2, is_answered=False)
    state.pinged(1, is_answered=False)
    assert state.is_connected


def test_misses_in_a_row_end_the_connection() -> None:
    """An answer between two misses resets the count; the end is reported once."""
    state, done = live()
    for _ in range(PINGS - 1):
        state.pinged(1, is_answered=False)
    state.pinged(1, is_answered=True)
    for _ in range(PINGS - 1):
        state.pinged(1, is_answered=False)
    assert state.is_live
    state.pinged(1, is_answered=False)
    assert (state.is_connected, state.is_live, done) == (False, False, [do.CutOff()])
    state.cut(1)
    state.tick(100.0)
    assert done == [do.CutOff()]
    assert not state.resumed(1, 5)
    assert not state.hear(1)


def test_messages_are_acknowledged_together() -> None:
    """They are acknowledged when there are many, or at the next tick; each number once."""
    state, done = live()
    for _ in range(ACKNOWLEDGED_TOGETHER):
        assert state.hear(1)
    state.acknowledge_many()
    assert done == []
    state.hear(1)
    state.acknowledge_many()
    state.acknowledge_many()
    state.tick(0.0)
    assert done == [do.Acknowledge(1, ACKNOWLEDGED_TOGETHER + 1)]
    state.hear(1)
    state.acknowledge_many()
    assert done[1:] == []
    state.tick(0.0)
    state.tick(0.0)
    assert done[1:] == [do.Acknowledge(1, ACKNOWLEDGED_TOGETHER + 2)]


def test_messages_of_another_connection_do_not_count() -> None:
    """Messages that come before the scheduler has answered do not count either."""
    done: list[do.Action] = []
    state = ConnectionState(done.append)
    assert (state.is_connected, state.is_live, state.heard) == (False, False, 0)
    epoch = state.connected(0.0)
    assert not state.hear(epoch)
    assert not state.resumed(epoch - 1, 7)
    assert state.resumed(epoch, 7)
    assert not state.hear(epoch + 1)
    assert state.hear(epoch)
    assert state.heard == 8
    state.cut(epoch - 1)
    assert (state.is_live_in(epoch), state.is_live_in(epoch + 1), done) == (True, False, [])
