"""Teardown with clouds that fail in each method.

It returns only when no machine is billed. If it gives up, the error names all machines that may be left.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyward_core import Instance, InstancesLeft, InstanceState
from skyward_core.providers.base import Provider
from skyward_core.provisioning.teardown import DEADLINE_SECONDS, tear_down
from tests.conftest import examples

POOL = "sky-1"
CONSOLE = "https://console.example/"


class Time:
    """A clock that advances only during pauses and during calls of the cloud."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.pauses: list[float] = []

    def __call__(self) -> float:
        return self.now

    def pause(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds


def machine(name: str) -> Instance:
    return Instance(
        id=name,
        provider="cloud",
        pool_id=POOL,
        rank=0,
        state=InstanceState.RUNNING,
        region="r",
        instance_type="t",
        price_per_hour=1,
    )


@dataclass
class Cloud:
    """A cloud with its machines in `billed`. A machine is listed from its time in `listed_from` on.

    Each method follows its script, then it works. Terminations: "fail" raises, "nothing" accepts and does nothing,
    "half" ends the first half of the given machines, "refuse" raises InstancesLeft with the ids that are left, "vague"
    raises it without ids. Listings: "fail" raises, "blank" returns no machines.
    """

    time: Time
    billed: set[str]
    terminate_confirms: bool = False
    gone_deadline_seconds: float = 120.0
    endings: list[str] = field(default_factory=list)
    listings: list[str] = field(default_factory=list)
    always: str = ""
    """The result of a termination after the script has ended; "" works."""
    is_blind: bool = False
    """All listings fail after the script."""
    listed_from: dict[str, float] = field(default_factory=dict)
    listing_seconds: float = 0.0
    asked: list[list[str]] = field(default_factory=list)
    names: str = "cloud"

    @property
    def name(self) -> str:
        return self.names

    def instances(self, pool_id: str | None = None) -> list[Instance]:
        assert pool_id == POOL
        does = self.listings.pop(0) if self.listings else ("fail" if self.is_blind else "")
        seen = [
            name for name in sorted(self.billed) if self.listed_from.get(name, 0.0) <= self.time.now and does != "blank"
        ]
        self.time.now += self.listing_seconds
        if does == "fail":
            raise ConnectionError("503 from the listing")
        return [machine(name) for name in seen]

    def terminate(self, ids: Sequence[str]) -> None:
        self.asked.append(list(ids))
        does = self.endings.pop(0) if self.endings else self.always
        if does == "fail":
            raise ConnectionError("502 from the termination")
        ended = {"nothing": [], "half": ids[: len(ids) // 2], "refuse": ids[: len(ids) // 2], "vague": []}.get(
            does, ids
        )
        self.billed -= set(ended)
        if does == "vague":
            raise InstancesLeft("some are left")
        if does == "refuse" and (left := sorted(set(ids) & self.billed)):
            raise InstancesLeft(f"{left} are left", left)

    def console_url(self, instance: Instance) -> str | None:
        return CONSOLE + instance.id


class Page:
    """A witness. It checks that each machine that it receives as gone is gone."""

    def __init__(self, cloud: Cloud, known: Iterable[str]) -> None:
        self.cloud = cloud
        self.known = set(known)
        self.entries: list[tuple[str, ...]] = []
        self.evidence: dict[str, str] = {}
        self.lapsed: frozenset[str] = frozenset()

    def rented(self) -> set[str]:
        return self.known - self.evidence.keys()

    def found(self, instances: Iterable[Instance]) -> None:
        for instance in instances:
            if instance.id not in self.known:
                self.known.add(instance.id)
                self.entries.append(("found", instance.id))

    def ending(self, instance_ids: Iterable[str]) -> None:
        ids = list(instance_ids)
        assert not any(set(ids) & set(asked) for asked in self.cloud.asked), "recorded after termination was asked for"
        self.entries += [("ending", name) for name in ids]

    def end_requested(self, instance_ids: Iterable[str]) -> None:
        assert set(instance_ids) <= {name for asked in self.cloud.asked for name in asked}, (
            "recorded before termination was asked for"
        )

    def gone(self, instance_ids: Iterable[str], evidence: str) -> None:
        for name in instance_ids:
            assert name not in self.cloud.billed or name in self.lapsed, (
                f"{name} is billed and was recorded as gone: {evidence}"
            )
            assert name not in self.evidence, f"{name} was recorded as gone twice"
            self.entries.append(("gone", name))
            self.evidence[name] = evidence


@dataclass
class Scene:
    """A cloud, its clock and its witness."""

    time: Time
    cloud: Cloud
    page: Page

    def tear_down(self, **keywords: Any) -> None:
        tear_down(cast("Provider", self.cloud), POOL, self.page, clock=self.time, pause=self.time.pause, **keywords)


def scene(billed: str, known: str | None = None, **settings: Any) -> Scene:
    """Make a cloud of machines with one letter each, and a page that knows all of them, or only those in `known`."""
    time = Time()
    cloud = Cloud(time, set(billed), **settings)
    return Scene(time, cloud, Page(cloud, set(billed if known is None else known)))


# ── evidence ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_machines_are_gone_when_the_provider_does_not_list_them() -> None:
    """One request and one later listing, without a pause.

    Each machine is recorded as ending before the request, and as gone after it, with the evidence.
    """
    it = scene("ab")
    it.tear_down()
    assert it.cloud.asked == [["a", "b"]]
    assert it.page.entries == [("ending", "a"), ("ending", "b"), ("gone", "a"), ("gone", "b")]
    assert it.page.evidence == dict.fromkeys("ab", "cloud lists it no more")
    assert it.time.pauses == []


@pytest.mark.parametrize("times", [1, 3, 20])
def test_a_termination_without_effect_is_repeated(times: int) -> None:
    """It is repeated until it has effect, with pauses that grow to two seconds. A machine is recorded as ending once."""
    it = scene("ab", endings=["nothing"] * times)
    it.tear_down()
    assert it.cloud.asked == [["a", "b"]] * (times + 1)
    assert [entry for entry in it.page.entries if entry[0] == "ending"] == [("ending", "a"), ("ending", "b")]
    assert it.time.pauses == sorted(it.time.pauses)
    assert (it.time.pauses[0], max(it.time.pauses) <= 2.0) == (0.2, True)


def test_only_machines_that_are_left_are_requested_again() -> None:
    """Machines that the listing lacks are gone, and recorded at once. The others are terminated again."""
    it = scene("abcd", endings=["half", "half"])
    it.tear_down()
    assert it.cloud.asked == [["a", "b", "c", "d"], ["c", "d"], ["d"]]
    assert [name for what, name in it.page.entries if what == "gone"] == ["a", "b", "c", "d"]


def test_a_failed_listing_proves_nothing() -> None:
    """While listings fail no machine is recorded as gone. Terminations are requested and repeated."""
    it = scene("ab", listings=["fail"] * 7)
    it.tear_down()
    assert it.page.evidence == dict.fromkeys("ab", "cloud lists it no more")
    assert len(it.cloud.asked) >= 3
    assert it.cloud.billed == set()


def test_an_empty_listing_after_a_failed_termination_needs_a_second_one() -> None:
    """A cloud with a failure may list too little.

    A machine with a failed termination is gone only when a second listing lacks it too.
    """
    it = scene("a", endings=["fail", "fail"], listings=["", "blank", "", ""])
    it.tear_down()
    assert it.cloud.billed == set()
    assert it.cloud.asked == [["a"]] * 3


def test_an_outage_is_waited_out() -> None:
    """Terminations and listings fail for some time, then they work."""
    it = scene("ab", listings=["fail"] * 9, endings=["fail"] * 4)
    it.tear_down()
    assert it.cloud.billed == set()
    assert it.page.rented() == set()


def test_a_machine_that_only_the_listing_has_is_ended_too() -> None:
    """It is recorded before its termination is requested."""
    it = scene("abz", known="ab")
    it.tear_down()
    assert it.cloud.billed == set()
    assert (
        it.page.entries.index(("found", "z"))
        < it.page.entries.index(("ending", "z"))
        < it.page.entries.index(("gone", "z"))
    )


def test_a_machine_listed_after_the_first_termination_is_ended_too() -> None:
    """The first listing fails. The listing after the first termination has one machine more."""
    it = scene("az", known="a", listings=["fail"])
    it.tear_down()
    assert it.cloud.asked == [["a"], ["z"]]
    assert it.cloud.billed == set()


def test_a_pool_without_machines_needs_no_request() -> None:
    """There are one or two listings and no termination."""
    it = scene("")
    it.tear_down()
    assert it.cloud.asked == []
    assert it.page.entries == []


def test_a_second_teardown_requests_nothing() -> None:
    """The second call finds no machine."""
    it = scene("ab")
    it.tear_down()
    entries = list(it.page.entries)
    it.tear_down()
    assert it.cloud.asked == [["a", "b"]]
    assert it.page.entries == entries


def test_a_second_teardown_finishes_an_interrupted_one() -> None:
    """Ctrl-C interrupts a pause. The next call continues."""
    it = scene("ab", endings=["nothing"])

    def interrupted(_: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tear_down(cast("Provider", it.cloud), POOL, it.page, clock=it.time, pause=interrupted)
    assert it.page.rented() == {"a", "b"}
    it.cloud.asked.clear()
    it.tear_down()
    assert (it.cloud.billed, it.page.rented()) == (set(), set())


# ── a late listing ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_an_early_listing_does_not_prove_that_a_machine_is_gone() -> None:
    """A machine is listed 30 s after its launch. It is found and ended, although the first listings were empty."""
    it = scene("az", known="a", listed_from={"z": 1030.0})
    it.tear_down(unsure_until=1030.0)
    assert it.cloud.billed == set()
    assert it.time.now >= 1030.0
    assert it.page.evidence.keys() == {"a", "z"}


def test_a_machine_that_is_not_listed_yet_is_not_gone() -> None:
    """Its termination has no effect, and the listing lacks it.

    It is terminated again, and recorded as gone only when it would have to be listed.
    """
    it = scene("a", listed_from={"a": 1020.0}, endings=["nothing"] * 3)
    it.tear_down(unsure_until=1020.0)
    assert it.cloud.billed == set()
    assert it.time.now >= 1020.0


def test_a_listing_counts_by_the_time_of_its_request() -> None:
    """A listing takes 20 s and returns the state at its request, so the time of the request counts."""
    it = scene("z", known="", listed_from={"z": 1030.0}, listing_seconds=20.0)
    it.tear_down(unsure_until=1030.0)
    assert it.cloud.billed == set()


def test_the_deadline_begins_after_the_listing_is_reliable() -> None:
    """A machine that is listed late has the full deadline."""
    it = scene("z", known="", listed_from={"z": 1200.0}, endings=["nothing"] * 30, gone_deadline_seconds=100.0)
    it.tear_down(unsure_until=1200.0)
    assert it.cloud.billed == set()
    assert it.time.now > 1240.0


# ── a provider that confirms ─────────────────────────────────────────────────────────────────────────────────────────


def test_a_provider_that_confirms_needs_no_listing() -> None:
    """There is one request and no listing if all machines are known."""
    it = scene("ab", terminate_confirms=True, is_blind=True)
    it.tear_down(are_all_known=True)
    assert it.page.evidence == dict.fromkeys("ab", "cloud confirmed its termination")
    assert it.time.pauses == []


def test_after_a_lost_launch_a_provider_that_confirms_is_listed_too() -> None:
    """A machine that only the listing has is terminated too."""
    it = scene("az", known="a", terminate_confirms=True)
    it.tear_down(are_all_known=False)
    assert it.cloud.billed == set()
    assert it.page.evidence.keys() == {"a", "z"}


def test_a_machine_found_during_teardown_is_ended_too() -> None:
    """A termination fails, so a listing is requested. It has an unexpected machine."""
    it = scene("abz", known="ab", terminate_confirms=True, endings=["refuse"])
    it.tear_down(are_all_known=True, unsure_until=1010.0)
    assert it.cloud.billed == set()
    assert it.page.rented() == set()


def test_confirmed_machines_are_recorded_at_once_and_the_rest_repeated() -> None:
    """InstancesLeft names the machines that are left. The metering of the others ends without a listing."""
    it = scene("abcd", terminate_confirms=True, is_blind=True, endings=["refuse"])
    it.tear_down(are_all_known=True)
    assert it.cloud.asked == [["a", "b", "c", "d"], ["c", "d"]]
    assert it.page.evidence == dict.fromkeys("abcd", "cloud confirmed its termination")


def test_instances_left_without_ids_confirms_nothing() -> None:
    """The provider does not say which machines are left, so none is confirmed."""
    it = scene("ab", terminate_confirms=True, is_blind=True, endings=["vague", "vague"])
    it.tear_down(are_all_known=True)
    assert it.cloud.asked == [["a", "b"]] * 3
    assert it.cloud.billed == set()


def test_a_failed_termination_confirms_nothing() -> None:
    """It holds for a provider that confirms terminations too."""
    it = scene("ab", terminate_confirms=True, is_blind=True, endings=["fail"])
    it.tear_down(are_all_known=True)
    assert it.cloud.asked == [["a", "b"]] * 2


def test_a_machine_that_its_lease_has_ended_needs_no_confirmation() -> None:
    """A host does not answer, and the lease of its node has expired. The evidence states that.

    The other machines are confirmed.
    """
    it = scene("ab", terminate_confirms=True, is_blind=True, always="refuse")  # ends a, never b
    it.page.lapsed = frozenset("b")
    it.tear_down(are_all_known=True, presumed_gone=frozenset("b"))
    assert it.page.evidence == {
        "a": "cloud confirmed its termination",
        "b": "its lease has expired, and its host does not answer",
    }


def test_a_machine_that_was_presumed_gone_may_be_confirmed() -> None:
    """The presumption counts only if the provider cannot confirm."""
    it = scene("ab", terminate_confirms=True)
    it.tear_down(are_all_known=True, presumed_gone=frozenset("b"))
    assert it.page.evidence == dict.fromkeys("ab", "cloud confirmed its termination")


def test_a_listed_machine_is_not_gone_although_it_was_presumed() -> None:
    """The cloud lists the machine, so it lives."""
    it = scene("ab", endings=["nothing"])
    it.tear_down(presumed_gone=frozenset("ab"))
    assert it.cloud.billed == set()


# ── giving up ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_machines_that_do_not_end_are_named_with_console_page_and_cause() -> None:
    """The error comes after the deadline. It has the ids, the console page and the command that repeats the teardown.

    Its cause is the last failure.
    """
    it = scene("abc", always="half", gone_deadline_seconds=10.0)  # half of one machine is none
    with pytest.raises(
        InstancesLeft,
        match=r"cloud was asked to terminate c; after 10 s .* Look at https://console.example/c; `skyward sweep`",
    ) as caught:
        it.tear_down()
    assert caught.value.ids == ("c",)
    assert caught.value.__cause__ is None
    assert it.page.rented() == {"c"}
    assert 1010.0 < it.time.now < 1013.0
    it = scene("a", always="fail", gone_deadline_seconds=10.0)
    with pytest.raises(InstancesLeft) as caught:
        it.tear_down()
    assert "502" in str(caught.value.__cause__)


def test_teardown_takes_ten_minutes_at_most() -> None:
    """A provider that claims to need an hour is given up. A sweep repeats the teardown."""
    it = scene("a", always="nothing", gone_deadline_seconds=3600.0)
    with pytest.raises(InstancesLeft):
        it.tear_down()
    assert DEADLINE_SECONDS < it.time.now - 1000.0 < DEADLINE_SECONDS + 3.0


def test_an_endless_outage_names_all_machines() -> None:
    """Terminations are accepted and listings fail, so all machines are named.

    A machine that was never listed has no console page.
    """
    it = scene("ab", is_blind=True, gone_deadline_seconds=10.0)
    with pytest.raises(InstancesLeft, match="Look at its console") as caught:
        it.tear_down()
    assert caught.value.ids == ("a", "b")
    assert "503" in str(caught.value.__cause__)


def test_accepted_and_refused_machines_that_are_left_are_named() -> None:
    """The cloud does not confirm terminations. It refuses one machine and reports nothing about the others.

    While listings fail all of them may live.
    """
    it = scene("abcd", is_blind=True, endings=["refuse"], always="nothing", gone_deadline_seconds=10.0)
    with pytest.raises(InstancesLeft) as caught:
        it.tear_down()
    assert set(caught.value.ids) >= it.cloud.billed
    assert it.cloud.asked[-1] == ["a", "b", "c", "d"]


def test_a_pool_is_not_empty_while_listings_fail() -> None:
    """No machine is known and none can be listed. The pool may have machines."""
    it = scene("z", known="", is_blind=True, gone_deadline_seconds=10.0)
    with pytest.raises(InstancesLeft, match="its machines") as caught:
        it.tear_down()
    assert caught.value.ids == ()


# ── arbitrary failures ───────────────────────────────────────────────────────────────────────────────────────────────

LETTERS = "abcdef"
endings = st.lists(st.sampled_from(["", "fail", "nothing", "half", "refuse", "vague"]), max_size=8)
listings = st.lists(st.sampled_from(["", "fail"]), max_size=8)


@pytest.mark.generated
@settings(max_examples=examples(300), deadline=None)
@given(
    billed=st.sets(st.sampled_from(LETTERS)),
    gone_before=st.sets(st.sampled_from("xy")),
    hidden=st.sets(st.sampled_from(LETTERS)),
    lags=st.dictionaries(st.sampled_from(LETTERS), st.floats(0, 30)),
    endings=endings,
    listings=listings,
    always=st.sampled_from(["", "", "nothing", "fail", "refuse"]),
    is_blind=st.booleans(),
    listing_seconds=st.sampled_from([0.0, 3.0]),
)
def test_teardown_ends_all_machines_or_names_those_that_are_left(
    billed: set[str],
    gone_before: set[str],
    hidden: set[str],
    lags: dict[str, float],
    endings: list[str],
    listings: list[str],
    always: str,
    is_blind: bool,
    listing_seconds: float,
) -> None:
    """It holds for all scripts of all methods, in any order.

    Each machine that is recorded as gone is gone (`Page.gone`).

    Each known or listed machine that may live is named.
    """
    time = Time()
    listed_from = {name: time.now + lag for name, lag in lags.items()}
    cloud = Cloud(
        time,
        set(billed),
        endings=endings,
        listings=listings,
        always=always,
        is_blind=is_blind,
        listed_from=listed_from,
        listing_seconds=listing_seconds,
    )
    page = Page(cloud, (billed - hidden) | gone_before)
    unsure_until = max(listed_from.values(), default=0.0)
    try:
        tear_down(cast("Provider", cloud), POOL, page, unsure_until=unsure_until, clock=time, pause=time.pause)
    except InstancesLeft as error:
        assert set(error.ids) >= cloud.billed & page.known
        assert set(error.ids) >= page.rented()
        assert always or is_blind, "nothing stood in the way for ever"
    else:
        assert cloud.billed == set()
        assert page.rented() == set()


@pytest.mark.generated
@settings(max_examples=examples(400), deadline=None)
@given(
    billed=st.sets(st.sampled_from(LETTERS)),
    hidden=st.sets(st.sampled_from(LETTERS)),
    endings=endings,
    listings=listings,
    is_blind=st.booleans(),
)
def test_the_same_with_providers_that_confirm(
    billed: set[str], hidden: set[str], endings: list[str], listings: list[str], is_blind: bool
) -> None:
    """A confirmation counts, except for machines that the pool does not know."""
    time = Time()
    truthful = [does for does in endings if does not in ("nothing", "half")]
    cloud = Cloud(time, set(billed), terminate_confirms=True, endings=truthful, listings=listings, is_blind=is_blind)
    page = Page(cloud, billed - hidden)
    try:
        tear_down(cast("Provider", cloud), POOL, page, are_all_known=not billed & hidden, clock=time, pause=time.pause)
    except InstancesLeft as error:
        assert set(error.ids) >= cloud.billed & page.known
        assert billed & hidden or billed == set() or is_blind
    else:
        assert (cloud.billed, page.rented()) == (set(), set())
