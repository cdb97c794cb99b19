"""Prices of planned tasks: what each would rent now, and the most that it may cost."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from skyward_core.errors import SkywardError
from skyward_core.pool.preparation import prepare
from skyward_core.providers.base import Provider
from skyward_core.provisioning.quote import PlannedTask, Quote, ceiling_of, quote
from skyward_core.spec import PoolSpec


@dataclass(frozen=True, slots=True)
class TaskQuote:
    """The quote of a planned task.

    `spec` is completed by the settings. `quote` is None if the task's spec is not known or cannot be, and then `reason`
    says why; `is_faulty` is true if it cannot be. `ceiling_usd` is for one try of one task, as in `Quote`.
    """

    task: PlannedTask
    spec: PoolSpec | None = None
    quote: Quote | None = None
    reason: str = ""
    is_faulty: bool = False

    @property
    def ceiling_usd(self) -> float | None:
        """The most that one try may cost, in USD; None if nothing limits it, or it is not known."""
        return None if self.quote is None else self.quote.ceiling_usd

    @property
    def run_ceiling_usd(self) -> float | None:
        """The most that one run of the workflow may spend on this task: all its tries, and all tasks mapped from it."""
        if self.ceiling_usd is None or self.task.instances is None:
            return None
        return self.ceiling_usd * self.task.tries * self.task.instances


class TaskPrices:
    """Quotes tasks. Tasks that differ only in what has no influence on prices share the providers' answers."""

    def __init__(self) -> None:
        self._known: list[tuple[PoolSpec, Sequence[Provider], Quote]] = []

    def quote(self, task: PlannedTask) -> TaskQuote:
        """Return the quote of a task. Queries providers; rents nothing."""
        if task.spec is None:
            return TaskQuote(task, reason=task.reason)
        try:
            prepared = prepare(task.spec)
            quoted = self._quote(_priced(prepared.spec), prepared.providers)
        except SkywardError as error:
            return TaskQuote(task, task.spec, reason=str(error), is_faulty=True)
        spec = prepared.spec
        seconds = None if task.timeout_seconds is None else task.timeout_seconds + spec.keep_warm
        ceiling = ceiling_of(spec, quoted.ways, seconds)
        return TaskQuote(task, spec, Quote(quoted.ways, ceiling, spec.budget, quoted.refusals))

    def _quote(self, spec: PoolSpec, providers: Sequence[Provider]) -> Quote:
        for known_spec, known_providers, known in self._known:
            if known_spec == spec and known_providers == providers:
                return known
        found = quote(spec, providers)
        self._known.append((spec, providers, found))
        return found


def quotes_of(tasks: Iterable[PlannedTask]) -> list[TaskQuote]:
    """Return the quotes of tasks, in their order."""
    prices = TaskPrices()
    return [prices.quote(task) for task in tasks]


def ceiling_of_run(quotes: Iterable[TaskQuote]) -> float | None:
    """Return the most that one run with these tasks may cost, in USD; None if that of a task is not known."""
    ceilings = [one.run_ceiling_usd for one in quotes]
    return None if None in ceilings else sum(ceiling for ceiling in ceilings if ceiling is not None)


def _priced(spec: PoolSpec) -> PoolSpec:
    """Return a spec without what has no influence on prices."""
    return spec.with_(
        max_cost=None,
        max_lifetime=None,
        budget=None,
        env=None,
        secrets=None,
        name=None,
        keep_warm=0.0,
    )
