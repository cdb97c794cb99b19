r"""Shell text that makes the working directory of the calls: the image's included files, and what its commands make.

As in `shell`, the program is constant and values enter it only as quoted words.
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from collections.abc import Mapping, Sequence

from skyward_core.image.image import Image
from skyward_core.secret import looks_secret


def make_work(image: Image, archive: str, env: Mapping[str, str]) -> str:
    """Return lines of bash that fill the working directory of the calls and enter it.

    They follow `Image.bootstrap()`'s text, or `shell.prelude()`, in the same shell, and need
    `$SKYWARD_INSTANCE_DIRECTORY`. `archive` is the path of the included files on the node, as a word of bash,
    and `env` has the variables that commands see.

    Without commands the archive is unpacked for each node. With commands the phase is "shell". They run once on each
    machine, in a directory that keeps what they make, and each node gets a copy of it. They run again, in an empty
    directory, if the commands, the included files, the packages or a variable that they name are others, and after a
    failure or a kill.
    """
    if not image.shell:
        unpack = f'skyward_run skyward_unpack {archive} "$PWD"' if image.included else ""
        return "\n".join([_ENTER, *([_UNPACK, unpack] if unpack else [])])
    parts = [image.content_hash(), *(one.sha256 for one in image.included), list(image.shell), _named(image.shell, env)]
    key = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:12]
    words = f"{key} {archive if image.included else shlex.quote('')} {shlex.join(image.shell)}"
    return "\n".join([_ENTER, _UNPACK, _COMMANDS, f"skyward_prepare {words}"])


def _named(commands: Sequence[str], env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables whose names are in the commands. A token decides who may read, and not what is read: a new
    one is no reason to run them again.
    """
    words = set(re.findall(r"\w+", " ".join(commands)))
    return {name: value for name, value in sorted(env.items()) if name in words and not looks_secret(name, value)}


_ENTER = """mkdir -p -- "$SKYWARD_INSTANCE_DIRECTORY/work"
cd -- "$SKYWARD_INSTANCE_DIRECTORY/work" || exit 1"""

_UNPACK = r"""skyward_unpack() { # archive, folder
  tar -xzf "$1" -C "$2"
}
"""

# A service that a command starts must not inherit the lock, so 9>&- closes it.
_COMMANDS = r"""skyward_prepare() { # key, archive or "", commands
  local made="$skyward_environment/prepared/$1" archive=$2
  shift 2
  skyward_phase shell
  skyward_lock "$made.lock"
  if [ ! -f "$made.complete" ]; then
    skyward_run rm -rf -- "$made"
    skyward_run mkdir -p -- "$made"
    [ -z "$archive" ] || skyward_run skyward_unpack "$archive" "$made"
    for skyward_command; do
      (cd -- "$made" && PATH="$skyward_environment/bin:$SKYWARD_HOME/uv/bin:$PATH" VIRTUAL_ENV="$skyward_environment" exec bash -eo pipefail -c "$skyward_command") </dev/null 9>&-
    done
    skyward_command=
    : >"$made.complete"
  fi
  skyward_run cp -a -- "$made/." .
  skyward_unlock
}
"""  # noqa: E501
