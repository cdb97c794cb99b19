"""No process that a call has started outlives its node: the keeper, with real processes and real kills."""

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

import skyward_core as sky
from skyward_core.providers import local as control_groups
from skyward_core.providers.termination_shell import PROOFS
from skyward_core.worker import keeper, node_clocks
from tests.waiting import wait_until

RUNAWAY = "sh -c 'env -i setsid /bin/sleep {seconds} </dev/null >/dev/null 2>&1 &';"
EMPTY_GROUP, EMPTY_TREE, EMPTY_TAG = PROOFS["group"], PROOFS["tree"], PROOFS["tag"]


@pytest.fixture
def mark() -> Iterator[str]:
    """A duration that no other process sleeps: it identifies processes without a tag. All of them are removed."""
    seconds = f"{4000 + uuid.uuid4().int % 1000000}.{uuid.uuid4().int % 10**8}"
    yield seconds
    for pid in running(seconds):
        os.kill(pid, signal.SIGKILL)


@pytest.fixture
def no_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """A computer without control groups."""
    monkeypatch.setattr(control_groups, "make", lambda *_: None)


def running(seconds: str) -> list[int]:
    """The processes with this word in their command lines."""
    found = []
    for pid in keeper.processes():
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if seconds.encode() in words and keeper.start_of(pid):
                found.append(pid)
    return found


def launched(script: str, pool_id: str = "") -> sky.Instance:
    """An instance of this computer, after its startup script has reported that it runs."""
    provider = sky.Local()
    (offer,) = provider.offers(sky.Requirements())
    (instance,) = provider.launch(
        offer, 1, {"skyward-pool": pool_id or f"sky-test-{uuid.uuid4().hex[:8]}", "skyward-rank": "0"}, script
    )
    wait_until((Path(str(instance.directory)) / "started").exists, "the script to run")
    return instance


def keepers_of(instance: sky.Instance) -> list[int]:
    """The pids of its keepers, in order."""
    pids = [pid for pid, is_keeper in node_clocks.members(instance.id).items() if is_keeper]
    return sorted(pids, key=lambda pid: keeper.parent_of(pid) in pids)


def listed(instance: sky.Instance) -> list[str]:
    return [found.id for found in sky.Local().instances(instance.pool_id)]


# ── the end of a node ────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_process_that_sheds_its_tag_ends_with_the_node(mark: str, no_groups: None) -> None:
    """When a node is terminated from outside, processes that have left its session, environment and parent end too."""
    instance = launched(f"{RUNAWAY.format(seconds=mark)} touch started; sleep 300")
    wait_until(lambda: running(mark), "the runaway")
    assert sky.Local().terminate([instance.id]) == {instance.id: EMPTY_TREE}
    assert running(mark) == []
    assert listed(instance) == []


def test_a_process_that_removes_its_tag_is_listed_as_its_node(mark: str) -> None:
    """The startup script ended long ago, but processes that it left are still found, and the keeper ends them."""
    instance = launched(f"{RUNAWAY.format(seconds=mark)} touch started")
    wait_until(lambda: listed(instance) == [], "the node to end with its command")
    assert running(mark) == []
    assert (Path(str(instance.directory)) / keeper.KEPT).read_text() in {"group\n", "tree\n"}
    sky.Local().terminate([instance.id])


@pytest.mark.parametrize("who", ["command", "first keeper", "second keeper"])
def test_after_the_kill_of_any_process_of_a_node_the_others_are_found(who: str, mark: str, no_groups: None) -> None:
    """Any one of the three processes above an untagged process may be killed: the latter ends, at once or with the
    node.
    """
    instance = launched(f"echo $$ >shell; {RUNAWAY.format(seconds=mark)} touch started; sleep 300")
    wait_until(lambda: running(mark), "the runaway")
    first, second = keepers_of(instance)
    os.kill(
        {
            "command": int((Path(str(instance.directory)) / "shell").read_text()),
            "first keeper": first,
            "second keeper": second,
        }[who],
        signal.SIGKILL,
    )
    if who == "first keeper":
        assert listed(instance) == [instance.id]
        assert sky.Local().terminate([instance.id]) == {instance.id: EMPTY_TREE}
    else:
        wait_until(lambda: listed(instance) == [], "the node to end")
    assert running(mark) == []
    sky.Local().terminate([instance.id])


CHAINS = {
    "sh": 'while [ -e "$1/go" ]; do touch "$1/beat"; setsid sh "$0" "$@" </dev/null >/dev/null 2>&1 & exit; done',
    "python": "import os, sys\nos.chdir(sys.argv[1])\nwhile os.path.exists('go'):\n    open('beat', 'w').close()\n    if os.fork():\n        os._exit(0)\n    os.setsid()\n",
}
"""Programs that fork all the time while there is a file `go`, and touch the file `beat`: a list of processes hardly
ever shows one.
"""


@pytest.mark.parametrize("fork", CHAINS)
def test_a_process_that_forks_all_the_time_is_caught(fork: str, mark: str, tmp_path: Path, no_groups: None) -> None:
    """Each process of the chain lives only for a moment, has another session and no environment.

    Sleeps: its processes have to live for a moment.
    """
    go, beat, chain = tmp_path / "go", tmp_path / "beat", tmp_path / "chain"
    chain.write_text(CHAINS[fork])
    program = "sh" if fork == "sh" else f"{sys.executable} -I -S"
    go.touch()
    try:
        instance = launched(
            f"env -i PATH=$PATH setsid {program} {chain} {tmp_path} </dev/null >/dev/null 2>&1 & touch started; sleep 300"
        )
        wait_until(beat.exists, "the chain")
        began = time.monotonic()
        for _ in range(3):
            beat.unlink()
            wait_until(beat.exists, "the chain to go on")
        seconds = max(0.1, 2 * (time.monotonic() - began))  # in which a chain that lives beats several times
        sky.Local().terminate([instance.id])
        beat.unlink(missing_ok=True)
        time.sleep(seconds)
        assert not beat.exists()
    finally:
        go.unlink()


def test_a_frozen_keeper_keeps_its_children(mark: str, no_groups: None) -> None:
    """A stopped keeper reaps no process, but is still their parent."""
    instance = launched(f"{RUNAWAY.format(seconds=mark)} touch started; sleep 300")
    wait_until(lambda: running(mark), "the runaway")
    keepers = keepers_of(instance)
    for pid in keepers:
        os.kill(pid, signal.SIGSTOP)
    node_clocks.kill_instance(instance.id)  # once: processes above the others are spared while those exist
    wait_until(lambda: set(node_clocks.members(instance.id)) == set(keepers), "all but the keepers to be dead")
    assert sky.Local().terminate([instance.id]) == {instance.id: EMPTY_TREE}
    assert running(mark) == []
    assert listed(instance) == []


def test_without_keepers_and_groups_the_evidence_claims_no_more_than_it_can(
    mark: str, no_groups: None, caplog: pytest.LogCaptureFixture
) -> None:
    """If both keepers are killed at once, and there is no control group, untagged processes are not found, and the
    evidence does not claim otherwise.
    """
    instance = launched(f"{RUNAWAY.format(seconds=mark)} touch started; sleep 300")
    wait_until(lambda: running(mark), "the runaway")
    kill_at_once(keepers_of(instance))
    wait_until(lambda: keepers_of(instance) == [], "the keepers to be dead")
    assert sky.Local().terminate([instance.id]) == {instance.id: EMPTY_TAG}
    assert EMPTY_TAG in caplog.text
    assert len(running(mark)) == 1


@pytest.mark.skipif(os.getuid() != 0, reason="becoming another user needs root")
def test_a_process_that_has_changed_its_user_ends_with_the_node(mark: str, no_groups: None) -> None:
    """`su nobody`, with a shell that is left running."""
    instance = launched(
        f"su -s /bin/sh nobody -c 'setsid nohup env -i /bin/sleep {mark} >/dev/null 2>&1 </dev/null &'; touch started; sleep 300"
    )
    wait_until(lambda: [pid for pid in running(mark) if os.stat(f"/proc/{pid}").st_uid != 0], "the runaway")
    sky.Local().terminate([instance.id])
    assert running(mark) == []


def kill_at_once(pids: list[int]) -> None:
    """Kill these so that none sees the death of another."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


# ── control groups ───────────────────────────────────────────────────────────────────────────────────────────────────


def has_groups() -> bool:
    """Whether this computer lets this user make control groups (cgroup v2, kernel 5.14 or later)."""
    group = control_groups.make(f"local-{uuid.uuid4().hex[:12]}", "sky-test-probe", "0")
    return group is not None and group.remove()


@pytest.mark.skipif(not has_groups(), reason="no cgroup v2 in which this user may make groups")
def test_a_control_group_holds_processes_that_have_lost_their_keepers(mark: str) -> None:
    """Both keepers are killed at once, client and reaper are gone: any process of the same user lists the node by
    its group, and ends all processes in it.
    """
    pool_id = f"sky-test-{uuid.uuid4().hex[:8]}"
    instance = launched(f"{RUNAWAY.format(seconds=mark)} touch started; sleep 300", pool_id)
    wait_until(lambda: running(mark), "the runaway")
    kill_at_once([pid for pid in node_clocks.members(instance.id) if pid not in running(mark)])
    wait_until(lambda: not node_clocks.members(instance.id), "nothing with a tag to be left")
    asked = "import sys, skyward_core as sky; print([(i.id, i.pool_id, i.rank) for i in sky.Local().instances(sys.argv[1])])"
    output = subprocess.run([sys.executable, "-c", asked, pool_id], capture_output=True, text=True, check=True).stdout
    assert output == f"{[(instance.id, pool_id, 0)]}\n"
    assert sky.Local().terminate([instance.id]) == {instance.id: EMPTY_GROUP}
    assert running(mark) == []
    assert listed(instance) == []
    assert [group for group in control_groups.all_groups() if group.pool_id == pool_id] == []


@pytest.mark.skipif(not has_groups(), reason="no cgroup v2 in which this user may make groups")
def test_an_abandoned_group_is_removed_by_the_next_launch() -> None:
    """A node that ended while no process watched leaves an empty folder; a folder that a node is about to enter is
    left alone.
    """
    group = control_groups.make(f"local-{uuid.uuid4().hex[:12]}", "sky-test-abandoned", "0")
    assert group is not None
    control_groups.remove_abandoned()
    assert group.path.exists()
    control_groups.remove_abandoned(lambda: time.time() + control_groups.ABANDONED_GROUP_SECONDS)
    assert not group.path.exists()
