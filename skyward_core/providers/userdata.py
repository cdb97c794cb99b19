"""What a rented machine runs when it comes up: whom to let in, who it is, and its startup script, cut loose from
whatever runs this.

The same four variables and the same directory as everywhere (decisions/0006). The machine's id is told by the machine:
a text of shell that prints it, for the answer to the creating call comes too late. Where it prints nothing, the token
of the launch stands in: the client finds no such node, but the lease holds.

A machine that is started anew has lost its node and its guard, whose clock is the uptime. It ends itself at once,
whatever its lease was, so that no lease is longer for it: a unit of systemd does that, for cloud-init and startup
scripts run at the first boot alone. Which boot was the first is told by the kernel's id of the boot, and whose it was
by the machine's id, for a disk may be copied. Stopped between any two lines:

    boot script begun                    no unit: the reaper and the sweep end what is started anew
    the unit's script written            the same; a half of it does nothing
    unit and link written                started anew, it ends itself; in the same boot the unit does nothing
    startup begun                        the guard watches; started anew, it ends itself
    guard has ended, power is off        switched on by somebody, it ends itself again

A container has no systemd, and the cloud runs its first process, our main script, again whenever it ends, on the same
disk or a new one (`is_container`):

    first start                          a file says so; the guard watches, and the first process watches the guard and
    the time of day started anew, the file is there      the guard is told that the node has ended before it begins: no
    work is started, and the end is asked for started anew on another disk         the same from START_SECONDS after the
    request on; the script, which is in the environment, holds that moment guard killed, whoever did it         another
    guard is started, and told the same
    the pool's last moment has come      the guard is told so, and a minute later the first process asks for the end
    itself

So the first process never ends by itself: a container that ends is started anew, and paid for.
"""

from __future__ import annotations

import base64
import gzip
import json
import posixpath
import re
import shlex
import time

from skyward_core.errors import BadRequest
from skyward_core.providers.base import CREATED_TAG, EXPIRES_TAG, LAUNCH_TAG, POOL_TAG, RANK_TAG, Tags
from skyward_core.providers.ssh_keys import HostKey, Key
from skyward_core.providers.tagging import TAGS_VARIABLE, to_word

HOME = "/root/.cache/skyward"
END = "/root/.cache/skyward/end"
"""The script with which a machine ends itself: `end_command` of a cloud is to run it."""
END_COMMAND = f"exec sh {END}"
REBOOTED = "/root/.cache/skyward/rebooted"
"""The script that ends a machine which was started anew."""
UNIT = "/etc/systemd/system/skyward-guard.service"
BOOT_ID = "/proc/sys/kernel/random/boot_id"
"""Another one at each boot, random(4)."""
BEGAN = "/root/.cache/skyward/began"
"""When a container was started, one line for each time."""
START_SECONDS = 3600
"""After the request for a container: what is started later was started before.

A launch waits for ten minutes; the rest is for clocks that differ.
"""
DELIMITER = "SKYWARD_END_OF_FILE"

BOOT = """\
umask 077
id=$({machine_id})
told=$id
case $id in '' | .* | *[!A-Za-z0-9._-]*) id={launch} told= ;; esac
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
    echo "boot='$(cat {boot_id})' told='$told' log='$directory/log'"
    cat <<'{delimiter}'
[ "$(cat {boot_id})" != "$boot" ] || exit 0
again=$({machine_id})
case $again in .* | *[!A-Za-z0-9._-]*) again= ;; esac
case $told/$again in /* | */ | "$told/$told") ;; *) exit 0 ;; esac # on a copy of that disk: this machine is not ours to end
{{ echo '{ends}' >>"$log"; }} 2>/dev/null
exec sh {end}
{delimiter}
  }} >{rebooted}
  (
    umask 022
    mkdir -p {unit_directory}/multi-user.target.wants
    cat >{unit} <<'{delimiter}'
[Unit]
Description=End this machine, which was rented for a time: it was started anew, and nobody watches it
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
"""  # noqa: E501
"""Containers have no systemd, sd_booted(3). The unit waits for the network, which the end may need; what cloud-init's
first stages do, such as FORGET, comes before that (cloud-init.service: Before=network-online.target).
"""
START_GUARD = """\
env HOME=/root SKYWARD_INSTANCE_ID="$id" SKYWARD_INSTANCE_DIRECTORY="$directory" {variables} \\
  setsid sh "$directory/startup.sh" </dev/null >>"$directory/log" 2>&1 &
"""
START_GUARD_ONCE = """\
skyward_until='{expires}'
skyward_over() {{ # reason: the node has ended; the guard says so, stops its work and ends the machine
  {{ echo "$1" >"$directory/ended"; }} 2>/dev/null
}}
skyward_guard() {{
{start}
  skyward_guard_pid=$!
}}
skyward_now=$(date +%s)
if [ -e {began} ]; then
  skyward_over "its container was started anew"
elif [ "$skyward_now" -ge {start_by} ]; then
  skyward_over "its container was started more than {start_seconds} s after it was asked for, by its clock: it was started anew, or a clock is wrong"
fi
{{ echo "$skyward_now" >>{began}; }} 2>/dev/null
skyward_guard
"""  # noqa: E501
"""Whatever the container's environment and disk say, no start but the first has a lease.

The shell's own job table says whether the guard lives.
"""
WATCH = f"""\
skyward_ending=''
while :; do
  sleep 10 &
  wait "$!"
  if [ -n "$skyward_until" ] && [ "$(date +%s)" -ge "$skyward_until" ]; then
    skyward_over "the pool's last moment has come"
    [ -n "$skyward_ending" ] || {{ (sleep 60 && exec sh {END}) & skyward_ending=$!; }}
  fi
  kill -0 "$skyward_guard_pid" 2>/dev/null && continue
  skyward_over "its guard is gone"
  if [ -f "$directory/startup.sh" ]; then
    skyward_guard
  else # the node's folder is gone: it has ended, and only the end is missing
    sh {END} &
    skyward_guard_pid=$!
  fi
done
"""
"""What the first process of a container does for the rest of its life; a shell that waits also lets go of the processes
that others have left behind.
"""
END_AGAIN_SECONDS = 30
"""Ending a machine may fail, for one because the cloud's API is out: it is tried until the machine is gone."""

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
"""Lets us in and makes the machine who we take it for. Others may have left a file of keys whose last line has no end.

An image without sshd is small: what a container needs to end itself comes with it. Somebody else may be installing at
that moment: it is tried again.
"""

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
"""One that runs reads its keys anew. Ending it and starting another is a race for its port, which the other loses
without a word.

No `pkill`: images lack it. A process without `exe` is dead and waits to be taken notice of.
"""
RELOAD_SSHD = """\
if ! { systemctl restart ssh || systemctl restart sshd; } >/dev/null 2>&1; then
  START
fi
""".replace("START", "\n  ".join(START_SSHD.splitlines()))
OBEY = "trap 'exit 0' TERM\n"
"""Nobody else, neither from inside nor `docker stop`, ends the first process of a container with a signal that it does
not wait for.
"""

FORGET = f"""\
[ ! -d {HOME}/instances ] ||
  rm -rf {HOME}/instances {END} {REBOOTED} /root/.ssh/authorized_keys /home/*/.ssh/authorized_keys
"""
"""Has a machine that was started from another one's disk forget who that was, and who was let in there.

Elsewhere it finds nothing.
"""


def directory_of(machine_id: str) -> str:
    """Return where a machine that calls itself so has its files."""
    return f"{HOME}/instances/{machine_id}"


def boot_script(
    startup: str, tags: Tags, machine_id: str, end_script: str = "poweroff", *, is_container: bool = False
) -> str:
    """Return POSIX sh, to be run once as root, that starts `startup`. `machine_id` is shell text that prints the
    machine's id.

    `end_script` is what END_COMMAND runs: how the machine ends itself, for good where it can. It is run again as long
    as it has not. `is_container`: the script is for `container_script`, and is run again whenever the container is
    started anew.
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
        ends="skyward: node ends: its machine was started anew",
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
    """A moment as a tag tells it, in seconds since 1970; "" if it tells none."""
    return text if text is not None and re.fullmatch("[0-9]{1,15}", text) else ""


def cloud_config(boot: str, key: Key, host: HostKey, *, may_be_a_copy: bool = False) -> str:
    """Return user data for a machine whose image has cloud-init: its host key before sshd starts, root let in with our
    key, the boot script at the end.

    `may_be_a_copy`: its disk may be that of another machine of ours, which is forgotten before anybody is let in, once
    for each machine and not at each boot (`bootcmd` comes before the modules `users-groups` and `ssh`;
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
    """Return the same as the main script of a container, which may have no sshd and has nothing that would start one;
    it ends when it is told to.

    The guard is there before anything is installed, which may take long or come to nothing. `boot` was made with
    `is_container`.
    """
    return "#!/bin/sh\n" + OBEY + boot + _login(key, host) + START_SSHD + WATCH


def packed(text: str) -> str:
    """Return a script in one word, where there is little room or line breaks do not pass; `UNPACKED` of it runs it."""
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


UNPACKED = 'umask 077; printf %s "$SKYWARD_BOOT" | base64 -d | gzip -d >/run/skyward-boot && exec sh /run/skyward-boot'
"""Runs what `packed` returned, from the environment variable SKYWARD_BOOT."""


def _login(key: Key, host: HostKey) -> str:
    return LOGIN.format(
        public=shlex.quote(key.public),
        host_private=shlex.quote(host.private.rstrip("\n")),
        host_public=shlex.quote(host.public),
    )


def _flat(config: object) -> str:
    r"""Return JSON that is YAML as well, letter for letter: PyYAML takes what JSON makes of a smiley, "\ud83d\ude00",
    for two letters that nobody can write.
    """
    text = json.dumps(config, indent=1, ensure_ascii=False)
    return re.sub("[\x7f-\uffff]", lambda match: f"\\u{ord(match[0]):04x}", text)
