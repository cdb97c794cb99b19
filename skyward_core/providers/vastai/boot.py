"""Shell text of Vast.ai's containers: the first process, and how a container ends itself."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from itertools import batched

from skyward_core.errors import BadRequest
from skyward_core.providers import userdata
from skyward_core.providers.base import LAUNCH_TAG, Tags
from skyward_core.providers.ssh_keys import Key, host_key
from skyward_core.providers.vastai.api import URL

ENVIRONMENT_VALUE = 240
"""Characters of one value of the environment. The schema of the creating call allows 256
(docs.vast.ai/api-reference/openapi/yaml/create_instance.yaml, x-input-validation, 2026-11)."""
ENVIRONMENT = 32_768
"""The same of all names and values. Vast.ai refuses more ("total length > 32KB", reported on 2026-10-08)."""
BOOT = "SKYWARD_BOOT"
UNPACKED = (
    f'umask 077; n=0; while eval "part=\\${{{BOOT}_$n-}}"; [ -n "$part" ]; do printf %s "$part"; n=$((n + 1)); done |'
    " base64 -d | gzip -d >/run/skyward-boot && exec sh /run/skyward-boot"
)
"""Joins the parts of the script (`in_parts`) and runs it."""
MAIN = """trap 'exit 0' TERM; while :; do ({}) & wait "$!"; sleep 5 & wait "$!"; done"""
"""The first process of the container. It ends only on SIGTERM, which `sleep` as a first process would ignore.

If its only child is killed, it runs the child again, and that finds that the container was restarted.
"""
TOOLS = """\
command -v curl >/dev/null || { apt-get update -qq; DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends curl ca-certificates; } \\
  </dev/null >/dev/null 2>&1 &
"""  # noqa: E501
"""Installs what END needs and small images lack. It runs early, because the network may be down later."""
END = f"""\
variable() {{ tr '\\0' '\\n' </proc/1/environ | sed -n "s/^$1=//p"; }} # processes over SSH do not inherit the container's variables
request() {{ # method, path, body: succeeds if it was accepted
  answer=$(printf 'Authorization: Bearer %s' "$key" |
    curl -sS -m 20 -w ' %{{http_code}}' -X "$1" -H @- -H 'Content-Type: application/json' -d "$3" "{URL}/api/v0/instances/$2" 2>/dev/null)
  case $answer in *'"success": true'*' '2?? | *'"success":true'*' '2??) return 0 ;; *) return 1 ;; esac
}}
pause=5
while :; do
  id=${{CONTAINER_ID:-$(variable CONTAINER_ID)}} key=${{CONTAINER_API_KEY:-$(variable CONTAINER_API_KEY)}}
  [ -n "$id" ] || {{ id=$(variable VAST_CONTAINERLABEL) && id=${{id#C.}}; }}
  if [ -n "$id" ] && [ -n "$key" ]; then
    request DELETE "$id/" '{{}}' || request DELETE '' '{{"instance_ids": ['"$id"']}}' || request PUT "$id/" '{{"state": "stopped"}}' # then only its disk is billed
  fi
  sleep "$pause"
  [ "$pause" -ge 60 ] || pause=$((pause * 2))
done"""  # noqa: E501
"""Tries every documented method until one succeeds.

The first process never ends, because Vast.ai does not document what becomes of a container that has ended. After a
restart it ends itself as soon as it begins (`userdata`).
"""


def in_parts(name: str, value: str) -> dict[str, str]:
    """Return the variables that together have this value: NAME_0, NAME_1, ..., each short enough for Vast.ai."""
    parts = batched(value, ENVIRONMENT_VALUE)
    return {f"{name}_{number}": "".join(part) for number, part in enumerate(parts)}


def joined(environment: Mapping[str, str], name: str) -> str:
    """Return the value that `in_parts` has split; "" if there is none."""
    parts: list[str] = []
    while (part := environment.get(f"{name}_{len(parts)}")) is not None:
        parts.append(part)
    return "".join(parts)


def environment_of(boot: str, more: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a container: the packed script, and the tags that its label has no room for.

    Raises BadRequest if Vast.ai would refuse it.
    """
    split = [in_parts(name, value) for name, value in {BOOT: boot, **more}.items()]
    environment = {name: value for parts in split for name, value in parts.items()}
    length = sum(len(name) + len(value) for name, value in environment.items())
    if length >= ENVIRONMENT:
        raise BadRequest(
            f"the startup script is too long: an environment at Vast.ai has {ENVIRONMENT} characters at most, and this"
            f" has {length}, compressed"
        )
    return environment


def packed_boot(startup: str, tags: Tags, machine_id: str, key: Key) -> str:
    """Return the container's script, packed for its environment."""
    boot = userdata.boot_script(startup, tags, f"printf %s {shlex.quote(machine_id)}", END, is_container=True) + TOOLS
    return userdata.packed(userdata.container_script(boot, key, host_key(tags[LAUNCH_TAG], key)))
