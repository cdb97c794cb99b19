"""The display of a notebook: its summary as a value, and when it is shown. `tests/system/test_notebooks.py` has real kernels."""

import threading

import pytest

import skyward_core as sky
from skyward_core.events.notebook import MimeBundle, NotebookDisplay
from tests.unit.events.test_notebook import BILL, READY
from tests.waiting import wait_until


def test_many_events_are_few_outputs() -> None:
    outputs: list[tuple[str, bool]] = []
    threads: list[str] = []

    def show(output: MimeBundle, *, is_update: bool) -> None:
        outputs.append((output["text/plain"], is_update))
        threads.append(threading.current_thread().name)

    pool = NotebookDisplay(show)
    for event in [*READY, *(sky.CallProgress(1000, done, 0) for done in range(1001)), BILL]:
        pool(event)
    pool.close()
    pool.close()
    pool(sky.InfraCreating())
    assert outputs[0] == ("looking for machines", False)
    assert outputs[-1] == ("done: 12.3 s, $0.0123 (1 on demand)\n1000 of 1000 calls", True)
    assert len(outputs) < 20
    assert (threads[0], {*threads[1:]}) == (threading.current_thread().name, {"skyward-notebook"})


def test_a_notebook_that_is_gone_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    def show(output: MimeBundle, *, is_update: bool) -> None:
        if is_update:
            raise OSError("the socket is closed")

    pool = NotebookDisplay(show)
    pool(sky.InfraCreating())
    pool(sky.CallProgress(2, 1, 0))
    wait_until(lambda: "the socket is closed" in caplog.text, "the report")
    pool(sky.CallProgress(2, 2, 0))
    pool.close()
    assert caplog.text.count("the notebook does not take the pool's state") == 1
