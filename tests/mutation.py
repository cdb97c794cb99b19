"""Finds faults that our tests do not notice.

`make mutate MODULE=skyward_core/engine/shipments.py` puts small faults into a module, one at a time, and runs the
module's tests on each.

mutmut makes these faulty copies, the mutants. `mutation_process.py` collects the tests once and runs them in a fork for
each mutant. All of it happens in a temporary copy of the working tree. Mutants of texts for people (strings with a
space) are left out. mutmut makes none in functions with a decorator other than `staticmethod` and `classmethod`, nor
outside of functions. docs/mutation.md has the conclusions from the survivors.
"""

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
from collections.abc import Iterator, Sequence
from contextlib import chdir, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).parent.parent
PR_SET_CHILD_SUBREAPER = 36
SECONDS_LONGER = 10.0
"""A test may take so much longer with a mutant than five times its time without."""

HISTORIES = ("system/engine/test_simulation.py::test_histories[0]",)
LIFECYCLE = ("system/provisioning/test_lifecycle.py", "system/provisioning/test_selection.py")
LEDGER = (
    *(f"system/ledger/test_{name}.py" for name in ("ledger", "names", "prune", "budgets", "run_accounts")),
    "unit/session/test_paid_time.py",
)
DISPATCHER = ("calls", "dispatcher", "outbox", "shipments", "state")
OTHERS = {
    **{f"engine/{name}": HISTORIES for name in DISPATCHER},
    "engine/recovery": ("unit/worker/test_preemption_notice.py",),
    "cleanup/release": ("unit/cli",),
    **{
        f"ledger/{name}": LEDGER
        for name in ("accounts", "bills", "intents", "journal", "metering", "names", "names_policy", "pools", "receipt")
    },
    "machines/offers": ("unit/provisioning/test_candidates.py", "unit/test_spec.py"),
    **{f"provisioning/{name}": LIFECYCLE for name in ("lifecycle", "rental", "replacement", "selection", "teardown")},
}
"""Tests of a module beside those that `tests_of` finds."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one mutant: its module, name and diff, and killed, survived, no tests or timeout."""

    module: str
    name: str
    diff: str
    status: str


def main(arguments: Sequence[str] | None = None) -> int:
    """Print each survivor as a diff when it is found, and the counts of each module at the end; return 1 if the run
    itself has failed.
    """
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument("modules", nargs="+", metavar="module", help="such as skyward_core/engine/shipments.py")
    parser.add_argument("--sample", type=int, metavar="N", help="only so many mutants of each module, drawn by chance")
    parser.add_argument("--seed", type=int, default=0, help="the same seed draws the same mutants of the same module")
    parser.add_argument("--only", nargs="+", default=(), metavar="PART", help="only mutants whose name has a PART")
    parser.add_argument("--tests", nargs="+", help="these instead of the module's own, as pytest names them")
    options = parser.parse_args(arguments)
    tests = options.tests or list(dict.fromkeys(name for module in options.modules for name in tests_of(module)))
    print(f"{' '.join(options.modules)}: tested by {' '.join(tests)}", flush=True)
    outcomes: dict[str, list[Outcome]] = {module: [] for module in options.modules}
    try:
        for outcome in explored(ROOT, options.modules, tests, options.sample, options.seed, options.only):
            outcomes[outcome.module].append(outcome)
            if outcome.status != "killed":
                print(f"\n# {outcome.status}: {outcome.name}\n{outcome.diff}", flush=True)
    except Failed as failure:
        print(failure, file=sys.stderr)
        return 1
    print()
    for module in options.modules:
        print(f"{module}: {summary(outcomes[module])}")
    return 0


def summary(outcomes: Sequence[Outcome]) -> str:
    """Count the mutants; those without a test also count as survivors."""
    count = Counter(outcome.status for outcome in outcomes)
    survived = count["survived"] + count["no tests"]
    return f"{len(outcomes)} mutants, {count['killed']} killed, {survived} survived, {count['timeout']} timed out"


def tests_of(module: str) -> list[str]:
    """Return the tests of a module: the unit tests of its package, the system tests that mirror it, and `OTHERS`.

    A test that does not reach a function costs nothing but one run without a fault.
    """
    path = Path(module).with_suffix("")
    place = path.relative_to(path.parts[0])
    unit = f"unit/{place.parent}" if place.parent != Path() else f"unit/test_{place.name}.py"
    names = dict.fromkeys((unit, f"system/{place.parent}/test_{place.name}.py", *OTHERS.get(str(place), ())))
    if found := [f"tests/{name}" for name in names if (ROOT / "tests" / name.partition("::")[0]).exists()]:
        return found
    raise SystemExit(f"{module} has no tests: name them in tests/mutation.py, or with --tests")


class Failed(Exception):
    """The run has failed: the tests fail without a fault, or none of them runs code of the module."""


def explored(
    root: Path,
    modules: Sequence[str],
    tests: Sequence[str],
    sample: int | None = None,
    seed: int = 0,
    only: Sequence[str] = (),
) -> Iterator[Outcome]:
    """Yield the result of each mutant of these modules of `root` as soon as it is known.

    `sample` draws so many mutants of each module. `only` leaves the mutants whose names have one of these parts.
    """
    if missing := [module for module in modules if not (root / module).is_file()]:
        raise Failed(f"there is no {' '.join(missing)}")
    with tempfile.TemporaryDirectory(prefix="skyward-mutation-") as folder:
        copy = Path(folder, "copy")
        shutil.copytree(root, copy, symlinks=True, ignore=shutil.ignore_patterns(".*", "__pycache__", "node_modules"))
        _configure(copy, modules)
        chosen: dict[str, tuple[str, str]] = {}
        for module in modules:
            diffs = dict(mutants_of(copy, module))
            if only:
                diffs = {name: diff for name, diff in diffs.items() if any(part in name for part in only)}
            if sample is not None and sample < len(diffs):
                diffs = {name: diffs[name] for name in sorted(random.Random(seed).sample(sorted(diffs), sample))}
            chosen |= {name: (module, diff) for name, diff in diffs.items()}
        if chosen:
            for name, status in _run(copy, tests, list(chosen), Path(folder, "tmp")):
                module, diff = chosen[name]
                yield Outcome(module, name, diff, status)


def mutants_of(copy: Path, module: str) -> Iterator[tuple[str, str]]:
    """Put the mutants into the copy's module.

    Yield name and diff of each, except those that change a text for people.
    """
    from mutmut.configuration import reset_config
    from mutmut.mutation.diff_apply import generated_function_names
    from mutmut.mutation.file_mutation import mutate_file_contents
    from mutmut.utils.format_utils import get_mutant_name

    reset_config()  # it is read from the pyproject.toml of the current folder
    with chdir(copy):
        mutated = mutate_file_contents(module, Path(module).read_text())
        Path(module).write_text(mutated.code)
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


def _configure(copy: Path, modules: Sequence[str]) -> None:
    """Configure mutmut in the copy's pyproject.toml: it records which tests reach which function."""
    packages = sorted({Path(module).parts[0] for module in modules})
    with (copy / "pyproject.toml").open("a") as file:
        file.write(f"\n[tool.mutmut]\nsource_paths = {json.dumps(packages)}\n")


def _run(copy: Path, tests: Sequence[str], names: Sequence[str], temporary: Path) -> Iterator[tuple[str, str]]:
    """Run the tests on each mutant, one at a time; yield its name and its result."""
    temporary.mkdir()
    request, log = temporary.with_name("request.json"), temporary.with_name("log")
    asked = {"tests": list(tests), "names": list(names), "seconds_longer": SECONDS_LONGER}
    request.write_text(json.dumps(asked))
    environment = os.environ | {"TMPDIR": str(temporary), "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-P", Path(__file__).with_name("mutation_process.py"), request]
    count = 0
    with (
        nothing_left_running(),
        log.open("w") as output,
        subprocess.Popen(
            command, cwd=copy, env=environment, stdout=subprocess.PIPE, stderr=output, text=True
        ) as process,
    ):
        assert process.stdout
        for count, line in enumerate(process.stdout, 1):
            result = json.loads(line)
            yield result["name"], result["status"]
        code = process.wait()
    if code or count < len(names):
        raise Failed(f"the tests have failed with exit code {code}:\n{log.read_text()[-8000:]}")


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


if __name__ == "__main__":
    # the started mutant is ended in either case
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main())
