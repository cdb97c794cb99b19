"""Every test asserts something, lets no time pass, and uses public names only, unless its docstring gives a reason.

The reason follows one of these words in the docstring: `Sleeps:`, `Looks inside:`. A test that asserts nothing is never
allowed.
"""

import ast
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, cast

import pytest

TESTS = Path(__file__).parent
PACKAGES = [TESTS.parent / "skyward_core", TESTS.parent / "integrations"]
FOREVER_SECONDS = 60
"""A sleep of at least this time waits to be stopped, not for time to pass."""

NOT_YET = {
    "image/test_image.py",
    "ledger/test_ledger.py",
    "ledger/test_metering.py",
    "pool/test_pool.py",
    "providers/test_aws.py",
    "providers/test_aws_fleet.py",
    "providers/test_digitalocean.py",
    "providers/test_hosts.py",
    "providers/test_runpod.py",
    "providers/test_verda.py",
    "session/test_session.py",
}
"""Files whose docstrings do not give all reasons yet; their tests assert something."""

ASSERTING = {"raises", "warns", "fail", "run_state_machine_as_test"}
"""Names of pytest and hypothesis that fail a test; those of mocks begin with `assert_`."""

NOTHING = "asserts nothing"

type Function = ast.FunctionDef | ast.AsyncFunctionDef


def test_every_test_keeps_the_rules() -> None:
    """All tests follow the rules of this file."""
    asserting, private = helpers_that_assert(trees(TESTS)), private_names()
    found = [
        f"{path.relative_to(TESTS)}:{fault}"
        for path, tree in trees(TESTS).items()
        if path.name.startswith("test_")
        for fault in faults(tree, asserting, private)
        if fault.endswith(NOTHING) or str(path.relative_to(TESTS)) not in NOT_YET
    ]
    assert found == [], "\n".join(found)


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
    ],
)
def test_a_test_that_breaks_a_rule_is_found(body: str, fault: str) -> None:
    """A test that gives its reason is not."""
    lines = "\n".join(f"    {line}" for line in body.splitlines())
    found = faults(ast.parse(f"async def test_it():\n{lines}\n"), {"look"}, {"_open"})
    assert [one.partition("test_it ")[2] for one in found] == ([fault] if fault else [])


def faults(tree: ast.Module, asserting: set[str], private: set[str]) -> list[str]:
    """Return a line for each rule that a test of a file breaks."""
    return [
        f"{test.lineno}: {test.name} {fault}"
        for test in functions(tree)
        if test.name.startswith("test_")
        for fault in _faults(test, asserting, private)
    ]


def _faults(test: Function, asserting: set[str], private: set[str]) -> Iterator[str]:
    reasons = ast.get_docstring(test) or ""
    if not asserts(test, asserting):
        yield NOTHING
    if "Sleeps: " not in reasons and any(sleeps(test)):
        yield "sleeps"
    if "Looks inside: " not in reasons and (touched := sorted(set(names_touched(test)) & private)):
        yield f"looks at {', '.join(touched)}"


def asserts(function: Function, helpers: set[str]) -> bool:
    """Return whether a statement of a function can fail a test."""
    return any(
        isinstance(node, ast.Assert)
        or (isinstance(node, ast.Call) and (name_called(node) in helpers | ASSERTING or _is_mocks(name_called(node))))
        for node in ast.walk(function)
    )


def _is_mocks(name: str) -> bool:
    return name.startswith("assert_")


def sleeps(function: Function) -> Iterator[ast.Call]:
    """Yield the calls that let time pass, except those of a loop that polls, and those that only yield the
    processor.
    """
    polls = {
        call
        for loop in ast.walk(function)
        if isinstance(loop, ast.While) and not isinstance(loop.test, ast.Constant)
        for call in ast.walk(loop)
    }
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and node not in polls and _is_sleep(node.func) and not _is_harmless(node):
            yield node


def _is_sleep(called: ast.expr) -> bool:
    return ast.unparse(called) in {"time.sleep", "asyncio.sleep"}


def _is_harmless(sleep: ast.Call) -> bool:
    seconds = sleep.args[0]
    return isinstance(seconds, ast.Constant) and (
        seconds.value == 0 or float(cast(Any, seconds.value)) >= FOREVER_SECONDS
    )


def names_touched(function: Function) -> Iterator[str]:
    """Yield the private names that a function reads from objects other than its own, or replaces there."""
    for node in ast.walk(function):
        match node:
            case ast.Attribute(value=value, attr=name) if not _is_self(value):
                yield name
            case ast.Call(args=[_, ast.Constant(value=str(name)), *_]) if name_called(node) in {"setattr", "getattr"}:
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


def functions(tree: ast.AST) -> list[Function]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def helpers_that_assert(files: dict[Path, ast.Module]) -> set[str]:
    """Return the names of functions of the tests that assert, or call one that does."""
    helpers = [one for tree in files.values() for one in functions(tree) if not one.name.startswith("test_")]
    calls = [(one.name, {name_called(call) for call in ast.walk(one) if isinstance(call, ast.Call)}) for one in helpers]
    found = {one.name for one in helpers if asserts(one, set())}
    while more := {name for name, called in calls if name not in found and called & found}:
        found |= more
    return found


def private_names() -> set[str]:
    """Return the private names that our packages define, and the tests (their fakes) do not."""
    ours = {name for package in PACKAGES for name in _defined(trees(package).values())}
    return ours - set(_defined(trees(TESTS).values()))


def _defined(files: Iterable[ast.Module]) -> Iterator[str]:
    for tree in files:
        for node in ast.walk(tree):
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


@cache
def trees(folder: Path) -> dict[Path, ast.Module]:
    """Return the source of all Python files of a folder."""
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(folder.rglob("*.py"))}
