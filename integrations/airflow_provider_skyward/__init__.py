"""Skyward for Apache Airflow: `SkywardOperator` and `@task.skyward`.

Airflow asks every process for the provider's info, so this file imports nothing but data.
"""

from __future__ import annotations

from airflow_provider_skyward.connection_types import connection_types


def get_provider_info() -> dict[str, object]:
    """Return the provider info for Airflow's provider manager (`airflow/provider_info.schema.json`).

    `package-name` is the distribution's name.
    """
    return {
        "package-name": "skyward-core",
        "name": "Skyward",
        "description": (
            "Runs a task's function on machines that exist only for that task: accelerators of a cloud, or local"
            " processes."
        ),
        "integrations": [{"integration-name": "Skyward", "tags": ["compute"]}],
        "operators": [
            {
                "integration-name": "Skyward",
                "python-modules": [f"airflow_provider_skyward.{name}" for name in ("operators", "pools", "programs")],
            }
        ],
        "triggers": [{"integration-name": "Skyward", "python-modules": ["airflow_provider_skyward.triggers"]}],
        "hooks": [{"integration-name": "Skyward", "python-modules": ["airflow_provider_skyward.hooks"]}],
        "connection-types": connection_types(),
        "notifications": ["airflow_provider_skyward.notifications.BudgetNotifier"],
        "extra-links": [
            f"airflow_provider_skyward.links.{name}" for name in ("SkywardLink", "ReceiptLink", "ConsoleLink")
        ],
        "task-decorators": [{"name": "skyward", "class-name": "airflow_provider_skyward.decorators.skyward_task"}],
    }
