"""Large values in the memory of nodes: which node is chosen, what is uploaded, and what is removed."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from skyward_core.engine import actions as do
from skyward_core.engine.outbox import Entry, Shipment
from skyward_core.engine.shipments import freest
from skyward_core.engine.state import Members, Out, Phase
from skyward_core.wire import messages as wire
from skyward_core.wire.messages import INLINE_BYTES, Batch, Call, Parcel
from skyward_core.wire.protocol import WorkerKept
from skyward_core.wire.shared_values import SharedValue
from tests.engine.dispatcher_pool import ADDRESSES, SMALL, TOPIC, Pool, entry, value
from tests.engine.model import LARGE, machine_id, node_of

KEY_END = "-ours"
STRANGER = "array-sum-theirs"


def out(number: int, worker: str | None, phase: Phase = Phase.SENT, unended: Sequence[str] = ("a",)) -> Out:
    return Out(Shipment(number, Batch(TOPIC, (), {}), worker, set(unended)), phase, 1, worker)


def key(number: int) -> str:
    return f"skyward-{number}{KEY_END}"


@pytest.mark.parametrize(
    ("slots", "outs", "load", "expected"),
    [
        pytest.param((1, 2), [], {}, "1-0", id="more slots"),
        pytest.param((4, 4), [], {"0-0": [STRANGER]}, "1-0", id="another client's task"),
        pytest.param((4, 4), [out(1, None)], {"0-0": [key(1)]}, "1-0", id="our batch, placed by the scheduler"),
        pytest.param((4, 4), [out(1, "0-0")], {}, "1-0", id="our batch, not known to the scheduler yet"),
        pytest.param((4, 4), [out(1, "0-0", Phase.UPLOADING, ())], {}, "1-0", id="being uploaded"),
        pytest.param((4, 4), [out(1, "1-0", unended=()), out(2, "0-0")], {"1-0": [key(1)]}, "1-0", id="has ended"),
        pytest.param((4, 4), [out(1, "0-0"), out(2, "1-0"), out(3, "1-0")], {"0-0": [key(1)]}, "0-0", id="counts once"),
    ],
)
def test_large_arguments_go_to_the_worker_with_the_most_free_slots(
    slots: Sequence[int], outs: Sequence[Out], load: Mapping[str, Sequence[str]], expected: str
) -> None:
    members = Members.of(node_of(rank, rank, 1, count) for rank, count in enumerate(slots))
    assert freest(members, outs, load, KEY_END) is None, "no worker has joined"
    for rank in range(len(slots)):
        members.join(f"{rank}-0", f"tls://{rank}")
    assert freest(members, outs, load, KEY_END) == expected


def test_the_scheduler_is_asked_once_for_its_load() -> None:
    """Two batches wait for one answer; one from an earlier connection does not count. Small values need none."""
    pool = Pool()
    (small,) = pool.submit(entry("a", arguments=Parcel(bytes(INLINE_BYTES))))
    assert pool.submit(entry("b", arguments=LARGE), entry("c", arguments=LARGE)) == []
    assert pool.take(do.AskLoad) == [do.AskLoad(pool.epoch)]
    pool.dispatcher.load_known(pool.epoch - 1, {})
    assert pool.take(do.Upload) == []
    pool.dispatcher.load_known(pool.epoch, {"0-0": [small.key]})
    upload, *_ = pool.take(do.Upload)
    assert (upload.instance_id, upload.arguments) == (pool.nodes[1].instance.id, (("b", LARGE),))
    pool.upload(upload)
    (sent,) = pool.take(do.Send)
    assert [call.arguments.path for call in sent.batch.calls] == [f"/dev/shm/{upload.instance_id}/a-b"]
    assert sent.address == ADDRESSES["1-0"]


def test_an_upload_delays_no_other_call() -> None:
    pool = Pool()
    pool.submit(entry("small", worker="1-0"), entry("large", arguments=LARGE, worker="0-0"))
    pool.end("small", 0, node=1)
    pool.tick(10.0)
    assert (pool.finished(), len(pool.take(do.Upload)), len(pool.take(do.Ping))) == (["small"], 1, 1)


def test_nodes_of_this_machine_share_large_functions_and_get_arguments_in_the_message() -> None:
    pool = Pool(is_local=True)
    pool.submit(entry("a", arguments=LARGE, is_large=True))
    (upload,) = pool.take(do.Upload)
    assert (upload.instance_id, upload.arguments) == (pool.nodes[0].instance.id, ())
    pool.upload(upload)
    (sent,) = pool.take(do.Send)
    assert [call.arguments for call in sent.batch.calls] == [LARGE]
    assert sent.batch.functions["f"].path == f"/dev/shm/{upload.instance_id}/f"
    assert pool.take(do.AskLoad) == []


def large(call_id: str, function: str) -> Entry:
    return entry(call_id, function=function, is_large=True, worker="0-0")


def using(value: SharedValue, call_id: str) -> Entry:
    """Return a call that uses a scattered value."""
    return Entry(Call(call_id, "f", SMALL, "job", shared=(value.name,)), SMALL, "0-0", shared={value.name: value})


def test_the_least_recently_used_functions_are_evicted() -> None:
    """There is room for two. One in use stays until its call has ended; a scattered value has no part in the limit."""
    pool, shared = Pool(), SharedValue(LARGE)
    assert pool.run(using(shared, "0")) == []
    assert [pool.run(large(*names)) for names in ("1f", "2g", "3f")] == [[], [], []]
    assert pool.run(large("4", "h")) == ["g"], "f was used again"
    assert pool.submit(large("5", "f")), "it is not uploaded again"
    assert pool.run(large("6", "i")) == ["h"]
    assert pool.run(large("7", "j")) == ["i"]
    assert len(pool.submit(using(shared, "8"))) == 1, "the value is still there"
    pool.end("5", next(number for number, sent in pool.dispatcher.outs.items() if "5" in sent.shipment.unended))
    assert pool.run(large("9", "k")) == ["f"]


def test_a_node_that_stays_has_its_functions_after_a_change_of_head() -> None:
    pool = Pool()
    pool.run(large("1", "f"))
    pool.dispatcher.restarted(pool.nodes, lambda _: True, 0.0)
    pool.connect(is_known=False)
    assert len(pool.submit(large("2", "f"))) == 1


def test_a_value_that_a_kept_call_needs_stays_on_its_node() -> None:
    """The call goes on in its worker while the head is lost."""
    pool, shared = Pool(), SharedValue(LARGE)
    pool.submit(using(shared, "a"))
    pool.upload(*pool.take(do.Upload))
    (sent,) = pool.take(do.Send)
    pool.dispatcher.restarted(pool.nodes, lambda _: True, 0.0)
    pool.connect(is_known=False)
    pool.news(WorkerKept("0-0", ADDRESSES["0-0"], ("a",), keys=(sent.key,)))
    pool.dispatcher.release_shared(shared.name)
    assert pool.removed() == []
    pool.report(value("a"), origin=f"tls://zero/{sent.key}", number=1)
    assert pool.removed() == [shared.name]


def test_a_node_that_replaces_another_one_gets_a_scattered_value() -> None:
    """From the client's copy."""
    pool, shared = Pool(), SharedValue(LARGE)
    pool.run(using(shared, "a"))
    pool.dispatcher.restarted([node_of(7, 0, 1, 1), pool.nodes[1]], lambda _: True, 0.0)
    pool.connect(is_known=False)
    pool.submit(using(shared, "b"))
    (upload,) = pool.take(do.Upload)
    assert (upload.instance_id, upload.functions) == ("machine-007", ((shared.name, LARGE),))


def test_a_batch_that_waits_for_an_upload_to_a_node_that_was_replaced_is_placed_again() -> None:
    """The node is replaced before its worker is known to be gone. The machine that is gone gets no further upload."""
    pool, shared = Pool(workers=["0-0"]), SharedValue(LARGE)
    pool.submit(using(shared, "a"), using(shared, "b"))
    (upload,) = pool.take(do.Upload)
    pool.dispatcher.update_nodes([node_of(7, 0, 1, 1)])
    pool.dispatcher.upload_failed(upload.number, upload.instance_id, [shared.name], OSError("gone"), is_its_fault=False)
    pool.tick(1.0)
    (again,) = pool.take(do.Upload)
    assert again.instance_id == machine_id(7)
    pool.upload(again)
    assert {call.call_id for sent in pool.take(do.Send) for call in sent.batch.calls} == {"a", "b"}


def test_a_value_for_which_there_is_no_room_does_not_travel_in_the_message() -> None:
    """The call waits: no value of any size goes through the scheduler. A large function does."""
    pool, shared = Pool(), SharedValue(LARGE)
    pool.submit(using(shared, "a"), large("b", "g"))
    for upload in pool.take(do.Upload):
        if upload.functions[0][0] == "g":
            pool.dispatcher.uploaded(upload.number, upload.instance_id, {}, {"g": None})
        else:
            error, names = OSError("no room"), [shared.name]
            pool.dispatcher.upload_failed(upload.number, upload.instance_id, names, error, is_its_fault=False)
    assert [sent.batch.functions for sent in pool.take(do.Send)] == [{"g": LARGE}]
    pool.tick(1.0)
    assert len(pool.take(do.Upload)) == 1


@pytest.mark.parametrize("arguments", [wire.KEEPS_NO_DESCRIPTOR, {}], ids=["as here", "as on Python 3.12"])
def test_values_in_use_need_no_file_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any]
) -> None:
    """The usual limit is 1,024 descriptors: a map with more large results would fail, and the whole program would have
    too few.
    """
    monkeypatch.setattr(wire, "KEEPS_NO_DESCRIPTOR", arguments)
    before = len(os.listdir("/proc/self/fd"))
    parcels = [Parcel(b"", (bytearray(100_000),)).moved_to_file([str(tmp_path)]) for _ in range(50)]
    held = [parcel.contents()[1] for parcel in parcels]
    assert len(os.listdir("/proc/self/fd")) == before
    for parcel, (buffer,) in zip(parcels, held, strict=True):
        parcel.release()
        memoryview(buffer)[0] = 7  # writable, and still there
