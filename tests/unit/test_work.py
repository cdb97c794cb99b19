"""The work of a pool: in the ledger, the receipt, the tags of the machines, and the sums of costs."""

import json
import os
import pickletools
from collections.abc import Iterator
from contextvars import copy_context
from dataclasses import replace

import pytest

import skyward_core as sky
from skyward_core.engine.packing import ArgumentPacker, surroundings_of_calls
from skyward_core.providers.tagging import work_tags
from skyward_core.work import WORK_CHARACTERS, paid_by, paying_use
from skyward_core.worker import runner

TRAIN = sky.Work(
    system="airflow", workflow="nightly", run="manual__2026-11-22T07:00:00+00:00", task="train", attempt="1"
)


def test_a_work_is_plain_text_of_bounded_length() -> None:
    """Any text of an orchestrator fits into the ledger's columns; two that differ only at their ends stay different."""
    assert sky.Work(attempt=2).attempt == "2"  # type: ignore[arg-type]
    assert sky.Work(run="a\nb\x00c\x1b[0m").run == "a?b?c?[0m"
    one, other = (sky.Work(asset="a, " * 400 + end).asset for end in "xy")
    assert len(one) == len(other) == WORK_CHARACTERS
    assert one != other
    assert sky.Work(asset=one).asset == one


def test_tags_have_only_text_that_clouds_accept() -> None:
    tags = work_tags(replace(TRAIN, task_run="[a|b]", asset="x" * 300, partition="  "))
    assert set(tags) == {
        f"skyward-work-{name}"
        for name in ("system", "workflow", "run", "task", "task-run", "attempt", "asset", "partition")
    }
    assert tags["skyward-work-run"] == TRAIN.run
    assert tags["skyward-work-task-run"] == "_a_b_"
    assert len(tags["skyward-work-asset"]) == 120
    assert tags["skyward-work-partition"] == "_"
    assert work_tags(sky.Work()) == {}


@sky.compute
def tags() -> dict[str, str]:
    import os

    return json.loads(os.environ["SKYWARD_TAGS"])


def test_a_run_context_travels_as_plain_values() -> None:
    """Plain arguments stay so beside it: the slow pickler is for functions and for objects of classes."""
    context = sky.RunContext(system="prefect", run_id="r-1", tags=("b", "a"), parameters={"rate": 0.5}, run_count=2)
    assert sky.RunContext(*context.plain()) == context
    with sky.running_for(context):
        packer = ArgumentPacker(None, None, is_copied=False, surroundings=surroundings_of_calls())
    parcel = packer.arguments(sky.PendingCompute(len, ([1],)))
    names = [argument for code, argument, _ in pickletools.genops(parcel.data) if code.name.endswith("GLOBAL")]
    assert names == []


def test_the_variables_of_a_run_are_those_of_its_calls_and_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OF_THE_NODE", "before")
    with sky.running_for(sky.RunContext(env={"OF_THE_NODE": "during", "OF_THE_CALL": "yes"})):
        variables = surroundings_of_calls().env
    with pytest.raises(LookupError), runner._variables(variables):
        assert (os.environ["OF_THE_NODE"], os.environ["OF_THE_CALL"]) == ("during", "yes")
        raise LookupError
    assert (os.environ["OF_THE_NODE"], os.environ.get("OF_THE_CALL")) == ("before", None)


def test_a_block_of_a_use_may_end_in_another_context() -> None:
    """A generator that several tasks of asyncio drive, as Dagster does, has another context in each of them."""

    def steps() -> Iterator[str]:
        with paid_by("use"):
            yield paying_use()

    one = steps()
    assert copy_context().run(next, one) == "use"
    assert list(one) == []
    assert paying_use() == ""
