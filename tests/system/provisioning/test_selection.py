"""Renting from candidates: the order of the tries, the machines of a refused candidate, and the money."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
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
    SkywardError,
)
from skyward_core.ledger.ledger import Ledger, default_url
from skyward_core.ledger.receipt import receipt
from skyward_core.ledger.rows import Account, Period
from skyward_core.machines.offers import Extra, Offer, Requirements
from skyward_core.provisioning import candidates as placing
from tests.conftest import RecordedEvents
from tests.fakes import FakeProvider


class Elsewhere(FakeProvider):
    """Another cloud. Its machines are gone just after their launch, so the pool fails at once."""

    name: ClassVar[str] = "elsewhere"

    def account(self) -> str:
        return "me"

    def instances(self, pool_id: str | None = None) -> list[sky.Instance]:
        return []


class Refusing(FakeProvider):
    """A provider that launches some machines and then refuses with the given error."""

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
        launched = super().launch(offer, min(count, self.launches_first), tags, startup)
        if self._error is not None:
            raise self._error
        return launched


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("SKYWARD_LEDGER", f"sqlite:///{tmp_path / 'ledger.db'}")
    return str(tmp_path)


def run(
    providers: list[sky.Provider], expected: type[BaseException] = sky.BootstrapFailed, **options: Any
) -> tuple[Any, RecordedEvents]:
    """Open a pool that fails. Return the error and the collected events."""
    seen = RecordedEvents()
    pool = sky.ComputePool(provider=providers, on_event=seen, display="quiet", **{"nodes": 2, **options})
    with pytest.raises(expected) as caught:
        pool.open()
    return caught.value, seen


def attempts() -> list[tuple[str, str]]:
    with Ledger(default_url()) as ledger:
        return [(one.provider, one.error) for one in ledger.attempts()]


class Beside(Elsewhere):
    """A provider of machines at 36 USD an hour, with extra costs of 324 USD an hour."""

    def offers(self, want: Requirements) -> list[Offer]:
        (one,) = super().offers(want)
        extras = (Extra(name="disk", usd_per_hour=324.0),)
        return [one.model_copy(update={"extras_per_hour": extras, "on_demand_price_per_hour": one.price_per_hour})]


def test_extra_costs_of_machines_are_reserved_and_billed(folder: str) -> None:
    """Two machines for their first minute are 12 USD, not 1.20. The receipt has a line for the extra costs."""
    beside = Beside(folder=folder)
    error, _ = run([beside], expected=BudgetExceeded, max_cost=11.0)
    assert "2 x 360.0 USD per hour cost" in str(error)
    assert beside.machines.launched == []
    _, seen = run([beside], max_cost=40.0)
    assert [event.price_on_demand for event in seen.of(sky.InstanceProvisioned)] == [360.0, 360.0]
    with Ledger(default_url()) as ledger:
        (pool,) = [entry for entry in ledger.pools(include_ended=True) if ledger.intents(pool_id=entry.id)]
        bill = receipt(ledger, pool.id)
    assert [one["price_per_hour_usd"] for one in bill["resources"]] == [360.0, 360.0]
    assert bill["lines"]["disk"] == pytest.approx(0.9 * bill["total_cost_usd"], abs=1e-5)
    assert sum(bill["lines"].values()) == pytest.approx(bill["total_cost_usd"])
    assert bill["total_cost_usd"] > 0


# ── a refusal ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("error", "first"),
    [
        (NoCapacity("none").coded("InsufficientInstanceCapacity"), 0),
        (ProviderFailed("down").coded("500"), 1),
        (None, 1),
    ],
    ids=["refused", "lost answer", "incomplete"],
)
def test_after_a_refusal_the_next_provider_is_tried(folder: str, error: SkywardError | None, first: int) -> None:
    """Machines that the cheaper one has launched anyway are terminated first: a pool's come from one candidate."""
    cheap = Refusing(folder=folder + "/cheap", price_per_hour=1.0, launches_first=first).with_error(error)
    dear = Elsewhere(folder=folder + "/dear", price_per_hour=2.0)
    _, seen = run([dear, cheap])
    assert (len(cheap.machines.launched), cheap.machines.running) == (first, {})
    assert dear.machines.launched == ["fake-0", "fake-1"]
    (refused,) = seen.of(sky.CandidateRefused)
    name, code = ("NoCapacity", "") if error is None else (type(error).__name__, error.code)
    assert (refused.provider, refused.region, refused.instance_type) == ("refusing", "nowhere-1", "fake.1")
    assert (refused.error, refused.code, refused.seconds >= 0) == (name, code, True)
    assert error is not None or "had 1 of 2" in refused.message
    assert [event.provider for event in seen.of(sky.InstanceLaunching)] == ["refusing", "elsewhere"]
    assert attempts() == [("refusing", name), ("elsewhere", "")]
    with Ledger(default_url()) as ledger:
        (entry,) = ledger.pools(include_ended=True)
        assert (entry.written_provider, entry.provider_account) == (dear.to_json(), "me")
        assert entry.ended_at is not None
        assert not ledger.open_intents()


class Keeping(Refusing):
    """A provider that accepts terminations and does nothing."""

    gone_deadline_seconds: ClassVar[float] = 0.5

    def terminate(self, ids: Sequence[str]) -> None:
        """Accept, and do nothing."""


class Sticky(Keeping):
    """A provider that refuses terminations."""

    def terminate(self, ids: Sequence[str]) -> None:
        raise ProviderFailed("it does not answer")


@pytest.mark.parametrize(
    ("kind", "first", "error"),
    [
        (Keeping, 1, ProviderFailed("no answer")),
        (Sticky, 1, ProviderFailed("half of it")),
        (Refusing, 0, sky.InstancesLeft("could not delete x", ["x"])),
    ],
)
def test_while_a_machine_of_a_candidate_may_run_no_other_is_tried(
    folder: str, kind: type[Refusing], first: int, error: SkywardError
) -> None:
    """No money is committed twice. The ledger's entry names the provider that has the machine."""
    cheap = kind(folder=folder + "/cheap", price_per_hour=1.0, launches_first=first).with_error(error)
    dear = Elsewhere(folder=folder + "/dear", price_per_hour=2.0)
    run([cheap, dear], expected=sky.InstancesLeft, max_cost=5.0)
    assert dear.machines.launched == []
    with Ledger(default_url()) as ledger:
        assert [entry.written_provider for entry in ledger.pools(include_ended=True)] == [cheap.to_json()]


WRONG = sky.BadRequest("region nowhere-1 has no default subnet")


@pytest.mark.parametrize(
    "errors",
    [{"error": WRONG}, {"error": None, "of_offers": sky.BadRequest("its SDK is not installed")}],
    ids=["launch", "offers"],
)
def test_a_bad_request_of_one_provider_is_a_refusal_of_that_provider(folder: str, errors: dict[str, Any]) -> None:
    """Its other offers are not tried. BadRequest is raised if there is no other provider, or if all raise it."""

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
    assert attempts() == [("refusing", "BadRequest"), ("elsewhere", "")]
    alone, _ = run([bad("/2")], expected=sky.BadRequest)
    assert alone in (errors["error"], errors.get("of_offers"))
    _, seen = run([bad("/3"), bad("/4")], expected=sky.BadRequest)
    assert len(seen.of(sky.CandidateRefused)) == 2


def test_if_all_candidates_refuse_the_error_has_all_refusals(folder: str) -> None:
    """In their order. The error of a single candidate is not its own cause: a loop over the causes ends."""
    first = Refusing(folder=folder + "/1", price_per_hour=1.0).with_error(NoCapacity("none here").coded("A"))
    second = Refusing(folder=folder + "/2", price_per_hour=2.0, region="nowhere-2").with_error(
        QuotaExceeded("too many").coded("B")
    )
    asking = Refusing(folder=folder + "/3").with_error(None, of_offers=CredentialsError("who are you").coded("401"))
    error, seen = run([first, second, asking], expected=NoCapacity)
    assert {(one.region, one.error, one.code) for one in error.refusals} == {
        ("nowhere-1", "NoCapacity", "A"),
        ("nowhere-2", "QuotaExceeded", "B"),
        ("", "CredentialsError", "401"),
    }
    assert {"none here", "too many"} <= {refused.message for refused in seen.of(sky.CandidateRefused)}
    assert error.__cause__ is not None
    alone, _ = run([first], expected=NoCapacity)
    assert (str(alone), alone.code, alone.__cause__, len(alone.refusals)) == ("none here", "A", None, 1)


def test_a_provider_that_cannot_fulfil_a_spec_is_left_out(folder: str) -> None:
    """Another provider can. If no provider can, the pool cannot be created."""

    class NoApt(Refusing):
        refuses: ClassVar[Mapping[str, str]] = {"apt": "there is no apt; use an image"}

    cannot, can = NoApt(folder=folder + "/1", price_per_hour=1.0), Elsewhere(folder=folder + "/2")
    _, seen = run([cannot, can], image=sky.Image(apt=["jq"]))
    assert [event.provider for event in seen.of(sky.InstanceLaunching)] == ["elsewhere"]
    with pytest.raises(sky.NotYetSupported, match="there is no apt"):
        sky.ComputePool(provider=[cannot], image=sky.Image(apt=["jq"]))


def test_providers_are_queried_at_the_same_time(folder: str) -> None:
    """All requests have begun before any provider answers."""
    barrier = threading.Barrier(3, timeout=120)

    class Waiting(Refusing):
        def offers(self, want: Requirements) -> list[Offer]:
            barrier.wait()
            return super().offers(want)

    sold = placing.ask([Waiting(folder=folder, price_per_hour=float(n)) for n in range(1, 4)], Requirements())
    assert [one.offers[0].price_per_hour for one in sold] == [1.0, 2.0, 3.0]


def test_a_candidate_that_failed_repeatedly_is_tried_later(folder: str) -> None:
    """The ledger records it for all pools with the same number of machines."""
    cheap = Refusing(folder=folder + "/cheap", price_per_hour=1.0).with_error(NoCapacity("none"))
    dear = Elsewhere(folder=folder + "/dear", price_per_hour=1.4)
    for _ in range(3):
        run([cheap, dear])
    _, seen = run([cheap, dear])
    assert [event.provider for event in seen.of(sky.InstanceLaunching)] == ["elsewhere"]
    _, seen = run([cheap, dear], nodes=1)
    assert [event.provider for event in seen.of(sky.InstanceLaunching)] == ["refusing", "elsewhere"]


# ── the money ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("options", "first"), [({"max_cost": 5.0}, 1), ({"budget": "team"}, 0)], ids=str)
def test_after_a_lost_answer_the_next_candidate_gets_the_money(
    folder: str, options: dict[str, Any], first: int
) -> None:
    """All money was reserved for the first candidate, until it has no machine any more."""
    with Ledger(default_url()) as ledger:
        ledger.set_account(Account("team", Decimal(5), Period.MONTH))
    lost = Refusing(folder=folder + "/lost", price_per_hour=20.0, launches_first=first).with_error(
        ProviderFailed("no answer")
    )
    dear = Elsewhere(folder=folder + "/dear", price_per_hour=22.0)
    run([lost, dear], **options)
    assert dear.machines.launched == ["fake-0", "fake-1"]


def test_money_that_is_too_little_for_one_candidate_may_be_enough_for_another(folder: str) -> None:
    """The cheaper candidate bills at least ten minutes. It launches nothing, so nothing is terminated."""

    class TenMinutes(Refusing):
        name: ClassVar[str] = "ten"
        billing_minimum_seconds: ClassVar[int] = 600

        def instances(self, pool_id: str | None = None) -> list[sky.Instance]:
            raise AssertionError("nothing was asked of it")

    ten, fits = TenMinutes(folder=folder + "/ten"), Elsewhere(folder=folder + "/fits", price_per_hour=37.0)
    _, seen = run([ten, fits], max_cost=5.0)
    assert (ten.machines.launched, fits.machines.launched) == ([], ["fake-0", "fake-1"])
    assert [(one.provider, one.error) for one in seen.of(sky.CandidateRefused)] == [("ten", "BudgetExceeded")]
    assert attempts() == [("ten", "BudgetExceeded"), ("elsewhere", "")]
    dear = Elsewhere(folder=folder + "/dear", price_per_hour=3700.0)
    error, _ = run([ten, dear], expected=BudgetExceeded, max_cost=5.0, max_price_ratio=200)
    assert "billed 600 s at least" in str(error)
    assert "3700" in str(error)


def test_if_the_second_part_is_too_dear_the_first_is_terminated(folder: str) -> None:
    """The on-demand part of a mixed candidate is rented. Then the account has no money for the spot part."""
    with Ledger(default_url()) as ledger:
        ledger.set_account(Account("team", Decimal(4), Period.MONTH))

    class Dear(FakeProvider):
        def offers(self, want: Requirements) -> list[Offer]:
            on_demand, spot = super().offers(want)
            return [on_demand, spot.model_copy(update={"price_per_hour": 300.0})]

    dear = Dear(folder=folder, price_per_hour=3.0, spot_is_sold=True)
    error, seen = run([dear], expected=BudgetExceeded, spot=0.5, budget="team")
    assert (dear.machines.launched, dear.machines.running) == (["fake-0"], {})
    assert [(one.spot, one.error) for one in seen.of(sky.CandidateRefused)] == [(True, "BudgetExceeded")]
    assert (error.account, error.left_usd < 4) == ("team", True)


# ── spot ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("options", "is_sold", "price", "is_warned"),
    [({}, False, 3.6, True), ({"spot": "never"}, False, 3.6, False), ({}, True, 3.6, False), ({}, False, 0.0, False)],
)
def test_missing_spot_is_logged_once(
    folder: str, caplog: pytest.LogCaptureFixture, options: dict[str, Any], is_sold: bool, price: float, is_warned: bool
) -> None:
    """If the user has left the choice to the pool, and the machines cost something."""
    with caplog.at_level(logging.INFO, "skyward"):
        run([Elsewhere(folder=folder, spot_is_sold=is_sold, price_per_hour=price)], **options)
    said = [record.getMessage() for record in caplog.records if "has no spot offer" in record.getMessage()]
    assert said == (["elsewhere/nowhere-1 fake.1 has no spot offer: it is rented on demand"] if is_warned else [])


class Fickle(Refusing):
    """A provider that lists spot machines from its third answer on, or never. With `fails` it has an outage until then."""

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


@pytest.mark.parametrize("fails", [False, True])
def test_spot_that_is_not_available_yet_is_tried_again(folder: str, fails: bool) -> None:
    """Each round requests new offers. An outage does not mean that spot is not sold."""
    fickle = Fickle(folder=folder, spot_is_sold=True, fails=fails, launches_first=2)
    _, seen = run([fickle], spot=sky.Spot.Always(retries=3, interval=0.0))
    assert len(fickle._asked) == 3
    assert [one.spot for one in seen.of(sky.InstanceProvisioned)] == [True, True]
    assert {one.error for one in seen.of(sky.CandidateRefused)} == {"ProviderFailed" if fails else "NoCapacity"}


def test_spot_that_never_becomes_available_is_no_capacity(folder: str) -> None:
    """`Spot.Always(retries, interval)` tries so many times more; the error has the reasons of the last round.

    A share of spot is tried once. Where no provider may sell it later, it is a BadRequest.
    """
    fickle = Fickle(folder=folder, spot_is_sold=True, asked_first=99)
    scarce = Refusing(folder=folder + "/scarce", spot_is_sold=True).with_error(NoCapacity("none"))
    plain = Elsewhere(folder=folder + "/plain")
    error, seen = run([fickle, scarce, plain], expected=NoCapacity, spot=sky.Spot.Always(retries=2, interval=0.0))
    assert (len(fickle._asked), len(error.refusals)) == (3, 3)
    assert [one.spot for one in seen.of(sky.CandidateRefused)].count(True) == 3
    run([fickle, plain], expected=NoCapacity, spot=0.5)
    assert len(fickle._asked) == 4
    run([plain], expected=sky.BadRequest, spot=sky.Spot.Always(retries=2, interval=9.0))
