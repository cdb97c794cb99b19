"""Dagster: the functions of assets and ops run on an ephemeral accelerator pool.

The one public class is `SkywardResource`.
"""

from dagster_shared.libraries import DagsterLibraryRegistry

import skyward_core
from dagster_skyward.resource import SkywardResource as SkywardResource

__all__ = ["SkywardResource"]

DagsterLibraryRegistry.register("dagster-skyward", skyward_core.__version__, is_dagster_package=False)
