"""The simulation of the dispatcher: histories that must hold all invariants."""

import pytest

from tests.engine import simulation
from tests.engine.broken import HISTORIES
from tests.engine.simulation import World, explore


@pytest.mark.parametrize("first", range(0, HISTORIES, 100))
def test_histories(first: int) -> None:
    """`python -m tests.engine.simulation --seed N` prints a failure step by step."""
    assert [failure for seed in range(first, first + 100) if (failure := explore(seed))] == []


def test_a_seed_gives_the_same_history_twice() -> None:
    """Otherwise a seed could not reproduce a failure."""
    for seed in range(20):
        lines: tuple[list[str], list[str]] = ([], [])
        for trace in lines:
            World(seed, trace=lambda line, trace=trace: trace.append(line.partition(" object at 0x")[0])).run()
        assert lines[0] == lines[1]


def test_the_command_prints_failures(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """With the seed, and with exit code 1 for `make`."""
    monkeypatch.setattr(simulation, "explore", lambda seed: f"seed {seed}: Violation: it broke" if seed == 7 else None)
    assert simulation.main(["--histories", "10", "--processes", "1"]) == 1
    assert "seed 7: Violation: it broke" in capsys.readouterr().out
