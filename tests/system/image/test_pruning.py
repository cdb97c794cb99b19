"""A host removes environments and uploads by itself that no pool has used for 30 days, when it builds another."""

import os
import subprocess
import time
from pathlib import Path

from skyward_core.image import shell

OLD = time.time() - 31 * 86_400


def entry(folder: Path, *, is_old: bool) -> Path:
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").symlink_to("/bin/sh")
    mark = folder / ".skyward-complete" if folder.parent.name == "envs" else folder
    if mark != folder:
        mark.touch()
    if is_old:
        os.utime(mark, (OLD, OLD))
    return folder


def run(home: Path, lines: str) -> str:
    script = shell.script(shell.prelude(), lines)
    environ = {"PATH": os.environ["PATH"], "HOME": str(home), "SKYWARD_HOME": str(home)}
    done = subprocess.run(["bash"], input=script, env=environ, capture_output=True, text=True, check=True, timeout=60)
    return done.stdout


def test_what_no_pool_has_used_for_long_goes_and_what_a_node_names_stays(tmp_path: Path) -> None:
    envs, files = tmp_path / "envs", tmp_path / "files"
    old, used, young = (entry(envs / name, is_old=name != "young") for name in ("old", "used", "young"))
    sent, new = entry(files / "sent", is_old=True), entry(files / "new", is_old=False)
    node = subprocess.Popen(
        ["cat"], stdin=subprocess.PIPE, env={**os.environ, "SKYWARD_ENV_PYTHON": f"{used}/bin/python"}
    )
    with node:
        assert "failed" not in run(tmp_path, "skyward_prune")
        assert node.stdin is not None
        node.stdin.close()
    assert [path.exists() for path in (old, used, young, sent, new)] == [False, True, True, False, True]
    run(tmp_path, "skyward_prune")
    assert not used.exists()


def test_an_environment_that_is_used_again_is_young(tmp_path: Path) -> None:
    old = entry(tmp_path / "envs" / "old", is_old=True)
    assert run(tmp_path, 'skyward_find old\nskyward_prune\necho "complete=$skyward_complete"') == "complete=yes\n"
    assert old.exists()
