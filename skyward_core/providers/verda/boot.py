"""Shell text with which a machine of Verda deletes itself."""

from __future__ import annotations

END_BY_ITSELF = """\
command -v python3 >/dev/null || exec poweroff
python3 - "$(hostname)" <<'SKYWARD_PYTHON'
import json, sys, urllib.request

URL, CLIENT_ID, CLIENT_SECRET = {words}

def ask(method, path, body=None, token=""):
    headers = {{"Content-Type": "application/json", "Authorization": "Bearer " + token}} if token else {{"Content-Type": "application/json"}}
    request = urllib.request.Request(URL + path, None if body is None else json.dumps(body).encode(), headers, method=method)
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.loads(answer.read() or b"null")

try:
    token = ask("POST", "/oauth2/token", {{"grant_type": "client_credentials", "client_id": CLIENT_ID, "client_secret": CLIENT_SECRET}})["access_token"]
    for machine in ask("GET", "/instances", token=token):
        if machine["hostname"] == sys.argv[1]:
            disk = {{"volume_ids": [machine["os_volume_id"]], "delete_permanently": True}} if machine.get("os_volume_id") else {{}}
            ask("PUT", "/instances", {{"id": [machine["id"]], "action": "delete", **disk}}, token)
except Exception as error:
    print("this machine cannot delete itself yet:", type(error).__name__, getattr(error, "code", ""), flush=True)
SKYWARD_PYTHON"""  # noqa: E501
"""Runs again until the machine is gone. A machine that is off would be billed too, and could not try again."""
