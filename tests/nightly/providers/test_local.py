"""`Local` with real processes: tags find them, and they end with terminate or with their client."""

import os
import signal
import tempfile
from pathlib import Path

import pytest

import skyward_core as sky
from skyward_core.paths import existing, state_places
from skyward_core.worker import node_clocks
from tests.system.providers.test_local import (  # noqa: F401 - fixtures
    client,
    folder_of,
    launch,
    left_of,
    pool_id,
)
from tests.waiting import wait_until


def kill_keepers(instance_id: str) -> None:
    """Kill the keepers of an instance, so that only the tags connect its processes."""
    for pid in sorted(pid for pid, is_keeper in node_clocks.members(instance_id).items() if is_keeper):
        os.kill(pid, signal.SIGSTOP)  # so that the second keeper does not end all processes when the first is gone
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(
    "word", ["", "{", "[1]", '{"odd": 1}', '{"skyward-pool": "sky-somebody-else", "skyward-rank": "9"}']
)
def test_an_instance_that_has_lost_its_tags_is_still_found(word: str, pool_id: str) -> None:
    """Only a process with other variables is left. The instance is listed with its pool and its rank."""
    kept = f"SKYWARD_INSTANCE_ID=$SKYWARD_INSTANCE_ID SKYWARD_POOL_ID=$SKYWARD_POOL_ID SKYWARD_RANK=7 SKYWARD_TAGS='{word}'"
    (instance,) = launch(pool_id, script=f"touch started; exec env -i {kept} sleep 300")
    kill_keepers(instance.id)
    # a search may miss it for a moment
    wait_until(lambda: [found.rank for found in sky.Local().instances(pool_id)] == [7], "the process to be exchanged")
    (found,) = sky.Local().instances(pool_id)
    assert (found.id, found.directory) == (instance.id, instance.directory)
    assert found.tags == {"skyward-pool": pool_id, "skyward-rank": "7"}


def test_a_pool_uses_no_files_in_the_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dask's folders, also the scheduler's, are in the node's own folder, and are removed with it."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # the variable is also for the nodes
    with sky.ComputePool(provider=sky.Local(), display="quiet") as pool:
        assert pool.run(sky.compute(tempfile.gettempdir)()) == str(tmp_path)
        assert list(tmp_path.iterdir()) == []
        (node,) = pool.lease.nodes
        assert (folder_of(node.instance) / "dask-scratch-space").is_dir()


def test_nodes_end_when_their_client_is_killed_while_they_start(tmp_path: Path) -> None:
    """A client that is killed before its nodes are ready leaves no process."""
    process, log = client(tmp_path)
    try:
        wait_until(lambda: log.read_text().count("local-") == 2, "the instances", 60)
    finally:
        process.kill()
        process.wait()
    ids = log.read_text().split()
    wait_until(lambda: not left_of(ids), "the nodes to end")


def test_nodes_end_when_their_client_is_killed_while_packages_are_installed(tmp_path: Path) -> None:
    """The installation is stopped too."""
    slow_uv = tmp_path / "bin" / "uv"
    slow_uv.parent.mkdir()
    slow_uv.write_text("#!/bin/sh\ntouch $HOME/uv-began\nsleep 300\n")
    slow_uv.chmod(0o755)
    (tmp_path / "sitecustomize.py").write_text(f"import uv\nuv.find_uv_bin = lambda: {str(slow_uv)!r}\n")
    env = {
        "PYTHONPATH": f"{tmp_path}:{Path(sky.__file__).parents[1]}",
        "HOME": str(tmp_path),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }
    process, log = client(tmp_path, "sky.Image(pip=['iniconfig'])", env=env)
    try:
        wait_until(
            lambda: (tmp_path / "uv-began").exists() and log.read_text().count("local-") == 2,
            "the installation to begin",
            60,
        )
    finally:
        process.kill()
        process.wait()
    ids = [line for line in log.read_text().split() if line.startswith("local-")]
    assert len(ids) == 2
    wait_until(lambda: not left_of(ids), "the installation to end")


def test_a_program_that_exits_with_an_open_pool_tears_it_down(tmp_path: Path) -> None:
    """sys.exit during a call returns, and leaves no machine and no directory."""
    process, log = client(tmp_path, ending="exit")
    try:
        assert process.wait(timeout=60) == 0, (tmp_path / "errors").read_text()
    finally:
        process.kill()
        process.wait()
    ids = [line for line in log.read_text().split() if line.startswith("local-")]
    assert "ready" in log.read_text()
    assert left_of(ids) == []
    assert not any(
        (folder / instance_id).exists() for folder in existing("nodes", state_places()) for instance_id in ids
    )
