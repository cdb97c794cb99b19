"""Images: refused values, the content hash, and the effect of the script on a machine."""

import contextlib
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
import uv
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from skyward_core.image import shell, uv_wheels
from skyward_core.image.image import Image, runtime_pins
from tests.unit.image.test_image import (  # noqa: F401 - fixtures
    FULL,
    HERE,
    machine,
    real,
)

SHELLCHECK = Path(sys.executable).with_name("shellcheck")
NO_RUNTIME = ()


def test_the_hash_is_the_same_in_another_process():
    """Processes with different hash seeds agree. The client's own versions are part of it."""
    code = "from skyward_core.image.image import Image; print(Image(pip=['b', 'a'], apt=['git'], env={'A': '1'}).content_hash())"
    names = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert names == {Image(pip=["a", "b"], apt=["git"]).content_hash(runtime=runtime_pins())}


@pytest.mark.parametrize("ttl", [0, 1, 3600])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        *({name: value} | ({"pip": FULL["pip"]} if name == "pip_indexes" else {}) for name, value in FULL.items()),
        FULL,
    ],
    ids=lambda fields: "+".join(fields) or "bare",
)
def test_the_script_passes_shellcheck(fields, ttl):
    """It holds for all combinations of fields."""
    assert _shellcheck(Image(**fields).bootstrap(ttl)) == ""


_NASTY = st.text(st.sampled_from("aZ0 '\"\\$(){}[]`;&|<>*?!#~=-\té…"), min_size=1, max_size=20)


@settings(max_examples=30, deadline=None, database=None)
@given(values=st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=30), max_size=5))
def test_variables_are_exported_literally(values):
    """bash exports exactly the given text, newlines included."""
    env = {f"V{rank}": value for rank, value in enumerate(values)}
    seen = subprocess.run(
        ["/bin/bash", "-c", f"{shell.export(Image(env=env).env)}\n/usr/bin/env -0"],
        capture_output=True,
        check=True,
        env={},
    ).stdout
    pairs = (entry.partition("=") for entry in seen.decode().split("\0"))
    assert {name: value for name, _, value in pairs if name.startswith("V")} == env


def reported(output: str) -> list[str]:
    return [line.removeprefix("::skyward ") for line in output.splitlines() if line.startswith("::skyward ")]


def test_the_script_reports_its_phases_and_exports_the_environment(machine):
    """A good run reports uv, deps and done.

    Later text in the same shell has the interpreter and the image's variables.
    """
    machine.uv()
    image = Image(pip=["six"], env={"GREETING": "it's $HOME"})
    run = machine.run(
        image.bootstrap(runtime=NO_RUNTIME)
        + 'echo "$SKYWARD_ENV_PYTHON|$(env | grep GREETING)"\nskyward_phase server\nfalse\n'
    )
    environment = machine.home / "envs" / image.content_hash(runtime=NO_RUNTIME)
    assert reported(run.stdout) == [
        "phase uv",
        "phase deps",
        "done phase=deps",
        "phase server",
        "failed phase=server exit=1 command=false",
    ]
    assert f"{environment}/bin/python|GREETING=it's $HOME" in run.stdout
    assert (environment / ".skyward-complete").exists()


@settings(
    max_examples=15,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    database=None,
)
@given(pip=st.lists(_NASTY, max_size=4))
def test_requirements_are_passed_literally(machine, pip):
    """uv receives exactly the given text, after a "--" that ends its options."""
    machine.uv()
    machine.log.write_text("")
    image = Image(pip=_acceptable(pip))
    run = machine.run(image.bootstrap(runtime=["dask==1"]), SKYWARD_HOME=str(machine.home / image.content_hash()))
    assert run.returncode == 0, run.stderr
    (install,) = (line for line in machine.called("uv") if line.startswith("[pip]"))
    assert install.partition(" [--] ")[2] == " ".join(f"[{word}]" for word in ("dask==1", *image.pip))
    shutil.rmtree(machine.home)


def test_a_second_run_does_nothing(machine):
    """If the environment is complete, the script does not search for uv and reports no phase."""
    machine.uv()
    script = Image(pip=["six"]).bootstrap(runtime=NO_RUNTIME)
    assert machine.run(script).returncode == 0
    machine.stand_in("uv", "exit 9")
    machine.log.write_text("")
    run = machine.run(script, SKYWARD_UV="/nonexistent")
    assert (run.returncode, reported(run.stdout), machine.log.read_text()) == (0, ["done phase=deps"], "")


def test_an_environment_without_its_interpreter_is_built_again(machine):
    """The environment was complete, but its interpreter has been removed."""
    machine.uv()
    image = Image()
    assert machine.run(image.bootstrap(runtime=NO_RUNTIME)).returncode == 0
    python = machine.home / "envs" / image.content_hash(runtime=NO_RUNTIME) / "bin" / "python"
    python.unlink()
    python.symlink_to("/nonexistent/python")
    run = machine.run(image.bootstrap(runtime=NO_RUNTIME))
    assert run.returncode == 0
    assert "phase deps" in reported(run.stdout)
    assert python.resolve() == Path(sys.executable).resolve()


def test_a_failed_installation_is_reported_with_its_command_and_tried_again(machine):
    """One line has the installer's exit code and command, and the script ends with that code.

    The next run starts again.
    """
    machine.uv('if [ "$1" = pip ]; then exit 7; fi')
    image = Image(pip=["no such\tthing"[:7]])
    run = machine.run(image.bootstrap(runtime=NO_RUNTIME))
    assert run.returncode == 7
    *_, failed = reported(run.stdout)
    assert failed.startswith("failed phase=deps exit=7 command=uv pip install")
    assert failed.endswith("-- no such")
    machine.uv()
    assert reported(machine.run(image.bootstrap(runtime=NO_RUNTIME)).stdout) == [
        "phase uv",
        "phase deps",
        "done phase=deps",
    ]


def test_a_killed_build_is_repaired(machine):
    """If the script is killed during an installation, the next run removes its files and builds the environment."""
    machine.uv('if [ "$1" = pip ]; then kill -KILL "$PPID"; exit 1; fi')
    image = Image(pip=["six"])
    environment = machine.home / "envs" / image.content_hash(runtime=NO_RUNTIME)
    assert machine.run(image.bootstrap(runtime=NO_RUNTIME)).returncode == -signal.SIGKILL
    assert environment.exists()
    (environment / "left-over").touch()
    machine.uv()
    assert reported(machine.run(image.bootstrap(runtime=NO_RUNTIME)).stdout)[-1] == "done phase=deps"
    assert not (environment / "left-over").exists()


def test_two_nodes_at_the_same_time_build_once(machine):
    """Two nodes of one machine need the same environment. One builds it, and the other waits and uses it."""
    gate = machine.home.parent / "gate"
    os.mkfifo(gate)
    # opening it for reading waits until another process opens it for writing
    machine.uv(f'if [ "$1" = venv ]; then : <"{gate}"; fi')
    script = Image(pip=["six"]).bootstrap(runtime=NO_RUNTIME)
    pair = [
        subprocess.Popen(
            [machine.bin / "bash", "-c", script],
            env=machine.env,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        for _ in range(2)
    ]
    try:
        for process in pair:
            assert process.stdout is not None
            assert [process.stdout.readline() for _ in range(2)] == ["::skyward phase uv\n", "::skyward phase deps\n"]
        gate.open("w").close()
        assert [process.communicate(timeout=30)[0] for process in pair] == ["::skyward done phase=deps\n"] * 2
    finally:
        for process in pair:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            process.stdout.close()
    assert [line.split()[0] for line in machine.called("uv") if not line.startswith("[--version]")] == [
        "[venv]",
        "[pip]",
    ]


def test_an_interpreter_of_another_version_is_refused(machine):
    """If SKYWARD_PYTHON has another version than the image, the bootstrap fails with that reason."""
    machine.uv()
    other = "3.7"
    run = machine.run(Image(python=other).bootstrap(runtime=NO_RUNTIME))
    assert run.returncode == 1
    assert reported(run.stdout)[-1].startswith("failed phase=deps exit=1")
    assert f"This interpreter is Python {HERE}, not {other}" in run.stderr


@pytest.mark.parametrize("interpreter", [None, "/opt/a python"])
def test_uv_gets_the_configured_interpreter(machine, interpreter):
    """It is the one in SKYWARD_PYTHON, else the version. Packages are installed only into the environment."""
    machine.uv()
    image = Image(pip_extra_index_url="https://x.org/simple")
    machine.run(image.bootstrap(runtime=["dask==1"]), **({"SKYWARD_PYTHON": interpreter} if interpreter else {}))
    environment = machine.home / "envs" / image.content_hash(runtime=["dask==1"])
    index = "[--index] [https://x.org/simple] [--index-strategy] [first-index]"
    assert [line for line in machine.called("uv") if not line.startswith("[--version]")] == [
        f"[venv] [--no-project] [--python] [{interpreter or HERE}] [{environment}]",
        f"[pip] [install] [--no-progress] [--python] [{environment}/bin/python] [--] [dask==1]",
        f"[pip] [install] [--no-progress] [--python] [{environment}/bin/python] {index} [--] [dask==1]",
    ]


def test_the_order_of_the_search_for_uv(machine):
    """The order is SKYWARD_UV, the PATH, python3's module. Otherwise it is installed from the package index, once."""
    machine.uv()
    given = machine.bin / "given uv"
    shutil.copy(machine.bin / "uv", given)
    script = Image().bootstrap(runtime=NO_RUNTIME)

    def users(**env: str) -> set[str]:
        machine.log.write_text("")
        shutil.rmtree(machine.home / "envs", ignore_errors=True)
        run = machine.run(
            script.replace(
                "printf '::skyward done", 'printf "%s|" "${skyward_uv_command[@]}"; echo\nprintf \'::skyward done'
            ),
            **env,
        )
        assert run.returncode == 0, (run.stdout, run.stderr)
        return {line.rstrip("|") for line in run.stdout.splitlines() if line.endswith("|")}

    assert users(SKYWARD_UV=str(given)) == {str(given)}
    assert users() == {"uv"}
    (machine.bin / "uv").unlink()
    machine.stand_in("python3", 'if [ "$1 $2" = "-m uv" ]; then shift 2; exec "${0%/*}/given uv" "$@"; fi')
    assert users() == {"python3|-m|uv"}
    no_module = 'case "$2 $3" in "pip --version") exit ;; "pip install") mkdir -p "${10}/bin"; ln -s "${0%/*}/given uv" "${10}/bin/uv" ;; *) exit 1 ;; esac'
    machine.stand_in("python3", no_module)
    machine.is_a("aarch64")
    installed = {str(machine.home / "uv/bin/uv")}
    assert users() == installed
    hashed = f"[--no-deps] [--only-binary] [:all:] [--require-hashes] [--target] [{machine.home}/uv.partial] [-r] [{machine.home}/uv.partial/uv.txt]"
    assert [line for line in machine.called("python3") if "[install]" in line] == [
        f"[-m] [pip] [install] [--quiet] {hashed}"
    ]
    assert (
        machine.home / "uv/uv.txt"
    ).read_text() == f"uv=={uv_wheels.VERSION} --hash=sha256:{uv_wheels.WHEELS['aarch64'].sha256}\n"
    assert users() == installed
    assert [line for line in machine.called("python3") if "[pip]" in line] == []


FETCHERS = {
    "curl": 'cp "${0%/*}/../uv.whl" "${@: -2:1}"',
    "wget": 'cp "${0%/*}/../uv.whl" "$3"',
    "python3": 'case "$2" in pip | uv) exit 1 ;; *urllib*) cp "${0%/*}/../uv.whl" "$4" ;; *) exec "$REAL_PYTHON" "$@" ;; esac',
}


@pytest.mark.parametrize("fetcher", FETCHERS)
@pytest.mark.parametrize("kind", ["x86_64", "aarch64"])
def test_without_pip_the_file_of_the_index_is_fetched_and_checked(machine, tmp_path, fetcher, kind):
    """curl, wget or Python downloads it, and unzip or Python unpacks it.

    It is the file of the machine's own architecture, and no other.
    """
    with zipfile.ZipFile(tmp_path / "uv.whl", "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr("uv-9.data/scripts/uvx", "not this one")
        wheel.writestr(
            "uv-9.data/scripts/uv",
            '#!/bin/bash\nif [ "$1" = venv ]; then mkdir -p "${@: -1}/bin"; ln -s "$REAL_PYTHON" "${@: -1}/bin/python"; fi\n',
        )
    wanted = uv_wheels.WHEELS[kind]
    machine.is_a(kind)
    machine.stand_in(fetcher, FETCHERS[fetcher])
    for tool in ("sha256sum", "chmod", "cp", *(["unzip"] if fetcher == "curl" else [])):
        (machine.bin / tool).symlink_to(str(shutil.which(tool)))
    if fetcher == "wget":
        machine.stand_in("python3", FETCHERS["python3"].replace("*urllib*", "--none"))
    script = Image().bootstrap(runtime=NO_RUNTIME)
    run = machine.run(script)
    assert run.returncode != 0
    assert "has changed" in run.stderr
    assert reported(run.stdout)[-1].startswith("failed phase=uv exit=1 command=fetch_uv")
    assert not (machine.home / "uv").exists()
    run = machine.run(script.replace(wanted.sha256, hashlib.sha256((tmp_path / "uv.whl").read_bytes()).hexdigest()))
    assert run.returncode == 0, run.stderr
    assert [line for line in machine.called(fetcher) if wanted.url in line]
    assert (machine.home / "uv/bin/uv").read_text().startswith("#!/bin/bash")


@pytest.mark.parametrize(
    ("kind", "advice"),
    [("riscv64", "no uv is known for Linux-riscv64"), ("x86_64", "neither curl, wget nor python3 to fetch it")],
)
def test_without_any_uv_the_phase_uv_fails(machine, kind, advice):
    """The machine has no uv and no program to download it. The phase uv fails once, with advice."""
    machine.is_a(kind)
    run = machine.run(Image().bootstrap(runtime=NO_RUNTIME))
    assert run.returncode == 1
    assert advice in run.stderr
    assert reported(run.stdout) == ["phase uv", f"failed phase=uv exit=1 command=fetch_uv {machine.home}/uv.partial"]


def test_the_home_is_found_without_HOME(machine):
    """cloud-init runs scripts without HOME: the user's home is used."""
    script = shell.script(shell.prelude(), 'printf "%s\\n" "$HOME" "$SKYWARD_HOME"')
    run = subprocess.run(
        [machine.bin / "bash"], input=script, env={"PATH": str(machine.bin)}, capture_output=True, text=True, check=True
    )
    home = os.path.expanduser("~") if "HOME" not in os.environ else __import__("pwd").getpwuid(os.getuid()).pw_dir
    assert run.stdout.splitlines() == [home, f"{home}/.cache/skyward"]


DPKG = 'case "${@: -1}" in have) printf "installed 1.0-1" ;; gone) printf "config-files 1.0-1" ;; *) exit 1 ;; esac'


@pytest.mark.parametrize(
    ("packages", "missing"),
    [
        (["have"], []),
        (["have=1.0-1"], []),
        (["have=2.0-1"], ["have=2.0-1"]),
        (["have", "lack", "gone"], ["lack", "gone"]),
    ],
)
def test_only_missing_packages_are_installed(machine, packages, missing):
    """Removed packages and other versions count as missing. The list of packages is updated only if one is missing."""
    machine.uv()
    for tool, body in (
        ("dpkg-query", DPKG),
        ("apt-get", 'cat >/dev/null; echo "$DEBIAN_FRONTEND" >>"$LOG.frontend"'),
        ("sudo", 'shift 2; "$@"'),
    ):
        machine.stand_in(tool, body)
    run = machine.run(Image(apt=packages).bootstrap(runtime=NO_RUNTIME))
    assert run.returncode == 0, run.stderr
    assert reported(run.stdout) == ["phase uv", *(["phase apt"] if missing else []), "phase deps", "done phase=deps"]
    calls = machine.called("apt-get")
    assert [next(word for word in ("[update]", "[install]") if word in call) for call in calls] == (
        ["[update]", "[install]"] if missing else []
    )
    if missing:
        assert calls[1].partition(" [--] ")[2] == " ".join(f"[{package}]" for package in missing)
        assert Path(f"{machine.log}.frontend").read_text().split() == ["noninteractive"]


def test_a_failed_apt_is_reported_in_its_phase(machine):
    """The report has the phase, the command and apt's exit code."""
    machine.uv()
    for tool, body in (
        ("dpkg-query", DPKG),
        ("apt-get", '[[ "$*" != *install* ]] || exit 100'),
        ("sudo", 'shift 2; "$@"'),
    ):
        machine.stand_in(tool, body)
    run = machine.run(Image(apt=["lack"]).bootstrap(runtime=NO_RUNTIME))
    assert run.returncode == 100
    assert reported(run.stdout)[-1].startswith(
        "failed phase=apt exit=100 command=sudo env DEBIAN_FRONTEND=noninteractive apt-get"
    )


# Run scripts with a ttl only with this PATH: it has no real shutdown.
@pytest.mark.parametrize(("ttl", "minutes"), [(1, 1), (60, 1), (61, 2), (3600, 60)])
def test_a_machine_is_turned_off_by_systemd(machine, ttl, minutes):
    """Seconds are rounded up to minutes, and an earlier timer is cancelled first. No process of the script is left."""
    machine.uv()
    machine.stand_in("shutdown", "exit 0")
    machine.stand_in("true", "exit 0")
    machine.stand_in("sudo", 'shift 2; "$@"')
    assert machine.run(Image().bootstrap(ttl, runtime=NO_RUNTIME)).returncode == 0
    assert machine.called("shutdown") == ["[-c]", f"[-P] [+{minutes}]"]
    assert not (machine.home / "ttl.pid").exists()


def test_without_systemd_a_timer_turns_the_machine_off(machine):
    """If shutdown has no timer, a background process waits.

    A second run replaces it, and a run with ttl 0 keeps it.
    """
    machine.uv()
    machine.stand_in("shutdown", "exit 1")
    machine.stand_in("poweroff", "exit 0")
    machine.stand_in("sudo", 'shift 2; "$@"')
    timers: list[int] = []
    try:
        for ttl in (1000, 2000, 0):
            run = machine.run(Image().bootstrap(ttl, runtime=NO_RUNTIME))
            assert run.returncode == 0, run.stderr
            timers.append(int((machine.home / "ttl.pid").read_text()))
        first, second, third = timers
        assert second == third
        assert _gone(first)
        assert b"skyward-ttl\x002000\x00" in Path(f"/proc/{second}/cmdline").read_bytes()
        assert machine.called("poweroff") == []
    finally:
        for timer in timers[-1:]:
            os.killpg(timer, signal.SIGKILL)


def test_the_timer_ends_in_a_shutdown(machine):
    """After its sleep the process shuts the machine down. If that fails it turns the power off."""
    machine.uv()
    finished = machine.home.parent / "finished"
    os.mkfifo(finished)
    machine.stand_in("sleep", "exit 0")
    machine.stand_in("shutdown", "exit 1")
    machine.stand_in("poweroff", f'echo done >"{finished}"')
    machine.stand_in("sudo", 'shift 2; "$@"')
    assert machine.run(Image().bootstrap(7, runtime=NO_RUNTIME)).returncode == 0
    assert finished.read_text() == "done\n"
    assert machine.called("sleep") == ["[7]"]
    assert machine.called("shutdown") == ["[-c]", "[-P] [+1]", "[-P] [now]"]
    assert machine.called("poweroff") == ["[-f]"]


def _bash(script: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["bash"], input=script, env=env, capture_output=True, text=True, timeout=300, check=False)


def test_a_real_environment_is_built_once(real, tmp_path):
    """The first run installs the package and the client's Dask.

    The second changes nothing, without network or cache.
    """
    image = Image(pip=["six==1.17.0"])
    environment = Path(real["SKYWARD_HOME"], "envs", image.content_hash())
    check = (
        """"$SKYWARD_ENV_PYTHON" -c 'import sys, six, dask; print(six.__version__, dask.__version__, sys.prefix)'\n"""
    )
    first = _bash(image.bootstrap() + check, real)
    assert first.returncode == 0, first.stderr
    assert reported(first.stdout) == ["phase uv", "phase deps", "done phase=deps"]
    dask = next(pin for pin in runtime_pins() if pin.startswith("dask==")).removeprefix("dask==")
    assert first.stdout.splitlines()[-1] == f"1.17.0 {dask} {environment}"

    before = _snapshot(environment)
    empty = tmp_path / "empty cache"
    started = time.monotonic()
    second = _bash(image.bootstrap() + check, {**real, "UV_OFFLINE": "1", "UV_CACHE_DIR": str(empty)})
    assert time.monotonic() - started < 30
    assert (second.returncode, reported(second.stdout)) == (0, ["done phase=deps"])
    assert second.stdout.splitlines()[-1] == first.stdout.splitlines()[-1]
    assert _snapshot(environment) == before
    assert not empty.exists()


def test_a_package_that_does_not_exist_is_reported(real):
    """Phase deps fails, with uv's explanation on stderr, and no environment is left as complete."""
    image = Image(pip=["skyward-no-such-package-exists==99"])
    run = _bash(image.bootstrap(runtime=NO_RUNTIME), real)
    assert run.returncode != 0
    assert reported(run.stdout)[:2] == ["phase uv", "phase deps"]
    assert reported(run.stdout)[2].startswith(f"failed phase=deps exit={run.returncode} command=uv pip install")
    assert "skyward-no-such-package-exists" in run.stderr
    assert not Path(real["SKYWARD_HOME"], "envs", image.content_hash(runtime=NO_RUNTIME), ".skyward-complete").exists()


def test_a_real_environment_is_repaired(real):
    """A broken interpreter and a stray file of a killed build are replaced by a working environment."""
    image = Image(pip=["six"])
    environment = Path(real["SKYWARD_HOME"], "envs", image.content_hash(runtime=NO_RUNTIME))
    (environment / "bin").mkdir(parents=True)
    (environment / "bin" / "python").write_text("half of a file")
    run = _bash(image.bootstrap(runtime=NO_RUNTIME) + '"$SKYWARD_ENV_PYTHON" -c "import six"\n', real)
    assert run.returncode == 0, run.stderr


def test_uv_is_installed_from_the_package_index(real):
    """It happens on a machine that has Python but no uv."""
    path = Path(real["SKYWARD_HOME"]).with_name("bin")
    path.mkdir()
    for tool in ("bash", "env", "flock", "mkdir", "mv", "rm", "uname"):
        (path / tool).symlink_to(str(shutil.which(tool)))
    subprocess.run(
        [uv.find_uv_bin(), "venv", "--quiet", "--seed", "--python", sys.executable, path / "venv"],
        env={**os.environ, "UV_PYTHON": ""},
        check=True,
    )
    (path / "python3").symlink_to(path / "venv" / "bin" / "python")
    (path / "python3").unlink()
    (path / "python3").write_text(f'#!/bin/bash\nexec "{path}/venv/bin/python" "$@"\n')
    (path / "python3").chmod(0o755)
    run = _bash(Image(pip=["six"]).bootstrap(runtime=NO_RUNTIME), {**real, "SKYWARD_UV": "", "PATH": str(path)})
    assert run.returncode == 0, run.stderr
    assert Path(real["SKYWARD_HOME"], "uv", "bin", "uv").exists()


def _acceptable(pip: list[str]) -> list[str]:
    return [word for word in pip if word.strip() and "\t" not in word and not word.lstrip().startswith("-")]


def _shellcheck(script: str) -> str:
    return subprocess.run(
        [SHELLCHECK, "--shell=bash", "-"], input=script, capture_output=True, text=True, check=False
    ).stdout


def _gone(pid: int) -> bool:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] == "Z":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.01)
    return False


def _snapshot(folder: Path) -> dict[str, tuple[int, int]]:
    return {
        str(path.relative_to(folder)): (path.lstat().st_ino, path.lstat().st_mtime_ns)
        for path in [folder, *folder.rglob("*")]
        if "__pycache__" not in path.parts
    }
