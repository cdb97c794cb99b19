"""Giving back, at clouds that misbehave in every verb: it returns only when nothing is billed any more, and names all
that may be when it gives up.
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
    """Goes on only while somebody pauses, or a verb of the cloud takes its time."""

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
    """A cloud whose truth is `billed`. A machine is listed from its time in `listed_from` on; what each verb does next
    is scripted, then it works.

    Scripts: "fail" raises, "nothing" accepts and does nothing, "half" ends the first half of what it is asked for,
    "refuse" raises InstancesLeft with those that it has not ended, "vague" does the same and names none; of listings
    "fail", and "blank", which shows nothing.
    """

    time: Time
    billed: set[str]
    terminate_confirms: bool = False
    gone_deadline_seconds: float = 120.0
    endings: list[str] = field(default_factory=list)
    listings: list[str] = field(default_factory=list)
    always: str = ""
    """What a termination does once the script is over; "" works."""
    is_blind: bool = False
    """Listings fail for ever once the script is over."""
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
    """A witness that checks, each time it is told that something is gone, that it is."""

    def __init__(self, cloud: Cloud, known: Iterable[str]) -> None:
        self.cloud = cloud
        self.known = set(known)
        self.told: list[tuple[str, ...]] = []
        self.evidence: dict[str, str] = {}
        self.lapsed: frozenset[str] = frozenset()

    def rented(self) -> set[str]:
        return self.known - self.evidence.keys()

    def found(self, instances: Iterable[Instance]) -> None:
        for instance in instances:
            if instance.id not in self.known:
                self.known.add(instance.id)
                self.told.append(("found", instance.id))

    def ending(self, instance_ids: Iterable[str]) -> None:
        ids = list(instance_ids)
        assert not any(set(ids) & set(asked) for asked in self.cloud.asked), "told after termination was asked for"
        self.told += [("ending", name) for name in ids]

    def asked(self, instance_ids: Iterable[str]) -> None:
        assert set(instance_ids) <= {name for asked in self.cloud.asked for name in asked}, (
            "told before termination was asked for"
        )

    def gone(self, instance_ids: Iterable[str], evidence: str) -> None:
        for name in instance_ids:
            assert name not in self.cloud.billed or name in self.lapsed, (
                f"{name} is billed and was told as gone: {evidence}"
            )
            assert name not in self.evidence, f"{name} was told as gone twice"
            self.told.append(("gone", name))
            self.evidence[name] = evidence


@dataclass
class Scene:
    """A cloud, its clock, and who keeps book."""

    time: Time
    cloud: Cloud
    page: Page

    def tear_down(self, **keywords: Any) -> None:
        tear_down(cast("Provider", self.cloud), POOL, self.page, clock=self.time, pause=self.time.pause, **keywords)


def scene(billed: str, known: str | None = None, **settings: Any) -> Scene:
    """A cloud with machines of one letter each, and a page that knows these, or those given."""
    time = Time()
    cloud = Cloud(time, set(billed), **settings)
    return Scene(time, cloud, Page(cloud, set(billed if known is None else known)))


# ── what it believes ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_machines_are_gone_when_the_provider_does_not_list_them() -> None:
    """One request, one listing after it, no waiting; each machine is told as ending before it is asked for, and as gone
    after it, with the evidence.
    """
    it = scene("ab")
    it.tear_down()
    assert it.cloud.asked == [["a", "b"]]
    assert it.page.told == [("ending", "a"), ("ending", "b"), ("gone", "a"), ("gone", "b")]
    assert it.page.evidence == dict.fromkeys("ab", "cloud lists it no more")
    assert it.time.pauses == []


@pytest.mark.parametrize("times", [1, 3, 20])
def test_a_termination_without_effect_is_repeated(times: int) -> None:
    """As often as it takes, with pauses that grow to two seconds; a machine is told as ending once."""
    it = scene("ab", endings=["nothing"] * times)
    it.tear_down()
    assert it.cloud.asked == [["a", "b"]] * (times + 1)
    assert [told for told in it.page.told if told[0] == "ending"] == [("ending", "a"), ("ending", "b")]
    assert it.time.pauses == sorted(it.time.pauses)
    assert (it.time.pauses[0], max(it.time.pauses) <= 2.0) == (0.2, True)


def test_only_machines_that_are_left_are_requested_again() -> None:
    """What the listing lacks is gone and told at once; the rest is asked for again."""
    it = scene("abcd", endings=["half", "half"])
    it.tear_down()
    assert it.cloud.asked == [["a", "b", "c", "d"], ["c", "d"], ["d"]]
    assert [name for what, name in it.page.told if what == "gone"] == ["a", "b", "c", "d"]


def test_a_failed_listing_proves_nothing() -> None:
    """Nothing is told as gone while the provider cannot say; termination is asked for all the same, and again."""
    it = scene("ab", listings=["fail"] * 7)
    it.tear_down()
    assert it.page.evidence == dict.fromkeys("ab", "cloud lists it no more")
    assert len(it.cloud.asked) >= 3
    assert it.cloud.billed == set()


def test_an_empty_listing_after_a_failed_termination_needs_a_second_one() -> None:
    """A cloud in trouble may show nothing of what it has: what could not be terminated is gone only when a second
    listing lacks it too.
    """
    it = scene("a", endings=["fail", "fail"], listings=["", "blank", "", ""])
    it.tear_down()
    assert it.cloud.billed == set()
    assert it.cloud.asked == [["a"]] * 3


def test_an_outage_is_waited_out() -> None:
    """Terminations and listings fail for a while, then work."""
    it = scene("ab", listings=["fail"] * 9, endings=["fail"] * 4)
    it.tear_down()
    assert it.cloud.billed == set()
    assert it.page.rented() == set()


def test_a_machine_that_only_the_listing_has_is_ended_too() -> None:
    """It is told to the witness before its end is asked for."""
    it = scene("abz", known="ab")
    it.tear_down()
    assert it.cloud.billed == set()
    assert it.page.told.index(("found", "z")) < it.page.told.index(("ending", "z")) < it.page.told.index(("gone", "z"))


def test_a_machine_listed_after_the_first_termination_is_ended_too() -> None:
    """The listing fails before the first request and shows one more after it."""
    it = scene("az", known="a", listings=["fail"])
    it.tear_down()
    assert it.cloud.asked == [["a"], ["z"]]
    assert it.cloud.billed == set()


def test_a_pool_without_machines_needs_no_request() -> None:
    """A pool without machines is one or two looks, and no request."""
    it = scene("")
    it.tear_down()
    assert it.cloud.asked == []
    assert it.page.told == []


def test_a_second_teardown_requests_nothing() -> None:
    """A second time finds nothing left to do."""
    it = scene("ab")
    it.tear_down()
    told = list(it.page.told)
    it.tear_down()
    assert it.cloud.asked == [["a", "b"]]
    assert it.page.told == told


def test_a_second_teardown_finishes_an_interrupted_one() -> None:
    """Ctrl-C comes through from a pause; called again it goes on."""
    it = scene("ab", endings=["nothing"])

    def interrupted(_: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tear_down(cast("Provider", it.cloud), POOL, it.page, clock=it.time, pause=interrupted)
    assert it.page.rented() == {"a", "b"}
    it.cloud.asked.clear()
    it.tear_down()
    assert (it.cloud.billed, it.page.rented()) == (set(), set())


# ── a listing that lags ──────────────────────────────────────────────────────────────────────────────────────────────


def test_an_early_listing_does_not_prove_that_a_machine_is_gone() -> None:
    """A machine that is listed 30 s after its launch is found and ended, though the first listings were empty."""
    it = scene("az", known="a", listed_from={"z": 1030.0})
    it.tear_down(unsure_until=1030.0)
    assert it.cloud.billed == set()
    assert it.time.now >= 1030.0
    assert it.page.evidence.keys() == {"a", "z"}


def test_a_machine_that_is_not_listed_yet_is_not_gone() -> None:
    """Its termination did nothing and the listing lacks it: it is asked for again, and told as gone only after it must
    be listed.
    """
    it = scene("a", listed_from={"a": 1020.0}, endings=["nothing"] * 3)
    it.tear_down(unsure_until=1020.0)
    assert it.cloud.billed == set()
    assert it.time.now >= 1020.0


def test_a_listing_counts_by_the_time_of_its_request() -> None:
    """It takes 20 s to answer with what it saw at the beginning; the time of the asking counts."""
    it = scene("z", known="", listed_from={"z": 1030.0}, listing_seconds=20.0)
    it.tear_down(unsure_until=1030.0)
    assert it.cloud.billed == set()


def test_the_deadline_begins_after_the_listing_is_reliable() -> None:
    """A machine that comes to light late has the whole deadline still."""
    it = scene("z", known="", listed_from={"z": 1200.0}, endings=["nothing"] * 30, gone_deadline_seconds=100.0)
    it.tear_down(unsure_until=1200.0)
    assert it.cloud.billed == set()
    assert it.time.now > 1240.0


# ── a provider that confirms ─────────────────────────────────────────────────────────────────────────────────────────


def test_a_provider_that_confirms_needs_no_listing() -> None:
    """One request, nothing listed, if no machine can exist that nobody knows."""
    it = scene("ab", terminate_confirms=True, is_blind=True)
    it.tear_down(are_all_known=True)
    assert it.page.evidence == dict.fromkeys("ab", "cloud confirmed its termination")
    assert it.time.pauses == []


def test_after_a_lost_launch_a_provider_that_confirms_is_listed_too() -> None:
    """What only the listing knows is ended too."""
    it = scene("az", known="a", terminate_confirms=True)
    it.tear_down(are_all_known=False)
    assert it.cloud.billed == set()
    assert it.page.evidence.keys() == {"a", "z"}


def test_a_machine_found_during_teardown_is_ended_too() -> None:
    """A listing that was asked for only because a termination failed shows a machine that should not be there."""
    it = scene("abz", known="ab", terminate_confirms=True, endings=["refuse"])
    it.tear_down(are_all_known=True, unsure_until=1010.0)
    assert it.cloud.billed == set()
    assert it.page.rented() == set()


def test_confirmed_machines_are_recorded_at_once_and_the_rest_repeated() -> None:
    """InstancesLeft names those that are left; the others cost no more, listing or not."""
    it = scene("abcd", terminate_confirms=True, is_blind=True, endings=["refuse"])
    it.tear_down(are_all_known=True)
    assert it.cloud.asked == [["a", "b", "c", "d"], ["c", "d"]]
    assert it.page.evidence == dict.fromkeys("abcd", "cloud confirmed its termination")


def test_instances_left_without_ids_confirms_nothing() -> None:
    """A provider that says that some are left and not which has confirmed none."""
    it = scene("ab", terminate_confirms=True, is_blind=True, endings=["vague", "vague"])
    it.tear_down(are_all_known=True)
    assert it.cloud.asked == [["a", "b"]] * 3
    assert it.cloud.billed == set()


def test_a_failed_termination_confirms_nothing() -> None:
    """Not even at a provider whose terminations confirm."""
    it = scene("ab", terminate_confirms=True, is_blind=True, endings=["fail"])
    it.tear_down(are_all_known=True)
    assert it.cloud.asked == [["a", "b"]] * 2


def test_a_machine_that_its_lease_has_ended_needs_no_confirmation() -> None:
    """A host that does not answer cannot be asked; its node's lease is over, and the evidence says just that.

    The others are confirmed.
    """
    it = scene("ab", terminate_confirms=True, is_blind=True, always="refuse")  # ends a, never b
    it.page.lapsed = frozenset("b")
    it.tear_down(are_all_known=True, presumed_gone=frozenset("b"))
    assert it.page.evidence == {
        "a": "cloud confirmed its termination",
        "b": "its lease has run out, and what carries it does not answer",
    }


def test_a_machine_that_was_presumed_gone_may_be_confirmed() -> None:
    """The presumption is asked for only where the provider cannot tell."""
    it = scene("ab", terminate_confirms=True)
    it.tear_down(are_all_known=True, presumed_gone=frozenset("b"))
    assert it.page.evidence == dict.fromkeys("ab", "cloud confirmed its termination")


def test_a_listed_machine_is_not_gone_although_it_was_presumed() -> None:
    """At a cloud that lists the machine it lives, whatever was presumed."""
    it = scene("ab", endings=["nothing"])
    it.tear_down(presumed_gone=frozenset("ab"))
    assert it.cloud.billed == set()


# ── giving up ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_machines_that_do_not_end_are_named_with_console_page_and_cause() -> None:
    """After the deadline: the ids, where a person sees them, the command that asks again, and the last trouble as the
    cause.
    """
    it = scene("abc", always="half", gone_deadline_seconds=10.0)  # of one machine half is none
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
    """A provider that claims to need an hour is not waited for; a sweep asks again."""
    it = scene("a", always="nothing", gone_deadline_seconds=3600.0)
    with pytest.raises(InstancesLeft):
        it.tear_down()
    assert DEADLINE_SECONDS < it.time.now - 1000.0 < DEADLINE_SECONDS + 3.0


def test_an_endless_outage_names_all_machines() -> None:
    """Termination was accepted, and nobody can see what came of it: all are named, without a page if they were never
    seen.
    """
    it = scene("ab", is_blind=True, gone_deadline_seconds=10.0)
    with pytest.raises(InstancesLeft, match="Look at its console") as caught:
        it.tear_down()
    assert caught.value.ids == ("a", "b")
    assert "503" in str(caught.value.__cause__)


def test_accepted_and_refused_machines_that_are_left_are_named() -> None:
    """A cloud whose terminations do not confirm refuses one and says nothing of the others: while it cannot be asked,
    all may live.
    """
    it = scene("abcd", is_blind=True, endings=["refuse"], always="nothing", gone_deadline_seconds=10.0)
    with pytest.raises(InstancesLeft) as caught:
        it.tear_down()
    assert set(caught.value.ids) >= it.cloud.billed
    assert it.cloud.asked[-1] == ["a", "b", "c", "d"]


def test_a_pool_is_not_empty_while_listings_fail() -> None:
    """Nothing is known and nothing can be listed: that is no empty pool."""
    it = scene("z", known="", is_blind=True, gone_deadline_seconds=10.0)
    with pytest.raises(InstancesLeft, match="its machines") as caught:
        it.tear_down()
    assert caught.value.ids == ()


# ── all at once ──────────────────────────────────────────────────────────────────────────────────────────────────────

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
    """Whatever each verb does, in whatever order: whoever is told as gone is gone (`Page.gone`), and what was known or
    seen is named if it may live.
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
    """A confirmation is believed, but for machines that nobody knew."""
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
