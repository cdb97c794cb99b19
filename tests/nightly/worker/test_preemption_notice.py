"""The notice before a spot machine is taken back: read on the machine, sent to the client, and the pool's actions
before the machine is gone.
"""

import skyward_core as sky
from tests.conftest import RecordedEvents
from tests.providers.fake_metadata import FakeMetadata
from tests.system.worker.test_preemption_notice import (  # noqa: F401 - fixtures
    noticed,
    service,
    square,
)
from tests.waiting import wait_until


def test_a_service_that_hangs_delays_no_node(noticed: FakeMetadata) -> None:
    """Calls run as usual, and the node ends as usual."""
    recorded = RecordedEvents()
    with sky.ComputePool(provider=sky.Local(), nodes=2, display="quiet", on_event=recorded) as pool:
        wait_until(lambda: noticed.asked, "the first question")
        noticed.hangs = True
        asked = len(noticed.asked)
        wait_until(lambda: len(noticed.asked) > asked, "a question without an answer")
        assert pool.map(square, range(20)) == [number * number for number in range(20)]
    assert recorded.of(sky.InstanceLost) == []
