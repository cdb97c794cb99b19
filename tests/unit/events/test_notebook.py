"""The display of a notebook: its summary as a value, and when it is shown. `tests/system/test_notebooks.py` has real kernels."""

import pytest

import skyward_core as sky
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
