"""The plugin of `skyward quote` for Dagster's definitions: which pools the steps of their jobs and assets would open.

`skyward quote` imports this file also where Dagster is not installed, so Dagster is imported only for a target that may
have definitions.
"""

from __future__ import annotations

from pathlib import Path

import skyward_core as sky


def planned_tasks(target: str) -> sky.Plan | None:
    """Return the steps with a pool of "package.module:name" or "file.py:name"; None for what has no definitions.

    The module is imported, as Dagster imports it. Nothing runs, and no Dagster instance is needed.
    """
    place, _, name = target.rpartition(":")
    if not place or not name.isidentifier():
        return None
    is_file = place.endswith(".py") and Path(place).is_file()
    if not is_file and not all(part.isidentifier() for part in place.split(".")):
        return None
    from dagster_skyward.definition_plans import plan_of

    return plan_of(place, name, is_file=is_file)
