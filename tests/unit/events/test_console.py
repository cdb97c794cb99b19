"""The displays get the events of a pool's life, and the tests check their text."""

import io
import logging
import math
from collections.abc import Sequence
from decimal import Decimal
from typing import override

import pytest

import skyward_core as sky
from skyward_core.events.console import display, last_log_of
from skyward_core.events.events import hide_other_nodes
from skyward_core.events.narrator import Narrator, digits

OPENING: list[sky.SkywardEvent] = [
    sky.InfraCreating(),
    sky.InfraCreated("here"),
    sky.InstanceLaunching(2, "local", "local"),
    sky.InstanceProvisioned("i-a", node=0, spot=False, provider="local"),
    sky.InstanceProvisioned(
        "i-b",
        node=1,
        spot=True,
        provider="aws",
        ip="127.0.0.1",
        instance_type="p4d.24xlarge",
        price_on_demand=32.77,
        price_spot=9.83,
    ),
    sky.BootstrapStarting("i-a"),
    sky.BootstrapProgress("i-a", "deps"),
    sky.BootstrapStarting("i-b"),
    sky.BootstrapCompleted("i-a"),
    sky.BootstrapCompleted("i-b"),
    sky.PoolReady("sky-1", 2, 4, 3.21),
]
CLOSING: list[sky.SkywardEvent] = [
    sky.PoolStopping(),
    sky.InstanceStopping("i-a"),
    sky.CostFinal(0.0123, 12.3, 3.6, 0, 2, 0.0),
]


def _written(kind: str, events: Sequence[sky.SkywardEvent], file: io.StringIO | None = None) -> str:
    file = file or io.StringIO()
    shown = display(kind, file=file)
    try:
        for event in events:
            assert shown(event) is None
    finally:
        shown.close()
    return file.getvalue()


@pytest.mark.usefixtures("unconfigured")
def test_log_has_one_line_for_each_important_event():
    assert _written("log", OPENING + CLOSING).splitlines() == [
        "skyward  looking for machines",
        "skyward  chose machines in here",
        "skyward  launching 2 x local on local",
        "skyward  node 0 is i-a",
        "skyward  node 1 is i-b (p4d.24xlarge, 127.0.0.1, spot at $9.83 per hour)",
        "skyward  node 0: preparing",
        "skyward  node 0: installing packages",
        "skyward  node 1: preparing",
        "skyward  node 0: ready",
        "skyward  node 1: ready",
        "skyward  the pool is ready after 3.2 s: 2 nodes, 4 slots",
        "skyward  giving the machines back",
        "skyward  done: 12.3 s, $0.0123 (2 on demand)",
    ]


@pytest.mark.parametrize(
    ("amount", "shown"),
    [
        (0, "0.0000"),
        (49.16, "49.1600"),
        (0.01, "0.0100"),
        (0.0123456, "0.01235"),
        (0.00001234567, "0.00001235"),
        (-0.00004, "-0.00004"),
        (Decimal("0.000001"), "0.000001"),
        (1e-9, "0.000000001"),
        (9.99999, "10.0000"),
    ],
)
def test_a_price_above_zero_is_not_shown_as_zero(amount: float | Decimal, shown: str):
    """Four decimals, more only where the first four digits need them; no trailing zeros after those."""
    assert digits(amount) == shown


@pytest.mark.usefixtures("unconfigured")
def test_log_has_the_cost_once_a_minute_and_no_metrics():
    """An update every 10 s for 130 s makes two lines; metrics make none of their own."""
    events: list[sky.SkywardEvent] = []
    for second in range(10, 140, 10):
        events += [sky.CostUpdate(float(second), second / 100, 36.0, 1, 0), sky.Metrics("i-a", 0, 50.0, 50.0, 1.0, 2.0)]
    events.insert(4, sky.CallProgress(40, 12, 1))
    used = "processor 50 %, memory 50 %"
    assert _written("log", events).splitlines() == [
        f"skyward  running for 1 min 0 s, 11 of 40 calls done, 1 failed, $0.6000 so far at $36.00 per hour, {used}",
        f"skyward  running for 2 min 0 s, 11 of 40 calls done, 1 failed, $1.20 so far at $36.00 per hour, {used}",
    ]


@pytest.mark.parametrize(
    ("event", "line"),
    [
        (sky.LogLine(3, "i-d", "epoch 1 [bold]x[/bold] %s", 0.0), "[node 3] epoch 1 [bold]x[/bold] %s"),
        (sky.InstanceLost("i-d", 3, "preempted"), "skyward  warning: node 3 is lost: preempted"),
        (sky.Error("no key"), "skyward  error: no key"),
        (sky.Error("disk full", "i-d"), "skyward  error: i-d: disk full"),
        (
            sky.CostFinal(12345.6, 3840.0, 9.0, 1, 2, 40.0),
            "skyward  done: 1 h 4 min, $12,345.60 (1 spot, 2 on demand), $40.00 less than on demand",
        ),
        (sky.CostFinal(0.0, 1.0, 0.0, 0, 1, 0.0), "skyward  done: 1.0 s, $0 (1 on demand)"),
        (
            sky.PoolLeft("sky-1", 0.154, 154.0, 3.6),
            "skyward  left: the pool sky-1 goes on, at $3.60 per hour; it has cost $0.1540 in 2 min 34 s so far",
        ),
        (
            sky.CostFinal(
                2.0,
                3600.0,
                2.0,
                1,
                0,
                4.0,
                {"launching": 0.14, "running calls": 1.62, "idle": 0.235, "billing rounding": 0.005},
            ),
            "skyward  done: 1 h 0 min, $2.00 (1 spot), $4.00 less than on demand; running calls 81 %, idle 12 %, launching 7 %",
        ),
        (sky.BudgetWarning(8.0, 10.0, None), "skyward  warning: the money runs low: $8.00 of $10.00 are spent"),
        (
            sky.BudgetWarning(8.0, None, "team-a"),
            "skyward  warning: the money runs low: $8.00 are spent, and account 'team-a' has little left",
        ),
        (
            sky.BudgetWarning(8.0, 10.0, None, "8 of 10 are gone"),
            "skyward  warning: the money runs low: 8 of 10 are gone",
        ),
    ],
)
@pytest.mark.usefixtures("unconfigured")
def test_log_marks_problems_and_node_output(event: sky.SkywardEvent, line: str):
    assert _written("log", [event]) == line + "\n"


def test_a_record_of_a_logger_with_a_level_of_its_own_is_shown_below_the_root_s(caplog: pytest.LogCaptureFixture):
    """As `logging` shows it in one process; a level of our own loggers holds all the same."""
    show = display("log")
    with caplog.at_level(logging.INFO):
        caplog.handler.setLevel(logging.NOTSET)
        show(sky.LogLine(0, "i-0", "detail", 0.0, level=logging.DEBUG))
        with caplog.at_level(logging.ERROR, "skyward.node"):
            show(sky.LogLine(0, "i-0", "unwanted", 0.0, level=logging.WARNING))
    show.close()
    assert [(one.levelno, one.getMessage()) for one in caplog.records] == [(logging.DEBUG, "[node 0] detail")]
    assert caplog.records[0].__dict__["skyward_node"] == 0


def test_of_reports_there_is_a_line_a_minute_and_the_last():
    """A line has all values since the one before it; what was told already is not told again at the end."""
    narrator, told = Narrator(), list[tuple[float, str]]()

    def tell(at: float, step: int, *, is_last: bool = False, **values: float) -> None:
        if line := narrator.tell(sky.CallReported(0, "i-0", "call", step, values, at, is_last)):
            told.append((at, line[1]))

    tell(0.0, 0, loss=1.0)
    for second in range(1, 131):
        tell(float(second), second, **({"accuracy": 0.5} if second == 20 else {"loss": math.nan}))
    tell(130.0, 130, loss=math.nan, accuracy=0.5, is_last=True)
    assert told == [
        (0.0, "[node 0] step 0: loss 1"),
        (60.0, "[node 0] step 60: loss NaN, accuracy 0.5"),
        (120.0, "[node 0] step 120: loss NaN"),
        (130.0, "[node 0] step 130: loss NaN, accuracy 0.5"),
    ]
    told.clear()
    tell(200.0, 0, loss=1.0)
    tell(200.0, 0, loss=1.0, is_last=True)
    assert [words for _, words in told] == ["[node 0] step 0: loss 1"]


def test_the_line_of_a_minute_says_how_the_nodes_were_used_since_the_last_one():
    narrator, told = Narrator(), list[str]()
    for event in (
        sky.Metrics("i-0", 0, 90.0, 90.0, 0.0, 0.0),
        sky.CallProgress(1, 0, 0),
        sky.Metrics("i-0", 0, 20.0, 10.0, 0.0, 0.0, gpu_utilization=95.0),
        sky.CostUpdate(60.0, 0.0, 0.0, 0, 1),
        sky.Metrics("i-0", 0, 40.0, 10.0, 0.0, 0.0),
        sky.Metrics("i-0", 0, 50.0, 10.0, 0.0, 0.0),
        sky.CostUpdate(120.0, 0.0, 0.0, 0, 1),
        sky.CostUpdate(180.0, 0.0, 0.0, 0, 1),
    ):
        if line := narrator.tell(event):
            told.append(line[1])
    assert told == [
        "running for 1 min 0 s, 0 of 1 call done, accelerators 95 %, processor 20 %, memory 10 %",
        "running for 2 min 0 s, 0 of 1 call done, processor 45 % (most 50 %), memory 10 %",
        "running for 3 min 0 s, 0 of 1 call done",
    ]


def test_log_records_have_pool_node_and_call_as_fields(unconfigured: logging.Logger):
    """Also where the event names a machine and not its node. A field that an event has not is None, and none is missing."""
    heard: list[logging.LogRecord] = []

    class Collector(logging.Handler):
        @override
        def emit(self, record: logging.LogRecord) -> None:
            heard.append(record)

    unconfigured.addHandler(Collector())
    unconfigured.setLevel(logging.INFO)
    shown = display("log")
    for event in (
        sky.Error("before the id is known"),
        sky.InfraCreating("sky-1"),
        sky.InstanceProvisioned("i-b", node=1, spot=False, provider="local"),
        sky.BootstrapStarting("i-b"),
        sky.BootstrapStarting("i-unknown"),
        sky.InstanceLost("i-b", 1, "gone"),
        sky.LogLine(0, "i-a", "hello", 0.0, call_id="c-1"),
        sky.CallRetrying("c-1", 2, 3, "its node was lost"),
    ):
        shown(event)
    shown.close()
    attached = display("log", pool_id="sky-2")
    attached(sky.ClusterRestarting("the head was lost"))
    attached.close()
    fields = ("name", "skyward_event", "skyward_pool", "skyward_node", "skyward_call")
    assert [tuple(getattr(record, field) for field in fields) for record in heard] == [
        ("skyward", "Error", None, None, None),
        ("skyward", "InfraCreating", "sky-1", None, None),
        ("skyward", "InstanceProvisioned", "sky-1", 1, None),
        ("skyward", "BootstrapStarting", "sky-1", 1, None),
        ("skyward", "BootstrapStarting", "sky-1", None, None),
        ("skyward", "InstanceLost", "sky-1", 1, None),
        ("skyward.node", "LogLine", "sky-1", 0, "c-1"),
        ("skyward", "CallRetrying", "sky-1", None, "c-1"),
        ("skyward", "ClusterRestarting", "sky-2", None, None),
    ]


ASIDE = [
    hide_other_nodes(sky.LogLine(node, "i", text, 0.0, level=level, place=place))
    for node, text, level, place in (
        (3, "of the first node", None, 0),
        (4, "of another node", None, 1),
        (4, "a record", logging.INFO, 1),
        (4, "a warning", logging.WARNING, 1),
        (4, "of no broadcast", None, None),
    )
]
SHOWN = ["[node 3] of the first node", "[node 4] a warning", "[node 4] of no broadcast"]


@pytest.mark.parametrize("kind", ["log", "spinner"])
@pytest.mark.usefixtures("unconfigured")
def test_of_a_broadcast_the_lines_of_the_first_node_are_shown(kind: str):
    """And warnings of all nodes."""
    assert _written(kind, ASIDE).splitlines() == SHOWN


def test_lines_that_are_not_shown_are_in_the_log_at_debug(caplog: pytest.LogCaptureFixture):
    show = display("log")
    with caplog.at_level(logging.DEBUG, "skyward.node"):
        for event in ASIDE:
            show(event)
    show.close()
    assert [one.getMessage() for one in caplog.records if one.levelno == logging.DEBUG] == [
        "[node 4] of another node",
        "[node 4] a record",
    ]
    assert hide_other_nodes(sky.InfraCreating()) == sky.InfraCreating()


def test_spinner_without_a_terminal_prints_plain_lines():
    text = _written("spinner", [*OPENING, sky.LogLine(0, "i-a", "hello", 0.0), *CLOSING])
    assert "\x1b" not in text
    assert text.splitlines()[-3:] == [
        "[node 0] hello",
        "skyward  giving the machines back",
        "skyward  done: 12.3 s, $0.0123 (2 on demand)",
    ]


@pytest.mark.usefixtures("unconfigured")
def test_what_is_said_after_the_end_is_printed_unless_the_pool_is_quiet(capfd: pytest.CaptureFixture[str]):
    for kind in ("log", "spinner", "quiet"):
        _written(kind, CLOSING)
        last_log_of(kind)(logging.INFO, "the pool %r stays warm", kind)
    assert capfd.readouterr().err.splitlines() == [
        "skyward  the pool 'log' stays warm",
        "skyward  the pool 'spinner' stays warm",
    ]


def test_quiet_shows_nothing(capfd: pytest.CaptureFixture[str]):
    assert _written("quiet", [*OPENING, sky.Error("no key"), *CLOSING]) == ""
    assert capfd.readouterr() == ("", "")
