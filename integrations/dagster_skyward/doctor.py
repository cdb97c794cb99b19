"""The check of Dagster for `skyward doctor`."""

from __future__ import annotations

import os
from importlib.metadata import version

import skyward_core as sky

SUBJECT = "Dagster"
OLDEST = (1, 12)
HOME = "DAGSTER_HOME"


def check() -> list[sky.Check]:
    """Check the version of Dagster and its instance."""
    found = version("dagster")
    if tuple(int(part) if part.isdecimal() else 0 for part in found.split(".")[:2]) < OLDEST:
        needed = ".".join(map(str, OLDEST))
        return [sky.Check.failed(SUBJECT, f"Dagster {found} is too old", f"pip install 'dagster>={needed}'")]
    return [sky.Check.ok(SUBJECT, f"Dagster {found}"), _check_home()]


def _check_home() -> sky.Check:
    subject, home = f"{SUBJECT}: instance", os.environ.get(HOME, "")
    if not home:
        return sky.Check.ok(subject, f"{HOME} is not set: `dagster dev` keeps runs only until it ends")
    if not os.path.isdir(home):
        return sky.Check.failed(subject, f"{HOME}={home} is no folder", f"make it, or set {HOME} to a folder that is")
    return sky.Check.ok(subject, f"{HOME}={home}")
