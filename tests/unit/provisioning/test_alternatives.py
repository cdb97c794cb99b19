"""Alternatives of a pool's accelerator: which is rented, why the others are not, and what the pool keeps to."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

import skyward_core as sky
from skyward_core import Offer
from skyward_core.concurrency import threads
from skyward_core.errors import BadRequest, CredentialsError, NoCapacity, SkywardError
from skyward_core.machines.signing import signed, verify
from skyward_core.provisioning.candidates import ProviderOffers
from skyward_core.provisioning.lifecycle import PoolMachines
from skyward_core.provisioning.quote import questions, rank_all
from skyward_core.session.named_use import terms_of
from tests.offers import offer
from tests.providers.in_process import NoThread
from tests.unit.provisioning.test_lifecycle import Opened, Pool, opened  # noqa: F401 - a fixture
from tests.unit.provisioning.test_selection import Market

A100, H100 = "A100-80GB", "H100"
EITHER = [H100, A100]


def gpu(kind: str, price: float, chip: str, **fields: Any) -> Offer:
    return offer(kind, price, accelerator=chip, accelerators=1, accelerator_memory_gb=80.0, **fields)


HOPPER, AMPERE = gpu("hopper", 4.0, "H100"), gpu("ampere", 2.0, "A100")
DEAR_AMPERE = gpu("other-ampere", 3.0, "A100")


class Cloud(Market):
    """A market with another name."""

    name = "cloud"


@pytest.fixture
def market(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Market]:
    """Return a function that makes a market, by its folder."""
    monkeypatch.setattr(threads.threading, "Thread", NoThread)

    def made(
        *sold: Offer,
        refuses: Callable[[Offer], SkywardError | None] = lambda _: None,
        refuses_to_list: SkywardError | None = None,
        kind: type[Market] = Market,
    ) -> Market:
        one = kind(folder=str(tmp_path / kind.name))
        one._sold, one._refusals, one._refuses_to_list = [*sold], [refuses], refuses_to_list
        return one

    return made


def sold_out(*kinds: str) -> Callable[[Offer], SkywardError | None]:
    return lambda one: NoCapacity(f"no {one.instance_type} now") if one.instance_type in kinds else None


def rented(pool: Pool) -> list[str]:
    return [instance.instance_type for instance in pool.provider.instances()]


@pytest.mark.parametrize(
    ("accelerator", "options", "tried"),
    [
        (EITHER, {}, ["hopper", "ampere", "other-ampere"]),
        ([A100, H100], {}, ["ampere", "other-ampere", "hopper"]),
        (EITHER, {"selection": "first"}, ["hopper", "ampere", "other-ampere"]),
        (EITHER, {"selection": "cheapest"}, ["ampere", "other-ampere", "hopper"]),
        # what is too dear for `max_hourly_cost` is left out, whatever the order
        (EITHER, {"max_hourly_cost": 2.5}, ["ampere"]),
        # an alternative may have one provider: both orders of the providers too
        ([sky.Alternative(H100, provider="aws"), A100], {}, ["ampere", "other-ampere"]),
        ([sky.Alternative(H100, "Local"), sky.Alternative(A100, "aws")], {}, ["hopper"]),
    ],
    ids=str,
)
def test_the_order_in_which_alternatives_are_tried(
    accelerator: list[Any], options: dict[str, Any], tried: list[str]
) -> None:
    providers = [sky.Local(), sky.AWS()]
    spec = sky.PoolSpec.of(accelerator=accelerator, **options)
    asked = questions(spec, providers)
    sold = {"local": (HOPPER, DEAR_AMPERE, AMPERE), "aws": ()}
    answers = [[ProviderOffers(one, sold[one.name]) for one in question.providers] for question in asked]
    found, _ = rank_all(asked, answers)
    assert [one.parts[0].offer.instance_type for one in found] == tried
    assert {one.parts[0].offer.accelerator: str(one.spec.accelerator) for one in found}.items() <= {
        "H100": "H100 80GB",
        "A100": "A100 80GB",
    }.items()


def test_the_next_alternative_is_rented_if_the_first_is_sold_out(
    opened: Opened,
    market: Callable[..., Market],
) -> None:
    """Its refusals are recorded. A lost node, and a new one, are of the alternative that the pool has."""
    cloud = market(HOPPER, AMPERE, DEAR_AMPERE, refuses=sold_out("hopper"))
    pool = opened(cloud, nodes=(1, 3), accelerator=EITHER)
    selection = pool.machines._selection
    selection.rent_all(float("inf"))
    assert rented(pool) == ["ampere"]
    assert [one.message for one in pool.recorded.of(sky.CandidateRefused)] == ["no hopper now"]
    assert [one.accelerator for one in pool.recorded.of(sky.InstanceProvisioned)] == ["A100 80GB"]
    assert [(one.instance_type, one.error) for one in pool.ledger.attempts(pool_id="sky-1")] == [
        ("hopper", "NoCapacity"),
        ("ampere", ""),
    ]
    cloud._refusals = [sold_out("ampere")]
    assert selection.rent_one(0, None).instance_type == "other-ampere"  # the H100 is there again, and not taken
    selection.choose_for(1)
    assert selection.rent_one(1, None).instance_type == "other-ampere"
    assert "hopper" not in rented(pool)


def test_a_refusal_lists_each_alternative_with_its_reason(
    opened: Opened,
    market: Callable[..., Market],
) -> None:
    """An alternative that is sold nowhere, one that is sold out, and a cloud with wrong credentials, which is once."""
    cloud = market(AMPERE, refuses=sold_out("ampere"))
    closed = market(refuses_to_list=CredentialsError("who are you"), kind=Cloud)
    pool = opened(cloud, others=[closed], nodes=2, accelerator=EITHER)
    with pytest.raises(NoCapacity) as caught:
        pool.machines._selection.rent_all(float("inf"))
    head, *reasons = str(caught.value).splitlines()
    assert head == "no provider rents out 2 x H100 80GB, else A100 80GB:"
    assert [reason.split(":")[0].strip() for reason in reasons] == ["fake", "cloud", "fake/r-1 ampere"]
    assert "nothing fits H100 80GB" in reasons[0]
    assert "who are you" in reasons[1]
    assert "no ampere now" in reasons[2]
    assert len(caught.value.refusals) == 3


def test_a_wrong_request_for_one_alternative_leaves_the_other(
    opened: Opened,
    market: Callable[..., Market],
) -> None:
    def refuses(one: Offer) -> SkywardError | None:
        return BadRequest("no network for this type") if one.instance_type == "hopper" else None

    pool = opened(market(HOPPER, AMPERE, refuses=refuses), nodes=1, accelerator=EITHER)
    pool.machines._selection.rent_all(float("inf"))
    assert rented(pool) == ["ampere"]


def test_credentials_that_are_refused_for_one_alternative_are_refused_for_all(
    opened: Opened,
    market: Callable[..., Market],
) -> None:
    cloud = market(HOPPER, AMPERE, refuses=lambda _: CredentialsError("revoked"))
    with pytest.raises(CredentialsError, match="revoked"):
        opened(cloud, nodes=1, accelerator=EITHER).machines._selection.rent_all(float("inf"))
    assert cloud._asked == ["hopper"]


def test_the_lease_has_the_alternative_and_its_next_keeper_rents_no_other(
    opened: Opened,
    market: Callable[..., Market],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cloud = market(HOPPER, AMPERE, refuses=sold_out("hopper"))
    pool = opened(cloud, nodes=1, accelerator=EITHER)
    pool.machines._selection.rent_all(float("inf"))
    lease = pool.machines.lease
    assert lease.accelerator == sky.Accelerator("A100", memory="80GB").to_json()
    assert sky.Lease.model_validate_json(lease.model_dump_json()) == lease

    cloud._refusals = [sold_out()]
    (machine,) = cloud.instances()
    later = PoolMachines(
        pool.machines._spec,
        [cloud],
        "sky-1",
        Future(),
        emit=pool.recorded,
        meter=pool.meter,
        journal=pool.journal,
        spending_limit=pool.limit,
    )
    monkeypatch.setattr(later._nodes, "adopt", lambda _: None)
    node = sky.Node(instance=machine, rank=0)
    later.adopt(lease.model_copy(update={"nodes": (node,)}), [machine], is_launch_unsure=False)
    assert later._rental.accelerator_of(machine.id) == sky.Accelerator("A100", memory="80GB")
    assert later._selection.rent_one(0, None).instance_type == "ampere"


def test_a_lease_without_alternatives_is_as_it_was() -> None:
    """Releases before alternatives can read and verify it."""
    lease = sky.Lease(pool_id="p", provider={"name": "aws"}, created_at=datetime(2026, 11, 27, tzinfo=UTC))
    assert "accelerator" not in lease.model_dump(mode="json")


def test_a_signature_covers_the_alternative(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKYWARD_LEASE_KEY", "k" * 64)
    lease = sky.Lease(
        pool_id="p",
        provider={"name": "aws"},
        accelerator=sky.Accelerator("A100").to_json(),
        created_at=datetime(2026, 11, 27, tzinfo=UTC),
    )
    written = signed(lease)
    verify(written, asks_provider=True)
    with pytest.raises(CredentialsError):
        verify(written.model_copy(update={"accelerator": None}), asks_provider=True)


def test_processes_with_the_same_alternatives_share_a_pool() -> None:
    """However they write them; another order is another wish."""
    spec = sky.PoolSpec.of(name="n", accelerator=EITHER)
    same = sky.PoolSpec.of(name="n", accelerator=[{"accelerator": "H100"}, sky.accelerators.A100(memory="80GB")])
    providers = [sky.Local()]
    assert terms_of(spec, providers) == terms_of(same, providers)
    assert terms_of(spec, providers) == terms_of(sky.PoolSpec.model_validate_json(spec.model_dump_json()), providers)
    assert terms_of(spec, providers) != terms_of(sky.PoolSpec.of(name="n", accelerator=[A100, H100]), providers)


def test_a_quote_has_the_ways_of_all_alternatives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads.threading, "Thread", NoThread)
    local = sky.Local(price_per_hour=1.0, simulate="A100")
    quoted = sky.ComputePool(provider=local, accelerator=EITHER).quote()
    assert [one.price_per_hour for one in quoted.candidates] == [1.0]
    (refused,) = quoted.refusals
    assert "nothing fits H100 80GB" in refused.message


@pytest.mark.parametrize(
    ("accelerator", "words"),
    [
        ([], "an empty list of accelerators"),
        (["A100", sky.accelerators.A100()], "named twice"),
        (["A100", "A1000"], "A1000"),
        ([{"accelerator": "A100", "region": "x"}], "an alternative has no 'region'; known are accelerator, provider"),
        (["A100", sky.accelerators.H100(mig="3g.40gb")], "different numbers of workers of one machine"),
        (sky.Alternative("A100"), "stands in a list"),
        ([3], "is not an accelerator"),
    ],
    ids=str,
)
def test_wrong_alternatives_are_refused(accelerator: Any, words: str) -> None:
    with pytest.raises(BadRequest, match=words):
        sky.PoolSpec.of(accelerator=accelerator)


def test_an_alternative_names_a_provider_of_the_pool() -> None:
    with pytest.raises(
        BadRequest, match=r"A100 80GB on aws is for a provider that the pool does not have \(it has local\)"
    ):
        sky.ComputePool(provider=sky.Local(), accelerator=[H100, sky.Alternative("A100", provider="aws")])
    with pytest.raises(BadRequest, match='write its name, as in provider="aws"'):
        sky.Alternative("A100", provider=sky.AWS())  # type: ignore[arg-type]
