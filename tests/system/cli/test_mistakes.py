"""Wrong input, terminals and damaged files: the `skyward` command reports the fault, does the rest, and shows no
traceback.
"""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from skyward_core import cli
from skyward_core.ledger.ledger import Ledger
from tests.cleanup.pools import FolderProvider
from tests.unit.cli.test_commands import (  # noqa: F401 - fixtures
    DEAD,
    HERE,
    ROOT,
    Clock,
    Skyward,
    clock,
    folder,
    ledger,
    open_pool,
    skyward,
    url,
)

# ── output ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def shell(line: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = line.replace("skyward", f"{shlex.quote(sys.executable)} -m skyward_core.cli", 1)
    return subprocess.run(
        ["bash", "-c", command],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
        timeout=60,
        env=os.environ | environ,
    )


def test_a_terminal_without_unicode_shows_every_name(ledger: Ledger, clock: Clock, folder: FolderProvider) -> None:
    """Characters that it cannot show are written as their numbers."""
    open_pool(ledger, clock, folder, "sky-möwe", owner=HERE)
    done = shell("skyward ps", PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert (done.returncode, "sky-m\\xf6we" in done.stdout) == (0, True)


@given(
    st.one_of(
        st.text(max_size=30),
        st.text(max_size=10).map(lambda name: f"sqlite:///{name}"),
        st.text(max_size=10).map(lambda name: f"postgresql+psycopg://localhost:{name}"),
    )
)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_url_of_a_ledger_is_a_traceback(url: str, tmp_path: Path, where: str) -> None:
    """It is opened, or refused with a message."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        try:
            assert cli.main([f"--ledger={where}", "ps"]) in (0, 1)
        except SystemExit as end:
            assert end.code in (0, 2)
