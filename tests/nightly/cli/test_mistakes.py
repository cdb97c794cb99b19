"""Full disks, closed pipes and Ctrl-C: the `skyward` command shows no traceback."""

import re
import signal
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from tests.cli.ledger import Page, Skyward, shell


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_disk_and_a_closed_pipe(skyward: Skyward, monkeypatch: pytest.MonkeyPatch, unbuffered: str) -> None:
    """One line, or none if the reader has closed the pipe; the exit code is 1.

    With PYTHONUNBUFFERED too, as in many containers.
    """
    skyward.open_three()
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    for line in ("skyward ps", "skyward ps --json", "skyward --version"):
        # else each print raises by itself, and only the system's message is shown
        done = shell(f"{line} > /dev/full", PYTHONUNBUFFERED="")
        assert (done.returncode, done.stderr.count("\n")) == (1, 1), line
        assert "No space left on device: the output is lost" in done.stderr, line
    for line in ("skyward ps", "skyward cost --json", "skyward receipt sky-live"):
        done = shell(f"{line} | true")
        assert (done.stdout, done.stderr) == ("", ""), line
    assert shell("skyward ps 2>&1 >/dev/full | true").stderr == ""
    assert shell("skyward ps >&-").returncode in (0, 1)
    assert "Traceback" not in shell("skyward ps >&- 2>&1").stdout


@pytest.mark.usefixtures("ledger")
def test_ctrl_c_ends_the_page() -> None:
    """It prints the URL with a random token, and no request; the exit code is 0."""
    program = [sys.executable, "-m", "skyward_core.cli", "ui"]
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            printed = process.stdout.readline().strip()
            found = re.fullmatch(r"http://127\.0\.0\.1:(\d+)/\?token=([\w-]{32})", printed)
            assert found
            server: Any = SimpleNamespace(server_port=int(found[1]))
            assert Page(server).get("/api/pools", token=found[2]).json["pools"] == []
            assert Page(server).get("/api/pools").status == 403
            process.send_signal(signal.SIGINT)
            rest = process.communicate(timeout=30)
        finally:
            process.kill()
    assert process.returncode == 0
    assert rest == (
        "",
        "skyward: Ctrl-C ends the page; with this URL, every user of this machine can read it\nskyward: the page has ended; the pools go on\n",
    )
