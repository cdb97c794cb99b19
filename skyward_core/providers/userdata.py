"""The boot script of a rented machine: our key, its identity, and its startup script in a separate process.

Variables and directory are the same for all providers (decisions/0006). Shell text prints the machine's id on the
machine itself, because the answer to the creating call comes too late. If it prints nothing, the launch token is the
id: the client finds no such node, but the lease holds.

A machine that restarts has lost its node and its guard, whose clock is the uptime. It ends itself at once, whatever its
lease, so no restart extends a lease. A systemd unit does that, because cloud-init and startup scripts run at the first
boot only. The unit compares the kernel's boot id, and the machine's id because a disk may be a copy. If the machine
stops between two steps:

    boot script begun               no unit: reaper and sweep end the machine after a restart
    the unit's script written       the same; half a script does nothing
    unit and link written           after a restart it ends itself; in the same boot the unit does nothing
    startup begun                   the guard watches; after a restart it ends itself
    guard has ended, power is off   if a person switches it on, it ends itself again

A container has no systemd. The cloud runs its first process, our main script, again whenever it ends, on the same disk
or a new one (`is_container`):

    first start                     a file records it; the guard watches, and the first process watches guard and time
    restart, the file exists        the guard learns before its start that the node has ended: no work starts, and it
                                    ends the machine
    restart on another disk         the same from START_SECONDS after the request on; the script, which is in the
                                    environment, contains that time
    guard killed                    another guard starts, and learns the same
    the pool's hard end has come    the guard learns so; a minute later the first process ends the machine itself

So the first process never ends by itself: a container that ends is restarted and billed.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import hmac
import importlib
import json
import os
import posixpath
import re
import shlex
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from platformdirs import user_state_path

from skyward_core.errors import BadRequest
from skyward_core.machines.instances import Endpoint
from skyward_core.providers.base import CREATED_TAG, EXPIRES_TAG, LAUNCH_TAG, POOL_TAG, RANK_TAG, Tags
from skyward_core.providers.tagging import TAGS_VARIABLE, to_word
from skyward_core.wire.private_folders import NotPrivate, make_file, make_private, read_file, read_kept

PURPOSE = b"skyward host key of launch "
HOME = "/root/.cache/skyward"
END = "/root/.cache/skyward/end"
"""The script with which a machine ends itself. A cloud's `end_command` runs it."""
END_COMMAND = f"exec sh {END}"
REBOOTED = "/root/.cache/skyward/rebooted"
"""The script that ends a restarted machine."""
UNIT = "/etc/systemd/system/skyward-guard.service"
BOOT_ID = "/proc/sys/kernel/random/boot_id"
"""Differs for each boot, random(4)."""
BEGAN = "/root/.cache/skyward/began"
"""One line with the time of each start of a container."""
START_SECONDS = 3600
"""A container that starts this long after its request has been restarted.

A launch waits for ten minutes; the rest allows for clocks that differ.
"""
DELIMITER = "SKYWARD_END_OF_FILE"
BOOT = """\
umask 077
id=$({machine_id})
known=$id
case $id in '' | .* | *[!A-Za-z0-9._-]*) id={launch} known= ;; esac
directory={home}/instances/$id
mkdir -p "$directory"
cat >{end} <<'{delimiter}'
while :; do
(
{end_script}
)
sleep {again_seconds}
done
{delimiter}
if [ -d /run/systemd/system ]; then
  {{
    echo "boot='$(cat {boot_id})' known='$known' log='$directory/log'"
    cat <<'{delimiter}'
[ "$(cat {boot_id})" != "$boot" ] || exit 0
again=$({machine_id})
case $again in .* | *[!A-Za-z0-9._-]*) again= ;; esac
case $known/$again in /* | */ | "$known/$known") ;; *) exit 0 ;; esac # on a copy of that disk, which is another machine
{{ echo '{ends}' >>"$log"; }} 2>/dev/null
exec sh {end}
{delimiter}
  }} >{rebooted}
  (
    umask 022
    mkdir -p {unit_directory}/multi-user.target.wants
    cat >{unit} <<'{delimiter}'
[Unit]
Description=End this rented machine: it was restarted, and nothing watches it
ConditionPathExists={rebooted}
Wants=network-online.target
After=network-online.target
[Service]
ExecStart=/bin/sh {rebooted}
[Install]
WantedBy=multi-user.target
{delimiter}
    ln -sf {unit} {unit_directory}/multi-user.target.wants/
  )
fi
cat >"$directory/startup.sh" <<'{delimiter}'
{startup}
{delimiter}
"""
"""Containers have no systemd, sd_booted(3). The unit waits for the network, which the end may need.

cloud-init's first stages, such as FORGET, run before that (cloud-init.service: Before=network-online.target).
"""
START_GUARD = """\
env HOME=/root SKYWARD_INSTANCE_ID="$id" SKYWARD_INSTANCE_DIRECTORY="$directory" {variables} \\
  setsid sh "$directory/startup.sh" </dev/null >>"$directory/log" 2>&1 &
"""
START_GUARD_ONCE = """\
skyward_until='{expires}'
skyward_over() {{ # reason: the node has ended; the guard logs it, stops its work and ends the machine
  {{ echo "$1" >"$directory/ended"; }} 2>/dev/null
}}
skyward_guard() {{
{start}
  skyward_guard_pid=$!
}}
skyward_now=$(date +%s)
if [ -e {began} ]; then
  skyward_over "its container was restarted"
elif [ "$skyward_now" -ge {start_by} ]; then
  skyward_over "its container was started more than {start_seconds} s after its request, by its clock: it was restarted, or a clock is wrong"
fi
{{ echo "$skyward_now" >>{began}; }} 2>/dev/null
skyward_guard
"""  # noqa: E501
"""Only the first start has a lease, whatever the container's environment and disk say.

The shell's own job table shows whether the guard lives.
"""
WATCH = f"""\
skyward_ending=''
while :; do
  sleep 10 &
  wait "$!"
  if [ -n "$skyward_until" ] && [ "$(date +%s)" -ge "$skyward_until" ]; then
    skyward_over "the pool's hard end has come"
    [ -n "$skyward_ending" ] || {{ (sleep 60 && exec sh {END}) & skyward_ending=$!; }}
  fi
  kill -0 "$skyward_guard_pid" 2>/dev/null && continue
  skyward_over "its guard is gone"
  if [ -f "$directory/startup.sh" ]; then
    skyward_guard
  else # the node's folder is gone: the node has ended, only the machine remains
    sh {END} &
    skyward_guard_pid=$!
  fi
done
"""
"""What the first process of a container does for the rest of its life.

A waiting shell also reaps processes that others have left behind.
"""
END_AGAIN_SECONDS = 30
"""Ending a machine may fail, for example during an outage of the cloud's API. It is tried until the machine is gone."""
LOGIN = """\
umask 022
if [ ! -x /usr/sbin/sshd ]; then
  for pause in 5 10 20 30 60 0; do
    apt-get update -qq &&
      DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends openssh-server curl ca-certificates >/dev/null && break
    sleep "$pause"
  done
fi
mkdir -p /run/sshd
umask 077
mkdir -p /root/.ssh
printf '\\n%s\\n' {public} >>/root/.ssh/authorized_keys
chmod 600 /root/.ssh/authorized_keys
chmod 700 /root /root/.ssh
touch /root/.no_auto_tmux
rm -f /etc/ssh/ssh_host_*
printf '%s\\n' {host_private} >/etc/ssh/ssh_host_ed25519_key
printf '%s\\n' {host_public} >/etc/ssh/ssh_host_ed25519_key.pub
"""  # noqa: E501
"""Installs our key and the machine's host key. An existing key file may lack the newline at its end.

Images without sshd are small, so curl and certificates, which a container needs to end itself, come with it. Another
process may be installing packages at the same time, so this is tried again.
"""
TOOLS = """\
command -v curl >/dev/null || { apt-get update -qq; DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends curl ca-certificates; } \\
  </dev/null >/dev/null 2>&1 &
"""  # noqa: E501
"""Installs what a container needs to end itself and small images lack. It runs early: the network may be down later."""
START_SSHD = """\
sshds() {
  for process in /proc/[0-9]*; do
    read -r name <"$process/comm" && [ "$name" = sshd ] && readlink "$process/exe" >/dev/null && echo "${process#/proc/}"
  done 2>/dev/null
}
running=$(sshds)
for pid in $running; do kill -HUP "$pid"; done
[ -z "$running" ] || sleep 1
[ -n "$(sshds)" ] || /usr/sbin/sshd
"""  # noqa: E501
"""A running sshd reads its keys again. A restart would race for the port, and the loser fails silently.

No `pkill`, because images lack it. A process without `exe` is a zombie.
"""
RELOAD_SSHD = """\
if ! { systemctl restart ssh || systemctl restart sshd; } >/dev/null 2>&1; then
  START
fi
""".replace("START", "\n  ".join(START_SSHD.splitlines()))
OBEY = "trap 'exit 0' TERM\n"
"""Without this trap the kernel ignores signals to a container's first process, also those of `docker stop`."""
FORGET = f"""\
[ ! -d {HOME}/instances ] ||
  rm -rf {HOME}/instances {END} {REBOOTED} /root/.ssh/authorized_keys /home/*/.ssh/authorized_keys
"""
"""Removes identity and keys from a machine that was started from another machine's disk.

On other machines it finds nothing.
"""
UNPACKED = 'umask 077; printf %s "$SKYWARD_BOOT" | base64 -d | gzip -d >/run/skyward-boot && exec sh /run/skyward-boot'
"""Runs what `packed` returned, from the environment variable SKYWARD_BOOT."""


# Keys for SSH to rented machines: our own key, and host keys of machines that do not exist yet.
#
# A machine gets its host key in its user data, so the client knows the key before it connects. The host key is
# derived from our key and from the launch token, which is a tag of the machine. Every process with our key derives
# the same one, also one that attaches or sweeps, so nothing is stored. All machines of one creating call share it.


@dataclass(frozen=True, slots=True)
class Key:
    """Our SSH key: `path` of the private one, and the public one as in a `.pub` file, without comment."""

    path: Path
    public: str


@dataclass(frozen=True, slots=True)
class HostKey:
    """A machine's host key. `private` is in OpenSSH's format and goes only into the machine's user data."""

    private: str
    public: str

    def __repr__(self) -> str:
        return f"HostKey(public={self.public!r})"


def our_key(path: str | None = None) -> Key:
    """Return the key at a path, or this user's key, which is created when it is first needed.

    A key at a path is an OpenSSH private key without passphrase. Raises BadRequest for any other file, if no key can be
    created, and for a key of this user's state folder that another user could have put there.
    """
    try:
        file = (
            Path(path).expanduser().absolute()
            if path is not None
            else user_state_path("skyward") / "ssh" / "id_ed25519"
        )
    except RuntimeError as error:
        raise BadRequest(f"the path {path} cannot be expanded: {error}") from error
    if path is None and not file.exists():
        try:
            _create_key(file)
        except OSError as error:
            raise BadRequest(
                f"the SSH key {file} cannot be created: {error}; name one of your own with ssh_key="
            ) from error
    return Key(file, _public(_load(file, is_found=path is None)))


def host_key(launch: str, key: Key) -> HostKey:
    """Return the host key of the machines of a launch. It is always the same, and secret without our private key.

    A repeated creating call with the same token must have the same user data (AWS: IdempotentParameterMismatch).
    """
    serialization = _serialization()
    ed25519 = importlib.import_module("cryptography.hazmat.primitives.asymmetric.ed25519")
    secret = _load(key.path).private_bytes(
        serialization.Encoding.DER, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    seed = hmac.new(secret, PURPOSE + launch.encode(), hashlib.sha256).digest()
    private = ed25519.Ed25519PrivateKey.from_private_bytes(seed)
    return HostKey(_fixed_text(seed, private.public_key().public_bytes_raw()), _public(private))


def endpoint_of(host: str, port: int, launch: str, key: Key, **more: Any) -> Endpoint:
    """Return where and with which keys root logs in on a machine of a launch."""
    public = host_key(launch, key).public
    return Endpoint(
        host=host, port=port, user="root", key=str(key.path), host_key=public, known_hosts=os.devnull, **more
    )


def _create_key(file: Path) -> None:
    """Create our key. If two processes do so at the same time, one complete key remains."""
    make_private(file.parent)
    private = importlib.import_module("cryptography.hazmat.primitives.asymmetric.ed25519").Ed25519PrivateKey.generate()
    make_file(file, _text(private).encode())


def _load(file: Path, *, is_found: bool = False) -> Any:
    """Return a private key. `is_found`: its path was not named, so no other user may have chosen the key."""
    serialization = _serialization()
    try:
        content = read_kept(file) if is_found else read_file(file)
        return serialization.load_ssh_private_key(content, None)
    except NotPrivate as error:
        raise BadRequest(
            f"the SSH key {file} is refused, because another user could have chosen it: {error}. Name one of your own"
            " with ssh_key="
        ) from error
    except OSError as error:
        raise BadRequest(f"the SSH key {file} cannot be read: {error}") from error
    # for example a key in a security token
    except (ValueError, TypeError, importlib.import_module("cryptography.exceptions").UnsupportedAlgorithm) as error:
        raise BadRequest(f"{file} is no OpenSSH private key without passphrase: {error}") from error


def _text(private: Any) -> str:
    serialization = _serialization()
    return private.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    ).decode()


def _fixed_text(seed: bytes, public: bytes) -> str:
    """Return an Ed25519 key in OpenSSH's format (its PROTOCOL.key), with 0 for its random number."""

    def field(content: bytes) -> bytes:
        return len(content).to_bytes(4) + content

    kind = field(b"ssh-ed25519") + field(public)
    private = bytes(8) + kind + field(seed + public) + field(b"")
    private += bytes(range(1, 1 + -len(private) % 8))
    content = (
        b"openssh-key-v1\0"
        + field(b"none")
        + field(b"none")
        + field(b"")
        + (1).to_bytes(4)
        + field(kind)
        + field(private)
    )
    lines = textwrap.wrap(base64.b64encode(content).decode(), 70)
    return "\n".join(["-----BEGIN OPENSSH PRIVATE KEY-----", *lines, "-----END OPENSSH PRIVATE KEY-----", ""])


def _public(private: Any) -> str:
    serialization = _serialization()
    return (
        private.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH).decode()
    )


def _serialization() -> Any:
    return importlib.import_module("cryptography.hazmat.primitives.serialization")


def directory_of(machine_id: str) -> str:
    """Return the directory of a machine with this id."""
    return f"{HOME}/instances/{machine_id}"


def boot_script(
    startup: str, tags: Tags, machine_id: str, end_script: str = "poweroff", *, is_container: bool = False
) -> str:
    """Return POSIX sh that starts `startup`, to be run once as root.

    `machine_id` is shell text that prints the machine's id. END_COMMAND runs `end_script`, again until it succeeds: it
    ends the machine, for good where it can. `is_container`: the script is for `container_script`, and runs again
    whenever the container restarts.
    """
    if f"\n{DELIMITER}\n" in f"\n{startup}\n{end_script}\n":
        raise BadRequest(f"a startup script cannot have a line {DELIMITER!r}")
    variables = {
        "SKYWARD_POOL_ID": tags[POOL_TAG],
        "SKYWARD_RANK": tags.get(RANK_TAG, "0"),
        TAGS_VARIABLE: to_word(tags),
    }
    start = START_GUARD.format(variables=shlex.join(f"{name}={value}" for name, value in variables.items()))
    if is_container:
        start = START_GUARD_ONCE.format(
            start=start.rstrip("\n"),
            began=BEGAN,
            expires=_seconds(tags.get(EXPIRES_TAG)),
            start_by=int(_seconds(tags.get(CREATED_TAG)) or time.time()) + START_SECONDS,
            start_seconds=START_SECONDS,
        )
    boot = BOOT.format(
        machine_id=machine_id,
        launch=shlex.quote(tags.get(LAUNCH_TAG, "unknown")),
        home=HOME,
        end=END,
        boot_id=BOOT_ID,
        ends="skyward: node ends: its machine was restarted",
        rebooted=REBOOTED,
        unit=UNIT,
        unit_directory=posixpath.dirname(UNIT),
        end_script=end_script,
        again_seconds=END_AGAIN_SECONDS,
        startup=startup.removesuffix("\n"),
        delimiter=DELIMITER,
    )
    return boot + start


def _seconds(text: str | None) -> str:
    """Return the seconds since 1970 of a tag; "" if it has none."""
    return text if text is not None and re.fullmatch("[0-9]{1,15}", text) else ""


def cloud_config(boot: str, key: Key, host: HostKey, *, may_be_a_copy: bool = False) -> str:
    """Return user data for an image with cloud-init: host key, our key for root, boot script.

    The host key is set before sshd starts, and the boot script runs last.

    `may_be_a_copy`: the disk may be that of another machine of ours. Its identity is removed before logins are
    possible, once for each machine and not at each boot (`bootcmd` comes before the modules `users-groups` and `ssh`;
    cloud-init-per(1)).
    """
    config: dict[str, object] = {
        "disable_root": False,
        "ssh_pwauth": False,
        "ssh_authorized_keys": [key.public],
        "ssh_deletekeys": True,
        "ssh_genkeytypes": ["ed25519"],
        "ssh_keys": {"ed25519_private": host.private, "ed25519_public": host.public},
        "runcmd": [["sh", "-c", boot]],
    }
    if may_be_a_copy:
        config["bootcmd"] = [["cloud-init-per", "instance", "skyward-forget", "sh", "-c", FORGET]]
    return "#cloud-config\n" + _flat(config) + "\n"


def script(boot: str, key: Key, host: HostKey) -> str:
    """Return the same as a shell script, for a machine that runs one as root some time after its sshd has started."""
    return "#!/bin/sh\n" + boot + _login(key, host) + RELOAD_SSHD


def container_script(boot: str, key: Key, host: HostKey) -> str:
    """Return the same as the main script of a container, which may have no sshd and no init. It ends on SIGTERM.

    The guard starts before packages are installed, which may take long or fail. `boot` was made with `is_container`.
    """
    return "#!/bin/sh\n" + OBEY + boot + TOOLS + _login(key, host) + START_SSHD + WATCH


def packed(text: str) -> str:
    """Return a script as one word, where room is short or line breaks are not allowed. `UNPACKED` runs it."""
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


def _login(key: Key, host: HostKey) -> str:
    return LOGIN.format(
        public=shlex.quote(key.public),
        host_private=shlex.quote(host.private.rstrip("\n")),
        host_public=shlex.quote(host.public),
    )


def _flat(config: object) -> str:
    r"""Return JSON that every YAML parser reads alike. PyYAML reads JSON's "\ud83d\ude00" as two invalid characters."""
    text = json.dumps(config, indent=1, ensure_ascii=False)
    return re.sub("[\x7f-\uffff]", lambda match: f"\\u{ord(match[0]):04x}", text)
