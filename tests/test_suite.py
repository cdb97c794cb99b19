"""Every test asserts something, lets no time pass, and uses public names only, unless its docstring gives a reason.

The reason follows one of these words in the docstring: `Sleeps:`, `Looks inside:`. A test that asserts nothing is never
allowed. No test replaces a clock or a system call of all threads, because pools that tests share run in some of them.

Files, classes and functions of the packages and of the tests are not too long.
"""

import ast
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, cast

import pytest

TESTS = Path(__file__).parent
ROOT = TESTS.parent
PACKAGES = [ROOT / "skyward_core", ROOT / "integrations"]
FOREVER_SECONDS = 60
"""A sleep of at least this time waits to be stopped, not for time to pass."""

ASSERTING = {"raises", "warns", "fail", "run_state_machine_as_test"}
"""Names of pytest and hypothesis that fail a test; those of mocks begin with `assert_`."""

NOTHING = "asserts nothing"
REPLACES = "replaces %s for all threads: replace the name in the tested module instead"

MOST_LINES = {"file": 600, "class": 400, "function": 60}
"""Without decorators."""
OLD = """
tests/cleanup/test_reaper.py file
tests/engine/test_dispatcher.py file
tests/engine/test_recovery.py file
tests/image/test_image.py file
tests/integrations/test_airflow.py file
tests/integrations/test_dagster.py file
tests/integrations/test_prefect.py file
tests/kill/points.py file
tests/kill/points.py Round
tests/kill/test_endings.py file
tests/ledger/test_budgets.py file
tests/ledger/test_journal.py file
tests/ledger/test_ledger.py file
tests/pool/test_pool.py file
tests/providers/test_aws.py file
tests/providers/test_aws_fleet.py file
tests/providers/test_aws_ssm.py file
tests/providers/test_digitalocean.py file
tests/providers/test_hosts.py file
tests/providers/test_runpod.py file
tests/providers/test_userdata.py file
tests/providers/test_vastai.py file
tests/providers/test_verda.py file
tests/session/test_attached.py file
tests/test_real_hosts.py file
tests/test_secret.py file
tests/test_seed_tables.py file
tests/transport/test_ssh_connection.py file
tests/worker/test_calls.py file
tests/worker/test_supervisor.py file
"""
"""What was longer before the rule. Files of tests may stay so until they are split; nothing new comes here."""

type Definition = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Function:
    """What the rules need to know of one function; its syntax tree would take a thousand times the memory."""

    name: str
    line: int
    docstring: str
    has_assert: bool
    sleeps: bool
    called: frozenset[str]
    """The last name of each call."""
    touched: frozenset[str]
    """Names that it reads from objects other than its own, or replaces there."""
    replaced: frozenset[str]
    """Parts of the standard library that it replaces for all threads, by a module of ours: `time.monotonic`."""


@dataclass(frozen=True)
class File:
    """What the rules need to know of one file."""

    functions: tuple[Function, ...]
    private: frozenset[str]
    """The private names that it defines."""
    too_long: tuple[str, ...]
    """What is longer than `MOST_LINES`: "file", or the name of a class or function."""


def test_every_test_keeps_the_rules() -> None:
    """All tests follow the rules of this file."""
    tests = files(TESTS)
    asserting, private = helpers_that_assert(tests.values()), private_names(tests.values())
    found = [
        f"{path.relative_to(TESTS)}:{fault}"
        for path, file in tests.items()
        for fault in faults(file, asserting, private)
    ]
    assert found == [], "\n".join(found)


def test_nothing_is_too_long() -> None:
    """Readers see a file of at most 600 lines, a class of at most 400, and a function of at most 60."""
    found = {
        f"{path.relative_to(ROOT)} {name}"
        for folder in (*PACKAGES, TESTS)
        for path, file in files(folder).items()
        for name in file.too_long
    }
    assert sorted(found - set(OLD.split("\n"))) == []
    assert sorted(set(OLD.strip().split("\n")) - found) == [], "not too long any more: remove it from OLD"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("x = 1\n" * 600, ()),
        ("x = 1\n" * 601, ("file",)),
        ("class C:\n" + "    x = 1\n" * 399, ()),
        ("class C:\n" + "    x = 1\n" * 400, ("C",)),
        ("def f():\n" + "    x = 1\n" * 59, ()),
        ("def f():\n" + "    x = 1\n" * 60, ("f",)),
        ("async def f():\n" + "    x = 1\n" * 60, ("f",)),
        ("@mark(\n" + "    1,\n" * 60 + ")\ndef f(): ...\n", ()),
    ],
    ids=range(8),
)
def test_what_is_too_long_is_found(text: str, found: tuple[str, ...]) -> None:
    """At the limit and one line above it."""
    assert read(text).too_long == found


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        ("run()", "asserts nothing"),
        ("look()", ""),
        ("assert run()", ""),
        ("with pytest.raises(ValueError):\n    run()", ""),
        ("mock.assert_called_once()", ""),
        ("time.sleep(1)\nassert run()", "sleeps"),
        ("await asyncio.sleep(0.1)\nassert run()", "sleeps"),
        ("def work():\n    time.sleep(1)\nassert run(work)", "sleeps"),
        ("'''Sleeps: it is about time.'''\ntime.sleep(1)\nassert run()", ""),
        ("await asyncio.sleep(0)\nassert run()", ""),
        ("while not run():\n    time.sleep(0.1)\nassert run()", ""),
        ("while True:\n    time.sleep(0.1)\nassert run()", "sleeps"),
        ("def work():\n    time.sleep(600)\nassert run(work)", ""),
        ("assert pool._open", "looks at _open"),
        ("'''Looks inside: nothing else shows it.'''\nassert pool._open", ""),
        ("'''Sleeps: it is about time.'''\nassert pool._open", "looks at _open"),
        ("monkeypatch.setattr(pool, '_open', None)\nassert run()", "looks at _open"),
        ("assert fake._anything", ""),
        ("monkeypatch.setattr(launch.time, 'sleep', print)\nassert run()", REPLACES % "time.sleep"),
        ("monkeypatch.setattr(slot.os, 'kill', print)\nassert run()", REPLACES % "os.kill"),
        ("monkeypatch.setattr(time, 'monotonic', print)\nassert run()", REPLACES % "time.monotonic"),
        ("monkeypatch.setattr('time.monotonic', print)\nassert run()", REPLACES % "time.monotonic"),
        ("monkeypatch.setattr(launch, 'time', fake)\nassert run()", ""),
    ],
)
def test_a_test_that_breaks_a_rule_is_found(body: str, fault: str) -> None:
    """A test that gives its reason is not."""
    lines = "\n".join(f"    {line}" for line in body.splitlines())
    found = faults(read(f"async def test_it():\n{lines}\n"), {"look"}, {"_open"})
    assert [one.partition("test_it ")[2] for one in found] == ([fault] if fault else [])


# ── the rules ────────────────────────────────────────────────────────────────────────────────────────────────────────


def faults(file: File, asserting: set[str], private: set[str]) -> list[str]:
    """Return a line for each rule that a test of a file breaks, or a function that helps the tests."""
    return [
        f"{function.line}: {function.name} {fault}"
        for function in file.functions
        for fault in (
            *(_faults(function, asserting, private) if function.name.startswith("test_") else ()),
            # a shared pool took the time of a test for its own: it found itself idle for an hour, and ended
            *([REPLACES % ", ".join(sorted(function.replaced))] if function.replaced else ()),
        )
    ]


def _faults(test: Function, asserting: set[str], private: set[str]) -> Iterator[str]:
    if not asserts(test, asserting):
        yield NOTHING
    if test.sleeps and "Sleeps: " not in test.docstring:
        yield "sleeps"
    if "Looks inside: " not in test.docstring and (touched := sorted(test.touched & private)):
        yield f"looks at {', '.join(touched)}"


def asserts(function: Function, helpers: set[str]) -> bool:
    """Return whether a statement of a function can fail a test."""
    return function.has_assert or any(
        name in helpers or name in ASSERTING or name.startswith("assert_") for name in function.called
    )


def helpers_that_assert(tests: Iterable[File]) -> set[str]:
    """Return the names of functions of the tests that assert, or call one that does."""
    helpers = [one for file in tests for one in file.functions if not one.name.startswith("test_")]
    found = {one.name for one in helpers if asserts(one, set())}
    while more := {one.name for one in helpers if one.name not in found and one.called & found}:
        found |= more
    return found


def private_names(tests: Iterable[File]) -> set[str]:
    """Return the private names that our packages define, and the tests (their fakes) do not."""
    ours = {name for package in PACKAGES for file in files(package).values() for name in file.private}
    return ours - {name for file in tests for name in file.private}


# ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@cache
def files(folder: Path) -> dict[Path, File]:
    """Return what the rules need to know of all Python files of a folder."""
    return {path: read(path.read_text(encoding="utf-8")) for path in sorted(folder.rglob("*.py"))}


def read(text: str) -> File:
    """Return what the rules need to know of the text of a file."""
    nodes = list(ast.walk(ast.parse(text)))
    definitions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return File(
        tuple(read_function(one) for one in definitions),
        frozenset(_defined(nodes)),
        (*_long_file(text), *_long_parts(nodes)),
    )


def _long_file(text: str) -> Iterator[str]:
    if len(text.splitlines()) > MOST_LINES["file"]:
        yield "file"


def _long_parts(nodes: Iterable[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            most = MOST_LINES["class" if isinstance(node, ast.ClassDef) else "function"]
            if (node.end_lineno or node.lineno) - node.lineno >= most:
                yield node.name


def read_function(definition: Definition) -> Function:
    """Return what the rules need to know of a function, with the functions that it defines."""
    nodes = list(ast.walk(definition))
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    return Function(
        name=definition.name,
        line=definition.lineno,
        docstring=ast.get_docstring(definition) or "",
        has_assert=any(isinstance(node, ast.Assert) for node in nodes),
        sleeps=any(_lets_time_pass(nodes, calls)),
        called=frozenset(name_called(call) for call in calls),
        touched=frozenset(_names_touched(nodes)),
        replaced=frozenset(_replaced_for_all(calls)),
    )


def _lets_time_pass(nodes: Iterable[ast.AST], calls: Iterable[ast.Call]) -> Iterator[ast.Call]:
    """Yield the calls that let time pass, except those of a loop that polls, and those that only yield the
    processor.
    """
    sleeps = [call for call in calls if _is_sleep(call.func) and not _is_harmless(call)]
    if sleeps:
        loops = [node for node in nodes if isinstance(node, ast.While) and not isinstance(node.test, ast.Constant)]
        polls = {call for loop in loops for call in ast.walk(loop)}
        yield from (call for call in sleeps if call not in polls)


def _is_sleep(called: ast.expr) -> bool:
    match called:
        case ast.Attribute(value=ast.Name(id="time" | "asyncio"), attr="sleep"):
            return True
        case _:
            return False


def _is_harmless(sleep: ast.Call) -> bool:
    seconds = sleep.args[0]
    return isinstance(seconds, ast.Constant) and (
        seconds.value == 0 or float(cast(Any, seconds.value)) >= FOREVER_SECONDS
    )


def _names_touched(nodes: Iterable[ast.AST]) -> Iterator[str]:
    for node in nodes:
        match node:
            case ast.Attribute(value=value, attr=name) if not _is_self(value):
                yield name
            case ast.Call(args=[_, ast.Constant(value=str(name)), *_]) if name_called(node) in {"setattr", "getattr"}:
                yield name
            case _:
                pass


def _replaced_for_all(calls: Iterable[ast.Call]) -> Iterator[str]:
    for call in calls:
        match call:
            case ast.Call(
                func=ast.Attribute(attr="setattr"), args=[ast.Attribute(attr=str(module)), ast.Constant(value=name), *_]
            ):
                if module in sys.stdlib_module_names:
                    yield f"{module}.{name}"
            case ast.Call(func=ast.Attribute(attr="setattr"), args=[ast.Name(id="time"), ast.Constant(value=name), *_]):
                yield f"time.{name}"
            case ast.Call(func=ast.Attribute(attr="setattr"), args=[ast.Constant(value=str(name)), *_]) if (
                name.startswith("time.")
            ):
                yield name
            case _:
                pass


def _is_self(value: ast.expr) -> bool:
    return isinstance(value, ast.Name) and value.id in {"self", "cls"}


def name_called(call: ast.Call) -> str:
    """Return the last name of the called expression."""
    match call.func:
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return name
        case _:
            return ""


def _defined(nodes: Iterable[ast.AST]) -> Iterator[str]:
    for node in nodes:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                pass
            case ast.Name(id=name, ctx=ast.Store()):
                pass
            case ast.Attribute(value=value, attr=name, ctx=ast.Store()) if _is_self(value):
                pass
            case _:
                continue
        if name.startswith("_") and not name.startswith("__") and name not in {"_", "_replace"}:
            yield name
