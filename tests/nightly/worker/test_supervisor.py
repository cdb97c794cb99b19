"""The first process of a node, started as on a machine: when it ends, which processes it ends, how it becomes another
node.

Most nodes here have a clock in a file, and workers without Dask that run the text of the file `call`. They start
quickly, and hours pass at once.
"""

from collections.abc import Callable
from pathlib import Path

from skyward_core.wire.messages import OutcomeKind
from skyward_core.wire.protocol import WorkerFree
from skyward_core.worker.node_clocks import uptime, write_lease
from tests.system.worker.test_supervisor import (  # noqa: F401 - fixtures
    DRIVER,
    HOUR,
    NoticePoller,
    Start,
    certificate,
    listen,
    long_call,
    start,
    two_nodes,
)
from tests.waiting import wait_until

ROUNDS = """
import random, threading
from skyward_core.wire.messages import Outcome

def run_worker(directory, settings, index, control):
    # a worker that waits for a processor is no long call
    slot = Slot(RunnerFactory(control), settings.value_directories, patience_seconds=60.0)
    first, wrong, stopped, random_moments = slot.pid, [], 0, random.Random(11)
    nap = Parcel(pickle.dumps(((0.0003,), {})))
    for number in range(400):
        ids = [f"{number}-{place}" for place in range(12)]
        wanted = random_moments.choice(ids)
        timer = threading.Timer(random_moments.random() * 0.006, slot.cancel, [wanted])
        news = []
        timer.start()
        slot.run(Batch("", tuple(Call(call_id, "sleep", nap, "job") for call_id in ids), {"sleep": Parcel(pickle.dumps(time.sleep))}), news.extend)
        timer.join()
        endings = [(item.call_id, item.kind.name) for item in news if isinstance(item, Outcome)]
        wrong += [item.text for item in news if isinstance(item, Outcome) and item.text]
        wrong += [ending for ending in endings if ending[1] != "RESULT" and ending != (wanted, "CANCELLED")]
        wrong += [call_id for call_id in ids if sum(call_id == ended for ended, _ in endings) != 1]
        stopped += (wanted, "CANCELLED") in endings
    (directory / "done").write_text(f"{stopped} stopped, {wrong} wrong")
    while True:
        signal.pause()

node.run_worker = run_worker
"""


def test_a_cancellation_stops_one_call_whenever_it_comes(start: Start) -> None:
    """Four hundred batches of calls of 0.3 ms; in each batch one call is cancelled at some moment. It is stopped or
    has ended, and no other call is touched.
    """
    machine = start(DRIVER + ROUNDS)
    stopped, _, rest = machine.await_file("done", 120.0).partition(" ")
    assert rest == "stopped, [] wrong"
    assert int(stopped) > 20


# ── with Dask ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_node_that_becomes_the_head_keeps_its_calls(
    start: Start, listen: Callable[[str], NoticePoller], tmp_path: Path
) -> None:
    """Its supervisor starts a scheduler beside the worker, which joins that scheduler with its call."""
    head, other, first = two_nodes(start, listen)
    first.run("1-0", long=long_call(tmp_path))
    wait_until((tmp_path / "begun").exists, "the call to begin")
    head.process.kill()
    other.tell(rank=0, scheduler=None, generation=1)
    second = listen(other.await_file("head.json"))
    wait_until(lambda: ("long",) in second.kept("0-0"), "what is kept")
    (tmp_path / "go").touch()
    wait_until(lambda: second.endings() == {"long": OutcomeKind.RESULT}, "the call to end")
    wait_until(lambda: any(isinstance(news, WorkerFree) for news in second.heard), "the worker to be free")
    second.await_worker("0-0")
    assert (tmp_path / "begun").read_text() == "begun\n"


def test_a_worker_without_calls_restarts(start: Start, listen: Callable[[str], NoticePoller], tmp_path: Path) -> None:
    """So does a worker that dies with its calls: the new head learns that they are not there."""
    head, other, first = two_nodes(start, listen, workers=({}, {}))
    first.run("1-0", long=long_call(tmp_path))
    wait_until((tmp_path / "begun").exists, "the call to begin")
    head.process.kill()
    wait_until(lambda: "worker 1-0 has lost its scheduler" in other.text("log"), "the loss to be noticed")
    other.kill_children()
    new = start("", rank=0, scheduler=None, keeps_calls=True)
    second = listen(new.await_file("head.json"))
    other.tell(scheduler=new.text("head.json"), generation=1)
    wait_until(lambda: second.kept("1-0") and second.kept("1-1"), "both workers")
    assert set(second.kept("1-0") + second.kept("1-1")) == {()}
    assert (tmp_path / "begun").read_text() == "begun\n"
    other.tell(total_nodes=3, generation=2)
    wait_until(lambda: other.text("log").count("carries on as generation 2"), "the settings to arrive at the node")
    second.await_worker("1-0")
    second.await_worker("1-1")


def test_a_worker_that_its_scheduler_has_dropped_ends_its_calls(
    start: Start, listen: Callable[[str], NoticePoller], tmp_path: Path
) -> None:
    """The scheduler lives and has reported the calls lost to the client: they must not go on."""
    _, other, first = two_nodes(start, listen)
    first.run("1-0", long=long_call(tmp_path))
    wait_until((tmp_path / "begun").exists, "the call to begin")
    first.client.retire_workers(names=["1-0"], close_workers=True)
    wait_until(lambda: "worker 0 died with 0" in other.text("log"), "the worker to end")
    first.await_worker("1-0")
    assert first.kept("1-0")[-1] == ()


def test_a_worker_without_a_new_head_ends_its_calls(
    start: Start, listen: Callable[[str], NoticePoller], tmp_path: Path
) -> None:
    """After a lease, although the node itself lives longer."""
    head, other, first = two_nodes(start, listen, lease_seconds=25.0)
    write_lease(other.directory, uptime() + HOUR)
    first.run("1-0", long=long_call(tmp_path))
    wait_until((tmp_path / "begun").exists, "the call to begin")
    head.process.kill()
    wait_until(lambda: "worker 0 died with 0" in other.text("log"), "the worker to end", 90.0)
    assert other.is_alive
