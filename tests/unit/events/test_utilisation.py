"""What a use of a pool knows of its nodes and of its calls' reports."""

import math

import pytest

import skyward_core as sky


def sample(cpu: float, instance_id: str = "i-0", *, memory: float = 10.0, gpu: float | None = None) -> sky.Metrics:
    used = None if gpu is None else 800 * gpu
    return sky.Metrics(
        instance_id,
        0,
        cpu,
        memory,
        320 * memory,
        32_000,
        gpu_utilization=gpu,
        gpu_memory_used_mb=used,
        gpu_memory_total_mb=80_000,
    )


def report(step: int | None, **values: float) -> sky.CallReported:
    return sky.CallReported(0, "i-0", "call", step, values, 0.0)


def use_after(*events: sky.SkywardEvent) -> sky.Utilisation:
    use = sky.Utilisation()
    for event in events:
        use.see(event)
    return use


RUNNING, ENDED = sky.CallProgress(3, 1, 0, 1), sky.CallProgress(3, 2, 0, 1)


def test_samples_count_while_calls_run():
    """All nodes, and of each the first sample after the end: it is of the two seconds before it."""
    idle, busy = sample(100.0), [sample(10.0), sample(30.0, "i-1", memory=50.0)]
    use = use_after(idle, RUNNING, *busy, ENDED, sample(50.0), idle, sample(70.0, "i-1"), sample(100.0, "i-1"))
    assert use.numbers() == {
        "cpu_percent_mean": 40.0,
        "cpu_percent_max": 70.0,
        "memory_percent_mean": 20.0,
        "memory_percent_max": 50.0,
    }
    assert use.words() == "processor 40 % (most 70 %), memory 20 % (most 50 %)"
    assert (use.memory_gb.mean, use.memory_gb.greatest) == (pytest.approx(6.4), 16.0)


def test_without_calls_there_are_no_numbers():
    use = use_after(sample(100.0), ENDED, sample(100.0))
    assert (use.numbers(), use.words(), use.last_values()) == ({}, "", {})


def test_accelerators_and_their_memory():
    numbers = use_after(RUNNING, sample(0.0, gpu=20.0), sample(0.0, gpu=60.0)).numbers()
    assert numbers["gpu_percent_mean"] == numbers["gpu_memory_percent_mean"] == 40.0
    assert numbers["gpu_percent_max"] == numbers["gpu_memory_percent_max"] == 60.0


def test_the_nodes_now_are_those_that_live():
    use = use_after(RUNNING, sample(10.0), sample(20.0), sample(60.0, "i-1"))
    assert use.now()["cpu_percent"] == 40.0
    use.see(sky.InstanceLost("i-1", 1, "gone"))
    assert use.now()["cpu_percent"] == 20.0


def test_the_last_values_of_all_reports_also_those_that_are_no_numbers_any_more():
    use = use_after(report(1, loss=2.0), report(2, loss=1.0, lr=0.1), report(None, lr=math.nan, best=-math.inf))
    assert use.last_values() == {"loss": 1.0, "lr": "NaN", "best": "-Infinity"}
    assert use.step == 2
    assert [(name, its.text, its.count) for name, its in use.reported.items()] == [
        ("loss", "1", 2),
        ("lr", "NaN", 1),
        ("best", "-Infinity", 0),
    ]


@pytest.mark.parametrize("calls", [1, 2])
def test_a_use_of_some_of_the_pool_s_calls_counts_them_itself(calls: int):
    use = sky.Utilisation()
    use.running(calls)
    use.see(sample(30.0))
    use.running(0)
    for cpu in (50.0, 100.0):
        use.see(sample(cpu))
    assert use.numbers()["cpu_percent_max"] == 50.0
