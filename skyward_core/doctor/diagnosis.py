"""All checks at the same time, each with a time limit.

A check that hangs is abandoned in its thread, which does not keep the process alive. Distributions add checks by the
entry-point group `skyward.doctor`: a function that returns a list of `Check`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from importlib.metadata import EntryPoint, entry_points

from skyward_core.concurrency.threads import Threads
from skyward_core.config.settings import Settings
from skyward_core.doctor import this_machine
from skyward_core.doctor.check import Check
from skyward_core.doctor.clouds import check_cloud
from skyward_core.errors import BadRequest
from skyward_core.providers.base import Provider, load_all

GROUP = "skyward.doctor"
LIMIT_SECONDS = 20.0

type Probe = tuple[str, Callable[[], Sequence[Check]]]
"""The subject, and what checks it."""


def diagnose(
    *,
    providers: Sequence[Provider] | None = None,
    ledger_url: str | None = None,
    limit_seconds: float = LIMIT_SECONDS,
) -> list[Check]:
    """Check this machine, the ledger, the clouds and the orchestrators; return all results in a fixed order.

    `providers` are those of the settings if not given. A check that takes longer than the limit has failed. Raises
    nothing.
    """
    settings = this_machine.check_settings()  # here, because it reads the environment of the caller
    probes: list[Probe] = [
        ("versions", this_machine.check_versions),
        ("settings", lambda: settings),
        ("network", this_machine.check_network),
        ("state folder", this_machine.check_folders),
        ("ledger", partial(this_machine.check_ledger, ledger_url)),
        ("secret key", this_machine.check_keys),
        *_clouds(providers),
        *((_title(entry.name), partial(_orchestrator, entry)) for entry in entry_points(group=GROUP)),
    ]
    threads, deadline = Threads("skyward-doctor"), time.monotonic() + limit_seconds
    answers = [threads.submit(check) for _, check in probes]
    return [
        check
        for (subject, _), answer in zip(probes, answers, strict=True)
        for check in _result(subject, answer, deadline, limit_seconds)
    ]


def _clouds(given: Sequence[Provider] | None) -> list[Probe]:
    try:
        found = load_all(Settings.read().fields.get("provider") or "local") if given is None else given
    except BadRequest:  # the check of the settings says it
        return []
    return [(f"provider {one.name}", partial(check_cloud, one)) for one in found]


def _result(subject: str, answer: Future[Sequence[Check]], deadline: float, limit_seconds: float) -> Sequence[Check]:
    try:
        return answer.result(max(0.0, deadline - time.monotonic()))
    except TimeoutError as error:
        if answer.done():
            return [_broken(subject, error)]
        cure = "look whether the network or a disk hangs, or give it longer with --limit"
        return [Check.failed(subject, f"no answer within {limit_seconds:g} s", cure)]
    except Exception as error:  # a check of another distribution may raise anything
        return [_broken(subject, error)]


def _broken(subject: str, error: Exception) -> Check:
    return Check.failed(subject, f"the check itself failed: {type(error).__name__}: {error}", "report this as a bug")


def _title(name: str) -> str:
    return name.replace("_", " ").capitalize()


def _orchestrator(entry: EntryPoint) -> Sequence[Check]:
    """Run the check of an integration; without its orchestrator the integration cannot be imported."""
    try:
        check: Callable[[], Sequence[Check]] = entry.load()
        return check()
    except ModuleNotFoundError as error:
        ours = entry.module.partition(".")[0]
        if (error.name or ours).partition(".")[0] == ours:
            raise
        return [Check.ok(_title(entry.name), f"not installed (there is no module {error.name!r})")]
