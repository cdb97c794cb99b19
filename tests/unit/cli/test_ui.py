"""The server of `skyward ui`: who may read it, and what each path answers."""

# pyright: reportUnusedImport=false

from types import SimpleNamespace
from typing import Any

import pytest

import skyward_core as sky
from skyward_core import cli
from skyward_core.cli.commands import ui as command
from skyward_core.cli.ui.utilisation import curves
from skyward_core.ledger.ledger import Ledger
from skyward_core.live import metrics
from tests.unit.cli.test_commands import HERE, ROOT, Clock, Skyward, clock, folder, ledger, skyward, url  # noqa: F401 - fixtures

TOKEN = "a-token-of-enough-letters"


def sample(percent: float, seconds: float = 0.0, gpu: float | None = None) -> sky.Metrics:
    memory = {"gpu_memory_used_mb": 10.0, "gpu_memory_total_mb": 40.0} if gpu is not None else {}
    return sky.Metrics("i-0", 0, percent, 50.0, 1.0, 2.0, gpu_utilization=gpu, timestamp=seconds, **memory)


def test_curves_have_sixty_points_at_most() -> None:
    """Each is the mean of those that it stands for; what no node has is None."""
    found = curves([sample(float(number)) for number in range(900)])
    assert len(found["cpu_percent"]) == 60
    assert found["cpu_percent"][:2] == [7.0, 22.0]
    assert set(found["gpu_percent"]) == {None}
    assert curves([])["cpu_percent"] == []


def test_connections_to_pools_that_have_ended_are_closed(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []

    class FakeObserver:
        def __init__(self, pool_id: str) -> None:
            self.pool_id = pool_id

        def __exit__(self, *_: object) -> None:
            closed.append(self.pool_id)

    monkeypatch.setattr(metrics, "find_nodes", lambda _, pool_id: pool_id)
    monkeypatch.setattr(metrics, "Observer", FakeObserver)
    monkeypatch.setattr(metrics, "SampleFeed", lambda *_: SimpleNamespace(uses=list))
    with metrics.PoolUses(ledger) as uses:
        assert [uses.of("sky-1"), uses.of("sky-2")] == [[], []]
        uses.keep(["sky-2"])
        assert closed == ["sky-1"]
    assert closed == ["sky-1", "sky-2"]


# ── the command ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("token", ["", "short", "with a blank in the middle of it", "t\xf6ken-of-enough-letters"])
def test_a_weak_token_of_the_environment_is_refused(
    token: str, monkeypatch: pytest.MonkeyPatch, skyward: Skyward
) -> None:
    monkeypatch.setenv(command.TOKEN, token)
    assert "SKYWARD_UI_TOKEN needs at least 20" in skyward("ui", code=cli.FAILED)


def test_the_token_of_the_environment_is_no_setting_of_a_pool(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(command.TOKEN, TOKEN)
    assert sky.PoolSpec.of(provider="local")
    assert "is no setting" not in caplog.text


@pytest.mark.parametrize("port", ["65536", "-1", "http"])
def test_a_port_that_cannot_be_is_refused(port: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["ui", f"--port={port}"])
    assert end.value.code == 2
    assert "65535" in capsys.readouterr().err or port != "65536"


def test_a_ledger_that_cannot_be_opened_ends_the_command(skyward: Skyward, tmp_path: Any) -> None:
    (tmp_path / "broken.db").write_text("this is no database, and is long enough to be looked at" * 10)
    assert "broken.db" in skyward(f"--ledger sqlite:///{tmp_path}/broken.db ui", code=cli.FAILED)
