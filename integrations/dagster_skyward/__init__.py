"""Dagster: the functions of assets and ops run on an ephemeral accelerator pool.

`SkywardResource` is the pool, `Lifecycle` says when it opens and ends, `PoolResult` is what a call returns,
`PipesSkywardClient` runs functions, scripts and commands with Dagster Pipes, and `upkeep()` has the sensors and the
schedule of a deployment.
"""

from dagster_shared.libraries import DagsterLibraryRegistry

import skyward_core
from dagster_skyward.component import SkywardComponent as SkywardComponent
from dagster_skyward.cost_check import build_cost_check as build_cost_check
from dagster_skyward.credentials import AWSCredentials as AWSCredentials
from dagster_skyward.credentials import DigitalOceanCredentials as DigitalOceanCredentials
from dagster_skyward.credentials import RunPodCredentials as RunPodCredentials
from dagster_skyward.credentials import VastAICredentials as VastAICredentials
from dagster_skyward.credentials import VerdaCredentials as VerdaCredentials
from dagster_skyward.executor import skyward_executor as skyward_executor
from dagster_skyward.lifecycle import Lifecycle as Lifecycle
from dagster_skyward.pipes import PipesSkywardClient as PipesSkywardClient
from dagster_skyward.resource import PoolResult as PoolResult
from dagster_skyward.resource import SkywardResource as SkywardResource
from dagster_skyward.upkeep import upkeep as upkeep

__all__ = [
    "AWSCredentials",
    "DigitalOceanCredentials",
    "Lifecycle",
    "PipesSkywardClient",
    "PoolResult",
    "RunPodCredentials",
    "SkywardComponent",
    "SkywardResource",
    "VastAICredentials",
    "VerdaCredentials",
    "build_cost_check",
    "skyward_executor",
    "upkeep",
]

DagsterLibraryRegistry.register("dagster-skyward", skyward_core.__version__, is_dagster_package=False)
