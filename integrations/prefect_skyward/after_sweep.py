"""What `skyward sweep --yes` completes in Prefect. Importing this module does not import Prefect."""

from __future__ import annotations


def complete_bills() -> int:
    """Write the final costs of flow runs whose processes could not (`settle_flow_runs`); return of how many.

    Without PREFECT_API_URL there is no server that knows any. Raises ModuleNotFoundError without Prefect.
    """
    from prefect.settings import PREFECT_API_URL

    if not PREFECT_API_URL.value():
        return 0
    from prefect_skyward import settle_flow_runs

    return settle_flow_runs()
