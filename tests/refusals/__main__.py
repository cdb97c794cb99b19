"""`python -m tests.refusals [--only TEXT] [--every N] [--at-once N] SCENARIO...`: refuse each call site once.

A run without a refusal lists the sites of a scenario. Then each site gets a run in which it says no once. After each
run: no machine lives longer than its lease; the pool works, or has ended with words; each call has its result or an
error; the parts of the bill are the bill; the bill is what a watcher of the processes has seen; no thread is missing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import skyward_core as sky
from skyward_core.ledger.ledger import Ledger
from skyward_core.ledger.rows import CostBy
from skyward_core.worker.node_clocks import INSTANCE_TAG
from tests.conftest import processes_by_tag
from tests.real_hosts import owned_by, tagged
from tests.refusals.programs import LEASE_SECONDS, USD_PER_HOUR
from tests.testbed import Fleet, Host, why_not
from tests.testbed.fixtures import requirements
from tests.testbed.mirror import Mirror

ROOT = Path(__file__).parents[2]
SCENARIOS = ("own", "named", "joined", "detached", "ssh")
PROGRAM_SECONDS = 120.0
GONE_SECONDS = LEASE_SECONDS + 30.0
LOOK_SECONDS = 0.2
LEAST_USD, MOST_SECONDS = 2.5, LEASE_SECONDS + 15.0
"""The bill may be so much less than what the watcher saw, and so many seconds of a machine more: until its end is known
it is billed.
"""
STOP_SECONDS = 15.0
ALWAYS = ("thread", "fork", "COMMIT", "answer", "stop", "provider", "provider-answer")
"""Kinds that each scenario meets by itself; of the others those sites that no scenario before it had."""
PASSING = ("skyward-callbacks", "skyward-opening", "skyward-prepare", "Thread", "IO loop", "Profile")
"""Threads that may have ended, or not begun."""
WORDS = ("RuntimeError", "OSError", "PermissionError", "BlockingIOError", "ConnectionError", "TimeoutError")
"""What a user may read beside our own errors: the refusal itself, and `future.result` that has waited too long."""
REPLACED = ("skyward-collected",)
"""Threads whose work is done elsewhere once they could not be started: finalizers do it themselves."""


@dataclass
class Run:
    """What a run was, and what was wrong with it."""

    scenario: str
    site: str
    wrong: list[str] = field(default_factory=list)
    said: list[dict[str, Any]] = field(default_factory=list)
    has_met: bool = False
    seconds: float = 0.0
    stderr: str = ""

    @property
    def kind(self) -> str:
        return " ".join(self.site.split(" ", 2)[:2])

    @property
    def has_worked(self) -> bool:
        """Whether nothing of the refusal was seen by the program."""
        return bool(self.said) and all(line.get("ok", True) and "ended" not in line for line in self.said)


@dataclass(frozen=True)
class Elsewhere:
    """A host of the test bed, and the provider that has it."""

    host: Host
    provider: sky.Hosts


class Home:
    """The folder, the ledger and the machines of one run."""

    def __init__(self, folder: Path, site: str, elsewhere: Elsewhere | None) -> None:
        self.folder = folder
        self.provider = ["--provider", "local"] if elsewhere is None else []
        self.sites = folder / "sites"
        self.ledger_url = f"sqlite:///{folder / 'ledger.db'}"
        self.environ = {name: value for name, value in os.environ.items() if not name.startswith(("REFUSALS_", "SKYW"))}
        self.environ |= {
            "PYTHONPATH": str(ROOT),
            "SKYWARD_LEDGER": self.ledger_url,
            "XDG_STATE_HOME": str(folder / "state"),
        }
        if not site or "code_upload" in site:  # our package is copied once for each cache
            self.environ["XDG_CACHE_HOME"] = str(folder / "cache")
        if elsewhere is not None:
            self.environ["HOSTS"] = self.environ["SKYWARD_PROVIDER"] = json.dumps(elsewhere.provider.to_json())
        self._elsewhere = elsewhere
        self.environ["REFUSALS_STOP_SECONDS"] = str(STOP_SECONDS)
        self.refusing = self.environ | {"REFUSALS_FILE": str(self.sites), "REFUSALS_SITE": site}
        self.lives: dict[str, tuple[float, float]] = {}
        """From when to when the watcher has seen each machine."""
        self._is_over = threading.Event()
        self._watcher = threading.Thread(target=self._watch)
        self._watcher.start()

    def start(self, scenario: str, *, is_refused: bool, more: Sequence[str] = ()) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "tests.refusals.programs", scenario, *more]
        environ = self.refusing if is_refused else self.environ
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        return subprocess.Popen(command, cwd=self.folder, env=environ, text=True, start_new_session=True, **pipes)

    def pids(self, tag: str = "XDG_STATE_HOME") -> Iterator[tuple[int, str]]:
        """The processes of this run that have a tag, and its value."""
        ours = f"XDG_STATE_HOME={self.folder / 'state'}".encode()
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            with contextlib.suppress(OSError):
                environ = (entry / "environ").read_bytes().split(b"\0")
                state = (entry / "stat").read_text().rpartition(") ")[2][:1]
                if ours in environ and state not in "ZX":
                    values = [item.partition(b"=")[2] for item in environ if item.startswith(f"{tag}=".encode())]
                    yield from ((int(entry.name), value.decode()) for value in values)

    def machines(self) -> set[str]:
        """The machines that have a living process. Only one run at once is on the hosts."""
        if self._elsewhere is not None:
            there = {*tagged(self._elsewhere.host)}
            return {value for pid, value in processes_by_tag(INSTANCE_TAG) if pid in there}
        return {value for _, value in self.pids(INSTANCE_TAG)}

    def end(self) -> None:
        self._is_over.set()
        self._watcher.join()

    def _watch(self) -> None:
        while not self._is_over.wait(LOOK_SECONDS):
            now = time.monotonic()
            for machine in self.machines():
                self.lives[machine] = (self.lives.get(machine, (now, now))[0], now)


def sites_of(scenario: str, elsewhere: Elsewhere | None) -> tuple[list[str], list[str]]:
    """Return the sites that a run without a refusal reaches, and its threads."""
    run, sites = run_with(scenario, "", elsewhere=elsewhere)
    if run.wrong:
        sys.exit(f"{scenario} goes wrong without a refusal: {run.wrong}\n{run.stderr}")
    return sites, threads_of(run)


def threads_of(run: Run) -> list[str]:
    return next((line["threads"] for line in run.said if "threads" in line), [])


def run_with(
    scenario: str, site: str, threads: Sequence[str] = (), elsewhere: Elsewhere | None = None
) -> tuple[Run, list[str]]:
    """Run a scenario with this site refused once ("": none), and judge it. Return also the sites that it has noted."""
    run, began = Run(scenario, site), time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="refusals-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    home = Home(folder, site, elsewhere)
    try:
        with contextlib.ExitStack() as others:
            if scenario == "joined":
                others.enter_context(_opener(home))
            _end(home.start(scenario, is_refused=True), run)
        _judge_machines(home, run)
        _judge_calls(run, threads)
        _judge_bill(home, run)
        sites = home.sites.read_text().splitlines() if home.sites.exists() else []
        run.has_met = not site or Path(f"{home.sites}.met").exists()
    finally:
        for pid, _ in home.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)
        home.end()
        shutil.rmtree(folder, ignore_errors=True)
    run.seconds = time.monotonic() - began
    return run, sites


@contextlib.contextmanager
def _opener(home: Home) -> Generator[None]:
    """Another process that has opened the pool, and leaves it last."""
    process = home.start("named", is_refused=False, more=["--wait"])
    assert process.stdout is not None
    while "threads" not in process.stdout.readline():
        assert process.poll() is None
    try:
        yield
    finally:
        process.communicate("\n", timeout=PROGRAM_SECONDS)


def _end(process: subprocess.Popen[str], run: Run) -> None:
    try:
        stdout, run.stderr = process.communicate(timeout=PROGRAM_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        stdout, run.stderr = process.communicate()
        run.wrong.append(f"the program has not ended after {PROGRAM_SECONDS:.0f} s")
    run.said = [json.loads(line) for line in stdout.splitlines()]
    if process.returncode not in {0, 1}:
        run.wrong.append(f"the program has ended with {process.returncode}")
    if process.returncode == 1 and not any("ended" in line for line in run.said):
        run.wrong.append("the program has ended without words")


def _judge_machines(home: Home, run: Run) -> None:
    """No machine lives longer than the lease; then the ledger has nothing open, perhaps after a sweep."""
    deadline = time.monotonic() + GONE_SECONDS
    while (left := home.machines()) and time.monotonic() < deadline:
        time.sleep(LOOK_SECONDS)
    if left:
        run.wrong.append(f"left running: {sorted(left)}")
    while any(home.pids()) and time.monotonic() < deadline:  # a reaper may try for some seconds
        time.sleep(LOOK_SECONDS)
    with Ledger(home.ledger_url) as ledger:
        if not ledger.open_intents() and not ledger.pools():
            return
    time.sleep(max(0.0, LEASE_SECONDS + 1 - (time.monotonic() - deadline + GONE_SECONDS)))  # the pool's lease ends
    command = [sys.executable, "-m", "skyward_core.cli", "sweep", "--yes", *home.provider, "--min-age", "1"]
    done = subprocess.run(command, env=home.environ, capture_output=True, text=True, check=False, timeout=120)
    with Ledger(home.ledger_url) as ledger:
        if ledger.open_intents() or ledger.pools():
            run.wrong.append(f"open in the ledger after a sweep: {done.stdout} {done.stderr}")


def _judge_calls(run: Run, threads: Sequence[str]) -> None:
    for line in run.said:
        if line.get("ok") is False:
            run.wrong.append(f"wrong result of {line['call']}")
        raised = line.get("raised") or line.get("ended")
        if raised and not (line["message"] and (line["is_ours"] or raised in WORDS)):
            run.wrong.append(f"{line.get('call', 'the pool')} raised {raised} without words: {line['message']}")
    if threads and run.has_worked and (missing := set(threads) - set(threads_of(run)) - {*PASSING, *REPLACED}):
        run.wrong.append(f"missing threads: {sorted(missing)}")


def _judge_bill(home: Home, run: Run) -> None:
    """The parts of the bill are the bill, and the bill is what the watcher has seen."""
    with Ledger(home.ledger_url) as ledger:
        sums = {by: sum(row.cost_usd for row in ledger.cost_rows(by)) for by in CostBy}
        pools = ledger.pools(include_ended=True)
    bill = float(sums[CostBy.POOL])
    if len(set(sums.values())) > 1:
        run.wrong.append(
            f"the parts of the bill are not the bill: { {by.value: str(usd) for by, usd in sums.items()} }"
        )
    rate = USD_PER_HOUR / 3600
    seen = sum(until - since for since, until in home.lives.values()) * rate
    # a machine is billed from its request on, and the process may have been stopped just before it
    most_seconds = MOST_SECONDS + (STOP_SECONDS if run.kind.endswith(" stop") else 0.0)
    most = seen + most_seconds * rate * max(1, len(home.lives))
    if not seen - LEAST_USD <= bill <= most:
        run.wrong.append(f"the bill is {bill:.2f} USD, the watcher has seen {seen:.2f} of {len(pools)} pools")


@contextlib.contextmanager
def elsewhere_of(scenario: str) -> Generator[Elsewhere | None]:
    """A host of the test bed, for the scenario that needs one."""
    if scenario != "ssh":
        yield None
        return
    if reason := why_not():
        sys.exit(f"this machine cannot run hosts: {reason}")
    with Fleet() as fleet, Mirror(fleet.network.gateway, requirements()) as mirror:
        host = fleet.create()
        mirror.configure(host)
        with tempfile.TemporaryDirectory() as folder:
            provider = owned_by([host], Path(folder) / "known_hosts")
            yield Elsewhere(host, provider.model_copy(update={"price_per_hour": USD_PER_HOUR}))
        host.crash()


def table(runs: Sequence[Run]) -> str:
    """Sites and runs of each kind, and how they have ended."""
    lines = ["| what says no once | sites | met | pool works | ended with words | wrong |", "| --- |" + " --- |" * 5]
    for kind in sorted({run.kind for run in runs}):
        some = [run for run in runs if run.kind == kind]
        worked = sum(run.has_worked for run in some)
        wrong = sum(bool(run.wrong) for run in some)
        met = sum(run.has_met for run in some)
        lines.append(f"| {kind} | {len(some)} | {met} | {worked} | {len(some) - worked} | {wrong} |")
    return "\n".join(lines)


def sites_to_refuse(scenario: str, sites: Sequence[str], seen: set[str], only: str, every: int) -> list[str]:
    """Return the sites of a scenario that get a run."""
    new = [site for site in sites if site not in seen or site.split(" ", 2)[1] in ALWAYS]
    seen.update(sites)
    return [site for site in new if only in site][::every]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.refusals", description=__doc__)
    parser.add_argument("scenarios", nargs="*", default=SCENARIOS)
    parser.add_argument("--only", default="", help="sites that have this text")
    parser.add_argument("--every", type=int, default=1, help="one of so many sites")
    parser.add_argument("--at-once", type=int, default=2)
    options = parser.parse_args()
    runs, seen, began = list[Run](), set[str](), time.monotonic()
    for scenario in options.scenarios:
        with elsewhere_of(scenario) as elsewhere, ThreadPoolExecutor(1 if elsewhere else options.at_once) as pool:
            sites, threads = sites_of(scenario, elsewhere)
            chosen = sites_to_refuse(scenario, sites, seen, options.only, options.every)
            print(f"{scenario}: {len(sites)} sites, {len(chosen)} runs", flush=True)
            started = [pool.submit(run_with, scenario, site, threads, elsewhere) for site in chosen]
            for future in as_completed(started):
                run, _ = future.result()
                runs.append(run)
                if run.wrong or not run.has_met:
                    print(f"{run.scenario}: {run.site}: {run.wrong or 'not met'} ({run.seconds:.0f} s)", flush=True)
                if run.wrong:
                    print(json.dumps(run.said), run.stderr[-4000:], sep="\n", flush=True)
    print(table(runs))
    ways = Counter(run.scenario for run in runs)
    print(f"{len(runs)} runs in {time.monotonic() - began:.0f} s: {dict(ways)}")
    return 1 if any(run.wrong for run in runs) else 0


if __name__ == "__main__":
    sys.exit(main())
