"""The pages for contributors are correct: their links and the tests that they name exist."""

import ast
import re
from collections.abc import Iterator

from tests.unit.test_pages import (
    called,
    calls_of_the_core,
    rows_below,
)

LOCKS = {"Lock", "RLock", "Condition", "Semaphore", "BoundedSemaphore", "Barrier", "SmallCondition", "allocate_lock"}


def test_the_architecture_names_each_lock() -> None:
    """A lock is identified by package, class and attribute."""
    listed = set(re.findall(r"`([^`]+)`", " ".join(row[0] for row in rows_below("Locks"))))
    there = set(locks_of_the_core())
    assert there == listed, (
        f"not on the page: {sorted(there - listed)}; on the page and not in the code: {sorted(listed - there)}"
    )


def locks_of_the_core() -> Iterator[str]:
    for place, call, _, target in calls_of_the_core():
        if called(call) in LOCKS and "super()" not in ast.unparse(call):
            package, *classes = place.split(".")[:-1] if "." in place else [place]
            yield ".".join([package, *classes, target or place.rpartition(".")[2]])
