"""docker-compose.yml as Docker Compose reads it; the program that runs such a file without containers, on small services."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import processes_by_tag
from tests.stack.__main__ import READY
from tests.stack.compose import DEVELOPMENT, FILE, ROOT, filled, read, read_env
from tests.waiting import wait_until

HEALTHY = "service_healthy"


def shell(script: str, *, health: str = "", needs: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return a service that runs a script, and is healthy when the other one succeeds; without it, it runs once."""
    body: dict[str, Any] = {"image": "skyward-stack:1", "command": ["sh", "-c", script]}
    body["environment"] = {"PLACE": "${STACK_DATA:-/data}"}
    body["depends_on"] = {name: {"condition": condition} for name, condition in (needs or {}).items()}
    if health:
        body["healthcheck"] = {"test": ["CMD", "sh", "-c", health], "interval": "5s", "timeout": "5s"}
    return body


@contextmanager
def running(tmp_path: Path, services: Mapping[str, Any], **variables: str) -> Generator[subprocess.Popen[str]]:
    (tmp_path / "compose.yml").write_text(yaml.safe_dump({"services": dict(services)}))
    (tmp_path / "empty.env").touch()
    own = {"COMPOSE_FILE": str(tmp_path / "compose.yml"), "STACK_DATA": str(tmp_path / "data"), **variables}
    with subprocess.Popen(
        [sys.executable, "-m", "tests.stack", tmp_path / "empty.env"],
        cwd=ROOT,
        env=os.environ | own,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def lines_until_ready(process: subprocess.Popen[str]) -> list[str]:
    assert process.stdout is not None
    lines: list[str] = []
    for line in process.stdout:
        lines.append(line.strip())
        if lines[-1] == READY:
            return lines
    pytest.fail("\n".join(lines))


def living(tmp_path: Path) -> list[int]:
    """Return the processes of services: their environment has the folder."""
    return [pid for pid, place in processes_by_tag("PLACE") if place == str(tmp_path / "data")]


def test_ctrl_c_ends_every_process_of_every_service(tmp_path: Path) -> None:
    """Services start in the order of their needs."""
    orphan = 'setsid sh -c "trap \\"\\" TERM INT HUP; sleep 1000" & sleep 0.2; touch $PLACE/first; exec sleep 1000'
    services = {
        "last": shell(
            "test -e $PLACE/middle && exec sleep 1000",
            health="true",
            needs={"middle": "service_completed_successfully"},
        ),
        "middle": shell("test -e $PLACE/first && touch $PLACE/middle", needs={"first": HEALTHY}),
        "first": shell(orphan, health="test -e $PLACE/first"),
    }
    with running(tmp_path, services) as process:
        names = [line.split()[-1] for line in lines_until_ready(process)[:3]]
        assert names == ["first", "middle", "last"]
        assert len(living(tmp_path)) >= 3
        process.send_signal(signal.SIGINT)
        output = process.communicate(timeout=60)[0]
    assert process.returncode == 0, output
    assert living(tmp_path) == []


def test_a_port_in_use_is_named_before_anything_starts(tmp_path: Path) -> None:
    """The error names the variable that moves the service to another port."""
    services = {"one": shell("touch $PLACE/started; exec sleep ${ONE_PORT:-1}", health="true")}
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        with running(tmp_path, services, ONE_PORT=port) as process:
            output = process.communicate(timeout=60)[0]
    assert process.returncode == 1
    assert f"error: port {port} is in use: set ONE_PORT to another one" in output
    assert not (tmp_path / "data/started").exists()


def test_services_end_when_the_program_is_killed(tmp_path: Path) -> None:
    """The kernel sends each service its signal to end, so that no port stays in use."""
    services = {"one": shell("exec sleep 1000", health="true")}
    with running(tmp_path, services) as process:
        lines_until_ready(process)
        assert living(tmp_path)
        process.kill()
        wait_until(lambda: not living(tmp_path), "the end of the services")
    assert process.returncode == -signal.SIGKILL


@pytest.fixture
def open_folder() -> Generator[Path]:
    """A folder through which all users may pass, unlike those of pytest."""
    folder = Path(tempfile.mkdtemp(prefix="skyward-stack-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def test_other_users_can_read_neither_data_nor_logs(open_folder: Path) -> None:
    """Airflow's log has its admin's password. Only the group of a service with a user of its own passes through the
    folder, to the data of that service.
    """
    script = "echo password; echo more >$PLACE/file; exec sleep 1000"
    services = {"one": shell(script, health="test -s $PLACE/file")}
    is_root = os.geteuid() == 0
    if is_root:
        services["two"] = shell("echo data >$PLACE/two/file; exec sleep 1000", health="test -s $PLACE/two/file")
        services["two"] |= {"x-native": {"user": "nobody"}, "volumes": ["two:${STACK_DATA:-/data}/two"]}
    (open_folder / "data" / "logs").mkdir(parents=True)  # of an earlier release
    before = os.umask(0)
    try:
        (open_folder / "data" / "logs" / "old.log").write_text("")
        with running(open_folder, services) as process:
            lines_until_ready(process)
            modes = {
                str(path.relative_to(open_folder)): path.stat().st_mode & 0o777
                for path in folders_and_files(open_folder)
            }
    finally:
        os.umask(before)
    assert modes.pop("data") == (0o710 if is_root else 0o700)
    assert modes.pop("data/logs/old.log") == 0o666
    assert {"data/logs", "data/home", "data/stack.pid", "data/logs/one.log", "data/file"} <= modes.keys()
    assert {name: mode for name, mode in modes.items() if mode & 0o077} == {}


def folders_and_files(tmp_path: Path) -> list[Path]:
    return [tmp_path / "data", *(tmp_path / "data").rglob("*")]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give folders to others")
@pytest.mark.parametrize("spoiled", ["owner", "mode", "above"])
def test_a_folder_that_another_user_could_exchange_is_refused(tmp_path: Path, spoiled: str) -> None:
    """Its name can be guessed. `make stack-down` would signal the process that the file in it names."""
    (tmp_path / "data").mkdir(mode=0o700)
    if spoiled == "mode":
        (tmp_path / "data").chmod(0o777)
    else:
        os.chown(tmp_path / "data" if spoiled == "owner" else tmp_path, 61_001, 61_001)
    with running(tmp_path, {"one": shell("exec sleep 1000", health="true")}) as process:
        output = process.communicate(timeout=60)[0]
    assert process.returncode == 1
    assert "set STACK_DATA to another folder" in output
    with pytest.raises(subprocess.CalledProcessError) as caught:
        down(tmp_path)
    assert "set STACK_DATA to another folder" in caught.value.stderr
    assert list((tmp_path / "data").iterdir()) == []


WORKER = """
import os, signal, subprocess, sys, time
def told(*_):
    print(sys.argv[1], flush=True)
    if sys.argv[1] == "run":  # a reaper outlives its run
        subprocess.Popen(["sh", "-c", "sleep 0.3; echo reaper"], start_new_session=True)
    os._exit(0)
signal.signal(signal.SIGTERM, told)
print("begun", flush=True)
if sys.argv[1] == "worker":
    subprocess.Popen([sys.executable, "-c", sys.argv[2], "run"])
while True:
    time.sleep(60)
"""


def test_the_flow_runs_of_a_worker_end_before_it_and_what_they_have_left_is_waited_for() -> None:
    command = [sys.executable, ROOT / "stack/end_runs_first.py", sys.executable, "-c", WORKER, "worker", WORKER]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        assert [program.stdout.readline() for _ in range(2)] == ["begun\n"] * 2
        program.send_signal(signal.SIGTERM)
        assert program.stdout.read().split() == ["run", "worker", "reaper"]
    assert program.returncode == 0


# ── from another shell ───────────────────────────────────────────────────────────────────────────────────────────────


def down(tmp_path: Path) -> str:
    """Run `make stack-down`, and return what it prints."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.stack", "down"],
        cwd=ROOT,
        env=os.environ | {"STACK_DATA": str(tmp_path / "data")},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout


def test_another_shell_ends_a_stack(tmp_path: Path) -> None:
    """A second stack of the same folder is refused. To end what does not run is no error."""
    services = {"one": shell("exec sleep 1000", health="true")}
    with running(tmp_path, services) as process:
        lines_until_ready(process)
        with running(tmp_path, services) as second:
            assert "runs already" in second.communicate(timeout=60)[0]
        assert second.returncode == 1
        assert "Nothing of the stack" in down(tmp_path)
        assert process.wait(timeout=60) == 0
    assert living(tmp_path) == []
    assert "were left" not in down(tmp_path)


def test_what_a_killed_stack_leaves_is_ended(tmp_path: Path) -> None:
    """An orphan of a service does not end with the program that ran the services; `stack-down` finds it."""
    orphan = "setsid sleep 1000 & exec sleep 1000"
    with running(tmp_path, {"one": shell(orphan, health="true")}) as process:
        lines_until_ready(process)
        process.kill()
        wait_until(lambda: len(living(tmp_path)) == 1, "the end of the service without its orphan")
        assert "1 processes were left by a stack that was killed" in down(tmp_path)
    assert living(tmp_path) == []


# ── Docker Compose ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_docker_compose_reads_the_file_as_this_program_does() -> None:
    """Debian's docker-compose accepts the file; commands, environments and health checks are those that run here."""
    if shutil.which("docker-compose") is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(
            "docker-compose is not installed (Debian: docker-compose)"
        )
    done = subprocess.run(
        ["docker-compose", "--file", FILE, "--env-file", DEVELOPMENT, "config"],
        env={"PATH": os.environ["PATH"], "HOME": os.environ["HOME"]},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    theirs = filled(yaml.safe_load(done.stdout), {})["services"]  # it writes $$ for $
    ours = filled(read(), read_env())["services"]
    assert theirs.keys() == ours.keys()
    for name, body in ours.items():
        assert theirs[name]["command"] == body["command"]
        assert theirs[name].get("environment", {}) == body.get("environment", {})
        assert theirs[name].get("depends_on", {}) == body.get("depends_on", {})
        assert theirs[name].get("healthcheck", {}).get("test") == body.get("healthcheck", {}).get("test")
