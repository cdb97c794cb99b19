"""A look at a live pool: logs, metrics, stacks, logins and Dask's pages, with a real pool of this machine."""

import shlex
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import skyward_core as sky
from skyward_core import cli
from skyward_core.errors import Unreachable
from skyward_core.ledger.ledger import Ledger
from skyward_core.live import metrics
from skyward_core.live.login import login_command
from skyward_core.live.metrics import PoolUses
from skyward_core.live.pool_nodes import PoolNodes
from skyward_core.machines.instances import Endpoint, Instance, InstanceState
from skyward_core.machines.owner import Owner


@pytest.fixture(autouse=True)
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The ledger of commands and of pools."""
    found = f"sqlite:///{tmp_path / 'ledger.db'}"
    monkeypatch.setenv("SKYWARD_LEDGER", found)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return found


@pytest.fixture
def skyward(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    def run(line: str, code: int = 0) -> str:
        assert cli.main(shlex.split(line)) == code
        output = capsys.readouterr()
        return output.err if code else output.out

    return run


def machine(rank: int = 0, **more: Any) -> Instance:
    fields = {"provider": "hosts", "state": InstanceState.RUNNING, "region": "", "instance_type": "", **more}
    return Instance(id=f"i-{rank}", pool_id="sky-1", rank=rank, **fields)


@pytest.fixture
def ledger(url: str) -> Iterator[Ledger]:
    with Ledger(url) as opened:
        opened.open_pool(
            "sky-1",
            owner=Owner.here(),
            provider={"name": "local"},
            spec_json="{}",
            lease_expires_at=datetime.now(UTC) + timedelta(seconds=60),
        )
        yield opened


def test_a_pool_that_cannot_be_looked_at_says_why(ledger: Ledger, skyward: Callable[..., str]) -> None:
    for command in ("logs", "metrics", "stacks", "ssh", "dashboard"):
        assert "the ledger has no pool 'nonesuch'" in skyward(f"{command} nonesuch", code=1)
        assert "local lists no node of pool sky-1" in skyward(f"{command} sky-1", code=1)
    ledger.end_pool("sky-1")
    for command in ("logs", "metrics", "stacks", "ssh", "dashboard"):
        complaint = skyward(f"{command} sky-1", code=1)
        assert "its nodes are gone with their logs. What is kept: `skyward receipt`" in complaint


def test_a_node_that_a_pool_has_not_is_refused() -> None:
    nodes = PoolNodes("sky-1", (machine(0), machine(3)))
    assert nodes.instance(3).id == "i-3"
    with pytest.raises(sky.BadRequest, match="has no node 1; its nodes are 0, 3"):
        nodes.instance(1)


def test_a_login_trusts_the_host_key_of_the_pool_only(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("")
    endpoint = Endpoint(
        host="10.0.0.7",
        port=2222,
        user="ada",
        key=str(key),
        host_key="ssh-ed25519 AAAA",
        proxy_command=("aws", "ssm", "start-session", "--target", "i-0"),
    )
    words = login_command(PoolNodes("sky-1", (machine(endpoint=endpoint),)), 0)
    assert words[:5] == ["ssh", "-i", str(key), "-o", "IdentitiesOnly=yes"]
    assert words[-1] == "ada@10.0.0.7"
    assert words[words.index("-p") + 1] == "2222"
    assert "ProxyCommand=aws ssm start-session --target i-0" in words
    assert "StrictHostKeyChecking=yes" in words
    (place,) = [word.partition("=")[2] for word in words if word.startswith("UserKnownHostsFile=")]
    assert Path(place).read_text() == "i-0 ssh-ed25519 AAAA\n"


def test_a_login_without_the_pools_key_is_refused(tmp_path: Path) -> None:
    endpoint = Endpoint(host="10.0.0.7", key=str(tmp_path / "nowhere"))
    with pytest.raises(sky.BadRequest, match="is not on this machine: run the command where the pool was opened"):
        login_command(PoolNodes("sky-1", (machine(endpoint=endpoint),)), 0)


def test_a_pool_out_of_reach_is_tried_again_later(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not at each picture: a login that hangs would stop them."""
    tried: list[str] = []

    def fail(_: Ledger, pool_id: str) -> PoolNodes:
        tried.append(pool_id)
        raise Unreachable("no route\nto it")

    monkeypatch.setattr(metrics, "find_nodes", fail)
    with PoolUses(ledger) as uses:
        assert [uses.of("sky-1"), uses.of("sky-1")] == ["no route", "no route"]
        assert tried == ["sky-1"]
        monkeypatch.setattr(metrics, "AGAIN_SECONDS", 0.0)
        uses.of("sky-1")
    assert tried == ["sky-1", "sky-1"]
