"""Every program of examples/ runs on this machine, as its users run it, and prints its result.

Those that train with a framework run in `make frameworks`. (Flows and DAGs: `test_examples.py`.)
"""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
FITTED = r"weights \[1\.0, 2\.0, 3\.0\]"
"""What a program prints that has found y = 1·a + 2·b + 3·c."""

PLAIN = {
    "plain_map.py": [r"primes below 100,000: 9592"],  # OEIS A006880
    "standard_executor.py": [r"begins with 6171 and has 261 steps"],  # OEIS A006877
    "asyncio_tasks.py": [r"2\*\*15 sum up to 26\b", r"2\*\*1000 sum up to 1366\b", "hangs was stopped"],  # OEIS A001370
    "stream_generator.py": [r"step 10: ", r"the minimum is at x = 3\.00, found in \d\d steps"],
    "scatter_array.py": [r"between (4\.99\d|5\.000) and (5\.00\d|4\.999) \(95 %\)"],
    "joblib_parallel.py": [r"pi is 3\.14159265\b"],
    "guides/04_gpu_accelerators.py": [
        r"asked for A100 and got \['A100'\]",
        r"processor: \d+\.\d+ s for 256 x 256",
        "GPU: none. This computer has no GPU and simulates it",
    ],
    "grid_search.py": [r"best parameters: \{'C': \d+, 'gamma': 0\.001\}", r"right on unseen digits: 9[89]\.\d%"],
}
"""What each program prints, as patterns in this order."""
NIGHTLY = {"asyncio_tasks.py", "joblib_parallel.py", "scatter_array.py", "stream_generator.py"}
"""What these show is also on a page whose blocks run in the gate, or has tests of its own there."""

ARGUMENTS = {"guides/04_gpu_accelerators.py": ["A100", "256"]}

GUIDES = {
    "guides/01_getting_started.py": [
        r"one call: 0\.9\n",
        r"on every node: \(0\.9, 0\.9\)",
        r"two in parallel: \(0\.9, 0\.8\)",
        r"many, in order: \[0\.5, 0\.75, 0\.875\]",
        r"cost: 0\.0[0-9]*[1-9][0-9]* USD; left running: \[\]",
    ],
    "guides/02_core_concepts.py": [
        r"Sample\(values=\[-2\.0, -1\.0, 3\.0\]\)",
        "in its own class: division by zero",
        r"the pool has ended: \d+ s, 0\.\d+ USD",
    ],
    "guides/03_providers.py": [r"local local: 0\.0000 USD per hour", r"a call ran on \w+, Linux"],
}
"""What the guides print that run in tests/nightly."""

WITH_FRAMEWORKS = {
    "jax_gradient.py": [rf"rank {rank} of 2 devices: {FITTED}" for rank in range(2)],
    "tensorflow_workers.py": [rf"rank {rank} of 2 replicas: {FITTED}" for rank in range(2)],
    "keras_fit.py": [rf"rank {rank}: {FITTED}" for rank in range(2)],
    "guides/05_distributed_training.py": [rf"rank {rank}: 32 rows, weights \[1\.0, 2\.0, 3\.0\]" for rank in range(2)],
    "lightning_trainer.py": [rf"rank {rank} of 2: {FITTED}" for rank in range(2)],
    "huggingface_trainer.py": [rf"rank {rank} of 2: loss 0\.0" for rank in range(2)],
}
IN_STEPS = "torch_ddp.py"
"""Runs twice, in a test of its own."""


def test_there_is_a_test_for_every_program() -> None:
    """A new program without an expected output here fails."""
    folder = ROOT / "examples"
    programs = {path.relative_to(folder).as_posix() for path in folder.rglob("*.py")}
    assert programs == {*PLAIN, *GUIDES, *WITH_FRAMEWORKS, IN_STEPS}


@pytest.mark.timeout(450)
@pytest.mark.parametrize(
    "program", [pytest.param(one, marks=[pytest.mark.nightly] * (one in NIGHTLY)) for one in PLAIN]
)
def test_a_program_prints_its_result(program: str) -> None:
    assert_printed(PLAIN[program], printed_by(program, *ARGUMENTS.get(program, [])))


def printed_by(program: str, *arguments: str) -> str:
    """Run a program of examples/ as a separate process, and return what it prints on its standard output."""
    command: list[Any] = [sys.executable, ROOT / "examples" / program, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=430)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def assert_printed(patterns: list[str], said: str) -> None:
    """Fail unless all patterns are found in the output, in this order."""
    assert re.search(".*".join(patterns), said, re.DOTALL), said[-4000:]
