"""The parts of the Prefect report that need no server: series, the state of a pool, pages and notices."""

import math

import pytest

import skyward_core as sky
from prefect_skyward.report import notices, pages
from prefect_skyward.report.pages import RunState
from prefect_skyward.report.pool_state import PoolState, SharedPool
from prefect_skyward.report.task_costs import TaskCosts
from skyward_core.events.series import MOST_POINTS, Series


def provisioned(node: int, price: float = 3.6, **more: object) -> sky.InstanceProvisioned:
    return sky.InstanceProvisioned(
        f"i-{node}", node, spot=False, provider="aws", instance_type="p4d", price_on_demand=price, **more
    )


def pool_of(*events: sky.SkywardEvent, at: float = 0.0) -> PoolState:
    pool = PoolState("")
    for event in events:
        pool.after(event, at)
    return pool


def test_a_series_of_any_length_has_few_points_and_exact_extremes() -> None:
    series = Series()
    for value in range(10_000):
        series.add(float(value))
    series.add(math.nan)
    line = series.sparkline()
    assert (series.count, series.last, series.least, series.greatest) == (10_000, 9_999, 0, 9_999)
    assert series.mean == pytest.approx(4999.5)
    assert MOST_POINTS / 2 <= len(line) <= MOST_POINTS + 1
    assert list(line) == sorted(line)
    assert (line[0], line[-1]) == ("▁", "█")


def test_a_sparkline_of_equal_values_and_of_none() -> None:
    """Equal values are the lowest bar; between given bounds a value is where it belongs."""
    series = Series()
    assert series.sparkline() == ""
    series.add(50.0)
    assert (series.sparkline(), series.sparkline(0, 100), series.sparkline(0, 50)) == ("▁", "▅", "█")


def test_progress_rises_from_nothing_to_a_pool_that_is_ready() -> None:
    """It never falls on the way, and names what it has reached."""
    pool = PoolState("")
    seen = [pool.progress]
    for event in (
        sky.InfraCreating("p-1"),
        sky.InfraCreated("here"),
        sky.InstanceLaunching(2, "p4d", "aws"),
        provisioned(0),
        provisioned(1),
        sky.BootstrapProgress("i-0", "uv"),
        sky.BootstrapProgress("i-0", "server"),
        sky.BootstrapCompleted("i-0"),
        sky.BootstrapCompleted("i-1"),
    ):
        pool.after(event, 0.0)
        seen.append(pool.progress)
    assert seen == sorted(seen)
    assert (seen[0], seen[1]) == (0.0, 0.0)
    assert 85 < seen[-1] < 100
    assert pages.progress_words(pool) == "2 of 2 machines rented, 2 prepared"
    pool.after(sky.PoolReady("p-1", 2, 2, 61.4), 0.0)
    assert pool.progress == 100.0
    assert pages.progress_words(pool) == "2 x p4d ready after 1 min 1 s"


def test_before_the_end_a_machine_costs_its_price_times_its_seconds_and_then_what_its_receipt_says() -> None:
    pool = pool_of(sky.InstanceLaunching(1, "p4d", "aws"), provisioned(0), at=100.0)
    machine = pool.machines["i-0"]
    assert (machine.seconds_at(1100.0), machine.cost_at(1100.0)) == (1000.0, pytest.approx(1.0))
    resource = {"cloud_id": "i-0", "seconds": {"idle": 990.0}, "cost_usd": 1.25, "price_per_hour_usd": 4.5}
    pool.settle({"resources": [resource, {**resource, "cloud_id": "i-other"}]})
    assert (machine.seconds_at(9999.0), machine.cost_at(9999.0), machine.price_per_hour) == (990.0, 1.25, 4.5)


def test_a_lost_machine_stops_costing_and_is_marked() -> None:
    pool = pool_of(provisioned(0), at=0.0)
    pool.after(sky.InstanceLost("i-0", 0, "gone"), 36.0)
    (row,) = pages.node_rows(RunState([pool]), 1000.0)
    assert (row["seconds"], row["state"]) == (36.0, "lost")


def test_the_machine_of_a_provider_with_a_console_is_a_link() -> None:
    pool = pool_of(provisioned(0, console_url="https://console.example/i-0", accelerator="A100 40GB"))
    page = pages.cost_page(RunState([pool]), 0.0)
    assert "[i-0](https://console.example/i-0) (A100 40GB)" in page


def test_the_cost_page_so_far_adds_up_with_a_line_for_the_difference() -> None:
    """The bill is that of the pool; what the estimates of the machines leave is named."""
    pool = pool_of(
        sky.InfraCreating("p-1"), provisioned(0), sky.CostUpdate(1000.0, 1.5, 3.6, 0, 1), at=0.0
    )  # the machine: 1.0
    page = pages.cost_page(RunState([pool], earlier={"p-0": 0.25}), 1000.0)
    assert "| Total so far | **$1.75** |" in page
    assert f"| {pages.BILLING_ROUNDING} |  |  | $0.5000 |" in page
    assert "| earlier attempts |  |  | $0.2500 |" in page
    assert page.endswith("`skyward receipt p-0`, `skyward receipt p-1`")
    assert pages.summary(RunState([pool])) == "$1.50 so far, $3.60 per hour · 1 x p4d · 16 min 40 s"


def test_the_share_of_a_pool_that_was_found_warm_is_the_cost_of_the_run() -> None:
    """Also beside a pool of its own; the pool's costs, buckets and final event are of all its users."""
    joined = PoolState("pool 2")
    instance = sky.Instance(
        id="i-9", provider="aws", pool_id="p-9", rank=0, state=sky.InstanceState.RUNNING, region="r",
        instance_type="g4", price_per_hour=3.6,
    )  # fmt: skip
    joined.share(SharedPool("team-gpu", "p-9", "T4", (sky.Node(instance=instance, rank=0),)), 10.0)
    final = sky.CostFinal(9.0, 100.0, 3.6, 0, 1, 0.0, {"idle": 9.0})
    joined.after(final, 20.0)
    assert notices.notice_of(final, joined) is None
    assert RunState([joined]).usd == 0
    joined.share_usd = 0.25
    joined.leave(70.0)
    state = RunState([pool_of(sky.CostUpdate(10.0, 1.0, 3.6, 0, 1)), joined], is_final=True)
    page = pages.cost_page(state, 100.0)
    assert (
        "share of pool `team-gpu` (1 x T4): the calls of this run, by the seconds of their slots |  |  | $0.2500"
        in page
    )
    assert "| **Total** |  |  | **$1.25** |" in page
    assert "What it went to" not in page
    assert pages.summary(RunState([joined], is_final=True)) == "$0.2500 · share of pool team-gpu · 1 x T4 · 1 min 0 s"
    assert pages.progress_words(joined) == "1 x T4 found warm, or in use: pool team-gpu"
    assert [row["USD"] for row in pages.node_rows(state, 100.0)] == [""]
    assert notices.share_final(joined).payload == {
        "usd": 0.25, "seconds": 60.0, "hardware": "1 x T4", "share_of": "team-gpu", "has_opened": False,
    }  # fmt: skip


def test_the_machines_of_equal_pools_are_counted_together() -> None:
    """A run of three pools with one, two and one machine has four."""
    pools = [pool_of(provisioned(0)), pool_of(provisioned(1), provisioned(2)), pool_of(provisioned(3))]
    assert RunState(pools).hardware == "4 x p4d"


def test_a_report_that_is_faster_than_the_submit_is_kept() -> None:
    """It belongs to the task run once that is known."""
    tasks = TaskCosts()
    tasks.report(sky.CallReported(0, "i-0", "call-1", 3, {"loss": 0.5}, 0.0))
    assert tasks.runs == {}
    tasks.know_call("call-1", "run-1", "train")
    tasks.add("run-1", 0.25)
    assert pages.task_rows(tasks.costliest()) == [
        {"task": "train", "task run": "run-1", "USD": 0.25, "calls": 1, "loss": 0.5}
    ]
    assert pages.task_summary(tasks.runs["run-1"]) == "$0.2500 · loss 0.5"


@pytest.mark.parametrize(
    ("amount", "words"),
    [(0, "$0"), (1234.5, "$1,234.50"), (0.5, "$0.5000"), (0.001234, "$0.001234"), (0.00000012, "$0.00000012")],
)
def test_no_cost_is_shown_as_zero(amount: float, words: str) -> None:
    assert pages.usd(amount) == words


def test_notices_carry_the_money_and_are_few() -> None:
    """A budget warning has the share that is spent; of many losses the first ones are emitted, and each bill."""
    pool = pool_of(provisioned(0))
    warning = notices.notice_of(sky.BudgetWarning(8.0, 10.0, None, "80 %"), pool)
    assert warning == notices.Notice(
        "skyward.budget.warning",
        {"spent_usd": 8.0, "limit_usd": 10.0, "share": 0.8, "account": None, "reason": "80 %"},
    )
    assert notices.notice_of(sky.PoolStopping(), pool) is None
    sieve = notices.Sieve()
    lost = notices.notice_of(sky.InstanceLost("i-0", 0, "gone"), pool)
    final = notices.notice_of(sky.CostFinal(1.0, 2.0, 3.0, 0, 1, 0.0), pool)
    assert lost is not None
    assert final is not None
    assert [sieve.lets(lost) for _ in range(7)] == [True] * 5 + [False] * 2
    assert all(sieve.lets(final) for _ in range(7))


def test_a_flow_run_warns_once_of_its_limit() -> None:
    """At 80 % of the sum of its pools, or when a pool warns of the same limit; a step's own limit is another one."""

    def of_pool(limit_usd: float | None, account: str | None = None) -> notices.Notice:
        found = notices.notice_of(sky.BudgetWarning(1.0, limit_usd, account, "x"), PoolState(""))
        assert found is not None
        return found

    run = notices.RunWarning()
    assert run.due(100.0) is None, "it has no limit"
    run.limit_usd = 10.0
    assert run.due(7.9) is None
    assert not run.repeats(of_pool(2.0))
    assert not run.repeats(of_pool(10.0, "team"))
    warning = run.due(8.0)
    assert warning is not None
    assert (warning.event, warning.payload["share"], warning.payload["limit_usd"]) == (notices.WARNING, 0.8, 10.0)
    assert "max_cost=10" in warning.payload["reason"]
    assert run.due(9.0) is None
    assert run.repeats(of_pool(10.0))
    assert not run.repeats(notices.Notice(notices.LOST, {}))
    other = notices.RunWarning()
    other.limit_usd = 10.0
    assert not other.repeats(of_pool(10.0))
    assert other.due(9.0) is None


def test_a_preemption_notice_has_the_time_that_is_left() -> None:
    notice = notices.notice_of(sky.PreemptionNoticed("i-0", 0, "terminate", 1000.0, 118.0), PoolState(""))
    assert notice is not None
    assert (notice.event, notice.payload["seconds_left"]) == ("skyward.preemption.noticed", 118.0)
