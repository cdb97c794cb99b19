"""Completes the arguments of a pool: settings, providers and secrets."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal

from skyward_core.config.settings import Settings
from skyward_core.errors import BadRequest, ShortTraceback, SkywardError
from skyward_core.events import console
from skyward_core.events.events import Callback
from skyward_core.events.narrator import usd
from skyward_core.machines import spot
from skyward_core.providers.base import Provider
from skyward_core.providers.local import Local
from skyward_core.provisioning.quote import PlannedTask, Quote, ceiling_of, questions, quote
from skyward_core.secret import read_values, too_short_to_mask
from skyward_core.serialization import pickling
from skyward_core.spec import MOST_USD, PoolSpec
from skyward_core.wire.masking import SecretValues
from skyward_core.work import NO_WORK, Work
from skyward_core.written_numbers import number


@dataclass(frozen=True, slots=True)
class Prepared:
    """The checked arguments of a pool. `why_provider` says where the providers come from, if not from the caller.

    `belongs_to` is the work that bears what no call uses: empty for a pool to which its user has given a name.
    """

    spec: PoolSpec
    providers: tuple[Provider, ...]
    why_provider: str = ""
    on_event: Callback | None = None
    replace_object: pickling.Replace | None = None
    work: Work = NO_WORK
    given_secrets: SecretValues = field(default_factory=lambda: SecretValues({}))
    run_limit_usd: Decimal | None = None
    belongs_to: Work = NO_WORK

    def log_provider(self) -> None:
        """Log which provider was chosen, and why, if the caller named none.

        Called while the pool opens, because the display may not show yet.
        """
        if self.why_provider:
            here = self.providers[0]
            is_stand_in = here not in self.spec.providers and isinstance(here, Local) and here != Local()
            self._log(logging.WARNING if is_stand_in else logging.INFO, "%s", self.why_provider)

    def read_secrets(self) -> SecretValues:
        """Return the values of the spec's secrets, and warn of plain text that should be a secret.

        Raises BadRequest.
        """
        values = read_values(self.spec.secrets or {}, self.given_secrets)
        if short := too_short_to_mask(values):
            self._log(logging.WARNING, "%s: too short a value to be masked in what calls print", ", ".join(short))
        if plain := self.spec.plain_secrets:
            names = ", ".join(plain)
            self._log(
                logging.WARNING,
                "env holds %s as plain text, on the nodes' disks too: write secrets=(%r,) if the calls need it"
                " (docs/secrets.md)",
                names,
                plain[0],
            )
        return values

    @property
    def _log(self) -> Callable[..., None]:
        return console.log_of(self.spec.display)


def prepare(
    spec: PoolSpec,
    *,
    credentials: Provider | Sequence[Provider] | None = None,
    on_event: Callback | None = None,
    replace_object: pickling.Replace | None = None,
    work: Work = NO_WORK,
    secrets: Mapping[str, str] | None = None,
    run_max_cost: float | None = None,
    belongs_to: Work | None = None,
) -> Prepared:
    """Complete and check the arguments of a pool. Raises BadRequest."""
    spec, providers, why_provider = complete(spec, credentials)
    spec.refuse_what_cannot_be()
    spec.refuse_keep_warm_without_a_name()
    questions(spec, providers)
    limit = _run_limit(run_max_cost, spec, work)
    own = (work if spec.name is None else NO_WORK) if belongs_to is None else belongs_to
    given = SecretValues(secrets or {})
    return Prepared(spec, providers, why_provider, on_event, replace_object, work, given, limit, own)


def _run_limit(run_max_cost: float | None, spec: PoolSpec, work: Work) -> Decimal | None:
    """Check a limit for all pools of a run, and return it in USD; None for no limit."""
    if run_max_cost is None:
        return None
    limit_usd = number(run_max_cost, "run_max_cost", "a positive number of USD, or None", most=MOST_USD)
    if not work.run:
        raise BadRequest('run_max_cost needs the run whose pools it limits: work=sky.Work(system="...", run="...")')
    if spec.name is not None:
        raise BadRequest(
            f"run_max_cost beside name={spec.name!r}: a pool with a name is not for one run; max_cost and budget limit"
            " it"
        )
    return Decimal(repr(limit_usd))


def complete(
    spec: PoolSpec, credentials: Provider | Sequence[Provider] | None = None
) -> tuple[PoolSpec, tuple[Provider, ...], str]:
    """Return the spec completed by the settings, the providers to ask, and in words their source, if it is not the
    caller, and what this machine simulates in place of a cloud.
    """
    settings = Settings.read(pool=spec.name)
    missing = {
        name: value
        for name, value in settings.fields.items()
        if name not in spec.model_fields_set or (name == "provider" and spec.provider is None)
    }
    if missing:
        try:
            spec = spec.with_(**missing)
        except BadRequest as error:
            raise BadRequest(
                f"{error} (from the settings: {', '.join(f'{name} from {settings.sources[name]}' for name in missing)})"
            ) from error
    providers, source = (Local(),), "no provider was named, neither in the program nor in the settings"
    if credentials is not None:
        providers, source = (credentials,) if isinstance(credentials, Provider) else tuple(credentials), ""
    elif spec.providers:
        names = ", ".join(repr(provider.name) for provider in spec.providers)
        providers = spec.providers
        source = f"provider {names}, from {settings.sources['provider']}" if "provider" in missing else ""
    providers, simulated = _simulating(spec, providers)
    if not spec.providers and credentials is None:
        source += ": running on this machine (Local)"
    return spec, providers, "; ".join(filter(None, (source, simulated)))


def _simulating(spec: PoolSpec, providers: tuple[Provider, ...]) -> tuple[tuple[Provider, ...], str]:
    """Let this machine simulate what the pool needs and it lacks, if it is the only provider, and say so.

    Beside a cloud it does not: it costs nothing, so it would always be rented in place of the cloud.
    """
    asked = providers[0]
    if len(providers) > 1 or type(asked) is not Local:  # a subclass knows what it sells
        return providers, ""
    here = asked.standing_in_for(spec.first_accelerator, needs_spot=isinstance(spec.spot, spot.Always | spot.Percent))
    said: list[str] = []
    if here.simulate != asked.simulate:
        said.append(
            f"this machine has no GPU and stands in for {spec.first_accelerator}, at {usd(here.price_per_hour)} per"
            " hour: calls find it in instance_info(), simulated, and no device"
        )
    if here.spot_price_per_hour is not None and asked.spot_price_per_hour is None:
        price = usd(here.spot_price_per_hour)
        said.append(
            f"its spot machines are simulated, at {price} per hour: Local(spot_price_per_hour=...) sets another"
        )
    return (here,), "; ".join(said)


class Quoting:
    """The part of `ComputePool` that asks for prices before machines are rented."""

    _prepared: Prepared

    @ShortTraceback()
    def quote(self) -> Quote:
        """Return the candidates for this pool's machines now, the price of each, and the most that the pool may cost.

        Queries the providers; rents nothing. Allowed whether the pool is open or not. Raises BadRequest, as `open`.
        """
        return quote(self._prepared.spec, self._prepared.providers)


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
        ceiling = ceiling_of(spec, quoted.candidates, seconds)
        return TaskQuote(task, spec, Quote(quoted.candidates, ceiling, spec.budget, quoted.refusals))

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
