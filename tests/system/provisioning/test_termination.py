"""Lost machines of an open pool are terminated until they are gone. Other machines are not."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import pytest

from skyward_core import Instance, InstanceState
from skyward_core.errors import InstancesLeft, LeaseLost
from skyward_core.provisioning.teardown import Terminations
from tests.waiting import wait_until


@dataclass
class Cloud:
    """A cloud with a number of failing requests. Ended machines stay listed for some time."""

    name: ClassVar[str] = "cloud"
    terminate_confirms: bool = False  # type: ignore[misc]
    there: set[str] = field(default_factory=set[str])
    failures: list[Exception] = field(default_factory=list[Exception])
    """The errors of the next requests."""
    outages: int = 0
    """The number of listings that fail."""
    lingers: int = 0
    """The number of listings that still have an ended machine."""
    asked: list[list[str]] = field(default_factory=list[list[str]])
    going: set[str] = field(default_factory=set[str])
    hold: threading.Event = field(default_factory=threading.Event)
    """Requests wait for this event if it is cleared."""

    def __post_init__(self) -> None:
        self.hold.set()

    def terminate(self, ids: Sequence[str]) -> None:
        self.asked.append(list(ids))
        self.hold.wait(120)
        if self.failures:
            raise self.failures.pop(0)
        self.going |= set(ids)

    def instances(self, pool_id: str | None = None) -> list[Instance]:
        assert pool_id == "sky-1"
        if self.outages:
            self.outages -= 1
            raise ConnectionError("503")
        if self.lingers:
            self.lingers -= 1
        else:
            self.there -= self.going
        return [
            Instance(
                id=name,
                provider="cloud",
                pool_id="sky-1",
                rank=0,
                state=InstanceState.RUNNING,
                region="r",
                instance_type="t",
            )
            for name in sorted(self.there)
        ]


@dataclass
class Witness:
    """A witness that records which machines are gone, and why."""

    entries: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    error: Exception | None = None

    def gone(self, instance_ids: Iterable[str], evidence: str) -> None:
        self.entries += [(instance_id, evidence) for instance_id in instance_ids]
        if self.error is not None:
            raise self.error


@pytest.fixture
def witness() -> Witness:
    return Witness()


@pytest.fixture
def terminations(witness: Witness) -> Iterator[Terminations]:
    made = Terminations("sky-1", witness.gone)
    yield made
    made.stop()
    assert not repeaters()


def repeaters() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "skyward-ending"]


LISTED_NO_MORE, CONFIRMED = "cloud lists it no more", "cloud confirmed its termination"


def test_a_machine_that_ends_at_once_is_requested_once(terminations: Terminations, witness: Witness) -> None:
    """The thread ends, and the other machine of the pool stays."""
    cloud = Cloud(there={"a", "b"})
    assert terminations.end("a", cloud).over.is_set()
    assert (cloud.asked, cloud.there, witness.entries) == ([["a"]], {"b"}, [("a", LISTED_NO_MORE)])
    assert not repeaters()


@pytest.mark.parametrize(
    ("failures", "lingers", "outages"),
    [
        ([ConnectionError("503")], 0, 0),
        ([InstancesLeft("not yet", ["a"])], 0, 0),
        ([InstancesLeft("which?", [])], 0, 0),
        ([], 1, 0),
        ([], 0, 1),
    ],
    ids=["a 503", "it is left", "some are left", "it lingers", "a listing fails"],
)
def test_a_machine_that_does_not_end_is_requested_again(
    terminations: Terminations, witness: Witness, failures: list[Exception], lingers: int, outages: int
) -> None:
    """Until a listing lacks the machine. Then the thread ends."""
    cloud = Cloud(there={"a", "b"}, failures=[*failures], lingers=lingers, outages=outages)
    assert terminations.end("a", cloud).over.wait(120)
    assert (cloud.asked, cloud.there, witness.entries) == ([["a"]] * 2, {"b"}, [("a", LISTED_NO_MORE)])
    wait_until(lambda: not repeaters(), "the thread to end")


def test_a_listing_is_not_believed_before_a_request_was_accepted(terminations: Terminations, witness: Witness) -> None:
    """A late listing may lack a new machine that exists."""
    cloud = Cloud(failures=[ConnectionError("503")])
    assert terminations.end("late", cloud).over.wait(120)
    assert (len(cloud.asked), witness.entries) == (2, [("late", LISTED_NO_MORE)])


@pytest.mark.parametrize("ids", [["a"], []])
def test_a_provider_that_confirms_is_not_listed(terminations: Terminations, witness: Witness, ids: list[str]) -> None:
    """Machines that it names as left are not gone. If it names none, no machine is gone."""
    cloud = Cloud(terminate_confirms=True, outages=10**6, failures=[InstancesLeft("it does not answer", ids)])
    assert terminations.end("a", cloud).over.wait(120)
    assert (len(cloud.asked), witness.entries) == (2, [("a", CONFIRMED)])


def test_many_machines_are_in_one_request(terminations: Terminations, witness: Witness) -> None:
    """Those that are left after each first request. A part of it may fail."""
    cloud = Cloud(there={"a", "b", "c"}, failures=[ConnectionError("503")] * 3)
    cloud.hold.clear()
    all_of_them = [terminations.end_in_thread(name, cloud, f"skyward-end-{name}", lambda: None) for name in "abc"]
    wait_until(lambda: len(cloud.asked) == 3, "each to be asked for by itself")
    cloud.failures.append(InstancesLeft("b is left", ["b"]))
    cloud.hold.set()
    assert all(one.over.wait(120) for one in all_of_them)
    assert sorted(name for name, _ in witness.entries) == ["a", "b", "c"]
    assert cloud.there == set()


class ListedCloud(Cloud):
    """Its first listing goes on until the end of twenty machines was asked for."""

    listings = 0

    def instances(self, pool_id: str | None = None) -> list[Instance]:
        self.listings += 1
        if self.listings == 1:
            wait_until(lambda: len(self.asked) == 20, "all requests")
        return super().instances(pool_id)


def test_threads_that_wait_for_a_listing_share_it(terminations: Terminations, witness: Witness) -> None:
    """Of a pool of 1,000 machines each costs a second of the processor. One that began before a request proves nothing."""
    names = [f"m-{number}" for number in range(20)]
    cloud = ListedCloud(there=set(names))
    all_of_them = [terminations.end_in_thread(name, cloud, f"skyward-end-{name}", lambda: None) for name in names]
    assert all(one.over.wait(120) for one in all_of_them)
    assert sorted(name for name, _ in witness.entries) == sorted(names)
    assert 2 <= cloud.listings <= 10


def test_errors_of_callbacks_do_not_stop_a_termination(
    terminations: Terminations, witness: Witness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One before the request, and one of the ledger: a sweep has condemned the pool meanwhile."""
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    witness.error = LeaseLost("judged dead")

    def fail() -> None:
        raise ZeroDivisionError

    cloud = Cloud(there={"a"})
    assert terminations.end_in_thread("a", cloud, "skyward-end-0", fail).over.wait(120)
    assert (cloud.there, witness.entries) == (set(), [("a", LISTED_NO_MORE)])


def test_the_end_of_the_pool_stops_all_requests(terminations: Terminations, witness: Witness) -> None:
    """Waiting threads return, and no machine is recorded as gone. A later machine is requested once."""
    cloud = Cloud(there={"a", "b"}, lingers=10**6)
    one = terminations.end("a", cloud)
    wait_until(lambda: len(cloud.asked) > 1, "another try")
    assert not one.over.is_set()
    assert [thread.daemon for thread in repeaters()] == [True]
    terminations.stop()
    assert one.over.is_set()
    asked = len(cloud.asked)
    assert terminations.end("b", cloud).over.is_set()
    assert cloud.asked[asked:] == [["b"]]
    assert (witness.entries, repeaters()) == ([], [])


def test_stop_waits_for_a_request_in_flight(terminations: Terminations) -> None:
    cloud = Cloud(there={"a"})
    cloud.hold.clear()
    terminations.end_in_thread("a", cloud, "skyward-end-0", lambda: None)
    wait_until(lambda: cloud.asked, "the request")
    stopping = threading.Thread(target=terminations.stop)
    stopping.start()
    stopping.join(0.05)
    assert stopping.is_alive()
    cloud.hold.set()
    stopping.join(120)
    assert "skyward-end-0" not in [thread.name for thread in threading.enumerate()]
