"""Two notebooks in real kernels, run by nbclient: the display, interrupted cells, asyncio, and a kernel that is killed."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import processes_by_tag
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]
CALLS = 300

DEFINITIONS = """
import os, pathlib, time
import skyward_core as sky
FOLDER = pathlib.Path({folder!r})
INTERRUPT = FOLDER / "interrupt"

@sky.compute
def square(x):
    print("<b>", x)
    return x * x

@sky.compute
def endless(signal):
    print("endless begins")
    (FOLDER / "pid").write_text(str(os.getpid()))
    (FOLDER / signal).touch()
    while True:
        time.sleep(60)

@sky.compute
def items():
    yield 1
    INTERRUPT.touch()
    while True:
        time.sleep(60)

def has_ended():
    "Wait for the end of the process of `endless`."
    process = pathlib.Path("/proc", (FOLDER / "pid").read_text())
    deadline = time.monotonic() + 60
    while process.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    return not process.exists()

def interrupt_bootstrap(event):
    if isinstance(event, sky.BootstrapStarting):
        INTERRUPT.touch()
"""
CELLS = {
    "definitions": DEFINITIONS,
    "open": """
pool = sky.ComputePool(provider=sky.Local()).open()
(FOLDER / "id").write_text(pool.lease.nodes[0].instance.id)
""",
    "map": "print(sum(pool.map(square, range({calls}))))",
    "interrupted": "endless('interrupt') >> pool",
    "after": "print(has_ended(), pool.is_active, square(3) >> pool)",
    "interrupted stream": "for item in items() >> pool: pass",
    "after stream": "print(square(4) >> pool)",
    "interrupted await": "await pool.arun(endless('interrupt'))",
    "after await": "print(has_ended(), await pool.arun(square(5)), square(6) >> pool)",
    "interrupted with": """
with sky.ComputePool(provider=sky.Local(price_per_hour=3.6)) as second:
    endless('interrupt') >> second
""",
    "after with": "print(has_ended(), second.is_active)",
    "interrupted opening": """
with sky.ComputePool(provider=sky.Local(), on_event=interrupt_bootstrap):
    time.sleep(60)
""",
    "async with": """
async with sky.ComputePool(provider=sky.Local()) as third:
    print(await third.arun(square(7)))
print(1 / 0)
""",
    "killed": "endless('kill') >> pool",
}


class Ran:
    """The notebook after its last cell, in which the kernel was killed."""

    def __init__(self, folder: Path, result: dict[str, Any]) -> None:
        self.folder = folder
        self.counts: dict[str, int] = result["counts"]
        self.is_dead: bool = result["is_dead"]
        self._outputs = dict(zip(CELLS, result["outputs"], strict=True))

    def displayed(self, cell: str) -> list[dict[str, str]]:
        return [output["data"] for output in self._outputs[cell] if output["output_type"] == "display_data"]

    def printed(self, cell: str) -> str:
        return "".join(output["text"] for output in self._outputs[cell] if output["output_type"] == "stream")

    def error(self, cell: str) -> str | None:
        return next((output["ename"] for output in self._outputs[cell] if output["output_type"] == "error"), None)


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    folder = tmp_path_factory.mktemp("notebook")
    own = {name: str(folder / name) for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "XDG_STATE_HOME")}
    cells = [cell.format(folder=str(folder), calls=CALLS) for cell in CELLS.values()]
    runner = subprocess.run(
        [sys.executable, str(ROOT / "tests/notebook_runner.py"), str(folder)],
        input=json.dumps(cells),
        env=os.environ | own | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert runner.returncode == 0, runner.stderr
    return Ran(folder, json.loads(runner.stdout.splitlines()[-1]))


def test_lines_of_nodes_are_below_the_cell_that_made_the_call(ran: Ran) -> None:
    lines = ran.printed("map").splitlines()
    assert lines[-1] == str(sum(x * x for x in range(CALLS)))
    assert sorted(lines[:-1]) == sorted(f"[node 0] <b> {x}" for x in range(CALLS))
    assert ran.printed("open") == ""
    assert ran.printed("interrupted") == "[node 0] endless begins\n"


def test_hundreds_of_events_are_few_messages(ran: Ran) -> None:
    assert ran.counts["display_data"] == 4
    assert 0 < ran.counts["update_display_data"] < CALLS / 2


def test_an_interrupted_cell_stops_its_call_and_the_pool_goes_on(ran: Ran) -> None:
    assert ran.error("interrupted") == "KeyboardInterrupt"
    assert ran.printed("after") == "[node 0] <b> 3\nTrue True 9\n"
    assert ran.error("interrupted stream") == "KeyboardInterrupt"
    assert ran.printed("after stream").endswith("16\n")
    assert ran.error("interrupted await") == "CancelledError"
    assert ran.printed("after await").endswith("True 25 36\n")


def test_an_interrupted_with_block_closes_its_pool(ran: Ran) -> None:
    assert ran.error("interrupted with") == ran.error("interrupted opening") == "KeyboardInterrupt"
    assert ran.printed("after with") == "True False\n"
    for cell in ("interrupted with", "interrupted opening"):
        assert ran.displayed(cell)[0]["text/plain"].startswith("done: ")


def test_async_with_works_in_a_cell_and_an_error_stays_the_users_own(ran: Ran) -> None:
    assert ran.printed("async with") == "[node 0] <b> 7\n49\n"
    assert ran.error("async with") == "ZeroDivisionError"


def test_nothing_is_left_of_a_kernel_that_was_killed(ran: Ran) -> None:
    assert ran.is_dead
    home, node = str(ran.folder / "XDG_STATE_HOME"), (ran.folder / "id").read_text()

    def left() -> list[tuple[int, str]]:
        tagged = processes_by_tag("XDG_STATE_HOME") + processes_by_tag("SKYWARD_INSTANCE_ID")
        return [(pid, value) for pid, value in tagged if value in (home, node)]

    wait_until(lambda: not left(), "the end of the pool's processes")
    assert not Path("/proc", (ran.folder / "pid").read_text()).exists()


@pytest.mark.nightly
@pytest.mark.timeout(400)
def test_a_pool_is_one_output_below_the_cell_that_opened_it(ran: Ran) -> None:
    """It ends with the calls and the cost; other cells have no output of it."""
    (final,) = ran.displayed("interrupted with")
    assert re.search(r"^done: .* s, \$0\.\d+ \(1 on demand\)", final["text/plain"])
    assert "0 of 1 calls, 1 cancelled" in final["text/plain"]
    assert final["text/html"].startswith("<div><b>skyward</b> done: ")
    openings = ["open", "interrupted with", "interrupted opening", "async with"]
    assert [cell for cell in CELLS if ran.displayed(cell)] == openings
