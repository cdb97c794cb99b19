"""Exceptions on their way from a node to their caller: with their own class, and with everything that can travel."""

from tblib import pickling_support  # type: ignore[import-untyped]

from tests.unit.serialization.test_exceptions import (
    assert_arrives_unchanged,
)

pickling_support.install()  # as Dask does, for every class of exceptions: it loses slots


def test_an_exception_of_scikit_learn_arrives_unchanged() -> None:
    """It is imported here, because the import takes a second."""
    from sklearn.exceptions import NotFittedError

    assert_arrives_unchanged(NotFittedError("not yet"))
