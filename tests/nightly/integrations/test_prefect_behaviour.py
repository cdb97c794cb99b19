"""What a user expects of any task runner of Prefect, each behaviour by its name; docs/prefect.md has the table.

One flow run holds one pool for the whole file: a test hands it a function, which runs in the flow's body.
"""

import pytest

from tests.system.integrations.test_prefect_behaviour import (  # noqa: F401 - fixtures
    add,
    in_flow,
    pools,
)

pytest.importorskip("prefect")
from tests.integrations.prefect_server import InFlow  # isort: skip

from prefect import unmapped  # isort: skip


pytestmark = [
    pytest.mark.filterwarnings("default"),  # Prefect's own warnings are not our faults
]


def test_many_tasks_end_all_and_in_their_order(in_flow: InFlow) -> None:
    assert in_flow(lambda: add.map(range(300), unmapped(1)).result()) == list(range(1, 301))
