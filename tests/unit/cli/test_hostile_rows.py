"""Texts that another user of the ledger, a provider or a node has written, in every command and on the page."""

import json
import re
from functools import partial

import pytest

import skyward_core as sky
from skyward_core.cleanup.sweep import sweep
from skyward_core.cli import live, printing
from skyward_core.cli.ui import answers
from skyward_core.ledger.rows import Attempt, CallState, SlotUse
from skyward_core.live.observer import Line, WorkerStacks
from skyward_core.worker.stacks import SlotStack
from tests.cli.ledger import Skyward
from tests.hostile_texts import HOSTILE_TEXTS, refuse_hidden, refuse_hidden_in_data, refuse_lines_of_ours

hostile = pytest.mark.parametrize("text", HOSTILE_TEXTS.values(), ids=HOSTILE_TEXTS)
COLUMNS = {
    "skyward_pools": (
        "owner_user",
        "owner_host",
        "account",
        "name",
        "stopped_by",
        "work_run",
        "work_task",
        "work_asset",
    ),
    "skyward_resources": ("provider", "region", "cloud_id", "evidence"),
    "skyward_attempts": ("provider", "region", "instance_type", "error", "code", "message"),
    "skyward_calls": ("name", "owner", "state", "work_run"),
    "skyward_clients": ("owner_user", "owner_host", "work_run"),
    "skyward_accounts": (),
}
"""What `UPDATE` may put there: identities are other rows' too."""
COMMANDS = (
    "ps", "ps --all", "users nightly", "users nightly --split", "cost --by owner", "cost --by run", "cost --by pool",
    "cost --by task", "calls", "why sky-named", "why sky-dead", "budget list", "sweep --min-age 0",
    "receipt sky-named", "warm nightly --for 1h", "top --once", "ps --json", "calls --json", "why sky-dead --json",
    "receipt sky-dead", "receipt sky-named --json",
)  # fmt: skip


def written_by_others(skyward: Skyward, text: str) -> None:
    """Fill the ledger, and put the text into each column that others write."""
    skyward.open_three()
    skyward.open_named(sky.Work(system="cron", run="2"))
    tried = [
        Attempt(
            pool,
            skyward.clock.now,
            "folder",
            "r",
            "t",
            is_spot=False,
            seconds=1.0,
            error="NoCapacity",
            code="c",
            message="m",
        )
        for pool in ("sky-named", "sky-dead")
    ]
    skyward.ledger.note_attempts(tried)
    escaped = "CAST(x'" + text.encode(errors="surrogatepass").hex() + "' AS TEXT)"
    for table, columns in COLUMNS.items():
        for column in columns:
            where = "WHERE id != 'sky-named'" if column == "name" and table == "skyward_pools" else ""
            skyward.damage(f"UPDATE {table} SET {column} = {escaped} {where}")


@hostile
def test_a_hostile_text_in_the_ledger_acts_in_no_command(
    text: str, skyward: Skyward, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each command has read it. `skyward offers` has texts of providers only, in the same tables."""
    monkeypatch.setattr("skyward_core.cleanup.sweep.sweep", partial(sweep, pause=lambda _: None))
    written_by_others(skyward, text)
    for command in COMMANDS:
        _, output, errors = skyward.run(command)
        for shown in (output, errors):
            refuse_lines_of_ours(shown)


@hostile
def test_a_hostile_text_in_the_ledger_is_visible_text_of_the_page(text: str, skyward: Skyward) -> None:
    """The page makes text nodes of it (`tests/system/cli`); here no character is hidden in its data."""
    written_by_others(skyward, text)

    class NotLooked:
        def of(self, _: str) -> str:
            return text

    pages = answers(skyward.ledger, NotLooked())  # pyright: ignore[reportArgumentType]
    refuse_hidden(pages["/metrics"]({}).body.decode())
    for path, answer in pages.items():
        if path.startswith("/api/"):
            found = answer({"pool": "sky-named", "by": "owner"})
            refuse_hidden_in_data(json.loads(found.body))


@hostile
def test_a_hostile_text_is_stored_as_visible_text(text: str, skyward: Skyward) -> None:
    """PostgreSQL takes no NUL, no database half of a surrogate pair; and a text keeps to the length of its column."""
    skyward.open("sky-live")
    ledger, now = skyward.ledger, skyward.clock.now
    long = text * 200
    ledger.note_attempts(
        [Attempt("sky-live", now, "folder", text, long, is_spot=False, seconds=1.0, error="E", code=long, message=long)]
    )
    ledger.note_calls("sky-live", [CallState("c", long[:200], text, 1, "running", now, None, (SlotUse("i", 1, 5.0),))])
    (attempt,) = ledger.attempts(pool_id="sky-live")
    (call,) = ledger.calls()
    for stored in (attempt.region, attempt.instance_type, attempt.code, attempt.message, call.name, call.owner):
        refuse_hidden(stored or "")
    assert len(attempt.instance_type) <= 255 or len(long) > 255
    assert len(call.name) <= 255


@hostile
def test_a_hostile_line_of_a_node_is_marked_by_skyward_logs(text: str) -> None:
    shown = live._line_text(Line(0, f"a\n{text}"))
    refuse_hidden(shown)
    assert all(line.startswith("[node 0] ") for line in shown.split("\n"))
    refuse_hidden(live._line_text(Line(live.OF_A_CALL, text)))


@hostile
def test_a_hostile_stack_or_function_is_indented(text: str) -> None:
    stack = SlotStack(pid=1, busy_seconds=1.0, text=f"Thread\n{text}\n{text}")
    shown = live._stacks_text([WorkerStacks(text, (stack,))])
    refuse_lines_of_ours(shown)
    assert all(line.startswith("  ") for line in shown.split("\n")[1:])


@hostile
def test_a_hostile_text_is_one_cell_and_one_line(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    """In a table, a warning, and a sentence of ours."""
    printing.print_table(["NAME", ">COST USD"], [[text, "1.0000"], ["b", "2.0000"]])
    output = capsys.readouterr().out
    refuse_lines_of_ours(output)
    assert len(output.splitlines()) == 3
    assert re.search(r"1\.0000$", output.splitlines()[1])
    printing.print_warnings([f"it said: {text}", sky.NodeLost(text)])
    warnings = capsys.readouterr().err
    refuse_lines_of_ours(warnings)
    assert all(line.startswith("skyward: ") for line in warnings.splitlines())
    printing.say(f"the pool {text} has ended")
    refuse_lines_of_ours(capsys.readouterr().out)
