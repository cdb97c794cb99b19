"""The built wheel, installed alone in a fresh environment with each extra, and with none."""

from pathlib import Path

import pytest

from tests.system.test_extras import (  # noqa: F401 - fixtures
    installed,
    run,
    wheel,
)

ORCHESTRATORS = ("prefect", "airflow", "dagster")
IMPORTS = {
    "prefect": "from prefect_skyward import SkywardTaskRunner",
    "airflow": "from airflow_provider_skyward.operators import SkywardOperator; from airflow_provider_skyward.decorators import skyward_task",
    "dagster": "from dagster_skyward import SkywardResource",
}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("orchestrator", ORCHESTRATORS)
def test_each_extra_alone_installs_only_its_orchestrator(wheel: Path, orchestrator: str, tmp_path: Path) -> None:
    """With one extra its package can be imported, and the other two orchestrators are not installed."""
    python = installed(wheel, f"[{orchestrator}]", tmp_path / "env")
    run(python, "-c", f"import skyward_core; {IMPORTS[orchestrator]}", cwd=tmp_path)
    for other in set(ORCHESTRATORS) - {orchestrator}:
        run(python, "-c", f"import importlib.util; assert importlib.util.find_spec({other!r}) is None", cwd=tmp_path)
