"""AWS(use_ssm=True): SSH through Session Manager.

A script replaces AWS's plugin and connects to the address in the fake's session.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import asyncssh
import pytest

import skyward_core as sky
from skyward_core.errors import BadRequest, ConnectionLost, CredentialsError, Unreachable
from skyward_core.machines.instances import Endpoint, InstanceState
from skyward_core.providers import aws_session_manager
from skyward_core.providers.base import LAUNCH_TAG, load
from skyward_core.providers.userdata import host_key, our_key
from skyward_core.transport.proxy_command import PYTHON, Proxy
from skyward_core.transport.ssh_connection import SSHConnection
from tests.conftest import processes_by_tag
from tests.providers.aws import OFFER, SECRET, T4, as_us
from tests.providers.contract import STARTUP, tags
from tests.providers.fake_aws import FakeAWS
from tests.providers.http_fake import FakeCloud, Reply, Request, route
from tests.system.transport.test_ssh_connection import Echo, Server, echo, key, own_home, say, server  # noqa: F401 - fixtures
from tests.testbed.fixtures import fleet, mirror  # noqa: F401 - fixtures
from tests.waiting import WAIT_SECONDS, wait_until

PLUGIN = """\
#!{python}
import json, os, socket, sys, threading

if sys.argv[1:] == ["--version"]:
    print("{version}")
    sys.exit()
answer = json.loads(os.environ.pop(sys.argv[1]))
with open(f"{{os.environ['PLUGIN_NOTES']}}/{{os.getpid()}}", "w") as notes:
    json.dump({{"argv": sys.argv[1:], "answer": answer}}, notes)
print(f"\\nStarting session with SessionId: {{answer['SessionId']}}", flush=True)
host, port = answer["StreamUrl"].removeprefix("wss://").split(":")
peer = socket.create_connection((host, int(port)))

def back():
    while piece := peer.recv(65536):
        os.write(1, piece)
    os._exit(0)

threading.Thread(target=back, daemon=True).start()
while piece := os.read(0, 65536):
    peer.sendall(piece)
"""


class Plugin:
    """AWS's plugin, as a script on PATH. `notes` has the arguments of its processes, by their ids."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._notes = folder / "notes"
        self._notes.mkdir(parents=True)
        self.install()

    @property
    def path(self) -> str:
        """Return the value for PATH."""
        return f"{self._folder}{os.pathsep}{os.environ['PATH']}"

    def install(self, version: str = "1.2.707.0") -> None:
        """Install the script."""
        part = self._folder / "part"
        part.write_text(PLUGIN.format(python=sys.executable, version=version))
        part.chmod(0o755)
        part.rename(self._folder / aws_session_manager.PLUGIN)

    def remove(self) -> None:
        (self._folder / aws_session_manager.PLUGIN).unlink()

    @property
    def notes(self) -> dict[int, dict[str, Any]]:
        return {
            int(path.name): json.loads(text)
            for path in self._notes.iterdir()
            if (text := path.read_text()).endswith("}")
        }

    @property
    def living(self) -> set[int]:
        """Return the processes that are the proxy command or the plugin of a machine."""
        return {
            pid
            for pid in processes()
            if b"i-" in (parameters := arguments(pid))
            and (b"aws_session_manager" in parameters or str(self._folder).encode() in parameters)
        }


def processes() -> list[int]:
    """Return the processes that this test session has started: its folder is in their environment."""
    return [pid for pid, home in processes_by_tag("XDG_STATE_HOME") if home == os.environ["XDG_STATE_HOME"]]


def arguments(pid: int) -> bytes:
    """Return the command line of a process; an empty one if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plugin:
    plugin = Plugin(tmp_path / "plugin")
    monkeypatch.setenv("PATH", plugin.path)
    monkeypatch.setenv("PLUGIN_NOTES", str(tmp_path / "plugin" / "notes"))
    return plugin


SESSION_TOKEN = "AAEAAfJ3SESSIONTOKENEXAMPLE"


class FakeSsm(FakeCloud):
    """Sessions of Session Manager. `agents` has the URL of each machine's port 22, once its agent has registered."""

    def __init__(self) -> None:
        super().__init__()
        self.agents: dict[str, str] = {}

    @route("POST", "/")
    def answer(self, request: Request) -> Reply:
        if request.headers["x-amz-target"] != "AmazonSSM.StartSession":
            return Reply(200, {"SessionId": request.body["SessionId"]})
        assert request.body["DocumentName"] == "AWS-StartSSHSession"
        target = request.body["Target"]
        if (url := self.agents.get(target)) is None:
            return refusal("TargetNotConnected", message=f"{target} is not connected.")
        return Reply(200, {"SessionId": f"ann-{target}", "TokenValue": SESSION_TOKEN, "StreamUrl": url})

    def sessions(self) -> list[dict[str, Any]]:
        """Return the requests for a session."""
        return [one.body for one in self.asked("POST") if one.headers["x-amz-target"].endswith("StartSession")]


def refusal(code: str, status: int = 400, message: str = "") -> Reply:
    return Reply(status, {"__type": code, "message": message})


@pytest.fixture
def cloud(monkeypatch: pytest.MonkeyPatch, plugin: Plugin) -> Iterator[FakeSsm]:
    with FakeSsm() as fake:
        as_us(fake.url, monkeypatch)
        yield fake


@pytest.fixture
def endpoint(server: Server, key: str, cloud: FakeSsm) -> Endpoint:
    """Return the server as a machine with a registered agent."""
    cloud.agents["i-0a"] = f"wss://127.0.0.1:{server.port}"
    return reached_by(server, key, aws_session_manager.command("i-0a", "us-east-1", None, None))


def reached_by(server: Server, key: str, command: tuple[str, ...]) -> Endpoint:
    public = server.host_key.export_public_key().decode()
    return Endpoint(
        host="i-0a",
        port=22,
        user="ann",
        key=key,
        host_key=public,
        known_hosts="/dev/null",
        config="/dev/null",
        proxy_command=command,
    )


def test_a_login_uses_the_id_of_the_machine(cloud: FakeSsm) -> None:
    """Its host key is known before. The command has no secrets, and is the same from any process."""
    requested, provider = tags(), sky.AWS(use_ssm=True)
    with FakeAWS():
        (machine,) = provider.launch(OFFER, 1, requested, STARTUP)
        assert load(provider.to_json()).instances(machine.pool_id) == [machine]
    ours = our_key()
    assert machine.state is InstanceState.RUNNING
    assert machine.endpoint == Endpoint(
        host=machine.id,
        port=22,
        user="root",
        key=str(ours.path),
        host_key=host_key(requested[LAUNCH_TAG], ours).public,
        known_hosts="/dev/null",
        config="/dev/null",
        proxy_command=("{python}", "-m", "skyward_core.providers.aws_session_manager", machine.id, "us-east-1"),
    )
    assert SECRET not in machine.model_dump_json()
    assert Endpoint.model_validate_json(machine.endpoint.model_dump_json()) == machine.endpoint


@pytest.mark.parametrize(
    ("version", "reason"),
    [(None, "needs AWS's session-manager-plugin on PATH"), ("1.2.497.0", "after 1.2.497.0"), ("what?", "after")],
)
def test_without_a_plugin_that_keeps_tokens_secret_nothing_is_launched(
    cloud: FakeSsm, plugin: Plugin, version: str | None, reason: str
) -> None:
    """The error names its download page."""
    provider = sky.AWS(use_ssm=True)
    with FakeAWS() as aws:
        assert provider.offers(T4)
        aws.requests.clear()
        plugin.remove() if version is None else plugin.install(version)
        with pytest.raises(BadRequest, match=reason) as refused:
            provider.launch(OFFER, 1, tags(), STARTUP)
        assert "docs.aws.amazon.com" in str(refused.value)
        assert aws.requests == []


def test_an_agent_that_registers_late_is_waited_for(
    endpoint: Endpoint, cloud: FakeSsm, plugin: Plugin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One process waits through refusals, throttling and an outage."""
    for reply in (refusal("TargetNotConnected"), refusal("ThrottlingException"), refusal("InternalServerError", 500)):
        cloud.fail("POST", "/", reply)
    with SSHConnection(endpoint).connect(60) as connection:
        assert connection.run("true").exit_code == 0
    assert len(cloud.sessions()) == 4
    assert len(plugin.notes) == 1


def test_a_process_without_the_plugin_cannot_attach(endpoint: Endpoint, cloud: FakeSsm, plugin: Plugin) -> None:
    """No session is requested."""
    plugin.remove()
    with SSHConnection(endpoint) as connection, pytest.raises(BadRequest, match="on PATH"):
        connection.connect(60)
    assert cloud.sessions() == []


RELAY = """\
import os, socket, sys, threading
peer = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
def back():
    while piece := peer.recv(65536):
        os.write(1, piece)
        if len(sys.argv) > 2:
            print("chatter", file=sys.stderr, flush=True)
    os._exit(0)
threading.Thread(target=back, daemon=True).start()
while piece := os.read(0, 65536):
    peer.sendall(piece)
if len(sys.argv) > 2:
    import time
    time.sleep(600)
"""


def shell(text: str) -> tuple[str, ...]:
    return ("sh", "-c", text)


def test_other_output_of_a_proxy_does_no_harm(server: Server, key: str, own_home: None) -> None:
    """A proxy that does not end by itself is killed."""
    endpoint = reached_by(server, key, (PYTHON, "-c", RELAY, str(server.port), "stays"))
    before = set(processes())
    with SSHConnection(endpoint).connect(30) as connection:
        assert connection.run("head -c 1000000 /dev/zero | wc -c").output.strip() == "1000000"
        ours = {pid for pid in set(processes()) - before if b"stays" in arguments(pid)}
        assert len(ours) == 1
        started = time.monotonic()
    assert time.monotonic() - started < WAIT_SECONDS, "it sleeps for 600 s"
    assert not [pid for pid in ours if arguments(pid)]


def test_a_proxy_that_fails_is_tried_again(server: Server, key: str, tmp_path: Path) -> None:
    """Its last line of output is reported."""
    counted = f"echo x >>{tmp_path}/tries; echo no way >&2; echo through >&2; exit 1"
    with (
        SSHConnection(reached_by(server, key, shell(counted))) as connection,
        pytest.raises(Unreachable, match=r"last try ended with: through$"),
    ):
        connection.connect(1)
    assert (tmp_path / "tries").read_text().count("x") > 1


def test_a_machine_with_a_wrong_host_key_is_refused(server: Server, key: str) -> None:
    """A proxy does not change the check of host keys, or of our key."""
    command = (PYTHON, "-c", RELAY, str(server.port))
    other = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJ3R1nVJ0uC1Vd9b4v2m8QkN2d1b7vYw3X0pJxv4m5sP"
    with (
        SSHConnection(reached_by(server, key, command).model_copy(update={"host_key": other})) as connection,
        pytest.raises(sky.HostKeyChanged),
    ):
        connection.connect(60)
    stranger = server.folder / "stranger"
    asyncssh.generate_private_key("ssh-ed25519").write_private_key(stranger)
    with (
        SSHConnection(reached_by(server, str(stranger), command)) as connection,
        pytest.raises(CredentialsError, match="refuses our keys"),
    ):
        connection.connect(60)


def test_closing_during_a_login_leaves_no_process(server: Server, key: str, tmp_path: Path) -> None:
    """The proxy prints nothing, and ignores signals."""
    note = tmp_path / "pid"
    endpoint = reached_by(
        server,
        key,
        shell(f"trap '' TERM HUP PIPE; echo $$ >{note}.part; mv {note}.part {note}; sleep 600 & wait; sleep 600"),
    )
    connection = SSHConnection(endpoint)
    failures: list[BaseException] = []

    def connect() -> None:
        try:
            connection.connect(60)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=connect)
    thread.start()
    wait_until(note.exists, "the proxy to run")
    pid = int(note.read_text())
    connection.close()
    thread.join()
    assert [type(error) for error in failures] == [ConnectionLost]
    assert not arguments(pid)
    # a zombie process has no command line
    assert not [one for one in processes() if group(one) == pid and arguments(one)]


def test_closing_while_a_proxy_starts_leaves_no_process(tmp_path: Path) -> None:
    """It is a process, and asyncio has not connected its pipes yet. Its children hold them."""
    before = {*processes()}
    command = shell("trap '' TERM HUP PIPE; sleep 611 & sleep 611")

    async def start_and_cancel() -> None:
        starting = asyncio.ensure_future(Proxy.start(command))
        for _ in range(100):  # turns of the loop
            await asyncio.sleep(0)
            if {*processes()} - before:
                break
        starting.cancel()
        async with asyncio.timeout(60):
            await asyncio.wait([starting])
        assert starting.cancelled()

    asyncio.run(start_and_cancel())
    wait_until(lambda: not [one for one in processes() if b"611" in arguments(one)], "the end of its children")


def group(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None


def test_a_proxy_ends_when_its_client_is_killed(endpoint: Endpoint, plugin: Plugin, tmp_path: Path) -> None:
    """It ends at the end of its input."""
    text = "from skyward_core.transport.ssh_connection import SSHConnection; from skyward_core.machines.instances import Endpoint; import sys, time\n"
    text += "connection = SSHConnection(Endpoint.model_validate_json(sys.argv[1])).connect(60); print('there', flush=True); time.sleep(600)"
    reading, writing = os.pipe()
    pid = os.posix_spawn(
        sys.executable,
        [sys.executable, "-c", text, endpoint.model_dump_json()],
        os.environ,
        file_actions=[(os.POSIX_SPAWN_DUP2, writing, 1)],
    )
    os.close(writing)
    with open(reading) as output:
        assert output.readline() == "there\n"
        os.kill(pid, 9)
        os.waitpid(pid, 0)
    wait_until(lambda: plugin.living == set(), "the plugin to end")
