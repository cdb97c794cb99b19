"""Bad input gets a clear error before anything starts."""

import threading
from pathlib import Path
from typing import Any

import pytest

import skyward_core as sky
from skyward_core.providers import local


@sky.compute
def double(x: int) -> int:
    return 2 * x


@pytest.mark.parametrize(
    "options", [{"accelerator": "B200", "provider": sky.Local(simulate="A100")}, {"memory": "1000TB"}], ids=str
)
def test_more_than_this_machine_has_is_no_capacity(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local.Local, "launch", lambda *_: pytest.fail("a machine was launched"))
    with pytest.raises(sky.NoCapacity, match=r"B200|memory"):
        sky.ComputePool(**{"provider": sky.Local(), "display": "quiet", **options}).open()


def test_nothing_of_a_map_or_a_batch_runs_if_a_part_of_it_cannot(pool: sky.ComputePool, tmp_path: Path) -> None:
    """Iterables of different lengths, and a second call that cannot be pickled."""

    def touch(name: str, _: object) -> None:
        (tmp_path / name).touch()

    with pytest.raises(sky.BadRequest, match="zip"):
        pool.map(touch, ["a", "b", "c"], [1, 2])
    call = sky.compute(touch)
    with pytest.raises(sky.NotPicklable):
        sky.gather(call("d", 1), call("e", threading.Lock())) >> pool
    assert double(1) @ pool == (2, 2)
    assert list(tmp_path.iterdir()) == []


def test_only_calls_are_run(pool: sky.ComputePool) -> None:
    wrong: Any
    for wrong in (double, double.local, 42):
        for run in (pool.submit, pool.run):
            with pytest.raises(TypeError, match=r"@sky\.compute"):
                run(wrong)


def test_an_unpicklable_closure_is_named(pool: sky.ComputePool) -> None:
    guard = threading.Lock()

    @sky.compute
    def work() -> bool:
        return guard.locked()

    with pytest.raises(sky.NotPicklable, match="guard"):
        work() >> pool
    assert double(1) >> pool == 2
