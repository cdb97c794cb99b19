"""`Check`: the result of one check."""

from __future__ import annotations

import importlib
import os
import platform
import socket
import sys
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from importlib.metadata import EntryPoint, entry_points, version
from pathlib import Path
from typing import Any, Self, cast

from skyward_core.concurrency.threads import Threads
from skyward_core.config.settings import Settings
from skyward_core.errors import BadRequest, CredentialsError, LedgerError, SkywardError, without_logins
from skyward_core.machines import signing as sealing
from skyward_core.machines.signing import file_key, key_file
from skyward_core.operations import Sellers, sellers
from skyward_core.paths import cache_places, first_private, state_places
from skyward_core.providers.base import Provider
from skyward_core.spec import PoolSpec
from skyward_core.wire.private_folders import NotPrivate

GROUP = "skyward.doctor"
LIMIT_SECONDS = 20.0
OURS = "skyward-core"
SHOWN = ("distributed", "asyncssh", "sqlalchemy")
NETWORK_SECONDS = 5.0


class CheckState(StrEnum):
    """How a check ended. A warning stops no pool."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check: what was checked, what was found, and for all but `ok` what to do (`cure`)."""

    subject: str
    state: CheckState
    message: str
    cure: str = ""

    def __post_init__(self) -> None:
        """Hide the passwords of URLs: a check says which address did not answer."""
        object.__setattr__(self, "message", without_logins(self.message))

    @classmethod
    def ok(cls, subject: str, message: str) -> Self:
        """Return that all is well."""
        return cls(subject, CheckState.OK, message)

    @classmethod
    def warning(cls, subject: str, message: str, cure: str) -> Self:
        """Return that something works, but not in all cases."""
        return cls(subject, CheckState.WARNING, message, cure)

    @classmethod
    def failed(cls, subject: str, message: str, cure: str) -> Self:
        """Return that something does not work."""
        return cls(subject, CheckState.FAILED, message, cure)


type Probe = tuple[str, Callable[[], Sequence[Check]]]
"""The subject, and what checks it."""


# All checks at the same time, each with a time limit.
#
# A check that hangs is abandoned in its thread, which does not keep the process alive. Distributions add checks by the
# entry-point group `skyward.doctor`: a function that returns a list of `Check`.


def diagnose(
    *,
    providers: Sequence[Provider] | None = None,
    ledger_url: str | None = None,
    limit_seconds: float = LIMIT_SECONDS,
) -> list[Check]:
    """Check this machine, the ledger, the clouds and the orchestrators; return all results in a fixed order.

    `providers` are those of the settings if not given, else each cloud with credentials. A check that takes longer than
    the limit has failed. Raises nothing.
    """
    settings = check_settings()  # here, because it reads the environment of the caller
    probes: list[Probe] = [
        ("versions", check_versions),
        ("settings", lambda: settings),
        ("network", check_network),
        ("state folder", check_folders),
        ("ledger", partial(check_ledger, ledger_url)),
        ("secret key", check_keys),
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
        asked = sellers() if given is None else Sellers(given)
    except BadRequest:  # the check of the settings says it
        return []
    return [
        *((f"provider {provider.name}", partial(check_cloud, provider)) for provider in asked.providers),
        *((f"provider {name}", partial(_without, name, why)) for name, why in asked.without.items()),
    ]


def _without(name: str, why: str) -> list[Check]:
    return [Check.ok(f"provider {name}", f"not asked: {why}")]


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
        return [Check.ok(_title(entry.name), "not installed")]


def check_cloud(provider: Provider) -> list[Check]:
    """Check whether the provider accepts our credentials, and lists our machines."""
    subject = f"provider {provider.name}"
    try:
        began = time.monotonic()
        account = provider.account()
        seconds = time.monotonic() - began
        machines = provider.instances()
    except SkywardError as error:
        return [Check.failed(subject, error.without_advice, error.advice or _cure(error))]
    except (OSError, ImportError) as error:
        return [Check.failed(subject, f"{type(error).__name__}: {error}", _cure(error))]
    whose = f"account {account}, answered in {seconds:.1f} s" if account else "needs no account"
    count = f"{len(machines)} machine{'' if len(machines) == 1 else 's'} of pools"
    return [Check.ok(subject, f"{whose}; {count}"), *_quotas(provider, subject)]


def _cure(error: Exception) -> str:
    if isinstance(error, CredentialsError):
        return "set other credentials, as docs/clouds says for this provider, or give these the missing rights"
    if isinstance(error, ImportError):
        return "install the package that is missing, as the page of this provider says (docs/clouds)"
    return "look whether this machine reaches the provider, and at its status page"


def _quotas(provider: Provider, subject: str) -> list[Check]:
    subject = f"{subject}: quota"
    try:
        quotas = provider.quotas()
    except SkywardError as error:
        cure = "nothing, if pools open; else give the credentials the right to read quotas"
        return [Check.warning(subject, f"not known: {error}", cure)]
    return [
        Check.ok(subject, f"{name}: {value:g}")
        if value > 0
        else Check.warning(subject, f"{name}: {value:g}", "ask the provider for more, or add credit")
        for name, value in quotas.items()
    ]


def check_versions() -> list[Check]:
    """Check whether this Python is one of those that we test."""
    python = platform.python_version()
    found = ", ".join([f"Python {python}", f"{OURS} {version(OURS)}", *(f"{name} {version(name)}" for name in SHOWN)])
    folder = Path(__file__).parents[1]
    tested = sorted(path.stem.removeprefix("constraints-") for path in folder.glob("constraints-*.txt"))
    if not tested or f"{sys.version_info.major}.{sys.version_info.minor}" in tested:
        return [Check.ok("versions", found)]
    cure = f"if something fails, try Python {' or '.join(tested)} with `skyward --constraints`"
    return [Check.warning("versions", f"{found}; no versions were tested with this Python", cure)]


def check_settings() -> list[Check]:
    """Check whether a pool could have the settings of this folder and environment."""
    try:
        settings = Settings.read()
        PoolSpec.of(**cast("Any", dict(settings.fields)))
    except (BadRequest, OSError) as error:
        return [Check.failed("settings", str(error), "`skyward config show` lists each value with its source")]
    sources = ", ".join(dict.fromkeys(settings.sources.values()))
    return [Check.ok("settings", f"read from {sources}" if sources else "none; the defaults hold")]


def check_network() -> list[Check]:
    """Check whether programs of this machine reach each other, as a pool and its local nodes do."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(NETWORK_SECONDS)
            with socket.create_connection(server.getsockname(), NETWORK_SECONDS):
                server.accept()[0].close()
    except OSError as error:
        cure = "allow connections to 127.0.0.1: look at the firewall, or at the sandbox that this runs in"
        return [Check.failed("network", f"ports of 127.0.0.1 cannot be used: {error}", cure)]
    return [Check.ok("network", "ports of 127.0.0.1 can be opened and reached")]


def check_folders() -> list[Check]:
    """Check whether there are private folders for state and cache."""
    missing = {path for _, place in cache_places() for path in _missing_parts(place)}
    try:
        state, cache = first_private("doctor", state_places()), first_private("doctor", cache_places())
    except NotPrivate as error:
        return [Check.failed("state folder", str(error), "name a folder of your own with XDG_STATE_HOME")]
    for folder in {state, cache}:
        _remove_empty(folder, missing)
    return [Check.ok("state folder", f"{state.parent} and {cache.parent} are private and can be written to")]


def _missing_parts(place: Callable[[], Path]) -> list[Path]:
    """Return the folders of a place that do not exist yet."""
    try:
        path = Path(os.path.realpath(place()))
    except (OSError, RuntimeError, KeyError):  # no home, and no entry for this user
        return []
    return [part for part in (path, *path.parents) if not part.exists()]


def _remove_empty(folder: Path, made: Collection[Path]) -> None:
    """Remove a folder, and those above it that were made with it and have nothing else in them."""
    folder.rmdir()
    for path in folder.parents:
        if path not in made:
            return
        try:
            path.rmdir()
        except OSError:  # another process uses it
            return


def check_ledger(url: str | None) -> list[Check]:
    """Check whether the ledger answers, has this release's tables, and can be written to. Does not migrate it."""
    ledgers = importlib.import_module("skyward_core.ledger.ledger")
    try:
        place = url or ledgers.default_url()
        with ledgers.ledger_to_read(place) as ledger:
            schema = ledger.try_write()
            where = repr(ledger.url)
        if not ledgers.is_made(place):
            return [Check.ok("ledger", f"there is none yet; the first pool makes {where}")]
    except LedgerError as error:
        return [Check.failed("ledger", str(error), "docs/ledger.md says where it may be and which rights it needs")]
    return [Check.ok("ledger", f"{where}: version {schema}, can be written to")]


def check_keys() -> list[Check]:
    """Check the key that seals what other machines need, without showing it. None is made."""
    try:
        if keys := sealing.secret_keys():
            return [Check.ok("secret key", f"{len(keys)} in {sealing.SECRET_VARIABLE}")]
        file_key(sealing.SECRET_FILE, may_make=False)
    except BadRequest as error:
        return [Check.failed("secret key", str(error), sealing.CURE)]
    except FileNotFoundError:
        return [
            Check.ok("secret key", f"{sealing.SECRET_VARIABLE} is not set; the first pool that needs a key makes one")
        ]
    except (OSError, RuntimeError, KeyError) as error:
        return [Check.failed("secret key", f"the key file cannot be used: {error}", sealing.CURE)]
    message = f"{key_file(sealing.SECRET_FILE)}: processes of this machine and user can attach to pools"
    return [Check.ok("secret key", f"{message}; for other machines set {sealing.SECRET_VARIABLE}")]
