"""Candidates for a pool's machines: their order, those that are delayed, and the error if all refuse."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any, ClassVar

import pytest

import skyward_core as sky
from skyward_core.errors import (
    BudgetExceeded,
    CredentialsError,
    NoCapacity,
    OfferGone,
    ProviderFailed,
    QuotaExceeded,
    RateLimited,
    Refusal,
    SkywardError,
)
from skyward_core.ledger.rows import Attempt
from skyward_core.machines.offers import Extra, Offer, Requirements, matches
from skyward_core.providers.base import rank, select_instance
from skyward_core.provisioning import candidates as placing
from skyward_core.provisioning.candidates import (
    ProviderOffers,
    candidates,
    key_of,
    may_come,
    none_left,
    order,
    own_mistake,
    refusal,
    resting,
)
from tests.offers import offer

NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)
CHEAP, DEAR = sky.Local(price_per_hour=1.0), sky.Local(price_per_hour=2.0)


def both(kind: str, price: float, spot_price: float, **fields: Any) -> tuple[Offer, Offer]:
    return offer(kind, price, **fields), offer(kind, spot_price, is_spot=True, on_demand_price_per_hour=price, **fields)


def in_short(found: Sequence[placing.Candidate]) -> list[list[tuple[str, bool, int, int]]]:
    return [
        [(part.offer.instance_type, part.offer.is_spot, part.count, part.first_rank) for part in one.parts]
        for one in found
    ]


def types_of(found: Sequence[placing.Candidate]) -> list[str]:
    return [one.parts[0].offer.instance_type for one in found]


# ── candidates ───────────────────────────────────────────────────────────────────────────────────────────────────────

SPOT = [[("b", True, 2, 0)], [("a", True, 2, 0)]]
ON_DEMAND = [[("c", False, 2, 0)], [("a", False, 2, 0)], [("b", False, 2, 0)]]
HALF = [[("b", False, 1, 0), ("b", True, 1, 1)], [("a", False, 1, 0), ("a", True, 1, 1)]]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, SPOT + ON_DEMAND),
        ({"spot": "if-available"}, SPOT + ON_DEMAND),
        ({"spot": "always"}, SPOT),
        ({"spot": "never"}, ON_DEMAND),
        ({"spot": 0.5}, HALF),
    ],
    ids=str,
)
def test_the_spot_strategy_determines_the_candidates(options: dict[str, Any], expected: list[Any]) -> None:
    """The cheapest is first. In a mixed pool the on-demand part has the lower ranks, and its price counts."""
    offers = (*both("a", 3.0, 1.0), *both("b", 3.1, 0.5), offer("c", 2.0))
    found, refusals = candidates(sky.PoolSpec.of(nodes=2, **options), [ProviderOffers(CHEAP, offers, "acc")])
    assert (in_short(found), refusals) == (expected, [])
    assert {one.account for one in found} == {"acc"}
    assert [one.price_per_hour for one in found] == sorted(one.price_per_hour for one in found)


def test_all_providers_and_regions_are_ranked_together() -> None:
    """By the price of all machines; at equal prices the smaller machine is first."""
    sold = [
        ProviderOffers(CHEAP, (offer("x", 2.0, vcpus=8), offer("small", 0.1, vcpus=2))),
        ProviderOffers(DEAR, (offer("y", 2.0), offer("z", 1.5, region="r-2"), offer("z", 1.4, region="r-2"))),
    ]
    found, _ = candidates(sky.PoolSpec.of(nodes=1, cpu=4), sold)
    assert [
        (one.provider, one.region, one.parts[0].offer.instance_type, one.price_per_hour) for one in found
    ] == [(DEAR, "r-2", "z", 1.4), (DEAR, "r-2", "z", 1.5), (DEAR, "r-1", "y", 2.0), (CHEAP, "r-1", "x", 2.0)]  # fmt: skip


def test_only_the_cheapest_of_many_offers_are_ranked() -> None:
    offers = tuple(offer(f"t{n}", 1 + n * 7919 % 1000 / 1000) for n in range(placing.MOST_CANDIDATES + 100))
    found, _ = candidates(sky.PoolSpec.of(nodes=2, spot="never"), [ProviderOffers(CHEAP, offers)])
    cheapest = sorted(one.price_per_hour for one in offers)[: placing.MOST_CANDIDATES]
    assert [one.price_per_hour for one in found] == [2 * price for price in cheapest]


@pytest.mark.parametrize(
    ("options", "limit", "left"),
    [
        ({"spot": "never"}, 2.0, [1.0, 2.0]),  # a candidate that costs the limit is allowed
        ({"nodes": 2}, 3.0, [2.0, 3.0]),  # the limit is for all machines
        ({"nodes": (2, 8)}, 2.9, [2.0]),  # an elastic pool opens with its least number
        ({"nodes": 2, "spot": 0.5}, 3.9, []),  # a mixed pool costs both prices
        ({"nodes": 2, "spot": 0.5}, 4.0, [4.0]),
    ],
    ids=str,
)
def test_candidates_above_the_hourly_limit_are_left_out(
    options: dict[str, Any], limit: float, left: list[float]
) -> None:
    sold = [ProviderOffers(CHEAP, (offer("a", 1.0), offer("b", 2.0), *both("c", 2.5, 1.5)))]
    found, refusals = candidates(sky.PoolSpec.of(max_hourly_cost=limit, **options), sold)
    assert ([one.price_per_hour for one in found], bool(refusals)) == (left, not left)


def test_a_refusal_for_the_hourly_limit_names_the_cheapest_and_what_to_write() -> None:
    """Of each provider; the number that is to be written is enough."""
    spec = sky.PoolSpec.of(nodes=3, max_hourly_cost=2.5)
    cheap, dear = (offer("a", 1.1), offer("b", 4.0)), (offer("c", 0.333, is_spot=True), offer("d", 0.9))
    found, refusals = candidates(spec, [ProviderOffers(CHEAP, cheap), ProviderOffers(DEAR, dear)])
    assert [one.price_per_hour for one in found] == [pytest.approx(0.999)]
    ((error, message),) = [(one.error, one.message) for one in refusals]
    assert error == "NoCapacity"
    assert message == (
        "the cheapest that fits costs $3.30 per hour (3 x local/r-1 a), and max_hourly_cost=2.5 is less: write"
        " max_hourly_cost=3.3, or ask for fewer or cheaper machines"
    )
    allowed, _ = candidates(spec.with_(max_hourly_cost=3.3), [ProviderOffers(CHEAP, cheap)])
    assert types_of(allowed) == ["a"]


def test_extra_costs_of_a_machine_count() -> None:
    """In the order, in the limit, and in the choice between two prices of a type."""
    disk = (Extra(name="disk", usd_per_hour=0.625, source="a page", checked="2026-11-22"),)
    offers = (offer("a", 1.125, extras_per_hour=disk), offer("b", 1.5), offer("b", 1.25, extras_per_hour=disk))
    found, _ = candidates(sky.PoolSpec.of(nodes=2), [ProviderOffers(CHEAP, offers)])
    assert [*zip(types_of(found), [one.price_per_hour for one in found], strict=True)] == [
        ("b", 3.0),
        ("a", 3.5),
        ("b", 3.75),
    ]
    limited = Requirements(max_price_per_hour=1.5)
    assert [one.instance_type for one in rank(offers, limited)] == ["b"]
    assert matches(offers[0], limited) == "costs $1.75 an hour with all that is billed beside it"
    assert select_instance(offers).total_per_hour == 1.5


def test_a_provider_without_candidates_is_reported_with_the_reason() -> None:
    sold = [
        ProviderOffers(CHEAP, error=ProviderFailed("down").coded("503"), seconds=2.0),
        ProviderOffers(DEAR, (offer("tiny", vcpus=1),), seconds=1.0),
        ProviderOffers(CHEAP, (offer("od", 1.0),)),
        ProviderOffers(DEAR, both("s", 3, 1)),
    ]
    found, refusals = candidates(sky.PoolSpec.of(cpu=2, spot="always"), sold)
    assert in_short(found) == [[("s", True, 1, 0)]]
    assert refusals[0] == Refusal("local", "", "", False, "ProviderFailed", "503", "down", 2.0)  # noqa: FBT003 - spot
    assert "tiny has 1 CPUs" in refusals[1].message
    assert "no spot machine" in refusals[2].message


def test_a_region_that_fails_is_reported_beside_the_offers_of_the_others() -> None:
    """It might sell what the pool requires, so without spot elsewhere this is no BadRequest."""
    unasked = {"far": CredentialsError("not enabled").coded("AuthFailure")}
    part = ProviderOffers(CHEAP, (offer("a"),), seconds=2.0, unasked=unasked)
    found, refusals = candidates(sky.PoolSpec.of(), [part])
    assert in_short(found) == [[("a", False, 1, 0)]]
    assert refusals == [Refusal("local", "far", "", False, "CredentialsError", "AuthFailure", "not enabled", 2.0)]  # noqa: FBT003 - spot
    assert [str(error) for error in part.errors] == ["not enabled"]
    assert candidates(sky.PoolSpec.of(spot="always"), [part])[0] == []


class Market(sky.Local):
    """A provider that lists spot machines only while one is available."""

    name: ClassVar[str] = "market"

    def may_sell_spot(self, want: Requirements) -> bool:
        return True


def test_spot_that_no_provider_sells_is_a_bad_request() -> None:
    """Unless no offer fits at all, or a provider has not answered, or may sell spot later."""
    sold = ProviderOffers(CHEAP, (offer(),))
    with pytest.raises(sky.BadRequest, match="if-available"):
        candidates(sky.PoolSpec.of(spot=0.5, nodes=2), [sold])
    assert candidates(sky.PoolSpec.of(spot="always", cpu=99), [sold])[0] == []
    for other, words in (
        (ProviderOffers(DEAR, error=ProviderFailed("down").coded("503")), "down"),
        (ProviderOffers(DEAR, error=CredentialsError("who")), "who"),
        (ProviderOffers(Market(), (offer(),)), "no spot machine free"),
        (ProviderOffers(Market()), "there are no offers at all"),
    ):
        found, refusals = candidates(sky.PoolSpec.of(spot="always"), [sold, other])
        assert found == []
        assert "sells no spot machine" in refusals[0].message
        assert words in refusals[1].message


def test_some_providers_list_spot_only_while_it_is_available() -> None:
    """AWS always lists a spot price. RunPod sells no spot, DigitalOcean sells three chips as spot (fact sheet)."""
    want = Requirements(accelerator=sky.Accelerator.NVIDIA.H100())
    clouds = (sky.RunPod(), sky.AWS(), sky.DigitalOcean(), sky.Verda(), sky.VastAI())
    assert [cloud.may_sell_spot(want) for cloud in clouds] == [False, False, False, True, True]
    assert sky.DigitalOcean().may_sell_spot(Requirements(accelerator=sky.Accelerator.NVIDIA.B300()))
    assert sky.DigitalOcean().may_sell_spot(Requirements(instance_type="gpu-mi350x1-288gb"))


def gpus(kind: str, price: float, chips: int, **fields: Any) -> Offer:
    return offer(kind, price, accelerator="H100", accelerators=chips, accelerator_memory_gb=80, **fields)


FOUR_CHIPS = sky.Accelerator.NVIDIA.H100(count=4)


@pytest.mark.parametrize(
    ("options", "types"),
    [
        ({"accelerator": "H100"}, ["one", "two", "one", "only-eight"]),  # the last one is too dear
        ({"accelerator": "H100", "spot": "always"}, ["one"]),
        ({"accelerator": "H100", "spot": 0.5, "nodes": 2}, ["one"]),
        ({"accelerator": FOUR_CHIPS}, ["eight", "only-eight", "only-eight", "eight"]),
        ({"machine": "eight"}, ["eight", "eight"]),
        ({"accelerator": "H100", "machine": "eight"}, ["eight", "eight"]),
    ],
    ids=str,
)
def test_offers_with_more_chips_than_required(options: dict[str, Any], types: list[str]) -> None:
    """They are used if they cost no more than those with the fewest chips, not because those are sold out."""
    sold = [
        ProviderOffers(
            CHEAP,
            (
                gpus("one", 4.0, 1),
                gpus("eight", 31.0, 8),
                gpus("two", 3.5, 2),
                gpus("one", 1.5, 1, is_spot=True),
                gpus("eight", 9.0, 8, is_spot=True),
            ),
        ),
        ProviderOffers(DEAR, (gpus("only-eight", 16.0, 8), gpus("only-eight", 17.0, 8, region="r-2"))),
    ]
    assert types_of(candidates(sky.PoolSpec.of(**options), sold)[0]) == types
    free = [ProviderOffers(CHEAP, (gpus("one", 0.0, 1), gpus("eight", 0.0, 8)))]
    assert len(candidates(sky.PoolSpec.of(accelerator="H100"), free)[0]) == 2


SMALL, LARGE, ONE_CHIP, EIGHT_CHIPS = (
    offer("s", 0.036),
    offer("l", 0.25, vcpus=16),
    gpus("1x", 0.1, 1),
    gpus("8x", 24, 8),
)


@pytest.mark.parametrize(
    ("options", "offers", "types"),
    [
        # machines with chips are no fallback for machines without
        ({"max_price_ratio": 1000}, (SMALL, LARGE, ONE_CHIP, EIGHT_CHIPS), ["s", "l"]),
        ({"cpu": 16}, (SMALL, ONE_CHIP.model_copy(update={"vcpus": 64.0})), []),
        # unless the type is named, the provider sells nothing else, or they cost nothing
        ({"machine": "8x"}, (SMALL, LARGE, ONE_CHIP, EIGHT_CHIPS), ["8x"]),
        ({}, (ONE_CHIP, EIGHT_CHIPS), ["1x"]),
        ({}, (SMALL, gpus("own", 0.0, 1)), ["own", "s"]),
        # nothing costs more than four times the first one, unless the user has written a limit
        ({}, (SMALL, LARGE), ["s"]),
        ({"max_price_ratio": 7}, (SMALL, LARGE), ["s", "l"]),
        ({"max_hourly_cost": 1}, (SMALL, LARGE), ["s", "l"]),
        ({"accelerator": "H100"}, (ONE_CHIP, gpus("1x-dear", 0.41, 1), gpus("1x-other", 0.4, 1)), ["1x", "1x-other"]),
        # a large discount of a spot machine is no reason to refuse others; what costs nothing is no measure
        ({}, both("a", 1.0, 0.1), ["a", "a"]),
        ({}, (offer("free", 0.0), SMALL, LARGE), ["free", "s"]),
    ],
    ids=str,
)
def test_no_candidate_is_of_another_kind_or_many_times_dearer(
    options: dict[str, Any], offers: tuple[Offer, ...], types: list[str]
) -> None:
    ranked, _ = candidates(sky.PoolSpec.of(**options), [ProviderOffers(CHEAP, offers)])
    assert types_of([candidate for candidate in ranked if not candidate.too_dear]) == types


def test_the_cheapest_of_each_provider_that_is_too_dear_says_what_to_write() -> None:
    dear = tuple(offer(f"dear-{price}", price) for price in (20.0, 5.001, 30.0))
    spec = sky.PoolSpec.of(nodes=2)
    ranked, refusals = candidates(
        spec, [ProviderOffers(CHEAP, (offer("a", 1.0), *dear)), ProviderOffers(DEAR, (offer("b", 9.0),))]
    )
    assert refusals == []
    assert [candidate.too_dear for candidate in ranked] == [
        "",
        (
            "2 x local/r-1 dear-5.001 costs $10.00 per hour, more than 4 times the $2.00 of 2 x local/r-1 a: to allow it,"
            " write max_hourly_cost=10.01"
        ),
        (
            "2 x local/r-1 b costs $18.00 per hour, more than 4 times the $2.00 of 2 x local/r-1 a: to allow it, write"
            " max_hourly_cost=18"
        ),
    ]
    allowed, _ = candidates(spec.with_(max_hourly_cost=10.01), [ProviderOffers(CHEAP, dear)])
    assert types_of(allowed) == ["dear-5.001"]


def test_a_machine_with_an_accelerator_that_alone_fits_is_named() -> None:
    large = EIGHT_CHIPS.model_copy(update={"vcpus": 96.0})
    _, (refused,) = candidates(sky.PoolSpec.of(cpu=64), [ProviderOffers(CHEAP, (SMALL, large))])
    assert refused.message == (
        "nothing without an accelerator fits 64 CPUs. local/r-1 8x fits, with 8 x H100 at $24.00 an hour: to rent it"
        " all the same, write machine='8x'"
    )


# ── earlier failures ─────────────────────────────────────────────────────────────────────────────────────────────────


def attempt(seconds_ago: float, error: str = "NoCapacity", kind: str = "a", pool: str = "", nodes: int = 1) -> Attempt:
    """Return an attempt. Without a pool id it belongs to a new pool."""
    at = NOW - timedelta(seconds=seconds_ago)
    return Attempt(
        pool or f"p{seconds_ago}", at, "local", "r-1", kind, is_spot=False, seconds=1.0, error=error, nodes=nodes
    )


OTHER_CAUSES, OWN_CAUSES = (
    ("ProviderFailed", "RateLimited", "QuotaExceeded"),
    ("BadRequest", "CredentialsError", "OfferGone", "BudgetExceeded", "NotYetSupported"),
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
        ([attempt(n, error) for n, error in enumerate(OTHER_CAUSES)], 60),
        ([attempt(n, error) for error in OWN_CAUSES for n in range(3)], None),
        ([attempt(3), attempt(2, "BadRequest"), attempt(1), attempt(0)], 60),
        ([attempt(n, nodes=3) for n in range(9)], None),
        ([attempt(n, nodes=2) for n in range(3)], 60),
        ([*(attempt(n, nodes=2) for n in (4, 3, 2)), attempt(1, error="", nodes=64)], None),
    ],
)
def test_a_candidate_that_fails_repeatedly_is_delayed(attempts: list[Attempt], rest_seconds: float | None) -> None:
    """From the third failure in a row on, twice as long each time, up to half an hour. A success ends it.

    Each pool counts once; only pools that needed at most as many machines, and errors with another cause than the pool.
    """
    found = resting(attempts, NOW, 2)
    assert found == ({} if rest_seconds is None else {key_of(attempts[0]): NOW + timedelta(seconds=rest_seconds)})


def test_a_delayed_candidate_follows_those_that_cost_little_more() -> None:
    offers = (offer("a", 1.0), offer("b", 1.2), offer("c", 1.5), offer("d", 1.6), offer("e", 9.0))
    found, _ = candidates(sky.PoolSpec.of(nodes=1), [ProviderOffers(CHEAP, offers)])
    rest = resting([attempt(n, kind=kind) for n in (1, 2, 3) for kind in ("a", "d")], NOW)
    assert types_of(order(found, rest)) == ["b", "c", "a", "d", "e"]
    assert order(found, {}) == found


# ── errors ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("first", "second", "kind"),
    [
        (CredentialsError, CredentialsError, CredentialsError),
        (QuotaExceeded, QuotaExceeded, QuotaExceeded),
        (QuotaExceeded, NoCapacity, NoCapacity),
        (CredentialsError, ProviderFailed, NoCapacity),
        (BudgetExceeded, BudgetExceeded, BudgetExceeded),
        (BudgetExceeded, NoCapacity, NoCapacity),
        (sky.BadRequest, sky.NotYetSupported, sky.BadRequest),
        (sky.BadRequest, RateLimited, NoCapacity),
    ],
)
def test_the_error_has_all_reasons(
    first: type[SkywardError], second: type[SkywardError], kind: type[SkywardError]
) -> None:
    """If all reasons have one type, the error has that type, else it is NoCapacity."""
    errors = [first("no"), second("neither")]
    refusals = [refusal(CHEAP, offer(), error.coded("x7"), 1.5) for error in errors]
    error = none_left([Requirements()], 2, refusals, errors)
    assert (type(error), error.code) == (kind, "x7")
    assert all(words in str(error) for words in ("local/r-1 a: ", "no", "neither"))
    if isinstance(error, NoCapacity):
        assert error.refusals == tuple(refusals)


def test_missing_money_is_reported_as_such() -> None:
    """All offers that fit cost too much, and other providers sell nothing. The error has the account and its balance."""
    errors = [BudgetExceeded("no", "team", Decimal(3)), BudgetExceeded("neither", "team", Decimal(2))]
    nothing = refusal(DEAR, None, NoCapacity("nothing fits"), 0.1)
    error = none_left([Requirements()], 1, [nothing, *(refusal(CHEAP, offer(), one, 0.1) for one in errors)], errors)
    assert isinstance(error, BudgetExceeded)
    assert (error.account, error.left_usd) == ("team", Decimal(2))
    assert "nothing fits" in str(error)


def mistaken(words: str, code: str = "") -> NoCapacity:
    error = NoCapacity("no").coded(code)
    error.mistake = words
    return error


def test_equal_refusals_that_may_be_about_the_request_are_an_error_of_the_request() -> None:
    """Only the last ones count. Another error among them, or another message, says that it may be capacity."""
    same, other = mistaken("no such disk", "500"), mistaken("no such zone")
    error = own_mistake([other, same, same, same])
    assert type(error) is sky.BadRequest
    assert (error.code, "3 offers" in str(error)) == ("500", True)
    assert own_mistake([same], 1) is not None
    for errors in ([], [same, same], [same, other, same], [same, NoCapacity("no"), same], [same, ProviderFailed("x")]):
        assert own_mistake(errors) is None
        assert own_mistake(errors, len(errors)) is None or errors == [same, same]


def test_another_round_may_succeed_after_errors_that_pass() -> None:
    """Or with a provider that has no spot machine just now. It may not after errors that stay."""
    want, market = Requirements(), Market()
    for error in (NoCapacity("none"), ProviderFailed("down"), OfferGone("gone")):
        assert may_come([CHEAP], [], want, [CredentialsError("who"), error])
    assert not may_come([CHEAP], [], want, [CredentialsError("who")])
    assert may_come([CHEAP, market], [], want, [])
    found, _ = candidates(sky.PoolSpec.of(), [ProviderOffers(market, (offer(),))])
    assert not may_come([CHEAP, market], found, want, [])


def test_several_providers_are_part_of_the_spec() -> None:
    """Also after JSON. A list of one provider equals that provider."""
    spec = sky.PoolSpec.of(provider=["local", {"name": "local", "price_per_hour": 2.0}])
    assert spec.providers == (sky.Local(), sky.Local(price_per_hour=2.0))
    assert sky.PoolSpec.model_validate_json(spec.model_dump_json(exclude_unset=True)) == spec
    assert sky.PoolSpec.of(provider=[sky.Local()]).provider == sky.Local()
    for name in ("VastAI", "vastai", "Vast.ai"):
        assert sky.PoolSpec.of(provider=name).provider == sky.VastAI()
    assert sky.PoolSpec.of().providers == ()
    wrong: dict[str, list[str]] = {
        "an empty list": [],
        "named twice": ["local"] * 2,
        "did you mean 'local'": ["locale"],
    }
    for words, names in wrong.items():
        with pytest.raises(sky.BadRequest, match=words):
            sky.PoolSpec.of(provider=names if len(names) != 1 else ["local", *names])
