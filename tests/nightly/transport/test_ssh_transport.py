"""The SSH transport to a node, on real hosts with only a guard: files, lines, ports, values and leases, and the
effects of a lost connection.
"""

import gzip
import pickle
import re
from pathlib import Path
from typing import Any

import pytest

from skyward_core.errors import CommandFailed, ConnectionLost
from skyward_core.image import shell
from skyward_core.transport import code_upload, ssh_transport
from skyward_core.transport.code_upload import shipped_archive
from skyward_core.worker.wire import Parcel
from tests.conftest import wait_until
from tests.system.transport.test_ssh_transport import (  # noqa: F401 - fixtures
    cloud,
    lead,
    way,
)
from tests.testbed.fixtures import fleet  # noqa: F401 - a fixture

MIB = 1 << 20


# ── its life ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_script_is_started_once_and_followed_to_its_end(lead, monkeypatch):
    """The script runs with the instance's tag, with the sent files, uv and our package; once, although the answer to
    its start was lost. Its exit code is reported.

    Looks inside: one answer is lost, which no server does when asked.
    """
    way = lead()
    ask, starts = way.transport._command, []

    def lose_the_first_answer(text: str, words: list[str], **settings: Any) -> str:
        answer = ask(text, words, **settings)
        if text == ssh_transport.START:
            starts.append(words)
            if len(starts) == 1:
                raise ConnectionLost("after it was done")
        return answer

    monkeypatch.setattr(way.transport, "_command", lose_the_first_answer)
    script = (
        'echo "ran on $SKYWARD_INSTANCE_ID, $SKYWARD_RANK of $SKYWARD_POOL_ID"\n'
        '"$SKYWARD_UV" --version | sed "s/ .*//"\n'
        f'ls "$SKYWARD_HOME/ship/{shipped_archive().name}/skyward_core/transport/ssh_transport.py"\n'
        "exit 7\n"
    )
    way.transport.start(script, timeout_seconds=60, emit=way.recorded)
    wait_until(lambda: way.has_emitted("::skyward exited 7"), "the end of the script")
    assert len(starts) == 2
    home = str(way.instance.directory).partition("/instances/")[0]
    ours = [
        "::skyward phase uv",
        f"ran on {way.instance.id}, 0 of sky-ways",
        "uv",
        f"{home}/ship/{shipped_archive().name}/skyward_core/transport/ssh_transport.py",
    ]
    assert way.lines == [*ours, "::skyward exited 7"]
    assert not (way.directory / "ship.tar.gz").exists()


@pytest.mark.parametrize(("kind", "file"), [("Linux aarch64", "aarch64"), ("Linux riscv64", None)])
def test_a_host_gets_the_uv_of_its_own_architecture(lead, monkeypatch, tmp_path, kind, file):
    """It is chosen by the output of `uname` there. For an unknown architecture nothing is sent, and the host has to
    find uv itself.

    Looks inside: the real one would fetch a program.
    """
    (tmp_path / "uv.gz").write_bytes(gzip.compress(b"of another architecture"))
    fetched: list[str] = []
    monkeypatch.setattr(
        code_upload,
        "_fetched_uv",
        lambda machine: fetched.append(machine) or code_upload.CompressedFile(tmp_path / "uv.gz", 23),
    )
    way = lead()
    uname = way.host.root / "usr/local/bin/uname"
    uname.write_text(f"#!/bin/sh\ncase $1 in -s) echo {kind.split()[0]} ;; -m) echo {kind.split()[1]} ;; esac\n")
    uname.chmod(0o755)
    way.transport.start('echo "uv is ${SKYWARD_UV:-to be found}"\nexit 7\n', timeout_seconds=60, emit=way.recorded)
    wait_until(lambda: way.has_emitted("::skyward exited 7"), "the end of the script")
    sent = way.directory.parent.parent / "uv/bin/uv"
    assert fetched == ([file] if file else [])
    assert sent.exists() is (file is not None)
    assert file is None or sent.read_bytes() == b"of another architecture"
    assert "uv is to be found" in way.lines  # a uv that does not run here is not used


def test_a_running_script_is_not_touched_by_a_second_request_to_start_it(lead):
    """Not even if only a part of the script arrives then, or none: bash reads a script while it runs it, and would take
    the end of the part for the end of the script.

    Looks inside: the command is kept, and sent a second time.
    """
    way = lead()
    wait = 'until [ -e "$SKYWARD_INSTANCE_DIRECTORY/go" ]; do sleep 0.05; done\n'
    script = "echo runs\n" + wait + f"# {'x' * 100}\n" * 1000 + "exit 7\n"
    ask = way.transport._command
    asked: list[list[str]] = []

    def remember(text: str, words: list[str], **settings: Any) -> str:
        if text == ssh_transport.START:
            asked.append(words)
        return ask(text, words, **settings)

    way.transport._command = remember
    way.transport.start(script, timeout_seconds=60, emit=way.recorded)
    wait_until(lambda: way.has_emitted("runs"), "the script to run")
    for part in (script[:20], ""):
        ask(ssh_transport.START, asked[0], stdin=part)
    (way.directory / "go").touch()
    wait_until(
        lambda: way.has_emitted("::skyward exited 7") or way.has_emitted("::skyward exited 0"), "the end of the script"
    )
    assert way.lines[-1] == "::skyward exited 7"


def test_a_part_of_a_script_is_not_started(lead):
    """It is refused and removed, and the whole script is started when it comes.

    Looks inside: half of a command is lost, which no server does when asked.
    """
    way = lead()
    ask = way.transport._command

    def lose_half(text: str, words: list[str], *, stdin: str | None = None, **settings: Any) -> str:
        return ask(text, words, stdin=stdin[: len(stdin) // 2] if stdin else None, **settings)

    way.transport._command = lose_half
    with pytest.raises(CommandFailed, match="could not run a command of ours"):
        way.transport.start("exit 6\nexit 7\n", timeout_seconds=60, emit=way.recorded)
    assert not list(way.directory.glob("bootstrap*"))
    way.transport._command = ask
    way.transport.start("exit 6\nexit 7\n", timeout_seconds=60, emit=way.recorded)
    wait_until(lambda: way.has_emitted("::skyward exited 6"), "the end of the script")


def test_on_a_full_disk_a_script_can_still_report_its_failure(lead):
    """Not one byte is free when a script fails, not even for the log. Still the log has the failed command, the
    reason, and the end.
    """
    way = lead()
    fill = 'cat /dev/zero >"$HOME/filler" || true\nwhile printf "x\\n"; do :; done 2>/dev/null\n'
    way.transport.start(
        shell.script(shell.prelude(), "skyward_phase deps", fill, "skyward_run cp /etc/passwd /root"),
        timeout_seconds=60,
        emit=way.recorded,
    )
    wait_until(lambda: way.has_emitted("::skyward exited 1"), "the end of the script")
    last = [line for line in way.lines if line != "x"][-3:]
    assert last[0] == "The disk that holds /root/.cache/skyward is full, or nearly so."
    assert last[1:] == ["::skyward failed phase=deps exit=1 command=cp /etc/passwd /root", "::skyward exited 1"]


# ── large values ─────────────────────────────────────────────────────────────────────────────────────────────────────


def _parcel(size: int) -> Parcel:
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(bytearray(b"ab" * (size // 2)), protocol=5, buffer_callback=buffers.append)
    return Parcel(data, tuple(buffer.raw() for buffer in buffers))


def test_values_go_to_the_nodes_memory_and_come_back(lead):
    """A value on the node is in its memory, for its owner only. After it is taken it is unchanged, and removed
    there. A released value is removed too.
    """
    way = lead()
    way.transport.start("true", timeout_seconds=60, emit=way.recorded)
    memory = way.host.root / way.transport.value_directories[0].lstrip("/")
    there = way.transport.put(_parcel(MIB))
    assert [path.name for path in memory.iterdir()] == [Path(str(there.path)).name]
    assert next(memory.iterdir()).stat().st_mode & 0o777 == 0o600
    data, buffers = way.transport.take(there).contents()
    assert pickle.loads(data, buffers=buffers) == b"ab" * (MIB // 2)
    assert list(memory.iterdir()) == []
    way.transport.release(way.transport.put(_parcel(MIB)))
    assert list(memory.iterdir()) == []


def test_the_nodes_folder_in_memory_has_a_name_that_other_users_cannot_guess(lead):
    """Another user of the host sees the node's id: a folder that he makes with that name is not used.

    Clients that attach to the node later get the same folder.
    """
    way = lead()
    squatted = [f"/dev/shm/skyward-node-{way.instance.id}", f"/dev/shm/skyward-0-{way.instance.id}"]
    assert way.host.run(f"setpriv --reuid=nobody --clear-groups mkdir -m 777 {' '.join(squatted)}").returncode == 0
    way.transport.start("true", timeout_seconds=60, emit=way.recorded)
    memory, directory = way.transport.value_directories
    assert directory == way.instance.directory
    assert re.fullmatch(rf"/dev/shm/skyward-[A-Za-z0-9]{{10}}-{way.instance.id}", memory)
    there = (way.host.root / memory.lstrip("/")).stat()
    assert (there.st_uid, there.st_mode & 0o777) == (0, 0o700)
    way.transport.put(_parcel(MIB))
    assert [list((way.host.root / path.lstrip("/")).iterdir()) for path in squatted] == [[], []]
    way.transport.join(timeout_seconds=60)
    assert way.transport.value_directories == (memory, directory)
    way.host.run(f"rmdir {' '.join(squatted)}")


def test_a_value_goes_to_disk_if_memory_is_full_and_is_refused_if_both_are(lead):
    """Without room in the node's memory its disk takes the value. Without room there it raises CommandFailed, and no
    part of the value is left.
    """
    way = lead()
    way.transport.start("true", timeout_seconds=60, emit=way.recorded)
    there = way.transport.put(_parcel(MIB))
    (way.host.root / "dev/shm/filler").write_bytes(b"")
    way.host.run("head -c 300M /dev/zero >/dev/shm/filler")
    on_disk = way.transport.put(_parcel(4 * MIB))
    assert (str(there.path).startswith("/dev/shm/"), str(on_disk.path).startswith(str(way.instance.directory))) == (
        True,
        True,
    )
    way.host.fill_disk()
    before = sorted(way.directory.iterdir())
    with pytest.raises(CommandFailed, match="No space left"):
        way.transport.put(_parcel(4 * MIB))
    assert sorted(way.directory.iterdir()) == before
