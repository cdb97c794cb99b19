"""The checks of this machine: versions, settings, network, folders, the ledger and the keys."""

from __future__ import annotations

import importlib
import platform
import socket
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

from skyward_core.config.settings import Settings
from skyward_core.doctor.check import Check
from skyward_core.errors import BadRequest, LedgerError
from skyward_core.machines import sealing
from skyward_core.machines.user_keys import file_key, key_file
from skyward_core.paths import cache_places, first_private, state_places
from skyward_core.spec import PoolSpec
from skyward_core.worker.private_folders import NotPrivate

OURS = "skyward-core"
SHOWN = ("distributed", "asyncssh", "sqlalchemy")
NETWORK_SECONDS = 5.0


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
    try:
        state, cache = first_private("doctor", state_places()), first_private("doctor", cache_places())
    except NotPrivate as error:
        return [Check.failed("state folder", str(error), "name a folder of your own with XDG_STATE_HOME")]
    for folder in {state, cache}:
        folder.rmdir()
    return [Check.ok("state folder", f"{state.parent} and {cache.parent} are private and can be written to")]


def check_ledger(url: str | None) -> list[Check]:
    """Check whether the ledger answers, has this release's tables, and can be written to. Migrates it, as any command
    does.
    """
    ledgers = importlib.import_module("skyward_core.ledger.ledger")
    try:
        with ledgers.Ledger(url or ledgers.default_url()) as ledger:
            schema = ledger.try_write()
            where = repr(ledger.url)
    except LedgerError as error:
        return [Check.failed("ledger", str(error), "docs/ledger.md says where it may be and which rights it needs")]
    return [Check.ok("ledger", f"{where}: version {schema}, can be written to")]


def check_keys() -> list[Check]:
    """Check the key that seals what other machines need, without showing it. None is made."""
    try:
        if keys := sealing.secret_keys():
            return [Check.ok("secret key", f"{len(keys)} in {sealing.VARIABLE}")]
        file_key(sealing.FILE, may_make=False)
    except BadRequest as error:
        return [Check.failed("secret key", str(error), sealing.CURE)]
    except FileNotFoundError:
        return [Check.ok("secret key", f"{sealing.VARIABLE} is not set; the first pool that needs a key makes one")]
    except (OSError, RuntimeError, KeyError) as error:
        return [Check.failed("secret key", f"the key file cannot be used: {error}", sealing.CURE)]
    message = f"{key_file(sealing.FILE)}: processes of this machine and user can attach to pools"
    return [Check.ok("secret key", f"{message}; for other machines set {sealing.VARIABLE}")]
