"""For how long the calls of each client have kept a slot busy."""

from skyward_core.worker.detached_calls import detached_key
from skyward_core.worker.topic_seconds import MOST_TOPICS, RECENT_SECONDS, TopicSeconds, added_up


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_seconds_of_each_topic_add_up() -> None:
    times = TopicSeconds()
    for topic, seconds in (("a", 1.0), ("b", 2.0), ("a", 3.0)):
        times.add(topic, seconds)
    assert times.recent() == {"a": 4.0, "b": 2.0}


def test_a_topic_that_was_not_used_lately_is_known_and_not_sent() -> None:
    """Heartbeats stay small; it goes on from its sum when it comes back."""
    clock = Clock()
    times = TopicSeconds(clock)
    times.add("a", 1.0)
    clock.now = RECENT_SECONDS + 1
    times.add("b", 2.0)
    assert times.recent() == {"b": 2.0}
    assert times.recent(running="a") == {"a": 1.0, "b": 2.0}
    times.add("a", 1.0)
    assert times.recent() == {"b": 2.0, "a": 2.0}


def test_the_topic_that_was_used_least_recently_is_forgotten() -> None:
    times = TopicSeconds(Clock())
    times.add("first", 1.0)
    times.add("second", 1.0)
    times.add("first", 1.0)
    for number in range(MOST_TOPICS - 1):
        times.add(f"t{number}", 1.0)
    assert len(times.recent()) == MOST_TOPICS
    assert (times.of("first"), times.of("second")) == (2.0, 0.0)


def test_detached_calls_are_no_clients() -> None:
    times = TopicSeconds()
    times.add(detached_key("train/1"), 1.0)
    times.add("", 1.0)
    assert times.recent(running=detached_key("train/1")) == {}


def test_the_slots_of_a_worker_add_up() -> None:
    assert added_up([{"a": 1.0}, {}, {"a": 2.0, "b": 3.0}]) == {"a": 3.0, "b": 3.0}
