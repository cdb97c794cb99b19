"""The text and the tables of the artifacts. Everything adds up: each table ends in the total that is at its head."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import skyward_core as sky
from prefect_skyward.report.pool_state import PREPARED_SHARE, MachineState, PoolState, in_words
from prefect_skyward.report.task_costs import TaskCosts, TaskRunCost, total

markdown, markdown_code, markdown_link = (
    sky.shown_text.markdown,
    sky.shown_text.markdown_code,
    sky.shown_text.markdown_link,
)
"""Names and errors on these pages are other people's: Prefect's UI shows images and HTML that stand in Markdown."""
MOST_MACHINE_LINES = 20
MOST_TASK_LINES = 20
BILLING_ROUNDING = "billing rounding, and machines that are not in the list"


@dataclass(slots=True)
class RunState:
    """All that is known of a flow run: its pools, its task runs, and the USD of earlier attempts by pool id."""

    pools: list[PoolState] = field(default_factory=list[PoolState])
    tasks: TaskCosts = field(default_factory=TaskCosts)
    earlier: Mapping[str, float] = field(default_factory=dict[str, float])
    is_final: bool = False

    @property
    def attempt_usd(self) -> float:
        """The cost of this attempt's pools."""
        return total(pool.usd for pool in self.pools)

    @property
    def usd(self) -> float:
        """The cost of the flow run, with its earlier attempts."""
        return total([self.attempt_usd, *self.earlier.values()])

    @property
    def rate_per_hour(self) -> float:
        """The cost per hour of the machines that are rented now."""
        return total(pool.rate_per_hour for pool in self.pools if pool.final is None and not pool.is_left)

    @property
    def seconds(self) -> float:
        """The longest life of its pools."""
        return max((pool.seconds for pool in self.pools), default=0.0)

    @property
    def utilisation(self) -> tuple[str, float] | None:
        """The mean of accelerators while calls ran, or of the processor without them: words and percent.

        None before the first sample.
        """
        for name in ("gpu_percent", "cpu_percent"):
            series = [its for pool in self.pools if (its := pool.use.measured.get(name)) is not None and its.count]
            if series:
                mean = sum(its.mean * its.count for its in series) / sum(its.count for its in series)
                return sky.Utilisation.words_of(name), mean
        return None

    @property
    def hardware(self) -> str:
        """All machines in words."""
        return in_words(machine for pool in self.pools for machine in pool.machines.values())


def usd(amount: float) -> str:
    """Return an amount as it is written, with the small parts that a short run costs."""
    if amount == 0:
        return "$0"
    if abs(amount) >= 1:
        return f"${amount:,.2f}"
    decimals = 4 if abs(amount) >= 0.01 else min(8, 3 - math.floor(math.log10(abs(amount))))
    return f"${amount:.{decimals}f}"


def machines(count: int) -> str:
    """Return a number of machines in words."""
    return f"{count} machine{'' if count == 1 else 's'}"


def duration(seconds: float) -> str:
    """Return seconds in words."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def summary(state: RunState) -> str:
    """Return the line that lists show: the amount first."""
    parts = [usd(state.usd) + ("" if state.is_final else f" so far, {usd(state.rate_per_hour)} per hour")]
    parts += [used(*state.utilisation)] if state.utilisation is not None else []
    shared = dict.fromkeys(pool.shared_name for pool in state.pools)
    parts += [markdown(f"share of pool {name}") for name in shared if name]
    parts += [markdown(state.hardware)] if state.hardware else []
    parts.append(duration(state.seconds))
    if any(pool.unconfirmed for pool in state.pools):
        parts.append("NOT CONFIRMED GONE")
    return " · ".join(parts)


def used(measure: str, percent: float | None) -> str:
    """Return a mean utilisation in words; "" for none."""
    # labels have one decimal: a percentage that was read from there is the same in words
    return "" if percent is None else f"{measure} {round(percent, 1):.0f} %".strip()


def cost_tag(amount: float, measure: str = "", percent: float | None = None, *, is_final: bool = True) -> str:
    """Return the tag of a flow run. Prefect shows it beside the name, on the run's page and in the list of runs."""
    return " · ".join(filter(None, (usd(amount) + ("" if is_final else " so far"), used(measure, percent))))


def cost_page(state: RunState, now: float) -> str:
    """Return the markdown of the cost."""
    return "\n\n".join(
        section
        for section in (
            _head(state),
            _machines(state, now),
            _buckets(state),
            _tasks(state),
            _utilization(state),
            _receipts(state),
        )
        if section
    )


def _head(state: RunState) -> str:
    rows = {"Total" if state.is_final else "Total so far": f"**{usd(state.usd)}**"}
    if state.earlier:
        rows["This attempt"] = usd(state.attempt_usd)
        rows["Earlier attempts"] = f"{usd(total(state.earlier.values()))} ({_pools(len(state.earlier))})"
    finals = [pool.final for pool in state.pools if pool.final is not None]
    rate = sum(pool.rate_per_hour for pool in state.pools) if state.is_final else state.rate_per_hour
    rows["Rate of all machines" if state.is_final else "Rate now"] = f"{usd(rate)} per hour"
    if saved := total(final.savings_vs_ondemand for final in finals):
        rows["Saved against on demand"] = usd(saved)
    rows["Time"] = duration(state.seconds)
    rows["Machines"] = f"{sum(len(pool.machines) for pool in state.pools)} ({markdown(state.hardware or 'none yet')})"
    rows["Calls"] = _calls(state.pools)
    for pool in state.pools:
        if pool.unconfirmed:
            rows["**Not confirmed gone**"] = (
                f"{markdown(', '.join(pool.unconfirmed))}; the pool's reaper and `skyward sweep` ask again"
            )
        if pool.trouble:
            rows[f"Trouble{_of_pool(pool)}"] = markdown(pool.trouble)
    return table(["Machines of this run", ""], [[name, value] for name, value in rows.items()])


def _calls(pools: Sequence[PoolState]) -> str:
    counts = [pool.calls for pool in pools]
    failed, cancelled = sum(one.failed for one in counts), sum(one.cancelled for one in counts)
    return f"{sum(one.done for one in counts)} of {sum(one.submitted for one in counts)} done, {failed} failed" + (
        f", {cancelled} cancelled" if cancelled else ""
    )


def _machines(state: RunState, now: float) -> str:
    shared = [pool for pool in state.pools if pool.shared_name]
    machines = [(pool, machine) for pool in state.pools if pool not in shared for machine in pool.machines.values()]
    if not machines and not shared:
        return ""
    machines.sort(key=lambda item: -item[1].cost_at(now))
    rows = [_machine_row(machine, now) for _, machine in machines[:MOST_MACHINE_LINES]]
    if rest := machines[MOST_MACHINE_LINES:]:
        rows.append([f"{len(rest)} others", "", "", usd(total(machine.cost_at(now) for _, machine in rest))])
    rows += [[_share_words(pool), "", "", usd(pool.usd)] for pool in shared]
    listed = sum(machine.cost_at(now) for _, machine in machines) + sum(pool.usd for pool in shared)
    difference = total([state.attempt_usd, -listed])
    if abs(difference) >= 1e-6:
        rows.append([BILLING_ROUNDING, "", "", usd(difference)])
    if state.earlier:
        rows.append(["earlier attempts", "", "", usd(total(state.earlier.values()))])
    rows.append(["**Total**", "", "", f"**{usd(state.usd)}**"])
    words = "" if state.is_final else " The seconds of machines that still run are estimates until the pool has ended."
    return (
        "### How it adds up\n\nPrice per hour x seconds / 3600; providers bill begun seconds or minutes as whole ones."
        f"{words}\n\n" + table(["machine", "per hour", "seconds", "USD"], rows)
    )


def _share_words(pool: PoolState) -> str:
    hardware = markdown(pool.hardware or "its machines")
    name = f"share of pool {markdown_code(pool.shared_name)} ({hardware}): "
    return name + (
        "the calls of this run, by the seconds of their slots"
        if pool.joined_at is not None
        else "the calls of this run, and what is for no calls, because this run has opened it"
    )


def _machine_row(machine: MachineState, now: float) -> list[str]:
    url = machine.console_url
    name = markdown_code(machine.instance_id) if url is None else markdown_link(machine.instance_id, url)
    spot = " spot" if machine.is_spot else ""
    kind = markdown(machine.accelerator or machine.instance_type)
    return [
        f"node {machine.node}: {name} ({kind}{spot}{', lost' if machine.is_lost else ''})",
        usd(machine.price_per_hour),
        f"{machine.seconds_at(now):.1f}",
        usd(machine.cost_at(now)),
    ]


def _buckets(state: RunState) -> str:
    costs: dict[str, float] = {}
    for pool in state.pools:
        # the buckets of a shared pool are of all its users
        for name, amount in (pool.final.buckets if pool.final is not None and not pool.shared_name else {}).items():
            costs[name] = costs.get(name, 0.0) + amount
    whole = sum(costs.values())
    if not whole:
        return ""
    rows = [
        [markdown(name), usd(amount), f"{100 * amount / whole:.0f} %"]
        for name, amount in sorted(costs.items(), key=lambda item: -item[1])
    ]
    rows.append(["**Together**", f"**{usd(total(costs.values()))}**", ""])
    return "### What it went to\n\n" + table(["", "USD", "share"], rows)


def _tasks(state: RunState) -> str:
    by_task = state.tasks.by_task()
    if not by_task:
        return ""
    items = list(by_task.items())
    rows = [[markdown(task), str(count), usd(amount)] for task, (count, amount) in items[:MOST_TASK_LINES]]
    if rest := items[MOST_TASK_LINES:]:
        rows.append([f"{len(rest)} other tasks", str(sum(item[1][0] for item in rest)),
                     usd(total(item[1][1] for item in rest))])  # fmt: skip
    knows_all = all(pool.joined_at is None for pool in state.pools)
    others = "no task (opening, idle time, the end)" if knows_all else "calls whose cost is known to the opener only"
    rows.append([others, "", usd(total([state.attempt_usd, -state.tasks.usd]))])
    rows.append(["**This attempt**", "", f"**{usd(state.attempt_usd)}**"])
    return "### By task\n\n" + table(["task", "task runs", "USD"], rows)


def _utilization(state: RunState) -> str:
    lines = [
        f"{pool.use.words_of(name)}{_of_pool(pool)} `{series.sparkline(0, 100)}` mean {series.mean:.0f} %,"
        f" highest {series.greatest:.0f} %"
        for pool in state.pools
        for name, series in pool.use.measured.items()
    ]
    return "### Utilisation\n\n" + "\n\n".join(lines) if lines else ""


def _receipts(state: RunState) -> str:
    return _receipt_words([*state.earlier, *(pool.pool_id for pool in state.pools if pool.pool_id)])


def _receipt_words(pool_ids: Sequence[str]) -> str:
    commands = ", ".join(markdown_code(f"skyward receipt {pool_id}") for pool_id in pool_ids)
    return f"Each machine, exactly: {commands}" if commands else ""


def settled_page(whole_usd: float, tasks: Sequence[Mapping[str, Any]], pool_ids: Sequence[str]) -> str:
    """Return the markdown of the cost of a run whose process could not write it: by the ledger."""
    by_task: dict[str, list[float]] = {}
    for row in tasks:
        by_task.setdefault(row["task"], []).append(row["USD"])
    shown = sorted(by_task.items(), key=lambda item: -sum(item[1]))[:MOST_TASK_LINES]
    rows = [[markdown(task), str(len(amounts)), usd(total(amounts))] for task, amounts in shown]
    others = total([whole_usd, *(-amount for _, amounts in shown for amount in amounts)])
    rows += [["other tasks, opening, idle time, the end", "", usd(others)]]
    rows += [["**Total**", "", f"**{usd(whole_usd)}**"]]
    words = (
        "This run uses no machines now, and its process has not written its bill: it was killed, Prefect's API did not"
        " answer it, or machines were not confirmed gone at its end. These figures are the ledger's."
    )
    return f"{words}\n\n{table(['task', 'task runs', 'USD'], rows)}\n\n{_receipt_words(pool_ids)}"


def node_rows(state: RunState, now: float) -> list[dict[str, Any]]:
    """Return the rows of the table of nodes."""
    return [
        {
            "pool": pool.pool_id,
            "node": machine.node,
            "instance id": machine.instance_id,
            "type": machine.instance_type,
            "accelerator": machine.accelerator,
            "spot": "yes" if machine.is_spot else "no",
            "price per hour": round(machine.price_per_hour, 6),
            "seconds": round(machine.seconds_at(now), 1),
            "USD": "" if pool.shared_name else round(machine.cost_at(now), 6),
            "utilisation": f"{machine.utilization.mean:.0f} %" if machine.utilization.count else "",
            "state": "lost" if machine.is_lost else "ended" if machine.ended or pool.final is not None else "rented",
            "console": machine.console_url or "",
        }
        for pool in state.pools
        for machine in pool.machines.values()
    ]


def task_rows(runs: Iterable[TaskRunCost]) -> list[dict[str, Any]]:
    """Return the rows of the table of task runs."""
    return [
        {
            "task": run.task,
            "task run": run.task_run_id,
            "USD": round(run.usd, 6),
            "calls": run.calls,
            **run.use.last_values(),
            **run.use.numbers(),
        }
        for run in runs
    ]


def task_summary(run: TaskRunCost) -> str:
    """Return the line of a task run: its last reported values, and its cost once a call has ended."""
    values = [f"{markdown(name)} {series.text}" for name, series in list(run.use.reported.items())]
    return " · ".join(([usd(run.usd)] if run.calls else []) + ([", ".join(values)] if values else []))


def task_page(run: TaskRunCost) -> str:
    """Return the markdown of one task run: its cost, and the course of what it reported."""
    head = f"**{usd(run.usd)}** ({run.calls} call{'' if run.calls == 1 else 's'}: the price of a slot for their time)"
    rows = [_metric_row(name, series) for name, series in list(run.use.reported.items())]
    parts = [head if run.calls else "Its cost is known when its call has ended."]
    if run.use.step is not None:
        parts.append(f"Step {run.use.step}")
    if rows:
        parts.append(table(["reported", "last", "least", "greatest", "course"], rows))
    if words := run.use.words():
        parts.append(f"While it ran: {words}")
    return "\n\n".join(parts)


def _metric_row(name: str, series: sky.Series) -> list[str]:
    extremes = (f"{number:.6g}" if series.count else "" for number in (series.least, series.greatest))
    return [markdown(name), series.text, *extremes, f"`{series.sparkline()}`"]


def progress_words(pool: PoolState) -> str:
    """Return what the opening of a pool has reached, in Markdown."""
    hardware = markdown(pool.hardware or "the pool")
    if pool.joined_at is not None:
        return f"{hardware} found warm, or in use: pool {markdown(pool.shared_name)}"
    if pool.ready_seconds is not None:
        return f"{hardware} ready after {duration(pool.ready_seconds)}"
    if pool.trouble:
        return markdown(pool.trouble)
    if not pool.machines:
        return f"launching {pool.wanted} machines" if pool.wanted else "looking for machines"
    ready = sum(machine.share >= PREPARED_SHARE for machine in pool.machines.values())
    return f"{len(pool.machines)} of {pool.wanted} machines rented, {ready} prepared"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in markdown. The cells are Markdown: texts of others are escaped before (`markdown`)."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _pools(count: int) -> str:
    return "1 pool" if count == 1 else f"{count} pools"


def _of_pool(pool: PoolState) -> str:
    return f" of pool {markdown(pool.name)}" if pool.name else ""
