"""Shell text of Vast.ai's containers: the first process, and how a container ends itself."""

from __future__ import annotations

import shlex

from skyward_core.providers import userdata
from skyward_core.providers.base import LAUNCH_TAG, Tags
from skyward_core.providers.ssh_keys import Key, host_key
from skyward_core.providers.vastai.api import URL

MAIN = """trap 'exit 0' TERM; while :; do ({}) & wait "$!"; sleep 5 & wait "$!"; done"""
"""The first process of the container. It ends when it is told to, which `sleep` as a first process would not, and at no
other moment: who kills its only child has it run again, and find that it was started anew.
"""
TOOLS = """\
command -v curl >/dev/null || { apt-get update -qq; DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends curl ca-certificates; } \\
  </dev/null >/dev/null 2>&1 &
"""  # noqa: E501
"""What the end needs and small images lack; there may be no network when it is needed."""
END = f"""\
told() {{ tr '\\0' '\\n' </proc/1/environ | sed -n "s/^$1=//p"; }} # what is started over SSH does not inherit them
ask() {{ # method, path, body: succeeds if it was accepted
  answer=$(printf 'Authorization: Bearer %s' "$key" |
    curl -sS -m 20 -w ' %{{http_code}}' -X "$1" -H @- -H 'Content-Type: application/json' -d "$3" "{URL}/api/v0/instances/$2" 2>/dev/null)
  case $answer in *'"success": true'*' '2?? | *'"success":true'*' '2??) return 0 ;; *) return 1 ;; esac
}}
pause=5
while :; do
  id=${{CONTAINER_ID:-$(told CONTAINER_ID)}} key=${{CONTAINER_API_KEY:-$(told CONTAINER_API_KEY)}}
  [ -n "$id" ] || {{ id=$(told VAST_CONTAINERLABEL) && id=${{id#C.}}; }}
  if [ -n "$id" ] && [ -n "$key" ]; then
    ask DELETE "$id/" '{{}}' || ask DELETE '' '{{"instance_ids": ['"$id"']}}' || ask PUT "$id/" '{{"state": "stopped"}}' # that costs its disk alone
  fi
  sleep "$pause"
  [ "$pause" -ge 60 ] || pause=$((pause * 2))
done"""  # noqa: E501
"""By every way that Vast documents, and for as long as it takes: the first process is never ended, for what becomes of
a container that has ended is told nowhere. If it is started anew, it ends itself as soon as it begins (`userdata`).
"""


def packed_boot(startup: str, tags: Tags, machine_id: str, key: Key) -> str:
    """Return what the container runs, packed for its environment."""
    boot = userdata.boot_script(startup, tags, f"printf %s {shlex.quote(machine_id)}", END, is_container=True) + TOOLS
    return userdata.packed(userdata.container_script(boot, key, host_key(tags[LAUNCH_TAG], key)))
