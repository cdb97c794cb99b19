"""The display of a notebook: its summary as a value, and when it is shown. `tests/system/test_notebooks.py` has real kernels."""

import logging
import sys
from types import SimpleNamespace

import pytest

import skyward_core as sky
from skyward_core.events.console import display
from skyward_core.events.narrator import Narrator
from skyward_core.events.notebook import Summary, after, as_html, as_text, rendered

OPENING: list[sky.SkywardEvent] = [
    sky.InfraCreating(),
    sky.InstanceProvisioned("i-a", node=0, spot=False, provider="local"),
    sky.BootstrapStarting("i-a"),
    sky.BootstrapProgress("i-a", "deps"),
]
READY: list[sky.SkywardEvent] = [*OPENING, sky.BootstrapCompleted("i-a"), sky.PoolReady("sky-1", 1, 2, 3.21)]
BILL = sky.CostFinal(0.0123, 12.3, 3.6, 0, 1, 0.0)


def summed(*events: sky.SkywardEvent) -> Summary:
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
            [*READY, sky.BootstrapStarting("i-b"), sky.BootstrapStarting("i-c"), sky.BootstrapCompleted("i-c")],
            "the pool is ready after 3.2 s: 1 node, 2 slots\nnodes: 2 ready, 1 preparing",
        ),
        (
            [*READY, sky.CallProgress(40, 12, 1), sky.CostUpdate(5.0, 0.05, 36.0, 1, 0)],
            "the pool is ready after 3.2 s: 1 node, 2 slots · $0.0500 at $36.00/h\n12 of 40 calls, 1 failed\nnodes: 1 ready",
        ),
        (
            [*READY, sky.CostUpdate(5.0, 0.05, 36.0, 1, 0), sky.PoolStopping(), BILL],
            "done: 12.3 s, $0.0123 (1 on demand)",
        ),
        ([*OPENING, BILL], "done: 12.3 s, $0.0123 (1 on demand)"),
        ([*OPENING, sky.InstanceStopping("i-a")], "looking for machines"),
        ([*OPENING, sky.InstanceLost("i-a", 0, "preempted")], "looking for machines\nnode 0 is lost: preempted"),
        ([sky.ContactRegained("i-a", 0, 12.0)], "opening the pool\nnode 0 answers again after 12.0 s"),
        ([sky.Error("a disk is full")], "opening the pool\na disk is full"),
        ([sky.Metrics("i-a", 0, 1.0, 1.0, 1.0, 1.0)], "opening the pool"),
    ],
)
def test_the_text_has_phase_cost_calls_nodes_and_problems(events: list[sky.SkywardEvent], text: str) -> None:
    assert as_text(summed(*events)) == text


def test_the_html_has_the_same_and_escapes_it() -> None:
    """What a node or a provider says is text in the notebook and never HTML."""
    evil = "<script>alert('&')</script>"
    summary = summed(
        *OPENING,
        sky.BootstrapProgress("i-a", evil),
        sky.CallProgress(40, 12, 0, cancelled=3),
        sky.InstanceLost("i-b", 1, evil),
        sky.InfraCreated(evil),
    )
    html = as_html(summary)
    assert "<script" not in html
    assert html.count("&lt;script&gt;alert(&#x27;&amp;&#x27;)&lt;/script&gt;") == 3
    assert '<progress value="15" max="40"></progress> 12 of 40 calls, 3 cancelled' in html
    assert rendered(summary) == {"text/plain": as_text(summary), "text/html": html}


class InteractiveShell:
    """Stands in for IPython's shell; a terminal's is no kernel."""


class ZMQInteractiveShell(InteractiveShell):
    """Stands in for ipykernel's."""

    def __init__(self) -> None:
        self.display_pub = self.kernel = self.io_loop = self
        self.published: list[tuple[str, str, bool]] = []

    def publish(self, data, metadata, *, transient, update) -> None:
        self.published.append((data["text/plain"], transient["display_id"], update))

    def add_callback(self, callback) -> None:
        callback()


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch) -> ZMQInteractiveShell:
    """The shell of a kernel in which logging is not configured: the root logger is not the one with pytest's handlers."""
    shell = ZMQInteractiveShell()
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    monkeypatch.setattr(logging.getLogger("skyward"), "parent", logging.RootLogger(logging.WARNING))
    return shell


def test_the_log_of_a_kernel_that_has_configured_logging_stays_a_log(
    shell: ZMQInteractiveShell, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("skyward"), "handlers", [caplog.handler])
    with caplog.at_level(logging.INFO, "skyward"):
        pool = display("log")
        pool(sky.InfraCreating())
        pool.close()
    assert caplog.messages == ["looking for machines"]
    assert shell.published == []
