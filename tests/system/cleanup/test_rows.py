"""A row of the ledger, which many may write, sends no credentials to an address of its writer and runs no command."""

import json
import pickle
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import skyward_core as sky
from skyward_core import cli
from skyward_core.cleanup.reaper import ReaperInput
from skyward_core.cleanup.release import release
from skyward_core.cleanup.sweep import sweep
from skyward_core.ledger.ledger import Ledger
from skyward_core.live.observer import PoolUses
from skyward_core.live.pool_nodes import find_nodes
from skyward_core.providers import host_connections
from tests.cleanup.pools import DEAD, FolderProvider
from tests.cleanup.reaping_provider import Pool
from tests.providers.http_fake import FakeCloud
from tests.system.cleanup.test_reaper import Ended

POOL = "sky-a"
TOKEN = "a-token-of-the-team"
CREDENTIALS = {
    "aws": ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"),
    "digitalocean": ("DIGITALOCEAN_TOKEN",),
    "runpod": ("RUNPOD_API_KEY",),
    "vastai": ("VAST_API_KEY",),
    "verda": ("VERDA_CLIENT_ID", "VERDA_CLIENT_SECRET"),
}
COMMANDS = (f"logs {POOL}", f"ssh {POOL} --print", f"metrics {POOL}", f"stacks {POOL}", f"stop {POOL}", "sweep")


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the URL of the ledger; this process has credentials of all clouds, and its settings name no provider."""
    found = f"sqlite:///{tmp_path}/ledger.db"
    monkeypatch.setenv("SKYWARD_LEDGER", found)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("SKYWARD_PROVIDER", '{"name": "folder", "folder": "/nonexistent"}')
    for names in CREDENTIALS.values():
        for name in names:
            monkeypatch.setenv(name, TOKEN)
    monkeypatch.chdir(tmp_path)
    return found


@pytest.fixture
def ledger(url: str) -> Iterator[Ledger]:
    with Ledger(url) as opened:
        yield opened


@pytest.fixture
def listener() -> Iterator[FakeCloud]:
    """A server of whoever has altered the row."""
    with FakeCloud() as server:
        yield server


def open_dead(ledger: Ledger, provider: dict[str, Any], pool_id: str = POOL) -> None:
    ledger.open_pool(pool_id, owner=DEAD, provider=provider, spec_json="{}", lease_expires_at=datetime.now(UTC))


def alter(url: str, provider: dict[str, Any], pool_id: str = POOL) -> None:
    """Write a row as everybody can who may write to the ledger; a signature that it has stays, and is no more valid."""
    with closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as database:
        (text,) = database.execute("SELECT provider_json FROM skyward_pools WHERE id = ?", (pool_id,)).fetchone()
        kept = {name: value for name, value in json.loads(text).items() if name == "skyward-signature"}
        changed = json.dumps({**provider, **kept})
        database.execute("UPDATE skyward_pools SET provider_json = ? WHERE id = ?", (changed, pool_id))
        database.commit()


def refuse_everywhere(ledger: Ledger, capsys: pytest.CaptureFixture[str], kind: type[Exception]) -> str:
    """Let each reader of a row meet it; return what they have said."""
    report = sweep(ledger, is_dry_run=True)
    (failure,) = report.failures
    assert (failure.pool_id, type(failure.error), report.to_do) == (POOL, kind, ())
    said = [str(failure)]
    for reader in (
        lambda: find_nodes(ledger, POOL),
        lambda: release(POOL, ledger=ledger),
        lambda: sky.release(POOL),
    ):
        with pytest.raises(kind) as caught:
            reader()
        said.append(str(caught.value))
    shown = PoolUses(ledger).of(POOL)
    assert isinstance(shown, str)
    said.append(shown)
    for line in COMMANDS:
        capsys.readouterr()
        assert cli.main(line.split()) == cli.FAILED
        said.append(capsys.readouterr().err)
    assert cli.main(["top", "--once"]) == 0  # one pool keeps the table from no other
    report = sweep(ledger, is_dry_run=False)
    assert (len(report.failures), report.ended, report.closed) == (1, (), ())
    assert [(entry.condemned_at, entry.ended_at) for entry in ledger.pools()] == [(None, None)]
    return "\n".join(said)


@pytest.mark.parametrize("was_signed", [False, True], ids=["", "it was signed for another address"])
@pytest.mark.parametrize("cloud", CREDENTIALS)
def test_an_altered_row_sends_no_credentials_to_its_address(
    cloud: str, was_signed: bool, url: str, ledger: Ledger, listener: FakeCloud, capsys: pytest.CaptureFixture[str]
) -> None:
    """Sweep, release, stop, logs, metrics, top, ssh and the page: each refuses it, and names the field and the cure."""
    open_dead(ledger, {"name": cloud, **({"endpoint_url": "https://proxy.example"} if was_signed else {})})
    alter(url, {"name": cloud, "endpoint_url": f"{listener.url}/\x1b[2J"})
    said = refuse_everywhere(ledger, capsys, sky.LeaseTampered if was_signed else sky.CredentialsError)
    assert listener.requests == []
    assert "endpoint_url=" in said
    assert "SKYWARD_SECRET_KEY" in said
    assert "\x1b" not in said
    assert TOKEN not in said


def test_the_owners_row_is_used_by_all_his_processes(url: str, ledger: Ledger, listener: FakeCloud) -> None:
    """No setting is needed: the row is signed with the key file of its user. On another pool the signature is refused."""
    signed = {"name": "digitalocean", "endpoint_url": listener.url}
    open_dead(ledger, signed)
    with pytest.raises(sky.SkywardError):  # it is no cloud
        find_nodes(ledger, POOL)
    assert len(sweep(ledger).failures) == 1
    count = len(listener.requests)
    assert count > 1
    open_dead(ledger, {"name": "digitalocean"}, "sky-b")
    with closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as database:
        copy = "(SELECT provider_json FROM skyward_pools WHERE id = 'sky-a')"
        database.execute(f"UPDATE skyward_pools SET provider_json = {copy} WHERE id = 'sky-b'")
        database.commit()
    with pytest.raises(sky.LeaseTampered, match="'sky-b'"):
        find_nodes(ledger, "sky-b")
    assert len(listener.requests) == count


@pytest.mark.parametrize("command", ["ProxyCommand", "Match"])
def test_an_altered_row_runs_no_command(
    command: str,
    url: str,
    ledger: Ledger,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither that of an SSH configuration, nor one of its conditions. The signed row of the same user is used."""
    monkeypatch.setattr(host_connections, "CONNECT_SECONDS", 2.0)  # no host answers
    proof, config = tmp_path / "proof", tmp_path / "config"
    runs = f"ProxyCommand touch {proof}" if command == "ProxyCommand" else f'Match exec "touch {proof}"'
    config.write_text(f"{runs}\n")
    row = {"name": "hosts", "addresses": ["127.0.0.1:9"], "config": str(config)}
    open_dead(ledger, {"name": "local"})
    alter(url, row)
    said = refuse_everywhere(ledger, capsys, sky.CredentialsError)
    assert "addresses=" in said
    assert not proof.exists()
    open_dead(ledger, row, "sky-signed")
    with pytest.raises(sky.SkywardError):
        find_nodes(ledger, "sky-signed")
    assert proof.exists()


def test_a_refused_pool_does_not_keep_the_others_from_their_end(url: str, ledger: Ledger, tmp_path: Path) -> None:
    """Machines of a refused pool that another listing shows are left, because the ledger knows their pool."""
    folder = tmp_path / "machines"
    folder.mkdir()
    mine = FolderProvider(folder=str(folder))
    for pool_id in (POOL, "sky-b"):
        open_dead(ledger, mine.to_json(), pool_id)
        mine.launch(None, 1, {"skyward-pool": pool_id, "skyward-rank": "0"})
    alter(url, {"name": "hosts", "addresses": ["192.0.2.1"]})
    report = sweep(ledger, [mine], is_dry_run=False)
    assert [finding.pool_id for finding in report.ended] == ["sky-b"]
    assert [(left.pool_id, left.action.value) for left in report.findings if left.pool_id == POOL] == [(POOL, "leave")]
    assert [failure.pool_id for failure in report.failures] == [POOL]
    (entry,) = ledger.pools()
    assert (entry.id, entry.condemned_at) == (POOL, None)
    assert [machine.pool_id for machine in mine.instances()] == [POOL]


@pytest.mark.parametrize("is_rebuilt", [True, False], ids=["", "its own providers cannot be rebuilt"])
def test_a_reaper_uses_what_its_owner_gave_it(
    is_rebuilt: bool, url: str, ledger: Ledger, listener: FakeCloud, tmp_path: Path
) -> None:
    """An altered row takes nothing away from it. Without its owner's providers it refuses the row, and says so."""
    pool = Pool(tmp_path)
    pool.open()
    alter(url, {"name": "digitalocean", "endpoint_url": listener.url}, pool.pool_id)
    given: ReaperInput = pool.reaper_input()
    ended = Ended.by("pass", given if is_rebuilt else replace(given, providers=pickle.dumps(None)[:-1]))
    assert listener.requests == []
    if is_rebuilt:
        assert (ended.status, len(ended.calls)) == (0, 1)
        assert " FolderProvider " in ended.calls[0]
    else:
        assert (ended.status, ended.calls) == (1, [])
        assert any("endpoint_url=" in line for line in ended.log)


@pytest.mark.parametrize("name", ["SKYWARD_SECRET_KEY", "SKYWARD_LEASE_KEY"])
def test_computers_with_one_key_use_each_others_rows(
    name: str, url: str, ledger: Ledger, listener: FakeCloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has its own state folder. Without the key the row is refused, until the reader's settings name the provider."""
    provider = {"name": "digitalocean", "endpoint_url": listener.url}
    other = sky.DigitalOcean(endpoint_url=listener.url)
    monkeypatch.setenv(name, "bmV3" * 10 + "bmU=")
    open_dead(ledger, provider)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another computer"))

    def asked(reader: Callable[[], object]) -> bool:
        before = len(listener.requests)
        with pytest.raises(sky.SkywardError):
            reader()
        return len(listener.requests) > before

    assert asked(lambda: find_nodes(ledger, POOL))
    monkeypatch.delenv(name)
    assert not asked(lambda: find_nodes(ledger, POOL))
    (failure,) = sweep(ledger, [other]).failures
    assert failure.pool_id == ""  # that the cloud does not answer
    monkeypatch.setenv("SKYWARD_PROVIDER", json.dumps(provider))
    assert asked(lambda: find_nodes(ledger, POOL))
    monkeypatch.delenv("SKYWARD_PROVIDER")
    (tmp_path / "skyward.toml").write_text(f'provider = {{name = "digitalocean", endpoint_url = "{listener.url}"}}')
    assert asked(lambda: find_nodes(ledger, POOL))


def test_a_pool_that_has_another_provider_of_its_kind_is_not_taken_for_ended(
    url: str, ledger: Ledger, tmp_path: Path
) -> None:
    """A process that ends what a dead pool of a name has left, with settings of its own, does not list other hosts."""
    here, there = (tmp_path / name for name in ("here", "there"))
    for folder in (here, there):
        folder.mkdir()
    theirs, mine = (FolderProvider(folder=str(folder)) for folder in (there, here))
    open_dead(ledger, theirs.to_json())
    theirs.launch(None, 1, {"skyward-pool": POOL, "skyward-rank": "0"})
    with pytest.raises(sky.SkywardError, match="folder"):
        release(POOL, ledger=ledger, given=[mine])
    assert len(theirs.instances()) == 1
    (entry,) = ledger.pools()
    assert entry.ended_at is None
    release(POOL, ledger=ledger, given=[mine, theirs])
    assert theirs.instances() == []


def test_a_scheduled_sweep_with_credentials_alone_lists_pools_of_clouds(
    url: str, ledger: Ledger, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It has no key of those who opened the pools. What they log in with, or have rented, is not needed to end it."""
    rows: list[dict[str, Any]] = [
        {"name": "digitalocean", "region": "nyc2", "ssh_key": "/home/ada/key", "image": "her-image"},
        {"name": "runpod", "disk_gb": 80, "registry": "r-1"},
    ]
    for number, row in enumerate(rows):
        open_dead(ledger, row, f"sky-{number}")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "scheduler"))
    listed: list[sky.Provider] = []

    def instances(self: sky.Provider, pool_id: str | None = None) -> list[sky.Instance]:
        listed.append(self)
        return []

    for kind in (sky.DigitalOcean, sky.RunPod):
        monkeypatch.setattr(kind, "instances", instances)
        monkeypatch.setattr(kind, "account", lambda _: "team")
    assert sweep(ledger, is_dry_run=True).failures == ()
    assert {provider.name: provider for provider in listed} == {
        "digitalocean": sky.DigitalOcean(region="nyc2"),
        "runpod": sky.RunPod(disk_gb=80),
    }


def test_a_lease_that_runs_out_soon_needs_no_provider(url: str, ledger: Ledger) -> None:
    """`ps` and `receipt` show an altered row, and settle the other pools of this computer."""
    open_dead(ledger, {"name": "local"})
    end = datetime.now(UTC) + timedelta(seconds=60)
    ledger.open_pool("sky-b", owner=DEAD, provider={"name": "local"}, spec_json="{}", lease_expires_at=end)
    alter(url, {"name": "local", "folder": "/etc"})
    assert cli.main(["ps"]) == 0
    assert {entry.id for entry in ledger.pools()} == {POOL}
