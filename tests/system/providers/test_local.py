"""`Local` with real processes: tags find them, and they end with terminate or with their client."""

import json
import os
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import skyward_core as sky
from skyward_core.providers import base
from skyward_core.wire.settings import memory_directory
from skyward_core.worker import node_clocks
from tests.conftest import processes_by_tag
from tests.waiting import wait_until

SCRIPT = "env -0 >env; touch started; sleep 300 & sleep 300"


@pytest.fixture
def pool_id() -> Iterator[str]:
    """Yield a pool id. Its remaining instances are terminated at the end."""
    pool_id = f"sky-test-{uuid.uuid4().hex[:8]}"
    yield pool_id
    provider = sky.Local()
    provider.terminate([instance.id for instance in provider.instances(pool_id)])


def launch(pool_id: str, count: int = 1, provider: sky.Local | None = None, script: str = SCRIPT) -> list[sky.Instance]:
    provider = provider or sky.Local()
    (offer,) = provider.offers(sky.Requirements())
    instances = provider.launch(offer, count, {"skyward-pool": pool_id, "skyward-rank": "0"}, script)
    for instance in instances:
        wait_until((folder_of(instance) / "started").exists, "the script to run")
    return instances


def folder_of(instance: sky.Instance) -> Path:
    assert instance.directory is not None
    return Path(instance.directory)


def processes_of(instance_id: str) -> list[int]:
    return [pid for pid, tag in processes_by_tag("SKYWARD_INSTANCE_ID") if tag == instance_id]


def test_the_one_offer_is_this_machine() -> None:
    """The offer has this machine's processors and memory, and this provider's price."""
    (offer,) = sky.Local(price_per_hour=1.5).offers(sky.Requirements())
    assert offer.vcpus == len(os.sched_getaffinity(0))
    assert offer.memory_gb == pytest.approx(psutil.virtual_memory().total / 1e9)
    assert (offer.price_per_hour, offer.is_spot, offer.accelerators) == (1.5, False, 0)
    assert base.load({"name": "local", "price_per_hour": 1.5}) == sky.Local(price_per_hour=1.5)


TAGS = {
    "skyward-launch": "token-1",
    "skyward-owner": "Jo Doe@box",
    "skyward-process": "boot.4026531836.7.123",
    "skyward-created": "1790000000",
    "skyward-expires": "1790003600",
    "odd": "a b\"c'd$(touch pwned)\n\\é=;\t*",
}
"""The tags of a pool, and a value with characters that shells and line-wise readers may misinterpret."""


def test_another_process_finds_complete_tags(pool_id: str) -> None:
    """The tags exist from the creating call on. Each machine has its own rank. The process knows only the provider."""
    (offer,) = sky.Local().offers(sky.Requirements())
    launched = sky.Local().launch(offer, 2, {"skyward-pool": pool_id, "skyward-rank": "3", **TAGS}, "sleep 300")
    wanted = [{"skyward-pool": pool_id, "skyward-rank": rank, **TAGS} for rank in ("3", "4")]
    assert [instance.tags for instance in launched] == wanted
    code = "import skyward_core as sky; print('[' + ','.join(instance.model_dump_json() for instance in sky.Local().instances()) + ']')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    found = [sky.Instance.model_validate(fields) for fields in json.loads(done.stdout)]
    assert [instance for instance in found if instance.pool_id == pool_id] == launched


KILLED_AT_ITS_START = """
import os, signal, subprocess
import skyward_core as sky

subprocess.Popen = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
(offer,) = sky.Local().offers(sky.Requirements())
sky.Local().launch(offer, 3, {"skyward-pool": "sky-killed", "skyward-rank": "0"}, "")
"""


def test_a_sweep_removes_the_folders_of_a_launch_that_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was killed after it had made the folders and before the first process."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("SKYWARD_LEDGER", f"sqlite:///{tmp_path}/ledger/ledger.db")
    killed = subprocess.run([sys.executable, "-c", KILLED_AT_ITS_START], timeout=120, check=False)
    assert killed.returncode == -signal.SIGKILL
    (folder,) = (tmp_path / "skyward/nodes").iterdir()
    memory = Path(memory_directory(folder.name))
    assert memory.is_dir()
    line = f"local: folders of ended nodes in {folder.parent}: 1"
    assert line in sky.sweep([sky.Local()], is_dry_run=True).pruned
    assert folder.is_dir()
    assert line in sky.sweep([sky.Local()], is_dry_run=False, min_age_seconds=3e8).pruned
    assert (folder.exists(), memory.exists()) == (False, False)


def test_a_script_is_run_without_a_path(pool_id: str) -> None:
    """A file with a path could be replaced between check and start. bash reads an unnamed file, and no file of the node
    contains the script.
    """
    (instance,) = launch(
        pool_id,
        script='echo "$BASH_SOURCE/$(readlink /proc/$$/fd/255)"; touch started; sleep 300 # a mark of this script',
    )
    folder = folder_of(instance)
    assert "memfd:skyward-startup" in (folder / "log").read_text()
    assert str(folder) not in (folder / "log").read_text()
    assert [
        path.name for path in folder.rglob("*") if path.is_file() and b"a mark of this script" in path.read_bytes()
    ] == []


def test_without_a_pool_the_instances_of_all_pools_are_listed(pool_id: str) -> None:
    """All instances of this user are listed, of any pool. Processes of other providers on this machine are not."""
    (mine,), (other,) = launch(pool_id), launch(f"{pool_id}-other")
    foreign = {
        **os.environ,
        "SKYWARD_INSTANCE_ID": "host-0123456789ab",
        "SKYWARD_POOL_ID": pool_id,
        "SKYWARD_RANK": "0",
        "SKYWARD_INSTANCE_DIRECTORY": "/x",
    }
    sleeper = subprocess.Popen(["sleep", "300"], env=foreign)
    try:
        listed = {instance.id: instance for instance in sky.Local().instances()}
        assert (listed[mine.id], listed[other.id]) == (mine, other)
        assert "host-0123456789ab" not in listed
        assert sky.Local().instances(pool_id) == [mine]
    finally:
        sleeper.kill()
        sleeper.wait()
        sky.Local().terminate([other.id])
    assert other.id not in {instance.id for instance in sky.Local().instances()}


def test_a_process_that_cannot_be_seen_for_a_moment_is_not_gone(pool_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """During execve(2) a process has no visible environment, so one search without a result proves nothing."""
    (instance,) = launch(pool_id, script="touch started; exec sleep 300")
    look, looks = node_clocks.tagged_processes, iter([False])
    monkeypatch.setattr(node_clocks, "tagged_processes", lambda: look() if next(looks, True) else iter(()))
    sky.Local().terminate([instance.id])
    assert processes_of(instance.id) == []
    assert not folder_of(instance).exists()


def test_terminate_ends_every_process_and_removes_the_directory(pool_id: str) -> None:
    """Children with their own session, and processes that ignore SIGTERM, are gone when terminate returns."""
    stubborn = "trap '' TERM; setsid bash -c 'trap \"\" TERM; touch away; sleep 300 & wait; sleep 300' & while [ ! -e away ]; do sleep 0.01; done; touch started; sleep 300; sleep 300"
    (hard,) = launch(pool_id, script=stubborn)
    (other,) = launch(pool_id)
    assert len(processes_of(hard.id)) >= 3
    for ids in ([hard.id], [hard.id, "local-000000000000"], []):  # one that is gone is no error
        sky.Local().terminate(ids)
    assert processes_of(hard.id) == []
    assert not folder_of(hard).exists()
    assert processes_of(other.id) != []
    assert [instance.id for instance in sky.Local().instances(pool_id)] == [other.id]


def test_the_folders_in_memory_of_killed_nodes_are_removed_by_the_next_one(pool_id: str) -> None:
    """If they are empty and old: a node may be about to start its first process, or be a process of a container."""
    (living,) = launch(pool_id)
    gone, full, young = (Path(memory_directory(f"local-{uuid.uuid4().hex[:12]}")) for _ in range(3))
    folders = [gone, full, young, Path(memory_directory(living.id))]
    for folder in folders:
        folder.mkdir(exist_ok=True)
    (full / "value").touch()
    for folder in folders:
        if folder is not young:
            os.utime(folder, (0, 0))
    try:
        launch(pool_id)
        assert [folder.exists() for folder in folders] == [False, True, True, True]
    finally:
        for folder in (gone, full, young):
            shutil.rmtree(folder, ignore_errors=True)


def test_an_id_is_compared_completely(pool_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Terminating a prefix of an id, an empty id or a path has no effect."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))  # an error would remove files only here
    (instance,) = launch(pool_id)
    sky.Local().terminate([instance.id[:-1], "local-", "", ".", "local-/../"])
    assert processes_of(instance.id) != []
    assert folder_of(instance).exists()
    sky.Local().terminate([instance.id])


def test_a_node_sees_paths_and_proxies_but_no_secrets(pool_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node inherits variables that every machine has."""
    kept = {
        "LC_ALL": "C.UTF-8",
        "https_proxy": "http://proxy:3128",
        "REQUESTS_CA_BUNDLE": "/etc/ca.pem",
        "UV_INDEX_URL": "https://x/simple",
        "NVIDIA_X": "1",
    }
    dropped = (
        "AWS_SECRET_ACCESS_KEY",
        "GITHUB_TOKEN",
        "PREFECT_API_KEY",
        "AIRFLOW_HOME",
        "DAGSTER_HOME",
        "PYTHONPATH",
        "VIRTUAL_ENV",
        "SKYWARD_PROVIDER",
    )
    for name, value in kept.items():
        monkeypatch.setenv(name, value)
    for name in dropped:
        monkeypatch.setenv(name, "/secret")
    (instance,) = launch(pool_id)
    seen = dict(item.partition("=")[::2] for item in (folder_of(instance) / "env").read_text().split("\0") if item)
    assert seen.items() >= (kept | {"PATH": os.environ["PATH"], "HOME": os.environ["HOME"]}).items()
    assert not set(dropped) & set(seen)
    assert "/secret" not in seen.values()
    for folder in (folder_of(instance), Path(memory_directory(instance.id))):
        assert folder.stat().st_mode & 0o077 == 0, "of this user only"


CLIENT = """
import sys, time, os
import skyward_core as sky

log = open(sys.argv[1], "a", buffering=1)
image = eval(sys.argv[2])

def on_event(event):
    if isinstance(event, sky.InstanceProvisioned):
        log.write(f"{event.instance_id}\\n")
    if isinstance(event, sky.BootstrapProgress) and event.step == "deps":
        log.write("installing\\n")

pool = sky.ComputePool(provider=sky.Local(), nodes=2, image=image, display="quiet", on_event=on_event)
pool.open()
future = pool.submit(sky.compute(lambda: (print("begun"), time.sleep(300)))())
pool.submit(sky.compute(lambda: 1)()).result()
log.write("ready\\n")
if sys.argv[3] == "exit":
    sys.exit(0)
future.result()
"""


def client(
    tmp_path: Path, image: str = "sky.Image()", ending: str = "stay", env: dict[str, str] | None = None
) -> tuple[subprocess.Popen[str], Path]:
    (tmp_path / "client.py").write_text(CLIENT)
    log = tmp_path / "log"
    log.touch()
    with (tmp_path / "errors").open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, "-W", "ignore", str(tmp_path / "client.py"), str(log), image, ending],
            env={**os.environ, **(env or {})},
            stdout=subprocess.DEVNULL,
            stderr=errors,
            text=True,
        )
    return process, log


def left_of(ids: list[str]) -> list[Any]:
    running = [(pid, tag) for pid, tag in processes_by_tag("SKYWARD_INSTANCE_ID") if tag in ids]
    return running + [name for name in os.listdir("/dev/shm") if any(name.endswith(instance_id) for instance_id in ids)]


@pytest.mark.parametrize("sig", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.nightly)])
def test_nodes_end_with_their_client(sig: signal.Signals, tmp_path: Path) -> None:
    """When a client is killed during a call, all processes of its nodes, and their memory, are gone within seconds."""
    process, log = client(tmp_path)
    try:
        wait_until(lambda: "ready" in log.read_text(), "the client's pool", 60)
        ids = [line for line in log.read_text().split() if line.startswith("local-")]
        assert len(ids) == 2
        assert len({tag for _, tag in processes_by_tag("SKYWARD_INSTANCE_ID")} & set(ids)) == 2
    finally:
        process.send_signal(sig)
        process.wait()
    wait_until(lambda: not left_of(ids), "the nodes to end")
    ends = sky.Local().ends(ids)
    assert set(ends) == set(ids)
    if sig == signal.SIGKILL:
        assert {end.reason for end in ends.values()} <= {"its client is gone", "asked to"}
