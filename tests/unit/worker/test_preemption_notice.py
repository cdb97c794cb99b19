"""The notice before a spot machine is taken back: read on the machine, sent to the client, and the pool's actions
before the machine is gone.
"""

from dataclasses import replace
from pathlib import Path

import pytest

import skyward_core as sky
from skyward_core.events.narrator import Narrator
from skyward_core.machines.instances import Instance
from skyward_core.provisioning.bootstrap import Preparation
from skyward_core.wire.info import Kind, Notice
from skyward_core.wire.settings import NodeSettings, with_partitions
from skyward_core.worker.preemption_notice import FILE_ENV, MARK, NOTICE_FILE, note

INTERRUPTED = Notice(Kind.INTERRUPTION, "terminate", 1e9, 120.0)


def test_calls_read_how_much_time_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A recommendation is no notice; a time that is over is 0, and outside a pool there is none."""
    assert sky.preemption_notice() is None
    monkeypatch.setenv(FILE_ENV, str(tmp_path / NOTICE_FILE))
    note(Notice(Kind.REBALANCE, "", 0.0), tmp_path)
    assert sky.preemption_notice() is None
    note(Notice(Kind.INTERRUPTION, "terminate", 0.0, seconds_left=100.0), tmp_path)
    assert 50 < (sky.preemption_notice() or 0) <= 100
    note(Notice(Kind.INTERRUPTION, "terminate", 0.0, seconds_left=0.0), tmp_path)
    assert sky.preemption_notice() == 0.0
    note(Notice(Kind.INTERRUPTION, "terminate", 0.0), tmp_path / "gone")  # a full disk must not end the poller


# ── as text ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_notice_travels_as_text() -> None:
    """The printed line is read back; any other line is refused."""
    assert Notice.from_text(INTERRUPTED.to_text()) == INTERRUPTED
    for text in (
        "",
        "null",
        "{}",
        "7",
        INTERRUPTED.to_text()[:-5],
        INTERRUPTED.to_text().replace("interruption", "party"),
        '{"kind": "rebalance"}',
    ):
        with pytest.raises(ValueError, match=r".*"):
            Notice.from_text(text)
    with pytest.raises(ValueError, match="no number of seconds"):
        Notice.from_text(INTERRUPTED.to_text().replace("120.0", "NaN"))


class FakeReach:
    """A node's log and nothing else."""

    is_local = False

    def __init__(self, *lines: str) -> None:
        self.instance = Instance.model_construct(id="i-1")
        self._lines = list(lines)

    def new_lines(self) -> list[str]:
        lines, self._lines = self._lines, []
        return lines


def test_the_log_has_the_notices_of_a_machine() -> None:
    """A line that was cut short is ignored."""
    node = Preparation(
        FakeReach("hello", MARK + '{"kind": "inter', MARK + INTERRUPTED.to_text(), "bye"), 1, lambda _: None
    )  # type: ignore[arg-type]
    node.follow()
    assert node.notices == (INTERRUPTED,)


def test_a_node_without_workers_needs_no_partitions(tmp_path: Path) -> None:
    """A retired node has as many partitions of GPUs as before, and no workers for them."""
    settings = NodeSettings(
        "pool", "i-1", 1, 2, 1, "127.0.0.1", "127.0.0.1", 1, "", "", (str(tmp_path),), workers=({}, {})
    )
    retired = replace(settings, workers=())
    assert with_partitions(retired, "MIG-a\nMIG-b\n") == retired
    assert NodeSettings.from_json(retired.to_json()) == retired


# ── what the pool decides ────────────────────────────────────────────────────────────────────────────────────────────


def test_the_texts_of_the_notices() -> None:
    """They describe what happens next."""
    texts = [
        Narrator().tell(event)
        for event in (
            sky.PreemptionNoticed("i-1", 1, "terminate", 1e9, 118.0),
            sky.PreemptionNoticed("i-0", 0, "stop", 1e9, 118.0),
            sky.RebalanceRecommended("i-1", 1, 1e9),
        )
    ]
    assert [line and line[1] for line in texts] == [
        "node 1 is taken back by its provider in 1 min 58 s (terminate): it takes no more calls, and another machine is prepared",
        "node 0 is taken back by its provider in 1 min 58 s (stop): it is the head, and the cluster comes up anew without it then",
        "node 1 may be taken back by its provider soon",
    ]
