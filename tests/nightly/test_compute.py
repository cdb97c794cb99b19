"""The operators alone, with a runner that records what it receives."""

import re
from pathlib import Path

import pytest

from tests.system.test_compute import (
    pyright,
)

# ── type checking ────────────────────────────────────────────────────────────────────────────────────────────────────

WRONG = """
from typing import assert_type
import skyward_core as sky

@sky.compute
def add(a: int, b: int) -> int:
    return a + b

@sky.compute
def name() -> str:
    return ""

def use(pool: sky.ComputePool) -> None:
    add("1", 2) >> pool  # 14
    add(1) >> pool  # 15
    number: str = add(1, 2) >> pool  # 16
    add(1, 2) >> 3  # 17
    add >> pool  # 18
    first: int = (name() & add(1, 2)) >> pool  # 19
    pair: tuple[int, str] = (name() & add(1, 2)) >> pool  # 20
    add(1, 2) & 5  # 21
    everywhere: list[int] = add(1, 2) @ pool  # 22
    text: str = pool.submit(add(1, 2)).result()  # 23
    assert_type(pool.map(add, [1], [2]), list[str])  # 24
"""


@pytest.mark.timeout(300)
def test_wrong_uses_are_refused_by_the_type_checker(tmp_path: Path) -> None:
    """Pyright finds an error on each line with a wrong use of a call."""
    (tmp_path / "wrong.py").write_text(WRONG)
    done = pyright(tmp_path / "wrong.py")
    expected = {n for n, line in enumerate(WRONG.splitlines(), 1) if "  # " in line}
    found = {int(match[1]) for match in re.finditer(r"wrong\.py:(\d+):\d+ - error: (?!.*reportUnused)", done.stdout)}
    assert found == expected, done.stdout
