"""Teardown with clouds that fail in each method: no machine is billed at its end, or the error names all that may be."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyward_core import Instance, InstancesLeft, InstanceState
from skyward_core.providers.base import Provider
from skyward_core.provisioning.teardown import DEADLINE_SECONDS, report_gone, tear_down
from tests.conftest import examples

POOL = "sky-1"
CONSOLE = "https://console.example/"
LISTED_NO_MORE, CONFIRMED = "cloud lists it no more", "cloud confirmed its termination"


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
    name: ClassVar[str] = "cloud"

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
        self.ended: set[str] = set()

    def rented(self) -> set[str]:
        return self.known - self.evidence.keys() - self.ended  # as a meter: what is seen to be gone is not counted

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

    def seen_gone(self, instance_ids: Iterable[str]) -> None:
        self.ended |= set(instance_ids)

    def gone(self, instance_ids: Iterable[str], evidence: str) -> None:
        for name in instance_ids:
            assert name in self.ended or name in self.lapsed, "its time went on until it was recorded"
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
    """Each is recorded as ending before the request, and as gone after it. A second teardown requests nothing."""
    it = scene("ab")
    for _ in range(2):
        it.tear_down()
        assert it.cloud.asked == [["a", "b"]]
        assert it.page.entries == [("ending", "a"), ("ending", "b"), ("gone", "a"), ("gone", "b")]
    assert it.page.evidence == dict.fromkeys("ab", LISTED_NO_MORE)
    assert it.time.pauses == []
    empty = scene("")
    empty.tear_down()
    assert (empty.cloud.asked, empty.page.entries) == ([], [])


@pytest.mark.parametrize("times", [1, 20])
def test_a_termination_without_effect_is_repeated(times: int) -> None:
    """With pauses that grow to two seconds. A machine is recorded as ending once."""
    it = scene("ab", endings=["nothing"] * times)
    it.tear_down()
    assert it.cloud.asked == [["a", "b"]] * (times + 1)
    assert [entry for entry in it.page.entries if entry[0] == "ending"] == [("ending", "a"), ("ending", "b")]
    assert it.time.pauses == sorted(it.time.pauses)
    assert (it.time.pauses[0], max(it.time.pauses) <= 2.0) == (0.2, True)


def test_a_failure_proves_nothing() -> None:
    """A cloud with a failure may list too little: a second listing must lack the machines too."""
    it = scene("ab", endings=["fail", "fail"], listings=["", "blank", "", ""])
    it.tear_down()
    assert (len(it.cloud.asked), it.cloud.billed) == (3, set())
    assert it.page.evidence == dict.fromkeys("ab", LISTED_NO_MORE)


def test_a_second_teardown_finishes_an_interrupted_one() -> None:
    """Ctrl-C interrupts a pause."""
    it = scene("ab", endings=["nothing"])

    def interrupted(_: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tear_down(cast("Provider", it.cloud), POOL, it.page, clock=it.time, pause=interrupted)
    assert it.page.rented() == {"a", "b"}
    it.cloud.asked.clear()
    it.tear_down()
    assert (it.cloud.billed, it.page.rented()) == (set(), set())


@pytest.mark.parametrize(
    ("billed", "known", "lag_seconds", "settings", "at_least_seconds"),
    [
        ("az", "a", 30.0, {}, 30.0),
        # a listing has the state of its request, although its answer takes 20 s
        ("z", "", 30.0, {"listing_seconds": 20.0}, 30.0),
        # the whole deadline begins when the listing is reliable
        ("z", "", 200.0, {"endings": ["nothing"] * 30, "gone_deadline_seconds": 100.0}, 240.0),
    ],
)
def test_an_early_listing_does_not_prove_that_a_machine_is_gone(
    billed: str, known: str, lag_seconds: float, settings: dict[str, Any], at_least_seconds: float
) -> None:
    """A machine is listed only some time after its launch. It is found and ended."""
    it = scene(billed, known, listed_from={"z": 1000.0 + lag_seconds}, **settings)
    it.tear_down(unsure_until=1000.0 + lag_seconds)
    assert (it.cloud.billed, it.page.evidence.keys()) == (set(), set(billed))
    assert it.time.now >= 1000.0 + at_least_seconds


# ── a provider that confirms ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("endings", "asked"),
    [([], ["abcd"]), (["refuse"], ["abcd", "cd"]), (["vague", "vague"], ["abcd"] * 3), (["fail"], ["abcd"] * 2)],
)
def test_a_provider_that_confirms_needs_no_listing(endings: list[str], asked: list[str]) -> None:
    """Machines that it names as left are requested again; all, if it names none or fails."""
    it = scene("abcd", terminate_confirms=True, is_blind=True, endings=endings)
    it.tear_down(are_all_known=True)
    assert it.cloud.asked == [[*ids] for ids in asked]
    assert it.page.evidence == dict.fromkeys("abcd", CONFIRMED)


def test_a_machine_that_its_lease_has_ended_needs_no_confirmation() -> None:
    """A host does not answer, and the lease of its node has expired. A confirmation or a listing counts for more."""
    it = scene("ab", terminate_confirms=True, is_blind=True, always="refuse")  # ends a, never b
    it.page.lapsed = frozenset("b")
    it.tear_down(are_all_known=True, presumed_gone=frozenset("b"))
    assert it.page.evidence == {"a": CONFIRMED, "b": "its lease has expired, and its host does not answer"}
    confirmed = scene("ab", terminate_confirms=True)
    confirmed.tear_down(are_all_known=True, presumed_gone=frozenset("b"))
    assert confirmed.page.evidence == dict.fromkeys("ab", CONFIRMED)
    listed = scene("ab", endings=["nothing"])
    listed.tear_down(presumed_gone=frozenset("ab"))
    assert listed.cloud.billed == set()


# ── giving up ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_machines_that_do_not_end_are_named_with_console_page_and_cause() -> None:
    """After the deadline, with the command that repeats the teardown. The cause is the last failure."""
    it = scene("abc", always="half", gone_deadline_seconds=10.0)  # half of one machine is none
    with pytest.raises(
        InstancesLeft,
        match=r"cloud was asked to terminate c; after 10 s .* Look at https://console.example/c; `skyward sweep`",
    ) as caught:
        it.tear_down()
    assert (caught.value.ids, caught.value.__cause__, it.page.rented()) == (("c",), None, {"c"})
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


@pytest.mark.parametrize(
    ("billed", "known", "settings", "words"),
    [
        ("ab", None, {}, "Look at its console"),
        ("abcd", None, {"endings": ["refuse"], "always": "nothing"}, "a, b, c, d"),
        ("z", "", {}, "its machines"),
    ],
    ids=["accepted", "one refused", "none known"],
)
def test_while_listings_fail_all_machines_may_be_left(
    billed: str, known: str | None, settings: dict[str, Any], words: str
) -> None:
    """Also those that the cloud has accepted to end, and machines of which nothing is known."""
    it = scene(billed, known, is_blind=True, gone_deadline_seconds=10.0, **settings)
    with pytest.raises(InstancesLeft, match=words) as caught:
        it.tear_down()
    assert caught.value.ids == tuple(billed if known is None else known)
    assert "503" in str(caught.value.__cause__)


def test_machines_are_recorded_with_their_proofs() -> None:
    """Those with the same proof together. The evidence alone stands where there is none."""
    recorded: list[tuple[list[str], str]] = []

    def record(ids: Iterable[str], evidence: str) -> None:
        recorded.append((list(ids), evidence))

    report_gone(record, {"d", "c", "b", "a"}, "confirmed", {"a": "no files", "c": "no files", "x": "another"})
    assert recorded == [(["b", "d"], "confirmed"), (["a", "c"], "confirmed: no files")]
    report_gone(record, set(), "confirmed", {"x": "another"})
    assert len(recorded) == 2


# ── arbitrary failures ───────────────────────────────────────────────────────────────────────────────────────────────

LETTERS = "abcdef"
FAULTS = ["", "fail", "refuse", "vague"]


@pytest.mark.generated
@pytest.mark.parametrize("confirms", [False, True])
@settings(max_examples=examples(300), deadline=None)
@given(
    billed=st.sets(st.sampled_from(LETTERS)),
    hidden=st.sets(st.sampled_from(LETTERS)),
    lags=st.dictionaries(st.sampled_from(LETTERS), st.floats(0, 30)),
    endings=st.lists(st.sampled_from([*FAULTS, "nothing", "half"]), max_size=8),
    listings=st.lists(st.sampled_from(["", "fail"]), max_size=8),
    always=st.sampled_from(["", "", "nothing", "fail", "refuse"]),
    is_blind=st.booleans(),
    listing_seconds=st.sampled_from([0.0, 3.0]),
)
def test_teardown_ends_all_machines_or_names_those_that_are_left(
    confirms: bool,
    billed: set[str],
    hidden: set[str],
    lags: dict[str, float],
    endings: list[str],
    listings: list[str],
    always: str,
    is_blind: bool,
    listing_seconds: float,
) -> None:
    """For all scripts of all methods, in any order. Each machine that is recorded as gone is gone (`Page.gone`).

    A provider that confirms tells the truth, and need not list machines that the pool knows.
    """
    time = Time()
    if confirms:
        lags, always, endings = {}, "", [does for does in endings if does in FAULTS]
    listed_from = {name: time.now + lag for name, lag in lags.items()}
    cloud = Cloud(
        time,
        set(billed),
        terminate_confirms=confirms,
        endings=endings,
        listings=listings,
        always=always,
        is_blind=is_blind,
        listed_from=listed_from,
        listing_seconds=listing_seconds,
    )
    page = Page(cloud, (billed - hidden) | (set() if confirms else {"x"}))
    keywords: dict[str, Any] = {"are_all_known": confirms and not billed & hidden}
    unsure_until = max(listed_from.values(), default=0.0)
    provider = cast("Provider", cloud)
    try:
        tear_down(provider, POOL, page, unsure_until=unsure_until, clock=time, pause=time.pause, **keywords)
    except InstancesLeft as error:
        assert set(error.ids) >= (cloud.billed & page.known) | page.rented()
        assert always or is_blind, "nothing stood in the way for ever"
    else:
        assert (cloud.billed, page.rented()) == (set(), set())
