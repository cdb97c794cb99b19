"""Calls, cancels and large values while the connection to the scheduler, or to a node, is cut.

The nodes are processes of this machine.
"""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import skyward_core as sky
from skyward_core.engine import detached_calls as module


@pytest.fixture
def lone() -> Iterator[sky.ComputePool]:
    """One node with two slots. No call runs twice."""
    with sky.ComputePool(
        provider=sky.Local(), nodes=1, concurrency=2, retries=0, display="quiet", collect_metrics=False
    ) as pool:
        yield pool


def cluster_of(pool: sky.ComputePool) -> Any:
    return pool._session.cluster


def cut(pool: sky.ComputePool) -> Callable[[], None]:
    """Cut a pool's client off from its scheduler; return a function that connects it again."""
    cluster: Any = cluster_of(pool)
    address = cluster.client.scheduler.address
    cluster._disconnect()
    return lambda: cluster.resume(address, 20)


@sky.compute
def note_and_wait(folder: str, name: str) -> str:
    """Leave a note of this run, wait for the file `go`."""
    Path(folder, f"{name}-{time.monotonic_ns()}").touch()
    while not Path(folder, "go").exists():
        time.sleep(0.01)
    return name


def runs(folder: Path, name: str) -> int:
    return len(list(folder.glob(f"{name}-*")))


@pytest.mark.parametrize("is_healed", [True, False])
def test_a_detached_call_is_taken_in_once(
    lone: sky.ComputePool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_healed: bool
) -> None:
    """The answer is lost with the connection: the request is repeated, and is idempotent.

    If that fails, the error has the call's id.

    Looks inside: the connection is cut between two steps that are private.
    """
    ask_on, heals = module.ask_on, list[Callable[[], None]]()

    def interrupted(*args: Any) -> Any:
        answer = ask_on(*args)
        if not heals:
            heals.append(cut(lone))
            if is_healed:
                heals[0]()
            raise sky.NodeLost("cut")
        return answer

    monkeypatch.setattr(module, "ask_on", interrupted)
    monkeypatch.setattr(module, "DETACH_SECONDS", 30 if is_healed else 0.1)
    if is_healed:
        call = lone.start_detached(note_and_wait(str(tmp_path), "call"))
    else:
        with pytest.raises(sky.NodeLost, match=r"call \w{32} may have begun") as caught:
            lone.start_detached(note_and_wait(str(tmp_path), "call"))
        heals[0]()
        call = lone.detached_call(str(caught.value).partition("call ")[2].partition(" ")[0])
    (tmp_path / "go").touch()
    assert call.result(60) == "call"
    assert [known.call_id for known in lone.detached_calls()] == [call.call_id]
    assert runs(tmp_path, "call") == 1
