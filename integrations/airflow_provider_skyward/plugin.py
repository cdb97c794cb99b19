"""The plugin: the tab "Skyward" of a task instance, the tab "Cost" of a DAG run, and the end of tasks that users mark.

Airflow imports plugins in all its processes, so FastAPI is imported only when Airflow asks for the app.
"""

from __future__ import annotations

from typing import Any, cast

from airflow.plugins_manager import AirflowPlugin

from airflow_provider_skyward import marks

BUNDLE_URL = "skyward/tabs.js"
"""Relative: Airflow's UI resolves it against its own base URL, which may have a path."""


class _Apps:
    """An attribute of the class that is computed when it is read."""

    def __get__(self, instance: object, owner: type) -> list[dict[str, Any]]:
        from airflow_provider_skyward.cost_app import cost_app

        return [{"app": cost_app(), "url_prefix": "/skyward", "name": "Skyward"}]


class SkywardPlugin(AirflowPlugin):
    """What Airflow loads by the entry point `airflow.plugins`."""

    name = "skyward"
    fastapi_apps = cast("list[Any]", _Apps())
    listeners: list[Any] = [marks]  # noqa: RUF012 - as in the base class
    react_apps: list[Any] = [  # noqa: RUF012
        {"name": "Skyward", "url_route": "skyward", "destination": "task_instance", "bundle_url": BUNDLE_URL},
        {"name": "Cost", "url_route": "skyward-cost", "destination": "dag_run", "bundle_url": BUNDLE_URL},
    ]
