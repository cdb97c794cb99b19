"""Boot scripts of rented machines, in real shells and on real hosts: login, identity and the machine's end.

The handling of cloud-config was read in cloud-init's source (cloudinit/config/cc_ssh.py, cloudinit/util.py: shellify).
Images with cloud-init, systemd and a network for installations are not available here. So two things are not tested:
that sshd starts before the host key is set on a cloud's image, and `systemctl restart` and `apt-get`.
"""

import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

import pytest
import yaml

from skyward_core.errors import BadRequest, HostKeyChanged
from skyward_core.machines.instances import Endpoint
from skyward_core.providers import userdata
from skyward_core.providers.base import CREATED_TAG, EXPIRES_TAG, POOL_TAG, RANK_TAG
from skyward_core.providers.tagging import TAGS_VARIABLE, from_word
from skyward_core.providers.userdata import HostKey, Key, host_key, our_key
from skyward_core.provisioning.bootstrap import GUARD_ENDS, guard_script
from skyward_core.transport.ssh_connection import SSHConnection
from tests.providers.contract import tags as contract_tags
from tests.testbed import Fleet, Host
from tests.testbed.fixtures import fleet  # noqa: F401 - a fixture
from tests.waiting import wait_until

SHELLCHECK = Path(sys.executable).with_name("shellcheck")
LAUNCH = "L0a1b2c3d4e5f607182930415263748596"
TAGS = {
    **contract_tags(launch=LAUNCH),
    "skyward-owner": 'Jo "$HOME" O\'Neil \\ é 🙂@box',
    "skyward-expires": "1790003600",
}
GUARD = guard_script(300, 86_400, userdata.END_COMMAND)
NASTY = '#!/bin/sh\nprintf \'%s\\n\' "it\'s \\"$HOME\\" \\\\ \\$x `id` $(id)" é 🙂 \u2028\u0085\x7f {launch} %s\t\x01\n'
"""Characters that a layer between client and machine may change."""


@pytest.fixture(autouse=True)
def _home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture
def key() -> Key:
    return our_key()


@pytest.fixture
def host(key: Key) -> HostKey:
    return host_key(LAUNCH, key)


def moved(script: str, tmp_path: Path) -> str:
    """Return the script for another root directory, so that it can run here."""
    (tmp_path / "run").mkdir(exist_ok=True)
    (tmp_path / "root").mkdir(exist_ok=True)
    (tmp_path / "etc/ssh").mkdir(exist_ok=True, parents=True)
    for place in ("/root", "/etc/ssh", "/etc/systemd", "/run/"):
        script = script.replace(place, f"{tmp_path}{place}")
    return script


def run(script: str, shell: str = "sh", **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [shell], input=script, capture_output=True, text=True, check=False, timeout=30, env=os.environ | variables
    )


def booted(tmp_path: Path, script: str) -> Path:
    """Run a boot script below its own root directory. Its startup script creates the file `up`. Returns the directory
    of that file.
    """
    done = run(moved(script, tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    wait_until(lambda: list(tmp_path.glob("root/.cache/skyward/instances/*/up")), "the startup script")
    return next(tmp_path.glob("root/.cache/skyward/instances/*/up")).parent


@pytest.mark.parametrize("kind", ["boot", "script", "container"])
@pytest.mark.parametrize("startup", [GUARD, NASTY])
def test_the_scripts_are_plain_sh(key: Key, host: HostKey, kind: str, startup: str) -> None:
    """shellcheck, dash and bash report nothing."""
    boot = userdata.boot_script(
        startup,
        contract_tags(),
        "cat /var/lib/cloud/data/instance-id",
        "echo over\npoweroff",
        is_container=kind == "container",
    )
    script = {
        "boot": boot,
        "script": userdata.script(boot, key, host),
        "container": userdata.container_script(boot, key, host),
    }[kind]
    result = subprocess.run([SHELLCHECK, "--shell=sh", "-"], input=script, capture_output=True, text=True, check=False)
    assert result.stdout == ""
    for shell in ("dash", "bash"):
        assert subprocess.run([shell, "-n"], input=script, capture_output=True, text=True, check=False).stderr == ""


@pytest.mark.parametrize("startup", [NASTY, "echo no end", "", "\n\n", "a\n\n\n", "cat <<'E'\nx\nE\n", GUARD])
def test_a_startup_script_is_kept_exactly(tmp_path: Path, startup: str) -> None:
    """Its content does not matter. A missing final line break is added."""
    boot = userdata.boot_script(startup, TAGS, "echo m-1").replace("setsid sh", 'touch "$directory/up" #')
    assert (booted(tmp_path, boot) / "startup.sh").read_text() == moved(startup.removesuffix("\n") + "\n", tmp_path)


def test_a_startup_script_has_its_identity_in_the_environment(tmp_path: Path) -> None:
    """They are id, directory, pool, rank and all tags."""
    startup = 'env -0 >"$SKYWARD_INSTANCE_DIRECTORY/environ"; read -r x || echo "no $x input"; echo error >&2\n'
    startup += 'cut -d" " -f1,6 /proc/$$/stat; touch "$SKYWARD_INSTANCE_DIRECTORY/up"\n'
    directory = booted(tmp_path, userdata.boot_script(startup, TAGS, "echo m-1"))
    variables = dict(item.split("=", 1) for item in (directory / "environ").read_text().split("\0") if item)
    assert directory.name == variables["SKYWARD_INSTANCE_ID"] == "m-1"
    assert variables["SKYWARD_INSTANCE_DIRECTORY"] == str(directory) == str(tmp_path) + userdata.directory_of("m-1")
    assert (variables["SKYWARD_POOL_ID"], variables["SKYWARD_RANK"]) == (TAGS[POOL_TAG], TAGS[RANK_TAG])
    assert from_word(variables[TAGS_VARIABLE], TAGS[POOL_TAG], 0) == TAGS
    assert variables["HOME"] == f"{tmp_path}/root"
    *lines, numbers = (directory / "log").read_text().splitlines()
    assert lines == ["no  input", "error"]
    assert len(set(numbers.split())) == 1
    assert {
        path.name: path.stat().st_mode & 0o777 for path in (directory, directory / "startup.sh", directory / "log")
    } == {"m-1": 0o700, "startup.sh": 0o600, "log": 0o600}


@pytest.mark.parametrize("answer", ["", "false", "echo '<html>'", "echo ..", "echo '../../tmp/x'"])
def test_a_machine_without_a_readable_id_is_named_by_its_launch(tmp_path: Path, answer: str) -> None:
    """The metadata service gives no answer, an error page, or an invalid file name."""
    startup = 'touch "$SKYWARD_INSTANCE_DIRECTORY/up"\n'
    assert booted(tmp_path, userdata.boot_script(startup, TAGS, answer)).name == LAUNCH


@pytest.mark.parametrize("field", ["startup", "end_script"])
@pytest.mark.parametrize("text", ["SKYWARD_END_OF_FILE", "a\nSKYWARD_END_OF_FILE\nb", "SKYWARD_END_OF_FILE\n"])
def test_a_script_with_the_final_word_of_the_heredoc_is_refused(field: str, text: str) -> None:
    """No line of a script may run as part of the boot script. The word within a line is harmless."""
    texts = {"startup": ":\n", "end_script": "poweroff"}
    with pytest.raises(BadRequest, match="SKYWARD_END_OF_FILE"):
        userdata.boot_script(**{**texts, field: text}, tags=TAGS, machine_id="echo 1")
    userdata.boot_script(**{**texts, field: f"echo {userdata.DELIMITER}"}, tags=TAGS, machine_id="echo 1")


def test_a_failed_end_of_a_machine_is_repeated(tmp_path: Path) -> None:
    """The end script may fail with `exit` or otherwise. Only root can read the file, because it may have a key. `sleep`
    writes down how long it should sleep.
    """
    (sleep := tmp_path / "sleep").write_text(f'#!/bin/sh\necho "$1" >>"{tmp_path}/pauses"\n')
    sleep.chmod(0o700)
    end = f'echo tried >>"{tmp_path}/tries"\n[ "$(wc -l <"{tmp_path}/tries")" -ge 3 ] || exit 1\nkill "$PPID_OF_TEST"'
    booted(tmp_path, userdata.boot_script('touch "$SKYWARD_INSTANCE_DIRECTORY/up"\n', TAGS, "echo m-1", end))
    place = tmp_path / "root/.cache/skyward/end"
    assert place.stat().st_mode & 0o777 == 0o600
    command = moved(userdata.END_COMMAND, tmp_path)
    done = subprocess.run(
        ["sh", "-c", f"PPID_OF_TEST=$$; export PPID_OF_TEST; PATH={tmp_path}:$PATH; {command}"],
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    assert (done.returncode, done.stderr) == (-15, "")
    assert (tmp_path / "tries").read_text() == "tried\n" * 3
    assert (tmp_path / "pauses").read_text() == f"{userdata.END_AGAIN_SECONDS}\n" * 2


QUIET = 'touch "$SKYWARD_INSTANCE_DIRECTORY/up"\n'
BOOT_ID = Path(userdata.BOOT_ID).read_text().strip()
LATER = "00000000-0000-4000-8000-000000000000"
"""The id of another boot."""


def units(tmp_path: Path) -> Path:
    """Pretend that systemd is the first process of the machine; return the directory of its units."""
    (tmp_path / "run/systemd/system").mkdir(parents=True)
    return tmp_path / "etc/systemd/system"


def restarted(tmp_path: Path, *, is_another_boot: bool = True) -> bool:
    """Run the unit's script in this boot or a later one; return whether the machine has ended itself."""
    script = (tmp_path / "root/.cache/skyward/rebooted").read_text()
    assert BOOT_ID in script
    script = script.replace(BOOT_ID, LATER) if is_another_boot else script
    done = subprocess.run(
        ["sh", "-c", f"TEST=$$; export TEST; {script}"], capture_output=True, text=True, check=False, timeout=30
    )
    assert done.stderr == ""
    assert done.returncode in (0, -15)
    return done.returncode == -15


@pytest.mark.parametrize(
    ("known", "again", "ends"),
    [
        ("m-1", "m-1", True),
        ("m-1", "", True),  # the metadata service does not answer now
        ("m-1", "..", True),
        ("", "m-1", True),  # the metadata service did not answer at the first boot
        ("m-1", "m-2", False),  # another machine with a copy of the disk
    ],
)
def test_a_machine_that_restarts_ends_itself(tmp_path: Path, known: str, again: str, ends: bool) -> None:
    """It ends in every boot but the first, for any lease. Only the rented machine ends."""
    units(tmp_path)
    who = tmp_path / "who"
    who.write_text(known)
    directory = booted(tmp_path, userdata.boot_script(QUIET, TAGS, f"cat {who}", 'kill "$TEST"'))
    assert not restarted(tmp_path, is_another_boot=False)
    assert (directory / "log").read_text() == ""
    who.write_text(again)
    assert restarted(tmp_path) == ends
    assert (directory / "log").read_text() == (f"{GUARD_ENDS}its machine was restarted\n" if ends else "")


class Container:
    """A container's main script below its own root directory. A shell runs it in the place of the first process.

    Its end is a line in the file `ends`.
    """

    def __init__(self, tmp_path: Path, **tags: str) -> None:
        self.ends = tmp_path / "ends"
        end = f'echo asked >>{self.ends}; [ "$(wc -l <{self.ends})" -lt 20 ] || sleep 100\nkill -KILL $$'
        now = int(time.time())
        all_tags = {**TAGS, CREATED_TAG: str(now), EXPIRES_TAG: str(now + 86_400), **tags}
        guard = guard_script(300, 86_400, userdata.END_COMMAND, paid_seconds=600)
        boot = userdata.boot_script(guard, all_tags, f"echo {tmp_path.name}-{os.getpid()}", end, is_container=True)
        boot = boot.replace(f"sleep {userdata.END_AGAIN_SECONDS}\n", "sleep 0.2\n")
        self._script = moved(
            userdata.OBEY + boot + userdata.WATCH.replace("sleep 10", "sleep 0.1").replace("sleep 60", "sleep 0.1"),
            tmp_path,
        )
        self._home = tmp_path / "root/.cache/skyward"
        self._main: subprocess.Popen[str] | None = None
        self._log: TextIO | None = None

    def follow(self) -> None:
        """Copy the node's log, because its folder will be removed."""
        self._log = (self.directory / "log").open()

    def said(self) -> str:
        assert self._log is not None
        return self._log.read()

    def is_up(self) -> bool:
        return self._main is not None and self._main.poll() is None

    def start(self) -> None:
        self._main = subprocess.Popen(
            ["sh", "-c", self._script],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    @property
    def directory(self) -> Path:
        return next((self._home / "instances").iterdir())

    def guard(self) -> int:
        """Wait until a guard runs; return its pid."""
        wait_until(lambda: list(self._home.glob("instances/*/guard")), "the guard")
        return int((self.directory / "guard").read_text())

    def crash(self, *, wipe: bool = False) -> None:
        """End all of its processes at once, as when it is stopped. With `wipe` its disk is removed too."""
        guards = [int(place.read_text()) for place in self._home.glob("instances/*/guard")]
        assert self._main is not None
        for pid in (self._main.pid, *guards):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        self._main.communicate()
        if self._log is not None:
            self._log.close()
            self._log = None
        if wipe:
            shutil.rmtree(self._home)

    def has_asked_for_its_end(self) -> bool:
        return self.ends.exists()


@pytest.fixture
def container(tmp_path: Path) -> Iterator[Callable[..., Container]]:
    made: list[Container] = []

    def make(**tags: str) -> Container:
        made.append(Container(tmp_path, **tags))
        made[-1].start()
        return made[-1]

    yield make
    for one in made:
        one.crash()


def test_a_container_that_restarts_requests_its_end_and_does_nothing_else(container: Callable[..., Container]) -> None:
    """It has no new lease and no new `paid`, and logs the reason."""
    one = container()
    one.guard()
    assert not one.has_asked_for_its_end()
    one.crash()
    one.follow()
    one.start()
    wait_until(
        lambda: one.has_asked_for_its_end() and len(one.ends.read_text().splitlines()) >= 3,
        "the third time that the end is asked for",
    )
    assert f"{GUARD_ENDS}its container was restarted\n" in one.said()
    assert one.is_up()


def test_a_container_that_restarts_on_another_disk_gets_no_second_lease(
    container: Callable[..., Container], tmp_path: Path
) -> None:
    """The time of its request is in the script, which is in the environment."""
    one = container(**{CREATED_TAG: str(int(time.time()) - userdata.START_SECONDS - 5)})
    wait_until(one.has_asked_for_its_end, "the end")
    one.crash(wipe=True)
    one.ends.unlink()
    one.start()
    wait_until(one.has_asked_for_its_end, "the end of the one that was started anew")


def test_a_container_requests_its_end_if_its_guard_is_killed(container: Callable[..., Container]) -> None:
    """A call may run `kill -9 -1`. The kernel protects the first process from that."""
    one = container()
    guard = one.guard()
    one.follow()
    os.kill(guard, signal.SIGKILL)
    wait_until(one.has_asked_for_its_end, "the end")
    assert f"{GUARD_ENDS}its guard is gone\n" in one.said()


@pytest.mark.parametrize("is_guard_stuck", [False, True])
def test_the_first_process_ends_a_container_at_its_hard_end(
    container: Callable[..., Container], is_guard_stuck: bool
) -> None:
    """It uses the time of day, which no process can extend. A guard that hangs is not waited for."""
    one = container(**{EXPIRES_TAG: str(int(time.time()) + 2)})
    guard = one.guard()
    if is_guard_stuck:
        os.kill(guard, signal.SIGSTOP)
    wait_until(one.has_asked_for_its_end, "the end")


def test_cloud_config_is_the_same_as_yaml_and_json(key: Key, host: HostKey) -> None:
    """PyYAML, which cloud-init uses, and JSON agree. The keys are those that cloud-init documents."""
    boot = userdata.boot_script(NASTY, TAGS, "echo m-1")
    text = userdata.cloud_config(boot, key, host)
    head, _, body = text.partition("\n")
    assert head == "#cloud-config"
    assert yaml.safe_load(text.encode()) == yaml.safe_load(text) == json.loads(body)
    assert json.loads(body) == {
        "disable_root": False,
        "ssh_pwauth": False,
        "ssh_authorized_keys": [key.public],
        "ssh_deletekeys": True,
        "ssh_genkeytypes": ["ed25519"],
        "ssh_keys": {"ed25519_private": host.private, "ed25519_public": host.public},
        "runcmd": [["sh", "-c", boot]],
    }


def test_repeated_creating_calls_have_the_same_user_data(key: Key) -> None:
    """They must be the same, byte for byte."""

    def text() -> str:
        return userdata.cloud_config(userdata.boot_script(GUARD, TAGS, "echo m-1"), key, host_key(LAUNCH, key))

    assert text() == text()
    assert userdata.packed(text()) == userdata.packed(text())


def test_existing_authorized_keys_stay(tmp_path: Path, key: Key, host: HostKey) -> None:
    """It holds also if the last line has no line break."""
    (tmp_path / "root/.ssh").mkdir(parents=True)
    (tmp_path / "root/.ssh/authorized_keys").write_text("ssh-ed25519 AAAAtheirs them@there")
    (tmp_path / "root/.ssh/authorized_keys").chmod(0o666)
    (tmp_path / "etc/ssh").mkdir(parents=True)
    for name in ("rsa_key", "rsa_key.pub", "ed25519_key", "ed25519_key-cert.pub"):
        (tmp_path / "etc/ssh" / f"ssh_host_{name}").write_text("old")
    script = userdata.script("", key, host).partition("if ! { systemctl")[0]
    done = run(moved(script, tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    assert [line for line in (tmp_path / "root/.ssh/authorized_keys").read_text().split("\n") if line] == [
        "ssh-ed25519 AAAAtheirs them@there",
        key.public,
    ]
    places = {path.name: path for path in (tmp_path / "etc/ssh").iterdir()}
    assert {name: path.read_text() for name, path in places.items()} == {
        "ssh_host_ed25519_key": host.private,
        "ssh_host_ed25519_key.pub": host.public + "\n",
    }
    modes = [
        path.stat().st_mode & 0o777
        for path in (places["ssh_host_ed25519_key"], tmp_path / "root/.ssh", tmp_path / "root/.ssh/authorized_keys")
    ]
    assert modes == [0o600, 0o700, 0o600]
    assert (tmp_path / "run/sshd").stat().st_mode & 0o777 == 0o755


def test_sshd_is_installed_if_it_is_missing(tmp_path: Path, key: Key, host: HostKey) -> None:
    """The umask keeps files readable for others."""
    place = tmp_path / "bin"
    place.mkdir()
    sshd = tmp_path / "sshd"
    stub = f'#!/bin/sh\numask >>{tmp_path}/asked; echo "$DEBIAN_FRONTEND $*" >>{tmp_path}/asked; [ -e {tmp_path}/busy ] && rm {tmp_path}/busy && exit 100\n'
    (place / "apt-get").write_text(f'{stub}[ "$1" = update ] || {{ echo : >{sshd}; chmod 755 {sshd}; }}\n')
    (place / "sleep").write_text(f'#!/bin/sh\necho "pause $1" >>{tmp_path}/asked\n')
    for stub_path in place.iterdir():
        stub_path.chmod(0o755)
    (tmp_path / "busy").touch()
    script = userdata.container_script(f"umask 077\necho boot >>{tmp_path}/asked\n", key, host)
    script = moved(script.partition("\nsshds() {")[0] + "\n", tmp_path).replace("/usr/sbin/sshd", str(sshd))
    done = run(script, PATH=f"{place}:{os.environ['PATH']}", DEBIAN_FRONTEND="")
    assert (done.returncode, done.stderr) == (0, "")
    install = "noninteractive install -y -qq --no-install-recommends openssh-server curl ca-certificates"
    assert (tmp_path / "asked").read_text().splitlines() == [
        "boot",
        "0022",
        " update -qq",
        "pause 5",
        "0022",
        " update -qq",
        "0022",
        install,
    ]
    assert (tmp_path / "etc/ssh/ssh_host_ed25519_key").stat().st_mode & 0o777 == 0o600


@pytest.fixture
def machine(fleet: Fleet) -> Iterator[Host]:
    """Return a host as a cloud delivers it: it accepts the cloud's key, not ours, and has its own host key."""
    machine = fleet.create(disk="256M")
    yield machine
    machine.crash()


def endpoint(machine: Host, key: Key) -> Endpoint:
    """Return its address with the derived host key, which is set some time after sshd answers."""
    return Endpoint(
        host=machine.ip,
        port=22,
        user="root",
        key=str(key.path),
        host_key=host_key(LAUNCH, key).public,
        host_key_grace_seconds=60,
        known_hosts="/dev/null",
        config="/dev/null",
    )


def bring_up(machine: Host, script: str) -> None:
    """Run a script as root and detached, as a cloud's agent does."""
    bring = 'cat >/root/user-data; setsid env -i PATH="$PATH" sh /root/user-data </dev/null >/root/user-data.log 2>&1 &'
    assert machine.run(bring, text=script).returncode == 0


def inside(machine: Host, path: str) -> Path:
    return machine.root / path.lstrip("/")


def test_a_machine_gets_the_expected_host_key(machine: Host, key: Key, host: HostKey) -> None:
    """Before its script has run its host key is wrong."""
    stranger = SSHConnection(endpoint(machine, key))
    with pytest.raises(HostKeyChanged):
        stranger.connect(30)
    stranger.close()
    caught: list[object] = []
    connection = SSHConnection(endpoint(machine, key))

    def connect() -> None:
        try:
            caught.append(connection.connect(60, auth_grace_seconds=60))
        except Exception as error:
            caught.append(error)

    thread = threading.Thread(target=connect)
    thread.start()
    bring_up(machine, userdata.script(userdata.boot_script(GUARD, TAGS, "echo m-1"), key, host))
    thread.join(80)
    assert caught == [connection]
    try:
        assert connection.run("id -u").output.strip() == "0"
        wait_until(lambda: connection.run(f"cat {userdata.directory_of('m-1')}/guard").exit_code == 0, "the guard")
        assert connection.run("cat /root/user-data.log").output == ""
        # sshd before 9.8 reads its keys for each connection, later versions at start and on SIGHUP
        assert "Received SIGHUP; restarting." in connection.run("cat /var/log/sshd.log").output
    finally:
        connection.close()


def test_a_machine_ends_itself_when_its_lease_expires(machine: Host, key: Key, host: HostKey) -> None:
    """No client has connected: the guard runs END_COMMAND, which runs the end script."""
    bring_up(
        machine,
        userdata.script(userdata.boot_script(guard_script(1, None, userdata.END_COMMAND), TAGS, "echo m-1"), key, host),
    )
    wait_until(lambda: not machine.is_up, "the machine to power itself off")


def test_a_machine_that_restarts_powers_itself_off(machine: Host) -> None:
    """All of its processes are gone, and the unit ends it, although its lease is long."""
    machine.run("mkdir -p /run/systemd/system")
    bring_up(machine, userdata.boot_script(guard_script(3600, None, userdata.END_COMMAND), TAGS, "echo m-1"))
    guard = inside(machine, userdata.directory_of("m-1")) / "guard"
    wait_until(guard.exists, "the guard")
    unit = 'sh -c "$(sed -n s/^ExecStart=//p /etc/systemd/system/multi-user.target.wants/skyward-guard.service)" </dev/null'
    assert machine.run(unit).returncode == 0
    assert (
        machine.run(
            f"kill -KILL $(cat {userdata.directory_of('m-1')}/guard); sed -i s/{BOOT_ID}/{LATER}/ {userdata.REBOOTED}"
        ).returncode
        == 0
    )
    machine.run(f"setsid {unit} >/dev/null 2>&1 &")
    wait_until(lambda: not machine.is_up, "the machine to power itself off")


def test_sshd_is_started_if_it_is_not_running(machine: Host, key: Key, host: HostKey) -> None:
    """In a container no other process starts it."""
    script = userdata.container_script(userdata.boot_script(":\n", TAGS, "echo m-1"), key, host)
    alone = "ip link set lo up; sh /root/script & for try in $(seq 100); do ssh-keyscan -t ed25519 127.0.0.1 2>/dev/null >/root/seen; [ -s /root/seen ] && break; sleep 0.2; done"
    machine.run("cat >/root/script", text=script)
    done = machine.run(
        f"unshare --net --pid --fork --mount-proc sh -c {shlex.quote(alone)} </dev/null 2>&1; cat /root/seen"
    )
    assert done.stdout.split()[-2:] == host.public.split(), done.stdout


def test_a_machine_with_an_ended_node_ends_again_when_it_is_switched_on(tmp_path: Path) -> None:
    """The guard has removed the node's directory, and a user has switched the machine on."""
    units(tmp_path)
    shutil.rmtree(booted(tmp_path, userdata.boot_script(QUIET, TAGS, "echo m-1", 'kill "$TEST"')))
    assert restarted(tmp_path)
