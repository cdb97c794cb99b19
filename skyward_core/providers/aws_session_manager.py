"""SSH to a machine of EC2 through Session Manager, without an open port: the proxy command of provider aws
(`instances.Endpoint.proxy_command`).

    python -m skyward_core.providers.aws_session_manager INSTANCE REGION [PROFILE [ENDPOINT_URL]]

This process requests a session with port 22 of the machine, then becomes AWS's own `session-manager-plugin`, which
carries the bytes:

    requesting ──no agent yet, throttled, an outage──▶ waiting ──▶ requesting        (until stdin ends)
       ├──refused──▶ exits with the reason, and with `proxy_command.REFUSED` or `proxy_command.WRONG`
       └──a session──▶ the plugin, in the same process

Credentials come from the environment or the profile. The token of a session goes to the plugin in its environment.
Neither is ever an argument, because other users of this machine can read arguments. The plugin is called as AWS's CLI
calls it (aws-cli, customizations/sessionmanager.py; plugin, session.go). Its arguments are: the name of the variable
with the answer, region, operation, profile, parameters of the request, endpoint.

If this process is killed after the answer and before the plugin runs, the session has no client. SSM ends such a
session after some minutes, and it costs nothing.
"""

from __future__ import annotations

import json
import os
import re
import select
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from skyward_core.concurrency.backoff import Backoff
from skyward_core.errors import BadRequest, CredentialsError, ProviderFailed, SkywardError
from skyward_core.providers.aws_account import AwsAccount
from skyward_core.shown_text import visible
from skyward_core.transport.proxy_command import PYTHON, REFUSED, WRONG

PLUGIN = "session-manager-plugin"
PLUGIN_HOME = (
    "https://docs.aws.amazon.com/systems-manager/latest/userguide/session-manager-working-with-install-plugin.html"
)
LAST_WITH_TOKEN_AS_ARGUMENT = (1, 2, 497, 0)
"""Later plugins read the answer from a variable. Up to this version the list of processes would show a session's
token.
"""
PLUGIN_SECONDS = 10.0
ANSWER = "AWS_SSM_START_SESSION_RESPONSE"
DOCUMENT = "AWS-StartSSHSession"
NOT_THERE = re.compile(r"TargetNotConnected|InvalidInstance.*")
"""Codes for a machine whose agent has not registered, which takes 30 to 120 s after the boot (fact sheet, 1.9)."""
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.5, 5.0


def command(instance_id: str, region: str, profile: str | None, endpoint_url: str | None) -> tuple[str, ...]:
    """Return the proxy command that connects to port 22 of a machine."""
    words = [instance_id, region, profile or "", endpoint_url or ""]
    while not words[-1]:
        words.pop()
    return (PYTHON, "-m", "skyward_core.providers.aws_session_manager", *words)


def plugin() -> str:
    """Return the path of AWS's plugin.

    Raises BadRequest if it is missing, does not answer, or is too old to take a token from its environment.
    """
    place = shutil.which(PLUGIN)
    if place is None:
        raise BadRequest(
            f"use_ssm=True needs AWS's {PLUGIN} on PATH, on the machine that opens the pool: {PLUGIN_HOME}"
        )
    try:
        output = subprocess.run(
            [place, "--version"],
            capture_output=True,
            text=True,
            check=True,
            timeout=PLUGIN_SECONDS,
            stdin=subprocess.DEVNULL,
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise BadRequest(f"{place} does not print its version: {error}; install it again: {PLUGIN_HOME}") from error
    version = re.search(r"\d+(\.\d+)+", output)
    if version is None or tuple(map(int, version[0].split("."))) <= LAST_WITH_TOKEN_AS_ARGUMENT:
        raise BadRequest(
            f"{place} is version {output.strip()[:40]!r}: use_ssm=True needs one after 1.2.497.0, which keeps tokens"
            f" secret: {PLUGIN_HOME}"
        )
    return place


def main(words: Sequence[str]) -> int:
    """Become the plugin. On failure print the reason to stderr and return an exit code."""
    instance_id, region, profile, endpoint_url = (*words, "", "")[:4]
    try:
        program = plugin()
        with AwsAccount(profile or None, endpoint_url or None, None) as account:
            wanted = {"Target": instance_id, "DocumentName": DOCUMENT, "Parameters": {"portNumber": ["22"]}}
            session = _session(account, region, wanted)
            place = account.endpoint(region, "ssm")
            try:
                arguments = [program, ANSWER, region, "StartSession", profile, json.dumps(wanted), place]
                os.execve(program, arguments, os.environ | {ANSWER: json.dumps(session)})  # noqa: S606 - no shell is wanted
            except OSError as error:
                account.ask(region, "ssm", "terminate_session", SessionId=session["SessionId"])
                raise BadRequest(f"{program} cannot be run: {error}") from error
    except SkywardError as error:
        _print_error(str(error))
        return (
            REFUSED
            if isinstance(error, CredentialsError)
            else WRONG
            if isinstance(error, BadRequest)
            else os.EX_UNAVAILABLE
        )


def _session(account: AwsAccount, region: str, wanted: Mapping[str, Any]) -> dict[str, str]:
    """Request a session until there is one. A process that waits costs less than one that is started again."""
    for pause in Backoff(FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS, 1.5).pauses():
        try:
            answer = account.ask(region, "ssm", "start_session", once=True, **wanted)
            return {name: str(answer[name]) for name in ("SessionId", "TokenValue", "StreamUrl")}
        except (BadRequest, ProviderFailed) as error:
            if isinstance(error, BadRequest) and not NOT_THERE.fullmatch(error.code):
                raise
            why = _hint(wanted["Target"], region, error) if isinstance(error, BadRequest) else str(error)
            _print_error(why)
            if _hung_up(pause):
                raise ProviderFailed(why) from error
    raise AssertionError  # the pauses have no end


def _hint(instance_id: str, region: str, error: SkywardError) -> str:
    return (
        f"the agent of {instance_id} has not registered with Session Manager in {region} yet ({error.code}). If this"
        " continues, the machine lacks rights (instance_profile= with a role that has AmazonSSMManagedInstanceCore, or"
        " the account's Default Host Management), or a route to the internet"
    )


def _hung_up(seconds: float) -> bool:
    """Wait; return whether the client of this connection has gone. Its input stays unread, for the plugin."""
    poll = select.poll()
    poll.register(sys.stdin.fileno(), select.POLLHUP | select.POLLRDHUP)
    return bool(poll.poll(seconds * 1000))


def _print_error(text: str) -> None:
    print(visible(" ".join(text.split())), file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
