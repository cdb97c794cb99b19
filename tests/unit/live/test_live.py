"""A look at a live pool: logs, metrics, stacks, logins and Dask's pages, with a real pool of this machine."""

import os
import shlex
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import skyward_core as sky
from skyward_core import cli
from skyward_core.cli import calls as view
from skyward_core.errors import NodeLost, Unreachable
from skyward_core.ledger.ledger import Ledger
from skyward_core.live import observer as metrics
from skyward_core.live.node_files import _beside, read_place
from skyward_core.live.observer import PoolUses, SampleFeed, call_list, calls_of
from skyward_core.live.pool_nodes import PoolNodes, command_on, login_command
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
    for command in ("logs", "metrics", "stacks", "ssh", "dashboard", "calls"):
        assert "the ledger has no pool 'nonesuch'" in skyward(f"{command} nonesuch", code=1)
        assert "the ledger has no pool 'nonesuch'" in skyward("cp nonesuch:0:/a .", code=1)
        assert "local lists no node of pool sky-1" in skyward(f"{command} sky-1", code=1)
    ledger.end_pool("sky-1")
    for command in ("logs", "metrics", "stacks", "ssh", "dashboard", "calls"):
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


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("nightly:1:/data/a.csv", ("nightly", 1, "/data/a.csv")),
        ("nightly:/data/a:b", ("nightly", 0, "/data/a:b")),
        ("nightly:out.csv", ("nightly", 0, "out.csv")),
        ("nightly:2:", ("nightly", 2, "")),
        ("team/etl:gpu:3:out", ("team/etl:gpu", 3, "out")),
        ("./nightly:1:/data", None),
        ("/data/a:b", None),
        ("../a:b", None),
        ("data.csv", None),
    ],
)
def test_a_place_on_a_node_is_written_as_for_scp(text: str, place: tuple[str, int, str] | None) -> None:
    assert read_place(text) == place


@pytest.mark.parametrize("words", ["a.csv b.csv", "nightly:0:/a other:0:/b"])
def test_a_copy_has_one_end_on_a_node(words: str, skyward: Callable[..., str]) -> None:
    assert "one of both must be on a node, and the other one here" in skyward(f"cp {words}", code=1)


def test_a_script_on_a_node_has_the_login_s_key_and_proxy(tmp_path: Path) -> None:
    """It is one word of OpenSSH's command line, and a node without an address is refused."""
    key = tmp_path / "key"
    key.write_text("")
    endpoint = Endpoint(host="10.0.0.7", user="ada", key=str(key), proxy_command=("aws", "ssm"))
    nodes = PoolNodes("sky-1", (machine(endpoint=endpoint, directory="/home/ada/node"), machine(1, endpoint=endpoint)))
    words = command_on(nodes, 0, "cat $2", ["it's"])
    assert words[-2:] == ["ada@10.0.0.7", shlex.join(["sh", "-c", "cat $2", "skyward", "/home/ada/node", "it's"])]
    login = login_command(nodes, 0)
    assert words[: len(login) - 1] == login[:-1]
    with pytest.raises(sky.NodeLost, match="node 1 of pool sky-1 does not run: it has no address yet"):
        command_on(nodes, 1, "", [])


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


@pytest.mark.parametrize(
    ("error", "why"),
    [(NodeLost("the scheduler does not answer"), "the scheduler does not answer"), (KeyError("a"), "KeyError: 'a'")],
    ids=["scheduler is gone", "unknown error"],
)
def test_a_pool_that_ends_while_it_is_looked_at_is_out_of_reach(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch, error: Exception, why: str
) -> None:
    """The thread of `skyward ui` goes on with the other pools."""

    def ask_for(*_: Any, **__: Any) -> None:
        raise error

    client = SimpleNamespace(subscribe_topic=lambda *_: None)
    observer = SimpleNamespace(client=lambda: client, instances=(), ask_for=ask_for, __exit__=lambda *_: None)
    with PoolUses(ledger) as uses:
        monkeypatch.setattr(uses, "_feed", lambda _: SampleFeed(observer))  # type: ignore[arg-type]
        assert uses.of("sky-1") == why


# ── calls ────────────────────────────────────────────────────────────────────────────────────────────────────────────

ADA = {"topic": "skyward-a", "user": "ada@laptop", "pid": 4711, "work": {"run": "7"}, "work_text": "cron:7"}
BOB = {"topic": "skyward-b", "user": "bob@server", "pid": 4712, "work": {}, "work_text": ""}


def answer(**more: Any) -> dict[str, Any]:
    """What a scheduler answers: two clients, two workers, and a detached call."""
    listed = [
        ["a-waits", "train", "waiting", None, 60.0],
        ["a-runs", "train", "out", None, 70.0],
        ["a-queued", "train", "out", "1-0", 65.0],
        ["a-fetched", "score", "fetching", "1", 2.0],
    ]
    return {
        "clients": [{**ADA, "calls": {"listed": listed, "waiting": 5001}}, {**BOB, "calls": None}],
        "workers": [
            {"name": "0-0", "slots": [[0, 100, "skyward-a", "a-runs", 30.0, "in train"]]},
            {
                "name": "1-1",
                "slots": [
                    [0, 101, "skyward-b", "b-runs", 3600.0, None],
                    [2, 102, "skyward-call-etl:1", "run-1", 5.0, None],
                ],
            },
        ],
        "others": [],
        "detached": [
            {
                "call_id": "etl:1",
                "name": "etl",
                "owner": "dag/run",
                "state": "running",
                "worker": "1-1",
                "submitted_at": 1.0,
            },
            {
                "call_id": "etl:2",
                "name": "etl",
                "owner": "dag/run",
                "state": "waiting",
                "worker": "",
                "submitted_at": 90.0,
            },
            {
                "call_id": "etl:0",
                "name": "etl",
                "owner": "dag/run",
                "state": "ended",
                "worker": "1-1",
                "submitted_at": 0.0,
            },
        ],
        "now": 100.0,
        **more,
    }


def test_the_calls_of_all_clients_are_one_list() -> None:
    """Running ones first, the longest first. A call whose client does not answer is there, without its function."""
    found = call_list(answer())
    table = [
        (one.call_id, one.function, one.state.value, one.seconds, one.node, one.slot, one.client.pid, one.owner)
        for one in found.calls
    ]
    assert table == [
        ("b-runs", "", "running", 3600.0, 1, 0, 4712, ""),
        ("a-runs", "train", "running", 30.0, 0, 0, 4711, ""),
        ("etl:1", "etl", "running", 5.0, 1, 2, None, "dag/run"),
        ("a-queued", "train", "waiting", 65.0, 1, None, 4711, ""),
        ("a-waits", "train", "waiting", 60.0, None, None, 4711, ""),
        ("etl:2", "etl", "waiting", 10.0, None, None, None, "dag/run"),
        ("a-fetched", "score", "fetching", 2.0, 1, None, 4711, ""),
    ]
    assert found.more_waiting == 5000
    assert [words.partition(", does")[0] for words in found.silent] == ["the client bob@server, process 4712"]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"workers": [{"name": "0-0", "slots": None}]}, "worker 0-0 does not answer"),
        ({"workers": [], "others": ["0-0"]}, "worker 0-0 has a release that lists no calls"),
    ],
)
def test_what_a_worker_that_does_not_answer_runs_is_unknown(more: dict[str, Any], words: str) -> None:
    """A call that was sent may wait or run."""
    found = call_list(answer(clients=[answer()["clients"][0]], detached=[], **more))
    assert {one.call_id: one.state.value for one in found.calls} == {
        "a-runs": "unknown",
        "a-queued": "unknown",
        "a-waits": "waiting",
        "a-fetched": "fetching",
    }
    assert words in found.silent[0]


def test_nodes_of_an_earlier_release_list_no_calls() -> None:
    old: Any = SimpleNamespace(pool_id="sky-1", ask=lambda *_, **__: None)
    with pytest.raises(sky.BadRequest, match="have a release that lists no calls: `skyward stacks` shows"):
        calls_of(old)


def test_the_table_of_calls_has_their_clients_and_slots() -> None:
    found = call_list(answer())
    heads, rows = view.live_table(found, limit=2)
    assert dict(zip(heads, rows[0], strict=True))[">SLOT"] == "1/0"
    assert rows[1] == ["a-runs", "train", "running", "30 s", "0", "0", "ada@laptop", "4711", "cron:7"]
    assert view.more(found, limit=2) == "and 5005 more calls; --limit shows more"
    assert view.more(replace(found, more_waiting=0), limit=100) == ""
    assert view.stacks_text(found, limit=100) == "stacks of a-runs (train), process 100 on node 0\n  in train"


def test_a_signal_right_after_the_folder_of_a_copy_is_made_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.mkdir

    def interrupted(*args: Any, **options: Any) -> None:
        real(*args, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "mkdir", interrupted)
    with pytest.raises(KeyboardInterrupt), _beside(tmp_path / "copy"):
        pass
    assert list(tmp_path.iterdir()) == []
