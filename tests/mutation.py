"""Finds faults that our tests do not notice.

`make mutate MODULE=skyward_core/engine/placement.py` puts small faults into a module, one at a time, and runs the
module's tests on each.

mutmut makes these faulty copies, the mutants, and runs the tests. All of it happens in a temporary copy of the working
tree. Mutants of texts for people (strings with a space) are left out. mutmut makes none in functions with a decorator
other than `staticmethod` and `classmethod`, nor outside of functions. docs/mutation.md has the conclusions from the survivors.
"""

from __future__ import annotations

import argparse
import ctypes
import difflib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import chdir, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).parent.parent
FAST = "not slow and not long"
PR_SET_CHILD_SUBREAPER = 36
TIMES_LONGER = 10.0
"""A mutant may take this many times as long as its tests take without a fault, and ten seconds."""

DISPATCHER = ("engine/test_dispatcher.py", "engine/test_outbox.py", "engine/test_simulation.py::test_histories[0]")
SWEEP = (
    "cleanup/test_policy.py",
    "cleanup/test_release.py",
    "cleanup/test_sweep.py",
    "cleanup/test_other_accounts.py",
)
LIFECYCLE = ("provisioning/test_lifecycle.py", "provisioning/test_candidates.py", "provisioning/test_selection.py")
JOURNAL = ("ledger/test_journal.py", "ledger/test_prune.py")
OTHERS = {
    "engine/calls": DISPATCHER,
    "engine/connection_state": DISPATCHER,
    "engine/dispatcher": DISPATCHER,
    "engine/fetches": DISPATCHER,
    "engine/function_files": DISPATCHER,
    "engine/kept_calls": DISPATCHER,
    "engine/losses": DISPATCHER,
    "engine/members": ("engine/test_recovery.py", *DISPATCHER),
    "engine/membership": ("engine/test_recovery.py",),
    "engine/outbox": DISPATCHER,
    "engine/placement": DISPATCHER,
    "engine/shipments": DISPATCHER,
    "cleanup/policy": SWEEP,
    "cleanup/pool_record": SWEEP,
    "cleanup/provider_work": SWEEP,
    "cleanup/release": (*SWEEP, "cli/test_commands.py"),
    "cleanup/survey": SWEEP,
    "cleanup/sweep": SWEEP,
    "ledger/accounts": ("ledger/test_budgets.py",),
    "ledger/bills": ("ledger/test_ledger.py", "ledger/test_receipt.py", *JOURNAL),
    "ledger/intents": ("ledger/test_ledger.py", *JOURNAL),
    "ledger/journal": JOURNAL,
    "ledger/metering": JOURNAL,
    "ledger/pools": ("ledger/test_ledger.py", *JOURNAL),
    "ledger/receipt": JOURNAL,
    "provisioning/rental": LIFECYCLE,
    "provisioning/replacement": LIFECYCLE,
    "provisioning/selection": LIFECYCLE,
    "provisioning/startup": LIFECYCLE,
    "provisioning/teardown": LIFECYCLE,
    "provisioning/termination": LIFECYCLE,
}
"""Tests of a module in other files than the mirrored one: files of tests/ that test several modules together."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one mutant: its name, its diff, and killed, survived, no tests, timeout or another word of
    mutmut's.
    """

    name: str
    diff: str
    status: str


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the survivors as diffs, and a line with the counts; return 1 if the run itself has failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument("module", help="such as skyward_core/engine/placement.py")
    parser.add_argument("--sample", type=int, metavar="N", help="only so many mutants, drawn by chance")
    parser.add_argument("--seed", type=int, default=0, help="the same seed draws the same mutants of the same module")
    parser.add_argument("--tests", nargs="+", help="these instead of the module's own, as pytest names them")
    options = parser.parse_args(arguments)
    tests = options.tests or tests_of(options.module)
    print(f"{options.module} is tested by {' '.join(tests)}", flush=True)
    try:
        outcomes = explored(ROOT, options.module, tests, options.sample, options.seed)
    except Failed as failure:
        print(failure, file=sys.stderr)
        return 1
    for outcome in outcomes:
        if outcome.status != "killed":
            print(f"\n# {outcome.status}: {outcome.name}\n{outcome.diff}")
    print(f"\n{options.module}: {summary(outcomes)}")
    return 0


def summary(outcomes: Sequence[Outcome]) -> str:
    """Count the mutants; those without a test also count as survivors."""
    count = Counter(outcome.status for outcome in outcomes)
    survived, known = count["survived"] + count["no tests"], ("killed", "survived", "no tests", "timeout")
    parts = [f"{len(outcomes)} mutants", f"{count['killed']} killed", f"{survived} survived"]
    parts += [f"{count['timeout']} timed out"]
    return ", ".join(parts + [f"{count[status]} {status}" for status in sorted(count) if status not in known])


def tests_of(module: str) -> list[str]:
    """Return the tests of a module: the file that mirrors it, and those of `OTHERS`."""
    path = Path(module).with_suffix("")
    place = path.relative_to(path.parts[0])
    mirrored = f"{place.parent}/test_{place.name}.py".removeprefix("./")
    names = dict.fromkeys((mirrored, *OTHERS.get(str(place), ())))
    if found := [f"tests/{name}" for name in names if (ROOT / "tests" / name.partition("::")[0]).exists()]:
        return found
    raise SystemExit(f"{module} has no tests/{mirrored}: name its tests in tests/mutation.py, or with --tests")


# ── one run ──────────────────────────────────────────────────────────────────────────────────────────────────────────


class Failed(Exception):
    """The run has failed: the tests fail without a fault, or none of them runs code of the module."""


def explored(root: Path, module: str, tests: Sequence[str], sample: int | None = None, seed: int = 0) -> list[Outcome]:
    """Return the result of each mutant of a module of `root`, or of a sample of them."""
    if not (root / module).is_file():
        raise Failed(f"there is no {module}")
    with tempfile.TemporaryDirectory(prefix="skyward-mutation-") as folder:
        copy = Path(folder, "copy")
        shutil.copytree(root, copy, symlinks=True, ignore=shutil.ignore_patterns(".*", "__pycache__", "mutants"))
        _configure(copy, module, tests)
        diffs = dict(mutants_of(copy, module))
        if sample is not None and sample < len(diffs):
            diffs = {name: diffs[name] for name in sorted(random.Random(seed).sample(sorted(diffs), sample))}
        if not diffs:
            return []
        _run(copy, diffs, Path(folder, "tmp"))
        codes = json.loads((copy / "mutants" / f"{module}.meta").read_text())["exit_code_by_key"]
    return [Outcome(name, diff, _status(codes[name])) for name, diff in diffs.items()]


def mutants_of(copy: Path, module: str) -> Iterator[tuple[str, str]]:
    """Yield name and diff of each mutant, except those that change a text for people."""
    from mutmut.configuration import reset_config
    from mutmut.mutation.diff_apply import generated_function_names
    from mutmut.mutation.file_mutation import mutate_file_contents
    from mutmut.utils.format_utils import get_mutant_name

    reset_config()  # it is read from the pyproject.toml of the current folder
    with chdir(copy):
        mutated = mutate_file_contents(module, Path(module).read_text())
    lines, spans = mutated.code.splitlines(), mutated.line_span_by_function_name
    for function in mutated.mutant_names:
        sides = [
            [line.replace(name, function.partition("__mutmut_")[0]) for line in lines[span.start - 1 : span.end]]
            for name in generated_function_names(function)
            for span in [spans[name]]
        ]
        diff = "\n".join(difflib.unified_diff(*sides, module, module, lineterm=""))
        if not _is_of_text(diff):
            yield get_mutant_name(Path(module), function), diff


def _is_of_text(diff: str) -> bool:
    """Return whether both sides are equal except for strings with a space."""
    sides = [
        re.sub(r'"[^"]*\s[^"]*"', '""', "".join(line[1:] for line in diff.splitlines()[2:] if line.startswith(sign)))
        for sign in "-+"
    ]
    return sides[0] == sides[1]


def _configure(copy: Path, module: str, tests: Sequence[str]) -> None:
    """Configure mutmut in the copy's pyproject.toml."""
    package = Path(module).parts[0]
    settings = {
        "source_paths": [package],
        "only_mutate": [module],
        "also_copy": sorted(path.name for path in copy.iterdir() if path.name != package),
        "pytest_add_cli_args": ["-m", FAST, "-p", "no:cacheprovider"],
        "pytest_add_cli_args_test_selection": list(tests),
        "timeout_multiplier": TIMES_LONGER,
    }
    with (copy / "pyproject.toml").open("a") as file:
        file.write("\n[tool.mutmut]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in settings.items()))


def _run(copy: Path, names: Iterable[str], temporary: Path) -> None:
    """Run the tests on each mutant, one at a time."""
    temporary.mkdir()
    mutmut = Path(sys.executable).with_name("mutmut")
    environment = os.environ | {"TMPDIR": str(temporary), "PYTHONDONTWRITEBYTECODE": "1"}
    with nothing_left_running():
        run = subprocess.run(
            [mutmut, "run", "--max-children", "1", *names],
            cwd=copy,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
    if run.returncode or "Mutant results" not in run.stdout:
        raise Failed(f"mutmut has failed with exit code {run.returncode}:\n{run.stdout[-8000:]}")


@contextmanager
def nothing_left_running() -> Iterator[None]:
    """Kill processes that were started meanwhile and still run, also if their parent has ended, because killed tests
    clean nothing up.
    """
    there = set(psutil.Process().children(recursive=True))
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        while left := set(psutil.Process().children(recursive=True)) - there:
            for process in left:
                process.send_signal(signal.SIGKILL)
            psutil.wait_procs(left)
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 0)


def _status(exit_code: int | None) -> str:
    from mutmut.stats import status_by_exit_code

    return status_by_exit_code[exit_code]


if __name__ == "__main__":
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM)
    )  # the started mutant is ended in either case
    sys.exit(main())
