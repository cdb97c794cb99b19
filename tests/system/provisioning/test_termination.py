"""Lost machines of an open pool are terminated until they are gone. Other machines are not."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest

from skyward_core import Instance, InstanceState
from skyward_core.errors import InstancesLeft, LeaseLost
from skyward_core.provisioning import termination
from skyward_core.provisioning.termination import Terminations
from tests.conftest import wait_until


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
        self.hold.wait(30)
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


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(termination, "FIRST_PAUSE_SECONDS", 0.001)
    monkeypatch.setattr(termination, "LONGEST_PAUSE_SECONDS", 0.004)


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
    ("trouble", "times"),
    [
        ({"failures": [ConnectionError("503")]}, 2),
        ({"failures": [ConnectionError("503")] * 7}, 8),
        ({"failures": [InstancesLeft("not yet", ["a"])]}, 2),
        ({"failures": [InstancesLeft("which?", [])]}, 2),
        ({"lingers": 5}, 6),
        ({"outages": 5}, 6),
    ],
    ids=["a 503", "an outage", "it is left", "some are left", "it lingers", "a listing fails"],
)
def test_a_machine_that_does_not_end_is_requested_again(
    terminations: Terminations, witness: Witness, trouble: dict[str, Any], times: int
) -> None:
    """The termination is repeated until a listing lacks the machine. Then the thread ends."""
    cloud = Cloud(there={"a", "b"}, **copy.deepcopy(trouble))
    assert terminations.end("a", cloud).over.wait(30)
    assert (cloud.asked, cloud.there, witness.entries) == ([["a"]] * times, {"b"}, [("a", LISTED_NO_MORE)])
    wait_until(lambda: not repeaters(), "the thread to end")


def test_a_listing_is_not_believed_before_a_request_was_accepted(terminations: Terminations, witness: Witness) -> None:
    """A late listing may lack a new machine that exists."""
    cloud = Cloud(failures=[ConnectionError("503")] * 3)
    assert terminations.end("late", cloud).over.wait(30)
    assert len(cloud.asked) == 4
    assert witness.entries == [("late", LISTED_NO_MORE)]


@pytest.mark.parametrize("ids", [["a"], []])
def test_a_provider_that_confirms_is_not_listed(terminations: Terminations, witness: Witness, ids: list[str]) -> None:
    """Machines that it names as left are not gone. If it names none, no machine is gone."""
    cloud = Cloud(terminate_confirms=True, outages=10**6, failures=[InstancesLeft("it does not answer", ids)] * 2)
    assert terminations.end("a", cloud).over.wait(30)
    assert len(cloud.asked) == 3
    assert witness.entries == [("a", CONFIRMED)]


def test_many_machines_are_in_one_request(terminations: Terminations, witness: Witness) -> None:
    """The machines that are left after each first request go into one request. A part of that may fail.

    A later machine joins it.
    """
    left = InstancesLeft("b is left", ["b"])
    cloud = Cloud(there={"a", "b", "c"}, failures=[ConnectionError("503")] * 3)
    cloud.hold.clear()
    all_of_them = [terminations.end_in_thread(name, cloud, f"skyward-end-{name}", lambda: None) for name in "abc"]
    wait_until(lambda: len(cloud.asked) == 3, "each to be asked for by itself")
    cloud.failures.append(left)
    cloud.hold.set()
    assert all(one.over.wait(30) for one in all_of_them)
    assert sorted(name for name, _ in witness.entries) == ["a", "b", "c"]
    assert cloud.there == set()


def test_the_work_before_the_request_may_fail(
    terminations: Terminations, witness: Witness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine is terminated even if a callback raises."""
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    cloud = Cloud(there={"a"})

    def fail() -> None:
        raise ZeroDivisionError

    assert terminations.end_in_thread("a", cloud, "skyward-end-0", fail).over.wait(30)
    assert witness.entries == [("a", LISTED_NO_MORE)]


def test_an_error_of_the_ledger_does_not_stop_a_termination(terminations: Terminations, witness: Witness) -> None:
    """A sweep has condemned the pool meanwhile. A waiting thread learns that the machine is gone."""
    witness.error = LeaseLost("judged dead")
    cloud = Cloud(there={"a"}, lingers=2)
    assert terminations.end("a", cloud).over.wait(30)
    assert len(witness.entries) == 1


def test_the_end_of_the_pool_stops_all_requests(terminations: Terminations, witness: Witness) -> None:
    """Waiting threads return, and no machine is recorded as gone. A later machine is requested once."""
    cloud = Cloud(there={"a", "b"}, lingers=10**6)
    one = terminations.end("a", cloud)
    wait_until(lambda: len(cloud.asked) > 3, "some tries")
    assert not one.over.is_set()
    assert [thread.daemon for thread in repeaters()] == [True]
    terminations.stop()
    assert one.over.is_set()
    assert not repeaters()
    asked = len(cloud.asked)
    assert terminations.end("b", cloud).over.is_set()
    assert cloud.asked[asked:] == [["b"]]
    assert witness.entries == []
    assert not repeaters()


def test_stop_waits_for_a_request_in_flight(terminations: Terminations) -> None:
    """When stop returns, no request is in flight."""
    cloud = Cloud(there={"a"})
    cloud.hold.clear()
    terminations.end_in_thread("a", cloud, "skyward-end-0", lambda: None)
    wait_until(lambda: cloud.asked, "the request")
    assert [thread.daemon for thread in threading.enumerate() if thread.name == "skyward-end-0"] == [True]
    stopping = threading.Thread(target=terminations.stop)
    stopping.start()
    stopping.join(0.05)
    assert stopping.is_alive()
    cloud.hold.set()
    stopping.join(30)
    assert not stopping.is_alive()
    assert "skyward-end-0" not in [thread.name for thread in threading.enumerate()]
