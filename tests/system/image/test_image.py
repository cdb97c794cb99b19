"""The script of an image on a machine: with fakes for uv, apt and shutdown, and with real tools."""

import contextlib
import dataclasses
import gzip
import hashlib
import os
import pwd
import shutil
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import uv
from hypothesis import given, settings
from hypothesis import strategies as st

from skyward_core.image import shell
from skyward_core.image import shell as uv_wheels
from skyward_core.image.image import Image, make_work, runtime_pins
from skyward_core.image.volume import S3Volume, mount_volumes
from skyward_core.transport import code_upload
from tests.waiting import wait_until

HERE = "{}.{}".format(*sys.version_info)
DONE = ["phase uv", "phase deps", "done phase=deps"]
FULL = {
    "pip": ["torch>=2.9; python_version<'3.15'", "pkg[extra]==1.*", "a @ https://x.org/a.whl#sha256=0"],
    "pip_extra_index_url": "https://download.pytorch.org/whl/cu128?a=$(id)",
    "pip_indexes": {"https://pins.example.org/a'b?c=$(id)": ["pkg"]},
    "apt": ["ffmpeg", "g++", "git=1:2.39.5-0+deb12u2"],
    "env": {"A": 'it\'s "quoted" $(id) `id` \\ !', "PEM": "-----\nabc\n-----", "EMPTY": "", "_x9": "~/*"},
}
MAKE_ENVIRONMENT = 'if [ "$1" = venv ]; then mkdir -p "${@: -1}/bin"; ln -s "$REAL_PYTHON" "${@: -1}/bin/python"; fi'


def run_bash(script: str, env: dict[str, str], bash: str = "bash") -> subprocess.CompletedProcess[str]:
    return subprocess.run([bash], input=script, env=env, capture_output=True, text=True, timeout=120, check=False)


class Machine:
    """A home for the script, and a separate PATH with a few real tools and the fakes of a test."""

    def __init__(self, root: Path) -> None:
        self.home, self.bin, self.log = root / "sky home", root / "bin", root / "log"
        self.bin.mkdir()
        self.log.touch()
        self.link("bash", "sh", "cat", "env", "flock", "grep", "kill", "mkdir", "mv")
        self.link("rm", "sleep", "setsid", "touch", "ln", "uname")
        self.env = {
            "PATH": str(self.bin),
            "HOME": str(root),
            "SKYWARD_HOME": str(self.home),
            "LOG": str(self.log),
            "REAL_PYTHON": sys.executable,
        }

    def link(self, *tools: str) -> None:
        for tool in tools:
            (self.bin / tool).symlink_to(str(shutil.which(tool)))

    def stand_in(self, name: str, body: str) -> None:
        """Put a command on the PATH. It logs its arguments, each in brackets, and then runs `body`."""
        path = self.bin / name
        path.unlink(missing_ok=True)
        words = f"""words=$(printf ' [%s]' "$@")\nprintf '%s\\n' "{name}$words" >>"$LOG\""""
        path.write_text(f"#!{self.bin}/bash\n{words}\n{body}\n")
        path.chmod(0o755)

    def is_a(self, kind: str) -> None:
        """Set the output of `uname`."""
        self.stand_in("uname", f"case $1 in -s) echo Linux ;; -m) echo {kind} ;; esac")

    def uv(self, body: str = "") -> None:
        """Put a uv on the PATH. After `body` it creates an environment with a link to this interpreter."""
        self.stand_in("uv", f"{body}\n{MAKE_ENVIRONMENT}")

    def run(self, script: str, **env: str) -> subprocess.CompletedProcess[str]:
        return run_bash(script, self.env | env, f"{self.bin}/bash")

    def build(self, image: Image, ttl: int = 0, **env: str) -> subprocess.CompletedProcess[str]:
        """Run the script of an image without the packages that a node needs."""
        return self.run(image.bootstrap(ttl, runtime=()), **env)

    def environment(self, image: Image) -> Path:
        return self.home / "envs" / image.content_hash(runtime=())

    def called(self, name: str) -> list[str]:
        return [line.removeprefix(f"{name} ") for line in self.log.read_text().splitlines() if line.split()[0] == name]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def reported(output: str) -> list[str]:
    return [line.removeprefix("::skyward ") for line in output.splitlines() if line.startswith("::skyward ")]


def prepared(machine: Machine, image: Image, node: str) -> subprocess.CompletedProcess[str]:
    """Make the working directory of a node's calls, after the packages."""
    folder = machine.home / "instances" / node
    folder.mkdir(parents=True, exist_ok=True)
    archive = "".join(f"'{code_upload.shipped_file(one)}'" for one in image.included)
    script = image.bootstrap(runtime=()) + make_work(image, archive, image.env) + "\necho in $PWD\n"
    return machine.run(script, SKYWARD_INSTANCE_DIRECTORY=str(folder), TOKEN="tok")


def test_commands_run_once_on_a_machine_where_the_included_files_are(machine: Machine, tmp_path: Path) -> None:
    """Each node gets a copy of what they have made, and may change it. They run again if a command or a file is another
    one, and the environment's programs come first.
    """
    machine.link("cp", "tar", "gzip", "wc", "tr")
    machine.uv()
    (tmp_path / "words.txt").write_text("one two\n")
    commands = ["tr a-z A-Z <words.txt >upper.txt; command -v python", 'echo "ran with ${TOKEN}" >>"$LOG"']
    image = Image(includes=[str(tmp_path / "words.txt")], shell=commands)
    done = [prepared(machine, image, node) for node in ("first", "second")]
    work = [machine.home / "instances" / node / "work" for node in ("first", "second")]
    assert [run.stdout.splitlines()[-1] for run in done] == [f"in {one}" for one in work], done[0].stderr
    assert [sorted(path.name for path in one.iterdir()) for one in work] == [["upper.txt", "words.txt"]] * 2
    assert (work[1] / "upper.txt").read_text() == "ONE TWO\n"
    assert machine.called("ran") == ["with tok"]
    assert f"{machine.environment(image)}/bin/python" in done[0].stdout.splitlines()
    assert reported(done[0].stdout)[-1] == "phase shell"
    (work[0] / "upper.txt").write_text("changed by a call")
    prepared(machine, Image(includes=[str(tmp_path / "words.txt")], shell=[*commands, "true"]), "third")
    (tmp_path / "words.txt").write_text("three\n")
    prepared(machine, Image(includes=[str(tmp_path / "words.txt")], shell=commands), "fourth")
    assert (machine.home / "instances/fourth/work/upper.txt").read_text() == "THREE\n"
    assert machine.called("ran") == ["with tok"] * 3
    assert machine.log.read_text().count("[venv]") == 1, "the packages are the same"


def test_commands_run_again_for_another_value_of_a_variable_that_they_name(machine: Machine) -> None:
    """Not for a new token, and not for a variable that they do not name."""
    machine.link("cp")
    machine.uv()
    command = 'echo "ran ${MODEL} with $HUB_TOKEN" >>"$LOG"'
    first = {"MODEL": "small", "HUB_TOKEN": "a", "RATE": "1"}
    for number, changed in enumerate(({}, {"HUB_TOKEN": "b"}, {"RATE": "2"}, {"MODEL": "large"}, {})):
        prepared(machine, Image(shell=[command], env=first | changed), f"node-{number}")
    assert machine.called("ran") == ["small with a", "large with a"]


def test_a_command_that_fails_is_reported_and_runs_again(machine: Machine) -> None:
    """With its exit code; also the first of a pipe, and of several lines. It begins in an empty directory."""
    machine.link("cp", "ls", "wc")
    machine.uv()
    image = Image(shell=["echo it begins", 'ls; touch left; [ -e "$HOME/mended" ] || (exit 7) | cat\necho not reached'])
    failed = prepared(machine, image, "first")
    assert failed.returncode == 7
    said = failed.stdout.splitlines()
    assert "it begins" in said
    assert reported(failed.stdout)[-1].startswith("failed phase=shell exit=7 command=ls; touch left;")
    assert "not reached" not in said
    (machine.home.parent / "mended").touch()
    again = prepared(machine, image, "first")
    assert (again.returncode, "left" in again.stdout.splitlines()) == (0, False)
    assert prepared(machine, Image(), "bare").stdout.splitlines()[-1].endswith("/instances/bare/work")


# ── the text ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_hash_is_the_same_in_another_process() -> None:
    """Processes with different hash seeds agree. The client's own versions are part of it."""
    image = "Image(pip=['b', 'a'], apt=['git'], env={'A': '1'})"
    code = f"from skyward_core.image.image import Image; print({image}.content_hash())"
    expected = Image(pip=["a", "b"], apt=["git"]).content_hash(runtime=runtime_pins())
    for seed in ("1", "2"):
        env = os.environ | {"PYTHONHASHSEED": seed}
        assert subprocess.check_output([sys.executable, "-c", code], env=env, text=True) == f"{expected}\n"


@pytest.mark.parametrize(("fields", "ttl"), [({}, 0), (FULL, 1), (FULL, 3600)])
def test_the_script_passes_shellcheck(fields: dict, ttl: int) -> None:
    volumes = [
        S3Volume(mount_path="/it's $HOME", bucket="a.b.c", prefix="`x`"),
        S3Volume(mount_path="/out", bucket="out", read_only=False, region="eu-west-1"),
    ]
    image = Image(**fields, shell=["echo 'a $b'"] if fields else ())
    script = (
        image.bootstrap(ttl) + mount_volumes(volumes if fields else []) + "\n" + make_work(image, "a", image.env) + "\n"
    )
    command = [Path(sys.executable).with_name("shellcheck"), "--shell=bash", "-"]
    assert subprocess.run(command, input=script, capture_output=True, text=True, check=False).stdout == ""


@settings(max_examples=30, deadline=None, database=None)
@given(
    values=st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=30), max_size=5),
    path=st.text(st.characters(min_codepoint=32, max_codepoint=0x2FF).filter(str.isprintable), min_size=1, max_size=20),
)
def test_variables_and_paths_reach_bash_literally(values: list[str], path: str) -> None:
    env = {f"V{rank}": value for rank, value in enumerate(values)}
    path = path.replace("..", "")
    volume = S3Volume(mount_path=f"/x{path}", bucket="my-bucket", prefix=f"x{path}", endpoint_url="http://x.org:1")
    call = mount_volumes([volume]).splitlines()[-1]
    script = f'{shell.export(Image(env=env).env)}\nskyward_volume() {{ printf "%s\\0" "$@"; }}\n{call}\n/usr/bin/env -0'
    words = subprocess.check_output(["/bin/bash", "-c", script], env={}).decode().split("\0")
    assert words[:6] == [volume.mount_path, "ro", "my-bucket", volume.prefix, "http://x.org:1", ""]
    pairs = (word.partition("=") for word in words[6:])
    assert {name: value for name, _, value in pairs if name.startswith("V")} == env


# ── with fakes for uv, apt and shutdown ──────────────────────────────────────────────────────────────────────────────


def test_the_script_reports_its_phases_and_exports_the_environment(machine: Machine) -> None:
    """Later text in the same shell has the interpreter and the image's variables."""
    machine.uv()
    image = Image(pip=["six"], env={"GREETING": "it's $HOME"})
    then = 'echo "$SKYWARD_ENV_PYTHON|$(env | grep GREETING)"\nskyward_phase server\nfalse\n'
    run = machine.run(image.bootstrap(runtime=()) + then)
    assert reported(run.stdout) == [*DONE, "phase server", "failed phase=server exit=1 command=false"]
    assert f"{machine.environment(image)}/bin/python|GREETING=it's $HOME" in run.stdout
    assert (machine.environment(image) / ".skyward-complete").exists()


def test_requirements_are_passed_literally(machine: Machine) -> None:
    machine.uv()
    image = Image(pip=["it's", '"a b"', "$(id)`id`", "a;b&c|d", "{a,b}*?[!x]", "#~é…\\"])
    assert machine.run(image.bootstrap(runtime=["dask==1"])).returncode == 0
    (install,) = (line for line in machine.called("uv") if line.startswith("[pip]"))
    assert install.partition(" [--] ")[2] == " ".join(f"[{word}]" for word in ("dask==1", *image.pip))


def test_an_environment_without_its_interpreter_is_built_again(machine: Machine) -> None:
    machine.uv()
    assert machine.build(Image()).returncode == 0
    python = machine.environment(Image()) / "bin" / "python"
    python.unlink()
    python.symlink_to("/nonexistent/python")
    assert reported(machine.build(Image()).stdout) == DONE
    assert python.resolve() == Path(sys.executable).resolve()


def test_a_failed_installation_is_reported_with_its_command_and_tried_again(machine: Machine) -> None:
    machine.uv('if [ "$1" = pip ]; then exit 7; fi')
    image = Image(pip=["no such"])
    run = machine.build(image)
    assert run.returncode == 7
    *_, failed = reported(run.stdout)
    assert failed.startswith("failed phase=deps exit=7 command=uv pip install")
    assert failed.endswith("-- no such")
    machine.uv()
    assert reported(machine.build(image).stdout) == DONE


def test_a_killed_build_is_repaired(machine: Machine) -> None:
    machine.uv('if [ "$1" = pip ]; then kill -KILL "$PPID"; exit 1; fi')
    image = Image(pip=["six"])
    assert machine.build(image).returncode == -signal.SIGKILL
    (machine.environment(image) / "left-over").touch()
    machine.uv()
    assert reported(machine.build(image).stdout)[-1] == "done phase=deps"
    assert not (machine.environment(image) / "left-over").exists()


def test_two_nodes_at_the_same_time_build_once(machine: Machine) -> None:
    gate = machine.home.parent / "gate"
    os.mkfifo(gate)
    # opening it for reading waits until another process opens it for writing
    machine.uv(f'if [ "$1" = venv ]; then : <"{gate}"; fi')
    argv = [machine.bin / "bash", "-c", Image(pip=["six"]).bootstrap(runtime=())]
    start = {"env": machine.env, "stdout": subprocess.PIPE, "text": True, "start_new_session": True}
    pair = [subprocess.Popen(argv, **start) for _ in range(2)]
    try:
        for process in pair:
            assert [process.stdout.readline() for _ in range(2)] == ["::skyward phase uv\n", "::skyward phase deps\n"]
        gate.open("w").close()
        assert [process.communicate(timeout=60)[0] for process in pair] == ["::skyward done phase=deps\n"] * 2
    finally:
        for process in pair:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            process.stdout.close()
    calls = [line.split()[0] for line in machine.called("uv") if not line.startswith("[--version]")]
    assert calls == ["[venv]", "[pip]"]


def test_an_interpreter_of_another_version_is_refused(machine: Machine) -> None:
    machine.uv()
    run = machine.build(Image(python="3.7"))
    assert run.returncode == 1
    assert reported(run.stdout)[-1].startswith("failed phase=deps exit=1")
    assert f"This interpreter is Python {HERE}, not 3.7" in run.stderr


@pytest.mark.parametrize("interpreter", [None, "/opt/a python"])
def test_uv_gets_the_configured_interpreter(machine: Machine, interpreter: str | None) -> None:
    """It is the one in SKYWARD_PYTHON, else the version. Packages are installed only into the environment."""
    machine.uv()
    image = Image(pip_extra_index_url="https://x.org/simple")
    machine.run(image.bootstrap(runtime=["dask==1"]), **({"SKYWARD_PYTHON": interpreter} if interpreter else {}))
    environment = machine.home / "envs" / image.content_hash(runtime=["dask==1"])
    install = f"[pip] [install] [--no-progress] [--python] [{environment}/bin/python]"
    assert [line for line in machine.called("uv") if not line.startswith("[--version]")] == [
        f"[venv] [--no-project] [--python] [{interpreter or HERE}] [{environment}]",
        f"{install} [--] [dask==1]",
        f"{install} [--index] [https://x.org/simple] [--index-strategy] [first-index] [--] [dask==1]",
    ]


def test_the_order_of_the_search_for_uv(machine: Machine) -> None:
    """The order is SKYWARD_UV, the PATH, python3's module. Otherwise it is installed from the package index, once."""
    machine.uv()
    given = machine.bin / "given uv"
    shutil.copy(machine.bin / "uv", given)
    done, show = "printf '::skyward done", 'printf "%s|" "${skyward_uv_command[@]}"; echo\n'
    script = Image().bootstrap(runtime=()).replace(done, show + done)

    def used(**env: str) -> str:
        machine.log.write_text("")
        shutil.rmtree(machine.home / "envs", ignore_errors=True)
        run = machine.run(script, **env)
        assert run.returncode == 0, (run.stdout, run.stderr)
        return next(line.rstrip("|") for line in run.stdout.splitlines() if line.endswith("|"))

    assert used(SKYWARD_UV=str(given)) == str(given)
    assert used() == "uv"
    (machine.bin / "uv").unlink()
    machine.stand_in("python3", 'if [ "$1 $2" = "-m uv" ]; then shift 2; exec "${0%/*}/given uv" "$@"; fi')
    assert used() == "python3|-m|uv"
    make = '"pip install") mkdir -p "${10}/bin"; ln -s "${0%/*}/given uv" "${10}/bin/uv"'
    machine.stand_in("python3", f'case "$2 $3" in "pip --version") exit ;; {make} ;; *) exit 1 ;; esac')
    machine.is_a("aarch64")
    installed = machine.home / "uv/bin/uv"
    assert used() == str(installed)
    (install,) = (line for line in machine.called("python3") if "[install]" in line)
    assert install == (
        f"[-m] [pip] [install] [--quiet] [--no-deps] [--only-binary] [:all:] [--require-hashes]"
        f" [--target] [{machine.home}/uv.partial] [-r] [{machine.home}/uv.partial/uv.txt]"
    )
    locked = f"uv=={uv_wheels.VERSION} --hash=sha256:{uv_wheels.WHEELS['aarch64'].sha256}\n"
    assert (machine.home / "uv/uv.txt").read_text() == locked
    assert used() == str(installed)
    assert [line for line in machine.called("python3") if "[pip]" in line] == []


COPY = 'cp "${0%/*}/../uv.whl"'
FETCHERS = {
    "curl": f'{COPY} "${{@: -2:1}}"',
    "wget": f'{COPY} "$3"',
    "python3": f'case "$2" in pip | uv) exit 1 ;; *urllib*) {COPY} "$4" ;; *) exec "$REAL_PYTHON" "$@" ;; esac',
}


@pytest.mark.parametrize(("fetcher", "kind"), [("curl", "x86_64"), ("wget", "aarch64"), ("python3", "aarch64")])
def test_without_pip_the_file_of_the_index_is_fetched_and_checked(
    machine: Machine, tmp_path: Path, fetcher: str, kind: str
) -> None:
    """It is the file of the machine's own architecture; unzip or Python unpacks it."""
    with zipfile.ZipFile(tmp_path / "uv.whl", "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr("uv-9.data/scripts/uvx", "not this one")
        wheel.writestr("uv-9.data/scripts/uv", f"#!/bin/bash\n{MAKE_ENVIRONMENT}\n")
    wanted = uv_wheels.WHEELS[kind]
    machine.is_a(kind)
    machine.stand_in(fetcher, FETCHERS[fetcher])
    machine.link("sha256sum", "chmod", "cp", *(["unzip"] if fetcher == "curl" else []))
    if fetcher == "wget":
        machine.stand_in("python3", FETCHERS["python3"].replace("*urllib*", "--none"))
    run = machine.build(Image())
    assert run.returncode != 0
    assert "has changed" in run.stderr
    assert reported(run.stdout)[-1].startswith("failed phase=uv exit=1 command=fetch_uv")
    assert not (machine.home / "uv").exists()
    digest = hashlib.sha256((tmp_path / "uv.whl").read_bytes()).hexdigest()
    run = machine.run(Image().bootstrap(runtime=()).replace(wanted.sha256, digest))
    assert run.returncode == 0, run.stderr
    assert [line for line in machine.called(fetcher) if wanted.url in line]
    assert (machine.home / "uv/bin/uv").read_text().startswith("#!/bin/bash")


@pytest.mark.parametrize(
    ("kind", "advice"),
    [("riscv64", "no uv is known for Linux-riscv64"), ("x86_64", "neither curl, wget nor python3 to fetch it")],
)
def test_without_any_uv_the_phase_uv_fails(machine: Machine, kind: str, advice: str) -> None:
    machine.is_a(kind)
    run = machine.build(Image())
    assert run.returncode == 1
    assert advice in run.stderr
    assert reported(run.stdout) == ["phase uv", f"failed phase=uv exit=1 command=fetch_uv {machine.home}/uv.partial"]


def test_the_home_is_found_without_home(machine: Machine) -> None:
    """cloud-init runs scripts without HOME: the user's home is used."""
    script = shell.script(shell.prelude(), 'printf "%s\\n" "$HOME" "$SKYWARD_HOME"')
    home = pwd.getpwuid(os.getuid()).pw_dir
    run = run_bash(script, {"PATH": str(machine.bin)}, f"{machine.bin}/bash")
    assert run.stdout.splitlines() == [home, f"{home}/.cache/skyward"]


@pytest.mark.parametrize(
    ("packages", "missing"),
    [
        (["have"], []),
        (["have=1.0-1"], []),
        (["have=2.0-1"], ["have=2.0-1"]),
        (["have", "lack", "gone"], ["lack", "gone"]),
        (["broken"], ["broken"]),
    ],
)
def test_only_missing_packages_are_installed(machine: Machine, packages: list[str], missing: list[str]) -> None:
    """Removed packages and other versions count as missing. A failure is reported with apt's exit code."""
    machine.uv()
    known = 'have) printf "installed 1.0-1" ;; gone) printf "config-files 1.0-1" ;;'
    machine.stand_in("dpkg-query", f'case "${{@: -1}}" in {known} *) exit 1 ;; esac')
    machine.stand_in("apt-get", 'echo "$DEBIAN_FRONTEND" >>"$LOG.frontend"; [[ "$*" != *broken* ]] || exit 100')
    machine.stand_in("sudo", 'shift 2; "$@"')
    run = machine.build(Image(apt=packages))
    phases, calls = reported(run.stdout), machine.called("apt-get")
    if packages == ["broken"]:
        assert run.returncode == 100
        command = "sudo env DEBIAN_FRONTEND=noninteractive apt-get"
        assert phases[-1].startswith(f"failed phase=apt exit=100 command={command}")
        return
    assert run.returncode == 0, run.stderr
    assert phases == ["phase uv", *(["phase apt"] if missing else []), "phase deps", "done phase=deps"]
    assert len(calls) == (2 if missing else 0)
    if missing:
        assert "[update]" in calls[0]
        assert calls[1].partition(" [--] ")[2] == " ".join(f"[{package}]" for package in missing)
        assert set(Path(f"{machine.log}.frontend").read_text().split()) == {"noninteractive"}


# Run scripts with a ttl only with the machine's PATH: it has no real shutdown.
@pytest.mark.parametrize(("ttl", "minutes"), [(1, 1), (60, 1), (61, 2), (3600, 60)])
def test_a_machine_is_turned_off_by_systemd(machine: Machine, ttl: int, minutes: int) -> None:
    """An earlier timer is cancelled first. No process of the script is left."""
    machine.uv()
    machine.stand_in("shutdown", "exit 0")
    machine.stand_in("sudo", 'shift 2; "$@"')
    assert machine.build(Image(), ttl).returncode == 0
    assert machine.called("shutdown") == ["[-c]", f"[-P] [+{minutes}]"]
    assert not (machine.home / "ttl.pid").exists()


def test_without_systemd_a_timer_turns_the_machine_off(machine: Machine) -> None:
    """A second run replaces it, and a run with ttl 0 keeps it. At its end it shuts down, or turns the power off."""
    machine.uv()
    machine.stand_in("shutdown", "exit 1")
    machine.stand_in("poweroff", "exit 0")
    machine.stand_in("sudo", 'shift 2; "$@"')
    timers: list[int] = []
    try:
        for ttl in (1000, 2000, 0):
            assert machine.build(Image(), ttl).returncode == 0
            timers.append(int((machine.home / "ttl.pid").read_text()))
        first, second, third = timers
        assert second == third
        wait_until(lambda: has_ended(first), "the first timer to end")
        assert b"skyward-ttl\x002000\x00" in Path(f"/proc/{second}/cmdline").read_bytes()
        assert machine.called("poweroff") == []
    finally:
        for timer in timers[-1:]:
            os.killpg(timer, signal.SIGKILL)
    finished = machine.home.parent / "finished"
    os.mkfifo(finished)
    machine.stand_in("sleep", "exit 0")
    machine.stand_in("poweroff", f'echo done >"{finished}"')
    machine.log.write_text("")
    assert machine.build(Image(), 7).returncode == 0
    assert finished.read_text() == "done\n"
    assert machine.called("sleep") == ["[7]"]
    assert machine.called("shutdown") == ["[-c]", "[-P] [+1]", "[-P] [now]"]
    assert machine.called("poweroff") == ["[-f]"]


def has_ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] == "Z"
    except FileNotFoundError:
        return True


# ── with real tools ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def real(tmp_path: Path) -> dict[str, str]:
    """The variables for the real uv and this interpreter, with misleading variables of uv."""
    return os.environ | {
        "SKYWARD_HOME": str(tmp_path / "sky home"),
        "SKYWARD_UV": uv.find_uv_bin(),
        "SKYWARD_PYTHON": sys.executable,
        "UV_PYTHON": "/nonexistent",
        "VIRTUAL_ENV": "/nonexistent",
    }


def test_a_real_environment_is_built_once(real: dict[str, str], tmp_path: Path) -> None:
    """The first run installs the package and the client's Dask. The second one needs neither network nor cache."""
    image = Image(pip=["six==1.17.0"])
    environment = Path(real["SKYWARD_HOME"], "envs", image.content_hash())
    check = "import sys, six, dask; print(six.__version__, dask.__version__, sys.prefix)"
    script = f"""{image.bootstrap()}\n"$SKYWARD_ENV_PYTHON" -c '{check}'\n"""
    first = run_bash(script, real)
    assert first.returncode == 0, first.stderr
    assert reported(first.stdout) == DONE
    dask = next(pin for pin in runtime_pins() if pin.startswith("dask==")).removeprefix("dask==")
    assert first.stdout.splitlines()[-1] == f"1.17.0 {dask} {environment}"

    def files() -> dict[Path, tuple[int, int]]:
        paths = [path for path in environment.rglob("*") if "__pycache__" not in path.parts]
        return {path: (path.lstat().st_ino, path.lstat().st_mtime_ns) for path in paths if path != last_use}

    last_use = environment / ".skyward-complete"
    before, cache = files(), tmp_path / "empty cache"
    os.utime(last_use, (0, 0))
    second = run_bash(script, real | {"UV_OFFLINE": "1", "UV_CACHE_DIR": str(cache)})
    assert (second.returncode, reported(second.stdout)) == (0, ["done phase=deps"])
    assert second.stdout.splitlines()[-1] == first.stdout.splitlines()[-1]
    assert files() == before
    assert last_use.stat().st_mtime > 0, "it is pruned by its age"
    assert not cache.exists()


def test_no_index_comes_from_a_file_above_the_working_directory(real: dict[str, str], tmp_path: Path) -> None:
    """In a folder below /tmp, another user may have written a `uv.toml` or a `pyproject.toml` there."""
    below = tmp_path / "theirs" / "node"
    below.mkdir(parents=True)
    (below.parent / "uv.toml").write_text('[pip]\nindex-url = "http://127.0.0.1:9/theirs"\n')
    (below.parent / "pyproject.toml").write_text('[project]\nname = "x"\nversion = "0"\n')
    script = f"cd {below}\n{Image(pip=['six==1.17.0']).bootstrap(runtime=())}"
    run = run_bash(script, real | {"UV_CACHE_DIR": str(tmp_path / "cache")})
    assert "127.0.0.1:9" not in run.stderr
    assert (run.returncode, reported(run.stdout)) == (0, DONE), run.stderr


def test_uv_is_installed_from_the_package_index(real: dict[str, str]) -> None:
    """On a machine that has Python but no uv. A package that does not exist is an error of the phase deps."""
    path = Path(real["SKYWARD_HOME"]).with_name("bin")
    path.mkdir()
    for tool in ("bash", "env", "flock", "mkdir", "mv", "rm", "uname"):
        (path / tool).symlink_to(str(shutil.which(tool)))
    make = [uv.find_uv_bin(), "venv", "--quiet", "--seed", "--python", sys.executable, path / "venv"]
    subprocess.run(make, env=os.environ | {"UV_PYTHON": ""}, check=True)
    (path / "python3").write_text(f'#!/bin/bash\nexec "{path}/venv/bin/python" "$@"\n')
    (path / "python3").chmod(0o755)
    variables = real | {"SKYWARD_UV": "", "PATH": str(path)}
    run = run_bash(Image(pip=["six"]).bootstrap(runtime=()), variables)
    assert run.returncode == 0, run.stderr
    assert Path(real["SKYWARD_HOME"], "uv", "bin", "uv").exists()
    run = run_bash(Image(pip=["skyward-no-such-package-exists==99"]).bootstrap(runtime=()), variables)
    assert reported(run.stdout)[-1].startswith(f"failed phase=deps exit={run.returncode} command=")
    assert "skyward-no-such-package-exists" in run.stderr


@pytest.mark.nightly
def test_the_uv_for_another_architecture_is_downloaded_and_cached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For arm64 it is a static program (183 is EM_AARCH64 of ELF). Looks inside: the result is kept in the process."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    code_upload._fetched_uv.cache_clear()
    try:
        packed = code_upload.shipped_uv("Linux", "aarch64")
        with gzip.open(packed.path) as content:
            binary = content.read()
        assert len(binary) == packed.unpacked_bytes
        assert (binary[:4], int.from_bytes(binary[18:20], "little")) == (b"\x7fELF", 183)
        assert [path.name for path in packed.path.parent.iterdir()] == [packed.path.name]
        code_upload._fetched_uv.cache_clear()
        monkeypatch.setattr(code_upload, "_fetch", None)
        assert code_upload.shipped_uv("Linux", "aarch64") == packed
        monkeypatch.undo()
        wrong = dataclasses.replace(uv_wheels.WHEELS["aarch64"], sha256="0" * 64)
        with pytest.raises(subprocess.CalledProcessError) as caught:
            code_upload._fetch(wrong, tmp_path)
        assert "hash" in caught.value.stderr.lower()
    finally:
        code_upload._fetched_uv.cache_clear()
