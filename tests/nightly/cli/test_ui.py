"""The server of `skyward ui`: who may read it, and what each path answers."""

# pyright: reportUnusedImport=false

import re
import signal
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

from skyward_core.ledger.ledger import Ledger
from tests.system.cli.test_ui import (  # noqa: F401 - fixtures
    Page,
    page,
    utilisation,
)
from tests.unit.cli.test_commands import HERE, ROOT, Clock, Skyward, clock, folder, ledger, skyward, url  # noqa: F401 - fixtures


def test_ctrl_c_ends_the_page(url: str, ledger: Ledger) -> None:
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
