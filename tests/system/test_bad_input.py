"""Bad input gets a clear error before anything starts."""

import threading
from typing import Any

import pytest

import skyward_core as sky
from tests.unit.test_bad_input import double, nothing_starts  # noqa: F401 - fixtures


def test_an_accelerator_that_this_machine_lacks_is_no_capacity() -> None:
    """On Local without that GPU, opening the pool raises NoCapacity with the requested and the existing GPUs."""
    with pytest.raises(sky.NoCapacity, match="B200"):
        sky.ComputePool(provider=sky.Local(), accelerator="B200", display="quiet").open()


def test_more_memory_than_this_machine_has_is_no_capacity() -> None:
    """A worker that is larger than the machine is refused before it starts."""
    with pytest.raises(sky.NoCapacity, match="memory"):
        sky.ComputePool(provider=sky.Local(), memory="1000TB", display="quiet").open()


# these need an open pool, and launch no machine of their own


@pytest.fixture
def opened(pool: sky.ComputePool, monkeypatch: pytest.MonkeyPatch) -> sky.ComputePool:
    """The shared pool."""
    return pool


def test_map_over_different_lengths_runs_nothing(opened: sky.ComputePool, tmp_path: Any) -> None:
    """Iterables of different lengths are refused before any call runs, and the message says what to do."""

    def touch(name: str, _: int) -> None:
        (tmp_path / name).touch()

    with pytest.raises(sky.BadRequest, match="zip"):
        opened.map(touch, ["a", "b", "c"], [1, 2])
    assert double(1) @ opened == (2, 2)
    assert list(tmp_path.iterdir()) == []


def test_only_calls_are_run(opened: sky.ComputePool) -> None:
    """submit and run of any other object name what is missing."""
    for wrong in (double, double.local, 42):
        with pytest.raises(TypeError, match=r"@sky\.compute"):
            opened.submit(wrong)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"@sky\.compute"):
            opened.run(wrong)  # type: ignore[arg-type]


def test_an_unpicklable_closure_is_named(opened: sky.ComputePool) -> None:
    """A function that closes over a lock is refused at once; the message names the variable."""
    guard = threading.Lock()

    @sky.compute
    def work() -> bool:
        return guard.locked()

    with pytest.raises(sky.NotPicklable, match="guard"):
        work() >> opened
    assert double(1) >> opened == 2


def test_no_call_of_a_batch_runs_if_one_cannot_be_pickled(opened: sky.ComputePool, tmp_path: Any) -> None:
    """When the second call of a gather cannot be pickled, the first one does not run either."""

    @sky.compute
    def touch(_: Any) -> None:
        (tmp_path / "ran").touch()

    with pytest.raises(sky.NotPicklable):
        sky.gather(touch(1), touch(threading.Lock())) >> opened
    assert double(1) @ opened == (2, 2)
    assert list(tmp_path.iterdir()) == []
