"""`skyward quote program.py`: the pools that the text of a program makes, without a line of it being run."""

from importlib.metadata import entry_points
from pathlib import Path

import pytest

import skyward_core as sky
from skyward_core.provisioning.script_plan import planned_tasks

HEAD = """
import os
import skyward_core as sky
import skyward_core as other
from skyward_core import ComputePool, PoolSpec
from skyward_core.accelerators import H100
from skyward_core.integrations import ScikitLearnPool
HOURS = 2
LOCAL = sky.Local(price_per_hour=3.0)
twice = 1
twice = 2
raise SystemExit("nothing of the program runs")
"""
LOCAL = sky.Local(price_per_hour=3.0)


def planned(tmp_path: Path, line: str) -> sky.PlannedTask:
    (tmp_path / "train.py").write_text(f"{HEAD}def main(n):\n    {line}\n")
    plan = planned_tasks(str(tmp_path / "train.py"))
    assert plan is not None
    (task,) = plan.tasks
    assert (task.workflow, task.task) == ("train.py", "line 14")
    return task


@pytest.mark.parametrize(
    ("line", "fields"),
    [
        ("with sky.ComputePool(provider=LOCAL, nodes=2): pass", {"nodes": 2}),
        ("pool = ComputePool(provider=LOCAL, max_lifetime=HOURS * 3600, on_event=print)", {"max_lifetime": 7200}),
        ("other.ComputePool(provider=[LOCAL], nodes=(1, 4), max_cost=5.0)", {"nodes": (1, 4), "max_cost": 5.0}),
        ("sky.ComputePool(provider=LOCAL, accelerator=H100(count=2))", {"accelerator": sky.accelerators.H100(count=2)}),
        ("sky.ComputePool(provider=LOCAL, image=sky.Image(pip=['torch']))", {"image": sky.Image(pip=["torch"])}),
        ("ComputePool.from_spec(PoolSpec.of(provider=LOCAL, nodes=3))", {"nodes": 3}),
        ("spec = PoolSpec.of(provider=LOCAL, nodes=3); ComputePool(spec=spec)", {"nodes": 3}),
        ("ScikitLearnPool(provider=LOCAL, sklearn_version='1.7')", {}),
    ],
)
def test_what_the_text_says_is_the_spec(tmp_path: Path, line: str, fields: dict) -> None:
    assert planned(tmp_path, line).spec == sky.PoolSpec.of(provider=LOCAL, **fields)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("sky.ComputePool(nodes=n)", "n is known only when the program runs"),
        ("sky.ComputePool(nodes=twice)", "twice is known only when the program runs"),
        ("sky.ComputePool(max_cost=float(os.environ['M']))", "float(os.environ['M']) is known only"),
        ("sky.ComputePool(**options)", "** is known only when the program runs"),
        ("sky.ComputePool(nodes=HOURS * 'x')", "'x' is known only"),
        ("sky.ComputePool.from_spec(n)", "n is known only when the program runs"),
        ("sky.ComputePool(nodes=sky.offers()[0])", "sky.offers()[0] is known only"),
        ("sky.ComputePool(max_cots=3)", "did you mean 'max_cost'?"),
        ("sky.ComputePool(image=sky.Image(pip='torch'))", "write a list of texts"),
    ],
)
def test_what_only_a_run_decides_is_named(tmp_path: Path, line: str, reason: str) -> None:
    task = planned(tmp_path, line)
    assert task.spec is None
    assert reason in task.reason


def test_other_targets_are_not_its_own(tmp_path: Path) -> None:
    """A folder, another file, and a program that makes no pool of this library."""
    (tmp_path / "other.py").write_text("import sky\nsky.ComputePool(nodes=2)\nComputePool()\n")
    for target in (tmp_path, tmp_path / "other.py", tmp_path / "nonesuch.py", "module:name"):
        assert planned_tasks(str(target)) is None


def test_a_file_that_is_no_program_is_refused_in_words(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("def main(:\n")
    with pytest.raises(sky.BadRequest, match=r"broken\.py cannot be read: invalid syntax"):
        planned_tasks(str(tmp_path / "broken.py"))


def test_the_command_asks_it() -> None:
    """By the entry point of the installed package."""
    (entry,) = entry_points(group="skyward.quotes", name="program")
    assert entry.load() is planned_tasks
