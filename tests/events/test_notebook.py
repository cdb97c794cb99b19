"""The display of a notebook: its summary as a value, and when it is shown. `tests/test_notebooks.py` has real kernels."""

import contextvars
import logging
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from skyward_core.events.console import display
from skyward_core.events.events import (
    BootstrapCompleted,
    BootstrapProgress,
    BootstrapStarting,
    CallProgress,
    CallReported,
    ContactRegained,
    CostFinal,
    CostUpdate,
    Error,
    InfraCreated,
    InfraCreating,
    InstanceLost,
    InstanceProvisioned,
    InstanceStopping,
    LogLine,
    Metrics,
    PoolReady,
    PoolStopping,
    SkywardEvent,
)
from skyward_core.events.narrator import Narrator
from skyward_core.events.notebook import (
    MOST_CHARACTERS,
    MOST_PROBLEMS,
    MimeBundle,
    NotebookDisplay,
    Summary,
    after,
    as_html,
    as_text,
    kernel,
    rendered,
)
from tests.conftest import wait_until

OPENING: list[SkywardEvent] = [
    InfraCreating(),
    InstanceProvisioned("i-a", node=0, spot=False, provider="local"),
    BootstrapStarting("i-a"),
    BootstrapProgress("i-a", "deps"),
]
READY: list[SkywardEvent] = [*OPENING, BootstrapCompleted("i-a"), PoolReady("sky-1", 1, 2, 3.21)]
BILL = CostFinal(0.0123, 12.3, 3.6, 0, 1, 0.0)


def summed(*events: SkywardEvent) -> Summary:
    """Return the summary after these events."""
    summary, narrator = Summary(), Narrator()
    for event in events:
        summary = after(summary, event, narrator.tell(event))
    return summary


@pytest.mark.parametrize(
    ("events", "text"),
    [
        ([], "opening the pool"),
        (OPENING, "looking for machines\nnodes: 1 deps"),
        (
            [*READY, BootstrapStarting("i-b"), BootstrapStarting("i-c"), BootstrapCompleted("i-c")],
            "the pool is ready after 3.2 s: 1 node, 2 slots\nnodes: 2 ready, 1 preparing",
        ),
        (
            [*READY, CallProgress(40, 12, 1), CostUpdate(5.0, 0.05, 36.0, 1, 0)],
            "the pool is ready after 3.2 s: 1 node, 2 slots · $0.0500 at $36.00/h\n12 of 40 calls, 1 failed\nnodes: 1 ready",
        ),
        ([*READY, CostUpdate(5.0, 0.05, 36.0, 1, 0), PoolStopping(), BILL], "done: 12.3 s, $0.0123 (1 on demand)"),
        ([*OPENING, BILL], "done: 12.3 s, $0.0123 (1 on demand)"),
        ([*OPENING, InstanceStopping("i-a")], "looking for machines"),
        ([*OPENING, InstanceLost("i-a", 0, "preempted")], "looking for machines\nnode 0 is lost: preempted"),
        ([ContactRegained("i-a", 0, 12.0)], "opening the pool\nnode 0 answers again after 12.0 s"),
        ([Error("a disk is full")], "opening the pool\na disk is full"),
        ([Metrics("i-a", 0, 1.0, 1.0, 1.0, 1.0)], "opening the pool"),
    ],
)
def test_the_text_has_phase_cost_calls_nodes_and_problems(events: list[SkywardEvent], text: str) -> None:
    """Each event changes its own part of the summary; the bill replaces nodes and cost."""
    assert as_text(summed(*events)) == text


def test_the_html_has_the_same_and_escapes_it() -> None:
    """What a node or a provider says is text in the notebook and never HTML."""
    evil = "<script>alert('&')</script>"
    summary = summed(
        *OPENING,
        BootstrapProgress("i-a", evil),
        CallProgress(40, 12, 0, cancelled=3),
        InstanceLost("i-b", 1, evil),
        InfraCreated(evil),
    )
    html = as_html(summary)
    assert "<script" not in html
    assert html.count("&lt;script&gt;alert(&#x27;&amp;&#x27;)&lt;/script&gt;") == 3
    assert '<progress value="15" max="40"></progress> 12 of 40 calls, 3 cancelled' in html
    assert rendered(summary) == {"text/plain": as_text(summary), "text/html": html}


def test_a_bar_of_no_calls_is_valid_html() -> None:
    """`max` of a progress element must be above 0."""
    assert '<progress value="0" max="1">' in as_html(summed(CallProgress(0, 0, 0)))


def test_only_the_last_problems_are_shown() -> None:
    """An output stays small, however much goes wrong; it says how many problems are left out."""
    lines = as_text(summed(*(Error(f"problem {number}") for number in range(100)))).splitlines()
    assert lines[1] == f"… {100 - MOST_PROBLEMS} earlier problems"
    assert lines[2:] == [f"problem {number}" for number in range(100 - MOST_PROBLEMS, 100)]
    assert len(as_text(summed(Error("x" * 10**6)))) < 2 * MOST_CHARACTERS


class Shown:
    """Records the outputs, and can hold up the thread that shows them."""

    def __init__(self) -> None:
        self.outputs: list[tuple[str, bool]] = []
        self.threads: list[str] = []
        self.may_return = threading.Event()
        self.may_return.set()

    def __call__(self, output: MimeBundle, *, is_update: bool) -> None:
        self.outputs.append((output["text/plain"], is_update))
        self.threads.append(threading.current_thread().name)
        assert self.may_return.wait(60)


def test_many_events_are_few_outputs() -> None:
    """The first event is shown by its own thread, the last state when the display is closed, and not one output for
    each event.
    """
    shown = Shown()
    pool = NotebookDisplay(shown)
    for event in [*READY, *(CallProgress(1000, done, 0) for done in range(1001)), BILL]:
        pool(event)
    pool.close()
    pool.close()
    pool(InfraCreating())
    assert shown.outputs[0] == ("looking for machines", False)
    assert shown.outputs[-1] == ("done: 12.3 s, $0.0123 (1 on demand)\n1000 of 1000 calls", True)
    assert len(shown.outputs) < 20
    assert shown.threads[0] == threading.current_thread().name
    assert set(shown.threads[1:]) == {"skyward-notebook"}


def test_a_state_is_shown_although_no_event_follows() -> None:
    """The last event before a silence is shown too, when its turn has come."""
    shown = Shown()
    pool = NotebookDisplay(shown)
    pool(InfraCreating())
    pool(CallProgress(2, 1, 0))
    wait_until(lambda: len(shown.outputs) == 2, "the second output")
    pool.close()
    assert shown.outputs[1] == ("looking for machines\n1 of 2 calls", True)


def test_a_slow_notebook_delays_no_event_and_gets_the_last_state() -> None:
    """While an output is being shown events are taken; the display closes after the last state."""
    shown = Shown()
    pool = NotebookDisplay(shown)
    pool(InfraCreating())
    shown.may_return.clear()
    pool(CallProgress(2, 1, 0))
    wait_until(lambda: len(shown.outputs) == 2, "the second output")
    pool(CallProgress(2, 2, 0))
    closing = threading.Thread(target=pool.close)
    closing.start()
    shown.may_return.set()
    closing.join(60)
    assert not closing.is_alive()
    assert shown.outputs[2:] == [("looking for machines\n2 of 2 calls", True)]


def test_a_notebook_that_is_gone_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    """An error of the notebook ends the display's thread; events and `close` go on."""

    def show(output: MimeBundle, *, is_update: bool) -> None:
        if is_update:
            raise OSError("the socket is closed")

    pool = NotebookDisplay(show)
    pool(InfraCreating())
    pool(CallProgress(2, 1, 0))
    wait_until(lambda: "the socket is closed" in caplog.text, "the report")
    pool(CallProgress(2, 2, 0))
    pool.close()
    assert caplog.text.count("the notebook does not take the pool's state") == 1


class InteractiveShell:
    """Stands in for IPython's shell; a terminal's is no kernel."""


class ZMQInteractiveShell(InteractiveShell):
    """Stands in for ipykernel's."""

    def __init__(self) -> None:
        self.display_pub = self.kernel = self.io_loop = self
        self.published: list[tuple[str, str, bool]] = []
        self.woken = threading.Event()

    def publish(self, data, metadata, *, transient, update) -> None:
        self.published.append((data["text/plain"], transient["display_id"], update))

    def add_callback(self, callback) -> None:
        callback()
        self.woken.set()


class ColabShell(ZMQInteractiveShell):
    """Other hosts of kernels subclass it."""


@pytest.mark.parametrize(
    ("shell", "is_kernel"),
    [(None, False), (InteractiveShell(), False), (ZMQInteractiveShell(), True), (ColabShell(), True)],
)
def test_a_kernel_is_recognized_by_its_shell(shell: object, is_kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """IPython in a terminal is no notebook."""
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    assert (kernel() is shell) == (is_kernel or shell is None)


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch) -> ZMQInteractiveShell:
    """The shell of a kernel in which logging is not configured: the root logger is not the one with pytest's handlers."""
    shell = ZMQInteractiveShell()
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    monkeypatch.setattr(logging.getLogger("skyward"), "parent", logging.RootLogger(logging.WARNING))
    return shell


@pytest.mark.parametrize("kind", ["spinner", "log"])
def test_a_pool_is_one_output_in_a_kernel(
    kind: str, shell: ZMQInteractiveShell, capsys: pytest.CaptureFixture[str]
) -> None:
    """All outputs of a pool have one id, another pool has another one, and nothing is printed."""
    for _ in range(2):
        pool = display(kind)
        pool(InfraCreating())
        pool(BILL)
        pool.close()
    texts, ids, updates = zip(*shell.published, strict=True)
    assert texts == ("looking for machines", "done: 12.3 s, $0.0123 (1 on demand)") * 2
    assert updates == (False, True) * 2
    assert len(set(ids)) == 2
    assert capsys.readouterr() == ("", "")


def test_the_log_of_a_kernel_that_has_configured_logging_stays_a_log(
    shell: ZMQInteractiveShell, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`logging.basicConfig()` in a cell chooses lines."""
    monkeypatch.setattr(logging.getLogger("skyward"), "handlers", [caplog.handler])
    with caplog.at_level(logging.INFO, "skyward"):
        pool = display("log")
        pool(InfraCreating())
        pool.close()
    assert caplog.messages == ["looking for machines"]
    assert shell.published == []


def test_lines_of_nodes_are_printed_for_the_cell_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each on its own stream, and in the empty context: kernels keep the cell of a thread as a context variable."""
    cell = contextvars.ContextVar("cell", default="the one that runs")
    cell.set("the one that opened the pool")
    printed: dict[str, list[tuple[str, str]]] = {"stdout": [], "stderr": []}
    for stream, lines in printed.items():
        write = lambda text, lines=lines: lines.append((text, cell.get())) if text.strip() else None
        monkeypatch.setattr(sys, stream, SimpleNamespace(write=write, flush=lambda: None))
    shown = Shown()
    pool = NotebookDisplay(shown)
    for event in (
        InfraCreating(),
        LogLine(0, "i-a", "hello", 0.0),
        LogLine(0, "i-a", "oops", 0.0, stream="stderr"),
        CallReported(1, "i-b", "call", 7, {"loss": 0.25}, 0.0),
    ):
        pool(event)
    pool.close()
    assert printed == {
        "stdout": [("[node 0] hello", "the one that runs"), ("[node 1] step 7: loss 0.25", "the one that runs")],
        "stderr": [("[node 0] oops", "the one that runs")],
    }
    assert [text for text, _ in shown.outputs] == ["looking for machines"]


def test_the_event_loop_of_the_kernel_is_woken(shell: ZMQInteractiveShell) -> None:
    """ipykernel's own handler of SIGINT does not do it, when a cell awaits a call."""
    pool = display("spinner")
    pool(InfraCreating())
    assert shell.woken.wait(60)
    pool.close()


def test_ipython_is_never_imported() -> None:
    """A script that has IPython installed does not load it."""
    code = "import sys; from skyward_core.events.console import display; display('spinner').close(); print('IPython' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
