"""Deferrable tasks: the worker begins the call, a trigger follows it, and the worker that comes back has the result."""

import importlib.util

import pytest

if importlib.util.find_spec("airflow") is None:
    pytest.skip("Airflow is not installed", allow_module_level=True)

from tests.system.integrations.test_airflow import Airflow, airflow

__all__ = ["airflow"]


def test_a_deferred_task_has_its_result_its_log_and_its_bill(airflow: Airflow) -> None:
    """A trigger follows the call. Result, exception, lines and bill are those of a task that is not deferred; the
    machines are gone.
    """
    ran = airflow.run(
        "deferred",
        """
        @dag(schedule=None)
        def deferred():
            @task.skyward(provider=LOCAL, deferrable=True, map_over="x")
            def square(x):
                import time
                print("squaring", x, flush=True)
                time.sleep(3)
                print("squared", x, flush=True)
                return x * x
            @task.skyward(provider=LOCAL, deferrable=True)
            def fails(): raise LookupError("it fails")
            square([2, 3]), fails()
        deferred()
        """,
    )
    assert ran.xcoms["square", -1, "return_value"] == [4, 9]
    assert [
        ran.log.count(f"{word} {x}\n") + ran.log.count(f"{word} {x} ")
        for word in ("squaring", "squared")
        for x in (2, 3)
    ] == [1] * 4
    assert "LookupError: it fails" in ran.log
    for name in ("square", "fails"):
        bill = ran.bill(name)
        assert bill["is_final"]
        assert bill["cost_usd"] > 0
        assert bill["all_tries_usd"] == bill["cost_usd"]


def test_a_trigger_leaves_the_pool_unless_the_user_ends_the_task(airflow: Airflow) -> None:
    """Two triggerers may follow one call. `cleanup` ends neither call nor pool; `on_kill` ends both."""
    code = """
        import asyncio
        from airflow_provider_skyward.triggers import SkywardTrigger
        def work():
            import time
            print("working", flush=True)
            time.sleep(600)
        pool = sky.ComputePool(provider=LOCAL, display="quiet").open()
        call = pool.start_detached(sky.compute(work)(), call_id="a/1/0")
        pool.detach(600)
        def alive():
            return len(sky.Local().instances(pool.id))
        async def follow():
            triggers = [SkywardTrigger(pool.id, ["a/1/0"], [0]) for _ in range(2)]
            async def first(trigger):
                return [event async for event in trigger.run()]
            tasks = [asyncio.create_task(first(trigger)) for trigger in triggers]
            while not all(trigger.cursors[0] for trigger in triggers):
                await asyncio.sleep(0.1)
            found = []
            for trigger, task, ends in zip(triggers, tasks, (False, True)):
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                if ends:  # Airflow's order after an action of the user
                    await trigger.on_kill()
                await trigger.cleanup()
                found.append(alive())
            return found
        answer = asyncio.run(follow())
    """
    assert airflow.evaluate(code) == [1, 0]
