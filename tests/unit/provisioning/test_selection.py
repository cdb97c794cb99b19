"""Renting all machines of a pool that opens: which refusals end a provider, and which only one of its offers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
from pydantic import PrivateAttr

import skyward_core as sky
from skyward_core import Instance, Offer
from skyward_core.concurrency import threads
from skyward_core.errors import BadRequest, CredentialsError, NoCapacity, QuotaExceeded, SkywardError
from skyward_core.provisioning import rental as rental_module
from tests.fakes import FakeProvider
from tests.offers import offer
from tests.providers.in_process import NoThread
from tests.unit.provisioning.test_lifecycle import Opened, opened  # noqa: F401 - a fixture

THIRTY = [offer(f"type-{number}", 1.0 + number) for number in range(30)]
BOTH = [offer("both", 2.0), offer("both", 0.5, is_spot=True), offer("other", 0.6, is_spot=True)]


class Market(FakeProvider):
    """Sells what the test says, and refuses as the test says. It keeps each creation and each listing."""

    may_have_spot: bool = False
    _sold: list[Offer] = PrivateAttr(default_factory=list[Offer])
    _refusals: list[Callable[[Offer], SkywardError | None]] = PrivateAttr(default_factory=list)
    _refuses_to_list: SkywardError | None = PrivateAttr(default=None)
    _asked: list[str] = PrivateAttr(default_factory=list[str])
    """The types that were to be created."""
    _questions: list[sky.Requirements] = PrivateAttr(default_factory=list[sky.Requirements])
    _listings: list[str | None] = PrivateAttr(default_factory=list[str | None])

    def offers(self, want: sky.Requirements) -> list[Offer]:
        self._questions.append(want)
        if self._refuses_to_list is not None:
            raise self._refuses_to_list
        return [*self._sold]

    def may_sell_spot(self, want: sky.Requirements) -> bool:
        return self.may_have_spot

    def launch(self, offer: Offer, count: int, tags: Mapping[str, str], startup: str) -> list[Instance]:
        self._asked.append(offer.instance_type + (" spot" if offer.is_spot else ""))
        for refuses in self._refusals:
            if (error := refuses(offer)) is not None:
                raise error
        return super().launch(offer, count, tags, startup)

    def instances(self, pool_id: str | None = None) -> list[Instance]:
        self._listings.append(pool_id)
        return super().instances(pool_id)


@pytest.fixture
def market(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Market]:
    """Return a function that makes a market, by its folder."""
    monkeypatch.setattr(threads.threading, "Thread", NoThread)

    def made(
        folder: str,
        *sold: Offer,
        refuses: Callable[[Offer], SkywardError | None] = lambda _: None,
        refuses_to_list: SkywardError | None = None,
        **fields: Any,
    ) -> Market:
        one = Market(folder=str(tmp_path / folder), **fields)
        one._sold, one._refusals, one._refuses_to_list = [*sold], [refuses], refuses_to_list
        return one

    return made


def without_rights(_: Offer) -> SkywardError:
    return CredentialsError("this key may not create").coded("403")


def without_spot(one: Offer) -> SkywardError | None:
    error = CredentialsError("the role for spot is missing")
    error.is_about_spot = True
    return error if one.is_spot else None


@pytest.mark.parametrize("strategy", [None, "always", "never"])
def test_refused_credentials_at_a_creation_end_the_only_provider_at_once(
    opened: Opened,
    market: Callable[..., Market],
    strategy: str | None,
) -> None:
    """Thirty offers are one creation. The next offer would be refused too, after a listing that waits for the lag."""
    sold = [one.model_copy(update={"is_spot": strategy == "always"}) for one in THIRTY]
    cloud = market("cloud", *sold, refuses=without_rights, may_have_spot=True)
    it = opened(cloud, nodes=1, **({} if strategy is None else {"spot": strategy}))
    with pytest.raises(CredentialsError, match="may not create") as caught:
        it.machines._selection.rent_all(float("inf"))
    assert [one.removesuffix(" spot") for one in cloud._asked] == ["type-0"]
    assert (caught.value.code, cloud._listings) == ("403", [])


@pytest.mark.parametrize("is_certain", [True, False])
def test_after_a_certain_refusal_no_machine_is_looked_for(
    opened: Opened, market: Callable[..., Market], monkeypatch: pytest.MonkeyPatch, is_certain: bool
) -> None:
    """The teardown does not wait until a listing would show one, and the ledger has no machine that may live."""

    def refuses(_: Offer) -> SkywardError:
        error = CredentialsError("this key may not create")
        error.left_nothing = is_certain
        return error

    it = opened(market("cloud", offer("a", 1.0), refuses=refuses), nodes=1)
    with pytest.raises(CredentialsError):
        it.machines._selection.rent_all(float("inf"))
    (intent,) = it.ledger.intents(pool_id="sky-1")
    assert (intent.gone_at is not None) == is_certain
    are_known: list[bool] = []
    monkeypatch.setattr(rental_module, "tear_down", lambda *_, are_all_known, **__: are_known.append(are_all_known))
    it.machines._rental.tear_down()
    assert are_known == [is_certain]


@pytest.mark.parametrize("error", [CredentialsError("revoked"), BadRequest("no such network")])
def test_of_several_providers_only_the_one_that_refuses_is_left_out(
    opened: Opened,
    market: Callable[..., Market],
    error: SkywardError,
) -> None:
    bad = market("bad", *THIRTY, refuses=lambda _: error)
    good = market("good", offer("dear", 3.0))
    it = opened(bad, others=[good], nodes=1)
    (machine,) = it.machines._selection.rent_all(float("inf"))
    assert (machine.instance_type, bad._asked, good._asked) == ("dear", ["type-0"], ["dear"])


def test_an_account_without_money_is_not_asked_for_dearer_machines(
    opened: Opened, market: Callable[..., Market]
) -> None:
    """Its cheapest machine is refused, and so would all others be."""
    poor = market("poor", *THIRTY, refuses=lambda _: QuotaExceeded.of_money("add credit"))
    with pytest.raises(QuotaExceeded, match="add credit"):
        opened(poor, nodes=1).machines._selection.rent_all(float("inf"))
    assert poor._asked == ["type-0"]


def test_what_is_too_dear_is_refused_when_all_others_have_refused(
    opened: Opened, market: Callable[..., Market]
) -> None:
    """It is not asked for; the error is of the kind of the others, and says what to write."""
    cloud = market(
        "cloud", offer("a", 1.0), offer("b", 2.0), offer("c", 8.0), refuses=lambda _: QuotaExceeded("no right")
    )
    it = opened(cloud, nodes=1)
    with pytest.raises(QuotaExceeded, match=r"more than 4 times the \$1.00 of .* write max_hourly_cost=8") as caught:
        it.machines._selection.rent_all(float("inf"))
    assert cloud._asked == ["a", "b"]
    assert [refused.code for refused in caught.value.refusals] == ["", "", "max_price_ratio"]


def forbidden(sold: Offer) -> SkywardError:
    error = NoCapacity(f"no {sold.instance_type} for you").coded("403")
    error.if_all = CredentialsError("the key may not create").coded("403")
    return error


class Endless(Market):
    """Its machines are billed when they are off, as DigitalOcean's."""

    ends_for_good_with: ClassVar[str] = "give node_token="
    is_cured: bool = False

    def ends_for_good(self) -> bool:
        return self.is_cured


@pytest.mark.parametrize(
    ("price", "is_cured", "is_warned"), [(2.0, False, True), (2.0, True, False), (0.0, False, False)]
)
def test_a_pool_whose_machines_do_not_end_for_good_says_so_with_the_price_and_the_cure(
    opened: Opened,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    price: float,
    is_cured: bool,
    is_warned: bool,
) -> None:
    monkeypatch.setattr(threads.threading, "Thread", NoThread)
    cloud = Endless(folder=str(tmp_path / "cloud"), is_cured=is_cured)
    cloud._sold = [offer("a", price)]
    opened(cloud, nodes=2).machines._selection.rent_all(float("inf"))
    warned = [
        record.getMessage() for record in caplog.records if "billed until somebody deletes it" in record.getMessage()
    ]
    assert len(warned) == is_warned
    assert (
        not warned or "$96.00 a day. For an end of the bill too, give node_token=, or run `skyward sweep" in warned[0]
    )


class Stopping(Market):
    """It stops spot machines that are outbid, and bills their disks, as Vast.ai does."""

    def stopped_spot(self) -> str:
        return "the disk of a stopped container is billed"


@pytest.mark.parametrize("is_spot", [True, False])
def test_a_pool_whose_spot_machines_are_stopped_and_kept_says_so(
    opened: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, is_spot: bool
) -> None:
    monkeypatch.setattr(threads.threading, "Thread", NoThread)
    cloud = Stopping(folder=str(tmp_path / "cloud"))
    cloud._sold = [offer("a", 1.0, is_spot=is_spot)]
    opened(cloud, nodes=1).machines._selection.rent_all(float("inf"))
    words = "without this computer and its reaper, the disk of a stopped container is billed"
    assert any(words in record.getMessage() for record in caplog.records) == is_spot


BOTH_TYPES = offer("a", 1.0), offer("b", 2.0)


def test_a_refusal_with_two_meanings_may_be_one_of_the_candidate(opened: Opened, market: Callable[..., Market]) -> None:
    """A pool of machines that the account may not use, or a key without rights (RunPod's 403)."""
    cloud = market("cloud", *BOTH_TYPES, refuses=lambda sold: forbidden(sold) if sold.instance_type == "a" else None)
    (machine,) = opened(cloud, nodes=1).machines._selection.rent_all(float("inf"))
    assert (machine.instance_type, cloud._asked) == ("b", ["a", "b"])


def test_if_all_are_refused_so_the_key_lacks_rights(opened: Opened, market: Callable[..., Market]) -> None:
    cloud = market("cloud", *BOTH_TYPES, refuses=forbidden)
    with pytest.raises(CredentialsError, match="the key may not create"):
        opened(cloud, nodes=1).machines._selection.rent_all(float("inf"))
    assert cloud._asked == ["a", "b"]


def test_a_provider_that_is_left_out_is_not_asked_again(
    opened: Opened,
    market: Callable[..., Market],
) -> None:
    """Neither one that refuses a creation nor one that refuses its offers; the error has the reason of both, each
    emitted once. The third has no machine free, and is tried in each round.
    """
    spot = {"is_spot": True}
    bad = market("bad", offer("a", 1.0, **spot), offer("b", 2.0, **spot), refuses=without_rights, may_have_spot=True)
    closed = market("closed", refuses_to_list=CredentialsError("who are you"), may_have_spot=True)
    full = market("full", offer("c", 3.0, **spot), refuses=lambda _: NoCapacity("none free"), may_have_spot=True)
    it = opened(bad, others=[closed, full], nodes=1, spot=sky.Spot.Always(retries=3, interval=0.0))
    with pytest.raises(NoCapacity) as caught:
        it.machines._selection.rent_all(float("inf"))
    assert (len(bad._questions), len(closed._questions), len(full._questions)) == (2, 1, 4)  # one is of `opened`
    assert (bad._asked, full._asked) == (["a spot"], ["c spot"] * 4)
    assert {one.error for one in caught.value.refusals} == {"CredentialsError", "NoCapacity"}
    assert {"this key may not create", "who are you", "none free"} == {one.message for one in caught.value.refusals}
    said = [one.message for one in it.recorded.of(sky.CandidateRefused)]
    assert [said.count(text) for text in ("this key may not create", "who are you", "none free")] == [1, 1, 4]


def test_without_any_provider_left_nothing_is_tried_again(
    opened: Opened,
    market: Callable[..., Market],
) -> None:
    """However many retries the strategy has. All have the same error, so it is of that class."""
    first, second = (
        market(name, offer(name, 1.0, is_spot=True), refuses=without_rights, may_have_spot=True) for name in "ab"
    )
    it = opened(first, others=[second], nodes=1, spot=sky.Spot.Always(retries=3, interval=9.0))
    with pytest.raises(CredentialsError):
        it.machines._selection.rent_all(float("inf"))
    assert (first._asked, second._asked) == (["a spot"], ["b spot"])


def test_an_account_that_may_not_rent_spot_rents_on_demand(
    opened: Opened,
    market: Callable[..., Market],
) -> None:
    """One spot creation shows it; no other spot offer is tried."""
    cloud = market("cloud", *BOTH, refuses=without_spot)
    it = opened(cloud, nodes=1)
    (machine,) = it.machines._selection.rent_all(float("inf"))
    assert (machine.is_spot, cloud._asked) == (False, ["both spot", "both"])


def test_an_account_that_may_not_rent_spot_is_told_so_where_spot_is_demanded(
    opened: Opened,
    market: Callable[..., Market],
) -> None:
    cloud = market("cloud", *BOTH, refuses=without_spot)
    with pytest.raises(CredentialsError, match="the role for spot is missing"):
        opened(cloud, nodes=1, spot="always").machines._selection.rent_all(float("inf"))
    assert cloud._asked == ["both spot"]


def test_a_full_quota_does_not_end_a_provider(opened: Opened, market: Callable[..., Market]) -> None:
    """Another type or region may have another quota."""
    cloud = market("cloud", *THIRTY[:3], refuses=lambda one: QuotaExceeded("0") if one.price_per_hour < 3 else None)
    (machine,) = opened(cloud, nodes=1).machines._selection.rent_all(float("inf"))
    assert (machine.instance_type, len(cloud._asked)) == ("type-2", 3)
