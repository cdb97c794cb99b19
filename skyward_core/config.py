"""Settings: what a `PoolSpec` says when its user does not.

From the environment (`SKYWARD_PROVIDER=local`, `SKYWARD_NODES=2`, ...) and below that from `skyward.toml`, the nearest
one from the working directory upwards, else the one in the user's configuration directory. A file looks like this:

    nodes = 2
    [provider]
    name = "local"
    price_per_hour = 1.2
"""

from __future__ import annotations

import json
import logging
import os
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from platformdirs import user_config_path

from skyward_core.errors import BadRequest
from skyward_core.spec import PoolSpec

PREFIX = "SKYWARD_"
FILE = "skyward.toml"
NODE_VARIABLES = (
    "BOOT_WATCHER ENV_PYTHON HOME INSTANCE_DIRECTORY INSTANCE_ID INSTANCE_INFO LEASE_KEY LEDGER OWNER POOL_ID"
    " PRICE_PER_HOUR PYTHON RANK SECRET_KEY UV"
)
NOT_SETTINGS = frozenset(f"{PREFIX}{name}" for name in NODE_VARIABLES.split())
_log = logging.getLogger("skyward")


@dataclass(frozen=True, slots=True)
class Settings:
    """Defaults of a `PoolSpec`'s fields, and for each field where it was found."""

    fields: Mapping[str, Any] = field(default_factory=dict[str, Any])
    sources: Mapping[str, str] = field(default_factory=dict[str, str])

    @classmethod
    def read(cls, environ: Mapping[str, str] = os.environ, directory: Path | None = None) -> Settings:
        """Read the settings that hold in a directory (by default the working directory).

        Raises BadRequest for one that does not exist.
        """
        fields: dict[str, Any] = {}
        sources: dict[str, str] = {}
        if (path := _find(directory or Path.cwd())) is not None:
            try:
                found = tomllib.loads(path.read_text())
            except tomllib.TOMLDecodeError as error:
                raise BadRequest(f"{path}: {error}") from error
            _check(found, str(path))
            fields |= found
            sources |= dict.fromkeys(found, str(path))
        for name, text in environ.items():
            if not name.startswith(PREFIX) or name in NOT_SETTINGS:
                continue
            key = name.removeprefix(PREFIX).lower()
            if key in PoolSpec.model_fields:
                fields[key] = _from_text(text)
                sources[key] = f"{name} in the environment"
            else:
                near = get_close_matches(key, PoolSpec.model_fields, 1, cutoff=0.5)
                _log.warning(
                    "%s in the environment is no setting%s",
                    name,
                    f"; did you mean {PREFIX}{near[0].upper()}?" if near else "",
                )
        return cls(fields, sources)


def _find(directory: Path) -> Path | None:
    candidates = [parent / FILE for parent in (directory, *directory.parents)]
    with suppress(RuntimeError, KeyError):  # no home, and no entry for this user
        candidates.append(user_config_path("skyward") / FILE)
    return next((path for path in candidates if path.is_file()), None)


def _check(found: Mapping[str, Any], where: str) -> None:
    for name in found:
        if name not in PoolSpec.model_fields:
            near = get_close_matches(name, PoolSpec.model_fields, 1, cutoff=0.5)
            raise BadRequest(f"{where}: there is no setting {name!r}{f'; did you mean {near[0]!r}?' if near else ''}")


def _from_text(text: str) -> Any:
    """A setting in the environment is JSON where it can be read as such, else the text itself: `2`, `true`, `{"name":
    "local"}`, `A100`.
    """
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text
