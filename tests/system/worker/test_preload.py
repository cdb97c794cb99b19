"""Modules that a node imports once, before it forks runners: which are imported, and which are skipped."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import skyward_core as sky
from tests.conftest import RecordedEvents
from tests.waiting import wait_until

PROGRAM = """
import json, os, sys
from skyward_core.worker import supervisor
supervisor.DEVICES = ("/dev/zero",)
skipped = supervisor.preload(sys.argv[1:])
print(json.dumps({"skipped": dict(skipped), "imported": [name for name in sys.argv[1:] if name in sys.modules],
    "pid": os.getpid(), "is_clean": supervisor.SKIPPED not in os.environ}))
"""
MODULES = {
    "plain": "value = 1",
    "broken": "raise RuntimeError('no such device')",
    "leaving": "import sys; sys.exit(3)",
    "threaded": "import threading; threading.Thread(target=threading.Event().wait, name='poller', daemon=True).start()",
    "opening": "device = open('/dev/zero')",
    "broken_thread": "import threaded; raise ImportError('after it has started a thread')",
}


def run(folder: Path, *modules: str) -> dict[str, Any]:
    """Preload modules in a separate process; return what it says."""
    for name, text in MODULES.items():
        (folder / f"{name}.py").write_text(text)
    paths = os.pathsep.join([str(folder), str(Path(__file__).parents[3])])
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *modules],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": paths},
    ) as process:
        assert process.stdout is not None
        said = json.loads(process.stdout.read())
    assert said.pop("pid") == process.pid
    assert said.pop("is_clean")
    return said


def test_modules_are_imported(tmp_path: Path) -> None:
    """NumPy's library starts threads. It ends them before each fork, so it is no risk."""
    assert run(tmp_path, "plain", "numpy.linalg") == {"skipped": {}, "imported": ["plain", "numpy.linalg"]}


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        ("not_there", "ModuleNotFoundError: No module named 'not_there'"),
        ("broken", "RuntimeError: no such device"),
        ("leaving", "SystemExit: 3"),
        ("threaded", "the import has started 1 threads (poller)"),
        ("opening", "the import has opened /dev/zero"),
        ("broken_thread", "the import has started 1 threads (poller)"),
    ],
)
def test_a_module_that_fails_or_makes_forks_unsafe_is_skipped(module: str, reason: str, tmp_path: Path) -> None:
    """The others are imported, in the same process."""
    said = run(tmp_path, "plain", module, "colorsys")
    assert said == {"skipped": {module: reason}, "imported": ["plain", "colorsys"]}


@pytest.mark.parametrize("name", ["", "a b", "os; import sys", "1st", ".tree", "-m"])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(sky.BadRequest, match="write the names of modules"):
        sky.Image(preload=[name])


def test_an_image_with_other_modules_needs_no_other_environment() -> None:
    image = sky.Image(preload=["sklearn", "torch.nn"])
    assert image.preload == ("sklearn", "torch.nn")
    assert image.content_hash(runtime=()) == sky.Image().content_hash(runtime=())


def loaded_modules() -> list[str]:
    return [name for name in ("colorsys", "wave") if name in sys.modules]


def test_calls_find_the_modules_and_a_warning_names_the_others() -> None:
    recorded = RecordedEvents()
    image = sky.Image(preload=["colorsys", "not_there"])
    with sky.ComputePool(provider=sky.Local(), image=image, display="quiet", on_event=recorded) as pool:
        assert sky.compute(loaded_modules)() >> pool == ["colorsys"]
        wait_until(lambda: recorded.of(sky.LogLine), "the warning")
    (line,) = recorded.of(sky.LogLine)
    assert (line.level, line.call_id, line.node) == (logging.WARNING, None, 0)
    assert "'not_there' was skipped: ModuleNotFoundError" in line.line
