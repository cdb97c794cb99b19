"""Settings: what a `PoolSpec` says when its user does not.

From the environment (`SKYWARD_PROVIDER=local`, `SKYWARD_NODES=2`, ...) and below that from `skyward.toml`, the nearest
one from the working directory upwards, else the one in the user's configuration directory. SKYWARD_CONFIG names another
one. A file that was found, and not named, must be of this user or root, and of nobody else, as all folders above it:
it can name commands, and take away limits. A file looks like this:

    nodes = 2
    [provider]
    name = "local"
    price_per_hour = 1.2

    [profiles.large]        # with SKYWARD_PROFILE=large
    nodes = 8

    [pools.nightly]         # of the pool with this name
    accelerator = "A100"

A table of a pool has priority over the profile, and that over the top of the file.
"""

from __future__ import annotations

import json
import logging
import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from platformdirs import user_config_path

from skyward_core.errors import BadRequest, meant, question
from skyward_core.spec import PoolSpec
from skyward_core.wire.private_folders import NotPrivate, read_file, read_kept

PREFIX = "SKYWARD_"
FILE = "skyward.toml"
PROFILE = f"{PREFIX}PROFILE"
CONFIG = f"{PREFIX}CONFIG"
PROFILES, POOLS = "profiles", "pools"
"""The tables of a file that have tables by name."""
OTHER_VARIABLES = (
    "BOOT BOOT_WATCHER COMMAND CONFIG ENDS END_OF_FILE ENV_PYTHON HOME INSTANCE INSTANCE_DIRECTORY INSTANCE_ID"
    " INSTANCE_INFO INSTANCE_TYPE IS_SPOT KEEP_DIRECTORY LEASE_KEY LEDGER LOOK MORE_TAGS OWNER POOL POOL_ID"
    " PREEMPTION_FILE PRELOAD_SKIPPED PRICE_PER_HOUR PRIVATE_IP PROFILE PYTHON RANK RESERVE SECRET_KEY TAGS UI_TOKEN"
    " UPTIME_FILE UV"
)
"""Variables of ours that set no field of a pool: those of users, of nodes and of scripts on machines."""
NOT_SETTINGS = frozenset(f"{PREFIX}{name}" for name in OTHER_VARIABLES.split())
PART = re.compile("_[0-9]+$")
"""The end of the name of a variable that holds a part of a long value, as in containers: SKYWARD_BOOT_0."""
_log = logging.getLogger("skyward")


@dataclass(frozen=True, slots=True)
class Settings:
    """Defaults of a `PoolSpec`'s fields, and for each field where it was found."""

    fields: Mapping[str, Any] = field(default_factory=dict[str, Any])
    sources: Mapping[str, str] = field(default_factory=dict[str, str])

    @classmethod
    def read(
        cls,
        environ: Mapping[str, str] = os.environ,
        directory: Path | None = None,
        *,
        profile: str | None = None,
        pool: str | None = None,
    ) -> Settings:
        """Read the settings that hold in a directory (by default the working directory).

        `profile` is that of SKYWARD_PROFILE if not given. `pool` is the name of the pool they are for; if not given, it
        is the `name` of the settings themselves. Raises BadRequest for a setting or a profile that does not exist, and
        for a file that another user could have written. A pool needs no table.
        """
        profile = environ.get(PROFILE) or None if profile is None else profile
        above = _of_environment(environ)
        file = SettingsFile.nearest(directory, environ)
        if file is None:
            if profile is not None:
                raise BadRequest(f"there is no profile {profile!r}, because there is no {FILE} here: write one")
            return above
        below = file.settings(profile)
        name = pool or above.fields.get("name") or below.fields.get("name")
        return below.under(file.of_pool(name)).under(above)

    def under(self, others: Settings) -> Settings:
        """Return these settings where the others have none."""
        return Settings({**self.fields, **others.fields}, {**self.sources, **others.sources})


@dataclass(frozen=True, slots=True)
class SettingsFile:
    """A `skyward.toml` without faults in its names: its top, and the tables of profiles and pools by name."""

    path: Path
    top: Mapping[str, Any]
    profiles: Mapping[str, Mapping[str, Any]]
    pools: Mapping[str, Mapping[str, Any]]

    @classmethod
    def nearest(cls, directory: Path | None = None, environ: Mapping[str, str] = os.environ) -> SettingsFile | None:
        """Read the file that SKYWARD_CONFIG names, else the one that holds in a directory; None if there is none.

        Raises BadRequest, also for a file that was not named and that another user could have written.
        """
        if named := environ.get(CONFIG):
            path = Path(named)
            return cls.of(path, _named_content(path))
        found = _find(directory or Path.cwd())
        return None if found is None else cls.of(found, _found_content(found))

    @classmethod
    def of(cls, path: Path, content: bytes) -> SettingsFile:
        """Return what a file with this content says. Raises BadRequest for no TOML, and for names that do not exist."""
        try:
            found = tomllib.loads(content.decode())
        except UnicodeDecodeError as error:
            line = error.object[: error.start].count(b"\n") + 1
            raise BadRequest(f"{path}: line {line} is not UTF-8: save the file with that encoding") from error
        except tomllib.TOMLDecodeError as error:
            raise BadRequest(f"{path}: {error}") from error
        except RecursionError as error:
            raise BadRequest(f"{path}: its values are nested too deep to be read") from error
        profiles, pools = (_tables(found.pop(name, {}), name, path) for name in (PROFILES, POOLS))
        _check(found, str(path), (PROFILES, POOLS))
        for name, table in profiles.items():
            _check(table, _place(path, PROFILES, name))
        for name, table in pools.items():
            if "name" in table:
                where = _place(path, POOLS, name)
                raise BadRequest(f"{where}: the table's own name is that of the pool; remove the setting 'name'")
            _check(table, _place(path, POOLS, name))
        return cls(path, found, profiles, pools)

    def settings(self, profile: str | None) -> Settings:
        """Return the top of the file, and above it a profile. Raises BadRequest if it has no such profile."""
        top = _found(self.top, str(self.path))
        if profile is None:
            return top
        if profile not in self.profiles:
            raise BadRequest(f"{self.path}: there is no profile {profile!r}{_instead(profile, self.profiles)}")
        return top.under(_found(self.profiles[profile], _place(self.path, PROFILES, profile)))

    def of_pool(self, name: str | None) -> Settings:
        """Return the table of a pool with a name, and the name; nothing if there is no such table."""
        if name is None or name not in self.pools:
            return Settings()
        return _found({"name": name, **self.pools[name]}, _place(self.path, POOLS, name))


def _found(fields: Mapping[str, Any], source: str) -> Settings:
    return Settings(fields, dict.fromkeys(fields, source))


def _place(path: Path, kind: str, name: str) -> str:
    return f"{path} [{kind}.{name}]"


def _instead(name: str, known: Iterable[str]) -> str:
    """Return how to go on from a name that is not known."""
    names = sorted(known)
    near = question(name, names)
    return f"; {near}" if near else f"; it has {', '.join(names)}" if names else "; it has none"


def _tables(found: object, kind: str, path: Path) -> Mapping[str, Mapping[str, Any]]:
    tables = cast("Mapping[str, Any]", found) if isinstance(found, Mapping) else {"": found}
    for name, table in tables.items():
        if not isinstance(table, Mapping):
            raise BadRequest(f"{path}: {kind} has tables by name: write [{kind}.{name or 'NAME'}]")
    return tables


def _of_environment(environ: Mapping[str, str]) -> Settings:
    fields: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for name, text in environ.items():
        if not name.startswith(PREFIX) or PART.sub("", name) in NOT_SETTINGS:
            continue
        key = name.removeprefix(PREFIX).lower()
        if key in PoolSpec.model_fields:
            fields[key] = from_text(text)
            sources[key] = f"{name} in the environment"
        else:
            near = meant(key, PoolSpec.model_fields)
            _log.warning(
                "%s in the environment is no setting%s",
                name,
                f"; did you mean {PREFIX}{near.upper()}?" if near else "",
            )
    return Settings(fields, sources)


def _find(directory: Path) -> Path | None:
    candidates = [parent / FILE for parent in (directory, *directory.parents)]
    with suppress(RuntimeError, KeyError):  # no home, and no entry for this user
        candidates.append(user_config_path("skyward") / FILE)
    return next(filter(_is_there, candidates), None)


def _is_there(path: Path) -> bool:
    """Whether something has this name, also what cannot be read: it would be a silence to look further."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise _unreadable(path, error) from error
    return True


def _named_content(path: Path) -> bytes:
    """A path that the user has named is his own decision, whoever owns the file."""
    try:
        return read_file(path.expanduser())
    except (OSError, RuntimeError, ValueError) as error:  # ValueError: a NUL
        raise BadRequest(f"{CONFIG} names {path}, which cannot be read: {error}") from error


def _found_content(path: Path) -> bytes:
    try:
        return read_kept(path)
    except NotPrivate as error:
        raise BadRequest(
            f"the settings {path} are refused, because another user could choose their commands and limits: {error}."
            f" Change that owner or mode (chown, chmod go-w), or, if you trust who can write there, set"
            f" {CONFIG}={path}. {CONFIG}=/dev/null reads no file"
        ) from error
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> BadRequest:
    return BadRequest(
        f"the settings {path} cannot be read: {error.strerror}. They may hold limits, so they are not left out: make"
        f" them readable, or name other ones with {CONFIG}. {CONFIG}=/dev/null reads no file"
    )


def _check(found: Mapping[str, Any], where: str, also: tuple[str, ...] = ()) -> None:
    for name in found:
        if name not in PoolSpec.model_fields:
            near = question(name, [*PoolSpec.model_fields, *also])
            raise BadRequest(f"{where}: there is no setting {name!r}{f'; {near}' if near else ''}")


def from_text(text: str) -> Any:
    """Return a setting that was typed: JSON where it can be read as such (`2`, `true`, `{"name": "local"}`), else the
    text itself (`A100`).
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # also for a number of thousands of digits
        return text
