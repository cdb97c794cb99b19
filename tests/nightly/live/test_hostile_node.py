"""A hostile node, at length: it publishes on every topic, and the scheduler answers every question with a pickle."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

import skyward_core as sky
from skyward_core.wire.protocol import (
    BUSY_TIMES,
    DASK_PAGE,
    END_CLIENT,
    HOLD,
    KEPT,
    LIST_CALLS,
    LIST_STACKS,
    POOL_TOPIC,
    WAITING,
)
from tests.unit.live.test_live import url  # noqa: F401 - a fixture
from tests.waiting import wait_until
from tests.worker.hostile import COMMANDS, TRIGGER, lie, watched

QUESTIONS = (
    "identity",
    "processing",
    "gather",
    "skyward_call",
    "skyward_calls",
    "skyward_busy",
    "skyward_load",
    *(BUSY_TIMES, DASK_PAGE, END_CLIENT, HOLD, KEPT, LIST_CALLS, LIST_STACKS, WAITING),
)
DASHBOARD = """
from skyward_core.ledger.ledger import Ledger, default_url
from skyward_core.live.observer import Observer
from skyward_core.live.pool_nodes import find_nodes
with Ledger(default_url()) as ledger:
    nodes = find_nodes(ledger, json.loads(sys.argv[1]))
with Observer(nodes) as observer:
    try:
        observer.dask_page("info/main/workers.html")
    except sky.NodeLost as error:
        print("CODE dashboard 1")
        print(f"skyward: {error}", file=sys.stderr)
"""


@sky.compute
def double(n: int) -> int:
    return 2 * n


@sky.compute
def speak(count: int) -> int:
    import time

    for number in range(count):
        print(f"line {number}", flush=True)
        time.sleep(0.1)
    return count


def opened() -> sky.ComputePool:
    return sky.ComputePool(provider=sky.Local(), concurrency=4, display="quiet")


def test_every_question_that_is_answered_by_a_pickle_is_a_failure_in_words(
    tmp_path: Path, url: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Of each command that looks, and of the opener: no traceback, nothing unpickled, one line of each sender."""
    marks, end = tmp_path / "marks", tmp_path / "end"
    with caplog.at_level(logging.WARNING, "skyward"), opened() as pool:
        call = pool.start_detached(speak(5))
        assert call.result() == 5
        lying = pool.submit(lie(str(marks), [POOL_TOPIC], QUESTIONS, str(end)))
        wait_until(lambda: any("cannot be read" in line for line in caplog.messages), "the first lie")
        commands = [f"{command} {pool.id}" for command in ("metrics", "stacks", "calls", f"logs --call {call.call_id}")]
        for body, argument in ((COMMANDS, commands), (COMMANDS, ["top"]), (DASHBOARD, pool.id)):
            shown = watched(body, argument)
            assert shown.stdout.rstrip().endswith("UNPICKLED []"), shown.stdout + shown.stderr
            assert "Traceback" not in shown.stderr + shown.stdout
        shown = watched(COMMANDS, commands)
        assert [line.rpartition(" ")[2] for line in shown.stdout.splitlines() if line.startswith("CODE")] == ["1"] * 4
        with pytest.raises(sky.NodeLost, match="an answer that is none"):
            call.log()
        end.touch()
        lying.result()
        assert call.log() == [f"line {number}" for number in range(5)], "the scheduler is honest again"
        assert list(pool.map(double, range(1000))) == [2 * n for n in range(1000)]
    firsts = [line for line in caplog.messages if "sends messages that cannot be read" in line]
    assert len(firsts) == len({line.partition(" sends ")[0] for line in firsts})
    assert not any(record.exc_info for record in caplog.records if record.name.startswith("skyward"))
    assert not marks.exists(), list(marks.iterdir())


def test_who_attaches_to_read_the_log_of_a_detached_call_unpickles_nothing(tmp_path: Path, url: Any) -> None:
    """As Airflow's triggerer does, by the lease. It gets all lines of the call, beside the garbage on its topic."""
    marks, end = tmp_path / "marks", tmp_path / "end"
    with opened() as pool:
        lying = pool.submit(lie(str(marks), [POOL_TOPIC], (), str(end)))
        call = pool.start_detached(speak(60))
        shown = watched(TRIGGER, [pool.lease.model_dump(mode="json"), call.call_id])
        end.touch()
        heard = lying.result()
        assert any(call.call_id in topic for topic in heard)
        assert call.result() == 60
        log = Path(str(pool.lease.nodes[0].instance.directory), "log").read_text()
    assert f"a worker of call {call.call_id} of the pool sends messages that cannot be read" in log, (
        "the head drops them"
    )
    assert shown.stdout.rstrip().endswith("UNPICKLED []"), shown.stdout + shown.stderr
    lines = [
        line
        for text in shown.stdout.splitlines()
        for word, _, found in [text.replace("STATE ended", "LINES").partition(" ")]
        if word == "LINES"
        for line in json.loads(found.replace("'", '"'))
    ]
    assert lines == [f"line {number}" for number in range(60)], shown.stdout + shown.stderr
    assert "a worker of the pool sends messages that cannot be read" in shown.stderr
    assert "Traceback" not in shown.stderr
    assert not marks.exists(), list(marks.iterdir())
