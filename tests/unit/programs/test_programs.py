"""`skyward run`: what is to run, what is printed, signals, and programs on a real pool of this machine."""

import importlib
import io
import logging
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import skyward_core as sky
from skyward_core import cli
from skyward_core.programs import Interrupted, Program, ProgramOutput, interruptible, read_target, spec_of
from skyward_core.worker.script import Command


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working directory, with its own path of modules and without settings."""
    folder = tmp_path / "project"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("SKYWARD_PROVIDER", "SKYWARD_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SKYWARD_LEDGER", f"sqlite:///{tmp_path / 'ledger.db'}")
    before = set(sys.modules)
    yield folder
    for name in set(sys.modules) - before:
        if str(folder) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def test_a_script_brings_the_modules_that_it_imports(project: Path) -> None:
    (project / "tool").mkdir()
    (project / "tool/__init__.py").write_text("from tool import part\n")
    (project / "tool/part.py").write_text("def f():\n    import deep\n")
    (project / "deep.py").write_text("X = 1\n")
    (project / "other.py").write_text("")
    (project / "train.py").write_text("import os, tool\n")
    program = read_target("train.py", ["--epochs", "3"])
    (script,) = program.call.args
    assert (program.name, program.is_script, script.args) == ("train.py", True, ("--epochs", "3"))
    assert script.files.keys() == {"train.py", "tool/__init__.py", "tool/part.py", "deep.py"}


def test_a_script_finds_the_modules_of_its_own_folder_first(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `python script.py` does: also where this process has imported others of these names, as a DAG file has."""
    for folder in (project, project / "job"):
        (folder / "parts").mkdir(parents=True)
        (folder / "parts/__init__.py").touch()
        (folder / "parts/part.py").write_text(f"X = {folder.name!r}\n")
        (folder / "labels.py").write_text(f"X = {folder.name!r}\n")
    (project / "shared.py").touch()
    (project / "job/train.py").write_text("import labels, parts.part, shared\n")
    monkeypatch.syspath_prepend(project)
    for name in ("labels", "parts.part"):
        assert importlib.import_module(name).X == "project"
    before = [*sys.path]
    (script,) = sky.script_call("job/train.py").args
    assert script.files.keys() == {"labels.py", "parts/__init__.py", "parts/part.py", "shared.py", "train.py"}
    assert (script.files["labels.py"], script.files["parts/part.py"]) == ("X = 'job'\n", "X = 'job'\n")
    assert sys.path == before, "the path of the process that makes the call is left as it was"


def test_files_of_a_call_lie_beside_its_script_or_are_where_the_command_begins(project: Path) -> None:
    (project / "data/__pycache__").mkdir(parents=True)
    (project / "data/a.bin").write_bytes(b"\xff")
    (project / "data/__pycache__/a.pyc").write_bytes(b"")
    (project / "run.sh").write_text("echo")
    (project / "run.sh").chmod(0o755)
    (project / "train.py").write_text("")
    (project / "sub").mkdir()
    (project / "sub/main.py").write_text("")
    (project / "sub/c.txt").write_text("c")
    (inner,) = sky.script_call("sub/main.py", files=["sub/c.txt", "run.sh"]).args
    assert [place for place, _, _ in inner.others] == ["c.txt", "run.sh"]
    (script,) = sky.script_call("train.py", ["1"], files=["data", project / "run.sh"], folder=project).args
    assert (script.name, script.args, script.files.keys()) == ("train.py", ("1",), {"train.py"})
    assert script.others == (("data/a.bin", b"\xff", False), ("run.sh", b"echo", True))
    (command,) = sky.command_call("./run.sh | tee log\nrm log", files=["."], folder=project).args
    assert (command.name, command.argv) == ("./run.sh | tee log", ("bash", "-c", "./run.sh | tee log\nrm log"))
    assert [place for place, _, _ in command.files] == [
        *("data/a.bin", "run.sh", "sub/c.txt", "sub/main.py", "train.py")
    ]
    assert sky.command_call(["ls", "-l"]).args == (("ls", ("ls", "-l"), ()),)


def test_files_that_cannot_travel_with_a_call_are_refused(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(sky.BadRequest, match=r"files= has 'nonesuch', and there is no file or folder .*/nonesuch on"):
        sky.command_call("true", files=["nonesuch"])
    with pytest.raises(sky.BadRequest, match="write a text for bash, or a list"):
        sky.command_call([])
    (project / "large").write_bytes(b"x" * 2000)
    monkeypatch.setattr("skyward_core.programs.MOST_BYTES", 1000)
    with pytest.raises(sky.BadRequest, match="travel with each call: name fewer, include them in the image"):
        sky.command_call("true", files=["large"])


def test_a_function_is_found_in_the_working_directory(project: Path) -> None:
    (project / "work.py").write_text(
        "import skyward_core as sky\n@sky.compute\ndef f(x): return x\nclass C:\n    g = staticmethod(lambda x: x)\n"
    )
    program = read_target("work:f", ["1"])
    assert (program.name, program.is_script, program.call.args) == ("work:f", False, ("1",))
    assert read_target("work:C.g", ["2"]).call.args == ("2",)


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("nonesuch.py", "cannot be read"),
        ("nonesuch", "is no file here"),
        ("nonesuch:f", "cannot be imported from"),
        ("work:", "names no function"),
        ("work:g", "has no 'g'"),
        ("work:X", "is no function: it is int"),
        ("work:h", "missing 1 required positional argument: 'x': write the arguments behind work:h"),
        ("broken:f", "SyntaxError"),
        ("broken.py", "is no Python program"),
        ("failing:f", "ZeroDivisionError: division by zero"),
        ("bytes.py", "is no Python program"),
    ],
)
def test_a_wrong_target_is_refused_before_anything_is_rented(project: Path, target: str, words: str) -> None:
    (project / "work.py").write_text("X = 1\ndef f(): pass\ndef h(x): pass\n")
    (project / "broken.py").write_text("def\n")
    (project / "failing.py").write_text("1 / 0\n")
    (project / "bytes.py").write_bytes(b"\xff\xfe")
    with pytest.raises(sky.BadRequest, match=words):
        read_target(target, [])


def test_a_spec_has_the_settings_below_the_options(project: Path) -> None:
    (project / "skyward.toml").write_text(
        "provider = 'local'\nnodes = 2\ntimeout = 50\n[profiles.large]\nnodes = 8\n[pools.nightly]\nconcurrency = 3\n"
    )
    spec = spec_of({"name": "nightly", "timeout": 60}, profile="large")
    assert (spec.name, spec.nodes, spec.concurrency, spec.timeout, spec.display) == ("nightly", 8, 3, 60, "quiet")
    with pytest.raises(sky.BadRequest, match="did you mean 'nodes'"):
        spec_of({"node": 3})


def line(text: str, **more: Any) -> sky.LogLine:
    return sky.LogLine(1, "i-1", text, 0.0, **{"call_id": "c", **more})


@pytest.mark.parametrize(("has_ranks", "first"), [(False, "result"), (True, "[node 1] result")])
def test_lines_of_the_program_go_to_their_streams(has_ranks: bool, first: str) -> None:
    out, err = io.StringIO(), io.StringIO()
    output = ProgramOutput(out, err, has_ranks=has_ranks, least_level=logging.WARNING)
    output(line("result"))
    output(line("of another node of a broadcast", is_shown=False))
    output(line("complaint", stream="stderr"))
    output(line("a log record", level=logging.INFO))
    output(sky.BootstrapCompleted("i-1"))
    output(sky.InstanceLost("i-1", 1, "reclaimed"))
    mark = "[node 1] " if has_ranks else ""
    assert out.getvalue() == f"{first}\n"
    lost = "skyward: node 1 is lost: reclaimed"
    assert err.getvalue().splitlines() == [f"{mark}complaint", f"{mark}a log record", lost]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_stops_and_the_next_does_not_wait(number: signal.Signals) -> None:
    messages: list[str] = []
    left: list[str] = []
    before = signal.getsignal(number)
    with (
        pytest.raises(Interrupted) as again,
        interruptible(messages.append, lambda: left.append("left"), "its machines end"),
    ):
        try:
            signal.raise_signal(number)
        except Interrupted as first:
            assert (first.exit_code, left) == (128 + number, [])
            signal.raise_signal(number)
    assert (again.value.exit_code, left) == (128 + number, ["left"])
    assert messages[0].startswith(f"{number.name}: stopping; the program is cancelled, and its machines end")
    assert messages[1].startswith(f"{number.name} again: nothing is waited for")
    assert signal.getsignal(number) is before


@pytest.mark.parametrize(
    ("words", "argv"),
    [
        (["--", "nvidia-smi", "-L"], ("nvidia-smi", "-L")),
        (["--nodes", "2", "--", "./a.py"], ("./a.py",)),
        (["--", "echo", "--", "x"], ("echo", "--", "x")),
        (["a.py"], None),
        (["a.py", "--", "x"], None),
        (["--nodes", "2", "a.py", "--"], None),
    ],
)
def test_what_follows_two_dashes_is_a_command(
    project: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], argv: tuple[str, ...] | None
) -> None:
    """Two dashes behind a script are an argument of the script."""
    (project / "a.py").write_text("")
    found: list[Program] = []
    run = "skyward_core.programs.run_program"
    monkeypatch.setattr(run, lambda program, spec, output, everywhere: found.append(program) or 0)
    assert cli.main(["run", "--provider", "local", *words]) == 0
    ((sent,),) = (program.call.args for program in found)
    assert (sent.argv if isinstance(sent, Command) else None) == argv
    if argv is None:
        assert sent.args == tuple(words[words.index("a.py") + 1 :])


def test_options_become_settings(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (project / "a.py").write_text("")
    found: list[sky.PoolSpec] = []
    run = "skyward_core.programs.run_program"
    monkeypatch.setattr(run, lambda program, spec, output, everywhere: found.append(spec) or 0)
    line = ["run", "--provider", "local", "--pip", "numpy", "--env", "A=b=c", "--secret", "HOME", "--max-cost", "2"]
    line += ["--max-hourly-cost", "1.5", "--accelerator", "8xH100", "--accelerator", "8xA100"]
    assert cli.main([*line, "--set", "nodes=[1, 3]", "--set", 'image={"apt": ["git"]}', "a.py"]) == 0
    (spec,) = found
    assert (spec.nodes, spec.image.pip, spec.image.apt, spec.max_cost) == ((1, 3), ("numpy",), ("git",), 2.0)
    assert (spec.max_hourly_cost, spec.accelerator_words) == (1.5, "8 x H100 80GB, else 8 x A100 80GB")
    assert cli.main(["run", "--provider", "local", "--accelerator", "H100", "a.py"]) == 0
    assert found[1].accelerator == sky.accelerators.H100(), "one is no alternative"
    assert (dict(spec.env or {}), [*(spec.secrets or ())], spec.provider) == ({"A": "b=c"}, ["HOME"], sky.Local())
    for wrong in (["--set", "node=1"], ["--set", "image=x", "--pip", "y"], ["--set", "nodes=many"]):
        assert cli.main(["run", *wrong, "a.py"]) == cli.FAILED
    with pytest.raises(SystemExit):
        cli.main(["run", "--env", "no assignment", "a.py"])
