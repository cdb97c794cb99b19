"""`make versions`: tests the core and every plugin with the lowest and with the newest versions of their requirements.

Each combination has its own environment. With the lowest, the packages in pyproject.toml have the lowest version that
it allows, and no other package is newer than in uv.lock. A failure names the package. With `minors`, a plugin is tested
with the newest patch of each minor version of its orchestrator, and no other package is newer than in uv.lock.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import uv
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
PARTS = {
    "core": ["aws", "otel", "postgres", "prometheus"],
    "prefect": ["prefect"],
    "airflow": ["airflow"],
    "dagster": ["dagster"],
}
ALSO = {"dagster": ["dagster-webserver"]}
"""Packages that a part's smoke starts in addition to the extra's packages."""
MINOR_RELEASES = {"prefect": ("3.6", "3.7", "3.8", "3.9")}
"""The minor versions of an orchestrator that its plugin works with; those that are not tested elsewhere."""
NEWER = {
    "3.8": {"fastapi": "<0.140"},
    "3.9": {"fastapi": "<0.151", "certifi": ">=2026.10.19", "python-slugify": ">=9,<9.2"},
}
"""What a minor version needs that is newer than in uv.lock. With a newer FastAPI the server of Prefect 3.8.8 fails."""
BOUNDED = ("dask", "distributed", "prefect")
"""Packages for which pyproject.toml has an upper bound."""
SMOKE_SECONDS = 600
AT_ONCE = 2
"""Trials that run at the same time. Most of a trial is the start of programs, one after the other."""
MINORS = ("3.12", "3.13")
ENVIRONMENTS = [
    {"sys_platform": system, "platform_system": system.title(), "platform_machine": machine}
    for system in ("linux", "darwin")
    for machine in ("x86_64", "arm64", "aarch64")
]
HEAD = """\
# The versions that skyward-core was tested with on Python {minor}, made of uv.lock by `make constraints`:
#   pip install -c constraints-{minor}.txt ".[prefect]"
"""


def constraints(minor: str, root: Path = ROOT) -> str:
    """Return the text of `constraints-{minor}.txt`, including the extras and Dagster's web server."""
    return HEAD.format(minor=minor) + "".join(f"{line}\n" for line in pins(_exported(root), minor))


def _exported(root: Path = ROOT) -> list[str]:
    command = [
        "export",
        "--locked",
        "--quiet",
        "--project",
        str(root),
        "--all-extras",
        "--no-dev",
        "--group",
        "webserver",
    ]
    command += ["--no-emit-project", "--no-hashes", "--no-annotate", "--no-header"]
    return subprocess.check_output([uv.find_uv_bin(), *command], text=True).splitlines()


def pins(exported: Iterable[str], minor: str) -> list[str]:
    """Return the pins for this Python; with a marker only where another pin of the same package applies elsewhere."""
    python, held = {"python_version": minor, "python_full_version": f"{minor}.0"}, dict[str, list[Requirement]]()
    for pin in map(Requirement, exported):
        if pin.marker is None or any(pin.marker.evaluate(python | where) for where in ENVIRONMENTS):
            held.setdefault(pin.name, []).append(pin)
    return [
        f"{pin.name}{pin.specifier}" if len(its) == 1 else str(pin) for _, its in sorted(held.items()) for pin in its
    ]


@dataclass(frozen=True)
class Trial:
    """One part with one choice of versions on one Python, in its own folder."""

    part: str
    resolution: str
    python: str
    folder: Path

    def __str__(self) -> str:
        return f"{self.part}, {self.resolution} versions, Python {self.python}"

    @property
    def interpreter(self) -> Path:
        return self.folder / "venv/bin/python"


def tried(trial: Trial, wheel: Path) -> str:
    """Create the environment and run the smoke.

    Returns "" on success, else the error, with the package that is the probable cause.
    """
    trial.folder.mkdir(parents=True)
    locked = _locked()
    if failure := _installed(trial, wheel, locked):
        return failure
    log = trial.folder / "log.txt"
    code = _smoked(trial, log)
    if code == 0:
        return ""
    text = log.read_text(errors="replace")
    end = "it took too long" if code is None else f"exit code {code}"
    tail = "\n".join(f"    {line}" for line in text.splitlines()[-25:])
    return f"{end}; {blamed(text, versions(trial), locked)}\n{tail}"


def _installed(trial: Trial, wheel: Path, locked: Mapping[str, str]) -> str:
    flags = ["--resolution", "lowest-direct" if trial.resolution == "lowest" else "highest"]
    if trial.resolution != "newest":
        file = trial.folder / "limits.txt"
        file.write_text("".join(f"{line}\n" for line in limits(trial, locked)))
        flags += ["--constraints", str(file)]
    else:  # a version above the upper bound is tried: if the smoke passes, the bound may change
        beyond = trial.folder / "beyond.txt"
        beyond.write_text("".join(f"{name}\n" for name in BOUNDED))
        flags += ["--overrides", str(beyond)]
    extras = [flag for extra in PARTS[trial.part] for flag in ("--extra", extra)]
    install = ["pip", "install", "--quiet", "--python", str(trial.interpreter)]
    # a smoke imports less than half of the modules: Python compiles them when it imports them
    environ = os.environ | {"UV_COMPILE_BYTECODE": "0"}
    flags += ["--only-binary", ":all:", "--requirements", str(ROOT / "pyproject.toml")]
    for command in (
        ["venv", "--quiet", "--python", trial.python, str(trial.folder / "venv")],
        [*install, *flags, *extras, *ALSO.get(trial.part, [])],
        [*install, "--no-deps", str(wheel)],
    ):
        done = subprocess.run([uv.find_uv_bin(), *command], env=environ, capture_output=True, text=True, check=False)
        if done.returncode:
            return f"uv {' '.join(command)}: {done.stderr.strip()}"
    return ""


def limits(trial: Trial, locked: Mapping[str, str]) -> list[str]:
    """Return the constraints of a trial with the lowest versions, or with a minor version of the orchestrator."""
    if trial.resolution == "lowest":
        return [f"{name}<={version}" for name, version in locked.items()]
    newer = {trial.part: f"=={trial.resolution}.*", **NEWER.get(trial.resolution, {})}
    others = [f"{name}<={version}" for name, version in locked.items() if name not in newer]
    return [*others, *(f"{name}{bound}" for name, bound in newer.items())]


def _smoked(trial: Trial, log: Path) -> int | None:
    """Run the smoke with its own home, in a process group; return its exit code, None after a timeout."""
    home = trial.folder / "home"
    home.mkdir()
    ours = ("SKYWARD_", "PREFECT_", "AIRFLOW_", "DAGSTER_", "PYTHON", "XDG_", "VIRTUAL_ENV")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    path = f"{trial.interpreter.parent}{os.pathsep}{os.environ['PATH']}"
    environ |= {"HOME": str(home), "PATH": path, "DO_NOT_TRACK": "1", "NO_COLOR": "1"}
    command = [str(trial.interpreter), str(Path(__file__).with_name("smoke.py")), trial.part]
    with (
        log.open("wb") as file,
        subprocess.Popen(
            command, cwd=home, env=environ, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
        ) as process,
    ):
        try:
            return process.wait(SMOKE_SECONDS)
        except subprocess.TimeoutExpired:
            return None
        finally:
            process.terminate()  # it ends its servers
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


def versions(trial: Trial) -> dict[str, str]:
    """Return the versions installed in a trial's environment."""
    freeze = [uv.find_uv_bin(), "pip", "freeze", "--quiet", "--python", str(trial.interpreter)]
    output = subprocess.check_output(freeze, text=True)
    return dict(line.split("==", 1) for line in output.splitlines() if "==" in line)


def _locked() -> dict[str, str]:
    """Return the newest version that uv.lock has of each package."""
    return {pin.name: next(iter(pin.specifier)).version for pin in map(Requirement, _exported())}


def blamed(log: str, installed: Mapping[str, str], locked: Mapping[str, str]) -> str:
    """Name the packages in the last traceback of a library, the innermost first, with their versions."""
    names = {name.lower().replace("-", "_"): name for name in installed}
    missing = re.findall(r"No module named '([A-Za-z0-9_]+)", log)
    frames = re.findall(r"site-packages/([A-Za-z0-9_]+)", log)
    suspects = [
        f"{name} {installed.get(name, 'missing')} (locked: {locked.get(name)})"
        for module in dict.fromkeys([*reversed(missing), *reversed(frames)])
        if not module.startswith("skyward")
        if (name := names.get(module.lower(), module.replace("_", "-") if module in missing else ""))
    ]
    return f"look at {', '.join(suspects[:4])}" if suspects else "no package stands in a traceback"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the selected trials; return how many of those that may not fail have failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.versions", description=__doc__)
    resolutions = ["lowest", "minors", "newest"]
    parser.add_argument("resolution", nargs="*", choices=[*resolutions, "constraints"], default=resolutions)
    parser.add_argument("--python", action="append", metavar="VERSION", help="default: the one that runs this")
    parser.add_argument("--part", action="append", choices=sorted(PARTS))
    parser.add_argument("--at-once", type=int, default=AT_ONCE, metavar="NUMBER", help=f"default: {AT_ONCE}")
    parser.add_argument("--keep", action="store_true", help="leave the environments and logs where they are")
    asked = parser.parse_args(argv)
    if "constraints" in asked.resolution:
        for minor in MINORS:
            (ROOT / "skyward_core" / f"constraints-{minor}.txt").write_text(constraints(minor))
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    place = Path(tempfile.mkdtemp(prefix="skyward-versions-"))
    try:
        return _all(asked, place)
    finally:
        if not asked.keep:
            shutil.rmtree(place, ignore_errors=True)


def _all(asked: argparse.Namespace, place: Path) -> int:
    build = ["build", "--quiet", "--wheel", "--out-dir", str(place / "dist"), str(ROOT)]
    subprocess.run([uv.find_uv_bin(), *build], check=True)
    (wheel,) = (place / "dist").glob("*.whl")
    failed = 0
    for trial, failure, seconds in _outcomes(asked, list(trials(asked, place)), wheel):
        is_required = trial.resolution != "newest"
        verdict = "works" if not failure else "FAILED" if is_required else "FAILED (reported only)"
        print(f"{trial}: {verdict} after {seconds:.0f} s{f': {failure}' if failure else ''}", flush=True)
        failed += bool(failure) and is_required
    if failed:
        print(
            "Raise the lower bound of what failed in pyproject.toml, run `uv lock` and `make constraints`.", flush=True
        )
    return failed


def _outcomes(asked: argparse.Namespace, chosen: Sequence[Trial], wheel: Path) -> Iterator[tuple[Trial, str, float]]:
    """Yield each trial with its error ("" on success) and its seconds, in the given order.

    The processes of the trials end with this one: each ends its smoke first.
    """
    outcome = partial(_outcome, wheel=wheel, is_kept=asked.keep)
    if asked.at_once == 1:
        yield from map(outcome, chosen)
        return
    with multiprocessing.get_context("fork").Pool(asked.at_once) as processes:
        yield from processes.imap(outcome, chosen)


def _outcome(trial: Trial, wheel: Path, *, is_kept: bool) -> tuple[Trial, str, float]:
    began = time.monotonic()
    failure = tried(trial, wheel)
    if not is_kept:
        shutil.rmtree(trial.folder, ignore_errors=True)
    return trial, failure, time.monotonic() - began


def trials(asked: argparse.Namespace, place: Path) -> Iterator[Trial]:
    """Yield the trials that the command line asks for: resolution by resolution, and part by part."""
    for resolution in asked.resolution:
        for python in asked.python or [f"{sys.version_info.major}.{sys.version_info.minor}"]:
            for part in asked.part or PARTS:
                for wanted in MINOR_RELEASES.get(part, ()) if resolution == "minors" else (resolution,):
                    yield Trial(part, wanted, python, place / f"{wanted}-{python.replace('/', '_')}-{part}")
