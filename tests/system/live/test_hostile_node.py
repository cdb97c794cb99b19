"""A call of a node has the pool's certificate, and lies to everybody: nobody who looks unpickles anything."""

import logging
from pathlib import Path
from typing import Any

import pytest

import skyward_core as sky
from skyward_core.wire.protocol import LIST_CALLS, POOL_TOPIC
from tests.unit.live.test_live import url  # noqa: F401 - a fixture
from tests.waiting import wait_until
from tests.worker.hostile import COMMANDS, GARBAGE, lie, watched


@sky.compute
def double(n: int) -> int:
    return 2 * n


def test_who_looks_at_a_pool_unpickles_nothing_of_its_nodes(
    tmp_path: Path, url: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A call publishes pickles and garbage on the topics of the pool and of its opener, and lets the scheduler answer
    a question with a pickle. `skyward metrics` and `skyward calls` say what they know, and load none. The opener goes
    on; it logs one line at first, and at the end how many there were.
    """
    marks, end = tmp_path / "marks", tmp_path / "end"
    with caplog.at_level(logging.WARNING, "skyward"):
        with sky.ComputePool(provider=sky.Local(), concurrency=2, display="quiet") as pool:
            lying = pool.submit(lie(str(marks), [POOL_TOPIC], [LIST_CALLS], str(end)))
            wait_until(lambda: any("cannot be read" in line for line in caplog.messages), "the first lie")
            shown = watched(COMMANDS, [f"metrics {pool.id} --json", f"calls {pool.id}"])
            assert shown.stdout.rstrip().endswith("UNPICKLED []"), shown.stdout + shown.stderr
            assert f"CODE metrics {pool.id} --json 0" in shown.stdout
            assert '"cpu_percent"' in shown.stdout
            assert f"a node of pool {pool.id} sends messages that cannot be read" in shown.stderr
            assert "has sent an answer that is none" in shown.stderr
            assert list(pool.map(double, range(100))) == [2 * n for n in range(100)]
            end.touch()
            assert len(lying.result()) == 2
    lines = [line for line in caplog.messages if line.startswith("a worker of the pool")]
    assert "sends messages that cannot be read" in lines[0]
    number = int(
        lines[-1].removeprefix("a worker of the pool: ").removesuffix(" messages in all that could not be read")
    )
    assert number >= 2 * GARBAGE
    assert len(lines) == 1 + len(str(number)), "at each tenfold, and at the end"
    assert not marks.exists(), list(marks.iterdir())
