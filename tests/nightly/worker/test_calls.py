"""The scheduler's memory: messages that clients miss, calls without waiting clients, workers that do not answer."""

import asyncio
import os
import pickle
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import distributed
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from skyward_core.worker.calls import CallMemory
from skyward_core.worker.scheduler_messages import Resumed
from tests.conftest import members, slowness, wait_until
from tests.system.worker.test_calls import (  # noqa: F401 - fixtures
    Nodes,
    _nodes,
    news,
    one_node,
    say_and_wait,
    state_of,
    submit,
)
from tests.testbed import Fleet, why_not
from tests.worker.fake_scheduler import FOR_EVER, TOPIC, FakeScheduler, Wire
from tests.worker.following import Following

STEPS = st.lists(
    st.sampled_from(["say", "say", "deliver", "cut", "reconnect", "resume", "acknowledge", "deliver late"]), max_size=80
)


@hypothesis_settings(max_examples=400, deadline=None)
@given(STEPS, st.sampled_from([10**6, 12]))
def test_a_client_gets_each_message_once_however_it_reconnects(steps: list[str], limit_bytes: int) -> None:
    """With messages, broken connections, new clients and repeated questions in any order: each message comes once,
    in order, or is known to be missed.
    """
    asyncio.run(_reconnecting(steps, limit_bytes))


async def _reconnecting(steps: list[str], limit_bytes: int) -> None:
    calls = CallMemory(FOR_EVER, limit_bytes)
    scheduler: Any = FakeScheduler(calls)
    await calls.start(scheduler)
    said, heard, missed = list[bytes](), list[bytes](), list[int]()

    def resumed(answer: Resumed) -> None:
        missed.extend(range(len(heard) + len(missed), answer.number))
        assert answer.missed == 0 or limit_bytes < 10**6

    following = Following(TOPIC, heard.append, resumed)
    old: Wire | None = None
    wire: Wire | None = None

    def connect() -> Wire:
        client_id = f"client-{uuid.uuid4().hex}"
        wire = scheduler.wires[client_id] = Wire(client_id, following.handler(client_id))
        if len(said) % 2:
            # as client.subscribe_topic does: live messages may come before the answer
            scheduler.subscribe_topic(TOPIC, client_id)
        return wire

    def ask(wire: Wire) -> None:
        scheduler.take(wire.client_id, following.resume(wire.client_id))

    wire = connect()
    ask(wire)
    for step in [*steps, "reconnect", "deliver", "say", "deliver"]:
        if step == "say":
            said.append(f"{len(said):04}".encode())
            scheduler.log_event(TOPIC, said[-1])
        elif step == "cut" and wire is not None:
            calls.remove_client(scheduler, wire.client_id)
            old = scheduler.wires.pop(wire.client_id)
            wire = None
        elif step == "reconnect":
            old, wire = wire or old, connect()
            ask(wire)
        elif step == "resume" and wire is not None:
            ask(wire)
        elif step == "acknowledge" and wire is not None:
            scheduler.take(wire.client_id, following.acknowledge())
        elif step == "deliver late" and old is not None and old.sent:
            old.handler(old.sent.pop(0))
        elif step == "deliver" and wire is not None:
            while wire.sent:
                wire.handler(wire.sent.pop(0))
    await calls.close()
    assert sorted([*heard, *(said[number] for number in missed)]) == said
    assert heard == sorted(heard)
    if limit_bytes == 10**6:
        assert heard == said


SUBMITTER = """
import os, pickle, sys, time
from tests.system.worker.test_calls import Nodes, say_and_wait, submit
with open(sys.argv[1], "rb") as file:
    client = pickle.load(file).connect()
future = submit(client, "d", say_and_wait, sys.argv[2])
print("sent", flush=True)
time.sleep(60)
"""


def test_a_detached_call_outlives_the_process_that_sent_it(one_node: Nodes, tmp_path: Path) -> None:
    """When its sender is killed a call goes on; another client finds it, follows its log, reads its outcome, and
    deletes it.
    """
    note = tmp_path / "nodes"
    note.write_bytes(pickle.dumps(replace(one_node, processes=[])))
    sender = subprocess.Popen([sys.executable, "-c", SUBMITTER, str(note), str(tmp_path)], stdout=subprocess.PIPE)
    try:
        assert sender.stdout is not None
        assert sender.stdout.readline() == b"sent\n"
        wait_until(lambda: list(tmp_path.glob("run-*")), "the call to run")
    finally:
        sender.kill()
        sender.communicate()
    with one_node.connect() as client:
        wait_until(lambda: state_of(client, "d")["state"] == "running", "the call to be known to run")
        (known,) = client.sync(client.scheduler.skyward_calls)
        assert (known["name"], known["worker"], known["runs"]) == ("say_and_wait", "0-0", 1)
        wait_until(lambda: state_of(client, "d")["messages"], "its first line")
        begun = state_of(client, "d")
        assert [item.lines for item in news(begun["messages"])] == [("begun",)]
        (tmp_path / "go").touch()
        wait_until(lambda: state_of(client, "d")["state"] == "ended", "the call to end")
        later = client.sync(client.scheduler.skyward_call, call_id="d", after=begun["messages_in_all"])
        assert later["number"] == begun["messages_in_all"]
        line, outcome = news(later["messages"])
        assert line.lines == ("gone on",)
        assert pickle.loads(outcome.parcel.data) == "done"
        assert client.sync(client.scheduler.skyward_forget, call_id="d") is True
        assert not client.sync(client.scheduler.skyward_calls)
        assert state_of(client, "d") is None
        assert len(list(tmp_path.glob("run-*"))) == 1


def test_a_frozen_worker_is_dropped_and_replaced_when_it_runs_again(tmp_path: Path) -> None:
    """A worker with frozen threads is out of the pool within 15 s. When it runs again it ends, and another joins in
    its place.
    """
    with _nodes(2, tmp_path) as nodes, nodes.connect() as client:
        client.wait_for_workers(2)
        pids = {
            worker["name"]: (address, worker_pid)
            for address, worker_pid in client.run(os.getpid).items()
            for worker in [_worker(client, address)]
        }
        address, pid = pids["1-0"]
        submit(client, "d", say_and_wait, str(tmp_path))
        limit, heard = 20 * slowness(), _worker(client, address)["last_seen"]
        wait_until(lambda: _worker(client, address)["last_seen"] != heard, "a sign of life, from which on it is silent")
        os.kill(pid, signal.SIGSTOP)
        began = time.monotonic()
        try:
            wait_until(lambda: address not in members(client), "the frozen worker to be given up", limit)
            assert time.monotonic() - began > 5
        finally:
            os.kill(pid, signal.SIGCONT)
        wait_until(lambda: any(worker["name"] == "1-0" for worker in members(client).values()), "a worker in its place")
        (tmp_path / "go").touch()


def test_a_worker_that_was_cut_off_joins_again(tmp_path: Path) -> None:
    """A node that loses all packets is dropped within 20 s, notices itself that it is cut off, and is back within 10
    s after the network recovers.
    """
    if reason := why_not():
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(reason)
    with Fleet() as fleet:
        hosts = [fleet.create(), fleet.create()]
        with _nodes(2, tmp_path, hosts) as nodes, nodes.connect() as client:
            (log,) = [path for path in tmp_path.glob("*/log") if not (path.parent / "head.json").exists()]

            def is_there() -> bool:
                return any(worker["name"] == "1-0" for worker in members(client).values())

            wait_until(is_there, "the worker")
            hosts[1].partition()
            wait_until(lambda: not is_there(), "the worker to be given up", 20 * slowness())
            wait_until(lambda: "worker 1-0 ends" in log.read_text(), "the worker to end itself", 30)
            hosts[1].heal()
            wait_until(is_there, "a worker in its place")


def _worker(client: distributed.Client, address: str) -> dict[str, Any]:
    return members(client)[address]
