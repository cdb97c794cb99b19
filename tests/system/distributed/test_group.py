"""Groups of ranks in threads and on pools, with a framework of the test."""

import contextlib
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

import skyward_core as sky
from skyward_core.distributed.group import Group, decorator, members_of
from skyward_core.distributed.group import places as places_of_call
from skyward_core.distributed.member import UNPROVED_BYTES, Hub, HubServer, Member, Place, find_hub, open_hub
from skyward_core.worker.node_clocks import kill_instance
from tests.conftest import RecordedEvents
from tests.waiting import wait_until


def places(world: int) -> list[Place]:
    key = secrets.token_hex(8)
    return [Place(rank, world, 0, 1, rank, world, "127.0.0.1", key) for rank in range(world)]


def on_all[R](ranks: list[Place], work: Callable[[Member], R], seconds: float = 30.0) -> list[Future[R]]:
    """Run the work as each of the ranks, in threads, and wait until all have ended."""

    def run(place: Place) -> R:
        with members_of([place], seconds) as (member,):
            return work(member)

    with ThreadPoolExecutor(len(ranks)) as threads:
        return [threads.submit(run, place) for place in ranks]


def test_the_error_names_the_ranks_that_did_not_come() -> None:
    ranks = places(4)
    for one in on_all([ranks[0], ranks[2]], lambda _: None, seconds=0.5):
        with pytest.raises(sky.GroupNotFormed, match="ranks 1, 3 did not come") as raised:
            one.result()
        assert raised.value.absent == (1, 3)


def test_a_taken_port_is_skipped_by_all_ranks() -> None:
    ranks = places(2)
    with contextlib.ExitStack() as undo:
        listeners = [undo.enter_context(socket.create_server(("127.0.0.1", port))) for port in ranks[0].ports[:2]]

        def answer() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listeners[0].accept()
                    with connection:
                        connection.sendall(b'{"nonce": 1}\n[]\n')

        thread = threading.Thread(target=answer)
        thread.start()
        undo.callback(thread.join)
        undo.callback(listeners[0].shutdown, socket.SHUT_RDWR)
        assert [one.result() for one in on_all(ranks, lambda member: member.exchange(1))] == [[1, 1]] * 2


def test_only_who_has_the_key_joins() -> None:
    ranks = places(2)
    hub = open_hub(ranks[0], time.monotonic() + 60)
    port = next(port for port in ranks[0].ports if _listens(port))
    try:
        with socket.create_connection(("127.0.0.1", port)) as connection, connection.makefile("rb") as lines:
            assert b"nonce" in lines.readline()
            connection.sendall(b'{"join": 1, "nonce": "x", "proof": "\xc3\xa4"}\n')
            assert lines.readline() == b""
        with pytest.raises(sky.GroupNotFormed, match="rank 0 did not come"):
            find_hub(replace(ranks[1], key="guessed"), time.monotonic())
        connection, lines = find_hub(ranks[1], time.monotonic() + 60)
        lines.close()
        connection.close()
    finally:
        hub.close()


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


@dataclass(frozen=True)
class Fake:
    """A framework that sets a variable; it can fail at its start."""

    needs_process: ClassVar[bool] = False
    fails_on: int = -1

    @contextlib.contextmanager
    def running(self, group: Group) -> Generator[None]:
        group.set_environment({"FAKE_RANK": str(group.place.rank), "FAKE_KEPT": "inside"})
        group.set_defaults({"FAKE_KEPT": "default"})
        if group.place.rank == self.fails_on:
            raise OSError("no device")
        yield


def fake(fails_on: int = -1) -> Any:
    return decorator(Fake(fails_on), 60.0)


@sky.compute
@fake()
def ranks_of() -> tuple[int, int, str | None, str | None]:
    (place,) = places_of_call(1)
    return place.rank, place.world_size, os.environ.get("FAKE_RANK"), os.environ.get("FAKE_KEPT")


@sky.compute
def variables() -> list[str]:
    return [name for name in os.environ if name.startswith("FAKE")]


def test_a_broadcast_is_one_group(pool: sky.ComputePool) -> None:
    for _ in range(2):
        assert ranks_of() @ pool == ((0, 2, "0", "inside"), (1, 2, "1", "inside"))
        assert variables() @ pool == ([], [])


def test_a_single_call_is_a_group_of_one(pool: sky.ComputePool) -> None:
    assert ranks_of() >> pool == (0, 1, "0", "inside")
    assert ranks_of.local() == (0, 1, "0", "inside")
    assert "FAKE_RANK" not in os.environ


@sky.compute
@fake()
def fail_on(rank: int, kind: str) -> None:
    """One rank ends; the other one gets an error at once, as from a collective, or hangs."""
    if places_of_call(1)[0].rank == rank:
        if kind == "crash":
            os._exit(3)
        raise ValueError(f"rank {rank} has failed")
    if kind == "hang":
        threading.Event().wait()
    raise OSError("connection closed by peer")


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("kind", "expected"), [("hang", "has failed"), ("crash", "exit")])
def test_the_error_of_the_rank_that_failed_first_is_raised(
    pool: sky.ComputePool, rank: int, kind: str, expected: str
) -> None:
    with pytest.raises((ValueError, sky.CallCrashed), match=expected):
        fail_on(rank, kind) @ pool
    assert ranks_of() @ pool == ((0, 2, "0", "inside"), (1, 2, "1", "inside"))


@sky.compute
@fake()
def count_to(steps: int, folder: str) -> tuple[int, int]:
    """Count, one step for each file `go-STEP`, with a checkpoint after it; return the first step and the last."""
    found = sky.checkpoint(Path(folder, "checkpoints"))
    first = found.load(default=0)
    rank = places_of_call(1)[0].rank
    Path(folder, f"rank-{rank}-begins-at-{first}").touch()
    for step in range(first, steps):
        while not Path(folder, f"go-{step}").exists():
            time.sleep(0.01)
        if rank == 0:
            found.save(step + 1, step + 1)
    return first, steps


@pytest.mark.parametrize("lost", [0, 1])
def test_after_the_loss_of_a_node_the_training_goes_on_from_its_checkpoint(tmp_path: Path, lost: int) -> None:
    """Node 1, or the head, is killed in the middle: it is replaced, and both ranks run again."""
    recorded = RecordedEvents()
    with (
        sky.ComputePool(provider=sky.Local(), nodes=2, retries=1, display="quiet", on_event=recorded) as pool,
        ThreadPoolExecutor(1) as thread,
    ):
        running = thread.submit(lambda: count_to(4, str(tmp_path)) @ pool)
        wait_until(lambda: len([*tmp_path.glob("rank-?-begins-at-0")]) == 2, "both to begin")
        for step in range(3):
            (tmp_path / f"go-{step}").touch()
        wait_until(lambda: sky.checkpoint(tmp_path / "checkpoints").load() == 3, "the third checkpoint")
        kill_instance(pool.lease.nodes[lost].instance.id)
        both = lambda: len([*tmp_path.glob("rank-?-begins-at-3")]) == 2
        wait_until(lambda: both() or running.done(), "both to have loaded it")
        assert both(), running.result()
        (tmp_path / "go-3").touch()
        assert running.result(120) == ((3, 4), (3, 4))
        assert ranks_of() @ pool == ((0, 2, "0", "inside"), (1, 2, "1", "inside"))
    # the first is the training's; the call that waits for the new node may be lost with the old one, and has one too
    retrying = recorded.of(sky.CallRetrying)
    assert {(len(event.call_id), event.attempt, event.attempts) for event in retrying} == {(32, 2, 2)}
    assert len({event.call_id for event in retrying}) == len(retrying) <= 2


def test_wrong_uses_are_refused_with_what_to_write() -> None:
    with pytest.raises(TypeError, match=r"write @sky.compute above"):
        fake()(ranks_of)
    with pytest.raises(TypeError, match=r"decorated with @sky.distributed already"):
        fake()(fake()(len))
    with pytest.raises(TypeError, match=r"^3 is no function"):
        fake()(3)
    with pytest.raises(TypeError, match="argument"):
        fail_on(1)  # type: ignore[call-arg]
    assert fail_on(1, "hang").fn.__name__ == "fail_on"


def test_tf_config_names_all_workers_and_this_one() -> None:
    framework = sky.distributed.tensorflow()(print).framework
    group = Group(Place(1, 2, 0, 1, 1, 2, "10.0.0.1", "key"), "10.0.0.2", lambda mine: ["10.0.0.1:4000", mine])
    with framework.running(group):
        config = json.loads(os.environ["TF_CONFIG"])
        first, second = config["cluster"]["worker"]
        assert config["task"] == {"type": "worker", "index": 1}
        assert first == "10.0.0.1:4000"
        assert second.startswith("10.0.0.2:")
        assert os.environ["no_grpc_proxy"] == "10.0.0.1,10.0.0.2"  # noqa: SIM112 - gRPC's own spelling
    group.restore_environment()
    assert "TF_CONFIG" not in os.environ


def test_a_connection_without_a_proof_is_closed_after_four_kilobytes() -> None:
    """It sends no end of a line: the hub neither waits for one, nor keeps what comes."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = HubServer(Hub(1, deadline=time.monotonic() + 60), listener, "key")
    try:
        with socket.create_connection(listener.getsockname()) as connection:
            connection.settimeout(60)
            with connection.makefile("rb") as lines:
                assert "nonce" in json.loads(lines.readline())
            connection.sendall(b"x" * UNPROVED_BYTES)
            assert connection.recv(1) == b""
    finally:
        server.close()
    assert UNPROVED_BYTES == 4096


def test_an_error_at_the_start_of_the_framework_is_the_first_one(pool: sky.ComputePool) -> None:
    """Rank 0 may run its function; its error is not the one that is raised."""

    @sky.compute
    @fake(fails_on=1)
    def waits() -> None:
        threading.Event().wait()

    with pytest.raises(OSError, match="no device"):
        waits() @ pool
