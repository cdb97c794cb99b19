"""asyncio programs on real pools: many calls with cancellations and time-outs, and pools that open under a deadline."""

import asyncio
from pathlib import Path

import pytest

import skyward_core as sky
from tests.system.pool.test_aio_programs import endless, fail, living, square


def test_a_pool_lives_in_a_coroutine(tmp_path: Path) -> None:
    """Opened and closed by `async with`; a task group whose member fails stops the calls of the others."""

    async def program() -> sky.ComputePool:
        async with sky.ComputePool(provider=sky.Local(), display="quiet") as pool:
            assert await pool.arun(square(3)) == 9
            assert await (square(4) >> pool.aio) == 16
            assert await (square(5) @ pool.aio) == (25,)
            assert await pool.arun(square(1) & square(2)) == (1, 4)
            assert await pool.aio.map(square, range(100)) == [x * x for x in range(100)]
            with pool.executor() as executor:
                assert await asyncio.get_running_loop().run_in_executor(executor, square.local, 6) == 36
            with pytest.raises(ExceptionGroup) as caught:
                async with asyncio.TaskGroup() as group:
                    group.create_task(pool.arun(fail(1)))
                    group.create_task(pool.arun(endless(str(tmp_path))))
            assert caught.group_contains(LookupError)
            assert await pool.arun(square(7)) == 49
            for wrong in (3, square):
                with pytest.raises(TypeError, match="a pool runs pending calls"):
                    await pool.arun(wrong)  # type: ignore[call-overload]
        return pool

    pool = asyncio.run(program())
    assert not pool.is_active
    assert pool.receipt is not None
    assert living(tmp_path) == []


@pytest.mark.parametrize("seconds", [0.3, 1.0])
def test_a_pool_whose_opening_is_cancelled_leaves_nothing(seconds: float) -> None:
    """At any time: its machines are ended, and its ledger is closed, before the time-out is raised."""

    async def program() -> None:
        async with asyncio.timeout(seconds), sky.ComputePool(provider=sky.Local(), display="quiet"):
            await asyncio.Event().wait()

    with pytest.raises(TimeoutError) as caught:
        asyncio.run(program())
    assert not hasattr(caught.value.__cause__, "__notes__")
