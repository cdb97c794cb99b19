"""A short form of `make soak`."""

from tests.soak import MB, growth, looks


def test_the_process_that_runs_calls_does_not_grow() -> None:
    """A regression kept 272 bytes of each call: 8 MB here."""
    grown = growth(list(looks(40_000)))
    assert set(grown) == {"client", "supervisor", "scheduler", "worker", "runner"}
    assert grown["runner"] < 1.5 * MB
