"""The check of Airflow for `skyward doctor`. It reads what is registered and imports no Airflow, which makes files."""

from __future__ import annotations

from importlib.metadata import entry_points, version

import skyward_core as sky
from airflow_provider_skyward import get_provider_info

SUBJECT = "Airflow"
OLDEST = (3, 3)
CURE = "install skyward-core again in the environment of Airflow, so that its entry points are written"


def check() -> list[sky.Check]:
    """Check the version of Airflow, and whether provider and plugin are registered. Raises PackageNotFoundError without
    Airflow.
    """
    found = version("apache-airflow")
    if tuple(int(part) if part.isdecimal() else 0 for part in found.split(".")[:2]) < OLDEST:
        needed = ".".join(map(str, OLDEST))
        return [sky.Check.failed(SUBJECT, f"Airflow {found} is too old", f"pip install 'apache-airflow>={needed}'")]
    return [
        sky.Check.ok(SUBJECT, f"Airflow {found}"),
        _registered("provider", "apache_airflow_provider", "airflow_provider_skyward:get_provider_info"),
        _registered("tabs", "airflow.plugins", "airflow_provider_skyward.plugin:SkywardPlugin"),
    ]


def _registered(what: str, group: str, value: str) -> sky.Check:
    subject = f"{SUBJECT}: {what}"
    if value not in {entry.value for entry in entry_points(group=group)}:
        return sky.Check.failed(subject, f"{value} is not registered under {group}", CURE)
    return sky.Check.ok(subject, f"registered by {get_provider_info()['package-name']}")
