"""The ranks that broadcasts use, while nodes come and leave; and the place of a call in its broadcast."""

from __future__ import annotations

import json

from skyward_core.engine.broadcast_ranks import BroadcastRanks
from skyward_core.worker.info import JOB_PLACE, InstanceInfo, of_call, to_env

INFO = InstanceInfo(
    node=5,
    total_nodes=8,
    is_head=False,
    accelerators=[],
    head_addr="10.0.0.1",
    head_port=1,
    job_id=JOB_PLACE,
    worker=1,
    workers_per_node=2,
)


def test_a_rank_that_is_left_out_waits_for_broadcasts_that_have_begun() -> None:
    """A rank that comes meanwhile is in the next one."""
    ranks = BroadcastRanks([2, 0])
    with ranks.begin() as used, ranks.begin():
        ranks.leave_out(2)
        ranks.take_in(1)
        ranks.take_in(1)
        assert used == [0, 2]
        assert [ranks.beginning_at(rank) for rank in (0, 1, 2)] == [2, 0, 2]
    assert ranks.all == [0, 1]
    assert ranks.beginning_at(2) == 0
    ranks.set([3, 1])
    assert ranks.all == [1, 3]


def test_a_call_of_a_broadcast_counts_the_nodes_of_the_broadcast() -> None:
    info = InstanceInfo(**json.loads(of_call(to_env(INFO), "job", is_broadcast=True, place=(1, 3))))
    assert (info.node, info.total_nodes, info.rank, info.world_size) == (1, 3, 3, 6)
    assert (info.job_id, info.is_broadcast) == ("job", True)


def test_a_call_without_a_place_has_the_numbers_of_its_node() -> None:
    info = InstanceInfo(**json.loads(of_call(to_env(INFO), "job", is_broadcast=False)))
    assert (info.node, info.total_nodes, info.is_broadcast) == (5, 8, False)
