"""Prefect flows on ephemeral accelerator pools: `@flow(task_runner=SkywardTaskRunner(accelerator="A100"))`.

Prefect's server and workers import `blocks`, which is registered under `prefect.collections`. So the core is loaded
only when a pool is made, and Prefect only when a name is first used.
"""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prefect_skyward.blocks import SkywardAWSCredentials as SkywardAWSCredentials
    from prefect_skyward.blocks import SkywardCredentials as SkywardCredentials
    from prefect_skyward.blocks import SkywardDigitalOceanCredentials as SkywardDigitalOceanCredentials
    from prefect_skyward.blocks import SkywardPool as SkywardPool
    from prefect_skyward.blocks import SkywardRunPodCredentials as SkywardRunPodCredentials
    from prefect_skyward.blocks import SkywardVastAICredentials as SkywardVastAICredentials
    from prefect_skyward.blocks import SkywardVerdaCredentials as SkywardVerdaCredentials
    from prefect_skyward.direct_calls import on_skyward as on_skyward
    from prefect_skyward.options import skyward_options as skyward_options
    from prefect_skyward.report.settlement import settle_flow_runs as settle_flow_runs
    from prefect_skyward.task_runner import SkywardTaskRunner as SkywardTaskRunner
    from prefect_skyward.task_runner import cost_so_far as cost_so_far

_HOMES = {
    "SkywardAWSCredentials": "blocks",
    "SkywardCredentials": "blocks",
    "SkywardDigitalOceanCredentials": "blocks",
    "SkywardPool": "blocks",
    "SkywardRunPodCredentials": "blocks",
    "SkywardTaskRunner": "task_runner",
    "SkywardVastAICredentials": "blocks",
    "SkywardVerdaCredentials": "blocks",
    "cost_so_far": "task_runner",
    "on_skyward": "direct_calls",
    "settle_flow_runs": "report.settlement",
    "skyward_options": "options",
}

__all__ = [
    "SkywardAWSCredentials",
    "SkywardCredentials",
    "SkywardDigitalOceanCredentials",
    "SkywardPool",
    "SkywardRunPodCredentials",
    "SkywardTaskRunner",
    "SkywardVastAICredentials",
    "SkywardVerdaCredentials",
    "cost_so_far",
    "on_skyward",
    "settle_flow_runs",
    "skyward_options",
]


OLDEST_PREFECT = (3, 6)


def refuse_old_prefect(found: str) -> None:
    """Raise ImportError for a version of Prefect that is too old, with the version needed."""
    parts = tuple(int(part) if part.isdecimal() else 0 for part in found.split(".")[:2])
    if parts < OLDEST_PREFECT:
        needed = ".".join(map(str, OLDEST_PREFECT))
        raise ImportError(
            f"prefect_skyward needs Prefect {needed} or newer, and this is {found}: pip install"
            f" 'prefect>={needed},<3.10'"
        )


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    refuse_old_prefect(version("prefect"))
    value = globals()[name] = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
