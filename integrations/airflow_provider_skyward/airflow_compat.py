"""What we use of Airflow that is not among its public names, in one place, with a fallback where there is one.

Raises ImportError on an Airflow before 3.3, which lacks names of the Task SDK and the task state store.
"""

from __future__ import annotations

import logging
import socket
from typing import TYPE_CHECKING, Any

from airflow.sdk import __version__ as SDK_VERSION  # noqa: N812 - a constant, which has this name there

if TYPE_CHECKING:
    from airflow.sdk.bases.xcom import BaseXCom

LEAST_SDK = (1, 3)
"""The Task SDK of Airflow 3.3."""


def refuse_older(version: str) -> None:
    """Raise ImportError for a Task SDK that is too old."""
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())
    if numbers < LEAST_SDK:
        raise ImportError(
            "airflow_provider_skyward needs Airflow 3.3 or later, and this is one with apache-airflow-task-sdk"
            f" {version} (3.3 has 1.3): pip install 'apache-airflow>=3.3'"
        )


refuse_older(SDK_VERSION)


def known_level(level: int) -> int:
    """Return the next level down that Airflow's loggers know: they raise KeyError for another one, such as 25."""
    return max(logging.DEBUG, min(level // 10 * 10, logging.CRITICAL))


def xcom_class() -> type[BaseXCom]:
    """Return the class of XCom that the configuration names. Only for a running task."""
    try:
        from airflow.sdk.execution_time.xcom import XCom
    except ImportError:  # moved: the configuration says the same
        from airflow.sdk.bases.xcom import BaseXCom
        from airflow.sdk.configuration import conf

        return conf.getimport("core", "xcom_backend", fallback=BaseXCom)
    return XCom


def gauge(name: str, value: float, tags: dict[str, str]) -> None:
    """Send a gauge to the metrics that Airflow is configured for; nothing if this Airflow has no such module."""
    try:
        from airflow.sdk.observability import stats
    except ImportError:
        return
    stats.gauge(name, value, tags=tags)


def tracer() -> Any:
    """Return OpenTelemetry's tracer, None if Airflow does not trace (`[traces] otel_on`)."""
    from airflow.sdk.configuration import conf

    if not conf.getboolean("traces", "otel_on", fallback=False):
        return None
    from opentelemetry import trace

    return trace.get_tracer("airflow_provider_skyward")


def is_supervisor_gone() -> bool:
    """Return whether the process that supervises this task has ended: it sends no heartbeat and no kill any more. False
    if this process supervises itself, as in `airflow dags test`.
    """
    from airflow.sdk.execution_time import task_runner

    connection = getattr(getattr(task_runner, "SUPERVISOR_COMMS", None), "socket", None)
    if connection is None:
        return False
    try:
        return connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True
