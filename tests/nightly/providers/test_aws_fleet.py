"""AWS: spot machines from EC2 Fleet, placement groups and EFA."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import skyward_core as sky
from skyward_core.errors import CredentialsError, NoCapacity, ProviderFailed, QuotaExceeded, SkywardError
from skyward_core.machines.offers import Requirements
from skyward_core.providers.aws import launch as aws_launch
from skyward_core.providers.aws.account import AwsAccount
from skyward_core.providers.base import CREATED_TAG
from tests.providers.contract import POOL, STARTUP, tags
from tests.providers.fake_aws import FakeAWS
from tests.providers.fake_fleet import UNTRIED
from tests.system.providers.test_aws import OFFER, SPOT, T4, make
from tests.system.providers.test_aws_fleet import (  # noqa: F401 - fixtures
    OLD,
    TOGETHER,
    A,
    B,
    C,
    _at_once,
    account,
    cloud,
    launch_parameters,
    left,
    now,
    offers_of_both_markets,
    spot,
    zones_of,
)
from tests.testbed.fixtures import fleet, mirror  # noqa: F401 - fixtures


def test_zones_with_similar_prices_are_one_offer(cloud: FakeAWS) -> None:
    """The user sets the share; dearer zones are further offers."""
    spot(cloud, a=0.2, b=0.21, c=0.3)
    sold = [offer.price_per_hour for offer in make(cloud).offers(T4) if offer.is_spot]
    assert sold == [0.21, 0.3]
    assert [offer.price_per_hour for offer in make(cloud, spot_spread=1.0).offers(T4) if offer.is_spot] == [0.3]
    assert [offer.price_per_hour for offer in make(cloud, spot_spread=0).offers(T4) if offer.is_spot] == [
        0.2,
        0.21,
        0.3,
    ]
    with pytest.raises(ValueError, match="spot_spread"):
        make(cloud, spot_spread=-0.1)


def test_a_type_with_another_processor_is_not_equivalent(cloud: FakeAWS) -> None:
    """It needs another image."""
    cloud.spot = {("c7i.xlarge", A): 0.1, ("c7g.xlarge", A): 0.05, ("m7i.xlarge", A): 0.06}
    sold = {offer.instance_type: offer.or_types for offer in make(cloud).offers(Requirements(vcpus=4)) if offer.is_spot}
    assert sold == {"c7i.xlarge": ("m7i.xlarge",), "c7g.xlarge": (), "m7i.xlarge": ()}


@pytest.mark.parametrize(
    ("codes", "kind"),
    [
        (["InsufficientInstanceCapacity", "MaxSpotInstanceCountExceeded"], QuotaExceeded),
        (["InsufficientInstanceCapacity", "UnauthorizedOperation"], CredentialsError),
        (["AuthFailure.ServiceLinkedRoleCreationNotPermitted"], CredentialsError),
        (["InvalidParameterValue", "InsufficientInstanceCapacity"], NoCapacity),
        (["InternalError", "InsufficientInstanceCapacity"], NoCapacity),
        (["InvalidParameterValue", "InternalError"], ProviderFailed),
        (["InvalidAMIID.NotFound"], sky.BadRequest),
        (["SpotMaxPriceTooLow"], NoCapacity),
        ([UNTRIED[0]], NoCapacity),
        ([], NoCapacity),
    ],
)
def test_a_fleets_error_codes_determine_the_error(cloud: FakeAWS, codes: list[str], kind: type[SkywardError]) -> None:
    """They have no HTTP status; errors that hold for all pools come first."""
    spot(cloud, a=0.18, b=0.19)
    zones = [("g4dn.xlarge", A), ("g4dn.xlarge", B)]
    cloud.fleets.untried = set(zones)
    for zone, code in zip(zones, codes, strict=False):
        cloud.fleets.untried.discard(zone)
        cloud.fleets.refusals[zone] = (code, "why")
    with pytest.raises(SkywardError) as caught:
        make(cloud).launch(SPOT, 1, tags(), STARTUP)
    assert type(caught.value) is kind
    assert caught.value.code in (*codes, UNTRIED[0])


@pytest.mark.parametrize("market", [0, 1])
def test_a_single_machine_has_neither_efa_nor_a_placement_group(cloud: FakeAWS, market: int) -> None:
    """A type without EFA has neither of them, because capacity matters more."""
    for offer, count in ((TOGETHER.model_copy(update={"nodes": 1}), 1), (OFFER.model_copy(update={"nodes": 4}), 4)):
        make(cloud).launch(offers_of_both_markets(cloud, offer)[market], count, tags(launch=f"L{count}"), STARTUP)
        assert not [name for name in launch_parameters(cloud) if name.endswith(("InterfaceType", "GroupName"))]
    assert cloud.fleets.groups == {}
    assert cloud.parameters("AuthorizeSecurityGroupEgress") == []
    assert cloud.parameters("DescribePlacementGroups") == []


@pytest.mark.parametrize("market", [0, 1])
def test_an_additional_machine_joins_the_others(cloud: FakeAWS, market: int) -> None:
    """A replacement, or the spot part of a pool, is in the same zone and group, with EFA."""
    offer = offers_of_both_markets(cloud, TOGETHER)[market]
    first = make(cloud).launch(offer, 1, tags(), STARTUP)
    (zone,) = zones_of(cloud, first)
    cloud.spot = {(offer.instance_type, name): 0.5 for name in (A, B, C)}
    later = [
        instance
        for launch in ("L1", "L2")
        for instance in make(cloud).launch(offer, 1, tags(first_rank=1, launch=launch), STARTUP)
    ]
    assert zones_of(cloud, [*first, *later]) == {zone}
    (group,) = cloud.fleets.groups.values()
    assert len(group.machines) == 3
    assert launch_parameters(cloud)["NetworkInterface.1.InterfaceType"] == "efa"


@pytest.mark.parametrize("market", [0, 1])
@pytest.mark.parametrize(
    ("action", "word"), [("CreatePlacementGroup", "GroupName"), ("AuthorizeSecurityGroupEgress", "InterfaceType")]
)
def test_without_the_right_machines_start_without_efa_or_group(
    cloud: FakeAWS, market: int, action: str, word: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A warning is logged. A slower network is better than no machines."""
    offer = offers_of_both_markets(cloud, TOGETHER)[market]
    cloud.fail(action, "UnauthorizedOperation", 403, times=99)
    assert len(make(cloud).launch(offer, 2, tags(), STARTUP)) == 2
    assert not [name for name in launch_parameters(cloud) if name.endswith(word)]
    assert "UnauthorizedOperation" in caplog.text


# ── a killed client ──────────────────────────────────────────────────────────────────────────────────────────────────


class Killed(BaseException):
    """The process has died: no later code runs."""


STEPS = ["CreateLaunchTemplate", "CreateFleet", "DescribeInstances", "CreateTags"]


@pytest.mark.parametrize("step", STEPS)
def test_all_resources_of_a_killed_client_can_be_found(
    cloud: FakeAWS, account: AwsAccount, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client is killed at any step. Machines are found by their tags, with unique ranks and no price too low. The
    other resources are deleted when they are old.
    """
    spot(cloud, a=0.2, b=0.15)
    cloud.fleets.is_split = True
    ask: Callable[..., Any] = AwsAccount.ask
    pages: Callable[..., Any] = AwsAccount.pages
    is_over: list[bool] = []

    def die(operation: str, parameters: dict[str, Any]) -> None:
        if is_over:
            raise Killed
        if operation.replace("_", "") == step.lower() and not (
            step == "DescribeInstances" and not cloud.parameters("CreateFleet")
        ):
            is_over.append(True)
            if step != "DescribeInstances":
                (ask if operation != "describe_instances" else pages)(
                    account, "us-east-1", "ec2", operation, **parameters
                )
            raise Killed

    def dying_ask(self: AwsAccount, region: str, service: str, operation: str, **parameters: Any) -> Any:
        if self is not account:
            die(operation, {name: word for name, word in parameters.items() if name != "once"})
        return ask(self, region, service, operation, **parameters)

    def dying_pages(self: AwsAccount, region: str, service: str, operation: str, what: str, **parameters: Any) -> Any:
        if self is not account:
            die(operation, parameters)
        return pages(self, region, service, operation, what, **parameters)

    with monkeypatch.context() as patch:
        patch.setattr(AwsAccount, "ask", dying_ask)
        patch.setattr(AwsAccount, "pages", dying_pages)
        with pytest.raises(Killed):
            make(cloud).launch(SPOT, 3, tags() | {CREATED_TAG: str(int((now() - OLD).timestamp()))}, STARTUP)
    assert is_over
    there = make(cloud).instances(POOL)
    assert {instance.id for instance in there} == cloud.alive()
    assert sorted(instance.rank for instance in there) == ([] if step == "CreateLaunchTemplate" else [0, 1, 2])
    assert {instance.price_per_hour for instance in there} <= ({0.15, 0.2} if step == "CreateTags" else {0.2})
    make(cloud).terminate([instance.id for instance in there])
    assert cloud.alive() == set()
    aws_launch.prune_launches(account, "us-east-1", now())
    assert left(cloud) == set()
