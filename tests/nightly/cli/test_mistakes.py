"""Meaningless words, full disks, closed pipes and Ctrl-C: the `skyward` command shows no traceback."""

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from skyward_core import cli
from skyward_core import doctor as diagnosis
from skyward_core.cli.app import command_tree
from skyward_core.cli.ui import PageServer
from skyward_core.errors import BadRequest
from skyward_core.providers import base
from tests.cleanup.pools import FolderProvider
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


def commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], list[Any]]]:
    """Each command with its options and arguments, as typer has them."""
    for name, sub in getattr(command, "commands", {}).items():
        yield from commands(sub, (*path, name))
    if not hasattr(command, "commands"):
        yield path, command.params


ODD = "nan inf -1 0 1 1e400 1e-400 ² 2026-11-21 0001-01-01T00:00:00+14:00 9999-12-31T23:59:59-14:00 90d 1d {} []"
WORDS = st.one_of(
    st.sampled_from(["", " ", *ODD.split(), "sky-live", "team", "day", "H100:8", "9" * 400 + "d", '{"name": 1}']),
    st.text(max_size=20),
    st.floats().map(str),
)


@st.composite
def command_lines(draw: st.DrawFn) -> list[str]:
    """A command with some of its options; most values are meaningless."""
    path, params = draw(st.sampled_from(list(commands(command_tree()))))
    words: list[str] = []
    for param in params:
        if param.required or draw(st.booleans()):
            choices = param.type_descriptor.choices
            value = st.sampled_from(sorted(choices)) if choices and draw(st.booleans()) else WORDS
            words += param.opts[:1] if param.param_type_name == "option" else []
            words += [] if getattr(param, "is_flag", False) else [draw(value)]
    return [*path, *words]


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(line=command_lines())
def test_no_command_line_is_a_traceback(skyward: Skyward, line: list[str]) -> None:
    """Any has one of the exit codes of docs/commands/reference.md, and rents nothing."""
    if not skyward.ledger.pools(include_ended=True):
        skyward.open_three()
    load = base.load

    def loading(requested: Any) -> Any:
        if isinstance(requested, str) and requested in base.BUILT_IN:
            raise BadRequest("tests rent nothing")
        return load(requested)

    def interrupted(_: PageServer) -> None:
        raise KeyboardInterrupt  # else `skyward ui` serves until Ctrl-C

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(base, "load", loading)
        patch.setattr(diagnosis, "entry_points", lambda group: ())
        patch.setattr(FolderProvider, "offers", lambda self, want: [])
        patch.setattr(PageServer, "serve_forever", interrupted)
        patch.setenv("XDG_CACHE_HOME", skyward.folder.folder)
        try:
            assert cli.main(line) in (0, 1, 3)
        except SystemExit as end:
            assert end.code in (0, 2)
