"""The pools of a flow run, on pools that rent nothing: what happens between the threads, without a server."""

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("prefect")
import skyward_core as sky
from prefect_skyward import pool_life
from prefect_skyward.flow_pools import FlowPools
from prefect_skyward.run_calls import facts_of

SPEC = sky.PoolSpec()


class Pool:
    """Stands for a `ComputePool`: opens when it may, and counts its ends."""

    cost = 0.0
    receipt = None

    def __init__(self, **_: Any) -> None:
        self.id = f"pool-{id(self):x}"
        self.may_open = threading.Event()
        self.may_open.set()
        self.is_active = True
        self.ends = 0

    def open(self) -> None:
        assert self.may_open.wait(60)

    def terminate_now(self) -> None:
        self.may_open.set()

    def hand_over(self) -> None:
        self.is_active = False
        self.ends += 1


@pytest.fixture
def rented(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Pool]]:
    """The pools that were opened, in their order."""
    pools: list[Pool] = []

    def from_spec(_spec: sky.PoolSpec, **keywords: Any) -> Pool:
        pools.append(Pool(**keywords))
        return pools[-1]

    monkeypatch.setattr(pool_life.sky.ComputePool, "from_spec", from_spec)
    return pools


@pytest.fixture
def pools(rented: list[Pool]) -> Iterator[FlowPools]:
    flow_pools = FlowPools(facts_of(None, None), 300.0)
    yield flow_pools
    flow_pools.end()
    assert all(pool.ends == 1 for pool in rented)


def test_a_pool_that_was_long_in_opening_is_not_idle_when_it_is_open(
    pools: FlowPools, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    monkeypatch.setattr(Pool, "open", lambda _pool: gate.wait(60))
    life = pools.request(SPEC)
    life.idle_since -= 1000
    gate.set()
    life.opened.result(60)
    pools.end_idle()
    assert pools.request(SPEC) is life


def test_a_flow_that_ends_while_an_idle_end_begins_ends_its_pools(
    pools: FlowPools, rented: list[Pool], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Thread(threading.Thread):
        def start(self) -> None:
            pools.end()
            super().start()

    life = pools.request(SPEC)
    life.opened.result(60)
    life.idle_since -= 1000
    monkeypatch.setattr("prefect_skyward.flow_pools.threading", SimpleNamespace(Thread=Thread))
    pools.end_idle()
    assert [pool.ends for pool in rented] == [1]


def test_an_opening_whose_thread_cannot_start_does_not_hold_up_the_end(
    pools: FlowPools, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(_self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        with pytest.raises(RuntimeError, match="start new thread"):
            pools.request(SPEC)
    assert pools.request(SPEC).opened.result(60)
