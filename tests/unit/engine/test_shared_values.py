"""Scattered values in the engine: uploads, releases, and changes of nodes."""

from skyward_core.engine import actions as do
from skyward_core.engine.outbox import Entry
from skyward_core.worker.shared_values import SharedValue
from skyward_core.worker.wire import Call, Parcel
from tests.engine.model import LARGE
from tests.unit.engine.test_dispatcher import SMALL, Pool, run, value


def using(value: SharedValue, call_id: str, worker: str = "0-0") -> Entry:
    """Return a call that uses a scattered value."""
    call = Call(call_id, "f", SMALL, "job", shared=(value.name,))
    return Entry(call, SMALL, worker, shared={value.name: value})


def removed(pool: Pool) -> list[str]:
    return [str(action.parcel.path).rpartition("/")[2] for action in pool.take(do.Remove)]


def end(pool: Pool, call_id: str, number: int) -> None:
    pool.report(value(call_id))
    pool.dispatcher.task_ended(pool.epoch, number, is_finished=True, reason="")


def test_each_node_gets_a_value_once() -> None:
    """Calls that come while it is on its way wait for it. In the batch the value is a file of the node."""
    pool, shared = Pool(), SharedValue(LARGE)
    assert pool.submit(using(shared, "a"), using(shared, "b"), using(shared, "c", "1-0")) == []
    uploads = pool.take(do.Upload)
    assert [(action.instance_id, action.functions) for action in uploads] == [
        (node.instance.id, ((shared.name, LARGE),)) for node in pool.nodes
    ]
    for action in uploads:
        pool.upload(action)
    sent = pool.take(do.Send)
    assert [call.call_id for action in sent for call in action.batch.calls] == ["a", "b", "c"]
    assert all(action.batch.functions[shared.name].path.endswith(shared.name) for action in sent)
    assert len(pool.submit(using(shared, "d"))) == 1
    assert pool.take(do.Upload) == []


def test_a_released_value_is_removed_when_no_call_uses_it() -> None:
    """A batch in flight keeps it. It is removed from all nodes."""
    pool, shared = Pool(), SharedValue(LARGE)
    pool.submit(using(shared, "a"), using(shared, "b", "1-0"))
    for action in pool.take(do.Upload):
        pool.upload(action)
    first, second = pool.take(do.Send)
    end(pool, "a", first.number)
    pool.dispatcher.release_shared(shared.name)
    assert removed(pool) == [shared.name]
    end(pool, "b", second.number)
    assert removed(pool) == [shared.name]


def test_a_value_that_is_released_while_it_is_uploaded_is_removed_when_it_arrives() -> None:
    """The call that needed it was cancelled meanwhile."""
    pool, shared = Pool(), SharedValue(LARGE)
    pool.submit(using(shared, "a"))
    (upload,) = pool.take(do.Upload)
    pool.dispatcher.cancel("a")
    pool.dispatcher.release_shared(shared.name)
    assert removed(pool) == []
    pool.upload(upload)
    assert removed(pool) == [shared.name]


def test_a_value_is_not_evicted_like_a_function() -> None:
    """However many functions come: it has no part in their limit."""
    pool, shared = Pool(), SharedValue(LARGE)
    pool.submit(using(shared, "a"))
    pool.upload(pool.take(do.Upload)[0])
    end(pool, "a", pool.take(do.Send)[0].number)
    assert [run(pool, name, name) for name in ("f", "g", "h", "i")] == [[], [], ["f"], ["g"]]
    assert len(pool.submit(using(shared, "b"))) == 1


def test_a_node_that_replaces_another_one_gets_the_value() -> None:
    """The value is sent again, from the client's copy."""
    pool, shared = Pool(), SharedValue(LARGE)
    pool.submit(using(shared, "a"))
    pool.upload(pool.take(do.Upload)[0])
    end(pool, "a", pool.take(do.Send)[0].number)
    before = pool.nodes[0]
    pool.nodes[0] = before.model_copy(update={"instance": before.instance.model_copy(update={"id": "machine-new"})})
    pool.dispatcher.restarted(pool.nodes, lambda parcel: True, 0.0)
    pool.connect()
    pool.submit(using(shared, "b"))
    (upload,) = pool.take(do.Upload)
    assert (upload.instance_id, upload.functions) == ("machine-new", ((shared.name, LARGE),))


def test_a_value_for_which_there_is_no_room_does_not_travel_in_the_message() -> None:
    """The upload fails, and the call waits: no value of any size goes through the scheduler."""
    pool, shared = Pool(), SharedValue(Parcel(bytes(70_000)))
    pool.submit(using(shared, "a"))
    (upload,) = pool.take(do.Upload)
    pool.dispatcher.upload_failed(
        upload.number, upload.instance_id, [shared.name], OSError("no room"), is_its_fault=False
    )
    assert pool.take(do.Send) == []
    pool.dispatcher.tick(1.0, lambda _: True)
    assert len(pool.take(do.Upload)) == 1
