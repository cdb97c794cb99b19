"""Where a pool's machines may come from: candidates, their order, what is put aside, and what is raised when all have
refused.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any, ClassVar

import pytest
from pydantic import PrivateAttr

import skyward_core as sky
from skyward_core.errors import (
    BudgetExceeded,
    CredentialsError,
    NoCapacity,
    ProviderFailed,
    QuotaExceeded,
    RateLimited,
    Refusal,
    SkywardError,
)
from skyward_core.ledger.ledger import Ledger, default_url
from skyward_core.ledger.receipt import receipt
from skyward_core.ledger.rows import Account, Attempt, Period
from skyward_core.machines.offers import Extra, Offer, Requirements, matches, rank, select_instance
from skyward_core.provisioning import candidates as placing
from skyward_core.provisioning import teardown
from skyward_core.provisioning.candidates import Sold, candidates, key_of, none_left, order, refusal, resting
from skyward_core.provisioning.selection import Selection
from skyward_core.provisioning.termination import Ending
from tests.conftest import Told
from tests.fakes import FakeProvider

NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)
CHEAP, DEAR = sky.Local(price_per_hour=1.0), sky.Local(price_per_hour=2.0)


def offer(kind: str = "a", price: float = 1.0, **fields: Any) -> Offer:
    return Offer(
        **{
            "provider": "local",
            "instance_type": kind,
            "region": "r-1",
            "price_per_hour": price,
            "vcpus": 4,
            "memory_gb": 16,
            **fields,
        }
    )


def both(kind: str, price: float, spot_price: float, **fields: Any) -> tuple[Offer, Offer]:
    return offer(kind, price, **fields), offer(kind, spot_price, is_spot=True, on_demand_price_per_hour=price, **fields)


def told(found: Sequence[placing.Candidate]) -> list[list[tuple[str, bool, int, int]]]:
    return [
        [(part.offer.instance_type, part.offer.is_spot, part.count, part.first_rank) for part in one.parts]
        for one in found
    ]


# ── candidates ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("spot", "expected"),
    [
        (
            None,
            [
                [("b", True, 2, 0)],
                [("a", True, 2, 0)],
                [("c", False, 2, 0)],
                [("a", False, 2, 0)],
                [("b", False, 2, 0)],
            ],
        ),
        (
            "if-available",
            [
                [("b", True, 2, 0)],
                [("a", True, 2, 0)],
                [("c", False, 2, 0)],
                [("a", False, 2, 0)],
                [("b", False, 2, 0)],
            ],
        ),
        ("always", [[("b", True, 2, 0)], [("a", True, 2, 0)]]),
        ("never", [[("c", False, 2, 0)], [("a", False, 2, 0)], [("b", False, 2, 0)]]),
        (0.5, [[("b", False, 1, 0), ("b", True, 1, 1)], [("a", False, 1, 0), ("a", True, 1, 1)]]),
    ],
)
def test_candidates_are_what_the_strategy_allows(spot: Any, expected: list[Any]) -> None:
    """Cheapest first; in a mixed pool the on-demand part has the lower ranks and counts with its price."""
    wishes = {} if spot is None else {"spot": spot}
    offers = (*both("a", 3.0, 1.0), *both("b", 3.1, 0.5), offer("c", 2.0))
    found, refusals = candidates(sky.PoolSpec.of(nodes=2, **wishes), [Sold(CHEAP, offers, "acc")])
    assert told(found) == expected
    assert refusals == []
    assert {one.account for one in found} == {"acc"}
    assert [one.price_per_hour for one in found] == sorted(one.price_per_hour for one in found)


def test_all_providers_and_regions_are_ranked_together() -> None:
    """By the price of all machines; of equal prices the smaller machine."""
    spec = sky.PoolSpec.of(nodes=1, cpu=4)
    found, _ = candidates(
        spec,
        [
            Sold(CHEAP, (offer("x", 2.0, vcpus=8), offer("small", 0.1, vcpus=2))),
            Sold(DEAR, (offer("y", 2.0), offer("z", 1.5, region="r-2"), offer("z", 1.4, region="r-2"))),
        ],
    )
    assert [(one.provider, one.region, one.parts[0].offer.instance_type, one.price_per_hour) for one in found] == [
        (DEAR, "r-2", "z", 1.4),
        (DEAR, "r-2", "z", 1.5),
        (DEAR, "r-1", "y", 2.0),
        (CHEAP, "r-1", "x", 2.0),
    ]


BESIDE = (Extra(name="disk", usd_per_hour=0.625, source="a page", checked="2026-11-22"),)


def test_what_is_billed_beside_a_machine_counts() -> None:
    """In the order, in the limit, and in which of two prices of a type is the cheaper one."""
    offers = (offer("a", 1.125, extras_per_hour=BESIDE), offer("b", 1.5), offer("b", 1.25, extras_per_hour=BESIDE))
    found, _ = candidates(sky.PoolSpec.of(nodes=2), [Sold(CHEAP, offers)])
    assert [(one.parts[0].offer.instance_type, one.price_per_hour) for one in found] == [
        ("b", 3.0),
        ("a", 3.5),
        ("b", 3.75),
    ]
    assert [one.instance_type for one in rank(offers, Requirements(max_price_per_hour=1.5))] == ["b"]
    assert (
        matches(offers[0], Requirements(max_price_per_hour=1.5))
        == "costs $1.75 an hour with all that is billed beside it"
    )
    assert select_instance(offers).total_per_hour == 1.5


def test_who_has_nothing_is_told_with_the_reason() -> None:
    """A provider that could not be asked, one with nothing that fits, one without spot; the others are candidates."""
    failed = ProviderFailed("down").coded("503")
    sold = [
        Sold(CHEAP, error=failed, seconds=2.0),
        Sold(DEAR, (offer("tiny", vcpus=1),), seconds=1.0),
        Sold(CHEAP, (offer("od", 1.0),)),
        Sold(DEAR, both("s", 3, 1)),
    ]
    found, refusals = candidates(sky.PoolSpec.of(cpu=2, spot="always"), sold)
    assert told(found) == [[("s", True, 1, 0)]]
    assert refusals[0] == Refusal("local", "", "", False, "ProviderFailed", "503", "down", 2.0)  # noqa: FBT003 - spot
    assert "tiny has 1 CPUs" in refusals[1].message
    assert "no spot machine" in refusals[2].message


def test_a_region_that_could_not_be_asked_is_told_beside_what_the_others_sell() -> None:
    """And like a provider that could not be asked, it may sell what is demanded."""
    part = Sold(
        CHEAP, (offer("a"),), seconds=2.0, unasked={"far": CredentialsError("not enabled").coded("AuthFailure")}
    )
    found, refusals = candidates(sky.PoolSpec.of(), [part])
    assert told(found) == [[("a", False, 1, 0)]]
    assert refusals == [Refusal("local", "far", "", False, "CredentialsError", "AuthFailure", "not enabled", 2.0)]  # noqa: FBT003 - spot
    assert [str(error) for error in part.errors] == ["not enabled"]
    assert candidates(sky.PoolSpec.of(spot="always"), [part])[0] == []


def test_spot_that_nobody_sells_is_a_bad_request() -> None:
    """Demanded where offers fit and none is spot."""
    with pytest.raises(sky.BadRequest, match="if-available"):
        candidates(sky.PoolSpec.of(spot=0.5, nodes=2), [Sold(CHEAP, (offer(),))])
    assert candidates(sky.PoolSpec.of(spot="always", cpu=99), [Sold(CHEAP, (offer(),))])[0] == []


class Market(sky.Local):
    """Lists spot machines only while one is free."""

    name: ClassVar[str] = "market"

    def may_sell_spot(self, want: Requirements) -> bool:
        return True


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (Sold(DEAR, error=ProviderFailed("down").coded("503")), "down"),
        (Sold(DEAR, error=CredentialsError("who")), "who"),
        (Sold(Market(), (offer(),)), "no spot machine free"),
        (Sold(Market()), "there are no offers at all"),
    ],
    ids=["outage", "credentials", "none free", "nothing now"],
)
def test_spot_that_somebody_may_sell_is_no_bad_request(other: Sold, words: str) -> None:
    """One has not answered, or sells spot when a machine is free: whoever asks for it may ask again."""
    found, refusals = candidates(sky.PoolSpec.of(spot="always"), [Sold(CHEAP, (offer(),)), other])
    assert found == []
    assert "sells no spot machine" in refusals[0].message
    assert words in refusals[1].message


@pytest.mark.parametrize(
    ("cloud", "wish", "expected"),
    [
        (sky.RunPod(), {"accelerator": sky.Accelerator.NVIDIA.H100()}, False),
        (sky.AWS(), {"accelerator": sky.Accelerator.NVIDIA.H100()}, False),
        (sky.Verda(), {"accelerator": sky.Accelerator.NVIDIA.H100()}, True),
        (sky.VastAI(), {"accelerator": sky.Accelerator.NVIDIA.H100()}, True),
        (sky.DigitalOcean(), {"accelerator": sky.Accelerator.NVIDIA.H100()}, False),
        (sky.DigitalOcean(), {"accelerator": sky.Accelerator.NVIDIA.B300()}, True),
        (sky.DigitalOcean(), {"instance_type": "gpu-mi350x1-288gb"}, True),
        (sky.DigitalOcean(), {}, False),
    ],
    ids=str,
)
def test_who_lists_spot_only_while_it_is_free(cloud: sky.Provider, wish: dict[str, Any], expected: bool) -> None:
    """AWS tells a price whether a machine is free or not, RunPod sells none, DigitalOcean three chips (fact sheet)."""
    assert cloud.may_sell_spot(Requirements(**wish)) is expected


def gpus(kind: str, price: float, chips: int, **fields: Any) -> Offer:
    return offer(kind, price, accelerator="H100", accelerators=chips, accelerator_memory_gb=80, **fields)


def test_one_chip_is_not_eight() -> None:
    """More chips than were asked for are taken where they cost no more than the fewest do, and not when those are sold
    out.
    """
    aws, market = sky.Local(price_per_hour=3.0), sky.Local(price_per_hour=4.0)
    sold = [
        Sold(
            aws,
            (
                gpus("one", 4.0, 1),
                gpus("eight", 31.0, 8),
                gpus("two", 3.5, 2),
                gpus("one", 1.5, 1, is_spot=True),
                gpus("eight", 9.0, 8, is_spot=True),
            ),
        ),
        Sold(market, (gpus("only-eight", 16.0, 8), gpus("only-eight", 17.0, 8, region="r-2"))),
    ]

    def types(**wishes: Any) -> list[str]:
        found, _ = candidates(sky.PoolSpec.of(**wishes), sold)
        return [one.parts[0].offer.instance_type for one in found]

    assert types(accelerator="H100") == ["one", "two", "one", "only-eight", "only-eight"]
    assert types(accelerator="H100", spot="always") == ["one"]
    assert types(accelerator="H100", spot=0.5, nodes=2) == ["one"]
    assert types(accelerator=sky.Accelerator.NVIDIA.H100(count=4)) == ["eight", "only-eight", "only-eight", "eight"]
    assert types(machine="eight") == ["eight", "eight"]
    assert types(accelerator="H100", machine="eight") == ["eight", "eight"]
    assert "eight" in types()


def test_chips_that_cost_nothing_are_taken() -> None:
    """Hosts of one's own."""
    found, _ = candidates(
        sky.PoolSpec.of(accelerator="H100"), [Sold(CHEAP, (gpus("one", 0.0, 1), gpus("eight", 0.0, 8)))]
    )
    assert len(found) == 2


# ── what is remembered ───────────────────────────────────────────────────────────────────────────────────────────────


def attempt(seconds_ago: float, error: str = "NoCapacity", kind: str = "a", pool: str = "", nodes: int = 1) -> Attempt:
    """A try of a pool of its own, if it is not told of which."""
    at = NOW - timedelta(seconds=seconds_ago)
    return Attempt(
        pool or f"p{seconds_ago}", at, "local", "r-1", kind, is_spot=False, seconds=1.0, error=error, nodes=nodes
    )


@pytest.mark.parametrize(
    ("attempts", "rest_seconds"),
    [
        ([], None),
        ([attempt(3), attempt(2)], None),
        ([attempt(3), attempt(2), attempt(1)], 59),
        ([attempt(1), attempt(3), attempt(2), attempt(4)], 119),
        ([attempt(4), attempt(3), attempt(2), attempt(1, error="")], None),
        ([attempt(9, error=""), attempt(3), attempt(2), attempt(1)], 59),
        ([attempt(100 + n) for n in range(3)], None),
        ([attempt(100 + n) for n in range(40)], 1700),
        ([attempt(n, pool="p") for n in range(40)], None),
        ([*(attempt(10 + n, pool="p") for n in range(9)), attempt(8), attempt(5)], 55),
        ([attempt(n, error) for n, error in enumerate(("ProviderFailed", "RateLimited", "QuotaExceeded"))], 60),
        (
            [
                attempt(n, error)
                for error in ("BadRequest", "CredentialsError", "OfferGone", "BudgetExceeded", "NotYetSupported")
                for n in range(3)
            ],
            None,
        ),
        ([attempt(3), attempt(2, "BadRequest"), attempt(1), attempt(0)], 60),
        ([attempt(n, nodes=3) for n in range(9)], None),
        ([attempt(n, nodes=2) for n in range(3)], 60),
        ([*(attempt(n, nodes=2) for n in (4, 3, 2)), attempt(1, error="", nodes=64)], None),
    ],
)
def test_what_fails_again_and_again_rests(attempts: list[Attempt], rest_seconds: float | None) -> None:
    """From the third failure in a row on, each time twice as long and half an hour at most; a success ends it.

    One for each pool that wanted no more machines than the two that are wanted now, and of those errors that are not
    the pool's own.
    """
    found = resting(attempts, NOW, 2)
    assert found == ({} if rest_seconds is None else {key_of(attempts[0]): NOW + timedelta(seconds=rest_seconds)})


def test_who_rests_is_asked_after_what_costs_little_more() -> None:
    """And is not left out, nor behind what costs much more."""
    found, _ = candidates(
        sky.PoolSpec.of(nodes=1),
        [Sold(CHEAP, (offer("a", 1.0), offer("b", 1.2), offer("c", 1.5), offer("d", 1.6), offer("e", 9.0)))],
    )
    rest = resting([attempt(n, kind=kind) for n in (1, 2, 3) for kind in ("a", "d")], NOW)
    assert [one.parts[0].offer.instance_type for one in order(found, rest)] == ["b", "c", "a", "d", "e"]
    assert order(found, {}) == found


def test_who_asks_stubbornly_puts_nothing_to_rest(folder: str) -> None:
    """All rounds of a pool that wants spot only count once: the next pool has spot."""

    class Scarce(Refusing):
        def launch(self, offer: Offer, count: int, tags: Mapping[str, str], startup: str) -> list[sky.Instance]:
            if offer.is_spot and self._error is not None:
                raise self._error
            return FakeProvider.launch(self, offer, count, tags, startup)

    scarce = Scarce(folder=folder, spot_is_sold=True).with_error(NoCapacity("none"))
    run([scarce], expected=NoCapacity, spot=sky.Spot.Always(retries=4, interval=0.0))
    with Ledger(default_url()) as ledger:
        tries = ledger.attempts()
        assert [(one.error, one.nodes) for one in tries] == [("NoCapacity", 2)] * 5
        assert resting(tries, datetime.now(UTC), 2) == {}


# ── what is raised ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("errors", "kind"),
    [
        ([CredentialsError("no"), CredentialsError("neither")], CredentialsError),
        ([QuotaExceeded("no"), QuotaExceeded("neither")], QuotaExceeded),
        ([QuotaExceeded("no"), NoCapacity("neither")], NoCapacity),
        ([CredentialsError("no"), ProviderFailed("neither")], NoCapacity),
        ([BudgetExceeded("no"), BudgetExceeded("neither")], BudgetExceeded),
        ([BudgetExceeded("no"), NoCapacity("neither")], NoCapacity),
        ([sky.BadRequest("no"), sky.NotYetSupported("neither")], sky.BadRequest),
        ([sky.BadRequest("no"), RateLimited("neither")], NoCapacity),
    ],
)
def test_all_reasons_are_told(errors: list[SkywardError], kind: type[SkywardError]) -> None:
    """One kind where all have it, else NoCapacity; every candidate with its reason."""
    refusals = [refusal(CHEAP, offer(), error.coded("x7"), 1.5) for error in errors]
    error = none_left(Requirements(), 2, refusals, errors)
    assert type(error) is kind
    assert "local/r-1 a: " in str(error)
    assert "no" in str(error)
    assert "neither" in str(error)
    assert error.code == "x7"
    if isinstance(error, NoCapacity):
        assert error.refusals == tuple(refusals)


def test_one_that_was_alone_says_it_itself() -> None:
    """The very error, with its refusal."""
    alone = QuotaExceeded("too many")
    assert none_left(Requirements(), 1, [refusal(CHEAP, offer(), alone, 0.1)], [alone]) is alone
    assert len(alone.refusals) == 1


def test_money_that_is_missing_is_told_as_such() -> None:
    """If it is in the way of all that fits, whoever else sells nothing; with the account and what is left of it."""
    errors = [BudgetExceeded("no", "team", Decimal(3)), BudgetExceeded("neither", "team", Decimal(2))]
    nothing = refusal(DEAR, None, NoCapacity("nothing fits"), 0.1)
    error = none_left(Requirements(), 1, [nothing, *(refusal(CHEAP, offer(), one, 0.1) for one in errors)], errors)
    assert isinstance(error, BudgetExceeded)
    assert (error.account, error.left_usd) == ("team", Decimal(2))
    assert "nothing fits" in str(error)
    assert "BudgetExceeded" in str(error)


# ── failing over ─────────────────────────────────────────────────────────────────────────────────────────────────────


class Elsewhere(FakeProvider):
    """Another cloud, whose machines are gone as soon as they were launched: the pool does not come up, at once."""

    name: ClassVar[str] = "elsewhere"
    called: str = "me"

    def account(self) -> str:
        return self.called

    def instances(self, pool_id: str | None = None) -> list[sky.Instance]:
        return []


class Refusing(FakeProvider):
    """Launches some machines, then refuses with whatever it is told to."""

    name: ClassVar[str] = "refusing"
    region: str = "nowhere-1"
    launches_first: int = 0
    _error: SkywardError | None = PrivateAttr(default=None)
    _offers_error: SkywardError | None = PrivateAttr(default=None)

    def with_error(self, error: SkywardError | None, of_offers: SkywardError | None = None) -> Refusing:
        self._error, self._offers_error = error, of_offers
        return self

    def offers(self, want: Requirements) -> list[Offer]:
        if self._offers_error is not None:
            raise self._offers_error
        return [one.model_copy(update={"region": self.region}) for one in super().offers(want)]

    def launch(self, offer: Offer, count: int, tags: Mapping[str, str], startup: str) -> list[sky.Instance]:
        if self._error is None:
            return super().launch(offer, min(count, self.launches_first), tags, startup)
        super().launch(offer, self.launches_first, tags, startup)
        raise self._error


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(teardown, "DEADLINE_SECONDS", 0.5)
    monkeypatch.setattr(teardown, "FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.setenv("SKYWARD_LEDGER", f"sqlite:///{tmp_path / 'ledger.db'}")
    return str(tmp_path)


def run(
    providers: list[sky.Provider], expected: type[BaseException] = sky.BootstrapFailed, **wishes: Any
) -> tuple[Any, Told]:
    """Open a pool that cannot come up; return the error and what was told."""
    seen = Told()
    pool = sky.ComputePool(provider=providers, on_event=seen, display="quiet", **{"nodes": 2, **wishes})
    with pytest.raises(expected) as caught:
        pool.open()
    return caught.value, seen


class Beside(Elsewhere):
    """Machines at 36 USD an hour, beside which 324 more are billed."""

    def offers(self, want: Requirements) -> list[Offer]:
        return [
            one.model_copy(update={"extras_per_hour": (Extra(name="disk", usd_per_hour=324.0),)})
            for one in super().offers(want)
        ]


def test_what_is_billed_beside_a_machine_is_set_aside_and_paid(folder: str) -> None:
    """Two machines for their first minute are 12 USD, and not 1.20; the receipt has a line for what was beside."""
    beside = Beside(folder=folder, price_per_hour=36.0)
    error, _ = run([beside], expected=BudgetExceeded, max_cost=11.0)
    assert "2 x 360.0 USD per hour cost" in str(error)
    assert beside.machines.launched == []
    run([beside], max_cost=40.0)
    with Ledger(default_url()) as ledger:
        (pool,) = [entry for entry in ledger.pools(include_ended=True) if ledger.intents(pool_id=entry.id)]
        told = receipt(ledger, pool.id)
    assert [one["price_per_hour_usd"] for one in told["resources"]] == [360.0, 360.0]
    assert told["lines"]["disk"] == pytest.approx(0.9 * told["total_cost_usd"], abs=1e-5)
    assert sum(told["lines"].values()) == pytest.approx(told["total_cost_usd"])
    assert told["total_cost_usd"] > 0


@pytest.mark.parametrize(
    "error",
    [
        NoCapacity("none").coded("InsufficientInstanceCapacity"),
        QuotaExceeded("limit").coded("VcpuLimitExceeded"),
        CredentialsError("who").coded("401"),
        ProviderFailed("down").coded("500"),
        sky.OfferGone("gone").coded("410"),
    ],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.slow
@pytest.mark.parametrize("first", [0, 1])
def test_the_next_provider_is_asked(folder: str, error: SkywardError, first: int) -> None:
    """Whatever the cheaper one refuses with; what it had launched all the same is gone before, and the event tells
    class, code and seconds.
    """
    cheap = Refusing(folder=folder + "/cheap", price_per_hour=1.0, launches_first=first).with_error(error)
    dear = Elsewhere(folder=folder + "/dear", price_per_hour=2.0)
    _, seen = run([dear, cheap])
    assert cheap.machines.running == {}
    assert dear.machines.launched == ["fake-0", "fake-1"]
    (refused,) = seen.of(sky.CandidateRefused)
    assert (refused.provider, refused.region, refused.instance_type, refused.error, refused.code) == (
        "refusing",
        "nowhere-1",
        "fake.1",
        type(error).__name__,
        error.code,
    )
    assert refused.seconds >= 0
    assert [event.provider for event in seen.of(sky.InstanceLaunching)] == ["refusing", "elsewhere"]
    with Ledger(default_url()) as ledger:
        (entry,) = ledger.pools(include_ended=True)
        assert entry.provider == dear.to_json()
        assert entry.provider_account == "me"
        assert entry.ended_at is not None
        assert [(one.provider, one.error, one.code) for one in ledger.attempts()] == [
            ("refusing", type(error).__name__, error.code),
            ("elsewhere", "", ""),
        ]
        assert not ledger.open_intents()


@pytest.mark.slow
@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("wishes", [{"max_cost": 5.0}, {"budget": "team"}], ids=str)
def test_a_lost_answer_keeps_no_money_from_the_next(folder: str, wishes: dict[str, Any], first: int) -> None:
    """All of it was set aside for the first candidate; when nothing of that one is left the second has it.

    What was spent meanwhile is not there any more.
    """
    with Ledger(default_url()) as ledger:
        ledger.set_account(Account("team", Decimal(5), Period.MONTH))
    lost = Refusing(folder=folder + "/lost", price_per_hour=20.0, launches_first=first).with_error(
        ProviderFailed("no answer")
    )
    dear = Elsewhere(folder=folder + "/dear", price_per_hour=22.0)
    run([lost, dear], **wishes)
    assert dear.machines.launched == ["fake-0", "fake-1"]


@pytest.mark.slow
def test_a_lost_answer_keeps_its_money_while_its_machines_may_run(folder: str) -> None:
    """The listing tells that one of them is still there: nobody else is asked, and nothing is granted twice."""

    class Staying(Refusing):
        def terminate(self, ids: Sequence[str]) -> None:
            """Accept, and do nothing."""

    lost = Staying(folder=folder + "/lost", price_per_hour=1.0, launches_first=1).with_error(
        ProviderFailed("no answer")
    )
    dear = Elsewhere(folder=folder + "/dear", price_per_hour=2.0)
    run([lost, dear], expected=sky.InstancesLeft, max_cost=5.0)
    assert dear.machines.launched == []


@pytest.mark.slow
def test_fewer_than_asked_for_are_given_back_before_the_next(folder: str) -> None:
    """Half a pool here and half of it elsewhere is no pool."""
    cheap = Refusing(folder=folder + "/cheap", price_per_hour=1.0, launches_first=1)
    dear = Elsewhere(folder=folder + "/dear", price_per_hour=2.0)
    _, seen = run([cheap, dear])
    assert (cheap.machines.launched, cheap.machines.running) == (["fake-0"], {})
    assert dear.machines.launched == ["fake-0", "fake-1"]
    assert "had 1 of 2" in seen.of(sky.CandidateRefused)[0].message


@pytest.mark.slow
def test_who_cannot_be_asked_is_left_out(folder: str) -> None:
    """An outage, or refused credentials, of the offers of one provider."""
    down = Refusing(folder=folder + "/down", price_per_hour=1.0).with_error(
        None, of_offers=CredentialsError("who are you").coded("401")
    )
    up = Elsewhere(folder=folder + "/up")
    _, seen = run([down, up])
    assert up.machines.launched == ["fake-0", "fake-1"]
    assert [(one.provider, one.instance_type, one.error, one.code) for one in seen.of(sky.CandidateRefused)] == [
        ("refusing", "", "CredentialsError", "401")
    ]


WRONG = sky.BadRequest("region nowhere-1 has no default subnet")


@pytest.mark.slow
@pytest.mark.parametrize(
    "errors",
    [{"error": WRONG}, {"error": None, "of_offers": sky.BadRequest("its SDK is not installed")}],
    ids=["launch", "offers"],
)
def test_a_bad_request_of_one_is_a_refusal_of_that_one(folder: str, errors: dict[str, Any]) -> None:
    """The others are asked; its other machines are not. It is raised if nobody else is there, or all say so."""

    class Twice(Refusing):
        def offers(self, want: Requirements) -> list[Offer]:
            (one,) = super().offers(want)
            return [one, one.model_copy(update={"instance_type": "fake.2"})]

    def bad(at: str) -> Refusing:
        return Twice(folder=folder + at, price_per_hour=1.0).with_error(**errors)

    up = Elsewhere(folder=folder + "/up", price_per_hour=2.0)
    _, seen = run([bad("/1"), up])
    assert up.machines.launched == ["fake-0", "fake-1"]
    assert [(one.provider, one.error) for one in seen.of(sky.CandidateRefused)] == [("refusing", "BadRequest")]
    with Ledger(default_url()) as ledger:
        assert [(one.provider, one.error) for one in ledger.attempts()] == [
            ("refusing", "BadRequest"),
            ("elsewhere", ""),
        ]
    alone, _ = run([bad("/2")], expected=sky.BadRequest)
    assert alone in (errors["error"], errors.get("of_offers"))
    both, seen = run([bad("/3"), bad("/4")], expected=sky.BadRequest)
    assert "/3" not in str(both)
    assert len(seen.of(sky.CandidateRefused)) == 2


@pytest.mark.slow
def test_money_for_one_is_money_for_another(folder: str) -> None:
    """The cheaper one bills ten minutes at once, which is more than there is; nothing was asked of it, and nothing is
    given back to it.
    """

    class TenMinutes(Refusing):
        name: ClassVar[str] = "ten"
        billing_minimum_seconds: ClassVar[int] = 600

        def instances(self, pool_id: str | None = None) -> list[sky.Instance]:
            raise AssertionError("nothing was asked of it")

    ten = TenMinutes(folder=folder + "/ten", price_per_hour=36.0)
    fits = Elsewhere(folder=folder + "/fits", price_per_hour=37.0)
    _, seen = run([ten, fits], max_cost=5.0)
    assert (ten.machines.launched, fits.machines.launched) == ([], ["fake-0", "fake-1"])
    assert [(one.provider, one.error) for one in seen.of(sky.CandidateRefused)] == [("ten", "BudgetExceeded")]
    with Ledger(default_url()) as ledger:
        assert [(one.provider, one.error) for one in ledger.attempts()] == [
            ("ten", "BudgetExceeded"),
            ("elsewhere", ""),
        ]
    error, _ = run(
        [ten, Elsewhere(folder=folder + "/dear", price_per_hour=3700.0)], expected=BudgetExceeded, max_cost=5.0
    )
    assert "billed 600 s at least" in str(error)
    assert "3700" in str(error)


def test_money_that_is_out_after_half_of_it_gives_that_half_back(folder: str) -> None:
    """The on-demand part of a mixed candidate was rented when the account turned out to have nothing for its spot
    part.
    """
    with Ledger(default_url()) as ledger:
        ledger.set_account(Account("team", Decimal(4), Period.MONTH))

    class Dear(FakeProvider):
        def offers(self, want: Requirements) -> list[Offer]:
            return [
                one.model_copy(update={"price_per_hour": 300.0}) if one.is_spot else one for one in super().offers(want)
            ]

    dear = Dear(folder=folder, price_per_hour=3.0, spot_is_sold=True)
    error, seen = run([dear], expected=BudgetExceeded, spot=0.5, budget="team")
    assert (dear.machines.launched, dear.machines.running) == (["fake-0"], {})
    assert [(one.spot, one.error) for one in seen.of(sky.CandidateRefused)] == [(True, "BudgetExceeded")]
    assert (error.account, error.left_usd < 4) == ("team", True)


@pytest.mark.parametrize("is_spot", [False, True])
def test_the_part_that_was_refused_is_blamed(folder: str, is_spot: bool) -> None:
    """Event, refusal and ledger name the same part of a mixed candidate."""

    class Half(FakeProvider):
        def launch(self, offer: Offer, count: int, tags: Mapping[str, str], startup: str) -> list[sky.Instance]:
            if offer.is_spot is is_spot:
                raise NoCapacity("none").coded("x")
            return super().launch(offer, count, tags, startup)

    error, seen = run([Half(folder=folder, spot_is_sold=True)], expected=NoCapacity, spot=0.5)
    with Ledger(default_url()) as ledger:
        written = [one.is_spot for one in ledger.attempts() if one.error]
    assert (
        [one.spot for one in seen.of(sky.CandidateRefused)]
        == [one.spot for one in error.refusals]
        == written
        == [is_spot]
    )


class Shelf:
    """A rental that launches nothing: each type answers with its error."""

    provider = CHEAP

    def __init__(self, answers: Mapping[str, SkywardError]) -> None:
        self.answers, self.asked = answers, list[str]()

    def launch(self, offer: Offer, *_: Any) -> list[sky.Instance]:
        self.asked.append(offer.instance_type)
        raise self.answers[offer.instance_type]


def test_a_replacement_that_is_too_dear_is_passed_over() -> None:
    """What stands after it may be paid for, and the lost one's own type may be free once that is gone."""
    a, b, c = offer("a", 1.0), offer("b", 9.0), offer("c", 2.0)
    shelf: Any = Shelf({"a": NoCapacity("none"), "b": BudgetExceeded("too dear"), "c": QuotaExceeded("none")})
    selection = Selection(sky.PoolSpec.of(), [CHEAP], shelf, emit=Told(), book=None)  # type: ignore[arg-type]
    selection.offers, selection.others = {0: a}, [a, b, c]
    ended = Ending("a-1", CHEAP)
    ended.over.set()
    with pytest.raises(NoCapacity):
        selection.rent_one(0, ended)
    assert shelf.asked == ["a", "b", "c", "a"]


def test_machines_left_by_a_launch_end_the_search(folder: str) -> None:
    """Nobody else is asked while one that was made may run."""
    left = Refusing(folder=folder + "/1", price_per_hour=1.0).with_error(sky.InstancesLeft("could not delete x", ["x"]))
    other = Elsewhere(folder=folder + "/2", price_per_hour=2.0)
    run([left, other], expected=sky.InstancesLeft)
    assert other.machines.launched == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wishes", "is_sold", "price", "is_told"),
    [
        ({}, False, 3.6, True),
        ({"spot": "if-available"}, False, 3.6, True),
        ({"spot": "never"}, False, 3.6, False),
        ({}, True, 3.6, False),
        ({}, False, 0.0, False),
    ],
)
def test_on_demand_for_want_of_spot_is_said_once(
    folder: str, caplog: pytest.LogCaptureFixture, wishes: dict[str, Any], is_sold: bool, price: float, is_told: bool
) -> None:
    """Where the choice was left to us; of machines that cost nothing there is nothing to say."""
    with caplog.at_level(logging.INFO, "skyward"):
        run([Elsewhere(folder=folder, spot_is_sold=is_sold, price_per_hour=price)], **wishes)
    said = [record.getMessage() for record in caplog.records if "has no spot offer" in record.getMessage()]
    assert said == (["elsewhere/nowhere-1 fake.1 has no spot offer: it is rented on demand"] if is_told else [])


@pytest.mark.slow
def test_machines_that_do_not_go_end_the_search(folder: str) -> None:
    """As long as the first may have machines nobody else is asked: InstancesLeft."""

    class Sticky(Refusing):
        def terminate(self, ids: Sequence[str]) -> None:
            raise ProviderFailed("it does not answer")

    cheap = Sticky(folder=folder + "/cheap", price_per_hour=1.0, launches_first=1).with_error(
        ProviderFailed("half of it")
    )
    dear = Elsewhere(folder=folder + "/dear", price_per_hour=2.0)
    run([cheap, dear], expected=sky.InstancesLeft)
    assert dear.machines.launched == []
    with Ledger(default_url()) as ledger:
        (entry,) = ledger.pools()
        assert entry.provider == cheap.to_json()


def test_when_all_refuse_all_reasons_are_raised(folder: str) -> None:
    """NoCapacity with the refusals in their order."""
    first = Refusing(folder=folder + "/1", price_per_hour=1.0).with_error(NoCapacity("none here").coded("A"))
    second = Refusing(folder=folder + "/2", price_per_hour=2.0, region="nowhere-2").with_error(
        QuotaExceeded("too many").coded("B")
    )
    error, seen = run([first, second], expected=NoCapacity)
    assert [(one.region, one.error, one.code) for one in error.refusals] == [
        ("nowhere-1", "NoCapacity", "A"),
        ("nowhere-2", "QuotaExceeded", "B"),
    ]
    assert [refused.message for refused in seen.of(sky.CandidateRefused)] == ["none here", "too many"]
    assert error.__cause__ is not None


def test_one_that_refuses_alone_is_not_its_own_cause(folder: str) -> None:
    """Who walks along the causes of an error comes to an end."""
    error, _ = run([Refusing(folder=folder).with_error(NoCapacity("none here").coded("A"))], expected=NoCapacity)
    assert str(error) == "none here"
    assert error.code == "A"
    assert error.__cause__ is None
    assert len(error.refusals) == 1


def test_spot_is_asked_for_again(folder: str) -> None:
    """`Spot.Always(retries, interval)`: all candidates so many times more."""
    scarce = Refusing(folder=folder, spot_is_sold=True).with_error(NoCapacity("none"))
    error, seen = run([scarce], expected=NoCapacity, spot=sky.Spot.Always(retries=2, interval=0.0))
    assert len(seen.of(sky.CandidateRefused)) == 3
    assert {one.spot for one in seen.of(sky.CandidateRefused)} == {True}
    assert len(error.refusals) == 1


class Fickle(Refusing):
    """Lists spot machines from its third answer on, or for ever not; `fails` with an outage until then."""

    asked_first: int = 2
    fails: bool = False
    _asked: list[Requirements] = PrivateAttr(default_factory=list)

    def may_sell_spot(self, want: Requirements) -> bool:
        return True

    def offers(self, want: Requirements) -> list[Offer]:
        self._asked.append(want)
        if len(self._asked) > self.asked_first:
            return super().offers(want)
        if self.fails:
            raise ProviderFailed("down").coded("503")
        return [one for one in super().offers(want) if not one.is_spot]

    def instances(self, pool_id: str | None = None) -> list[sky.Instance]:
        return []


@pytest.mark.slow
@pytest.mark.parametrize("fails", [False, True])
def test_spot_that_is_not_free_this_minute_is_asked_for_again(folder: str, fails: bool) -> None:
    """Offers are asked for anew in each round; an outage is not read as "not sold"."""
    fickle = Fickle(folder=folder, spot_is_sold=True, fails=fails, launches_first=2)
    _, seen = run([fickle], spot=sky.Spot.Always(retries=3, interval=0.0))
    assert len(fickle._asked) == 3
    assert [one.spot for one in seen.of(sky.InstanceProvisioned)] == [True, True]
    assert {one.error for one in seen.of(sky.CandidateRefused)} == {"ProviderFailed" if fails else "NoCapacity"}


def test_spot_that_never_becomes_free_is_no_capacity(folder: str) -> None:
    """With the reasons of the last round; a share of spot is asked for once."""
    fickle = Fickle(folder=folder, spot_is_sold=True, asked_first=99)
    plain = Elsewhere(folder=folder + "/plain")
    error, _ = run([fickle, plain], expected=NoCapacity, spot=sky.Spot.Always(retries=2, interval=0.0))
    assert (len(fickle._asked), len(error.refusals)) == (3, 2)
    run([fickle, plain], expected=NoCapacity, spot=0.5)
    assert len(fickle._asked) == 4
    run([plain], expected=sky.BadRequest, spot=sky.Spot.Always(retries=2, interval=9.0))


def test_what_nobody_can_do_is_refused_and_what_one_can_is_asked_of_it(folder: str) -> None:
    """A provider that never does what is asked for is left out, if another does it."""

    class NoApt(Refusing):
        refuses: ClassVar[Mapping[str, str]] = {"apt": "there is no apt; use an image"}

    cannot = NoApt(folder=folder + "/1", price_per_hour=1.0)
    can = Elsewhere(folder=folder + "/2")
    _, seen = run([cannot, can], image=sky.Image(apt=["jq"]))
    assert [event.provider for event in seen.of(sky.InstanceLaunching)] == ["elsewhere"]
    with pytest.raises(sky.NotYetSupported, match="there is no apt"):
        sky.ComputePool(provider=[cannot], image=sky.Image(apt=["jq"]))


def test_providers_are_asked_at_the_same_time(folder: str) -> None:
    """All of them have been asked before any has answered."""
    barrier = threading.Barrier(3, timeout=20)

    class Waiting(Refusing):
        def offers(self, want: Requirements) -> list[Offer]:
            barrier.wait()
            return super().offers(want)

    sold = placing.ask([Waiting(folder=folder, price_per_hour=float(n)) for n in range(1, 4)], Requirements())
    assert [one.offers[0].price_per_hour for one in sold] == [1.0, 2.0, 3.0]


@pytest.mark.slow
def test_one_that_failed_again_and_again_is_asked_later(folder: str) -> None:
    """The ledger remembers it for all pools that want as many machines."""
    cheap = Refusing(folder=folder + "/cheap", price_per_hour=1.0).with_error(NoCapacity("none"))
    dear = Elsewhere(folder=folder + "/dear", price_per_hour=1.4)
    for _ in range(3):
        run([cheap, dear])
    _, seen = run([cheap, dear])
    assert [event.provider for event in seen.of(sky.InstanceLaunching)] == ["elsewhere"]
    _, seen = run([cheap, dear], nodes=1)
    assert [event.provider for event in seen.of(sky.InstanceLaunching)] == ["refusing", "elsewhere"]


# ── several in a spec ────────────────────────────────────────────────────────────────────────────────────────────────


def test_several_providers_are_part_of_the_spec() -> None:
    """There and back through JSON; one in a list is that one; none, and the same twice, are refused."""
    spec = sky.PoolSpec.of(provider=["local", {"name": "local", "price_per_hour": 2.0}])
    assert spec.providers == (sky.Local(), sky.Local(price_per_hour=2.0))
    assert sky.PoolSpec.model_validate_json(spec.model_dump_json(exclude_unset=True)) == spec
    assert sky.PoolSpec.of(provider=[sky.Local()]).provider == sky.Local()
    assert sky.PoolSpec.of().providers == ()
    for wrong, words in (
        ([], "an empty list"),
        (["local", "local"], "named twice"),
        (["local", "locale"], "did you mean 'local'"),
    ):
        with pytest.raises(sky.BadRequest, match=words):
            sky.PoolSpec.of(provider=wrong)


def test_the_smallest_instance_is_selected() -> None:
    """Fewest accelerators, then CPUs, then memory; not the cheapest. NoCapacity tells why none."""
    offers = [
        offer("big", 1.0, vcpus=64, memory_gb=256, accelerator="H100", accelerators=8, accelerator_memory_gb=80),
        offer("right", 9.0, vcpus=48, memory_gb=128, accelerator="H100", accelerators=1, accelerator_memory_gb=80),
        offer("small", 0.5, vcpus=16, memory_gb=128, accelerator="H100", accelerators=1, accelerator_memory_gb=80),
        offer("none", 0.1, vcpus=64, memory_gb=256),
    ]
    assert sky.select_instance(offers, accelerator="H100", cpu=32, memory="128GB").instance_type == "right"
    assert sky.select_instance(offers, cpu=50).instance_type == "none"
    with pytest.raises(NoCapacity, match="small has 16 CPUs"):
        sky.select_instance(offers, accelerator="H100", cpu=100)


def test_a_form_factor_is_met_where_it_is_told() -> None:
    """Asked for, an offer that tells none is not taken for it."""
    wanted = Requirements(accelerator=sky.Accelerator.NVIDIA.H100(form_factor="SXM"))
    chip = {"accelerator": "H100", "accelerators": 1, "accelerator_memory_gb": 80}
    assert [matches(offer(**chip, form_factor=form), wanted) for form in ("SXM", "PCIe", None)] == [
        None,
        "has them as PCIe",
        "does not report their form factor",
    ]


@pytest.mark.slow
def test_many_offers_are_ranked() -> None:
    """Of 50,000 as many as anybody would try, the cheapest first. How quickly is for the benchmarks to tell."""
    offers = tuple(offer(f"t{n % 500}", 1 + (n * 7919) % 50_000 / 1000, region=f"r-{n // 500}") for n in range(50_000))
    found, _ = candidates(sky.PoolSpec.of(nodes=2, spot="never"), [Sold(CHEAP, offers)])
    assert len(found) == placing.MOST_CANDIDATES
    assert [one.price_per_hour for one in found] == [
        2 * price for price in sorted(offer.price_per_hour for offer in offers)[: len(found)]
    ]
