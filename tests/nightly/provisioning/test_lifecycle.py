"""Machines of fake clouds: after any failure all are terminated, or an error names them."""

import pytest

import skyward_core as sky
from skyward_core.provisioning import teardown
from tests.conftest import RecordedEvents, wait_until
from tests.fakes import (
    StuckLocal,
)
from tests.system.provisioning.test_lifecycle import (  # noqa: F401 - fixtures
    is_ended,
    unending,
)


def test_closing_names_the_machines_that_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """An open pool's machines cannot be terminated: close raises InstancesLeft with their ids, after the final cost
    event.

    It can be called again.
    """
    monkeypatch.setattr(teardown, "DEADLINE_SECONDS", 0.3)
    recorded = RecordedEvents()
    pool = sky.ComputePool(provider=StuckLocal(), on_event=recorded, display="quiet")
    with pytest.raises(sky.InstancesLeft) as caught, pool:
        (instance,) = [node.instance for node in pool.lease.nodes]
    sky.Local().terminate([instance.id])
    assert caught.value.ids == (instance.id,)
    assert len(recorded.of(sky.CostFinal)) == 1
    assert not pool.is_active
    pool.close()
    assert pool.unconfirmed is None


@pytest.mark.parametrize("is_free", [True, False])
def test_results_are_kept_if_machines_cannot_be_confirmed_gone(
    unending: None, monkeypatch: pytest.MonkeyPatch, is_free: bool
) -> None:
    """The calls are done.

    If the machines cost nothing and end themselves there is no error, else InstancesLeft is raised.

    In both cases an event comes before the final cost event, and the ledger's entry stays open. The reaper ends the
    free machines and closes the entry.
    """
    monkeypatch.setattr(sky.Local, "may_be_left_to_its_lease", lambda *_: is_free)
    recorded = RecordedEvents()
    pool = sky.ComputePool(provider=sky.Local(), on_event=recorded, display="quiet").open()
    (node,) = pool.lease.nodes
    result = pool.run(sky.PendingCompute(abs, (-1,)))
    try:
        pool.close()
        assert is_free
    except sky.InstancesLeft:
        assert not is_free
    assert result == 1
    (left,) = recorded.of(sky.InstancesUnconfirmed)
    assert (left.instance_ids, left.is_free) == ((node.instance.id,), is_free)
    assert recorded.events.index(left) < recorded.events.index(recorded.of(sky.CostFinal)[0])
    assert pool.unconfirmed is not None
    assert pool.unconfirmed.ids == (node.instance.id,)
    if is_free:
        assert [entry["cloud_id"] for entry in (pool.receipt or {})["left"]] == [node.instance.id]
        pool.close()
        with pytest.raises(sky.PoolClosed):
            pool.run(sky.PendingCompute(abs, (-1,)))
    else:
        assert pool.hand_over() is not None
        assert pool.hand_over() is not None
    wait_until(lambda: is_ended(node.instance.pool_id), "the reaper to end it")
    assert sky.Local().instances(node.instance.pool_id) == []


def test_a_second_close_finishes_an_interrupted_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second Ctrl-C interrupts the teardown and is raised.

    The next close terminates the machines. There is only one final cost event.
    """
    recorded = RecordedEvents()
    pool = sky.ComputePool(provider=sky.Local(), on_event=recorded, display="quiet").open()
    (instance,) = [node.instance for node in pool.lease.nodes]

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(sky.Local, "terminate", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pool.close()
    assert sky.Local().instances(instance.pool_id) != []
    pool.close()
    assert sky.Local().instances(instance.pool_id) == []
    assert len(recorded.of(sky.CostFinal)) == 1
