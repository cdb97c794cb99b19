"""The check of Prefect for `skyward doctor`. Importing this module does not import Prefect."""

from __future__ import annotations

from importlib.metadata import version

import skyward_core as sky
from prefect_skyward import refuse_old_prefect

SUBJECT = "Prefect"


def check() -> list[sky.Check]:
    """Check the version of Prefect, and whether its API answers, if one is set. Raises PackageNotFoundError without
    Prefect.
    """
    found = version("prefect")
    try:
        refuse_old_prefect(found)
    except ImportError as error:
        return [sky.Check.failed(SUBJECT, f"Prefect {found} is too old", str(error))]
    return [sky.Check.ok(SUBJECT, f"Prefect {found}"), _check_api()]


def _check_api() -> sky.Check:
    from prefect.client.orchestration import get_client
    from prefect.settings import PREFECT_API_URL

    subject = f"{SUBJECT}: API"
    url = PREFECT_API_URL.value()
    if not url:
        return sky.Check.ok(subject, "PREFECT_API_URL is not set: each flow run starts a server of its own")
    with get_client(sync_client=True) as client:
        error = client.api_healthcheck()
    if error is None:
        return sky.Check.ok(subject, f"{url} answers")
    cure = "start the server (`prefect server start`), or set PREFECT_API_URL and PREFECT_API_KEY to those of yours"
    return sky.Check.failed(subject, f"{url} does not answer: {type(error).__name__}: {error}", cure)
