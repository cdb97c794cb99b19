"""Real machines that you own: three hosts and a spare one."""

import shlex
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import skyward_core as sky
from skyward_core import cli
from skyward_core.events.events import BootstrapProgress
from tests.conftest import RecordedEvents
from tests.real_hosts import executions, hosts, names_of, owned, pool_on, square, tagged, where  # noqa: F401 - fixtures
from tests.testbed.command import run
from tests.testbed.fixtures import fleet, mirror  # noqa: F401 - fixtures

pytestmark = [pytest.mark.timeout(300)]


@sky.compute
def solved(matrix: Any, vector: Any) -> Any:
    """A numpy computation, with the node's own numpy."""
    import numpy as np

    return np.linalg.solve(matrix, vector)


@sky.compute
def prepared() -> tuple[str, list[str], str, str]:
    """The working directory's last name, what is in it, and the content of two of its files."""
    here = Path.cwd()
    files = sorted(str(path.relative_to(here)) for path in here.rglob("*") if path.is_file())
    return here.name, files, (here / "data/words.txt").read_text(), (here / "upper.txt").read_text()


def command_line(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    """Run a command of `skyward`; return the lines that it prints."""
    assert cli.main([*words]) == 0, capsys.readouterr().err
    return capsys.readouterr().out.splitlines()


def test_three_bare_hosts_become_a_pool(hosts, owned, tmp_path, monkeypatch, capsys):
    """From hosts with nothing but sshd to broadcast, map, numpy and logs. Included files are on each of
    them, and a command has run once. A second opening installs nothing and runs no command, and at the end nothing runs
    on them. With a wrong host key nothing is started at all.
    """
    np = pytest.importorskip("numpy")
    assert [(host.root / "root/.cache/skyward").exists() for host in hosts] == [False] * 4
    recorded = RecordedEvents()
    monkeypatch.chdir(tmp_path)
    Path("data").mkdir()
    Path("data/words.txt").write_text("one two\n")
    command = "tr a-z A-Z <data/words.txt >upper.txt; echo commands >>/root/commands"
    pool = pool_on(owned, recorded, image=sky.Image(pip=["numpy"], includes=["data"], shell=[command]))
    with pool:
        made = ("work", ["data/words.txt", "upper.txt"], "one two\n", "ONE TWO\n")
        assert prepared() @ pool == (made,) * 3
        names = [host.name for host in hosts[:3]]
        assert where() @ pool == tuple((name, rank) for rank, name in enumerate(names))
        assert pool.map(square, range(60)) == [number * number for number in range(60)]
        ran = [executions([host]) for host in hosts]
        assert sum(ran, Counter()) == Counter(range(60))
        assert [bool(of_one) for of_one in ran] == [True, True, True, False]

        matrix, vector = np.random.default_rng(0).random((300, 300)), np.arange(300.0)
        found = pool.map(solved, [matrix, matrix.T], [vector, vector])
        assert all(np.allclose(one @ answer, vector) for one, answer in zip((matrix, matrix.T), found, strict=True))

        (login,) = command_line(capsys, "ssh", pool.id, "1", "--print")
        assert run(*shlex.split(login), "hostname").split() == [hosts[1].name]
        command_line(capsys, "cp", "data", f"{pool.id}:1:/root/copied")
        assert (hosts[1].root / "root/copied/words.txt").read_text() == "one two\n"
        command_line(capsys, "cp", f"{pool.id}:2:upper.txt", "back.txt")
        command_line(capsys, "cp", f"{pool.id}:1:/root/copied", "back")
        assert (Path("back.txt").read_text(), Path("back/words.txt").read_text()) == ("ONE TWO\n", "one two\n")
        assert cli.main(["cp", f"{pool.id}:1:/no/such", "."]) == 1
        assert f"node 1 of pool {pool.id}: there is no file or folder /no/such" in capsys.readouterr().err

        call = pool.submit(square(7))
        assert call.result() == 49
        assert recorded.lines(call.call_id) == ["square of 7"]  # emitted before the result arrives
        lines = Counter(event.line for event in recorded.of(sky.LogLine))
        assert lines == Counter([f"square of {number}" for number in (*range(60), 7)])
        assert {event.node for event in recorded.of(sky.LogLine)} == {0, 1, 2}
    assert [event.step for event in recorded.of(BootstrapProgress)].count("deps") == 3
    receipt = pool.receipt
    assert receipt is not None
    assert (len(receipt["resources"]), receipt["left"]) == (3, [])

    recorded.events.clear()
    with pool:
        assert where() @ pool == tuple((name, rank) for rank, name in enumerate(names))
        assert prepared() @ pool == (made,) * 3
    assert "deps" not in [event.step for event in recorded.of(BootstrapProgress)]
    assert [(host.root / "root/commands").read_text() for host in hosts[:3]] == ["commands\n"] * 3
    executions(hosts)

    hosts[1].change_host_key()
    recorded.events.clear()
    with pytest.raises(sky.HostKeyChanged, match=hosts[1].ip):
        pool.open()
    assert recorded.of(sky.InstanceProvisioned) == []
    assert [names_of(tagged(host)) for host in hosts] == [[]] * 4
