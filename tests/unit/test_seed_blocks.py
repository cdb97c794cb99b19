"""Every code block of the user's documents runs as it stands there, or is refused with a message that says what to
write.

`seed_blocks.txt` has the blocks, each with the number of its document (shared/seeds: 000 the guide to accelerators, 001
their reference, 002 and 004 the introductions, 003 the API) and its line. Signatures and dataclasses are tables here;
blocks of accelerators alone are rows of test_seed_tables.py. The documents import `skyward`, which is `skyward_core`.
"""

import ast
import dataclasses
import inspect
import re
import sys
import textwrap
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import asyncssh  # noqa: F401 - its first import runs ldconfig, and a unit test starts no process
import pytest

import skyward_core as sky
from tests.offers import offer

TEXT = (Path(__file__).parents[1] / "seed_blocks.txt").read_text()
BLOCKS = dict(re.findall(r"^=== (\S+)\n(.*?)(?=^=== |\Z)", TEXT, re.S | re.M))
REFUSED = {
    "001:123": (sky.PoolClosed, "with"),
}
ON_POOLS = ["003:132", "003:759", "003:786", "003:813"]
WITH_TORCH = ["002:29", "003:443", "003:462", "004:29"]
OFFERS = [
    offer(name, price, vcpus=vcpus, memory_gb=memory_gb, accelerator="H100", accelerators=1)
    for name, price, vcpus, memory_gb in [("small", 2.0, 16, 64), ("large", 9.0, 96, 512), ("fits", 4.0, 32, 128)]
]
PREPARED: dict[str, dict[str, Any]] = {
    "001:123": {"train": sky.compute(lambda: 1)},
    "003:328": {"Literal": typing.Literal},
    "003:630": {f"callback{number}": lambda event: event for number in (1, 2, 3)},
    "003:640": {"Metrics": lambda _: sky.Metrics("i-1", 0, 1.0, 2.0, 3.0, 4.0)},
    "003:650": {"my_callback": lambda event: None},
    "003:740": {"available_instances": OFFERS},
}


@pytest.fixture(autouse=True)
def skyward(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """The module `skyward` of the documents."""
    module = types.ModuleType("skyward")
    module.__dict__["__getattr__"] = lambda name: getattr(sky, name)
    monkeypatch.setitem(sys.modules, "skyward", module)
    monkeypatch.setitem(sys.modules, "skyward.integrations", sky.integrations)
    return module


def run(key: str, **names: Any) -> dict[str, Any]:
    """Run a block; return its names."""
    found = {name: getattr(sky, name) for name in dir(sky) if not name.startswith("_")}
    found.update({"sky": sky, **PREPARED.get(key, {}), **names})
    exec(compile(BLOCKS[key], f"seed block {key}", "exec"), found)
    return found


@pytest.mark.parametrize("key", sorted({*BLOCKS} - {*REFUSED, "003:64", *ON_POOLS, *WITH_TORCH}))
def test_a_block_runs(key: str) -> None:
    found = run(key)
    if key == "003:740":
        assert found["instance"].instance_type == "fits"
    if key == "003:328":
        assert found["NVIDIA"].__args__[0] == "T4"


@pytest.mark.parametrize("key", REFUSED)
def test_a_block_is_refused_with_what_to_write(key: str) -> None:
    kind, text = REFUSED[key]
    with pytest.raises(kind, match=text):
        run(key)


@pytest.mark.parametrize(
    ("function", "written"),
    [
        (sky.gather, "*computations"),  # 003:50
        (sky.ComputePool.run, "pending"),  # 003:109
        (sky.ComputePool.run_batch, "batch"),  # 003:114
        (sky.ComputePool.broadcast, "pending"),  # 003:119
        (sky.Image.content_hash, ""),  # 003:189
        (sky.Image.bootstrap, "ttl=0"),  # 003:194
        (sky.shard, "*arrays, shuffle=False, seed=None"),  # 003:414
        (sky.instance_info, ""),  # 003:478
    ],
)
def test_a_function_has_the_parameters_of_its_signature(function: Callable[..., Any], written: str) -> None:
    """Ours may have more."""
    expected = inspect.signature(eval(f"lambda {written}: None")).parameters.values()
    ours = [own for own in inspect.signature(function).parameters.values() if own.name != "self"]
    for one, own in zip(expected, ours, strict=False):
        assert (one.name, one.kind, one.default) == (own.name, own.kind, own.default)
    assert len(ours) >= len(expected)


GPU = "gpu_utilization gpu_memory_used_mb gpu_memory_total_mb gpu_temperature"
COUNTS = "hourly_rate spot_count ondemand_count"
FIELDS = {
    # 003:488 to 003:611
    "InstanceInfo": "node total_nodes is_head accelerators head_addr head_port job_id worker workers_per_node",
    "InfraCreating": "",
    "InfraCreated": "region",
    "InstanceLaunching": "count instance_type provider",
    "InstanceProvisioned": "instance_id node spot provider ip instance_type price_on_demand price_spot",
    "BootstrapStarting": "instance_id",
    "BootstrapProgress": "instance_id step",
    "BootstrapCompleted": "instance_id",
    "Metrics": f"instance_id node cpu_percent memory_percent memory_used_mb memory_total_mb {GPU}",
    "LogLine": "node instance_id line timestamp",
    "InstanceStopping": "instance_id",
    "PoolStopping": "",
    "CostUpdate": f"elapsed_seconds accumulated_cost {COUNTS}",
    "CostFinal": f"total_cost total_seconds {COUNTS} savings_vs_ondemand",
    "Error": "message instance_id",
}


@pytest.mark.parametrize("name", FIELDS)
def test_a_dataclass_has_the_fields_of_its_declaration(name: str) -> None:
    """In this order; ours may have more."""
    fields = [field.name for field in dataclasses.fields(getattr(sky, name))]
    assert fields[: len(FIELDS[name].split())] == FIELDS[name].split()


def test_the_lines_of_the_guide_that_a_document_quotes_are_whole() -> None:
    """000 quotes lines of examples/guides/04_gpu_accelerators.py: the detection, the benchmark and the pool."""
    lines = (Path(__file__).parents[2] / "examples/guides/04_gpu_accelerators.py").read_text().splitlines()
    quoted = [textwrap.dedent("\n".join(lines[first - 1 : last])) for first, last in ((6, 9), (12, 39), (43, 47))]
    detection, benchmark = (ast.parse(block).body for block in quoted[:2])
    pool = ast.parse(f"{quoted[2]}\n    pass").body
    assert [type(one) for one in (*detection, *benchmark, *pool)] == [ast.FunctionDef, ast.FunctionDef, ast.With]
