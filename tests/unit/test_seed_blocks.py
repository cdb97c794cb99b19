"""Every code block of the user's documents runs as it stands there, or is refused with a message that says what to
write.

`seed_blocks.txt` has the blocks, each with the number of its document (shared/seeds: 000 the guide to accelerators, 001
their reference, 002 and 004 the introductions, 003 the API) and its line. The documents import `skyward`; that name is
`skyward_core` here. Blocks that open a pool run on this machine.
"""

import ast
import dataclasses
import inspect
import re
import sys
import types
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import asyncssh  # noqa: F401 - its first import runs ldconfig, and a unit test starts no process
import pytest

import skyward_core as sky
from tests.offers import offer

BLOCKS = dict(
    re.findall(
        r"^=== (\S+)\n(.*?)(?=^=== |\Z)", (Path(__file__).parents[1] / "seed_blocks.txt").read_text(), re.S | re.M
    )
)

INCLUDES = ["000:9", "000:32", "000:42"]
"""Lines that a documentation tool replaces with parts of a file; they are no Python."""
SIGNATURES: dict[str, Callable[..., Any]] = {
    "003:50": sky.gather,
    "003:109": sky.ComputePool.run,
    "003:114": sky.ComputePool.run_batch,
    "003:119": sky.ComputePool.broadcast,
    "003:189": sky.Image.content_hash,
    "003:194": sky.Image.bootstrap,
    "003:414": sky.shard,
    "003:478": sky.instance_info,
}
DATACLASSES = ["003:488", "003:508", "003:537", "003:554", "003:578", "003:590", "003:611"]
REFUSED = {
    "001:123": (sky.PoolClosed, "with"),
    "001:193": (sky.BadRequest, r"image=Image\(pip="),
    "001:215": (sky.BadRequest, r"image=Image\(pip="),
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
OTHERS = sorted({*BLOCKS} - {*INCLUDES, *SIGNATURES, *DATACLASSES, *REFUSED, "003:64", *ON_POOLS, *WITH_TORCH})


@pytest.fixture(autouse=True)
def skyward(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    """The module `skyward` of the documents."""
    module = types.ModuleType("skyward")
    module.__dict__["__getattr__"] = lambda name: getattr(sky, name)
    monkeypatch.setitem(sys.modules, "skyward", module)
    monkeypatch.setitem(sys.modules, "skyward.integrations", sky.integrations)
    yield module


def run(key: str, **names: Any) -> dict[str, Any]:
    """Run a block; return its names."""
    found = {name: getattr(sky, name) for name in dir(sky) if not name.startswith("_")}
    found.update({"sky": sky, **PREPARED.get(key, {}), **names})
    exec(compile(BLOCKS[key], f"seed block {key}", "exec"), found)
    return found


@pytest.mark.parametrize("key", OTHERS)
def test_a_block_runs(key: str) -> None:
    found = run(key)
    if key == "003:740":
        assert found["instance"].instance_type == "fits"
    if key == "003:328":
        assert found["NVIDIA"].__args__[0] == "T4"
    assert found


@pytest.mark.parametrize("key", REFUSED)
def test_a_block_is_refused_with_what_to_write(key: str) -> None:
    kind, text = REFUSED[key]
    with pytest.raises(kind, match=text):
        run(key)


@pytest.mark.parametrize("key", SIGNATURES)
def test_a_function_has_the_parameters_of_its_signature(key: str) -> None:
    """Their names, their order, their defaults; ours may have more."""
    text = re.sub(r"^from .*$|\s*->.*$", "", BLOCKS[key], flags=re.M).strip().removeprefix("def ")
    expected = inspect.signature(_defined(f"def {text}: pass")).parameters.values()
    ours = [own for own in inspect.signature(SIGNATURES[key]).parameters.values() if own.name != "self"]
    for one, own in zip(expected, ours, strict=False):
        assert (one.name, one.kind, one.default) == (own.name, own.kind, own.default)
    assert len(ours) >= len(expected)


def _defined(text: str) -> Callable[..., Any]:
    """Return the function that a text defines; its annotations are not evaluated."""
    names: dict[str, Any] = {}
    exec(f"from __future__ import annotations\n{text}", names)
    return next(value for value in names.values() if isinstance(value, types.FunctionType))


@pytest.mark.parametrize("key", DATACLASSES)
def test_a_dataclass_has_the_fields_of_its_declaration(key: str) -> None:
    """Their names and their order; ours may have more."""
    declared = [node for node in ast.parse(BLOCKS[key]).body if isinstance(node, ast.ClassDef)]
    for one in declared:
        names = [
            line.target.id for line in one.body if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
        ]
        assert [field.name for field in dataclasses.fields(getattr(sky, one.name))][: len(names)] == names
    assert declared
