"""`skyward run`: what is to run, what is printed, signals, and programs on a real pool of this machine."""

import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import skyward_core as sky
from skyward_core import cli
from skyward_core.concurrency import interrupts
from skyward_core.programs import ProgramOutput, read_target, run_program, spec_of
from skyward_core.worker import script as on_node
from tests.unit.programs.test_programs import (  # noqa: F401 - fixtures  # noqa: F401 - fixtures
    project,
)
from tests.waiting import wait_until

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("text", "code"), [("import sys; sys.exit(7)", 7), ("", 0), ("1/0", 1), ("import os; os.kill(os.getpid(), 9)", 137)]
)
def test_a_script_has_its_exit_code(text: str, code: int, capfd: pytest.CaptureFixture[str]) -> None:
    assert on_node.run_script(on_node.Script("a.py", {"a.py": text}, ())) == code


@pytest.mark.parametrize(
    ("command", "code"),
    [("exit 3", 3), (["nonesuch"], 127), ("./run.sh 4", 4), (["./run.sh", "0"], 0), ("kill -9 $$", 137)],
)
def test_a_command_has_its_exit_code(command: str | list[str], code: int, project: Path) -> None:
    (project / "run.sh").write_text("#!/bin/sh\nexit $1\n")
    (project / "run.sh").chmod(0o755)
    call = sky.command_call(command, files=["run.sh"])
    if code == 0:
        assert call.fn(*call.args) == 0
        return
    with pytest.raises(sky.CallCrashed, match=f"has exit code {code}") as raised:
        call.fn(*call.args)
    assert raised.value.exit_code == code


def test_programs_run_on_a_pool_of_this_machine(project: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The first exit code that is not zero stops the other node, and is that of the command."""
    (project / "tool.py").write_text("WORD = 'from tool'\n")
    (project / "train.py").write_text(
        "import os, sys, time, tool\n"
        "print(tool.WORD, *sys.argv[1:], flush=True)\n"
        "print('rank', os.environ['RANK'], file=sys.stderr)\n"
        "if os.environ['RANK'] == '0':\n    sys.exit(7)\n"
        "time.sleep(600)\n"
    )
    argv = ["run", "--provider", "local", "--nodes", "2", "--everywhere", "-q", "train.py", "--fast", "--nodes", "x"]
    assert cli.main(argv) == 7
    output = capfd.readouterr()
    assert "[node 0] from tool --fast --nodes x" in output.out.splitlines()
    assert "[node 0] rank 0" in output.err.splitlines()
    (receipt,) = sky.receipts_of(sky.Work(system="skyward", workflow="train.py"))
    assert (len(receipt["resources"]), receipt["left"]) == (2, [])


def test_a_command_runs_on_a_pool_of_this_machine(capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "--provider", "local", "-q", "--", "sh", "-c", "echo rank $RANK; exit 3"]) == 3
    assert capfd.readouterr().out == "rank 0\n"


UNANSWERED = """
import sys, threading, time
import skyward_core as sky
from skyward_core.providers.local import Local

def is_never_answered(*_):
    print("the end was requested", file=sys.stderr, flush=True)
    threading.Event().wait()

Local.terminate = is_never_answered
with sky.ComputePool(provider=sky.Local()) as pool:
    print(pool.id, flush=True)
    sky.compute(time.sleep)(600) >> pool
"""


OPENS = """
launched = Local.launch

def is_never_ready(*arguments):
    launched(*arguments)
    print("is launched", file=sys.stderr, flush=True)
    threading.Event().wait()

Local.launch = is_never_ready
with sky.ComputePool(provider=sky.Local(), on_event=lambda event: hasattr(event, "pool_id") and print(event.pool_id, flush=True)):
    raise AssertionError
"""


@pytest.mark.parametrize("while_it_opens", [False, True])
def test_a_second_ctrl_c_waits_for_no_provider(tmp_path: Path, *, while_it_opens: bool) -> None:
    """The program ends although its own request for the end of the machines is never answered. The reaper ends them.
    Each says at once what it does, and there is no bill, because what the machines cost is not known yet.
    """
    block = UNANSWERED.index("with sky.ComputePool")
    (tmp_path / "unanswered.py").write_text(UNANSWERED[:block] + OPENS if while_it_opens else UNANSWERED)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(tmp_path / "unanswered.py")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env) as program:
        assert program.stdout is not None
        assert program.stderr is not None
        pool_id = program.stdout.readline().strip()
        complaint = ""
        for words in ("is launched" if while_it_opens else "is ready", "the end was requested"):
            while words not in (line := program.stderr.readline()):
                complaint += line
                assert program.poll() is None
            program.send_signal(signal.SIGINT)
        complaint += program.stderr.read()
        assert program.wait(60) != 0
    first = interrupts.OPENING if while_it_opens else interrupts.CLOSING
    assert complaint.index(first) < complaint.index("these machines may still run") < complaint.index(interrupts.AGAIN)
    assert "skyward  done: " not in complaint
    assert complaint.count("Traceback") == 1
    wait_until(lambda: sky.receipt_of(pool_id)["left"] == [], "the reaper to end the machines")


def test_ctrl_c_ends_the_machines(project: Path) -> None:
    (project / "wait.py").write_text("import time\nprint('began', flush=True)\ntime.sleep(600)\n")
    command = [sys.executable, "-m", "skyward_core.cli", "run", "--provider", "local", "wait.py"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env) as program:
        assert program.stdout is not None
        assert program.stderr is not None
        assert program.stdout.readline() == "began\n"
        program.send_signal(signal.SIGINT)
        complaint = program.stderr.read()
        assert program.wait(60) == 130
    assert "SIGINT: stopping; the program is cancelled, and its machines end" in complaint
    assert complaint.splitlines()[-1] == "skyward: stopped"
    assert "Traceback" not in complaint
    (receipt,) = sky.receipts_of(sky.Work(system="skyward", workflow="wait.py"))
    assert receipt["left"] == []


@pytest.mark.nightly
def test_functions_run_on_a_pool_with_a_name(project: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (project / "work.py").write_text(
        "import sys\n"
        "def half(x):\n    print('halving')\n    return int(x) / 2\n"
        "def fail(x):\n    raise ValueError(f'not {x}')\n"
        "def leave(code):\n    sys.exit(int(code))\n"
    )
    spec = spec_of({"provider": "local", "name": "nightly", "keep_warm": 120})
    codes = list[int]()
    for target, arg in (("work:half", "9"), ("work:fail", "me"), ("work:leave", "3"), ("work:leave", "0")):
        output = ProgramOutput(sys.stdout, sys.stderr, has_ranks=False, least_level=logging.WARNING)
        codes.append(run_program(read_target(target, [arg]), spec, output))
    printed = capfd.readouterr()
    try:
        assert codes == [0, 1, 3, 0]
        assert printed.out.splitlines() == ["halving", "4.5"]
        assert "ValueError: not me" in printed.err
        assert "in fail" in printed.err
    finally:
        sky.release("nightly")


def test_a_plan_rents_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """It has the price and the most that it costs. Without a candidate it says why, and fails."""
    script = tmp_path / "train.py"
    script.write_text("raise SystemExit('this must not run')\n")
    priced = 'provider={"name": "local", "price_per_hour": 2}'
    assert cli.main(["run", "--dry-run", "--nodes", "2", "--max-cost", "3", "--set", priced, str(script)]) == 0
    assert capsys.readouterr().out == "2 x local/local local at $4.00 per hour; at most $3.00\n"
    assert cli.main(["run", "--dry-run", "--provider", "local", "--set", "cpu=100000", str(script)]) == cli.FAILED
    assert "skyward: local: NoCapacity" in capsys.readouterr().err
