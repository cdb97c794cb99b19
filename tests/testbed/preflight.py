"""Checks whether this machine can run the test bed, and prints the reason in one line."""

import os
import shutil
import subprocess
import sys

PACKAGES = {
    "sshd": "openssh-server",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
    "ip": "iproute2",
    "unshare": "util-linux",
    "nsenter": "util-linux",
}
"""Commands that the test bed calls, and the Debian packages that have them."""

NAMESPACES = ("--net", "--mount", "--pid", "--uts", "--ipc", "--cgroup", "--fork", "--kill-child=KILL")
"""The options of `unshare` that create a host."""

REHEARSAL = """set -e
mount -t tmpfs rehearsal "$1"; mkdir "$1/upper" "$1/work" "$1/root"
mount -t overlay -o "lowerdir=/,upperdir=$1/upper,workdir=$1/work" overlay "$1/root"
mount -t proc proc "$1/root/proc"
ip link add name bridge0 type bridge
ip link add name port0 type veth peer name eth0
ip link set dev port0 master bridge0
ip link set dev port0 type bridge_slave isolated on
"""


def why_not() -> str | None:
    """Return why hosts cannot be created here, in one line; None if they can.

    It tries this in its own namespaces and leaves nothing.
    """
    if sys.platform != "linux":
        return f"the test bed needs Linux namespaces, and this is {sys.platform}"
    if missing := sorted({package for command, package in PACKAGES.items() if _which(command) is None}):
        return f"the test bed needs: apt-get install {' '.join(missing)}"
    if os.geteuid() != 0:
        return "the test bed needs root, to make network namespaces and mounts"
    done = subprocess.run(
        ["unshare", *NAMESPACES, "sh", "-c", REHEARSAL, "rehearsal", "/mnt"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    if done.returncode:
        return f"this kernel refuses the test bed: {' '.join(done.stderr.split()) or f'exit code {done.returncode}'}"
    return None


def _which(command: str) -> str | None:
    """Also search the folders of administrators' commands, which a user's PATH on Debian lacks."""
    places = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
    return shutil.which(command, path=places)
