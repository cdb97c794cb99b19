"""Scattered values in calls: what they are there, and when they are gone."""

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import skyward_core as sky
from skyward_core.serialization import sources
from skyward_core.wire import shared_values
from skyward_core.wire.messages import Parcel
from skyward_core.wire.settings import memory_directory
from skyward_core.wire.shared_values import value_of
from tests.waiting import wait_until


@sky.compute
def described(array: Any) -> tuple[float, bool, set[str]]:
    """Return the sum, whether the array can be written to, and the large files that the process has mapped."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    return float(array.sum()), array.flags.writeable, {line.split()[4] for line in maps if "/dev/shm/skyward" in line}


@sky.compute
def nested(table: dict[str, Any]) -> tuple[int, str]:
    return len(table["rows"][0]), table["name"]


def summing(rows: list[int]) -> Any:
    return sky.compute(lambda factor: sum(rows) * factor)


def files(pool: sky.ComputePool) -> list[Path]:
    folders = [Path(memory_directory(node.instance.id)) for node in pool.lease.nodes]
    return [path for folder in folders if folder.exists() for path in folder.iterdir()]


def test_calls_share_one_read_only_copy(pool: sky.ComputePool) -> None:
    """Processes map the same file. It is removed with the last reference."""
    before = files(pool)
    rows = sky.scatter(np.ones(50_000))
    first, second = described(rows) @ pool
    assert first == second
    assert first[:2] == (50_000.0, False)
    assert len(first[2]) == 1
    assert pool.map(described, [rows] * 4) == [first] * 4
    assert len(files(pool)) == len(before) + 1
    del rows
    wait_until(lambda: len(files(pool)) <= len(before), "the scattered value to be removed")


def test_a_reference_in_a_container_and_in_a_function(pool: sky.ComputePool) -> None:
    """The value is in its place, also a small one. A runner does not keep a function that reads one."""
    rows, name = sky.scatter(list(range(50_000))), sky.scatter("digits")
    assert nested({"rows": [rows], "name": name}) >> pool == (50_000, "digits")
    before = len(files(pool))
    total = summing(rows)
    assert [total(1) >> pool, *(total(2) @ pool)] == [1_249_975_000, *[2_499_950_000] * 2]
    del rows, total
    gc.collect()
    wait_until(lambda: len(files(pool)) < before, "the scattered value to be removed")


def test_a_call_gets_the_value_as_it_was(pool: sky.ComputePool) -> None:
    """The client may change its own array, and a call its lists, without effect on other calls."""
    array = np.zeros(50_000)
    rows = sky.scatter({"array": array, "list": []})
    array += 1

    @sky.compute
    def changed(table: dict[str, Any]) -> tuple[float, int]:
        table["list"].append(1)
        return float(table["array"].sum()), len(table["list"])

    assert pool.map(changed, [rows] * 4) == [(0.0, 1)] * 4


def test_a_detached_call_takes_no_reference(pool: sky.ComputePool) -> None:
    """It may outlive the reference."""
    with pytest.raises(sky.NotPicklable, match="not in detached calls"):
        pool.start_detached(nested({"rows": sky.scatter(bytes(100_000))}))


def test_what_cannot_travel_cannot_be_scattered() -> None:
    with pytest.raises(sky.NotPicklable, match="generator"):
        sky.scatter(x for x in range(3))


def test_a_value_whose_file_is_gone(tmp_path: Path) -> None:
    """The error says so."""
    shared_values.begin_call({"shared-a": Parcel(b"", (), str(tmp_path / "gone"), ((0, 1),))})
    with pytest.raises(sky.NodeLost, match="scattered value"):
        value_of("shared-a")
    shared_values.begin_call({})


def test_a_reference_inside_a_scattered_value_is_refused() -> None:
    """The message says what to do. A small one travels as its value."""
    with pytest.raises(sky.NotPicklable, match="scatter the value itself as a part of the other one"):
        sky.scatter({"rows": sky.scatter(np.ones(50_000))})
    assert "scattered" in repr(sky.scatter([sky.scatter("digits")]))
    with pytest.raises(sky.NotPicklable, match="not in detached calls"):
        sources.pack(sky.scatter(np.ones(50_000)))


def test_a_reference_says_where_its_value_is() -> None:
    """In the client's process a function that gets it, as with `.local`, has no value."""
    rows: Any = sky.scatter(np.ones(50_000))
    for use in (
        lambda: rows.sum(),
        lambda: rows[0],
        lambda: len(rows),
        lambda: list(rows),
        lambda: described.local(rows),
    ):
        with pytest.raises((AttributeError, TypeError), match="only a reference in this process"):
            use()
    assert rows
    assert not hasattr(rows, "shape")
