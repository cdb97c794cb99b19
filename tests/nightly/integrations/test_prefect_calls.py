"""Calls of task runs, on a real API and real nodes: what travels, what fails, what is logged.

One flow run holds one pool for the whole file, as in test_prefect_behaviour.py.
"""

from datetime import timedelta
from pathlib import Path

import pytest

from tests.system.integrations.test_prefect_calls import (  # noqa: F401 - fixtures
    in_flow,
)

pytest.importorskip("prefect")

from prefect import task
from prefect.tasks import task_input_hash

from tests.integrations import prefect_server
from tests.integrations.prefect_server import InFlow

api = pytest.fixture(scope="module", autouse=True)(prefect_server.served)


pytestmark = [
    pytest.mark.filterwarnings("default"),  # Prefect's own warnings are not our faults
]


@task(cache_key_fn=task_input_hash, cache_expiration=timedelta(minutes=5), persist_result=True)
def counted(path: Path) -> int:
    path.write_text(path.read_text() + "x" if path.exists() else "x")
    return len(path.read_text())


def test_results_are_cached_here(in_flow: InFlow, tmp_path: Path) -> None:
    """Caching works as without the runner, and its keys contain the user's code: another function of the same name
    is another entry.
    """

    def renamed(path: Path) -> int:
        return -counted.fn(path)

    renamed.__name__ = renamed.__qualname__ = counted.fn.__qualname__
    other = task(renamed, cache_key_fn=task_input_hash, cache_expiration=timedelta(minutes=5), persist_result=True)

    def twice() -> list[int]:
        return [
            counted.submit(tmp_path / "n").result(),
            counted.submit(tmp_path / "n").result(),
            other.submit(tmp_path / "n").result(),
        ]

    assert in_flow(twice) == [1, 1, -2]
