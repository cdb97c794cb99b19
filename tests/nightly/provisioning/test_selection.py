"""Renting from candidates: the order of the tries, the machines of a refused candidate, and replacements."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest

import skyward_core as sky
from skyward_core.errors import (
    CredentialsError,
    NoCapacity,
    ProviderFailed,
    QuotaExceeded,
    SkywardError,
)
from skyward_core.ledger.ledger import Ledger, default_url
from skyward_core.ledger.rows import Account, Period
from tests.system.provisioning.test_selection import (  # noqa: F401 - fixtures
    Elsewhere,
    Refusing,
    folder,
    run,
)


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
@pytest.mark.parametrize("first", [0, 1])
def test_after_a_refusal_the_next_provider_is_tried(folder: str, error: SkywardError, first: int) -> None:
    """It holds for each error of the cheaper provider. Machines that it has launched anyway are terminated first.

    The event has class, code and seconds.
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


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("options", [{"max_cost": 5.0}, {"budget": "team"}], ids=str)
def test_after_a_lost_answer_the_next_candidate_gets_the_money(
    folder: str, options: dict[str, Any], first: int
) -> None:
    """All money was reserved for the first candidate.

    When it has no machine any more, the second candidate gets the money.

    Money that was spent meanwhile is not available.
    """
    with Ledger(default_url()) as ledger:
        ledger.set_account(Account("team", Decimal(5), Period.MONTH))
    lost = Refusing(folder=folder + "/lost", price_per_hour=20.0, launches_first=first).with_error(
        ProviderFailed("no answer")
    )
    dear = Elsewhere(folder=folder + "/dear", price_per_hour=22.0)
    run([lost, dear], **options)
    assert dear.machines.launched == ["fake-0", "fake-1"]
