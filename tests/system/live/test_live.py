"""A look at a live pool: logs, metrics, stacks, logins and Dask's pages, with a real pool of this machine."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import skyward_core as sky
from skyward_core.ledger.ledger import Ledger
from skyward_core.live.pool_nodes import find_nodes
from skyward_core.machines.owner import Owner
from skyward_core.worker import stacks
from tests.cli.ledger import check_fields, documented
from tests.unit.live.test_live import (  # noqa: F401 - fixtures
    ledger,
    machine,
    skyward,
    url,
)
from tests.waiting import wait_until

ROOT = Path(__file__).parents[3]


RUNNER = """
import sys, time
from skyward_core.worker.stacks import answer_requests
def in_a_library():
    print('began', flush=True)
    time.sleep(600)
if sys.argv[1] == 'answers':
    answer_requests()
in_a_library()
"""


@pytest.mark.parametrize("kind", ["answers", "does not"])
def test_a_process_shows_its_stacks_and_goes_on(kind: str) -> None:
    """Twice; one that has not registered gets no signal, which would end it."""
    with subprocess.Popen([sys.executable, "-c", RUNNER, kind], stdout=subprocess.PIPE, text=True, cwd=ROOT) as program:
        try:
            assert program.stdout is not None
            assert program.stdout.readline() == "began\n"
            for _ in range(2):
                text = asyncio.run(stacks.stacks_of(program.pid))
                assert ("in in_a_library" in text) == (kind == "answers")
                assert text.count("Current thread") + text.count("Thread 0x") == (kind == "answers")
            assert program.poll() is None
        finally:
            program.kill()
    assert asyncio.run(stacks.stacks_of(program.pid)) == ""


def wait_for_end(file: str) -> str:
    print("it waits", flush=True)
    while not os.path.exists(file):
        time.sleep(0.05)
    return "done"


class Heavy:
    """A value whose load at the client takes until a file exists."""

    def __init__(self, file: str) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return load_at_last, (self.file,)


def load_at_last(file: str) -> str:
    while not os.path.exists(file):
        time.sleep(0.05)
    return "done"


def copy_there_and_back(skyward: Callable[..., str], pool: str, work: Path, here: Path) -> None:
    """Copy files and folders to the working directory of the calls on node 0, and back. Faults are named."""
    (here / "tree/inner").mkdir(parents=True)
    program = here / "tree/inner/run.sh"
    program.write_bytes(b"#!/bin/sh\n" * 200_000)  # more than a pipe holds
    program.chmod(0o755)
    (here / "tree/link").symlink_to("inner/run.sh")
    skyward(f"cp {program} {pool}:copied.sh")
    skyward(f"cp {here}/tree {pool}:0:{work}")
    skyward(f"cp {here}/tree {pool}:0:renamed/")
    skyward(f"cp {here}/tree {pool}:0:renamed")
    for copy in ("copied.sh", "tree/inner/run.sh", "renamed/link", "renamed/tree/inner/run.sh"):
        assert (work / copy).read_bytes() == program.read_bytes()
        assert os.access(work / copy, os.X_OK)
    skyward(f"cp {pool}:0:tree {here}/back")
    skyward(f"cp {pool}:tree/inner/run.sh {here}")
    skyward(f"cp {pool}:0: {here}")
    for copy in ("back/link", "run.sh", "work/tree/inner/run.sh", "work/copied.sh"):
        assert (here / copy).read_bytes() == program.read_bytes()
        assert os.access(here / copy, os.X_OK)
    assert sorted(path.name for path in here.iterdir()) == ["back", "run.sh", "tree", "work"], "and no parts"
    (here / "private").write_text("his")
    (here / "private").chmod(0o600)
    skyward(f"cp {here}/private {pool}:private")
    skyward(f"cp {pool}:private {here}/again")
    assert [path.stat().st_mode & 0o777 for path in (work / "private", here / "again")] == [0o600, 0o600]
    for words, fault in (
        (f"{pool}:0:/no/such {here}", f"node 0 of pool {pool}: there is no file or folder /no/such"),
        (f"{here}/none {pool}:0:a", f"there is no file or folder {here}/none on this machine"),
        (f"{program} {pool}:0:/no/such/place", "there is no folder /no/such"),
        (f"{pool}:0:tree {here}/no/such", f"there is no folder {here}/no on this machine"),
        (f"{pool}:9:tree {here}", "has no node 9; its nodes are 0"),
        (f"{here}/tree {pool}:0:copied.sh", "copied.sh"),
    ):
        assert fault in skyward(f"cp {words}", code=1)
    (work / "escape").mkdir()
    (work / "escape/outside").symlink_to("/etc/passwd")
    assert "outside' is a link to an absolute path: nothing was copied" in skyward(f"cp {pool}:0:escape {here}", code=1)


def make_large_and_write_to_the_log() -> None:
    os.mkdir("large")
    with open("large/file", "wb") as file:
        file.truncate(8 << 30)
    with open(os.path.dirname(os.getcwd()) + "/log", "ab") as log:
        log.write(b"\xff a byte of no text\n")


def test_what_a_call_leaves_on_its_node_stops_neither_copies_nor_logs(
    tmp_path: Path, skyward: Callable[..., str], url: str
) -> None:
    """A copy that is ended by a signal leaves nothing, and one byte in the log of a node hides no line."""
    command = [Path(sys.executable).parent / "skyward", "--ledger", url, "cp"]
    with sky.ComputePool(provider=sky.Local(), display="quiet") as pool:
        sky.compute(make_large_and_write_to_the_log)() >> pool
        assert "\ufffd a byte of no text" in skyward(f"logs {pool.id}")
        for number, ending in enumerate((signal.SIGTERM, signal.SIGHUP)):
            here = tmp_path / str(number)
            here.mkdir()
            with subprocess.Popen([*command, f"{pool.id}:0:large", here]) as copy:
                wait_until(lambda here=here: any(here.iterdir()), "the copy to begin")
                copy.send_signal(ending)
                assert copy.wait(60) == 128 + ending
            assert list(here.iterdir()) == []


def test_a_live_pool_is_looked_at(tmp_path: Path, skyward: Callable[..., str], url: str) -> None:
    end = str(tmp_path / "end")
    with sky.ComputePool(provider=sky.Local(), concurrency=2, display="quiet") as pool:
        waiting = pool.submit(sky.compute(wait_for_end)(end))
        found: list[Any] = []
        deadline = time.monotonic() + 60
        while not any("wait_for_end" in one["stacks"] for one in found) and time.monotonic() < deadline:
            found = json.loads(skyward(f"stacks {pool.id} --json"))
        assert sorted(one["busy_seconds"] is None for one in found) == [False, True]
        assert "worker 0-0, slot 1, process" in skyward(f"stacks {pool.id}")
        lines = json.loads(skyward(f"logs {pool.id} --json"))
        assert [one for one in lines if one["text"].startswith("::skyward head") and one["node"] == 0]
        assert "[node 0] ::skyward head" in skyward(f"logs {pool.id} --node 0")
        assert "has no node 7" in skyward(f"logs {pool.id} --node 7", code=1)
        uses = json.loads(skyward(f"metrics {pool.id} --json"))
        for command, line in (("logs", f"logs {pool.id}"), ("metrics", f"metrics {pool.id}"), ("top", "top")):
            fields = documented(command)
            assert check_fields(line, skyward(f"{line} --json"), fields) == fields.keys()
        assert check_fields("stacks", json.dumps(found), documented("stacks")) == documented("stacks").keys()
        assert uses[0]["samples"][0]["cpu_percent"] >= 0
        assert (uses[0]["node"], uses[0]["busy_slots"], uses[0]["slots"]) == (0, 1, 2)
        assert skyward(f"metrics {pool.id}").splitlines()[1].split()[:2] == ["0", "1/2"]
        (row,) = json.loads(skyward("top --json"))
        assert (row["pool"], row["trouble"], row["nodes"][0]["slots"]) == (pool.id, None, 2)
        assert pool.id in skyward("top")
        with Ledger(url) as ledger:
            folder = find_nodes(ledger, pool.id).instances[0].directory
        assert skyward(f"ssh {pool.id} 0 --print").startswith(f"sh -c 'cd {folder} && exec")
        assert "has no node 7" in skyward(f"ssh {pool.id} 7 --print", code=1)
        copy_there_and_back(skyward, pool.id, Path(folder, "work"), tmp_path / "copies")
        call = pool.start_detached(sky.compute(wait_for_end)(end), call_id="nightly:1")
        assert "it has nightly:1" in skyward(f"logs {pool.id} --call other", code=1)
        Path(end).touch()
        assert (waiting.result(60), call.result(60)) == ("done", "done")
        loading = pool.submit(sky.compute(Heavy)(f"{end} of load"))
        last: list[Any] = []

        def is_fetched() -> bool:
            last[:] = json.loads(skyward(f"calls {pool.id} --json"))["calls"]
            return [one["state"] for one in last] == ["fetching"]

        try:
            wait_until(is_fetched, "the result to be loaded here")
            assert (last[0]["function"], last[0]["client_pid"]) == ("Heavy", os.getpid())
        finally:
            Path(f"{end} of load").touch()
        assert loading.result(60) == "done"
        assert f"{pool.id} has no calls now" in skyward(f"calls {pool.id}")
        assert skyward(f"logs {pool.id} --call nightly:1 --follow") == "it waits\n"
        pool.start_detached(sky.compute(print)("heard"), call_id="nightly:2")
        assert skyward(f"logs {pool.id} --call nightly:2 --follow") == "heard\n"
        states = {one["call"]: one["state"] for one in json.loads(skyward("calls --json"))["calls"]}
        assert states["nightly:2"] == "ended", "whoever reads the output of a call writes its state into the ledger"
        pool.close()
    assert "its nodes are gone" in skyward(f"logs {pool.id}", code=1)


HANGING = """
import sys, time
import skyward_core as sky

def wait_for_ever():
    while True:
        time.sleep(0.1)

work = sky.Work(system="cron", workflow="nightly", run="2026-11-27", task="train")
spec = sky.PoolSpec(provider=sky.Local(), nodes=2, name="nightly", display="quiet")
with sky.ComputePool.from_spec(spec, work=work) as pool:
    calls = [pool.submit(sky.compute(wait_for_ever)()) for _ in range(3)]
    print(pool.id, flush=True)
    sys.stdin.readline()
    for call in calls:
        call.cancel()
"""


def test_a_call_that_hangs_is_found_from_another_process(
    skyward: Callable[..., str],
) -> None:
    """With its client, its work, its node and where in the code it is; also when its client does not answer any more."""
    with subprocess.Popen(
        [sys.executable, "-c", HANGING], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as program:
        assert program.stdin is not None
        assert program.stdout is not None
        try:
            pool_id = program.stdout.readline().strip()
            found: dict[str, Any] = {"calls": []}

            def are_all_found() -> bool:
                found.update(json.loads(skyward("calls nightly --stacks --json")))
                return [one["state"] for one in found["calls"]] == ["running", "running", "waiting"] and all(
                    "in wait_for_ever" in one["stacks"] for one in found["calls"][:2]
                )

            wait_until(are_all_found, "both slots to have a call")
            running, waiting = found["calls"][:2], found["calls"][2]
            assert found["pool"] == pool_id
            assert {one["node"] for one in running} == {0, 1}
            for one in found["calls"]:
                assert (one["function"], one["client_pid"], one["user"]) == (
                    "wait_for_ever",
                    program.pid,
                    Owner.here().name,
                )
                assert one["work"]["task"] == "train"
            assert (waiting["node"], waiting["slot"], waiting["stacks"]) == (None, None, None)
            assert check_fields("calls", json.dumps(found), documented("live calls")) == documented("live calls").keys()
            text = skyward("calls nightly --stacks")
            assert "cron:nightly/2026-11-27/train" in text
            assert "in wait_for_ever" in text
            assert str(program.pid) in skyward("users nightly")
            program.send_signal(signal.SIGSTOP)
            complaint = skyward("calls nightly --json", code=1)
            assert f"process {program.pid}, does not answer" in complaint
            program.send_signal(signal.SIGCONT)
            print("", file=program.stdin, flush=True)
            assert program.wait(120) == 0
        finally:
            program.kill()
    assert "its nodes are gone" in skyward("calls nightly", code=1)
