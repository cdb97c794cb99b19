"""AWS(use_ssm=True): SSH through Session Manager.

A script replaces AWS's plugin and connects to the address in the fake's session.
"""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest

import skyward_core as sky
from skyward_core.errors import ConnectionLost, Unreachable
from skyward_core.machines.instances import Endpoint
from skyward_core.transport.ssh_connection import SSHConnection
from tests.conftest import RecordedEvents
from tests.providers.aws import SECRET, as_us
from tests.providers.fake_aws import HostedAWS
from tests.providers.hosted import Hosting
from tests.providers.http_fake import Reply, Request, route
from tests.system.providers.test_aws_ssm import (  # noqa: F401 - fixtures
    SESSION_TOKEN,
    FakeSsm,
    Plugin,
    arguments,
    cloud,
    endpoint,
    group,
    plugin,
    processes,
)
from tests.system.providers.test_end_to_end import square, where
from tests.system.transport.test_ssh_connection import Echo, Server, echo, key, own_home, say, server  # noqa: F401 - fixtures
from tests.testbed import Fleet
from tests.testbed.fixtures import fleet, mirror  # noqa: F401 - fixtures
from tests.testbed.mirror import Mirror


def test_commands_files_and_ports_go_through_the_plugin(
    endpoint: Endpoint, cloud: FakeSsm, plugin: Plugin, echo: Echo, tmp_path: Path
) -> None:
    """The plugin gets the same arguments as from AWS's CLI. No process has a secret in its arguments, and none is left."""
    with SSHConnection(endpoint).connect(30) as connection:
        assert connection.run("echo hello").output == "hello\n"
        connection.put(os.urandom(1 << 20), "big")
        assert len(connection.fetch(str(tmp_path / "big"))) == 1 << 20
        assert say(connection.forward_local("127.0.0.1", echo.port), b"hello") == b"HELLO"
        ((pid, called),) = plugin.notes.items()
        assert plugin.living == {pid}
        request = {"Target": "i-0a", "DocumentName": "AWS-StartSSHSession", "Parameters": {"portNumber": ["22"]}}
        assert called["argv"] == [
            "AWS_SSM_START_SESSION_RESPONSE",
            "us-east-1",
            "StartSession",
            "",
            json.dumps(request),
            cloud.url,
        ]
        assert called["answer"]["TokenValue"] == SESSION_TOKEN
        assert not [
            parameters
            for parameters in map(arguments, processes())
            if SESSION_TOKEN.encode() in parameters or SECRET.encode() in parameters
        ]
    assert plugin.living == set()
    assert cloud.sessions() == [request]


def test_an_agent_that_never_registers_is_an_error(endpoint: Endpoint, cloud: FakeSsm, plugin: Plugin) -> None:
    """The error at the end has the reason. No process is left waiting."""
    cloud.agents.clear()
    with (
        SSHConnection(endpoint) as connection,
        pytest.raises(Unreachable, match=r"TargetNotConnected.*AmazonSSMManagedInstanceCore.*internet"),
    ):
        connection.connect(4)
    assert cloud.sessions()
    assert plugin.living == set()


def test_a_broken_session_is_replaced(endpoint: Endpoint, plugin: Plugin) -> None:
    """Another process carries the new one."""
    lost = threading.Event()
    with SSHConnection(endpoint, on_lost=lambda _: lost.set()).connect(30) as connection:
        (first,) = plugin.living
        os.kill(first, 9)
        assert lost.wait(10)
        with pytest.raises(ConnectionLost):
            connection.run("true")
        connection.reconnect(30)
        assert connection.run("true").exit_code == 0
        assert len(plugin.living) == 1
        assert plugin.living != {first}
    assert plugin.living == set()


class LateSsm(FakeSsm):
    """Agents of hosts that register some time after the start: at the second request for a session."""

    def __init__(self, hosting: Hosting) -> None:
        super().__init__()
        self._hosting = hosting

    @route("POST", "/")
    def answer(self, request: Request) -> Reply:
        target = request.body.get("Target", "")
        ip = self._hosting.ip(target)
        if len([one for one in self.sessions() if one["Target"] == target]) > 1 and ip is not None:
            self.agents[target] = f"wss://{ip}:22"
        return super().answer(request)


@pytest.mark.timeout(180)
def test_a_pool_runs_through_session_manager(
    fleet: Fleet, mirror: Mirror, plugin: Plugin, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Bare machines are prepared and used only through sessions. No machine, session or open port is left."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("SKYWARD_LEDGER", f"sqlite:///{tmp_path / 'ledger.db'}")
    hosting, recorded = Hosting(fleet, mirror.configure), RecordedEvents()
    try:
        with HostedAWS(hosting) as cloud, LateSsm(hosting) as ssm:
            as_us(ssm.url, monkeypatch)
            with sky.ComputePool(
                provider=sky.AWS(use_ssm=True),
                nodes=2,
                cpu=4,
                image=sky.Image(),
                on_event=recorded,
                display="quiet",
                lease_seconds=60,
            ) as pool:
                assert sorted(where() @ pool) == sorted(host.name for host in hosting.hosts.values())
                assert [future.result(60) for future in pool.submit_all([square(number) for number in range(8)])] == [
                    number**2 for number in range(8)
                ]
                assert {note["argv"][4].partition("i-")[2][:17] for note in plugin.notes.values()} == {
                    machine[2:] for machine in hosting.hosts
                }
                assert len(plugin.living) == 2
                assert all(node.instance.endpoint.host == node.instance.id for node in pool.lease.nodes)
                written = pool.lease.model_dump_json()
                assert "IpRanges" not in str(cloud.rules)
            assert cloud.alive() == set()
            assert plugin.living == set()
    finally:
        hosting.close()
    assert SECRET not in written + repr(recorded.events)
    assert SESSION_TOKEN not in written + repr(recorded.events)
