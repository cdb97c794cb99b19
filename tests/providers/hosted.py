"""Machines for the fake clouds: each rented machine becomes a host of the test bed, which boots with its user data.

hosting = Hosting(fleet, prepare=mirror.configure) hosting.rent("123", lambda host: cloud_init(host, "123", user_data))
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import skyward_core as sky
from tests.testbed import Fleet, Host
from tests.waiting import wait_until

RESTART = "#!/bin/sh\nexec kill -HUP 1\n"
"""Replaces systemctl and pkill on hosts, because their first process is sshd. It makes sshd read its keys again."""


@dataclass(frozen=True)
class Rented:
    """A cloud with hosts as machines, and a method to preempt one."""

    provider: sky.Provider
    hosting: Hosting
    alive: Callable[[], set[str]]
    preempt: Callable[[str], None]
    secrets: tuple[str, ...]


class Hosting:
    """Hosts by the cloud's ids. Those that are up are crashed when it closes."""

    def __init__(self, fleet: Fleet, prepare: Callable[[Host], object]) -> None:
        self._fleet = fleet
        self._prepare = prepare
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._ended: set[str] = set()
        self.hosts: dict[str, Host] = {}
        self.failures: list[BaseException] = []

    @property
    def gateway(self) -> str:
        """Return the address of this machine that hosts can reach."""
        return self._fleet.network.gateway

    def rent(self, machine_id: str, boot: Callable[[Host], object]) -> None:
        """Start a host in a thread, and boot it."""
        thread = threading.Thread(
            target=self._bring_up, args=(machine_id, boot), name=f"boot-{machine_id}", daemon=True
        )
        self._threads.append(thread)
        thread.start()

    def _bring_up(self, machine_id: str, boot: Callable[[Host], object]) -> None:
        try:
            host = self._fleet.create()
            self._prepare(host)
            for name in ("systemctl", "pkill"):
                place = host.root / "usr/local/bin" / name
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_text(RESTART)
                place.chmod(0o755)
            boot(host)
            with self._lock:
                self.hosts[machine_id] = host
                is_ended = machine_id in self._ended
            if is_ended:
                host.crash()
        except BaseException as error:
            self.failures.append(error)
            raise

    def ip(self, machine_id: str) -> str | None:
        """Return the address of a host that has booted."""
        host = self.hosts.get(machine_id)
        return None if host is None else host.ip

    def is_off(self, machine_id: str) -> bool:
        """Return whether a host has started and then powered itself off."""
        host = self.hosts.get(machine_id)
        return host is not None and not host.is_up

    def end(self, machine_id: str) -> None:
        """Turn a host off as soon as it has started. Do nothing if it is already off."""
        with self._lock:
            self._ended.add(machine_id)
            host = self.hosts.get(machine_id)
        if host is not None and host.is_up:
            host.crash()

    def close(self) -> None:
        """Turn all hosts off. Raise the errors of hosts that failed to start."""
        for thread in list(self._threads):
            thread.join(60)
        for machine_id in list(self.hosts):
            self.end(machine_id)
        if self.failures:
            raise self.failures[0]


# ── boot ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def cloud_init(host: Host, instance_id: str, user_data: str) -> None:
    """Do what cloud-init does with our user data. It sets id, host key and keys before logins are possible, and runs
    commands at the end in the environment of a boot.
    """
    head, _, text = user_data.partition("\n")
    assert head == "#cloud-config"
    config = json.loads(text)
    assert config["disable_root"] is False
    assert config["ssh_deletekeys"] is True
    for command in config.get("bootcmd", []):
        assert command[:2] == ["cloud-init-per", "instance"]
        as_boot(host, shlex.join(command[3:]))
    # the test bed's own login; no cloud has it
    if not (host.root / "root/.ssh/authorized_keys").exists():
        (host.root / "root/.ssh/authorized_keys").write_text(host.key_path.with_suffix(".pub").read_text())
    data = host.root / "var/lib/cloud/data"
    data.mkdir(parents=True, exist_ok=True)
    (data / "instance-id").write_text(f"{instance_id}\n")
    keys = config["ssh_keys"]
    place = host.root / "etc/ssh/ssh_host_ed25519_key"
    place.write_text(keys["ed25519_private"])
    place.with_suffix(".pub").write_text(keys["ed25519_public"] + "\n")
    with (host.root / "root/.ssh/authorized_keys").open("a") as allowed:
        allowed.write("".join(f"{key}\n" for key in config["ssh_authorized_keys"]))
    os.kill(host.pid, signal.SIGHUP)
    know(host, keys["ed25519_public"])
    for command in config["runcmd"]:
        as_boot(host, shlex.join(command))


def boot_script(host: Host, hostname: str, text: str) -> None:
    """Run a startup script as a machine with this name does, some time after its sshd has begun to answer."""
    place = host.root / "usr/local/bin/hostname"
    place.write_text(f"#!/bin/sh\necho {shlex.quote(hostname)}\n")
    place.chmod(0o755)
    as_boot(host, text)
    know(host, (host.root / "etc/ssh/ssh_host_ed25519_key.pub").read_text())


def container(host: Host, variables: Mapping[str, str], arguments: Sequence[str]) -> None:
    """Start a container's main process, which does not return, and wait until its sshd has the given key."""
    before = host_key_of(host)
    as_boot(host, f"setsid {shlex.join(arguments)} &", variables)

    def new_key() -> str:
        found = host_key_of(host)  # read once: the next moment it may be away
        return found if found.endswith("\n") and found != before else ""

    know(host, wait_until(new_key, f"{host.name} to have its host key"))


def host_key_of(host: Host) -> str:
    """Return a host's present public key, complete or not; "" while its boot script replaces the key."""
    try:
        return (host.root / "etc/ssh/ssh_host_ed25519_key.pub").read_text()
    except FileNotFoundError:
        return ""


def know(host: Host, public: str) -> None:
    """Wait until a host shows this key, and expect it from now on."""
    host.known_hosts_path.write_text(f"{host.ip} {' '.join(public.split()[:2])}\n")
    wait_until(lambda: host.run("true").returncode == 0, f"{host.name} to show its new key")


def as_boot(host: Host, command: str, variables: Mapping[str, str] | None = None) -> None:
    """Run a command as part of the boot, not of a login. Its environment has PATH, HOME and the given variables."""
    words = ["env", "-i", "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/root"]
    words += [f"{name}={value}" for name, value in (variables or {}).items()]
    done = host.run(f"{shlex.join(words)} sh -c {shlex.quote(command)} </dev/null >>/var/log/boot.log 2>&1")
    if done.returncode:
        log = Path(host.root / "var/log/boot.log")
        raise RuntimeError(f"{host.name} did not boot: {done.stderr} {log.read_text() if log.exists() else ''}")
