"""A flow run whose process is killed, and no worker is left: what ends, and the automation that sets it Crashed."""

import pytest

pytest.importorskip("prefect")


import skyward_core as sky
from prefect_skyward.automations import deploy_crash_guard
from tests.integrations import prefect_server

api = pytest.fixture(scope="module", autouse=True)(prefect_server.served)


pytestmark = [
    pytest.mark.filterwarnings("default"),  # Prefect's own warnings are not our faults
]


def test_a_crash_guard_that_waits_too_short_is_refused() -> None:
    with pytest.raises(sky.BadRequest, match="10 seconds"):
        deploy_crash_guard(5)
