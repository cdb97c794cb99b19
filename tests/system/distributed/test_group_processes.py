"""Groups whose ranks have processes of their own, on a pool, with a framework of the test."""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest

import skyward_core as sky
from skyward_core.distributed.group import Group, decorator, places, variables_of
from skyward_core.wire.info import ENV, InstanceInfo, instance_info, to_env
from skyward_core.worker.keeper import start_of
from tests.waiting import wait_until


@dataclass(frozen=True)
class Fake:
    """A framework that exchanges a value of each rank; it can kill the process at its start."""

    needs_process: ClassVar[bool] = True
    kills: int = -1

    @contextlib.contextmanager
    def running(self, group: Group) -> Generator[None]:
        if group.place.rank == self.kills:
            os.kill(os.getpid(), signal.SIGKILL)
        group.set_environment({"FAKE_RANKS": str(group.exchange(group.place.rank))})
        yield


def fake(nproc_per_node: int | None = None, kills: int = -1) -> Any:
    return decorator(Fake(kills), 60.0, nproc_per_node)


def on_node(monkeypatch: pytest.MonkeyPatch, **changed: Any) -> None:
    fields: dict[str, Any] = {"node": 1, "total_nodes": 3, "worker": 0, "workers_per_node": 1, "is_broadcast": True}
    info = InstanceInfo(
        is_head=False, accelerators=[], head_addr="10.0.0.9", head_port=1, job_id="j", **fields | changed
    )
    monkeypatch.setenv(ENV, to_env(info))


def test_a_process_counts_as_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    on_node(monkeypatch)
    variables = variables_of(places(2)[1])
    assert variables["OMP_NUM_THREADS"] == "1"
    monkeypatch.setenv(ENV, variables[ENV])
    assert (instance_info().rank, instance_info().world_size) == (3, 6)
    on_node(monkeypatch)
    assert "OMP_NUM_THREADS" not in variables_of(places(1)[0])
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert "OMP_NUM_THREADS" not in variables_of(places(2)[0])


class Coloured(Exception):
    def __init__(self, colour: str) -> None:
        super().__init__(colour)
        self.colour = colour


COLOUR = "green"


@sky.compute
@fake()
def one_each(colour: Coloured) -> tuple[int, str, Coloured, str]:
    return sky.shard(range(2))[0], os.environ["FAKE_RANKS"], Coloured(COLOUR + colour.colour), str(os.getpid())


@sky.compute
@fake(nproc_per_node=2)
def two_each() -> tuple[int, str]:
    return sky.shard(range(4))[0], os.environ["FAKE_RANKS"]


@sky.compute
def variables() -> list[str]:
    return [name for name in os.environ if name.startswith("FAKE")]


def test_each_training_has_new_processes(pool: sky.ComputePool) -> None:
    pids = set[str]()
    for _ in range(2):
        zero, one = one_each(Coloured("blue")) @ pool
        assert (zero[:2], one[:2]) == ((0, "[0, 1]"), (1, "[0, 1]"))
        assert isinstance(zero[2], Coloured)
        assert zero[2].colour == "greenblue"
        pids |= {zero[3], one[3]}
        assert variables() @ pool == ([], [])
    assert len(pids) == 4
    assert not any(start_of(int(pid)) for pid in pids)


def test_modules_that_the_function_imports_travel_to_its_process(
    pool: sky.ComputePool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The nodes have no such file: their runners got its text, and hand it on. It is imported before it is sent back."""
    (tmp_path / "helper_of_training.py").write_text("class Three(int):\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)

    @sky.compute
    @fake()
    def uses(number: Any) -> Any:
        import helper_of_training

        return helper_of_training.Three(number + 1)

    import helper_of_training

    try:
        zero, one = uses(helper_of_training.Three(2)) @ pool
        assert (zero, one) == (3, 3)
        assert type(zero) is helper_of_training.Three
    finally:
        del sys.modules["helper_of_training"]


def test_several_processes_a_node_return_lists(pool: sky.ComputePool) -> None:
    ranks = "[0, 1, 2, 3]"
    assert two_each() @ pool == ([(0, ranks), (1, ranks)], [(2, ranks), (3, ranks)])
    assert two_each() >> pool == [(0, "[0, 1]"), (1, "[0, 1]")]


@sky.compute
@fake(nproc_per_node=2)
def fails(rank: int, how: str, folder: str) -> None:
    """One rank ends; one aborts as soon as that rank's process is gone, as JAX does, and the others hang."""
    mine = sky.instance_info().rank
    Path(folder, f"{mine}.part").write_text(str(os.getpid()))
    Path(folder, f"{mine}.part").rename(Path(folder, str(mine)))
    while len([one for one in Path(folder).iterdir() if not one.suffix]) < 4:
        time.sleep(0.001)
    if mine == rank:
        match how:
            case "runner":
                os.kill(os.getppid(), signal.SIGKILL)
            case "exit":
                sys.exit(3)
            case "raise":
                raise Coloured("red")
            case _:
                os.kill(os.getpid(), signal.SIGKILL)
    elif mine == 3 - rank:
        first = int(Path(folder, str(rank)).read_text())
        while start_of(first):
            time.sleep(0.001)
        os.abort()
    threading.Event().wait()


@pytest.mark.parametrize(
    ("rank", "how", "error", "code"),
    [
        (1, "raise", Coloured, 0),
        (3, "raise", Coloured, 0),
        (0, "kill", sky.CallCrashed, -signal.SIGKILL),
        (2, "exit", sky.CallCrashed, 3),
        (0, "runner", sky.CallCrashed, -signal.SIGKILL),
        (3, "runner", sky.CallCrashed, -signal.SIGKILL),
    ],
)
def test_the_rank_that_failed_first_is_raised(
    pool: sky.ComputePool, tmp_path: Path, rank: int, how: str, error: type[Exception], code: int
) -> None:
    with pytest.raises(error) as raised:
        fails(rank, how, str(tmp_path)) @ pool
    if isinstance(raised.value, sky.CallCrashed):
        assert (raised.value.node, raised.value.exit_code) == (rank // 2, code)
        notes = raised.value.output
    else:
        notes = raised.value.__notes__
    if how != "runner":
        (line,) = (line for line in notes if "rank" in line)
        assert f"rank {rank} of 4, which is local rank {rank % 2} of node {rank // 2}" in line
    pids = [int((tmp_path / str(number)).read_text()) for number in range(4)]
    assert len(one_each(Coloured("")) @ pool) == 2
    wait_until(lambda: not any(map(start_of, pids)), "the end of the training's processes")
