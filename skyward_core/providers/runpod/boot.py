"""Shell text with which a pod of RunPod ends itself."""

from __future__ import annotations

MACHINE_ID = 'printf %s "$RUNPOD_POD_ID"'
TOOLS = """\
command -v curl >/dev/null || { apt-get update -qq; DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends curl ca-certificates; } \\
  </dev/null >/dev/null 2>&1 &
"""  # noqa: E501
"""Installs what END needs and small images lack. It runs early, because the network may be down later."""
END = """\
variable() {{ tr '\\0' '\\n' </proc/1/environ | sed -n "s/^$1=//p"; }} # processes over SSH do not inherit the container's variables
request() {{ # method, address, body: succeeds if it was accepted
  answer=$(printf 'Authorization: Bearer %s' "$key" |
    curl -sS -m 20 -w ' %{{http_code}}' -X "$1" -H @- -H 'Content-Type: application/json' ${{3:+-d}} ${{3:+"$3"}} "$2" 2>/dev/null)
  case $answer in
    *'"errors"'*) return 1 ;; # GraphQL refuses with 200
    *' '2??) return 0 ;;
    *) return 1 ;;
  esac
}}
pause=5
while :; do
  id=${{RUNPOD_POD_ID:-$(variable RUNPOD_POD_ID)}} key=${{RUNPOD_API_KEY:-$(variable RUNPOD_API_KEY)}} is_accepted=
  if [ -n "$id" ] && [ -n "$key" ]; then
    request DELETE {url}/v2/pods/"$id" && is_accepted=yes
    request POST {url}/v2/pods/"$id"/action '{{"action": "terminate"}}' && is_accepted=yes
    request POST {url}/graphql '{{"query": "mutation {{ podTerminate(input: {{podId: \\\\"'"$id"'\\\\"}}) }}"}}' && is_accepted=yes
    if command -v runpodctl >/dev/null; then RUNPOD_API_KEY=$key runpodctl remove pod "$id" && is_accepted=yes; fi
    [ -n "$is_accepted" ] || request POST {url}/v2/pods/"$id"/action '{{"action": "stop"}}' # a pod that is off is billed for no GPU
  fi
  sleep "$pause"
  [ "$pause" -ge 60 ] || pause=$((pause * 2))
done"""  # noqa: E501
"""Tries every documented method until one succeeds. Version 1 of the REST API is not one any more: its date was
2026-11-15.

RunPod does not document which of them a pod's own key may use (fact sheet, "added"). The first process never ends,
because a container that ends is restarted and billed.
"""
