"""How machines of REST clouds end themselves, in real shells. The tools that a script calls record their arguments."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

import skyward_core as sky
from skyward_core.providers import userdata
from skyward_core.providers.digitalocean import MACHINE_ID
from skyward_core.providers.runpod import END as RUNPOD_END
from skyward_core.providers.vastai import END as VAST_END
from skyward_core.providers.vastai import MAIN
from tests.providers.contract import STARTUP, cheapest, tags
from tests.providers.fake_verda import CLIENT_ID, CLIENT_SECRET, FakeVerda
from tests.providers.in_process import Clock, clock  # noqa: F401 - a fixture
from tests.waiting import wait_until

NODE_TOKEN = "dop_v1_n0den0den0den0den0de"


@pytest.fixture(autouse=True)
def _state(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def run(script: str, folder: Path, tools: Mapping[str, str], **variables: str) -> list[str]:
    """Run a script until it ends or is killed; return the calls of the tools. It prints nothing.

    A tool records its name and arguments before it runs its text.
    """
    folder.mkdir(exist_ok=True)
    for name, text in tools.items():
        (folder / name).write_text(f'#!/bin/sh\necho "{name} $*" >>"$CALLS"\n{text}\n')
        (folder / name).chmod(0o755)
    environment = {"PATH": f"{folder}:/usr/bin:/bin", "CALLS": str(folder / "calls"), **variables}
    done = subprocess.run(
        ["sh", "-c", script],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        start_new_session=True,
    )
    assert (done.stdout, done.stderr) == ("", "")
    return (folder / "calls").read_text().splitlines()


def end_script_of(boot: str) -> str:
    """Return the end script in a boot script."""
    _, _, text = boot.partition("cat >/root/.cache/skyward/end <<'SKYWARD_END_OF_FILE'\n")
    return text.partition("\nSKYWARD_END_OF_FILE\n")[0]


# ── DigitalOcean ─────────────────────────────────────────────────────────────────────────────────────────────────────


def droplets_end_script() -> str:
    return end_script_of(
        userdata.boot_script(STARTUP, tags(), MACHINE_ID, sky.DigitalOcean(node_token=NODE_TOKEN)._end_script())  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    ("answers", "metadata", "pauses"),
    [
        ([0], "4711", ["60"]),
        (
            [22] * 20 + [0],
            "4711",
            ["30"] * 20 + ["60"],
        ),  # a machine that is off costs the same, and could not try again
        ([], "<html>", ["30"] * 3),  # the URL without an id is that of all droplets
    ],
)
def test_a_droplet_deletes_itself_until_it_is_gone(
    tmp_path: Path, answers: list[int], metadata: str, pauses: list[str]
) -> None:
    """It uses the id of the metadata service. The token is in no command line."""
    results = " ".join(map(str, answers))
    tools = {
        "curl": f'case "$*" in *metadata/v1/id) echo {shlex.quote(metadata)}; exit ;; esac; cat >"{tmp_path}/header"\n'
        f'set -- {results}; shift $(($(grep -c DELETE "$CALLS") - 1)); exit "$1"',
        "sleep": f'[ "$1" != 60 ] && [ "$(grep -c ^sleep "$CALLS")" -lt {len(pauses)} ] || kill -KILL 0',
        "poweroff": ":",
    }
    calls = run(droplets_end_script(), tmp_path / "bin", tools)
    assert [line.removeprefix("sleep ") for line in calls if line.startswith("sleep")] == pauses
    deletions = [line for line in calls if "DELETE" in line]
    assert len(deletions) == len(answers)
    assert all(line.endswith("-X DELETE -K - https://api.digitalocean.com/v2/droplets/4711") for line in deletions)
    assert "poweroff " not in calls
    assert NODE_TOKEN not in "".join(calls)
    if answers:
        assert (tmp_path / "header").read_text() == f'header = "Authorization: Bearer {NODE_TOKEN}"\n'


def test_the_end_script_of_a_droplet_passes_shellcheck() -> None:
    """The script that prints the machine's id passes too."""
    script = f'#!/bin/sh\n{droplets_end_script()}\nid=$({MACHINE_ID})\necho "$id"\n'
    shellcheck = str(Path(sys.executable).with_name("shellcheck"))
    assert subprocess.run([shellcheck, "-"], input=script, capture_output=True, text=True, check=False).stdout == ""


# ── containers ───────────────────────────────────────────────────────────────────────────────────────────────────────

DESTROY = "DELETE -d {} https://console.vast.ai/api/v0/instances/12345/"
DESTROY_ALL = 'DELETE -d {"instance_ids": [12345]} https://console.vast.ai/api/v0/instances/'
STOP = 'PUT -d {"state": "stopped"} https://console.vast.ai/api/v0/instances/12345/'
WAYS = [
    "DELETE https://api.runpod.io/v2/pods/12345",
    'POST -d {"action": "terminate"} https://api.runpod.io/v2/pods/12345/action',
    'POST -d {"query": "mutation { podTerminate(input: {podId: \\"12345\\"}) }"} https://api.runpod.io/graphql',
]
STOP_POD = 'POST -d {"action": "stop"} https://api.runpod.io/v2/pods/12345/action'
NAMES = {"vastai": ("CONTAINER_ID", "CONTAINER_API_KEY"), "runpod": ("RUNPOD_POD_ID", "RUNPOD_API_KEY")}


@pytest.mark.parametrize(
    ("cloud", "accepted", "ways"),
    [
        ("vastai", "*/12345/", [DESTROY]),
        ("vastai", "*instance_ids*", [DESTROY, DESTROY_ALL]),
        ("vastai", "PUT*", [DESTROY, DESTROY_ALL, STOP]),
        ("vastai", "nothing", [DESTROY, DESTROY_ALL, STOP]),
        ("runpod", "*/v2/pods/12345", WAYS),
        ("runpod", "*/graphql", WAYS),
        ("runpod", "nothing", [*WAYS, "runpodctl remove pod 12345", STOP_POD]),  # that frees its GPU
    ],
)
@pytest.mark.parametrize("is_inherited", [False, True])
def test_a_container_requests_its_end_until_it_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cloud: str, accepted: str, ways: list[str], is_inherited: bool
) -> None:
    """The request has the container's own key, which is in no command line. The container never ends its own process.

    A process over SSH reads the environment of the first process.
    """
    monkeypatch.delenv("RUNPOD_API_BASE_URL", raising=False)
    yes, no = ("{} 204", "{} 403") if cloud == "runpod" else ('{"success": true} 200', '{"success": false} 200')
    if cloud == "runpod":
        graphql = '{"errors": [{"message": "not authorized"}]} 200'
        no = f"""$(case "$*" in */graphql) echo '{graphql}' ;; *) echo '{no}' ;; esac)"""
    else:
        no = f"$(echo '{no}')"
    tools = {
        "curl": f'shift 6; echo "$*" >>"$CALLS"; cat >"{tmp_path}/header"\n'
        f"""case "$*" in {accepted}) printf %s '{yes}' ;; *) printf %s "{no}" ;; esac""",
        "sleep": '[ "$(grep -c ^sleep "$CALLS")" -lt 5 ] || kill "$PPID"',
    }
    if accepted == "nothing" and cloud == "runpod":
        tools["runpodctl"] = "exit 1"
    script = VAST_END if cloud == "vastai" else sky.RunPod(api_key=SecretStr("k"))._end_script()
    its = dict(zip(NAMES[cloud], ("12345", "its-own-key"), strict=True))
    if not is_inherited:
        (tmp_path / "environ").write_text("A=b\0" + "".join(f"{name}={value}\0" for name, value in its.items()))
        script = script.replace("/proc/1/environ", str(tmp_path / "environ"))
    calls = run(script, tmp_path / "bin", tools, **(its if is_inherited else {}))
    made = [
        line.replace(" -H @- -H Content-Type: application/json", "") for line in calls if not line.startswith("curl ")
    ]
    assert made == [line for pause in (5, 10, 20, 40, 80) for line in (*ways, f"sleep {pause}")]
    assert (tmp_path / "header").read_text() == "Authorization: Bearer its-own-key"
    assert "its-own-key" not in "".join(calls)
    assert "kill" not in VAST_END + RUNPOD_END


def test_a_killed_main_script_of_a_container_is_started_again(tmp_path: Path) -> None:
    """The first process starts it, and no process inside can kill the first process."""
    starts = tmp_path / "starts"
    starts.touch()
    script = f"echo up >>{starts}; exec sleep 1000"
    main = subprocess.Popen(
        ["sh", "-c", MAIN.format(f"sh -c {shlex.quote(script)}").replace("sleep 5", "sleep 0.1")],
        start_new_session=True,
    )
    try:
        wait_until(lambda: starts.read_text() == "up\n", "the script")
        for child in Path(f"/proc/{main.pid}/task/{main.pid}/children").read_text().split():
            os.kill(int(child), signal.SIGKILL)
        wait_until(lambda: starts.read_text() == "up\nup\n", "the script, again")
    finally:
        os.killpg(main.pid, signal.SIGKILL)
        main.wait()


# ── Verda ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_machine_of_verda_deletes_itself_with_its_disk(tmp_path: Path, clock: Clock) -> None:
    """After a failure it stays on and tries again. It deletes no other machine. The secret is in no output."""
    secret = "secret\"of'node"
    with FakeVerda() as cloud:
        cloud.secrets["idofnode"] = secret
        given: dict[str, Any] = {"client_id": CLIENT_ID, "client_secret": CLIENT_SECRET}
        own = sky.Verda(
            endpoint_url=cloud.url + "/v1", node_client_id="idofnode", node_client_secret=SecretStr(secret), **given
        )
        first, second = own.launch(cheapest(own), 2, tags(), STARTUP)
        (script,) = (one["script"] for one in cloud.scripts.values())
        name = cloud.machines[second.id]["hostname"]
        command = end_script_of(script).removeprefix("while :; do\n(\n").partition("\n)\nsleep ")[0]
        tools = {"hostname": f"echo {name}", "poweroff": ":"}
        cloud.is_out = True
        failed = "this machine cannot delete itself yet: HTTPError 500\n"
        wrapped = f'test "$({command}\n)" = {shlex.quote(failed.strip())}'
        assert run(wrapped, tmp_path / "bin", tools) == ["hostname "]
        assert cloud.alive() == {first.id, second.id}
        cloud.is_out = False
        assert run(command, tmp_path / "bin", tools) == ["hostname ", "hostname "]
        assert (cloud.alive(), len(cloud.volumes), cloud.trash) == ({first.id}, 1, {})
