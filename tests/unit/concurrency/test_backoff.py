"""Pauses between tries: they grow up to a limit."""

from itertools import islice

import pytest

from skyward_core.concurrency.backoff import Backoff


@pytest.mark.parametrize(
    ("backoff", "pauses"),
    [
        (Backoff(0.5, 15.0), [0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 15.0]),
        (Backoff(1.0, 3.0, 1.5), [1.0, 1.5, 2.25, 3.0]),
        (Backoff(0.0, 15.0), [0.0, 0.0]),
        (Backoff(5.0, 2.0), [2.0, 2.0]),
    ],
)
def test_pauses_grow_up_to_the_longest(backoff: Backoff, pauses: list[float]) -> None:
    """By the factor, from the first pause on; the longest is the limit also for the first."""
    assert list(islice(backoff.pauses(), len(pauses))) == pytest.approx(pauses)
    assert [backoff.seconds(failures) for failures in range(1, len(pauses) + 1)] == pytest.approx(pauses)
