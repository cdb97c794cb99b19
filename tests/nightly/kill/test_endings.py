"""However a program ends, no machine stays alive, and the output says what happened."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import sqlite3
import time
from collections.abc import Generator

import pytest

from skyward_core.errors import LedgerError
from skyward_core.ledger.ledger import Ledger
from tests.kill import billed
from tests.system.kill.test_endings import CALLS, INTERRUPTED, Program, program, reaped, tidied  # noqa: F401 - fixtures

WAITS = """
p = pool().open()
quick_call() >> p
say("ready")
input()
"""

pytestmark = [pytest.mark.timeout(300)]


FAILS_IN_A_CALLBACK = """
def fails(event): raise ValueError(f"no {type(event).__name__} for me")
with pool(on_event=fails) as p: print(quick_call() >> p)
"""
EXITS_IN_A_CALLBACK = """
def exits(event):
    if isinstance(event, sky.InstanceStopping): sys.exit("out of here")
with pool(on_event=exits) as p: print(quick_call() >> p)
"""
FAILS_IN_EXIT = """
class Broken(sky.ComputePool):
    def __exit__(self, *args): raise OSError("the log is full")
with Broken(provider=Billed(folder=str(HOME / "billed")), display="quiet") as p: print(quick_call() >> p)
"""


@pytest.mark.parametrize(
    ("text", "status", "words"),
    [
        ("with pool() as p:\n    quick_call() >> p\n    1 / 0", 1, "ZeroDivisionError"),
        ("p = pool().open()\nquick_call() >> p", 0, ""),
        (FAILS_IN_A_CALLBACK, 0, "ValueError: no "),
        (EXITS_IN_A_CALLBACK, 1, "out of here"),
        (FAILS_IN_EXIT, 1, "OSError: the log is full"),
        ("p = pool().open()\nquick_call() >> p\nos._exit(3)", 3, ""),
    ],
    ids=["an exception", "never closed", "a callback fails", "a callback exits", "__exit__ fails", "no clean-up runs"],
)
def test_an_end_by_the_program_itself(program: Program, text: str, status: int, words: str) -> None:
    """However Python leaves the program, the machines end before its process; after `os._exit` the reaper ends them."""
    assert program.start(text).status() == status, program.stderr
    (reaped if status == 3 else tidied)(program)
    assert words in program.stderr


OPENS = "pool().open()"


@pytest.mark.parametrize("fault", [billed.LAUNCH_HANGS, billed.ANSWER_HANGS])
@pytest.mark.parametrize("sig", [signal.SIGKILL, signal.SIGINT])
def test_the_middle_of_a_launch(program: Program, fault: str, sig: signal.Signals) -> None:
    program.lay(fault).start(OPENS).come_to(lambda: program.has_met(fault))
    assert len(list(program.bill.glob("local-*"))) == (fault == billed.ANSWER_HANGS)
    os.kill(program.pid, sig)
    assert program.status() == -sig
    if sig == signal.SIGINT:
        tidied(program)
        assert "KeyboardInterrupt" in program.stderr
    else:
        reaped(program)
    assert len(program.machines()) == (fault == billed.ANSWER_HANGS)


def test_an_interrupt_while_the_machines_come_up(program: Program) -> None:
    program.start("pool(on_event=lambda event: say(type(event).__name__)).open()").come_to(
        lambda: program.has_said("BootstrapProgress")
    )
    os.kill(program.pid, signal.SIGINT)
    assert program.status() == INTERRUPTED
    tidied(program)
    assert "KeyboardInterrupt" in program.stderr
    assert program.stdout.splitlines()[-1] == "CostFinal"


def test_two_interrupts_while_the_pool_opens(program: Program) -> None:
    program.lay(billed.ANSWER_HANGS, billed.TERMINATE_HANGS).start(OPENS).come_to(
        lambda: program.has_met(billed.ANSWER_HANGS)
    )
    os.kill(program.pid, signal.SIGINT)
    program.wait_for(lambda: program.has_met(billed.TERMINATE_HANGS), "a termination to hang")
    os.kill(program.pid, signal.SIGINT)
    assert program.status() == INTERRUPTED
    reaped(program)
    assert "KeyboardInterrupt" in program.stderr


def test_a_second_interrupt_leaves_a_termination_that_hangs_to_the_reaper(program: Program) -> None:
    program.lay(billed.TERMINATE_HANGS).start(CALLS).come_to(program.is_running_a_call)
    os.kill(program.pid, signal.SIGINT)
    program.wait_for(lambda: program.has_met(billed.TERMINATE_HANGS), "a termination to hang")
    os.kill(program.pid, signal.SIGINT)
    program.status()
    reaped(program)
    assert "KeyboardInterrupt" in program.stderr


@pytest.mark.parametrize("point", ["a call runs", "the pool opens"])
def test_a_burst_of_interrupts(program: Program, point: str) -> None:
    program.start(CALLS).come_to(
        program.is_running_a_call if point == "a call runs" else lambda: list(program.bill.glob("local-*.json"))
    )
    for _ in range(40):
        with contextlib.suppress(ProcessLookupError):
            os.kill(program.pid, signal.SIGINT)
        time.sleep(0.02)  # no wait for anything: so far apart are the keystrokes
    program.status()
    program.leaves_nothing()
    assert program.is_clean()
    assert "KeyboardInterrupt" in program.stderr


def test_a_provider_that_is_down_when_the_pool_closes(program: Program) -> None:
    program.start("""
with pool() as p:
    quick_call() >> p
    (HOME / "billed" / "is-down").touch()
""").come_to((program.bill / billed.IS_DOWN).exists)
    assert program.status() == 1
    (machine,) = program.machines()
    assert f"InstancesLeft: billed was asked to terminate {machine}" in program.stderr
    assert "ConnectionError: 503 from the landlord" in program.stderr
    assert "`skyward sweep` asks again" in program.stderr
    program.wait_for(lambda: "InstancesLeft" in program.reaper_log, "the reaper to fail")
    assert list(program.bill.glob("local-*"))
    (program.bill / billed.IS_DOWN).unlink()
    reaped(program)


FULL = "could not be read or written by the operating system. Check the disk: it may be full"
DAMAGED = "is damaged, or no ledger. Move it away"
LOCKED = "is locked: process "
NO_ROOM = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (1, resource.RLIM_INFINITY))\n"
WAITS_FOR = """
from skyward_core.session import bookkeeping
bookkeeping.LEDGER_BUSY_SECONDS = {seconds}
"""


def damage(program: Program) -> None:
    """Overwrite the ledger with junk, as a failing disk does."""
    for file in program.home.glob("ledger.db*"):
        if not file.name.endswith("-shm"):
            with file.open("r+b") as data:
                data.write(b"no database " * (file.stat().st_size // 12))


@contextlib.contextmanager
def locked(program: Program) -> Generator[None]:
    """Hold the ledger's lock, as a stopped backup process does."""
    with contextlib.closing(sqlite3.connect(program.ledger_file, isolation_level=None)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        yield


@pytest.mark.parametrize(("trouble", "words"), [("full", FULL), ("damaged", DAMAGED), ("locked", LOCKED)])
def test_a_ledger_that_cannot_be_used_when_the_pool_opens(program: Program, trouble: str, words: str) -> None:
    with contextlib.ExitStack() as until_then:
        if trouble == "damaged":
            program.ledger_file.write_bytes(b"no database " * 1000)
        elif trouble == "locked":
            Ledger(program.ledger_url).close()
            until_then.enter_context(locked(program))
        program.start(f"{NO_ROOM if trouble == 'full' else WAITS_FOR.format(seconds=0.5)}{OPENS}")
        assert program.status() == 1
    program.wait_for(lambda: not program.living(), "everything to be gone")
    (error,) = [line for line in program.stderr.splitlines() if line.startswith("skyward_core.errors.LedgerError")]
    assert words in error
    assert program.reaper_log == ""


def test_a_disk_that_is_full_while_the_pool_is_open(program: Program) -> None:
    program.start(f"{WAITS}p.close()").come_to(lambda: program.has_said("ready"))
    resource.prlimit(program.pid, resource.RLIMIT_FSIZE, (1, resource.RLIM_INFINITY))
    program.go_on()
    assert program.status() == 1
    assert not list(program.bill.glob("local-*"))
    assert FULL in program.stderr
    assert "not recorded: " in program.stderr
    reaped(program)


def test_a_ledger_that_is_damaged_while_the_pool_is_open(program: Program) -> None:
    program.start(f"{WAITS}p.close()").come_to(lambda: program.has_said("ready"))
    damage(program)
    program.go_on()
    program.status()
    program.wait_for(lambda: not program.living(), "everything to be gone")
    with pytest.raises(LedgerError, match=DAMAGED):
        Ledger(program.ledger_url)


def test_a_lock_keeps_no_machine_alive(program: Program) -> None:
    """The machines end first, however long the wait for the ledger would take; then everything is recorded."""
    program.start(f"{WAITS_FOR.format(seconds=600)}{WAITS}p.close()").come_to(lambda: program.has_said("ready"))
    with locked(program):
        program.go_on()
        program.wait_for(lambda: not list(program.bill.glob("local-*")) and not program.nodes(), "the machines to end")
    assert program.status() == 0
    tidied(program)


FORKS = """
import gc, multiprocessing

def helper(end):
    if (pid := os.fork()) == 0:
        end()
        os._exit(0)
    os.waitpid(pid, 0)

def calls():
    try:
        quick_call() >> p
    except sky.PoolClosed as error:
        say(f"a fork calls: {error}")
    say(f"a fork looks: {p.is_active}")

def forgets():
    global p
    del p
    gc.collect()

p = pool(lease_seconds=30)
signal.signal(signal.SIGTERM, lambda *_: p.terminate_now())  # the documented hook
with p:
    helper(lambda: signal.raise_signal(signal.SIGTERM))
    helper(calls)
    helper(p.close)
    helper(forgets)
    if (pid := os.fork()) == 0:
        sys.exit(0)  # leaves the block, and runs what is registered for the interpreter's end
    os.waitpid(pid, 0)
    worker = multiprocessing.get_context("fork").Process(target=quick_call)
    worker.start()
    worker.terminate()
    worker.join()
    say(f"{quick_call() >> p} by {len(p.lease.nodes)}, active: {p.is_active}")
"""


def test_forks_of_a_program_that_end(program: Program) -> None:
    assert program.start(FORKS).status() == 0, program.stderr
    *output, last = program.stdout.splitlines()
    assert any(
        "a fork calls: process" in line and "is a fork of the one that has opened the pool" in line for line in output
    )
    assert "a fork looks: False" in output
    assert last == "done by 1, active: True"
    assert len(program.machines()) == 1
    tidied(program)


SPENDS = """
import json, threading
from skyward_core.ledger import budgets
budgets.FIRST_MINUTE_SECONDS = 1.0  # so that what is to be spent is spent in seconds

events = []
with pool(price_per_hour=3600.0, max_cost={max_cost}, on_event=events.append) as p:
    for call in (long_call(str(HOME)), quick_call()):
        try:
            call >> p
        except sky.BudgetExceeded as error:
            say(f"refused: {{error}}")
say(json.dumps({{
    "cost": p.cost_final.total_cost,
    "receipt": p.receipt,
    "warned": [event.spent_usd for event in events if isinstance(event, sky.BudgetWarning)],
    "last": type(events[-1]).__name__,
}}))
"""


def test_the_money_runs_out(program: Program) -> None:
    assert program.start(SPENDS.format(max_cost=20)).status() == 0, program.stderr
    *refusals, story = program.stdout.splitlines()
    account = json.loads(story)
    assert len(refusals) == 2
    assert all("of max_cost=20" in line for line in refusals)
    assert 16 <= account["cost"] <= 20
    assert len(account["warned"]) == 1
    assert account["last"] == "CostFinal"
    assert account["receipt"] is not None
    tidied(program)


def test_the_money_of_a_stopped_program_runs_out(program: Program) -> None:
    program.start(SPENDS.format(max_cost=20)).come_to(program.is_running_a_call)
    began = min((file.stat().st_mtime for file in program.bill.glob("local-*")), default=time.time())
    os.kill(program.pid, signal.SIGSTOP)
    program.wait_for(lambda: not program.nodes(), "the machine to end itself")
    assert time.time() - began < 20 + 3  # the client may take this long to notice it on a busy machine
    assert list(program.bill.glob("local-*")), "no process was there to terminate it"
    os.kill(program.pid, signal.SIGCONT)
    assert program.status() == 0, program.stderr
    program.leaves_nothing()
    *refusals, story = program.stdout.splitlines()
    assert len(refusals) == 2
    assert json.loads(story)["receipt"] is not None
