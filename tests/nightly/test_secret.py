"""`secrets=`: the spec has references, the processes of calls have the values in memory, and nothing that is written
has them.
"""

import os
import signal
import uuid
from typing import Any

import pytest

import skyward_core as sky
from skyward_core.worker.masking import MASK
from tests.conftest import RecordedEvents, wait_until
from tests.system.test_secret import (
    spelled,
)

LOSS_SECONDS = 60.0


@sky.compute
def supervisor() -> int:
    """The first process of the node."""
    return os.getppid()


@sky.compute
def prints(name: str) -> int:
    """Print the value; return its length."""
    print(os.environ[name])
    return len(os.environ[name])


@pytest.mark.timeout(240)
def test_replacements_have_the_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """A restarted worker process, a replaced node, a new head, and the calls of an attached client that has no values
    itself.
    """
    value, recorded = f"tok-{uuid.uuid4().hex}", RecordedEvents()
    monkeypatch.setenv("HF_TOKEN", value)
    with sky.ComputePool(
        provider=sky.Local(), nodes=2, secrets=("HF_TOKEN",), display="quiet", on_event=recorded, collect_metrics=False
    ) as pool:
        monkeypatch.delenv("HF_TOKEN")
        workers: Any = pool.dask_client().run(os.getpid)
        for pid in workers.values():
            os.kill(pid, signal.SIGKILL)
        assert list(spelled("HF_TOKEN") @ pool) == [value[::-1]] * 2
        for lost in (1, 0):
            os.kill((supervisor() @ pool)[lost], signal.SIGKILL)
            wait_until(
                lambda lost=lost: lost in [event.node for event in recorded.of(sky.InstanceLost)],
                "the loss",
                LOSS_SECONDS,
            )
            assert list(spelled("HF_TOKEN") @ pool) == [value[::-1]] * 2
            assert pool.map(spelled, ["HF_TOKEN"] * 10) == [value[::-1]] * 10
        with sky.ComputePool.attach(pool.lease) as attached:
            assert list(spelled("HF_TOKEN") @ attached) == [value[::-1]] * 2
            call = attached.start_detached(prints("HF_TOKEN"))
            assert call.result(60) == len(value)
            assert call.log() == [MASK]
            call.forget()
