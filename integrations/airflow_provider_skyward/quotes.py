"""The plugin of `skyward quote` for DAGs: which pools their tasks would open.

`skyward quote` imports this file also where Airflow is not installed, so Airflow is imported only for a target that may
be a DAG folder.
"""

from __future__ import annotations

from pathlib import Path

import skyward_core as sky


def planned_tasks(target: str) -> sky.Plan | None:
    """Return the tasks with a pool of a folder or a file of DAGs; None for any other target.

    The files are imported, as Airflow imports them. Nothing runs, and no database is needed.
    """
    path = Path(target)
    if not (path.is_dir() or (path.is_file() and path.suffix in {".py", ".zip"})):
        return None
    from airflow_provider_skyward.dag_plans import plan_of

    return plan_of(path)
