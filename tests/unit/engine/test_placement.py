"""The choice of a worker for a batch with large values, and the uploads to its node before the batch is sent."""

from collections.abc import Mapping, Sequence

import pytest

from skyward_core.engine import actions as do
from skyward_core.engine.members import Members
from skyward_core.engine.outbox import Shipment
from skyward_core.engine.placement import freest
from skyward_core.engine.shipments import Out, Phase
from skyward_core.worker.wire import INLINE_BYTES, Batch, Parcel
from tests.engine.model import LARGE, node_of
from tests.unit.engine.test_dispatcher import TOPIC, Pool, entry, value

KEY_END = "-ours"
STRANGER = "array-sum-theirs"


def members(slots: Sequence[int] = (4, 4)) -> Members:
    """Nodes with one worker each; the numbers are the slots of the workers."""
    found = Members.of(node_of(rank, rank, 1, count) for rank, count in enumerate(slots))
    for rank in range(len(slots)):
        found.join(f"{rank}-0", f"tls://{rank}")
    return found


def out(number: int, worker: str | None, phase: Phase = Phase.SENT, unended: Sequence[str] = ("a",)) -> Out:
    return Out(Shipment(number, Batch(TOPIC, (), {}), worker, set(unended)), phase, 1, worker)


def key(number: int) -> str:
    return f"skyward-{number}{KEY_END}"


@pytest.mark.parametrize(
    ("slots", "outs", "load", "expected"),
    [
        ((1, 2), [], {}, "1-0"),
        ((4, 4), [], {"0-0": [STRANGER]}, "1-0"),
        ((4, 4), [], {"1-0": [STRANGER]}, "0-0"),
        ((4, 4), [out(1, None)], {"0-0": [key(1)]}, "1-0"),
        ((4, 4), [out(1, "0-0")], {}, "1-0"),
        ((4, 4), [out(1, "0-0", Phase.UPLOADING, ())], {}, "1-0"),
        ((4, 4), [out(1, "1-0", unended=()), out(2, "0-0")], {"1-0": [key(1)]}, "1-0"),
        ((4, 4), [out(1, "0-0"), out(2, "1-0"), out(3, "1-0")], {"0-0": [key(1)]}, "0-0"),
    ],
    ids=[
        "more slots",
        "another client's task on the first",
        "another client's task on the second",
        "our batch that the scheduler has placed",
        "our batch that the scheduler does not know yet",
        "a batch that is being uploaded",
        "a batch has ended, which the scheduler does not know yet",
        "a batch counts once though both know of it",
    ],
)
def test_the_worker_with_the_most_free_slots(
    slots: Sequence[int], outs: Sequence[Out], load: Mapping[str, Sequence[str]], expected: str
) -> None:
    """It depends on its slots, on tasks that the scheduler has placed there, and on batches that are on their way
    there.
    """
    assert freest(members(slots), outs, load, KEY_END) == expected


def test_without_workers_there_is_none_to_choose() -> None:
    """No worker has joined yet."""
    assert freest(Members.of([node_of(0, 0, 1, 1)]), [], {}, KEY_END) is None


def test_the_scheduler_is_asked_once_and_its_answer_decides() -> None:
    """Two batches with large arguments wait for one answer.

    An answer from an earlier connection does not count. The next batch asks again.
    """
    pool = Pool(workers=("0-0", "1-0"))
    (small,) = pool.submit(entry("a"))
    assert pool.submit(entry("b", arguments=LARGE), entry("c", arguments=LARGE)) == []
    assert pool.take(do.AskLoad) == [do.AskLoad(pool.epoch)]
    pool.dispatcher.load_known(pool.epoch - 1, {})
    assert pool.take(do.Upload) == []
    pool.dispatcher.load_known(pool.epoch, {"0-0": [f"skyward-{small.number}-{TOPIC[-8:]}"]})
    assert pool.take(do.Upload)[0].instance_id == pool.nodes[1].instance.id
    assert pool.take(do.AskLoad) == []
    pool.report(value("a"))
    pool.submit(entry("d"))
    pool.submit(entry("e", arguments=LARGE))
    assert pool.take(do.AskLoad) == [do.AskLoad(pool.epoch)]


def test_a_small_value_travels_in_the_message() -> None:
    """Also a value of exactly as many bytes as a message may carry."""
    (sent,) = Pool().submit(entry("a", arguments=Parcel(bytes(INLINE_BYTES))))
    assert [call.arguments.nbytes for call in sent.batch.calls] == [INLINE_BYTES]


@pytest.mark.parametrize("is_its_fault", [True, False])
def test_an_upload_that_fails(is_its_fault: bool) -> None:
    """The call raises if its values cannot be sent. If the node is at fault, the call and its function are uploaded
    again.
    """
    pool = Pool()
    pool.submit(entry("a", is_large=True))
    (upload,) = pool.take(do.Upload)
    error = OSError("no room")
    pool.dispatcher.upload_failed(upload.number, upload.instance_id, ["f"], error, is_its_fault=is_its_fault)
    failed = pool.errors()
    pool.dispatcher.tick(1.0, lambda _: True)
    again = [action for action in pool.take(do.Upload) if action.functions == upload.functions]
    assert (list(failed), len(again)) == ((["a"], 0) if is_its_fault else ([], 1))


def test_a_call_is_sent_with_the_place_of_its_large_arguments() -> None:
    """They are on the node already."""
    pool = Pool()
    pool.submit(entry("a", arguments=LARGE))
    (upload,) = pool.take(do.Upload)
    assert upload.arguments == (("a", LARGE),)
    pool.upload(upload)
    (sent,) = pool.take(do.Send)
    assert [call.arguments.path for call in sent.batch.calls] == [f"/dev/shm/{upload.instance_id}/a-a"]


def test_nodes_of_this_machine_share_large_functions_and_get_arguments_in_the_message() -> None:
    """They share their memory: the function goes to the first node, and the scheduler is not asked for its load."""
    pool = Pool(is_here=True)
    pool.submit(entry("a", arguments=LARGE, is_large=True))
    (upload,) = pool.take(do.Upload)
    assert (upload.instance_id, upload.arguments) == (pool.nodes[0].instance.id, ())
    assert [name for name, _ in upload.functions] == ["f"]
    pool.upload(upload)
    (sent,) = pool.take(do.Send)
    assert [call.arguments for call in sent.batch.calls] == [LARGE]
    assert sent.batch.functions["f"].path == f"/dev/shm/{upload.instance_id}/f"
    assert pool.take(do.AskLoad) == []
