"""One sum is split among several parties, to the last unit."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyward_core.ledger.bills import split_exactly

AMOUNTS = st.integers(0, 10**15)
WEIGHTS = st.lists(st.integers(0, 10**12), max_size=20)


@pytest.mark.parametrize(
    ("amount", "weights", "parts"),
    [
        (10, [1, 1, 1], [4, 3, 3]),
        (2, [1, 1, 1], [1, 1, 0]),
        (100, [1, 2, 0, 1], [25, 50, 0, 25]),
        (7, [5], [7]),
        (5, [1, 2], [2, 3]),
        (0, [1, 2], [0, 0]),
        (9, [0, 0], [0, 0]),
        (9, [], []),
    ],
)
def test_the_largest_remainders_are_rounded_up(amount: int, weights: list[int], parts: list[int]) -> None:
    assert split_exactly(amount, weights) == parts


@given(AMOUNTS, WEIGHTS)
def test_the_parts_add_up_and_are_fair(amount: int, weights: list[int]) -> None:
    parts, total = split_exactly(amount, weights), sum(weights)
    assert sum(parts) == (amount if total else 0)
    for part, weight in zip(parts, weights, strict=True):
        assert abs(part * total - amount * weight) < max(1, total)
        assert weight or not part


@given(AMOUNTS, WEIGHTS, st.integers(1, 1000))
def test_only_the_proportions_count(amount: int, weights: list[int], factor: int) -> None:
    assert split_exactly(amount, [weight * factor for weight in weights]) == split_exactly(amount, weights)


@pytest.mark.parametrize(("amount", "weights"), [(-1, [1]), (1, [2, -1])])
def test_negative_numbers_are_refused(amount: int, weights: list[int]) -> None:
    with pytest.raises(ValueError, match="zero or more"):
        split_exactly(amount, weights)
